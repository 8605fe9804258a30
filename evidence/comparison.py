"""Arms against a baseline: pairs, estimates, verdicts, and a sentence for each verdict."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.errors import ConfigError, UserError
from common.stats import (
    ALPHA,
    Estimate,
    Verdict,
    bca_interval,
    crossed,
    decide,
    detectable_effect,
    paired,
    seeds_needed,
    sign_flip_p,
)
from evidence.runs import METRICS, RULES, Metric, Run, difference_in_settings, item_differences

EQUAL_TIME = Metric("val_loss_equal_time", "nats per token", True)
CHANCE = 0.25  # of HellaSwag
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline in one metric.

    Differences are arm - baseline, of logarithms if relative.
    """

    metric: Metric
    arm: str
    baseline: str
    delta: float
    delta_kind: str  # declared, post hoc, or "" for none
    seeds: list[int]
    differences: np.ndarray  # (n,) paired by seed
    estimate: Estimate
    verdict: Verdict
    n_arms: int
    no_verdict: str  # why the verdict is not what the tests alone would say

    @property
    def word(self) -> str:
        if self.metric is EQUAL_TIME or (self.no_verdict and self.metric.relative):
            return NOT_JUDGED
        return "inconclusive" if self.no_verdict else self.verdict.word

    @property
    def sd(self) -> float:
        """Standard deviation of the seeds' differences."""
        return float(self.differences.std(ddof=1))

    @cached_property
    def detectable(self) -> float:
        """Smallest true difference that this many seeds find with 80 % power, all arms corrected
        for.
        """
        # the SD, or more where items are part of the error
        scale = self.estimate.se * len(self.seeds) ** 0.5
        return detectable_effect(scale, len(self.seeds), ALPHA / self.n_arms) if scale else 0.0

    @cached_property
    def needed(self) -> int | None:
        """Seeds that come to a verdict with 80 % power if the true difference is the observed one.

        None if they are too many, and for HellaSwag, whose error has a part that no number of seeds
        takes away.
        """
        if self.metric.name.startswith("hellaswag"):
            return None
        return seeds_needed(self.estimate.mean, self.delta, self.sd, ALPHA / self.n_arms)

    @cached_property
    def sign_flip(self) -> float:
        return sign_flip_p(self.differences)

    @cached_property
    def bootstrap(self) -> tuple[float, float]:
        return bca_interval(self.differences)

    def show(self, difference: float, sign: bool = True) -> str:
        """A difference for people: per cent for a relative metric."""
        if not np.isfinite(difference):
            return "n/a"
        text = (
            f"{100 * np.expm1(difference):+.2f} %" if self.metric.relative else f"{difference:+.4f}"
        )
        return text if sign else text.lstrip("+")

    def show_interval(self, interval: tuple[float, float]) -> str:
        return " … ".join(map(self.show, interval)) if np.isfinite(interval).all() else "n/a"

    def sentence(self) -> str:
        """Why the verdict is what it is."""
        verdict, n, word = self.verdict, len(self.seeds), self.word
        unit = "" if self.metric.relative else f" {self.metric.unit}"
        amount = (
            f"{self.arm}: {word}: {self.show(self.estimate.mean)}{unit} "
            f"against {self.baseline} over {n} seeds"
        )
        inside = f"Holm interval {self.show_interval(verdict.interval)}"
        bound = f"the {self.delta_kind} margin of {self.show(self.delta, sign=False)}"
        if self.no_verdict:
            return f"{amount}, {inside}; {self.no_verdict}."
        if word in ("better", "worse"):
            small = (
                f", and lies within {bound}"
                if verdict.p_tost is not None and verdict.p_tost < ALPHA
                else ""
            )
            return f"{amount}, {inside}, which leaves out zero{small}."
        if word == "equivalent":
            return f"{amount}, within {bound} (TOST p = {verdict.p_tost:.2g})."
        why = (
            f"TOST does not place it within {bound} (p = {verdict.p_tost:.2g})"
            if self.delta
            else "no margin was declared, so it cannot be called equivalent"
        )
        return f"{amount}, {inside} holds zero, and {why}; {self.missing()}."

    def missing(self) -> str:
        """What it would take to know more."""
        n, needed = len(self.seeds), self.needed
        if not self.estimate.se:
            return "all its pairs are identical"
        if self.metric.name.startswith("hellaswag"):
            return (
                f"these seeds and items find {self.show(self.detectable, sign=False)} or more "
                "with 80 % power"
            )
        if needed is None:
            return (
                "a verdict on a difference like the observed one would take more than 10,000 seeds"
            )
        # the tests correct step by step, the count of seeds for all arms at once
        needed = max(needed, n + 1)
        return (
            f"a verdict on a difference like the observed one takes {needed} seeds (80 % power), "
            f"{needed - n} more"
        )


