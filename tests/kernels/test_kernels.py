"""Every kernel against float64, over all shapes, layouts, types and contents that can go wrong.

    python -m pytest tests/kernels/test_kernels.py

    NANONORM_FULL=1/100 python -m pytest tests/kernels/test_kernels.py   # on a GPU

Without a GPU the kernels run in Triton's interpreter (helpers.py). The axes below are combined
pairwise: any two values of any two axes meet, for each operator. NANONORM_FULL adds a share of the
full product, always the same one.
"""

import itertools
import os
import zlib
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import draw

import kernels
from kernels import binding, rows
from kernels.reference import GATED, KINDS

ON_GPU = torch.cuda.is_available() and not binding.INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
EPS = 1e-5
EPS_OUT = 0.02  # of output norms
TOLERANCE = {torch.float32: 3e-7, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}  # relative L2 error
THREADS = rows.THREADS
GUARD = 64  # elements on either side of every output, which must stay as they are

AXES = {
    "C": (17, 1, 96, 127, 499, 500, 768, 1000, 1023, 1600, 4096, 4097, 8191, 8193),
    "rows": (7, 64, 1),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "dims": (2, 3),
    "layout": ("contiguous", "strided", "transposed", "expanded"),
    "grad_layout": ("contiguous", "strided", "transposed", "expanded"),
    "weights": ("same", "other", "none"),
    "content": ("normal", "zeros", "scaled", "inf"),
    # outputs with a gradient; other: the second one alone, where there are several
    "given": ("y", "all", "other"),
}
IMPOSSIBLE = (("rows", 1), ("content", "inf"))  # inf rows have others beside them


def pairwise(axes):
    """Few combinations of the axes' values in which every pair of values of two axes occurs.
    Greedy, deterministic; where it makes no difference an axis takes its first value.
    """
    missing = {
        ((first, a), (second, b))
        for first, second in itertools.combinations(axes, 2)
        for a in axes[first]
        for b in axes[second]
    } - {IMPOSSIBLE}
    order = {pair: place for place, pair in enumerate(sorted(missing, key=str))}
    while missing:
        case = dict(min(missing, key=order.__getitem__))
        for name in axes:
            if name not in case:
                counts = [
                    sum(
                        bool({((name, value), met), (met, (name, value))} & missing)
                        for met in case.items()
                    )
                    for value in axes[name]
                ]  # of pairs not met before, with each value
                allowed = [
                    not {*IMPOSSIBLE} <= {*case.items(), (name, value)} for value in axes[name]
                ]
                case[name] = max(zip(allowed, counts, axes[name]), key=lambda choice: choice[:2])[2]
        case = {name: case[name] for name in axes}
        missing -= set(itertools.combinations(case.items(), 2))
        yield SimpleNamespace(**case)


def full_product(axes, share):
    """The given share of all combinations, spread evenly by a checksum."""
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values))
        if zlib.crc32(repr(values).encode()) < share * 2**32 and not {*IMPOSSIBLE} <= {
            *case.items()
        }:
            yield SimpleNamespace(**case)


SHARE = Fraction(os.environ.get("NANONORM_FULL", "0"))
CASES = [*pairwise(AXES), *(full_product(AXES, SHARE) if SHARE else ())]


def test_the_cases_cover_all_pairs():
    cases = list(pairwise(AXES))
    for first, second in itertools.combinations(AXES, 2):
        met = {((first, getattr(case, first)), (second, getattr(case, second))) for case in cases}
        assert met == {((first, a), (second, b)) for a in AXES[first] for b in AXES[second]} - {
            IMPOSSIBLE
        }
    assert len(cases) < 120


def test_a_share_of_the_full_product_has_all_values():
    everything = sum(1 for _ in full_product(AXES, 1))
    cases = list(full_product(AXES, Fraction("1/500")))
    assert 0.8 < 500 * len(cases) / everything < 1.2
    for name, values in AXES.items():
        assert {getattr(case, name) for case in cases} == {*values}


# ---------------------------------------------------------------------------- operators and float64


