"""Draw loss curves of runs, and sizes of the residual stream."""

from pathlib import Path
from textwrap import fill

import numpy as np

from common.errors import UserError, printable
from common.plotting import plt, save, style
from evidence.runs import Run

LINE = 1.6  # width of a mean's line, points


def plot_loss(runs: list[Run], target: Path) -> Path:
    """Draw the val loss of every run, and its training loss, faint.

    Raises UserError if no run has an evaluation yet.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    # Without the first of many evaluations, from which the loss falls steeply.
    later = np.concatenate([run.curve[len(run.curve) > 4 :, 1] for run in runs])
    if not later.size:
        raise UserError("no evaluation yet: nothing to draw")
    runs = [run for run in runs if len(run.curve)]
    for index, run in enumerate(runs):
        tokens, losses = run.curve.T  # (n,) each
        end = "diverged" if run.diverged else f"{losses[-1]:.3f}"
        look = style(index)
        # Between two of them would be a formula.
        name = printable(run.name).replace("$", r"\$")
        label = fill(f"{name}: {end}", 100)
        axis.plot(tokens / 1e6, losses, label=label, linewidth=LINE, **look)
        millions = [step["step"] * run.start["tokens_per_step"] / 1e6 for step in run.steps]
        train = [step["loss"] for step in run.steps]
        axis.plot(millions, train, color=look["color"], alpha=0.25, linewidth=1)
    axis.set_ylim(later.min() - 0.05, later.max() + 0.05)
    axis.set_title("Validation loss (training loss faint)")
    axis.set(xlabel="training tokens (millions)", ylabel="val loss (nats per token)")
    if len(runs) <= 16:  # more names leave no room for the curves
        look = {"frameon": False, "fontsize": 8, "title": "run: last value"}
        figure.legend(loc="outside lower left", **look)  # below: a name may be long
    axis.grid(alpha=0.3)
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
        low, high = zip(*(row["quantiles"][::2] for row in mine))
        look = style(index)
        mean = [row["mean"] for row in mine]
        axis.plot(blocks, mean, label=f"mean {name}", linewidth=LINE, **look)
        axis.fill_between(blocks, low, high, color=look["color"], alpha=0.18, linewidth=0)
        first = [row["first"] for row in mine]
        look = {"linewidth": 0.8, "linestyle": ":", "color": look["color"]}
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
