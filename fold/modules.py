"""Writing a fold back into the modules of a model: centred parameters, RMSNorms in the place of
LayerNorms, centrings.

A `Plan` holds names alone, so it can be carried out on any copy of the model. The state dict keeps
its keys, and what it holds is right for the unfolded model, too: a LayerNorm does the same to rows
of zero mean as an RMSNorm.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.utils import parametrize

from .axes import argument, is_float, moved, norm_input, shape
from .beside import rms_norm
from .graph import Graph, Source


@dataclass(frozen=True)
class Swap:
    """A norm module that becomes an RMSNorm over `axis` of its input, in `groups`."""

    path: str
    axis: int
    channels: int
    groups: int
    eps: float
    gain: str | None  # names of its parameters
    bias: str | None


@dataclass(frozen=True)
class Insertion:
    """A centring of what module `path` returns, or of its argument (position, name); "" is the
    whole model.
    """

    path: str
    axis: int
    block: int
    argument: tuple[int, str] | None = None


@dataclass
class Plan:
    """All that a fold changes, by name."""

    sources: list[Source] = field(default_factory=list)
    # names that get a copy of their own
    untied: list[tuple[Source, tuple[str, ...]]] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    insertions: list[Insertion] = field(default_factory=list)
    keep: set[str] = field(default_factory=set)  # parameters whose values it relies on


class FoldedNorm(nn.Module):
    """RMSNorm with LayerNorm's gain and bias, over `axis` of input (*), in the place of the norm
    `old`: same names.

    y = x / sqrt(mean(x^2) + eps) * gain + bias; the mean is over each of `groups` equal blocks of
    the axis. On a GPU in eager mode it runs as a kernel (kernels/); statistics are float32, or
    float64 for float64. Hooks of `old` stay.
    """

    def __init__(self, old: nn.Module, swap: Swap):
        super().__init__()
        self.swap, self.axis, self.groups, self.eps = swap, swap.axis, swap.groups, swap.eps
        self.normalized_shape, self.names = (swap.channels,), (swap.gain, swap.bias)
        for name in {"weight", "bias", *self.names} - {None}:
            self.register_parameter(name, getattr(old, name, None))
        self.__dict__.update({name: value for name, value in vars(old).items() if "_hook" in name})
        self.train(old.training)

    def forward(self, input: Tensor) -> Tensor:  # LayerNorm's name for it, which callers may use
        gain, bias = (None if name is None else getattr(self, name) for name in self.names)
        if self.axis == input.dim() - 1:
            return rms_norm(input, gain, self.eps, bias, self.groups)[0]
        return rms_norm(input.movedim(self.axis, -1), gain, self.eps, bias, self.groups)[0].movedim(
            -1, self.axis
        )

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}" + f", groups={self.groups}" * (
            self.groups > 1
        )


class Center:
    """Hook that centres what a module returns, or one of its arguments."""

    def __init__(self, insertion: Insertion):
        self.insertion = insertion
        self.axis, self.block, self.argument = insertion.axis, insertion.block, insertion.argument

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        if self.argument is None:
            return centered(call[-1], self.axis, self.block)
        args, kwargs = call
        position, name = self.argument
        if name in kwargs:
            return args, {**kwargs, name: centered(kwargs[name], self.axis, self.block)}
        return (
            *args[:position],
            centered(args[position], self.axis, self.block),
            *args[position + 1 :],
        ), kwargs


class CenteredWeight(nn.Module):
    """Parametrisation V = W - mean(W) (CBWC, equation 7); with a gain, of gain * W (LayerScale)."""

    def __init__(self, axis: int, block: int, gain: nn.Parameter | None = None):
        super().__init__()
        self.axis, self.block, self.gain = axis, block, gain

    def forward(self, weight: Tensor) -> Tensor:
        return centered(merged(weight, self.gain, self.axis), self.axis, self.block)


class Ones(nn.Module):
    """Parametrisation of a gain that has been merged into weights."""

    def forward(self, gain: Tensor) -> Tensor:
        return torch.ones_like(gain)


def centered(x: Tensor, axis: int, block: int) -> Tensor:
    """x minus the mean of each block of its axis (counted from the front)."""
    blocks = x.unflatten(axis, (-1, block))
    return (blocks - blocks.mean(axis + 1, keepdim=True)).flatten(axis, axis + 1)


def merged(weight: Tensor, gain: Tensor | None, axis: int) -> Tensor:
    """The weight times a gain, one number for each place on the axis."""
    return (
        weight
        if gain is None
        else weight * gain.reshape([-1 if i == axis else 1 for i in range(weight.dim())])
    )


# ------------------------------------------------------------------------------ carrying out a plan


@torch.no_grad()
def carry_out(plan: Plan, model: nn.Module) -> None:
    """Fold `model` in place: its weights are centred for good (in float64, rounded once)."""
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
        new = nn.Parameter(_centered_once(old, None, axis, source.block), old.requires_grad)
        for name in names:
            module, attribute = _owner(model, name)
            setattr(module, attribute, new)
        if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
            # or loading a saved copy would tie the head to it
            model.config.tie_word_embeddings = False
    swap_and_insert(plan, model)


def reparametrize(plan: Plan, model: nn.Module) -> None:
    """Fold `model` in place for training (CBWC): weights stay as they are and are centred whenever
    they are read.
    """
    for module in model.modules():
        # a copy shares torch's made-up class with the original: one of its own
        if parametrize.is_parametrized(module):
            old = type(module)
            own = {
                name: value
                for name, value in vars(old).items()
                if name not in ("__dict__", "__weakref__")
            }
            module.__class__ = type(old.__name__, old.__bases__, own)
    for source, names in [(source, None) for source in plan.sources] + plan.untied:
        gain = tensor_of(model, source.scale) if source.scale else None
        for name, axis in source.parameters:
            weight = tensor_of(model, name)
            everywhere = [
                n for n, value in model.named_parameters(remove_duplicate=False) if value is weight
            ]
            for alias in names or everywhere or [name]:
                parametrize.register_parametrization(
                    *_owner(model, alias), CenteredWeight(axis, source.block, gain)
                )
        if gain is not None:
            parametrize.register_parametrization(*_owner(model, source.scale), Ones())
    swap_and_insert(plan, model)


def swap_and_insert(plan: Plan, model: nn.Module) -> None:
    """What a plan does beside the weights: LayerNorms become RMSNorms, centrings are inserted. In
    place.
    """
    for swap in plan.swaps:
        old = model.get_submodule(swap.path)
        new = FoldedNorm(old, swap)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is old:
                    setattr(parent, name, new)
    for module in model.modules():
        if not any(isinstance(part, FoldedNorm) for part in module.modules()):
            continue
        # or its fast path, taken without gradients, passes over
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the norms and computes LayerNorms
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # for that path alone
    for insertion in plan.insertions:
        module = model.get_submodule(insertion.path)
        if insertion.argument is None:
            module.register_forward_hook(Center(insertion))
        else:
            module.register_forward_pre_hook(Center(insertion), with_kwargs=True)


def _centered_once(weight: Tensor, gain: Tensor | None, axis: int, block: int) -> Tensor:
    gain = None if gain is None else gain.double()
    return centered(merged(weight.detach().double(), gain, axis), axis, block).to(weight.dtype)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of this name."""
    return getattr(*_owner(model, name))


