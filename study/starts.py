"""The scale at which an arm starts: RMS of what each norm gives, beside the baseline's.

A norm that starts 1.25 times as large as RMSNorm trains as RMSNorm with gains of 1.25 would, which
is another learning rate and another start. A verdict of such an arm speaks of both at once.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from data.shards import read_meta
from load import init_from
from model import GPT
from norm_types import NORM_TYPES
from norms import NoNorm, Place
from training.choices import with_vocabulary
from training.config import TrainConfig
from training.dataloader import Blocks

from .arms import own_values
from .declaration import JudgedArm
from .places import EMBEDDINGS, as_it_was, place_names

OUTPUT = " output"  # ends the name of an output norm
SEQUENCES, TOKENS = 4, 128  # of the batch, at most
# A ratio between these is the baseline's scale.
LEAST, MOST = 0.95, 1.05
ROUNDS = 5  # in which a gain is looked for: one is enough where the gain multiplies the ratio
LEAST_SLOPE = 0.05  # of log ratio over log gain; a norm below it does not take its gain from there


class Start(NamedTuple):
    """What a norm gives before the first step, root of the mean square over tokens and channels."""

    place: str
    rms: float
    baseline_rms: float

    @property
    def ratio(self) -> float:
        return self.rms / self.baseline_rms if self.baseline_rms else math.inf

    @property
    def is_matched(self) -> bool:
        """Is it the baseline's scale?"""
        return is_near(self.ratio)

    @property
    def is_input(self) -> bool:
        """Is it of what a sublayer or the head reads? A single `initial_gain` acts there alone."""
        return not self.place.endswith(OUTPUT) and self.place != EMBEDDINGS


def starts(config: TrainConfig, baseline: TrainConfig) -> list[Start]:
    """Compare an untrained arm with the untrained baseline, of the same seed, on the same batch.

    Places where one of the two has no norm are left out.
    """
    own, other = (
        output_rms(one) for one in (config, dataclasses.replace(baseline, seed=config.seed))
    )
    return [Start(place, own[place], other[place]) for place in own if place in other]


def matched_gain(found: list[Start], config: TrainConfig) -> float | None:
    """Return the `initial_gain` with which the median of the ratios is 1.

    Returns:
        None if it is 1 within 5 %, as no one gain would bring single places nearer; if that gain
        would take more places from the baseline's scale than it brings there; if the arm has gains
        of its own for each place; or if its norms do not take theirs from `initial_gain`.
    """
    inputs = [start for start in found if start.is_input]
    if not inputs or isinstance(config.initial_gain, tuple) or not config.has_gain:
        return None
    ratio = median_ratio(inputs)
    if is_near(ratio) or not (config.initial_gain > 0 and 0 < ratio < math.inf):
        return None
    # In logarithms, where a scale-invariant norm is a line of slope 1: a secant finds the zero.
    last, size = math.log(config.initial_gain), math.log(ratio)
    slope = 1.0
    for _ in range(ROUNDS):
        gain = last - size / slope
        rms = output_rms(dataclasses.replace(config, initial_gain=math.exp(gain)))
        moved = [start._replace(rms=rms[start.place]) for start in inputs]
        ratio = median_ratio(moved)
        if is_near(ratio):
            return math.exp(gain) if n_matched(moved) >= n_matched(inputs) else None
        if not 0 < ratio < math.inf:
            break
        slope = (math.log(ratio) - size) / (gain - last)
        last, size = gain, math.log(ratio)
        if slope < LEAST_SLOPE:
            break
    return None


def may_be_matched(judged: JudgedArm) -> bool:
    """May an arm have a second one, with a matched start?

    House norm types start as their authors wrote them, and are never changed. An arm with several
    initial gains has a choice already.
    """
    values = [own_values(option.arm) for option in judged.options]
    row = NORM_TYPES.get(values[0]["norm_type"])
    is_of_house = row is not None and row.source is None
    gains = {each.get("initial_gain") for each in values}
    return not is_of_house and len(gains) == 1


def why_unmatched(found: list[Start]) -> str:
    """Say why no gain was found for an arm; "" if it starts at the baseline's scale everywhere."""
    inputs = [start for start in found if start.is_input]
    if all(start.is_matched for start in inputs):
        return ""
    if is_near(median_ratio(inputs)):
        return "not matched: most places start at the baseline's scale, and one gain moves them all"
    return "not matched: no one initial_gain brings them to the baseline's scale"


def is_near(ratio: float) -> bool:
    """Is it the ratio of a scale that counts as the baseline's?"""
    return LEAST <= ratio <= MOST


def median_ratio(found: list[Start]) -> float:
    return statistics.median(start.ratio for start in found)


def n_matched(found: list[Start]) -> int:
    """Count the places at the baseline's scale."""
    return sum(start.is_matched for start in found)


@torch.no_grad()
def output_rms(config: TrainConfig) -> dict[str, float]:
    """Return the RMS of what each norm of an untrained model gives, by place.

    The model is as in the forward pass of the first step, but for dropout.
    """
    config, meta = with_vocabulary(config, read_meta(config.data_dir))
    # A folded block would apply the scale elsewhere.
    plain = {"dropout": 0.0, "recompute": False, "coupled_impl": "scale", "kernels": "torch"}
    config = dataclasses.replace(config, **plain)
    model = GPT(config, config.seed)
    if config.init_from:
        init_from(model, config.init_from, meta)
    model.train()
    model.set_step(1, config.max_iters)
    rms: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for name, place in named_places(model):
            stack.enter_context(place.register_forward_hook(noting(name, rms)))
        model.hidden(some_tokens(config, model.n_vocab))
    return rms


def named_places(model: GPT) -> Iterator[tuple[str, Place]]:
    if model.norm_e is not None:
        yield EMBEDDINGS, model.norm_e
    yield from zip(place_names(model.config.n_layer), model.places(), strict=True)


def noting(name: str, rms: dict[str, float]):
    """Return a forward hook of a place that notes the RMS of its norms' outputs in `rms`."""

    def note(place: Place, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        y, _, _ = outputs
        if place.output is not None:
            # Once more, because in the pass it may have been part of a function that adds.
            with as_it_was(place.output):
                normed, _ = place.output(inputs[1])
            rms[name + OUTPUT] = size_of(normed)
        if not isinstance(place.reader or place.norm, NoNorm):
            rms[name] = size_of(y)

    return note


def size_of(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def some_tokens(config: TrainConfig, n_vocab: int) -> Tensor:
    """Return token ids (B, T) of the training data, from all over it."""
    blocks = Blocks(config.data_dir, "train", config.block_size, n_vocab)
    indices = range(0, len(blocks), math.ceil(len(blocks) / SEQUENCES))
    x, _ = blocks.batch([*indices])
    return x[:, :TOKENS]
