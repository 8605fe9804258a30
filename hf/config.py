"""Translate between the config.json of a Hugging Face model and GPTConfig.

GPT-2, Qwen3 and Llama 3.x are known, and CoupledNorm in each of them. A model in which a norm
shares its statistic (or, on the shape of GPT-2, is an RMSNorm) has a model_type of its own,
coupled_gpt2, coupled_qwen3 or coupled_llama, and two more keys, norm_plan and coupled_alpha. Stock
transformers knows none of these three, so it cannot run them as something else; hf/coupled.py can
run them.
"""

import difflib
from typing import Any

import torch

from common.errors import HFError
from configurator import Overrides
from model import GPT, GPTConfig
from norm_plan import NormPlan

COUPLED = "coupled_"  # before the model_type of a stock architecture
STOCK = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
# Class that saved the model -> model_type.
ARCHITECTURES = STOCK | {f"Coupled{name}": COUPLED + family for name, family in STOCK.items()}
# Their activations -> ours.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# Keys of config.json that change what a model computes, with the values with which it computes what
# our GPT does.
NEUTRAL: dict[str, tuple] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "add_cross_attention": (False,),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}

# The published shapes, as their config.json gives them.
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LLAMA32 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _shape(
    base: dict, hidden: int, inner: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    """Return a config.json of the family `base`; `others` override or add keys."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return base | sizes | others


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    "qwen3-0.6b": _shape(QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(QWEN3, 2048, 6144, 28, 16),
    "qwen3-8b": _shape(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama3.2-1b": _shape(LLAMA32, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": _shape(LLAMA32, 3072, 8192, 28, 24, head_dim=128),
}


def shape_config(name: str) -> GPTConfig:
    """Return the config of a published shape. Raises HFError for a name that is not in SHAPES."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SHAPES)}"
        raise HFError(f"unknown shape {name!r}: {hint}")
    return gpt_config(SHAPES[name], f"shape {name}")


def random_model(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> GPT:
    """Return a GPT of a published shape with random weights, in eval mode.

    Weights are drawn in float32, then rounded to `dtype`. For the large shapes, `with
    torch.device("cuda")` around the call draws them on the GPU.

    Args:
        name: a key of SHAPES, e.g. "qwen3-0.6b".

    Raises:
        HFError: the name is unknown.
    """
    model = GPT(shape_config(name), seed).to(dtype or torch.float32)
    model.meta = {"vocab_size": model.config.vocab_size}
    if name == "gpt2":
        model.meta["tokenizer"] = "gpt2"
    return model.eval()


def architecture(hf: dict[str, Any]) -> str:
    """Return gpt2, llama or qwen3, or coupled_ and one of them.

    The class that saved the model decides, else model_type. Raises HFError for any other.
    """
    found = (hf.get("architectures") or [hf.get("model_type")])[0]
    family = ARCHITECTURES.get(found, found)
    if family not in ARCHITECTURES.values() or hf.get("model_type", family) != family:
        raise HFError(
            f"architecture {found!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return family


def gpt_config(hf: dict[str, Any], origin: str) -> GPTConfig:
    """Return the GPTConfig for the content of a config.json.

    Absent keys have the defaults of transformers' config classes.

    Args:
        origin: where the content is from, for messages.

    Raises:
        HFError: our GPT does not compute what is asked for.
        ConfigError: a value has the wrong type.
    """
    family = architecture(hf)
    base = family.removeprefix(COUPLED)
    for key, allowed in NEUTRAL.items():
        if key in hf and hf[key] not in allowed:
            raise HFError(f"{origin}: {key}={hf[key]!r} is not supported")
    has_window = hf.get("sliding_window") is not None and hf.get("use_sliding_window", True)
    if has_window or set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise HFError(f"{origin}: sliding-window and other partial attention is not supported")
    try:
        keys = gpt2_keys(hf) if base == "gpt2" else llama_keys(hf, base)
        if base != family:
            keys["norm_type"] = "coupled"
            keys["norm_plan"] = hf["norm_plan"]
            keys["coupled_alpha"] = hf["coupled_alpha"]
    except KeyError as error:
        raise HFError(f"{origin}: {error.args[0]} is missing: is the file complete?") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise HFError(f"{origin}: {error}") from None
    overrides = Overrides(GPTConfig)
    for key, value in keys.items():
        overrides.set(key, value, origin)
    return overrides.build()


def gpt2_keys(hf: dict[str, Any]) -> dict[str, Any]:
    """Return our keys for a config.json of GPT-2. Raises ValueError, or KeyError for a lost key."""
    activation = hf.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_function={activation!r} is not supported")
    return {
        "vocab_size": hf["vocab_size"],
        "block_size": hf["n_positions"],
        "n_layer": hf["n_layer"],
        "n_head": hf["n_head"],
        "n_embd": hf["n_embd"],
        "n_inner": hf.get("n_inner") or 4 * hf["n_embd"],
        "activation": ACTIVATIONS[activation],
        "position": "learned",
        "bias": True,
        "norm_type": "layer",
        "norm_eps": hf.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": hf.get("tie_word_embeddings", True),
    }


def llama_keys(hf: dict[str, Any], family: str) -> dict[str, Any]:
    """Return our keys for a config.json of Llama or Qwen3. Raises as gpt2_keys does."""
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported")
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim")
    if not head_dim:
        # The defaults of transformers' config classes.
        head_dim = 128 if family == "qwen3" else hf["hidden_size"] // heads
    return {
        "vocab_size": hf["vocab_size"],
        "block_size": hf["max_position_embeddings"],
        "n_layer": hf["num_hidden_layers"],
        "n_embd": hf["hidden_size"],
        "n_inner": hf["intermediate_size"],
        "n_head": heads,
        "n_kv_head": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "activation": "swiglu",
        "position": "rope",
        **rope_keys(hf),
        "bias": family == "llama" and hf.get("mlp_bias", False),
        "attn_bias": hf.get("attention_bias", False),
        "norm_type": "rms",
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "qk_norm": "head" if family == "qwen3" else None,
        "tie_embeddings": hf.get("tie_word_embeddings", False),
    }


def rope_keys(hf: dict[str, Any]) -> dict[str, Any]:
    """Return our keys for rotary positions.

    transformers 5 stores them in `rope_parameters`, older versions in `rope_theta` and
    `rope_scaling`. Raises ValueError for a scaling that we do not compute.
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope parameters that differ between kinds of layers are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rope {rope} is not supported; rope_type default and llama3 are")
    scaling: tuple[float, ...] = ()
    if kind == "llama3":
        # Some files have it at the top level.
        name = "original_max_position_embeddings"
        original = hf.get(name) or rope[name]
        scaling = (rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    return {
        "rope_theta": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        "rope_scaling": scaling,
    }


# ---------------------------------------------------------------------------------- GPTConfig -> HF


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """Return the config.json for a GPT's config.

    Raises HFError that names what no supported architecture computes.
    """
    is_gpt2 = config.position == "learned"
    norm_plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
    plan = str(norm_plan)
    family = "qwen3" if norm_plan.qk_kind == "head" else "llama"
    if is_gpt2:
        family = "gpt2"
    refuse_unknown(config, family)
    hf = gpt2_entries(config) if is_gpt2 else llama_entries(config, family)
    if "s" in plan or (is_gpt2 and config.norm_type in ("rms", "coupled")):
        family = COUPLED + family
        hf["norm_plan"] = plan
        hf["coupled_alpha"] = alpha_of_positions(config, plan)
    [name] = [name for name, known in ARCHITECTURES.items() if known == family]
    common = {
        "architectures": [name],
        "model_type": family,
        "vocab_size": config.n_vocab or config.vocab_size,  # without the rows of padding
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return common | hf


def alpha_of_positions(config: GPTConfig, plan: str) -> list[float]:
    """Return one alpha for each position of the plan."""
    if isinstance(config.coupled_alpha, tuple):
        alpha = list(config.coupled_alpha)
    else:
        alpha = [config.coupled_alpha]
    if len(alpha) == 1:
        alpha = alpha * len(plan.replace(" ", ""))
    return alpha


def refuse_unknown(config: GPTConfig, family: str) -> None:
    """Raise HFError for what the architecture does not compute."""
    # Whether transformers' class computes it, for each key.
    computes = {
        "window": not config.window,
        "attn_scale": not config.attn_scale,
        "embed_scale": config.embed_scale == 1,
    }
    if family == "gpt2":
        computes |= {
            "norm_type": config.norm_type in ("layer", "rms", "coupled"),
            "rms_fraction": config.rms_fraction == 1,
            "norm_groups": config.norm_groups == 1,
            "rms_bias": not (config.rms_bias and config.bias),
            "qk_norm": config.qk_norm in (None, "none"),
            "activation": config.activation in ACTIVATIONS.values(),
            "n_kv_head": config.kv_heads == config.n_head,
            "head_dim": config.head_channels * config.n_head == config.n_embd,
        }
    else:
        computes |= {
            "rope_scaling_kind": config.rope_scaling_kind == "llama3",
            "norm_type": config.norm_type in ("rms", "coupled"),
            "rms_fraction": config.rms_fraction == 1,
            "norm_groups": config.norm_groups == 1,
            "rms_bias": not (config.rms_bias and config.bias),
            "activation": config.activation == "swiglu",
            "bias": family != "qwen3" or not config.bias,
        }
    for name, is_computed in computes.items():
        if not is_computed:
            raise HFError(
                f"{name}={getattr(config, name)!r}: no {family} of transformers computes that, so "
                "it cannot be exported (convert.py makes other norm types rms)"
            )


def gpt2_entries(config: GPTConfig) -> dict[str, Any]:
    """Return the entries of config.json that GPT-2 alone has."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    return {
        "n_positions": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": config.inner,
        "activation_function": activation,
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def llama_entries(config: GPTConfig, family: str) -> dict[str, Any]:
    """Return the entries of config.json that Llama and Qwen3 have."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(original),
        }
    attn_bias = config.bias if config.attn_bias is None else config.attn_bias
    entries = {
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "intermediate_size": config.inner,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_channels,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "attention_bias": attn_bias,
    }
    if family == "llama":
        entries["mlp_bias"] = config.bias
    return entries
