"""Find out in which order a norm rounds in 16 bits, and how wide its statistic is.

The bits of its output are compared with those of each order. Orders differ in a good part of the
outputs; the same order in another way of summing in 1 of 1,000. So the order is known where one
order alone gives all but SAME of the bits.

In a model in float32 outputs are compared with those of the formula in float64: casts to 16 bits
within a norm show there.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .formulas import (
    CLAMP,
    INSIDE,
    NO_EPS,
    OUTSIDE,
    Formula,
    Found,
    Function,
    difference,
    numbers,
)
from .gain_forms import GainForm

WIDTHS = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *WIDTHS, torch.float64)
DOUBLE_EPS = torch.finfo(torch.float64).eps  # torch's RMSNorm has its type's where none is given
SAME_EPS = 0.03  # of outputs in 16 bits where eps halves them, largest difference
EXACT = 1e-5  # largest difference of outputs in float32 from those in float64
MORE = "rounds more than float32 does"
SAME = 0.01  # largest share of outputs that may differ by their last bit
CALLS = 4
BEFORE = "gain before the rounding"
AFTER = "gain after the rounding"


@dataclass(frozen=True)
class Rounding:
    """The order of rounding of a norm in one type.

    Attributes:
        statistic: "float32", or how much of it is in 16 bits; "not known".
        gain: BEFORE or AFTER, "" where there is no gain; "not known".
        offset: for 1 + w, the type of the sum.
        result: type of the output, where it is another than the input's.
    """

    statistic: str
    gain: str = ""
    offset: str = ""
    result: str = ""

    def __str__(self) -> str:
        if self.statistic == "not known":
            return self.statistic
        offset = f"1 + w in {self.offset}" if self.offset else ""
        if self.offset == "not known":
            offset = "type of 1 + w not known"
        gain = "rounding not known" if self.gain == "not known" else self.gain
        said = [f"statistic in {self.statistic}", gain, offset]
        said.append(f"returns {self.result}" if self.result else "")
        return ", ".join(filter(None, said))


NOT_KNOWN = Rounding("not known", "not known")


def find_rounding(
    f: Function,
    found: Found,
    form: GainForm,
    dtype: torch.dtype,
    device: torch.device,
) -> Rounding:
    """Find the order of rounding of a norm.

    Args:
        f: the norm in `dtype`, with the gain and the bias of `found`; they are exact in `dtype`.
        found: its formula.
        form: how its gain is stored.
        dtype: bfloat16 or float16.
    """
    if found.formula is None or found.formula.statistic != "rms":
        return NOT_KNOWN
    weight = None
    if form.name:
        weight = form.stored(found.gain).to(device, dtype)
    elif form.text != "none":
        return NOT_KNOWN
    bias = None if found.bias is None else found.bias.to(device, dtype)
    wrong: dict[Rounding, int] = defaultdict(int)
    total = 0
    result = ""
    like = torch.empty(0, device=device)
    for call in range(CALLS):
        rows = numbers(found.layout.size, 30 + call, like, torch.float64).to(dtype)
        output = f(found.layout.tensor(rows))
        result = "" if output.dtype == dtype else str(output.dtype).removeprefix("torch.")
        y = found.layout.rows(output).to(dtype)
        total += y.numel()
        best: dict[Rounding, int] = {}
        for order, expected in orders(rows, weight, bias, found.formula, form):
            off = int((expected != y).sum())
            best[order] = min(off, best.get(order, off))
        for order, off in best.items():
            wrong[order] += off
    ranked = sorted(wrong, key=wrong.__getitem__)
    good = [order for order in ranked if wrong[order] <= SAME * total]
    if not good:
        return NOT_KNOWN
    first = good[0]
    # Two orders give these bits: what they do not share is not known.
    same = [order for order in good if wrong[order] <= wrong[first] + SAME * total / 10]
    parts = {
        name: getattr(first, name)
        if len({getattr(order, name) for order in same}) == 1
        else "not known"
        for name in ("statistic", "gain", "offset")
    }
    return Rounding(**parts, result=result)


def orders(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    formula: Formula,
    form: GainForm,
) -> Iterator[tuple[Rounding, Tensor]]:
    """Compute a norm in each order of rounding.

    Args:
        x: rows (R, G, n) in 16 bits.
        weight, bias: (G, n) in 16 bits, or None.
    """
    dtype = x.dtype
    gains: list[tuple[str, Tensor | None]] = [("", None)]
    if weight is not None:
        wide = form.offset + form.scale * weight.float()
        narrow = form.offset + form.scale * weight
        gains = [("", wide), ("", narrow.float())]
        if form.offset:
            gains = [("float32", wide), ("16 bits", narrow.float())]
    for statistic, z in normalised(x, formula):
        for offset, gain in gains:
            for how, y in _with_gain(z, gain, bias, dtype):
                yield Rounding(statistic, "" if gain is None else how, offset), y.to(dtype)


def _with_gain(
    z: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Apply a gain in float32 and a bias in 16 bits, before and after the rounding."""
    for how, start in ((BEFORE, z.float()), (AFTER, z.to(dtype).float())):
        y = start if gain is None else start * gain
        if bias is None:
            yield how, y
        else:
            yield how, y + bias.float()
            yield how, y.to(dtype).float() + bias.float()


