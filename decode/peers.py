"""Hugging Face's generate as a peer of our arms, with our weights.

It runs with a dynamic cache in eager mode, and with a static cache, compiled.
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
SAME_MODEL = 0.05  # a peer whose logits differ by more than this, relatively, is another model


def arms(
    spec: str, model: GPT, idx: Tensor, tokens: int, compiled: bool, missing: list[str]
) -> dict[str, Callable[[], None]]:
    """Make the calls that are timed.

    generate reads the prompt too, so there are two calls a peer: NAME generates `tokens` tokens
    after idx (B, T), `NAME prefill` a single one. The difference of their times is decoding.

    Args:
        compiled: also the static cache.
        missing: the reason is appended for each peer that cannot run; it has no call.
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
        found = {
            name: functools.partial(generate, peer, idx, tokens, static, tokens),
            f"{name} prefill": functools.partial(generate, peer, idx, 1, static, tokens),
        }
        try:
            for call in found.values():
                call()
        except Exception as failure:  # another library's limits are no failure of this program
            missing.append(f"{name}: {one_line(failure)}")
            continue
        calls |= found
    return calls


def one_line(failure: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(failure).splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"


def hf_model(spec: str, model: GPT) -> torch.nn.Module:
    """Return the model of transformers with the same weights, type and device.

    Raises:
        HFError: transformers is not installed, or has no such model.
    """
    transformers = import_transformers()
    register()  # an exported folder may use our coupled class
    weight = model.wte.weight
    folder = Path(spec)
    is_run = (folder / "log.jsonl").exists()  # ours, which has a config.json as well
    if (folder / "config.json").is_file() and not is_run:
        peer = transformers.AutoModelForCausalLM.from_pretrained(spec, dtype=weight.dtype)
        return peer.to(weight.device).eval()
    name = spec.removeprefix("random:")
    if name == spec or name not in SHAPES:
        raise HFError(f"transformers has no model for {spec}")
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    with torch.device(weight.device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=weight.dtype).eval()
    theirs = {}
    for key, value in peer.named_parameters():
        theirs[key.removeprefix("model.").removeprefix("transformer.")] = value
    with torch.no_grad():
        for key, piece in weights.hf_pieces(model, architecture(SHAPES[name])):
            theirs.pop(key).copy_(piece)
    left = [key for key in theirs if key != "lm_head.weight"]  # the head may be the embedding
    if left:
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
    """Generate `count` tokens greedily.

    A static cache has room for `longest` tokens at every count, so nothing is compiled twice.
    """
    cache = {}
    if static:
        cache = {"cache_implementation": "static", "max_cache_len": idx.shape[1] + longest}
    peer.generate(
        idx,
        attention_mask=torch.ones_like(idx),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **cache,
    )
    if idx.is_cuda:
        torch.cuda.synchronize()