def usable(
    arms: dict[str, dict[int, Run]],
) -> tuple[dict[str, dict[int, Run]], list[str], dict[str, str]]:
    """The runs that went to their end, a line about each of the others, and arm -> sentence where
    seeds diverged.
    """
    left_out, kept, diverged = [], {}, {}
    for arm, runs in arms.items():
        if bad := [seed for seed, run in runs.items() if run.diverged]:
            diverged[arm] = (
                f"{len(bad)} of {len(runs)} seeds diverged, "
                "and those that are left are no fair sample"
            )
        problems = {seed: run.problem() for seed, run in runs.items()}
        left_out += [
            f"{arm}, seed {seed}: {problem}" for seed, problem in problems.items() if problem
        ]
        kept[arm] = {seed: run for seed, run in runs.items() if not problems[seed]}
    return {arm: runs for arm, runs in kept.items() if runs}, left_out, diverged


def pair(
    arms: dict[str, dict[int, Run]], baseline: str, unusable: tuple[str, ...] = ()
) -> tuple[dict[str, list[tuple[Run, Run]]], list[str]]:
    """arm -> (run, baseline run) of each common seed, in order; and a line about each run that has
    no pair.

    Raises UserError if the baseline has no runs (`unusable` says why), or if its own runs differ in
    more than the seed: they are several experiments.
    """
    if baseline not in arms:
        there = ", ".join(map(repr, arms)) or "none"
        why = "".join(f"; {line}" for line in unusable)
        raise ConfigError(f"baseline={baseline!r}: the arms with usable runs are {there}{why}")
    left_out, pairs = [], {}
    first = next(iter(arms[baseline].values()))
    for run in arms[baseline].values():
        # a start for each seed is fair
        if difference := difference_in_settings(run, first, but=("seed", "init_from")):
            raise UserError(
                f"{baseline}, seeds {run.seed} and {first.seed}: {difference}: report on them apart"
            )
    for arm, runs in arms.items():
        if arm == baseline:
            continue
        pairs[arm] = []
        for seed, run in sorted(runs.items()):
            base = arms[baseline].get(seed)
            reason = (
                f"{baseline} has no such seed"
                if base is None
                else difference_in_settings(run, base)
            )
            if reason:
                left_out.append(f"{arm}, seed {seed}: not paired: {reason}")
            else:
                pairs[arm].append((run, base))
        if missing := sorted(arms[baseline].keys() - runs.keys()):
            left_out.append(f"{arm} has no finished run of seed {', '.join(map(str, missing))}")
    return pairs, left_out


def margin(metric: Metric, run: Run, post_hoc: dict[str, float]) -> tuple[float, str]:
    """(equivalence margin, where it comes from): the runs' own, which is the same in all, unless
    one is given now.
    """
    name = "val_loss" if metric is EQUAL_TIME else metric.name
    delta, kind = run.config.get(f"delta_{name}", 0.0), "declared"
    if name in post_hoc:
        delta, kind = post_hoc[name], "post hoc"
    return (float(np.log1p(delta)) if metric.relative else delta, kind) if delta else (0.0, "")


def exchange_rate(run: Run) -> float | None:
    """Nats per token that one e-fold more tokens buy: slope of val loss over log tokens, later half
    of the run.

    It has the learning rate's decay in it, so it is an upper estimate of what more tokens would
    buy.
    """
    later = run.curve[run.curve[:, 0] > run.curve[-1, 0] / 2]
    return -float(np.polyfit(np.log(later[:, 0]), later[:, 1], 1)[0]) if len(later) > 2 else None


