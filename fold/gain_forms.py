"""Find out how a norm stores its gain: as w, as 1 + w, as w / sqrt(l), or not at all.

The gain that the calls of a norm show is compared with its parameters, which have random values
meanwhile. That also tells L2 from RMSNorm: the two differ by a factor sqrt(n) of the gain alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .formulas import Found, Layout, in_unit, units

NO_GAIN = "none"
FIXED = "fixed"
MOST_DEPTH = 1000  # of a block, for w / sqrt(l)


@dataclass(frozen=True)
class GainForm:
    """How a gain is stored.

    Attributes:
        text: "w", "1 + w", "w / sqrt(3)", "none", "fixed" or more.
        name: of the parameter; "" for none.
        offset, scale: the gain is offset + scale * parameter, if there is a parameter.
    """

    text: str
    name: str = ""
    offset: float = 0.0
    scale: float = 1.0

    def stored(self, gain: Tensor) -> Tensor:
        """Return the parameter's values from the gain's."""
        return (gain - self.offset) / self.scale


def one_a_channel(layout: Layout, gain: Tensor, tolerance: float) -> Tensor:
    """Return a gain (G, n) without the axes and groups along which it does not change, flat."""
    repeats, groups, count = layout.size
    full = layout.in_blocks(layout.tensor(gain.expand(repeats, groups, count).contiguous()))
    for axis, size in enumerate(full.shape):
        first = full.narrow(axis, 0, 1)
        if size > 1 and bool(((full - first).abs() <= tolerance * full.abs().max()).all()):
            full = first
    return full.flatten()


def gain_form(found: Found, parameters: Mapping[str, Tensor]) -> tuple[Found, GainForm]:
    """Find how the gain of a norm is stored.

    Args:
        found: of a norm whose formula is known.
        parameters: name -> values with which it was called, random ones.

    Returns:
        The same function, as L2 or a sum where that is what its gain says; and the form.
    """
    tolerance = 10 * found.precision.tolerance
    gain = one_a_channel(found.layout, found.gain, tolerance)
    same = {
        name: value.detach().double().flatten().to(gain.device)
        for name, value in parameters.items()
        if value.numel() == gain.numel()
    }
    ways = {"": 1.0, **units(found.formula)}
    for unit in ways.values():
        form = _plain_form(unit * gain, same, tolerance)
        if form is not None:
            return (in_unit(found, unit) if unit != 1 else found), form
    form = _linear_form(gain, same, tolerance)
    if form is not None:
        return found, form
    if bool(((gain - gain.mean()).abs() <= tolerance * gain.abs().max()).all()):
        return found, GainForm(f"{FIXED} {float(gain.mean()):.6g}")
    return found, GainForm("not known" if parameters else FIXED)


def settled(form: GainForm, found: Found, own: Found) -> GainForm:
    """Return the form of a gain, now that the gain with the norm's own weights is known as well.

    One that other parameters change is not fixed: exp(a) with a number a for all channels.
    """
    tolerance = 10 * found.precision.tolerance * float(own.gain.abs().max())
    if form.text.startswith(FIXED) and bool(((found.gain - own.gain).abs() > tolerance).any()):
        return GainForm("not known")
    return form


def _plain_form(
    gain: Tensor, parameters: Mapping[str, Tensor], tolerance: float
) -> GainForm | None:
    """Return the form of a gain that is w, 1 + w or 1; None for another one."""

    def equal(value: Tensor | float) -> bool:
        return bool(((gain - value).abs() <= tolerance * gain.abs().max()).all())

    for name, value in parameters.items():
        if equal(value):
            return GainForm("w", name)
        if equal(1 + value):
            return GainForm("1 + w", name, offset=1.0)
    return GainForm(NO_GAIN) if equal(1.0) else None


def _linear_form(
    gain: Tensor, parameters: Mapping[str, Tensor], tolerance: float
) -> GainForm | None:
    """Return the form of a gain that is offset + scale * w; None for another one."""
    if gain.numel() <= 2:  # a line goes through any two points
        return None
    for name, value in parameters.items():
        offset, scale = _line(value, gain)
        error = (offset + scale * value - gain).abs()
        if bool((error <= tolerance * gain.abs().max()).all()):
            return GainForm(_words(offset, scale, tolerance), name, offset, scale)
    return None


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Fit y = offset + scale * x by least squares."""
    centred = x - x.mean()
    scale = float((centred * y).sum() / centred.square().sum())
    return float(y.mean() - scale * x.mean()), scale


def _words(offset: float, scale: float, tolerance: float) -> str:
    """Write offset + scale * w."""
    times = "" if abs(abs(scale) - 1) <= tolerance else f"{abs(scale):.6g} "
    if abs(offset) > tolerance:
        return f"{offset:.6g} {'-' if scale < 0 else '+'} {times}w"
    depth = round(1 / scale**2) if scale > 0 else 0
    if 1 < depth <= MOST_DEPTH and math.isclose(scale, depth**-0.5, rel_tol=1e-4):
        return f"w / sqrt({depth})"
    return f"{'-' if scale < 0 else ''}{times}w"


def is_all_one(gain: Tensor) -> bool:
    """Tell whether all gains are 1: folded into what reads the norm, or never trained."""
    return bool(torch.allclose(gain, torch.ones_like(gain), rtol=0, atol=1e-7))


def random_values(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Draw values for a parameter, in its type; bfloat16 and float16 hold them exactly.

    They have many sizes, so that 1 + w needs more digits than 16 bits have.
    """
    numbers = torch.randn(parameter.shape, generator=generator)
    halvings = torch.randint(7, parameter.shape, generator=generator)
    return (numbers * 0.5**halvings).bfloat16().to(parameter)
