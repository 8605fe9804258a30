"""Which norm? Archives of runs -> the card, its tables and its figure.

    python -m repro.which_norm
        results/cpu/which_norm: README.md and card.png; and, between markers, the card in
        docs/which_norm.md, its picture and answer in README.md
    python -m repro.which_norm results/30m/which_norm/rates-W.tar.xz
        the rate of each arm, from its curve over the learning rate

Every arm has the learning rate that was chosen for it, as its study declares. Pairs are those of
report.py (evidence/comparison.py), which refuses runs that differ in anything else.
repro/which_norm.toml and the heads of repro/layer_coupled.sh and repro/leads.sh declare what is
compared. An archive that is not there yet is "not run".
"""

import functools
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import special

from common.errors import UserError, run_program
from common.output import markdown, write_bytes_atomically, writing
from common.stats import BETTER, NO_DIFFERENCE, Estimate, Verdict, decide, holm, paired
from evidence.comparison import BY_SEED, Arms, Pairs, pair_by_seed
from evidence.runs import (
    RATES,
    Run,
    by_arm,
    by_value,
    difference_in_settings,
    final_loss,
    find_runs,
)
from study.rates import level_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "cpu"
OUT = RESULTS / "which_norm"
PLAN = tomllib.loads((ROOT / "repro" / "which_norm.toml").read_text(encoding="utf-8"))
SHAPES = {"W": "wide", "D": "deep"}
MARKERS = ("<!-- card: python -m repro.which_norm -->", "<!-- end of the card -->")
# Arms that the plan does not name
OTHER_ARMS = {
    "coupled --coupled_span=0 --coupled_calibrate=10": "one-rms",
    "deepnorm --norm_recipe=common": "deepnorm-common",
}
# Arm -> its words in the picture
ON_CARD = {
    "peri": "Peri-LN",
    "one-rms": "one-RMS CoupledNorm",
    "deepnorm-common": "DeepNorm",
    "coupled-full-gradient": "full-gradient CoupledNorm",
    "coupled-block-0": "first-block CoupledNorm",
    "coupled": "plain CoupledNorm",
    "rms-qk-norm": "RMSNorm plus QK-norm",
    "layer": "LayerNorm",
}
BASELINE = PLAN["baseline"]


@dataclass(frozen=True)
class Condition:
    """Runs of several arms that differ in norm, learning rate and seed alone.

    Attributes:
        archive: below results/cpu, without its ending; or a folder of archives.
        name: heading of its column.
        shape: W or D.
        family: name of the tests that are corrected together; "" for runs that nothing judges.
        tests: number of tests that the family was declared with.
        seeds: those that are compared.
    """

    archive: str
    name: str
    shape: str
    family: str
    tests: int
    seeds: range


WIDE, DEEP = "wide, 2 M tokens", "deep, 2 M tokens"
LONG, MUON = "wide, 8 M tokens", "wide, Muon"
CONDITIONS = (
    Condition("which_norm/verdict-W", WIDE, "W", "verdict", 8, range(200, 216)),
    Condition("which_norm/verdict-D", DEEP, "D", "verdict", 8, range(200, 216)),
    Condition("layer_coupled/W", WIDE, "W", "layer and coupled", 4, range(200, 216)),
    Condition("layer_coupled/D", DEEP, "D", "layer and coupled", 4, range(200, 216)),
    Condition("leads/verdict-W", WIDE, "W", "leads", 3, range(720, 736)),
    Condition("leads/verdict-D", DEEP, "D", "leads", 3, range(720, 736)),
    Condition("which_norm/tokens-W", LONG, "W", "", 0, range(400, 404)),
    Condition("which_norm/muon-W", MUON, "W", "", 0, range(500, 504)),
)
# Judged by a declaration of its own, at a rate that was not tuned for it, and not on the card
OTHER_STUDIES = (Condition("span_again", "wide, the rate of rms", "W", "span", 5, range(600, 608)),)
NAMES = tuple(dict.fromkeys(condition.name for condition in CONDITIONS))


# ----------------------------------------------------------------------------------- runs and pairs


