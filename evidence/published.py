"""CoupledNorm's Table 1, re-read: what its printed means and deviations support. Used by `report.py
--published`.

The paper (Loretz & Hochreiter 2026, section 5.2) prints means over 8 runs of each of two models.
Seeds were paired, but the pairs are not printed, so only an unpaired test can be made: Welch's.
"""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError, UserError
from common.stats import ALPHA, Estimate, decide, holm, welch

INTRO = """\
CoupledNorm, Table 1, re-read from its printed numbers: Welch's unpaired t test, because the pairs
are not printed. Deviations are taken for standard deviations (the paper does not say). p Holm
corrects for all metrics of the table, and decides. Margins are ours, set after the fact; the paper
declares none, and without one nothing can be called equivalent. Each line reads: the paper's
baseline -> CoupledNorm.
"""
TABLE = Path(__file__).resolve().parents[1] / "repro" / "coupled_table1.csv"


def read_table(path: Path) -> list[dict]:
    """Rows of the CSV, numbers as numbers. Raises UserError."""
    try:
        lines = [
            line
            for line in path.read_text(encoding="utf-8").splitlines()
            if not line.startswith("#")
        ]
        rows = []
        for row in csv.DictReader(lines):
            numbers = {
                k: float(v)
                for k, v in row.items()
                if k not in ("metric", "unit", "lower_is_better", "n")
            }
            rows.append(
                {
                    **row,
                    **numbers,
                    "n": int(row["n"]),
                    "lower_is_better": row["lower_is_better"] == "yes",
                }
            )
            sds = numbers["baseline_sd"], numbers["coupled_sd"]
            if (
                rows[-1]["n"] < 2
                or not all(map(math.isfinite, numbers.values()))
                or not numbers["baseline_mean"]
            ):
                raise ValueError
            if min(sds) < 0 or max(sds) <= 0 or numbers["delta"] < 0 or numbers["sd_unit"] <= 0:
                raise ValueError
            rows[-1]["rounding"] = 0.5 * 10 ** -len(row["coupled_mean"].partition(".")[2])
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: not a table like repro/coupled_table1.csv: compare the columns"
        ) from None
    return rows


def read_row(row: dict) -> tuple[Estimate, str]:
    """(difference coupled - baseline, what was read) of one row."""
    scale = row["sd_unit"]
    estimate = welch(
        row["baseline_mean"],
        row["baseline_sd"] * scale,
        row["n"],
        row["coupled_mean"],
        row["coupled_sd"] * scale,
        row["n"],
    )
    note = f"; both means are rounded, by up to {row['rounding']:g} each"
    note += f"; deviations stand in another unit there, taken times {scale:g}" if scale != 1 else ""
    return (
        estimate,
        f"{row['baseline_mean']} -> {row['coupled_mean']} {row['unit']}, n = {row['n']} each{note}",
    )


def main(argv: list[str]) -> None:
    """`--published` or `--published=FILE`."""
    if len(argv) > 1:
        raise ConfigError(f"{argv[1]}: --published stands alone")
    found, rows = {}, read_table(Path(argv[0].partition("=")[2] or TABLE))
    p_holm = holm([read_row(row)[0].p_value() for row in rows])
    print(INTRO)
    for row, corrected in zip(rows, p_holm, strict=True):
        estimate, what = read_row(row)
        [verdict] = decide([estimate], row["delta"], row["lower_is_better"])
        if verdict.word in ("better", "worse") and corrected >= ALPHA:
            verdict = replace(verdict, word="inconclusive")
        low, high = estimate.interval()
        t = estimate.mean / estimate.se if estimate.se else None
        base = row["baseline_mean"]
        shown = "undefined" if t is None else f"{t:.2f}"
        print(f"{row['metric']}: {what}")
        print(
            f"  difference {estimate.mean:+.4g} ({estimate.mean / base:+.2%}), 95 % interval "
            f"{low:+.4g} … {high:+.4g} ({low / base:+.2%} … {high / base:+.2%})"
        )
        print(
            f"  t = {shown}, p = {verdict.p:.2g}, p Holm = {corrected:.2g}"
            + (f"; TOST within {row['delta']:g}: p = {verdict.p_tost:.2g}" if row["delta"] else "")
        )
        print(f"  {verdict.word}: {reason(verdict.word, row, verdict.p)}\n")
        found[row["metric"]] = {
            "t": t,
            "p": verdict.p,
            "p_holm": corrected,
            "ci": [low, high],
            "ci_relative": [low / base, high / base],
            "p_tost": verdict.p_tost,
            "verdict": verdict.word,
        }
    print(json.dumps(found))


def reason(word: str, row: dict, p: float) -> str:
    if word in ("better", "worse"):
        return f"the printed numbers support a difference, coupled being {word}."
    if word == "equivalent":
        return f"the printed numbers support equality within {row['delta']:g}."
    alone = (
        "a difference is not shown"
        if p >= ALPHA
        else "a difference shows only without correction for the metrics"
    )
    return (
        alone
        + (
            f"; equality within {row['delta']:g} is not shown"
            if row["delta"]
            else "; nor is equality"
        )
        + "."
    )
