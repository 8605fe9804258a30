"""fold/gpt.py: weightless norms of our GPT are exact.

python -m pytest tests/test_gains.py
"""

import hashlib
import json
from functools import partial

import pytest
import torch
from helpers import tokens
from test_convert import LLAMA, ONE_PLUS, certified, gpt, saved

import convert
from common.errors import FoldError
from fold.gpt import gain_folds, to_weightless
from hf.weights import load_hf
from load import load_model
from norms import Norm

__all__ = ["saved"]  # a fixture

HEADS = {"q_norm.weight", "k_norm.weight"}
HYBRID = {"norm_type": "hybrid"}
# A model, and what is left of its gains, by the last parts of their names
CASES = [
    ({"norm_type": "layer", "bias": True, "attn_bias": False}, {"norm.bias"}),
    ({"norm_type": "rms", **LLAMA, **ONE_PLUS, "bias": True}, HEADS),
    (
        {"norm_type": "rms", "norm_groups": 2, "rms_fraction": 0.5, "rms_bias": True, "bias": True},
        {"norm.bias"},
    ),
    ({"norm_type": "cbwc", "bias": True}, {"norm.bias"}),
    ({"norm_type": "lns", **ONE_PLUS, "tie_embeddings": False}, set()),
    ({"norm_type": "coupled", "coupled_alpha": (1.0, 1.2, 1.0, 0.7, 1.0)}, set()),
    ({"norm_type": "coupled", "coupled_calibrate": 2, **LLAMA}, HEADS),
    (
        {"norm_type": "coupled", "norm_plan": "Rs ss R|RR IR|R", "coupled_alpha": 1.3},
        {"norm.weight", "output.weight"},
    ),
    # its norms have biases where the model has none
    ({"norm_type": "derf"}, {"norm.bias"}),
    ({"norm_type": "bhyt", "paired_gains": 0.125}, set()),
    ({"norm_type": "peri", **ONE_PLUS}, {"norm.weight", "output.weight"}),
    ({"norm_type": "olmo2", **LLAMA, "qk_norm": "full"}, {"output.weight", *HEADS}),
    ({"norm_type": "post", "bias": True}, {"norm.weight"}),
    ({"norm_type": "keel", "post_base": "layer", "bias": True}, {"norm.weight", "norm.bias"}),
    (
        {"norm_type": "mixln", "mixln_share": 0.5, "bias": True, "post_base": "layer"},
        {"norm.weight", "norm.bias"},
    ),
    ({"norm_type": "taper", "norm_plan": "LR RL R", "bias": True}, set()),
    # the gains of values go into the projection
    ({**HYBRID, "n_kv_head": 1, **ONE_PLUS}, {"norm.weight", *HEADS}),
    ({**HYBRID, "qk_norm": "full", "head_dim": 6, "bias": True}, {"norm.weight", *HEADS}),
    ({**HYBRID, "n_kv_head": 1, "window": 4, "local_blocks": "lg"}, {"norm.weight", *HEADS}),
]


def gains_left(model):
    """Names of the parameters that are no gain of 1 and no bias of 0."""
    found = set()
    for name, norm in model.named_modules():
        if isinstance(norm, Norm) and norm.weight is not None:
            # in float64: 1 + weight of a weight of 0
            if (norm.exact_gain != 1).any():
                found.add(f"{name}.weight")
            if norm.bias is not None and norm.bias.any():
                found.add(f"{name}.bias")
    return found


def weightless(model, **options):
    """The model without the gains that fold, once it is certified, and what stays."""
    folds, left = gain_folds(model)
    after, certificate = certified(model, partial(to_weightless, folds=folds), **options)
    assert certificate.ok and certificate.max_rel < 1e-13
    assert gains_left(after) == left.keys()
    n_gains = sum(isinstance(m, Norm) and m.weight is not None for m in model.modules())
    assert len(folds) + sum(name.endswith("weight") for name in left) == n_gains
    # Without any gain to keep there are no parameters for one.
    assert (after.config.norm_gain == "none") == (not left)
    return after, left


@pytest.mark.parametrize(("keys", "expected"), CASES)
def test_no_gain_is_left_that_linears_alone_read(keys, expected):
    alike = keys["norm_type"] in ("layer", "rms", "cbwc", "derf", "bhyt", "olmo2", "hybrid")
    model = gpt(**keys, n_layer=1 if alike and "window" not in keys else 2)
    for index, (name, buffer) in enumerate(model.named_buffers()):
        if name.endswith("alpha"):
            buffer.fill_(0.5 + index)
    after, left = weightless(model)
    x = tokens(2, 12, seed=3)
    assert (after(x) - model(x)).abs().max() < 1e-12 * model(x).abs().max()
    assert {".".join(name.split(".")[-2:]) for name in left} == expected
    assert not after.config.tie_embeddings
    assert torch.equal(after.wte.weight, model.wte.weight)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"norm_type": "rms", "norm_gain": "none"}, "none of its norms has a gain but 1"),
        ({"norm_type": "taper", "steps": 7}, "--to=folded"),  # first
        ({"norm_type": "gatednorm"}, "norm1.norm.weight stays"),
        ({"norm_type": "seednorm"}, "none of its norms has a gain but 1"),
    ],
)
def test_without_such_a_gain_it_is_refused(keys, why):
    with pytest.raises(FoldError, match=why):
        gain_folds(gpt(**keys))


def test_the_final_bias_stays_whole_where_the_gain_is_0():
    model = gpt(norm_type="layer", bias=True, n_layer=1)
    model.norm_f.norm.weight.data[2] = 0
    after, left = weightless(model, random_weights=False)
    assert "norm_f.norm.weight" in left
    assert torch.equal(after.norm_f.norm.bias, model.norm_f.norm.bias)
    model.norm_f.norm.bias.data[2] = 0
    assert "norm_f.norm.weight" not in weightless(model)[1]


# ------------------------------------------------------------------------------------------ program


def test_weightless_is_written_and_exported(saved, tmp_path, capsys):
    """The run folder, and from it the stock architecture with gains of 1."""
    path, out = saved(norm_type="rms", n_layer=1, **LLAMA), tmp_path / "out"
    convert.main([str(path), "--to=weightless", f"--out={out}", "--json"])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["folded"] == 3
    assert "left: blocks.N.attn.q_norm.weight: " in printed
    convert.main([str(out), "--to=hf", f"--out={tmp_path / 'hf'}"])
    certificate = (tmp_path / "hf/certificate.json").read_bytes()
    assert certificate == (out / "certificate.json").read_bytes()
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["weightless_norms"] == hashlib.sha256(certificate).hexdigest()
    before, x = load_model(str(path)), tokens(2, 12, seed=5)
    for after in (load_model(str(out)), load_hf(tmp_path / "hf")):
        assert gains_left(after) == json.loads(certificate)["refusals"].keys()
        assert (after(x) - before(x)).abs().max() < 2e-6 * before(x).abs().max()
    convert.main([str(path), "--to=weightless", "--untie=False"])
    assert "left: norm_f.norm.weight: " in capsys.readouterr().out
