"""Translate between the config.json of a Hugging Face model and GPTConfig.

GPT-2, Llama 3.x, Qwen3, OLMo 2, OLMo 3 and Gemma 3 (text) are known, and CoupledNorm in the first
three. A model in which a norm shares its statistic, is an RMSNorm with a bias, or is an RMSNorm on
the shape of GPT-2 has a model_type of its own, coupled_gpt2, coupled_qwen3 or coupled_llama, and
three more keys, norm_plan, coupled_alpha and norm_bias. Stock transformers knows none of these
three, so it cannot run them as something else. Its classes are in hf/modeling_coupled.py, which
goes along with an exported model.
"""

import math
from typing import Any

import numpy as np
import torch

from common.errors import ConfigError, HFError
from common.hub import MOST_LAYERS
from configurator import Overrides
from model import GPT, ROPE_SCALINGS, GPTConfig
from norm_plan import NormPlan
from norm_types import NONE, SHARED

COUPLED = "coupled_"  # before the model_type of a stock architecture
CODE = "modeling_coupled"  # the module of their classes, without .py
PRE_NORM = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
# Class that saved the model -> model_type.
ARCHITECTURES = (
    PRE_NORM
    | {
        "Olmo2ForCausalLM": "olmo2",
        "Olmo3ForCausalLM": "olmo3",
        "Gemma3ForCausalLM": "gemma3_text",
    }
    | {f"Coupled{name}": COUPLED + family for name, family in PRE_NORM.items()}
)
# Their activations -> ours.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
LOCAL = "sliding_attention"  # their words for kinds of blocks
GLOBAL = "full_attention"
ORIGINAL = "original_max_position_embeddings"  # their name of original_length


# The norm of queries and keys, as our key has it
QK_NORM = {"qwen3": "head", "olmo2": "full", "olmo3": "full", "gemma3_text": "head"}
# By default every block but each fourth or sixth is local; the other families have no local blocks.
PERIODS = {"olmo3": 4, "gemma3_text": 6}
# What transformers' config classes have for keys that are absent
LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 0, "tie_word_embeddings": False}
DEFAULTS = {
    "gpt2": {"tie_word_embeddings": True},
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 128},
    "olmo2": LLAMA | {"rms_norm_eps": 1e-5},
    "olmo3": LLAMA | {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "gemma3_text": LLAMA
    | {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}

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
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}

# The published shapes, as their config.json gives them, but for transformers' defaults.
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
OLMO2 = {
    "model_type": "olmo2",
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 1,
    "sliding_window": 512,
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
    "olmo2-1b": _shape(OLMO2, 2048, 8192, 16, 16),
    "gemma3-1b": _shape(GEMMA3, 1152, 6912, 26, 4),
}


def shape_config(name: str) -> GPTConfig:
    """Return the config of a published shape. Raises HFError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise HFError(f"unknown shape {name!r}: there are {', '.join(SHAPES)}")
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
    """Return a name of DEFAULTS, or coupled_ and gpt2, llama or qwen3.

    The class that saved the model decides, else model_type. Raises HFError for any other.
    """
    named = hf.get("architectures") or [hf.get("model_type")]
    found = named[0] if isinstance(named, list) else named
    family = ARCHITECTURES.get(found, found) if isinstance(found, str) else ""
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
        HFError: our GPT does not compute what is asked for, or a value has the wrong type.
    """
    family = architecture(hf)
    base = family.removeprefix(COUPLED)
    hf = DEFAULTS[base] | hf
    for key, allowed in NEUTRAL.items():
        if key in hf and hf[key] not in allowed:
            raise HFError(f"{origin}: {key}={hf[key]!r} is not supported")
    try:
        layers = hf["n_layer" if base == "gpt2" else "num_hidden_layers"]
        if type(layers) is int and layers > MOST_LAYERS:  # before there is a list of them
            raise ValueError(f"{layers} blocks, more than {MOST_LAYERS}")
        keys = gpt2_keys(hf) if base == "gpt2" else llama_keys(hf, base)
        if base != family:
            keys |= {"norm_plan": hf["norm_plan"], "rms_bias": hf.get("norm_bias", False)}
            if SHARED in hf["norm_plan"]:
                keys |= {"norm_type": "coupled", "coupled_alpha": hf["coupled_alpha"]}
            else:
                keys["norm_type"] = "rms"
        overrides = Overrides(GPTConfig)
        for key, value in keys.items():
            overrides.set(key, value, origin)
        return overrides.build()
    except KeyError as error:
        raise HFError(f"{origin}: {error.args[0]} is missing: is the file complete?") from None
    except (ConfigError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise HFError(f"{origin}: {error}") from None


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
        "tie_embeddings": hf["tie_word_embeddings"],
    }


