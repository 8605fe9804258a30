"""The places of an arm without the model around them, and streams that may reach them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from norm_plan import NormPlan
from norms import Place
from training.config import TrainConfig

BATCH, TOKENS = 3, 4  # of the streams
EMBEDDINGS = "embeddings"


def place_names(n_layer: int) -> list[str]:
    """Return what the 2L + 1 places of a model are called, in the order of its plan."""
    blocks = [f"block {block} {part}" for block in range(n_layer) for part in ("attention", "MLP")]
    return [*blocks, "final"]


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
        """Return what is the same of places that are alike: their formula, and what comes in."""
        return (formula_of(self.place), self.delta is None, self.inv_rms is None)


def formula_of(place: Place) -> tuple:
    """Return what a place computes with, but for parameters: classes, numbers, statistics."""
    parts = []
    for part in place.modules():
        numbers = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str)}
        # A statistic or a schedule that has moved makes another formula.
        state = tuple(float(one.double().sum()) for one in tensors_of(part))
        parts.append((type(part), tuple(sorted(numbers.items())), state))
    return tuple(parts)


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
        shape = (*sizes.shape[:2], place.norm.channels)
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


def row_sizes(*sizes: float) -> Tensor:
    """Return one size for each row (B, T, 1), in turn."""
    rows = [sizes[number % len(sizes)] for number in range(BATCH * TOKENS)]
    return torch.tensor(rows, dtype=torch.float64).view(BATCH, TOKENS, 1)


@contextlib.contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo at the end what forward passes move: buffers, and attributes of a norm of a file."""
    saved = [State.of(part) for part in module.modules()]
    try:
        yield
    finally:
        for state in saved:
            state.restore()


class State(NamedTuple):
    """What a module without its children was."""

    part: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    values: list[tuple[Tensor, Tensor]]  # each tensor, and a copy of it

    @classmethod
    def of(cls, part: nn.Module) -> "State":
        values = [(tensor, tensor.detach().clone()) for tensor in tensors_of(part)]
        return cls(part, dict(vars(part)), dict(part._buffers), values)

    @torch.no_grad()
    def restore(self) -> None:
        vars(self.part).clear()
        vars(self.part).update(self.attributes)
        self.part._buffers.update(self.buffers)
        for tensor, before in self.values:
            tensor.detach().copy_(before)


def tensors_of(part: nn.Module) -> list[Tensor]:
    """Return buffers, and tensors in attributes, of a module without its children."""
    found = [*part._buffers.values(), *vars(part).values()]
    return [one for one in found if isinstance(one, Tensor)]


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


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Let a norm draw the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield
