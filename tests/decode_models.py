"""Small models of every norm and shape for the tests of decoding, and what the model itself
computes.
"""

import torch
from helpers import shake, tokens

from decode.pack import pack
from decode.step import Decoder
from model import GPT, GPTConfig, KVCache
from norm_types import NORM_TYPES

SHAPES = {
    "gpt2": {"activation": "gelu_tanh"},
    "gpt2-bias": {"activation": "gelu", "bias": True},
    "qwen3": {
        "position": "rope",
        "activation": "swiglu",
        "n_kv_head": 2,
        "head_dim": 16,
        "qk_norm": "head",
        "tie_embeddings": False,
        "norm_eps": 1e-6,
    },
    "llama": {
        "position": "rope",
        "activation": "swiglu",
        "n_kv_head": 2,
        "head_dim": 8,
        "rope_theta": 5e5,
        "rope_scaling": (32.0, 1.0, 4.0, 16.0),
        "tie_embeddings": True,
    },
    "gemma3": {
        "position": "rope",
        "activation": "geglu",
        "n_kv_head": 1,
        "head_dim": 16,
        "qk_norm": "head",
        "rope_theta": 1e3,
        "rope_scaling": (8.0,),
        "rope_scaling_kind": "linear",
        "window": 5,
        "local_blocks": "llg",
        "local_rope_theta": 50.0,
        "attn_scale": 0.3,
        "embed_scale": 3.0,
    },
}
ALPHAS = (1.0, 1.09, 0.9, 1.2, 1.1, 0.8, 1.3, 1.05, 1.0)
NORMS = {
    "rms": {"norm_type": "rms"},
    "coupled": {"norm_type": "coupled", "coupled_alpha": 1.09},
    "coupled-first": {"norm_type": "coupled", "coupled_first": 2, "coupled_alpha": ALPHAS},
    "coupled-span": {"norm_type": "coupled", "coupled_span": 2, "coupled_alpha": 1.1},
    "coupled-odd": {
        "norm_type": "coupled",
        "coupled_first": 2,
        "coupled_span": 2,
        "norm_gain": "none",
        "coupled_impl": "fold",
    },
    "coupled-end": {"norm_type": "coupled", "norm_plan": "RR Rs ss Rs s", "coupled_alpha": 1.1},
    "layer": {"norm_type": "layer"},
    "cbwc": {"norm_type": "cbwc"},
    "taper": {"norm_type": "taper", "taper_warmup": 1, "taper_end": 2},
    "taper-layer": {
        "norm_type": "taper",
        "taper_base": "layer",
        "taper_warmup": 1,
        "taper_end": 2,
        "taper_final": True,
        "taper_anchor": 0.1,
        "taper_fit": "channel",
    },
    "partial": {"norm_type": "rms", "rms_fraction": 0.5, "norm_groups": 2},
    "dyt-common": {"norm_type": "dyt", "norm_recipe": "common"},
    "peri-layer": {"norm_type": "peri", "norm_plan": "LL LL RL RR L | LR IL RR LI | L"},
    "peri-one-plus": {"norm_type": "peri", "norm_gain": "one_plus", "initial_gain": 1.5},
    "hybrid-full": {"norm_type": "hybrid", "qk_norm": "full"},
    "coupled-outputs": {"norm_type": "coupled", "norm_plan": "RR Rs Rs ss R | IR RR IR RI | R"},
    "mixln-layer": {"norm_type": "mixln", "post_base": "layer", "mixln_share": 0.5},
    "mixln-weighted": {"norm_type": "mixln", "norm_plan": "PB PI RP PB P", "residual_weight": 0.7},
    "rms-full": {"norm_type": "rms", "qk_norm": "full", "norm_gain": "one_plus"},
    "olmo2-gainless": {"norm_type": "olmo2", "norm_gain": "none"},
}
# a row of the registry without a variant here is tested as it is
NORMS |= {name: {"norm_type": name} for name in NORM_TYPES if name not in NORMS}


SIZE = {"n_layer": 4, "n_head": 4, "n_embd": 32, "block_size": 32, "vocab_size": 64, "n_vocab": 61}


def make(shape: str, norm: str, init_std: float = 0.1, seed: int = 0, **keys) -> GPT:
    """A small model in float64 with gains, biases and tapers far from their initial values."""
    config = GPTConfig(**SIZE | SHAPES[shape] | NORMS[norm] | keys, init_std=init_std)
    model = shake(GPT(config, seed))
    if config.norm_type == "taper":
        model.train().set_step(1, 10)
        model(tokens(4, 32, seed=1, below=61))
        model.set_step(5, 10)
    return model.eval()


def prompt(batch: int, length: int = 7) -> torch.Tensor:
    return tokens(batch, length, seed=7, below=61)


@torch.no_grad()
def definition(model: GPT, idx: torch.Tensor, prefill: int) -> torch.Tensor:
    """Logits of the model itself, with its own cache: of the prompt's last token and of each token
    after it.
    """
    cache = KVCache(model.config, len(idx), idx.shape[1], model.wte.weight)
    logits = [model(idx[:, :prefill], cache=cache)[:, -1:]]
    return torch.cat(
        logits + [model(idx[:, i : i + 1], cache=cache) for i in range(prefill, idx.shape[1])], 1
    )


def decoded(model: GPT, level: str, idx: torch.Tensor, prefill: int) -> torch.Tensor:
    """The same from packed weights, the tokens given (a decoder reads its `out`)."""
    decoder = Decoder(pack(model, level), len(idx), idx.shape[1])
    logits = [decoder.prefill(idx[:, :prefill])]
    for i in range(prefill, idx.shape[1]):
        decoder.out[:, i] = idx[:, i]
        decoder.rewind(i)
        logits.append(decoder.step().clone())
    return torch.cat(logits, 1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
