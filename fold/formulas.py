"""Find out which formula a norm computes, by calling it on numbers.

    found = identify(f, x)      # f takes and returns tensors of the shape of x
    found.kind                  # "RMSNorm", "LayerNorm", "L2", ..., "unknown formula", "not a norm"
    found.formula, found.gain   # y = formula.normalise(rows) * gain + bias

A formula is named only if it gives the outputs of `f`: at large inputs, at five sizes around the
one where eps halves the output, and with single channels scaled.

A norm averages over a row of n numbers. `Layout` says which numbers of a tensor make a row: those
that an output reads. It arranges a tensor as rows (R, G, n); the G rows of a tensor that have gains
of their own (groups, heads) stand beside one another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

UNKNOWN = "unknown formula"
NOT_A_NORM = "not a norm"
INSIDE = "inside the root"
OUTSIDE = "outside the root"
CLAMP = "as the least divisor"
NO_EPS = "none"
PLACES = (INSIDE, OUTSIDE, CLAMP)

# Where eps is looked for: powers of two that an input of size 1 is multiplied by
SMALLEST = -200
SIZES = (-6, -2, 0, 2, 6)  # around the size where eps halves the output, also powers of two
SPIKE = 50.0  # what a single channel is scaled by
MOST_STEPS = 0.3  # of the outputs, the largest share that changes where a function is in steps


class Precision(NamedTuple):
    """The type in which `f` is called, a size beside which eps is nothing, and what rounding
    leaves of a difference, relative to the largest output.
    """

    dtype: torch.dtype
    large: float
    tolerance: float


DOUBLE = Precision(torch.float64, 2.0**40, 1e-8)
# For operators that compute in float32 whatever they are given
SINGLE = Precision(torch.float32, 2.0**14, 2e-4)


@dataclass(frozen=True)
class Formula:
    """A norm without its gain: rows (..., n) divided by a statistic of each.

    Attributes:
        statistic: "rms", "l1" (mean of |x|) or "max" (of |x|).
        centred: the mean of the row is subtracted first.
        counted: the first numbers of the row that the statistic goes over.
        unit: what the statistic is multiplied by: sqrt(n) for L2, n for a sum of |x|.
        eps: added to the statistic, or to its square.
        place: where eps is: one of PLACES or NO_EPS.
    """

    statistic: str
    centred: bool
    counted: int
    unit: float = 1.0
    eps: float = 0.0
    place: str = NO_EPS

    def centre(self, rows: Tensor) -> Tensor:
        """Subtract the mean of each row, if the norm does."""
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows

    def divisor(self, centred: Tensor) -> Tensor:
        """Return what centred rows (..., n) are divided by, (..., 1)."""
        counted = centred[..., : self.counted]
        if self.statistic == "rms":
            size = counted.square().mean(-1, keepdim=True).sqrt()
        elif self.statistic == "l1":
            size = counted.abs().mean(-1, keepdim=True)
        else:
            size = counted.abs().amax(-1, keepdim=True)
        size = size * self.unit
        if self.place == INSIDE:
            return (size.square() + self.eps).sqrt()
        if self.place == OUTSIDE:
            return size + self.eps
        if self.place == CLAMP:
            return size.clamp_min(self.eps)
        return size

    def normalise(self, rows: Tensor) -> Tensor:
        """Normalise rows (..., n)."""
        centred = self.centre(rows)
        return centred / self.divisor(centred)


@dataclass(frozen=True)
class Layout:
    """Which numbers of a tensor a norm averages.

    Attributes:
        shape: of the tensor.
        averaged: axes that are averaged over whole.
        split: (axis, block): an axis that is averaged over in consecutive blocks; None: no such.
        apart: further axes along which gains differ.
    """

    shape: tuple[int, ...]
    averaged: tuple[int, ...]
    split: tuple[int, int] | None = None
    apart: tuple[int, ...] = ()

    def _order(self) -> tuple[tuple[int, ...], list[int], list[int], list[int]]:
        """Return the axes that are repeated, apart and averaged.

        They count in the shape that comes first, in which the split axis is two.
        """
        shape = list(self.shape)
        averaged = set(self.averaged)
        apart = set(self.apart)
        if self.split is not None:
            axis, block = self.split
            shape[axis : axis + 1] = [shape[axis] // block, block]
            averaged = {a + (a > axis) for a in averaged} | {axis + 1}
            apart = {a + (a > axis) for a in apart} | {axis}
        repeated = [a for a in range(len(shape)) if a not in averaged | apart]
        return tuple(shape), repeated, sorted(apart), sorted(averaged)

    def in_blocks(self, x: Tensor) -> Tensor:
        """Make the split axis of a tensor two."""
        shape, *_ = self._order()
        return x.reshape(shape)

    def rows(self, x: Tensor) -> Tensor:
        """Arrange a tensor as rows (R, G, n)."""
        shape, repeated, apart, averaged = self._order()
        groups = math.prod(shape[a] for a in apart)
        numbers = math.prod(shape[a] for a in averaged)
        moved = x.reshape(shape).permute(*repeated, *apart, *averaged)
        return moved.reshape(-1, groups, numbers)

    def tensor(self, rows: Tensor) -> Tensor:
        """Arrange rows (R, G, n) as the tensor."""
        shape, repeated, apart, averaged = self._order()
        order = [*repeated, *apart, *averaged]
        moved = rows.reshape([shape[a] for a in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        return moved.permute(back).reshape(self.shape)

    @property
    def size(self) -> tuple[int, int, int]:
        """R, G and n."""
        shape, repeated, apart, averaged = self._order()
        parts = (repeated, apart, averaged)
        r, g, n = (math.prod(shape[a] for a in axes) for axes in parts)
        return r, g, n

    @property
    def is_last_axis(self) -> bool:
        """Is it the last axis alone, whole?"""
        return self.averaged == (len(self.shape) - 1,) and self.split is None

    def describe(self) -> str:
        """Say which axes and groups are averaged; "" for the last axis."""
        said = []
        if self.split is not None:
            axis, block = self.split
            groups = self.shape[axis] // block
            where = "" if axis == len(self.shape) - 1 else f" of axis {axis}"
            said.append(f"{groups} groups{where}")
        if not self.is_last_axis and self.averaged:
            one = len(self.averaged) == 1
            axes = ", ".join(map(str, self.averaged))
            said.append(f"{'axis' if one else 'axes'} {axes} of {len(self.shape)}")
        return ", ".join(said)


@dataclass(frozen=True)
class Found:
    """What calls of a function told.

    Attributes:
        kind: name of the formula, "unknown formula" or "not a norm".
        layout: which numbers are averaged; None where it could not be found.
        formula: None for an unknown one.
        gain: (G, n), float64; of a point-wise function (channels,).
        bias: (G, n), float64, or None if it is zero.
        note: what else is known.
        precision: in which the function was called.
    """

    kind: str
    layout: Layout | None = None
    formula: Formula | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None
    note: str = ""
    precision: Precision = DOUBLE

    def apply(self, rows: Tensor) -> Tensor:
        """Compute the norm of rows (R, G, n) with its gain and bias."""
        y = self.formula.normalise(rows) * self.gain.to(rows)
        return y if self.bias is None else y + self.bias.to(rows)


# ------------------------------------------------------------------------------------ is it a norm?


def numbers(shape: tuple[int, ...], seed: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.to(like.device, dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest number of b; inf for NaNs."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    largest = float(b.abs().max())
    return float((a - b).abs().max()) / max(largest, torch.finfo(torch.float64).tiny)


def forgets_size(f: Function, x: Tensor, precision: Precision) -> bool:
    """Tell whether a function of large inputs does not change if all of them are doubled.

    That is so for norms, and for functions of single numbers that saturate.
    """
    u = numbers(tuple(x.shape), 1, x, precision.dtype)
    once, twice = (f(size * precision.large * u) for size in (1, 2))
    tolerance = max(precision.tolerance, 1e-7)
    if not difference(once, twice) <= tolerance:
        return False
    return not difference(f(-precision.large * u), once) <= tolerance


def is_point_wise(f: Function, x: Tensor, precision: Precision) -> bool:
    """Tell whether each number of the output depends on the same number of the input alone."""
    one, two = (numbers(tuple(x.shape), seed, x, precision.dtype) for seed in (2, 3))
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)).to(x.device) < 0.5
    mixed = f(torch.where(keep, one, two))
    return difference(mixed, torch.where(keep, f(one), f(two))) <= precision.tolerance


# Functions of a x that saturate at 1, and their inverses
SATURATING = (
    ("tanh(a x)", torch.tanh, torch.atanh),
    ("erf(a x)", torch.erf, torch.erfinv),
    ("clamp(a x)", lambda v: v.clamp(-1, 1), lambda y: y),
    ("a x / (1 + |a x|)", lambda v: v / (1 + v.abs()), lambda y: y / (1 - y.abs())),
    (
        "a x / sqrt(1 + (a x)^2)",
        lambda v: v * torch.rsqrt(1 + v.square()),
        lambda y: y * torch.rsqrt(1 - y.square()),
    ),
)


def point_wise(f: Function, x: Tensor, precision: Precision) -> Found:
    """Name a function of single numbers: tanh(a x), erf(a x) and the like, with gain and bias."""
    like = torch.ones(x.shape, dtype=precision.dtype, device=x.device)
    high, low = (f(sign * precision.large * like) for sign in (1, -1))
    gain = (high - low) / 2
    bias = (high + low) / 2
    largest = int(gain.abs().flatten().argmax())
    u = numbers(tuple(x.shape), 5, x, precision.dtype)

    def share(size: float) -> Tensor:
        """Return the function of one size, relative to that of infinity; one number's."""
        return ((f(size * like) - bias) / gain).flatten()[largest]

    half = 1.0
    for _ in range(40):
        half *= 0.5 if abs(share(half)) > 0.5 else 1
        half *= 2 if abs(share(half)) < 0.25 else 1
    at = share(half)
    for name, form, inverse in SATURATING:
        slope = float(inverse(at)) / half
        if math.isfinite(slope) and all(
            difference(f(size * u), gain * form(slope * size * u) + bias) <= precision.tolerance
            for size in (half * 2.0**k for k in SIZES)
        ):
            note = f"a = {slope:.4g}"
            return Found(f"point-wise {name}", gain=gain, bias=bias, note=note, precision=precision)
    return Found(NOT_A_NORM, note="a function of single numbers")


