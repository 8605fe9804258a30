"""What the runs of a study say: made from judge.json and run folders alone."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.stats import BETTER, NO_DIFFERENCE, WORSE, Estimate, paired
from evidence.comparison import (
    Arms,
    Comparison,
    Pairs,
    compare,
    diverged_arms,
    lack_of_verdict,
    like_baseline,
    pair_by_seed,
    with_error,
)
from evidence.names import short_name

from .arms import own_choices, own_values
from .declaration import JudgedArm, Record
from .finished import (
    AGAIN,
    JUDGED,
    SCREENING,
    chosen,
    finished,
    judged_runs,
    mismatch,
    screens_of,
)
from .rates import Screen, noise, rate_error, worst_rate_error

DECIDING = "val_loss_full"
NOT_OVER = "its screening is not over"
NOT_SETTLED = "its learning rate is not settled: the best one is the last that may be tried"


class Explained(NamedTuple):
    """What the start of an arm explains of its difference."""

    arm: str  # as written
    matched: str
    share: Estimate  # as written minus matched, nats


def label(judged: JudgedArm) -> str:
    """Return what an arm is called: its name, if it was given one, else its words."""
    arm = judged.arm
    is_named = any(word.startswith("--arm=") for word in arm.words)
    return arm.name if is_named else judged.text


@dataclass(frozen=True)
class Outcome:
    """A study as it stands.

    Attributes:
        out: its folder.
        record: its judge.json.
        options: arm -> each option of it, and its screening.
        chosen: arm -> the option that is judged.
        screens: arm -> the screening of that option.
        rates: arm -> its learning rate; None where it is not settled.
        rate_errors: arm -> standard error that its screening leaves in its loss, nats.
        arms: arm -> seed -> judged run.
        pairs: arm -> pairs with the baseline.
        rows: comparisons of all metrics, family by family.
        no_verdict: arm -> why it has none.
        left_out: lines about runs that are not compared.
    """

    out: Path
    record: Record
    options: dict[str, dict[JudgedArm, Screen]]
    chosen: dict[str, JudgedArm]
    screens: dict[str, Screen]
    rates: dict[str, float | None]
    rate_errors: dict[str, float]
    arms: Arms
    pairs: Pairs
    rows: list[Comparison]
    no_verdict: dict[str, str]
    left_out: list[str]

    @property
    def baseline(self) -> str:
        """What the baseline is called."""
        return label(self.record.baseline)

    @cached_property
    def deciding(self) -> dict[str, Comparison]:
        """Arm -> its comparison in the loss that decides."""
        return {row.arm: row for row in self.rows if row.metric.name == DECIDING}

    @property
    def noise(self) -> float | None:
        """SD of a run's loss by the screenings, nats."""
        return noise(self.all_screens)

    @property
    def all_screens(self) -> list[Screen]:
        """The screenings of all options of all arms."""
        return [screen for its in self.options.values() for screen in its.values()]

    @property
    def later(self) -> set[str]:
        """The arms that came after the verdict."""
        return {label(judged) for its in self.record.later for judged in its.arms}

    @cached_property
    def explained(self) -> list[Explained]:
        """What the start explains, of each arm with a matched one."""
        found = []
        for judged in self.record.arms:
            if not judged.matches:
                continue
            written = next(a for a in self.record.arms if a.text == judged.matches)
            names = label(written), label(judged)
            if self.choices_of(written) != self.choices_of(judged):
                continue  # more than the start differs
            losses = [losses_of(self.pairs.get(name, [])) for name in names]
            seeds = sorted(losses[0].keys() & losses[1].keys())
            if len(seeds) >= 2 and not any(map(self.no_verdict.get, names)):
                differences = np.array([losses[0][seed] - losses[1][seed] for seed in seeds])
                error = math.hypot(*(self.rate_errors[name] for name in names))
                found.append(Explained(*names, with_error(paired(differences), error)))
        return found

    def choices_of(self, judged: JudgedArm) -> dict[str, str]:
        """Return what an arm has chosen beside its initial gain."""
        own = own_values(self.chosen[label(judged)].arm)
        return {key: own[key] for key in own.keys() & {"init_std", "optimizer"}}

    @property
    def is_open(self) -> bool:
        """Are runs missing that the study still wants?"""
        if any(not screen.is_over for screen in self.all_screens):
            return True
        settled = [name for name, rate in self.rates.items() if rate is not None]
        if self.baseline not in settled or len(settled) < 2:
            return False
        return any(len(self.arms.get(name, {})) < self.record.seeds for name in settled)

    def sentence(self) -> str:
        """Say in one sentence, or one for each arm, what is shown."""
        if self.rates[self.baseline] is None:
            why = self.no_verdict[self.baseline]
            return f"No verdict: of {short_name(self.baseline)}, {why}."
        return " ".join(self.sentence_of(label(judged)) for judged in self.record.arms[1:])

    def sentence_of(self, arm: str) -> str:
        """Say what is shown of one arm."""
        name, base = short_name(arm), short_name(self.baseline)
        row = self.deciding.get(arm)
        if row is None or row.no_verdict:
            why = self.no_verdict.get(arm) or (row and row.no_verdict) or "not run yet"
            screened = ""
            lowest, base_lowest = self.screens[arm].lowest, self.screens[self.baseline].lowest
            if why == NOT_SETTLED and math.isinf(lowest):
                why = "it diverged at every learning rate"
            elif why == NOT_SETTLED:
                screened = (
                    f" (its lowest loss in the screening is {lowest:.4f} nats per token, that of "
                    f"{base} {base_lowest:.4f})"
                )
            return f"{name}: no verdict: {why}{screened}."
        kind = "95 % interval" if row.n_arms == 1 else "Holm interval"
        interval = f"{kind} {row.show_interval(row.verdict.interval)}"
        tokens = row.show_tokens()
        worth = f", worth {tokens} of the tokens" if tokens else ""
        seeds = f"{len(row.seeds)} seeds, each arm at its own rate"
        after = "; it came after the verdict and is tested alone" if arm in self.later else ""
        if row.verdict.direction == NO_DIFFERENCE:
            return (
                f"{name}: no difference from {base} is shown: {row.show(row.estimate.mean)} nats "
                f"per token ({interval}); {excluded(row)}; {seeds}{after}."
            )
        ends = {BETTER: "lower", WORSE: "higher"}[row.verdict.direction]
        return (
            f"{name} ends {ends} than {base}: {row.show(row.estimate.mean)} nats per token "
            f"({interval}){worth}; {seeds}{after}."
        )


