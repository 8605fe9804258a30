"""Two ways to train on several ranks (`--parallel`): ddp, where each holds everything, and fsdp, where each holds a
share of weights, gradients and optimiser state (PyTorch's FSDP2). Both compute the same: weights stay float32, low
precision comes by autocast, and norms reduce their statistics over ranks themselves.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# FSDP2 and DTensor are imported where they are used: that takes a second, and most programs never need it.


def shard(model: nn.Module, device: torch.device) -> None:
    """Have FSDP2 share the parameters of a GPT out, row by row, over all ranks; in place, before the optimiser.

    A block's weights are gathered when its turn comes, forward and backward; the rest (embeddings, head, last norm)
    once for both. Blocks move to `device` one by one, so that it never holds the whole model. Buffers are not sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    with torch.no_grad():  # FSDP2 takes what runs first for the root of all, and that may be a block (gather_root)
        model.eval()(torch.zeros(1, 1, dtype=torch.long, device=device))
    model.train().reshard()


def is_sharded(part: nn.Module | Tensor) -> bool:
    """Is it a model, or a tensor of one, that `shard` has shared out?"""
    return hasattr(part, "unshard") or hasattr(part, "to_local")


def replicate(model: nn.Module) -> nn.Module:
    """`model` behind DDP. Norms settle their statistics alike on all ranks: DDP must not copy rank 0's over them."""
    with warnings.catch_warnings():  # of torch 2.13, whose new name for it 2.11 does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def accumulate(model: nn.Module, last: bool) -> AbstractContextManager:
    """Around a micro-batch's forward and backward. DDP adds up gradients on each rank and reduces them after the `last`
    one; FSDP reduces each time, because whole gradients are what does not fit."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def gather_root(model: nn.Module) -> None:
    """Gather what is in no block, for a caller of `model.hidden` or `model.logits`: FSDP does that on forward only."""
    if is_sharded(model):
        model.unshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP may have sharded, gathered; every rank must ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def share(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor that FSDP may have sharded; the very memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor
