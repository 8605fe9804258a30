"""Faults that tests inject into a training process, before it starts."""

import ctypes
import errno
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import model
import train
from common import norm_file
from common.distributed import share
from common.errors import UserError
from training import choices, dataloader, evaluation, run
from training.loop import Loop


def replaces(owner: object, name: str) -> Callable:
    """Decorate f(original, ...), which takes the place of a function or method of `owner`."""
    original = getattr(owner, name)

    def install(fault: Callable) -> None:
        setattr(owner, name, lambda *words, **keys: fault(original, *words, **keys))

    return install


def nan_loss(rank: int, step: int) -> None:
    """The loss of `rank` is NaN at `step`; its gradients are not."""

    @replaces(Loop, "_backward")
    def poisoned(original, self, batches):
        losses = original(self, batches)
        is_bad = self.step == step and self.ranks.rank == rank
        return losses * float("nan") if is_bad else losses


def die_after(step: int) -> None:
    """The process dies at once, with nothing flushed, when it has done `step` (as SIGKILL at that
    moment).
    """

    @replaces(train.NextToken, "prepare")
    def fatal(original, self, loop):
        if loop.step == step:
            os._exit(9)
        original(self, loop)


def slow_steps(seconds: float) -> None:
    """Every step takes at least `seconds`, so that a signal can be aimed at one."""

    @replaces(Loop, "_train_step")
    def slow(original, self, batches):
        time.sleep(seconds)
        return original(self, batches)


def other_data(rank: int) -> None:
    """One rank reads other tokens than the others."""
    other = "0" * (int(os.environ["RANK"]) == rank)

    @replaces(dataloader.Blocks, "fingerprint")
    def changed(original, self):
        return original(self) + other


def other_norm_file() -> None:
    """Each rank has another norm file."""

    @replaces(norm_file, "read_norm_file")
    def changed(original, *words):
        file = original(*words)
        return file._replace(content=file.content + f"# {os.environ['RANK']}".encode())


def other_place(**values: object) -> None:
    """The program believes that it runs in another place: other code, other versions."""

    @replaces(run, "environment")
    def elsewhere(original, device):
        return {**original(device), **values}


def other_out_dir(rank: int, folder: str) -> None:
    """One rank looks for checkpoints elsewhere, as on a machine of its own."""
    if int(os.environ["RANK"]) == rank:

        @replaces(run, "find_checkpoint")
        def elsewhere(original, out_dir, *words):
            return original(Path(folder), *words)


def record_samples(path: str) -> None:
    """Write the block numbers of every micro-batch this rank trains on, one file a rank."""

    @replaces(dataloader.TrainLoader, "sample_ids")
    def recorded(original, self, step, micro):
        ids = original(self, step, micro)
        with open(f"{path}.{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{step} {micro} {ids}\n")
        return ids


def bad_share(rank: int | None, step: int, name: str, value: str) -> None:
    """On `rank` alone, its share of a parameter's gradient begins with `value` at `step`."""

    @replaces(Loop, "_backward")
    def poisoned(original, self, batches):
        losses = original(self, batches)
        if self.step == step and rank in (None, self.ranks.rank):
            share(self.objective.parameters[name].grad).view(-1)[0] = float(value)
        return losses


def die_in_save(step: int) -> None:
    """The process dies when the checkpoint of `step` is written and has no name yet."""

    @replaces(Loop, "save")
    def fatal(original, self, name):
        if self.step == step:
            os.replace = lambda *paths: os._exit(9)
        original(self, name)
        if self.step == step:
            os._exit(9)  # another rank, which does not write


def small_machine(size: int) -> None:
    """The machine has `size` bytes of memory for a model."""
    model.machine_memory = lambda: size


def main_rank_fails(step: int) -> None:
    """What the main rank alone does fails, such as writing the log."""

    @replaces(Loop, "_log_step")
    def failing(original, self, report):
        if report.step == step and self.ranks.is_main:
            raise UserError("log.jsonl: cannot be written (No space left on device)")
        original(self, report)


def die_in_sample() -> None:
    """All steps are done and saved; the process is killed while it writes the final sample."""
    evaluation.Evaluator.write_sample = lambda *_: os._exit(9)


def fast_bfloat16(rank: int) -> None:
    """One rank is on a processor with fast bfloat16 products, the others are not. None goes on in
    another dtype than the rest.
    """
    has_it = int(os.environ.get("RANK", 0)) == rank
    choices.native_bfloat16 = train.native_bfloat16 = lambda: 64 if has_it else 0

    @replaces(Loop, "run")
    def checked(original, self):
        self.ranks.check_same(self.precision.dtype.itemsize, "dtypes differ")
        original(self)


def compile_with(backend: str) -> None:
    """torch.compile uses another backend: dynamo traces the same, and no C++ is compiled."""
    torch.compile = functools.partial(torch.compile, backend=backend)


def ranks_disagree() -> None:
    """Each rank of distill.py chooses an alpha of its own."""
    import distill

    @replaces(distill, "choose")
    def own(original, *words):
        plan, alpha = original(*words)
        return plan, tuple(value * (1 + 0.2 * int(os.environ["RANK"])) for value in alpha)


def infinite_weight(step: int) -> None:
    """The update of `step` makes a weight infinite, in the share of the last rank alone."""

    @replaces(train.NextToken, "prepare")
    def overflow(original, self, loop):
        if loop.step == step and loop.ranks.rank == loop.ranks.world_size - 1:
            share(self.model.wte.weight).data[0, 0] = float("inf")
        original(self, loop)


def fault_at(files: str, trace: str, mode: str, point: int, rank: int) -> None:
    """Call number `point` of `rank` that changes a file below `files` is killed or fails
    (preload.c); 0: none.
    """
    own = int(os.environ.get("RANK", 0))
    wish = str(getattr(errno, mode, mode)).encode()
    number = ctypes.c_long(point if own == rank else 0)
    ctypes.CDLL(None).fault_arm(files.encode(), f"{trace}.{own}".encode(), number, wish)