def at_equal_time(run: Run, baseline: Run) -> float | None:
    """Val loss of `run`, had it trained for as long as its baseline took instead of on as many
    tokens.
    """
    speeds, rate = [r.metrics.get("tok_per_s") for r in (run, baseline)], exchange_rate(baseline)
    if None in (*speeds, rate):
        return None
    return run.metrics["val_loss"] - rate * float(np.log(speeds[0] / speeds[1]))


def compare(
    pairs: dict[str, list[tuple[Run, Run]]],
    baseline: str,
    post_hoc: dict[str, float],
    diverged: dict[str, str],
) -> tuple[list[Comparison], list[str]]:
    """(rows of every metric and arm with two pairs or more, lines about pairs that lack a metric).

    diverged: arm -> sentence, for arms of which some seeds diverged; the seeds that are left speak
    for themselves only.
    """
    rows, left_out = [], []
    for metric in (*METRICS.values(), EQUAL_TIME):
        found = {}
        for arm, its_pairs in pairs.items():
            measured, lacking = measure(metric, its_pairs)
            if lacking and len(lacking) < len(its_pairs):
                left_out.append(
                    f"{metric.name} of {arm} leaves out seed {', '.join(lacking)}: "
                    "not measured alike"
                )
            if len(measured.seeds) >= 2:
                found[arm] = measured
        if not found:
            continue
        run = next(iter(pairs.values()))[0][0]
        delta, kind = margin(metric, run, post_hoc)
        estimates = [measured.estimate() for measured in found.values()]
        verdicts = decide(estimates, delta, metric.lower_is_better)
        for (arm, measured), estimate, verdict in zip(
            found.items(), estimates, verdicts, strict=True
        ):
            row = Comparison(
                metric,
                arm,
                baseline,
                delta,
                kind,
                measured.seeds,
                np.array(measured.differences),
                estimate,
                verdict,
                len(found),
                diverged.get(arm, "") or measured.caution(metric, run),
            )
            rows.append(row)
    return rows, left_out


@dataclass
class Measured:
    """One metric of one arm's pairs: values, differences, and for HellaSwag the differences item by
    item.
    """

    seeds: list[int]
    values: list[float]
    differences: list[float]
    by_item: list[np.ndarray]

    def estimate(self) -> Estimate:
        return (
            crossed(np.stack(self.by_item)) if self.by_item else paired(np.array(self.differences))
        )

    def caution(self, metric: Metric, run: Run) -> str:
        """Why a verdict would mislead here, whatever the tests say; or ""."""
        if metric is EQUAL_TIME:
            return "the exchange rate is an upper estimate, so this is no verdict"
        if metric.relative and run.on_cpu:
            return (
                "speeds of runs on a CPU are described, not judged "
                "(bench/train.py compares steps in one process)"
            )
        if self.by_item:
            ours, items = np.mean(self.values), len(self.by_item[0])
            best = max(ours, ours - np.mean(self.differences))
            if best < CHANCE + 2 * (CHANCE * (1 - CHANCE) / items) ** 0.5:
                return (
                    f"neither can be told from chance on {items} items, "
                    "so nothing follows from a difference or none"
                )
        return ""


def measure(metric: Metric, pairs: list[tuple[Run, Run]]) -> tuple[Measured, list[str]]:
    """A metric of the pairs that have it, and the seeds of those that do not."""
    measured, lacking = Measured([], [], [], []), []
    rule = metric.name.removeprefix("hellaswag_")
    for run, base in pairs:
        value, reference = run.metrics.get(metric.name), base.metrics.get(metric.name)
        by_item = item_differences(run, base, rule) if rule in RULES else None
        if metric is EQUAL_TIME:
            value, reference = at_equal_time(run, base), base.metrics["val_loss"]
        first = measured.by_item[0] if measured.by_item else by_item
        if (
            value is None
            or reference is None
            or (rule in RULES and (by_item is None or len(by_item) != len(first)))
        ):
            lacking.append(str(run.seed))
            continue
        measured.seeds.append(run.seed)
        measured.values.append(value)
        measured.differences.append(
            float(np.log(value / reference)) if metric.relative else value - reference
        )
        measured.by_item += [by_item] if by_item is not None else []
    return measured, lacking
