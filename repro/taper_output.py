"""Measure what holds the scale of the stream at the output, at the end of runs of repro/taper.sh.

    python repro/taper_output.py out/taper results/cpu/taper
        writes output_end.jsonl and output_end.md into the second folder

Each run's last checkpoint is measured on windows spread evenly over validation and over training
text: size of the stream at the output, length of the logits, radial gradient (training/stream.py).
The table has means and standard deviations over seeds.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from common.environment import environment, faster_float32_products
from common.errors import run_program
from common.output import markdown, write_results
from evidence.comparison import check_alike
from evidence.runs import Run, by_arm
from load import load_model
from training.checkpoint import LAST
from training.dataloader import Blocks
from training.stream import measure

WINDOWS = 96


def main(argv: list[str]) -> None:
    """Measure all runs and write both files."""
    source, target = map(Path, argv)
    folders = sorted(folder for folder in source.iterdir() if (folder / LAST).exists())
    runs = [Run(folder) for folder in folders]
    for arm, its in by_arm(runs).items():
        check_alike(arm, its)  # before the minutes of measuring
    rows = []
    for folder, run in zip(folders, runs, strict=True):
        model = load_model(str(folder / LAST))
        faster_float32_products(model.config.n_embd, model.config.head_channels)
        for split in ("val", "train"):
            blocks = Blocks(run.config["data_dir"], split, model.config.block_size, model.n_vocab)
            evaluated = run.config["eval_tokens"] // blocks.block_size
            count = len(blocks) if split == "train" else min(len(blocks), evaluated)
            windows = np.linspace(0, count - 1, WINDOWS).astype(int).tolist()
            with torch.no_grad():
                stats = measure(model, *blocks.batch(windows))
            row = {
                "arm": run.arm,
                "seed": run.seed,
                "text": split,
                "windows": WINDOWS,
                "rms": float(stats.rms[-1]),
                "logit_norm": stats.logit_norm,
                "radial_gradient": stats.radial_gradient,
                **environment(torch.device("cpu")),
            }
            rows.append(row)
        print(folder.name, [f"{row['radial_gradient']:+.3f}" for row in rows[-2:]], flush=True)
    table = page(rows)
    write_results(target, "output_end", rows, "output_end.md", table)
    print(table)


def page(rows: list[dict[str, Any]]) -> str:
    """Return means and standard deviations over seeds, as a table."""
    cells = defaultdict(list)  # (arm, text) -> the three figures of each seed
    for row in rows:
        figures = [row["rms"], row["logit_norm"], row["radial_gradient"]]
        cells[row["arm"], row["text"]].append(figures)
    lines = []
    for (arm, split), values in cells.items():
        mean = np.mean(values, 0)  # (3,)
        sd = np.std(values, 0, ddof=1) if len(values) > 1 else np.full(3, np.nan)
        shown = zip(mean, sd, (".2f", ".1f", "+.3f"))
        spreads = [f"{m:{sign}} ({s:.2g})" for m, s, sign in shown]
        lines.append([f"`{arm}`", split, len(values), *spreads])
    head = ["arm", "text", "seeds", "RMS of the stream at the output (SD)"]
    return markdown([*head, "length of the logits (SD)", "radial gradient, nats (SD)"], lines)


if __name__ == "__main__":
    run_program(main, __doc__)
