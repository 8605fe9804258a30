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

    def mean(self, rate: float) -> float:
        """Return the plain mean of the losses at a rate over its seeds."""
        return float(np.mean(list(self.losses[rate].values())))

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
        parabola = self._parabola()
        if parabola is None:
            return self.best
        return self.best * 2 ** self._lowest(parabola)

    @property
    def highest_finite(self) -> float | None:
        """The highest rate at which no run diverged; None if all did."""
        return max((rate for rate in self.rates if math.isfinite(self.at(rate))), default=None)

    def regret(self, sd: float, draws: int = 1000) -> tuple[float, float]:
        """Return what choosing the rate by so few seeds costs: mean and 95th percentile, in nats.

        A parametric bootstrap: the losses are drawn again around those that were seen, a rate is
        chosen from them, and its loss is read off the parabola through the best rate and its
        neighbours. (nan, nan) without such a parabola.

        Args:
            sd: of a loss over seeds.
            draws: number of repetitions.
        """
        parabola = self._parabola()
        if parabola is None or not math.isfinite(sd):
            return math.nan, math.nan
        random = np.random.RandomState(0)
        costs = []
        for _ in range(draws):
            drawn = {
                rate: {
                    self.first: self.at(rate) + sd / len(found) ** 0.5 * random.standard_normal()
                }
                for rate, found in self.losses.items()
            }
            place = math.log2(Curve(drawn, self.first).chosen / self.best)
            costs.append(np.polyval(parabola, place) - np.polyval(parabola, self._lowest(parabola)))
        return float(np.mean(costs)), float(np.quantile(costs, 0.95))

    def _parabola(self) -> np.ndarray | None:
        """Return the parabola of the loss over log2(rate / best), None without a vertex."""
        if not self.is_settled or not all(math.isfinite(self.at(near)) for near in self.neighbours):
            return None
        below, above = self.neighbours
        places = np.log2([below / self.best, 1.0, above / self.best])
        found = np.polyfit(places, [self.at(rate) for rate in (below, self.best, above)], 2)
        return found if found[0] > 0 else None

    def _lowest(self, parabola: np.ndarray) -> float:
        """Return where a parabola is lowest, within half an octave of the best rate."""
        bend, slope, _ = parabola
        return float(np.clip(-slope / (2 * bend), -HALF_OCTAVE, HALF_OCTAVE))

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
    return {seed: finite_or_none(loss) for seed, loss in losses.items()}


def finite_pair(pair: tuple[float, float]) -> list[float] | None:
    """Return two numbers as JSON can hold them: None if they are not finite."""
    return list(pair) if all(map(math.isfinite, pair)) else None


def finite_or_none(loss: float) -> float | None:
    """Return a loss as JSON can hold it: None if the run diverged."""
    return loss if math.isfinite(loss) else None


def mean_of(record: dict[str, Any]) -> float:
    """Return the mean over the seeds of a record, infinite where it is None."""
    return math.inf if record["mean_of_seeds"] is None else record["mean_of_seeds"]


def pooled_sd(groups: list[list[float]]) -> float:
    """Return the SD within groups of finite losses; groups of one say nothing. nan without any."""
    squares, freedom = 0.0, 0
    for group in groups:
        values = np.array([loss for loss in group if math.isfinite(loss)])
        if len(values) > 1:
            squares += float(((values - values.mean()) ** 2).sum())
            freedom += len(values) - 1
    return math.sqrt(squares / freedom) if freedom else math.nan
