"""The figure of the study "which norm?": a forest of verdicts, and a panel of curves for each arm.

repro/which_norm_card.py gives the numbers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.plotting import plt, save, style
from evidence.curves import Curve

Interval = tuple[float, float, float]  # mean, low, high

# In inches
FOREST = 5.0  # width of the forest
PANEL = 2.0  # width and height of the panel of one arm
BELOW = 0.9  # height of titles and legend
COLUMNS = 4  # of panels

HIGHEST = 0.3  # nats above the baseline's best that a panel shows
LIGHT = 0.45  # opacity of the baseline's curves
FAINT = 0.18  # of the bands for the margin
BAND = 0.2  # height of such a band, in rows


@dataclass(frozen=True)
class Look:
    """How the figure draws a shape.

    Attributes:
        color: of curves, intervals and markers.
        fill: of markers.
        linestyle: of curves.
        offset: from the middle of an arm's row in the forest, in rows.
        top: height of the cross for a diverged run, as a share of the panel.
    """

    color: str
    fill: str
    linestyle: str
    offset: float
    top: float

    @property
    def marker(self) -> dict[str, Any]:
        """Markers without a line."""
        return {"color": self.color, "marker": "o", "markerfacecolor": self.fill, "linestyle": ""}

    @property
    def curve(self) -> dict[str, Any]:
        """Small markers on a line."""
        return self.marker | {"linestyle": self.linestyle, "linewidth": 1.2, "markersize": 3.5}

    @property
    def base(self) -> dict[str, Any]:
        """The curve of the baseline."""
        return {"color": "black", "linestyle": self.linestyle, "linewidth": 1.0, "alpha": LIGHT}

    @property
    def chosen(self) -> dict[str, Any]:
        """The chosen rate, at the lower edge of a panel."""
        return self.marker | {"marker": "^", "markersize": 7, "clip_on": False}

    @property
    def diverged(self) -> dict[str, Any]:
        """A run that diverged, at the upper edge of a panel."""
        return {"color": self.color, "marker": "x", "markersize": 6, "linestyle": ""}


BLUE, RED = style(0)["color"], style(1)["color"]
LOOKS = (  # of the shapes, in the plan's order
    Look(color=BLUE, fill=BLUE, linestyle="-", offset=-0.12, top=0.95),
    Look(color=RED, fill="white", linestyle="--", offset=0.12, top=0.87),
)


@dataclass(frozen=True)
class Figure:
    """What is drawn. Each dictionary has the arms in the order of the drawing.

    Attributes:
        baseline: name of the arm that the others are compared with.
        shapes: two names.
        curves: arm -> shape -> losses over the learning rate; the baseline's too.
        chosen: arm -> shape -> learning rate.
        worth: judged arm -> shape -> mean and 95 % interval, in % of tokens; empty before verdicts.
        margin: shape -> the margin, in % of tokens, below zero; empty before it is measured.
    """

    baseline: str
    shapes: list[str]
    curves: dict[str, dict[str, Curve]]
    chosen: dict[str, dict[str, float]]
    worth: dict[str, dict[str, Interval]]
    margin: dict[str, float]

    def draw(self, target: Path) -> None:
        """Draw the forest of verdicts, where there are some, beside the learning-rate curves.

        Raises UserError if `target` cannot be written.
        """
        columns = min(COLUMNS, len(self.others))
        rows = math.ceil(len(self.others) / columns)
        widths = [FOREST] * bool(self.worth) + [PANEL * columns]
        figure = plt.figure(figsize=(sum(widths), PANEL * rows + BELOW), layout="constrained")
        parts = list(figure.subfigures(1, len(widths), width_ratios=widths, squeeze=False)[0])
        if self.worth:
            self._draw_forest(parts.pop(0).subplots())
        grid = parts[0].subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        self._draw_curves(list(grid.flat))
        title = (
            "Screening: loss over the learning rate, nats above the best of "
            f"{self.baseline} in that shape"
        )
        parts[0].suptitle(title, fontsize=10)
        for axis in grid[-1]:
            axis.set_xlabel("learning rate / 0.001", fontsize=8)
        parts[0].legend(
            handles=self._keys(),
            loc="outside lower center",
            ncol=len(LOOKS) * (2 if self.has_diverged else 3),
            fontsize=8,
        )
        save(figure, target)

    @property
    def others(self) -> list[str]:
        """The arms but the baseline."""
        return [arm for arm in self.curves if arm != self.baseline]

    @property
    def has_diverged(self) -> bool:
        """Did any run of the curves diverge?"""
        return any(
            not math.isfinite(curve.at(rate))
            for curves in self.curves.values()
            for curve in curves.values()
            for rate in curve.rates
        )

    def _draw_forest(self, axis: plt.Axes) -> None:
        """Draw differences in tokens with their intervals, each over its margin as a band."""
        axis.axvline(0, color="0.4", linewidth=1.0)
        for place, worth in enumerate(self.worth.values()):
            for look, shape in zip(LOOKS, self.shapes, strict=True):
                value, low, high = worth[shape]
                height = place + look.offset
                words = (f"within the margin, {shape}", f"shape {shape}")
                band, point = words if place == 0 else (None, None)
                # What the margin is worth in tokens differs between the shapes.
                bar = {"height": BAND, "color": look.color, "alpha": FAINT, "linewidth": 0}
                axis.barh(height, self.margin[shape], label=band, **bar)
                axis.plot([low, high], [height] * 2, color=look.color, linewidth=1.4)
                axis.plot(value, height, label=point, **look.marker)
        axis.set_yticks(range(len(self.worth)), self.worth)
        axis.set_ylim(len(self.worth) - 0.5, -0.5)
        axis.set_xlabel(f"more tokens that {self.baseline} needs for the arm's loss, %")
        axis.set_title("Judged arms: mean and 95 % interval", fontsize=10, pad=18)
        words = {"transform": axis.get_xaxis_transform(), "fontsize": 9, "va": "bottom"}
        axis.text(0, 1.01, "$\\leftarrow$ worse ", ha="right", **words)
        axis.text(0, 1.01, " better $\\rightarrow$", ha="left", **words)
        axis.legend(fontsize=8)

    def _draw_curves(self, axes: list[plt.Axes]) -> None:
        """Draw one panel for each arm, with the baseline in grey."""
        for axis, arm in zip(axes, self.others, strict=False):
            for look, shape in zip(LOOKS, self.shapes, strict=True):
                self._draw_arm(axis, arm, shape, look)
            axis.set_title(arm, fontsize=9)
        for axis in axes[len(self.others) :]:
            axis.set_axis_off()
        lowest = min(
            self._above(shape, curve.at(curve.best))
            for curves in self.curves.values()
            for shape, curve in curves.items()
        )
        axes[0].set_ylim(lowest - 0.03, HIGHEST)
        axes[0].set_xscale("log", base=2)
        rates = {
            rate
            for curves in self.curves.values()
            for curve in curves.values()
            for rate in curve.rates
        }
        axes[0].set_xticks(sorted(rates), [f"{1000 * rate:g}" for rate in sorted(rates)])
        for axis in axes:
            axis.tick_params(labelsize=8)

    def _draw_arm(self, axis: plt.Axes, arm: str, shape: str, look: Look) -> None:
        """Draw the curves of an arm and of the baseline in one shape."""
        for curve, appearance in (
            (self.curves[self.baseline][shape], look.base),
            (self.curves[arm][shape], look.curve),
        ):
            rates = [rate for rate in curve.rates if math.isfinite(curve.at(rate))]
            heights = [self._above(shape, curve.at(rate)) for rate in rates]
            axis.plot(rates, heights, **appearance)
        edge = axis.get_xaxis_transform()
        curve = self.curves[arm][shape]
        diverged = [rate for rate in curve.rates if not math.isfinite(curve.at(rate))]
        axis.plot(diverged, [look.top] * len(diverged), transform=edge, **look.diverged)
        axis.plot(self.chosen[arm][shape], 0, transform=edge, **look.chosen)
        if self._above(shape, curve.at(curve.best)) > HIGHEST:
            words = {"color": look.color, "fontsize": 8, "ha": "center", "va": "top"}
            above = f"{shape}: all above {HIGHEST:g}"
            axis.text(0.5, look.top, above, transform=axis.transAxes, **words)

    def _above(self, shape: str, loss: float) -> float:
        """Return how far a loss lies above the best one of the baseline, in nats."""
        base = self.curves[self.baseline][shape]
        return loss - base.at(base.best)

    def _keys(self) -> list[plt.Line2D]:
        """Return what the legend of the curves shows: a column for each line."""
        found = []
        for look, shape in zip(LOOKS, self.shapes, strict=True):
            found.append(plt.Line2D([], [], label=f"the arm, {shape}", **look.curve))
            found.append(plt.Line2D([], [], label=f"{self.baseline}, {shape}", **look.base))
        for look, shape in zip(LOOKS, self.shapes, strict=True):
            found.append(plt.Line2D([], [], label=f"chosen rate (fit), {shape}", **look.chosen))
            if self.has_diverged:
                found.append(plt.Line2D([], [], label=f"diverged, {shape}", **look.diverged))
        return found
