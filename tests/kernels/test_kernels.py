"""Every kernel against float64, over all shapes, layouts, types and contents that can go wrong.

    python -m pytest tests/kernels/test_kernels.py

    NANONORM_FULL=1/100 python -m pytest tests/kernels/test_kernels.py   # on a GPU

Without a GPU the kernels run in Triton's interpreter (helpers.py). NANONORM_FULL adds a share of
all combinations of the axes, always the same one.
"""

import inspect
import itertools
import os
import random
import zlib
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import draw
from kernel_cases import (
    AXES,
    DEVICE,
    ON_GPU,
    OPERATORS,
    gradients_of,
    in_double,
    inputs_of,
    leaves,
    leaves_of,
    plain_case,
    upstream,
)

import kernels
from kernels import rows

# relative L2 error
TOLERANCE = {
    torch.float64: 1e-12,  # plain PyTorch
    torch.float32: 3e-7,
    torch.float16: 5e-4,
    torch.bfloat16: 2.5e-3,
}
THREADS = rows.THREADS
WARP_ROW = rows.WARP_ROW
SUM_COLUMNS = rows.SUM_COLUMNS
GUARD = 64  # elements on either side of every output, which must stay as they are


def cases():
    """Every number of channels in every layout; all other axes in even shares, at random."""
    pairs = list(itertools.product(AXES["C"], AXES["layout"]))
    others = {axis: values for axis, values in AXES.items() if axis not in ("C", "layout")}
    columns = {}
    for axis, values in others.items():
        columns[axis] = [values[i % len(values)] for i in range(len(pairs))]
        random.Random(axis).shuffle(columns[axis])
    for i, (C, layout) in enumerate(pairs):
        case = {"C": C, "layout": layout} | {axis: column[i] for axis, column in columns.items()}
        if C > 4096 and not ON_GPU:
            case["rows"] = min(case["rows"], 7)  # else the interpreter's time is all here
        yield case


def full_product(share):
    """The given share of all combinations, spread evenly by a checksum."""
    for values in itertools.product(*AXES.values()):
        if zlib.crc32(repr(values).encode()) < share * 2**32:
            yield dict(zip(AXES, values))


SHARE = Fraction(os.environ.get("NANONORM_FULL", "0"))
CASES = [
    SimpleNamespace(**case)
    for case in (*cases(), *(full_product(SHARE) if SHARE else ()))
    if case["rows"] > 1 or case["content"] != "inf"  # inf rows have others beside them
]


