"""Arms against a baseline: pairs, estimates, verdicts, and a sentence for each verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from common.errors import ConfigError, UserError
from common.output import prose
from common.stats import (
    ALPHA,
    NO_DIFFERENCE,
    WITHIN,
    Estimate,
    Verdict,
    crossed,
    decide,
    detectable_effect,
    paired,
    power_of_tost,
    seeds_needed,
)
from evidence.names import short_name
from evidence.runs import METRICS, RULES, Metric, Run, difference_in_settings, item_differences

FEW = 3  # pairs, of which the spread is hardly known
CHANCE = 0.25  # accuracy of a guess in HellaSwag: one of four endings
NOT_JUDGED = "not judged"
NO_VERDICT = "no verdict"
# What may differ between the seeds of an arm: each may start from a checkpoint of its own, on a
# device of its own. In a pair both are the same.
BY_SEED = ("seed", "init_from", "device")

Arms = dict[str, dict[int, Run]]  # arm -> seed -> run


class Pair(NamedTuple):
    """A run and the baseline's run of the same seed."""

    run: Run
    base: Run


Pairs = dict[str, list[Pair]]  # arm -> pairs, in the order of their seeds


class Text(NamedTuple):
    """What single documents of the val split do to a mean difference."""

    low: float  # smallest and largest mean difference when one document is left out
    high: float
    documents: int


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline in one metric.

    A difference is arm less baseline; of a relative metric, the difference of logarithms.
    """

    metric: Metric
    arm: str
    baseline: str
    delta: float  # margin of equivalence, in the unit of the differences; 0 for none
    delta_kind: str  # declared, post hoc, or "" for none
    seeds: list[int]
    differences: np.ndarray  # (n,) paired by seed
    estimate: Estimate
    verdict: Verdict  # without words, where there is none
    n_arms: int  # number of arms that the tests are corrected for
    not_judged: str  # why this metric is not judged; "" if it is
    no_verdict: str  # why the arm has no verdict; "" if it has
    rate: float | None  # nats per token that e times as many tokens buy; None: not a loss, unknown
    text: Text | None  # of val_loss_full alone

    @property
    def name(self) -> str:
        """Short name of the arm."""
        return short_name(self.arm)

    @property
    def word(self) -> str:
        """The verdict in one phrase, or that there is none."""
        if self.not_judged:
            return NOT_JUDGED
        return NO_VERDICT if self.no_verdict else self.verdict.word

    @property
    def two_words(self) -> str:
        """The verdict for a narrow table, such as "worse, within"."""
        if self.not_judged or self.no_verdict:
            return self.word
        if self.verdict.direction == NO_DIFFERENCE:
            return "within margin" if self.verdict.margin == WITHIN else "not shown"
        return ", ".join(filter(None, [self.verdict.direction, self.verdict.margin]))

    @property
    def sd(self) -> float:
        """Standard deviation of the seeds' differences."""
        return float(self.differences.std(ddof=1))

    @cached_property
    def detectable(self) -> float:
        """Smallest true difference that these seeds find with 80 % power.

        The level is divided by the number of arms (Bonferroni), which is on the safe side of Holm.
        """
        if not self.sd_of_seed:
            return 0.0
        return detectable_effect(self.sd_of_seed, len(self.seeds), ALPHA / self.n_arms)

    @property
    def sd_of_seed(self) -> float:
        """SD of one seed that the standard error belongs to.

        It is that of the differences, or more where the error counts HellaSwag's items too.
        """
        return self.estimate.se * len(self.seeds) ** 0.5

    @cached_property
    def power_within(self) -> float | None:
        """Power to show "within the margin" at a true difference of zero, with the observed SD.

        At the same level as `detectable`. None without a margin or a spread.
        """
        if not self.delta or not self.sd_of_seed:
            return None
        return power_of_tost(0.0, self.delta, self.sd_of_seed, len(self.seeds), ALPHA / self.n_arms)

    @cached_property
    def needed(self) -> int | None:
        """Number of seeds for 80 % power if the observed difference is true.

        Power to show the difference or, with a margin, that it lies within. None if more than
        10,000 are needed, for FEW pairs, whose SD may be off by a factor of 30, and for HellaSwag:
        its error has a part, from the items, that no number of seeds removes.
        """
        if self.metric.name.startswith("hellaswag") or len(self.seeds) <= FEW:
            return None
        return seeds_needed(self.estimate.mean, self.delta, self.sd, ALPHA / self.n_arms)

    def tokens(self, difference: float) -> float | None:
        """Return the share of tokens that a difference is worth, 0.02 for 2 % more tokens.

        The arm ends where the baseline would with that many more tokens, or fewer if negative. An
        exchange rate by curves is an upper estimate, and the share nearer to zero than the true
        one.
        """
        return None if self.rate is None else float(np.expm1(-difference / self.rate))

    def show_tokens(self) -> str:
        """Format the tokens that the mean difference is worth; "" if it is unknown."""
        share = self.tokens(self.estimate.mean)
        if share is None:
            return ""
        return f"{100 * share:+.1f} %" if share < 10 else "above +1000 %"

    def show(self, difference: float, sign: bool = True) -> str:
        """Format a difference: per cent for a relative metric, else four decimals."""
        if not np.isfinite(difference):
            return "n/a"
        if self.metric.relative:
            text = f"{100 * np.expm1(difference):+.2f} %"
        else:
            text = f"{difference:+.4f}"
        return text if sign else text.lstrip("+")

    def show_interval(self, interval: tuple[float, float]) -> str:
        """Format an interval of differences."""
        if not np.isfinite(interval).all():
            return "n/a"
        return " … ".join(self.show(end) for end in interval)

    def sentence(self) -> str:
        """Say in one sentence what the verdict is and why."""
        unit = "" if self.metric.relative else f" {self.metric.unit}"
        tokens = f" (worth {self.show_tokens()} of tokens)" if self.rate else ""
        parts = [
            f"{prose(self.name)}: {self.word}: {self.show(self.estimate.mean)}{unit}{tokens} "
            f"against {prose(short_name(self.baseline))} over {len(self.seeds)} seeds, "
            f"Holm interval {self.show_interval(self.verdict.interval)}"
        ]
        is_judged = not (self.not_judged or self.no_verdict)
        # Neither a direction nor that the difference lies within the margin
        is_open = self.verdict.direction == NO_DIFFERENCE and self.verdict.margin != WITHIN
        if not is_judged:
            parts.append(self.not_judged or self.no_verdict)
        elif not is_open and len(self.seeds) <= FEW:
            parts.append(
                f"from {len(self.seeds)} pairs this follows only if differences are normal: repeat "
                "it with a new set of more seeds"
            )
        elif is_open and self.needed:
            what = "this difference"
            if self.delta:
                what += ", or that it is within the margin,"
            # A new set: who adds seeds until a verdict appears gets false ones. And at least one
            # more, for the seeds that are there have not decided.
            needed = max(self.needed, len(self.seeds) + 1)
            parts.append(f"to show {what} takes a new set of {needed} seeds")
        if self.delta:
            parts.append(f"the {self.delta_kind} margin is {self.show(self.delta, sign=False)}")
        if self.text is not None:
            parts.append(
                f"conditional on this text: {self.show_interval((self.text.low, self.text.high))} "
                f"when one of its {self.text.documents} documents is left out"
            )
        return "; ".join(parts) + "."


