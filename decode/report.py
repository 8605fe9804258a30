"""What bench_decode.py shows: a card, a table, and a picture like the paper's Figure 2."""

import json
from pathlib import Path
from typing import Any

from common import output
from common.output import markdown
from decode.arms import AIM

ALONE = "D/A mixes fusion with the shared statistic; what the statistic alone is worth is D/C."
ENDS = (
    "A step's ends are nominal, 5 launches (embedding, norm, head, best, take; 4 where norm and "
    "head are one): inductor embeds in the first norm's kernel, which is one less in A, B and L."
)
PANELS = (
    ("coupled/rms", "B/A: the paper's claim"),
    ("coupled_fused/rms", "D/A: all fused, against compiled RMSNorm"),
    ("coupled_fused/rms_fused", "D/C: the shared statistic alone"),
    ("own_fused/own", "P/O: the model's own norms, all fused"),
)


def card(record: dict[str, Any]) -> str:
    """Return where and on what a record was measured, in several lines."""
    weights = "its own weights"
    if record["random_weights"]:
        weights = "random weights (not trained, not zeros)"
    clock = ", process time" if record["clock"] == "cpu_seconds" else ""
    lines = [
        f"{record['model']}: {weights}, stored as {record['norm_type']}, {record['dtype']}; "
        f"{record['prompt_tokens']} prompt tokens ({record['prompt_ids']}), {record['tokens']} "
        f"decoded greedily, {record['rounds']} rounds{clock}",
        output.card(record),
        f"floor: {record['floor_bytes'] / 1e6:,.0f} MB a step at {record['bandwidth'] / 1e9:,.0f} "
        f"GB/s (a copy's): {record['floor_ms_per_token']:.3f} ms at batch {record['batch']}",
    ]
    for name in ("clocks", "note"):
        if record.get(name):
            lines.append(record[name])
    return "\n".join(lines)


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown: a table of the arms, then one of the speed-ups."""
    heads = [
        "arm",
        "ms/token",
        "tok/s",
        "share of floor",
        "prefill ms (eager, unfused)",
        "launches (norms) per block",
        f"{record['memory']}, MB",
        "error (unfused)",
        "tokens as unfused",
    ]
    rows = [arm_cells(name, row, record["tokens"]) for name, row in record["arms"].items()]
    ratios = [
        [name, f"{ratio['median']:.4f}", f"{ratio['low']:.4f} .. {ratio['high']:.4f}"]
        for name, ratio in record["speed_ups"].items()
    ]
    lines = [
        f"batch {record['batch']}",
        "",
        markdown(heads, rows),
        "",
        markdown(["speed-up", "median", "95 % interval"], ratios),
    ]
    if record["faster"]:
        faster = ", ".join(record["faster"].values())
        lines += ["", f"Each in two variants; these ratios are of the faster: {faster}."]
    if "hf_static" in record["arms"] and record["device"].startswith("cpu"):
        note = "on a CPU transformers runs its static cache in eager mode."
        lines += ["", f"hf_static is not compiled here: {note}"]
    lines += [f"- not timed: {reason}" for reason in record["missing"]]
    return "\n".join(lines)


def arm_cells(name: str, row: dict[str, Any], tokens: int) -> list[str]:
    """Return an arm's cells in the table of the arms; those that it lacks are empty."""
    prefill = launches = memory = error = same = ""
    if "prefill_ms" in row:  # one of ours, and not the second copy
        prefill = f"{row['prefill_ms']:.2f}"
        launches = f"{row['launches_per_block']} ({row['norm_launches_per_block']})"
        memory = f"{row['memory_mb']:,.0f}"
        error = f"{row['error']:.2g} ({row['error_unfused']:.2g})"
    if "within_aim" in row:
        verdict = "within" if row["within_aim"] else "above"
        error += f", {row['error'] / row['error_unfused']:.2f}x: {verdict} {AIM}"
    if "same_tokens" in row:
        same = f"{row['same_tokens']} of {tokens}"
    return [
        name,
        f"{row['ms_per_token']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['share_of_floor']:.0%}",
        prefill,
        launches,
        memory,
        error,
        same,
    ]


