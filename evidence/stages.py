"""The stages of a study: which runs they want, and what they conclude (repro/which_norm.toml).

Each stage is made of the plan, what the stages before it concluded (stage -> what its JSON file
holds), and the scale's number of steps and of warm-up steps.
"""

import math
from typing import Any

import numpy as np

from common.errors import UserError
from common.stats import Estimate, paired
from evidence.comparison import Pair, without_a_document
from evidence.curves import Curve, finite, finite_or_none, finite_pair, mean_of, pooled_sd
from evidence.families import judge, power
from evidence.study import Plan, Rates, Results, Shape, Wanted

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

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length) as planned, without extensions."""
        raise NotImplementedError

    def losses(self, results: Results, runs: list[Wanted]) -> list[float]:
        """Return the losses of finished runs."""
        return [results.of(run).loss for run in runs]


class InitStage(Stage):
    """Stage 0, for a scale without init_std: the baseline at several, each at its best rate."""

    name = "initialisation"

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted by now, finished or not."""
        return [
            run
            for shape in reversed(self.plan.shapes)
            for init_std in self.rules["init_std"]
            for run in self._of(results, shape, init_std)
        ]

    def _of(self, results: Results, shape: Shape, init_std: float) -> list[Wanted]:
        """Return the runs of one init_std: the grid, then what lies beyond an end that is best."""
        grid = [self._run(shape, init_std, rate) for rate in self.plan.rates]
        if results.missing(grid):
            return grid
        rates = self.curve(results, shape, init_std)
        low, high = rates.rates[0], rates.rates[-1]
        if rates.best == low and low / 2 in all_rates(self.plan):
            return [*grid, self._run(shape, init_std, low / 2)]
        if rates.best == high and high * 2 in all_rates(self.plan):
            return [*grid, self._run(shape, init_std, high * 2)]
        return grid

    def curve(self, results: Results, shape: Shape, init_std: float) -> Curve:
        """Return what has been found of one init_std."""
        seed = self.rules["seed"]
        losses: Rates = {}
        for rate in all_rates(self.plan):
            result = results.of(self._run(shape, init_std, rate))
            if result is not None:
                losses[rate] = {seed: result.loss}
        return Curve(losses, seed)

    def _run(self, shape: Shape, init_std: float, rate: float) -> Wanted:
        seed = self.rules["seed"]
        return self.run(shape, self.plan.baseline, seed, init_std=init_std, learning_rate=rate)

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        count = len(self.rules["init_std"]) * len(self.plan.rates)
        return {shape.name: [(count, 1.0)] for shape in self.plan.shapes}

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return the best init_std of each shape, and the loss of each at its best rate."""
        losses = {
            shape.name: {
                init_std: (curve := self.curve(results, shape, init_std)).at(curve.best)
                for init_std in self.rules["init_std"]
            }
            for shape in self.plan.shapes
        }
        return {
            "init_std": {name: min(found, key=found.get) for name, found in losses.items()},
            "losses": {name: finite(found) for name, found in losses.items()},
        }


def all_rates(plan: Plan) -> list[float]:
    """Return every learning rate that the rules can come to, from the lowest on."""
    octaves = range(1, plan.plan["rates"]["extensions"] + 1)
    below = [plan.rates[0] / 2**octave for octave in octaves]
    above = [plan.rates[-1] * 2**octave for octave in octaves]
    return sorted([*below, *plan.rates, *above])


class RateStage(Stage):
    """Stage 1: learning-rate curves of all arms in all shapes."""

    name = "rates"

    def __init__(self, *words: Any):
        super().__init__(*words)
        self.first, self.second = self.rules["seeds"]

    def curve(self, results: Results, shape: Shape, arm: str) -> Curve:
        """Return what has been found of one arm, at every rate with the first seed."""
        losses: Rates = {}
        for rate in all_rates(self.plan):
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
        lowest, highest = curve.rates[0], curve.rates[-1]
        if curve.best == lowest and lowest / 2 in all_rates(self.plan):
            return [lowest / 2]
        _, is_seen = curve.tolerance(self.rules["tolerance"])
        if not is_seen and highest * 2 in all_rates(self.plan):
            return [highest * 2]
        return []

    def _run(self, shape: Shape, arm: str, rate: float, seed: int, **keys: Any) -> Wanted:
        return self.run(shape, arm, seed, learning_rate=rate, **keys)

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length); the second seed is at two rates."""
        count = len(self.plan.arms) * (len(self.plan.rates) + 2)
        count += 2 * len(self.rules["own_initialisation"])
        return {shape.name: [(count, 1.0)] for shape in self.plan.shapes}

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return rates by shape and arm, the SD over seeds, and the ranking of the arms."""
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
        shapes = {
            shape.name: {
                arm: self._of_curve(results, shape, arm, sd[shape.name]) for arm in self.plan.arms
            }
            for shape in self.plan.shapes
        }
        return {"shapes": shapes, "sd": sd, "ranking": self._ranking(shapes)}

    def _of_curve(self, results: Results, shape: Shape, arm: str, sd: float) -> dict[str, Any]:
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
            "loss": finite_or_none(curve.at(curve.best)),
            "mean_of_seeds": finite_or_none(curve.mean(curve.best)),
            "tolerance": octaves,
            "tolerance_seen": is_seen,
            "highest_finite": curve.highest_finite,
            "regret": finite_pair(curve.regret(sd)),
            "losses": {f"{rate:g}": finite(curve.losses[rate]) for rate in curve.rates},
            "common_initialisation": finite(common),
        }

    def _ranking(self, shapes: dict[str, Any]) -> list[str]:
        """Return the arms but the baseline by mean rank over the shapes, the best first.

        Ranked by the plain mean over the seeds at the best rate.
        """
        others = [arm for arm in self.plan.arms if arm != self.plan.baseline]
        ranks = dict.fromkeys(others, 0)
        for found in shapes.values():
            for rank, arm in enumerate(sorted(others, key=lambda arm: mean_of(found[arm]))):
                ranks[arm] += rank
        first = shapes[self.plan.shapes[0].name]
        return sorted(others, key=lambda arm: (ranks[arm], mean_of(first[arm])))


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

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        count = len(self.rules["seeds"])
        lengths = [(count, length) for length in self.rules["lengths"]]
        return {shape.name: lengths for shape in self.plan.shapes}

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


def in_tokens(nats: float, slope: float) -> float:
    """Return what a difference in loss is worth: the share of tokens that the baseline needs more.

    Args:
        nats: loss above the baseline's.
        slope: nats that e times the tokens buy.
    """
    return math.expm1(-nats / slope)


class VerdictStage(Stage):
    """Stage 3: the best arms against the baseline."""

    name = "verdict"

    def arms(self) -> list[str]:
        """Return the arms that are judged. Raises UserError if the power is too low for any."""
        count = self.before["margin"]["arms"]
        if not count:
            raise UserError(
                f"stage verdict does not start: with {len(self.rules['seeds'])} seeds not even one "
                f"arm has a power of {self.rules['power']}: amend the plan (docs/which_norm.md)"
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

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        arms = self.before.get("margin", self.rules)["arms"]
        count = (1 + arms) * len(self.rules["seeds"])
        return {shape.name: [(count, 1.0)] for shape in self.plan.shapes}

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
        # An arm of which runs diverged is not judged on the rest; its divergence is the result. If
        # the baseline's diverged, there is nothing to compare with.
        judged = {
            arm: found
            for arm, found in differences.items()
            if not diverged[arm] and not diverged[self.plan.baseline]
        }
        claims = judge(judged, margin, len(differences))
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
            Pair(results.of(run).run, results.of(base).run)
            for run, base in zip(runs[arm][shape], runs[self.plan.baseline][shape], strict=True)
        ]
        return {
            "difference": estimate.mean,
            "low": low,
            "high": high,
            "se": estimate.se,
            "tokens": in_tokens(estimate.mean, self.before["margin"]["slopes"][shape]),
            "without_a_document": document_range(pairs),
        }


def document_range(pairs: list[Pair]) -> list[float] | None:
    """Return the lowest and the highest mean difference when one document is left out.

    None where the logs do not have the documents, because they are many, or have only one. Raises
    UserError if the documents of a pair differ.
    """
    for run, base in pairs:
        # the number of tokens of each
        if not np.array_equal(run.documents[:1], base.documents[:1]):
            raise UserError(f"{run.name} and {base.name}: their val splits differ")
    found = without_a_document(pairs)
    return None if found is None else [found.low, found.high]


# ----------------------------------------------------------------------- was the answer a good one?


def recommend(plan: Plan, before: Conclusions, moved: dict[str, float]) -> tuple[str, str]:
    """Apply the declared rule (repro/which_norm.toml, "Recommendation").

    Args:
        plan: the plan.
        before: with `rates` and `verdict`.
        moved: name in the ledger of bytes -> bytes that its norms move in training.

    Returns:
        The arm, and why.
    """
    rules = plan.plan["recommendation"]
    verdicts = before["verdict"]["arms"]
    baseline = plan.baseline

    shapes = before["rates"]["shapes"].values()
    # Where the baseline's tolerance has no end, an arm cannot be shown to have more.
    ends = all(shape[baseline]["tolerance_seen"] for shape in shapes)

    def octaves(arm: str) -> float:
        return min(shape[arm]["tolerance"] for shape in shapes)

    def cost(arm: str) -> float:
        return moved.get(rules["bytes"].get(arm, ""), math.inf)

    if better := [arm for arm in verdicts if verdicts[arm]["direction"] == "better"]:
        return by_gain(verdicts, better)[0], "it is better in all shapes" + (
            ", and gains most" if len(better) > 1 else ""
        )
    within = [arm for arm in verdicts if verdicts[arm]["margin"] == "within"]
    more = octaves(baseline) + rules["octaves"]
    tolerant = [arm for arm in within if ends and octaves(arm) >= more]
    if tolerant:
        why = "it is non-inferior and its learning rate may be too high by a larger factor"
        return max(tolerant, key=octaves), why
    if cheaper := [arm for arm in within if cost(arm) < cost(baseline)]:
        arm = min(cheaper, key=cost)
        saved = 1 - cost(arm) / cost(baseline)
        return arm, f"it is non-inferior and its norms move {saved:.1%} fewer bytes"
    if not within:
        return (
            baseline,
            "no arm is shown to be better or within the margin: a default, not a winner",
        )
    names = ", ".join(f"`{arm}`" for arm in within)
    forgives = "forgives a much higher rate" if ends else "is shown to forgive a higher rate"
    return baseline, (
        f"no arm is shown to be better in all shapes, and what is shown to be within the margin "
        f"({names}) neither moves fewer bytes nor {forgives}: a default, not a winner"
    )


def by_gain(verdicts: dict[str, Any], arms: list[str] | None = None) -> list[str]:
    """Return judged arms, all or these, by their mean difference over the shapes, best first."""

    def difference(arm: str) -> float:
        return float(np.mean([found["difference"] for found in verdicts[arm]["shapes"].values()]))

    return sorted(verdicts if arms is None else arms, key=difference)


class CheckStage(Stage):
    """Stage 4: the baseline and the recommended arm at other rates and other initialisations."""

    name = "check"

    def arms(self) -> list[str]:
        """Return the baseline and the arm that is checked with it."""
        arm = self.before["recommendation"]["arm"]
        if arm == self.plan.baseline:
            arm = [*by_gain(self.before["verdict"]["arms"]), *self.before["rates"]["ranking"]][0]
        return [self.plan.baseline, arm]

    def _of(self, shape: Shape, arm: str, key: str, factor: float) -> list[Wanted]:
        """Return the runs with `key` at `factor` times its value."""
        keys = {"learning_rate": self.rate(shape, arm), "init_std": shape.keys["init_std"]}
        keys[key] *= factor
        return [self.run(shape, arm, seed, **keys) for seed in self.rules["seeds"]]

    def _settings(self) -> list[tuple[str, float]]:
        """Return what is varied: (key, factor), as chosen first."""
        varied = [
            (key, factor)
            for key in ("learning_rate", "init_std")
            for factor in self.rules["factors"]
        ]
        return [("learning_rate", 1.0), *varied]

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted, finished or not."""
        return [
            run
            for shape in reversed(self.plan.shapes)
            for arm in self.arms()
            for key, factor in self._settings()
            for run in self._of(shape, arm, key, factor)
        ]

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        count = 2 * len(self._settings()) * len(self.rules["seeds"])
        return {shape.name: [(count, 1.0)] for shape in self.plan.shapes}

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return mean losses, and where another setting is better by half a margin."""
        half = self.before["margin"]["margin"] / 2
        shapes: dict[str, Any] = {}
        unsettled: list[str] = []
        for shape in self.plan.shapes:
            for arm in self.arms():
                means = {
                    f"{key} x {factor:g}": float(
                        np.mean(self.losses(results, self._of(shape, arm, key, factor)))
                    )
                    for key, factor in self._settings()
                }
                chosen = means["learning_rate x 1"]
                found = [name for name, mean in means.items() if mean < chosen - half]
                unsettled += [f"{arm}, {shape.name}: {name}" for name in found]
                shapes.setdefault(shape.name, {})[arm] = finite(means)
        return {"shapes": shapes, "not_settled": unsettled}


class OneShapeStage(Stage):
    """What stages 5 and 6 have in common: the baseline and the best arms in one shape."""

    def arms(self) -> list[str]:
        """Return the baseline, the recommended arm and the best others of stage 3."""
        order = by_gain(self.before["verdict"]["arms"])
        recommended = self.before["recommendation"]["arm"]
        order.sort(key=lambda arm: arm != recommended)  # keeps the order of the others
        return [self.plan.baseline, *order[: self.rules["arms"]]]

    @property
    def shape(self) -> Shape:
        """The shape of this stage."""
        return next(shape for shape in self.plan.shapes if shape.name == self.rules["shape"])

    def of_arm(self, results: Results, arm: str) -> list[Wanted]:
        """Return the judged runs of an arm, one for each seed."""
        raise NotImplementedError

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted, finished or not."""
        return [run for arm in self.arms() for run in self.of_arm(results, arm)]

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return differences from the baseline, and the difference of stage 3 beside each."""
        arms: dict[str, Any] = {}
        losses = {
            arm: np.array(self.losses(results, self.of_arm(results, arm))) for arm in self.arms()
        }
        for arm in self.arms()[1:]:
            differences = losses[arm] - losses[self.plan.baseline]
            if not np.isfinite(differences).all():
                arms[arm] = {"difference": None}
                continue
            estimate = paired(differences)
            low, high = estimate.interval()
            then = self.before["verdict"]["arms"][arm]["shapes"][self.shape.name]["difference"]
            arms[arm] = {
                "difference": estimate.mean,
                "low": low,
                "high": high,
                "of_stage_3": then,
                # The interval leaves out the side on which stage 3 saw the arm.
                "contradicts": low > 0 > then or high < 0 < then,
            }
        return {"shape": self.shape.name, "arms": arms}


class TokensStage(OneShapeStage):
    """Stage 5: more tokens."""

    name = "tokens"

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        count = (1 + self.rules["arms"]) * len(self.rules["seeds"])
        return {self.rules["shape"]: [(count, float(self.rules["factor"]))]}

    def of_arm(self, results: Results, arm: str) -> list[Wanted]:
        rate = self.rate(self.shape, arm)
        factor = self.rules["factor"]
        return [
            self.run(self.shape, arm, seed, factor, learning_rate=rate)
            for seed in self.rules["seeds"]
        ]


class MuonStage(OneShapeStage):
    """Stage 6: Muon, at the best of some rates."""

    name = "muon"

    def planned(self) -> dict[str, list[tuple[int, float]]]:
        """Return shape -> (number of runs, length)."""
        count = (1 + self.rules["arms"]) * (len(self.rules["factors"]) + len(self.rules["seeds"]))
        return {self.rules["shape"]: [(count, 1.0)]}

    def wanted(self, results: Results) -> list[Wanted]:
        """Return the runs that are wanted, finished or not: first those that choose the rates."""
        first = [run for arm in self.arms() for run in self._selection(arm)]
        if results.missing(first):
            return first
        return first + super().wanted(results)

    def _selection(self, arm: str) -> list[Wanted]:
        """Return the runs that choose an arm's rate."""
        seed = self.rules["selection_seed"]
        return [self._run(arm, factor, seed) for factor in self.rules["factors"]]

    def of_arm(self, results: Results, arm: str) -> list[Wanted]:
        factor = self._best_factor(results, arm)
        return [self._run(arm, factor, seed) for seed in self.rules["seeds"]]

    def conclusion(self, results: Results) -> dict[str, Any]:
        """Return what the base class does, and the arms whose best rate is an end of those tried.

        Their rate is not settled: a better one may lie beyond.
        """
        ends = (min(self.rules["factors"]), max(self.rules["factors"]))
        factors = {arm: self._best_factor(results, arm) for arm in self.arms()}
        at_ends = [arm for arm, factor in factors.items() if factor in ends]
        return super().conclusion(results) | {"factors": factors, "not_settled": at_ends}

    def _best_factor(self, results: Results, arm: str) -> float:
        """Return the factor of an arm's chosen rate that has the lowest loss."""
        losses = self.losses(results, self._selection(arm))
        return self.rules["factors"][int(np.argmin(losses))]

    def _run(self, arm: str, factor: float, seed: int) -> Wanted:
        rate = factor * self.rate(self.shape, arm)
        return self.run(self.shape, arm, seed, optimizer="muon", learning_rate=rate)