def like_baseline(arms: Arms, baseline: str, but: tuple[str, ...] = ()) -> Arms:
    """Return each arm's runs with the settings of the baseline's; the keys `but` may differ."""
    first = next(run for run in arms[baseline].values() if not run.problem())
    alike: Arms = {}
    for arm, its in arms.items():
        alike[arm] = {}
        for seed, run in its.items():
            if not difference_in_settings(run, first, BY_SEED + but):
                alike[arm][seed] = run
    return alike


def arms_called(arms: Arms, name: str) -> list[str]:
    """Return the arms with usable runs that somebody may mean by `name`.

    An arm has a longer name than its runs where they have several rates, or where another arm has
    the same short name.
    """
    if name in arms:
        return [name]
    usable = []
    for arm, runs in arms.items():
        if any(not run.problem() for run in runs.values()):
            usable.append(arm)
    return [arm for arm in usable if next(iter(arms[arm].values())).arm == name]


def check_alike(arm: str, runs: dict[int, Run]) -> None:
    """Raise UserError if an arm's runs differ in more than the seed.

    They are several experiments then, and a mean over them says nothing.
    """
    first = next(iter(runs.values()))
    for run in runs.values():
        difference = difference_in_settings(run, first, BY_SEED)
        if difference:
            raise UserError(
                f"{arm}, seeds {run.seed} and {first.seed}: {difference}: report on them apart"
            )