@functools.cache
def read(archive: str) -> list[Run]:
    """Return the runs of an archive below results/cpu; none if it is not there yet."""
    paths = (RESULTS / f"{archive}.tar.xz", RESULTS / archive)
    runs = next((find_runs([path]) for path in paths if path.exists()), [])
    for run in runs:
        run.check()
    return runs


def read_alike(archive: str, *may_differ: str) -> list[Run]:
    """Return the runs of an archive. Raises UserError if they differ in more than these settings.

    Norm, seed and device may differ too.
    """
    return check_one_study(read(archive), *may_differ)


def check_one_study(runs: list[Run], *may_differ: str) -> list[Run]:
    """Return the runs. Raises UserError if they differ in more than these settings.

    Norm, seed and device may differ too.
    """
    for run in runs:
        if difference := difference_in_settings(run, runs[0], (*BY_SEED, *may_differ)):
            raise UserError(f"{run.name} and {runs[0].name}: {difference}: not of one study")
    return runs


def arm_name(run: Run) -> str:
    """Return the short name of a run's arm, of the plan or our own; the arm itself without one."""
    block_0 = " ".join(["Rs", *["RR"] * (run.config["n_layer"] - 1), "R"])
    names = {words.format(block_0=block_0): name for name, words in PLAN["arms"].items()}
    return (names | OTHER_ARMS).get(run.arm, run.arm)


@dataclass(frozen=True)
class Difference:
    """One arm against `rms` under one condition.

    Attributes:
        condition: of the runs.
        arm: short name.
        nats: (n,) loss minus that of `rms`, by seed, of pairs of which no run diverged.
        diverged: number of pairs of which a run diverged.
        verdict: None without a family, before all seeds are done, and where a run diverged.
    """

    condition: Condition
    arm: str
    nats: np.ndarray
    diverged: int
    verdict: Verdict | None = None

    @property
    def is_whole(self) -> bool:
        """Are all seeds done, and did no run diverge?"""
        return len(self.nats) == len(self.condition.seeds) and not self.diverged

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The mean difference and its error."""
        return paired(self.nats)

    @property
    def is_better(self) -> bool:
        """Is the arm better than `rms`, by its family's tests?"""
        return self.verdict is not None and self.verdict.direction == BETTER

    def text(self) -> str:
        """Return what the card says: mean, 95 % interval, and the verdict, if there is one."""
        if self.diverged:
            return f"diverged in {self.diverged} of {len(self.condition.seeds)}"
        if not self.is_whole:
            return "begun"
        low, high = self.estimate.interval()
        words = f"{self.estimate.mean:+.4f} ({low:+.4f} to {high:+.4f})"
        if self.verdict is None or self.verdict.direction == NO_DIFFERENCE:
            return words
        return f"{words}, **{self.verdict.direction}**"


def arms_under(condition: Condition) -> Arms:
    """Return arm -> seed -> run. Raises UserError if an arm has several learning rates."""
    return by_arm_name([run for run in read(condition.archive) if run.seed in condition.seeds])


def by_arm_name(runs: list[Run]) -> Arms:
    """Sort runs: short name -> seed -> run. Raises UserError if an arm has several rates."""
    arms: Arms = {}
    for name, its in by_arm(runs).items():
        first = next(iter(its.values()))
        arm = arm_name(first)
        if arm in arms:
            raise UserError(f"{first.name}: {name} is {arm} once more, at another rate")
        arms[arm] = its
    return arms


def all_pairs(arms: Arms, baseline: str, but: tuple[str, ...] = ()) -> Pairs:
    """Pair all runs that have not diverged with those of the baseline, by seed.

    Raises UserError if one is not finished, or if evidence/comparison.py refuses a pair.
    """
    for runs in arms.values():
        for run in runs.values():
            final_loss(run)
    pairs, left_out = pair_by_seed(arms, baseline, but)
    base = {seed for seed, run in arms[baseline].items() if not run.diverged}
    for arm, its in pairs.items():
        seeds = {seed for seed, run in arms[arm].items() if not run.diverged}
        if len(its) < len(seeds & base):
            why = next(line for line in left_out if line.startswith((f"{arm}, ", f"{arm}: ")))
            raise UserError(f"{why}: its study cannot be judged")
    return pairs


