"""Run folders -> curves, tables, statistics, verdicts. Reads only what the runs wrote.

    python report.py out/demo
        loss curve of one run or more: out/demo/loss.png
    python report.py out/small --baseline=rms
        every run folder in out/small: report.md, report.csv, seeds.csv and plots, into out/small
    python report.py runs/ --baseline=rms --delta.val_loss=0.002 --out=results/mine
    python report.py results/cpu/table1/runs.tar.xz --baseline=rms --out=out/table1
        an archive of runs, as sweep.sh keeps them
    python report.py --published
        CoupledNorm's Table 1, from its printed numbers

An arm is a norm type with its norm keys, such as "coupled --coupled_span=2". Every arm is compared
with the baseline, seed by seed. The margins of equivalence are those that the runs declared
(train.py's delta_* keys); a margin that is given here, --delta.METRIC=NUMBER, is labelled post hoc.
The metrics are val_loss, train_loss, hellaswag_acc, hellaswag_acc_norm and tok_per_s (its margin is
a share). Other keys:
    --out=DIR           where everything is written, instead of into the folder of the runs
    --pictures=False    write tables only
    --plot=FILE         file for the loss curves of runs without a baseline
"""

import common.interrupt  # noqa: F401

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import gmean

from common.errors import ConfigError, run_program
from common.output import markdown, write_bytes_atomically, writing
from evidence import published
from evidence.archive import SUFFIX
from evidence.comparison import (
    EQUAL_TIME,
    Comparison,
    Pairs,
    compare,
    exchange_rate,
    pair_by_seed,
    usable,
)
from evidence.plots import (
    Arms,
    drifting,
    plot_differences,
    plot_drift,
    plot_loss,
    plot_output,
    plot_stream,
)
from evidence.runs import METRICS, Run, by_arm, find_runs

HOW = """\
Mean (of tok_per_s the geometric one) and SD are over seeds; SD is the standard deviation, never the
standard error. train_loss is the mean over the logged steps of the last tenth of a run. A
difference is arm less baseline at the same seed. The verdict comes from the Holm-adjusted paired t
interval (it leaves out zero: better or worse) and from TOST within the margin, Holm-adjusted too
(equivalent); all else is inconclusive, and no p value above 0.05 means "the same". The Holm
interval belongs to the step at which Holm tested that arm; beside it stands the plain 95 % t
interval. Arms are corrected for, metrics are not: val_loss is the one to decide by. The sign-flip
permutation test and the BCa bootstrap stand beside and decide nothing. HellaSwag differences are
paired item by item within each seed, and their t error counts both seeds and items as samples;
sign-flip and bootstrap count seeds alone there. Detectable: the smallest true difference that these
seeds find with 80 % power, corrected for the number of arms; needed: seeds that come to a verdict,
of a difference or of equivalence, if the true difference is the observed one. tok_per_s is compared
as a ratio. val_loss_equal_time is the loss that an arm would have after its baseline's time instead
of its tokens."""


# ------------------------------------------------------------------------------------------- tables


def number(value: float | None, digits: int = 4) -> str:
    """Format a number for a table; "n/a" where it is missing or not finite."""
    if value is None or not np.isfinite(value):
        return "n/a"
    return f"{value:.{digits}f}"


def all_runs(arms: Arms) -> list[Run]:
    """Return the runs of all arms in one list."""
    return [run for runs in arms.values() for run in runs.values()]


def tost_cell(row: Comparison) -> str:
    """Format p of the equivalence test, with its margin and where the margin comes from."""
    if not row.delta:
        return "no margin"
    margin = row.show(row.delta, sign=False)
    return f"{row.verdict.p_tost:.3g} ({margin}, {row.delta_kind})"


# Heading -> cell, of the table of verdicts in report.md.
TABLE_COLUMNS: dict[str, Callable[[Comparison], Any]] = {
    "metric": lambda row: row.metric.name,
    "arm": lambda row: f"`{row.arm}`",
    "seeds": lambda row: len(row.seeds),
    "difference": lambda row: row.show(row.estimate.mean),
    "SD": lambda row: row.show(row.sd, sign=False),
    "95 % interval": lambda row: row.show_interval(row.estimate.interval()),
    "Holm interval": lambda row: row.show_interval(row.verdict.interval),
    "p": lambda row: f"{row.verdict.p:.3g}",
    "p Holm": lambda row: f"{row.verdict.p_holm:.3g}",
    "p TOST (margin)": tost_cell,
    "p sign-flip": lambda row: f"{row.sign_flip:.3g}",
    "BCa 95 %": lambda row: row.show_interval(row.bootstrap),
    "detectable": lambda row: row.show(row.detectable, sign=False),
    "needed": lambda row: row.needed or "n/a",
    "verdict": lambda row: f"**{row.word}**",
}

