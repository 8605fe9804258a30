"""Hugging Face checkpoints -> GPT: GPT-2, Qwen3 and Llama 3.x, streamed tensor by tensor out of safetensors files.

    model = load_hf("path/to/Qwen3-0.6B")                  # a folder with config.json and safetensors
    model = load_hf(resolve_hub("Qwen/Qwen3-0.6B"))        # the same from the hub
    model = random_model("llama3.2-1b", torch.bfloat16)    # the published shape with random weights, no download

What the two sides store differently:

    GPT-2          Conv1D weights are (in, out) there, Linear weights (out, in) here: transposed
    Qwen3, Llama   q_proj, k_proj, v_proj are the rows of our one qkv, gate_proj and up_proj of our one up

A config that asks for anything our GPT does not compute is refused. transformers is not needed to load weights.
"""

import difflib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from configurator import Overrides
from errors import UserError
from model import GPT, GPTConfig, rope_tables


class HFError(UserError):
    """A Hugging Face folder is missing, torn, of an unknown architecture, or asks for what our GPT does not have."""


ARCHITECTURES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# Keys of config.json that change what a model computes, with the values under which our GPT computes it.
NEUTRAL: dict[str, tuple] = {
    "quantization_config": (None,), "partial_rotary_factor": (1, None), "add_cross_attention": (False,),
    "is_causal": (True, None), "use_bidirectional_attention": (False, None),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
}  # fmt: skip
# Causal masks and rotary frequencies that old checkpoints store among their weights.
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Our module -> theirs. Those of a block are relative to blocks.N here, and to h.N or layers.N there.
GPT2_NAMES = {
    "wte": ["wte"], "wpe": ["wpe"], "norm_f": ["ln_f"], "lm_head": ["lm_head"], "blocks": ["h"],
    "norm1": ["ln_1"], "attn.qkv": ["attn.c_attn"], "attn.proj": ["attn.c_proj"],
    "norm2": ["ln_2"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"],
}  # fmt: skip
LLAMA_NAMES = {
    "wte": ["embed_tokens"], "norm_f": ["norm"], "lm_head": ["lm_head"], "blocks": ["layers"],
    "norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn.proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down": ["mlp.down_proj"],
}  # fmt: skip
NAMES = {"gpt2": GPT2_NAMES, "llama": LLAMA_NAMES, "qwen3": LLAMA_NAMES}

# The published shapes, in the words of their config.json.
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA32 = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8, "intermediate_size": 8192, "rope_theta": 5e5, "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


def _shape(base: dict, hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {**base, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, **more}  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
             "n_head": 12},
    "qwen3-0.6b": _shape(QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(QWEN3, 2048, 6144, 28, 16),
    "qwen3-8b": _shape(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama3.2-1b": _shape(LLAMA32, 2048, 8192, 16, 32, head_dim=64),
    "llama3.2-3b": _shape(LLAMA32, 3072, 8192, 28, 24, head_dim=128),
}  # fmt: skip


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> GPT:
    """The model of a Hugging Face folder, on the CPU, in eval mode, without dropout.

    Weights have `dtype`, or (None) the type that the embedding is stored in. `model.meta` names the tokenizer.
    Raises HFError (ConfigError for a value of the wrong type) in one line that names the key, file or tensor.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config, family = gpt_config(hf, str(folder / "config.json")), architecture(hf)
    with torch.device("meta"):  # shapes without memory, so that nothing is initialised only to be overwritten
        model = GPT(config)
    stored = open_tensors(folder)
    wanted = [name for name, _ in hf_pieces(model, family)]
    check_names(stored, wanted, folder)
    dtype = dtype or read_tensor(stored, wanted[0], folder).dtype
    model.to(dtype).to_empty(device="cpu")
    for name, piece in hf_pieces(model, family):
        tensor = read_tensor(stored, name, folder)
        if tensor.shape != piece.shape:
            raise HFError(f"{folder}: {name} is {tuple(tensor.shape)}, config.json wants {tuple(piece.shape)}")
        piece.copy_(tensor)
    head = stored.keys() & {"lm_head.weight"} - set(wanted)  # a tied head that is stored a second time
    if head and not torch.equal(read_tensor(stored, "lm_head.weight", folder).to(dtype), model.wte.weight):
        raise HFError(f"{folder}: lm_head.weight is not the embedding, though config.json ties them")
    if config.position == "rope":
        model.rope_cos, model.rope_sin = (table.to(dtype) for table in rope_tables(config))
    model.meta = {"tokenizer": "hf", "path": str(folder), "vocab_size": config.vocab_size}
    if family == "gpt2" and config.vocab_size == 50257:
        model.meta = {"tokenizer": "gpt2", "vocab_size": 50257}
    return model.eval()


def random_model(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> GPT:
    """GPT of a published shape with random weights, in eval mode: a key of SHAPES, e.g. "qwen3-0.6b".

    Weights are drawn in float32, then rounded to `dtype`. For the large shapes, `with torch.device("cuda")` around
    the call draws them on the GPU. Raises HFError for an unknown name.
    """
    model = GPT(shape_config(name), seed).to(dtype or torch.float32)
    model.meta = {"vocab_size": model.config.vocab_size, **({"tokenizer": "gpt2"} if name == "gpt2" else {})}
    return model.eval()


def shape_config(name: str) -> GPTConfig:
    """The config of a published shape. Raises HFError for a name that is not in SHAPES."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SHAPES)}"
        raise HFError(f"unknown shape {name!r}: {hint}")
    return gpt_config(SHAPES[name], f"shape {name}")


def resolve_hub(name: str) -> Path:
    """Folder of the hub repository `name`, e.g. "Qwen/Qwen3-0.6B", downloaded into Hugging Face's cache if need be.

    Raises HFError where huggingface_hub is not installed or the repository cannot be had.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise HFError(f"{name}: hub names need a package: pip install huggingface_hub, or give a folder") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "model*.safetensors", "tokenizer*", "*.txt"]))
    except Exception as error:  # whatever the hub, the HTTP library and the disk raise
        raise HFError(
            f"{name}: not a local folder, and the hub did not give it ({type(error).__name__}): check name, network "
            "and access rights, or give a folder"
        ) from None


def import_transformers() -> ModuleType:
    """transformers, which must not take our folder kernels/ for Hugging Face's package of that name.

    transformers looks once for a module `kernels` and remembers the answer; the name is hidden while it looks. So
    it always runs its own plain PyTorch code here. Raises HFError if transformers is not installed.
    """
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # to find_spec and import: there is no such module
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.integrations.hub_kernels")  # where it looks
        return transformers
    except ModuleNotFoundError as error:
        raise HFError(f"this needs a package ({error.name} is missing): pip install transformers") from None
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden


# ---------------------------------------------------------------------------------------------------------- config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises HFError."""
    path = folder / "config.json"
    if not path.is_file():
        raise HFError(f"{folder}: no config.json there, so not a Hugging Face model folder: check the path")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise HFError(f"{path}: not a JSON object ({error}): download it again") from None


def architecture(hf: dict[str, Any]) -> str:
    """gpt2, llama or qwen3: by the class that saved the model, else by model_type. Raises HFError."""
    found = (hf.get("architectures") or [hf.get("model_type")])[0]
    family = ARCHITECTURES.get(found, found)
    if family not in NAMES or hf.get("model_type", family) != family:
        raise HFError(f"architecture {found!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return family


def gpt_config(hf: dict[str, Any], origin: str) -> GPTConfig:
    """GPTConfig for the content of a config.json; absent keys have the defaults of transformers' config classes.

    Raises HFError for what our GPT does not compute, ConfigError for values of the wrong type; both name `origin`.
    """
    family = architecture(hf)
    for key, allowed in NEUTRAL.items():
        if key in hf and hf[key] not in allowed:
            raise HFError(f"{origin}: {key}={hf[key]!r} is not supported")
    windowed = hf.get("sliding_window") is not None and hf.get("use_sliding_window", True)
    if windowed or set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise HFError(f"{origin}: sliding-window and other partial attention is not supported")
    try:
        keys = gpt2_keys(hf) if family == "gpt2" else llama_keys(hf, family)
    except KeyError as error:
        raise HFError(f"{origin}: {error.args[0]} is missing: is the file complete?") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise HFError(f"{origin}: {error}") from None
    overrides = Overrides(GPTConfig)
    for key, value in keys.items():
        overrides.set(key, value, origin)
    return overrides.build()


def gpt2_keys(hf: dict[str, Any]) -> dict[str, Any]:
    activation = hf.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_function={activation!r} is not supported")
    return {
        "vocab_size": hf["vocab_size"], "block_size": hf["n_positions"], "n_layer": hf["n_layer"],
        "n_head": hf["n_head"], "n_embd": hf["n_embd"], "n_inner": hf.get("n_inner") or 4 * hf["n_embd"],
        "activation": ACTIVATIONS[activation], "position": "learned", "bias": True,
        "norm_type": "layer", "norm_eps": hf.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": hf.get("tie_word_embeddings", True),
    }  # fmt: skip


def llama_keys(hf: dict[str, Any], family: str) -> dict[str, Any]:
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported")
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"], "block_size": hf["max_position_embeddings"],
        "n_layer": hf["num_hidden_layers"], "n_embd": hf["hidden_size"], "n_inner": hf["intermediate_size"],
        "n_head": heads, "n_kv_head": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or (128 if family == "qwen3" else hf["hidden_size"] // heads),
        "activation": "swiglu", "position": "rope", **rope_keys(hf),
        "bias": family == "llama" and hf.get("mlp_bias", False), "attn_bias": hf.get("attention_bias", False),
        "norm_type": "rms", "norm_eps": hf.get("rms_norm_eps", 1e-6), "qk_norm": family == "qwen3",
        "tie_embeddings": hf.get("tie_word_embeddings", False),
    }  # fmt: skip


def rope_keys(hf: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope parameters of their own for each kind of layer are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rope {rope} is not supported; rope_type default and llama3 are")
    scaling: tuple[float, ...] = ()
    if kind == "llama3":
        original = hf.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        scaling = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original
    return {"rope_theta": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0, "rope_scaling": scaling}


# --------------------------------------------------------------------------------------------------------- tensors

Stored = dict[str, tuple[Any, str]]  # name without the base model's prefix -> (open safetensors file, name in it)


def open_tensors(folder: Path) -> Stored:
    """Where each tensor of the folder is; nothing but the headers is read. Raises HFError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise HFError(f"{folder}: reading it needs a package: pip install safetensors") from None
    stored: Stored = {}
    for path in shard_files(folder):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise HFError(f"{path}: torn or not safetensors ({error}): download it again") from None
        stored.update({re.sub(r"^(model|transformer)\.", "", name): (file, name) for name in file.keys()})  # noqa: SIM118
    return stored


def shard_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names. Raises HFError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise HFError(f"{folder}: neither {single.name} nor {index.name}: save the model as safetensors")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise HFError(f"{index}: not an index of safetensors shards: download it again") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise HFError(f"{folder}: shard {missing[0]} is missing ({len(missing)} of {len(names)}): download it again")
    return [folder / name for name in names]


def hf_pieces(model: GPT, family: str) -> Iterator[tuple[str, Tensor]]:
    """(their name, without prefix; our view of it) for every tensor they store, in our order of parameters.

    The view has their shape: rows of a packed weight, (in, out) for Conv1D.
    """
    config, names = model.config, NAMES[family]
    for ours, parameter in model.named_parameters():
        module, _, part = ours.rpartition(".")
        prefix = ""
        if module.startswith("blocks."):
            _, index, module = module.split(".", 2)
            prefix = f"{names['blocks'][0]}.{index}."
        theirs = names[module]
        views = [parameter]
        if len(theirs) > 1:  # qkv: query rows, then grouped key and value rows; up: gate rows, then up rows
            kv = config.kv_heads * config.head_channels
            rows = [config.n_head * config.head_channels, kv, kv] if len(theirs) == 3 else [config.inner] * 2
            views = parameter.detach().split(rows)
        for name, view in zip(theirs, views, strict=True):
            conv1d = family == "gpt2" and ".c_" in name and part == "weight"
            yield f"{prefix}{name}.{part}", view.detach().T if conv1d else view.detach()


def check_names(stored: Stored, wanted: list[str], folder: Path) -> None:
    """Raise HFError naming the first tensor that is missing or left over. A tied head may be stored all the same."""
    for name in wanted:
        if name not in stored:
            raise HFError(f"{folder}: tensor {name} is missing: are config.json and the weights of one model?")
    for name in sorted(stored.keys() - set(wanted)):
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name):
            raise HFError(f"{folder}: tensor {name} is not part of this architecture: it would be ignored, so refused")


def read_tensor(stored: Stored, name: str, folder: Path) -> Tensor:
    """One tensor as it is stored. Raises HFError for integers and 8-bit floats (quantised weights)."""
    file, full_name = stored[name]
    tensor = file.get_tensor(full_name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise HFError(f"{folder}: {name} is stored as {tensor.dtype}: quantised weights are not supported")
    return tensor