def differences(condition: Condition) -> list[Difference]:
    """Compare each arm with `rms`, seed by seed. Raises UserError of `all_pairs`."""
    arms = arms_under(condition)
    if BASELINE not in arms:
        return []
    pairs = all_pairs(arms, BASELINE)
    base = arms.pop(BASELINE)
    found = []
    for arm, runs in arms.items():
        seeds = runs.keys() & base.keys()
        nats = [final_loss(run) - final_loss(other) for run, other in pairs.get(arm, [])]
        diverged = sum(runs[seed].diverged or base[seed].diverged for seed in seeds)
        if seeds:
            found.append(Difference(condition, arm, np.array(nats), diverged))
    return found


@functools.cache
def rms_lengths(shape: str) -> dict[int, list[float]]:
    """Return steps -> losses of the `rms` runs that measure what tokens are worth."""
    by_length: dict[int, list[float]] = {}
    for run in read_alike(f"which_norm/margin-{shape}", "max_iters", "warmup_iters"):
        by_length.setdefault(run.config["max_iters"], []).append(final_loss(run))
    return by_length


def slope(shape: str) -> float:
    """Return the nats that e times as many tokens buy `rms`, from the shortest to the longest."""
    by_length = rms_lengths(shape)
    short, long = min(by_length), max(by_length)
    fall = np.mean(by_length[short]) - np.mean(by_length[long])
    return float(fall / math.log(long / short))


def margin(shape: str) -> float:
    """Return what the margin's share of tokens buys in a shape, nats."""
    return slope(shape) * math.log1p(PLAN["margin"]["share"])


def declared_margin() -> float:
    """Return the plan's one margin for both shapes, the mean of theirs, nats."""
    return float(np.mean([margin(shape) for shape in SHAPES]))


@functools.cache
def all_differences(conditions: tuple[Condition, ...] = CONDITIONS) -> list[Difference]:
    """Return the differences under conditions, each shape of a family judged by itself.

    Holm over all arms and shapes of the family, two-sided; the margin of each test is that of its
    shape. Tests that cannot be made count with p = 1.
    """
    found: list[Difference] = []
    for family in dict.fromkeys(condition.family for condition in conditions):
        its = [condition for condition in conditions if condition.family == family]
        rows = [row for condition in its for row in differences(condition)]
        judged = [row for row in rows if family and row.is_whole]
        found += [row for row in rows if row not in judged]
        # In units of each shape's margin, so that the margin of all is one.
        units = [margin(row.condition.shape) for row in judged]
        estimates = [
            Estimate(row.estimate.mean / unit, row.estimate.se / unit, row.estimate.df)
            for row, unit in zip(judged, units, strict=True)
        ]
        verdicts = decide(estimates, 1.0, lower_is_better=True, planned=its[0].tests)
        found += [replace(row, verdict=verdict) for row, verdict in zip(judged, verdicts)]
    return found


def difference_of(arm: str, name: str) -> Difference | None:
    """Return the difference of an arm under the conditions of a column; None if it was not run."""
    rows = [row for row in all_differences() if (row.arm, row.condition.name) == (arm, name)]
    return rows[0] if rows else None


def in_both_shapes(bound: float) -> dict[str, float]:
    """Return arm -> p of the declared test: below `bound` in W and in D, Holm over the arms.

    The larger of the two one-sided p (intersection-union test, Berger 1982).
    """
    p_values: dict[str, float] = {}
    for row in all_differences():
        if row.condition.family == "verdict" and row.verdict is not None:
            estimate = row.estimate
            p = float(special.stdtr(estimate.df, (estimate.mean - bound) / estimate.se))
            p_values[row.arm] = max(p, p_values.get(row.arm, 0.0))
    adjusted = holm(list(p_values.values()), PLAN["verdict"]["arms"])
    return dict(zip(p_values, adjusted, strict=True))


# ----------------------------------------------------------------------------------- learning rates