# ------------------------------------------------------------------------------ what can be written


def find_swap(graph: Graph, norm: Node) -> Swap | str:
    """How to swap the module that calls this norm, or why that is not possible.

    The module must do nothing but the norm: casts and moved axes around it are fine.
    """
    key = graph.call(norm)
    path = norm.meta["nn_module_stack"][key][0] if key else ""
    if not path:
        block = ", or in a no_grad or autocast block, where modules cannot be told" * graph.blocks
        return (
            f"the norm is called by the model itself, as a function{block}: "
            "there is no module to swap"
        )
    module, own = (
        graph.model.get_submodule(path),
        [node for node in graph.nodes if graph.call(node) == key],
    )
    line, _ = norm_input(norm)
    x, axis = line.node, line.axis
    before, x = _chain_back(x, own)
    after, out = _chain_forward(norm, own)
    extra = set(own) - {norm, *before, *after}
    if any(node.users for node in extra) or next(module.children(), None) is not None:
        return f"the norm is computed in {path}, together with other operations"
    for node in reversed(before):
        axis = moved(node)[axis]
    places = list(range(len(shape(x))))
    for node in [*before, *after]:
        places = [places[source] for source in moved(node)]
    if places != sorted(places) or out.meta["val"].dtype != x.meta["val"].dtype:
        return f"{path} moves axes or changes the type beside its norm"
    grouped = "group_norm" in str(norm.target)
    gain, bias = argument(norm, 2), argument(norm, 3)
    names = {id(value): name for name, value in module.named_parameters(recurse=False)}
    used = [
        None
        if x is None
        else names.get(id(graph.values[graph.names[x]]))
        if x in graph.names
        else None
        for x in (gain, bias)
    ]
    if [x is None for x in (gain, bias)] != [x is None for x in used] or len(names) != sum(
        x is not None for x in used
    ):
        return f"the parameters of {path} are not those of its norm"
    eps = argument(norm, 4, 1e-5)
    channels = shape(x)[axis]
    return Swap(path, axis, channels, channels // line.block if grouped else 1, eps, *used)


MOVES = (
    "aten.permute",
    "aten.transpose",
    "aten._to_copy",
    "aten.clone",
    "aten.alias",
    "aten.contiguous",
)


def _chain_back(x: Node, own: list[Node]) -> tuple[list[Node], Node]:
    """Casts and moves in front of the norm, first to last, and the module's input."""
    chain = []
    while x in own and str(x.target).startswith(MOVES) and len(x.users) == 1:
        chain.append(x)
        x = x.args[0]
    return chain[::-1], x


def _chain_forward(norm: Node, own: list[Node]) -> tuple[list[Node], Node]:
    """Casts and moves behind the norm, and the module's output.

    A norm with three results is followed by getitem.
    """
    chain, out = [], norm
    if isinstance(norm.meta["val"], list | tuple):
        pieces = [user for user in norm.users if user.args[1] == 0]
        chain, out = list(norm.users), pieces[0]
    while (
        len(out.users) == 1
        and (user := next(iter(out.users))) in own
        and str(user.target).startswith(MOVES)
    ):
        chain.append(user)
        out = user
    return [node for node in chain if is_float(node)], out
