"""Does it last? Archives of repro/lasts.sh -> rates, what tokens are worth, the verdict.

    python -m repro.lasts          results/cpu/lasts/README.md
    python -m repro.lasts blind    the blind look: how far differences spread; no arm, no mean

The head of repro/lasts.sh declares what is compared, and this file was written before the first
run. What decides is the loss over the documents that data/wheels shares with data/stdlib.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from common.errors import UserError, run_program
from common.output import markdown, write_bytes_atomically, writing
from common.stats import ALPHA, Estimate, holm, paired
from evidence.comparison import Pairs
from evidence.runs import RATES, Run, final_loss, find_runs
from repro.which_norm import (
    BASELINE,
    Curve,
    all_pairs,
    by_arm_name,
    check_one_study,
    curves_of,
    rates_table,
)

OUT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "lasts"
STDLIB_TOKENS = 349_064  # targets of data/stdlib's val split
SEEDS = range(800, 820)
MORE_SEEDS = range(820, 830)
BLIND = range(800, 810)
LARGEST_SD = 0.012  # of the blind look; above it MORE_SEEDS are run too
LENGTHS = (3840, 15360)  # steps of the runs that measure what tokens are worth
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
ARMS = (BASELINE, "layer", *TESTED)


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
    parts = slice(0, last + 1), slice(last + 1, None)
    return Losses(
        *(run.document_nats[part].sum() / run.document_tokens[part].sum() for part in parts)
    )


def deciding(run: Run) -> float:
    """Return the loss that decides."""
    return losses_of(run).stdlib


@functools.cache
def read(name: str) -> list[Run]:
    """Return the runs of an archive in results/cpu/lasts; none if it is not there yet."""
    path = OUT / f"{name}.tar.xz"
    runs = find_runs([path]) if path.exists() else []
    for run in runs:
        run.check()
    return runs


# ----------------------------------------------------------------------------- rates and the slope


def rates() -> dict[str, Curve]:
    """Return arm -> losses over the learning rate."""
    return curves_of(check_one_study(read("S"), *RATES), deciding)


def lengths() -> dict[int, list[float]]:
    """Return steps -> losses of `rms`; empty until both lengths are whole."""
    found = {}
    for steps in LENGTHS:
        found[steps] = [deciding(run) for run in check_one_study(read(f"M-{steps}"))]
    return found if all(len(losses) == 4 for losses in found.values()) else {}


def slope() -> float:
    """Return the nats that e times as many tokens buy `rms`."""
    short, long = LENGTHS
    fall = np.mean(lengths()[short]) - np.mean(lengths()[long])
    return float(fall / math.log(long / short))


# -------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Difference:
    """One arm minus `rms`.

    Attributes:
        arm: short name.
        stdlib, wheels: (n,) nats a byte, by seed, of pairs of which no run diverged.
        diverged: number of pairs of which a run diverged.
        tails: number of the arm's runs that end badly.
    """

    arm: str
    stdlib: np.ndarray
    wheels: np.ndarray
    diverged: int
    tails: int

    @property
    def estimate(self) -> Estimate:
        """The mean difference that decides, and its error."""
        return paired(self.stdlib)


def whole_seeds() -> set[int]:
    """Return the seeds of which all arms have a finished run, diverged or not."""
    arms = by_arm_name(read("A"))
    return set.intersection(*({*arms.get(arm, {})} for arm in ARMS))


def differences(seeds: set[int]) -> list[Difference]:
    """Compare each arm with `rms` at these seeds. Raises UserError where runs differ in more."""
    arms = by_arm_name([run for run in read("A") if run.seed in seeds])
    if others := arms.keys() - {*ARMS}:
        raise UserError(f"{OUT}/A.tar.xz: {', '.join(sorted(others))}: no arm of the declaration")
    pairs: Pairs = {}
    for group in (SEEDS, MORE_SEEDS):  # each was planned by itself
        its = {
            arm: {seed: runs[seed] for seed in runs if seed in group} for arm, runs in arms.items()
        }
        if its[BASELINE]:
            for arm, found_pairs in all_pairs(its, BASELINE).items():
                pairs.setdefault(arm, []).extend(found_pairs)
    base = arms.pop(BASELINE)
    found = []
    for arm, runs in arms.items():
        both = [(losses_of(pair.run), losses_of(pair.base)) for pair in pairs.get(arm, [])]
        ends = np.array([deciding(run) for run in runs.values()])
        found.append(
            Difference(
                arm,
                np.array([ours.stdlib - theirs.stdlib for ours, theirs in both]),
                np.array([ours.wheels - theirs.wheels for ours, theirs in both]),
                sum(runs[seed].diverged or base[seed].diverged for seed in runs),
                int((ends > np.median(ends) + TAIL).sum()),
            )
        )
    return found


def blind_look() -> float:
    """Return the pooled SD of the paired differences of the first ten seeds, nats a byte.

    Raises UserError before they are whole.
    """
    if missing := sorted({*BLIND} - whole_seeds()):
        raise UserError(f"the blind look is for ten seeds, and {missing[0]} is not whole")
    variances = [np.var(row.stdlib, ddof=1) for row in differences({*BLIND})]
    return float(np.mean(variances)) ** 0.5


def planned_seeds() -> set[int]:
    """Return the seeds that are needed for a verdict. Raises UserError of `blind_look`."""
    return {*SEEDS, *MORE_SEEDS} if blind_look() > LARGEST_SD else {*SEEDS}


def is_whole() -> bool:
    """Tell whether all is there that the verdict needs."""
    seeds = whole_seeds()
    return bool(lengths()) and {*BLIND} <= seeds and planned_seeds() <= seeds


def conclusion(row: Difference, p_holm: float, nats: float) -> str:
    """Return the words of the declaration about an arm of the family.

    Args:
        p_holm: of its test.
        nats: the slope.
    """
    was = TESTED[row.arm]
    estimate = row.estimate
    lasts = p_holm < ALPHA and estimate.mean * was.sign > 0
    # The end of the one-sided interval that lies on the side of 2 M tokens
    low, high = estimate.interval(2 * ALPHA)
    farthest = -low if was.sign < 0 else high
    words = ["lasts"] if lasts else []
    if farthest / nats < was.half:
        words.append("at most half is left")
    return "; ".join(words) or "open"


def verdict_table() -> str:
    """Return the tests, a row for each arm. Raises UserError of `differences`."""
    rows = {row.arm: row for row in differences(planned_seeds())}
    nats = slope()
    tested = [arm for arm in TESTED if not rows[arm].diverged]
    p_values = [rows[arm].estimate.p_value() for arm in tested]
    p_holm = dict(zip(tested, holm(p_values, len(TESTED)), strict=True))
    table = []
    for arm in ARMS[1:]:
        row = rows[arm]
        if row.diverged:
            words = f"diverged in {row.diverged} of {len(planned_seeds())}: no verdict"
            table.append([f"`{arm}`", *[""] * 8, words])
            continue
        low, high = row.estimate.interval()
        if arm in TESTED:
            tests = [f"{p_holm[arm]:.2g}", ""]
            words = conclusion(row, p_holm[arm], nats)
        else:
            p_tost = row.estimate.tost(nats * math.log1p(EQUAL))
            tests = ["", f"{p_tost:.2g}"]
            words = f"equal within {EQUAL:.0%} of the tokens" if p_tost < ALPHA else "open"
        cells = [f"{row.estimate.mean:+.4f} ({low:+.4f} to {high:+.4f})"]
        cells.append(f"{row.estimate.mean / nats:+.1%} ({low / nats:+.1%} to {high / nats:+.1%})")
        cells.append(f"{row.estimate.p_value():.2g}")
        ranks = f"{stats.wilcoxon(row.stdlib).pvalue:.2g}"
        table.append(
            [f"`{arm}`", *cells, *tests, ranks, f"{np.mean(row.wheels):+.4f}", row.tails, words]
        )
    header = ["arm", "minus `rms` (95 %)", "in tokens", "p", "p Holm", "p TOST"]
    return markdown([*header, "p Wilcoxon", "held-out wheels", "bad ends", "verdict"], table)


# ----------------------------------------------------------------------------------------- the page


def state() -> str:
    """Say which seeds have run, where there is no verdict yet. No mean is computed."""
    seeds = sorted(whole_seeds())
    ran = f"whole seeds: {', '.join(map(str, seeds))}" if seeds else "no seed is whole"
    return f"**Open**: {ran}."


def page() -> str:
    """Return README.md of the results."""
    parts = [
        "# Does it last?",
        "Runs of [repro/lasts.sh](../../../repro/lasts.sh), whose head is the declaration: the "
        "wide shape at 20 bytes a parameter. Nats a byte over the documents of `data/stdlib`'s val "
        "split. This page: `python -m repro.lasts`.",
        "## Learning rates (selection seeds; no verdicts)",
        rates_table(rates()) if read("S") else "Not run.",
        "## What tokens are worth",
    ]
    if found := lengths():
        rows = [
            [steps, ", ".join(f"{loss:.4f}" for loss in losses), f"{np.mean(losses):.4f}"]
            for steps, losses in found.items()
        ]
        parts += [
            markdown(["steps", "losses of `rms`", "mean"], rows),
            f"e times the tokens: {slope():.4f} nats.",
        ]
    else:
        parts.append("Not whole.")
    parts += ["## Verdict", verdict_table() if is_whole() else state()]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> None:
    """Write the page, or print the blind look."""
    if argv == ["blind"]:
        sd = blind_look()
        more = f"seeds {MORE_SEEDS[0]} to {MORE_SEEDS[-1]} are run too"
        print(f"pooled SD {sd:.4f}: {more if sd > LARGEST_SD else 'no more seeds'}")
        return
    if argv:
        raise UserError("give no words, or blind")
    with writing(OUT):
        write_bytes_atomically(OUT / "README.md", page().encode())
    print(f"wrote {OUT / 'README.md'}")


if __name__ == "__main__":
    run_program(main, __doc__)
