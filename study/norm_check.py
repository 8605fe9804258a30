"""Check the norms of an arm before it is trained: what else would show after hours, or never.

Each place of the norm plan is looked at as it sits there: with its sum, its output norm, and the
statistic that the place before it hands on; places that are alike, once. Norms with a schedule are
looked at in steps all over the run. The model around them is not needed, but for `resumed`, which
trains a small one twice.
"""

import contextlib
import dataclasses
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.errors import ConfigError, one_line
from common.norm_file import KEY as NORM_FILE
from data.shards import read_meta
from evidence.runs import Run
from model import GPT
from norm_files import line_of
from norm_plan import NormPlan
from norms import Place
from training.checkpoint import LAST, read_checkpoint
from training.choices import has_compiler, with_vocabulary
from training.config import TrainConfig

from .starts import EMBEDDINGS, place_names

ROOT = Path(__file__).resolve().parents[1]
BATCH, TOKENS = 3, 4  # of the streams that the places read
EIGHTHS = 8  # a schedule is looked at after each of so many parts of the run

# Errors are shares: of a gradient's length, of a row's RMS.
GRADIENT_BOUND = 1e-6
# Steps of finite differences, as shares of a tensor's RMS. |h| has a kink, which a smaller step
# avoids; the smallest error counts.
STEPS = (1e-5, 1e-6, 1e-7)
# For a norm that computes in float32 whatever it is given. With smaller steps the roundings of
# float32 would be seen, not the gradient.
SINGLE_STEPS, SINGLE_BOUND = (1e-3, 3e-4, 1e-4), 1e-3
# Two spacings of the type: what is rounded more often, or adds up in the type itself, has more.
LOW = {
    "bfloat16": (torch.bfloat16, 2 * torch.finfo(torch.bfloat16).eps),
    "float16": (torch.float16, 2 * torch.finfo(torch.float16).eps),
}
# RMS of the rows that are rounded to these types. Squares overflow float16 from 256 on.
LOW_SIZES = (0.1, 1.0, 16.0, 256.0)
ROW_SIZES = {"rows of zeros": 0.0, "rows of 1e-4": 1e-4, "rows of 1e4": 1e4}
# Not float16: its gradients are scaled, and steps in which they overflow are skipped.
ROW_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
APART_BOUND = 1e-6
ALONE = "being alone"
COMPILED_BOUND = 1e-5


class Finding(NamedTuple):
    """What one check found."""

    what: str
    is_ok: bool
    figure: str  # the number, with its bound; or why there is none


class Size(NamedTuple):
    """What a model of the arm takes."""

    parameters: int


def check_arm(config: TrainConfig, words: list[str]) -> list[Finding]:
    """Check the norms of an arm.

    Args:
        config: of the arm.
        words: train.py's for it, of which --norm_file is needed.
    """
    checks = (check_places, check_compiled, lambda one: [check_resumed(one, words)])
    found = []
    for check in checks:
        found += check(config)
    return found


def size_of(config: TrainConfig) -> Size:
    """Return what a model of the arm takes. No weights are made."""
    config, _ = with_vocabulary(config, read_meta(config.data_dir))
    with torch.device("meta"):
        return Size(GPT(config).num_params())


# ------------------------------------------------------------------------------ places, and streams


