"""Other programs as peers of our arms, with our weights.

Hugging Face's generate runs with a dynamic cache in eager mode and, on a GPU, with a static cache,
compiled.
gpt-fast's Transformer, cache and loop run from a checkout of github.com/meta-pytorch/gpt-fast:

    python bench_decode.py random:llama3.2-1b --gpt_fast=../gpt-fast

Its model.py and generate.py are loaded; no code of it is copied here. One thing differs from its
own use: the next token is that of the largest logit, as in all our arms, and is not sampled. A peer
whose logits are not the model's is not timed: gpt-fast's model has rotary positions, SwiGLU and
RMSNorm, and no biases, QK-norm or windows.
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

from common.errors import HFError, UserError, failure_line
from common.hub import import_transformers
from decode.step import TUNED
from hf import weights
from hf.config import SHAPES, architecture
from hf.coupled import register
from model import GPT, GPTConfig

NAMES = ("hf_eager", "hf_static")
GPT_FAST = "gpt_fast"
SAME_MODEL = 0.05  # a peer whose logits differ by more than this, relatively, is another model


Calls = dict[str, Callable[[], None]]  # what is timed, by name


def calls_of(config: Any, spec: str, model: GPT, idx: Tensor, missing: list[str]) -> Calls:
    """Make the calls that are timed, of the peers that a config asks for.

    Args:
        config: a DecodeBenchConfig.
        spec: the model's name.
        idx: prompts (B, T).
        missing: the reason is appended for each peer that cannot run; it has no call.

    Returns:
        The calls. generate reads the prompt too, so Hugging Face has two calls a peer: NAME
        generates `tokens` tokens, `NAME prefill` a single one. The difference of their times is
        decoding. gpt-fast's decodes tokens - 1 tokens, its prefill is done.
    """
    calls: Calls = {}
    if config.peers:
        try:
            peer = hf_model(spec, model)
            with torch.no_grad():
                check_same_logits(model(idx[:1]), peer(idx[:1]).logits[..., : model.n_vocab])
            names = ["hf_eager"]
            if config.compiled and idx.is_cuda:
                names.append("hf_static")
            for name in names:
                call = functools.partial(generate, peer, idx, name == "hf_static", config.tokens)
                found = {
                    name: functools.partial(call, config.tokens),
                    f"{name} prefill": functools.partial(call, 1),
                }
                for each in found.values():
                    each()
                calls |= found
        except Exception as failure:  # another library's limits are no failure of this program
            missing.append(f"Hugging Face: {failure_line(failure)}")
    if config.gpt_fast:
        try:
            files = load(config.gpt_fast)
            with options():
                calls[GPT_FAST] = prepared(files, model, idx, config.tokens, config.compiled)
        except Exception as failure:  # another program's limits are no failure of this one
            missing.append(f"gpt-fast: {failure_line(failure)}")
    return calls


def hf_model(spec: str, model: GPT) -> torch.nn.Module:
    """Return the model of transformers with the same weights, type and device.

    Raises:
        HFError: transformers has no such model.
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
    pieces = dict(weights.hf_pieces(model, architecture(SHAPES[name])))
    head = pieces.pop("lm_head.weight", None)  # None: it is the embedding
    peer.base_model.load_state_dict(pieces)
    if head is not None:
        peer.lm_head.load_state_dict({"weight": head})
    return peer


def check_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """Raise UserError if a peer's logits are too far from ours for it to be the same model."""
    ours, theirs = ours.float(), theirs.float()
    distance = ((ours - theirs).norm() / ours.norm()).item()
    if not distance < SAME_MODEL:
        raise UserError(f"its logits are {distance:.2g} off ours: not the same model, so not timed")


@torch.no_grad()
def generate(peer: torch.nn.Module, idx: Tensor, static: bool, longest: int, count: int) -> None:
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


# ----------------------------------------------------------------------------------- gpt-fast


def load(folder: str) -> SimpleNamespace:
    """Load its model.py and generate.py; return them as `model` and `generate`."""
    ours = sys.modules["model"]
    path = list(sys.path)
    model = module(folder, "model")
    # generate.py imports `model`, which here is a module of ours, and `tokenizer`, which needs
    # packages that decoding does not. It also sets options of torch for the whole process.
    sys.modules |= {"model": model, "tokenizer": SimpleNamespace(get_tokenizer=None)}
    try:
        with options():
            return SimpleNamespace(model=model, generate=module(folder, "generate"))
    finally:
        sys.modules["model"] = ours
        del sys.modules["tokenizer"]
        sys.path[:] = path  # generate.py appends to it


def module(folder: str, name: str, program: str = GPT_FAST) -> ModuleType:
    """Load NAME.py of a program's folder as the module PROGRAM_NAME, beside ours of that name."""
    spec = importlib.util.spec_from_file_location(f"{program}_{name}", Path(folder) / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # a dataclass looks up the module that defines it
    spec.loader.exec_module(loaded)
    return loaded


@contextlib.contextmanager
def options() -> Iterator[None]:
    """Set the options that generate.py sets, within; they are restored afterwards."""
    cached = torch._functorch.config.patch(enable_autograd_cache=True)
    with torch._inductor.config.patch(TUNED), cached:
        yield


def transformer(files: SimpleNamespace, model: GPT, length: int) -> torch.nn.Module:
    """Return its Transformer with our weights, for at most `length` tokens.

    It holds our own tensors, but for queries and keys, whose channels are in another order.
    """
    config = model.config
    # Llama's: factor, low and high frequency, original context
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    keys = {"rope_scaling": dict(zip(names, config.rope_scaling))} if config.rope_scaling else {}
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
) -> Callable[[], None]:
    """Return the call that decodes tokens - 1 tokens, compiled and run once."""
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
    return call


@torch.no_grad()
def decode(generate: ModuleType, peer: torch.nn.Module, first: Tensor, T: int, steps: int) -> None:
    """Decode the tokens (B, 1) that follow `first` (B, 1), which is at position T."""
    pos = torch.tensor([T], device=first.device, dtype=torch.int)
    generate.decode_n_tokens(peer, first.view(len(first), -1), pos, steps)
