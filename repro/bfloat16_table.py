"""Write what repro/bfloat16.sh measured as one page (a step of that script).

    python -m repro.bfloat16_table RESULTS

Reads the archives and JSONL files in RESULTS, and writes RESULTS/README.md.
"""

import json
from pathlib import Path

import numpy as np

from common.errors import run_program
from common.output import card, markdown, read_json, span, write_bytes_atomically
from common.stats import paired, paired_ratio
from evidence.runs import by_arm, find_runs

STEP = 300

HEAD = """# bfloat16 on a CPU

Made by `repro/bfloat16.sh`. Ratios are geometric means of paired rounds with 95 % t intervals, not
corrected for their number. The arms say dtype and whether they are compiled; `layer` alone is what
`train.py` chooses by itself."""


def losses_table(folder: Path) -> str:
    """Compare val losses of both types, paired by seed, one row for each norm type."""
    arms = {
        dtype: by_arm(find_runs([folder / f"{dtype}.tar.xz"])) for dtype in ("float32", "bfloat16")
    }
    rows = []
    for arm, runs in arms["float32"].items():
        seeds = sorted(runs)
        low = [arms["bfloat16"][arm][seed].metrics["val_loss"] for seed in seeds]
        full = [runs[seed].metrics["val_loss"] for seed in seeds]
        differences = np.array(low) - np.array(full)
        first, last = paired(differences).interval()
        cells = [f"`{arm}`", len(seeds), f"{np.mean(full):.4f}", f"{np.std(full, ddof=1):.4f}"]
        cells += [f"{value:+.4f}" for value in differences]
        rows.append([*cells, f"{differences.mean():+.4f} ({first:+.4f} to {last:+.4f})"])
    n_seeds = len(rows[0]) - 5
    header = ["norm type", "seeds", "float32", "SD over seeds"]
    header += [f"seed {seed}" for seed in range(1, n_seeds + 1)]
    return markdown([*header, "mean difference (95 %)"], rows)


def speed_table(folder: Path, names: list[str], base: str) -> str:
    """List the arms' speeds in tokens/s and over the arm `base`, one row for each file."""
    rows = []
    for name in names:
        records = read_json(folder / f"{name}.jsonl")
        of_base = next(row["seconds"] for row in records if row["arm"] == base)
        for row in records:
            if row["arm"].endswith("(A/A)"):
                continue
            ratio = ""
            if row["arm"] != base:
                ratio = span(paired_ratio(of_base, row["seconds"]), "{:.3f}")
            compiled = "compiled" if row["compile"] else "eager"
            cells = [name, f"`{row['arm']}`", f"{row['dtype']}, {compiled}"]
            rows.append([*cells, f"{row['tokens_per_s']:,.0f}", ratio])
    return markdown(["run", "arm", "runs in", "tokens/s", f"over `{base}`"], rows)


def main(argv: list[str]) -> None:
    """Write the page."""
    folder = Path(*argv)
    widths = [f"width-{width}" for width in (64, 128, 256, 384, 768, 1024)]
    one_core = [*widths, "no-amx-128", "no-amx-384", "table1_cpu"]
    place = json.loads((folder / "nanogpt-10m.jsonl").read_text().splitlines()[0])
    parts = [
        HEAD,
        "## Beside upstream nanoGPT",
        f"{card(place)}. `nanogpt` is what its users get on a CPU: float32, eager. 10m: 6 layers, "
        "384 channels, 12 x 256 tokens; small: 4 layers, 128 channels, 12 x 64 tokens.",
        speed_table(folder, ["nanogpt-10m", "nanogpt-small"], "nanogpt"),
        "## One core, by width",
        "Two layers, 16 x 128 tokens; `table1_cpu` is that config's shape, four layers of 128 "
        "channels. `no-amx`: the processor's AVX512-BF16 alone (ONEDNN_MAX_CPU_ISA).",
        speed_table(folder, one_core, "rms dtype=float32 compile=False"),
        "## Losses",
        f"The demo's first {STEP} steps, val loss over the whole val split in nats per byte, "
        "bfloat16 less float32 at the same seed. No interval leaves out zero, and none is narrow "
        "enough to show equality.",
        losses_table(folder),
    ]
    write_bytes_atomically(folder / "README.md", ("\n\n".join(parts) + "\n").encode())
    print(f"wrote {folder / 'README.md'}")


if __name__ == "__main__":
    run_program(main, __doc__)