@dataclass(frozen=True)
class Curve:
    """Losses of one arm in one shape over the learning rate.

    Attributes:
        losses: learning rate -> seed -> loss, infinite where the run diverged.
        stability: the last such event of the run at each rate with the first seed.
    """

    losses: dict[float, dict[int, float]]
    stability: dict[float, dict[str, float]]

    def at(self, rate: float) -> float:
        """Return the loss at a rate: the mean over its seeds, as `level_of` takes it."""
        return level_of(self.losses, rate, *PLAN["rates"]["seeds"])

    @functools.cached_property
    def best(self) -> float:
        """The rate of the lowest loss."""
        return min(sorted(self.losses), key=self.at)

    @property
    def chosen(self) -> float:
        """The rate to use, to two digits: the vertex of the parabola in log2(rate).

        Through the best rate and its neighbours, within half an octave of the best; the best itself
        where a neighbour is missing or diverged.
        """
        rates = sorted(self.losses)
        place = rates.index(self.best)
        near = rates[max(0, place - 1) : place + 2]
        losses = [self.at(rate) for rate in near]
        if len(near) < 3 or not all(map(math.isfinite, losses)):
            return self.best
        bend, fall, _ = np.polyfit(np.log2(np.array(near) / self.best), losses, 2)
        octaves = np.clip(-fall / (2 * bend), -0.5, 0.5)
        return float(f"{self.best * 2**octaves:.1e}")

    def rise(self, factor: float) -> str:
        """Return what the loss rises by at `factor` times the best rate, nats."""
        rate = self.best * factor
        if rate not in self.losses:
            return "not run"
        return nats_or_diverged(self.at(rate) - self.at(self.best), "+.4f")


def curves_of(runs: list[Run], loss_of: Callable[[Run], float] = final_loss) -> dict[str, Curve]:
    """Sort the runs of a screening: arm -> its curve.

    Args:
        loss_of: the loss of a run that decides.
    """
    found: dict[str, Curve] = {}
    for run in runs:
        curve = found.setdefault(arm_name(run), Curve({}, {}))
        rate = run.config["learning_rate"]
        curve.losses.setdefault(rate, {})[run.seed] = loss_of(run)
        if run.seed == PLAN["rates"]["seeds"][0]:
            curve.stability[rate] = run.stability
    return found


@functools.cache
def curves(shape: str) -> dict[str, Curve]:
    """Return arm -> losses over the learning rate, of the committed screening."""
    return curves_of(read_alike(f"which_norm/rates-{shape}", *RATES))


def nats_or_diverged(loss: float, form: str = ".4f") -> str:
    """Format a loss for a table."""
    return f"{loss:{form}}" if math.isfinite(loss) else "diverged"


def rates_table(found: dict[str, Curve]) -> str:
    """Return a table of losses over the learning rate, and what is known of the best rate."""
    rates = sorted({rate for curve in found.values() for rate in curve.losses})
    rows = []
    for arm in sorted(found, key=lambda arm: found[arm].at(found[arm].best)):
        curve = found[arm]
        cells = [nats_or_diverged(curve.at(rate)) if rate in curve.losses else "" for rate in rates]
        stable = curve.stability.get(curve.best) or {}
        names = ("clipped", "spikes", "attention_logit")
        values = [stable.get(name) for name in names]  # None if it was not finite
        events = ["" if value is None else f"{value:.3g}" for value in values]
        rows.append([f"`{arm}`", *cells, f"{curve.chosen:g}", *events])
    header = ["arm", *(f"{rate:g}" for rate in rates), "chosen"]
    return markdown([*header, "clipped steps", "spikes", "largest attention logit"], rows)


# --------------------------------------------------------------------- what else a setting is worth

# Two of the choices that `worth` compares
SCALE = "initial weights: std 0.08 instead of 0.02"
OPTIMIZER = "optimiser: Muon instead of AdamW"


def by_settings(shape: str, arm: str) -> dict[tuple[float, float], list[float]]:
    """Return learning rate and init_std -> losses, of the stage that asks if they were right."""
    found: dict[tuple[float, float], list[float]] = {}
    for run in read_alike(f"which_norm/check-{shape}", "init_std", *RATES):
        if arm_name(run) == arm:
            settings = run.config["learning_rate"], run.config["init_std"]
            found.setdefault(settings, []).append(final_loss(run))
    return found


def chosen_settings(shape: str) -> tuple[float, float]:
    """Return learning rate and init_std of `rms`."""
    return curves(shape)[BASELINE].chosen, PLAN["scales"]["cpu"]["shapes"][shape]["init_std"]


