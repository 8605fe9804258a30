"""Does it last? Archives of repro/lasts.sh -> rates, what tokens are worth, the verdict.

    python -m repro.lasts          results/cpu/lasts/README.md
    python -m repro.lasts blind    the blind look: how far differences spread; no arm, no mean

The head of repro/lasts.sh declares what is compared, and this file was written before the first
run. What decides is the loss over the documents that data/wheels shares with data/stdlib. Where the
declaration leaves a choice:

- The blind look is at seeds 800 to 809. Of an arm that has no verdict any more it takes nothing.
- Where a run of `rms` diverged no arm has a verdict.
- The slope s counts as exact.

Until the last seed is there, nothing else may be asked of A.tar.xz: report.py and repro.which_norm
print means.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from common.errors import UserError, run_program
from common.output import markdown
from common.stats import ALPHA, Estimate, holm, paired
from evidence.runs import RATES, Run, final_loss
from repro import declared
from repro.which_norm import (
    BASELINE,
    PLAN,
    Curve,
    arm_name,
    by_arm_name,
    check_one_study,
    curves_of,
    rates_table,
)

STDLIB_TOKENS = 349_064  # targets of data/stdlib's val split
XEON = "S-Xeon"  # runs of S on the processor on which it was begun: they choose nothing
STEPS = {"S": 7680, XEON: 7680, "M-3840": 3840, "M-15360": 15360, "A": 7680}
SCREENED = set(PLAN["rates"]["seeds"])
SLOPE_SEEDS = set(range(150, 154))
SEEDS = set(range(800, 820))
MORE_SEEDS = set(range(820, 830))
BLIND = set(range(800, 810))
LARGEST_SD = 0.012  # of the blind look; above it MORE_SEEDS are run too
EQUAL = 0.01  # share of the tokens within which `layer` is called equal
TAIL = 0.03  # nats above its arm's median that make a run's end a bad one


class Tested(NamedTuple):
    """An arm of the family of three, and what it was at 2 M tokens."""

    sign: int  # of its difference from `rms`
    half: float  # half of what it was worth, as a share of the tokens, in units of the logarithm


TESTED = {
    "peri": Tested(-1, 0.030),
    "one-rms": Tested(-1, 0.033),
    "coupled": Tested(1, 0.028),
}
OTHERS = ("layer", *TESTED)
ARMS = (BASELINE, *OTHERS)


# ---------------------------------------------------------------------------------- runs and losses


class Losses(NamedTuple):
    """What a run ends at, nats a byte; infinite if it diverged."""

    stdlib: float  # over the documents of data/stdlib: it decides
    wheels: float  # over the files that were held out of the wheels


def losses_of(run: Run) -> Losses:
    """Return both losses of a run.

    Raises UserError if its documents are others, or as `final_loss` does.
    """
    if math.isinf(final_loss(run)):
        return Losses(math.inf, math.inf)
    ends = np.cumsum(run.document_tokens)
    last = int(np.searchsorted(ends, STDLIB_TOKENS))
    if last + 1 >= len(ends) or ends[last] != STDLIB_TOKENS:
        raise UserError(f"{run.name}: its first documents are not those of data/stdlib")
    found = []
    for part in (slice(0, last + 1), slice(last + 1, None)):
        found.append(float(run.document_nats[part].sum() / run.document_tokens[part].sum()))
    return Losses(*found)


def deciding(run: Run) -> float:
    """Return the loss that decides."""
    return losses_of(run).stdlib


def read(archive: str) -> list[Run]:
    """Return the runs of an archive; none if it is not there yet. Raises UserError."""
    runs = declared.read("lasts", archive)
    for run in runs:
        if run.config["max_iters"] != STEPS[archive]:
            raise UserError(f"{run.name}: {run.config['max_iters']} steps, not {STEPS[archive]}")
        if arm_name(run) not in ARMS:
            raise UserError(f"{run.name}: no arm of the declaration")
    return runs


def check_study() -> None:
    """Raise UserError if the runs of all stages are not of one study, as it was declared."""
    slopes = read("M-3840") + read("M-15360")
    everything = read("S") + read(XEON) + slopes + read("A")
    check_one_study(everything, "max_iters", "eval_interval", "planned_seeds", *RATES)
    declared.check_seeds(read("S"), SCREENED)
    declared.check_seeds(slopes, SLOPE_SEEDS)
    declared.check_seeds(read("A"), SEEDS | MORE_SEEDS)
    declared.check_processors(read("S"), lambda run: (arm_name(run), run.seed))
    declared.check_processors(slopes + read("A"), lambda run: run.seed)
    chosen = rates()
    for run in slopes + read("A"):
        arm = arm_name(run)
        if arm not in chosen or run.config["learning_rate"] != chosen[arm].chosen:
            raise UserError(f"{run.name}: its learning rate is not what S chose for {arm}")
    if any(arm_name(run) != BASELINE for run in slopes):
        raise UserError("M-*.tar.xz: what tokens are worth is measured with rms alone")


# ------------------------------------------------------------------------------ rates and the slope


def rates() -> dict[str, Curve]:
    """Return arm -> losses over the learning rate."""
    return curves_of(read("S"), deciding)


def not_settled(curve: Curve) -> str:
    """Say what an arm's screening lacks; "" if nothing."""
    found = sorted(curve.losses)
    by_loss = sorted(found, key=curve.at)
    if by_loss[0] in (found[0], found[-1]):
        return f"the best is at an end, {by_loss[0]:g}"
    lacking = [f"{rate:g}" for rate in by_loss[:2] if set(curve.losses[rate]) != SCREENED]
    return f"a second seed at {' and '.join(lacking)}" if lacking else ""


