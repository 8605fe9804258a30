"""Run folders -> curves, tables, statistics, verdicts. Reads only what the runs wrote.

    python report.py out/demo
        loss curve of one run or more: out/demo/loss.png
    python report.py out/small --baseline=rms
        every run folder in out/small: report.html, report.md, report.csv, seeds.csv, into
        out/small
    python report.py runs/ --baseline=rms --delta_val_loss=0.002 --out=results/mine
    python report.py results/cpu/table1/runs.tar.xz --baseline=rms --out=out/table1
        an archive of runs, as sweep.sh keeps them
    python report.py --published
        CoupledNorm's Table 1, from its printed numbers
    python report.py out/mine --norm_file=my_norm.py
        refuse runs of another norm file; it does not run

An arm is a norm type with its norm keys, such as "coupled --coupled_span=2", or the name that it
was given (sweep.sh, or train.py's key `arm`). Every arm is compared with the baseline, seed by
seed. The margins of equivalence are those that the runs declared (train.py's keys delta_...); one
of val loss that is given here is labelled post hoc.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import gmean

from common.code_digest import check_digests, shortened
from common.errors import ConfigError, UserError, printable, run_program
from common.norm_file import NormFile, split_norm_file
from common.output import (
    check_replaceable,
    code,
    markdown,
    prose,
    write_bytes_atomically,
    writing,
)
from common.plotting import check_picture
from configurator import key, parse_args
from evidence import page, published, stability
from evidence.comparison import (
    NO_VERDICT,
    Arms,
    Comparison,
    arms_called,
    compare,
    diverged_arms,
    lack_of_verdict,
    like_baseline,
    mean_exchange_rate,
    pair_by_seed,
)
from evidence.names import short_name, told_apart
from evidence.plots import plot_loss
from evidence.runs import (
    METRICS,
    RATES,
    Metric,
    Run,
    by_arm,
    difference_in_data,
    find_runs,
)

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
a single one of its documents does. HellaSwag differences are paired item by item within each seed,
and their t error counts both seeds and items as samples. Detectable: the smallest true difference
that these seeds find with 80 % power, corrected for the number of arms; power within: the power to
show "within the margin" at a true difference of zero with the observed SD; needed: seeds that show
a difference, or that it lies within the margin, if the true difference is the observed one (80 %
power): a new set of them, because adding seeds until a verdict appears gives false ones; not known
from fewer than four pairs. tok_per_s is compared as a ratio."""

ALONE = """\
Nothing is compared, for no arm has two pairs. A pair differs in the norm alone: same seed, same
data, same settings. Arms with learning rates of their own, chosen on other seeds, are compared
where their runs declare a study (--study=NAME of train.py and sweep.sh; docs/compare.md)."""

RATES_ALONE = (
    "Nothing is compared, for {arm} has several learning rates: {names}. To compare arms at one "
    "rate, name one of these as the baseline. A rate that was chosen by these losses is judged on "
    "new seeds."
)

RATES_TABLE = """\
Mean of {metric} at each learning rate, with the number of runs where they are fewer than elsewhere.
Such a table chooses rates and judges no arm: the lowest of several losses is low by chance too."""

LONGEST_NAME = 19  # characters of an arm in the terminal's table of 80

STABILITY = """\
Divergence is a result: an arm of which runs diverged has no verdict on the rest. Clipped steps: the
share of steps whose gradient was clipped, mean over runs. A spike is a step whose loss is more than
0.5 above the median of the 50 steps before it. The largest attention logit is that of the last
evaluation, over all runs."""


class Rates(NamedTuple):
    """Learning rates of a run: the keys RATES."""

    learning_rate: float
    min_lr: float
    warmup_iters: int


# ------------------------------------------------------------------------------------------- tables


def number(value: float | None, digits: int = 4) -> str:
    """Format a number for a table; "n/a" where it is missing or not finite."""
    if value is None or not np.isfinite(value):
        return "n/a"
    return f"{value:.{digits}f}"


def runs_of(arms: Arms) -> list[Run]:
    """Return the runs of all arms in one list."""
    return [run for runs in arms.values() for run in runs.values()]


def tost_cell(row: Comparison) -> str:
    """Format p of the equivalence test, with its margin and where the margin comes from."""
    if not row.delta:
        return "no margin"
    return f"{row.verdict.p_tost:.3g} ({row.show(row.delta, sign=False)}, {row.delta_kind})"


