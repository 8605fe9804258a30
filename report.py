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
The metrics are val_loss (its margin is that of val_loss_full too), train_loss, hellaswag_acc,
hellaswag_acc_norm and tok_per_s (its margin is a share). Other keys:
    --out=DIR           where everything is written, instead of into the folder of the runs
    --pictures=False    write tables only
    --plot=FILE         file for the loss curves of runs without a baseline; runs that differ in the
                        seed alone are one curve, their mean
"""

import common.interrupt  # noqa: F401

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import gmean

from common.errors import ConfigError, UserError, run_program
from common.output import check_replaceable, markdown, write_bytes_atomically, writing
from evidence import published
from evidence.archive import SUFFIX
from evidence.comparison import (
    BY_SEED,
    EQUAL_TIME,
    NO_VERDICT,
    Comparison,
    Pairs,
    compare,
    like_baseline,
    mean_exchange_rate,
    pair_by_seed,
    usable,
)
from evidence.names import short_name
from evidence.plots import (
    Arms,
    drifting,
    plot_differences,
    plot_drift,
    plot_loss,
    plot_output,
    plot_stream,
)
from evidence.runs import (
    METRICS,
    Run,
    by_arm,
    check_same_norms,
    difference_in_data,
    difference_in_settings,
    differences,
    find_runs,
    settings,
)

MOST_CURVES = 24
LABEL = 70  # characters in a line of a curve's label

HOW = """\
Mean (of tok_per_s the geometric one) and SD are over seeds; SD is the standard deviation, never the
standard error. train_loss is the mean over the logged steps of the last tenth of a run. A
difference is arm less baseline at the same seed. A verdict has two parts. Its direction comes from
the Holm-adjusted paired t interval: better or worse if it leaves out zero, else no difference is
shown, and no p value above 0.05 means "the same". Beside it stands, where a margin is declared,
what is shown about the size: within the margin (TOST), beyond it (one-sided t test against the
margin; for a margin below some standard errors, both sides of it), or open; both Holm-adjusted. The
Holm interval belongs to the step at which Holm tested that arm; beside it stands the plain 95 % t
interval. Arms are corrected for, metrics are not: val_loss_full is the one to decide by, the loss
over every token of the val split, and val_loss where runs do not have it. Both are conditional on
their text: intervals cover other seeds, not other texts; the range "without one document" says what
a single one of its documents does. The sign-flip permutation test and the BCa bootstrap stand
beside and decide nothing. HellaSwag differences are paired item by item within each seed, and their
t error counts both seeds and items as samples; sign-flip and bootstrap count seeds alone there.
Detectable: the smallest true difference that these seeds find with 80 % power, corrected for the
number of arms; power within: the power to show "within the margin" at a true difference of zero
with the observed SD; needed: seeds that show a difference, or that it lies within the margin, if
the true difference is the observed one (80 % power): a new set of them, because adding seeds until
a verdict appears gives false ones. tok_per_s is compared as a ratio. val_loss_equal_time is the
loss that an arm would have after its baseline's time instead of its tokens."""

ALONE = """\
Nothing is compared, for no run has a pair. A pair differs in the norm alone: same seed, same data,
same settings. Arms with learning rates of their own are compared by a plan that was declared before
its runs, as repro/which_norm.sh does (docs/which_norm.md)."""

STABILITY = """\
Divergence is a result: an arm of which runs diverged has no verdict on the rest. Clipped steps: the
share of steps whose gradient was clipped, mean over runs. A spike is a step whose loss is more than
0.5 above the median of the 50 steps before it. The largest attention logit is that of the last
evaluation, over all runs."""


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


def text_cell(row: Comparison) -> str:
    """Format the range of the mean difference when one document is left out."""
    return "" if row.text is None else row.show_interval((row.text.low, row.text.high))


# Heading -> cell, of the table of verdicts in report.md.
VERDICT_COLUMNS: dict[str, Callable[[Comparison], Any]] = {
    "metric": lambda row: row.metric.name,
    "arm": lambda row: f"`{row.name}`",
    "seeds": lambda row: len(row.seeds),
    "difference": lambda row: row.show(row.estimate.mean),
    "Holm interval": lambda row: row.show_interval(row.verdict.interval),
    "in tokens": lambda row: row.show_tokens(row.estimate.mean) if row.rate else "",
    "without one document": text_cell,
    "verdict": lambda row: f"**{row.word}**",
}

