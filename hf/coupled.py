"""CoupledNorm within transformers: coupled_gpt2, coupled_qwen3 and coupled_llama, for what
hf/weights.py exports.

    from hf.coupled import register
    register()                           # tells the Auto classes of them
    from transformers import AutoModelForCausalLM
    # generate, static cache, everything
    model = AutoModelForCausalLM.from_pretrained("exported")

Each is the stock class with other norms. A norm that shares reads the statistic that its source
computed a moment ago; so attention, caches and generation stay transformers' own. That statistic is
state of the module: one forward at a time (no threads on one model), and no recomputing of a block
whose source is in another one: gradient checkpointing is for plans that share within blocks.
Without `register()` no Auto class knows these model types, and the gains of the norms are stored as
(1, C), which no stock class takes for its own (C,).
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import HFError
from hf.config import COUPLED
from hf.hub import import_transformers


class CoupledRMSNorm(nn.Module):
    """x (..., C) * inv_rms / alpha * gain, with inv_rms (..., 1) its own or, if it has a source,
    the source's latest.

    Loretz & Hochreiter 2026, equation 6. Statistics in float32 at least; one rounding, to the type
    of x.
    """

    def __init__(self, channels: int, eps: float, source: "CoupledRMSNorm | None", alpha: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels))
        self.eps, self.alpha = eps, alpha
        # a tuple, or torch would count the source as our part
        self.sources = () if source is None else (source,)
        self.inv_rms: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.sources:
            inv_rms = self.sources[0].inv_rms.to(x.device)
        else:
            inv_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            self.inv_rms = inv_rms.detach()  # a constant to those who share it (section 4.3)
        return (wide * (inv_rms / self.alpha) * self.weight).to(x.dtype)


class Couple:
    """Mixin of a causal LM of transformers: its 2L + 1 norms by config.norm_plan and
    config.coupled_alpha.
    """

    def __init__(self, config: Any, *words: Any, **names: Any):
        super().__init__(config, *words, **names)
        base = self.base_model
        blocks, pair, final = (
            base.h if hasattr(base, "h") else base.layers,
            ("ln_1", "ln_2"),
            "ln_f",
        )
        if not hasattr(base, "h"):
            pair, final = ("input_layernorm", "post_attention_layernorm"), "norm"
        places = [(block, name) for block in blocks for name in pair] + [(base, final)]
        letters, source = config.norm_plan.replace(" ", ""), None
        known = letters[:1] == "R" and set(letters) <= set("Rs")
        if not (known and len(letters) == len(config.coupled_alpha) == len(places)):
            raise HFError(
                f"norm_plan {config.norm_plan!r} and {len(config.coupled_alpha)} numbers in "
                f"coupled_alpha do not describe {len(places)} norms: is config.json damaged?"
            )
        # before attention: the source is in a block before
        self.shares_across = "s" in letters[:-1:2]
        for (owner, name), letter, alpha in zip(places, letters, config.coupled_alpha, strict=True):
            shares, old = letter == "s", getattr(owner, name).weight
            eps = config.layer_norm_epsilon if hasattr(base, "h") else config.rms_norm_eps
            norm = CoupledRMSNorm(
                len(old), eps, source if shares else None, alpha if shares else 1.0
            )
            setattr(owner, name, norm.to(old))
            source = source if shares else norm

    def _set_gradient_checkpointing(self, enable: bool = True, **names: Any) -> None:
        """transformers' own, which every way of switching it calls.

        Raises HFError for plans across blocks.
        """
        # it would read what the latest forward left, which may be of another batch
        if enable and self.shares_across:
            raise HFError(
                f"norm_plan {self.config.norm_plan!r} shares statistics across blocks, which "
                "gradient checkpointing computes apart: train without it"
            )
        super()._set_gradient_checkpointing(enable, **names)


@functools.cache
def coupled_classes() -> dict[str, tuple[type, type]]:
    """{model_type: (config class, model class)}, made on top of transformers' own."""
    transformers = import_transformers()
    found = {}
    for stem, model in (
        ("GPT2", "GPT2LMHeadModel"),
        ("Llama", "LlamaForCausalLM"),
        ("Qwen3", "Qwen3ForCausalLM"),
    ):
        body = {
            "model_type": COUPLED + stem.lower(),
            "norm_plan": "",
            "coupled_alpha": (),
            "__module__": __name__,
        }
        config = type(f"Coupled{stem}Config", (getattr(transformers, f"{stem}Config"),), body)
        more = {"config_class": config, "__module__": __name__}
        found[config.model_type] = (
            config,
            type(f"Coupled{model}", (Couple, getattr(transformers, model)), more),
        )
    # so that they can be pickled
    globals().update({cls.__name__: cls for pair in found.values() for cls in pair})
    return found


def register() -> None:
    """Tell transformers' Auto classes of the coupled ones."""
    auto = import_transformers()
    for model_type, (config, model) in coupled_classes().items():
        auto.AutoConfig.register(model_type, config, exist_ok=True)
        auto.AutoModelForCausalLM.register(config, model, exist_ok=True)
