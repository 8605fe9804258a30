"""Faults that tests inject into a training process, before it starts."""

import ctypes
import errno
import functools
import os
from pathlib import Path

import torch

from common.distributed import share
from common.errors import UserError
from training import loop, run
from training.loop import Loop


def nan_loss(rank: int, step: int) -> None:
    """The loss of `rank` is NaN at `step`, in forward and (through multiplication) in backward."""
    original = Loop._train_step

    def poisoned(self, batches):
        if self.step == step and self.ranks.rank == rank:
            model = self.objective.model
            forward = model.forward
            model.forward = lambda *words: tuple(part * float("nan") for part in forward(*words))
            try:
                return original(self, batches)
            finally:
                del model.forward
        return original(self, batches)

    Loop._train_step = poisoned


def nan_gradient(name: str, step: int) -> None:
    """The gradient of one parameter is NaN at `step`; the loss is sound."""
    original = Loop._train_step

    def poisoned(self, batches):
        parameter = self.objective.parameters[name]
        hook = (
            parameter.register_hook(lambda grad: grad * float("nan")) if self.step == step else None
        )
        try:
            return original(self, batches)
        finally:
            if hook is not None:
                hook.remove()

    Loop._train_step = poisoned


def die_after(step: int) -> None:
    """The process dies at once, with nothing flushed, when it has done `step` (as SIGKILL at that
    moment).
    """
    import train

    original = train.NextToken.prepare

    def fatal(self, loop):
        if loop.step == step:
            os._exit(9)
        original(self, loop)

    train.NextToken.prepare = fatal


def slow_steps(seconds: float) -> None:
    """Every step takes at least `seconds`, so that a signal can be aimed at one."""
    import time

    original = Loop._train_step

    def slow(self, batches):
        time.sleep(seconds)
        return original(self, batches)

    Loop._train_step = slow


def alone(seconds: float) -> None:
    """A rank waits so long for the others, of which it is told one more than there are."""
    import datetime

    from common import distributed

    distributed.PATIENCE = datetime.timedelta(seconds=seconds)
    os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) + 1)


def impatient(seconds: float) -> None:
    """A program waits so long for another one in its folder."""
    from common import lock

    lock.PATIENCE = seconds


def slow_distilling(seconds: float) -> None:
    """Every evaluation takes at least `seconds`."""
    import time

    import distill

    original = distill.Distillation.evaluate

    def slow(self, loop):
        time.sleep(seconds)
        original(self, loop)

    distill.Distillation.evaluate = slow


def other_data(rank: int) -> None:
    """One rank reads other tokens than the others."""
    if int(os.environ["RANK"]) == rank:
        from training import dataloader

        original = dataloader.Blocks.fingerprint
        dataloader.Blocks.fingerprint = lambda blocks: original(blocks) + "0"


def other_place(**values: object) -> None:
    """The program believes that it runs in another place: other code, other versions."""

    from training import provenance

    original = provenance.environment
    provenance.environment = lambda device: {**original(device), **values}


def other_out_dir(rank: int, folder: str) -> None:
    """One rank looks for checkpoints elsewhere, as on a machine of its own."""
    if int(os.environ["RANK"]) == rank:
        original = run.find_checkpoint
        run.find_checkpoint = lambda out_dir, *words: original(Path(folder), *words)


def record_samples(path: str) -> None:
    """Write the block numbers of every micro-batch this rank trains on, one file a rank."""
    from training.dataloader import TrainLoader

    original = TrainLoader.batches

    def recorded(self, first_step, rank, world_size, pin, at_once):
        assert at_once == 1
        with open(f"{path}.{rank}", "w") as file:
            for position, batch in enumerate(original(self, first_step, rank, world_size, pin)):
                step, micro = divmod(position, self.micro_batches // world_size)
                ids = self.sample_ids(first_step + step, micro * world_size + rank)
                expected = self.blocks.batch(ids)
                assert torch.equal(batch[0], expected[0]) and torch.equal(batch[1], expected[1])
                file.write(f"{first_step + step} {micro * world_size + rank} {ids}\n")
                file.flush()
                yield batch

    TrainLoader.batches = recorded


def bad_share(rank: int, step: int, name: str, value: float) -> None:
    """On `rank` alone, its share of a parameter's gradient begins with `value` at `step`."""
    original = Loop._train_step

    def poisoned(self, batches):
        def update(optimizer, scaler, parameters, *words):
            if self.step == step and rank in (None, self.ranks.rank):
                share(self.objective.parameters[name].grad).view(-1)[0] = value
            return guarded_update(optimizer, scaler, parameters, *words)

        loop.guarded_update = update
        return original(self, batches)

    guarded_update, Loop._train_step = loop.guarded_update, poisoned


def die_in_save(step: int) -> None:
    """The process dies when the checkpoint of `step` is written and has no name yet."""
    original = Loop.save

    def fatal(self, name):
        if self.step == step:
            os.replace = lambda *paths: os._exit(9)
        original(self, name)
        if self.step == step:
            os._exit(9)  # another rank, which does not write

    Loop.save = fatal


def small_machine(size: int) -> None:
    """The machine has `size` bytes of memory for a model."""
    import model

    model.machine_memory = lambda: size


def main_rank_fails(step: int) -> None:
    """What the main rank alone does fails, such as writing the log."""
    original = Loop._log_step

    def failing(self, report):
        if report.step == step and self.ranks.is_main:
            raise UserError("log.jsonl: cannot be written (No space left on device)")
        original(self, report)

    Loop._log_step = failing


def die_in_sample() -> None:
    """All steps are done and saved; the process is killed while it writes the final sample."""
    from training.evaluation import Evaluator

    Evaluator.write_sample = lambda *_: os._exit(9)


def fast_bfloat16(rank: int) -> None:
    """One rank is on a processor with fast bfloat16 products, the others are not. None goes on in
    another dtype than the rest.
    """
    from training import choices

    has_it = int(os.environ.get("RANK", 0)) == rank
    choices.native_bfloat16 = lambda: (64, "AMX") if has_it else (0, "")
    steps = Loop.run

    def checked(self):
        self.ranks.check_same(self.precision.dtype.itemsize, "dtypes differ")
        steps(self)

    Loop.run = checked


def compile_with(backend: str) -> None:
    """torch.compile uses another backend: dynamo traces the same, and no C++ is compiled."""
    torch.compile = functools.partial(torch.compile, backend=backend)


def ranks_disagree() -> None:
    """Each rank of distill.py chooses an alpha of its own."""
    import distill

    choose = distill.choose

    def own(*words):
        plan, alpha = choose(*words)
        return plan, tuple(value * (1 + 0.2 * int(os.environ["RANK"])) for value in alpha)

    distill.choose = own


def infinite_weight(step: int) -> None:
    """The update of `step` makes a weight infinite."""
    import train

    original = train.NextToken.prepare

    def overflow(self, loop):
        if loop.step == step:
            self.model.wte.weight.data[0, 0] = float("inf")
        original(self, loop)

    train.NextToken.prepare = overflow


def fault_at(files: str, trace: str, mode: str, point: int, rank: int) -> None:
    """Call number `point` of `rank` that changes a file below `files` is killed or fails
    (preload.c); 0: none.
    """
    from data.shakespeare_char import prepare

    prepare.__file__ = f"{files}/prepare.py"  # it writes beside itself
    own = int(os.environ.get("RANK", 0))
    wish = str(getattr(errno, mode, mode)).encode()
    number = ctypes.c_long(point if own == rank else 0)
    ctypes.CDLL(None).fault_arm(files.encode(), f"{trace}.{own}".encode(), number, wish)