# The same, of the table of tests below it.
TEST_COLUMNS: dict[str, Callable[[Comparison], Any]] = {
    "metric": lambda row: row.metric.name,
    "arm": lambda row: f"`{row.name}`",
    "SD": lambda row: row.show(row.sd, sign=False),
    "95 % interval": lambda row: row.show_interval(row.estimate.interval()),
    "p": lambda row: f"{row.verdict.p:.3g}",
    "p Holm": lambda row: f"{row.verdict.p_holm:.3g}",
    "p TOST (margin)": tost_cell,
    "p beyond": lambda row: f"{row.verdict.p_beyond:.3g}" if row.delta else "",
    "p sign-flip": lambda row: f"{row.sign_flip:.3g}",
    "BCa 95 %": lambda row: row.show_interval(row.bootstrap),
    "detectable": lambda row: row.show(row.detectable, sign=False),
    "power within": lambda row: number(row.power_within, 2) if row.delta else "",
    "needed": lambda row: row.needed or "n/a",
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
    "p_beyond": lambda row: row.verdict.p_beyond,
    "delta": lambda row: row.delta,
    "delta_kind": lambda row: row.delta_kind,
    "p_sign_flip": lambda row: row.sign_flip,
    "low_bca": lambda row: row.bootstrap[0],
    "high_bca": lambda row: row.bootstrap[1],
    "detectable": lambda row: row.detectable,
    "power_within": lambda row: row.power_within,
    "seeds_needed": lambda row: row.needed,
    "is_log_ratio": lambda row: row.metric.relative,
    "token_share": lambda row: row.tokens(row.estimate.mean),
    "low_document": lambda row: row.text and row.text.low,
    "high_document": lambda row: row.text and row.text.high,
    "direction": lambda row: row.direction,
    "margin_verdict": lambda row: row.margin_verdict,
    "verdict": lambda row: row.word,
}


def table_of(rows: list[Comparison], columns: dict[str, Callable[[Comparison], Any]]) -> str:
    """Return a Markdown table of comparisons, without columns that are empty in all of them."""
    cells = {heading: [cell(row) for row in rows] for heading, cell in columns.items()}
    filled = {heading: column for heading, column in cells.items() if any(column)}
    return markdown(filled, zip(*filled.values(), strict=True))


def power_lines(rows: list[Comparison]) -> str:
    """Say for each metric what its seeds can show: one line of a list each."""
    lines = []
    for metric, its in by_metric(rows).items():
        detectable = [row.detectable for row in its]
        found = " to ".join(
            dict.fromkeys(
                its[0].show(end, sign=False) for end in (min(detectable), max(detectable))
            )
        )
        unit = "" if its[0].metric.relative else f" {its[0].metric.unit}"
        line = f"- {metric}: a difference of {found}{unit} is found with 80 % power"
        powers = [row.power_within for row in its if row.power_within is not None]
        if powers:
            margin = its[0].show(its[0].delta, sign=False)
            power = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(powers), max(powers))))
            line += (
                f'; the power to show "within" the margin of {margin} at a true difference of zero '
                f"is {power}"
            )
        lines.append(line)
    return "\n".join(lines)


def stability_table(arms: Arms) -> str:
    """Return the outcomes beside loss, one line an arm; "" if no run has them and none diverged."""
    table = []
    for arm, runs in arms.items():
        records = [run.stability for run in runs.values() if run.stability]
        logits = values_of(records, "attention_logit")
        cells = [
            f"`{arm}`",
            len(runs),
            sum(run.diverged for run in runs.values()),
            percent(mean_of(values_of(records, "clipped"))),
            number(mean_of(values_of(records, "spikes")), 1),
            number(max(logits) if logits else None, 1),
        ]
        table.append(cells)
    if not any(run.stability or run.diverged for run in all_runs(arms)):
        return ""
    header = ["arm", "runs", "diverged", "clipped steps", "spikes a run", "largest attention logit"]
    return markdown(header, table)


def values_of(records: list[dict[str, Any]], name: str) -> list[float]:
    """Return the finite values of one field."""
    return [record[name] for record in records if record[name] is not None]


def mean_of(values: list[float]) -> float | None:
    """Return the mean; None of no values."""
    return float(np.mean(values)) if values else None


def percent(share: float | None) -> str:
    """Format a share in per cent."""
    return "n/a" if share is None else f"{100 * share:.0f} %"


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


def exchange_text(arms: Arms, baseline: str) -> str:
    """Say what tokens are worth in nats, by the baseline's curves."""
    rate = mean_exchange_rate(list(arms[baseline].values()))
    if rate is None:
        return (
            f"What a difference is worth in tokens is not known: the runs of `{baseline}` need "
            "three evaluations or more in their later half, and a loss that still falls."
        )
    return (
        "In tokens: how many more (+) or fewer (-) tokens the baseline would need for the arm's "
        f"loss. Exchange rate, from the later half of the `{baseline}` curves: 1 % more tokens buy "
        f"{rate * np.log(1.01):.5f} nats per token. The learning rate's decay is in it, so it is "
        "an upper estimate, and what a difference is worth in tokens a lower one."
    )