def muon_for_adamw() -> Estimate:
    """Return the loss of `rms` with AdamW minus that with Muon, each at its best rate, by seed."""
    arms = by_value(read("muon_rate/step"), "optimizer")
    pairs = all_pairs(arms, "adamw", ("optimizer",))["muon"]
    return paired(np.array([final_loss(base) - final_loss(run) for run, base in pairs]))


def worth() -> dict[str, float]:
    """Return by how much one choice instead of another lowers the loss in the wide shape, nats.

    All but the norm for `rms`. Initial scale: the chosen init_std, not GPT-2's, each at its best
    rate. Optimiser: likewise. Learning rate: the best, not half of it. Norm: the one that gains
    most.
    """
    best_rate, std = chosen_settings("W")
    by_std: dict[float, list[float]] = {}
    for run in read_alike("init_std/W", "init_std", "weight_decay", *RATES):
        # val_loss of these runs is over the whole split
        by_std.setdefault(run.config["init_std"], []).append(run.metrics["val_loss"])
    checked = by_settings("W", BASELINE)
    half = min(PLAN["check"]["factors"]) * best_rate
    gains = {
        row.arm: -row.estimate.mean
        for row in all_differences()
        if row.condition.name == WIDE and row.is_whole
    }
    best = max(gains, key=gains.get)
    return {
        SCALE: min(by_std[0.02]) - min(by_std[std]),
        OPTIMIZER: muon_for_adamw().mean,
        f"learning rate: {best_rate:g} instead of {half:g}": float(
            np.mean(checked[half, std]) - np.mean(checked[best_rate, std])
        ),
        f"norm: {ON_CARD[best]} instead of RMSNorm": gains[best],
    }


# ----------------------------------------------------------------------------------------- the card


# Written by hand, and held against the archives: the arms that it calls better in a shape are those
# that `better_arms` finds there, and what matters more is worth that to `rms`.
HEADLINE = """\
**For now, use RMSNorm before each sublayer.** Promising norms, better in one or both of \
our small models:

- both models: one-RMS CoupledNorm
- wide model: Peri-LN
- deep model:
  - DeepNorm
  - full-gradient CoupledNorm
  - first-block CoupledNorm

In the wide model, initial weights and optimiser mattered more than norms."""
CALLED_BETTER = {
    WIDE: {"peri", "one-rms"},
    DEEP: {"coupled-full-gradient", "coupled-block-0", "deepnorm-common", "one-rms"},
}
FAR = 2.0  # times the largest gain of a norm


def better_arms() -> dict[str, set[str]]:
    """Return which arms a declared study has found better than `rms`: shape's column -> arms."""
    rows = [row for row in all_differences((*CONDITIONS, *OTHER_STUDIES)) if row.is_better]
    on_wide = {row.arm for row in rows if row.condition.shape == "W"}
    on_deep = {row.arm for row in rows if row.condition.shape == "D"}
    return {WIDE: on_wide, DEEP: on_deep}


def headline() -> str:
    """Return the answer. Raises UserError if the archives no longer say what it says."""
    found = better_arms()
    if found != CALLED_BETTER:
        raise UserError(f"HEADLINE names {CALLED_BETTER} as better, and the runs say {found}")
    rows = all_differences((*CONDITIONS, *OTHER_STUDIES))
    largest = max(-row.estimate.mean for row in rows if row.is_better)
    nats = worth()
    least = min(nats[SCALE], nats[OPTIMIZER]) / largest
    if least < FAR:
        raise UserError(f"HEADLINE says more, and the runs say {least:.1f} times")
    return HEADLINE


def linked() -> str:
    """Return the headline as README has it, each norm with a link to its formula."""
    one_rms = ON_CARD["one-rms"]

    def link(found: re.Match[str]) -> str:
        page = "which_norm.md#how-to-read-the-card" if found[0] == one_rms else "norms.md"
        return f"[{found[0]}](docs/{page})"

    return re.sub(f"{one_rms}|Peri-LN|CoupledNorm|DeepNorm", link, headline())


