"""CoupledNorm within transformers: the classes of coupled_gpt2, coupled_llama and coupled_qwen3.

This file travels: it is copied into the folder of each exported model, and it needs torch and
transformers (5.x) alone.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)

CoupledNorm (Loretz & Hochreiter 2026): the norm before a block's MLP is an RMSNorm that takes the
statistic of the norm before attention, and its own gain. config.json says which norms share
(`norm_plan`: R computes its own statistic, s takes the latest one; two letters for a block, one for
the final norm), what each divides the shared statistic by (`coupled_alpha`), and whether those that
do not share add a bias, as the LayerNorm that they were (`norm_bias`). If none shares, all norms
are RMSNorms.

Each class is the stock class with other norms. A norm that shares reads the statistic that its
source computed a moment ago in the same thread, so attention, caches and generation stay
transformers' own, and threads may use one model. No block may be recomputed whose source is in
another one: gradient checkpointing works for plans that share within blocks.

The gains of the norms are stored as (1, C), so that no stock class takes them for its own, (C,): a
new model_type is not enough, because LlamaForCausalLM.from_pretrained only warns, and would compute
RMSNorm.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Names of the norms of the residual stream: in GPT-2, in Llama and Qwen3
NORMS = ("ln_1", "ln_2", "ln_f", "input_layernorm", "post_attention_layernorm", "norm")


class Latest(threading.local):
    """What a norm computed in the latest forward pass of this thread: inv_rms (..., 1)."""

    def __reduce__(self) -> tuple:
        """Let copies and pickles begin without it."""
        return Latest, ()


class CoupledRMSNorm(nn.Module):
    """RMSNorm with its own statistic or, if it has a source, the source's latest.

    y = x * inv_rms / alpha * gain (+ bias) (Loretz & Hochreiter 2026, equation 6), with x (..., C)
    and inv_rms (..., 1). Statistics are float32 at least; y is rounded once, to the type of x.
    """

    def __init__(
        self,
        channels: int,
        eps: float,
        source: "CoupledRMSNorm | None",
        alpha: float,
        has_bias: bool,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels))
        self.bias = nn.Parameter(torch.zeros(1, channels)) if has_bias else None
        self.eps = eps
        self.alpha = alpha
        # In a tuple, because torch would register a module as a part of this one.
        self.sources = () if source is None else (source,)
        self.latest = Latest()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.sources:
            inv_rms = self.sources[0].latest.inv_rms.to(x.device)
        else:
            inv_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            # A constant to the norms that share it (section 4.3).
            self.latest.inv_rms = inv_rms.detach()
        y = wide * (inv_rms / self.alpha) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def center_embedded(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Centre inputs_embeds (..., C) where all rows of the embedding are (a forward pre-hook).

    Such a model had LayerNorms, which do not see the mean of embeddings that are given by hand.
    """
    x = kwargs.get("inputs_embeds")
    if x is not None:
        rows = model.get_input_embeddings().weight.detach().double()
        rounding = max(1e-3, 4 * torch.finfo(x.dtype).eps)
        if (rows.mean(-1).abs() <= rounding * rows.square().mean(-1).sqrt()).all():
            kwargs = kwargs | {"inputs_embeds": x - x.mean(-1, keepdim=True)}
    return args, kwargs


class Couple:
    """Mixin of a causal LM of transformers that replaces its 2L + 1 norms.

    config.norm_plan says which of them share, config.coupled_alpha what each divides by.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of a mixin's sibling
        base = self.base_model
        for entry in (self, base):
            entry.register_forward_pre_hook(center_embedded, with_kwargs=True)
        # Modules come in the order in which they compute.
        paths = [path for path, _ in base.named_modules() if path.rpartition(".")[2] in NORMS]
        letters = config.norm_plan.replace(" ", "")
        # A norm before attention has its source in an earlier block.
        self.shares_across = "s" in letters[:-1:2]
        eps = getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps  # GPT-2's, Llama's
        source: CoupledRMSNorm | None = None
        for path, letter, alpha in zip(paths, letters, config.coupled_alpha, strict=True):
            old = base.get_submodule(path).weight
            if letter == "s":
                norm = CoupledRMSNorm(len(old), eps, source, alpha, False)
            else:
                norm = CoupledRMSNorm(len(old), eps, None, 1.0, config.norm_bias)
                source = norm
            base.set_submodule(path, norm.to(old))

    def _set_gradient_checkpointing(self, enable: bool = True, **kwargs: Any) -> None:
        """Switch gradient checkpointing; every way in transformers to do that calls this method.

        Raises ValueError for plans across blocks.
        """
        # A block that is computed again would read the statistic that the latest forward pass left,
        # which may be that of another batch.
        if enable and self.shares_across:
            raise ValueError(
                f"norm_plan {self.config.norm_plan!r} shares statistics across blocks, which "
                "gradient checkpointing computes apart: train without it"
            )
        super()._set_gradient_checkpointing(enable, **kwargs)


class NormKeys:
    """Mixin of a config of transformers: what `Couple` reads, and what older folders mean."""

    norm_plan = ""
    coupled_alpha = ()
    norm_bias = False


class CoupledGPT2Config(NormKeys, GPT2Config):
    """Configuration of coupled_gpt2."""

    model_type = "coupled_gpt2"


class CoupledLlamaConfig(NormKeys, LlamaConfig):
    """Configuration of coupled_llama."""

    model_type = "coupled_llama"


class CoupledQwen3Config(NormKeys, Qwen3Config):
    """Configuration of coupled_qwen3."""

    model_type = "coupled_qwen3"


class CoupledGPT2LMHeadModel(Couple, GPT2LMHeadModel):
    """GPT-2 with RMSNorms, of which some share."""

    config_class = CoupledGPT2Config


class CoupledLlamaForCausalLM(Couple, LlamaForCausalLM):
    """Llama in which some norms share."""

    config_class = CoupledLlamaConfig


class CoupledQwen3ForCausalLM(Couple, Qwen3ForCausalLM):
    """Qwen3 in which some norms share."""

    config_class = CoupledQwen3Config


MODELS = (CoupledGPT2LMHeadModel, CoupledLlamaForCausalLM, CoupledQwen3ForCausalLM)
# So save_pretrained copies this file into the folder, and names it in config.json.
for model_class in MODELS:
    model_class.config_class.register_for_auto_class("AutoConfig")
    model_class.register_for_auto_class("AutoModelForCausalLM")