def equal_time_text(rows: list[Comparison], arms: Arms, baseline: str) -> str:
    """Say what throughput is worth: losses at equal tokens and at equal time in one table."""
    rate = mean_exchange_rate(list(arms[baseline].values()))
    timed = [row for row in rows if row.metric is EQUAL_TIME]
    if rate is None or not timed:
        return "No run has throughput and enough evaluations to compare at equal time."
    by_key = {(row.arm, row.metric.name): row for row in rows}
    table = []
    for row in timed:
        loss = by_key[row.arm, "val_loss"]
        speed = by_key[row.arm, "tok_per_s"]
        cells = [
            f"`{row.name}`",
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
        "Throughput is worth the tokens of the same time, at the exchange rate above, so rather "
        "less than stands here.\n\n"
    ) + markdown(header, table)


def names_text(arms: Iterable[str]) -> str:
    """Return the table of short names; "" if no arm has one of its own."""
    table = [(f"`{short_name(arm)}`", f"`{arm}`") for arm in arms if short_name(arm) != arm]
    return markdown(["short name", "arm"], table) if table else ""


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


@dataclass(frozen=True)
class About:
    """What a report says beside the comparisons."""

    stable: Arms  # the runs that are compared and those that diverged, by full arm
    unjudged: list[str]  # one sentence for each arm with too few pairs to be compared
    left_out: list[str]  # one line for each run or pair that is not compared
    plots: list[Path]  # pictures in the same folder, in the order in which they are shown


def report_text(arms: Arms, rows: list[Comparison], baseline: str, about: About) -> str:
    """Return the whole of report.md.

    Args:
        arms: the runs that are compared, by the arms' short names.
        rows: every arm's comparison in every metric.
        baseline: short name of the arm that the others are compared with.
        about: what else is said.
    """
    judged = [row for row in rows if row.is_judged]
    others = [row for row in rows if not row.is_judged]
    parts = [f"# Norm types against `{baseline}`", header_text(arms), names_text(about.stable)]
    parts += [f"![{plot.stem}]({plot.name})" for plot in about.plots]
    parts.append("## Verdicts")
    parts += verdict_sentences(judged, about.unjudged)
    if not rows:
        parts.append("No arm has two seeds in common with the baseline.")
    if judged:
        parts += [table_of(judged, VERDICT_COLUMNS), exchange_text(arms, baseline)]
        parts += ["## Tests", table_of(judged, TEST_COLUMNS), "Power:", power_lines(judged)]
    parts.append(HOW)
    if stability := stability_table(renamed(about.stable)):
        parts += ["## Stability", stability, STABILITY]
    parts.append("## Seed by seed")
    for name, metric in METRICS.items():
        if any(name in run.metrics for run in all_runs(arms)):
            parts += [f"### {name} ({metric.unit})", seed_table(arms, name)]
    if about.left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in about.left_out)]
    if others:
        parts.append("## Appendix: not judged")
        parts += verdict_sentences(others)
        parts += [table_of(others, VERDICT_COLUMNS), table_of(others, TEST_COLUMNS)]
        parts += ["### Equal tokens, equal time", equal_time_text(rows, arms, baseline)]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_metric(rows: list[Comparison]) -> dict[str, list[Comparison]]:
    """Sort comparisons by the name of their metric."""
    found: dict[str, list[Comparison]] = {}
    for row in rows:
        found.setdefault(row.metric.name, []).append(row)
    return found


def verdict_sentences(rows: list[Comparison], unjudged: list[str] | None = None) -> list[str]:
    """Return one list of sentences for each metric, as Markdown; after them those of `unjudged`."""
    texts = [
        "\n".join([f"{name}:", "", *(f"- {row.sentence()}" for row in its)])
        for name, its in by_metric(rows).items()
    ]
    if unjudged:
        texts.append("\n".join(f"- {line}" for line in unjudged))
    return texts


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
    if judged := [row for row in rows if row.is_judged]:
        plots.append(plot_differences(judged, out / "differences.png"))
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


def renamed(arms: Arms) -> Arms:
    """Return the same runs by the arms' short names."""
    return {short_name(arm): runs for arm, runs in arms.items()}


def with_diverged(compared: Arms, arms: Arms) -> Arms:
    """Return the runs that are compared and all that diverged."""
    found: Arms = {}
    for arm, runs in arms.items():
        chosen = compared.get(arm, {})
        its = {seed: run for seed, run in runs.items() if run.diverged or seed in chosen}
        if its:
            found[arm] = its
    return found