def pair_by_seed(arms: Arms, baseline: str, but: tuple[str, ...] = ()) -> tuple[Pairs, list[str]]:
    """Pair each run that can be compared with the baseline's run of the same seed.

    Of an arm with more pairs than planned, the first ones are kept: else one could stop when the
    verdict pleases.

    Args:
        arms: all runs.
        baseline: an arm.
        but: settings that may differ, beside what the arms of a study may have of their own: those
            that are compared in place of norms (`by_value`), or that arms were declared with.

    Returns:
        The pairs of each arm, and a line about each run that has no pair.

    Raises:
        UserError: the baseline has no runs, or its runs differ in more than the seed.
    """
    left_out: list[str] = []
    good: Arms = {}
    for arm, runs in arms.items():
        for seed, run in sorted(runs.items()):
            if problem := run.problem():
                left_out.append(f"{arm}, seed {seed}: {problem}")
            else:
                good.setdefault(arm, {})[seed] = run
    bases = good.pop(baseline, {})
    if not bases:
        there = ", ".join(map(repr, good)) or "none"
        why = "".join(f"; {line}" for line in left_out)
        raise ConfigError(f"baseline={baseline!r}: the arms with usable runs are {there}{why}")
    check_alike(baseline, bases)
    pairs: Pairs = {}
    for arm, runs in good.items():
        pairs[arm] = []
        for seed, run in runs.items():
            base = bases.get(seed)
            if base is None:
                left_out.append(f"{arm}, seed {seed}: not paired: {baseline} has no such seed")
            elif difference := difference_in_settings(run, base, but):
                left_out.append(f"{arm}, seed {seed}: not paired: {difference}")
            else:
                pairs[arm].append(Pair(run, base))
        planned = run.config.get("planned_seeds", 0)
        if 0 < planned < len(pairs[arm]):
            more = ", ".join(str(pair.run.seed) for pair in pairs[arm][planned:])
            left_out.append(f"{arm}: {planned} seeds were planned, so seed {more} is not judged")
            del pairs[arm][planned:]
        if missing := sorted(bases.keys() - runs.keys()):
            left_out.append(f"{arm} has no finished run of seed {', '.join(map(str, missing))}")
    return pairs, left_out


def diverged_arms(alike: Arms) -> dict[str, str]:
    """Return arm -> sentence, where some of its runs diverged: those that are left get no verdict.

    Args:
        alike: runs with the baseline's settings. Divergence under others is another experiment.
    """
    found = {}
    for arm, runs in alike.items():
        if bad := sum(run.diverged for run in runs.values()):
            found[arm] = (
                f"{bad} of {len(runs)} runs diverged, and those that are left are no fair sample"
            )
    return found


def margin(metric: Metric, run: Run, post_hoc: float) -> tuple[float, str]:
    """Return the margin of equivalence and where it comes from.

    The runs declare it, all the same one, unless `post_hoc` gives one of val loss now. The margin
    of a relative metric becomes a difference of logarithms, as the differences are. (0.0, "") for
    no margin.
    """
    name = "val_loss" if metric.name == "val_loss_full" else metric.name
    if name == "val_loss" and post_hoc:
        return post_hoc, "post hoc"
    delta = run.config.get(f"delta_{name}", 0.0)
    if not delta:
        return 0.0, ""
    return float(np.log1p(delta)) if metric.relative else delta, "declared"


