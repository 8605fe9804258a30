"""Write a fold into the modules of a model: centred parameters, RMSNorms in the place of
LayerNorms, centrings.

A `Plan` holds names alone, so it can be carried out on any copy of the model. The state dict keeps
its keys. Its values are right for the unfolded model, too, because a LayerNorm does the same to
rows of zero mean as an RMSNorm.
"""

import inspect
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .certificate import duplicate, randomize, run, widened
from .graph import Graph, Source
from .lines import Norm, centered
from .siblings import FoldError, rms_norm


@dataclass(frozen=True)
class Swap:
    """A norm module that becomes an RMSNorm over `axis` of its input, in `groups`."""

    path: str
    # -1 for a norm of the last axis, which takes tensors of any rank; else counted from the front
    axis: int
    channels: int
    groups: int
    eps: float
    gain: str | None  # names of its parameters
    bias: str | None
    ndim: int | None = None  # the only rank for which the axis is right; None: any

    def of_one_rank(self, shapes: Collection[tuple[int, ...]]) -> "Swap":
        """Return the same for tensors of the rank of these shapes alone, if they have one rank."""
        ranks = {len(size) for size in shapes}
        if self.ndim is not None or len(ranks) > 1:
            return self
        (ndim,) = ranks
        return replace(self, axis=ndim - 1, ndim=ndim)


@dataclass(frozen=True)
class Insertion:
    """A centring of what module `path` returns, along an axis, in blocks."""

    path: str
    axis: int  # as in a Swap
    block: int
    ndim: int | None = None  # as in a Swap


@dataclass
class Plan:
    """All that a fold changes, by name."""

    # parameters that are centred; the names under which a centred copy is used, where one is made
    sources: list[tuple[Source, tuple[str, ...]]] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    insertions: list[Insertion] = field(default_factory=list)


# of the RMS: rounding in float32 leaves some 1e-6
LARGEST_MEAN = 1e-3


class FoldedNorm(nn.Module):
    """Compute RMSNorm with the gain and bias of the LayerNorm or GroupNorm `old`, in its place.

        y = x / sqrt(mean(x^2) + eps) * gain + bias

    The mean is over each of `swap.groups` equal blocks of `swap.axis`. Statistics are in float32,
    or float64 for float64. On a GPU in eager mode it runs as one kernel. Parameters keep their
    names, and the hooks of `old` stay. With `check` set, each call checks that its input is
    centred, at the cost of two more reductions.
    """

    def __init__(self, old: nn.Module, swap: Swap):
        super().__init__()
        # What the model's code may look for: hooks, the mode, attributes such as elementwise_affine
        found = {name: value for name, value in vars(old).items() if not hasattr(FoldedNorm, name)}
        self.__dict__.update(found)
        # in the order of the old norm, which optimisers go by
        self._parameters = {**old._parameters}
        self.swap = swap
        self.check = False
        # torch's encoder layers take a fast path, which does not call the norm modules and computes
        # LayerNorms, only where the eps of both norms are equal: this one is equal to none.
        self.eps = math.nan

    # Callers may use the name that the old norm has for its argument; LayerNorm's is `input`.
    def forward(self, input: Tensor | None = None, **named: Tensor | None) -> Tensor:
        (x,) = (value for value in (input, *named.values()) if value is not None)
        # (channels,) of whatever shape they have, as (1, channels, 1, 1)
        swap = self.swap
        gain, bias = (
            None if name is None else getattr(self, name).flatten()
            for name in (swap.gain, swap.bias)
        )
        if swap.ndim not in (None, x.dim()) or x.shape[swap.axis] != swap.channels:
            rank = "" if swap.ndim is None else f" of {swap.ndim} axes"
            raise FoldError(
                f"{swap.path} was folded for tensors{rank} with {swap.channels} numbers along axis "
                f"{swap.axis}, not for {tuple(x.shape)}: analyze the model on inputs of this kind"
            )
        x = x.movedim(swap.axis, -1)
        if self.check:
            self.require_centred(x)
        y, _ = rms_norm(x, gain, swap.eps, bias, swap.groups)
        return y.movedim(-1, swap.axis)

    def require_centred(self, x: Tensor) -> None:
        """Raise FoldError unless the blocks of the last axis have zero mean, but for rounding."""
        if not is_centred(x.detach().unflatten(-1, (self.swap.groups, -1))):
            raise FoldError(
                f"{self.swap.path}: its input is not centred, so the model's LayerNorm is another "
                "function here: analyze the model on inputs of this kind"
            )


