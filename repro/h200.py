"""Compare what was measured on an H200 with what was aimed at.

    python repro/h200.py results/h200
        write README.md and targets.png into a folder that h200.sh filled (its last step)
    python repro/h200.py --keep RUN results/h200/distill/distill.jsonl NAME
        append the end of a run's log to a file

Aims were set before anything was measured there, most of them from the papers' own figures. An aim
is met if the whole 95 % interval is at or above it, missed if all of it is below, and otherwise
open; a figure without an interval is judged by itself. Where an aim holds for several sizes, the
row shows the worst of them.
"""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

from common.errors import ConfigError, UserError, run_program
from common.output import append_json, markdown, middle, read_json, write_bytes_atomically, writing
from common.plotting import STYLES, plt, save
from common.stats import median_ratio, paired_ratio
from evidence.runs import read_log

Line = dict[str, Any]
WIDE = 2048  # with this many channels or more, a norm's aim is the higher one
FILE = "its file"  # the key under which a line has the file that it comes from
TITLE = "# Measured on the GPU, beside what was aimed at"
VERDICTS = ("met", "open", "missed", "stated", "not measured")


@dataclass(frozen=True)
class Target:
    """One row of the report: an aim and what was measured."""

    area: str
    what: str
    aim: float | None  # None for a figure that is only stated
    value: float | None = None  # None for not measured
    low: float | None = None
    high: float | None = None
    line: Line | None = None  # where the figure comes from
    note: str = ""
    form: str = "{:.3f}x"

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.value is None:
            return "not measured"
        if self.aim is None:
            return "stated"
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        if low >= self.aim:
            return "met"
        if high < self.aim:
            return "missed"
        return "open"


def figures(folder: Path, *names: str) -> list[Line]:
    """Read the lines of these files; each has its file's name under FILE."""
    return [line | {FILE: name} for name in names for line in read_json(folder / name)]


def row(
    area: str,
    what: str,
    aim: float | None,
    line: Line | None = None,
    ratio: dict[str, float] | float | None = None,
    note: str = "",
    form: str = "{:.3f}x",
) -> Target:
    """Make a row from a figure, or from a figure with its interval.

    Without a line or without a figure, the row is not measured.
    """
    if line is None or ratio is None:
        return Target(area, what, aim, form=form)
    if not isinstance(ratio, dict):
        return Target(area, what, aim, ratio, line=line, note=note, form=form)
    return Target(
        area,
        what,
        aim,
        value=middle(ratio),
        low=ratio["low"],
        high=ratio["high"],
        line=line,
        note=note,
        form=form,
    )


def worst(rows: list[Target]) -> Target:
    """Return the worst row: missed, else open, else met; of several the furthest below its aim."""
    order = ("missed", "open", "met", "stated", "not measured")

    def badness(row: Target) -> tuple[int, float]:
        return order.index(row.verdict), (row.value or 0) / (row.aim or 1)

    return min(rows, key=badness)


# ------------------------------------------------------------------------------------------ kernels

SHARE = "{:.0%}"
# (operator, phase) -> aimed share of a copy's bandwidth, at WIDE channels or more and at fewer.
SHARES = {
    ("rms_norm", "forward"): (0.90, 0.82),
    ("layer_norm", "forward"): (0.90, 0.82),
    ("add_rms_norm", "forward"): (0.92, 0.85),
    ("rms_norm", "backward"): (0.85, 0.75),
    ("layer_norm", "backward"): (0.85, 0.75),
    ("shared_rms_scale", "backward"): (0.92, 0.85),
    ("add_shared_rms_scale", "backward"): (0.92, 0.85),
}
UNSCALED = "torch, unscaled"
OPERATORS = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "taper_norm",
    "norm_add_norm",
    "add_normed",
    "shared_rms_scale",
    "add_shared_rms_scale",
    "scaled_gelu",
    "scaled_swiglu",
)


