"""Run a program under a setting that it has no key for, or say what attention runs with here.

    python repro/gpu_first.py attention
    python repro/gpu_first.py sync train config/rms.py --max_iters=15
    python repro/gpu_first.py cudnn bench.train config/rms.py --profile
    python repro/gpu_first.py warps=24 bench.kernels --ops=taper_norm --channels=768
    torchrun --standalone --nproc_per_node=8 repro/gpu_first.py optimize_ddp=False train \\
      config/rms.py

attention         the order of attention's backends, and the kernels of a training step, of a masked
                  call with grouped heads, and of PyTorch's RMSNorm (is it quack's?)
sync              warn where the host waits for the GPU
cudnn             attention by cuDNN alone
aten              PyTorch's own RMSNorm, where torch >= 2.13 puts quack's in its place
warps=N           warps of a backward kernel on each multiprocessor (kernels/rows.py has 32)
optimize_ddp=...  whether torch.compile cuts the model where DDP's buckets end (True or False)
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench.kernels
import bench.train
import train
from bench.kernel_arms import torch_runs_quack
from bench.train_profile import profile_step
from common.environment import find_device
from common.errors import ConfigError, run_program
from kernels import rows
from model import GPT, GPTConfig

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


def attention() -> None:
    """Print what decides which kernels attention runs with, and the kernels."""
    device = find_device("auto")
    model = GPT(GPTConfig(vocab_size=1024, n_layer=1, n_head=2, n_embd=128)).to(device)
    idx = torch.randint(1024, (2, 1024), device=device)
    tensor = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(8, 32, 1, 64, **tensor)  # one new token
    k, v = torch.randn(2, 8, 8, 1024, 64, **tensor)  # and its cache
    mask = torch.ones(8, 1, 1, 1024, dtype=torch.bool, device=device)
    x, gain = torch.randn(4096, 768, **tensor), torch.ones(768, **tensor)

    def training_step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss, _ = model(idx, idx)
        loss.backward()
        return loss

    calls = {
        "a training step": training_step,
        "a masked call with grouped heads": lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        ),
        "torch's rms_norm": lambda: F.rms_norm(x, (768,), gain),
    }
    order = [backend.name for backend in map(SDPBackend, torch._C._get_sdp_priority_order())]
    print("attention's backends, first choice first:", *order)
    print("torch's rms_norm is quack's:", torch_runs_quack())
    for what, call in calls.items():
        call()  # the first one compiles
        print(f"kernels of {what}:")
        for kernel in profile_step(call, device):
            print(f"  {kernel['us']:.1f} us, {kernel['class']}: {kernel['name']}")


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(__doc__)
    elif argv == ["attention"]:
        attention()
    elif argv[1:2] and argv[1] in PROGRAMS:
        with apply(argv[0]):
            PROGRAMS[argv[1]](argv[2:])
    else:
        raise ConfigError(f"name a setting and one of {', '.join(PROGRAMS)}: see --help")


if __name__ == "__main__":
    run_program(main)
