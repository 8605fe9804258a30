"""What bench_decode.py shows: a card, a table, and a picture like the paper's Figure 2."""

from pathlib import Path
from typing import Any

from common import output
from common.output import markdown
from decode.ledger import MEASURED

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
    is_process_time = record["device"].startswith("cpu") and record["threads"] == 1
    clock = ", process time" if is_process_time else ""
    lines = [
        f"{record['model']}: {weights}, stored as {record['norm_type']}, {record['dtype']}; "
        f"{record['prompt_tokens']} prompt tokens, {record['tokens']} "
        f"decoded greedily, {record['rounds']} rounds{clock}",
        output.card(record),
        f"floor: {record['floor_bytes'] / 1e6:,.0f} MB a step at {record['bandwidth'] / 1e9:,.0f} "
        f"GB/s (a copy's): {record['floor_ms_per_token']:.3f} ms at batch {record['batch']}",
    ]
    if record.get("clocks"):
        lines.append(record["clocks"])
    return "\n".join(lines)


def table(record: dict[str, Any]) -> str:
    """Return a record as Markdown: a table of the arms, then one of the speed-ups."""
    cells = {name: arm_cells(row, record) for name, row in record["arms"].items()}
    heads = list(dict.fromkeys(head for row in cells.values() for head in row))
    rows = [[name, *(row.get(head, "") for head in heads)] for name, row in cells.items()]
    ratios = [
        [name, f"{ratio['median']:.4f}", f"{ratio['low']:.4f} .. {ratio['high']:.4f}"]
        for name, ratio in record["speed_ups"].items()
    ]
    lines = [
        f"batch {record['batch']}",
        "",
        markdown(["arm", *heads], rows),
        "",
        markdown(["speed-up", "median", "95 % interval"], ratios),
    ]
    if record["faster"]:
        faster = ", ".join(record["faster"].values())
        lines += ["", f"Each in two variants; these ratios are of the faster: {faster}."]
    lines += [f"- not timed: {reason}" for reason in record["missing"]]
    return "\n".join(lines)


def arm_cells(row: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """Return an arm's cells in the table of the arms, by head."""
    cells = {
        "ms/token": f"{row['ms_per_token']:.3f}",
        "tok/s": f"{row['tokens_per_s']:,.0f}",
        "share of floor": f"{row['share_of_floor']:.0%}",
    }
    if "error" in row:  # one of ours, and not the second copy
        ratio = row["error"] / row["error_unfused"]
        cells["launches (norms) per block"] = launches(row)
        cells["error (over unfused)"] = f"{row['error']:.2g} ({ratio:.2f})"
        cells["tokens as unfused"] = f"{row['same_tokens']} of {record['tokens']}"
    return cells


def launches(row: dict[str, Any]) -> str:
    """Return an arm's launches per block, and of norms in brackets."""
    return f"{row['launches_per_block']} ({row['norm_launches_per_block']})"


def panels_of(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the panels of the picture for which there are measurements."""
    measured = {name for record in records for name in record["speed_ups"]}
    return [(name, title) for name, title in PANELS if name in measured]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw speed-up over batch size, a line for each model; bars are 95 % intervals.

    There must be a panel to draw.
    """
    from common.plotting import STYLES, plt, save  # matplotlib takes a second to import

    panels = panels_of(records)
    devices = list(dict.fromkeys(record["device"] for record in records))
    width = 4.6 * len(panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.8), layout="constrained")
    axes = [axes] if len(panels) == 1 else axes
    for axis, (name, title) in zip(axes, panels):
        for line, (color, marker) in zip(dict.fromkeys(map(one_line, records)), STYLES * 9):
            its = [r for r in records if one_line(r) == line and name in r["speed_ups"]]
            rows = sorted(its, key=lambda r: r["batch"])
            ratios = [row["speed_ups"][name] for row in rows]
            below = [abs(ratio["low"] - ratio["median"]) for ratio in ratios]
            above = [abs(ratio["high"] - ratio["median"]) for ratio in ratios]
            axis.errorbar(
                [row["batch"] for row in rows],
                [ratio["median"] for ratio in ratios],
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
    axes[0].set_ylabel("speed-up")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(", ".join(devices), fontsize=10)
    save(figure, path)


def write(folder: Path, records: list[dict[str, Any]], config: Any) -> None:
    """Add records to a results folder.

    A record replaces the old one of the same model, batch size, type and device.
    """
    for record in records:
        record["command"] = f"python bench_decode.py {record['model']} {output.made_with(config)}"
    every = merged(folder / "decode.jsonl", records)
    text = [
        "# A decoded token, by norm and by fusion",
        "",
        f"Speed-ups are medians over paired rounds. {ALONE}",
    ]
    for record in every:
        text += [
            "",
            f"## {record['model']}, {record['dtype']}, batch {record['batch']}",
            "",
            *(f"- {line}" for line in card(record).splitlines()),
            f"- made by `{record['command']}`",
            "",
            table(record),
        ]
    has_picture = bool(panels_of(every))
    if has_picture:
        text += ["", "![Speed-up over batch size](decode.png)"]
    # the records first, as drawing may fail
    output.write_results(folder, "decode", every, "README.md", "\n".join(text))
    if has_picture:
        plot(every, folder / "decode.png")


def write_ledgers(folder: Path, found: list[dict[str, Any]]) -> None:
    """Add ledgers to a folder: ledger.jsonl, and README.md with one table for all models.

    They replace the old ones of the same model and batch size.
    """
    every = merged(folder / "ledger.jsonl", found)
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
        "Predictions, not measurements, without the ramp-up and drain of kernels. "
        f"{ENDS}",
        "",
    ]
    rows = [[name, *(ledger_cell(one, name) for one in every)] for name in names]
    lines.append(markdown(["arm", *heads], rows))
    for one in every:
        found = MEASURED.get((one["model"], one["batch"]), {})
        figures = ", ".join(f"{name} {ms:.3f}" for name, ms in found.items())
        if found:
            lines += ["", f"Measured by others, {one['model']}, ms/token: {figures}."]
    return "\n".join(lines) + "\n"


def ledger_cell(ledger: dict[str, Any], name: str) -> str:
    """Return the cell of an arm; empty where the ledger lacks it."""
    row = ledger["arms"].get(name)
    if row is None:
        return ""
    predicted = row["predicted_ms_per_token"]
    share = ledger["floor_ms_per_token"] / predicted
    return f"{launches(row)}: {predicted:.3f}, {share:.0%}"


def merged(path: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a JSONL file that `records` do not replace, then these."""
    names = ("model", "batch", "dtype", "device")  # a ledger has neither type nor device
    places = [[record.get(name) for name in names] for record in records]
    kept = []
    for record in output.read_json(path):
        place = [record.get(name) for name in names]
        if place not in places:
            kept.append(record)
    return kept + records


def one_line(record: dict[str, Any]) -> tuple[str, ...]:
    """Return what the points of one line of the plot have in common."""
    return record["model"].removeprefix("random:"), record["dtype"], record["device"]
