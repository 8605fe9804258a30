"""The norms and the norm plan: values, gradients, printed plans, refusals.

    python -m pytest tests/test_norms.py

In float64 unless a test says otherwise. References are PyTorch's own, or written out here from the
papers.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from coupled_shape import IDX, TARGETS, gpt
from helpers import close, draw, shake

from common.errors import ConfigError
from norm_plan import NORMS, NormConfig, keys_of
from norm_types import NORM_TYPES, NormType, uniform
from norms import (
    CenteredLinear,
    GatedRMSNorm,
    LayerNorm,
    Norm,
    Place,
    RMSNorm,
    SharedRMSNorm,
    center,
)

# ----------------------------------------------------------------------------- the norms themselves


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
def test_rms_and_layer_norm_are_pytorchs(eps):
    x = draw(2, 5, 16) + 0.5
    rms, layer = shake(RMSNorm(16, eps)), shake(LayerNorm(16, eps, bias=True))
    close(rms(x)[0], F.rms_norm(x, (16,), rms.weight, eps))
    close(layer(x)[0], F.layer_norm(x, (16,), layer.weight, layer.bias, eps))
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    close(layer(x)[0], (x - mean) / (variance + eps).sqrt() * layer.weight + layer.bias)


@pytest.mark.parametrize(
    ("groups", "fraction", "counted"),
    [(1, 1.0, 64), (1, 0.125, 8), (1, 0.001, 1), (4, 1.0, 16), (4, 0.5, 8)],
)
def test_a_group_has_its_own_mean_over_its_first_channels(groups, fraction, counted):
    x = draw(2, 5, 64) * torch.arange(1, 65)
    norm = shake(RMSNorm(64, eps=0.01, groups=groups, fraction=fraction))
    y, inv_rms = norm(x)
    parts = x.unflatten(-1, (groups, -1))  # (2, 5, G, 64 / G)
    squares = parts[..., :counted].square().sum(-1, keepdim=True)
    rms = (squares / counted + 0.01).sqrt()
    close(y, (parts / rms).flatten(-2) * norm.weight)
    close(inv_rms, 1 / rms.squeeze(-1))
    # What is folded has one statistic over all channels.
    assert (norm.folded_form() is None) == ((groups, fraction) != (1, 1.0))


def test_a_small_weight_keeps_its_digits():
    norm, other = RMSNorm(4, offset=1.0), RMSNorm(4, offset=1.0)
    torch.nn.init.constant_(norm.weight, 1e-9)  # 1 + weight has seven digits of it
    assert torch.equal(other.weight_for(norm), norm.weight)


def mamba2_rms_norm_gated(x, z, weight, eps, group_size, norm_before_gate):
    """The reference of Mamba-2's layernorm_gated: rms_norm_ref, in float64."""
    if not norm_before_gate:
        x = x * F.silu(z)
    grouped = x.reshape(*x.shape[:-1], -1, group_size)
    rstd = 1 / torch.sqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
    out = (grouped * rstd).reshape(x.shape) * weight
    return out * F.silu(z) if norm_before_gate else out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gated_is_mamba2s(groups, norm_before_gate, dtype):
    """In 16 bits too: the square of 1e4 is beyond float16."""
    x, z = (1e4 * draw(2, 5, 16)).to(dtype), draw(2, 5, 16, seed=1).to(dtype)
    norm = shake(GatedRMSNorm(16, 0.01, norm_before_gate, groups))
    y = norm.to(dtype)(x, z)
    wide = x.double(), z.double(), norm.weight.double(), 0.01, 16 // groups
    assert y.dtype == dtype
    tolerance = max(1e-12, 8 * torch.finfo(dtype).eps)
    close(y.double(), mamba2_rms_norm_gated(*wide, norm_before_gate), tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "norm",
    [
        RMSNorm(64),
        RMSNorm(64, bias=True),
        RMSNorm(64, fraction=0.125),
        RMSNorm(64, groups=4),
        SharedRMSNorm(64),
    ],
    ids=["rms", "bias", "partial", "group", "shared"],
)
def test_low_precision_has_wide_statistics(norm, dtype):
    x = (1e4 * draw(2, 5, 64)).to(dtype)  # the square of 1e4 is beyond float16
    own = RMSNorm(64)(x)[1] if isinstance(norm, SharedRMSNorm) else None
    y, inv_rms = norm(x, own)
    assert inv_rms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert y.dtype == dtype and y.isfinite().all()
    exact, exact_inv_rms = norm(x.double(), RMSNorm(64)(x.double())[1])
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps * 8
    # The statistic is not rounded to the input's type: 0.4 % in bfloat16.
    assert (inv_rms / exact_inv_rms - 1).abs().max() < 1e-6


# ------------------------------------------------------------------------------- plans and refusals


NOT_THE_DEFAULT = {
    "rms_fraction": 0.5,
    "norm_groups": 2,
    "coupled_first": 1,
    "coupled_span": 2,
    "coupled_alpha": 1.1,
    "coupled_calibrate": 10,
    "coupled_grad": "full",
    "coupled_impl": "fold",
    "taper_base": "layer",
    "taper_warmup": 0.2,
    "taper_end": 0.9,
    "taper_fit": "channel",
    "taper_final": True,
    "taper_anchor": 0.1,
    "rms_bias": True,
    "post_base": "layer",
    "residual_weight": 2.0,
    "mixln_share": 0.5,
    "point_alpha": 0.3,
    "gate_start": "identity",
}
FOREIGN_KEYS = [
    (norm_type, owner, name)
    for norm_type, own in NORM_TYPES.items()
    for owner, row in NORM_TYPES.items()
    for name in row.keys
    if name not in own.keys
]


