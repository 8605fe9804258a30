"""Faults that tests inject into a training process, before it starts."""

import os

import torch

import train


def nan_loss(rank: int, step: int) -> None:
    """The loss of `rank` is NaN at `step`, in forward and (through multiplication) in backward."""
    original = train.Trainer._train_step

    def poisoned(self, batches):
        if self.step == step and self.ranks.rank == rank:
            forward = self.model.forward
            self.model.forward = lambda *words: tuple(part * float("nan") for part in forward(*words))
            try:
                return original(self, batches)
            finally:
                del self.model.forward
        return original(self, batches)

    train.Trainer._train_step = poisoned


def nan_gradient(name: str, step: int) -> None:
    """The gradient of one parameter is NaN at `step`; the loss is sound."""
    original = train.Trainer._train_step

    def poisoned(self, batches):
        parameter = dict(self.model.named_parameters())[name]
        hook = parameter.register_hook(lambda grad: grad * float("nan")) if self.step == step else None
        try:
            return original(self, batches)
        finally:
            if hook is not None:
                hook.remove()

    train.Trainer._train_step = poisoned


def die_after(step: int) -> None:
    """The process dies at once, with nothing flushed, when it has done `step` (as SIGKILL at that moment)."""
    original = train.Trainer._next_step

    def fatal(self):
        if self.step == step:
            os._exit(9)
        original(self)

    train.Trainer._next_step = fatal


def slow_steps(seconds: float) -> None:
    """Every step takes at least `seconds`, so that a signal can be aimed at one."""
    import time

    original = train.Trainer._train_step

    def slow(self, batches):
        time.sleep(seconds)
        return original(self, batches)

    train.Trainer._train_step = slow


def record_samples(path: str) -> None:
    """Write the block numbers of every micro-batch this rank trains on, one file a rank."""
    original = train.TrainLoader.batches

    def recorded(self, first_step, rank, world_size, pin):
        with open(f"{path}.{rank}", "w") as file:
            for position, batch in enumerate(original(self, first_step, rank, world_size, pin)):
                step, micro = divmod(position, self.micro_batches // world_size)
                ids = self.sample_ids(first_step + step, micro * world_size + rank)
                expected = self.blocks.batch(ids)
                assert torch.equal(batch[0], expected[0]) and torch.equal(batch[1], expected[1])
                file.write(f"{first_step + step} {micro * world_size + rank} {ids}\n")
                file.flush()
                yield batch

    train.TrainLoader.batches = recorded