def notes() -> str:
    """Say how the card's words are meant, and what is not shown."""
    bounds = (declared_margin(), margin("W"))
    declared, stricter = (in_both_shapes(bound)["coupled-full-gradient"] for bound in bounds)
    better = min(in_both_shapes(0.0).values())
    deep = next(condition for condition in CONDITIONS if condition.name == DEEP)
    compared = [final_loss(run) for run in arms_under(deep)[BASELINE].values()]
    screened = curves("D")[BASELINE]
    # All seeds of `rms` at its rate, or at the best one of the screening's grid
    everywhere = [
        *compared,
        *rms_lengths("D")[1000],
        *by_settings("D", BASELINE)[chosen_settings("D")],
        *screened.losses[screened.best].values(),
    ]
    limit = np.mean(compared) + 0.03
    bad, among = (sum(loss > limit for loss in losses) for losses in (everywhere, compared))
    muon = muon_for_adamw()
    low, high = muon.interval()
    return (
        "Loss over the whole val split minus that of `rms`, nats a byte, paired by seed; 95 % "
        "intervals. **Better** and **worse** are paired t tests, each shape by itself, Holm over "
        "all arms and shapes that were declared together; the other columns have four seeds and "
        "no verdicts. "
        f"2 % of the tokens are {margin('W'):.4f} nats in the wide shape, {margin('D'):.4f} in the "
        "deep one. The plan itself asked for an arm that is better in both shapes, and none of its "
        f"four is shown to be (smallest p {better:.2g}). That `coupled-full-gradient` loses no "
        f"more than {bounds[0]:.4f} in either is borderline (p {declared:.3f}; {stricter:.3f} at "
        f"the wide shape's {bounds[1]:.4f}). With its own best rate Muon ends {muon.mean:.4f} nats "
        f"({low:.4f} to {high:.4f}, four seeds) below AdamW, `rms` in the wide shape. The deep "
        f"shape has bad seeds: {bad} of {len(everywhere)} `rms` runs at its rate end 0.03 or more "
        f"above the mean of the {len(compared)} compared here, of which {among or 'none'} does."
    )


def card() -> str:
    """Return the card as Markdown."""
    rows = []
    for arm in ON_CARD:
        found = [difference_of(arm, name) for name in NAMES]
        rows.append([f"`{arm}`", *(row.text() if row else "not run" for row in found)])
    table = markdown(["arm", *NAMES], rows)
    return "\n\n".join([headline(), table, notes()])


# ------------------------------------------------------------------------- the page with all tables


def too_high_table() -> str:
    """Return what a learning rate that is too high costs: two and four times the best one tried."""
    rows = []
    screened = [arm for arm in (BASELINE, *ON_CARD) if arm in PLAN["arms"]]  # at such rates too
    for arm in screened:
        cells = [f"`{arm}`"]
        for shape in SHAPES:
            cells += [curves(shape)[arm].rise(factor) for factor in (2, 4)]
        rows.append(cells)
    return markdown(["arm", "wide, x 2", "wide, x 4", "deep, x 2", "deep, x 4"], rows)


def difference_table() -> str:
    """Return every difference whose seeds are done, with its tests."""
    rows = []
    for row in [row for row in all_differences() if row.is_whole]:
        interval = row.text().partition(", ")[0]
        cells = [row.condition.name, f"`{row.arm}`", len(row.nats), interval]
        cells.append(f"{np.std(row.nats, ddof=1):.4f}")
        tests = ["", "", "", "not judged"]
        if verdict := row.verdict:
            tests = [f"{p:.2g}" for p in (verdict.p, verdict.p_holm, verdict.p_tost)]
            tests.append(verdict.word)
        rows.append([*cells, *tests])
    header = ["condition", "arm", "seeds", "difference (95 % interval)", "SD"]
    return markdown([*header, "p", "p Holm", "p TOST", "verdict"], rows)


def both_table() -> str:
    """Return the tests that the plan declared: below its margin, and below zero, in both shapes."""
    below, better = in_both_shapes(declared_margin()), in_both_shapes(0.0)
    rows = [[f"`{arm}`", f"{below[arm]:.2g}", f"{better[arm]:.2g}"] for arm in below]
    return markdown(
        ["arm", f"p below {declared_margin():.4f}, both shapes", "p better, both"], rows
    )


