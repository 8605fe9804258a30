"""Compare the gradients at a place with finite differences, in float64."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .finding import Finding, Worst
from .places import Reached, as_it_was, seeded

BOUND = 1e-6  # of the error, as a share of the gradient's length
# Steps of finite differences, as shares of a tensor's RMS. |h| has a kink, which a smaller step
# avoids; the smallest error counts.
STEPS = (1e-5, 1e-6, 1e-7)
# For a norm that computes in float32 whatever it is given. With smaller steps the roundings of
# float32 would be seen, not the gradient.
SINGLE_STEPS, SINGLE_BOUND = (1e-3, 3e-4, 1e-4), 1e-3


class Gradients:
    """Compare gradients with finite differences, in float64."""

    def __init__(self) -> None:
        self.double = Worst("gradients", BOUND)
        self.single = Worst("gradients", SINGLE_BOUND)
        self.detaches = False

    def add(self, here: Reached, step: int) -> None:
        held = Held()
        for name, slope in slopes(here, held).items():
            where = f"{here.name}, {name}, step {step}"
            error = slope.smallest_error(STEPS, BOUND)
            if error > BOUND and slope.is_rounded():
                self.single.add(slope.smallest_error(SINGLE_STEPS, SINGLE_BOUND), where)
            else:
                self.double.add(error, where)
        self.detaches |= bool(held.values)

    def finding(self) -> Finding:
        found = self.double.finding()
        notes = []
        if found.is_ok and self.single.where:
            found = self.single.finding()
            notes.append("the norm computes in float32 where it is given float64")
        if self.detaches:
            notes.append("what it detaches is a constant")
        return found._replace(figure="; ".join([found.figure, *notes]))


class Held(TorchFunctionMode):
    """Let `detach` return what it returned in the first pass.

    A norm that detaches says that this is a constant in backward, so it is one in differences too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self.turn: int | None = None  # None in the first pass

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        self.turn = 0
        with self:
            yield

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        # Without gradients it is a forward of torch.autograd.Function, and says nothing.
        if function is not torch.Tensor.detach or not torch.is_grad_enabled():
            return found
        if self.turn is None:
            self.values.append(found.clone())
            return found
        self.turn += 1
        # The first ones alone, should a norm detach more in another pass.
        return self.values[self.turn - 1] if self.turn <= len(self.values) else found


class Slope:
    """The gradient of one tensor, beside finite differences along a random direction.

    Args:
        value: computes the objective.
        tensor: which is moved, and moved back.
        gradient: what backward gave.
        least: errors are shares of the gradient's length, or of this, if it is larger.
    """

    def __init__(self, value: Callable[[], float], tensor: Tensor, gradient: Tensor, least: float):
        draw = torch.Generator().manual_seed(1)
        self.value = value
        self.tensor = tensor
        self.direction = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        self.slope = float((gradient.double() * self.direction).sum())
        self.length = max(float(gradient.double().norm()), least)
        self.size = float(tensor.detach().double().square().mean().sqrt()) or 1.0

    def error(self, share: float) -> float:
        """Return the error with steps of this share of the tensor's RMS."""
        step = share * self.size
        before = self.tensor.detach().clone()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                self.tensor.copy_(before + sign * step * self.direction)
            values.append(self.value())
        with torch.no_grad():
            self.tensor.copy_(before)
        measured = (values[0] - values[1]) / (2 * step)
        error = abs(measured - self.slope) / max(self.length, abs(measured), 1e-30)
        return error if math.isfinite(error) else math.inf

    def smallest_error(self, shares: tuple[float, ...], bound: float) -> float:
        """Return the smallest error with these steps; the first one within the bound will do."""
        errors = []
        for share in shares:
            errors.append(self.error(share))
            if errors[-1] <= bound:
                break
        return min(errors)

    def is_rounded(self) -> bool:
        """Does the error come from roundings? Then it falls as the step grows."""
        return self.smallest_error(SINGLE_STEPS, 0.0) < 0.1 * self.error(STEPS[-1])


def slopes(here: Reached, held: Held) -> dict[str, Slope]:
    """Return the gradient of each tensor at a place, with what it is compared with.

    Args:
        held: a new one, for what the norms detach.
    """
    place = here.place
    names = ("stream", "sublayer", "statistic")
    tensors = {
        name: tensor.clone().requires_grad_()
        for name, tensor in zip(names, here.inputs, strict=True)
        if tensor is not None
    }
    weights: list[Tensor] = []  # of the outputs in the objective

    def objective() -> Tensor:
        y, h, handed_on = place(*(tensors.get(name) for name in names))
        if handed_on is tensors.get("statistic"):
            handed_on = None  # as it came
        # A statistic that is handed on without a gradient is a constant.
        outputs = [one for one in (y, h, handed_on) if one is not None and one.requires_grad]
        if not weights:
            draw = torch.Generator().manual_seed(2)
            weights.extend(
                torch.randn(one.shape, generator=draw, dtype=torch.float64) for one in outputs
            )
        return sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True))

    def value() -> float:
        with as_it_was(place), seeded(), held.replayed():
            return objective().item()

    parameters = dict(place.named_parameters())
    moved = {**tensors, **parameters}
    with as_it_was(place), seeded():
        with held:
            first = objective()
        found = torch.autograd.grad(first, [*moved.values()], allow_unused=True)
    gradients = dict(zip(moved, found, strict=True))
    if gradients.get("statistic") is None:
        # Where a norm sends no gradient into the statistic of another one, it is meant so.
        gradients.pop("statistic", None)
    # Differences are no better than the roundings of the whole sum.
    least = 1e-4 * max(float(one.norm()) for one in gradients.values() if one is not None)
    return {
        name: Slope(
            value, moved[name], torch.zeros_like(moved[name]) if one is None else one, least
        )
        for name, one in gradients.items()
    }