def kernels(folder: Path) -> Iterator[Target]:
    """Yield shares of a copy's bandwidth in the same run, and times of other implementations."""
    files = (f"kernels/{stage}/kernels.jsonl" for stage in ("norms", "sandwich", "coupled"))
    points = figures(folder, *files)
    for (operator, phase), (wide_aim, narrow_aim) in SHARES.items():
        its = [line for line in points if (line["operator"], line["phase"]) == (operator, phase)]
        wide = [line for line in its if line["channels"] >= WIDE]
        narrow = [line for line in its if line["channels"] < WIDE]
        what = f"{operator} {phase}, share of a copy's bandwidth, C"
        yield share_of_copy(wide, f"{what} >= {WIDE}", wide_aim)
        yield share_of_copy(narrow, f"{what} < {WIDE}", narrow_aim)
    for operator in OPERATORS:
        yield against(
            points,
            f"{operator}: the best other implementation's time over ours",
            1.0,
            lambda line, name, it=operator: line["operator"] == it and name != UNSCALED,
        )
    yield against(
        points,
        "Liger-Kernel's backward over ours, C <= 1024",
        1.3,
        lambda line, name: (
            name == "Liger" and line["phase"] == "backward" and line["channels"] <= 1024
        ),
    )
    yield against(
        points,
        "the unscaled activation's time over the scaled one's",
        0.99,
        lambda line, name: name == UNSCALED,
    )


def share_of_copy(lines: list[Line], what: str, aim: float) -> Target:
    """Return our kernel's share of a copy's bandwidth, at the size where it is worst."""
    found = []
    for line in lines:
        low, high = line["share_interval"][line["ours"]]
        share = {"median": line["share"][line["ours"]], "low": low, "high": high}
        note = f"worst at C = {line['channels']}"
        found.append(row("kernels", what, aim, line, share, note, SHARE))
    return worst(found or [row("kernels", what, aim, form=SHARE)])


def against(
    points: list[Line], what: str, aim: float, counts: Callable[[Line, str], bool]
) -> Target:
    """Return other implementations' time over ours, where we are worst; the note names them.

    Args:
        counts: whether an implementation at a point takes part, from the line and its name.
    """
    pairs = [
        (line, name, ratio)
        for line in points
        for name, ratio in line["time_over_ours"].items()
        if counts(line, name)
    ]
    others = ", ".join(dict.fromkeys(name for _, name, _ in pairs))
    found = []
    for line, name, ratio in pairs:
        note = f"worst: {name}, {line['phase']}, C = {line['channels']}; of {others}"
        found.append(row("kernels", what, aim, line, ratio, note))
    return worst(found or [row("kernels", what, aim)])


# ----------------------------------------------------------------------------------- training speed

FOLD = "coupled coupled_impl=fold"
CONTROL = "rms-no-mlp-gamma"


def training(folder: Path) -> Iterator[Target]:
    """Yield the speed of training steps (124 M parameters, bfloat16, compiled).

    By residual stream and options of the compiler.
    """
    aims = (
        (FOLD, "rms", 1.012),
        (FOLD, CONTROL, 1.0),
        ("coupled", "rms", 1.003),
        ("rms (A/A)", "rms", None),
    )
    nanogpt = (("rms", "nanogpt", 1.0), ("rms", "nanogpt", 1.3), ("layer", "nanogpt", None))
    for name, label in (
        ("train", "float32 stream"),
        ("train_bfloat16", "bfloat16 stream"),
    ):
        lines = figures(folder, f"{name}/steps.jsonl")
        pairs = aims
        if name == "train":
            pairs += nanogpt  # its stream is float32, too
        for arm, base, aim in pairs:
            goal = " (goal)" if aim == 1.3 else ""
            yield faster(lines, arm, base, aim, f"{arm} over {base}, tokens/s, {label}{goal}")
        rms = next((line for line in lines if line["arm"] == "rms"), None)
        mfu = rms["mfu"] if rms else None
        note = f"{rms['tokens_per_s']:,.0f} tokens/s" if rms else ""
        yield row("training", f"rms, MFU, {label}", 0.45, rms, mfu, note, "{:.1%}")
    lines = figures(folder, "train_kernels/steps.jsonl")
    for norm in ("rms", "coupled"):
        yield faster(
            lines,
            f"{norm} kernels=triton",
            f"{norm} kernels=torch",
            None,
            f"{norm} with our operators over the same compiled from plain PyTorch",
        )


