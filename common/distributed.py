"""The processes of a run, one or those of torchrun, and two ways to train on several
(`--parallel`).

ddp: each rank holds everything. fsdp: each holds a share of weights, gradients and optimiser state
(PyTorch's FSDP2). Both compute the same: weights stay float32, low precision comes by autocast, and
norms reduce their statistics over ranks themselves.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.environment import find_device, keep_freed_memory
from common.errors import ConfigError, UserError

T = TypeVar("T")


class StopSignal:
    """Notes SIGTERM and SIGINT in `name` ("" before), for a loop that stops after its step.
    Launchers send SIGTERM more than once; a second Ctrl-C means it, and ends the process at once.
    """

    def __init__(self):
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.name:
            signal.signal(number, signal.SIG_DFL)
        self.name = signal.Signals(number).name


@dataclass(frozen=True)
class Ranks:
    """Place of this process among all, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def start(cls, device: str, micro_batches: int = 0) -> "Ranks":
        """Join the process group that torchrun announces. `device` is auto, cpu, cuda or mps.

        Raises ConfigError if `micro_batches` cannot be dealt out evenly.
        """
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if micro_batches % world_size:
            raise ConfigError(
                f"gradient_accumulation_steps={micro_batches} counts over all ranks, and "
                f"{world_size} ranks do not divide it: change one of them"
            )
        place = find_device(device)
        if place.type == "cpu":
            keep_freed_memory()
        if place.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {rank} finds no GPU, there are {torch.cuda.device_count()}: "
                    "start fewer ranks"
                )
            place = torch.device("cuda", local)
            torch.cuda.set_device(place)
            torch.set_float32_matmul_precision("high")  # TF32 where a run computes in float32
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(rank, world_size, place)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def deal(self, items: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """(item, does it count) for this rank's part of `items`, equally many on every rank: one
        that runs out does the first item again, for nothing, because under FSDP all ranks must take
        part in each forward.
        """
        for start in range(0, len(items), self.world_size):
            counts = start + self.rank < len(items)
            yield items[start + self.rank if counts else 0], counts

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world_size > 1:
            dist.barrier()

    def together(self, action: Callable[[], T]) -> T:
        """Do `action` on every rank; it may not communicate. Where it fails on one rank, all of
        them end.

        Raises:
            UserError: on every rank that of the first rank where it failed, for rank 0 to print.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = error
        if self.world_size > 1:
            problem = self._first_problem(problem)
        if problem is not None:
            raise problem
        return result

    def _first_problem(self, own: Exception | None) -> Exception | None:
        """The exception of the first rank that has one. An unexpected one stays with its rank."""
        told = None
        if own is not None:
            text = (
                str(own)
                if isinstance(own, UserError)
                else f"rank {self.rank} failed: {type(own).__name__}: {own}"
            )
            told = text, getattr(own, "exit_code", 1)
        everyone: list[tuple[str, int] | None] = [None] * self.world_size
        dist.all_gather_object(everyone, told)
        first = next(filter(None, everyone), None)
        if first is None or not (own is None or isinstance(own, UserError)):
            return own
        problem = UserError(first[0])
        problem.exit_code, problem.on_every_rank = first[1], True
        return problem

    def check_same(self, number: int, error: UserError) -> None:
        """Raise `error` on every rank, for rank 0 to print, unless their numbers are the same."""
        bounds = torch.tensor([number, -number], device=self.device)
        if self.world_size > 1:
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
        if bounds.sum() != 0:
            error.on_every_rank = True
            raise error


# ------------------------------------------------------------------------------------ DDP and FSDP2

# FSDP2 and DTensor are imported where they are used: that takes a second, and most programs never
# need it.


def shard(model: nn.Module, device: torch.device) -> None:
    """Have FSDP2 share the parameters of a GPT out, row by row, over all ranks; in place, before
    the optimiser.

    A block's weights are gathered when its turn comes, forward and backward; the rest (embeddings,
    head, last norm) once for both. Blocks move to `device` one by one, so that it never holds the
    whole model. Buffers are not sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    with (
        torch.no_grad()
    ):  # FSDP2 takes what runs first for the root of all, and that may be a block (gather_root)
        model.eval()(torch.zeros(1, 1, dtype=torch.long, device=device))
    model.train().reshard()


def is_sharded(part: nn.Module | Tensor) -> bool:
    """Is it a model, or a tensor of one, that `shard` has shared out?"""
    return hasattr(part, "unshard") or hasattr(part, "to_local")


def replicate(model: nn.Module) -> nn.Module:
    """`model` behind DDP.

    Norms settle their statistics alike on all ranks: DDP must not copy rank 0's over them.
    """
    with warnings.catch_warnings():  # of torch 2.13, whose new name for it 2.11 does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager:
    """Around a micro-batch's forward and backward. DDP adds up gradients on each rank and reduces
    them after the `last` one; FSDP reduces each time, because whole gradients are what does not
    fit.
    """
    return (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not last
        else nullcontext()
    )


def gather_root(model: nn.Module) -> None:
    """Gather what is in no block, for a caller of `model.hidden` or `model.logits`: FSDP does that
    on forward only.
    """
    if is_sharded(model):
        model.unshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP may have sharded, gathered; every rank must ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def share(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor that FSDP may have sharded; the very memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor
