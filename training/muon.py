"""Muon for the hidden matrices of a GPT and AdamW for everything else, as one optimiser."""

from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW:
    """torch.optim.Muon for the matrices of the blocks, fused AdamW for all other parameters.

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

    # GradScaler then sets found_inf, as for fused AdamW, instead of waiting for the device.
    _step_supports_amp_scaling = True
    # Class attributes too, because GradScaler deletes those of the instance after each step.
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
        self.group = {"params": list(matrices), "lr": lr, "weight_decay": weight_decay}
        self.parts: list[Tensor] = []  # views: what changes them changes the weights
        for weight, rows in matrices.items():
            self.parts += weight.detach().split(rows)  # (rows, C) each
        # The settings are torch's defaults, written here so that they cannot change with torch.
        self.muon = torch.optim.Muon(
            self.parts,
            lr,
            weight_decay,
            momentum=0.95,
            nesterov=True,
            ns_steps=5,
            adjust_lr_fn="match_rms_adamw",
        )
        # Muon would make them in its first step. We need them before: to keep them where that step
        # is not applied, and to load a checkpoint into them.
        self.momenta = [torch.zeros_like(part) for part in self.parts]
        for part, momentum in zip(self.parts, self.momenta, strict=True):
            self.muon.state[part]["momentum_buffer"] = momentum
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
        self._give_gradients()
        settings = {name: self.group[name] for name in ("lr", "weight_decay")}
        self.muon.param_groups[0].update(settings)
        # Muon does not know found_inf, and a NaN would spread into momentum and weights. To ask the
        # device before the step would make the host wait at every step. So the device keeps copies,
        # and takes them back if the step was bad: for a moment 8 bytes for each number of the
        # matrices, when no activations are there.
        written = self.parts + self.momenta
        before = [tensor.clone() for tensor in written]
        self.muon.step()
        if self.found_inf is not None:
            is_bad = self.found_inf != 0
            for tensor, old in zip(written, before, strict=True):
                tensor.copy_(torch.where(is_bad, old, tensor))
        self.muon.zero_grad(set_to_none=True)

    def _give_gradients(self) -> None:
        """Give each matrix its rows of the gradient, divided by grad_scale."""
        gradients = [weight.grad for weight in self.group["params"]]
        given = [gradient for gradient in gradients if gradient is not None]
        if self.grad_scale is not None and given:
            torch._foreach_div_(given, self.grad_scale)
        parts = iter(self.parts)
        for gradient, rows in zip(gradients, self.rows, strict=True):
            # A weight without a gradient is left alone, as AdamW does.
            pieces = [None] * len(rows) if gradient is None else gradient.split(rows)
            for piece in pieces:
                next(parts).grad = piece

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        self.adamw.zero_grad(set_to_none)
        for weight in self.group["params"]:
            weight.grad = None