def is_softmax(f: Function, x: Tensor, precision: Precision) -> bool:
    """Tell whether a function is a softmax over one of its axes."""
    u = numbers(tuple(x.shape), 6, x, precision.dtype)
    y = f(u)
    return any(
        difference(y, u.softmax(axis)) <= precision.tolerance
        for axis in range(u.dim())
        if u.shape[axis] > 1
    )


def is_in_steps(f: Function, x: Tensor, precision: Precision) -> bool:
    """Tell whether small changes of large inputs leave most of the output as it is.

    That is so for what chooses, such as attention as a function of its queries alone.
    """
    step = max(1e-3, 25 * precision.tolerance)
    u, v = (precision.large * numbers(tuple(x.shape), seed, x, precision.dtype) for seed in (1, 25))
    y = f(u)
    # Beside each output's own size: gains may have many
    moved = (f(u + step * v) - y).abs() > precision.tolerance * y.abs()
    return float(moved.double().mean()) < MOST_STEPS


# ---------------------------------------------------------------------------- what does it average?


def find_layout(f: Function, x: Tensor, precision: Precision) -> Layout | None:
    """Find which numbers a norm averages, by changing the first or the last number of a tensor.

    Returns None where neither changes more than itself, or what changes has no such form.
    """
    u = numbers(tuple(x.shape), 7, x, precision.dtype)
    base = f(u)

    def reached(index: int) -> Tensor:
        moved = u.clone()
        moved.view(-1)[index] += 30
        change = (f(moved) - base).abs()
        return change > 100 * precision.tolerance * base.abs().max()

    for index in (0, -1):
        changed = reached(index)
        if int(changed.sum()) > 1:
            break
    else:
        return None
    averaged = []
    split = None
    for axis, size in enumerate(u.shape):
        others = [a for a in range(u.dim()) if a != axis]
        along = changed.any(dim=others) if others else changed
        at = along.nonzero().flatten()
        if size == 1 or len(at) <= 1:
            continue
        # A gain may be zero: the next divisor of the size
        reach = int(at.max()) + 1 if index == 0 else size - int(at.min())
        block = next(d for d in range(reach, size + 1) if size % d == 0)
        if block == size:
            averaged.append(axis)
        elif split is None:
            split = (axis, block)
        else:
            return None
    layout = Layout(tuple(u.shape), tuple(averaged), split)
    if not averaged and split is None:
        return None
    # Along which other axes do the gains differ? All rows are alike.
    _, groups, count = layout.size
    row = numbers((count,), 8, x, precision.dtype)
    same = layout.tensor(row.expand(layout.size[0], groups, count).contiguous())
    y = f(precision.large * same)
    apart = []
    for axis, size in enumerate(u.shape):
        is_averaged = axis in averaged or (split is not None and split[0] == axis)
        if size > 1 and not is_averaged:
            first = y.select(axis, 0).unsqueeze(axis).expand_as(y)
            if not difference(first, y) <= precision.tolerance:
                apart.append(axis)
    return replace(layout, apart=tuple(apart))