def llama_keys(hf: dict[str, Any], family: str) -> dict[str, Any]:
    """Return our keys for a config.json of Llama's shape. Raises as gpt2_keys does."""
    heads = hf["num_attention_heads"]
    keys = {
        "vocab_size": hf["vocab_size"],
        "block_size": hf["max_position_embeddings"],
        "n_layer": hf["num_hidden_layers"],
        "n_embd": hf["hidden_size"],
        "n_inner": hf["intermediate_size"],
        "n_head": heads,
        "n_kv_head": hf.get("num_key_value_heads") or heads,
        "head_dim": hf["head_dim"] or hf["hidden_size"] // heads,
        "activation": "swiglu",
        "position": "rope",
        "bias": family == "llama" and hf.get("mlp_bias", False),
        "attn_bias": hf.get("attention_bias", False),
        "norm_type": "rms",
        "norm_eps": hf["rms_norm_eps"],
        "qk_norm": QK_NORM.get(family),
        "tie_embeddings": hf["tie_word_embeddings"],
    }
    local = local_keys(hf, family)
    keys |= local
    keys |= rope_keys(hf, family, bool(local))
    if family == "gemma3_text":
        return keys | gemma3_keys(hf, keys)
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported")
    if family in ("olmo2", "olmo3"):
        keys |= {"norm_type": "olmo2", "output_eps": hf["rms_norm_eps"]}
    return keys


