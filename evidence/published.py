"""Re-read CoupledNorm's Table 1: what do its printed means and deviations support?

`report.py --published` is the program.

The paper (Loretz & Hochreiter 2026, section 5.2) prints means over 8 runs of each of two models.
Seeds were paired, but the pairs are not printed, so only an unpaired test can be made: Welch's.
"""

import csv
from dataclasses import replace
from pathlib import Path

from common.stats import (
    ALPHA,
    BEYOND,
    NO_DIFFERENCE,
    OPEN,
    Estimate,
    decide,
    holm,
    welch,
)

INTRO = """\
CoupledNorm, Table 1, re-read from its printed numbers: Welch's unpaired t test, because the pairs
are not printed. Deviations are taken for standard deviations (the paper does not say). p Holm
corrects for all metrics of the table, and decides. Margins are ours, set after the fact; the paper
declares none, and without one nothing can be called equal. Each line reads: the paper's
baseline -> CoupledNorm. A deviation that stands in another unit there is multiplied.
"""
TABLE = Path(__file__).resolve().parents[1] / "repro" / "coupled_table1.csv"


Row = dict[str, str]  # a line of the CSV


def read_table() -> list[Row]:
    """Read the rows of the CSV; lines that begin with # are comments."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def estimate_of(row: Row) -> Estimate:
    """Estimate the difference coupled - baseline by Welch's unpaired test."""
    n = int(row["n"])
    # what a printed deviation is multiplied by to have the unit of the means
    unit = float(row["sd_unit"])
    base, coupled = float(row["baseline_mean"]), float(row["coupled_mean"])
    return welch(
        base, float(row["baseline_sd"]) * unit, n, coupled, float(row["coupled_sd"]) * unit, n
    )


def print_verdicts() -> None:
    """Print what each row of the table supports."""
    rows = read_table()
    p_holm = holm([estimate_of(row).p_value() for row in rows])
    print(INTRO)
    for row, corrected in zip(rows, p_holm, strict=True):
        print_verdict(row, corrected)


def print_verdict(row: Row, p_holm: float) -> None:
    """Print what one row supports.

    Args:
        p_holm: p, corrected for all metrics of the table.
    """
    estimate = estimate_of(row)
    delta = float(row["delta"])  # our margin of equivalence; 0 for none
    rounding = 0.5 * 10 ** -len(row["coupled_mean"].partition(".")[2])
    # `decide` corrects for arms. Here there is one arm but several metrics, so p_holm has the last
    # word about a difference, and what has no direction is not shown to lie beyond a margin.
    [verdict] = decide([estimate], delta, row["lower_is_better"] == "yes")
    if p_holm >= ALPHA:
        margin = OPEN if verdict.margin == BEYOND else verdict.margin
        verdict = replace(verdict, direction=NO_DIFFERENCE, margin=margin)
    t = estimate.mean / estimate.se
    relative = [end / float(row["baseline_mean"]) for end in estimate.interval()]
    interval = " … ".join(f"{end:+.2%}" for end in relative)
    equal = f"; TOST within {delta:g}: p = {verdict.p_tost:.2g}" if delta else ""
    print(
        f"{row['metric']}: {row['baseline_mean']} -> {row['coupled_mean']} {row['unit']}, "
        f"n = {row['n']} each; both means are rounded, by up to {rounding:g} each; deviations "
        f"times {row['sd_unit']}\n  difference {estimate.mean:+.4g}, 95 % interval {interval}"
        f"\n  t = {t:.2f}, p = {verdict.p:.2g}, p Holm = {p_holm:.2g}{equal}\n  {verdict.word}\n"
    )