class Reached(NamedTuple):
    """A place, and what reaches it."""

    name: str
    place: Place
    x: Tensor  # residual stream (B, T, C)
    delta: Tensor | None  # output of the sublayer before (B, T, C)
    inv_rms: Tensor | None  # the statistic of the place before (B, T, 1)

    @property
    def inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.x, self.delta, self.inv_rms

    def to(self, dtype: torch.dtype) -> "Reached":
        """Round the stream to `dtype`, and the statistic to what belongs to it."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._replace(
            x=self.x.to(dtype),
            delta=None if self.delta is None else self.delta.to(dtype),
            inv_rms=None if self.inv_rms is None else self.inv_rms.to(wide),
        )

    def kind(self) -> tuple:
        """Return what is the same of places that are alike: classes, numbers and what comes in."""
        parts = []
        for part in self.place.modules():
            numbers = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str)}
            # A statistic or a schedule that has moved makes another formula.
            state = tuple(float(one.double().sum()) for one in part.buffers(recurse=False))
            parts.append((type(part), tuple(sorted(numbers.items())), state))
        return (*parts, self.delta is None, self.inv_rms is None)


def places_of(config: TrainConfig, dtype: torch.dtype) -> dict[str, Place]:
    """Build every place of an arm, by name, in training mode. Its parameters have this type."""
    config = dataclasses.replace(config, kernels="torch")
    plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
    with seeded():
        places = dict(zip(place_names(config.n_layer), plan.places(), strict=True))
        norm_e = plan.embedding_norm()
    if norm_e is not None:
        places = {EMBEDDINGS: norm_e, **places}
    return {name: place.to(dtype).train() for name, place in places.items()}


def reached(
    places: dict[str, Place], sizes: Tensor, dtype: torch.dtype, collects: bool = False
) -> Iterator[Reached]:
    """Yield every place with a stream that may reach it.

    Args:
        sizes: RMS of each row (B, T, 1).
        collects: do running statistics take part, as in a step? Else nothing moves.
    """
    draw = torch.Generator().manual_seed(0)
    inv_rms = None
    is_first = True
    for name, place in places.items():
        shape = (*sizes.shape[:2], channels_of(place))
        x, delta = (
            (sizes * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
            for _ in range(2)
        )
        is_sum = not (is_first or name == EMBEDDINGS)
        here = Reached(name, place, x, delta if is_sum else None, inv_rms if is_sum else None)
        yield here
        with torch.no_grad(), contextlib.nullcontext() if collects else as_it_was(place):
            _, _, inv_rms = place(*here.inputs)
        is_first = name == EMBEDDINGS


def channels_of(place: Place) -> int:
    return place.norm.channels


def row_sizes(*sizes: float) -> Tensor:
    """Return one size for each row (B, T, 1), in turn."""
    rows = [sizes[number % len(sizes)] for number in range(BATCH * TOKENS)]
    return torch.tensor(rows, dtype=torch.float64).view(BATCH, TOKENS, 1)


# Of the rows of a stream like that of a model
STREAM = row_sizes(0.3, 1.0, 3.0)


@contextlib.contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo at the end what forward passes move: buffers, and attributes of a norm of a file."""
    saved = []
    for part in module.modules():
        attributes = dict(vars(part))
        buffers = dict(part._buffers)
        own = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        kept = [
            (one, one.detach().clone())
            for one in (*buffers.values(), *own.values())
            if one is not None
        ]
        saved.append((part, attributes, buffers, kept))
    try:
        yield
    finally:
        with torch.no_grad():
            for part, attributes, buffers, kept in saved:
                vars(part).clear()
                vars(part).update(attributes)
                part._buffers.update(buffers)
                for tensor, before in kept:
                    tensor.detach().copy_(before)


class Worst:
    """The largest error of one check, and where it is."""

    def __init__(self, what: str, bound: float):
        self.what = what
        self.bound = bound
        self.error = 0.0
        self.where = ""

    def add(self, error: float, where: str) -> None:
        if error > self.error or not self.where:
            self.error, self.where = error, where

    def finding(self) -> Finding:
        figure = f"largest error {self.error:.1e} ({self.where}), at most {self.bound:.1e}"
        return Finding(self.what, self.error <= self.bound, figure)


# ---------------------------------------------------------------------------- the places themselves


def check_places(config: TrainConfig) -> list[Finding]:
    """Check gradients, low precision, extreme rows, and that rows are apart, at all places."""
    checks = PlaceChecks(config)
    try:
        for step in steps_of(config.max_iters):
            checks.set_step(step)
            checks.check_streams()
            checks.check_low()
            checks.check_sizes()
            checks.collect()
    except Exception as error:  # a norm of a file may raise anything
        return [Finding("runs", False, where_it_failed(error, config))]
    return checks.findings()