def margin_table() -> str:
    """Return what tokens are worth to `rms`."""
    rows = [
        [shape, f"{steps}", ", ".join(f"{loss:.4f}" for loss in losses), f"{np.mean(losses):.4f}"]
        for shape in SHAPES
        for steps, losses in sorted(rms_lengths(shape).items())
    ]
    return markdown(["shape", "steps", "losses", "mean"], rows)


def check_table() -> str:
    """Return mean losses at other learning rates and initialisations."""
    rows = [
        [f"`{arm}`", shape, f"{rate:g}", f"{init_std:g}", nats_or_diverged(np.mean(losses))]
        for shape in SHAPES
        for arm in (BASELINE, "peri")
        for (rate, init_std), losses in sorted(by_settings(shape, arm).items())
    ]
    return markdown(["arm", "shape", "learning_rate", "init_std", "mean of 4 seeds"], rows)


def page() -> str:
    """Return README.md of the results."""
    slopes = ", ".join(f"{slope(shape):.4f} in {shape}" for shape in SHAPES)
    settings = [f"{words} {nats:.4f}" for words, nats in worth().items()]
    archives = [condition.archive for condition in CONDITIONS]
    archives += [
        f"which_norm/{stage}-{shape}" for stage in ("rates", "margin", "check") for shape in SHAPES
    ]
    archives += ["muon_rate/curve", "muon_rate/step"]
    commits = {run.start["git"][:7] for archive in archives for run in read(archive)}
    parts = [
        "# Which norm?",
        "Plan: [repro/which_norm.toml](../../../repro/which_norm.toml); `layer` and `coupled`: "
        "[repro/layer_coupled.sh](../../../repro/layer_coupled.sh); `one-rms`: "
        "[repro/leads.sh](../../../repro/leads.sh). Words are explained in "
        "[docs/which_norm.md](../../../docs/which_norm.md). The `.json` files are what each stage "
        "concluded when it was done.",
        card(),
        "![The card as a figure](card.png)",
        f"What choices lower the loss by in the wide shape, nats: {'; '.join(settings)}.",
        "## All differences",
        difference_table(),
        "## The declared tests\n\nThe larger p of both shapes, one-sided, Holm over four arms.",
        both_table(),
        "## A learning rate that is too high\n\nNats above the loss at the best rate tried.",
        too_high_table(),
        "## Learning rates (selection seeds; no verdicts)",
        "val_loss_full, nats a byte: the mean over the seeds at that rate, the second seed cleared "
        "of its mean difference from the first.",
        *(f"{shape}:\n\n{rates_table(curves(shape))}" for shape in SHAPES),
        f"W with Muon:\n\n{rates_table(curves_of(read_alike('muon_rate/curve', *RATES)))}",
        f"## Margin\n\nNats for e times the tokens: {slopes}. 1,000 steps are 2 M tokens.",
        margin_table(),
        "## Were rate and initialisation right?",
        check_table(),
        f"Commits of the runs: {', '.join(sorted(commits))}.",
    ]
    return "\n\n".join(parts) + "\n"


def put(path: Path, text: str) -> None:
    """Put the card between its markers in a page; a page without them is left alone."""
    before, start, rest = path.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if end:
        write_bytes_atomically(path, f"{before}{start}\n\n{text}\n\n{end}{after}".encode())


def main(argv: list[str]) -> None:
    """Write the card, its tables and its figure; or print the rates of the archives in `argv`."""
    if argv:
        print(rates_table(curves_of(find_runs([Path(word) for word in argv]))))
        return
    from repro.which_norm_figure import draw_card

    with writing(OUT):
        write_bytes_atomically(OUT / "README.md", page().encode())
        rows = {
            words: {"wide model": difference_of(arm, WIDE), "deep model": difference_of(arm, DEEP)}
            for arm, words in ON_CARD.items()
        }
        draw_card(rows, worth(), OUT / "card.png")
    put(ROOT / "docs/which_norm.md", card())
    picture = "![How norms and other choices change the validation loss of small models]"
    put(ROOT / "README.md", f"{picture}(results/cpu/which_norm/card.png)\n\n{linked()}")
    print(f"wrote {OUT}, the card in docs/which_norm.md, and its answer in README.md")


if __name__ == "__main__":
    run_program(main, __doc__)
