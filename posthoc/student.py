"""The models of a distillation: teacher, student, and the student as a plain GPT again.

The student is a view of the teacher: the same tensors under another norm plan.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.fingerprint import END
from fold.gpt import absorb_alpha
from model import GPT
from posthoc import adapters
from posthoc.coupling import view
from posthoc.kl import kl_divergence


class Pair(nn.Module):
    """Teacher and student with the interface of a model that training can step."""

    def __init__(self, teacher: GPT, student: GPT):
        super().__init__()
        self.student = student
        # In a tuple it is no submodule, so nothing of the teacher is trained or saved.
        self.frozen = (teacher,)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean KL(teacher || student) in nats a token, and 0 as the auxiliary loss.

        First positions count too; held-out KL reports them apart.

        Args:
            idx: token ids (B, T).
            targets: not used.
        """
        loss = self.token_kl(*self.hidden(idx)).mean()
        return loss, torch.zeros_like(loss)

    def hidden(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the final hidden states (B, T, C) of student and teacher for idx (B, T)."""
        with torch.no_grad():
            taught = self.frozen[0].hidden(idx)
        return self.student.hidden(idx), taught

    def token_kl(self, x: Tensor, taught: Tensor) -> Tensor:
        """Return the KL (B, T) of every token, from the states of `hidden`."""
        teacher = self.frozen[0]
        return kl_divergence(
            x, self.student.head_weight(), taught, teacher.head_weight(), teacher.n_vocab
        )


def make_student(teacher: GPT, plan: str, alpha: Any, config: Any) -> GPT:
    """Return the teacher's weights under `plan`: a view with adapters, or a float32 copy.

    Args:
        plan: norm plan of the student.
        alpha: one number, or one for each position.
        config: a DistillConfig; method (full fine-tuning needs the copy), rank, adapter_alpha, seed
            and checkpoint_activations are used.
    """
    student = view(teacher, plan, alpha)
    if config.method == "full":
        student = copy.deepcopy(student)
        student.to(torch.promote_types(teacher.wte.weight.dtype, torch.float32))
        student.requires_grad_(True)
    else:
        torch.manual_seed(config.seed)
        adapters.add_adapters(student, config.rank, config.adapter_alpha, config.method == "dora")
    student.recompute = config.checkpoint_activations
    return student


@torch.no_grad()
def finished(student: GPT) -> GPT:
    """Return the student as a plain GPT: adapters merged, alpha absorbed into the gains.

    The argument must not be used afterwards. Tensors that it shares with a teacher do not change.
    """
    adapters.merge(student)
    return student.eval() if student.config.norm_gain == "none" else absorb_alpha(student)


def bytes_of(model: GPT) -> list[np.ndarray]:
    """Return the bytes of each tensor of a model, (n,) uint8, for its fingerprint.

    Of tensors on a GPU only the first ones, so that not all weights are copied.
    """
    arrays = []
    for tensor in model.state_dict().values():
        flat = tensor.detach().flatten()
        if flat.device.type != "cpu":
            flat = flat[:END].cpu()
        arrays.append(flat.view(torch.uint8).numpy())
    return arrays
