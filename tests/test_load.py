"""load.init_from: a run of one norm type starts from weights of another.

python -m pytest tests/test_load.py
"""

from dataclasses import replace

import pytest
import torch
from helpers import save_model, shake

from common.errors import CheckpointError
from load import init_from
from model import GPT, GPTConfig
from norm_types import NORM_TYPES
from training.same_norms import is_same_function

SHAPE = GPTConfig(vocab_size=40, n_vocab=32, block_size=8, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture
def saved(tmp_path):
    """saved(**keys) -> path of a checkpoint, and its model."""

    def save(**keys):
        model = shake(GPT(replace(SHAPE, **keys))).float()
        return save_model(tmp_path / "source.pt", model, {"chars": "abc"}), model

    return save


LAYER = {"norm_type": "layer"}
RMS = {"norm_type": "rms"}
CBWC = {"norm_type": "cbwc"}
COUPLED = {"norm_type": "coupled"}
ALPHA = {"coupled_alpha": 2.0}
LNS = {"norm_type": "lns"}
POST = {"norm_type": "post"}
# Keys of the source, those of the run, and whether the run begins with another function
PAIRS = [
    (LAYER, RMS, True),
    (LAYER, CBWC, False),
    (LAYER, {"norm_type": "taper", "taper_base": "layer"}, False),
    (CBWC, RMS, True),
    (CBWC, LAYER, False),
    (CBWC, {"norm_type": "taper", "taper_base": "layer"}, False),
    (RMS, LAYER, True),
    (RMS, {"norm_type": "taper"}, False),
    (RMS, COUPLED, True),
    (RMS, COUPLED | {"coupled_first": 2}, False),
    (RMS, LNS, False),
    (RMS, {"norm_type": "seednorm"}, False),
    ({"norm_type": "seednorm"}, RMS, True),
    (RMS, {"norm_type": "gatednorm"}, True),
    (RMS, {"norm_type": "gatednorm", "gate_start": "identity"}, False),
    (RMS, RMS | {"norm_groups": 2}, True),
    (RMS, RMS | {"rms_fraction": 0.5}, True),
    (RMS, RMS | {"norm_gain": "one_plus"}, False),
    (RMS, RMS | {"norm_gain": "none"}, True),
    (RMS, RMS | {"qk_norm": "head"}, True),
    (LAYER | {"bias": True}, CBWC | {"bias": True}, False),
    (LAYER | {"bias": True}, RMS | {"bias": True}, True),
    (RMS | {"bias": True, "rms_bias": True}, RMS | {"bias": True}, True),
    (LNS, RMS, False),
    (LNS, COUPLED, True),
    (COUPLED, RMS, True),
    (COUPLED, COUPLED | ALPHA, True),
    (COUPLED | ALPHA | {"coupled_calibrate": 5}, COUPLED | ALPHA, False),
    (POST, {"norm_type": "deepnorm"}, True),
    (POST, POST | {"residual_weight": 2.0}, True),
    (POST, {"norm_type": "mixln", "mixln_share": 0.5}, True),
    (RMS, {"norm_type": "mixln", "mixln_share": 0.0}, False),
    ({"norm_type": "peri"}, RMS, True),
    ({"norm_type": "olmo2"}, {"norm_type": "olmo2", "qk_norm": "none"}, True),
]


@pytest.mark.parametrize(("theirs", "ours", "changes"), PAIRS)
def test_a_function_that_changes_is_told(theirs, ours, changes, saved):
    path, source = saved(**theirs)
    model = GPT(replace(SHAPE, **ours), seed=1)
    note = init_from(model, path, {"chars": "abc"})
    x = torch.arange(16).view(2, 8)
    with torch.no_grad():
        before, after = source.eval()(x), model.eval()(x)
    assert ("function has changed" in note) == changes
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4) != changes
    is_exact = theirs["norm_type"] in ("layer", "cbwc") and ours["norm_type"] == "rms"
    assert ("convert.py" in note) == is_exact


