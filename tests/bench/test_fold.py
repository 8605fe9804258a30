"""bench/fold.py: arms that compute the same, records that add up. No timing is asserted.

python -m pytest tests/bench/test_fold.py
"""

import functools
import json

import pytest
import torch
from helpers import shake

from bench import fold
from bench.fold import SWAPPED, FoldBenchConfig, inputs, make_arms
from common.errors import ConfigError, HFError
from common.stats import paired_ratio
from hf.hub import import_transformers
from model import GPT, GPTConfig
from norms import RMSNorm
from training.checkpoint import save_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    model = shake(
        GPT(GPTConfig(vocab_size=40, block_size=32, n_layer=1, n_head=2, n_embd=16, bias=True))
    ).float()
    state = {"step": 0, "config": vars(model.config), "meta": {}, "model": model.state_dict()}
    save_checkpoint(tmp_path / "layer.pt", state)
    return str(tmp_path / "layer.pt")


def test_a_record_of_our_model(checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "fold.jsonl"
    fold.main(
        [
            checkpoint,
            "--lengths=8,16",
            "--rounds=6",
            "--sequential=2",
            "--device=cpu",
            f"--out={out}",
        ]
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [record["length"] for record in records] == [8, 16] and told["folded"] == 3
    for record, ratio in zip(records, told["ratios"], strict=True):
        times = record["seconds"]
        for clock in (times, record["processor_seconds"]):
            assert {name: len(its) for name, its in clock.items()} == {
                "before": 6,
                "after": 6,
                "before again": 6,
            }
        assert (
            record["before / after"]["mean"]["mean"]
            == paired_ratio(times["before"], times["after"]).mean
        )
        assert ratio["mean"] == record["before / after"]["mean"]["mean"]
        assert record["tok_per_s"]["after"] == pytest.approx(
            2 * record["length"] / record["ms"]["after"] * 1e3
        )
        means = record["sequential"]
        assert (
            means["saved"] == 1 - means["after"] / means["before"] and record["versions"]["torch"]
        )


def test_all_lengths_are_compiled(checkpoint, monkeypatch):
    """Dynamo keeps compiled versions by code object, which arms and lengths share; beyond its limit
    it runs eagerly.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        fold.main(
            [checkpoint, "--lengths=8,12,16", "--rounds=6", "--modes=compiled", "--device=cpu"]
        )


def test_both_arms_compute_the_same(checkpoint):
    before, after = make_arms(checkpoint, FoldBenchConfig(lengths=(16,)))[0].values()
    x = inputs(before, 2, 16, torch.float32)
    assert all(isinstance(place.norm, RMSNorm) for place in after.places())
    assert (before(*x) - after(*x)).abs().max() < 2e-6 * before(*x).abs().max()


TINY = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}, 3, 3),
    "bert": (
        "BertModel",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 50,
        },
        1,
        3,
    ),
    "vit": (
        "ViTModel",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "image_size": 32,
        },
        3,
        3,
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_shapes_of_transformers(name, monkeypatch, tmp_path):
    """Arms that compute the same on gains and biases that are not initial; the one that does not is
    called so.
    """
    try:
        import_transformers()
    except HFError as error:
        pytest.skip(str(error))
    family, shape, folds, total = TINY[name]
    monkeypatch.setitem(fold.HF_SHAPES, name, (family, shape))
    arms, folded = make_arms(f"hf:{name}", FoldBenchConfig(lengths=(3000,)))
    before = arms["before"]
    x = inputs(before, 2, 16, torch.float32)
    norms = [
        sum(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
        for model in arms.values()
    ]
    assert (
        folded == folds
        and norms == [total, total - folds, 0][: len(arms)]
        and (SWAPPED in arms) == (folds < total)
    )
    assert name == "vit" or before.config.max_position_embeddings == 3000
    assert all(
        norm.weight.std() > 0.1 for norm in before.modules() if isinstance(norm, torch.nn.LayerNorm)
    )
    outputs = [model(**x)[0].detach() for model in arms.values()]
    assert all((y - outputs[0]).abs().max() < 2e-6 * outputs[0].abs().max() for y in outputs[1:2])
    assert SWAPPED not in arms or (outputs[2] - outputs[0]).abs().max() > 1e-3
    out = tmp_path / "fold.jsonl"
    fold.main([f"hf:{name}", "--lengths=8", "--rounds=6", "--device=cpu", f"--out={out}"])
    record = json.loads(out.read_text())
    length = 5 if name == "vit" else 8  # four patches and the class token
    assert record["length"] == length and (f"before / {SWAPPED}" in record) == (folds < total)
    assert record["tok_per_s"]["after"] == pytest.approx(2 * length / record["ms"]["after"] * 1e3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["hf:gpt5"], "hf:gpt2"),
        (["x", "--rounds=5"], "rounds"),
        (["x", "--modes=eager,fast"], "fast"),
        (["x", "--modes="], "modes: give one or more"),
        (["x", "--lengths=0"], "length"),
        (["x", "--lengths=8,16,8"], "lengths: one is there twice"),
        (["x", "--modes=graph", "--device=cpu"], "CUDA"),
        ([], "name a model"),
    ],
)
def test_refusals(words, named):
    with pytest.raises(ConfigError, match=named):
        fold.main(words)


def test_longer_than_the_model_reads(checkpoint):
    with pytest.raises(ConfigError, match="reads 32 tokens"):
        fold.main([checkpoint, "--lengths=64", "--device=cpu"])
