"""Write a fold into the modules of a model: centred parameters, RMSNorms in the place of
LayerNorms, centrings.

A `Plan` holds names alone, so it can be carried out on any copy of the model. The state dict keeps
its keys. Its values are right for the unfolded model, too, because a LayerNorm does the same to
rows of zero mean as an RMSNorm.
"""

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.utils import parametrize

from .axes import argument, input_axes, is_float, shape
from .by_hand import hand_norm
from .graph import Graph, Source
from .norm_calls import norm_input
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


@dataclass(frozen=True)
class Insertion:
    """A centring of what module `path` returns or takes, along an axis, in blocks."""

    path: str  # "" is the whole model
    axis: int  # as in a Swap
    block: int
    argument: tuple[int, str] | None = None  # (position, name); None: what the module returns
    ndim: int | None = None  # as in a Swap


@dataclass
class Plan:
    """All that a fold changes, by name."""

    sources: list[Source] = field(default_factory=list)
    # parameters that get a centred copy, and the names under which the copy is used
    untied: list[tuple[Source, tuple[str, ...]]] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    insertions: list[Insertion] = field(default_factory=list)
    keep: set[str] = field(default_factory=set)  # parameters whose present values it relies on


class FoldedNorm(nn.Module):
    """Compute RMSNorm with the gain and bias of the LayerNorm or GroupNorm `old`, in its place.

        y = x / sqrt(mean(x^2) + eps) * gain + bias

    The mean is over each of `swap.groups` equal blocks of `swap.axis`. Statistics are in float32,
    or float64 for float64. On a GPU in eager mode it runs as one kernel. Parameters keep their
    names, and the hooks of `old` stay.
    """

    def __init__(self, old: nn.Module, swap: Swap):
        super().__init__()
        self.swap = swap
        self.axis = swap.axis
        self.groups = swap.groups
        self.eps = swap.eps
        self.normalized_shape = (swap.channels,)  # as a LayerNorm has it
        self.names = (swap.gain, swap.bias)
        # in the order of the old norm, which optimisers go by
        for name in dict.fromkeys([*old._parameters, "weight", "bias"]):
            self.register_parameter(name, getattr(old, name, None))
        hooks = {name: value for name, value in vars(old).items() if "_hook" in name}
        self.__dict__.update(hooks)
        self.train(old.training)

    # Callers may use the name that the old norm has for its argument; LayerNorm's is `input`.
    def forward(self, input: Tensor | None = None, **named: Tensor | None) -> Tensor:
        (x,) = (value for value in (input, *named.values()) if value is not None)
        gain, bias = (None if name is None else getattr(self, name) for name in self.names)
        channels = self.normalized_shape[0]
        if self.swap.ndim not in (None, x.dim()) or x.shape[self.axis] != channels:
            rank = "" if self.swap.ndim is None else f" of {self.swap.ndim} axes"
            raise FoldError(
                f"{self.swap.path} was folded for tensors{rank} with {channels} numbers along axis "
                f"{self.axis}, not for {tuple(x.shape)}: analyze the model on inputs of this kind"
            )
        is_last = self.axis in (-1, x.dim() - 1)
        x = x if is_last else x.movedim(self.axis, -1)
        y, _ = rms_norm(x, gain, self.eps, bias, self.groups)
        return y if is_last else y.movedim(-1, self.axis)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape[0]}, eps={self.eps}"
        if self.groups > 1:
            text += f", groups={self.groups}"
        return text


class Center:
    """Centre what a module returns, or one of its arguments (a hook)."""

    def __init__(self, insertion: Insertion):
        self.insertion = insertion
        self.axis = insertion.axis
        self.block = insertion.block
        self.argument = insertion.argument

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        if self.argument is None:  # a forward hook gets (args, output)
            return self.center(call[-1])
        args, kwargs = call  # a pre-hook with keywords
        position, name = self.argument
        if name in kwargs:
            return args, {**kwargs, name: self.center(kwargs[name])}
        return (*args[:position], self.center(args[position]), *args[position + 1 :]), kwargs

    def center(self, x: Tensor) -> Tensor:
        if self.insertion.ndim not in (None, x.dim()):
            raise FoldError(
                f"the centring inserted at {self.insertion.path or 'the input'} is for tensors of "
                f"{self.insertion.ndim} axes, not for {tuple(x.shape)}: analyze the model on "
                "inputs of this kind"
            )
        return centered(x, self.axis, self.block)


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


def centered(x: Tensor, axis: int, block: int) -> Tensor:
    """Subtract the mean of each block of an axis."""
    axis %= x.dim()
    blocks = x.unflatten(axis, (-1, block))
    return (blocks - blocks.mean(axis + 1, keepdim=True)).flatten(axis, axis + 1)


