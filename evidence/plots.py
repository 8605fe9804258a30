"""Draw runs: loss curves with bands over seeds, and sizes of the residual stream."""

from pathlib import Path

import numpy as np

from common.errors import UserError
from common.plotting import plt, save, style
from evidence.comparison import Arms
from evidence.runs import Run

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


def curves(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (n,) and val losses (runs, n) of the evaluations that all these runs share."""
    shared = sorted(set.intersection(*(set(run.curve[:, 0]) for run in runs)))
    losses = [[dict(run.curve)[tokens] for tokens in shared] for run in runs]
    return np.array(shared), np.array(losses)


def loss_unit(arms: Arms) -> str:
    """Return the unit of the losses; with 257 tokens, these are bytes and an end of text."""
    sizes = {run.config["n_vocab"] for runs in arms.values() for run in runs.values()}
    return "nats per token, a token is a byte" if sizes == {257} else "nats per token"


def plot_loss(arms: Arms, target: Path) -> Path:
    """Draw the val loss of every arm: mean over seeds with a band of one SD.

    Where an arm has one seed, its training loss is drawn too, faint. Raises UserError if no run has
    an evaluation yet.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
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
        draw_band(axis, x, (mean, mean - sd, mean + sd), index, label)
        if len(runs) == 1:
            [run] = runs.values()
            steps = np.array([step["step"] for step in run.steps])
            millions = steps * run.start["tokens_per_step"] / 1e6
            train = [step["loss"] for step in run.steps]
            axis.plot(millions, train, color=style(index)["color"], alpha=0.25, linewidth=1)
        drawn.append(losses)
    if not drawn:
        raise UserError("no evaluation yet: nothing to draw")
    # Without the first evaluation, from which the loss falls steeply.
    later = np.concatenate([losses[:, 1:].ravel() for losses in drawn])
    if later.size:
        axis.set_ylim(later.min() - 0.05, later.max() + 0.05)
    title = "Validation loss (training loss faint)"
    if any(len(runs) > 1 for runs in arms.values()):
        title = "Validation loss: mean over seeds, band of one SD"
    x_label = "training tokens (millions)"
    axis.set(xlabel=x_label, ylabel=f"val loss ({loss_unit(arms)})", title=title)
    axis.legend(frameon=False, fontsize=9, title="arm: last value")
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