def faster(lines: list[Line], arm: str, base: str, aim: float | None, what: str) -> Target:
    """Return the speed of one arm over another's, from the times of the same rounds."""
    arms = {line["arm"]: line for line in lines}
    if not {arm, base} <= arms.keys():
        return row("training", what, aim)
    ratio = paired_ratio(arms[base]["seconds"], arms[arm]["seconds"])
    return row("training", what, aim, arms[arm], vars(ratio), f"{ratio.n} rounds")


# ----------------------------------------------------------------------------------------- decoding


class DecodingAims(NamedTuple):
    """Aims for one model at batch 1; the arms are those of decode/arms.py."""

    paper: float  # B/A
    fused: float  # D/A
    share: float  # of the bandwidth floor, for D
    eager: float  # D over Hugging Face's eager generate


DECODING = {
    "qwen3-0.6b": DecodingAims(paper=1.03, fused=1.35, share=0.53, eager=16),
    "qwen3-1.7b": DecodingAims(paper=1.03, fused=1.17, share=0.74, eager=8),
    "qwen3-8b": DecodingAims(paper=1.01, fused=1.06, share=0.88, eager=2.8),
    "llama3.2-1b": DecodingAims(paper=1.01, fused=1.11, share=0.77, eager=5),
    "llama3.2-3b": DecodingAims(paper=1.01, fused=1.08, share=0.83, eager=3.5),
}


def decoding(folder: Path) -> Iterator[Target]:
    """Yield the speed of decoding a token at batch 1.

    D/A is shown with D/C, which alone is the merit of the shared statistic.
    """
    lines = {
        line["model"]: line for line in figures(folder, "decode/decode.jsonl") if line["batch"] == 1
    }
    for model, aims in DECODING.items():
        line = lines.get(f"random:{model}")
        ratios = line["speed_ups"] if line else {}
        # The control copy of an arm is named after the arm.
        control = next((name for name in ratios if name.startswith("A/A/")), "")
        note = f"{line['rounds']} rounds of {line['tokens']} tokens" if line else ""
        for pair, aim, title in (
            ("coupled/rms", aims.paper, "B/A"),
            ("coupled_fused/rms", aims.fused, "D/A"),
            ("coupled_fused/rms_fused", None, "D/C"),
            (control, None, "A/A"),
            ("coupled_fused/hf_eager", aims.eager, "D over Hugging Face eager"),
        ):
            yield row("decoding", f"{model}, {title}, batch 1", aim, line, ratios.get(pair), note)
        yield share_of_floor(
            line, f"{model}, D's share of the bandwidth floor, batch 1", aims.share
        )


def share_of_floor(line: Line | None, what: str, aim: float) -> Target:
    """Return the bandwidth floor's time over that of the faster of the two D arms."""
    measured = line["arms"] if line else {}
    names = [name for name in ("coupled_fused", "coupled_fused_tuned") if name in measured]
    if not names:
        return row("decoding", what, aim, form=SHARE)
    name = min(names, key=lambda name: measured[name]["ms_per_token"])
    times = line["seconds"][name]
    floor = line["floor_bytes"] / line["bandwidth"] * (line["tokens"] - 1)  # seconds
    ratio = median_ratio([floor] * len(times), times)
    note = f"{measured[name]['ms_per_token']:.3f} ms/token"
    return row("decoding", what, aim, line, ratio, note, SHARE)


# -------------------------------------------------------------------------- taper, fold, distilling

SIZES = 6  # of TaperNorm's protocol


def tapering(folder: Path) -> Iterator[Target]:
    """Yield TaperNorm's protocol: the worst of its sizes, once all of them are measured."""
    lines = figures(folder, "taper/last_token.jsonl")
    for pair, mode, aim in (
        ("taper/rms", "eager", 1.15),
        ("taper_folded/rms", "eager", 1.22),
        ("taper_folded/rms", "cached", 1.18),
        ("taper_folded/rms", "CUDA graph", None),
        ("taper_folded/rms_folded", "CUDA graph", None),
        ("taper_folded/rms", "cached, CUDA graph", None),
    ):
        what = f"{pair.replace('/', ' over ')}, {mode}"
        found = []
        for line in lines:
            if line["mode"] == mode:
                note = f"worst at batch {line['batch']}, context {line['context']}"
                found.append(row("taper", what, aim, line, line["speed_up"][pair], note))
        yield worst(found) if len(found) >= SIZES else row("taper", what, aim)


# Shape -> length -> per cent of time that the CBWC paper's protocol saves. Its OPT is a range.
FOLDING = {
    "gpt2": {256: 4.2, 1024: 8.5, 4096: 13.9},
    "bert": {256: 6.9, 1024: 10.6, 4096: 18.5},
    "opt": {256: 3.6, 4096: 8.0},
}


def folding(folder: Path) -> Iterator[Target]:
    """Yield what folding LayerNorms saves: by the paper's protocol, and in paired rounds.

    The paper's protocol runs one arm after the other, eager. Where not all norms fold (BERT), the
    paper's figures are of all norms swapped, which is another function.
    """
    for shape, aims in FOLDING.items():
        lines = {
            (line["mode"], line["length"]): line for line in figures(folder, f"fold/{shape}.jsonl")
        }
        for length, aim in aims.items():
            line = lines.get(("eager", length))
            what = f"{shape}, {length} tokens: time saved by the paper's protocol"
            note = "one figure, no interval"
            form = "{:.1%}"
            saved = line["sequential"] if line else {}
            value = saved.get("saved")
            if "saved_swapped" in saved:
                yield row("fold", f"{what}, folded exactly", None, line, value, note, form)
                value = saved["saved_swapped"]
                note += "; all norms swapped, not the same function"
            yield row("fold", what, aim / 100, line, value, note, form)
            for mode in ("eager", "compiled", "graph"):
                line = lines.get((mode, length))
                ratio = line["before / after"]["mean"] if line else None
                what = f"{shape}, {length} tokens: speed-up, {mode}, paired rounds"
                yield row("fold", what, None, line, ratio)


def distilling(folder: Path) -> Iterator[Target]:
    """Yield tokens/s and memory of the post-hoc conversion.

    The larger model has to fit on a GPU of 141 GB.
    """
    lines = {line["model"]: line for line in figures(folder, "distill/distill.jsonl")}
    for model in ("qwen3-0.6b", "qwen3-8b"):
        line = lines.get(model, {})
        speed = line.get("tok_per_s")
        peak = line.get("peak_bytes")
        yield row("distilling", f"{model}, tokens/s", None, line, speed, form="{:,.0f}")
        share = 141e9 / peak if peak else None
        note = f"peak {peak / 1e9:.1f} GB" if peak else ""
        yield row("distilling", f"{model}, 141 GB over the peak memory", 1.0, line, share, note)


def rows_of(folder: Path) -> list[Target]:
    """Return all rows; those without an aim only if they have been measured (see is_begun)."""
    found = []
    for area in (kernels, training, decoding, tapering, folding, distilling):
        rows = list(area(folder))
        found += [row for row in rows if row.aim is not None or is_begun(row, rows)]
    return found


def is_begun(one: Target, rows: list[Target]) -> bool:
    """Has the row been measured or, in decoding, any row of its model?

    D/A is never shown without D/C.
    """
    subject = one.what.partition(",")[0] if one.area == "decoding" else one.what
    return any(
        row.value is not None for row in rows if row.what.partition(",")[0] == subject or row is one
    )


# ------------------------------------------------------------------------------- README and picture


def render(folder: Path) -> list[Target]:
    """Write README.md and targets.png into the folder, from the files there; return the rows.

    Raises UserError.
    """
    page = folder / "README.md"
    if page.exists() and not page.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise UserError(
            f"{page} is another page, which would be overwritten: give a folder that h200.sh filled"
        )
    rows = rows_of(folder)
    with writing(folder):
        drawn = plot(rows, folder / "targets.png")
        write_bytes_atomically(page, text_of(folder, rows, drawn).encode())
    return rows