def without_a_row(
    rows: list[Comparison], pairs: Pairs, diverged: dict[str, str], baseline: str
) -> list[str]:
    """Return one sentence for each arm that has too few pairs to be compared, if it says why."""
    lines = []
    for arm in dict.fromkeys([*pairs, *diverged]):
        if arm == baseline or any(row.arm == arm for row in rows):
            continue
        its = pairs.get(arm, [])
        planned = its[0].run.config.get("planned_seeds", 0) if its else 0
        if arm in diverged:
            lines.append(f"{short_name(arm)}: {NO_VERDICT}: {diverged[arm]}.")
        elif planned:
            why = f"{len(its)} of {planned} planned seeds"
            lines.append(f"{short_name(arm)}: {NO_VERDICT}: {why}.")
    return lines


def write_report(
    arms: Arms, baseline: str, deltas: dict[str, float], out: Path, pictures: bool = True
) -> str:
    """Write report.md, report.csv, seeds.csv and pictures into `out`.

    Returns:
        The verdicts and the power as text, and a line for each run that was left out.

    Raises:
        UserError: the runs cannot be compared, or `out` cannot be written.
    """
    finished = usable(arms, baseline)
    pairs, unpaired = pair_by_seed(finished.arms, baseline, tuple(finished.left_out))
    rows, not_measured = compare(pairs, baseline, deltas, finished.diverged)
    left_out = finished.left_out + unpaired + not_measured
    compared = compared_arms(finished.arms, pairs, baseline)
    stable = with_diverged(compared, like_baseline(arms, baseline))
    unjudged = without_a_row(rows, pairs, finished.diverged, baseline)
    short = renamed(compared)
    with writing(out):
        plots = draw(short, rows, short_name(baseline), out) if pictures else []
        about = About(stable, unjudged, left_out, plots)
        text = report_text(short, rows, short_name(baseline), about)
        texts = {
            "report.md": text,
            "report.csv": verdict_csv(rows),
            "seeds.csv": seeds_csv(compared),
        }
        for name, content in texts.items():
            check_replaceable(out / name, re.escape(content[:9].encode()))
            write_bytes_atomically(out / name, content.encode(errors="backslashreplace"))
    return "\n\n".join(said(rows, unjudged, left_out))


def said(rows: list[Comparison], unjudged: list[str], left_out: list[str]) -> list[str]:
    """Return what the program prints: verdicts, power, what is not judged or left out."""
    judged = [row for row in rows if row.is_judged]
    parts = verdict_sentences(judged, unjudged)
    if not rows:
        parts.append(ALONE)
    if judged:
        parts.append(f"Power:\n\n{power_lines(judged)}")
    if others := by_metric([row for row in rows if not row.is_judged]):
        parts.append(f"Not judged (appendix of report.md): {', '.join(others)}")
    return parts + [f"Left out: {line}" for line in left_out]


def write_curves(runs: list[Run], request: Request) -> None:
    """Draw the loss curves of runs without a baseline."""
    if len(request.folders) > 1 and request.plot is None and request.out is None:
        raise ConfigError(
            "the plot of several folders needs a place: say where it goes, --plot=FILE or --out=DIR"
        )
    arms = label_runs(runs)
    if len(arms) > MOST_CURVES:
        raise ConfigError(
            f"{len(arms)} curves, {MOST_CURVES} can be told apart in a plot: name fewer runs, or "
            "compare all with one arm, --baseline=ARM"
        )
    out = request.target_folder()
    with writing(out):
        target = request.plot or out / "loss.png"
    print(f"wrote {plot_loss(arms, target)}")


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
    """Name runs for curves alone; the runs of a name are drawn as one curve, their mean.

    An arm has one curve if its runs differ in the seed alone, else one for each run. A label names
    the settings that are not the same in all curves.

    Raises:
        UserError: the runs have other data, and losses on other data cannot be compared.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if difference := difference_in_data(run, runs[0]):
            raise UserError(f"{run.name} and {runs[0].name}: {difference}: draw them apart")
        groups.setdefault(run.arm, []).append(run)
        check_same_norms(groups[run.arm][0], run)
    curves: list[dict[int, Run]] = []
    for its in groups.values():
        seeds = {run.seed: run for run in its}
        is_one = len(seeds) == len(its) and not any(
            difference_in_settings(run, its[0], BY_SEED) for run in its
        )
        curves += [seeds] if is_one else [{run.seed: run} for run in its]
    firsts = [next(iter(curve.values())) for curve in curves]
    differing = {name for run in firsts for name in differences(run, firsts[0], BY_SEED)}
    labels = []
    for run in firsts:
        values = settings(run)
        words = [f"{name}={values.get(name)}" for name in sorted(differing)]
        labels.append(textwrap.fill(", ".join([short_name(run.arm), *words]), LABEL))
    return {
        label if labels.count(label) == 1 else f"{label} ({run.name})": curve
        for label, run, curve in zip(labels, firsts, curves, strict=True)
    }


if __name__ == "__main__":
    run_program(main)