def set_check(model: nn.Module, check: bool) -> None:
    """Let each of the RMSNorms of a folded model check that its input is centred, or not."""
    for module in model.modules():
        if isinstance(module, FoldedNorm):
            module.check = check


def is_centred(blocks: Tensor) -> bool:
    """Tell whether the last axis has zero mean, but for rounding."""
    wide = blocks.double()
    mean = wide.mean(-1).abs()
    rms = wide.square().mean(-1).sqrt()
    return not (mean > max(LARGEST_MEAN, 4 * torch.finfo(blocks.dtype).eps) * rms).any()


class LoadGuard:
    """Warn if weights that are loaded are not centred (a hook before load_state_dict).

    Keys and shapes are those of the LayerNorm model, so its weights load without an error, and
    RMSNorms compute another function of them.
    """

    def __init__(self, weights: list[tuple[str, int, int]]):
        self.weights = weights  # (name, axis, block) of each

    def __call__(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        for name, axis, block in self.weights:
            weight = state_dict.get(prefix + name)
            if weight is not None and not is_centred(
                weight.movedim(axis, -1).unflatten(-1, (-1, block))
            ):
                warnings.warn(
                    f"{prefix}{name} is not centred in this state dict, as the folded "
                    f"{type(module).__name__} needs it: are these weights of the model with "
                    "LayerNorms? Load them into that model, and fold it again",
                    stacklevel=2,
                )
                return


class Center:
    """Centre what a module returns (a forward hook)."""

    def __init__(self, insertion: Insertion):
        self.insertion = insertion

    def __call__(self, module: nn.Module, args: tuple, x: Tensor) -> Tensor:
        if self.insertion.ndim not in (None, x.dim()):
            raise FoldError(
                f"the centring inserted at {self.insertion.path} is for tensors of "
                f"{self.insertion.ndim} axes, not for {tuple(x.shape)}: analyze the model on "
                "inputs of this kind"
            )
        return centered(x, self.insertion.axis, self.insertion.block)


# Arguments of models of transformers that take the place of rows of an embedding
EMBEDDED = ("inputs_embeds", "decoder_inputs_embeds")


class CenterEmbedded:
    """Centre embeddings that a caller gives, where the model's own are (a forward pre-hook).

    The LayerNorms of the model before did not see their mean: RMSNorms would. That makes them the
    same function again.

    Args:
        part: the model, or a part that may be called by itself, whose hook this becomes.
    """

    def __init__(self, part: nn.Module):
        self.names = list(inspect.signature(part.forward).parameters)

    def __call__(
        self, part: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        given = dict(zip(self.names, args)) | kwargs
        for name in EMBEDDED:
            x = given.get(name)
            if x is None or not _is_centred_embedding(self.embedding(part, name)):
                continue
            x = centered(x, -1, x.shape[-1])
            if name in kwargs:
                kwargs = kwargs | {name: x}
            else:
                place = self.names.index(name)
                args = (*args[:place], x, *args[place + 1 :])
        return args, kwargs

    def embedding(self, part: nn.Module, argument: str) -> nn.Module:
        """Return the embedding of a part of a model of transformers, for an argument."""
        if argument == "decoder_inputs_embeds":
            part = part.get_decoder()
        elif "decoder_inputs_embeds" in self.names:
            part = part.get_encoder()
        return part.get_input_embeddings()


def parts_that_take_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return a model of transformers and those parts that are called by themselves, too.

    generate(inputs_embeds=...) calls an encoder so. A language model behind another modality is
    left out, for it always gets embeddings, and from the model itself.
    """
    parts = {model, getattr(model, "base_model", model)}
    if hasattr(model, "get_decoder") and not hasattr(model.config, "text_config"):
        parts |= {model.get_encoder(), model.get_decoder()}
    return {part for part in parts if hasattr(part, "get_input_embeddings")}


def _is_centred_embedding(embedding: nn.Module) -> bool:
    """Tell whether what an embedding returns is centred: its rows are, or a hook does it."""
    is_inserted = any(isinstance(hook, Center) for hook in embedding._forward_hooks.values())
    return is_inserted or is_centred(embedding.weight.detach())


class CenteredWeight(nn.Module):
    """Parametrise a weight as V = W - mean(W) (CBWC, equation 7).

    With a gain it centres gain * W instead (LayerScale).
    """

    def __init__(self, axis: int, block: int, gain: nn.Parameter | None = None):
        super().__init__()
        self.axis = axis
        self.block = block
        self.gain = gain

    def forward(self, weight: Tensor) -> Tensor:
        return centered(merged(weight, self.gain, self.axis), self.axis, self.block)


class Ones(nn.Module):
    """Parametrise a gain that has been merged into weights: it is 1 from now on."""

    def forward(self, gain: Tensor) -> Tensor:
        return torch.ones_like(gain)


def merged(weight: Tensor, gain: Tensor | None, axis: int) -> Tensor:
    """Multiply a weight by a gain that has one number for each index of the axis."""
    if gain is None:
        return weight
    return weight * gain.reshape(-1, *[1] * (weight.dim() - 1 - axis))


# ------------------------------------------------------------------------------ carrying out a plan


@torch.no_grad()
def carry_out(plan: Plan, model: nn.Module) -> None:
    """Fold `model` in place. Weights are centred permanently, in float64 and rounded once."""
    for source, names in plan.sources:
        gain = tensor_of(model, source.scale) if source.scale else None
        for name, axis in source.parameters:
            weight = tensor_of(model, name)
            new = _centered_once(weight, gain, axis, source.block)
            if names:
                untie(model, names, new)
            else:
                weight.copy_(new)
        if gain is not None:
            gain.fill_(1)
    if any(names for _, names in plan.sources):
        end_ties(model)
    swap_and_insert(plan, model)
    weights = [
        (alias, axis, source.block)
        for source, names in plan.sources
        for name, axis in source.parameters
        for alias in names or (name,)
    ]
    model.register_load_state_dict_pre_hook(LoadGuard(weights))


def untie(model: nn.Module, names: Collection[str], value: Tensor) -> None:
    """Give a parameter that has several names a value of its own under `names`, in place."""
    old = tensor_of(model, min(names))
    all_names = [
        name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor is old
    ]
    new = nn.Parameter(value, old.requires_grad)
    for name in names:
        module, attribute = _owner(model, name)
        setattr(module, attribute, new)
    if not _tying_configs(model) and all_names[-1] in names:
        # A tied model would take the last value for all names: it must not load this state dict.
        model.register_buffer("untied", torch.ones(()))


def end_ties(model: nn.Module) -> None:
    """Let transformers tie nothing when this model is loaded, in place; for after `untie`.

    Other models stay as they are. transformers has one switch for all ties of a model. So every
    parameter that still has several names gets a value of its own under each of them: saving would
    leave out all but one, and loading would draw the others at random.
    """
    configs = _tying_configs(model)
    if not configs:
        return
    for config in configs:
        config.tie_word_embeddings = False
    seen = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, copied)
            seen.add(parameter)


def _tying_configs(model: nn.Module) -> list[Any]:
    """Return the configs of transformers by which it ties parameters as it loads a model."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if getattr(config, "tie_word_embeddings", False)]


def reparametrize(plan: Plan, model: nn.Module) -> None:
    """Fold `model` in place for training (CBWC).

    Weights keep their values and are centred whenever they are read.
    """
    for module in model.modules():
        # A copied module shares the class that torch made for its parametrisations with the
        # original. Registering another one would change that class, so it gets a class of its own.
        if parametrize.is_parametrized(module):
            old = type(module)
            members = {
                name: value
                for name, value in vars(old).items()
                if name not in ("__dict__", "__weakref__")
            }
            module.__class__ = type(old.__name__, old.__bases__, members)
    for source, names in plan.sources:
        gain = tensor_of(model, source.scale) if source.scale else None
        for name, axis in source.parameters:
            weight = tensor_of(model, name)
            # all names of a tensor, but for one that gets a copy
            aliases = [
                alias
                for alias, value in model.named_parameters(remove_duplicate=False)
                if value is weight
            ]
            for alias in names or aliases or [name]:
                centering = CenteredWeight(axis, source.block, gain)
                parametrize.register_parametrization(*_owner(model, alias), centering)
        if gain is not None:
            parametrize.register_parametrization(*_owner(model, source.scale), Ones())
    swap_and_insert(plan, model)


def swap_and_insert(plan: Plan, model: nn.Module) -> None:
    """Do what a plan does apart from the weights, in place.

    Norm modules become RMSNorms, and centrings are inserted as hooks.
    """
    for swap in plan.swaps:
        old = model.get_submodule(swap.path)
        new = FoldedNorm(old, swap)
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if module is old:
                model.set_submodule(path, new)
    for module in model.modules():
        has_folded = any(isinstance(part, FoldedNorm) for part in module.modules())
        if isinstance(module, nn.TransformerEncoder) and has_folded:
            module.use_nested_tensor = False  # nested tensors need the fast path of its layers
    for insertion in plan.insertions:
        model.get_submodule(insertion.path).register_forward_hook(Center(insertion))
    if plan.swaps and hasattr(model, "get_input_embeddings"):
        for part in parts_that_take_embeddings(model):
            part.register_forward_pre_hook(CenterEmbedded(part), with_kwargs=True)


def _centered_once(weight: Tensor, gain: Tensor | None, axis: int, block: int) -> Tensor:
    """Return gain * weight, centred in float64 and rounded once."""
    wide_gain = None if gain is None else gain.double()
    wide = merged(weight.detach().double(), wide_gain, axis)
    return centered(wide, axis, block).to(weight.dtype)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and the attribute that a parameter's name stands for."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of this name."""
    return getattr(*_owner(model, name))


# ------------------------------------------------------------------------------ what can be written


def find_swap(graph: Graph, path: str, norm: Norm) -> Swap | str:
    """Find out how to swap the module that calls this norm, or why that is not possible.

    The module must do nothing but the norm. That is tried out: on inputs that are centred, it must
    compute what the RMSNorm does that would take its place.
    """
    if not path:
        return (
            "the norm is called by the model itself, as a function, by a function that holds it, "
            "or in an autocast block, which hides its module: there is no module to swap"
        )
    module = graph.model.get_submodule(path)
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    # A bias may be a buffer, of zeros now.
    tensors = [*parameters, *(name for name, _ in module.named_buffers(recurse=False))]
    shapes = graph.taken[path]
    more = f"{path} does more than to normalise the one tensor that it takes"
    is_simple = shapes and None not in shapes and not list(module.children())
    if not is_simple or len(parameters) > 2:
        return more
    alone = widened(duplicate(module)).cpu()
    randomize(alone)
    deeper = {(3, *size) for size in shapes}
    # The last axis in tensors of any rank, or an axis of tensors of one rank
    places: list[tuple[int, int | None, set]] = [(-1, None, shapes | deeper)]
    for size in shapes:
        places += [(axis, len(size), shapes) for axis in range(len(size))]
    for axis, ndim, sizes in places:
        for gain, bias in permutations([*tensors, None, None], 2):
            swap = Swap(
                path=path,
                axis=axis,
                channels=norm.groups * norm.line.block,
                groups=norm.groups,
                eps=norm.eps,
                gain=gain,
                bias=bias,
                ndim=ndim,
            )
            if all(_computes(alone, swap, size) for size in sizes):
                return swap
    return more


def _computes(module: nn.Module, swap: Swap, size: tuple[int, ...]) -> bool:
    """Tell whether a float64 module does to a centred input what the norm does in its place.

    Also to a small one, and to one with a few large numbers, which a clamp after the norm may cut.
    """
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for x in (numbers, 1e-3 * numbers, 1e3 * numbers**9):
        try:
            x = centered(x, swap.axis, swap.channels // swap.groups)
            expected = run(module, (x,))
            found = run(FoldedNorm(module, swap), (x,))
        except Exception:  # no such axis, or what the module's forward may raise
            return False
        if expected.shape != found.shape or not torch.allclose(expected, found, 1e-9, 1e-9):
            return False
    return True