def exchange_rate(run: Run) -> float | None:
    """Return the nats per token that e times as many tokens buy; None for a short curve.

    It is the slope of val loss over the logarithm of tokens, in the later half of the run. The
    learning rate decays there, which lowers the loss too, so it is an upper estimate.
    """
    tokens = run.curve[:, 0]
    later = run.curve[tokens > tokens[-1] / 2]  # (n, 2): tokens, loss
    if len(later) < 3:  # with few evaluations, that in the middle counts too
        later = run.curve[tokens >= tokens[-1] / 2]
    if len(later) < 3:
        return None
    slope, _ = np.polyfit(np.log(later[:, 0]), later[:, 1], 1)
    return -float(slope)


def mean_exchange_rate(runs: list[Run]) -> float | None:
    """Return the mean exchange rate of runs; None if none has one, or more tokens buy nothing."""
    rates = [rate for rate in map(exchange_rate, runs) if rate is not None]
    mean = float(np.mean(rates)) if rates else 0.0
    return mean if mean > 0 else None


def without_a_document(pairs: list[Pair]) -> Text | None:
    """Return what leaving out one document does to the mean difference of val_loss_full.

    Every difference is computed again without the document. None if the logs do not have the
    documents, if they differ, or if there is one alone.
    """
    runs = [run for pair in pairs for run in pair]
    documents = runs[0].document_tokens
    have_same = all(np.array_equal(run.document_tokens, documents) for run in runs)
    if not have_same or len(documents) < 2:
        return None
    # of the difference without each document, (documents,) a pair
    means = [losses_without(pair.run) - losses_without(pair.base) for pair in pairs]
    mean = np.mean(means, 0)  # (documents,)
    return Text(float(mean.min()), float(mean.max()), len(mean))


def losses_without(run: Run) -> np.ndarray:
    """Return the mean loss of a run without each document of the val split, (documents,)."""
    tokens = run.document_tokens.sum() - run.document_tokens
    nats = run.document_nats.sum() - run.document_nats
    return nats / tokens


@dataclass(frozen=True)
class Measured:
    """One metric of those of an arm's pairs that have it."""

    metric: Metric
    pairs: list[Pair]
    values: np.ndarray  # (n, 2) of the arm and of the baseline
    by_item: list[np.ndarray]  # HellaSwag alone: (items,) a pair

    @property
    def differences(self) -> np.ndarray:
        """(n,) paired by seed."""
        if self.metric.relative:
            return np.log(self.values[:, 0] / self.values[:, 1])
        return self.values[:, 0] - self.values[:, 1]

    def estimate(self) -> Estimate:
        """Estimate the mean difference; seeds are the sample, for HellaSwag its items too.

        Over seeds alone the answer would hold for these items only.
        """
        if self.by_item:
            return crossed(np.stack(self.by_item))  # (seeds, items)
        return paired(self.differences)

    def caution(self) -> str:
        """Say why the metric is not judged, whatever the tests say; "" if it is."""
        runs = [run for pair in self.pairs for run in pair]
        problems = [run.speed_problem for run in runs if run.speed_problem]
        if self.metric.relative and problems:
            return (
                f"speeds {problems[0]} are described, not judged "
                "(bench/train.py compares steps in one process)"
            )
        if self.by_item:
            items = len(self.by_item[0])
            # Standard error of the accuracy of guesses, a binomial share.
            se = (CHANCE * (1 - CHANCE) / items) ** 0.5
            if self.values.mean(0).max() < CHANCE + 2 * se:
                return (
                    f"neither can be told from chance on {items} items, "
                    "so nothing follows from a difference or none"
                )
        return ""


def values_of(metric: Metric, run: Run, base: Run) -> tuple[float | None, float | None]:
    """Return a metric of a run and of the baseline's; None where it was not measured."""
    return run.metrics.get(metric.name), base.metrics.get(metric.name)


def measure(metric: Metric, pairs: list[Pair]) -> Measured:
    """Measure a metric on the pairs that have it, HellaSwag all on the same number of items."""
    found = [pair for pair in pairs if None not in values_of(metric, *pair)]
    by_item = []
    rule = metric.name.removeprefix("hellaswag_")
    if rule in RULES:
        rights = [item_differences(*pair, rule) for pair in found]
        items = max(map(len, rights), default=0)
        found = [pair for pair, right in zip(found, rights) if len(right) == items > 0]
        by_item = [right for right in rights if len(right) == items > 0]
    values = np.array([values_of(metric, *pair) for pair in found])
    return Measured(metric, found, values, by_item)


