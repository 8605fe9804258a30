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

An arm is a norm type with its norm keys ("coupled --coupled_span=2"); arms are compared with the
baseline by seed. The margins of equivalence are those that the runs declared (train.py's delta_*
keys); one that is given here, --delta.METRIC=NUMBER, is labelled post hoc. Metrics: val_loss,
train_loss, hellaswag_acc, hellaswag_acc_norm, tok_per_s (its margin is a share). Other keys:
--out=DIR (else beside the runs), --pictures=False (tables alone), --plot=FILE (the loss curves of
runs without a baseline).
"""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import gmean

from common.errors import ConfigError, run_program
from common.output import markdown, write_bytes_atomically, writing
from evidence import published
from evidence.archive import SUFFIX
from evidence.comparison import EQUAL_TIME, Comparison, compare, exchange_rate, pair, usable
from evidence.plots import (
    Arms,
    drifting,
    plot_differences,
    plot_drift,
    plot_loss,
    plot_output,
    plot_stream,
)
from evidence.runs import METRICS, by_arm, find_runs

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
    return "n/a" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def verdict_table(rows: list[Comparison]) -> str:
    header = [
        "metric",
        "arm",
        "seeds",
        "difference",
        "SD",
        "95 % interval",
        "Holm interval",
        "p",
        "p Holm",
        "p TOST (margin)",
        "p sign-flip",
        "BCa 95 %",
        "detectable",
        "needed",
        "verdict",
    ]
    table = []
    for row in rows:
        v = row.verdict
        tost = (
            f"{v.p_tost:.3g} ({row.show(row.delta, sign=False)}, {row.delta_kind})"
            if row.delta
            else "no margin"
        )
        table.append(
            [
                row.metric.name,
                f"`{row.arm}`",
                len(row.seeds),
                row.show(row.estimate.mean),
                row.show(row.sd, sign=False),
                row.show_interval(row.estimate.interval()),
                row.show_interval(v.interval),
                f"{v.p:.3g}",
                f"{v.p_holm:.3g}",
                tost,
                f"{row.sign_flip:.3g}",
                row.show_interval(row.bootstrap),
                row.show(row.detectable, sign=False),
                row.needed or "n/a",
                f"**{row.word}**",
            ]
        )
    return markdown(header, table)


def seed_table(arms: Arms, metric: str) -> str:
    """Values of one metric: seeds down, arms across, mean and SD below."""
    values = {
        arm: {seed: run.metrics.get(metric) for seed, run in runs.items()}
        for arm, runs in arms.items()
    }
    digits = 0 if metric == "tok_per_s" else 4
    table = [
        [seed, *(number(values[arm].get(seed), digits) for arm in arms)]
        for seed in sorted({seed for runs in arms.values() for seed in runs})
    ]
    there = {
        arm: [value for value in its.values() if value is not None] for arm, its in values.items()
    }
    mean = gmean if METRICS[metric].relative else np.mean
    table.append(["mean", *(number(mean(its) if its else None, digits) for its in there.values())])
    table.append(
        [
            "SD",
            *(
                number(np.std(its, ddof=1) if len(its) > 1 else None, digits)
                for its in there.values()
            ),
        ]
    )
    return markdown(["seed", *(f"`{arm}`" for arm in arms)], table)


def equal_time_text(rows: list[Comparison], arms: Arms, baseline: str) -> str:
    """What throughput is worth: the exchange rate, and losses at equal tokens and equal time side
    by side.
    """
    rates = [rate for run in arms[baseline].values() if (rate := exchange_rate(run)) is not None]
    timed = [row for row in rows if row.metric is EQUAL_TIME]
    if not rates or not timed:
        return "No run has throughput and enough evaluations to compare at equal time."
    rate = float(np.mean(rates))
    table = []
    for row in timed:
        tokens, speed = (
            next(r for r in rows if r.arm == row.arm and r.metric is METRICS[name])
            for name in ("val_loss", "tok_per_s")
        )
        table.append(
            [
                f"`{row.arm}`",
                tokens.show(tokens.estimate.mean),
                speed.show(speed.estimate.mean),
                f"{-rate * speed.estimate.mean:+.4f}",
                row.show(row.estimate.mean),
            ]
        )
    return (
        f"Exchange rate, from the later half of the `{baseline}` curves: 1 % more tokens buy "
        f"{rate * np.log(1.01):.5f} nats per token (the learning rate's decay is in it, so rather "
        "less).\n\n"
        + markdown(
            [
                "arm",
                "val loss at equal tokens",
                "throughput",
                "worth, nats",
                "val loss at equal time",
            ],
            table,
        )
    )


def report_text(
    arms: Arms, rows: list[Comparison], baseline: str, left_out: list[str], plots: list[Path]
) -> str:
    every = [run for runs in arms.values() for run in runs.values()]

    def distinct(values) -> str:
        return ", ".join(sorted({str(value) for value in values}))

    sizes = distinct(f"{run.start['n_params']:,}" for run in every)
    commits = distinct(str(run.start["git"])[:7] + str(run.start["git"])[40:] for run in every)
    parts = [
        f"# Norm types against `{baseline}`",
        f"{len(every)} runs, {len(arms)} arms. Device: "
        f"{distinct(run.start['device'] for run in every)}; torch "
        f"{distinct(run.start['versions']['torch'] for run in every)}; commit {commits}; {sizes} "
        f"parameters; {distinct(f'{int(run.curve[-1, 0]):,}' for run in every)} training tokens a "
        "run.",
        *(f"![{plot.stem}]({plot.name})" for plot in plots),
        "## Verdicts",
        *(verdict_sentences(rows) or ["No arm has two seeds in common with the baseline."]),
        verdict_table(rows) if rows else "",
        HOW,
        "## Equal tokens, equal time",
        equal_time_text(rows, arms, baseline),
        "## Seed by seed",
    ]
    for name, metric in METRICS.items():
        if any(name in run.metrics for run in every):
            parts += [f"### {name} ({metric.unit})", seed_table(arms, name)]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdict_sentences(rows: list[Comparison]) -> list[str]:
    metrics = dict.fromkeys(row.metric for row in rows)
    return [
        "\n".join(
            [
                f"{metric.name}:",
                "",
                *(f"- {row.sentence()}" for row in rows if row.metric is metric),
            ]
        )
        for metric in metrics
    ]


def csv_text(header: list[str], rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def verdict_csv(rows: list[Comparison]) -> str:
    header = [
        "metric",
        "arm",
        "baseline",
        "n_seeds",
        "mean_difference",
        "sd_difference",
        "standard_error",
        "low",
        "high",
        "low_holm",
        "high_holm",
        "p_t",
        "p_holm",
        "p_tost",
        "delta",
        "delta_kind",
        "p_sign_flip",
        "low_bca",
        "high_bca",
        "detectable",
        "seeds_needed",
        "is_log_ratio",
        "verdict",
    ]
    return csv_text(
        header,
        [
            [
                row.metric.name,
                row.arm,
                row.baseline,
                len(row.seeds),
                row.estimate.mean,
                row.sd,
                row.estimate.se,
                *row.estimate.interval(),
                *row.verdict.interval,
                row.verdict.p,
                row.verdict.p_holm,
                row.verdict.p_tost,
                row.delta,
                row.delta_kind,
                row.sign_flip,
                *row.bootstrap,
                row.detectable,
                row.needed,
                row.metric.relative,
                row.word,
            ]
            for row in rows
        ],
    )


def seeds_csv(arms: Arms) -> str:
    rows = [
        [arm, seed, *(run.metrics.get(name) for name in METRICS)]
        for arm, runs in arms.items()
        for seed, run in sorted(runs.items())
    ]
    return csv_text(["arm", "seed", *METRICS], rows)


# ------------------------------------------------------------------------------------------ program


def parse(argv: list[str]) -> tuple[list[Path], dict[str, str], dict[str, float]]:
    """(run folders, settings, post-hoc margins). Raises ConfigError."""
    folders, settings, deltas = [], {}, {}
    for word in argv:
        name, _, text = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            folders.append(Path(word))
        elif name in ("baseline", "out", "plot") and text:
            settings[name] = text
        elif word == "--pictures=False":
            settings["pictures"] = ""
        elif name.startswith("delta."):
            metric = name.removeprefix("delta.")
            try:
                deltas[metric] = float(text)
            except ValueError:
                deltas[metric] = -1.0
            if metric not in METRICS or not 0 < deltas[metric] < np.inf:
                raise ConfigError(f"{word}: wants a margin above 0 for one of {', '.join(METRICS)}")
        else:
            raise ConfigError(
                f"{word}: report.py knows --baseline=ARM, --delta.METRIC=NUMBER, --out=DIR, "
                "--plot=FILE, --pictures=False"
            )
    if not folders:
        raise ConfigError("name one run folder or more (--help says more)")
    if deltas and "baseline" not in settings:
        raise ConfigError("a margin needs a comparison: give --baseline=ARM")
    return folders, settings, deltas


def draw(arms: Arms, rows: list[Comparison], baseline: str, out: Path) -> list[Path]:
    """The pictures of a report.

    Losses over time are of runs on GPUs: speeds of runs on a CPU are not judged.
    """
    every = [run for runs in arms.values() for run in runs.values()]
    plots = [plot_loss(arms, out / "loss_tokens.png", "tokens", baseline)]
    if not any(run.on_cpu for run in every):
        plots.append(plot_loss(arms, out / "loss_time.png", "time"))
    if rows:
        plots.append(plot_differences(rows, out / "differences.png"))
    if any(run.stream for run in every):
        plots.append(plot_stream(arms, out / "stream.png"))
    if any(run.history for run in every):
        plots.append(plot_output(arms, out / "output.png"))
    if moved := drifting(arms):
        plots.append(plot_drift(moved, out / "drift.png"))
    return plots


def write_report(
    arms: Arms, baseline: str, deltas: dict[str, float], out: Path, pictures: bool = True
) -> str:
    """Everything into `out`; the verdicts as text."""
    arms, left_out, diverged = usable(arms)
    pairs, unpaired = pair(arms, baseline, tuple(left_out))
    rows, lacking = compare(pairs, baseline, deltas, diverged)
    left_out += unpaired + lacking
    # Means and curves are of the runs that are compared, so that they tell the same story as the
    # differences.
    used = {base.seed: base for its in pairs.values() for _, base in its} or arms[baseline]
    arms = {
        baseline: used,
        **{arm: {run.seed: run for run, _ in its} for arm, its in pairs.items() if its},
    }
    with writing(out):
        plots = draw(arms, rows, baseline, out) if pictures else []
        texts = {
            "report.md": report_text(arms, rows, baseline, left_out, plots),
            "report.csv": verdict_csv(rows),
            "seeds.csv": seeds_csv(arms),
        }
        for name, text in texts.items():
            write_bytes_atomically(out / name, text.encode())
    return "\n\n".join(verdict_sentences(rows) + [f"Left out: {line}" for line in left_out])


def main(argv: list[str]) -> None:
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    if argv[0].partition("=")[0] == "--published":
        return published.main(argv)
    folders, settings, deltas = parse(argv)
    runs = find_runs(folders)
    if "baseline" not in settings:
        if len(folders) > 1 and not {"plot", "out"} & settings.keys():
            raise ConfigError(
                "of several folders none is the plot's: say where it goes, --plot=FILE or --out=DIR"
            )
        out = Path(settings.get("out", folder_of(folders[0])))
        with writing(out):
            target = Path(settings.get("plot", out / "loss.png"))
        print(f"wrote {plot_loss(named(runs), target)}")
        return
    if len(folders) > 1 and "out" not in settings:
        raise ConfigError("of several folders none is the report's: say where it goes, --out=DIR")
    out = Path(settings.get("out", folder_of(folders[0])))
    pictures = "pictures" not in settings
    print(write_report(by_arm(runs), settings["baseline"], deltas, out, pictures))
    print(f"\nwrote report.md, report.csv, seeds.csv{' and plots' if pictures else ''} into {out}")


def folder_of(path: Path) -> Path:
    """Where a report goes if nobody says so: into the folder of the runs, or beside the file that
    holds them.
    """
    return path if path.is_dir() else path.parent if path.name.endswith(SUFFIX) else Path()


def named(runs: list) -> Arms:
    """Runs for curves alone: seeds of an arm together, unless two runs share arm and seed."""
    if len({(run.arm, run.seed) for run in runs}) == len(runs):
        return by_arm(runs)
    return {run.config["out_dir"]: {run.seed: run} for run in runs}


if __name__ == "__main__":
    run_program(main)
