"""README.md and targets.png of results/h200: each figure beside its aim (gpu_targets.py), whole tables, stages."""

from pathlib import Path

from common.output import markdown, write_bytes_atomically, writing
from common.plotting import STYLES, plt, save
from repro.gpu_targets import FILE, Line, Target, counted, read_lines, rows_of

PICTURES = ("train/speed.png", "train_bfloat16/speed.png", "decode/decode.png", "kernels/norms/kernels.png",
            "kernels/coupled/kernels.png", "table1_small/loss_tokens.png", "pair_124m/loss_tokens.png",
            "trace/trace-8.png")  # fmt: skip
REPORTS = ("train/README.md", "train_bfloat16/README.md", "train_autotuned/README.md", "train_kernels/README.md",
           "decode/README.md", "kernels/norms/README.md", "kernels/coupled/README.md", "taper/last_token.md",
           "taper/launches.md", "table1_small/report.md", "table1_small/against_layer/report.md",
           "pair_124m/report.md")  # fmt: skip


def render(folder: Path) -> list[Target]:
    """Writes README.md and targets.png into the folder, from the files there; the rows."""
    rows = rows_of(folder)
    stages = {line["stage"]: line for line in read_lines(folder / "stages.jsonl")}  # the last attempt at each
    with writing(folder):
        drawn = plot(rows, folder / "targets.png")
        write_bytes_atomically(folder / "README.md", text_of(folder, rows, list(stages.values()), drawn).encode())
    return rows


def text_of(folder: Path, rows: list[Target], stages: list[Line], drawn: bool) -> str:
    """README.md of the folder."""
    count = counted(rows)
    lines = ["# Measured on the GPU, beside what was aimed at", "",
             f"Made by `make gpu` from the JSONL files here. Of {sum(row.aim is not None for row in rows)} aims "
             f"{count['met']} are met, {count['missed']} missed, {count['open']} open (the aim lies within the 95 % "
             "interval); the others are not measured. A figure without an interval is judged by itself. Versions and "
             "clocks are in the line of the file named, and below."]  # fmt: skip
    if any(line["rehearsal"] for line in stages):
        lines += ["", "**A rehearsal, at toy sizes: none of these figures is a result, and toy models fill few rows.**"]
    short = [f"{line['stage']} ({line['state']})" for line in stages if line["state"] != "done"]
    if short:
        lines += ["", f"Not whole at the last attempt: {', '.join(short)}. Figures of these stages are an earlier "
                      "attempt's, or fewer than wanted (`goes on`: at the next call); where tests failed, what they "
                      "test is in doubt."]  # fmt: skip
    if drawn:
        lines += ["", "![Measured over aimed at](targets.png)"]
    for area in dict.fromkeys(row.area for row in rows):
        heads = ["what", "aim", "measured", "95 % interval", "verdict", "note", "from", "commit, device"]
        its = [table_row(row) for row in rows if row.area == area]
        lines += ["", f"## {area.capitalize()}", "", markdown(heads, its)]
    there = [name for name in REPORTS if (folder / name).exists()]
    if there:
        lines += ["", "## Whole tables", "", *(f"- [{name}]({name})" for name in there)]
    pictures = [name for name in PICTURES if (folder / name).exists()]
    lines += ["", *(f"![{name}]({name})" for name in pictures)] if pictures else []
    if stages:
        heads = ["stage", "state", "minutes", "commit, device", "clocks before; after", "said"]
        lines += ["", "## Stages", "", markdown(heads, map(stage_row, stages))]
    return "\n".join(lines) + "\n"


def table_row(row: Target) -> tuple[str, ...]:
    values = ["" if value is None else row.form.format(value) for value in (row.aim, row.value, row.low, row.high)]
    interval = f"{values[2]} .. {values[3]}" if values[2] else ""
    origin = f"[{row.line[FILE]}]({row.line[FILE]})" if row.line else ""
    return (row.what, f">= {values[0]}" if values[0] else "", values[1], interval, row.verdict, row.note, origin,
            place_of(row.line) if row.line else "")  # fmt: skip


def place_of(line: Line) -> str:
    commit = line.get("git") or "unknown"
    return f"{commit[:8]}{'+' if commit.endswith('+') else ''}, {line.get('device')}"


def stage_row(line: Line) -> tuple[str, ...]:
    clocks = "; ".join(text for text in (line.get("clocks"), line.get("clocks_after")) if text)
    said = line["said"].replace("|", "/")
    return line["stage"], line["state"], f"{line['seconds'] / 60:.1f}", place_of(line), clocks, said


def plot(rows: list[Target], target: Path) -> bool:
    """Measured over aimed at, with its interval, a line for each aim that was measured; False where there is none."""
    shown = [row for row in rows if row.aim and row.value is not None]
    if not shown:
        return False
    areas = list(dict.fromkeys(row.area for row in shown))
    figure, axis = plt.subplots(figsize=(9, 1.4 + 0.24 * len(shown)), layout="constrained")
    for index, row in enumerate(shown):
        color, marker = STYLES[areas.index(row.area) % len(STYLES)]
        if row.low is not None:
            axis.plot([row.low / row.aim, row.high / row.aim], [-index, -index], color=color, linewidth=2)
        axis.plot(row.value / row.aim, -index, color=color, marker=marker, linestyle="",
                  fillstyle={"met": "full", "open": "left"}.get(row.verdict, "none"))  # fmt: skip
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks([-index for index in range(len(shown))], [row.what for row in shown], fontsize=7)
    axis.set_ylim(0.7 - len(shown), 0.7)
    axis.set_xlabel("measured over aimed at, with 95 % interval; filled: met, half: open, hollow: missed")
    axis.grid(axis="x", alpha=0.3)
    save(figure, target)
    return True
