"""The processes of a run, one or those of torchrun, and two ways to train on several (--parallel).

    ddp   each rank holds the whole model
    fsdp  each rank holds a share of weights, gradients and optimiser state (PyTorch's FSDP2)

Both compute the same. Weights stay float32, low precision comes by autocast, and norms reduce their
statistics over ranks themselves.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.environment import find_device, keep_freed_memory
from common.errors import ConfigError, UserError

T = TypeVar("T")
# How long a rank waits for the others, at the start and in each collective operation.
PATIENCE = timedelta(minutes=10)
# MiB of gradients that DDP reduces at once. Compiled, the graph is cut where a bucket ends, and
# what crosses a cut is written and read in float32: with DDP's 25 MiB GPT-2 124M has 13 cuts and
# 76.8 kB a token, with 100 MiB 4 cuts and 20.0 kB.
BUCKET = 100


class StopSignal:
    """Note SIGTERM, SIGINT and SIGHUP in `name` ("" before), for a loop that stops after its step.

    SIGHUP means that the terminal was closed; under nohup it is ignored, and stays so. Launchers
    send SIGTERM more than once, so only Ctrl-C after one of them ends the process at once.
    """

    def __init__(self):
        self.name = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.name:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.name = signal.Signals(number).name


@dataclass(frozen=True)
class Ranks:
    """Place of this process among all, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def start(cls, device: str, micro_batches: int = 0) -> "Ranks":
        """Join the process group that torchrun announces, if there is one.

        Args:
            device: auto, cpu, cuda or mps.
            micro_batches: of a step, over all ranks.

        Raises:
            ConfigError: the ranks do not divide the micro-batches.
        """
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        if micro_batches % world_size:
            raise ConfigError(
                f"gradient_accumulation_steps={micro_batches} counts over all ranks, and "
                f"{world_size} ranks do not divide it: change one of them"
            )
        own = find_device(device)
        if own.type == "cpu":
            keep_freed_memory()
        if own.type == "cuda":
            own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(own)
            torch.set_float32_matmul_precision("high")  # TF32, if a run computes in float32
        if "RANK" in os.environ:
            backend, place = ("nccl", own) if own.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, timeout=PATIENCE, device_id=place)
        return cls(rank, world_size, own)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *problem: object) -> None:
        # After an error the others may not come to the same place.
        if self.are_joined and problem[0] is None:
            dist.destroy_process_group()

    @property
    def are_joined(self) -> bool:
        """Has torchrun started this process?"""
        return dist.is_initialized()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def deal(self, items: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's part of `items`, the same number on every rank.

        A rank that runs out gets the first item again, which does not count: under FSDP all ranks
        must take part in each forward.

        Yields:
            (item, whether it counts)
        """
        for start in range(0, len(items), self.world_size):
            counts = start + self.rank < len(items)
            yield items[start + self.rank if counts else 0], counts

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def together(self, action: Callable[[], T]) -> T:
        """Do `action` on every rank. If it fails on one of them, it fails on all.

        Args:
            action: must not communicate between ranks.

        Raises:
            UserError: on every rank, that of the first rank where it failed, for rank 0 to print.
        """
        result = None
        problem = None
        try:
            result = action()
        except Exception as error:
            problem = error
        if self.world_size > 1:
            problem = self._first_problem(problem)
        if problem is not None:
            raise problem
        return result

    def of_main(self, value: T) -> T:
        """Return the main rank's `value`, on every rank."""
        return self.of_all(value)[0]

    def of_all(self, value: T) -> list[T]:
        """Return every rank's `value`, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def _first_problem(self, own: Exception | None) -> Exception | None:
        """Find the exception of the first rank that has one; all ranks must call this.

        A rank whose own exception is not a UserError keeps that one, with its traceback.
        """
        is_unexpected = own is not None and not isinstance(own, UserError)
        sent: Any = own
        if is_unexpected:
            sent = UserError(f"rank {self.rank} failed: {type(own).__name__}: {own}")
        first = next(filter(None, self.of_all(sent)), None)
        if first is None or is_unexpected:
            return own
        first.on_every_rank = True
        return first

    def check_same(self, value: Any, problem: str) -> None:
        """Raise UserError(problem) on every rank unless their values are the same."""
        values = self.of_all(value)
        if values != values[:1] * len(values):
            error = UserError(problem)
            error.on_every_rank = True
            raise error


# ------------------------------------------------------------------------------------ DDP and FSDP2

# FSDP2 and DTensor are imported where they are used: importing them takes a second, and most
# programs never need them.


def shard(model: nn.Module, device: torch.device) -> None:
    """Have FSDP2 divide the parameters of a GPT among all ranks, row by row, in place.

    It must come before the optimiser, because it replaces the parameters. The weights of a block
    are gathered for its forward and again for its backward; the rest (embeddings, head, last norm)
    once for both. Blocks move to `device` one by one, so that it never holds the whole model.
    Buffers are not sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    # FSDP2 takes the module whose forward runs first to be the root. Without this forward of the
    # whole model, that might be a block (see gather_root).
    with torch.no_grad():
        model.eval()(torch.zeros(1, 1, dtype=torch.long, device=device))
    model.train().reshard()


def is_sharded(part: Any) -> bool:
    """Tell whether `part`, a model or a tensor of one, is sharded."""
    return hasattr(part, "unshard") or hasattr(part, "to_local")


def replicate(model: nn.Module) -> nn.Module:
    """Put DDP around `model`, if torchrun has started this process.

    Norms reduce their statistics over ranks themselves: DDP must not copy those of rank 0.
    """
    if not dist.is_initialized():
        return model
    with warnings.catch_warnings():
        # torch 2.13 has a new name for this argument, which torch 2.11 does not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET
        )


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager:
    """Make the context for forward and backward of a micro-batch.

    DDP adds up gradients on each rank, and reduces them after the `last` micro-batch. FSDP reduces
    after each, because each rank would have to keep whole float32 gradients. That costs one
    reduce-scatter more for each micro-batch, next to its two all-gathers.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def gather_root(model: nn.Module) -> None:
    """Gather the parameters that are in no block, before `model.hidden` or `model.logits`.

    FSDP gathers them in forward only.
    """
    if is_sharded(model):
        model.unshard()


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor, if FSDP has sharded it. Then all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def share(tensor: Tensor) -> Tensor:
    """Take this rank's share of a tensor, if FSDP has sharded it. No copy: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def cut(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Cut this rank's share out of a whole tensor, as a copy, if `like` is sharded."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor, so none of them needs to send it.
    part = distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    return torch.empty_like(like).copy_(part)


def gathered(value: Any, keep: bool) -> Any:
    """Gather the sharded tensors in nested dicts one by one. All ranks must call this.

    They are in host memory then, of the ranks that `keep` them. The others get None.
    """
    if isinstance(value, dict):
        return {name: gathered(part, keep) for name, part in value.items()}
    if not is_sharded(value):
        return value
    tensor = whole(value)
    return tensor.cpu() if keep else None
