"""The stages of a study: which runs they want, and what they conclude (repro/which_norm.toml).

Each stage is made of the plan, what the stages before it concluded (stage -> what its JSON file
holds), and the scale's number of steps and of warm-up steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import UserError
from common.stats import Estimate
from evidence.families import judge, power
from evidence.runs import Run
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


Conclusions = dict[str, dict[str, Any]]


class Stage:
    """What all stages have in common."""

    name = ""

    def __init__(self, plan: Plan, before: Conclusions, steps: int, warmup: int):
        self.plan = plan
        self.before = before
        self.steps = steps
        self.warmup = warmup
        self.rules: dict[str, Any] = plan.plan[self.name]

    def run(self, shape: Shape, arm: str, seed: int, length: float = 1.0, **keys: Any) -> Wanted:
        """Return a run of this stage, of `length` times the steps, with these further keys."""
        if length != 1:
            keys["max_iters"] = round(length * self.steps)
            keys["warmup_iters"] = round(length * self.warmup)
        return Wanted(self.name, shape.name, arm, self.plan.words(arm, shape, **keys), seed)

    def rate(self, shape: Shape, arm: str) -> float:
        """Return the learning rate that stage 1 chose."""
        return self.before["rates"]["shapes"][shape.name][arm]["rate"]

    def losses(self, results: Results, runs: list[Wanted]) -> list[float]:
        """Return the losses of finished runs."""
        return [results.of(run).loss for run in runs]


class RateStage(Stage):
    """Stage 1: learning-rate curves of all arms in all shapes."""

    name = "rates"

    def __init__(self, *words: Any):
        super().__init__(*words)
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
        return self.run(shape, arm, seed, learning_rate=rate, **keys)

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return rates by shape and arm, the SD over seeds, and the ranking of the arms."""
        shapes: dict[str, Any] = {}
        for shape in self.plan.shapes:
            shapes[shape.name] = {
                arm: self._of_curve(results, shape, arm) for arm in self.plan.arms
            }
        sd = {
            shape.name: pooled_sd(
                [
                    list(found.values())
                    for arm in self.plan.arms
                    for found in self.curve(results, shape, arm).losses.values()
                ]
            )
            for shape in self.plan.shapes
        }
        return {"shapes": shapes, "sd": sd, "ranking": self._ranking(shapes)}

    def _of_curve(self, results: Results, shape: Shape, arm: str) -> dict[str, Any]:
        """Return what a curve says, and what the common initialisation gives at its best rate."""
        curve = self.curve(results, shape, arm)
        octaves, is_seen = curve.tolerance(self.rules["tolerance"])
        common = {}
        if arm in self.rules["own_initialisation"]:
            for seed in (self.first, self.second):
                run = self._run(shape, arm, curve.best, seed, norm_recipe="common")
                common[seed] = results.of(run).loss
        return {
            "rate": curve.chosen,
            "best": curve.best,
            "settled": curve.is_settled,
            "loss": curve.at(curve.best) if math.isfinite(curve.at(curve.best)) else None,
            "tolerance": octaves,
            "tolerance_seen": is_seen,
            "losses": {f"{rate:g}": finite(curve.losses[rate]) for rate in curve.rates},
            "common_initialisation": finite(common),
        }

    def _ranking(self, shapes: dict[str, Any]) -> list[str]:
        """Return the arms but the baseline by mean rank over the shapes, the best first."""
        others = [arm for arm in self.plan.arms if arm != self.plan.baseline]
        ranks = dict.fromkeys(others, 0)
        for found in shapes.values():
            for rank, arm in enumerate(sorted(others, key=lambda arm: loss_of(found[arm]))):
                ranks[arm] += rank
        first = shapes[self.plan.shapes[0].name]
        return sorted(others, key=lambda arm: (ranks[arm], loss_of(first[arm])))


def finite(losses: dict[int, float]) -> dict[int, float | None]:
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


# ------------------------------------------------------------------------------- margin and verdict


class MarginStage(Stage):
    """Stage 2: what tokens are worth to the baseline, and how much seeds differ."""

    name = "margin"

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted, finished or not."""
        return [
            run
            for shape in reversed(self.plan.shapes)
            for length in self.rules["lengths"]
            for run in self._of_length(shape, length)
        ]

    def _of_length(self, shape: Shape, length: float) -> list[Wanted]:
        arm = self.plan.baseline
        rate = self.rate(shape, arm)
        return [
            self.run(shape, arm, seed, length, learning_rate=rate) for seed in self.rules["seeds"]
        ]

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return margin, slopes, SDs of a paired difference, and how many arms have the power."""
        losses = {
            shape.name: {
                length: self.losses(results, self._of_length(shape, length))
                for length in self.rules["lengths"]
            }
            for shape in self.plan.shapes
        }
        slopes = {name: slope(found) for name, found in losses.items()}
        margin = float(np.mean([*slopes.values()])) * math.log1p(self.rules["share"])
        sd = {
            name: math.sqrt(2) * max(self.before["rates"]["sd"][name], pooled_sd([*found.values()]))
            for name, found in losses.items()
        }
        verdict = self.plan.plan["verdict"]
        chances = {
            arms: power(margin, [*sd.values()], len(verdict["seeds"]), verdict["level"] / arms)
            for arms in range(1, verdict["arms"] + 1)
        }
        enough = [arms for arms, chance in chances.items() if chance >= verdict["power"]]
        return {
            "losses": losses,
            "slopes": slopes,
            "margin": margin,
            "sd_of_differences": sd,
            "power": chances,
            "arms": max(enough, default=0),
        }


