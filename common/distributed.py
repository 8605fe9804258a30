"""The processes of a run: torchrun's environment, or a single process."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError

ONEDNN_PAYS = 1 << 13  # n_embd head_dim from which a whole step gains, measured (LOG.md)


def find_device(name: str) -> torch.device:
    """The device called auto (the first there is of cuda, mps, cpu), cuda, mps or cpu. Raises ConfigError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    if not there[name]:
        raise ConfigError(f"device={name}: PyTorch finds no such device here: use --device=cpu")
    return torch.device(name)


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees: a step on a CPU frees and asks for the same large blocks each time, and
    pages that go back to the system must be zeroed and mapped anew. Does nothing where there is no glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: blocks below 1 GiB come from the heap
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap shrinks only beyond 2 GiB of free space


def faster_float32_products(n_embd: int, head_dim: int) -> None:
    """Have oneDNN do float32 products on AMD's CPUs with AVX-512, of which MKL uses no more than AVX2: twice as fast.

    PyTorch grants oneDNN leave to round to bfloat16 along with it. Only where a CPU has AMX does it make use of that,
    and there this does nothing. A call costs some 15 us more: attention with many small products would lose by it.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    if "AuthenticAMD" in cpu and "avx512" in cpu and "amx" not in cpu and n_embd * head_dim >= ONEDNN_PAYS:
        torch.set_float32_matmul_precision("medium")


class StopSignal:
    """Notes SIGTERM and SIGINT in `name` ("" before), for a loop that stops after its step. Launchers send SIGTERM more
    than once; a second Ctrl-C means it, and ends the process at once."""

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
                f"gradient_accumulation_steps={micro_batches} counts over all ranks, and {world_size} ranks do not "
                "divide it: change one of them"
            )
        place = find_device(device)
        if place.type == "cpu":
            keep_freed_memory()
        if place.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", 0))
            if local >= torch.cuda.device_count():
                raise ConfigError(f"rank {rank} finds no GPU, there are {torch.cuda.device_count()}: start fewer ranks")
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
        """(item, does it count) for this rank's part of `items`, equally many on every rank: one that runs out does the
        first item again, for nothing, because under FSDP all ranks must take part in each forward."""
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

    def agree(self, number: float) -> bool:
        """Have all ranks the same number?"""
        bounds = torch.tensor([number, -number], device=self.device)
        if self.world_size > 1:
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bool(bounds.sum() == 0)
