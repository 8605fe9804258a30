"""Losses over the learning rate: the best rate, the rate to use, and how large a rate may be."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from evidence.study import Rates

HALF_OCTAVE = 0.5


@dataclass(frozen=True)
class Curve:
    """Losses of one arm in one shape over the learning rate.

    Attributes:
        losses: learning rate -> seed -> loss, infinite where the run diverged.
        first: the seed that every rate has.
    """

    losses: Rates
    first: int

    def at(self, rate: float) -> float:
        """Return the loss at a rate: the mean over its seeds, cleared of the seeds' differences."""
        values = [
            loss - (self._offset(seed) if seed != self.first else 0.0)
            for seed, loss in self.losses[rate].items()
        ]
        return float(np.mean(values))

    def _offset(self, seed: int) -> float:
        """Return how much `seed` lies above the first one, at the rates that both have."""
        pairs = [
            found[seed] - found[self.first]
            for found in self.losses.values()
            if seed in found and math.isfinite(found[seed]) and math.isfinite(found[self.first])
        ]
        return float(np.mean(pairs)) if pairs else 0.0

    @property
    def rates(self) -> list[float]:
        """The rates, from the lowest on."""
        return sorted(self.losses)

    @property
    def best(self) -> float:
        """The rate of the lowest loss; the lowest rate if all runs diverged."""
        return min(self.rates, key=self.at)

    @property
    def neighbours(self) -> list[float]:
        """The rates next to the best one, those that there are."""
        place = self.rates.index(self.best)
        return [self.rates[near] for near in (place - 1, place + 1) if 0 <= near < len(self.rates)]

    @property
    def is_settled(self) -> bool:
        """Does the best rate lie inside the curve?"""
        return len(self.neighbours) == 2

    @property
    def chosen(self) -> float:
        """The rate to use: that of `vertex`, to two digits."""
        return float(f"{self.vertex():.1e}")

    def vertex(self) -> float:
        """Return the vertex of the parabola in log2(rate) through the best rate and its neighbours.

        Within half an octave of the best. The best rate itself where a neighbour is missing or
        diverged.
        """
        best = self.best
        if not self.is_settled or not all(math.isfinite(self.at(near)) for near in self.neighbours):
            return best
        below, above = self.neighbours
        places = np.log2([below / best, 1.0, above / best])
        bend, slope, _ = np.polyfit(places, [self.at(rate) for rate in (below, best, above)], 2)
        if bend <= 0:  # all three are equal
            return best
        shift = float(np.clip(-slope / (2 * bend), -HALF_OCTAVE, HALF_OCTAVE))
        return best * 2**shift

    def tolerance(self, nats: float) -> tuple[float, bool]:
        """Return how many octaves above the best rate the loss stays within `nats` of its minimum.

        Between two rates the loss is interpolated in log2(rate). A run that diverged ends the
        curve at the last rate that did not.

        Returns:
            octaves, and whether the end was seen; if not, it is at least that many.
        """
        best = self.best
        limit = self.at(best) + nats
        last = best
        for rate in self.rates[self.rates.index(best) + 1 :]:
            loss = self.at(rate)
            if not math.isfinite(loss):
                return math.log2(last / best), True
            if loss > limit:
                share = (limit - self.at(last)) / (loss - self.at(last))
                return math.log2(last / best) + share * math.log2(rate / last), True
            last = rate
        return math.log2(last / best), False


def finite(losses: dict[Any, float]) -> dict[Any, float | None]:
    """Return losses as JSON can hold them: None for a run that diverged."""
    return {seed: loss if math.isfinite(loss) else None for seed, loss in losses.items()}


def loss_of(record: dict[str, Any]) -> float:
    """Return the loss of a record, infinite where it is None."""
    return math.inf if record["loss"] is None else record["loss"]


def pooled_sd(groups: list[list[float]]) -> float:
    """Return the SD within groups of finite losses; groups of one say nothing. nan without any."""
    squares, freedom = 0.0, 0
    for group in groups:
        values = np.array([loss for loss in group if math.isfinite(loss)])
        if len(values) > 1:
            squares += float(((values - values.mean()) ** 2).sum())
            freedom += len(values) - 1
    return math.sqrt(squares / freedom) if freedom else math.nan