def merged(weight: Tensor, gain: Tensor | None, axis: int) -> Tensor:
    """Multiply a weight by a gain that has one number for each index of the axis."""
    if gain is None:
        return weight
    broadcast = [1] * weight.dim()
    broadcast[axis] = -1
    return weight * gain.reshape(broadcast)


# ------------------------------------------------------------------------------ carrying out a plan


@torch.no_grad()
def carry_out(plan: Plan, model: nn.Module) -> None:
    """Fold `model` in place. Weights are centred permanently, in float64 and rounded once."""
    for source in plan.sources:
        gain = tensor_of(model, source.scale) if source.scale else None
        for name, axis in source.parameters:
            weight = tensor_of(model, name)
            weight.copy_(_centered_once(weight, gain, axis, source.block))
        if gain is not None:
            gain.fill_(1)
    for source, names in plan.untied:
        ((name, axis),) = source.parameters
        old = tensor_of(model, name)
        untie(model, names, _centered_once(old, None, axis, source.block))
    swap_and_insert(plan, model)


def untie(model: nn.Module, names: Collection[str], value: Tensor) -> None:
    """Give a parameter that has several names a value of its own under `names`, in place."""
    old = tensor_of(model, min(names))
    new = nn.Parameter(value, old.requires_grad)
    for name in names:
        module, attribute = _owner(model, name)
        setattr(module, attribute, new)
    # Otherwise transformers would tie the head to the copy when a saved model is loaded.
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False


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
    for source in plan.sources:
        _center_when_read(model, source, None)
    for source, names in plan.untied:
        _center_when_read(model, source, names)
    swap_and_insert(plan, model)


def _center_when_read(model: nn.Module, source: Source, names: tuple[str, ...] | None) -> None:
    """Parametrise a source under the given names, or under all names that its tensors have."""
    gain = tensor_of(model, source.scale) if source.scale else None
    for name, axis in source.parameters:
        weight = tensor_of(model, name)
        aliases = [
            alias
            for alias, value in model.named_parameters(remove_duplicate=False)
            if value is weight
        ]
        for alias in names or aliases or [name]:
            module, attribute = _owner(model, alias)
            centering = CenteredWeight(axis, source.block, gain)
            parametrize.register_parametrization(module, attribute, centering)
    if gain is not None:
        parametrize.register_parametrization(*_owner(model, source.scale), Ones())


def swap_and_insert(plan: Plan, model: nn.Module) -> None:
    """Do what a plan does apart from the weights, in place.

    Norm modules become RMSNorms, and centrings are inserted as hooks.
    """
    for swap in plan.swaps:
        old = model.get_submodule(swap.path)
        new = FoldedNorm(old, swap)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is old:
                    setattr(parent, name, new)
    _disable_fast_path(model)
    for insertion in plan.insertions:
        module = model.get_submodule(insertion.path)
        if insertion.argument is None:
            module.register_forward_hook(Center(insertion))
        else:
            module.register_forward_pre_hook(Center(insertion), with_kwargs=True)


