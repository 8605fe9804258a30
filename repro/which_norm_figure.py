"""The figure of the study "which norm?"; repro/which_norm.py gives the numbers."""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from common.plotting import COLORS, save, style


def draw_card(
    rows: dict[str, dict[str, Any]],
    worth: dict[str, float],
    target: Path,
) -> None:
    """Draw a forest of differences, arms by models, beside what other choices are worth.

    Args:
        rows: an arm's words -> a model's words -> its Difference, None where it was not run.
        worth: a choice instead of another -> nats by which it lowers the loss.
        target: file.
    """
    figure, (forest, bars) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.5 * len(rows)), width_ratios=[3, 2], layout="constrained"
    )
    forest.set_title("Norms compared with RMSNorm", fontsize=10)
    forest.axvline(0, color="0.4", linewidth=1)
    for place, found in enumerate(rows.values()):
        for index, (model, row) in enumerate(found.items()):
            height = place + 0.24 * (index - (len(found) - 1) / 2)
            if row is None or not row.is_whole:
                words = f"{model}: {'not run' if row is None else row.text()}"
                forest.text(0.002, height, words, color=COLORS[index], fontsize=7, va="center")
                continue
            label = model if place == 0 else None
            look = style(index) | {"markersize": 5, "linestyle": ""}
            forest.plot(row.estimate.interval(), [height] * 2, color=COLORS[index], linewidth=1.4)
            forest.plot(row.estimate.mean, height, label=label, **look)
    labels = [textwrap.fill(words, 26, break_on_hyphens=False) for words in rows]
    forest.set_yticks(range(len(rows)), labels)
    forest.set_ylim(len(rows) - 0.5, -0.5)
    forest.set_xlabel("validation loss minus that of RMSNorm, nats: left is better; 95 % intervals")
    forest.legend(fontsize=9, loc="lower left")
    bars.barh(range(len(worth)), worth.values(), color="0.5")
    bars.set_yticks(range(len(worth)), [textwrap.fill(choice, 22) for choice in worth])
    bars.invert_yaxis()
    bars.set_title("What a better choice gains (wide model)", fontsize=10)
    bars.set_xlabel("validation loss is lower by, nats")
    save(figure, target)