def test_the_weight_of_the_stream_counts_at_every_place():
    """Also where the sum is normalised beside the stream, and does not replace it."""
    source, model = GPT(replace(SHAPE, **RMS)), GPT(replace(SHAPE, **RMS))
    assert is_same_function(source, model)
    model.blocks[1].norm1.residual_weight = 3.0
    assert not is_same_function(source, model)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_norm_type_starts_from_rms_and_leads_back(norm_type, saved):
    """All but the norms is taken over, and the input norms keep their gains."""
    path, source = saved(norm_type="rms")
    # The authors' dyt and derf have a learned scale of the embeddings, which rms has not.
    model = GPT(replace(SHAPE, norm_type=norm_type, norm_recipe="common"), seed=1)
    note = init_from(model, path, {"chars": "abc"})
    there = source.state_dict()
    here = model.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in there if "norm" not in name)
    gains = [place.core.exact_gain for place in source.places()]
    cores = [place.core for place in model.places()]
    kept = [
        norm.weight is not None and torch.allclose(norm.exact_gain, gain, rtol=1e-6)
        for norm, gain in zip(cores, gains, strict=True)
    ]
    # A norm that replaces the stream is no input norm, and not all have gains.
    assert kept == [
        letter not in "PB" and norm.weight is not None
        for letter, norm in zip(model.plan.letters, cores, strict=True)
    ]
    assert all(kept) == (" 0 are left out" in note or " are left out" not in note)
    back = GPT(replace(SHAPE, norm_type="rms", qk_norm="none"), seed=2)
    path, model = saved(norm_type=norm_type, norm_recipe="common")
    assert "its alphabet is not that of the data" in init_from(back, path, {"chars": "abd"})
    assert torch.equal(back.blocks[1].mlp.up.weight, model.blocks[1].mlp.up.weight)
    if norm_type == "peri":
        gains = [place.core.weight for place in model.places()]
        assert all(map(torch.equal, (place.core.weight for place in back.places()), gains))


@pytest.mark.parametrize(
    ("theirs", "ours", "remedy"),
    [
        ({"norm_type": "olmo2"}, {"norm_type": "rms"}, "add --qk_norm=full, or --qk_norm=none"),
        ({"norm_type": "olmo2"}, {"norm_type": "hybrid"}, "and this run head: add --qk_norm=full"),
        (
            {"norm_type": "hybrid"},
            {"norm_type": "rms", "qk_norm": "head"},
            "add --norm_type=hybrid",
        ),
        (
            {"norm_type": "peri", "output_eps": 1e-5},
            {"norm_type": "olmo2"},
            "add --output_eps=1e-05",
        ),
        (
            {"norm_type": "post", "post_base": "layer"},
            {"norm_type": "taper"},
            "add --taper_base=layer",
        ),
        ({"norm_type": "dyt"}, {"norm_type": "rms"}, "multiplies its embeddings by a learned"),
        ({"norm_type": "rms"}, {"norm_type": "derf"}, "this run multiplies its embeddings"),
        ({"embed_scale": 4.0}, {}, "embed_scale"),
    ],
)
def test_what_would_be_another_function_is_refused(theirs, ours, remedy, saved):
    path, _ = saved(**theirs)
    with pytest.raises(CheckpointError, match=remedy):
        init_from(GPT(replace(SHAPE, **ours)), path, {})


ONE_PLUS = {"norm_gain": "one_plus"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({**ONE_PLUS, "qk_norm": "head"}, {"qk_norm": "head"}),
        ({}, ONE_PLUS),
        ({"norm_type": "lns"}, {"norm_type": "taper"}),
        ({"norm_type": "lns", **ONE_PLUS}, {"norm_type": "coupled"}),
        ({}, {"norm_type": "lns"}),
        ({"norm_type": "peri", **ONE_PLUS, "output_eps": 1e-4}, {}),
    ],
    ids=str,
)
def test_gains_are_kept_however_they_are_stored(theirs, ours, saved):
    path, source = saved(**{"norm_type": "rms", **theirs})
    model = GPT(replace(SHAPE, **{"norm_type": "rms", **ours}))
    init_from(model, path, {})
    pairs = [(a.core, b.core) for a, b in zip(model.places(), source.places(), strict=True)]
    if "qk_norm" in ours:
        pairs += [(net.blocks[0].attn.q_norm for net in (model, source))]
    for new, old in pairs:
        torch.testing.assert_close(new.exact_gain, old.exact_gain, rtol=1e-6, atol=1e-7)