# Column -> value, of report.csv. Numbers are not rounded; relative metrics are log ratios.
CSV_COLUMNS: dict[str, Callable[[Comparison], Any]] = {
    "metric": lambda row: row.metric.name,
    "arm": lambda row: row.arm,
    "baseline": lambda row: row.baseline,
    "n_seeds": lambda row: len(row.seeds),
    "mean_difference": lambda row: row.estimate.mean,
    "sd_difference": lambda row: row.sd,
    "standard_error": lambda row: row.estimate.se,
    "low": lambda row: row.estimate.interval()[0],
    "high": lambda row: row.estimate.interval()[1],
    "low_holm": lambda row: row.verdict.interval[0],
    "high_holm": lambda row: row.verdict.interval[1],
    "p_t": lambda row: row.verdict.p,
    "p_holm": lambda row: row.verdict.p_holm,
    "p_tost": lambda row: row.verdict.p_tost,
    "delta": lambda row: row.delta,
    "delta_kind": lambda row: row.delta_kind,
    "p_sign_flip": lambda row: row.sign_flip,
    "low_bca": lambda row: row.bootstrap[0],
    "high_bca": lambda row: row.bootstrap[1],
    "detectable": lambda row: row.detectable,
    "seeds_needed": lambda row: row.needed,
    "is_log_ratio": lambda row: row.metric.relative,
    "verdict": lambda row: row.word,
}


def verdict_table(rows: list[Comparison]) -> str:
    """Return the Markdown table of all verdicts."""
    table = [[cell(row) for cell in TABLE_COLUMNS.values()] for row in rows]
    return markdown(TABLE_COLUMNS, table)


def seed_table(arms: Arms, metric: str) -> str:
    """Return the values of one metric: one row a seed, one column an arm, mean and SD below."""
    digits = 0 if metric == "tok_per_s" else 4
    # The mean of speeds is geometric, because they are compared as ratios.
    mean = gmean if METRICS[metric].relative else np.mean
    by_seed: dict[int, list[str]] = {seed: [] for runs in arms.values() for seed in runs}
    means: list[str] = []
    deviations: list[str] = []
    for runs in arms.values():
        values = {seed: run.metrics.get(metric) for seed, run in runs.items()}
        for seed, cells in by_seed.items():
            cells.append(number(values.get(seed), digits))
        measured = [value for value in values.values() if value is not None]
        means.append(number(mean(measured) if measured else None, digits))
        sd = np.std(measured, ddof=1) if len(measured) > 1 else None
        deviations.append(number(sd, digits))
    table: list[list[Any]] = [[seed, *by_seed[seed]] for seed in sorted(by_seed)]
    table.append(["mean", *means])
    table.append(["SD", *deviations])
    return markdown(["seed", *(f"`{arm}`" for arm in arms)], table)


def equal_time_text(rows: list[Comparison], arms: Arms, baseline: str) -> str:
    """Say what throughput is worth: losses at equal tokens and at equal time in one table.

    The exchange rate between the two is the baseline's (evidence/comparison.py, exchange_rate).
    """
    found = [exchange_rate(run) for run in arms[baseline].values()]
    rates = [rate for rate in found if rate is not None]
    timed = [row for row in rows if row.metric is EQUAL_TIME]
    if not rates or not timed:
        return "No run has throughput and enough evaluations to compare at equal time."
    rate = float(np.mean(rates))  # nats per token for one e-fold more tokens
    by_key = {(row.arm, row.metric.name): row for row in rows}
    table = []
    for row in timed:
        loss = by_key[row.arm, "val_loss"]
        speed = by_key[row.arm, "tok_per_s"]
        cells = [
            f"`{row.arm}`",
            loss.show(loss.estimate.mean),
            speed.show(speed.estimate.mean),
            f"{-rate * speed.estimate.mean:+.4f}",
            row.show(row.estimate.mean),
        ]
        table.append(cells)
    header = [
        "arm",
        "val loss at equal tokens",
        "throughput",
        "worth, nats",
        "val loss at equal time",
    ]
    return (
        f"Exchange rate, from the later half of the `{baseline}` curves: 1 % more tokens buy "
        f"{rate * np.log(1.01):.5f} nats per token (the learning rate's decay is in it, so rather "
        "less).\n\n"
    ) + markdown(header, table)


def distinct(values: Iterable[Any]) -> str:
    """List the different values, sorted as text."""
    return ", ".join(sorted({str(value) for value in values}))