def panels_of(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the panels of the picture for which there are measurements."""
    return [panel for panel in PANELS if any(panel[0] in record["speed_ups"] for record in records)]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw speed-up over batch size, a line for each model; bars are 95 % intervals.

    There must be a panel to draw.
    """
    from common.plotting import STYLES, plt, save  # matplotlib takes a second to import

    panels = panels_of(records)
    devices = list(dict.fromkeys(record["device"] for record in records))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.8), layout="constrained", squeeze=False
    )
    for axis, (name, title) in zip(axes[0], panels):
        for line, (color, marker) in zip(dict.fromkeys(map(one_line, records)), STYLES * 9):
            rows = sorted(
                (r for r in records if one_line(r) == line and name in r["speed_ups"]),
                key=lambda r: r["batch"],
            )
            if not rows:
                continue
            ratios = [row["speed_ups"][name] for row in rows]
            medians = [ratio["median"] for ratio in ratios]
            below = [abs(ratio["low"] - ratio["median"]) for ratio in ratios]
            above = [abs(ratio["high"] - ratio["median"]) for ratio in ratios]
            axis.errorbar(
                [row["batch"] for row in rows],
                medians,
                [below, above],
                color=color,
                marker=marker,
                capsize=3,
                label=", ".join(line[: 2 if len(devices) == 1 else 3]),
            )
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        sizes = sorted({record["batch"] for record in records})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set(title=title, xlabel="batch size")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("speed-up")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle(", ".join(devices), fontsize=10)
    save(figure, path)


def write(folder: Path, records: list[dict[str, Any]], config: Any) -> None:
    """Add records to a results folder.

    A record replaces the old one of the same model, batch size, type and device.
    """
    for record in records:
        record["command"] = f"python bench_decode.py {record['model']} {output.made_with(config)}"
    places = {place(record) for record in records}
    old = output.read_json(folder / "decode.jsonl")
    every = [record for record in old if place(record) not in places] + records
    text = [
        "# A decoded token, by norm and by fusion",
        "",
        f"Speed-ups are medians over paired rounds. {ALONE}",
    ]
    for run in dict.fromkeys(map(one_run, every)):
        its = [record for record in every if one_run(record) == run]
        text += [
            "",
            f"## {its[0]['model']}, {its[0]['dtype']}",
            "",
            *(f"- {line}" for line in card(its[0]).splitlines()),
            f"- made by `{its[0]['command']}`",
        ]
        text += [part for record in its for part in ("", table(record))]
    has_picture = bool(panels_of(every))
    if has_picture:
        text += ["", "![Speed-up over batch size](decode.png)"]
    # the records first, as drawing may fail
    output.write_results(folder, "decode", every, "README.md", "\n".join(text))
    if has_picture:
        plot(every, folder / "decode.png")


def write_ledger(folder: Path, ledger: dict[str, Any]) -> None:
    """Add a ledger to a folder: ledger.jsonl, and README.md with one table for all models.

    It replaces the old one of the same model and batch size.
    """
    old = output.read_json(folder / "ledger.jsonl")
    its_place = ledger["model"], ledger["batch"]
    every = [one for one in old if (one["model"], one["batch"]) != its_place] + [ledger]
    output.write_results(folder, "ledger", every, "README.md", ledgers(every))


def ledgers(every: list[dict[str, Any]]) -> str:
    """Return ledgers as one Markdown table: a row for each arm, a column for each model.

    A cell has launches per block (of norms), predicted ms/token and the floor's share of that.
    """
    names = list(dict.fromkeys(name for ledger in every for name in ledger["arms"]))
    heads = [f"{one['model'].removeprefix('random:')}, batch {one['batch']}" for one in every]
    lines = [
        "# Launches of a decoding step, and the time they predict",
        "",
        "Counted by `python bench_decode.py MODEL --ledger`, with no GPU. A cell: launches per "
        f"block (of norms), then floor + launches x {every[0]['launch_us']:g} us in ms/token, and "
        f"the floor's share of it. The floor: every matrix once and {every[0]['context']} tokens' "
        f"keys and values, at {every[0]['bandwidth'] / 1e12:g} TB/s. "
        f"Predictions, not measurements. {ENDS}",
        "",
    ]
    rows = []
    for name in names:
        cells = []
        for one in every:
            row = one["arms"].get(name)
            if row is None:
                cells.append("")
                continue
            predicted = row["predicted_ms_per_token"]
            share = one["floor_ms_per_token"] / predicted
            launches = f"{row['launches_per_block']} ({row['norm_launches_per_block']})"
            cells.append(f"{launches}: {predicted:.3f}, {share:.0%}")
        rows.append([name, *cells])
    return "\n".join([*lines, markdown(["arm", *heads], rows)]) + "\n"


def place(record: dict[str, Any]) -> tuple:
    """Return what tells a record of a results folder from the others."""
    return record["model"], record["batch"], record["dtype"], record["device"]


def one_line(record: dict[str, Any]) -> tuple[str, ...]:
    """Return what the points of one line of the plot have in common."""
    return record["model"].removeprefix("random:"), record["dtype"], record["device"]


def one_run(record: dict[str, Any]) -> str:
    """Return what records under one card have in common: all but the batch size and its floor."""
    names = (
        "model",
        "dtype",
        "device",
        "versions",
        "git",
        "command",
        "clocks",
        "threads",
        "load_average",
        "prompt_ids",
    )
    return json.dumps([record.get(name) for name in names])
