"""Pictures of runs: loss curves with seed bands, over tokens or time, and paired differences with
their intervals.
"""

from pathlib import Path

import numpy as np

from common.errors import UserError
from common.plotting import STYLES, plt, save, style
from evidence.comparison import Comparison
from evidence.runs import Run

Arms = dict[str, dict[int, Run]]


def curves(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n,) and val losses (runs, n), of the evaluations that all these runs share."""
    shared = sorted(set.intersection(*(set(run.curve[:, 0]) for run in runs)))
    return np.array(shared), np.array(
        [[dict(run.curve)[tokens] for tokens in shared] for run in runs]
    )


def loss_unit(arms: Arms) -> str:
    every = [run for runs in arms.values() for run in runs.values()]
    return "nats per token" + (
        ", a token is a byte" if all(run.config["n_vocab"] == 257 for run in every) else ""
    )


def plot_loss(arms: Arms, target: Path, over: str = "tokens", baseline: str = "") -> Path:
    """Val loss of every arm: mean over seeds with a band of one SD; training loss faint where there
    is one seed.

    With a baseline, a panel below shows each arm's paired difference to it, which the bands above
    would hide.
    """
    below = (
        bool(baseline)
        and over == "tokens"
        and any(len(arms[baseline].keys() & runs) > 1 for runs in arms.values())
    )
    figure, axes = plt.subplots(
        1 + below,
        figsize=(7.5, 7.5 if below else 4.6),
        layout="constrained",
        sharex=True,
        squeeze=False,
        height_ratios=[3, 2] if below else [1],
    )
    top, lowest, ends, all_losses = axes[0, 0], np.inf, [], []
    for index, (arm, runs) in enumerate(arms.items()):
        tokens, losses = curves(list(runs.values()))
        if not losses.size:
            continue
        # of the mean time
        speed = 1 / np.mean([1 / run.metrics.get("tok_per_s", np.nan) for run in runs.values()])
        x = tokens / 1e6 if over == "tokens" else tokens / speed / 60
        mean, sd = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(x))
        label = f"{arm}: {mean[-1]:.3f}" + (
            f" (SD {sd[-1]:.3f}, {len(losses)} seeds)" if len(losses) > 1 else ""
        )
        top.plot(x, mean, label=label, linewidth=1.6, **style(index))
        top.fill_between(
            x, mean - sd, mean + sd, color=STYLES[index % len(STYLES)][0], alpha=0.18, linewidth=0
        )
        if len(runs) == 1 and over == "tokens":
            run = next(iter(runs.values()))
            steps = [
                (step["step"] * run.start["tokens_per_step"] / 1e6, step["loss"])
                for step in run.steps
            ]
            top.plot(
                *zip(*steps), color=STYLES[index % len(STYLES)][0], alpha=0.25, linewidth=1
            ) if steps else None
        lowest = min(lowest, np.nanmin(losses))
        ends.append(mean[-1] + sd[-1])
        all_losses.append(losses[:, 1:])
    if not np.isfinite(lowest):
        raise UserError("no evaluation yet: nothing to draw")
    later = (
        np.concatenate([losses.ravel() for losses in all_losses]) if all_losses else np.array([])
    )
    # every arm's end is seen
    high = np.nanmax([np.quantile(later, 0.9) if later.size else lowest + 1.0, *ends])
    top.set_ylim(lowest - 0.1 * (high - lowest) - 0.02, high + 0.1 * (high - lowest) + 0.02)
    several = any(len(runs) > 1 for runs in arms.values())
    title = (
        "Validation loss: mean over seeds, band of one SD"
        if several
        else "Validation loss (training loss faint)"
    )
    top.set(ylabel=f"val loss ({loss_unit(arms)})", title=title)
    top.legend(frameon=False, fontsize=9, title="arm: last value")
    if below:
        plot_loss_differences(axes[1, 0], arms, baseline)
    axes[-1, 0].set_xlabel(
        "training tokens (millions)" if over == "tokens" else "training time (minutes)"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return save(figure, target)


def compress(axis: plt.Axes, samples: list[np.ndarray], which: str) -> None:
    """Limits that hold all samples; beyond the usual spread the scale is logarithmic, where one arm
    is far off.
    """
    spans = [np.abs(sample).max() for sample in samples if sample.size]
    usual, widest = np.median(spans), max(spans)
    if widest > 5 * usual > 0:
        scale = getattr(axis, f"set_{which}scale")
        scale("symlog", linthresh=1.5 * usual, linscale=2)
        getattr(axis, f"{which}axis").set_major_formatter("{x:g}")
    else:
        axis.locator_params(axis=which, nbins=4)
    low, high = min(sample.min() for sample in samples), max(sample.max() for sample in samples)
    room = 0.15 * usual or 1.0
    getattr(axis, f"set_{which}lim")(1.2 * min(low, 0) - room, 1.2 * max(high, 0) + room)


def plot_loss_differences(axis: plt.Axes, arms: Arms, baseline: str) -> None:
    """Each arm's val loss less the baseline's at the same seed and step: mean and the range of the
    seeds.
    """
    later = []  # differences after the first quarter, where the curves have settled
    for index, (arm, runs) in enumerate(arms.items()):
        seeds = sorted(runs.keys() & arms[baseline].keys())
        if arm == baseline or not seeds:
            continue
        tokens, both = curves(
            [runs[seed] for seed in seeds] + [arms[baseline][seed] for seed in seeds]
        )
        difference = both[: len(seeds)] - both[len(seeds) :]
        x, color = tokens / 1e6, STYLES[index % len(STYLES)][0]
        axis.plot(x, difference.mean(0), linewidth=1.6, **style(index))
        axis.fill_between(
            x, difference.min(0), difference.max(0), color=color, alpha=0.18, linewidth=0
        )
        later.append(difference[:, len(x) // 4 :])
    axis.axhline(0, color="black", linewidth=1)
    compress(axis, later, "y")
    axis.set(
        ylabel=f"val loss less that of {baseline}",
        title="Paired by seed: mean, band from lowest to highest seed",
    )


def plot_differences(rows: list[Comparison], target: Path) -> Path:
    """One panel a metric: every seed's difference, the mean with its Holm-adjusted interval, the
    margin shaded.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows))
    columns = min(2, len(metrics))
    lines = -(-len(metrics) // columns)
    names = 0.07 * max(map(len, arms))  # inches, about
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4.4 * columns + names, (0.9 + 0.55 * len(arms)) * lines + 0.3),
        layout="constrained",
        squeeze=False,
    )
    margins = " and ".join(dict.fromkeys(f"{row.delta_kind} margin" for row in rows if row.delta))
    gray = f" Gray: the {margins}." if margins else ""
    figure.suptitle(
        f"Dots: seeds. Marker and line: mean, Holm-adjusted 95 % interval.{gray}", size=10
    )
    for axis in axes.flat[len(metrics) :]:
        axis.set_visible(False)
    for number, (axis, metric) in enumerate(zip(axes.flat, metrics)):
        its = [row for row in rows if row.metric is metric]
        shown = (lambda x: 100 * np.expm1(x)) if metric.relative else (lambda x: np.asarray(x))
        if delta := its[0].delta:
            axis.axvspan(*shown(np.array([-delta, delta])), color="gray", alpha=0.15, linewidth=0)
        for row in its:
            y = -arms.index(row.arm)
            kind = style(arms.index(row.arm) + 1)  # the baseline has the first style in the curves
            axis.plot(
                shown(row.differences),
                np.full(len(row.seeds), y - 0.22),
                ".",
                color=kind["color"],
                alpha=0.5,
            )
            axis.plot(
                shown(np.array(row.verdict.interval)), [y, y], color=kind["color"], linewidth=2.2
            )
            axis.plot(shown(row.estimate.mean), y, linestyle="", **{**kind, "markersize": 8})
            axis.annotate(
                row.word, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9
            )
        sense = "left" if metric.lower_is_better else "right"
        unit = "per cent" if metric.relative else metric.unit
        axis.axvline(0, color="black", linewidth=1)
        axis.set_yticks(
            [-i for i in range(len(arms))], [""] * len(arms) if number % columns else arms
        )
        axis.set_ylim(-len(arms) + 0.4, 0.6)
        axis.set(
            title=f"{metric.name}: better to the {sense}",
            xlabel=f"difference to {rows[0].baseline} ({unit})",
        )
        axis.grid(axis="x", alpha=0.3)
        compress(
            axis, [shown(np.append(row.differences, row.verdict.interval)) for row in its], "x"
        )
    return save(figure, target)