def header_text(arms: Arms) -> str:
    """Say in one paragraph which runs are compared: device, versions, sizes."""
    runs = all_runs(arms)
    devices = distinct(run.start["device"] for run in runs)
    torch = distinct(run.start["versions"]["torch"] for run in runs)
    # A commit is a hash of 40 digits, perhaps with "-dirty" behind it, which is kept.
    commits = distinct(str(run.start["git"])[:7] + str(run.start["git"])[40:] for run in runs)
    sizes = distinct(f"{run.start['n_params']:,}" for run in runs)
    tokens = distinct(f"{int(run.curve[-1, 0]):,}" for run in runs)
    return (
        f"{len(runs)} runs, {len(arms)} arms. Device: {devices}; torch {torch}; commit {commits}; "
        f"{sizes} parameters; {tokens} training tokens a run."
    )


def report_text(
    arms: Arms, rows: list[Comparison], baseline: str, left_out: list[str], plots: list[Path]
) -> str:
    """Return the whole of report.md.

    Args:
        arms: the runs that are compared.
        rows: every arm's comparison in every metric.
        baseline: the arm that the others are compared with.
        left_out: one line for each run or pair that is not compared.
        plots: pictures in the same folder, in the order in which they are shown.
    """
    parts = [f"# Norm types against `{baseline}`", header_text(arms)]
    parts += [f"![{plot.stem}]({plot.name})" for plot in plots]
    parts.append("## Verdicts")
    parts += verdict_sentences(rows) or ["No arm has two seeds in common with the baseline."]
    if rows:
        parts.append(verdict_table(rows))
    parts += [HOW, "## Equal tokens, equal time", equal_time_text(rows, arms, baseline)]
    parts.append("## Seed by seed")
    for name, metric in METRICS.items():
        if any(name in run.metrics for run in all_runs(arms)):
            parts += [f"### {name} ({metric.unit})", seed_table(arms, name)]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(parts) + "\n"


def verdict_sentences(rows: list[Comparison]) -> list[str]:
    """Return one list of sentences for each metric, as Markdown."""
    by_metric: dict[str, list[str]] = {}
    for row in rows:
        by_metric.setdefault(row.metric.name, []).append(f"- {row.sentence()}")
    return ["\n".join([f"{name}:", "", *lines]) for name, lines in by_metric.items()]


