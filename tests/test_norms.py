"""The norms and the norm plan: values, gradients, printed plans, refusals.

    python -m pytest tests/test_norms.py

In float64 unless a test says otherwise. References are PyTorch's own, or written out here from the
papers.
"""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import close, draw, shake
from torch import nn

import norms as norm_layers
from common.errors import ConfigError
from model import GPT, GPTConfig, rope_tables, rotate
from norm_plan import NORMS, NormConfig, NormPlan, common
from norm_types import NORM_TYPES, NormType, uniform
from norms import (
    CenteredLinear,
    DynamicTanh,
    GatedRMSNorm,
    LayerNorm,
    NoNorm,
    Norm,
    Place,
    RMSNorm,
    SharedRMSNorm,
    center,
)

SHAPE = GPTConfig(vocab_size=32, block_size=8, n_layer=4, n_head=2, n_embd=16, init_std=0.2)
L = SHAPE.n_layer


def gpt(norm_type, **keys):
    return shake(GPT(replace(SHAPE, norm_type=norm_type, **keys)))


TOKENS = torch.randint(SHAPE.vocab_size, (3, 9), generator=torch.Generator().manual_seed(5))
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def loss_and_gradients(model):
    loss, aux = model(IDX, TARGETS)
    (loss + aux).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# ----------------------------------------------------------------------------- the norms themselves


@pytest.mark.parametrize(
    "norm",
    [
        RMSNorm(16, eps=0),
        RMSNorm(16, eps=0, fraction=0.25),
        RMSNorm(16, eps=0, groups=4),
        LayerNorm(16, eps=0),
    ],
    ids=["rms", "partial", "group", "layer"],
)
def test_scale_invariance_and_no_radial_gradient(norm):
    x = draw(2, 5, 16).requires_grad_()
    shake(norm)
    y = norm(x)[0]
    close(norm(7.5 * x)[0], y)
    (y * draw(2, 5, 16, seed=1)).sum().backward()
    close((x.grad * x).sum(-1), torch.zeros(2, 5, dtype=torch.float64))
    assert x.grad.abs().max() > 0.1


def test_every_group_has_no_radial_gradient_of_its_own():
    x, norm = draw(2, 5, 16).requires_grad_(), shake(RMSNorm(16, eps=0, groups=4))
    (norm(x)[0] * draw(2, 5, 16, seed=1)).sum().backward()
    close((x.grad * x).unflatten(-1, (4, 4)).sum(-1), torch.zeros(2, 5, 4, dtype=torch.float64))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
def test_rms_and_layer_norm_are_pytorchs(eps):
    x = draw(2, 5, 16) + 0.5
    rms, layer = shake(RMSNorm(16, eps)), shake(LayerNorm(16, eps, bias=True))
    close(rms(x)[0], F.rms_norm(x, (16,), rms.weight, eps))
    close(layer(x)[0], F.layer_norm(x, (16,), layer.weight, layer.bias, eps))
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    close(layer(x)[0], (x - mean) / (variance + eps).sqrt() * layer.weight + layer.bias)


def test_rms_norm_of_a_centred_input_is_layer_norm():
    x = draw(2, 5, 16) + 3
    rms, layer = shake(RMSNorm(16, bias=True)), shake(LayerNorm(16, bias=True))
    close(rms(center(x))[0], layer(x)[0])
    assert (rms(x)[0] - layer(x)[0]).abs().max() > 0.1


def test_eps_is_inside_the_root():
    x = torch.full((1, 1, 4), 0.1, dtype=torch.float64)
    close(RMSNorm(4, eps=0.03).double()(x)[0], torch.full_like(x, 0.1 / 0.04**0.5))
    x = torch.tensor([[[0.1, -0.1]]], dtype=torch.float64)
    close(LayerNorm(2, eps=0.03).double()(x)[0], x / 0.04**0.5)


