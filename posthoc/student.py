"""The models of a distillation: the teacher, the student that is a view of it, and the student as a
plain GPT again.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.fingerprint import END
from fold.gpt import absorb_alpha
from hf.config import gpt_config, shape_config
from hf.hub import HUB_NAME, read_config, resolve_hub
from load import load_model
from model import GPT, GPTConfig
from posthoc import adapters
from posthoc.coupling import view
from posthoc.kl import kl_divergence


class Pair(nn.Module):
    """Teacher and student behind the face of a model that micro_step knows; only the student is a
    part of it.
    """

    def __init__(self, teacher: GPT, student: GPT):
        super().__init__()
        self.student, self.frozen = (
            student,
            (teacher,),
        )  # a tuple: no submodule, nothing of it is trained or saved

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean KL(teacher || student) in nats a token over idx (B, T), first positions too, which
        held-out KL tells apart; and 0 for the auxiliary loss.
        """
        loss = self.token_kl(idx).mean()
        return loss, torch.zeros_like(loss)

    def token_kl(self, idx: Tensor) -> Tensor:
        """KL (B, T)."""
        teacher, student = self.frozen[0], self.student
        with torch.no_grad():
            taught = teacher.hidden(idx).flatten(0, 1)  # (B T, C)
        x = student.hidden(idx).flatten(0, 1)
        return kl_divergence(
            x, student.head_weight(), taught, teacher.head_weight(), teacher.n_vocab
        ).view(idx.shape)


def make_student(teacher: GPT, plan: str, alpha: Any, config: Any) -> GPT:
    """The teacher's weights under `plan`: a view with adapters, or for full fine-tuning a float32
    copy. `config` is a DistillConfig: method, rank, adapter_alpha, seed and checkpoint_activations
    count here.
    """
    student = view(teacher, plan, alpha)
    if config.method == "full":
        student = copy.deepcopy(student)
        student.to(torch.promote_types(teacher.wte.weight.dtype, torch.float32)).requires_grad_(
            True
        )
    else:
        torch.manual_seed(config.seed)
        adapters.add_adapters(student, config.rank, config.adapter_alpha, config.method == "dora")
    if config.checkpoint_activations:
        for block in student.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return student


@torch.no_grad()
def finished(student: GPT) -> GPT:
    """The student as a plain GPT: adapters merged, alpha absorbed into the gains. The argument is
    used up; tensors that it shares with a teacher stay as they are.
    """
    for block in student.blocks:
        block.__dict__.pop("forward", None)  # the checkpointed one
    adapters.merge(student)
    return absorb_alpha(student) if student.config.norm_affine else student.eval()


def bytes_of(model: GPT) -> list[np.ndarray]:
    """The bytes of each tensor of a model, for its fingerprint; of tensors that were drawn on a
    GPU, the first ones.
    """
    tensors = [tensor.detach().flatten() for tensor in model.state_dict().values()]
    return [
        (t if t.device.type == "cpu" else t[:END].cpu()).view(torch.uint8).numpy() for t in tensors
    ]


def teacher_config(spec: str) -> GPTConfig:
    """The config of a teacher, without its weights where that is possible."""
    if spec.startswith("random:"):
        return shape_config(spec.removeprefix("random:"))
    path = Path(spec)
    if not path.exists() and HUB_NAME.fullmatch(spec):
        path = resolve_hub(spec)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return gpt_config(read_config(path), spec)
    return load_model(spec).config
