"""Draw runs: loss curves with bands over seeds, paired differences with their intervals, sizes of
the residual stream.
"""

from pathlib import Path

import numpy as np

from common.errors import UserError
from common.plotting import plt, save, style
from evidence.comparison import Arms, Comparison
from evidence.names import short_name
from evidence.runs import Metric, Run

LINE = 1.6  # width of a mean's line, points
BAND = {"alpha": 0.18, "linewidth": 0}  # of the area around a mean


def draw_band(
    axis: plt.Axes, x: np.ndarray, lines: tuple[np.ndarray, ...], index: int, label: str = ""
) -> None:
    """Draw a mean (n,) over x (n,) with a band, in the style of the arm with this number.

    Args:
        lines: mean, lower and upper end of the band, (n,) each.
    """
    mean, low, high = lines
    axis.plot(x, mean, label=label, linewidth=LINE, **style(index))
    axis.fill_between(x, low, high, color=style(index)["color"], **BAND)


def over_seeds(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return mean, lowest and highest (n,) of the values (seeds, n)."""
    return values.mean(0), values.min(0), values.max(0)


def curves(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (n,) and val losses (runs, n) of the evaluations that all these runs share."""
    shared = sorted(set.intersection(*(set(run.curve[:, 0]) for run in runs)))
    losses = [[dict(run.curve)[tokens] for tokens in shared] for run in runs]
    return np.array(shared), np.array(losses)


def loss_unit(arms: Arms) -> str:
    """Return the unit of the losses; with 257 tokens, these are bytes and an end of text."""
    sizes = {run.config["n_vocab"] for runs in arms.values() for run in runs.values()}
    return "nats per token, a token is a byte" if sizes == {257} else "nats per token"


def loss_limits(curves_of_arms: list[np.ndarray]) -> tuple[float, float]:
    """Return limits of the loss axis that leave out the steep beginning but show every end.

    Args:
        curves_of_arms: val losses of each arm, (seeds, n) each.
    """
    lowest = min(np.nanmin(losses) for losses in curves_of_arms)
    # The first evaluation is before the fall of the loss, so the 90 % of the others are shown.
    later = np.concatenate([losses[:, 1:].ravel() for losses in curves_of_arms])
    high = np.quantile(later, 0.9) if later.size else lowest + 1.0
    ends = [losses[:, -1].mean() + losses[:, -1].std() for losses in curves_of_arms]
    high = np.nanmax([high, *ends])
    room = 0.1 * (high - lowest) + 0.02
    return lowest - room, high + room


def plot_loss(arms: Arms, target: Path, baseline: str = "") -> Path:
    """Draw the val loss of every arm: mean over seeds with a band of one SD.

    Where an arm has one seed, its training loss is drawn too, faint. With a baseline, a panel below
    shows each arm's paired difference to it, which the bands above would hide.

    Args:
        baseline: the arm of the differences; "" for no such panel.

    Raises:
        UserError: no run has an evaluation yet.
    """
    has_panel_below = bool(baseline) and any(
        len(arms[baseline].keys() & runs) > 1 for arm, runs in arms.items() if arm != baseline
    )
    heights = [3, 2] if has_panel_below else [3]
    figure, axes = plt.subplots(
        len(heights),
        figsize=(7.5, 1.5 * sum(heights)),
        layout="constrained",
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    top = axes[0, 0]
    drawn: list[np.ndarray] = []  # (seeds, n) of each arm
    for index, (arm, runs) in enumerate(arms.items()):
        tokens, losses = curves(list(runs.values()))
        if not losses.size:
            continue
        x = tokens / 1e6
        mean = losses.mean(0)
        sd = losses.std(0, ddof=int(len(losses) > 1))  # zeros for one seed
        label = f"{arm}: {mean[-1]:.3f}"
        if len(losses) > 1:
            label += f" (SD {sd[-1]:.3f}, {len(losses)} seeds)"
        if diverged := sum(run.diverged for run in runs.values()):
            label += f", {diverged} diverged"
        draw_band(top, x, (mean, mean - sd, mean + sd), index, label)
        if len(runs) == 1:
            [run] = runs.values()
            steps = np.array([step["step"] for step in run.steps])
            millions = steps * run.start["tokens_per_step"] / 1e6
            train = [step["loss"] for step in run.steps]
            top.plot(millions, train, color=style(index)["color"], alpha=0.25, linewidth=1)
        drawn.append(losses)
    if not drawn:
        raise UserError("no evaluation yet: nothing to draw")
    top.set_ylim(*loss_limits(drawn))
    title = "Validation loss (training loss faint)"
    if any(len(runs) > 1 for runs in arms.values()):
        title = "Validation loss: mean over seeds, band of one SD"
    top.set(ylabel=f"val loss ({loss_unit(arms)})", title=title)
    top.legend(frameon=False, fontsize=9, title="arm: last value")
    if has_panel_below:
        plot_loss_differences(axes[1, 0], arms, baseline)
    axes[-1, 0].set_xlabel("training tokens (millions)")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return save(figure, target)


def compress(axis: plt.Axes, samples: list[np.ndarray], which: str) -> None:
    """Set limits of the axis `which` ("x" or "y") that hold all samples.

    Where one arm is far away, the scale is logarithmic beyond the usual spread, so that the others
    can still be told apart.
    """
    spans = [np.abs(sample).max() for sample in samples if sample.size]
    usual = np.median(spans)
    if max(spans) > 5 * usual > 0:
        getattr(axis, f"set_{which}scale")("symlog", linthresh=1.5 * usual, linscale=2)
        getattr(axis, f"{which}axis").set_major_formatter("{x:g}")
    ends = np.concatenate([sample.ravel() for sample in samples])
    room = 0.15 * usual or 1.0
    limits = 1.2 * min(ends.min(), 0) - room, 1.2 * max(ends.max(), 0) + room
    getattr(axis, f"set_{which}lim")(*limits)


def plot_loss_differences(axis: plt.Axes, arms: Arms, baseline: str) -> None:
    """Draw each arm's val loss less the baseline's at the same seed and step.

    The line is the mean, the band the range of the seeds.
    """
    later = []  # differences after the first quarter, where the curves have settled
    for index, (arm, runs) in enumerate(arms.items()):
        seeds = sorted(runs.keys() & arms[baseline].keys())
        if arm == baseline or not seeds:
            continue
        ours = [runs[seed] for seed in seeds]
        theirs = [arms[baseline][seed] for seed in seeds]
        tokens, losses = curves(ours + theirs)  # (n,), (2 seeds, n)
        difference = losses[: len(seeds)] - losses[len(seeds) :]  # (seeds, n)
        draw_band(axis, tokens / 1e6, over_seeds(difference), index)
        later.append(difference[:, len(tokens) // 4 :])
    axis.axhline(0, color="black", linewidth=1)
    compress(axis, later, "y")
    axis.set(
        ylabel=f"val loss less that of {baseline}",
        title="Paired by seed: mean, band from lowest to highest seed",
    )


def in_units(metric: Metric, differences: np.ndarray | float) -> np.ndarray:
    """Return differences as they are shown: per cent for a relative metric."""
    if metric.relative:
        return 100 * np.expm1(differences)
    return np.asarray(differences)


def plot_metric(axis: plt.Axes, rows: list[Comparison], arms: list[str]) -> None:
    """Draw the comparisons in one metric, one line an arm.

    Args:
        rows: comparisons in this metric.
        arms: all arms of the figure, from top to bottom.
    """
    metric = rows[0].metric
    delta = rows[0].delta
    if delta:
        low, high = in_units(metric, np.array([-delta, delta]))
        axis.axvspan(low, high, color="gray", alpha=0.15, linewidth=0)
    for row in rows:
        place = arms.index(row.name)
        y = -place
        kind = style(place + 1)  # the baseline has the first style in the curves
        color = kind["color"]
        seeds = in_units(metric, row.differences)
        axis.plot(seeds, np.full(len(seeds), y - 0.22), ".", color=color, alpha=0.5)
        interval = in_units(metric, np.array(row.verdict.interval))
        axis.plot(interval, [y, y], color=color, linewidth=2.2)
        mean = in_units(metric, row.estimate.mean)
        axis.plot(mean, y, linestyle="", **{**kind, "markersize": 8})
        axis.annotate(
            row.word.replace(", ", ",\n"),
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
        )
    axis.axvline(0, color="black", linewidth=1)
    sense = "left" if metric.lower_is_better else "right"
    unit = "per cent" if metric.relative else metric.unit
    axis.set(
        title=f"{metric.name}: better to the {sense}",
        xlabel=f"difference to {short_name(rows[0].baseline)} ({unit})",
    )
    axis.grid(axis="x", alpha=0.3)
    samples = [in_units(metric, np.append(row.differences, row.verdict.interval)) for row in rows]
    compress(axis, samples, "x")


def plot_differences(rows: list[Comparison], target: Path) -> Path:
    """Draw the verdicts, one panel a metric.

    A panel shows every seed's difference, the mean with its Holm-adjusted interval, and the margin
    shaded.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    arms = list(dict.fromkeys(row.name for row in rows))
    columns = min(2, len(metrics))
    lines = -(-len(metrics) // columns)  # rounded up
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
        plot_metric(axis, [row for row in rows if row.metric is metric], arms)
        # The arms are named in the first column alone.
        labels = arms if number % columns == 0 else [""] * len(arms)
        axis.set_yticks([-place for place in range(len(arms))], labels)
        axis.set_ylim(-len(arms) + 0.4, 0.6)
    return save(figure, target)


def plot_sizes(rows: list[dict], plan: str, target: Path, title: str) -> Path:
    """Draw the mean RMS of the residual stream before attention and MLP of every block.

    Log scale, with the band of 5 to 95 % of tokens and the first token's RMS apart; grey where
    `plan` shares a statistic. After figure 3 of Loretz & Hochreiter 2026.

    Args:
        rows: `summary` of posthoc/rms_stats.py, one a norm position, the final norm last.
        plan: norm plan of the inputs, as it is printed.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for index, name in enumerate(("before attention", "before MLP")):
        mine = rows[index : len(rows) - 1 : 2]  # without the final norm
        blocks = np.arange(len(mine)) + 0.5 * index
        lines = ([row["mean"] for row in mine], *zip(*(row["quantiles"][::2] for row in mine)))
        draw_band(axis, blocks, lines, index, f"mean {name}")
        first = [row["first"] for row in mine]
        look = {"linewidth": 0.8, "linestyle": ":", "color": style(index)["color"]}
        axis.plot(blocks, first, label=f"first token, {name}", **look)
    for position, letter in enumerate(plan.replace(" ", "")):
        if letter == "s":
            start = position / 2 - 0.25
            axis.axvspan(start, start + 0.5, color="0.85", zorder=0, linewidth=0)
    axis.set(
        yscale="log",
        xlabel="block",
        ylabel="RMS of the residual stream",
        title=f"{title} (grey: shares)",
    )
    axis.legend(frameon=False, fontsize=8)
    return save(figure, target)