def check(actual, expected, what, tolerance=0.0):
    """Same NaN and inf; elsewhere the relative L2 error that the type allows. That is TOLERANCE, or
    `tolerance` if that is more, and never less than the exact result rounded to it has.
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
        monkeypatch.setattr(rows, "WARP_ROW", 0)
        monkeypatch.setattr(rows, "SUM_COLUMNS", 1024)
        monkeypatch.setattr(rows, "SUM_ROWS", 16)
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
            check(actual, exact, f"{case}: gradient of {field}", tolerance)
    for tensor, old in [*zip(given, before), *zip(grads, kept)]:
        assert tensor is old or torch.equal(tensor, old), f"{case}: an input was written to"
    check_guards()
    return outputs, gradients


def test_the_operators_are_all_here():
    """Those of the package are its functions with a `mode`; every test below goes through them."""
    there = {
        name
        for name, member in vars(kernels).items()
        if inspect.isfunction(member) and "mode" in inspect.signature(member).parameters
    }
    called = {name for _, operator, _ in OPERATORS.values() for name in operator.__code__.co_names}
    assert there - called == {"apply", "takes_kernel"}  # which an operator calls itself


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


@pytest.mark.parametrize("dtype", AXES["dtype"], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_against_float64(name, dtype):
    for case in CASES:
        if case.dtype == dtype:
            check_case(name, case)


@pytest.mark.parametrize("name", OPERATORS)
def test_plain_pytorch_in_float64(name):
    for given in ("y", "all"):
        for weights in ("same", "none"):
            case = plain_case(20, 7, dtype=torch.float64, given=given, weights=weights, dims=3)
            check_case(name, case)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_rows(name):
    for layout, dims in (("contiguous", 3), ("strided", 2)):
        case = plain_case(96, 0, layout=layout, grad_layout=layout, dims=dims, given="all")
        outputs, gradients = check_case(name, case)
        assert all(output.numel() == 0 for output in outputs)
        assert all(gradient.numel() == 0 or not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", OPERATORS)
def test_frozen_gains_and_biases_leave_the_other_gradients(name):
    """The same bits, without the sums over rows."""
    case = plain_case(96, 7, given="all")
    _, expected, _ = run(name, inputs_of(name, case), case)
    t = inputs_of(name, case)
    for field in {"w", "b", "wt"} & {*leaves_of(t)}:
        getattr(t, field).requires_grad_(False)
    outputs = OPERATORS[name][1](t)
    moving = [tensor for tensor in (t.x, t.a) if tensor is not None]
    actual = gradients_of(outputs, upstream(case, outputs), moving)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected))


@pytest.mark.parametrize("name", OPERATORS)
def test_tiles_of_the_size_a_gpu_gets(name, monkeypatch):
    monkeypatch.setattr(rows, "THREADS", THREADS)
    monkeypatch.setattr(rows, "WARP_ROW", WARP_ROW)
    for C, rows_of in ((96, 33), (600, 3), (2500, 3), (4096, 3), (4097, 3)):
        check_case(name, plain_case(C, rows_of))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_gradients_of_gains_and_biases_are_summed_by_one_launch(dtype, monkeypatch):
    """Of more programs than its tile has rows, in tiles of the width that a GPU gets."""
    launched, launch = [], rows.launch

    def recorded(kernel, *args, **arguments):
        launched.append(kernel.fn.__name__)
        launch(kernel, *args, **arguments)

    monkeypatch.setattr(rows, "launch", recorded)
    monkeypatch.setattr(rows, "THREADS", 64)
    monkeypatch.setattr(rows, "SUM_COLUMNS", SUM_COLUMNS)
    monkeypatch.setattr(rows, "SUM_ROWS", 4)
    monkeypatch.setattr(rows, "LEAST", 1)
    monkeypatch.setattr(rows, "programs", lambda *_: 1000)
    for name in ("layer", "norm_add_norm", "taper"):
        launched.clear()
        check_case(name, plain_case(17, 33, dtype=dtype))
        assert launched == ["forward_kernel", "backward_kernel", "sum_kernel"]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("n_programs", [3, 1000])
def test_any_number_of_multiprocessors(name, n_programs, monkeypatch):
    """More programs than rows, and few for all rows: the guards see a write outside."""
    monkeypatch.setattr(rows, "THREADS", 64)
    monkeypatch.setattr(rows, "programs", lambda *_: n_programs)
    check_case(name, plain_case(96, 64))


@pytest.mark.parametrize("name", OPERATORS)
def test_identical_bits_on_repeat(name):
    case = plain_case(1000, 64)
    first, second = (run(name, inputs_of(name, case), case) for _ in range(2))
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_has_the_same_bits_however_many_rows_there_are(name, monkeypatch):
    """In tiles of the size that a GPU gets: the forward pass of nine rows, and of some of them."""
    monkeypatch.setattr(rows, "THREADS", THREADS)
    monkeypatch.setattr(rows, "WARP_ROW", WARP_ROW)
    for C in (96, 1000):
        t = inputs_of(name, plain_case(C, 9, dtype=torch.bfloat16))
        of_all = OPERATORS[name][1](t)
        for part in (slice(4, 5), slice(1, 8)):
            some = {"x": t.x[part], "s": t.s[part], "a": None if t.a is None else t.a[part]}
            of_some = OPERATORS[name][1](SimpleNamespace(**vars(t) | some))
            for whole, piece in zip(of_all, of_some, strict=True):
                assert torch.equal(whole[part], piece), (C, part)


def test_exact_gelu_and_its_slope_against_float64():
    """cdf to 1.5 units of 2^-23, and to bfloat16's precision of what is left far below zero."""
    u = torch.linspace(-12, 12, 4801, device=DEVICE)[:, None].requires_grad_()
    y = kernels.scaled_activation(u, torch.ones_like(u), None, "gelu", mode="triton")
    (slope,) = torch.autograd.grad(y.sum(), u)
    exact = u.detach().double().requires_grad_()
    (exact_slope,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    of_u = 0.5 * torch.erfc(-exact.detach() / 2**0.5)  # ndtr is 0 far below zero
    error = (y.detach() / u.detach() - of_u).abs()[u.detach() != 0]
    assert error.max() <= 1.7 * 2**-23
    assert (slope - exact_slope).abs().max() <= 1.7 * 2**-23
    assert (error / of_u[u.detach() != 0]).max() <= torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize(
    ("registers", "warps", "expected"),
    [(32, 4, 8), (64, 4, 8), (72, 4, 7), (80, 4, 6), (96, 4, 5), (103, 8, 2), (128, 16, 1)],
)
def test_a_backward_kernel_gets_the_programs_that_its_registers_let_in(
    registers, warps, expected, monkeypatch
):
    """Of a multiprocessor with 65,536 registers; the grid is that of the kernel that is compiled on
    the tensors' own device.
    """
    assert rows.resident(registers, warps, 65536) == expected
    # Arguments come in any order; the kernel's own counts.
    given = {"n_rows": 16, "X": torch.bfloat16, "W": None}
    constants = (("C", 768), ("num_warps", warps))
    compiled = SimpleNamespace(n_regs=registers, _init_handles=lambda: None)

    def warmup(*signature, grid, **others):
        assert signature == (torch.bfloat16, None, 16) and others == dict(constants)
        assert current == [place]
        return compiled

    device = SimpleNamespace(regs_per_multiprocessor=65536, multi_processor_count=132)
    place, current = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "device", lambda own: nullcontext(current.append(own)))
    kernel = SimpleNamespace(warmup=warmup, arg_names=["X", "W", "n_rows", "C"])
    found = rows.programs.__wrapped__(kernel, tuple(given.items()), constants, place)
    assert found == 132 * expected
