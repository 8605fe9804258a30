"""What was aimed at on an H200, and what was measured: results/h200/README.md and targets.png, made of its JSONL files.

Aims are those set before anything was measured there, most from the papers' own figures. An aim is met when the whole
95 % interval lies on its good side, missed when all of it lies on the other, and open between. Where an aim holds for
several sizes, the row shows the worst of them. Every row names the file whose lines it comes from.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import STYLES, plt, save
from stats import median_ratio, paired_ratio

Lines = list[dict[str, Any]]
WIDE = 2048  # channels from which on a norm's aim is the higher one


@dataclass(frozen=True)
class Row:
    """One aim, or a figure to be stated without one (aim None). value None: not measured."""

    area: str
    what: str
    aim: float | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    source: str = ""
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


def read_lines(path: Path) -> Lines:
    """The records of a JSONL file; none where there is no file. A last line torn by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def worst(rows: Iterable[Row]) -> Row | None:
    """A missed row before an open one before one that is met; of several the one furthest below its aim."""
    order = ("missed", "open", "met", "stated")
    return min(rows, key=lambda row: (order.index(row.verdict), row.value / (row.aim or 1)), default=None)


# ------------------------------------------------------------------------------------------------------------ kernels

SHARE = "{:.0%}"
# (operator, phase) -> share of copy bandwidth at WIDE channels or more, and below
SHARES = {
    ("rms_norm", "forward"): (0.90, 0.82), ("layer_norm", "forward"): (0.90, 0.82),
    ("add_rms_norm", "forward"): (0.92, 0.85), ("rms_norm", "backward"): (0.85, 0.75),
    ("layer_norm", "backward"): (0.85, 0.75), ("shared_rms_scale", "backward"): (0.92, 0.85),
    ("add_shared_rms_scale", "backward"): (0.92, 0.85),
}  # fmt: skip
UNSCALED = "torch, unscaled"


def kernels(folder: Path) -> Iterator[Row]:
    """Shares of the bandwidth of a copy in the same run, and the fastest of other people's kernels."""
    area, files = "kernels", [f"kernels/{name}/kernels.jsonl" for name in ("norms", "coupled")]
    points = [row | {"source": source} for source in files for row in read_lines(folder / source)]
    for (operator, phase), aims in SHARES.items():
        its = [row for row in points if (row["operator"], row["phase"]) == (operator, phase)]
        for aim, is_wide in zip(aims, (True, False)):
            what = f"{operator} {phase}, share of a copy's bandwidth, C {'>=' if is_wide else '<'} {WIDE}"
            found = worst(Row(area, what, aim, row["share"][row["ours"]], *row["share_interval"][row["ours"]],
                              row["source"], f"worst at C = {row['channels']}", SHARE)
                          for row in its if (row["channels"] >= WIDE) == is_wide)  # fmt: skip
            yield found or Row(area, what, aim, form=SHARE)
    yield from peers(points)


def peers(points: Lines) -> Iterator[Row]:
    """Time of other implementations over that of ours, of each operator the point where we are worst."""

    def against(what: str, aim: float, wanted: Callable[[dict, str], bool]) -> Row:
        pairs = [(row, name, ratio) for row in points for name, ratio in row["time_over_ours"].items()
                 if wanted(row, name)]  # fmt: skip
        found = (Row("kernels", what, aim, ratio["median"], ratio["low"], ratio["high"], row["source"],
                     f"worst: {name}, {row['phase']}, C = {row['channels']}") for row, name, ratio in pairs)
        return worst(found) or Row("kernels", what, aim)  # fmt: skip

    for operator in dict.fromkeys(row["operator"] for row in points) or ("every operator",):
        yield against(f"{operator}: the best other implementation's time over ours", 1.0,
                      lambda row, name, it=operator: row["operator"] == it and name != UNSCALED)
    yield against("Liger-Kernel's backward over ours, C <= 1024", 1.3,
                  lambda row, name: name == "Liger" and row["phase"] == "backward" and row["channels"] <= 1024)
    yield against("the unscaled activation's time over the scaled one's", 0.99, lambda row, name: name == UNSCALED)


