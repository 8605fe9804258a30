"""Hugging Face checkpoints -> GPT: GPT-2, Qwen3 and Llama 3.x, streamed tensor by tensor out of
safetensors files.

    model = load_hf("path/to/Qwen3-0.6B")              # a folder with config.json and safetensors
    model = load_hf(resolve_hub("Qwen/Qwen3-0.6B"))    # the same from the hub (hf/hub.py)
    export_hf(model, "path/to/folder")                 # and back: stock classes, or hf/coupled.py's

    # export from the command line: any model of ours
    python convert.py out/run --to=hf --out=path/to/folder

What the two sides store differently:

    GPT-2          Conv1D weights are (in, out) there, Linear weights (out, in) here: transposed
    Qwen3, Llama   q_proj, k_proj, v_proj are the rows of our one qkv, gate_proj and up_proj of our
                   one up

A config that asks for anything our GPT does not compute is refused. transformers is not needed.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import DataError, HFError
from common.output import write_bytes_atomically
from data.tokenizers import END_OF_TEXT, hf_tokenizer, load_tokenizer
from hf.config import COUPLED, architecture, gpt_config, hf_config
from hf.hub import read_config
from model import GPT, rope_tables

SHARD_BYTES = 5 << 30  # of a safetensors file
# Causal masks and rotary frequencies that old checkpoints store among their weights.
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Our module -> theirs. Those of a block are relative to blocks.N here, and to h.N or layers.N
# there.
GPT2_NAMES = {
    "wte": ["wte"],
    "wpe": ["wpe"],
    "norm_f": ["ln_f"],
    "lm_head": ["lm_head"],
    "blocks": ["h"],
    "norm1": ["ln_1"],
    "attn.qkv": ["attn.c_attn"],
    "attn.proj": ["attn.c_proj"],
    "norm2": ["ln_2"],
    "mlp.up": ["mlp.c_fc"],
    "mlp.down": ["mlp.c_proj"],
}
LLAMA_NAMES = {
    "wte": ["embed_tokens"],
    "norm_f": ["norm"],
    "lm_head": ["lm_head"],
    "blocks": ["layers"],
    "norm1": ["input_layernorm"],
    "norm2": ["post_attention_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
NAMES = {"gpt2": GPT2_NAMES, "llama": LLAMA_NAMES, "qwen3": LLAMA_NAMES}
# Files beside the weights that an export takes along.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> GPT:
    """The model of a Hugging Face folder, on the CPU, in eval mode, without dropout.

    Weights have `dtype`, or (None) the type that the embedding is stored in. `model.meta` names the
    tokenizer. Raises HFError (ConfigError for a value of the wrong type) in one line that names the
    key, file or tensor.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config, family = gpt_config(hf, str(folder / "config.json")), architecture(hf)
    # shapes without memory, so that nothing is initialised only to be overwritten
    with torch.device("meta"):
        model = GPT(config)
    stored = open_tensors(folder)
    wanted = [name for name, _ in hf_pieces(model, family)]
    check_names(stored, wanted, folder)
    dtype = dtype or read_tensor(stored, wanted[0], folder).dtype
    model.to(dtype).to_empty(device="cpu")
    for name, piece in hf_pieces(model, family):
        tensor = read_tensor(stored, name, folder)
        if tensor.shape != piece.shape:
            raise HFError(
                f"{folder}: {name} is {tuple(tensor.shape)}, config.json wants {tuple(piece.shape)}"
            )
        piece.copy_(tensor)
    # a tied head that is stored a second time
    head = stored.keys() & {"lm_head.weight"} - set(wanted)
    if head and not torch.equal(
        read_tensor(stored, "lm_head.weight", folder).to(dtype), model.wte.weight
    ):
        raise HFError(
            f"{folder}: lm_head.weight is not the embedding, though config.json ties them"
        )
    if config.position == "rope":
        model.rope_cos, model.rope_sin = (table.to(dtype) for table in rope_tables(config))
    model.meta = {"tokenizer": "hf", "path": str(folder), "vocab_size": config.vocab_size}
    if family == "gpt2" and config.vocab_size == 50257:
        model.meta = {"tokenizer": "gpt2", "vocab_size": 50257}
    return model.eval()


