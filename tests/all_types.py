"""A program for tests: a short run of every norm type, one after the other in one process.

all_types.py whole DATA FOLDER    40 steps; a copy of the checkpoint after step 20 is kept
all_types.py rest DATA FOLDER     steps 21 to 40 again, from that copy, without evaluations
"""

import shutil
from pathlib import Path

from helpers import TINY, keys_of

import train
from norm_types import NORM_TYPES
from training.checkpoint import LAST
from training.loop import Loop

KEPT = "kept.pt"
COMMON = (
    *TINY,
    "--dtype=float64",
    "--lr_schedule=constant",
    "--gradient_accumulation_steps=2",
    "--eval_tokens=64",
)


def save_two(self: Loop, name: str, save=Loop.save) -> None:
    """Save after steps 20 and 40 only, and keep a copy of the first checkpoint."""
    if name != LAST or self.step not in (20, 40):
        return
    save(self, name)
    if self.step == 20:
        shutil.copy(self.folder.path / LAST, self.folder.path / KEPT)


def main(argv: list[str]) -> None:
    phase, data, folder = argv
    Loop.save = save_two
    for norm_type in NORM_TYPES:
        words = [*COMMON, *keys_of(norm_type), f"--data_dir={data}"]
        words.append(f"--out_dir={Path(folder) / phase / norm_type}")
        if phase == "whole":
            words.append("--eval_interval=10")
        else:
            words.append(f"--resume={Path(folder) / 'whole' / norm_type / KEPT}")
        train.main(words)