def excluded(row: Comparison) -> str:
    """Say which gain and which loss an interval excludes."""
    low, high = row.verdict.interval
    return (
        f"a gain of more than {max(-low, 0):.4f} and a loss of more than {max(high, 0):.4f} are "
        "excluded"
    )


def losses_of(pairs: list) -> dict[int, float]:
    """Return seed -> deciding loss of an arm's paired runs."""
    return {run.seed: run.metrics[DECIDING] for run, _ in pairs if DECIDING in run.metrics}


def read_outcome(out: Path, record: Record) -> Outcome:
    """Read a study. Raises UserError for a damaged run."""
    names = {label(judged): judged for judged in record.arms}
    screened, judged_all = finished(out, SCREENING), finished(out, JUDGED)
    options = {name: screens_of(screened, record, judged) for name, judged in names.items()}
    choices = {name: chosen(record, screens) for name, screens in options.items()}
    screens = {name: choice.screen for name, choice in choices.items()}
    rates = {name: choice.rate for name, choice in choices.items()}
    no_rate = {}
    for name, rate in rates.items():
        if rate is None:
            are_over = all(its.is_over for its in options[name].values())
            no_rate[name] = NOT_SETTLED if are_over else NOT_OVER
    arms: Arms = {}
    others: list[str] = []  # lines about runs that are not of this study, or not at the rate
    # Without its rate, nothing tells whether an arm's runs were made at it, nor the rate's error.
    for name in names.keys() - no_rate.keys():
        for seed, run in judged_runs(judged_all, record, names[name]).items():
            if why := mismatch(run, record, choices[name].option, seed, rates[name]):
                others.append(f"{name}, seed {seed}: not paired: {why}: {AGAIN}")
            else:
                arms.setdefault(name, {})[seed] = run
    arms = {name: arms[name] for name in names if name in arms}
    # What comes later changes nothing for the arms that were declared first.
    first = {label(judged) for judged in record.declaration.arms}
    declared = [screen for name in first for screen in options[name].values()]
    every = [screen for its in options.values() for screen in its.values()]
    errors = {
        name: rate_error_of(screen, declared if name in first else every)
        for name, screen in screens.items()
    }
    compared = Compared({}, [], {}, [])
    if label(record.baseline) in arms:
        compared = compare_families(record, arms, errors)
    return Outcome(
        out=out,
        record=record,
        options=options,
        chosen={name: choice.option for name, choice in choices.items()},
        screens=screens,
        rates=rates,
        rate_errors=errors,
        arms=arms,
        pairs=compared.pairs,
        rows=compared.rows,
        no_verdict=compared.no_verdict | no_rate,
        left_out=[*sorted(others), *compared.left_out],
    )


def rate_error_of(screen: Screen, screens: list[Screen]) -> float:
    """Return the standard error that a screening leaves in an arm's loss, nats; 0 if not over.

    Args:
        screens: all screenings of the study, which tell the noise of a run.
    """
    if screen.choice() is None:
        return 0.0
    sd = noise(screens) or 0.0
    if math.isfinite(screen.bend):
        return rate_error(screen.bend, sd)
    return math.hypot(screen.cost_beside_divergence, worst_rate_error() * sd)


class Compared(NamedTuple):
    """Comparisons of all families: fields of Outcome."""

    pairs: Pairs
    rows: list[Comparison]
    no_verdict: dict[str, str]
    left_out: list[str]


def compare_families(record: Record, arms: Arms, errors: dict[str, float]) -> Compared:
    """Pair and compare, each family by itself.

    Args:
        arms: arm -> seed -> judged run.
        errors: arm -> standard error that its screening leaves, nats.
    """
    baseline = label(record.baseline)
    bases = [*arms[baseline].values()]
    if all(run.problem() for run in bases):
        why = f"of {baseline}, no run can be compared: {bases[0].problem()}"
        return Compared({}, [], {label(judged): why for judged in record.arms[1:]}, [])
    own = tuple(own_choices(judged.text for judged in record.arms))
    pairs, left_out = pair_by_seed(arms, baseline, own)
    diverged = diverged_arms(like_baseline(arms, baseline, own))
    found = Compared(pairs, [], {}, left_out)
    for family in record.families:
        names = [label(judged) for judged in family]
        its = {name: pairs[name] for name in names if pairs.get(name)}
        both = {name: math.hypot(errors[name], errors[baseline]) for name in its}
        rows, not_measured = compare(its, baseline, 0.0, diverged, both, len(names))
        found.rows.extend(rows)
        found.left_out.extend(not_measured)
        for name in names:
            if why := lack_of_verdict(name, baseline, pairs.get(name, []), diverged):
                found.no_verdict[name] = why
    return found
