"""How kernels are bound and chosen: operators, dispatch, torch.compile, the norms of a GPT.

    python -m pytest tests/kernels/test_binding.py

Correctness of the kernels themselves is in kernels/test_kernels.py.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import draw, run_python
from kernel_cases import OPERATORS, inputs_of, leaves, leaves_of, plain_case

import kernels
from common.errors import ConfigError, UserError
from configurator import parse_args
from kernels import binding, reference
from kernels.operands import Outputs
from model import GPTConfig

EPS = 1e-5
EPS_OUT = 0.02  # of output norms
DEVICE = "cpu" if binding.INTERPRETED else "cuda"


def derivatives(name, dtype):
    """Second derivatives, and those of function transforms, of an operator's outputs.

    In float64 they are those of plain PyTorch.
    """
    t = inputs_of(name, plain_case(10, 3, dtype=dtype))
    fields = leaves_of(t)
    tensors = [getattr(t, field).detach().requires_grad_() for field in fields]

    def loss(s, *values):
        given = SimpleNamespace(**vars(t) | dict(zip(fields, values)) | {"s": s})
        return sum(output.sin().sum() for output in OPERATORS[name][1](given))

    first = torch.autograd.grad(loss(t.s, *tensors), tensors, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors, allow_unused=True)
    plain = [tensor.detach() for tensor in tensors]
    places = tuple(range(1, 1 + len(plain)))
    whole = torch.func.grad(loss, places)(t.s, *plain)
    of_rows = [0 if tensor.dim() > 1 else None for tensor in plain]
    each = torch.func.vmap(torch.func.grad(loss, places), (0, *of_rows))(
        t.s[:, None], *[v[:, None] if axis == 0 else v for v, axis in zip(plain, of_rows)]
    )
    for mine, theirs in zip(first, whole, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    return [*second, *whole, *each]


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_and_function_transforms_go_through_the_reference(name):
    """On a GPU, or in the interpreter, as on a CPU."""
    found = (derivatives(name, dtype) for dtype in (torch.float32, torch.float64))
    for mine, exact in zip(*found, strict=True):
        assert (mine is None) == (exact is None)
        assert exact is None or relative_error(mine, exact) <= 2e-5


@pytest.mark.parametrize("name", ("rms", "add_rms", "norm_add_norm", "layer", "taper", "swiglu"))
def test_opcheck(name, monkeypatch):
    """Schema, fake implementation, autograd registration and AOT dispatch, static and dynamic
    shapes, of the operators that torch.compile sees.
    """
    forward, backward = [], []
    launch = binding._launch_backward

    def eager(inputs, settings, mode):
        forward.append((*inputs, *settings))
        return Outputs(*binding.Fused.apply(*inputs, settings))

    def recorded(upstream, saved, settings, gains):
        backward.append((*upstream, *saved, *settings, gains))
        return launch(upstream, saved, settings, gains)

    monkeypatch.setattr(kernels, "apply", eager)
    monkeypatch.setattr(binding, "_launch_backward", recorded)
    t = inputs_of(name, plain_case(10, 3))
    outputs = OPERATORS[name][1](t)
    torch.autograd.grad(sum(output.sin().sum() for output in outputs), leaves(t))
    monkeypatch.setattr(binding, "_launch_backward", launch)
    torch.library.opcheck(binding.fused, forward[0])
    for given in backward:
        plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in given]
        torch.library.opcheck(binding.fused_backward, tuple(plain))
        torch.library.opcheck(binding.fused_backward, (*plain[:-1], False))


# --------------------------------------------------------------------------------- the coupled path


def penalty(x, w, scale):
    """|d loss / d x|^2, whose gradient is a second derivative; the statistic depends on x."""
    s = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    (gradient,) = torch.autograd.grad(scale(x * x.cos(), s, w).square().sum(), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize("gain", [True, False], ids=["gain", "no gain"])
def test_the_statistic_is_a_constant_in_second_derivatives_too(gain):
    x, w = draw(5, 24).requires_grad_(), draw(24, seed=1).requires_grad_() if gain else None
    leaves = (x, w) if gain else (x,)

    def plain(h, s, w):
        return h * s if w is None else h * s * w

    def second(scale):
        return torch.autograd.grad(penalty(x, w, scale), leaves)

    detached, full = second(lambda h, s, w: plain(h, s.detach(), w)), second(plain)
    for scale in (
        reference.shared_rms_scale,
        lambda h, s, w: kernels.add_shared_rms_scale(h, 0 * h, s, w)[0],
    ):
        for mine, exact in zip(second(scale), detached, strict=True):
            assert (mine - exact).norm() <= 1e-12 * exact.norm()
    assert (detached[0] - full[0]).norm() > 1e-2 * full[0].norm()


# ---------------------------------------------------------------------- output norm + add + norm


def plain_boundary(x, a, w_out, w_in):
    """(y, h, inv_rms) as one writes it, for autograd."""
    h = x + a * (a.square().mean(-1, keepdim=True) + EPS_OUT).rsqrt() * w_out
    s = (h.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return h * s * w_in, h, s


def boundary_inputs(dtype, *shape):
    shapes = (shape, shape, shape[-1:], shape[-1:])  # x, a and two gains
    return [
        draw(*each, seed=i, dtype=dtype).to(DEVICE).requires_grad_()
        for i, each in enumerate(shapes)
    ]


def relative_error(actual, exact):
    return (actual.double() - exact).norm() / exact.norm()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_second_derivatives_of_the_boundary(place):
    given = boundary_inputs(torch.float64, 4, 9)

    def second(function):
        total = function(*given)[place].sin().sum()
        first = torch.autograd.grad(total, given[:3], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given[:3])

    functions = [lambda *v: kernels.norm_add_norm(*v, EPS_OUT, EPS), plain_boundary]
    if place == 1:
        functions.insert(1, lambda x, a, w, _: (None, kernels.add_normed(x, a, w, EPS_OUT)))
    *ours, exact = (second(function) for function in functions)
    for gradients in ours:
        for mine, theirs in zip(gradients, exact, strict=True):
            assert relative_error(mine, theirs) <= 1e-12


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_the_boundary_compiles_to_one_graph_with_the_same_gradients(stream, kind):
    """Of a torch.autograd.Function with several outputs that are used, and one that is not."""
    x, a, w_out, w_in = boundary_inputs(torch.float32, 2, 3, 24)
    x, a = x.detach().to(stream).requires_grad_(), a.detach().to(kind).requires_grad_()

    def function(x, a, w_out, w_in):
        y, h, _ = kernels.norm_add_norm(x, a, w_out, w_in, EPS_OUT, EPS, "torch")
        return kernels.add_normed(h, y.to(kind), w_out, EPS_OUT, "torch"), y

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = []
    for run in (function, compiled):
        outputs = run(x, a, w_out, w_in)
        assert {output.dtype for output in outputs} == {stream}
        seeds = [draw(*y.shape, seed=9 + i, dtype=y.dtype).to(y) for i, y in enumerate(outputs)]
        found.append([*outputs, *torch.autograd.grad(outputs, (x, a, w_out, w_in), seeds)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


# ----------------------------------------------------------------------------------------- dispatch


def test_auto_is_plain_pytorch_on_a_cpu_and_float64_always():
    x = draw(3, 8, dtype=torch.float32)
    assert not kernels.takes_kernel(x, "auto") and not kernels.takes_kernel(x, "torch")
    assert not kernels.takes_kernel(x.double(), "triton")
    if binding.INTERPRETED:
        assert kernels.takes_kernel(x, "triton")
    with pytest.raises(ConfigError, match="kernels"):
        parse_args(GPTConfig, ["--kernels=cuda"])


WITHOUT = """
import sys, torch
from common.errors import UserError
x = torch.ones(2, 4)
sys.modules["triton"] = None
for without in ("triton", "GPU"):
    import kernels
    assert torch.equal(kernels.rms_norm(x, None, 0.0)[0], x)
    try:
        kernels.rms_norm(x, None, 0.0, mode="triton")
    except UserError as error:
        print(error)
    for name in [*sys.modules]:  # imported anew, with Triton
        if name.partition(".")[0] in ("kernels", "triton"):
            del sys.modules[name]
