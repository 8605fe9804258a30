"""A report as one page: verdicts, every seed's points, curves and the residual stream.

The page is one HTML file, with plotly's script inside, so that it needs no network. Arms and seeds
can be switched on and off: a line of a picture has the names that it belongs to in `meta`.
"""

import html
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from common.plotting import COLORS as ON_WHITE
from evidence.comparison import Arms, Comparison
from evidence.names import short_name
from evidence.runs import Metric, Run

TEMPLATE = Path(__file__).with_suffix(".html")
COLORS = [*ON_WHITE[:-1], "#888888"]  # black would not show on a dark page
DASHES = ("solid", "dash", "dot")
GRID = "rgba(128, 128, 128, 0.25)"
CLEAR = "rgba(0, 0, 0, 0)"
OF_DRIFT = ("drift", "spread")
TOKENS = "training tokens (millions)"

# run, figure -> x (n,) and y (n,)
Values = Callable[[Run, str], tuple[np.ndarray, np.ndarray]]


class Html(str):
    """Text that is HTML. All other text is escaped where it gets into the page."""


def escaped(text: str) -> Html:
    """Return text as HTML; what is HTML stays."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def joined(parts: Iterable[str]) -> Html:
    """Put texts and elements one after the other."""
    return Html("".join(map(escaped, parts)))


def element(tag: str, *content: str, **attributes: str) -> Html:
    """Return an element with texts and elements in it.

    Args:
        attributes: `class_` stands for class, `data_arm` for data-arm.
    """
    words = [tag]
    for name, value in attributes.items():
        words.append(f'{name.rstrip("_").replace("_", "-")}="{html.escape(value)}"')
    end = "" if tag == "input" else f"</{tag}>"  # an input has no content, and no end
    return Html(f"<{' '.join(words)}>{joined(content)}{end}")


def seed_name(run: Run) -> str:
    """Return what the switch of a run's seed is called."""
    return f"seed {run.seed}"


def color(arms: Arms, arm: str) -> str:
    """Return an arm's colour, the same in all pictures."""
    return COLORS[list(arms).index(arm) % len(COLORS)]


def styled(figure: go.Figure, height: int) -> Html:
    """Return a figure as HTML, without plotly's script."""
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 10, "t": 30, "b": 45},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        hovermode="closest",
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID)
    # plotly escapes what would end its script.
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True})
    return Html(drawn)


def in_units(metric: Metric, differences: np.ndarray | float) -> np.ndarray:
    """Return differences as they are shown: per cent for a relative metric."""
    if metric.relative:
        return 100 * np.expm1(differences)
    return np.asarray(differences)


def forest(rows: list[Comparison], arms: Arms) -> Html:
    """Draw one metric: every seed's difference, the mean with its Holm interval, the margin."""
    figure = go.Figure()
    metric = rows[0].metric
    for row in rows:
        values = in_units(metric, row.differences)
        mean = float(in_units(metric, row.estimate.mean))
        low, high = in_units(metric, np.array(row.verdict.interval))
        look = {"color": color(arms, row.arm)}
        figure.add_scatter(
            x=values,
            y=[row.name] * len(values),
            customdata=row.seeds,
            mode="markers",
            marker=look | {"size": 7, "opacity": 0.4},
            hovertemplate="seed %{customdata}: %{x:+.4f}<extra></extra>",
            showlegend=False,
            meta=[row.arm],
        )
        figure.add_scatter(
            x=[mean],
            y=[row.name],
            mode="markers",
            marker=look | {"size": 11, "symbol": "line-ns-open", "line": {"width": 3}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - mean],
                "arrayminus": [mean - low],
                "thickness": 3,
                "width": 0,
            },
            hovertemplate=f"{row.name}: {row.word}, %{{x:+.4f}}<extra></extra>",
            showlegend=False,
            meta=[row.arm],
        )
    if rows[0].delta:
        low, high = in_units(metric, np.array([-1.0, 1.0]) * rows[0].delta)
        figure.add_vrect(low, high, fillcolor="gray", opacity=0.15, line_width=0)
    figure.add_vline(0, line_width=1, line_color="gray")
    unit = "per cent" if metric.relative else metric.unit
    better = "left" if metric.lower_is_better else "right"
    title = f"difference to {short_name(rows[0].baseline)}, {unit}; better to the {better}"
    figure.update_xaxes(title=title)
    figure.update_yaxes(autorange="reversed")
    return styled(figure, 120 + 45 * len(rows))


