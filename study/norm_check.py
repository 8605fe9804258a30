"""Check the norms of an arm before it is trained: what else would show after hours, or never.

Each place of the norm plan is looked at as it sits there: with its sum, its output norm, and the
statistic that the place before it hands on; places that are alike, once. Norms with a schedule are
looked at in steps all over the run. RMSNorms of queries and keys are not looked at. Of the model
around the norms nothing is needed, but for resume_check.py, which trains a small one.
"""

import contextlib
import dataclasses
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError, one_line
from common.norm_file import NormFile
from data.shards import read_meta
from model import GPT, GPTConfig
from norm_files import add_norms
from norms import Place
from training.choices import has_compiler, with_vocabulary
from training.config import TrainConfig

from .finding import Finding, Worst, where_it_failed
from .gradient_check import Gradients
from .places import (
    Reached,
    as_it_was,
    distinct,
    formula_of,
    places_of,
    reached,
    row_sizes,
    seeded,
)
from .resume_check import check_resumed
from .traffic import bytes_of_arm, check_countable

EIGHTHS = 8  # a schedule is looked at after each of so many parts of the run
# Errors are shares of a row's RMS. Two spacings of the type: what is rounded more often, or adds up
# in the type itself, has more.
LOW = {
    "bfloat16": (torch.bfloat16, 2 * torch.finfo(torch.bfloat16).eps),
    "float16": (torch.float16, 2 * torch.finfo(torch.float16).eps),
}
# RMS of rows: of a stream like that of a model; of those that are rounded, whose squares overflow
# float16 from 256 on; and of extreme ones.
STREAM = (0.3, 1.0, 3.0)
LOW_SIZES = (0.1, 1.0, 16.0, 256.0)
ROW_SIZES = {"rows of zeros": 0.0, "rows of 1e-4": 1e-4, "rows of 1e4": 1e4}
# Not float16: its gradients are scaled, and steps in which they overflow are skipped.
ROW_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
APART_BOUND = 1e-6
ALONE = "being alone"
COMPILED_BOUND = 1e-5
RUNS = "runs"  # the check that a norm which raises an error fails


class Size(NamedTuple):
    """What a model of the arm takes."""

    parameters: int
    # that the norms and adds of one more block move in training; None if they cannot be counted
    bytes_a_token: float | None
    problem: str  # why they cannot; ""


def check_arm(config: TrainConfig, words: list[str]) -> list[Finding]:
    """Check the norms of an arm.

    Args:
        config: of the arm.
        words: train.py's for it, of which --norm_file is needed.
    """
    findings = check_places(config)
    if any(finding.what == RUNS for finding in findings):  # it raises an error at once
        return findings
    return [*findings, check_compiled(config), check_resumed(config, words)]


def size_of(config: TrainConfig) -> Size:
    """Return what a model of the arm takes. No weights are made, and no GPU is needed."""
    config, _ = with_vocabulary(config, read_meta(config.data_dir))
    with torch.device("meta"):
        parameters = GPT(config).num_params()
    try:
        check_countable(config)
    except UserError as error:
        return Size(parameters, None, str(error))
    shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTConfig)}
    # Fresh: a fork would have this process's threads.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        job = pool.submit(count_bytes, config.type.source, shape, config.batch_size)
        return Size(parameters, *job.result())


def count_bytes(
    source: NormFile | None, shape: dict[str, Any], sequences: int
) -> tuple[float | None, str]:
    """Count, in a process of its own, the bytes a token of a GPTConfig, or say what prevents it."""
    if source is not None:
        add_norms(source)
    config = GPTConfig(**shape)
    try:
        return bytes_of_arm(config, sequences), ""
    except Exception as error:
        is_said = isinstance(error, UserError)
        return None, one_line(str(error)) if is_said else where_it_failed(error, config)


# ---------------------------------------------------------------------------- the places themselves


def check_places(config: TrainConfig) -> list[Finding]:
    """Check gradients, low precision, extreme rows, and that rows are apart, at all places."""
    try:
        checks = PlaceChecks(config)
        for step in steps_of(config.max_iters):
            checks.set_step(step)
            if checks.have_moved():
                checks.check_streams()
                checks.check_low()
                checks.check_sizes()
            checks.collect()
    except UserError:
        raise
    except Exception as error:  # a norm of a file may raise anything
        return [Finding(RUNS, False, where_it_failed(error, config))]
    return checks.findings()


