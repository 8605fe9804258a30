"""gpt-fast's model as a peer of our arms: its Transformer, cache and loop, with our weights.

    python bench_decode.py random:llama3.2-1b --gpt_fast=../gpt-fast

The folder is a checkout of github.com/meta-pytorch/gpt-fast. Its model.py and generate.py are
loaded; no code of it is copied here. One thing differs from its own use: the next token is that of
the largest logit, as in all our arms, and is not sampled.
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
from decode.arms import tokens_in_common
from decode.peers import check_same_logits, one_line
from decode.step import TUNED
from model import GPT, GPTConfig

NAME = "gpt_fast"


def arms(
    folder: str, model: GPT, idx: Tensor, tokens: int, compiled: bool, missing: list[str]
) -> tuple[dict[str, Callable[[], None]], dict[str, dict[str, Any]]]:
    """Make the call that is timed.

    Args:
        missing: the reason is appended if its model cannot compute this one.

    Returns:
        ({NAME: call}, {NAME: {"same_tokens": tokens as model.generate's}}). The call decodes
        tokens - 1 tokens after idx (B, T), whose prefill is done. Both are empty if it cannot.

    Raises:
        UserError: the folder is not a checkout of gpt-fast.
    """
    files = load(folder)
    reason = unable(model.config)
    if reason:
        missing.append(f"gpt-fast: {reason}")
        return {}, {}
    try:
        with options():
            call, out = prepared(files, model, idx, tokens, compiled)
    except UserError as error:
        missing.append(f"gpt-fast: {error}")
        return {}, {}
    except Exception as failure:  # another program's limits are no failure of this one
        missing.append(f"gpt-fast: {one_line(failure)}")
        return {}, {}
    ours = model.generate(idx, tokens, temperature=0)[:, idx.shape[1] :]
    return {NAME: call}, {NAME: {"same_tokens": tokens_in_common(ours, out)}}


def load(folder: str) -> SimpleNamespace:
    """Load its model.py and generate.py; return them as `model` and `generate`.

    Raises:
        UserError: one of them is missing, or does not load.
    """
    for name in ("model.py", "generate.py"):
        if not (Path(folder) / name).is_file():
            raise UserError(
                f"gpt_fast={folder}: there is no {name}: give the folder of a gpt-fast checkout"
            )
    model = module(folder, "model")
    # generate.py imports `model`, which here is a module of ours, and `tokenizer`, which needs
    # packages that decoding does not. It also sets options of torch for the whole process.
    tokenizer = ModuleType("tokenizer")
    tokenizer.get_tokenizer = None
    with options(), named({"model": model, "tokenizer": tokenizer}):
        return SimpleNamespace(model=model, generate=module(folder, "generate"))


def module(folder: str, name: str) -> ModuleType:
    """Load NAME.py of the folder as the module gpt_fast_NAME. Raises UserError."""
    spec = importlib.util.spec_from_file_location(f"gpt_fast_{name}", Path(folder) / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        with named({spec.name: loaded}):  # a dataclass looks up the module that defines it
            spec.loader.exec_module(loaded)
    except Exception as failure:
        raise UserError(
            f"gpt_fast={folder}: {name}.py does not load: {type(failure).__name__}: {failure}"
        ) from None
    finally:
        sys.path[:] = path  # generate.py appends to it
    return loaded


@contextlib.contextmanager
def named(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Let `import NAME` give these modules, within."""
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
    """Set the options that generate.py sets, within; they are restored afterwards."""
    cached = torch._functorch.config.patch(enable_autograd_cache=True)
    with torch._inductor.config.patch(TUNED), cached:
        yield


def unable(config: GPTConfig) -> str:
    """Return why its Transformer cannot compute such a model; empty if it can."""
    is_plain_rms = (
        config.norm_type == "rms"
        and config.rms_fraction == 1
        and config.norm_groups == 1
        and config.norm_gain == "plain"
        and not config.norm_plan
    )
    if not is_plain_rms:
        return "its norms are RMSNorm"
    if config.qk_norm not in (None, "none"):
        return "it has no QK-norm"
    if config.position != "rope":
        return "its positions are rotary"
    if config.activation != "swiglu":
        return "its MLP is SwiGLU"
    if config.rope_scaling_kind != "llama3":
        return "its rotary positions are plain or scaled as Llama 3's"
    if config.window:
        return "its blocks all attend to the whole context"
    if config.attn_scale or config.embed_scale != 1:
        return "it scales neither scores nor embeddings"
    if config.bias or config.attn_bias:
        return "it has no biases"
    if config.n_head * config.head_channels != config.n_embd:
        return "its heads have n_embd / n_head channels"
    return ""


def transformer(files: SimpleNamespace, model: GPT, length: int) -> torch.nn.Module:
    """Return its Transformer with our weights, for at most `length` tokens.

    It holds our own tensors, but for queries and keys, whose channels are in another order.
    """
    config = model.config
    keys = {}
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
                block_size=-(-length // 8) * 8,  # its cache is a multiple of 8 long
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
        "norm.weight": model.norm_f.norm.weight,
        "output.weight": model.head_weight()[: model.n_vocab],
    }
    for i, block in enumerate(model.blocks):
        gate, up = block.mlp.up.weight.chunk(2)
        layer = {
            "attention.wqkv": turned(block.attn.qkv.weight, config),
            "attention.wo": block.attn.proj.weight,
            "feed_forward.w1": gate,
            "feed_forward.w3": up,
            "feed_forward.w2": block.mlp.down.weight,
            "attention_norm": block.norm1.norm.weight,
            "ffn_norm": block.norm2.norm.weight,
        }
        theirs |= {f"layers.{i}.{name}.weight": value for name, value in layer.items()}
    peer.load_state_dict({name: value.detach() for name, value in theirs.items()}, assign=True)
    return peer.eval()


def turned(qkv: Tensor, config: GPTConfig) -> Tensor:
    """Reorder qkv ((H + 2 H_kv) D, C) for its rotary positions.

    They turn channel 2 i with 2 i + 1; ours turn i with i + D / 2.
    """
    D = config.head_channels
    heads = config.n_head + config.kv_heads  # queries and keys; values do not turn
    turning = qkv[: heads * D].view(heads, 2, D // 2, -1)  # (heads, half, i, C)
    turning = turning.transpose(1, 2).reshape(heads * D, -1)  # (heads, i, half, C) as rows
    return torch.cat([turning, qkv[heads * D :]])


@torch.no_grad()
def prepared(
    files: SimpleNamespace, model: GPT, idx: Tensor, tokens: int, compiled: bool
) -> tuple[Callable[[], None], Tensor]:
    """Return (the call, tokens (B, tokens) that it decodes), compiled and run once."""
    batch, T = idx.shape
    device = idx.device
    generate = files.generate
    peer = transformer(files, model, T + tokens)
    logits = []
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
    """Decode the tokens (B, 1) that follow `first` (B, 1), which is at position T."""
    pos = torch.tensor([T], device=first.device, dtype=torch.int)
    found, _ = generate.decode_n_tokens(peer, first.view(len(first), -1), pos, steps)
    if first.is_cuda:
        torch.cuda.synchronize()
    return found
