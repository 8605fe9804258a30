"""Tell whether a model computes what another one does, whose weights it has taken (load.init_from).

All but the norms is the same by then, so their formulas, gains and biases decide.
"""

from collections.abc import Iterator

import torch

from model import GPT
from norms import GatedNorm, LayerNorm, Norm, RMSNorm, SeeDNorm, SharedRMSNorm
from taper import TaperNorm

Pair = tuple[Norm | None, Norm | None]


def is_same_function(source: GPT, model: GPT) -> bool:
    """Do the norms of two models compute the same, up to rounding? The rest is the same."""
    if _sums(source) != _sums(model):
        return False
    # Is the stream of each centred (cbwc)?
    was_centered = source.plan.type.embed is not None
    is_centered = model.plan.type.embed is not None
    for old, new in _stream_norms(source, model):
        if not _are_alike(old, new, was_centered, is_centered):
            return False
    return all(_are_alike(old, new) for old, new in _other_norms(source, model))


def _sums(gpt: GPT) -> list[tuple[float, bool]]:
    """List, for each place, the weight of the stream in the sum, and whether y replaces it."""
    return [(place.residual_weight, place.replaces) for place in gpt.places()]


def _stream_norms(source: GPT, model: GPT) -> Iterator[Pair]:
    """Yield the norms of the residual stream, in pairs."""
    for old, new in zip(source.places(), model.places(), strict=True):
        yield old.norm, new.norm
        yield old.reader, new.reader


def _other_norms(source: GPT, model: GPT) -> Iterator[Pair]:
    """Yield the norms of sublayers' outputs, of the embeddings and within attention, in pairs."""
    for old, new in zip(source.places(), model.places(), strict=True):
        yield old.output, new.output
    yield _norm_of_embeddings(source), _norm_of_embeddings(model)
    for old, new in zip(source.blocks, model.blocks, strict=True):
        for name in ("q_norm", "k_norm", "v_norm"):
            yield getattr(old.attn, name), getattr(new.attn, name)


def _norm_of_embeddings(gpt: GPT) -> Norm | None:
    return None if gpt.norm_e is None else gpt.norm_e.norm


def _are_alike(
    old: Norm | None, new: Norm | None, was_centered: bool = False, is_centered: bool = False
) -> bool:
    """Do two norms compute the same?

    Args:
        old, new: the norms, None where there is none.
        was_centered, is_centered: for each, is what it reads centred (cbwc)?
    """
    if old is None or new is None:
        return old is new
    old, new = _at_the_start(old), _at_the_start(new)
    if _formula(old, was_centered) != _formula(new, is_centered):
        return False
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=0) for a, b in zip(_map(old), _map(new), strict=True)
    )


def _at_the_start(norm: Norm) -> Norm:
    """Return the base of a norm whose taper has not begun, else the norm itself."""
    is_warm = isinstance(norm, TaperNorm) and norm.phase == "warm"
    return norm.base if is_warm else norm


def _formula(norm: Norm, is_centered: bool = False) -> tuple[type | int | float, ...]:
    """Return what tells a norm's formula from others, but for gain and bias.

    Two norms of one formula have the same tensors: the model has taken them from the source.
    """
    # These begin as RMSNorm.
    is_open = isinstance(norm, GatedNorm) and not norm.gate_up.weight.any() and norm.factor == 2
    is_even = isinstance(norm, SeeDNorm) and not norm.beta.any()
    if is_open or is_even:
        return (RMSNorm, 1, norm.channels)
    if isinstance(norm, GatedNorm):
        return (GatedNorm, norm.factor)
    if type(norm) is RMSNorm:  # a subclass is another formula
        if is_centered and norm.is_whole:  # on a centred stream it is LayerNorm
            return (LayerNorm,)
        return (RMSNorm, norm.groups, norm.counted)
    return (type(norm),)


def _map(norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gain and bias (C,) of a norm in float64."""
    gain = norm.core.exact_gain.expand(norm.channels)
    if isinstance(norm, SharedRMSNorm):
        gain = gain / norm.alpha
    bias = norm.core.bias
    return gain, torch.zeros_like(gain) if bias is None else bias.detach().double()