class PlaceChecks:
    """The checks at the places of an arm, at one step of a run after the other."""

    def __init__(self, config: TrainConfig):
        self.max_iters = config.max_iters
        self.step = 0
        self.exact = places_of(config, torch.float64)
        self.plain = places_of(config, torch.float32)
        self.formulas: list[tuple] = []
        self.gradients = Gradients()
        self.apart = Worst("rows apart", APART_BOUND)
        self.low = {name: Worst(name, bound) for name, (_, bound) in LOW.items()}
        self.rows = {name: Finite(name) for name in ROW_SIZES}
        self.seen: dict[str, set] = {}  # check -> kinds of places, so that none is checked twice

    def set_step(self, step: int) -> None:
        self.step = step
        for place in (*self.exact.values(), *self.plain.values()):
            place.set_step(step, self.max_iters)

    def have_moved(self) -> bool:
        """Is any formula another one than when this was last asked?"""
        before = self.formulas
        self.formulas = [formula_of(place) for place in self.exact.values()]
        return self.formulas != before

    def collect(self) -> None:
        """Do what a step does to statistics."""
        for places, dtype in ((self.exact, torch.float64), (self.plain, torch.float32)):
            for _ in reached(places, row_sizes(*STREAM), dtype, collects=True):
                pass

    def distinct(
        self, check: str, places: dict[str, Place], sizes: tuple[float, ...], dtype: torch.dtype
    ) -> Iterator[Reached]:
        """Yield places of a kind that this check has not met."""
        return distinct(places, row_sizes(*sizes), dtype, self.seen.setdefault(check, set()))

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
            for here in self.distinct(name, self.exact, LOW_SIZES, torch.float64):
                error = rounding(here, self.plain[here.name], dtype)
                self.low[name].add(error, f"{here.name}, step {self.step}")

    def check_sizes(self) -> None:
        """Check that small and large rows give finite numbers."""
        for name, size in ROW_SIZES.items():
            for here in self.distinct(name, self.plain, (size,), torch.float32):
                self.rows[name].add(here)

    def findings(self) -> list[Finding]:
        checks = (self.gradients, *self.low.values(), *self.rows.values(), self.apart)
        return [check.finding() for check in checks]


def steps_of(max_iters: int) -> list[int]:
    """Return the steps of a run in which schedules are looked at."""
    eighths = [max_iters * part // EIGHTHS for part in range(1, EIGHTHS + 1)]
    return sorted({1, min(2, max_iters), *filter(None, eighths)})


# -------------------------------------------------------------------------------------------- rows


def autocast(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Compute products in a low precision, as a run does."""
    return torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2)


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


# ---------------------------------------------------------------------------------------- compiled


class Together(nn.Module):
    """Some places, each with its own inputs: one graph."""

    def __init__(self, places: list[Place]):
        super().__init__()
        self.places = nn.ModuleList(places)

    def forward(self, inputs: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> list[Tensor]:
        outputs = [place(*each) for place, each in zip(self.places, inputs, strict=True)]
        return [tensor for y, h, _ in outputs for tensor in (y, h)]


def check_compiled(config: TrainConfig) -> Finding:
    """Compare the places with what torch.compile makes of them: outputs, gradients, statistics."""
    what = "compiled"
    if not has_compiler():
        return Finding(what, True, "not checked: there is no C++ compiler here")
    worst = Worst(what, COMPILED_BOUND)
    try:
        plain, compiled = (trained_once(config, is_compiled) for is_compiled in (False, True))
    except Exception as error:
        return Finding(what, False, where_it_failed(error, config))
    finally:
        torch._dynamo.reset()
    for name, tensor in plain.items():
        worst.add(largest_error(compiled[name].flatten(), tensor.flatten()), name)
    return worst.finding()


def trained_once(config: TrainConfig, is_compiled: bool) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers after a training pass of the distinct places."""
    places = places_of(config, torch.float32)
    for place in places.values():
        place.set_step(1, config.max_iters)
    met = list(distinct(places, row_sizes(*STREAM), torch.float32, set()))
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