def normalised(x: Tensor, formula: Formula) -> Iterator[tuple[str, Tensor]]:
    """Normalise rows in 16 bits, with a statistic of each width; yields (width, rows)."""
    wide = x.float()
    centred = formula.centre(wide)
    divisor = formula.divisor(centred)
    yield "float32", centred / divisor
    yield "float32", centred * (1 / divisor)
    # torch's own kernels have the mean in float32, and x in 16 bits until it is multiplied.
    yield "float32, factor in 16 bits", x_of(formula, x) * (1 / divisor).to(x.dtype)
    narrow = x_of(formula, x)
    counted = narrow[..., : formula.counted]
    square = counted.square().mean(-1, keepdim=True)  # rounded twice
    summed = counted.float().square().to(x.dtype).float().mean(-1, keepdim=True)
    if formula.unit != 1:
        square = square * formula.unit**2
        summed = summed * formula.unit**2
    yield "16 bits", narrow * _inverse(square, formula)
    yield "16 bits", narrow / _root(square, formula)
    yield "float32 of squares and mean in 16 bits", centred * _inverse(square.float(), formula)
    # The same of numbers that were centred in float32
    exact = centred[..., : formula.counted].to(x.dtype).square().mean(-1, keepdim=True)
    exact = exact.float() * formula.unit**2
    yield "float32 of squares and mean in 16 bits", centred * _inverse(exact, formula)
    wide_mean = centred[..., : formula.counted].square().mean(-1, keepdim=True)
    yield "float32 of squares in 16 bits", centred * _inverse(summed, formula)
    mean = wide_mean.to(x.dtype).float() * formula.unit**2
    yield "float32, then mean in 16 bits", centred * _inverse(mean, formula)


def x_of(formula: Formula, x: Tensor) -> Tensor:
    """Centre rows in their own type, if the norm centres."""
    return x - x.mean(-1, keepdim=True) if formula.centred else x


def _root(square: Tensor, formula: Formula) -> Tensor:
    if formula.place == INSIDE:
        return (square + formula.eps).sqrt()
    if formula.place == OUTSIDE:
        return square.sqrt() + formula.eps
    if formula.place == CLAMP:
        return square.sqrt().clamp_min(formula.eps)
    return square.sqrt()


def _inverse(square: Tensor, formula: Formula) -> Tensor:
    if formula.place == INSIDE:
        return torch.rsqrt(square + formula.eps)
    return 1 / _root(square, formula)


# -------------------------------------------------------------------------- in the model's own type


def type_of_eps(f: Function, found: Found, dtype: torch.dtype, like: Tensor) -> torch.dtype | None:
    """Return the type whose eps a norm has, if a copy in float64 has that of float64; else None.

    Args:
        f: the norm in `dtype`, with the gain and the bias of `found`.
        like: a tensor of the shape of its input.
    """
    formula = found.formula
    if formula.place == NO_EPS or abs(formula.eps - DOUBLE_EPS) > 1e-3 * DOUBLE_EPS:
        return None
    layout = found.layout
    unit = replace(formula, place=NO_EPS).normalise(numbers(layout.size, 20, like, torch.float64))
    for kind in FLOATS:
        eps = torch.finfo(kind).eps
        size = eps**0.5 if formula.place == INSIDE else eps / 2
        rows = (size / formula.unit * unit).to(dtype)
        y = layout.rows(f(layout.tensor(rows))).double()
        expected = replace(found, formula=replace(formula, eps=eps)).apply(rows.double())
        if difference(y, expected) <= SAME_EPS:
            is_number = kind == torch.float64 != dtype  # written as one
            return None if is_number else kind
    return None


def rounding_in_float32(f: Function, found: Found, like: Tensor) -> str:
    """Say what a norm of a model in float32 rounds to 16 bits; "" for nothing.

    Args:
        f: the norm in float32, with the gain and the bias of `found`.
        like: a tensor of the shape of its input.
    """
    layout = found.layout
    rows = numbers(layout.size, 40, like, torch.float64).float()
    y = layout.rows(f(layout.tensor(rows))).double()
    expected = found.apply(rows.double())
    tolerance = max(EXACT, found.precision.tolerance)
    off = difference(y, expected)
    if off <= tolerance:
        return ""
    for dtype in WIDTHS:
        name = str(dtype).removeprefix("torch.")
        rounded = replace(found, gain=found.gain.to(dtype).double())
        if difference(y, found.apply(rows.to(dtype).double())) <= tolerance:
            return f"input rounded to {name}"
        if difference(y, rounded.apply(rows.double())) <= tolerance:
            return f"gain rounded to {name}"
        if bool((y == y.to(dtype)).all()):
            return f"output rounded to {name}"
    bias = 0.0 if found.bias is None else found.bias.to(y)
    y, expected = y - bias, expected - bias
    # A statistic that is rounded multiplies the whole row.
    factor = (y * expected).sum(-1, keepdim=True) / expected.square().sum(-1, keepdim=True)
    if difference(y, factor * expected) <= tolerance:
        return f"statistic in 16 bits (off by {off:.0e})"
    return f"{MORE} (off by {off:.0e})"
