"""What a training step reports: losses, gradient norms, a request to stop, losses gone bad.

The numbers of a step are made on the device, and on a GPU the host reads them a step later. They
travel in one vector, so that a step takes one small reduction over ranks and one copy to the host:

    loss, aux_loss, stops, one number for each rank: `pack`, summed over ranks
    grad_norm, one number for each parameter: of guarded_update, the same on every rank
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed import Ranks
from training.optim import GradientNorms

HEAD = 3  # loss, aux_loss, stops: what stands before the ranks


@dataclass(frozen=True)
class StepReport:
    """The report of one step, on the host. Losses are means over all micro-batches and ranks."""

    step: int
    lr: float
    loss: float  # nats per token
    aux_loss: float  # 0 where the model has none
    stops: bool  # a rank has been asked to stop
    bad_ranks: list[int]  # ranks whose loss is not finite
    grad_norm: float  # global, before clipping
    gradient_norms: list[float]  # one number for each parameter


def pack(losses: Tensor, stops: bool, ranks: Ranks) -> Tensor:
    """Pack one rank's part of the report. The sum over ranks is what they report together.

    Args:
        losses: (2,) loss and auxiliary loss, means over the micro-batches of this rank.
        stops: this rank has been asked to stop.
        ranks: this process and the others.

    Returns:
        (3 + number of ranks,), on the device and in the dtype of the losses.
    """
    packed = torch.zeros(HEAD + ranks.world_size, dtype=losses.dtype, device=ranks.device)
    # so that the sum over ranks is their mean
    packed[:2] = losses / ranks.world_size
    packed[2].fill_(stops)  # an assignment would make the host wait for the GPU
    # In a place of its own, so that the sum still tells which rank it was.
    packed[HEAD + ranks.rank] = ~torch.isfinite(losses.sum())
    return packed


def count_bad(packed: Tensor) -> Tensor:
    """Count the ranks whose loss is not finite, on the device."""
    return packed[HEAD:].sum()


class PendingReport:
    """The report of a step on its way from the device to the host; the device does not wait."""

    def __init__(self, step: int, lr: float, packed: Tensor, norms: GradientNorms):
        """Start the copy to the host. `packed` has been summed over ranks."""
        self.step = step
        self.lr = lr
        self.n_ranks = len(packed) - HEAD
        self.values = torch.cat([packed, norms.total.view(1), norms.each])  # (3 + ranks + 1 + P,)
        self.arrived: torch.cuda.Event | None = None
        if self.values.is_cuda:
            on_device = self.values
            # Pinned: a copy to ordinary memory would make the host wait.
            self.values = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self.values.copy_(on_device, non_blocking=True)
            # Marks the end of the copy in the GPU's queue. Until then `values` holds nothing.
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> StepReport:
        """Wait for the copy and unpack it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values = self.values.tolist()
        loss, aux_loss, stops = values[:HEAD]
        end = HEAD + self.n_ranks
        return StepReport(
            step=self.step,
            lr=self.lr,
            loss=loss,
            aux_loss=aux_loss,
            stops=bool(stops),
            bad_ranks=[rank for rank, bad in enumerate(values[HEAD:end]) if bad],
            grad_norm=values[end],
            gradient_norms=values[end + 1 :],
        )