def test_gradient_of_rms_norm_in_closed_form():
    """dx = s u - s^3 / n * x * <u, x>, u = g gamma, s = 1 / rms; d gamma = sum g x s."""
    x, g, norm = (
        draw(2, 5, 16).requires_grad_(),
        draw(2, 5, 16, seed=1),
        shake(RMSNorm(16, eps=0.1)),
    )
    norm(x)[0].backward(g)
    gamma, h = norm.weight.detach(), x.detach()
    s = (h.square().mean(-1, keepdim=True) + 0.1) ** -0.5
    u = g * gamma
    close(x.grad, s * u - s**3 / 16 * h * (u * h).sum(-1, keepdim=True))
    close(norm.weight.grad, (g * h * s).sum((0, 1)))


@pytest.mark.parametrize(("fraction", "counted"), [(1.0, 64), (0.125, 8), (0.5, 32), (0.001, 1)])
def test_partial_counts_only_the_first_channels(fraction, counted):
    x, norm = draw(2, 5, 64), shake(RMSNorm(64, eps=0.01, fraction=fraction))
    y, inv_rms = norm(x)
    rms = (x[..., :counted].square().sum(-1, keepdim=True) / counted + 0.01).sqrt()
    close(y, x / rms * norm.weight)
    close(inv_rms, 1 / rms)
    if counted == 64:
        close(y, F.rms_norm(x, (64,), norm.weight, 0.01))
        return
    other = x.clone()
    other[..., counted:] *= 100
    assert torch.equal(norm(other)[1], inv_rms)
    other[..., counted - 1] *= 2
    assert not torch.equal(norm(other)[1], inv_rms)