class PlaceChecks:
    """The checks at the places of an arm, at one step of a run after the other."""

    def __init__(self, config: TrainConfig):
        self.max_iters = config.max_iters
        self.step = 0
        self.exact = places_of(config, torch.float64)
        self.plain = places_of(config, torch.float32)
        self.gradients = Gradients()
        self.apart = Worst("rows apart", APART_BOUND)
        self.low = {name: Worst(name, bound) for name, (_, bound) in LOW.items()}
        self.rows = {name: Finite(name) for name in ROW_SIZES}
        self.seen: dict[str, set] = {}  # check -> kinds of places, so that none is checked twice

    def set_step(self, step: int) -> None:
        self.step = step
        for place in (*self.exact.values(), *self.plain.values()):
            place.set_step(step, self.max_iters)

    def collect(self) -> None:
        """Do what a step does to statistics."""
        for places, dtype in ((self.exact, torch.float64), (self.plain, torch.float32)):
            for _ in reached(places, STREAM, dtype, collects=True):
                pass

    def distinct(
        self, check: str, places: dict[str, Place], sizes: Tensor, dtype: torch.dtype
    ) -> Iterator[Reached]:
        return distinct(places, sizes, dtype, self.seen.setdefault(check, set()))

    def check_streams(self) -> None:
        """Check gradients, and that rows are apart, in float64."""
        for here in self.distinct("streams", self.exact, STREAM, torch.float64):
            self.gradients.add(here, self.step)
            mixed = mixing(here)
            causes = [cause for cause, error in mixed.items() if error > APART_BOUND]
            # A row alone has nothing of all the others: that says more only if nothing else does.
            named = [cause for cause in causes if cause != ALONE] or causes
            by = f", by {', '.join(named)}" if named else ""
            self.apart.add(max(mixed.values()), f"{here.name}{by}")

    def check_low(self) -> None:
        """Check what is lost in 16 bits."""
        for name, (dtype, _) in LOW.items():
            for here in self.distinct(name, self.exact, row_sizes(*LOW_SIZES), torch.float64):
                error = rounding(here, self.plain[here.name], dtype)
                self.low[name].add(error, f"{here.name}, step {self.step}")

    def check_sizes(self) -> None:
        """Check that small and large rows give finite numbers."""
        for name, size in ROW_SIZES.items():
            for here in self.distinct(name, self.plain, row_sizes(size), torch.float32):
                self.rows[name].add(here)

    def findings(self) -> list[Finding]:
        checks = (self.gradients, *self.low.values(), *self.rows.values(), self.apart)
        return [check.finding() for check in checks]


def where_it_failed(error: Exception, config: TrainConfig) -> str:
    """Say in a line what a norm raised."""
    source = config.type.source
    where = f"{source.path}:{line_of(error, source)}: " if source else ""
    return one_line(f"{where}{type(error).__name__}: {error}")