def counted(rows: list[Target]) -> dict[str, int]:
    """Count the rows of each verdict."""
    verdicts = [row.verdict for row in rows]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def text_of(folder: Path, rows: list[Target], drawn: bool) -> str:
    """Return README.md: a table for each area, links to reports, the last attempt at each stage."""
    count = counted(rows)
    lines = [
        TITLE,
        "",
        f"Made by repro/h200.sh from the files here. Of {sum(row.aim is not None for row in rows)} "
        f"aims {count['met']} are met, {count['missed']} missed, {count['open']} open (the aim "
        "lies within the 95 % interval); the others are not measured. A figure without an "
        "interval is judged by itself.",
    ]
    if drawn:
        lines += ["", "![Measured over aimed at](targets.png)"]
    for area in dict.fromkeys(row.area for row in rows):
        heads = [
            "what",
            "aim",
            "measured",
            "95 % interval",
            "verdict",
            "note",
            "from",
            "commit, device",
        ]
        lines += [
            "",
            f"## {area.capitalize()}",
            "",
            markdown(heads, (cells(row) for row in rows if row.area == area)),
        ]
    reports = sorted(
        path.relative_to(folder) for path in folder.rglob("*.md") if path.parent != folder
    )
    if reports:
        lines += ["", "## Whole tables", "", *(f"- [{path}]({path})" for path in reports)]
    heads = [
        "stage",
        "state",
        "seconds",
        "commit",
        "device",
        "clocks (SM, memory), power, temperature before",
        "after",
    ]
    with (
        contextlib.suppress(FileNotFoundError),
        open(folder / "stages.csv", encoding="utf-8") as file,
    ):
        last = {line[0]: line for line in csv.reader(file) if len(line) == len(heads)}
        lines += [
            "",
            "## Stages",
            "",
            "A stage that is not done has the figures of an earlier attempt, or fewer than "
            "wanted; where tests failed, what they test is in doubt.",
            "",
            markdown(heads, last.values()),
        ]
    return "\n".join(lines) + "\n"


def cells(row: Target) -> tuple[str, ...]:
    """Return the cells of one row."""

    def shown(value: float | None) -> str:
        return "" if value is None else row.form.format(value)

    interval = "" if row.low is None else f"{shown(row.low)} .. {shown(row.high)}"
    aim = "" if row.aim is None else f">= {shown(row.aim)}"
    line = row.line or {}
    commit = line.get("git") or "unknown"
    changed = "+" if "+" in commit else ""
    place = f"{commit.rstrip('+')[:8]}{changed}, {line.get('device')}" if line else ""
    origin = f"[{line[FILE]}]({line[FILE]})" if line else ""
    return (
        row.what,
        aim,
        shown(row.value),
        interval,
        row.verdict,
        row.note,
        origin,
        place,
    )


def plot(rows: list[Target], target: Path) -> bool:
    """Draw measured over aimed at, one line for each aim that was measured.

    False if none was; then nothing is drawn.
    """
    shown = [row for row in rows if row.aim and row.value is not None]
    if not shown:
        return False
    areas = list(dict.fromkeys(row.area for row in shown))
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.24 * len(shown)), layout="constrained")
    for index, row in enumerate(shown):
        color, marker = STYLES[areas.index(row.area) % len(STYLES)]
        if row.low is not None:
            interval = [row.low / row.aim, row.high / row.aim]
            axis.plot(interval, [-index, -index], color=color, linewidth=2)
        axis.plot(
            row.value / row.aim,
            -index,
            color=color,
            marker=marker,
            linestyle="",
            fillstyle={"met": "full", "open": "left"}.get(row.verdict, "none"),
        )
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(
        [-index for index in range(len(shown))], [row.what for row in shown], fontsize=7
    )
    axis.set_ylim(0.7 - len(shown), 0.7)
    axis.set_xlabel(
        "measured over aimed at, with 95 % interval; filled: met, half: open, hollow: missed"
    )
    axis.grid(axis="x", alpha=0.3)
    save(figure, target)
    return True


def keep(run: Path, target: Path, name: str) -> None:
    """Append the place and the end of a run's log to `target`, as one line.

    Raises UserError for a run that did not end well.
    """
    log = read_log(run)
    if log[-1].get("event") != "end" or log[-1]["reason"] != "done":
        raise UserError(f"{run}: the run did not end well: look at {run}/log.jsonl")
    place = {key: log[0][key] for key in ("git", "versions", "device", "clocks") if key in log[0]}
    append_json(target, {**log[-1], **place, "model": name})


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    if argv[:1] == ["--keep"] and len(argv) == 4:
        keep(Path(argv[1]), Path(argv[2]), argv[3])
        return
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        raise ConfigError("h200.py needs the folder that h200.sh filled")
    print(json.dumps({"targets": counted(render(Path(argv[0]))), "out": argv[0]}))


if __name__ == "__main__":
    run_program(main)