@pytest.mark.parametrize(("groups", "fraction"), [(1, 1.0), (4, 1.0), (4, 0.5)])
def test_groups_are_separate_norms(groups, fraction):
    x, norm = (
        draw(2, 5, 16) * torch.arange(1, 17),
        shake(RMSNorm(16, groups=groups, fraction=fraction)),
    )
    y, inv_rms = norm(x)
    chunks = zip(x.chunk(groups, -1), norm.weight.chunk(groups), strict=True)
    apart = []
    for part, gain in chunks:
        single = RMSNorm(16 // groups, fraction=fraction).double()
        with torch.no_grad():
            single.weight.copy_(gain)
        apart.append(
            single(part)[0] if fraction < 1 else F.rms_norm(part, (16 // groups,), gain, 1e-5)
        )
    close(y, torch.cat(apart, -1))
    assert inv_rms.shape == (2, 5, groups)


def mamba2_rms_norm_gated(x, z, weight, eps, group_size, norm_before_gate):
    """The reference of Mamba-2's layernorm_gated: rms_norm_ref, in float64."""
    if not norm_before_gate:
        x = x * F.silu(z)
    grouped = x.reshape(*x.shape[:-1], -1, group_size)
    rstd = 1 / torch.sqrt(grouped.square().mean(dim=-1, keepdim=True) + eps)
    out = (grouped * rstd).reshape(x.shape) * weight
    return out * F.silu(z) if norm_before_gate else out


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_gated_is_mamba2s(groups, norm_before_gate):
    x, z = draw(2, 5, 16), 2 * draw(2, 5, 16, seed=1)
    norm = shake(GatedRMSNorm(16, 0.01, norm_before_gate, groups))
    y = norm(x, z)
    close(y, mamba2_rms_norm_gated(x, z, norm.weight, 0.01, 16 // groups, norm_before_gate))
    silu = z / (1 + torch.exp(-z))
    if groups == 1 and norm_before_gate:
        close(y, x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * norm.weight * silu)
    elif groups == 1:
        close(
            y, x * silu / ((x * silu).square().mean(-1, keepdim=True) + 0.01).sqrt() * norm.weight
        )
    other = shake(GatedRMSNorm(16, 0.01, not norm_before_gate, groups))
    assert (y - other(x, z)).abs().max() > 0.1


def test_gated_gate_after_the_norm_scales_and_gate_before_it_does_not():
    x, z = draw(2, 5, 16), torch.full((2, 5, 16), 3.0, dtype=torch.float64)
    plain = RMSNorm(16, eps=0).double()(x)[0]
    close(GatedRMSNorm(16, 0).double()(x, z), plain)
    close(
        GatedRMSNorm(16, 0, norm_before_gate=True).double()(x, z),
        plain * F.silu(torch.tensor(3.0).double()),
    )


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
    exact = norm(x.double(), RMSNorm(64)(x.double())[1])[0]
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_layer_norm_and_gated(dtype):
    x, z = (1e4 * draw(2, 5, 64)).to(dtype), draw(2, 5, 64, seed=1).to(dtype)
    limit = torch.finfo(dtype).eps * 8
    assert (LayerNorm(64)(x)[0].double() - F.layer_norm(x.double(), (64,))).abs().max() <= limit
    for before in (False, True):
        norm = GatedRMSNorm(64, norm_before_gate=before)
        expected = mamba2_rms_norm_gated(x.double(), z.double(), 1, 1e-5, 64, before)
        assert norm(x, z).dtype == dtype and (norm(x, z).double() - expected).abs().max() <= limit


def test_the_statistic_is_not_rounded_to_the_inputs_type():
    """A mean square in float16 would be infinite; one rounded to bfloat16 would be off by up to 0.4
    %.
    """
    x = draw(4, 64, 64).bfloat16()
    exact = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(RMSNorm(64)(x)[1].double(), exact, 1e-6)


def all_norms():
    return {
        "layer": LayerNorm(16),
        "rms": RMSNorm(16),
        "group": RMSNorm(16, groups=2),
        "shared": SharedRMSNorm(16),
        "none": NoNorm(16, affine=False),
        "dyt": DynamicTanh(16),
    }


@pytest.mark.parametrize("name", all_norms())
def test_the_common_face(name):
    """delta is added first; x comes back with it; who computes ignores what comes in; who shares
    hands it on.
    """
    norm = Place(shake(all_norms()[name]))
    x, delta = draw(2, 5, 16), draw(2, 5, 16, seed=1)
    incoming = draw(2, 5, 1, seed=2).abs() + 0.5
    y, stream, handed_on = norm(x, delta, incoming)
    assert torch.equal(stream, x + delta)
    assert torch.equal(norm(x + delta, None, incoming)[0], y)
    if name == "shared":
        assert handed_on is incoming
        assert not torch.equal(norm(x, delta, 2 * incoming)[0], y)
    else:
        assert torch.equal(norm(x, delta, 2 * incoming)[0], y)
        assert (handed_on is None) == (name in ("layer", "dyt", "none"))
    assert norm.aux_loss() == 0.0 and norm.set_step(1, 10) == []


@pytest.mark.parametrize("bias", [False, True])
def test_rms_bias(bias):
    """LayerNorm's bias, only where it is asked for and the model has biases."""
    plain, biased = (gpt("rms", bias=bias, rms_bias=rms_bias) for rms_bias in (False, True))
    names = {f"blocks.{i}.norm{k}.norm.bias" for i in range(L) for k in (1, 2)}
    names |= {"norm_f.norm.bias"}
    assert biased.state_dict().keys() - plain.state_dict().keys() == (names if bias else set())
    norm, x = biased.norm_f.norm, draw(2, 5, 16)
    close(
        norm(x)[0],
        x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        + (norm.bias if bias else 0),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_dynamic_tanh(bias):
    norm, x = DynamicTanh(16, bias=bias).double(), 2 * draw(2, 5, 16)
    close(norm(x)[0], torch.tanh(0.5 * x))  # Zhu et al.: alpha starts at 0.5, gain at 1, bias at 0
    parameters = {name: parameter.detach() for name, parameter in shake(norm).named_parameters()}
    assert parameters.keys() == {"weight", "alpha"} | ({"bias"} if bias else set())
    assert parameters["alpha"].shape == (1,) and parameters["alpha"] != 0.5
    e = torch.exp(2 * parameters["alpha"] * x)
    close(norm(x)[0], (e - 1) / (e + 1) * parameters["weight"] + parameters.get("bias", 0.0))


def test_qk_norm_commutes_with_rotation_where_the_gain_is_equal_within_each_pair():
    """Rotary positions turn channel i with channel i + head_dim / 2; RMS is invariant, a gain only
    if both share it.
    """
    config = replace(SHAPE, position="rope", head_dim=8, block_size=16)
    cos, sin = (table.double() for table in rope_tables(config))
    q, half = draw(2, 3, 16, 8), draw(4, seed=1)
    norm = RMSNorm(8).double()
    for gain, commutes in (
        (torch.cat([half, half]), True),
        (torch.ones(8), True),
        (half.repeat_interleave(2), False),
        (draw(8, seed=2), False),
    ):
        with torch.no_grad():
            norm.weight.copy_(gain)
        apart = (rotate(norm(q)[0], cos, sin) - norm(rotate(q, cos, sin))[0]).abs().max()
        assert apart <= 1e-6 if commutes else apart > 0.1  # the tables were made in float32


# -------------------------------------------------------------------------------------- CoupledNorm


def coupled_reference(model, idx, source):
    """Logits by equations 3-7.

    Position p divides by the RMS of the stream at position source[p], times alpha[p].
    """
    config, rms = model.config, {}
    alpha = (
        config.coupled_alpha
        if isinstance(config.coupled_alpha, tuple)
        else [config.coupled_alpha] * (2 * L + 1)
    )
    norms = [place.norm for place in model.places()]

    def normalize(h, p):
        # equation 3
        rms[p] = ((h * h).sum(-1, keepdim=True) / h.shape[-1] + config.norm_eps).sqrt()
        # sigma'_mlp = alpha sigma_rms, section 5.3
        sigma = rms[source[p]] * (alpha[p] if source[p] != p else 1)
        return h / sigma * norms[p].weight  # equations 4 and 6

    x = model.wte.weight[idx] + model.wpe.weight[: idx.shape[1]]
    for index, block in enumerate(model.blocks):
        h = x + block.attn(normalize(x, 2 * index), None, None)  # equation 5
        x = h + block.mlp(normalize(h, 2 * index + 1))  # equation 7
    return normalize(x, 2 * L) @ model.wte.weight.T


COUPLED_PLANS = [  # keys, printed plan, the position whose statistic each position uses
    ({}, "Rs Rs Rs Rs R", [0, 0, 2, 2, 4, 4, 6, 6, 8]),
    ({"coupled_first": 1}, "RR Rs Rs Rs R", [0, 1, 2, 2, 4, 4, 6, 6, 8]),
    ({"coupled_first": 2}, "RR RR Rs Rs R", [0, 1, 2, 3, 4, 4, 6, 6, 8]),
    ({"coupled_first": 3}, "RR RR RR Rs R", [0, 1, 2, 3, 4, 5, 6, 6, 8]),
    ({"coupled_first": 4}, "RR RR RR RR R", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ({"coupled_span": 2}, "Rs ss Rs ss R", [0, 0, 0, 0, 4, 4, 4, 4, 8]),
    ({"coupled_span": 3}, "Rs ss ss Rs R", [0, 0, 0, 0, 0, 0, 6, 6, 8]),
    ({"coupled_span": 2, "coupled_first": 1}, "RR Rs ss Rs R", [0, 1, 2, 2, 2, 2, 6, 6, 8]),
    ({"coupled_span": 0}, "Rs ss ss ss R", [0, 0, 0, 0, 0, 0, 0, 0, 8]),
    ({"coupled_span": 0, "coupled_first": 1}, "RR Rs ss ss R", [0, 1, 2, 2, 2, 2, 2, 2, 8]),
    ({"norm_plan": "RR Rs RR Rs R"}, "RR Rs RR Rs R", [0, 1, 2, 2, 4, 5, 6, 6, 8]),
    ({"norm_plan": "RsssRsssR", "coupled_first": 3}, "Rs ss Rs ss R", [0, 0, 0, 0, 4, 4, 4, 4, 8]),
]


@pytest.mark.parametrize(
    ("keys", "printed", "source"), COUPLED_PLANS, ids=lambda value: str(value).replace(" ", "")
)
def test_coupled_plan_and_equations(keys, printed, source):
    model = gpt("coupled", **keys)
    assert str(model.plan) == printed
    close(model(IDX), coupled_reference(model, IDX, source))


ALPHAS = (1.0, 1.3, 1.0, 0.8, 1.5, 1.1, 1.0, 0.7, 1.0)


@pytest.mark.parametrize("alpha", [1.09, ALPHAS], ids=["scalar", "tuple"])
@pytest.mark.parametrize(
    ("span", "source"), [(1, [0, 0, 2, 2, 4, 4, 6, 6, 8]), (2, [0, 0, 0, 0, 4, 4, 4, 4, 8])]
)
def test_coupled_alpha(alpha, span, source):
    model = gpt("coupled", coupled_alpha=alpha, coupled_span=span)
    logits = model(IDX)
    close(logits, coupled_reference(model, IDX, source))
    assert (logits - gpt("coupled", coupled_span=span)(IDX)).abs().max() > 1e-3


def test_coupled_with_all_blocks_standard_is_rms_bit_for_bit():
    loss, gradients = loss_and_gradients(gpt("coupled", coupled_first=L))
    expected, expected_gradients = loss_and_gradients(gpt("rms"))
    assert torch.equal(loss, expected) and gradients.keys() == expected_gradients.keys()
    assert all(
        torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items()
    )
    for first in range(L):
        assert not torch.equal(loss_and_gradients(gpt("coupled", coupled_first=first))[0], expected)


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_of_the_shared_position(detach):
    """y = h s / alpha gamma, h = x + delta. With u = g gamma: dh = u s / alpha + g_h, d gamma = sum
    g h s / alpha, and ds = <u, h> / alpha in full, nothing when detached.
    """
    x, delta, s = (
        draw(2, 5, 16).requires_grad_(),
        draw(2, 5, 16, seed=1).requires_grad_(),
        draw(2, 5, 1, seed=2).abs(),
    )
    g, g_h = draw(2, 5, 16, seed=3), draw(2, 5, 16, seed=4)
    norm = shake(SharedRMSNorm(16, alpha=1.1, detach=detach))
    s.requires_grad_()
    y, h, _ = Place(norm)(x, delta, s)
    ((y * g).sum() + (h * g_h).sum()).backward()
    with torch.no_grad():
        u = g * norm.weight
        close(x.grad, u * s / 1.1 + g_h)
        close(delta.grad, u * s / 1.1 + g_h)
        close(norm.weight.grad, (g * h * s / 1.1).sum((0, 1)))
        if detach:
            assert s.grad is None
        else:
            close(s.grad, (u * h).sum(-1, keepdim=True) / 1.1)


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_of_a_block_through_both_positions(detach):
    """x -> R -> W -> s with loss <g, y2> + <g_h, h>, by hand:

    dh = g gamma2 s / alpha + g_h;  u = (dh W) gamma1;  dx = dh + s u - s^3 / n * x * <u, x>
    and, through the shared statistic, in full only: - s^3 / n * x * <g gamma2, h> / alpha.
    """
    x, weight, alpha, eps = draw(2, 5, 16).requires_grad_(), 0.3 * draw(16, 16, seed=1), 1.1, 0.1
    g, g_h = draw(2, 5, 16, seed=3), draw(2, 5, 16, seed=4)
    first, second = (
        RMSNorm(16, eps).double(),
        SharedRMSNorm(16, eps, alpha=alpha, detach=detach).double(),
    )
    with torch.no_grad():
        first.weight += 0.3 * draw(16, seed=5)
        second.weight += 0.3 * draw(16, seed=6)
    y1, stream, inv_rms = Place(first)(x)
    y2, h, _ = Place(second)(stream, y1 @ weight.T, inv_rms)
    ((y2 * g).sum() + (h * g_h).sum()).backward()
    with torch.no_grad():
        gamma1, gamma2 = first.weight, second.weight
        s = (x.square().mean(-1, keepdim=True) + eps) ** -0.5
        h = x + (x * s * gamma1) @ weight.T
        dh = g * gamma2 * s / alpha + g_h
        dy1 = dh @ weight
        u = dy1 * gamma1
        expected = dh + s * u - s**3 / 16 * x * (u * x).sum(-1, keepdim=True)
        shared = -(s**3) / 16 * x * (g * gamma2 * h).sum(-1, keepdim=True) / alpha
        close(x.grad, expected if detach else expected + shared)
        assert shared.abs().max() > 0.1  # so the two are told apart
        close(gamma1.grad, (dy1 * x * s).sum((0, 1)))
        close(gamma2.grad, (g * h * s / alpha).sum((0, 1)))


def test_full_is_autograd_of_the_plain_formula_and_detach_is_not():
    source, gradients = [0, 0, 2, 2, 4, 4, 6, 6, 8], {}
    plain = gpt("coupled", coupled_alpha=1.1)
    logits = coupled_reference(plain, IDX, source)
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
    for mode in ("full", "detach"):
        gradients[mode] = loss_and_gradients(gpt("coupled", coupled_alpha=1.1, coupled_grad=mode))[
            1
        ]
    for name, parameter in plain.named_parameters():
        close(gradients["full"][name], parameter.grad)
    assert (gradients["detach"]["wte.weight"] - plain.wte.weight.grad).abs().max() > 1e-3


# ------------------------------------------------------------------------------- plans and refusals


@pytest.mark.parametrize(
    ("norm_type", "keys"),
    [
        ("layer", {}),
        ("rms", {"norm_groups": 2}),
        ("cbwc", {"bias": True}),
        ("dyt", {}),
        ("taper", {}),
        ("taper", {"taper_base": "layer", "taper_final": True}),
        *(("coupled", keys) for keys, _, _ in COUPLED_PLANS),
    ],
    ids=str,
)
def test_a_printed_plan_parses_back_to_the_same_model(norm_type, keys):
    model = gpt(norm_type, **keys)
    keys = {
        name: value
        for name, value in keys.items()
        if not name.startswith(("coupled", "taper_final"))
    }
    again = gpt(norm_type, **keys | {"norm_plan": str(model.plan)})
    assert str(again.plan) == str(model.plan)
    assert list(again.state_dict()) == list(model.state_dict())
    assert torch.equal(again(IDX), model(IDX))


@pytest.mark.parametrize(
    ("norm_type", "keys", "printed"),
    [
        ("layer", {}, "LL LL LL LL L"),
        ("rms", {}, "RR RR RR RR R"),
        ("cbwc", {}, "RR RR RR RR R"),
        ("dyt", {}, "DD DD DD DD D"),
        ("none", {}, "II II II II I"),
        ("taper", {}, "TT TT TT TT R"),
        ("taper", {"taper_base": "layer"}, "TT TT TT TT L"),
        ("taper", {"taper_final": True}, "TT TT TT TT T"),
    ],
)
def test_printed_plans_of_the_other_types(norm_type, keys, printed):
    assert str(NormPlan(NormConfig(norm_type=norm_type, **keys), L, 16, bias=False)) == printed


def test_layer_is_the_default():
    assert GPTConfig().norm_type == NormConfig().norm_type == "layer"


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


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("cupled", "did you mean coupled?"),
        ("rmsnorm", "did you mean rms?"),
        ("layernorm", "did you mean layer?"),
        ("tapper", "did you mean taper?"),
        ("zzz", ", ".join(NORM_TYPES)),
    ],
)
def test_unknown_norm_type_names_the_nearest(typed, hint):
    with pytest.raises(ConfigError) as error:
        NormConfig(norm_type=typed)
    assert repr(typed) in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize(
    ("norm_type", "keys", "words"),
    [
        ("coupled", {"norm_plan": "RL Rs Rs Rs R"}, ["'L'", "coupled", "R, s"]),
        ("layer", {"norm_plan": "RR RR RR RR R"}, ["'R'", "layer"]),
        ("rms", {"norm_plan": "Rs Rs Rs Rs R"}, ["'s'", "rms"]),
        ("coupled", {"norm_plan": "Rs Rs R"}, ["5 letters", "4 blocks", "9"]),
        ("coupled", {"norm_plan": "RsRsRsRsRR"}, ["10 letters", "9"]),
        ("coupled", {"norm_plan": "sR Rs Rs Rs R"}, ["position 0"]),
        ("coupled", {"norm_plan": "ss Rs Rs Rs R"}, ["position 0"]),
        ("coupled", {"coupled_first": 5}, ["coupled_first=5", "4 blocks"]),
        ("coupled", {"coupled_alpha": (1.0, 1.1)}, ["coupled_alpha", "9"]),
        ("coupled", {"coupled_alpha": (1.1,)}, ["coupled_alpha", "9"]),
        ("coupled", {"coupled_alpha": ()}, ["coupled_alpha"]),
        ("coupled", {"coupled_alpha": 0.0}, ["coupled_alpha", "at least"]),
        ("coupled", {"coupled_alpha": (*ALPHAS[:-1], -1.0)}, ["coupled_alpha", "at least"]),
        ("coupled", {"coupled_first": -1}, ["coupled_first"]),
        ("coupled", {"coupled_span": -1}, ["coupled_span"]),
        ("rms", {"norm_groups": 3}, ["norm_groups=3", "n_embd=16"]),
        ("rms", {"norm_groups": 0}, ["norm_groups"]),
        ("rms", {"rms_fraction": 0.0}, ["rms_fraction"]),
        ("rms", {"rms_fraction": 1.5}, ["rms_fraction"]),
        ("layer", {"norm_eps": -1e-5}, ["norm_eps"]),
        ("layer", {"norm_eps": float("nan")}, ["norm_eps"]),
        ("taper", {"taper_warmup": 0.8}, ["taper_warmup=0.8", "taper_end=0.75"]),
        ("taper", {"taper_warmup": 200.0, "taper_end": 100.0}, ["taper_warmup", "taper_end"]),
        ("taper", {"taper_warmup": -0.1}, ["taper_warmup"]),
        ("taper", {"taper_end": 1.0}, ["taper_end=1"]),
        ("taper", {"taper_anchor": -0.1}, ["taper_anchor"]),
    ],
)
def test_refused(norm_type, keys, words):
    with pytest.raises(ConfigError) as error:
        GPT(replace(SHAPE, norm_type=norm_type, **keys))
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    "norm_type", [name for name, row in NORM_TYPES.items() if "none" in row.gain_kinds]
)
def test_norm_gain_none_has_no_norm_parameters(norm_type):
    model = gpt(norm_type, norm_gain="none", bias=True, qk_norm="head")
    names = [name.rpartition(".")[2] for name, _ in model.named_parameters() if "norm" in name]
    # Parameters that are no gains: alpha and shift shape the function, scale is the embeddings'.
    others = {"dyt": {"alpha", "scale"}, "derf": {"alpha", "shift", "scale"}}
    assert set(names) == others.get(norm_type, set())
    with_gains = gpt(norm_type, bias=True, qk_norm="head")
    assert sum("norm" in name for name, _ in with_gains.named_parameters()) > len(names)
    loss, gradients = loss_and_gradients(model)
    assert loss.isfinite() and all(gradient is not None for gradient in gradients.values())


# --------------------------------------------------------------------------------------------- CBWC


@pytest.mark.parametrize("bias", [False, True])
def test_centered_linear_has_zero_mean_output(bias):
    linear, x = shake(CenteredLinear(12, 16, bias)), draw(3, 12)
    close(linear(x).mean(-1), torch.zeros(3, dtype=torch.float64))
    close(linear(x), center(F.linear(x, linear.weight, linear.bias)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_cbwc_is_layer_in_logits_and_gradients(bias, tied):
    layer, cbwc = (gpt(name, bias=bias, tie_embeddings=tied) for name in ("layer", "cbwc"))
    weights = layer.state_dict()
    assert weights.keys() == cbwc.state_dict().keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in cbwc.state_dict().items())
    close(cbwc(IDX), layer(IDX))
    (loss, gradients), (expected, expected_gradients) = (
        loss_and_gradients(cbwc),
        loss_and_gradients(layer),
    )
    close(loss, expected)
    for name, gradient in expected_gradients.items():
        close(gradients[name], gradient)
        assert gradient.abs().max() > 1e-4, name


def bias_not_centred(monkeypatch):
    def forward(self, x):
        return F.linear(x, self.weight - self.weight.mean(0), self.bias)

    monkeypatch.setattr(norm_layers.CenteredLinear, "forward", forward)


def embedding_not_centred(monkeypatch):
    monkeypatch.setitem(NORM_TYPES, "cbwc", replace(NORM_TYPES["cbwc"], embed=None))


def linears_not_centred(monkeypatch):
    monkeypatch.setitem(NORM_TYPES, "cbwc", replace(NORM_TYPES["cbwc"], residual_linear=nn.Linear))


@pytest.mark.parametrize("mutate", [bias_not_centred, embedding_not_centred, linears_not_centred])
def test_cbwc_needs_every_centring(mutate, monkeypatch):
    layer = gpt("layer", bias=True)
    mutate(monkeypatch)
    assert (gpt("cbwc", bias=True)(IDX) - layer(IDX)).abs().max() > 1e-3


def test_cbwc_leaves_the_head_alone():
    untied, tied = gpt("cbwc", tie_embeddings=False), gpt("cbwc")
    assert type(untied.lm_head) is nn.Linear and tied.lm_head is None
    assert all(
        type(block.attn.proj) is type(block.mlp.down) is CenteredLinear for block in tied.blocks
    )
    assert all(type(block.attn.qkv) is type(block.mlp.up) is nn.Linear for block in tied.blocks)
    idx = IDX
    logits = tied(idx)
    close(logits, tied.hidden(idx) @ tied.wte.weight.T)
    with torch.no_grad():
        tied.wte.weight.copy_(center(tied.wte.weight))  # the stream is the same, the head is not
    assert (tied(idx) - logits).abs().max() > 0.1


# ------------------------------------------------------------------------------------- the registry


def register_manhattan(monkeypatch):
    class Manhattan(Norm):
        """x / mean |x| * gain."""

        def forward(self, h, inv_rms=None):
            return self.affine(h / (h.abs().mean(-1, keepdim=True) + self.eps), h.dtype), None

    monkeypatch.setitem(NORMS, "M", lambda config, at: Manhattan(**common(config, at)))
    monkeypatch.setitem(NORM_TYPES, "manhattan", NormType(uniform("M"), "M"))


def test_a_new_norm_type_is_one_class_and_two_rows(monkeypatch):
    register_manhattan(monkeypatch)
    assert len(inspect.getsource(register_manhattan).splitlines()) <= 20
    model = gpt("manhattan")
    assert str(model.plan) == "MM MM MM MM M"
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(1, 4):
        model.set_step(step, 3)
        loss, aux = model(IDX, TARGETS)
        optimizer.zero_grad()
        (loss + aux).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert model.generate(TOKENS[:, :3], 4, temperature=0).shape == (3, 7)
