"""Where a program runs and in what precision: device, dtype, versions, clocks, peak speed."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
# What a commit must differ in to be other code; a bench may be writing to results meanwhile.
CODE = ("--", ".", ":!results", ":!docs", ":!tests", ":!*.md")
ONEDNN_PAYS = 1 << 13  # n_embd head_dim from which a whole step gains, measured (LOG.md)


def find_device(name: str) -> torch.device:
    """The device called auto (the first there is of cuda, mps, cpu), cuda, mps or cpu.

    Raises ConfigError.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    if not there[name]:
        raise ConfigError(f"device={name}: PyTorch finds no such device here: use --device=cpu")
    return torch.device(name)


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees: a step on a CPU frees and asks for the same large
    blocks each time, and pages that go back to the system must be zeroed and mapped anew. Does
    nothing where there is no glibc.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: blocks below 1 GiB come from the heap
        libc.mallopt(
            -1, (1 << 31) - 1
        )  # M_TRIM_THRESHOLD: the heap shrinks only beyond 2 GiB of free space


def faster_float32_products(n_embd: int, head_dim: int) -> None:
    """Have oneDNN do float32 products on AMD's CPUs with AVX-512, of which MKL uses no more than
    AVX2: twice as fast.

    PyTorch grants oneDNN leave to round to bfloat16 along with it. Only where a CPU has AMX does it
    make use of that, and there this does nothing. A call costs some 15 us more: attention with many
    small products would lose by it.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return
    if (
        "AuthenticAMD" in cpu
        and "avx512" in cpu
        and "amx" not in cpu
        and n_embd * head_dim >= ONEDNN_PAYS
    ):
        torch.set_float32_matmul_precision("medium")


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of this name, one of DTYPES, or auto: bfloat16 on CUDA, else float32."""
    return DTYPES[name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"]


class Precision:
    """What a run on `device` computes in; `name` as for find_dtype.

    Weights are float32 (float64 only if all is), low precision comes by autocast; float16 scales
    its loss.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = find_dtype(name, device)
        self.is_low = self.dtype in (torch.bfloat16, torch.float16)
        self.weights = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Forward passes run within; does nothing in float32 and float64."""
        return (
            torch.autocast(self.device.type, self.dtype)
            if self.is_low
            else contextlib.nullcontext()
        )


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to place a measurement: commit, versions, device."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({_processor()})"
    )
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **installed("numpy"),
    }
    products = torch.get_float32_matmul_precision()
    place = {
        "git": _git_commit(),
        "versions": versions,
        "device": name,
        "float32_products": products,
    }
    if device.type == "cuda":
        versions |= installed("triton") | {"cuda": torch.version.cuda}
        place["clocks"] = clocks(device)
    return place


def timing_environment(device: torch.device) -> dict[str, Any]:
    """`environment`, and what else a bench on a CPU depends on: threads, and the load average
    before it.
    """
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return environment(device) | {"threads": torch.get_num_threads(), "load_average": load}


def clocks(device: torch.device) -> str:
    """Clocks and power of a GPU as its driver tells them; empty without the driver's program."""
    names = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    try:
        words = [
            "nvidia-smi",
            f"--query-gpu={names}",
            "--format=csv,noheader",
            f"--id={device.index or 0}",
        ]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        return f"{names}: {told}"
    except (OSError, subprocess.CalledProcessError):
        return ""


def installed(*packages: str) -> dict[str, str]:
    """Versions of those of these packages that are there."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _processor() -> str:
    """Model name and number of cores of the CPU."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    return f"{name}, {os.cpu_count()} cores"


def _git(*words: str) -> str:
    """What git prints, in this repository. Raises OSError and CalledProcessError."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _git_commit() -> str | None:
    """Commit of the source tree, with `+` if its code has uncommitted changes; of an installed
    package its version. Outside a repository (a mere copy of the files) what NANONORM_COMMIT says,
    or None.
    """
    if __package__ != "common":  # installed, and the repository around it is the user's
        return "nanonorm " + installed("nanonorm").get("nanonorm", "of unknown version")
    try:
        return _git("rev-parse", "HEAD") + (
            "+" if _git("status", "--porcelain", "--untracked-files=no", *CODE) else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("NANONORM_COMMIT")


def is_same_code(then: str | None, now: str | None) -> bool:
    """Do two commits differ in results and texts alone? False where one is not there, or has
    uncommitted changes.
    """
    if not all(re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit or "") for commit in (then, now)):
        return False
    try:
        _git("diff", "--quiet", "--end-of-options", then, now, *CODE)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


# Dense bf16 peak, FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak of a known GPU; None for every other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)