# ------------------------------------------------------------------------------------------------------ training speed


def training(folder: Path) -> Iterator[Row]:
    """Speed of training steps, 124 M, bfloat16, compiled, by residual stream and options of the compiler."""
    fold, control = "coupled coupled_impl=fold", "rms-no-mlp-gamma"
    aims = ((fold, "rms", 1.012), (fold, control, 1.0), ("coupled", "rms", 1.003), ("rms", "nanogpt", 1.0),
            ("layer", "nanogpt", 1.0), ("rms (A/A)", "rms", None))  # fmt: skip
    for name, label in (("train", "float32 stream"), ("train_bfloat16", "bfloat16 stream"),
                        ("train_autotuned", "bfloat16 stream, autotuned products")):  # fmt: skip
        source = f"{name}/steps.jsonl"
        arms = {row["arm"]: row for row in read_lines(folder / source)}
        for arm, base, aim in aims:
            if base == "nanogpt" and name != "train":
                continue  # its stream is float32
            row = Row("training", f"{arm} over {base}, tokens/s, {label}", aim)
            if arm in arms and base in arms:
                ratio = paired_ratio(arms[base]["seconds"], arms[arm]["seconds"])
                row = Row(row.area, row.what, aim, ratio.mean, ratio.low, ratio.high, source, f"{ratio.n} rounds")
            yield row
        share = arms.get("rms", {}).get("mfu")
        yield Row("training", f"rms, MFU, {label}", 0.45, share, source=source if share else "",
                  note=f"{arms['rms']['tokens_per_s']:,.0f} tokens/s" if share else "", form="{:.1%}")  # fmt: skip
    source = "train_kernels/steps.jsonl"
    arms = {row["arm"]: row for row in read_lines(folder / source)}
    for norm in ("rms", "coupled"):
        ours, plain = (arms.get(f"{norm} kernels={name}") for name in ("triton", "torch"))
        if ours and plain:
            ratio = paired_ratio(plain["seconds"], ours["seconds"])
            yield Row("training", f"{norm} with our operators over the same compiled from plain PyTorch", None,
                      ratio.mean, ratio.low, ratio.high, source, f"{ratio.n} rounds")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ decoding

# model -> B/A, D/A, share of the bandwidth floor of D, D over Hugging Face's eager generate
DECODING = {
    "qwen3-0.6b": (1.03, 1.35, 0.53, 16), "qwen3-1.7b": (1.03, 1.17, 0.74, 8), "qwen3-8b": (1.01, 1.06, 0.88, 2.8),
    "llama3.2-1b": (1.01, 1.11, 0.77, 5), "llama3.2-3b": (1.01, 1.08, 0.83, 3.5),
}  # fmt: skip


def decoding(folder: Path) -> Iterator[Row]:
    """A decoded token at batch 1. D/A stands with D/C, which alone is the shared statistic's merit."""
    source = "decode/decode.jsonl"
    lines = {(row["model"].removeprefix("random:"), row["batch"]): row for row in read_lines(folder / source)}
    for model, (paper, fused, share, eager) in DECODING.items():
        row = lines.get((model, 1))
        for pair, aim, title in (("coupled/rms", paper, "B/A"), ("coupled_fused/rms", fused, "D/A"),
                                 ("coupled_fused/rms_fused", None, "D/C"), ("A/A/rms", None, "A/A"),
                                 ("coupled_fused/hf_eager", eager, "D over Hugging Face eager")):  # fmt: skip
            ratio = row["speed_ups"].get(pair) if row else None
            found = (ratio["median"], ratio["low"], ratio["high"], source, f"{row['rounds']} rounds") if ratio else ()
            yield Row("decoding", f"{model}, {title}, batch 1", aim, *found)
        what, times = f"{model}, D's share of the bandwidth floor", row["seconds"].get("coupled_fused") if row else None
        if times:
            floor = row["floor_bytes"] / row["bandwidth"] * (row["tokens"] - 1)
            ratio = median_ratio([floor] * len(times), times)
            yield Row("decoding", what, share, ratio["median"], ratio["low"], ratio["high"], source,
                      f"{row['arms']['coupled_fused']['ms_per_token']:.3f} ms/token", SHARE)  # fmt: skip
        else:
            yield Row("decoding", what, share, form=SHARE)


