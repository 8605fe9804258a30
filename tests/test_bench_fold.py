"""bench_fold.py: arms that compute the same, records that add up. No timing is asserted.

    python -m pytest tests/test_bench_fold.py
"""

import json

import pytest
import torch
from conftest import shake

import bench_fold
from bench_fold import BenchConfig, inputs, make_pair
from checkpoint import save_checkpoint
from errors import ConfigError
from hf import HFError, import_transformers
from model import GPT, GPTConfig
from norm_layers import RMSNorm
from stats import paired_ratio


@pytest.fixture
def checkpoint(tmp_path):
    model = shake(GPT(GPTConfig(vocab_size=40, block_size=32, n_layer=1, n_head=2, n_embd=16, bias=True))).float()
    state = {"step": 0, "config": vars(model.config), "meta": {}, "model": model.state_dict()}
    save_checkpoint(tmp_path / "layer.pt", state)
    return str(tmp_path / "layer.pt")


def test_a_record_of_our_model(checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "fold.jsonl"
    bench_fold.main([checkpoint, "--lengths=8,16", "--rounds=6", "--sequential=2", "--device=cpu", f"--out={out}"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [record["length"] for record in records] == [8, 16] and told["folded"] == 3
    for record, ratio in zip(records, told["ratios"], strict=True):
        times = record["seconds"]
        for clock in (times, record["processor_seconds"]):
            assert {name: len(its) for name, its in clock.items()} == {"before": 6, "after": 6, "before again": 6}
        assert record["before / after"]["mean"]["mean"] == paired_ratio(times["before"], times["after"]).mean
        assert ratio["mean"] == record["before / after"]["mean"]["mean"]
        assert record["tok_per_s"]["after"] == pytest.approx(2 * record["length"] / record["ms"]["after"] * 1e3)
        means = record["sequential"]
        assert means["saved"] == 1 - means["after"] / means["before"] and record["versions"]["torch"]


def test_both_arms_compute_the_same(checkpoint):
    before, after, _ = make_pair(checkpoint, BenchConfig(lengths=(16,)))
    x = inputs(before, 2, 16, torch.float32)
    assert all(isinstance(norm, RMSNorm) for norm in after.norms())
    assert (before(*x) - after(*x)).abs().max() < 2e-6 * before(*x).abs().max()


def test_shapes_of_transformers(monkeypatch):
    try:
        import_transformers()
    except HFError as error:
        pytest.skip(str(error))
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    monkeypatch.setitem(bench_fold.HF_SHAPES, "gpt2", ("GPT2LMHeadModel", tiny))
    before, after, folded = make_pair("hf:gpt2", BenchConfig(lengths=(3000,)))
    assert folded == 3 and before.config.n_positions == 3000
    x = inputs(before, 2, 16, torch.float32)
    assert not any(isinstance(module, torch.nn.LayerNorm) for module in after.modules())
    assert (before(**x).logits - after(**x).logits).abs().max() < 2e-6


@pytest.mark.parametrize(("words", "named"), [
    (["hf:gpt5"], "hf:gpt2"), (["x", "--rounds=5"], "rounds"), (["x", "--modes=eager,fast"], "fast"),
    (["x", "--lengths=0"], "length"), (["x", "--modes=graph", "--device=cpu"], "CUDA"), ([], "name a model"),
])  # fmt: skip
def test_refusals(words, named):
    with pytest.raises(ConfigError, match=named):
        bench_fold.main(words)


def test_longer_than_the_model_reads(checkpoint):
    with pytest.raises(ConfigError, match="reads 32 tokens"):
        bench_fold.main([checkpoint, "--lengths=64", "--device=cpu"])