class Rounded(torch.autograd.Function):
    """Stand for a sum by what the kernel rounded it to; the gradient is the sum's."""

    @staticmethod
    def forward(ctx, total, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def kept_sum(t, total):
    """The residual stream h of an operator that adds: the kernel's, which `total` is checked by."""
    t.total = total.detach()
    return Rounded.apply(total, t.rounded)


def exact_rms(t, h, groups=1, counted=None, eps=EPS):
    parts = h.unflatten(-1, (groups, -1))
    inv = (parts[..., :counted].square().mean(-1, keepdim=True) + eps).rsqrt()
    return gain_and_bias((parts * inv).flatten(-2), t), inv.squeeze(-1)


def exact_add_rms(t):
    h = kept_sum(t, t.x + t.a)
    y, inv = exact_rms(t, h)
    return y, h, inv


def exact_add_shared(t):
    h = kept_sum(t, t.x + t.a)
    return gain_and_bias(h * t.s, t), h


def exact_add_normed(t):
    return (kept_sum(t, t.x + exact_rms(t, t.a, eps=EPS_OUT)[0]),)


def exact_norm_add_norm(t):
    (h,) = exact_add_normed(t)
    y, inv = exact_rms(SimpleNamespace(w=t.wt, b=None), h)
    return y, h, inv


def exact_layer(t):
    centred = t.x - t.x.mean(-1, keepdim=True)
    return (gain_and_bias(centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt(), t),)


def gain_and_bias(y, t):
    y = y if t.w is None else y * t.w
    return y if t.b is None else y + t.b


def exact_activation(t, kind):
    u = t.x * t.s if t.b is None else t.x * t.s + t.b
    if kind == "swiglu":
        gate, up = u.chunk(2, -1)
        return (F.silu(gate) * up,)
    if kind == "geglu":
        gate, up = u.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * up,)
    tanh = "tanh" if kind == "gelu_tanh" else "none"
    return (F.relu(u) ** 2 if kind == "relu2" else F.gelu(u, approximate=tanh),)


def exact_taper(t):
    gate, c = t.gate_c
    plain = t.x if t.wt is None else t.x * t.wt
    return (gate * exact_rms(t, t.x)[0] + (1 - gate) * c * plain,)


def quarter(C):
    return max(1, C // 4)


def groups_of(C):
    return next(n for n in (8, 5, 4, 3, 2, 1) if C % n == 0)


# name: (inputs, the operator, the same in float64). With "a" among the inputs the operator adds,
# and what follows is of the kernel's rounded sum.
OPERATORS = {
    "rms": (
        "xw",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, mode="triton"),
        lambda t: exact_rms(t, t.x),
    ),
    "rms_bias": (
        "xwb",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, t.b, mode="triton"),
        lambda t: exact_rms(t, t.x),
    ),
    "partial": (
        "xw",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, counted=quarter(t.C), mode="triton"),
        lambda t: exact_rms(t, t.x, counted=quarter(t.C)),
    ),
    "group": (
        "xwb",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, t.b, groups_of(t.C), mode="triton"),
        lambda t: exact_rms(t, t.x, groups_of(t.C)),
    ),
    "add_rms": (
        "xaw",
        lambda t: kernels.add_rms_norm(t.x, t.a, t.w, EPS, mode="triton"),
        exact_add_rms,
    ),
    "add_normed": (
        "xaw",
        lambda t: (kernels.add_normed(t.x, t.a, t.w, EPS_OUT, mode="triton"),),
        exact_add_normed,
    ),
    "norm_add_norm": (
        "xawv",
        lambda t: kernels.norm_add_norm(t.x, t.a, t.w, t.wt, EPS_OUT, EPS, mode="triton"),
        exact_norm_add_norm,
    ),
    "layer": (
        "xw",
        lambda t: kernels.layer_norm(t.x, t.w, None, EPS, mode="triton")[:1],
        exact_layer,
    ),
    "layer_bias": (
        "xwb",
        lambda t: kernels.layer_norm(t.x, t.w, t.b, EPS, mode="triton")[:1],
        exact_layer,
    ),
    "shared": (
        "xw",
        lambda t: (kernels.shared_rms_scale(t.x, t.s, t.w, mode="triton"),),
        lambda t: (gain_and_bias(t.x * t.s, t),),
    ),
    "add_shared": (
        "xaw",
        lambda t: kernels.add_shared_rms_scale(t.x, t.a, t.s, t.w, mode="triton"),
        exact_add_shared,
    ),
    "taper": (
        "xwv",
        lambda t: kernels.taper_norm(t.x, t.w, t.wt, t.gate_c, EPS, mode="triton")[:1],
        exact_taper,
    ),
} | {
    kind: (
        "xb",
        lambda t, kind=kind: (kernels.scaled_activation(t.x, t.s, t.b, kind, mode="triton"),),
        lambda t, kind=kind: exact_activation(t, kind),
    )
    for kind in KINDS
}