# --------------------------------------------------------------------------------------------- taper, fold, distilling


def tapering(folder: Path) -> Iterator[Row]:
    """TaperNorm's protocol: the worst of its six sizes."""
    source = "taper/last_token.jsonl"
    lines = read_lines(folder / source)
    for pair, mode, aim in (("taper/rms", "eager", 1.15), ("taper_folded/rms", "eager", 1.22),
                            ("taper_folded/rms", "cached", 1.18), ("taper_folded/rms", "CUDA graph", None),
                            ("taper_folded/rms_folded", "CUDA graph", None),
                            ("taper_folded/rms", "cached, CUDA graph", None)):  # fmt: skip
        what = f"{pair.replace('/', ' over ')}, {mode}"
        found = []
        for row in (row for row in lines if row["mode"] == mode):
            ratio, size = row["speed_up"][pair], f"worst at batch {row['batch']}, context {row['context']}"
            found.append(Row("taper", what, aim, ratio["median"], ratio["low"], ratio["high"], source, size))
        yield worst(found) or Row("taper", what, aim)


# shape -> per cent of time that the CBWC paper's protocol saves, by length
FOLDING = {"gpt2": {256: 4.2, 1024: 8.5, 4096: 13.9}, "bert": {256: 6.9, 1024: 10.6, 4096: 18.5}, "opt": {256: 3.6}}


def folding(folder: Path) -> Iterator[Row]:
    """LayerNorms folded: time saved by the paper's protocol, one arm after the other, eager, with all norms swapped
    where not all of them fold, as the paper's figures have it; then paired rounds."""
    for shape, aims in FOLDING.items():
        source = f"fold/{shape}.jsonl"
        lines = {(row["mode"], row["length"]): row for row in read_lines(folder / source)}  # the last of each counts
        for length, aim in aims.items():
            row = lines.get(("eager", length))
            saved = row["sequential"].get("saved_swapped", row["sequential"]["saved"]) if row else None
            yield Row("fold", f"{shape}, {length} tokens: time saved by the paper's protocol", aim / 100, saved,
                      source=source if row else "", note="one figure, no interval" if row else "", form="{:.1%}")
            for mode in ("eager", "compiled", "graph"):
                row = lines.get((mode, length))
                ratio = row["before / after"]["mean"] if row else None
                found = (ratio["mean"], ratio["low"], ratio["high"], source) if ratio else ()
                yield Row("fold", f"{shape}, {length} tokens: speed-up, {mode}, paired rounds", None, *found)


def distilling(folder: Path) -> Iterator[Row]:
    """Tokens/s and memory of the post-hoc conversion. The larger model has to fit a GPU of 141 GB."""
    source = "distill/distill.jsonl"
    lines = {row["stage"]: row for row in read_lines(folder / source)}
    for model in ("qwen3-0.6b", "qwen3-8b"):
        row = lines.get(f"distill-{model}", {})
        speed, peak = row.get("tok_per_s"), row.get("peak_bytes")
        yield Row("distilling", f"{model}, tokens/s", None, speed, source=source if speed else "", form="{:,.0f}")
        yield Row("distilling", f"{model}, 141 GB over the peak memory", 1.0, 141e9 / peak if peak else None,
                  source=source if peak else "", note=f"peak {peak / 1e9:.1f} GB" if peak else "", form="{:.2f}x")


# ------------------------------------------------------------------------------------------------------------- results

AREAS = (kernels, training, decoding, tapering, folding, distilling)
PICTURES = ("train/speed.png", "train_bfloat16/speed.png", "decode/decode.png", "kernels/norms/kernels.png",
            "kernels/coupled/kernels.png", "table1_small/loss_tokens.png", "pair_124m/loss_tokens.png",
            "trace/trace-8.png")  # fmt: skip