def slope(losses: dict[float, list[float]]) -> float:
    """Return the nats that e times as many tokens buy, from the shortest to the longest run."""
    shortest, longest = min(losses), max(losses)
    fall = np.mean(losses[shortest]) - np.mean(losses[longest])
    return float(fall / math.log(longest / shortest))


class VerdictStage(Stage):
    """Stage 3: the best arms against the baseline."""

    name = "verdict"

    def arms(self) -> list[str]:
        """Return the arms that are judged. Raises UserError if the power is too low for any."""
        count = self.before["margin"]["arms"]
        if not count:
            raise UserError(
                f"stage verdict does not start: with {len(self.rules['seeds'])} seeds not even one "
                f"arm has a power of {self.rules['power']}: declare a plan with more seeds"
            )
        return self.before["rates"]["ranking"][:count]

    def _of_arm(self, shape: Shape, arm: str) -> list[Wanted]:
        rate = self.rate(shape, arm)
        planned = len(self.rules["seeds"])
        return [
            self.run(shape, arm, seed, learning_rate=rate, planned_seeds=planned)
            for seed in self.rules["seeds"]
        ]

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted, finished or not."""
        return [
            run
            for shape in reversed(self.plan.shapes)
            for arm in (self.plan.baseline, *self.arms())
            for run in self._of_arm(shape, arm)
        ]

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return the verdict of each arm."""
        margin = self.before["margin"]["margin"]
        runs = {
            arm: {shape.name: self._of_arm(shape, arm) for shape in self.plan.shapes}
            for arm in (self.plan.baseline, *self.arms())
        }
        losses = {
            arm: {shape: np.array(self.losses(results, its)) for shape, its in shapes.items()}
            for arm, shapes in runs.items()
        }
        differences = {
            arm: {shape: losses[arm][shape] - losses[self.plan.baseline][shape] for shape in shapes}
            for arm, shapes in runs.items()
            if arm != self.plan.baseline
        }
        diverged = {
            arm: sum(int((~np.isfinite(found)).sum()) for found in shapes.values())
            for arm, shapes in losses.items()
        }
        # An arm of which runs diverged is not judged on the rest; its divergence is the result.
        judged = {arm: found for arm, found in differences.items() if not diverged[arm]}
        claims = judge(judged, margin)
        level = self.rules["level"]
        return {
            "margin": margin,
            "diverged": diverged,
            "arms": {
                arm: {
                    "direction": claim.direction(level),
                    "margin": claim.against_margin(level),
                    "p_below_margin": claim.p_below,
                    "p_better": claim.p_better,
                    "p_worse": claim.p_worse,
                    "p_beyond_margin": claim.p_beyond,
                    "shapes": {
                        shape: self._of_shape(claim.estimates[shape], results, runs, arm, shape)
                        for shape in claim.estimates
                    },
                }
                for arm, claim in claims.items()
            },
        }

    def _of_shape(
        self, estimate: Estimate, results: Results, runs: dict, arm: str, shape: str
    ) -> dict[str, Any]:
        """Return the numbers of one arm in one shape."""
        low, high = estimate.interval()
        pairs = [
            (results.of(run).run, results.of(base).run)
            for run, base in zip(runs[arm][shape], runs[self.plan.baseline][shape], strict=True)
        ]
        return {
            "difference": estimate.mean,
            "low": low,
            "high": high,
            "se": estimate.se,
            "tokens": math.expm1(-estimate.mean / self.before["margin"]["slopes"][shape]),
            "without_a_document": without_a_document(pairs),
        }


def without_a_document(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Return the lowest and the highest mean difference when one document is left out."""
    sums, tokens = 0.0, None
    for run, base in pairs:
        here, there = run.events_of("val_full")[-1], base.events_of("val_full")[-1]
        if here["document_tokens"] != there["document_tokens"]:
            raise UserError(f"{run.name} and {base.name}: their val splits differ")
        sums = sums + np.array(here["document_nats"]) - np.array(there["document_nats"])
        tokens = np.array(here["document_tokens"])
    left = (sums.sum() - sums) / (tokens.sum() - tokens) / len(pairs)
    return [float(left.min()), float(left.max())]
