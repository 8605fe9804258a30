"""Arms against a baseline: pairs, estimates, verdicts, and a sentence for each verdict."""

from dataclasses import dataclass

import numpy as np

from errors import ConfigError, UserError
from runs import METRICS, RULES, Metric, Run, difference_in_settings, item_differences
from stats import (
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

EQUAL_TIME = Metric("val_loss_equal_time", "nats per token", True)


@dataclass(frozen=True)
class Row:
    """One arm against the baseline in one metric. Differences are arm - baseline, of logarithms if relative."""

    metric: Metric
    arm: str
    baseline: str
    delta: float
    delta_kind: str  # declared, post hoc, or "" for none
    seeds: list[int]
    values: np.ndarray  # (n,) of the arm
    differences: np.ndarray  # (n,) paired by seed
    estimate: Estimate
    verdict: Verdict
    n_arms: int

    @property
    def sd(self) -> float:
        """Standard deviation of one seed's difference (for HellaSwag with the share of the items in it)."""
        return self.estimate.se * len(self.seeds) ** 0.5

    @property
    def detectable(self) -> float:
        """Smallest true difference that this many seeds find with 80 % power, all arms corrected for."""
        return detectable_effect(self.sd, len(self.seeds), ALPHA / self.n_arms) if self.sd else 0.0

    @property
    def needed(self) -> int | None:
        """Seeds that find a difference as large as the margin (without one: as observed) with 80 % power."""
        return seeds_needed(self.delta or abs(self.estimate.mean), self.sd, ALPHA / self.n_arms)

    @property
    def sign_flip(self) -> float:
        return sign_flip_p(self.differences)

    @property
    def bootstrap(self) -> tuple[float, float]:
        return bca_interval(self.differences)

    def show(self, difference: float, sign: bool = True) -> str:
        """A difference for people: per cent for a relative metric."""
        if not np.isfinite(difference):
            return "n/a"
        text = f"{100 * np.expm1(difference):+.2f} %" if self.metric.relative else f"{difference:+.4f}"
        return text if sign else text.lstrip("+")

    def show_interval(self, interval: tuple[float, float]) -> str:
        return " … ".join(map(self.show, interval)) if np.isfinite(interval).all() else "n/a"

    def sentence(self) -> str:
        """Why the verdict is what it is."""
        verdict, n = self.verdict, len(self.seeds)
        unit = "" if self.metric.relative else f" {self.metric.unit}"
        amount = f"{self.show(self.estimate.mean)}{unit} against {self.baseline}"
        inside = f"Holm-adjusted 95 % interval {self.show_interval(verdict.interval)}"
        margin = f"the {self.delta_kind} margin of {self.show(self.delta, sign=False)}"
        if verdict.word in ("better", "worse"):
            small = f"; it may still be smaller than {margin}" if abs(self.estimate.mean) < self.delta else ""
            return f"{self.arm}: {verdict.word}: {amount} over {n} seeds, {inside}, which leaves out zero{small}."
        if verdict.word == "equivalent":
            return f"{self.arm}: equivalent: {amount} over {n} seeds, within {margin} (TOST p = {verdict.p_tost:.2g})."
        why = f"TOST does not place it within {margin} (p = {verdict.p_tost:.2g})" if self.delta else \
            "no margin was declared, so it cannot be called equivalent"  # fmt: skip
        return f"{self.arm}: inconclusive: {amount} over {n} seeds, {inside} holds zero, and {why}; {self.missing()}."

    def missing(self) -> str:
        """What it would take to know more."""
        n, needed = len(self.seeds), self.needed
        aim = "the margin" if self.delta else "the observed one"
        if not self.sd:
            return "all its pairs are identical"
        if needed is None:
            return f"to find a difference as small as {aim} would take more than 10,000 seeds"
        if needed <= n:
            return f"{n} seeds find differences from {self.show(self.detectable, sign=False)} on (80 % power)"
        return f"to find a difference as large as {aim} with 80 % power takes {needed} seeds, {needed - n} more"


def usable(arms: dict[str, dict[int, Run]]) -> tuple[dict[str, dict[int, Run]], list[str]]:
    """The runs that went to their end, and a line about each of the others."""
    left_out, kept = [], {}
    for arm, runs in arms.items():
        problems = {seed: run.problem() for seed, run in runs.items()}
        left_out += [f"{arm}, seed {seed}: {problem}" for seed, problem in problems.items() if problem]
        kept[arm] = {seed: run for seed, run in runs.items() if not problems[seed]}
    return {arm: runs for arm, runs in kept.items() if runs}, left_out


def pair(arms: dict[str, dict[int, Run]], baseline: str) -> tuple[dict[str, list[tuple[Run, Run]]], list[str]]:
    """arm -> (run, baseline run) of each common seed, in order; and a line about each run that has no pair."""
    if baseline not in arms:
        raise ConfigError(f"baseline={baseline!r}: the arms with finished runs are {', '.join(map(repr, arms))}")
    left_out, pairs = [], {}
    for arm, runs in arms.items():
        if arm == baseline:
            continue
        pairs[arm] = []
        for seed, run in sorted(runs.items()):
            base = arms[baseline].get(seed)
            reason = f"{baseline} has no such seed" if base is None else difference_in_settings(run, base)
            if reason:
                left_out.append(f"{arm}, seed {seed}: not paired: {reason}")
            else:
                pairs[arm].append((run, base))
        for seed in sorted(arms[baseline].keys() - runs.keys()):
            left_out.append(f"{baseline}, seed {seed}: {arm} has no such seed")
    return pairs, left_out


def margin(metric: Metric, runs: list[Run], post_hoc: dict[str, float]) -> tuple[float, str]:
    """(equivalence margin, where it comes from): the runs' own, unless one is given now. Raises UserError."""
    name = "val_loss" if metric is EQUAL_TIME else metric.name
    if name in post_hoc:
        delta, kind = post_hoc[name], "post hoc"
    else:
        declared = {run.config.get(f"delta_{name}", 0.0) for run in runs}
        if len(declared) > 1:
            several = ", ".join(map(str, sorted(declared)))
            raise UserError(f"runs declare different delta_{name} ({several}): give --delta.{name}=...")
        delta, kind = declared.pop(), "declared"
    return (float(np.log1p(delta)) if metric.relative else delta, kind) if delta else (0.0, "")


def exchange_rate(run: Run) -> float | None:
    """Nats per token that one e-fold more tokens buy: slope of val loss over log tokens, later half of the run.

    It has the learning rate's decay in it, so it is an upper estimate of what more tokens would buy.
    """
    later = run.curve[run.curve[:, 0] > run.curve[-1, 0] / 2]
    return -float(np.polyfit(np.log(later[:, 0]), later[:, 1], 1)[0]) if len(later) > 2 else None


def at_equal_time(run: Run, baseline: Run) -> float | None:
    """Val loss of `run`, had it trained for as long as its baseline took instead of on as many tokens."""
    speeds, rate = [r.metrics.get("tok_per_s") for r in (run, baseline)], exchange_rate(baseline)
    if None in (*speeds, rate):
        return None
    return run.metrics["val_loss"] - rate * float(np.log(speeds[0] / speeds[1]))


def compare(pairs: dict[str, list[tuple[Run, Run]]], baseline: str, post_hoc: dict[str, float]) -> list[Row]:
    """Rows of every metric that all pairs of an arm have, arms with fewer than two pairs left out."""
    rows = []
    for metric in (*METRICS.values(), EQUAL_TIME):
        found = {arm: measured for arm, its in pairs.items() if (measured := measure(metric, its)) is not None}
        if not found:
            continue
        delta, kind = margin(metric, [run for arm in found for both in pairs[arm] for run in both], post_hoc)
        estimates = [estimate for _, _, estimate in found.values()]
        verdicts = decide(estimates, delta, metric.lower_is_better)
        for (arm, (values, differences, estimate)), verdict in zip(found.items(), verdicts, strict=True):
            seeds = [run.seed for run, _ in pairs[arm]]
            rows.append(Row(metric, arm, baseline, delta, kind, seeds, values, differences, estimate, verdict,
                            len(found)))  # fmt: skip
    return rows


def measure(metric: Metric, pairs: list[tuple[Run, Run]]) -> tuple[np.ndarray, np.ndarray, Estimate] | None:
    """(values of the arm (n,), differences (n,), their mean with its error), or None where a run lacks the metric."""
    if len(pairs) < 2:
        return None
    if metric is EQUAL_TIME:
        values = [at_equal_time(run, base) for run, base in pairs]
        if None in values:
            return None
        differences = np.array(values) - [base.metrics["val_loss"] for _, base in pairs]
        return np.array(values), differences, paired(differences)
    if not all(metric.name in run.metrics for both in pairs for run in both):
        return None
    ours, theirs = (np.array([both[side].metrics[metric.name] for both in pairs]) for side in (0, 1))
    differences = np.log(ours / theirs) if metric.relative else ours - theirs
    rule = metric.name.removeprefix("hellaswag_")
    if rule in RULES:
        by_item = [item_differences(run, base, rule) for run, base in pairs]
        if any(items is None or len(items) != len(by_item[0]) for items in by_item):
            return None
        return ours, differences, crossed(np.stack(by_item))
    return ours, differences, paired(differences)