def slope_losses() -> dict[int, list[float]]:
    """Return steps -> losses of `rms`, those of a seed that is not whole left out."""
    archives = [read("M-3840"), read("M-15360")]
    whole = set.intersection(*({run.seed for run in runs} for runs in archives))
    return {
        runs[0].config["max_iters"]: [deciding(run) for run in runs if run.seed in whole]
        for runs in archives
        if runs
    }


def has_slope() -> bool:
    """Are all runs there that the slope needs?"""
    return [len(losses) for losses in slope_losses().values()] == [len(SLOPE_SEEDS)] * 2


def slope() -> float:
    """Return the nats that e times as many tokens buy `rms`.

    Raises UserError if they buy nothing, or a run diverged.
    """
    (short, near), (long, far) = sorted(slope_losses().items())
    found = float((np.mean(near) - np.mean(far)) / math.log(long / short))
    if not 0 < found < math.inf:
        raise UserError(f"the slope is {found}: a run of M diverged, or longer runs ended no lower")
    return found


# -------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Difference:
    """One arm minus `rms`, by seed, where neither run diverged.

    Attributes:
        stdlib: (n,) nats a byte over the documents that decide.
        wheels: (n,) over the others.
    """

    stdlib: np.ndarray
    wheels: np.ndarray

    @property
    def estimate(self) -> Estimate:
        """The mean difference that decides, and its error."""
        return paired(self.stdlib)


def ends_of(seeds: set[int]) -> dict[str, dict[int, Losses]]:
    """Return arm -> seed -> losses, of all five arms."""
    arms = by_arm_name([run for run in read("A") if run.seed in seeds])
    return {
        arm: {seed: losses_of(run) for seed, run in sorted(arms.get(arm, {}).items())}
        for arm in ARMS
    }


def diverged(ends: dict[int, Losses]) -> int:
    """Count an arm's runs that diverged."""
    return sum(math.isinf(losses.stdlib) for losses in ends.values())


def bad_ends(ends: dict[int, Losses]) -> int:
    """Count an arm's runs that end far above its median."""
    losses = np.array([losses.stdlib for losses in ends.values()])
    return int((losses > np.median(losses) + TAIL).sum())


def difference(ends: dict[int, Losses], base: dict[int, Losses]) -> Difference:
    """Compare an arm with `rms`, seed by seed."""
    seeds = [
        seed
        for seed in sorted(ends.keys() & base.keys())
        if math.isfinite(ends[seed].stdlib + base[seed].stdlib)
    ]
    return Difference(
        np.array([ends[seed].stdlib - base[seed].stdlib for seed in seeds]),
        np.array([ends[seed].wheels - base[seed].wheels for seed in seeds]),
    )


