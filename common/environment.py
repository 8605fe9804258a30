"""Where a program runs and in what precision: device, dtype, versions, clocks, peak speed."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
import zlib
from pathlib import Path
from typing import Any

import torch

from .code_digest import ROOT
from .errors import ConfigError

# What git compares to tell whether two commits differ in code. A bench may be writing to results/.
CODE = ("--", ".", ":!results", ":!docs", ":!tests", ":!config", ":!*.md")
# Instructions that a product may be made of
ROUNDING = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# What of it no training run imports
NOT_TRAINING = (":!bench", ":!repro", ":!evidence", ":!study", ":!report.py", ":!sweep.sh")
# n_embd * head_dim from which oneDNN makes a whole training step faster, measured (docs/log.md).
ONEDNN_PAYS = 1 << 13


def find_device(name: str) -> torch.device:
    """Find the device called `name`: cuda, mps, cpu, or auto for the first available of them.

    Raises ConfigError if PyTorch finds no such device.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if not available[name]:
        raise ConfigError(f"device={name}: PyTorch finds no such device here: use --device=cpu")
    return torch.device(name)


def keep_freed_memory() -> None:
    """Have glibc keep the memory that this process frees.

    A training step on a CPU frees and allocates the same large blocks each time. Pages that go back
    to the system in between must be mapped and zeroed again. Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # M_MMAP_THRESHOLD: blocks below 1 GiB come from the heap.
        libc.mallopt(-3, 1 << 30)
        # M_TRIM_THRESHOLD: the heap shrinks only beyond 2 GiB of free space.
        libc.mallopt(-1, (1 << 31) - 1)


def machine_memory() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpuinfo() -> str:
    """Read what Linux says of the processor; "" elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def faster_float32_products(n_embd: int, head_dim: int) -> None:
    """Have oneDNN do float32 matrix products on AMD CPUs with AVX-512: twice as fast.

    There MKL uses AVX2 only. The setting "medium" also allows oneDNN to round to bfloat16, which it
    does on CPUs with AMX only; on those this function does nothing. A call of oneDNN costs about
    15 us more, so attention with many small products would become slower.
    """
    cpu = cpuinfo()
    is_slow_with_mkl = "AuthenticAMD" in cpu and "avx512" in cpu
    if is_slow_with_mkl and "amx" not in cpu and n_embd * head_dim >= ONEDNN_PAYS:
        torch.set_float32_matmul_precision("medium")


DTYPES = ("float64", "float32", "bfloat16", "float16")  # as in torch


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Find the dtype of this name, one of DTYPES, or auto: bfloat16 on CUDA, else float32."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


class Precision:
    """The precision of a run on `device`; `name` is one of find_dtype's.

    Weights are float32, and float64 in a float64 run. Low precision comes by autocast. float16
    scales its loss.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = find_dtype(name, device)
        self.is_low = self.dtype in (torch.bfloat16, torch.float16)
        self.weights = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Make the context for forward passes; it does nothing in float32 and float64."""
        if not self.is_low:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def environment(device: torch.device) -> dict[str, Any]:
    """Describe where a measurement was made: commit, versions, device."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **installed("numpy"),
    }
    processor = _first_core().get("model name") or platform.processor() or platform.machine()
    place = {
        "git": _git_commit(),
        "versions": versions,
        "device": f"{device.type} ({processor}, {os.cpu_count()} cores)",
        "float32_products": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        place["processor"] = _kind_of_processor()
    if device.type == "cuda":
        place["device"] = torch.cuda.get_device_name(device)
        versions |= installed("triton") | {"cuda": torch.version.cuda}
        place["clocks"] = clocks(device)
    return place


def timing_environment(device: torch.device) -> dict[str, Any]:
    """Describe what a timing depends on: `environment`, threads, and the load average before it."""
    load = round(os.getloadavg()[0], 1)
    return environment(device) | {"threads": torch.get_num_threads(), "load_average": load}


def clocks(device: torch.device) -> str:
    """Read clocks and power of a GPU from nvidia-smi; "" without that program."""
    names = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = [
        "nvidia-smi",
        f"--query-gpu={names}",
        "--format=csv,noheader",
        f"--id={device.index or 0}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{names}: {done.stdout.strip()}"


def installed(*packages: str) -> dict[str, str]:
    """Find the versions of `packages`; those that are not installed are left out."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _kind_of_processor() -> str:
    """Say what decides how a CPU rounds: vendor, family, model, and instructions for vectors.

    The name of a virtual machine's processor does not tell.
    """
    found = _first_core()
    if "flags" not in found:
        return platform.processor() or platform.machine()
    kinds = [kind for kind in ROUNDING if kind in found["flags"].split()]
    model = f"family {found.get('cpu family')} model {found.get('model')}"
    return " ".join([found.get("vendor_id", "?"), model, *kinds])


def _first_core() -> dict[str, str]:
    """Return what Linux says of the first core, by field; {} elsewhere."""
    found: dict[str, str] = {}
    for line in cpuinfo().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _git(*arguments: str) -> str:
    """Run git in this repository. Raises OSError and CalledProcessError."""
    command = ["git", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="surrogateescape", check=True
    )
    return done.stdout.strip()


def _git_commit() -> str | None:
    """Find the commit of the source tree.

    Returns:
        The commit; if its code has uncommitted changes, with `+` and their CRC-32. For an installed
        package its version. For a copy of the files without a repository, the environment variable
        NANONORM_COMMIT, or None.
    """
    if __package__ != "common":  # installed: a repository around it would be the user's
        return "nanonorm " + installed("nanonorm").get("nanonorm", "of unknown version")
    try:
        commit = _git("rev-parse", "HEAD")
        # As the bytes are, whatever the user's git shows them with
        plain = ("--no-ext-diff", "--no-textconv", "--no-color")
        uncommitted = _git("diff", *plain, "HEAD", *CODE)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("NANONORM_COMMIT")
    if not uncommitted:
        return commit
    return f"{commit}+{zlib.crc32(uncommitted.encode(errors='surrogateescape')):08x}"


def is_same_code(then: str | None, now: str | None) -> bool:
    """Tell whether a training run computes the same at two commits: no code of it differs.

    False if one of them is unknown here, or has uncommitted changes.
    """
    try:
        _git("diff", "--quiet", "--end-of-options", str(then), str(now), *CODE, *NOT_TRAINING)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


# Dense bfloat16 peak, FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    "B300": 2250e12,
    "B200": 2250e12,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Look up the peak of a GPU, FLOP/s; None for every other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)
