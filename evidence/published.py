"""Re-read CoupledNorm's Table 1: what do its printed means and deviations support?

`report.py --published` is the program.

The paper (Loretz & Hochreiter 2026, section 5.2) prints means over 8 runs of each of two models.
Seeds were paired, but the pairs are not printed, so only an unpaired test can be made: Welch's.
"""

import csv
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from common.stats import (
    ALPHA,
    BEYOND,
    NO_DIFFERENCE,
    OPEN,
    WITHIN,
    Estimate,
    Verdict,
    decide,
    holm,
    welch,
)

INTRO = """\
CoupledNorm, Table 1, re-read from its printed numbers: Welch's unpaired t test, because the pairs
are not printed. Deviations are taken for standard deviations (the paper does not say). p Holm
corrects for all metrics of the table, and decides. Margins are ours, set after the fact; the paper
declares none, and without one nothing can be called equal. Each line reads: the paper's
baseline -> CoupledNorm.
"""
TABLE = Path(__file__).resolve().parents[1] / "repro" / "coupled_table1.csv"


@dataclass(frozen=True)
class PublishedRow:
    """One metric as the paper prints it, and how it is to be read."""

    metric: str
    unit: str
    lower_is_better: bool
    n: int  # runs of each model
    baseline_mean: float
    baseline_sd: float
    coupled_mean: float
    coupled_sd: float
    sd_unit: float  # what a printed deviation is multiplied by to have the unit of the means
    delta: float  # our margin of equivalence; 0 for none
    rounding: float  # half a unit of the last printed digit of a mean

    def estimate(self) -> Estimate:
        """Estimate the difference coupled - baseline by Welch's unpaired test."""
        return welch(
            self.baseline_mean,
            self.baseline_sd * self.sd_unit,
            self.n,
            self.coupled_mean,
            self.coupled_sd * self.sd_unit,
            self.n,
        )

    def description(self) -> str:
        """Say what was read."""
        text = f"{self.baseline_mean} -> {self.coupled_mean} {self.unit}, n = {self.n} each"
        text += f"; both means are rounded, by up to {self.rounding:g} each"
        if self.sd_unit != 1:
            text += f"; deviations stand in another unit there, taken times {self.sd_unit:g}"
        return text

    def check(self) -> None:
        """Raise ValueError for numbers that no table can print."""
        numbers = [value for value in vars(self).values() if isinstance(value, float)]
        if not all(map(math.isfinite, numbers)) or self.n < 2 or self.baseline_mean == 0:
            raise ValueError
        deviations = (self.baseline_sd, self.coupled_sd)
        if min(deviations) < 0 or max(deviations) == 0 or self.delta < 0 or self.sd_unit <= 0:
            raise ValueError


def parse_row(row: dict[str, str]) -> PublishedRow:
    """Parse one line of the CSV.

    Raises ValueError, KeyError, TypeError or AttributeError for a line that is no such row.
    """
    decimals = len(row["coupled_mean"].partition(".")[2])
    parsed = PublishedRow(
        metric=row["metric"],
        unit=row["unit"],
        lower_is_better=row["lower_is_better"] == "yes",
        n=int(row["n"]),
        baseline_mean=float(row["baseline_mean"]),
        baseline_sd=float(row["baseline_sd"]),
        coupled_mean=float(row["coupled_mean"]),
        coupled_sd=float(row["coupled_sd"]),
        sd_unit=float(row["sd_unit"]),
        delta=float(row["delta"]),
        rounding=0.5 * 10**-decimals,
    )
    parsed.check()
    return parsed


def read_table(path: Path) -> list[PublishedRow]:
    """Read the rows of the CSV; lines that begin with # are comments. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith("#")]
        return [parse_row(row) for row in csv.DictReader(lines)]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: not a table like repro/coupled_table1.csv: compare the columns"
        ) from None


def main(argv: list[str]) -> None:
    """Run `report.py --published` or `--published=FILE`: print the verdicts, then one JSON line."""
    if len(argv) > 1:
        raise ConfigError(f"{argv[1]}: --published stands alone")
    rows = read_table(Path(argv[0].partition("=")[2] or TABLE))
    p_holm = holm([row.estimate().p_value() for row in rows])
    print(INTRO)
    found = {}
    for row, corrected in zip(rows, p_holm, strict=True):
        found[row.metric] = print_verdict(row, corrected)
    print(json.dumps(found))


def print_verdict(row: PublishedRow, p_holm: float) -> dict[str, Any]:
    """Print what one row supports, and return it as a record.

    Args:
        p_holm: p, corrected for all metrics of the table.
    """
    estimate = row.estimate()
    # `decide` corrects for arms. Here there is one arm but several metrics, so p_holm has the last
    # word about a difference, and what has no direction is not shown to lie beyond a margin.
    [verdict] = decide([estimate], row.delta, row.lower_is_better)
    if p_holm >= ALPHA:
        is_beyond = verdict.margin == BEYOND
        margin = OPEN if is_beyond else verdict.margin
        verdict = replace(verdict, direction=NO_DIFFERENCE, margin=margin)
    low, high = estimate.interval()
    t = estimate.mean / estimate.se if estimate.se else None
    base = row.baseline_mean
    print(f"{row.metric}: {row.description()}")
    print(
        f"  difference {estimate.mean:+.4g} ({estimate.mean / base:+.2%}), 95 % interval "
        f"{low:+.4g} … {high:+.4g} ({low / base:+.2%} … {high / base:+.2%})"
    )
    shown = "undefined" if t is None else f"{t:.2f}"
    line = f"  t = {shown}, p = {verdict.p:.2g}, p Holm = {p_holm:.2g}"
    if row.delta:
        line += f"; TOST within {row.delta:g}: p = {verdict.p_tost:.2g}"
    print(line)
    print(f"  {verdict.word}: {reason(verdict, row.delta)}\n")
    return {
        "t": t,
        "p": verdict.p,
        "p_holm": p_holm,
        "ci": [low, high],
        "ci_relative": [low / base, high / base],
        "p_tost": verdict.p_tost,
        "direction": verdict.direction,
        "margin_verdict": verdict.margin,
        "verdict": verdict.word,
    }


def reason(verdict: Verdict, delta: float) -> str:
    """Say in one sentence what the printed numbers support."""
    if verdict.direction != NO_DIFFERENCE:
        difference = f"the printed numbers support a difference, coupled being {verdict.direction}"
    elif verdict.p < ALPHA:
        difference = "a difference shows only without correction for the metrics"
    else:
        difference = "a difference is not shown"
    if not delta:
        return f"{difference}; no margin is set."
    about_margin = {
        WITHIN: f"the numbers support equality within {delta:g}",
        BEYOND: f"the difference is larger than {delta:g}",
        OPEN: f"equality within {delta:g} is not shown",
    }
    return f"{difference}; {about_margin[verdict.margin]}."
