"""Load Hugging Face checkpoints of the architectures of hf/config.py into a GPT, and write them.

Tensors are read one by one out of safetensors files.

    model = load_hf("path/to/Qwen3-0.6B")              # a folder with config.json and safetensors
    model = load_hf(resolve_hub("Qwen/Qwen3-0.6B"))    # the same from the hub (common/hub.py)
    export_hf(model, "path/to/folder")                 # and back

    python convert.py out/run --to=hf --out=path/to/folder
        the same export from the command line, for any model of ours

What the two sides store differently:

    GPT-2          Conv1D weights are (in, out) there, Linear weights (out, in) here: transposed
    all others     q_proj, k_proj, v_proj are the rows of our one qkv, gate_proj and up_proj of our
                   one up
    OLMo, Gemma 3  the norm of a block's output sits in that block there, and here at the position
                   that adds the output: the MLP's in the next block, or before the final norm

A config that asks for anything our GPT does not compute is refused. transformers is not needed.
What no stock class computes is written with its own classes, hf/modeling_coupled.py.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import DataError, HFError
from common.hub import INDEX, companions, converted_from, read_config, weight_names
from common.inputs import check_regular
from common.output import parse_json, whole_folder, write_bytes_atomically
from data.tokenizers import END_OF_TEXT, HFTokenizer, hf_tokenizer, load_tokenizer
from hf.config import CODE, COUPLED, architecture, gpt_config, hf_config
from model import GPT, check_memory, rope_buffers
from norms import Norm

MAX_SHARD_SIZE = 5 * 10**9  # bytes of a safetensors file
# Causal masks and rotary frequencies that old checkpoints store among their weights.
BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

# Our module -> theirs. Names within a block are relative to blocks.N here, and to h.N or layers.N
# there.
GPT2_NAMES = {
    "wte": "wte",
    "wpe": "wpe",
    "norm_f.norm": "ln_f",
    "lm_head": "lm_head",
    "blocks": "h",
    "norm1.norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LLAMA_NAMES = {
    "wte": "embed_tokens",
    "norm_f.norm": "norm",
    "lm_head": "lm_head",
    "blocks": "layers",
    "norm1.norm": "input_layernorm",
    "norm2.norm": "post_attention_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.up": "mlp.gate_proj mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Llama's post_attention_layernorm is before the MLP, that of OLMo and Gemma is attention's output
# norm. A block's norm1.output is here that of its own MLP (hf_pieces).
OLMO_NAMES = LLAMA_NAMES | {
    "norm2.output": "post_attention_layernorm",
    "norm1.output": "post_feedforward_layernorm",
}
GEMMA_NAMES = OLMO_NAMES | {"norm2.norm": "pre_feedforward_layernorm"}
NAMES = {
    "gpt2": GPT2_NAMES,
    "llama": LLAMA_NAMES,
    "qwen3": LLAMA_NAMES,
    "olmo2": OLMO_NAMES,
    "olmo3": OLMO_NAMES,
    "gemma3_text": GEMMA_NAMES,
}
# Keys of config.json and generation_config.json.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> GPT:
    """Load the model of a Hugging Face folder, on the CPU, in eval mode, without dropout.

    `model.meta` names the tokenizer.

    Args:
        dtype: of the weights; None for the type that the embedding is stored in.

    Raises:
        HFError: in one line that names the key, file or tensor.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config = gpt_config(hf, str(folder / "config.json"))
    family = architecture(hf)
    stored = open_tensors(folder)
    # Shapes without memory, so that nothing is initialised only to be overwritten.
    with torch.device("meta"):
        model = GPT(config)
    wanted = [name for name, _ in hf_pieces(model, family)]
    for name in sorted(stored.keys() - set(wanted)):
        if name != "lm_head.weight" and not BUFFERS.fullmatch(name):
            raise HFError(
                f"{folder}: tensor {name} is not part of this architecture: "
                "it would be ignored, so refused"
            )
    dtype = dtype or read_tensor(stored, wanted[0], folder).dtype
    check_memory(config, dtype.itemsize)
    model.to(dtype).to_empty(device="cpu")
    for name, piece in hf_pieces(model, family):
        tensor = read_tensor(stored, name, folder)
        if tensor.shape != piece.shape:
            shapes = f"{tuple(tensor.shape)}, config.json asks for {tuple(piece.shape)}"
            raise HFError(f"{folder}: {name} is {shapes}")
        if not tensor.isfinite().all():
            raise HFError(f"{folder}: {name} is not finite: download it again")
        piece.copy_(tensor)
    # A tied head may be stored a second time. It must then be the embedding.
    if "lm_head.weight" in stored and "lm_head.weight" not in wanted:
        head = read_tensor(stored, "lm_head.weight", folder).to(dtype)
        if not torch.equal(head, model.wte.weight):
            raise HFError(
                f"{folder}: lm_head.weight is not the embedding, though config.json ties them"
            )
    for name, table in rope_buffers(config).items():
        # Computed in float32, then rounded: `to_empty` left them without content.
        setattr(model, name, table.to(dtype))
    model.meta = {"tokenizer": "hf", "path": str(folder), "vocab_size": config.vocab_size}
    # Other languages' models have this shape too, and tokenizers of their own.
    has_own = (folder / "tokenizer.json").exists()
    if family == "gpt2" and config.vocab_size == 50257 and not has_own:
        model.meta["tokenizer"] = "gpt2"
    return model.eval()