def laid_out(case, width, layout, seed, dtype):
    """(rows, width), or (..., rows / ..., width) in three dimensions; strides as `layout` says."""
    n = case.rows
    flat = {
        "contiguous": lambda: draw(n, width, seed=seed),
        "strided": lambda: draw(2 * n, width + 16, seed=seed)[::2, :width],
        "transposed": lambda: draw(width, n, seed=seed).t(),
        "expanded": lambda: draw(1, width, seed=seed).expand(n, width),
    }[layout]()
    if layout == "strided":  # a view of something larger
        x = torch.zeros(2 * n, width + 16, dtype=dtype, device=DEVICE)[::2, :width].copy_(flat)
    else:
        x = torch.empty_strided(flat.shape, flat.stride(), dtype=dtype, device=DEVICE)
    if layout == "expanded":
        x = with_content(draw(1, width, seed=seed).to(DEVICE, dtype), case.content).expand(n, width)
    else:
        x = with_content(x.copy_(flat), case.content)
    return x.unflatten(0, (4, -1) if n == 64 else (n, -1) if n else (0, 3)) if case.dims == 3 else x


def with_content(x, content):
    x[::3] *= {"zeros": 0.0, "scaled": 1e4}.get(content, 1.0)
    if content == "inf" and len(x):
        x[-1, 0] = -torch.inf
        x[0, -1] = torch.inf
    return x


def inputs_of(name, case):
    """Namespace of x, a, w, b, wt (None where the operator or the case has none), s, gate_c."""
    wanted, C = OPERATORS[name][0], case.C
    width = 2 * C if name in GATED else C
    other = torch.bfloat16 if case.dtype == torch.float32 else torch.float32
    kind = other if case.weights == "other" else case.dtype
    t = SimpleNamespace(C=C, a=None, w=None, b=None, wt=None)
    t.x = laid_out(case, width, case.layout, 0, case.dtype)
    if "a" in wanted:
        t.a = laid_out(case, width, case.grad_layout, 1, kind)
    if case.weights != "none":
        for letter, field, seed in (("w", "w", 2), ("b", "b", 3), ("v", "wt", 4)):
            if letter in wanted:
                setattr(t, field, draw(width, seed=seed).to(DEVICE, kind))
    square = t.x.double() if t.a is None else t.x.double() + t.a.double()
    t.s = (square.square().mean(-1, keepdim=True) + EPS).rsqrt().float()
    t.gate_c = torch.tensor([0.3, 0.01], device=DEVICE)
    leaves(t)
    return t


DIFFERENTIABLE = ("x", "a", "w", "b", "wt")


def leaves(t, fields=DIFFERENTIABLE):
    return [
        tensor.requires_grad_() for field in fields if (tensor := getattr(t, field)) is not None
    ]


def upstream(case, outputs):
    """Gradients for the outputs, in the layout of the case; None for those that get none."""
    plain = SimpleNamespace(**vars(case) | {"content": "normal"})
    chosen = {"y": {0}, "all": {*range(len(outputs))}, "other": {min(1, len(outputs) - 1)}}[
        case.given
    ]
    return [
        laid_out(plain, y.shape[-1], case.grad_layout, 10 + i, y.dtype) if i in chosen else None
        for i, y in enumerate(outputs)
    ]


