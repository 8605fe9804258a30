"""A program for tests: a short run of every norm type, one after the other in one process.

all_types.py whole DATA FOLDER    40 steps; a copy of the checkpoint after step 20 is kept
all_types.py rest DATA FOLDER     steps 21 to 40 again, from that copy, without evaluations
all_types.py ranks DATA FOLDER    the first 12 steps, for several ranks
"""

import shutil
from pathlib import Path

import torch.distributed as dist
from helpers import TINY, keys_of

import train
from norm_types import NORM_TYPES
from training.checkpoint import LAST
from training.loop import Loop

KEPT = "kept.pt"
# Settings of the three phases. With float64, two numbers of ranks agree to rounding.
COMMON = (
    *TINY,
    "--dtype=float64",
    "--lr_schedule=constant",
    "--gradient_accumulation_steps=2",
    "--eval_tokens=64",
)
PHASES = {
    "whole": ("--eval_interval=5",),
    "rest": ("--eval_interval=1000",),
    "ranks": ("--eval_interval=1000", "--max_iters=12"),
}


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
    start, end = dist.init_process_group, dist.destroy_process_group
    # One group serves all runs: a second one would need a port of its own.
    dist.init_process_group = lambda *words, **keys: (
        None if dist.is_initialized() else start(*words, **keys)
    )
    dist.destroy_process_group = lambda: None
    for norm_type in NORM_TYPES:
        words = [*COMMON, *PHASES[phase], *keys_of(norm_type), f"--data_dir={data}"]
        words.append(f"--out_dir={Path(folder) / phase / norm_type}")
        if phase == "rest":
            words.append(f"--resume={Path(folder) / 'whole' / norm_type / KEPT}")
        train.main(words)
    if dist.is_initialized():
        end()