"""


def test_without_triton_or_gpu_auto_works_and_triton_says_what_to_do():
    done = run_python("-c", WITHOUT, TRITON_INTERPRET="0")
    no_triton, no_gpu = done.stdout.splitlines()
    assert "pip install triton" in no_triton and "Triton needs a GPU" in no_gpu


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x, w: kernels.rms_norm(x, w[:3], EPS), "w of shape .3,"),
        (lambda x, w: kernels.layer_norm(x, w, w[:3], EPS), "b of shape .3,"),
        (lambda x, w: kernels.norm_add_norm(x, x[:1], w, w, EPS_OUT, EPS), "a of shape .1, 8"),
        (lambda x, w: kernels.add_normed(x, x, w[:3], EPS_OUT), "w_out of shape .3,"),
        (lambda x, w: kernels.shared_rms_scale(x, w, w), "given of shape .8,"),
        (lambda x, w: kernels.taper_norm(x, w, w[:3], w[:2], EPS), "w_tilde of shape .3,"),
        (lambda x, w: kernels.taper_norm(x, w, w, w[:2, None], EPS), "gate_c of shape .2, 1"),
        (lambda x, w: kernels.scaled_activation(x, x[:, :1], w, "tanh"), "tanh"),
        (lambda x, w: kernels.rms_norm(x, w, EPS, groups=3), "groups=3 for 8"),
        (lambda x, w: kernels.add_rms_norm(x, x, w, EPS, groups=0), "groups=0"),
        (lambda x, w: kernels.add_rms_norm(x, x, w, EPS, groups=2, counted=5), "counted=5"),
        (lambda x, w: kernels.rms_norm(x, w, EPS, counted=0), "counted=0"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_kernel_reads_beyond_it(call, names):
    with pytest.raises(UserError, match=names):
        call(draw(5, 8, dtype=torch.float32).to(DEVICE), draw(8, dtype=torch.float32).to(DEVICE))