def count_numbers(f: Function, layout: Layout, x: Tensor, precision: Precision) -> int:
    """Count the first numbers of a row that the statistic goes over."""
    u = numbers(layout.size, 9, x, precision.dtype)
    n = layout.size[2]
    base = f(layout.tensor(u))

    def matters(number: int) -> bool:
        moved = u.clone()
        moved[..., number] += 30
        change = layout.rows((f(layout.tensor(moved)) - base).abs())
        change[..., number] = 0
        return bool((change > 100 * precision.tolerance * base.abs().max()).any())

    if matters(n - 1):
        return n
    low, high = 1, n - 1  # how many are counted is in between
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if matters(middle - 1) else (low, middle - 1)
    return low


# ---------------------------------------------------------------------------- which formula is it?


def trial_rows(layout: Layout, x: Tensor, precision: Precision) -> list[Tensor]:
    """Draw rows (R, G, n) on which statistics differ, four times.

    They are normal, have one large channel, long tails, or a mean.
    """
    drawn = []
    for call in range(4):
        rows = numbers(layout.size, 10 + call, x, precision.dtype)
        row = torch.arange(len(rows), device=rows.device)
        kind = (call + row) % 4
        spiked = row[kind == 1]
        rows[spiked, :, (7 * call + spiked) % rows.shape[-1]] *= SPIKE
        rows[kind == 2] = rows[kind == 2] ** 3
        rows[kind == 3] += 3
        drawn.append(rows)
    return drawn