def csv_text(header: Iterable[str], rows: list[list[Any]]) -> str:
    """Return a CSV file's content."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(header), *rows])
    return text.getvalue()


def verdict_csv(rows: list[Comparison]) -> str:
    """Return report.csv: one line for each metric and arm."""
    return csv_text(CSV_COLUMNS, [[value(row) for value in CSV_COLUMNS.values()] for row in rows])


def seeds_csv(arms: Arms) -> str:
    """Return seeds.csv: one line for each run, with its metrics."""
    rows = []
    for arm, runs in arms.items():
        for seed, run in sorted(runs.items()):
            rows.append([arm, seed, *(run.metrics.get(name) for name in METRICS)])
    return csv_text(["arm", "seed", *METRICS], rows)


# ------------------------------------------------------------------------------------------ program


@dataclass
class Request:
    """What the command line asks for."""

    folders: list[Path]  # run folders, log files, archives, or folders of these
    baseline: str = ""  # "" for loss curves alone
    out: Path | None = None
    plot: Path | None = None
    pictures: bool = True
    deltas: dict[str, float] = field(default_factory=dict)  # metric -> margin, post hoc

    def target_folder(self) -> Path:
        """Return where the report goes: `out`, else into the folder of the runs or beside it."""
        if self.out is not None:
            return self.out
        first = self.folders[0]
        if first.is_dir():
            return first
        return first.parent if first.name.endswith(SUFFIX) else Path()


def parse(argv: list[str]) -> Request:
    """Read the command line. Raises ConfigError."""
    request = Request(folders=[])
    for argument in argv:
        name, _, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            request.folders.append(Path(argument))
        elif name == "baseline" and text:
            request.baseline = text
        elif name == "out" and text:
            request.out = Path(text)
        elif name == "plot" and text:
            request.plot = Path(text)
        elif argument == "--pictures=False":
            request.pictures = False
        elif name.startswith("delta."):
            metric = name.removeprefix("delta.")
            request.deltas[metric] = parse_margin(argument, metric, text)
        else:
            raise ConfigError(
                f"{argument}: report.py knows --baseline=ARM, --delta.METRIC=NUMBER, --out=DIR, "
                "--plot=FILE, --pictures=False"
            )
    if request.plot is not None:
        from common.plotting import check_picture

        check_picture(request.plot)  # before anything is read
    if not request.folders:
        raise ConfigError("name one run folder or more (--help says more)")
    if request.deltas and not request.baseline:
        metric = next(iter(request.deltas))
        raise ConfigError(f"delta.{metric}: a margin needs a comparison: give --baseline=ARM")
    return request


def parse_margin(argument: str, metric: str, text: str) -> float:
    """Return the margin of --delta.METRIC=NUMBER. Raises ConfigError."""
    try:
        margin = float(text)
    except ValueError:
        margin = -1.0
    if metric not in METRICS or not 0 < margin < np.inf:
        raise ConfigError(f"{argument}: needs a margin above 0 for one of {', '.join(METRICS)}")
    return margin


def draw(arms: Arms, rows: list[Comparison], baseline: str, out: Path) -> list[Path]:
    """Draw the pictures of a report into `out`, those that the runs have data for.

    Losses over time are drawn only if the speed of every run is judged: Run.speed_problem.
    """
    runs = all_runs(arms)
    plots = [plot_loss(arms, out / "loss_tokens.png", "tokens", baseline)]
    if not any(run.speed_problem for run in runs):
        plots.append(plot_loss(arms, out / "loss_time.png", "time"))
    if rows:
        plots.append(plot_differences(rows, out / "differences.png"))
    if any(run.stream for run in runs):
        plots.append(plot_stream(arms, out / "stream.png"))
    if any(run.history for run in runs):
        plots.append(plot_output(arms, out / "output.png"))
    if moved := drifting(arms):
        plots.append(plot_drift(moved, out / "drift.png"))
    return plots


def compared_arms(arms: Arms, pairs: Pairs, baseline: str) -> Arms:
    """Return only the runs that are compared.

    Means and curves are of these runs, so that they tell the same story as the differences.
    Without any pair, all runs of the baseline stay.
    """
    in_pairs = {pair.base.seed: pair.base for its in pairs.values() for pair in its}
    compared = {baseline: in_pairs or arms[baseline]}
    for arm, its in pairs.items():
        if its:
            compared[arm] = {pair.run.seed: pair.run for pair in its}
    return compared


def write_report(
    arms: Arms, baseline: str, deltas: dict[str, float], out: Path, pictures: bool = True
) -> str:
    """Write report.md, report.csv, seeds.csv and pictures into `out`.

    Returns:
        The verdicts as text, and a line for each run that was left out.

    Raises:
        UserError: the runs cannot be compared, or `out` cannot be written.
    """
    finished = usable(arms)
    pairs, unpaired = pair_by_seed(finished.arms, baseline, tuple(finished.left_out))
    rows, not_measured = compare(pairs, baseline, deltas, finished.diverged)
    left_out = finished.left_out + unpaired + not_measured
    compared = compared_arms(finished.arms, pairs, baseline)
    with writing(out):
        plots = draw(compared, rows, baseline, out) if pictures else []
        texts = {
            "report.md": report_text(compared, rows, baseline, left_out, plots),
            "report.csv": verdict_csv(rows),
            "seeds.csv": seeds_csv(compared),
        }
        for name, text in texts.items():
            write_bytes_atomically(out / name, text.encode())
    return "\n\n".join(verdict_sentences(rows) + [f"Left out: {line}" for line in left_out])


def write_curves(runs: list[Run], request: Request) -> None:
    """Draw the loss curves of runs without a baseline."""
    if len(request.folders) > 1 and request.plot is None and request.out is None:
        raise ConfigError(
            "the plot of several folders needs a place: say where it goes, --plot=FILE or --out=DIR"
        )
    out = request.target_folder()
    with writing(out):
        target = request.plot or out / "loss.png"
    print(f"wrote {plot_loss(label_runs(runs), target)}")


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    if argv[0].partition("=")[0] == "--published":
        published.main(argv)
        return
    request = parse(argv)
    runs = find_runs(request.folders)
    for run in runs:
        run.check()
    if not request.baseline:
        write_curves(runs, request)
        return
    if len(request.folders) > 1 and request.out is None:
        raise ConfigError(
            "the report of several folders needs a place: say where it goes, --out=DIR"
        )
    out = request.target_folder()
    print(write_report(by_arm(runs), request.baseline, request.deltas, out, request.pictures))
    and_plots = " and plots" if request.pictures else ""
    print(f"\nwrote report.md, report.csv, seeds.csv{and_plots} into {out}")


def label_runs(runs: list[Run]) -> Arms:
    """Name runs for curves alone: by arm, or by folder where two runs share arm and seed."""
    if len({(run.arm, run.seed) for run in runs}) == len(runs):
        return by_arm(runs)
    return {run.config["out_dir"]: {run.seed: run} for run in runs}


if __name__ == "__main__":
    run_program(main)
