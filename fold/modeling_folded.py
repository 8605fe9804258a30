"""Models of transformers with RMSNorms in the place of LayerNorms, for trust_remote_code=True.

This file travels: hub.py copies it into the folder of each folded model, and it needs torch and
transformers (5.x) alone.

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)

config.json says in `folded` which norms are RMSNorms, and where centrings were inserted. Each class
is the stock class with these modules. The stock class itself, without trust_remote_code, reads the
folder with LayerNorms. That is the same function, because what they read is centred. Training does
not keep it centred. So what is saved here has gains of shape (1, C), which no stock class takes.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class FoldedRMSNorm(nn.Module):
    """RMSNorm with the gain and bias of a LayerNorm: y = x / sqrt(mean(x^2) + eps) * gain + bias.

    x is (..., C), the gain (C,) or (1, C). Statistics are float32 at least; y has the type of x.
    """

    def __init__(self, old: nn.Module, eps: float, is_row: bool):
        super().__init__()
        self.weight = nn.Parameter(old.weight.detach()[None]) if is_row else old.weight
        self.bias = getattr(old, "bias", None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = y * self.weight.flatten()
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Center:
    """Subtract the mean of each block of the last axis of what a module returns (a hook)."""

    def __init__(self, block: int):
        self.block = block

    def __call__(self, module: nn.Module, args: tuple, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.block))
        return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


class CenterGiven:
    """Centre embeddings (..., C) that a caller gives, where the model's own are (a pre-hook).

    Args:
        part: the model, or a part that may be called by itself, whose hook this becomes.
    """

    def __init__(self, part: nn.Module):
        self.names = list(inspect.signature(part.forward).parameters)

    def __call__(
        self, part: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        given = dict(zip(self.names, args)) | kwargs
        for name in ("inputs_embeds", "decoder_inputs_embeds"):
            x = given.get(name)
            if x is None or not is_centred(self.embedding(part, name)):
                continue
            x = x - x.mean(-1, keepdim=True)
            if name in kwargs:
                kwargs = kwargs | {name: x}
            else:
                place = self.names.index(name)
                args = (*args[:place], x, *args[place + 1 :])
        return args, kwargs

    def embedding(self, part: nn.Module, argument: str) -> nn.Module:
        """Return the embedding of a part, for an argument."""
        if argument == "decoder_inputs_embeds":
            part = part.get_decoder()
        elif "decoder_inputs_embeds" in self.names:
            part = part.get_encoder()
        return part.get_input_embeddings()


def is_centred(embedding: nn.Module) -> bool:
    """Tell whether what an embedding returns has zero mean, but for rounding."""
    if any(isinstance(hook, Center) for hook in embedding._forward_hooks.values()):
        return True
    rounding = max(1e-3, 4 * torch.finfo(embedding.weight.dtype).eps)
    rows = embedding.weight.detach().double()
    return bool((rows.mean(-1).abs() <= rounding * rows.square().mean(-1).sqrt()).all())


class Folded:
    """Mixin of a model of transformers that replaces its LayerNorms as config.folded says."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of a mixin's sibling
        for path, eps in config.folded["norms"].items():
            norm = FoldedRMSNorm(self.get_submodule(path), eps, config.folded["is_row"])
            self.set_submodule(path, norm)
        for path, block in config.folded["centrings"].items():
            self.get_submodule(path).register_forward_hook(Center(block))
        parts = {self, self.base_model}
        if not hasattr(config, "text_config"):  # else a part always gets embeddings
            parts |= {self.get_encoder(), self.get_decoder()}
        for part in parts:
            if hasattr(part, "get_input_embeddings"):
                part.register_forward_pre_hook(CenterGiven(part), with_kwargs=True)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Let transformers rename weights that it loads and saves as for the stock class."""
        return False

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save it for this file alone: see above."""
        state = dict(kwargs.pop("state_dict", None) or self.state_dict())
        for path in self.config.folded["norms"]:
            state[f"{path}.weight"] = state[f"{path}.weight"].reshape(1, -1)
        self.config.folded = self.config.folded | {"is_row": True}
        super().save_pretrained(save_directory, *args, state_dict=state, **kwargs)


def __getattr__(name: str) -> type:
    """Make the folded class of a name that transformers has."""
    import transformers

    stock = getattr(transformers, name, None)
    if not isinstance(stock, type):
        raise AttributeError(name)
    made = type(name, (Folded, stock), {"__module__": __name__})
    globals()[name] = made  # so that there is one, and pickle finds it
    return made
