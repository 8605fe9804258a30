"""Hugging Face's generate beside our arms, with our weights: dynamic cache in eager mode, static
cache compiled.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common.errors import HFError, UserError
from hf import weights
from hf.config import SHAPES, architecture
from hf.coupled import register
from hf.hub import import_transformers
from model import GPT

NAMES = ("hf_eager", "hf_static")
SAME_MODEL = 0.05  # relative distance of a peer's logits from ours up to which it is the same model


def arms(
    spec: str, model: GPT, idx: Tensor, tokens: int, compiled: bool, missing: list[str]
) -> dict[str, Callable[[], None]]:
    """Calls that generate `tokens` tokens behind idx (B, T), and beside each, `NAME prefill`, a
    single one: the difference is decoding. What cannot run is left out, and the reason appended to
    `missing`.
    """
    calls: dict[str, Callable[[], None]] = {}
    try:
        peer = hf_model(spec, model)
        with torch.no_grad():
            check_same_logits(model(idx[:1]), peer(idx[:1]).logits[..., : model.n_vocab])
    except UserError as error:
        missing.append(f"Hugging Face: {error}")
        return calls
    for name, static in (("hf_eager", False), ("hf_static", True)):
        if static and not compiled:
            continue
        found = {}
        try:
            for word, count in ((name, tokens), (f"{name} prefill", 1)):
                found[word] = functools.partial(generate, peer, idx, count, static, tokens)
                found[word]()
            calls |= found
        except Exception as failure:  # another library's limits are no failure of this program
            missing.append(
                f"{name}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
            )
    return calls


def hf_model(spec: str, model: GPT) -> torch.nn.Module:
    """transformers' model of the same weights, in the same type on the same device.

    Raises HFError.
    """
    transformers = import_transformers()
    register()  # a folder may be of a coupled class
    weight = model.wte.weight
    if (
        Path(spec).is_dir()
        and (Path(spec) / "config.json").is_file()
        and not (Path(spec) / "log.jsonl").exists()
    ):
        peer = transformers.AutoModelForCausalLM.from_pretrained(spec, dtype=weight.dtype).to(
            weight.device
        )
        return peer.eval()
    name = spec.removeprefix("random:")
    if name == spec or name not in SHAPES:
        raise HFError(f"no model of its own for {spec}")
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    with torch.device(weight.device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=weight.dtype).eval()
    theirs = {
        key.removeprefix("model.").removeprefix("transformer."): value
        for key, value in peer.named_parameters()
    }
    with torch.no_grad():
        for key, piece in weights.hf_pieces(model, architecture(SHAPES[name])):
            theirs.pop(key).copy_(piece)
    if left := [key for key in theirs if key != "lm_head.weight"]:
        raise HFError(f"{left[0]} has no counterpart in our model")
    return peer


def check_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """Raise UserError if a peer's logits are too far from ours for it to be the same model."""
    ours, theirs = ours.float(), theirs.float()
    distance = ((ours - theirs).norm() / ours.norm()).item()
    if not distance < SAME_MODEL:
        raise UserError(f"its logits are {distance:.2g} off ours: not the same model, so not timed")


@torch.no_grad()
def generate(peer: torch.nn.Module, idx: Tensor, count: int, static: bool, longest: int) -> None:
    """Greedy generation of `count` tokens; a static cache is as long for all counts, so that
    nothing is recompiled.
    """
    more = (
        {"cache_implementation": "static", "max_cache_len": idx.shape[1] + longest}
        if static
        else {}
    )
    peer.generate(
        idx,
        attention_mask=torch.ones_like(idx),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **more,
    )
    if idx.is_cuda:
        torch.cuda.synchronize()