def verdict_cells(row: Comparison) -> dict[str, Any]:
    """Return a line of the table of verdicts: heading -> cell."""
    range_of_text = ""
    if row.text is not None:
        range_of_text = row.show_interval((row.text.low, row.text.high))
    return {
        "metric": row.metric.name,
        "arm": code(row.name),
        "verdict": f"**{row.word}**",
        "seeds": len(row.seeds),
        "difference": row.show(row.estimate.mean),
        "Holm interval": row.show_interval(row.verdict.interval),
        "in tokens": row.show_tokens(),
        "without one document": range_of_text,
    }


def test_cells(row: Comparison) -> dict[str, Any]:
    """Return a line of the table of tests below it."""
    return {
        "metric": row.metric.name,
        "arm": code(row.name),
        "SD": row.show(row.sd, sign=False),
        "95 % interval": row.show_interval(row.estimate.interval()),
        "p": f"{row.verdict.p:.3g}",
        "p Holm": f"{row.verdict.p_holm:.3g}",
        "p TOST (margin)": tost_cell(row),
        "p beyond": f"{row.verdict.p_beyond:.3g}" if row.delta else "",
        "detectable": row.show(row.detectable, sign=False),
        "power within": number(row.power_within, 2) if row.delta else "",
        "needed": row.needed or "n/a",
    }


def csv_cells(row: Comparison) -> dict[str, Any]:
    """Return a line of report.csv. Numbers are not rounded; relative metrics are log ratios."""
    low_document = high_document = None
    if row.text is not None:
        low_document, high_document = row.text.low, row.text.high
    low, high = row.estimate.interval()
    return {
        "metric": row.metric.name,
        "arm": row.arm,
        "baseline": row.baseline,
        "n_seeds": len(row.seeds),
        "mean_difference": row.estimate.mean,
        "sd_difference": row.sd,
        "standard_error": row.estimate.se,
        "low": low,
        "high": high,
        "low_holm": row.verdict.interval[0],
        "high_holm": row.verdict.interval[1],
        "p_t": row.verdict.p,
        "p_holm": row.verdict.p_holm,
        "p_tost": row.verdict.p_tost,
        "p_beyond": row.verdict.p_beyond,
        "delta": row.delta,
        "delta_kind": row.delta_kind,
        "detectable": row.detectable,
        "power_within": row.power_within,
        "seeds_needed": row.needed,
        "is_log_ratio": row.metric.relative,
        "token_share": row.tokens(row.estimate.mean),
        "low_document": low_document,
        "high_document": high_document,
        "direction": row.verdict.direction,
        "margin_verdict": row.verdict.margin,
        "verdict": row.word,
    }


