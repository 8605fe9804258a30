"""What was aimed at on an H200 beside what was measured: README.md and targets.png of a folder that
h200.sh filled.

    python repro/h200.py results/h200
        render (the last step of h200.sh)
    python repro/h200.py --keep RUN results/h200/distill/distill.jsonl NAME
        what a run's log says at its end

Aims were set before anything was measured there, most from the papers' own figures. An aim is met
when the whole 95 % interval lies on its good side, missed when all of it lies on the other, and
open between; a figure without an interval is judged by itself. Where an aim holds for several
sizes, the row shows the worst of them.
"""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, UserError, run_program
from common.output import append_json, markdown, middle, read_json, write_bytes_atomically, writing
from common.plotting import STYLES, plt, save
from common.stats import median_ratio, paired_ratio
from evidence.runs import read_log

Line = dict[str, Any]
WIDE = 2048  # channels from which on a norm's aim is the higher one
FILE = "its file"  # under this name a line has the file that it comes from
TITLE = "# Measured on the GPU, beside what was aimed at"
VERDICTS = ("met", "open", "missed", "stated", "not measured")


@dataclass(frozen=True)
class Target:
    """One aim, or a figure to be stated without one (aim None). value None: not measured."""

    area: str
    what: str
    aim: float | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    line: Line | None = None
    note: str = ""
    form: str = "{:.3f}x"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.aim is None:
            return "stated"
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return "met" if low >= self.aim else "missed" if high < self.aim else "open"


def figures(folder: Path, *names: str) -> list[Line]:
    """The lines of these files, each with the name of its own."""
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
    """A row from a figure, or from one with its interval; not measured without either."""
    if line is None or ratio is None:
        return Target(area, what, aim, form=form)
    if not isinstance(ratio, dict):
        return Target(area, what, aim, ratio, line=line, note=note, form=form)
    return Target(area, what, aim, middle(ratio), ratio["low"], ratio["high"], line, note, form)


def worst(rows: list[Target]) -> Target:
    """A missed row before an open one before one that is met; of several the one furthest below its
    aim.
    """
    order = ("missed", "open", "met", "stated", "not measured")
    return min(rows, key=lambda row: (order.index(row.verdict), (row.value or 0) / (row.aim or 1)))


# ------------------------------------------------------------------------------------------ kernels

SHARE = "{:.0%}"
# (operator, phase) -> share of copy bandwidth at WIDE channels or more, and below
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
    "shared_rms_scale",
    "add_shared_rms_scale",
    "scaled_gelu",
    "scaled_swiglu",
)


def kernels(folder: Path) -> Iterator[Target]:
    """Shares of the bandwidth of a copy in the same run, and the fastest of others' kernels."""
    points = figures(folder, "kernels/norms/kernels.jsonl", "kernels/coupled/kernels.jsonl")
    for (operator, phase), aims in SHARES.items():
        its = [line for line in points if (line["operator"], line["phase"]) == (operator, phase)]
        for aim, is_wide in zip(aims, (True, False)):
            what = (
                f"{operator} {phase}, share of a copy's bandwidth, "
                f"C {'>=' if is_wide else '<'} {WIDE}"
            )
            found = []
            for line in (line for line in its if (line["channels"] >= WIDE) == is_wide):
                share, (low, high) = (
                    line["share"][line["ours"]],
                    line["share_interval"][line["ours"]],
                )
                note = f"worst at C = {line['channels']}"
                found.append(
                    row(
                        "kernels",
                        what,
                        aim,
                        line,
                        {"median": share, "low": low, "high": high},
                        note,
                        SHARE,
                    )
                )
            yield worst(found or [row("kernels", what, aim, form=SHARE)])
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


def against(
    points: list[Line], what: str, aim: float, wanted: Callable[[Line, str], bool]
) -> Target:
    """Time of other implementations over that of ours, at the point where we are worst; and who
    they are.
    """
    pairs = [
        (line, name, ratio)
        for line in points
        for name, ratio in line["time_over_ours"].items()
        if wanted(line, name)
    ]
    others = ", ".join(dict.fromkeys(name for _, name, _ in pairs))
    found = [
        row(
            "kernels",
            what,
            aim,
            line,
            ratio,
            f"worst: {name}, {line['phase']}, C = {line['channels']}; of {others}",
        )
        for line, name, ratio in pairs
    ]
    return worst(found or [row("kernels", what, aim)])


# ----------------------------------------------------------------------------------- training speed

FOLD, CONTROL = "coupled coupled_impl=fold", "rms-no-mlp-gamma"


def training(folder: Path) -> Iterator[Target]:
    """Speed of training steps, 124 M, bfloat16, compiled, by residual stream and options of the
    compiler.
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
        ("train_autotuned", "bfloat16 stream, autotuned products"),
    ):
        lines = figures(folder, f"{name}/steps.jsonl")
        # nanoGPT's stream is float32
        for arm, base, aim in (*aims, *(nanogpt if name == "train" else ())):
            goal = " (goal)" if aim == 1.3 else ""
            yield faster(lines, arm, base, aim, f"{arm} over {base}, tokens/s, {label}{goal}")
        rms = next((line for line in lines if line["arm"] == "rms"), None)
        note = f"{rms['tokens_per_s']:,.0f} tokens/s" if rms else ""
        yield row("training", f"rms, MFU, {label}", 0.45, rms, rms and rms["mfu"], note, "{:.1%}")
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
    """Speed of one arm over another's, from the times of the same rounds."""
    arms = {line["arm"]: line for line in lines}
    if not {arm, base} <= arms.keys():
        return row("training", what, aim)
    ratio = paired_ratio(arms[base]["seconds"], arms[arm]["seconds"])
    return row("training", what, aim, arms[arm], vars(ratio), f"{ratio.n} rounds")


# ----------------------------------------------------------------------------------------- decoding

# model -> B/A, D/A, share of the bandwidth floor of D, D over Hugging Face's eager generate
DECODING = {
    "qwen3-0.6b": (1.03, 1.35, 0.53, 16),
    "qwen3-1.7b": (1.03, 1.17, 0.74, 8),
    "qwen3-8b": (1.01, 1.06, 0.88, 2.8),
    "llama3.2-1b": (1.01, 1.11, 0.77, 5),
    "llama3.2-3b": (1.01, 1.08, 0.83, 3.5),
}


def decoding(folder: Path) -> Iterator[Target]:
    """A decoded token at batch 1.

    D/A stands with D/C, which alone is the shared statistic's merit.
    """
    lines = {
        line["model"]: line for line in figures(folder, "decode/decode.jsonl") if line["batch"] == 1
    }
    for model, (paper, fused, share, eager) in DECODING.items():
        line = lines.get(f"random:{model}")
        ratios = line["speed_ups"] if line else {}
        twin = next((name for name in ratios if name.startswith("A/A/")), "")
        note = f"{line['rounds']} rounds of {line['tokens']} tokens" if line else ""
        for pair, aim, title in (
            ("coupled/rms", paper, "B/A"),
            ("coupled_fused/rms", fused, "D/A"),
            ("coupled_fused/rms_fused", None, "D/C"),
            (twin, None, "A/A"),
            ("coupled_fused/hf_eager", eager, "D over Hugging Face eager"),
        ):
            yield row("decoding", f"{model}, {title}, batch 1", aim, line, ratios.get(pair), note)
        what, ratio = f"{model}, D's share of the bandwidth floor, batch 1", None
        name = line and min(
            (name for name in ("coupled_fused", "coupled_fused_tuned") if name in line["arms"]),
            key=lambda name: line["arms"][name]["ms_per_token"],
            default=None,
        )
        if name:
            floor, times = (
                line["floor_bytes"] / line["bandwidth"] * (line["tokens"] - 1),
                line["seconds"][name],
            )
            ratio = median_ratio([floor] * len(times), times)
            note = f"{line['arms'][name]['ms_per_token']:.3f} ms/token"
        yield row("decoding", what, share, line, ratio, note, SHARE)


# -------------------------------------------------------------------------- taper, fold, distilling

SIZES = 6  # of TaperNorm's protocol


def tapering(folder: Path) -> Iterator[Target]:
    """TaperNorm's protocol: the worst of its sizes, once all of them are there."""
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
        found = [
            row(
                "taper",
                what,
                aim,
                line,
                line["speed_up"][pair],
                f"worst at batch {line['batch']}, context {line['context']}",
            )
            for line in lines
            if line["mode"] == mode
        ]
        yield worst(found) if len(found) >= SIZES else row("taper", what, aim)


# shape -> per cent of time that the CBWC paper's protocol saves, by length; of OPT it gives a range
FOLDING = {
    "gpt2": {256: 4.2, 1024: 8.5, 4096: 13.9},
    "bert": {256: 6.9, 1024: 10.6, 4096: 18.5},
    "opt": {256: 3.6, 4096: 8.0},
}


def folding(folder: Path) -> Iterator[Target]:
    """LayerNorms folded: time saved by the paper's protocol, one arm after the other, eager; then
    paired rounds. Where not all norms fold (BERT), the paper's figures are of all norms swapped,
    which is another function.
    """
    for shape, aims in FOLDING.items():
        lines = {
            (line["mode"], line["length"]): line for line in figures(folder, f"fold/{shape}.jsonl")
        }
        for length, aim in aims.items():
            line, what = (
                lines.get(("eager", length)),
                f"{shape}, {length} tokens: time saved by the paper's protocol",
            )
            saved = line["sequential"] if line else {}
            note, form = "one figure, no interval", "{:.1%}"
            if "saved_swapped" in saved:
                yield row("fold", f"{what}, folded exactly", None, line, saved["saved"], note, form)
                note += "; all norms swapped, not the same function"
            yield row(
                "fold",
                what,
                aim / 100,
                line,
                saved.get("saved_swapped", saved.get("saved")),
                note,
                form,
            )
            for mode in ("eager", "compiled", "graph"):
                line = lines.get((mode, length))
                ratio = line["before / after"]["mean"] if line else None
                yield row(
                    "fold",
                    f"{shape}, {length} tokens: speed-up, {mode}, paired rounds",
                    None,
                    line,
                    ratio,
                )