def _disable_fast_path(model: nn.Module) -> None:
    """Disable the fast path of torch's encoders that hold a folded norm.

    It is taken without gradients, does not call the norm modules and computes LayerNorms.
    """
    for module in model.modules():
        if not any(isinstance(part, FoldedNorm) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # "neither", for which there is no fast path
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors need the fast path


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


def find_swap(graph: Graph, norm: Node) -> Swap | str:
    """Find out how to swap the module that calls this norm, or why that is not possible.

    The module must do nothing but the norm. Casts and moved axes around the norm are allowed, if
    what it returns has the type and the axes of what it takes.
    """
    key = graph.call(norm)
    path = norm.meta["nn_module_stack"][key][0] if key else ""
    if not path:
        block = (
            ", or in a no_grad or autocast block, which hides its module" if graph.blocks else ""
        )
        return (
            f"the norm is called by the model itself, as a function{block}: "
            "there is no module to swap"
        )
    module = graph.model.get_submodule(path)
    if len(inspect.signature(module.forward).parameters) > 1 and graph.most_given[path] > 1:
        return f"{path} takes more than the tensor that it normalises"
    if path not in graph.returned:
        return f"{path} returns more than the normalised tensor"
    own = [node for node in graph.nodes if graph.call(node) == key]
    line = norm_input(norm).line
    by_hand = hand_norm(norm)
    if by_hand is None:
        gain, bias, eps = argument(norm, 2), argument(norm, 3), argument(norm, 4, 1e-5)
        inside = {norm}
        last = norm
    else:
        gain, bias, eps = by_hand.gain, by_hand.bias, by_hand.eps
        inside = by_hand.nodes
        last = by_hand.out
    before, x = _chain_back(line.node, own, inside)
    after, out = _chain_forward(last, own)
    others = set(own) - {*inside, *before, *after, *_views_again(graph, path, x, own)}
    spread = not inside <= set(own) or any(node.users for node in others)
    if spread or next(module.children(), None) is not None:
        return f"the norm is computed in {path}, together with other operations"
    # Follow the norm's axis back to the module's input.
    axis = line.axis
    for node in reversed(before):
        axis = input_axes(node)[axis]
    # Follow all axes of the input forwards: they must end where they were.
    places = list(range(len(shape(x))))
    for node in [*before, *after]:
        places = [places[source] for source in input_axes(node)]
    if places != sorted(places) or out.meta["val"].dtype != x.meta["val"].dtype:
        return f"{path} also moves axes or changes the type"
    own_names = {id(value): name for name, value in module.named_parameters(recurse=False)}
    names = []
    for parameter in (gain, bias):
        name = None
        if parameter in graph.names:
            name = own_names.get(id(graph.values[graph.names[parameter]]))
        if parameter is not None and name is None:
            return f"the parameters of {path} are not those of its norm"
        names.append(name)
    if len(own_names) != sum(name is not None for name in names):
        return f"the parameters of {path} are not those of its norm"
    channels = shape(x)[axis]
    grouped = "group_norm" in str(norm.target)
    from_end = not grouped if by_hand is None else by_hand.from_end
    moves = any(str(node.target).startswith(TURNS) for node in (*before, *after))
    axis, ndim = place(axis, len(shape(x)), from_end and not moves)
    return Swap(
        path=path,
        axis=axis,
        ndim=ndim,
        channels=channels,
        groups=channels // line.block if grouped else 1,
        eps=eps,
        gain=names[0],
        bias=names[1],
    )


def place(axis: int, ndim: int, from_end: bool = True) -> tuple[int, int | None]:
    """Return how a module finds an axis again, and the only rank for which that is right.

    The last axis, if it is meant as the last one, is -1 in tensors of any rank (None).
    """
    return (-1, None) if from_end and axis == ndim - 1 else (axis, ndim)


TURNS = ("aten.permute", "aten.transpose")
MOVES = (
    *TURNS,
    "aten._to_copy",
    "aten.clone",
    "aten.alias",
    "aten.contiguous",
    "aten.type_as",
)


VIEWS = (
    "aten.view.",
    "aten.unsqueeze.",
    "aten.squeeze.",
    "aten.permute.",
    "aten.transpose.",
    "aten.t.",
    "aten.flatten.",
    "aten.unflatten.",
    "aten.expand.",
    "aten.slice.",
    "aten.select.",
    "aten.alias.",
)


def _chain_back(x: Node, own: list[Node], inside: Collection[Node]) -> tuple[list[Node], Node]:
    """Follow casts and moves back from a norm's input.

    Args:
        x: the norm's input.
        own: the nodes of the module.
        inside: the nodes of the norm.

    Returns:
        The casts and moves, first to last, and the module's input.
    """
    chain = []
    while x in own and str(x.target).startswith(MOVES) and set(x.users) <= {*inside, *chain}:
        chain.append(x)
        x = x.args[0]
    return chain[::-1], x


def _views_again(graph: Graph, path: str, x: Node, own: list[Node]) -> set[Node]:
    """Return the views in a module by which the exporter makes again what the module takes.

    It does so where the tensor was written in place before: x is such a view, which is used outside
    the module, too, and has the shape of the module's argument.
    """
    taken = [argument.shape for argument in graph.arguments[path]]
    if x not in own or taken != [shape(x)] or set(x.users) <= set(own):
        return set()
    views = set()
    while x in own and str(x.target).startswith(VIEWS):
        views.add(x)
        x = x.args[0]
    return views if x not in own else set()


def _chain_forward(norm: Node, own: list[Node]) -> tuple[list[Node], Node]:
    """Follow casts and moves forwards from a norm.

    Returns:
        The casts and moves, first to last, and the module's output.
    """
    chain = []
    out = norm
    if isinstance(norm.meta["val"], list | tuple):  # native_layer_norm: (y, mean, inv_std)
        chain = list(norm.users)
        out = next(user for user in norm.users if user.args[1] == 0)
    while len(out.users) == 1:
        user = next(iter(out.users))
        if user not in own or not str(user.target).startswith(MOVES) or user.args[0] is not out:
            break
        chain.append(user)
        out = user
    return [node for node in chain if is_float(node)], out