def export_hf(model: GPT, folder: str | Path) -> Path:
    """Write `model` as a Hugging Face folder (config.json, safetensors, tokenizer); the folder.

    A model whose norms all compute their own statistic has its stock architecture, and one that
    shares statistics (or has RMSNorm on GPT-2's shape) is coupled_gpt2, coupled_qwen3 or
    coupled_llama. Rows of padding in the vocabulary are left out. Raises HFError for what no
    architecture computes, and where the folder is not empty. Warns where the model's tokenizer
    cannot be had (GPT-2's without a network), and writes the rest.
    """
    folder = Path(folder)
    if any(folder.glob("*")):
        raise HFError(f"{folder}: there is something in it: choose a new folder")
    if find_spec("safetensors") is None:
        raise HFError(f"{folder}: writing it needs a package: pip install safetensors")
    words = hf_config(model.config)
    family, weights = words["model_type"], dict(model.state_dict())
    for name in {"wte.weight", "lm_head.weight"} & weights.keys():
        weights[name] = weights[name][: model.n_vocab]
    with torch.device("meta"):
        target = GPT(gpt_config(words, "the exported config"))  # what load_hf will make of it
    # biases that the architecture always has, gains of no effect
    for name, tensor in target.state_dict().items():
        if name not in weights:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            weights[name] = fill(tensor.shape, dtype=model.wte.weight.dtype)
    target.load_state_dict(weights, assign=True)
    words["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    if (source := Path(model.meta.get("path", "nowhere"))).is_dir():
        theirs = read_config(source) if (source / "config.json").exists() else {}
        words |= {
            key: theirs[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if key in theirs
        }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(
            folder,
            hf_pieces(target, family),
            "transformer." if target.wpe is not None else "model.",
        )
        for companion in (path for pattern in COMPANIONS for path in source.glob(pattern)):
            shutil.copy(companion, folder)
        if (
            model.meta.get("tokenizer") in ("bytes", "chars", "gpt2")
            and not (folder / "tokenizer.json").exists()
        ):
            words |= write_tokenizer(model, folder)
        write_bytes_atomically(
            folder / "config.json", (json.dumps(words, indent=1) + "\n").encode()
        )
    except OSError as error:
        raise HFError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def write_tokenizer(model: GPT, folder: Path) -> dict[str, int]:
    """Write our own tokenizer as transformers reads it; the ids of its end-of-text token for
    config.json.
    """
    words: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.block_size,
    }
    try:
        tokenizer = hf_tokenizer(load_tokenizer(model.meta))
    except DataError as error:
        warnings.warn(f"{folder}: written without a tokenizer: {error}", stacklevel=3)
        return {}
    end = tokenizer.token_to_id(END_OF_TEXT)
    keys = ("bos_token", "eos_token") if end is not None else ()
    words |= dict.fromkeys(keys, END_OF_TEXT)
    write_bytes_atomically(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_bytes_atomically(
        folder / "tokenizer_config.json", (json.dumps(words, indent=1) + "\n").encode()
    )
    return {f"{key}_id": end for key in keys}


# ------------------------------------------------------------------------------------------ tensors


def write_tensors(folder: Path, pieces: Iterator[tuple[str, Tensor]], prefix: str) -> None:
    """Safetensors shards of about SHARD_BYTES, and their index if there are several; `prefix` is
    the base model's.
    """
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, piece in pieces:
        if filled and filled + piece.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name if name.startswith("lm_head.") else prefix + name] = piece
        filled += piece.nbytes
    count = len(shards)
    names = (
        [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else []
    )
    for name, shard in zip(names or ["model.safetensors"], shards, strict=True):
        save_file(
            {key: piece.contiguous() for key, piece in shard.items()},
            folder / name,
            metadata={"format": "pt"},
        )
    if names:
        index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        content = {
            "metadata": {"total_size": sum(p.nbytes for shard in shards for p in shard.values())}
        }
        write_bytes_atomically(
            folder / "model.safetensors.index.json",
            json.dumps(content | {"weight_map": index}, indent=1).encode(),
        )


# name without the base model's prefix -> (open safetensors file, name in it)
Stored = dict[str, tuple[Any, str]]


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
        names = file.keys()
        stored.update({re.sub(r"^(model|transformer)\.", "", name): (file, name) for name in names})
    return stored


def shard_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names.

    Raises HFError if one is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise HFError(
            f"{folder}: neither {single.name} nor {index.name}: save the model as safetensors"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise HFError(f"{index}: not an index of safetensors shards: download it again") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise HFError(
            f"{folder}: shard {missing[0]} is missing ({len(missing)} of {len(names)}): "
            "download it again"
        )
    return [folder / name for name in names]


def hf_pieces(model: GPT, family: str) -> Iterator[tuple[str, Tensor]]:
    """(their name, without prefix; our view of it) for every tensor they store, in our order of
    parameters.

    The view has their shape: rows of a packed weight, (in, out) for Conv1D, (1, C) for gains of
    coupled models.
    """
    config, names = model.config, NAMES[family.removeprefix(COUPLED)]
    for ours, parameter in model.named_parameters():
        module, _, part = ours.rpartition(".")
        prefix = ""
        if module.startswith("blocks."):
            _, index, module = module.split(".", 2)
            prefix = f"{names['blocks'][0]}.{index}."
        theirs = names[module]
        views = [parameter]
        # qkv: query rows, then grouped key and value rows; up: gate rows, then up rows
        if len(theirs) > 1:
            kv = config.kv_heads * config.head_channels
            rows = (
                [config.n_head * config.head_channels, kv, kv]
                if len(theirs) == 3
                else [config.inner] * 2
            )
            views = parameter.detach().split(rows)
        for name, view in zip(theirs, views, strict=True):
            view = view.detach()
            if names is GPT2_NAMES and ".c_" in name and part == "weight":  # Conv1D
                view = view.T
            elif family.startswith(COUPLED) and module in ("norm1", "norm2", "norm_f"):
                # (1, C): no stock class can take it for a norm with its own statistic
                view = view[None]
            yield f"{prefix}{name}.{part}", view


def check_names(stored: Stored, wanted: list[str], folder: Path) -> None:
    """Raise HFError naming the first tensor that is missing or left over.

    A tied head may be stored all the same.
    """
    for name in wanted:
        if name not in stored:
            raise HFError(
                f"{folder}: tensor {name} is missing: are config.json and the weights of one model?"
            )
    for name in sorted(stored.keys() - set(wanted)):
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name):
            raise HFError(
                f"{folder}: tensor {name} is not part of this architecture: "
                "it would be ignored, so refused"
            )


def read_tensor(stored: Stored, name: str, folder: Path) -> Tensor:
    """One tensor as it is stored.

    Raises HFError for integers and 8-bit floats (quantised weights).
    """
    file, full_name = stored[name]
    tensor = file.get_tensor(full_name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise HFError(
            f"{folder}: {name} is stored as {tensor.dtype}: quantised weights are not supported"
        )
    return tensor