def gemma3_keys(hf: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from the `keys` of Llama's shape. Raises as gpt2_keys does."""
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    if ACTIVATIONS.get(activation) != "gelu_tanh":
        raise ValueError(f"hidden_activation={activation!r} is not supported")
    # The scores are divided by sqrt(query_pre_attn_scalar), which in most sizes is head_dim.
    scalar = hf.get("query_pre_attn_scalar", 256)
    blocks = keys["n_layer"]
    return {
        "n_kv_head": hf["num_key_value_heads"],
        "activation": "geglu",
        "attn_scale": 0.0 if scalar == keys["head_dim"] else scalar**-0.5,
        "embed_scale": keys["n_embd"] ** 0.5,
        # Peri-LN without its norm of the embeddings.
        "norm_type": "peri",
        "norm_plan": f"{'RR ' * blocks}R | {'RR ' * blocks}".strip(),
        "norm_gain": "one_plus",
        "output_eps": keys["norm_eps"],
    }


def local_keys(hf: dict[str, Any], family: str) -> dict[str, Any]:
    """Return our keys for sliding windows; empty if all blocks are global.

    Newer files list `layer_types`, older ones of Gemma 3 give `sliding_window_pattern`. Raises
    ValueError for windows in other families, and for other kinds of attention.
    """
    period = PERIODS.get(family)
    types = hf.get("layer_types")
    if not period:
        has_window = hf.get("sliding_window") is not None and hf.get("use_sliding_window", True)
        if has_window or set(types or ()) - {GLOBAL}:
            raise ValueError(
                f"sliding-window and other partial attention is not supported in {family}"
            )
        return {}
    layers = hf["num_hidden_layers"]
    if types is None:
        if family == "gemma3_text":
            period = hf.get("sliding_window_pattern", period)
        types = [GLOBAL if (layer + 1) % period == 0 else LOCAL for layer in range(layers)]
    if len(types) != layers or set(types) - {GLOBAL, LOCAL}:
        raise ValueError(f"layer_types={types} is not {layers} times {GLOBAL} or {LOCAL}")
    if LOCAL not in types:
        return {}
    letters = "".join("l" if kind == LOCAL else "g" for kind in types)
    # The shortest pattern that repeats, as a person would write it.
    repeats = (n for n in range(1, layers + 1) if (letters[:n] * layers)[:layers] == letters)
    return {"window": hf.get("sliding_window", 4096), "local_blocks": letters[: next(repeats)]}


def rope_keys(hf: dict[str, Any], family: str, has_local: bool) -> dict[str, Any]:
    """Return our keys for rotary positions.

    transformers 5 stores them in `rope_parameters`, for each kind of blocks where a family has
    local ones. Older versions have `rope_theta`, `rope_scaling` (of global blocks) and Gemma's
    `rope_local_base_freq`. Raises ValueError for a scaling that we do not compute.
    """
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    is_nested = any(isinstance(value, dict) for value in rope.values())
    if is_nested and (family not in PERIODS or set(rope) != {GLOBAL, LOCAL}):
        raise ValueError(f"rope parameters of {', '.join(rope)} are not supported in {family}")
    if family in PERIODS and hf.get("rope_parameters") and not is_nested:
        # transformers 5 ignores them, or has applied them to local blocks too.
        raise ValueError(
            f"rope_parameters without {GLOBAL} and {LOCAL}, or beside rope_scaling, "
            "are not supported"
        )
    local = {}
    if is_nested:
        local = rope[LOCAL] or {}
        rope = rope[GLOBAL] or {}
    theta = rope.get("rope_theta") or hf["rope_theta"]
    kind, scaling = rope_scaling(rope, hf)
    keys = {"rope_theta": theta, "rope_scaling": scaling, "rope_scaling_kind": kind}
    if not has_local:
        return keys
    if rope_scaling(local, {})[1]:
        raise ValueError(f"rope scaling in {LOCAL} is not supported")
    base = hf.get("rope_local_base_freq") or theta
    base = local.get("rope_theta") or base
    return keys | {"local_rope_theta": 0.0 if base == theta else base}


def rope_scaling(rope: dict[str, Any], hf: dict[str, Any]) -> tuple[str, tuple[float, ...]]:
    """Return our rope_scaling_kind and rope_scaling for one kind of blocks.

    Args:
        rope: its parameters.
        hf: the content of config.json, where some files have the original length.

    Raises:
        ValueError: we do not compute it.
        KeyError: a number is missing.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    # Variants of YaRN, with the values with which they change nothing.
    neutral = {"partial_rotary_factor": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}
    is_plain = all(rope.get(name, value) == value for name, value in neutral.items())
    if kind not in ("default", "llama3", "linear", "yarn") or not is_plain:
        raise ValueError(
            f"rope {rope} is not supported; rope_type default, llama3, linear and yarn are"
        )
    if kind == "default":
        return "llama3", ()
    factor = rope["factor"]
    numbers = dict(rope)
    if kind != "linear":
        numbers["original_length"] = hf.get(ORIGINAL) or rope[ORIGINAL]
    if kind == "yarn":
        # The defaults of transformers; attention_factor is that of Peng et al. 2023, equation 22.
        numbers["beta_fast"] = rope.get("beta_fast") or 32
        numbers["beta_slow"] = rope.get("beta_slow") or 1
        numbers["attention_factor"] = (
            rope.get("attention_factor") or 0.1 * math.log(max(factor, 1)) + 1
        )
    return kind, tuple(numbers[name] for name in ROPE_SCALINGS[kind])


# ---------------------------------------------------------------------------------- GPTConfig -> HF


def hf_config(config: GPTConfig) -> dict[str, Any]:
    """Return the config.json for a GPT's config.

    Raises HFError that names what no supported architecture computes.
    """
    plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
    family = family_of(config, plan)
    hf = gpt2_entries(config) if family == "gpt2" else llama_entries(config, family)
    has_bias = plan.rms_has_bias and "R" in plan.letters
    is_rms_in_gpt2 = family == "gpt2" and "R" in plan.letters
    is_coupled = SHARED in plan.letters or has_bias or is_rms_in_gpt2
    if is_coupled and plan.adds_plainly and set(plan.letters) <= {"R", SHARED}:
        family = COUPLED + family
        hf["norm_plan"] = str(plan)
        hf["norm_bias"] = has_bias
        # one for each position
        hf["coupled_alpha"] = np.broadcast_to(config.coupled_alpha, len(plan.letters)).tolist()
    [name] = [name for name, known in ARCHITECTURES.items() if known == family]
    if family.startswith(COUPLED):
        stem = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
        hf["auto_map"] = {
            "AutoConfig": f"{CODE}.{stem}Config",
            "AutoModelForCausalLM": f"{CODE}.{name}",
        }
    common = {
        "architectures": [name],
        "model_type": family,
        "vocab_size": config.n_vocab or config.vocab_size,  # without the rows of padding
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    hf = common | hf
    # What config.json cannot say is not what is read back from it.
    theirs = computed(gpt_config(hf, "the exported config"))
    for key, value in computed(config).items():
        # Biases that the architecture always has can be zero.
        if value != theirs[key] and (key != "bias" or value):
            raise HFError(
                f"{key}={getattr(config, key)!r} (norm_type={config.norm_type}, {plan}): no "
                f"{family} of transformers computes that, so it cannot be exported (convert.py "
                "--to=rms says whether it can become rms; layouts of OLMo 2 and Gemma 3 need rope "
                "and a gated MLP)"
            )
    return hf


def computed(config: GPTConfig) -> dict[str, Any]:
    """Return what a config computes, by the key that decides it, but for sizes and gains."""
    plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
    return {
        "norm_type": (
            plan.letters,
            plan.outputs,
            plan.embedding,
            plan.has_learned_scale,
            # A row of a norm file may have one of these two without the other.
            plan.type.embed,
            plan.type.residual_linear,
        ),
        "qk_norm": (config.qk_kind, config.has_v_norm),
        "output_eps": None if plan.adds_plainly else config.output_eps,
        "n_kv_head": config.kv_heads,
        "head_dim": config.head_channels,
        "rms_fraction": config.rms_fraction,
        "norm_groups": config.norm_groups,
        "rms_bias": plan.rms_has_bias and "R" in plan.letters,
        "window": [config.window_of(block) for block in range(config.n_layer)],
        "attn_scale": config.attn_scale or config.head_channels**-0.5,
        "embed_scale": f"{config.embed_scale:.5g}",
        "activation": config.activation,
        "bias": config.bias,
    }


def family_of(config: GPTConfig, plan: NormPlan) -> str:
    """Return the architecture that has the positions and the norms of a model, or comes nearest."""
    if config.position == "learned":
        return "gpt2"
    if plan.adds_plainly:
        return "qwen3" if plan.config.qk_kind == "head" else "llama"
    if set(plan.letters[:-1]) == {NONE}:
        return "olmo3" if config.window else "olmo2"
    return "gemma3_text"


def gpt2_entries(config: GPTConfig) -> dict[str, Any]:
    """Return the entries of config.json that GPT-2 alone has."""
    activations = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
    return {
        "n_positions": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": config.inner,
        "activation_function": activations.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def llama_entries(config: GPTConfig, family: str) -> dict[str, Any]:
    """Return the entries of config.json that Llama and the families of its shape have."""
    attn_bias = config.bias if config.attn_bias is None else config.attn_bias
    entries = {
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "intermediate_size": config.inner,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_channels,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_entries(config),
        "attention_bias": attn_bias,
    }
    if family in PERIODS:
        base = config.local_rope_theta or config.rope_theta
        entries["rope_parameters"] = {
            GLOBAL: entries["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": base},
        }
        # Without local blocks the number is not used, but transformers wants one.
        entries["sliding_window"] = config.window or config.block_size
        entries["layer_types"] = [
            LOCAL if config.window_of(block) else GLOBAL for block in range(config.n_layer)
        ]
    if family == "gemma3_text":
        entries["hidden_activation"] = "gelu_pytorch_tanh"
        # Scores are divided by its root.
        scalar = round(config.attn_scale**-2) if config.attn_scale else config.head_channels
        entries["query_pre_attn_scalar"] = scalar
    else:
        entries["hidden_act"] = "silu"
    if family == "llama":
        entries["mlp_bias"] = config.bias
    return entries


def rope_entries(config: GPTConfig) -> dict[str, Any]:
    """Return transformers' parameters of rotary positions in global blocks."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if not config.rope_scaling:
        return rope
    rope["rope_type"] = config.rope_scaling_kind
    names = ROPE_SCALINGS[config.rope_scaling_kind]
    for name, value in zip(names, config.rope_scaling, strict=True):
        is_length = name == "original_length"
        rope[ORIGINAL if is_length else name] = int(value) if is_length else value
    return rope