def plot_stream(arms: Arms, target: Path) -> Path:
    """The residual stream at every norm position after training: its size, its drift from the
    statistic that the position uses, and that drift's spread over tokens, which no scalar can
    compensate. Geometric means over seeds.
    """
    panels = {
        "rms": "RMS of the stream",
        "drift": "drift: RMS / statistic used",
        "spread": "SD of log drift",
    }
    figure, axes = plt.subplots(3, figsize=(7.5, 8.5), layout="constrained", sharex=True)
    for index, (arm, runs) in enumerate(arms.items()):
        streams = [run.stream for run in runs.values() if run.stream]
        for axis, name in zip(axes, panels if streams else ()):
            rows = np.array([stream[name] for stream in streams])  # (seeds, 2L + 1)
            if name == "rms" or rows.std():  # without shared positions there is no drift
                mean = rows.mean(0) if name == "spread" else np.exp(np.log(rows).mean(0))
                axis.plot(
                    np.arange(rows.shape[1]) / 2, mean, label=arm, linewidth=1.6, **style(index)
                )
    for axis, (name, label) in zip(axes, panels.items()):
        axis.set(ylabel=label, yscale="log" if name == "rms" else "linear")
        axis.grid(alpha=0.3)
    axes[0].set_title("Residual stream at every norm position, last evaluation")
    axes[0].legend(frameon=False, fontsize=9)
    axes[-1].set_xlabel("block (whole: before attention, half: before the MLP, last: final norm)")
    return save(figure, target)