def gradients_of(outputs, grads, wanted):
    """For `wanted`; None where no output with a gradient depends on one."""
    pairs = [
        (output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None
    ]
    return torch.autograd.grad(
        [y for y, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
    )


def in_double(t, h):
    """The same inputs as float64 leaves, and h, if the operator adds, as the kernel rounded it."""
    twin = SimpleNamespace(**vars(t))
    for field in (*DIFFERENTIABLE, "s", "gate_c"):
        value = getattr(t, field)
        setattr(twin, field, None if value is None else value.detach().double().contiguous())
    twin.rounded = None if h is None else h.detach().double()
    return twin


def check(actual, expected, what, floor=0.0, tolerance=0.0):
    """Same NaN and inf; elsewhere the relative L2 error that the type allows, or absolutely
    `floor`. The type allows TOLERANCE, or `tolerance` if that is more, and never less than the
    exact result rounded to it has.
    """
    assert actual.shape == expected.shape, what
    wide = actual.double()
    assert torch.equal(wide.isnan(), expected.isnan()), (
        f"{what}: NaN where the reference has none, or the reverse"
    )
    assert torch.equal(wide.isinf(), expected.isinf()), f"{what}: inf"
    finite = expected.isfinite()
    error, size = (wide - expected)[finite], expected[finite]
    # few numbers of a short type cannot be nearer than this
    nearest = (size.to(actual.dtype).double() - size).norm()
    if floor:
        rounding = 0.0 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
        over = (error.abs() - rounding * size.abs()).max() if error.numel() else 0.0
        assert over <= floor, f"{what}: absolute error {over:.2e}, allowed {floor:.2e}"
    else:
        relative = max(TOLERANCE[actual.dtype], tolerance)
        allowed = torch.maximum(relative * size.norm(), 1.001 * nearest)
        assert error.norm() <= allowed, f"{what}: {error.norm() / size.norm():.2e}"


MADE = []  # outputs of kernels, guards included, not checked yet


def check_guards():
    """And forget the outputs: a GPU cannot hold those of all cases."""
    while MADE:
        base = MADE.pop()
        assert (base[:GUARD] == 7).all() and (base[-GUARD:] == 7).all(), (
            "written outside of an output"
        )


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs begin as NaN between guards; a kernel that leaves out an element or writes outside is
    found out.
    """

    def empty(shape, dtype, device):
        size = torch.Size(shape).numel()
        base = torch.full((size + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        base[:GUARD] = base[size + GUARD :] = 7.0
        MADE.append(base)
        return base[GUARD : size + GUARD].view(shape)

    monkeypatch.setattr(rows, "empty", empty)
    # the interpreter's time is for programs, not for elements: fewer and taller tiles
    if not ON_GPU:
        monkeypatch.setattr(rows, "THREADS", 2048)
    yield
    check_guards()


def run(name, t, case):
    """(outputs, gradients of the inputs that there are, upstream gradients)"""
    outputs = OPERATORS[name][1](t)
    grads = upstream(case, outputs)
    return outputs, gradients_of(outputs, grads, leaves(t)), grads


def check_case(name, case):
    t = inputs_of(name, case)
    given = [*leaves(t), t.s, t.gate_c]
    before = [tensor.detach().clone() for tensor in given]
    outputs = OPERATORS[name][1](t)
    grads = upstream(case, outputs)
    kept = [None if grad is None else grad.clone() for grad in grads]
    gradients = gradients_of(outputs, grads, leaves(t))
    place = None if t.a is None else min(1, len(outputs) - 1)  # of h
    twin = in_double(t, None if place is None else outputs[place])
    roots = leaves(twin)
    expected = OPERATORS[name][2](twin)
    wide = gradients_of(
        expected, [None if grad is None else grad.double() for grad in grads], roots
    )
    floors = allowed_at_one_channel(name, t, outputs, grads) if case.C == 1 else {}
    for i, (actual, exact) in enumerate(zip(outputs, expected, strict=True)):
        exact = twin.total if i == place else exact.detach()
        check(actual.detach(), exact, f"{case}: output {i}")
    for field, actual, exact in zip(leaves_of(t), gradients, wide, strict=True):
        assert (actual is None) == (exact is None), f"{case}: gradient of {field}"
        if exact is not None:
            assert actual.dtype == getattr(t, field).dtype
            # dx is rounded before the gradients of the output norm are computed from it
            rounded = name == "norm_add_norm" and field in ("a", "w") and case.given != "other"
            tolerance = 1.5 * TOLERANCE[case.dtype] if rounded else 0.0
            floor = floors.get(field, 0.0)
            check(actual, exact, f"{case}: gradient of {field}", floor, tolerance)
    for tensor, old in [*zip(given, before), *zip(grads, kept)]:
        assert tensor is old or torch.equal(tensor, old), f"{case}: an input was written to"
    check_guards()
    return outputs, gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_to_the_nearest(dtype):
    """Of float32 sums, ties to even: bit for bit as PyTorch does.

    (The interpreter does through helpers.py.)
    """
    x, a = (
        (draw(64, 1000, seed=seed) * 2.0 ** draw(64, 1, seed=seed + 2)).to(DEVICE, dtype)
        for seed in (0, 1)
    )
    step = torch.finfo(dtype).eps
    x[0, :6] = torch.tensor([1, 1, 1 + step, 1 + step, -1, torch.inf], dtype=dtype)
    a[0, :6] = torch.tensor(
        [0.5 * step, 0.75 * step, 0.5 * step, 0.25 * step, -0.5 * step, 1], dtype=dtype
    )
    _, h = kernels.add_shared_rms_scale(x, a, torch.ones(64, 1, device=DEVICE), None, mode="triton")
    assert torch.equal(h, x + a)
    assert h[0, :6].tolist() == [1, 1 + step, 1 + 2 * step, 1 + step, -1, torch.inf]


def leaves_of(t):
    return [field for field in DIFFERENTIABLE if getattr(t, field) is not None]


WITH_STATISTIC = ("rms", "rms_bias", "partial", "group", "add_rms", "layer", "layer_bias", "taper")


def allowed_at_one_channel(name, t, outputs, grads):
    """With C = 1, y is x's sign, and x's gradient a small difference of large terms, so that a
    relative error says nothing; one sum over rows that cancel stands for a whole gain. Allowed is
    1e-6 of the largest term, beside the rounding of a 16-bit result.
    """
    if name in ("add_normed", "norm_add_norm"):
        return allowed_with_an_output_norm(t, outputs, grads)
    if name not in WITH_STATISTIC or grads[0] is None:
        return {}
    largest = grads[0] * t.s if t.w is None else grads[0] * t.s * t.w
    if len(grads) > 1 and grads[-1] is not None:  # the gradient of inv_rms has its own term
        largest = largest.abs() + grads[-1].abs() * t.s**2
    of_x, of_w = (1e-6 * float(terms.detach().abs().max()) for terms in (largest, grads[0]))
    return {"x": of_x, "a": of_x, "w": of_w}


def allowed_with_an_output_norm(t, outputs, grads):
    """The same for each norm in turn. The second one takes the rounded gradient of the first."""
    dy, dh, ds = (None, *grads, None) if len(outputs) == 1 else grads
    h = outputs[0 if len(outputs) == 1 else 1].detach().double()
    terms = torch.zeros_like(h)
    if dy is not None:
        s = (h.square() + EPS).rsqrt()
        terms += (dy * s if t.wt is None else dy * s * t.wt.detach()).abs()
        terms += 0.0 if ds is None else ds.abs() * s**2
    terms += 0.0 if dh is None else dh.abs()
    p = (t.a.detach().double().square() + EPS).rsqrt()
    through = terms * p if t.w is None else terms * p * t.w.detach().abs()
    terms, through = (values[values.isfinite()] for values in (terms, through))  # others are NaN
    step = 1e-6 if t.x.dtype == torch.float32 else torch.finfo(t.x.dtype).eps
    allowed = {
        "x": 1e-6 * float(terms.max()),
        "a": step * float(through.max()),
        "w": step * float(terms.sum()),
    }
    return allowed if dy is None else allowed | {"wt": 1e-6 * float(dy.abs().max())}


@pytest.mark.parametrize("dtype", AXES["dtype"], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_against_float64(name, dtype):
    for case in CASES:
        if case.dtype == dtype:
            check_case(name, case)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_rows(name):
    for dtype, layout, dims in itertools.product(AXES["dtype"], AXES["layout"], AXES["dims"]):
        case = plain_case(
            96, 0, dtype=dtype, layout=layout, grad_layout=layout, dims=dims, given="all"
        )
        outputs, gradients = check_case(name, case)
        assert all(output.numel() == 0 for output in outputs)
        assert all(gradient.numel() == 0 or not gradient.any() for gradient in gradients)


def plain_case(C, n_rows, **changes):
    case = {axis: values[0] for axis, values in AXES.items()} | {"C": C, "rows": n_rows} | changes
    return SimpleNamespace(**case)


@pytest.mark.parametrize("name", OPERATORS)
def test_frozen_gains_and_biases_are_not_summed(name, monkeypatch):
    """And the gradients of the rest are the same bits."""
    case, sums = plain_case(96, 7, given="all"), []
    _, expected, _ = run(name, inputs_of(name, case), case)
    monkeypatch.setattr(
        rows, "sum_partials", lambda partials, like, x: sums.append(partials) or x.new_empty(0)
    )
    t = inputs_of(name, case)
    for field in {"w", "b", "wt"} & {*leaves_of(t)}:
        getattr(t, field).requires_grad_(False)
    outputs = OPERATORS[name][1](t)
    actual = gradients_of(
        outputs, upstream(case, outputs), [tensor for tensor in (t.x, t.a) if tensor is not None]
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected))
    assert sums and set(sums) == {None}


@pytest.mark.parametrize("name", OPERATORS)
def test_tiles_of_the_size_a_gpu_gets(name, monkeypatch):
    monkeypatch.setattr(rows, "THREADS", THREADS)
    for C in (96, 768, 4097):
        check_case(name, plain_case(C, 33))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("n_programs", [1, 3, 1000])
def test_any_number_of_multiprocessors(name, n_programs, monkeypatch):
    """More programs than rows, and one for all rows: the guards see a write outside."""
    monkeypatch.setattr(rows, "THREADS", 64)
    monkeypatch.setattr(rows, "programs", lambda device, warps: n_programs)
    check_case(name, plain_case(96, 64))


@pytest.mark.parametrize("name", OPERATORS)
def test_identical_bits_on_repeat(name):
    case = plain_case(1000, 64)
    first, second = (run(name, inputs_of(name, case), case) for _ in range(2))
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b)
