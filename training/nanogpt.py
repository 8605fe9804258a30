"""Checkpoints of nanoGPT (ckpt.pt), read as ours. Its keys: common/nanogpt.py.

Linears are stored as ours are. The optimiser's state is left out.
"""

import re
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from data.shards import GPT2, read_meta

FILE = "ckpt.pt"
# Their module -> ours; compiled, all names have a prefix.
NAMES = {
    r"(_orig_mod\.)?(transformer\.)?": "",
    r"h\.": "blocks.",
    r"ln_f\.": "norm_f.norm.",
    r"(.*\.)ln_([12])\.": r"\1norm\2.norm.",
    r"(.*)\.c_attn\.": r"\1.qkv.",
    r"(.*)\.attn\.c_proj\.": r"\1.attn.proj.",
    r"(.*)\.c_fc\.": r"\1.up.",
    r"(.*)\.mlp\.c_proj\.": r"\1.mlp.down.",
}
MASK = re.compile(r"blocks\.\d+\.attn\.bias")  # causal, of versions without flash attention


def as_ours(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint of nanoGPT as one of ours, with the tokenizer of its data.

    It is in data/DATASET beside the run folder or here; else GPT-2's, if the vocabulary is.

    Raises:
        CheckpointError: its entries are not what nanoGPT saves.
    """
    try:
        weights = {name_today(name): tensor for name, tensor in state["model"].items()}
        head = weights.pop("lm_head.weight")
        is_tied = torch.equal(head, weights["wte.weight"])
        config = {"bias": True, **state["model_args"], "tie_embeddings": is_tied}
        dataset = state.get("config", {}).get("dataset")
        meta = {}
        for folder in (path.resolve().parents[1], Path()) if dataset else ():
            meta = meta or read_meta(folder / "data" / dataset)
        if not meta and config["vocab_size"] >= GPT2["vocab_size"]:
            meta = GPT2
    except (LookupError, TypeError, AttributeError):  # a foreign file may hold anything
        raise CheckpointError(
            f"{path}: its model_args are nanoGPT's, its other entries are not: use another one"
        ) from None
    if not is_tied:
        weights["lm_head.weight"] = head
    weights = {name: tensor for name, tensor in weights.items() if not MASK.fullmatch(name)}
    return {"step": state.get("iter_num", 0), "config": config, "meta": meta, "model": weights}


def name_today(name: str) -> str:
    """Return our name of one of their tensors."""
    for theirs, ours in NAMES.items():
        name = re.sub(f"^{theirs}", ours, name)
    return name