@pytest.mark.parametrize(("norm_type", "owner", "name"), FOREIGN_KEYS)
def test_a_key_of_another_norm_type_is_refused(norm_type, owner, name):
    with pytest.raises(ConfigError, match=rf"{name} is .* norm_type=.*\b{owner}\b.* {norm_type}"):
        NormConfig(norm_type=norm_type, **{name: NOT_THE_DEFAULT[name]})
    NormConfig(norm_type=owner, **{name: NOT_THE_DEFAULT[name]})


def test_the_keys_of_the_norm_types_are_these():
    assert {name for row in NORM_TYPES.values() for name in row.keys} == NOT_THE_DEFAULT.keys()
    assert "norm_recipe" in keys_of("dyt") and "norm_recipe" not in keys_of("rms")


@pytest.mark.parametrize(
    "norm_type", [name for name, row in NORM_TYPES.items() if "none" in row.gain_kinds]
)
def test_norm_gain_none_has_no_norm_parameters(norm_type):
    model = gpt(norm_type=norm_type, norm_gain="none", bias=True, qk_norm="head")
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters() if "norm" in name}
    # Parameters that are no gains: alpha and shift shape the function, scale is the embeddings'.
    others = {"dyt": {"alpha", "scale"}, "derf": {"alpha", "shift", "scale"}}
    others |= {"bhyt": {"alpha"}, "gatednorm": {"weight"}}  # of the gate's matrices
    assert names == others.get(norm_type, set())
    model(IDX, TARGETS)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --------------------------------------------------------------------------------------------- CBWC


@pytest.mark.parametrize("bias", [False, True])
def test_centered_linear_has_zero_mean_output(bias):
    linear, x = shake(CenteredLinear(12, 16, bias)), draw(3, 12)
    close(linear(x).mean(-1), torch.zeros(3, dtype=torch.float64))
    close(linear(x), center(F.linear(x, linear.weight, linear.bias)))


# -------------------------------------------------------------------------------------- the places


class HalfRMSNorm(RMSNorm):
    def forward(self, h, inv_rms=None):
        return super().forward(h)[0] / 2, None


class HalfSharedRMSNorm(SharedRMSNorm):
    def forward(self, h, inv_rms):
        return super().forward(h, inv_rms)[0] / 2, None


class Seen(torch.nn.Module):
    """An anchor that remembers the sum."""

    def forward(self, h):
        self.h = h


@pytest.mark.parametrize("output", [None, RMSNorm, HalfRMSNorm, LayerNorm])
@pytest.mark.parametrize(
    "norm", [RMSNorm, HalfRMSNorm, LayerNorm, SharedRMSNorm, HalfSharedRMSNorm]
)
def test_a_place_adds_and_normalises_whatever_its_norms_are(norm, output):
    """y = N(w x + N_out(delta)), an anchor sees the sum, and a subclass is another formula."""
    x, delta, inv_rms = draw(2, 3, 8), draw(2, 3, 8, seed=1), draw(2, 3, 1, seed=2).exp()
    for weight in (1.0, 3.0):
        for anchor in (None, Seen()):
            place = Place(
                norm(8), output and output(8), residual_weight=weight, anchor=anchor
            ).double()
            y, h, _ = place(x, delta, inv_rms)
            added = delta if output is None else place.output(delta)[0]
            expected = weight * x + added
            close(h, expected)
            close(place.sum(x, delta), expected)
            close(y, place.norm(expected, inv_rms)[0])
            assert anchor is None or torch.equal(anchor.h, h)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_an_output_norm_is_rounded_with_the_sum(weight):
    x, delta = draw(2, 3, 64).bfloat16(), draw(2, 3, 64, seed=1).bfloat16()
    place = Place(LayerNorm(64), RMSNorm(64), residual_weight=weight)
    _, h, _ = place(x, delta)
    exact = weight * x.float() + place.output(delta.float())[0]
    assert torch.equal(h, exact.bfloat16())


def test_a_weight_of_the_stream_is_no_plain_sum():
    """So nothing folds as if it were one."""
    plain, weighted = (Place(RMSNorm(8), residual_weight=weight) for weight in (1.0, 3.0))
    assert plain.adds_plainly and plain.folded_form() is not None
    assert not weighted.adds_plainly and weighted.folded_form() is None


def test_every_norm_of_a_place_prepares_for_a_step():
    class Told(Norm):
        def set_step(self, step, max_iters):
            return [(step, max_iters)]

    place = Place(Told(8), output=Told(8), replaces=True, reader=Told(8))
    assert place.set_step(2, 9) == [(2, 9)] * 3


# ------------------------------------------------------------------------------------- the registry


def register_manhattan(monkeypatch):
    class Manhattan(Norm):
        """x / mean |x| * gain."""

        def forward(self, h, inv_rms=None):
            return self.affine(h / (h.abs().mean(-1, keepdim=True) + self.eps), h.dtype), None

    monkeypatch.setitem(NORMS, "M", lambda plan, at: Manhattan(**plan.common(at)))
    monkeypatch.setitem(NORM_TYPES, "manhattan", NormType(uniform("M"), "M"))


def test_a_new_norm_type_is_one_class_and_two_rows(monkeypatch):
    register_manhattan(monkeypatch)
    assert len(inspect.getsource(register_manhattan).splitlines()) <= 20
    model = gpt(norm_type="manhattan")
    assert str(model.plan) == "MM MM MM MM M"
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss, _ = model(IDX, TARGETS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