def distilling(folder: Path) -> Iterator[Target]:
    """Tokens/s and memory of the post-hoc conversion.

    The larger model has to fit a GPU of 141 GB.
    """
    lines = {line["model"]: line for line in figures(folder, "distill/distill.jsonl")}
    for model in ("qwen3-0.6b", "qwen3-8b"):
        line = lines.get(model, {})
        speed, peak = line.get("tok_per_s"), line.get("peak_bytes")
        yield row("distilling", f"{model}, tokens/s", None, line, speed, form="{:,.0f}")
        share, note = (141e9 / peak, f"peak {peak / 1e9:.1f} GB") if peak else (None, "")
        yield row("distilling", f"{model}, 141 GB over the peak memory", 1.0, line, share, note)


def rows_of(folder: Path) -> list[Target]:
    """All rows.

    Figures that are only to be stated stand there once anything of their area has been measured.
    """
    found = [
        list(area(folder)) for area in (kernels, training, decoding, tapering, folding, distilling)
    ]
    return [one for rows in found for one in rows if one.aim is not None or is_begun(one, rows)]


def is_begun(one: Target, rows: list[Target]) -> bool:
    """Whether it has been measured, or, in decoding, anything of its model: D/A never stands
    without D/C.
    """
    subject = one.what.partition(",")[0] if one.area == "decoding" else one.what
    return any(
        row.value is not None for row in rows if row.what.partition(",")[0] == subject or row is one
    )


# ------------------------------------------------------------------------------- README and picture


def render(folder: Path) -> list[Target]:
    """Write README.md and targets.png into the folder, from the files there; the rows.

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
    """How many rows have each verdict."""
    words = [row.verdict for row in rows]
    return {word: words.count(word) for word in VERDICTS}


def text_of(folder: Path, rows: list[Target], drawn: bool) -> str:
    """README.md of the folder: a table for each area, the reports beside it, the last attempt at
    each stage.
    """
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
    values = [
        "" if value is None else row.form.format(value)
        for value in (row.aim, row.value, row.low, row.high)
    ]
    interval = f"{values[2]} .. {values[3]}" if values[2] else ""
    line = row.line or {}
    commit = line.get("git") or "unknown"
    changed = "+" if commit.endswith("+") else ""
    place = f"{commit.rstrip('+')[:8]}{changed}, {line.get('device')}" if line else ""
    origin = f"[{line[FILE]}]({line[FILE]})" if line else ""
    return (
        row.what,
        f">= {values[0]}" if values[0] else "",
        values[1],
        interval,
        row.verdict,
        row.note,
        origin,
        place,
    )


def plot(rows: list[Target], target: Path) -> bool:
    """Measured over aimed at, with its interval, a line for each aim that was measured; False where
    there is none.
    """
    shown = [row for row in rows if row.aim and row.value is not None]
    if not shown:
        return False
    areas = list(dict.fromkeys(row.area for row in shown))
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.24 * len(shown)), layout="constrained")
    for index, row in enumerate(shown):
        color, marker = STYLES[areas.index(row.area) % len(STYLES)]
        if row.low is not None:
            axis.plot(
                [row.low / row.aim, row.high / row.aim], [-index, -index], color=color, linewidth=2
            )
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
    """The place and the end of a run's log as a line of `target`.

    Raises UserError for a run that did not end well.
    """
    log = read_log(run)
    if log[-1].get("event") != "end" or log[-1]["reason"] != "done":
        raise UserError(f"{run}: the run did not end well: look at {run}/log.jsonl")
    place = {key: log[0][key] for key in ("git", "versions", "device", "clocks") if key in log[0]}
    append_json(target, {**log[-1], **place, "model": name})


def main(argv: list[str]) -> None:
    if argv[:1] == ["--keep"] and len(argv) == 4:
        return keep(Path(argv[1]), Path(argv[2]), argv[3])
    if argv[:1] in (["--help"], ["-h"]):
        return print(__doc__)
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        raise ConfigError("h200.py wants the folder that h200.sh filled")
    print(json.dumps({"targets": counted(render(Path(argv[0]))), "out": argv[0]}))


if __name__ == "__main__":
    run_program(main)