def histories(runs: dict[int, Run]) -> list[dict[str, np.ndarray]]:
    """Of the runs that measured them, cut to what all of them have."""
    found = [run.history for run in runs.values() if run.history]
    shortest = min((len(history["tokens"]) for history in found), default=0)
    return [{name: values[:shortest] for name, values in history.items()} for history in found]


def plot_output(arms: Arms, target: Path) -> Path:
    """What holds the scale at the output, over training, and its later half at large: mean over
    seeds, band from lowest to highest.
    """
    panels = {
        "rms": "RMS of the stream\nat the output",
        "logit_norm": "length of the logits\naround their mean",
        "radial_gradient": "radial gradient at the\noutput, nats",
    }
    figure, axes = plt.subplots(3, 2, figsize=(11, 8.5), layout="constrained", sharex="col")
    for row, (name, label) in zip(axes, panels.items()):
        for index, (arm, runs) in enumerate(arms.items()):
            found = histories(runs)
            if not found:
                continue
            values = np.array([history[name] for history in found])
            values = values[..., -1] if name == "rms" else values  # (seeds, n)
            x, color = found[0]["tokens"] / 1e6, STYLES[index % len(STYLES)][0]
            half = x >= x[-1] / 2
            for axis, part in zip(row, (x >= 0, half)):
                axis.plot(x[part], values.mean(0)[part], label=arm, linewidth=1.6, **style(index))
                low, high = values.min(0)[part], values.max(0)[part]
                axis.fill_between(x[part], low, high, color=color, alpha=0.18, linewidth=0)
        row[0].set_ylabel(label)
        for axis in row:
            axis.grid(alpha=0.3)
    axes[0, 0].set_title("Mean over seeds, band from lowest to highest")
    axes[0, 1].set_title("Later half")
    for axis in axes[-1]:
        axis.set_xlabel("training tokens (millions)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return save(figure, target)


def drifting(arms: Arms) -> Arms:
    """The arms whose norms use a statistic that is not the stream's own, at some time."""
    return {
        arm: runs
        for arm, runs in arms.items()
        if any((run.history["drift"] != 1).any() for run in runs.values() if run.history)
    }


def plot_drift(arms: Arms, target: Path) -> Path:
    """How far the stream has moved from the statistic that each norm position uses, over training:
    one panel an arm, one line a position, geometric means over seeds.
    """
    figure, axes = plt.subplots(
        len(arms),
        figsize=(7.5, 1.2 + 1.8 * len(arms)),
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    for axis, (arm, runs) in zip(axes.flat, arms.items()):
        found = histories(runs)
        drift = np.exp(np.mean([np.log(history["drift"]) for history in found], 0))  # (n, 2L + 1)
        shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, drift.shape[1]))
        for position, (line, shade) in enumerate(zip(drift.T, shades)):
            axis.plot(
                found[0]["tokens"] / 1e6,
                line,
                color=shade,
                linewidth=1.4,
                label=f"{position / 2:g}",
            )
        axis.set(title=arm, ylabel="drift")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(
        frameon=False,
        fontsize=8,
        ncols=2,
        title="block",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    axes[-1, 0].set_xlabel("training tokens (millions)")
    figure.suptitle("RMS of the stream over the statistic used, at every norm position", size=10)
    return save(figure, target)


def plot_sizes(rows: list[dict], plan: str, target: Path, title: str) -> Path:
    """Mean RMS of the residual stream before attention and MLP of every block, log scale, with the
    band of 5 to 95 % of tokens; grey where `plan` shares a statistic. Figure 3 of Loretz &
    Hochreiter 2026. rows: `summary` of posthoc/rms_stats.py.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    letters = plan.replace(" ", "")
    for index, name in enumerate(("before attention", "before MLP")):
        mine = rows[index : len(rows) - 1 : 2]
        blocks = np.arange(len(mine)) + 0.5 * index
        axis.plot(
            blocks,
            [row["mean"] for row in mine],
            label=f"mean {name}",
            linewidth=1.2,
            **style(index),
        )
        low, high = ([row["quantiles"][q] for row in mine] for q in (0, 2))
        axis.fill_between(blocks, low, high, color=STYLES[index][0], alpha=0.18, linewidth=0)
        axis.plot(
            blocks,
            [row["first"] for row in mine],
            label=f"first token, {name}",
            linewidth=0.8,
            linestyle=":",
            color=STYLES[index][0],
        )
    for position in (p for p, letter in enumerate(letters) if letter == "s"):
        axis.axvspan(position / 2 - 0.25, position / 2 + 0.25, color="0.85", zorder=0, linewidth=0)
    axis.set(
        yscale="log",
        xlabel="block",
        ylabel="RMS of the residual stream",
        title=f"{title} (grey: shares)",
    )
    axis.legend(frameon=False, fontsize=8)
    return save(figure, target)
