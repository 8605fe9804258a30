"""gpt-fast's model beside our arms, with our weights: its Transformer, cache, loop and compiled
decode_one_token.

    python bench_decode.py random:llama3.2-1b --gpt_fast=../gpt-fast

The folder is a checkout of github.com/meta-pytorch/gpt-fast, of which model.py and generate.py are
loaded; nothing of it is here. One thing differs from its own use: the next token is the largest
logit's, as in all our arms, not sampled.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from decode.peers import check_same_logits
from decode.step import TUNED
from model import GPT, GPTConfig

NAME = "gpt_fast"


def arms(
    folder: str, model: GPT, idx: Tensor, tokens: int, compiled: bool, missing: list[str]
) -> tuple[dict[str, Callable[[], None]], dict[str, dict[str, Any]]]:
    """({NAME: a call that decodes tokens - 1 tokens behind idx (B, T), whose prefill is done},
    {NAME: {same_tokens}}).

    Both are empty, and the reason is appended to `missing`, where its model cannot do this one.
    Raises UserError if the folder is no checkout of it.
    """
    files = load(folder)
    if reason := unable(model.config):
        missing.append(f"gpt-fast: {reason}")
        return {}, {}
    try:
        with options():
            call, out = prepared(files, model, idx, tokens, compiled)
    except UserError as error:
        missing.append(f"gpt-fast: {error}")
        return {}, {}
    except Exception as failure:  # another program's limits are no failure of this one
        missing.append(
            f"gpt-fast: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
        )
        return {}, {}
    ours = model.generate(idx, tokens, temperature=0)[:, idx.shape[1] :]
    same = (ours == out).int().cumprod(1).sum(1).min().item()
    return {NAME: call}, {NAME: {"same_tokens": same}}


def load(folder: str) -> SimpleNamespace:
    """Its model.py and generate.py as modules `model` and `generate`. Raises UserError."""
    for name in ("model.py", "generate.py"):
        if not (Path(folder) / name).is_file():
            raise UserError(
                f"gpt_fast={folder}: there is no {name}: give the folder of a gpt-fast checkout"
            )
    model = module(folder, "model")
    # generate.py imports by names that are ours here (model), or drag a tokenizer in; and it sets
    # options for everyone.
    tokenizer = ModuleType("tokenizer")
    tokenizer.get_tokenizer = None
    with options(), named({"model": model, "tokenizer": tokenizer}):
        return SimpleNamespace(model=model, generate=module(folder, "generate"))


def module(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpt_fast_{name}", Path(folder) / f"{name}.py")
    loaded, path = importlib.util.module_from_spec(spec), list(sys.path)
    try:
        with named({spec.name: loaded}):  # its dataclass looks itself up
            spec.loader.exec_module(loaded)
    except Exception as failure:
        raise UserError(
            f"gpt_fast={folder}: {name}.py does not load: {type(failure).__name__}: {failure}"
        ) from None
    finally:
        sys.path[:] = path
    return loaded


@contextlib.contextmanager
def named(modules: dict[str, ModuleType]) -> Iterator[None]:
    """For a while, these are what an import of their names gives."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, old in before.items():
            del sys.modules[name]
            if old is not None:
                sys.modules[name] = old


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Inductor's options as generate.py sets them, and as they were afterwards."""
    with (
        torch._inductor.config.patch(TUNED),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def unable(config: GPTConfig) -> str:
    """Why its Transformer cannot compute such a model; empty if it can."""
    whole = (
        config.norm_type == "rms"
        and config.rms_fraction == 1
        and config.norm_groups == 1
        and config.norm_affine
    )
    reasons = {
        "its norms are RMSNorm": not whole or bool(config.norm_plan),
        "it has no QK-norm": config.qk_norm,
        "its positions are rotary": config.position != "rope",
        "its MLP is SwiGLU": config.activation != "swiglu",
        "it has no biases": config.bias or bool(config.attn_bias),
        "its heads have n_embd / n_head channels": config.n_head * config.head_channels
        != config.n_embd,
    }
    return next((reason for reason, stands in reasons.items() if stands), "")


def transformer(files: SimpleNamespace, model: GPT, length: int) -> torch.nn.Module:
    """Its Transformer with our weights, for at most `length` tokens; but for queries and keys it
    holds our tensors.
    """
    config, keys = model.config, {}
    if config.rope_scaling:
        names = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        keys["rope_scaling"] = dict(zip(names, config.rope_scaling, strict=True))
    with torch.device("meta"):
        peer = files.model.Transformer(
            files.model.ModelArgs(
                block_size=-(-length // 8) * 8,
                vocab_size=model.n_vocab,
                n_layer=config.n_layer,
                n_head=config.n_head,
                dim=config.n_embd,
                intermediate_size=config.inner,
                n_local_heads=config.kv_heads,
                rope_base=config.rope_theta,
                norm_eps=config.norm_eps,
                **keys,
            )
        )
    theirs = {
        "tok_embeddings.weight": model.wte.weight[: model.n_vocab],
        "norm.weight": model.norm_f.weight,
        "output.weight": model.head_weight()[: model.n_vocab],
    }
    for i, block in enumerate(model.blocks):
        gate, up = block.mlp.up.weight.chunk(2)
        parts = {
            "attention.wqkv": turned(block.attn.qkv.weight, config),
            "attention.wo": block.attn.proj.weight,
            "feed_forward.w1": gate,
            "feed_forward.w3": up,
            "feed_forward.w2": block.mlp.down.weight,
            "attention_norm": block.norm1.weight,
            "ffn_norm": block.norm2.weight,
        }
        theirs |= {f"layers.{i}.{name}.weight": value for name, value in parts.items()}
    peer.load_state_dict({name: value.detach() for name, value in theirs.items()}, assign=True)
    return peer.eval()


def turned(qkv: Tensor, config: GPTConfig) -> Tensor:
    """qkv ((H + 2 H_kv) D, C) for rotary positions that turn channel 2 i with 2 i + 1; ours turn i
    with i + D / 2.
    """
    D, heads = config.head_channels, config.n_head + config.kv_heads
    turning = qkv[: heads * D].view(heads, 2, D // 2, -1).transpose(1, 2).reshape(heads * D, -1)
    return torch.cat([turning, qkv[heads * D :]])


@torch.no_grad()
def prepared(
    files: SimpleNamespace, model: GPT, idx: Tensor, tokens: int, compiled: bool
) -> tuple[Callable[[], None], Tensor]:
    """(the call, the tokens (B, tokens) that it decodes), compiled and run once."""
    (batch, T), device, generate = idx.shape, idx.device, files.generate
    peer, logits = transformer(files, model, T + tokens), []
    with device:
        peer.setup_caches(max_batch_size=batch, max_seq_length=T + tokens)

    def largest(z: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
        if keep:
            logits.append(z[:, -1])
        token = z[:, -1].argmax(-1, keepdim=True).to(torch.int)
        return token, token

    generate.sample = largest
    if compiled:
        generate.decode_one_token = torch.compile(
            generate.decode_one_token, mode="reduce-overhead", fullgraph=True
        )
    else:
        generate.create_block_mask = torch.nn.attention.flex_attention.create_block_mask
    first = generate.prefill(peer, idx.int(), torch.arange(T, device=device), keep=True).clone()
    check_same_logits(model(idx)[:, -1], logits[0])
    call = functools.partial(decode, generate, peer, first, T, tokens - 1)
    call()
    return call, torch.cat([first, *call()], 1)


@torch.no_grad()
def decode(
    generate: ModuleType, peer: torch.nn.Module, first: Tensor, T: int, steps: int
) -> list[Tensor]:
    """The tokens (B, 1) that follow `first`, which stands at position T."""
    pos = torch.tensor([T], device=first.device, dtype=torch.int)
    found, _ = generate.decode_n_tokens(peer, first.view(len(first), -1), pos, steps)
    if first.is_cuda:
        torch.cuda.synchronize()
    return found