def whole_seeds() -> set[int]:
    """Return the seeds of which all arms have a finished run, diverged or not."""
    arms = by_arm_name(read("A"))
    return set.intersection(*({*arms.get(arm, {})} for arm in ARMS))


def blind_look() -> float:
    """Return the pooled SD of the paired differences of the first ten seeds, nats a byte.

    Over all arms of which no run diverged. Raises UserError before those seeds are whole.
    """
    if missing := sorted(BLIND - whole_seeds()):
        raise UserError(f"the blind look is at ten seeds, and {missing[0]} is not whole")
    ends = ends_of(BLIND)
    squares = freedom = 0.0
    for arm in OTHERS:
        nats = difference(ends[arm], ends[BASELINE]).stdlib
        if not diverged(ends[arm]) and len(nats) > 1:
            squares += float(((nats - nats.mean()) ** 2).sum())
            freedom += len(nats) - 1
    if not freedom:
        raise UserError("the blind look has no arm without a run that diverged")
    return (squares / freedom) ** 0.5


def planned_seeds() -> set[int]:
    """Return the seeds that are needed for a verdict. Raises UserError of `blind_look`."""
    return SEEDS | MORE_SEEDS if blind_look() > LARGEST_SD else SEEDS


def is_whole() -> bool:
    """Tell whether all is there that the verdict needs."""
    seeds = whole_seeds()
    return has_slope() and seeds >= BLIND and seeds >= planned_seeds()


def conclusion(arm: str, estimate: Estimate, p_holm: float, nats: float) -> str:
    """Return the words of the declaration about an arm of the family.

    Args:
        p_holm: of its test.
        nats: the slope.
    """
    was = TESTED[arm]
    lasts = p_holm < ALPHA and estimate.mean * was.sign > 0
    # The end of the one-sided interval that lies on the side of 2 M tokens
    low, high = estimate.interval(2 * ALPHA)
    farthest = -low if was.sign < 0 else high
    words = ["lasts"] if lasts else []
    if farthest / nats < was.half:
        words.append("at most half is left")
    return "; ".join(words) or "open"


def verdict_table(ends: dict[str, dict[int, Losses]]) -> str:
    """Return the tests, a row for each arm."""
    nats = slope()
    rows = {arm: difference(ends[arm], ends[BASELINE]) for arm in OTHERS}
    tested = [arm for arm in TESTED if not diverged(ends[arm])]
    p_values = [rows[arm].estimate.p_value() for arm in tested]
    p_holm = dict(zip(tested, holm(p_values, len(TESTED)), strict=True))
    table = []
    for arm, row in rows.items():
        if count := diverged(ends[arm]):
            words = f"diverged in {count} of {len(ends[arm])}: no verdict"
            table.append([f"`{arm}`", *[""] * 7, words])
            continue
        estimate = row.estimate
        if arm in TESTED:
            tests = [f"{p_holm[arm]:.2g}", ""]
            words = conclusion(arm, estimate, p_holm[arm], nats)
        else:
            p_tost = estimate.tost(nats * math.log1p(EQUAL))
            tests = ["", f"{p_tost:.2g}"]
            words = f"equal within {EQUAL:.0%} of the tokens" if p_tost < ALPHA else "open"
        low, high = estimate.interval()
        cells = [f"{estimate.mean:+.4f} ({low:+.4f} to {high:+.4f})"]
        cells.append(f"{estimate.mean / nats:+.1%} ({low / nats:+.1%} to {high / nats:+.1%})")
        cells += [f"{estimate.p_value():.2g}", *tests]
        cells.append(f"{stats.wilcoxon(row.stdlib).pvalue:.2g}")
        table.append([f"`{arm}`", *cells, f"{np.mean(row.wheels):+.4f}", words])
    header = ["arm", "minus `rms` (95 %)", "in tokens", "p", "p Holm", "p TOST", "p Wilcoxon"]
    return markdown([*header, "held-out wheels", "verdict"], table)


