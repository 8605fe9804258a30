"""Run a program under a setting that it has no key for.

    python -m repro.gpu_first sync train config/rms.py --max_iters=15
    python -m repro.gpu_first cudnn bench.train config/rms.py --profile
    python -m repro.gpu_first warps=24 bench.kernels --ops=taper_norm --channels=768
    torchrun --standalone --nproc_per_node=8 -m repro.gpu_first optimize_ddp=False train \\
      config/rms.py

sync              warn where the host waits for the GPU
cudnn             attention by cuDNN alone
aten              PyTorch's own RMSNorm, where torch >= 2.13 puts quack's in its place
warps=N           warps of a backward kernel on each multiprocessor (kernels/rows.py has 32)
optimize_ddp=...  whether torch.compile cuts the model where DDP's buckets end (True or False)
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench.kernels
import bench.train
import train
from common.errors import ConfigError, run_program
from kernels import rows

PROGRAMS = {
    "train": train.main,
    "bench.train": bench.train.main,
    "bench.kernels": bench.kernels.main,
}


def apply(setting: str) -> AbstractContextManager:
    """Make a setting; what has to last as long as the program is returned. Raises ConfigError."""
    name, _, value = setting.partition("=")
    if name == "sync":
        torch.cuda.set_sync_debug_mode("warn")
    elif name == "cudnn":
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    elif name == "aten":
        from torch._native.registry import deregister_op_overrides

        deregister_op_overrides(disable_dsl_names="cutedsl")
    elif name == "warps":
        rows.WARPS_PER_SM = int(value)
    elif name == "optimize_ddp":
        torch._dynamo.config.optimize_ddp = value == "True"
    else:
        raise ConfigError(f"{setting}: no such setting: see --help")
    return nullcontext()


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(__doc__)
    elif argv[1:2] and argv[1] in PROGRAMS:
        with apply(argv[0]):
            PROGRAMS[argv[1]](argv[2:])
    else:
        raise ConfigError(f"name a setting and one of {', '.join(PROGRAMS)}: see --help")


if __name__ == "__main__":
    run_program(main)