def compare(
    pairs: Pairs,
    baseline: str,
    post_hoc: float,
    diverged: dict[str, str],
    rate_errors: Mapping[str, float] = MappingProxyType({}),
    tests: int = 0,
    token_slope: float = 0.0,
) -> tuple[list[Comparison], list[str]]:
    """Compare every arm with the baseline in every metric.

    Args:
        post_hoc: margin of val loss that was not declared before the runs; 0: none.
        diverged: arm -> sentence, for arms of which some seeds diverged. The seeds that are left
            are no fair sample, so they get no verdict.
        rate_errors: arm -> standard error of its loss less the baseline's, nats, for learning rates
            that are not known exactly. All seeds share it.
        tests: arms that were declared together, if some cannot be tested.
        token_slope: nats that e times as many tokens buy the baseline; 0: by its curves.

    Returns:
        One comparison for each metric and arm with two pairs or more, and lines about pairs that
        lack a metric.
    """
    rows: list[Comparison] = []
    left_out: list[str] = []
    bases = {pair.base.seed: pair.base for its in pairs.values() for pair in its}
    rate = token_slope or mean_exchange_rate(list(bases.values()))
    for metric in METRICS.values():
        found: dict[str, Measured] = {}
        for arm, its_pairs in pairs.items():
            measured = measure(metric, its_pairs)
            lacking = [str(pair.run.seed) for pair in its_pairs if pair not in measured.pairs]
            if measured.pairs and lacking:
                left_out.append(
                    f"{metric.name} of {arm} leaves out seed {', '.join(lacking)}: "
                    "not measured alike"
                )
            if len(measured.pairs) >= 2:
                found[arm] = measured
        if not found:
            continue
        first = pairs[next(iter(found))][0].run
        delta, delta_kind = margin(metric, first, post_hoc)
        is_loss = metric.unit == METRICS["val_loss"].unit
        estimates = [
            with_error(measured.estimate(), rate_errors.get(arm, 0.0) if is_loss else 0.0)
            for arm, measured in found.items()
        ]
        # All arms of a metric together: each of them is a test, of difference and of equivalence,
        # and Holm corrects for their number.
        verdicts = decide(estimates, delta, metric.lower_is_better, tests)
        for (arm, measured), estimate, verdict in zip(found.items(), estimates, verdicts):
            not_judged = measured.caution()
            no_verdict = lack_of_verdict(arm, baseline, measured.pairs, diverged)
            if not_judged or no_verdict:
                verdict = replace(verdict, direction="", margin="")
            is_of_documents = metric.name == "val_loss_full"
            row = Comparison(
                metric=metric,
                arm=arm,
                baseline=baseline,
                delta=delta,
                delta_kind=delta_kind,
                seeds=[pair.run.seed for pair in measured.pairs],
                differences=measured.differences,
                estimate=estimate,
                verdict=verdict,
                n_arms=max(len(found), tests),
                not_judged=not_judged,
                no_verdict=no_verdict,
                rate=rate if is_loss else None,
                text=without_a_document(measured.pairs) if is_of_documents else None,
            )
            rows.append(row)
    return rows, left_out


def with_error(estimate: Estimate, error: float) -> Estimate:
    """Return an estimate with another standard error added, which is independent of its own."""
    return replace(estimate, se=(estimate.se**2 + error**2) ** 0.5) if error else estimate


def lack_of_verdict(arm: str, baseline: str, pairs: list[Pair], diverged: dict[str, str]) -> str:
    """Say why an arm has no verdict; "" if it has one, or nothing to judge.

    Args:
        arm: the arm.
        baseline: what it is compared with.
        pairs: its own; they declare how many seeds were planned.
        diverged: arm -> sentence, as `compare` takes it.
    """
    if arm in diverged:
        return diverged[arm]
    if baseline in diverged:
        return f"of {baseline}, {diverged[baseline]}"
    planned = pairs[0].run.config.get("planned_seeds", 0) if pairs else 0
    return f"{len(pairs)} of {planned} planned seeds" if len(pairs) < planned else ""