def verdict() -> str:
    """Return what the page says once all is whole."""
    ends = ends_of(planned_seeds())
    count = len(ends[BASELINE])
    sd = blind_look()
    tails = ", ".join(f"`{arm}` {bad_ends(its)}" for arm, its in ends.items())
    parts = [
        f"{count} seeds. The blind look at the first ten found a pooled SD of {sd:.4f}, so there "
        f"are {'ten more' if count > len(SEEDS) else 'no more'}. Of the {count} runs of an arm "
        f"these end {TAIL} or more above its median, and are kept: {tails}."
    ]
    if bad := diverged(ends[BASELINE]):
        parts.append(f"`{BASELINE}` diverged in {bad} of {count}, so no arm has a verdict.")
    else:
        parts.append(verdict_table(ends))
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------- the page


def state() -> str:
    """Say which seeds have run, where there is no verdict yet. No mean is computed."""
    whole = whole_seeds()
    begun = {run.seed for run in read("A")} - whole
    words = [f"whole seeds: {numbers(whole)}" if whole else "no seed is whole"]
    if begun:
        words.append(f"begun: {numbers(begun)}")
    if not has_slope():
        words.append("what tokens are worth is not measured")
    return f"**Open**: {'; '.join(words)}."


def numbers(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def rates_part() -> list[str]:
    """Return the table of the screening, and what it lacks."""
    if not read("S"):
        return ["Not run."]
    found = rates()
    lacking = {arm: not_settled(curve) for arm, curve in found.items()}
    said = [f"`{arm}`: {words}" for arm, words in lacking.items() if words]
    return [rates_table(found), *([f"Not settled: {'; '.join(said)}."] if said else [])]


def xeon_part() -> list[str]:
    """Say how far from the runs of S the same runs end on another processor."""
    elsewhere = ends_by_settings(XEON)
    if not elsewhere:
        return []
    here = ends_by_settings("S")
    apart = [here[same] - loss for same, loss in elsewhere.items() if same in here]
    words = (
        f"{len(elsewhere)} runs on another model of processor ({XEON}.tar.xz) choose nothing, for "
        "all rates of an arm and seed must be of one model."
    )
    if apart:
        words += (
            f" {len(apart)} of them were run again: they end {min(apart):+.4f} to "
            f"{max(apart):+.4f} from where they ended there."
        )
    return [words]


def ends_by_settings(archive: str) -> dict[tuple[str, float, int], float]:
    """Return (arm, learning rate, seed) -> the loss that decides."""
    return {
        (arm_name(run), run.config["learning_rate"], run.seed): deciding(run)
        for run in read(archive)
    }


def slope_part() -> list[str]:
    """Return the losses that the slope comes from, and the slope."""
    if not has_slope():
        return ["Not whole."]
    rows = [
        [steps, ", ".join(f"{loss:.4f}" for loss in losses), f"{np.mean(losses):.4f}"]
        for steps, losses in sorted(slope_losses().items())
    ]
    table = markdown(["steps", "losses of `rms`", "mean"], rows)
    return [table, f"e times the tokens: {slope():.4f} nats."]


def page() -> str:
    """Return README.md of the results."""
    check_study()
    parts = [
        "# Does it last?",
        "Runs of [repro/lasts.sh](../../../repro/lasts.sh), whose head is the declaration: the "
        "wide shape at 20 bytes a parameter. Nats a byte over the documents of `data/stdlib`'s val "
        "split. This page: `python -m repro.lasts`.",
        "## Learning rates (selection seeds; no verdicts)",
        *rates_part(),
        *xeon_part(),
        "## What tokens are worth",
        *slope_part(),
        "## Verdict",
        verdict() if is_whole() else state(),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> None:
    """Write the page, or print the blind look."""
    if argv == ["blind"]:
        check_study()
        sd = blind_look()
        more = f"seeds {min(MORE_SEEDS)} to {max(MORE_SEEDS)} are run too"
        print(f"pooled SD {sd:.4f}: {more if sd > LARGEST_SD else 'no more seeds'}")
        return
    if argv:
        raise UserError("give no words, or blind")
    declared.write_page("lasts", page)


if __name__ == "__main__":
    run_program(main, __doc__)