def table_of(lines: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    return markdown(*filled(list(lines)))


def filled(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and lines of a table, without columns that are empty in all lines."""
    header = [heading for heading in lines[0] if any(line[heading] for line in lines)]
    return header, [[line[heading] for heading in header] for line in lines]


def stability_rows(arms: Arms) -> list[list[Any]]:
    """Return the outcomes beside loss, a row for each arm; [] if no run has any."""
    if not any(run.stability or run.diverged for run in runs_of(arms)):
        return []
    return [
        stability.row(code(short_name(arm)), runs.values(), missing="n/a")
        for arm, runs in arms.items()
    ]


def mean_and_sd(metric: Metric, runs: dict[int, Run]) -> tuple[float | None, float | None]:
    """Return mean and SD of a metric over runs; None where too few have it."""
    values = [run.metrics[metric.name] for run in runs.values() if metric.name in run.metrics]
    # The mean of speeds is geometric, because they are compared as ratios.
    mean = gmean if metric.relative else np.mean
    sd = np.std(values, ddof=1) if len(values) > 1 else None
    return mean(values) if values else None, sd


def seed_table(arms: Arms, metric: str) -> str:
    """Return the values of one metric: one row a seed, one column an arm, mean and SD below."""
    digits = 0 if metric == "tok_per_s" else 4
    seeds = sorted({seed for runs in arms.values() for seed in runs})
    columns = [[*seeds, "mean", "SD"]]
    for runs in arms.values():
        values = [runs[seed].metrics.get(metric) if seed in runs else None for seed in seeds]
        values += mean_and_sd(METRICS[metric], runs)
        columns.append([number(value, digits) for value in values])
    return markdown(["seed", *map(code, arms)], zip(*columns, strict=True))


def deciding(runs: list[Run]) -> str:
    """Return the loss to decide by, of those that all runs have measured."""
    is_whole = all("val_loss_full" in run.metrics for run in runs)
    return "val_loss_full" if is_whole else "val_loss"


def ended(arms: Arms) -> list[Run]:
    """Return the runs that finished or diverged, those that tell what a learning rate gives."""
    return [run for run in runs_of(arms) if run.diverged or not run.problem()]


def rates_table(arms: Arms) -> tuple[list[str], list[list[str]]] | None:
    """Return header and rows of mean losses: a row for each arm, a column for each learning rate.

    Args:
        arms: runs that differ in norm, rate and seed alone.

    None where no arm has several rates.
    """
    found: dict[str, dict[Rates, list[Run]]] = {}  # run's own arm -> rates -> runs
    for run in ended(arms):
        rates = Rates(*(run.config[rate] for rate in RATES))
        found.setdefault(run.arm, {}).setdefault(rates, []).append(run)
    if all(len(at) == 1 for at in found.values()):
        return None
    metric = rates_metric(arms)
    columns = sorted({rates for at in found.values() for rates in at})
    most = max(len(runs) for at in found.values() for runs in at.values())
    rows = []
    for arm, name in told_apart([*found]).items():
        cells = [loss_cell(found[arm].get(at, []), metric, most) for at in columns]
        rows.append([code(short_name(name)), *cells])
    return ["arm", *rate_labels(columns)], rows


def rates_metric(arms: Arms) -> str:
    """Return the loss in the table of learning rates."""
    return deciding([run for run in ended(arms) if not run.diverged])


def rate_labels(columns: list[Rates]) -> list[str]:
    """Return the learning rates, each with what else differs between the columns."""
    varied = []
    for name in RATES[1:]:
        values = {getattr(at, name) for at in columns}
        if len(values) > 1:
            varied.append(name)
    labels = []
    for at in columns:
        others = [f"{name}={getattr(at, name)}" for name in varied]
        labels.append(" ".join([str(at.learning_rate), *others]))
    return labels


def loss_cell(runs: list[Run], metric: str, most: int) -> str:
    """Format the mean loss of runs, with their number if it is below `most`; "" without any."""
    if not runs:
        return ""
    if bad := sum(run.diverged for run in runs):
        return f"{bad} of {len(runs)} diverged"
    few = f" ({len(runs)} of {most})" if len(runs) < most else ""
    return f"{np.mean([run.metrics[metric] for run in runs]):.4f}{few}"


def rates_text(arms: Arms) -> str:
    """Say what the table of rates shows."""
    return RATES_TABLE.format(metric=rates_metric(arms))


def exchange_text(arms: Arms, baseline: str, token_slope: float) -> str:
    """Say what tokens are worth in nats, by the slope given or else by the baseline's curves."""
    meaning = (
        "In tokens: how many more (+) or fewer (-) tokens the baseline would need for the arm's "
        "loss. Exchange rate, "
    )
    if token_slope:
        return (
            f"{meaning}as given (--token_slope={token_slope:g}): 1 % more tokens buy "
            f"{token_slope * np.log(1.01):.5f} nats per token."
        )
    rate = mean_exchange_rate(list(arms[baseline].values()))
    if rate is None:
        return (
            f"What a difference is worth in tokens is not known: the runs of {code(baseline)} need "
            "three evaluations or more in their later half, and a loss that still falls."
        )
    return (
        f"{meaning}from the later half of the {code(baseline)} curves: 1 % more tokens buy "
        f"{rate * np.log(1.01):.5f} nats per token. The learning rate's decay is in it, so it is "
        "an upper estimate, and what a difference is worth in tokens a lower one."
    )


def names_text(arms: Arms) -> str:
    """Return the table of names; "" if no arm has another one than its words."""
    firsts = {short_name(arm): next(iter(runs.values())) for arm, runs in arms.items()}
    words = {name: run.words for name, run in firsts.items()}
    for setting in ("learning_rate", "warmup_iters"):
        if len({run.config[setting] for run in firsts.values()}) > 1:  # of a declared study
            for name, run in firsts.items():
                words[name] += f" --{setting}={run.config[setting]:g}"
    table = [(code(name), code(arm)) for name, arm in words.items() if name != arm]
    return markdown(["short name", "arm"], table) if table else ""


def distinct(values: Iterable[Any]) -> str:
    """List the different values, sorted as text."""
    return ", ".join(sorted({str(value) for value in values}))


def header_text(arms: Arms) -> str:
    """Say in one paragraph which runs are compared: device, versions, sizes."""
    runs = runs_of(arms)
    devices = distinct(run.start["device"] for run in runs)
    torch = distinct(run.start["versions"]["torch"] for run in runs)
    # A commit is a hash of 40 digits, perhaps with "-dirty" behind it, which is kept.
    commits = distinct(str(run.start["git"])[:7] + str(run.start["git"])[40:] for run in runs)
    sizes = distinct(f"{run.start['n_params']:,}" for run in runs)
    tokens = distinct(f"{int(run.curve[-1, 0]):,}" for run in runs)
    studies = distinct(run.config.get("study", "") for run in runs)
    return (
        f"{len(runs)} runs, {len(arms)} arms. Device: {devices}; torch {torch}; commit {commits}; "
        f"{sizes} parameters; {tokens} training tokens a run."
        + (f" Study: {studies}." if studies else "")
        + same_code_text(runs)
    )


def same_code_text(runs: list[Run]) -> str:
    """Say which codes are taken as one; "" if no run says so, nor whoever reports."""
    said = {frozenset(run.codes) for run in runs if len(run.codes) > 1}
    if not said:
        return ""
    classes = "; ".join(sorted(" = ".join(sorted(codes)) for codes in said))
    return (
        f" Code that is said to be one, because a recorded run that was trained again was equal to "
        f"the bit (--same_code): {classes}."
    )


@dataclass(frozen=True)
class Report:
    """What is compared, and what is to be said beside it.

    Attributes:
        baseline: full name of the arm that the others are compared with.
        compared: the runs that have a pair. Means and curves are of these, so that they tell the
            same story as the differences.
        stable: these and the runs that diverged.
        rows: every arm's comparison in every metric.
        unjudged: one sentence for each arm with too few pairs to be compared.
        left_out: one line for each run or pair that is not compared.
        alone: why nothing is compared; "" if something is.
        at_rates: runs with these settings at all learning rates.
        token_slope: nats that e times as many tokens buy, as given; 0: by curves.
    """

    baseline: str
    compared: Arms
    stable: Arms
    rows: list[Comparison]
    unjudged: list[str]
    left_out: list[str]
    alone: str
    at_rates: Arms
    token_slope: float = 0.0

    @property
    def judged(self) -> list[Comparison]:
        """The comparisons in metrics that are judged."""
        return [row for row in self.rows if not row.not_judged]

    @property
    def others(self) -> list[Comparison]:
        """Those that are not."""
        return [row for row in self.rows if row.not_judged]


def make_report(arms: Arms, baseline: str, delta: float, token_slope: float = 0.0) -> Report:
    """Pair and compare runs.

    Args:
        arms: all runs.
        baseline: an arm.
        delta: margin of val loss, post hoc; 0 for none.
        token_slope: nats that e times as many tokens buy the baseline; 0: by its curves.

    Raises:
        UserError: the runs cannot be compared.
    """
    called = arms_called(arms, baseline)
    if len(called) > 1:
        return without_comparison(arms, baseline, called)
    [baseline] = called or [baseline]
    pairs, left_out = pair_by_seed(arms, baseline)
    alike = like_baseline(arms, baseline)
    diverged = diverged_arms(alike)
    rows, not_measured = compare(pairs, baseline, delta, diverged, token_slope=token_slope)
    bases = {pair.base.seed: pair.base for its in pairs.values() for pair in its}
    # Without any pair, all runs of the baseline stay.
    compared = {baseline: bases or arms[baseline]}
    for arm, its in pairs.items():
        if its:
            compared[arm] = {pair.run.seed: pair.run for pair in its}
    stable: Arms = {}
    for arm, runs in alike.items():
        for seed, run in runs.items():
            if run.diverged or seed in compared.get(arm, {}):
                stable.setdefault(arm, {})[seed] = run
    judged = {row.arm for row in rows}
    unjudged = []
    for arm in alike:
        why = lack_of_verdict(arm, "", pairs.get(arm, []), diverged)
        if why and arm not in judged:
            unjudged.append(f"{short_name(arm)}: {NO_VERDICT}: {why}.")
    return Report(
        baseline=baseline,
        compared=compared,
        stable=stable,
        rows=rows,
        unjudged=unjudged,
        left_out=left_out + not_measured,
        alone="" if rows else ALONE,
        at_rates=like_baseline(arms, baseline, RATES),
        token_slope=token_slope,
    )


def finished(arms: Arms) -> Arms:
    """Return the runs without a problem, and the arms that have any."""
    good: Arms = {}
    for arm, runs in arms.items():
        for seed, run in runs.items():
            if not run.problem():
                good.setdefault(arm, {})[seed] = run
    return good


def without_comparison(arms: Arms, baseline: str, called: list[str]) -> Report:
    """Report on runs of which the baseline has several learning rates, `called`."""
    alike = like_baseline(arms, called[0], RATES)
    left_out = []
    for arm, runs in arms.items():
        for seed, run in runs.items():
            why = run.problem()
            if not why and seed not in alike[arm]:
                why = "other settings"
            if why:
                left_out.append(f"{arm}, seed {seed}: {why}")
    names = ", ".join(map(code, called))
    return Report(
        baseline=baseline,
        compared=finished(alike),
        stable={arm: runs for arm, runs in alike.items() if runs},
        rows=[],
        unjudged=[],
        left_out=left_out,
        alone=RATES_ALONE.format(arm=code(baseline), names=names),
        at_rates=alike,
    )


def report_text(report: Report) -> str:
    """Return the whole of report.md."""
    arms = {short_name(arm): runs for arm, runs in report.compared.items()}
    baseline = short_name(report.baseline)
    title = f"# Norm types against {code(baseline)}"
    parts = [title, prose(header_text(arms)), names_text(report.stable)]
    parts.append("## Verdicts")
    parts += verdict_sentences(report.judged, report.unjudged)
    parts.append(report.alone)
    if report.judged:
        parts += [
            table_of(map(verdict_cells, report.judged)),
            exchange_text(arms, baseline, report.token_slope),
        ]
        parts += ["## Tests", table_of(map(test_cells, report.judged))]
    parts.append(HOW)
    if stable := stability_rows(report.stable):
        parts += ["## Stability", markdown(stability.HEADER, stable), STABILITY]
    if rates := rates_table(report.at_rates):
        parts += ["## Learning rates", markdown(*rates), rates_text(report.at_rates)]
    parts.append("## Seed by seed")
    for name, metric in METRICS.items():
        if any(name in run.metrics for run in runs_of(arms)):
            parts += [f"### {name} ({metric.unit})", seed_table(arms, name)]
    if report.left_out:
        parts += ["## Left out", "\n".join(f"- {prose(line)}" for line in report.left_out)]
    if report.others:
        parts.append("## Appendix: not judged")
        parts += verdict_sentences(report.others)
        parts += [
            table_of(map(verdict_cells, report.others)),
            table_of(map(test_cells, report.others)),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_metric(rows: list[Comparison]) -> Iterator[tuple[str, Iterator[Comparison]]]:
    """Group comparisons, which are in the order of metrics, by the name of their metric."""
    return itertools.groupby(rows, lambda row: row.metric.name)


def verdict_sentences(rows: list[Comparison], unjudged: Iterable[str] = ()) -> list[str]:
    """Return one list of sentences for each metric, as Markdown; after them those of `unjudged`."""
    texts = []
    for name, its in by_metric(rows):
        texts.append("\n".join([f"{name}:", "", *(f"- {row.sentence()}" for row in its)]))
    return [*texts, "\n".join(f"- {prose(line)}" for line in unjudged)]


def csv_text(header: Iterable[str], lines: list[dict[str, Any]]) -> str:
    """Return a CSV file's content; what a line lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(header), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


# ------------------------------------------------------------------------------------------ program


@dataclass(frozen=True)
class ReportConfig:
    """The keys of report.py."""

    baseline: str = key("", "arm that every other one is compared with; without: loss curves alone")
    out: str = key("", "folder that everything is written into, instead of that of the runs")
    plot: str = key("", "file for the loss curves of runs without a baseline")
    pictures: bool = key(True, "make report.html, which has pictures")
    published: bool = key(False, "judge CoupledNorm's Table 1, and nothing else")
    delta_val_loss: float = key(0.0, "margin of val_loss and val_loss_full, post hoc", least=0.0)
    token_slope: float = key(
        0.0,
        "nats that e times as many tokens buy the baseline, from runs of several lengths "
        "(0: by the slope of its curves, which makes the tokens too few)",
        least=0.0,
    )
    same_code: tuple[str, ...] = key(
        (), "digests of code, one code by a recorded run that was equal to the bit"
    )


def target_folder(config: ReportConfig, paths: list[Path]) -> Path:
    """Return where the output goes: `out`, else into the folder of the runs or beside it."""
    if config.out:
        return Path(config.out)
    if len(paths) > 1 and not config.plot:
        raise ConfigError(
            "the runs are in several places: say where the output goes, --out=DIR or --plot=FILE"
        )
    return paths[0] if paths[0].is_dir() else paths[0].parent


def arms_text(arms: Arms) -> page.Html:
    """Return an HTML table of the norm keys of all arms: each has those that it reads."""
    firsts = {arm: next(iter(runs.values())) for arm, runs in arms.items()}
    keys = sorted({key for run in firsts.values() for key in run.norm_keys})
    rows = [
        [short_name(arm), *(run.norm_value(key) for key in keys)] for arm, run in firsts.items()
    ]
    return page.table(["arm", *keys], rows, arms)


def paragraphs(lines: Iterable[str]) -> list[page.Html]:
    """Return lines as paragraphs of a page."""
    return [page.element("p", line) for line in lines]


def page_of(report: Report) -> bytes:
    """Return report.html: what report.md says, with pictures that answer the pointer."""
    arms, rows = report.compared, report.judged
    verdicts = page.element("p", report.alone)
    if rows:
        cells = filled([verdict_cells(row) for row in rows])
        verdicts = page.table(*cells, [row.arm for row in rows])
    sections = {"Verdicts": page.joined([verdicts, *paragraphs(report.unjudged)])}
    for name, its in by_metric(rows):
        sections[f"Differences: {name}"] = page.forest(list(its), arms)
    sections |= {
        "Validation loss": page.losses(arms),
        "Residual stream after training": page.stream(arms),
        "Scale at the output": page.output(arms),
    }
    if stable := stability_rows(report.stable):
        sections["Stability"] = page.table(stability.HEADER, stable, report.stable)
    if rates := rates_table(report.at_rates):
        table = page.table(*rates, [""] * len(rates[1]))
        about = page.element("p", rates_text(report.at_rates))
        sections["Learning rates"] = page.joined([table, about])
    sections["Norm keys"] = arms_text(arms)
    if report.left_out:
        sections["Left out"] = page.joined(paragraphs(report.left_out))
    title = f"Norm types against {short_name(report.baseline)}"
    return page.write_page(title, header_text(arms), arms, sections)


def write_report(report: Report, out: Path, pictures: bool) -> None:
    """Write report.md, report.csv, seeds.csv, and with `pictures` report.html. Raises UserError."""
    with writing(out):
        seeds = [
            {"arm": arm, "seed": seed} | run.metrics
            for arm, runs in report.compared.items()
            for seed, run in sorted(runs.items())
        ]
        rows = [csv_cells(row) for row in report.rows]
        # Where nothing is compared, too, it begins in this way, so that it is known as ours.
        columns = rows[0] if rows else ("metric", "arm")
        texts = {
            "report.md": report_text(report),
            "report.csv": csv_text(columns, rows),
            "seeds.csv": csv_text(["arm", "seed", *METRICS], seeds),
        }
        for name, content in texts.items():
            check_replaceable(out / name, re.escape(content[:9].encode()))
            write_bytes_atomically(out / name, content.encode(errors="backslashreplace"))
        if pictures:
            check_replaceable(out / "report.html", b"<!doctype html>")
            write_bytes_atomically(out / "report.html", page_of(report))


def terminal_table(report: Report) -> str:
    """Return the arms in the loss to decide by, at most 80 characters a line."""
    metric = report.judged[0].metric if report.judged else METRICS["val_loss"]
    found = {row.arm: row for row in report.judged if row.metric is metric}
    lines = [["arm", "seeds", "mean", "SD", "diff", "95 % (Holm)", "verdict"]]
    for place, (arm, runs) in enumerate(report.compared.items()):
        name = cut(short_name(arm), place)
        mean, sd = mean_and_sd(metric, runs)
        tests = ["", "", "" if arm == report.baseline else NO_VERDICT]
        if row := found.get(arm):
            tests = [row.show(row.estimate.mean), row.show_interval(row.verdict.interval)]
            tests.append(row.two_words)
        lines.append([name, str(len(runs)), number(mean), number(sd), *tests])
    verdicts = [line.pop() for line in lines]
    table = [
        f"{line}  {verdict}".rstrip()
        for line, verdict in zip(aligned(lines), verdicts, strict=True)
    ]
    return "\n".join([f"{metric.name}, {metric.unit}", *table])


def terminal_rates(report: Report) -> str:
    """Return the losses at each learning rate."""
    header, rows = rates_table(report.at_rates)
    metric = METRICS[rates_metric(report.at_rates)]
    lines = [[cut(arm.strip("`"), place), *cells] for place, (arm, *cells) in enumerate(rows)]
    title = f"{metric.name}, {metric.unit}, by learning rate"
    return "\n".join([title, *(line.rstrip() for line in aligned([header, *lines]))])


def cut(name: str, place: int) -> str:
    """Cut a long name for the terminal; names that are alike up to there differ by their place."""
    return f"{name[: LONGEST_NAME - 4]} #{place}" if len(name) > LONGEST_NAME else name


def aligned(lines: list[list[str]]) -> list[str]:
    """Align cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        " ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for first, *cells in lines
    ]


def said(report: Report) -> str:
    """Return what the program prints: a table, verdicts, what is not judged or left out."""
    is_one_arm = report.baseline in report.compared
    parts = [terminal_table(report) if is_one_arm else terminal_rates(report)]
    parts += verdict_sentences(report.judged, report.unjudged)
    parts.append(report.alone)
    if report.others:
        names = ", ".join(name for name, _ in by_metric(report.others))
        parts.append(f"Not judged (appendix of report.md): {names}")
    parts += [f"Left out: {printable(line)}" for line in report.left_out]
    return "\n\n".join(part for part in parts if part)


def check_norm_file(run: Run, file: NormFile | None) -> None:
    """Raise UserError for a run of another norm file than the one given. The file does not run."""
    then = run.start.get("norm_file")
    if file and then and then["sha256"] != file.sha256:
        raise UserError(
            f"{run.name}: its norm file {then['name']} had the SHA-256 {then['sha256']}, and "
            f"norm_file={file.path} has {file.sha256}: leave the run out, or give its file"
        )


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    argv, norm_file = split_norm_file(argv)
    paths = [Path(word) for word in argv if not word.startswith("-")]
    config, _ = parse_args(ReportConfig, [word for word in argv if word.startswith("-")], __doc__)
    if config.published:
        published.print_verdicts()
        return
    check_digests("same_code", config.same_code)
    if not paths:
        raise ConfigError("name one run folder or more (--help says more)")
    out = target_folder(config, paths)
    if config.plot and config.baseline:
        raise ConfigError(
            f"plot={config.plot}: for loss curves without a baseline; with one they are in "
            "report.html: leave out --plot or --baseline"
        )
    if config.plot:
        check_picture(Path(config.plot))  # before anything is read
    runs = find_runs(paths)
    for run in runs:
        run.check()
        run.said_same = shortened(config.same_code)
        check_norm_file(run, norm_file)
    if not config.baseline:
        for run in runs:
            if difference := difference_in_data(run, runs[0]):
                raise UserError(f"{run.name} and {runs[0].name}: {difference}: draw them apart")
        with writing(out):
            print(f"wrote {plot_loss(runs, Path(config.plot or out / 'loss.png'))}")
        print("for a comparison of several seeds: --baseline=NORM_TYPE --out=DIR")
        return
    report = make_report(by_arm(runs), config.baseline, config.delta_val_loss, config.token_slope)
    write_report(report, out, config.pictures)
    first = out / ("report.html" if config.pictures else "report.md")
    print(f"{said(report)}\n\nwrote {first}, and beside it tables and CSV files")


if __name__ == "__main__":
    run_program(main)
