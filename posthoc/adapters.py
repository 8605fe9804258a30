"""LoRA and DoRA on a GPT through peft, on top of frozen weights, and what distillation needs of
memory.

DoRA (Liu et al. 2024): W' = m * (W + s B A) / ||W + s B A||, one norm and one magnitude m for each
output, s = alpha / r. Our projections are packed (queries, keys and values in one, gate and up in
one), so that one A serves all parts of a pack: 14 % fewer parameters than with seven adapters a
block on the shape of Qwen3-0.6B.
"""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from common.errors import UserError
from hf.hub import import_transformers
from model import GPT, GPTConfig
from posthoc.kl import CHUNK

TARGETS = ("qkv", "proj", "up", "down")  # every linear of a block
GIB = 1 << 30
# Bytes that backward keeps for a token in one SwiGLU block under bfloat16 autocast, by channel of
# stream, queries, keys (and as many values), the MLP's inner layer, and rank: a fit to counted
# bytes of 14 shapes (LOG.md).
KEPT = {"full": (16, 18, 18, 8, 0), "lora": (14, 16, 14, 8, 8), "dora": (22, 20, 22, 16, 8)}


def add_adapters(model: GPT, rank: int, alpha: float, dora: bool) -> None:
    """Freeze `model` and put adapters, float32, on its linears, in place.

    At first they change nothing.
    """
    # peft imports it, and it must not take our kernels/ for the package of that name
    if find_spec("transformers"):
        import_transformers()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError(
            "adapters need a package: pip install peft, or distil with --method=full"
        ) from None
    model.requires_grad_(False)
    options = LoraConfig(r=rank, lora_alpha=alpha, use_dora=dora, target_modules=list(TARGETS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(options, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = (
                parameter.data.float() if parameter.dtype != torch.float64 else parameter.data
            )
    for _, _, linear in adapted(model):  # peft's magnitudes were rounded to the type of the weights
        for magnitude in linear.lora_magnitude_vector.values():
            weight = linear.get_base_layer().weight.to(magnitude.weight.dtype)
            magnitude.weight.data = torch.linalg.norm(weight, dim=1)


def adapted(model: GPT) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, linear with adapters) of every one."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "lora_A"):
                yield parent, name, child


@torch.no_grad()
def merge(model: GPT) -> GPT:
    """Adapters into weights, in place.

    Weights that a teacher shares are copied first, one linear at a time.
    """
    for parent, name, linear in adapted(model):
        base = linear.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        linear.merge(safe_merge=True)
        setattr(parent, name, base)
    return model.requires_grad_(False)


def adapter_parameters(config: GPTConfig, rank: int, dora: bool) -> int:
    """How many parameters add_adapters adds."""
    width = config.n_head * config.head_channels
    up = config.inner * (2 if config.activation == "swiglu" else 1)
    shapes = [
        (config.n_embd, width + 2 * config.kv_heads * config.head_channels),
        (width, config.n_embd),
        (config.n_embd, up),
        (config.inner, config.n_embd),
    ]
    return config.n_layer * sum(rank * (i + o) + (o if dora else 0) for i, o in shapes)


def memory(
    config: GPTConfig, method: str, rank: int, tokens: int, low: bool, checkpointing: bool
) -> dict:
    """Bytes that a step over `tokens` tokens needs, part by part: an estimate, printed before
    weights are loaded.

    `low`: the computation is in 16 bits, and so are frozen weights. Full fine-tuning keeps the
    teacher in float32 and moves a float32 copy of it. What is trained has 16 bytes a parameter:
    float32 weight, gradient and AdamW's two moments; autocast keeps 2 more, its 16-bit copy, from
    forward to backward. Activations: stream and branch of every block if they are checkpointed, and
    what one block keeps (all blocks without; then DoRA keeps weights, too, which are not counted).
    Of DoRA one linear's W + s B A, norm and gradient.
    """
    width = 2 if low else 4  # bytes of an activation
    with torch.device("meta"):
        weights = GPT(config).num_params()
    trained = weights if method == "full" else adapter_parameters(config, rank, method == "dora")
    up = config.inner * (2 if config.activation == "swiglu" else 1)
    queries, keys = (number * config.head_channels for number in (config.n_head, config.kv_heads))
    heads = queries + 2 * keys
    channels = (config.n_embd, queries, keys, config.inner, rank)
    block = tokens * sum(n * kept for n, kept in zip(channels, KEPT[method], strict=True))
    # branch and stream
    stream = tokens * config.n_embd * (width + (4 if method == "full" else width))
    layers = config.n_layer
    parts = {
        "weights": weights * (4 if method == "full" else width),
        "trained": (18 if low else 16) * trained,
        "activations": block + layers * stream if checkpointing else layers * block,
        "dora": 4 * 4 * max(up, heads, config.inner) * config.n_embd if method == "dora" else 0,
        "kl": tokens * (4 * 4 * min(CHUNK, config.vocab_size) + 16 * config.n_embd)
        + 8 * min(CHUNK, config.vocab_size) * config.n_embd,
    }
    return {
        **parts,
        "total": sum(parts.values()),
        "trained_parameters": trained,
        "parameters": weights,
    }


def memory_line(parts: dict) -> str:
    """The estimate in one line, GiB."""
    words = ", ".join(
        f"{name} {parts[name] / GIB:.3g}"
        for name in ("weights", "trained", "activations", "dora", "kl")
    )
    return (
        f"memory, an estimate: {parts['total'] / GIB:.3g} GiB ({words}); "
        f"{parts['trained_parameters']:,} of {parts['parameters']:,} parameters train"
    )