def lines(
    arms: Arms, panels: dict[str, str], values_of: Values, x_title: str, log: str = ""
) -> Html:
    """Draw a line for each run, in panels one below the other; "" without runs.

    Args:
        arms: the runs.
        panels: y label -> figure.
        values_of: what is drawn of a run's figure.
        x_title: of the common x axis.
        log: y label of a panel with a logarithmic axis.
    """
    if not any(arms.values()):
        return Html()
    figure = make_subplots(len(panels), 1, shared_xaxes=True, vertical_spacing=0.05)
    traces, places = [], []
    for place, (label, figure_name) in enumerate(panels.items(), 1):
        for number, (arm, runs) in enumerate(arms.items()):
            dash = DASHES[number // len(COLORS) % len(DASHES)]
            for run in runs.values():
                x, y = values_of(run, figure_name)
                name = f"{short_name(arm)}, {seed_name(run)}"
                trace = {
                    "type": "scatter",
                    "x": x,
                    "y": y,
                    "mode": "lines",
                    "line": {"color": color(arms, arm), "width": 1.3, "dash": dash},
                    "hovertemplate": f"{name}: %{{y:.4f}}<extra></extra>",
                    "showlegend": False,
                    "meta": [arm, seed_name(run)],
                }
                traces.append(trace)
                places.append(place)
        kind = "log" if label == log else "linear"
        figure.update_yaxes(title=label, type=kind, row=place, col=1)
    # All at once: plotly takes milliseconds for each call.
    figure.add_traces(traces, rows=places, cols=[1] * len(traces))
    figure.update_xaxes(title=x_title, row=len(panels), col=1)
    return styled(figure, 120 + 240 * len(panels))


def over_evaluations(run: Run, figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and val loss, from the second evaluation on."""
    return run.curve[1:, 0] / 1e6, run.curve[1:, 1]


def over_tokens(run: Run, figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and a figure of the output; of the stream, at its last norm position."""
    tokens, found = run.stream(figure)
    return tokens / 1e6, np.atleast_2d(found.T)[-1]


def over_blocks(run: Run, figure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return norm positions, in blocks, and a figure of the stream at the last evaluation."""
    if figure in OF_DRIFT and not has_drift(run):
        return np.zeros(0), np.zeros(0)
    _, found = run.stream(figure)
    last = found[-1] if len(found) else found  # older logs lack some
    return np.arange(len(last)) / 2, last


def losses(arms: Arms) -> Html:
    """Draw the val loss of every run over its tokens."""
    return lines(arms, {"val loss": "val_loss"}, over_evaluations, TOKENS)


def stream(arms: Arms) -> Html:
    """Draw the residual stream at every norm position, at the last evaluation; "" without it."""
    panels = {
        "RMS of the stream": "rms",
        "RMS / shared or fixed statistic": "drift",
        "SD of its logarithm": "spread",
        "share of the mean over channels": "mean_share",
    }
    if not any(has_drift(run) for runs in arms.values() for run in runs.values()):
        panels = {label: figure for label, figure in panels.items() if figure not in OF_DRIFT}
    x_title = "block (whole: before attention, half: before the MLP, last: final norm)"
    return lines(having(arms, "rms"), panels, over_blocks, x_title, log="RMS of the stream")


def output(arms: Arms) -> Html:
    """Draw what holds the scale at the output, over training; "" without it."""
    panels = {
        "RMS at the output": "rms",
        "length of the logits": "logit_norm",
        "radial gradient, nats": "radial_gradient",
    }
    return lines(having(arms, "logit_norm"), panels, over_tokens, TOKENS)


def has_drift(run: Run) -> bool:
    """Does the run share a statistic, or fix it? A norm with its own, RMS or not, logs just 1."""
    _, drift = run.stream("drift")
    return bool((drift != 1).any())


def having(arms: Arms, figure: str) -> Arms:
    """Return the runs whose logs have this figure of the stream."""
    found: Arms = {}
    for arm, runs in arms.items():
        found[arm] = {seed: run for seed, run in runs.items() if len(run.stream(figure)[0])}
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[Any]], arms: Iterable[str]) -> Html:
    """Return an HTML table, of which each row goes with its arm's switch."""
    lines = [element("tr", *(element("th", cell) for cell in header))]
    for arm, row in zip(arms, rows, strict=True):
        cells = (element("td", str(cell).strip("*`")) for cell in row)
        lines.append(element("tr", *cells, data_arm=arm))
    return element("div", element("table", *lines), class_="wide")


def switches(arms: Arms) -> Html:
    """Return a box for each arm, in its colour, and for each seed."""
    seeds = {seed: run for runs in arms.values() for seed, run in runs.items()}
    boxes = [
        element("label", box(arm), f" {short_name(arm)}", style=f"color: {color(arms, arm)}")
        for arm in arms
    ]
    names = [seed_name(seeds[seed]) for seed in sorted(seeds)]
    boxes += [element("label", box(name), f" {name}") for name in names]
    return Html("\n".join(boxes))


def box(value: str) -> Html:
    """Return a box that is checked."""
    return element("input", type="checkbox", checked="", value=value)


def write_page(title: str, about: str, arms: Arms, sections: dict[str, Html]) -> bytes:
    """Return the page: sections are headings and content, those without content are left out."""
    parts = [Html(f"<script>{get_plotlyjs()}</script>")]
    for name, content in sections.items():
        if content:
            parts += [element("h2", name), content]
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    filled = template.substitute(
        title=escaped(title), about=escaped(about), switches=switches(arms), body=joined(parts)
    )
    return filled.encode()