def fit_gain(
    f: Function, layout: Layout, formula: Formula, x: Tensor, precision: Precision
) -> tuple[Tensor, Tensor | None] | None:
    """Fit the gain and the bias with which a formula gives the outputs at large inputs.

    Returns:
        (gain (G, n), bias (G, n) or None), or None if there are no such.
    """
    outputs = []
    normalised = []
    biases = []
    for rows in trial_rows(layout, x, precision):
        up, down = (
            layout.rows(f(layout.tensor(sign * precision.large * rows))) for sign in (1, -1)
        )
        if not (up.isfinite().all() and down.isfinite().all()):
            return None
        # Without eps, all these formulas change their sign with the input's.
        biases.append((up + down) / 2)
        outputs.append((up - down) / 2)
        normalised.append(replace(formula, place=NO_EPS).normalise(precision.large * rows))
    y, z = torch.cat(outputs), torch.cat(normalised)
    bias = torch.cat(biases)
    gain = (y * z).sum(0) / z.square().sum(0).clamp_min(torch.finfo(z.dtype).tiny)
    largest = float(y.abs().max()) + float(bias.abs().max())
    mean_bias = bias.mean(0)
    off = max(float((gain * z - y).abs().max()), float((bias - mean_bias).abs().max()))
    if not off <= precision.tolerance * largest:
        return None
    has_bias = bool(mean_bias.abs().max() > 10 * precision.tolerance * largest)
    return gain.double(), mean_bias.double() if has_bias else None


def fit_eps(f: Function, found: Found, x: Tensor) -> Formula | None:
    """Find eps and its place, from the size of inputs at which it halves the output.

    Returns:
        The formula with eps that gives the outputs at five sizes around that one; None if there is
        no such.
    """
    layout, formula, precision = found.layout, found.formula, found.precision
    gain = found.gain.to(x.device, precision.dtype)
    bias = 0.0 if found.bias is None else found.bias.to(x.device, precision.dtype)
    rows = numbers(layout.size, 20, x, precision.dtype)
    unit = formula.normalise(rows)  # its own statistic is 1
    expected = unit * gain

    def share(size: float) -> float:
        """Return the output at a size, relative to that without eps."""
        y = layout.rows(f(layout.tensor(size * unit))) - bias
        return float((y * expected).sum() / expected.square().sum())

    lowest = SMALLEST if precision is DOUBLE else -60
    low, high = lowest, int(math.log2(precision.large))
    is_halved = share(2.0**low) < 0.5  # False for a NaN
    while is_halved and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share(2.0**middle) < 0.5 else (low, middle)
    candidates = [formula]
    size = 2.0**high
    if is_halved:
        at = share(size)
        below = share(size / 2)
        if not (at > 0 and below > 0):
            return None  # what is small becomes zero
        candidates = [
            replace(formula, eps=size**2 * (1 / at**2 - 1), place=INSIDE),
            replace(formula, eps=size * (1 / at - 1), place=OUTSIDE),
            replace(formula, eps=size / 2 / below, place=CLAMP),
        ]
    for candidate in candidates:
        if holds(f, replace(found, formula=candidate), x, None if is_halved else 1.0):
            return candidate
    return None


