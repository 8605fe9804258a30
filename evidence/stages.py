"""The stages of a study: which runs they want, and what they conclude (repro/which_norm.toml)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from evidence.study import Plan, Rates, Results, Shape, Wanted

HALF_OCTAVE = 0.5


# ----------------------------------------------------------------------------- learning-rate curves


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


class RateStage:
    """Stage 1: learning-rate curves of all arms in all shapes."""

    name = "rates"

    def __init__(self, plan: Plan):
        self.plan = plan
        self.rules: dict[str, Any] = plan.plan["rates"]
        self.first, self.second = self.rules["seeds"]

    def curve(self, results: Results, shape: Shape, arm: str) -> Curve:
        """Return what has been found of one arm, at every rate with the first seed."""
        losses: Rates = {}
        for rate in self._all_rates():
            for seed in (self.first, self.second):
                result = results.of(self._run(shape, arm, rate, seed))
                if result is not None:
                    losses.setdefault(rate, {})[seed] = result.loss
        return Curve(
            {rate: found for rate, found in losses.items() if self.first in found}, self.first
        )

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted by now, finished or not."""
        runs: list[Wanted] = []
        for shape in reversed(self.plan.shapes):  # the slower shape first
            for arm in self.plan.arms:
                runs += self._of_arm(results, shape, arm)
        return runs

    def _of_arm(self, results: Results, shape: Shape, arm: str) -> list[Wanted]:
        """Return the runs of one arm: the grid, then what follows from it."""
        grid = [self._run(shape, arm, rate, self.first) for rate in self.plan.rates]
        if results.missing(grid):
            return grid
        curve = self.curve(results, shape, arm)
        more = self._extension(curve)
        if more:
            return grid + [self._run(shape, arm, rate, self.first) for rate in more]
        best_two = sorted(curve.rates, key=lambda rate: curve.losses[rate][self.first])[:2]
        runs = grid + [self._run(shape, arm, rate, self.second) for rate in best_two]
        if arm in self.rules["own_initialisation"]:
            for seed in (self.first, self.second):
                runs.append(self._run(shape, arm, curve.best, seed, norm_recipe="common"))
        return runs

    def _extension(self, curve: Curve) -> list[float]:
        """Return the next rate beyond the curve, if its best lies at an end or it goes on above."""
        grid = self.plan.rates
        limit = 2 ** self.rules["extensions"]
        lowest, highest = curve.rates[0], curve.rates[-1]
        if curve.best == lowest and lowest > grid[0] / limit * 1.01:
            return [lowest / 2]
        _, is_seen = curve.tolerance(self.rules["tolerance"])
        if not is_seen and highest < grid[-1] * limit / 1.01:
            return [highest * 2]
        return []

    def _all_rates(self) -> list[float]:
        """Return every rate that the rules can come to."""
        grid = self.plan.rates
        octaves = range(1, self.rules["extensions"] + 1)
        below = [grid[0] / 2**octave for octave in octaves]
        above = [grid[-1] * 2**octave for octave in octaves]
        return sorted([*below, *grid, *above])

    def _run(self, shape: Shape, arm: str, rate: float, seed: int, **keys: Any) -> Wanted:
        words = self.plan.words(arm, shape, learning_rate=rate, **keys)
        return Wanted(self.name, shape.name, arm, words, seed)

    def selection(self, results: Results) -> dict[str, Any]:
        """Return what the stage concludes: rates by shape and arm, and the ranking of the arms."""
        shapes: dict[str, Any] = {}
        for shape in self.plan.shapes:
            shapes[shape.name] = {
                arm: self._conclusion(self.curve(results, shape, arm)) for arm in self.plan.arms
            }
        return {"study": self.plan.study, "shapes": shapes, "ranking": self._ranking(shapes)}

    def _conclusion(self, curve: Curve) -> dict[str, Any]:
        octaves, is_seen = curve.tolerance(self.rules["tolerance"])
        return {
            "rate": curve.chosen,
            "best": curve.best,
            "settled": curve.is_settled,
            "loss": curve.at(curve.best),
            "tolerance": octaves,
            "tolerance_seen": is_seen,
            "losses": {f"{rate:g}": curve.losses[rate] for rate in curve.rates},
        }

    def _ranking(self, shapes: dict[str, Any]) -> list[str]:
        """Return the arms but the baseline by mean rank over the shapes, the best first."""
        others = [arm for arm in self.plan.arms if arm != self.plan.baseline]
        ranks = dict.fromkeys(others, 0)
        for found in shapes.values():
            for rank, arm in enumerate(sorted(others, key=lambda arm: found[arm]["loss"])):
                ranks[arm] += rank
        first = shapes[self.plan.shapes[0].name]
        return sorted(others, key=lambda arm: (ranks[arm], first[arm]["loss"]))
