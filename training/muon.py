"""Muon for the hidden matrices of a GPT and AdamW for everything else, as one optimiser."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.95


class MuonWithAdamW:
    """Muon for the matrices of the blocks, fused AdamW for all other parameters.

    The numbers are those of torch.optim.Muon, bit for bit on a CPU, which has its matrices one by
    one. Here those of one shape are one stack.

    Muon (Jordan et al. 2024) replaces the momentum M = U S V^T of a matrix by about U V^T, which
    Newton-Schulz iterations compute in bfloat16. A weight that holds several matrices side by side
    (q, k and v; gate and up) is orthogonalised matrix by matrix: Muon gets views of its rows, and
    of the rows of its gradient.

    An update of an (A, B) matrix is multiplied by 0.2 sqrt(max(A, B)), which gives it about the RMS
    of AdamW's updates, so that AdamW's learning rate and weight decay serve both (Liu et al. 2025,
    arXiv 2502.16982).

    To its callers this is a fused AdamW: param_groups, of whose entries "lr" and "weight_decay"
    count; state; and found_inf and grad_scale, tensors that the device reads in `step`.

    Args:
        matrices: weight -> the number of rows of each matrix in it.
        adamw: fused AdamW of all other parameters.
        lr, weight_decay: of the matrices.
    """

    found_inf: Tensor | None = None  # not 0: the step must not change anything
    grad_scale: Tensor | None = None  # gradients are divided by it

    def __init__(
        self,
        matrices: dict[nn.Parameter, list[int]],
        adamw: torch.optim.AdamW,
        lr: float,
        weight_decay: float,
    ):
        self.adamw = adamw
        self.rows = list(matrices.values())
        # Whole weights, as GradScaler needs them to divide their gradients by the loss scale.
        self.group: dict[str, Any] = {
            "params": list(matrices),
            "lr": lr,
            "weight_decay": weight_decay,
        }
        self.parts: list[Tensor] = []  # views: what changes them changes the weights
        for weight, rows in matrices.items():
            self.parts += weight.detach().split(rows)  # (rows, C) each
        self.alike: dict[tuple[int, ...], list[int]] = {}  # shape -> places in parts
        for place, part in enumerate(self.parts):
            self.alike.setdefault(part.shape, []).append(place)
        # Made before the first step: to keep them where that step is not applied, and to load a
        # checkpoint into them.
        self.momenta = [torch.zeros_like(part) for part in self.parts]
        # The same tensors by weight, beside the moments of the other parameters.
        momenta = iter(self.momenta)
        for weight, rows in matrices.items():
            adamw.state[weight] = {f"momentum.{part}": next(momenta) for part in range(len(rows))}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The group of the matrices, then AdamW's."""
        return [self.group, *self.adamw.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """AdamW's moments, and the momenta of the matrices, by parameter."""
        return self.adamw.state

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, unless found_inf says no. The host does not wait."""
        self.adamw.found_inf = self.found_inf
        self.adamw.grad_scale = self.grad_scale
        self.adamw.step()
        # To ask the device for found_inf before the step would make the host wait at every step,
        # and a NaN would spread into momentum and weights. So the device keeps copies, and takes
        # them back if the step was bad: for a moment 8 bytes for each number of the matrices, when
        # no activations are there.
        written = self.parts + self.momenta
        before = [tensor.clone() for tensor in written]
        self._update()
        if self.found_inf is not None:
            is_bad = self.found_inf != 0
            for tensor, old in zip(written, before, strict=True):
                tensor.copy_(torch.where(is_bad, old, tensor))

    def _update(self) -> None:
        """Move momenta and matrices in place. Decay comes first, as in AdamW."""
        gradients = [weight.grad for weight in self.group["params"]]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        pairs = zip(gradients, self.rows, strict=True)
        gradients = [piece for gradient, rows in pairs for piece in gradient.split(rows)]
        torch._foreach_lerp_(self.momenta, gradients, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gradients, self.momenta, MOMENTUM)  # Nesterov
        lr = self.group["lr"]
        torch._foreach_mul_(self.parts, 1 - lr * self.group["weight_decay"])
        for shape, places in self.alike.items():
            stack = torch.stack([updates[place] for place in places])  # (N, A, B)
            steps = divided(stack).unbind()
            size = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_([self.parts[place] for place in places], steps, alpha=-lr * size)


def orthogonalized(stack: Tensor) -> Tensor:
    """Compute about U V^T of each matrix U S V^T in `stack` (N, A, B), in bfloat16.

    Five Newton-Schulz iterations: each is an odd polynomial of the singular values, whose numbers
    are those of Jordan et al. 2024.
    """
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    x = x.to(torch.bfloat16)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if is_tall else x


def divided(stack: Tensor) -> Tensor:
    """Compute orthogonalized(stack). Each rank takes its share of the matrices, and gets all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return orthogonalized(stack)
    found = torch.zeros_like(stack, dtype=torch.bfloat16)
    found[dist.get_rank() :: ranks] = orthogonalized(stack[dist.get_rank() :: ranks])
    dist.all_reduce(found)
    return found
