"""fold/gpt.py: weightless norms of our GPT are exact.

python -m pytest tests/test_gains.py
"""

import json

import pytest
import torch
from test_convert import LLAMA, ONE_PLUS, SHAPES, certified, gpt, saved, tokens

import convert
from common.errors import FoldError
from fold.gpt import gain_folds, to_weightless
from hf.weights import load_hf
from load import load_model
from norm_types import NORM_TYPES
from norms import Norm

__all__ = ["saved"]  # a fixture

# What is left of the gains, by the last parts of their names
HEADS = {"q_norm.weight", "k_norm.weight"}
LEFT = {
    "post": {"norm.weight"},
    "deepnorm": {"norm.weight"},
    "keel": {"norm.weight"},
    "peri": {"output.weight", "norm.weight"},
    "olmo2": {"output.weight", *HEADS},
    "hybrid": {"norm.weight", *HEADS},
}
REFUSED = {"taper", "none"}  # a gate that is open; no norms


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


@pytest.mark.parametrize("norm_type", sorted(NORM_TYPES.keys() - REFUSED))
@pytest.mark.parametrize(
    "shape", ["biases", "no biases in attention", "no gains", "llama, biases", "one_plus"]
)
def test_no_gain_is_left_that_linears_alone_read(norm_type, shape):
    keys = ONE_PLUS if shape == "one_plus" else SHAPES[shape]
    if keys.get("norm_gain", "plain") not in NORM_TYPES[norm_type].gain_kinds:
        pytest.skip(f"{norm_type} has gains")
    model = gpt(norm_type=norm_type, **keys)
    if shape == "no gains":
        with pytest.raises(FoldError, match=f"norm_type={norm_type}.*none of its norms has a gain"):
            to_weightless(model)
        return
    after, certificate = certified(model, to_weightless)
    assert certificate.ok and certificate.max_rel < 1e-13
    x = tokens(2, 12, seed=3)
    assert (after(x) - model(x)).abs().max() < 1e-12 * model(x).abs().max()
    folds, left = gain_folds(model)
    assert gains_left(after) == left.keys()
    ends = {".".join(name.split(".")[-2:]) for name in left}
    expected = LEFT.get(norm_type, set()) | (HEADS if "llama" in shape else set())
    if norm_type not in ("post", "deepnorm", "keel", "hybrid"):
        expected = expected | ({"norm.bias"} if model.norm_f.core.bias is not None else set())
    assert ends == expected
    assert len(folds) + sum(name.endswith("weight") for name in left) == sum(
        isinstance(norm, Norm) and norm.weight is not None for norm in model.modules()
    )
    # Without any gain to keep there are no parameters for one.
    assert (after.config.norm_gain == "none") == (not left)
    assert not after.config.tie_embeddings
    assert torch.equal(after.wte.weight, model.wte.weight)


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_type": "hybrid", "n_kv_head": 1, **ONE_PLUS},
        {"norm_type": "hybrid", "qk_norm": "full", "head_dim": 6, "bias": True},
    ],
    ids=str,
)
def test_gains_of_values_go_into_the_projection(keys):
    model = gpt(**keys)
    after, certificate = certified(model, to_weightless)
    assert certificate.ok and certificate.max_rel < 1e-13
    assert (after.blocks[1].attn.v_norm.exact_gain == 1).all()
    assert (model.blocks[1].attn.v_norm.exact_gain - 1).abs().max() > 0.1


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_type": "coupled", "coupled_alpha": (1.0, 1.2, 1.0, 0.7, 1.0, 2.0, 1.0)},
        {"norm_type": "coupled", "coupled_calibrate": 2, **LLAMA},
        {"norm_type": "coupled", "norm_plan": "Rs ss Rs R | RR IR RR | R", "coupled_alpha": 1.3},
        {"norm_type": "rms", "norm_groups": 2, "rms_fraction": 0.5, "rms_bias": True, "bias": True},
        {"norm_type": "mixln", "mixln_share": 0.5, "bias": True, "post_base": "layer"},
        {"norm_type": "keel", "post_base": "layer", "bias": True},
        {"norm_type": "taper", "norm_plan": "LR RL LL R", "bias": True, "attn_bias": False},
        {"norm_type": "none", "norm_plan": "II RI IL R"},
    ],
    ids=str,
)
def test_other_plans(keys):
    model = gpt(**keys)
    norms = [place.norm for place in model.places()]
    alphas = [norm for norm in norms if isinstance(getattr(norm, "alpha", 1), torch.Tensor)]
    for index, norm in enumerate(alphas):
        norm.alpha.fill_(0.5 + index)
    after, certificate = certified(model, to_weightless)
    assert certificate.ok and certificate.max_rel < 1e-13
    assert gains_left(after) == gain_folds(model)[1].keys()
    again, certificate = certified(after, to_weightless) if gains_left(after) else (after, None)
    assert gains_left(again) == gains_left(after)


def test_biases_come_where_the_linears_can_have_them():
    """Derf's norms have biases where the model has none."""
    model = gpt(norm_type="derf")
    after = to_weightless(model)
    assert after.config.bias and after.config.attn_bias
    assert after.blocks[0].mlp.up.bias.any() and not after.blocks[0].mlp.down.bias.any()
    model = gpt(norm_type="layer", bias=True, attn_bias=False)
    after = to_weightless(model)
    assert after.config.attn_bias and after.blocks[2].attn.qkv.bias.any()


def test_the_final_bias_stays_whole_where_the_gain_is_0():
    model = gpt(norm_type="layer", bias=True)
    model.norm_f.norm.weight.data[2] = 0
    folds, left = gain_folds(model)
    assert (
        "norm_f.norm.weight" not in {fold.gain for fold in folds}
        and "the gain is 0" in left["norm_f.norm.weight"]
    )
    after, certificate = certified(model, to_weightless, random_weights=False)
    assert certificate.ok and torch.equal(after.norm_f.norm.bias, model.norm_f.norm.bias)
    model.norm_f.norm.bias.data[2] = 0
    assert "norm_f.norm.weight" in {fold.gain for fold in gain_folds(model)[0]}
    assert certified(model, to_weightless)[1].ok


def test_a_taper_is_folded_first():
    with pytest.raises(FoldError, match=r"norm_type=taper.*--to=folded"):
        to_weightless(gpt(steps=7, norm_type="taper"))


# ------------------------------------------------------------------------------------------ program


def test_weightless_is_written_and_exported(saved, tmp_path, capsys):
    """The run folder, and from it the stock architecture with gains of 1."""
    path, out = saved(norm_type="rms", **LLAMA), tmp_path / "out"
    convert.main([str(path), "--to=weightless", f"--out={out}"])
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert told["ok"] and told["folded"] == 7
    assert "left: blocks.N.attn.q_norm.weight (3): queries and keys are rotated" in printed
    refusals = json.loads((out / "certificate.json").read_text())["refusals"]
    assert len(refusals) == 6
    before, after, x = load_model(str(path)), load_model(str(out)), tokens(2, 12, seed=5)
    assert (after(x) - before(x)).abs().max() < 2e-6 * before(x).abs().max()
    convert.main([str(out), "--to=hf", f"--out={tmp_path / 'hf'}"])
    theirs = load_hf(tmp_path / "hf")
    assert theirs.config.norm_type == "rms" and not theirs.config.tie_embeddings
    assert gains_left(theirs) == refusals.keys()
    assert (theirs(x) - before(x)).abs().max() < 2e-6 * before(x).abs().max()
    convert.main([str(path), "--to=weightless", "--untie=False"])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["folded"] == 6
    assert "left: norm_f.norm.weight: the head is the embedding" in printed