def export_hf(
    model: GPT, folder: str | Path, max_shard_size: int = MAX_SHARD_SIZE, certificate: bytes = b""
) -> Path:
    """Write `model` as a Hugging Face folder: two configs, safetensors, tokenizer.

    A model whose norms all compute their own statistic has its stock architecture. One that shares
    statistics (or has RMSNorm with biases or on GPT-2's shape) is coupled_gpt2, coupled_qwen3 or
    coupled_llama; its folder has the code of these classes too, for trust_remote_code=True. Rows of
    padding in the vocabulary are left out. Where the model's tokenizer cannot be had (GPT-2's
    without a network), a warning says so, and the rest is written.

    Args:
        max_shard_size: bytes of a safetensors file; a larger single tensor has a file for itself.
        certificate: JSON of the conversion that the model comes from. config.json says in
            `converted_from` what that was. If it folded gains, config.json gets the certificate's
            SHA-256 as `weightless_norms`, as fold.hub.save writes it.

    Returns:
        The folder.

    Raises:
        HFError: no architecture computes what the model does, or the folder is not empty.
    """
    folder = Path(folder)
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    hf = hf_config(model.config)
    hf["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    target = export_target(model, hf)
    # The folder that the model was loaded from, or that its tokenizer is from
    source = Path(model.meta.get("path", "nowhere"))
    theirs = config_of(model, source)
    beside = list(companions(source))
    if theirs:
        hf |= {key: theirs[key] for key in TOKENS if key in theirs}
    elif model.meta.get("tokenizer") == "hf":
        try:
            hf |= load_tokenizer(model.meta).special
        except DataError as error:
            beside = []
            warnings.warn(f"the folder has no tokenizer: {error}", stacklevel=2)
    prefix = "transformer." if target.wpe is not None else "model."
    pieces = {
        name if name.startswith("lm_head.") else prefix + name: piece
        for name, piece in hf_pieces(target, hf["model_type"])
    }
    shards = split_torch_state_dict_into_shards(pieces, max_shard_size=max_shard_size)
    try:
        with whole_folder(folder) as partial:
            for file, names in shards.filename_to_tensors.items():
                contiguous = {name: pieces[name].contiguous() for name in names}
                save_file(contiguous, partial / file, metadata={"format": "pt"})
            if shards.is_sharded:
                index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                write_json(partial / INDEX, index)
            for companion in beside:
                if theirs or companion.name != "generation_config.json":
                    shutil.copy(companion, partial)
            if beside and not theirs and model.meta["tokenizer"] == "hf":
                read_as_it_is(partial, load_tokenizer(model.meta))
            is_ours = model.meta.get("tokenizer") in ("bytes", "chars", "gpt2")
            if is_ours and not (partial / "tokenizer.json").exists():
                hf |= write_tokenizer(model, partial)
            if "auto_map" in hf:
                shutil.copy(Path(__file__).with_name(f"{CODE}.py"), partial)
            if certificate:
                (partial / "certificate.json").write_bytes(certificate)
                hf["converted_from"] = converted_from(certificate)
            if b" -> weightless" in certificate:
                hf["weightless_norms"] = hf["converted_from"]["certificate"]
            write_json(partial / "config.json", hf)
            if not (partial / "generation_config.json").exists():
                tokens = {key: hf[key] for key in TOKENS if key in hf}
                write_json(partial / "generation_config.json", tokens)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HFError(
            f"{folder}: cannot be written ({reason}): make room, or choose another folder"
        ) from None
    return folder


def export_target(model: GPT, hf: dict[str, Any]) -> GPT:
    """Return the GPT that load_hf will make of the exported folder, with the model's weights.

    Padding of the vocabulary is gone. Biases that the architecture always has are zero, gains that
    it always has are one. Gains are stored as the architecture stores them.
    """
    with torch.device("meta"):
        target = GPT(gpt_config(hf, "the exported config"))
    # Block numbers of LayerNorm scaling go into the gains.
    own = model.state_dict()
    weights = {name: tensor for name, tensor in own.items() if not name.endswith(".depth")}
    for name in ("wte.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][: model.n_vocab]
    dtype = model.wte.weight.dtype
    for name, norm in target.named_modules():
        if isinstance(norm, Norm) and norm.weight is not None:
            weights[f"{name}.weight"] = norm.weight_for(model.get_submodule(name)).to(dtype)
    for name, tensor in target.state_dict().items():
        weights.setdefault(name, torch.zeros(tensor.shape, dtype=dtype))
    target.load_state_dict(weights, assign=True)
    return target


def config_of(model: GPT, source: Path) -> dict[str, Any]:
    """Return the config.json of a folder if it is that of `model`, perhaps converted; else {}.

    A folder whose tokenizer alone is used may hold another model, or none.
    """
    try:
        theirs = read_config(source)
        config = gpt_config(theirs, str(source))
    except HFError:
        return {}
    keys = ("n_layer", "n_embd", "n_head")
    is_same = all(getattr(config, key) == getattr(model.config, key) for key in keys)
    return theirs if is_same else {}


def read_as_it_is(folder: Path, tokenizer: HFTokenizer) -> None:
    """Let transformers take the tokenizer.json of a folder as it is.

    A class of one model's tokenizer, which tokenizer_config.json names or transformers guesses,
    builds parts of it anew: other ids than those that the model was trained on.
    """
    path = folder / "tokenizer_config.json"
    content = parse_json(path.read_bytes()) if path.exists() else {}
    for name in ("auto_map", "add_prefix_space"):
        content.pop(name, None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, token in tokenizer.special.items():
        content[name.removesuffix("_id")] = tokenizer.tokenizer.id_to_token(token)
    write_json(path, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, indented."""
    write_bytes_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def write_tokenizer(model: GPT, folder: Path) -> dict[str, int]:
    """Write our own tokenizer as transformers reads it.

    Returns:
        The ids of its end-of-text token for config.json; empty if it has no such token, or if the
        tokenizer cannot be had, for which a warning is given.
    """
    try:
        tokenizer = hf_tokenizer(load_tokenizer(model.meta))
    except (DataError, ImportError) as error:
        warnings.warn(f"the folder has no tokenizer: {error}", stacklevel=3)
        return {}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.block_size,
    }
    end = tokenizer.token_to_id(END_OF_TEXT)
    names = ("bos_token", "eos_token") if end is not None else ()
    settings |= dict.fromkeys(names, END_OF_TEXT)
    write_bytes_atomically(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_json(folder / "tokenizer_config.json", settings)
    return {f"{name}_id": end for name in names}


# ------------------------------------------------------------------------------------------ tensors


# Name without the base model's prefix -> (open safetensors file, name in it).
Stored = dict[str, tuple[Any, str]]


def open_tensors(folder: Path) -> Stored:
    """Find each tensor of the folder; only the files' headers are read. Raises HFError."""
    from safetensors import SafetensorError, safe_open

    stored: Stored = {}
    for path in (folder / name for name in weight_names(folder)):
        check_regular(path)
        if not path.exists():
            raise HFError(
                f"{folder}: {path.name} is missing, or the {INDEX} that names the safetensors "
                "files: get the folder again"
            )
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise HFError(f"{path}: torn or not safetensors ({error}): download it again") from None
        names = file.keys()  # the file itself cannot be iterated over
        for name in names:
            short = re.sub(r"^(model|transformer)\.", "", name)
            if short in stored:
                raise HFError(f"{path}: {name} is stored twice in this folder: get it again")
            stored[short] = (file, name)
    return stored


def hf_pieces(model: GPT, family: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (their name, our view) for every tensor that they store, in our order of parameters.

    The name is without the base model's prefix. The view has their shape: some rows of a packed
    weight, (in, out) for Conv1D, (1, C) for gains of coupled models. Writing into it writes into
    our parameter.
    """
    config = model.config
    names = NAMES[family.removeprefix(COUPLED)]
    is_coupled = family.startswith(COUPLED)
    query_rows = config.n_head * config.head_channels
    kv_rows = config.kv_heads * config.head_channels
    rows = {
        2: [config.inner, config.inner],  # up: gate, up
        3: [query_rows, kv_rows, kv_rows],  # qkv: queries, grouped keys, grouped values
    }
    for ours, parameter in model.named_parameters():
        module, _, part = ours.rpartition(".")
        block = None
        if module.startswith("blocks."):
            _, number, module = module.split(".", 2)
            block = int(number)
        elif module == "norm_f.output":
            block = config.n_layer
            module = "norm1.output"
        if module == "norm1.output":
            block -= 1  # the MLP of the block before
        prefix = "" if block is None else f"{names['blocks']}.{block}."
        theirs = names[module].split()
        whole = parameter.detach()
        views = whole.split(rows.get(len(theirs), len(whole)))  # one, where it is not packed
        for name, view in zip(theirs, views, strict=True):
            if names is GPT2_NAMES and ".c_" in name and part == "weight":
                view = view.T  # Conv1D
            elif is_coupled and module in ("norm1.norm", "norm2.norm", "norm_f.norm"):
                view = view[None]  # (1, C), see hf/modeling_coupled.py
            yield f"{prefix}{name}.{part}", view


def read_tensor(stored: Stored, name: str, folder: Path) -> Tensor:
    """Read one tensor in the type that it is stored in.

    Raises HFError where it is missing, and for integers and 8-bit floats (quantised weights).
    """
    if name not in stored:
        raise HFError(
            f"{folder}: tensor {name} is missing: are all safetensors files there, and of the same "
            "model as config.json?"
        )
    file, full_name = stored[name]
    tensor = file.get_tensor(full_name)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise HFError(
            f"{folder}: {name} is stored as {tensor.dtype}: quantised weights are not supported"
        )
    return tensor
