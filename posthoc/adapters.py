"""Put LoRA or DoRA on a frozen GPT through peft, and estimate the memory of a distillation.

DoRA (Liu et al. 2024): W' = m * (W + s B A) / ||W + s B A||, with one norm and one magnitude m for
each output, and s = alpha / r. Our projections are packed (queries, keys and values in one, gate
and up in one), so that one A serves all parts of a pack: 14 % fewer parameters than with seven
adapters a block on the shape of Qwen3-0.6B.
"""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from common.hub import import_transformers
from model import GPT, GPTConfig
from posthoc.kl import CHUNK

TARGETS = ("qkv", "proj", "up", "down")  # every linear of a block
GIB = 1 << 30
# Bytes that one SwiGLU block keeps for backward under bfloat16 autocast, for each token and channel
# of: stream, queries, keys (with as many values), the MLP's inner layer, rank. A fit to the counted
# bytes of 14 shapes (docs/log.md).
KEPT = {"full": (16, 18, 18, 8, 0), "lora": (14, 16, 14, 8, 8), "dora": (22, 20, 22, 16, 8)}


def add_adapters(model: GPT, rank: int, alpha: float, dora: bool) -> None:
    """Freeze `model` and put float32 adapters on its linears, in place.

    They change nothing until they are trained.
    """
    # peft imports transformers, which must not take our kernels/ for the package of that name.
    if find_spec("transformers"):
        import_transformers()
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    options = LoraConfig(r=rank, lora_alpha=alpha, use_dora=dora, target_modules=list(TARGETS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(options, model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float64:
            parameter.data = parameter.data.float()
    # peft rounds the magnitudes to the type of the weights, so they are computed again.
    for _, _, linear in adapted(model):
        for magnitude in linear.lora_magnitude_vector.values():
            weight = linear.get_base_layer().weight.to(magnitude.weight.dtype)
            magnitude.weight.data = torch.linalg.norm(weight, dim=1)


def adapted(model: GPT) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (parent, name, linear) for every linear with adapters."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "lora_A"):
                yield parent, name, child


@torch.no_grad()
def merge(model: GPT) -> GPT:
    """Merge the adapters into the weights, in place.

    Weights that a teacher shares are copied first, one linear at a time.
    """
    for parent, name, linear in adapted(model):
        base = linear.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        linear.merge(safe_merge=True)
        setattr(parent, name, base)
    return model.requires_grad_(False)


def adapter_parameters(model: GPT, rank: int, dora: bool) -> int:
    """Count the parameters that add_adapters adds."""
    linears = [part for name, part in model.named_modules() if name.split(".")[-1] in TARGETS]
    # A (rank, in), B (out, rank), and DoRA's magnitudes (out,)
    return sum(
        rank * (linear.in_features + linear.out_features) + dora * linear.out_features
        for linear in linears
    )


def memory(
    config: GPTConfig, method: str, rank: int, tokens: int, low: bool, checkpointing: bool
) -> dict:
    """Estimate the bytes that a step over `tokens` tokens needs, part by part.

    It needs no weights, so that it can be printed before they are loaded.

    Args:
        method: full, lora or dora.
        low: the computation is in 16 bits, and so are frozen weights.
        checkpointing: blocks are computed again in backward.
    """
    width = 2 if low else 4  # bytes of an activation
    is_full = method == "full"
    is_dora = method == "dora"
    with torch.device("meta"):
        model = GPT(config)
    parameters = model.num_params()
    trained = parameters if is_full else adapter_parameters(model, rank, is_dora)
    largest = max(matrix.numel() for matrix in model.hidden_matrices())
    # What a block keeps for backward; with checkpointing, one block, and stream and branch of all.
    # Without it DoRA keeps weights too, which are not counted.
    queries = config.n_head * config.head_channels
    keys = config.kv_heads * config.head_channels
    channels = (config.n_embd, queries, keys, config.inner, rank)
    block = tokens * sum(n * kept for n, kept in zip(channels, KEPT[method], strict=True))
    activations = config.n_layer * block
    if checkpointing:
        stream = tokens * config.n_embd * (width + (4 if is_full else width))
        activations = block + config.n_layer * stream
    chunk = min(CHUNK, config.vocab_size)
    parts = {
        # Full fine-tuning keeps the teacher in float32 and moves a float32 copy of it.
        "weights": parameters * (4 if is_full else width),
        # A trained parameter has 16 bytes: float32 weight, gradient and AdamW's two moments.
        # Autocast keeps its 16-bit copy, 2 bytes more, from forward to backward.
        "trained": (18 if low else 16) * trained,
        "activations": activations,
        # W + s B A of the largest linear, its norm and gradient, in float32
        "dora": 4 * 4 * largest if is_dora else 0,
        # Logits of one chunk of the vocabulary, hidden states, the chunk's rows of both heads
        "kl": tokens * (4 * 4 * chunk + 16 * config.n_embd) + 8 * chunk * config.n_embd,
    }
    return {
        **parts,
        "total": sum(parts.values()),
        "trained_parameters": trained,
        "parameters": parameters,
    }


def memory_line(parts: dict) -> str:
    """Return the estimate in one line, in GiB."""
    names = ("weights", "trained", "activations", "dora", "kl")
    listed = ", ".join(f"{name} {parts[name] / GIB:.3g}" for name in names)
    return (
        f"memory, an estimate: {parts['total'] / GIB:.3g} GiB ({listed}); "
        f"{parts['trained_parameters']:,} of {parts['parameters']:,} parameters train"
    )