def holds(f: Function, found: Found, x: Tensor, size: float | None = None) -> bool:
    """Tell whether a formula gives the outputs at five sizes, and with a channel scaled.

    Args:
        size: in the middle of the five; None: where eps halves the output.
    """
    formula = found.formula
    if size is None:
        size = math.sqrt(formula.eps / 3) if formula.place == INSIDE else formula.eps
        size = size / formula.unit or 1.0
    rows = numbers(found.layout.size, 20, x, found.precision.dtype)
    spiked = rows.clone()
    spiked[..., 0] *= SPIKE
    sizes = SIZES if formula.place != NO_EPS else (-20, -10, 0, 10, 20)
    return all(_gives(f, found, size * 2.0**k * some) for k in sizes for some in (rows, spiked))


def _gives(f: Function, found: Found, rows: Tensor) -> bool:
    """Tell whether a formula gives the output of a function on these rows."""
    y = found.layout.rows(f(found.layout.tensor(rows)))
    off = difference(y, found.apply(rows))
    return off <= 10 * found.precision.tolerance


STATISTICS = ("rms", "l1", "max")


def identify(f: Function, x: Tensor, precision: Precision = DOUBLE) -> Found:
    """Find out which norm a function is.

    Args:
        f: takes a tensor of the shape of x in `precision`'s type, and returns one of that shape.
        x: its shape and device are those of the numbers that f is called on.
    """
    if not forgets_size(f, x, precision):
        return Found(NOT_A_NORM)
    if is_point_wise(f, x, precision):
        return point_wise(f, x, precision)
    if is_softmax(f, x, precision):
        return Found(NOT_A_NORM, note="softmax")
    if is_in_steps(f, x, precision):
        return Found(NOT_A_NORM, note="in steps")
    layout = find_layout(f, x, precision)
    if layout is None:
        return Found(UNKNOWN, precision=precision)
    counted = count_numbers(f, layout, x, precision)
    for statistic in STATISTICS:
        for centred in (True, False):
            formula = Formula(statistic, centred, counted)
            fitted = fit_gain(f, layout, formula, x, precision)
            if fitted is None:
                continue
            gain, bias = fitted
            found = Found("", layout, formula, gain, bias, precision=precision)
            with_eps = fit_eps(f, found, x)
            if with_eps is None:
                note = f"{name_of(formula, layout)} of large inputs, but not of small ones"
                return Found(UNKNOWN, layout, note=note, precision=precision)
            return replace(found, kind=name_of(formula, layout), formula=with_eps)
    return Found(UNKNOWN, layout, precision=precision)


def units(formula: Formula) -> dict[str, float]:
    """Return the other statistics that differ from this one by a factor alone: name -> factor."""
    n = formula.counted
    if formula.statistic == "rms":
        found = {"L2": math.sqrt(n)}
        if formula.centred and n > 1:
            found["n - 1"] = math.sqrt(n / (n - 1))
        return found
    return {"sum": float(n)} if formula.statistic == "l1" else {}


def in_unit(found: Found, unit: float) -> Found:
    """Write the same function with a statistic that is `unit` times as large."""
    formula = found.formula
    factor = unit**2 if formula.place == INSIDE else unit
    new = replace(formula, unit=unit, eps=formula.eps * factor)
    return replace(found, formula=new, gain=found.gain * unit, kind=name_of(new, found.layout))


def name_of(formula: Formula, layout: Layout) -> str:
    """Name a formula, with its groups, its fraction and its axis."""
    unit = next((name for name, value in units(formula).items() if value == formula.unit), "")
    if formula.statistic == "rms":
        name = "LayerNorm" if formula.centred else "RMSNorm"
        if unit == "L2":
            name = "L2"
    else:
        name = {"l1": "L1", "max": "max"}[formula.statistic]
    if name == "LayerNorm" and layout.split is not None:
        name = "GroupNorm"
    said = []
    if formula.centred and name not in ("LayerNorm", "GroupNorm"):
        said.append("centred")
    if formula.statistic == "l1":
        said.append("sum of |x|" if unit == "sum" else "mean of |x|")
    if unit == "n - 1":
        said.append("variance over n - 1")
    n = layout.size[2]
    if formula.counted < n:
        said.append(f"of the first {formula.counted} of {n}")
    if layout.describe():
        said.append(layout.describe())
    return f"{name} ({', '.join(said)})" if said else name
