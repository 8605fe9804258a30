"""bench/fold.py: arms that compute the same, records that add up. No timing is asserted.

python -m pytest tests/bench/test_fold.py
"""

import functools
import json

import pytest
import torch
from helpers import json_lines, save_model, shake

from bench import fold
from bench.fold import BARE, SWAPPED, FoldBenchConfig, inputs, make_arms
from common.stats import paired_ratio
from model import GPT, GPTConfig

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 50}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}


def test_a_record_adds_up_and_all_lengths_are_compiled(tmp_path, capsys, monkeypatch):
    """Dynamo keeps compiled versions by code object, which arms and lengths share; beyond its limit
    it runs eagerly.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = GPTConfig(vocab_size=40, block_size=32, n_layer=1, n_head=2, n_embd=16, bias=True)
    checkpoint = save_model(tmp_path / "layer.pt", shake(GPT(config)).float())
    out = tmp_path / "new" / "fold.jsonl"
    words = ["--lengths=8,12,16", "--rounds=6", "--sequential=2", "--modes=compiled,eager"]
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        fold.main([checkpoint, *words, "--device=cpu", f"--out={out}"])
    records = json_lines(out)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [record["length"] for record in records] == [8, 8, 12, 12, 16, 16]
    assert told["folded"] == 3
    for record, ratio in zip(records, told["ratios"], strict=True):
        times = record["seconds"]
        arms = ["before", "after", BARE, "before again"]
        assert {name: len(its) for name, its in times.items()} == dict.fromkeys(arms, 6)
        assert record["norm_share"] == 1 - record["ms"][BARE] / record["ms"]["before"]
        mean = record["before / after"]["mean"]
        assert mean == ratio["mean"] == paired_ratio(times["before"], times["after"])["mean"]
        assert ("sequential" in record) == (record["mode"] == "eager")
    found = records[-1]["sequential"]
    assert found["saved"]["after"] == 1 - found["seconds"]["after"] / found["seconds"]["before"]


@pytest.mark.parametrize(
    ("name", "shape", "folds", "total"),
    [
        ("gpt2", ("GPT2LMHeadModel", GPT2), 3, 3),
        ("gptj", ("GPTJForCausalLM", GPTJ), 3, 3),
        ("bert", ("BertModel", SMALL), 1, 3),
        ("vit", ("ViTModel", SMALL | {"image_size": 32}), 3, 3),
    ],
)
def test_shapes_of_transformers(name, shape, folds, total, monkeypatch, tmp_path):
    """Arms that compute the same on gains and biases that are not initial; the one that does not is
    called so.
    """
    pytest.importorskip("transformers")
    monkeypatch.setitem(fold.HF_SHAPES, name, shape)
    arms, folded = make_arms(f"hf:{name}", FoldBenchConfig(lengths=(3000,)))
    norms = [
        [part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)]
        for model in arms.values()
    ]
    assert list(map(len, norms)) == [total, total - folds, *[0] * (len(arms) - 2)]
    assert folded == folds
    assert name == "vit" or arms["before"].config.max_position_embeddings == 3000
    assert all(norm.weight.std() > 0.1 for norm in norms[0])
    x = inputs(arms["before"], 2, 16, torch.float32)
    before, after, *swapped = (model(**x)[0].detach() for model in arms.values())
    assert (after - before).abs().max() < 2e-6 * before.abs().max()
    assert all((other - before).abs().max() > 1e-3 for other in swapped)
    out = tmp_path / "fold.jsonl"
    fold.main([f"hf:{name}", "--lengths=8", "--rounds=6", "--device=cpu", f"--out={out}"])
    record = json.loads(out.read_text())
    assert record["length"] == (5 if name == "vit" else 8)  # four patches and the class token
    assert (f"before / {SWAPPED}" in record) == (folds < total)