REPORTS = ("train/README.md", "train_bfloat16/README.md", "train_autotuned/README.md", "train_kernels/README.md",
           "decode/README.md", "kernels/norms/README.md", "kernels/coupled/README.md", "taper/last_token.md",
           "table1_small/report.md", "table1_small/against_layer/report.md", "pair_124m/report.md")  # fmt: skip


def counted(rows: list[Row]) -> dict[str, int]:
    """How many rows have each verdict."""
    words = [row.verdict for row in rows]
    return {word: words.count(word) for word in ("met", "open", "missed", "stated", "not measured")}


def render(folder: Path) -> list[Row]:
    """Writes README.md and targets.png into the folder, from the files there; the rows."""
    rows = [row for area in AREAS for row in area(folder) if row.aim is not None or row.value is not None]
    stages = {row["stage"]: row for row in read_lines(folder / "stages.jsonl")}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plot(rows, folder / "targets.png")
    (folder / "README.md").write_text(text_of(folder, rows, list(stages.values()), drawn), encoding="utf-8")
    return rows


def text_of(folder: Path, rows: list[Row], stages: Lines, drawn: bool) -> str:
    """README.md of the folder."""
    count = counted(rows)
    lines = ["# Measured on the GPU, beside what was aimed at", "",
             f"Made by `make gpu` from the JSONL files here. Of {sum(row.aim is not None for row in rows)} aims "
             f"{count['met']} are met, {count['missed']} missed, {count['open']} open (the aim lies within the 95 % "
             "interval); the others are not measured. Each figure's device, versions and commit are in its line of the "
             "file named; those of the last attempt at each stage are below."]  # fmt: skip
    if any(row["device"].startswith("cpu") for row in stages):
        lines += ["", "**A rehearsal, at toy sizes and without a GPU: none of these figures is a result.**"]
    if drawn:
        lines += ["", "![Measured over aimed at](targets.png)"]
    for area in dict.fromkeys(row.area for row in rows):
        lines += ["", f"## {area.capitalize()}", "",
                  "| what | aim | measured | 95 % interval | verdict | from |", "| --- " * 6 + "|"]  # fmt: skip
        lines += [table_row(row) for row in rows if row.area == area]
    there = [name for name in REPORTS if (folder / name).exists()]
    if there:
        lines += ["", "## Whole tables", "", *(f"- [{name}]({name})" for name in there)]
        lines += ["", *(f"![{name}]({name})" for name in PICTURES if (folder / name).exists())]
    if stages:
        lines += ["", "## Stages", "", "| stage | state | minutes | commit | device | clocks before; after | said |",
                  "| --- " * 7 + "|"]  # fmt: skip
        lines += [stage_row(row) for row in stages]
    return "\n".join(lines) + "\n"


def table_row(row: Row) -> str:
    values = ["" if value is None else row.form.format(value) for value in (row.aim, row.value, row.low, row.high)]
    interval = f"{values[2]} .. {values[3]}" if values[2] else ""
    origin = ", ".join(part for part in (row.note, f"[{row.source}]({row.source})" if row.source else "") if part)
    aim = f">= {values[0]}" if values[0] else ""
    return f"| {row.what} | {aim} | {values[1]} | {interval} | {row.verdict} | {origin} |"


def stage_row(row: dict[str, Any]) -> str:
    clocks = "; ".join(text for text in (row.get("clocks"), row.get("clocks_after")) if text)
    said = row["said"].replace("|", "/")
    commit = (row["git"] or "unknown")[:8] + ("+" if (row["git"] or "").endswith("+") else "")
    return (f"| {row['stage']} | {row['state']} | {row['seconds'] / 60:.1f} | {commit} | {row['device']} | {clocks} | "
            f"{said} |")  # fmt: skip


def plot(rows: list[Row], target: Path) -> bool:
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
                  fillstyle="none" if row.verdict == "missed" else "full")  # fmt: skip
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks([-index for index in range(len(shown))], [row.what for row in shown], fontsize=7)
    axis.set_ylim(0.7 - len(shown), 0.7)
    axis.set_xlabel("measured over aimed at, with 95 % interval; hollow: missed")
    axis.grid(axis="x", alpha=0.3)
    save(figure, target)
    return True