def steps_of(max_iters: int) -> list[int]:
    """Return the steps of a run in which schedules are looked at."""
    eighths = [max_iters * part // EIGHTHS for part in range(1, EIGHTHS + 1)]
    return sorted({1, min(2, max_iters), *filter(None, eighths)})


def distinct(
    places: dict[str, Place], sizes: Tensor, dtype: torch.dtype, seen: set
) -> Iterator[Reached]:
    """Yield the first place of each kind that is not in `seen`. It is as it was afterwards."""
    for here in reached(places, sizes, dtype):
        kind = here.kind()
        if kind not in seen:
            seen.add(kind)
            with as_it_was(here.place):
                yield here


# ---------------------------------------------------------------------------------------- gradients


class Gradients:
    """Compare gradients with finite differences, in float64."""

    def __init__(self) -> None:
        self.double = Worst("gradients", GRADIENT_BOUND)
        self.single = Worst("gradients", SINGLE_BOUND)
        self.detaches = False

    def add(self, here: Reached, step: int) -> None:
        held = Held()
        for name, slope in slopes(here, held).items():
            where = f"{here.name}, {name}, step {step}"
            error = slope.smallest_error(STEPS, GRADIENT_BOUND)
            if error > GRADIENT_BOUND and slope.is_rounded():
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
        error = abs(measured - self.slope) / max(self.length, abs(measured))
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


def autocast(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Compute products in a low precision, as a run does."""
    return torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Let a norm draw the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


# -------------------------------------------------------------------------------------------- rows


def rounding(here: Reached, plain: Place, dtype: torch.dtype) -> float:
    """Return the largest error of a row at a place in a low precision, beside float64.

    Rows that the type cannot hold do not count.

    Args:
        here: with the float64 place.
        plain: the same place with float32 parameters, as a run has it.
    """
    low = here.to(dtype)
    with torch.no_grad(), as_it_was(plain), as_it_was(here.place), seeded():
        exact, sum_, _ = here.place(*low.to(torch.float64).inputs)
        with autocast(dtype):
            given, _, _ = plain(*low.inputs)
    fits = torch.maximum(exact.abs().amax(-1), sum_.abs().amax(-1)) < torch.finfo(dtype).max / 2
    return largest_error(given[fits], exact[fits])


def largest_error(given: Tensor, exact: Tensor) -> float:
    """Return the largest RMS of the error of a row (..., C), as a share of the row's RMS."""
    if not exact.numel():
        return 0.0
    error = (given.double() - exact.double()).square().mean(-1).sqrt()
    size = exact.double().square().mean(-1).sqrt()
    share = float(torch.where(error == 0, 0, error / size.clamp(min=1e-12)).max())
    return math.inf if math.isnan(share) else share


class Finite:
    """Count numbers that are not finite, forward and backward."""

    def __init__(self, what: str):
        self.what = what
        self.worst = ""

    def add(self, here: Reached) -> None:
        for name, dtype in ROW_TYPES.items():
            for part, tensor in passes(here.to(dtype)).items():
                bad = int((~tensor.isfinite()).sum())
                if bad and not self.worst:
                    self.worst = (
                        f"{bad} of {tensor.numel()} numbers of {part} are not finite "
                        f"({here.name}, {name}), at most 0"
                    )

    def finding(self) -> Finding:
        figure = self.worst or f"0 numbers not finite, in {' and '.join(ROW_TYPES)}, at most 0"
        return Finding(self.what, not self.worst, figure)


def passes(here: Reached) -> dict[str, Tensor]:
    """Return outputs and gradients of a forward and a backward pass of a place, by name."""
    place = here.place
    names = ("the gradient of the stream", "the gradient of the sublayer")
    inputs = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in zip(names, (here.x, here.delta), strict=True)
        if tensor is not None
    }
    moved = inputs | {f"the gradient of {name}": one for name, one in place.named_parameters()}
    with as_it_was(place), seeded():
        with autocast(here.x.dtype):
            outputs = place(*(inputs.get(name) for name in names), here.inv_rms)
        found = {
            name: one
            for name, one in zip(("the output", "the sum", "the statistic"), outputs, strict=True)
            if one is not None
        }
        draw = torch.Generator().manual_seed(2)
        carried = [one for one in found.values() if one.requires_grad]
        weights = [torch.randn(one.shape, generator=draw).to(one.dtype) for one in carried]
        gradients = torch.autograd.grad(carried, [*moved.values()], weights, allow_unused=True)
    found = {name: one.detach() for name, one in found.items()}
    return found | {
        name: one for name, one in zip(moved, gradients, strict=True) if one is not None
    }


def mixing(here: Reached) -> dict[str, float]:
    """Return by how much a row changes, as a share of its RMS, by what is not in it.

    In eval mode, where running statistics stand still.
    """
    place = here.place
    draw = torch.Generator().manual_seed(3)

    def others(keep: tuple[slice, slice]) -> Reached:
        """Return the streams with other rows, but for those that are kept."""
        changed = []
        for tensor in (here.x, here.delta):
            if tensor is not None:
                other = 3 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
                other[keep] = tensor[keep]
                tensor = other
            changed.append(tensor)
        return here._replace(x=changed[0], delta=changed[1])

    def read(one: Reached) -> Tensor:
        return place(*one.inputs)[0]

    every = slice(None)
    kept = {
        "other sequences": (slice(0, 1), every),
        "later tokens": (every, slice(0, 2)),
        "earlier tokens": (every, slice(2, None)),
    }
    found = {}
    with torch.no_grad(), as_it_was(place), seeded():
        place.eval()
        try:
            whole = read(here)
            for what, rows in kept.items():
                found[what] = largest_error(read(others(rows))[rows], whole[rows])
            found["calls before it"] = largest_error(read(here), whole)
            last = (slice(-1, None), slice(-1, None))
            alone = [None if one is None else one[last] for one in here.inputs]
            found[ALONE] = largest_error(place(*alone)[0], whole[last])
        finally:
            place.train()
    return found


# ---------------------------------------------------------------------------- compiled, and resumed


class Together(nn.Module):
    """Some places, each with its own inputs: one graph."""

    def __init__(self, places: list[Place]):
        super().__init__()
        self.places = nn.ModuleList(places)

    def forward(self, inputs: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> list[Tensor]:
        outputs = [place(*each) for place, each in zip(self.places, inputs, strict=True)]
        return [tensor for y, h, _ in outputs for tensor in (y, h)]


def check_compiled(config: TrainConfig) -> list[Finding]:
    """Compare the places with what torch.compile makes of them: outputs, gradients, statistics."""
    what = "compiled"
    if not has_compiler():
        return [Finding(what, True, "not checked: there is no C++ compiler here")]
    worst = Worst(what, COMPILED_BOUND)
    try:
        plain, compiled = (trained_once(config, is_compiled) for is_compiled in (False, True))
    except Exception as error:
        return [Finding(what, False, where_it_failed(error, config))]
    finally:
        torch._dynamo.reset()
    for name, tensor in plain.items():
        worst.add(largest_error(compiled[name].flatten(), tensor.flatten()), name)
    return [worst.finding()]


def trained_once(config: TrainConfig, is_compiled: bool) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers after a training pass of the distinct places."""
    places = places_of(config, torch.float32)
    for place in places.values():
        place.set_step(1, config.max_iters)
    met = list(distinct(places, STREAM, torch.float32, set()))
    model = Together([here.place for here in met])
    inputs = [here.inputs for here in met]
    for x, delta, _ in inputs:
        for tensor in (x, delta):
            if tensor is not None:
                tensor.requires_grad_()
    forward = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
    with seeded():
        outputs = forward(inputs)
    draw = torch.Generator().manual_seed(2)
    weights = [torch.randn(one.shape, generator=draw) for one in outputs]
    sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True)).backward()
    found = {}
    for number, here in enumerate(met):
        found[f"{here.name}, output"] = outputs[2 * number].detach()
        for name, tensor in zip(("stream", "sublayer"), here.inputs, strict=False):
            if tensor is not None:
                found[f"{here.name}, gradient of the {name}"] = tensor.grad
        for name, parameter in here.place.named_parameters():
            if parameter.grad is not None:
                found[f"{here.name}, gradient of {name}"] = parameter.grad
        for name, buffer in here.place.named_buffers():
            found[f"{here.name}, {name}"] = buffer
    return found


# The run that is resumed: small, and seconds long
SMALL = {
    "n_head": 2,
    "n_kv_head": 0,
    "head_dim": 0,
    "n_inner": 0,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "warmup_iters": 10,
    "log_interval": 1,
    "eval_tokens": 256,
    "sample_tokens": 0,
    "hellaswag": "off",
    "full_val": False,
    "tracker": "off",
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "parallel": "ddp",
    "init_from": "",
    "resume": "auto",
}
LARGEST_RATE = 3e-3  # a model this small may diverge with more
# Steps: should a run be over before it can be stopped, the next length is taken.
LENGTHS = (100, 400, 1600)
MOST_SECONDS = 600.0
POLL = 0.005  # seconds


def check_resumed(config: TrainConfig, words: list[str]) -> Finding:
    """Train a small model of the arm, stop it on the way, go on, and compare it with one run.

    Args:
        words: train.py's for the arm, of which --norm_file is needed.
    """
    what = "resumed"
    named = [word for word in words if word.startswith(f"--{NORM_FILE}=")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for length in LENGTHS:
            settings = folder / f"{length}.py"
            settings.write_text(as_config_file(small(config, length)))
            command = [sys.executable, str(ROOT / "train.py"), str(settings), *named]
            stopped, whole = folder / f"stopped-{length}", folder / f"whole-{length}"
            problem, step = train_and_stop([*command, f"--out_dir={stopped}"], stopped)
            if problem or step < length:
                break
        else:
            return Finding(what, True, f"not checked: {length} steps were over before the stop")
        for out in () if problem else (stopped, whole):
            problem = problem or train([*command, f"--out_dir={out}"])
        if problem:
            return Finding(what, False, problem)
        difference = difference_of(stopped, whole)
    figure = f"stopped after step {step} of {length}: {difference or 'the same'}, to the bit"
    return Finding(what, not difference, figure)


def small(config: TrainConfig, length: int) -> TrainConfig:
    """Return the arm at a small shape, for a run of so many steps."""
    rate = min(config.learning_rate, LARGEST_RATE)
    return dataclasses.replace(
        config,
        **SMALL,
        n_layer=fewest_blocks(config),
        n_embd=math.lcm(32, config.norm_groups),
        max_iters=length,
        eval_interval=length,
        checkpoint_interval=length // 2,
        learning_rate=rate,
        min_lr=min(config.min_lr, rate),
    )


def fewest_blocks(config: TrainConfig) -> int:
    """Return 2, or as many blocks as the arm has if its plan or its numbers are for so many."""
    try:
        NormPlan(config, 2, config.n_embd, config.bias)
    except ConfigError:
        return config.n_layer
    return 2


def as_config_file(config: TrainConfig) -> str:
    """Return all keys as a config file has them."""
    return "".join(f"{name} = {value!r}\n" for name, value in vars(config).items())


def train_and_stop(command: list[str], folder: Path) -> tuple[str, int]:
    """Start a run, and stop it after its first checkpoint, in the middle.

    Returns:
        What went wrong, "" for nothing; and the step after which it stopped.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            began = time.monotonic()
            while child.poll() is None and not (folder / LAST).exists():
                if time.monotonic() > began + MOST_SECONDS:
                    return f"no checkpoint after {MOST_SECONDS:g} s", 0
                time.sleep(POLL)
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            code = child.wait(MOST_SECONDS)
        finally:
            child.kill()
            child.wait()
        output.seek(0)
        if code:
            return last_error(output.read()), 0
    return "", Run(folder).steps[-1]["step"]


def train(command: list[str]) -> str:
    """Train to the end. Returns what went wrong, "" for nothing."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    return last_error(done.stdout) if done.returncode else ""


def last_error(output: bytes) -> str:
    """Return the last line that a run printed."""
    lines = output.decode(errors="replace").strip().splitlines()
    return one_line(f"train.py fails: {lines[-1] if lines else 'it says nothing'}")


def difference_of(resumed: Path, whole: Path) -> str:
    """Say in what two finished runs differ, "" if in nothing: logged losses, weights, moments."""
    losses = [
        {event["step"]: event["loss"] for event in Run(out).steps} for out in (resumed, whole)
    ]
    apart = [step for step in losses[1] if losses[0].get(step) != losses[1][step]]
    if apart:
        largest = max(abs(losses[0].get(step, math.inf) - losses[1][step]) for step in apart)
        return (
            f"losses differ from step {apart[0]} on, by at most {largest:.1e}; they must be equal"
        )
    states = [read_checkpoint(out / LAST) for out in (resumed, whole)]
    tensors = [tensors_of({key: one[key] for key in ("model", "optimizer")}) for one in states]
    for name, tensor in tensors[1].items():
        if not torch.equal(tensors[0][name], tensor):
            size = float((tensors[0][name] - tensor).abs().max())
            return f"{name} differs by {size:.1e}; it must be equal"
    return ""


def tensors_of(state: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors in nested dicts, by their path."""
    if isinstance(state, Tensor):
        return {name: state}
    if not isinstance(state, dict):
        return {}
    parts = (tensors_of(value, f"{name}.{key}".lstrip(".")) for key, value in state.items())
    return {path: tensor for part in parts for path, tensor in part.items()}
