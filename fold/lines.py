"""Name the numbers that a norm averages, in a graph of ATen operations, and recognise norms.

A `Line` is an axis of a tensor in the graph, cut into blocks. The last axis in one block of C
numbers is what a LayerNorm over C channels averages; in blocks of C / G numbers it is what a
GroupNorm with G groups averages. How one line follows from others is the subject of rules.py.

Norms are LayerNorms, and GroupNorms of (N, C), whose statistics are over channels alone ("Enjoy
Your Layer Normalization", appendix C.3). A LayerNorm may be written out by hand:

    (x - mean(x)) / sqrt(variance(x) + eps)

That is tried out, so a model may write it as it likes, over any axis. Where eps is added to the
standard deviation, or the variance is divided by n - 1, it is another norm, and not found.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Line:
    """The numbers along `axis` of a node's tensor, in consecutive blocks of `block` numbers."""

    node: Node
    axis: int  # counted from the front
    block: int


@dataclass(frozen=True)
class Feeds:
    """The lines that feed a line.

    A line without inputs and without a failure has zero mean already.
    """

    inputs: tuple[Line, ...] = ()
    # why the line cannot have zero mean, even if all its inputs have ("": it can)
    failure: str = ""


# ------------------------------------------------------------------------------------------ helpers


def shape(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)


def is_tensor(value: Any) -> bool:
    """Tell whether an argument of an operation is a tensor of the graph."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def is_float(value: Any) -> bool:
    """Tell whether an argument of an operation is a floating-point tensor of the graph."""
    return is_tensor(value) and value.meta["val"].is_floating_point()


def argument(node: Node, position: int, default: Any = None, name: str = "") -> Any:
    """Return an argument of an operation, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def made_by(node: Node) -> Node:
    """Return the operation that gives a tensor, perhaps beside others."""
    return node.args[0] if node.target is operator.getitem else node


def describe(node: Node) -> str:
    """Name an operation, and the module that calls it, for messages."""
    if node.op == "placeholder":
        return node.meta.get("kind", node.name)  # set in graph.py
    name = str(made_by(node).target).removeprefix("aten.").split(".")[0]
    where = module_path(node)
    return f"{name} in {where}" if where else name


def module_path(node: Node) -> str:
    """Return the path of the innermost module that calls the node; "" for the whole model."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


def aligned(x: Any, line: Line) -> Line | None:
    """Return the line of x that lies on `line` when x is broadcast to the line's tensor.

    Returns None where x has the same value all along the axis.
    """
    if not is_tensor(x):
        return None
    # Broadcasting aligns shapes at their last axes.
    axis = line.axis - (len(shape(line.node)) - len(shape(x)))
    if axis < 0 or shape(x)[axis] != shape(line.node)[line.axis]:
        return None
    return Line(x, axis, line.block)


def centring(node: Node) -> tuple[int, int] | None:
    """Return (axis, block) if the node is x - x.mean(axis, keepdim=True), else None."""
    if str(node.target) != "aten.sub.Tensor" or node.kwargs or not all(map(is_tensor, node.args)):
        return None
    x, mean = node.args
    if mean.target is operator.getitem and mean.args[1] == 1:  # torch.var_mean: (variance, mean)
        mean = mean.args[0]
    if not str(mean.target).startswith(("aten.mean.dim", "aten.var_mean.")):
        return None
    axis = reduced_axis(mean)
    if mean.args[0] is not x or axis is None:
        return None
    return axis, shape(x)[axis]


def reduced_axis(node: Node) -> int | None:
    """Return the axis of a mean or a variance over one axis that is kept, else None."""
    # `keepdim` of a variance comes after its correction.
    position = 2 if str(node.target) == "aten.mean.dim" else 3
    keepdim = argument(node, position, False, "keepdim")
    dims = argument(node, 1, None, "dim")
    if not dims or len(dims) != 1 or keepdim is not True:
        return None
    return dims[0] % len(shape(node.args[0]))


WIDER = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)


def wider(x: Any) -> Any:
    """Return float64 for a type of floats; other arguments of an operation stay."""
    return WIDER.get(x, x) if isinstance(x, torch.dtype) else x


def compute(node: Node, known: dict[Node, Any]) -> Any:
    """Compute a tensor of the graph in float64 from known ones, which become more.

    Raises KeyError if it depends on other tensors, and what its operations raise.
    """
    if node not in known and node.op != "call_function":
        raise KeyError(node)
    if node not in known:

        def value(x: Any) -> Any:
            return compute(x, known) if isinstance(x, Node) else wider(x)

        args, kwargs = tree_map(value, (node.args, node.kwargs))
        known[node] = node.target(*args, **kwargs)
    return known[node]


def centered(x: Tensor, axis: int, block: int) -> Tensor:
    """Subtract the mean of each block of an axis."""
    axis %= x.dim()
    blocks = x.unflatten(axis, (-1, block))
    return (blocks - blocks.mean(axis + 1, keepdim=True)).flatten(axis, axis + 1)


# -------------------------------------------------------------------------------------------- norms


PRODUCTS = ("aten.mul.Tensor", "aten.div.Tensor")
TINY = 1e-9
SCALES = (1.0, 1e6)  # also of large numbers, which a clamp may cut


@dataclass(frozen=True)
class Norm:
    """A norm: the line that it centres, and what it adds to the variance."""

    line: Line
    eps: float
    groups: int = 1
    by_hand: bool = False
    refused: str = ""  # why it can never be folded ("": it may be)


def norm_of(node: Node) -> Norm | None:
    """Return the norm whose statistics `node` applies to its input; None if it is no norm."""
    name = str(node.target)
    groups = 1
    why = ""
    if name.startswith(("aten.layer_norm", "aten.native_layer_norm")):
        x, sizes = node.args[:2]
        axis = len(shape(x)) - 1
        block = sizes[-1]
        # native_layer_norm returns (y, mean, inv_std)
        pieces = [user for user in node.users if user.target is operator.getitem]
        if any(piece.args[1] > 0 and piece.users for piece in pieces):
            why = "its mean or its deviation is used as well"
        if len(sizes) > 1:
            why = f"its mean is over {len(sizes)} axes"
    # Of (N, C) alone: that (N, C, ...) has one position may be due to the example. (A U-Net's
    # deepest GroupNorms see one position of a small picture, and more of a larger one.)
    elif name.startswith("aten.group_norm") and len(shape(node.args[0])) == 2:
        x, groups = node.args[:2]
        axis = 1
        block = shape(x)[1] // groups
    else:
        return _by_hand(node)
    if block == 1:
        why = "its mean is over one number"
    return Norm(Line(x, axis, block), argument(node, 4, 1e-5), groups, refused=why)


# ------------------------------------------------------------------------------ written out by hand


def _by_hand(node: Node) -> Norm | None:
    """Return the norm that `node` scales the centred input of, if it does: that is tried out."""
    if not str(node.target).startswith(PRODUCTS):
        return None
    for centred in node.all_input_nodes:
        at = centring(centred)
        if at is None or at[1] == 1:
            continue
        x = centred.args[0]
        axis, block = at
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(shape(x), generator=generator, dtype=torch.float64)
        numbers = numbers.to(x.meta["val"].device)
        try:
            tiny, *found = (compute(node, {x: scale * numbers}) for scale in (TINY, *SCALES))
        except Exception:  # it needs other tensors, or is no operation on floats
            continue
        c = numbers - numbers.mean(axis, keepdim=True)
        # A tiny input is divided by sqrt(eps) alone.
        eps = float(TINY * c.abs().max() / tiny.abs().max()) ** 2
        wide = torch.stack([scale * c for scale in SCALES])
        mean = wide.square().mean(axis - c.dim(), keepdim=True)
        expected = wide * torch.rsqrt(mean + eps)
        if torch.allclose(torch.stack(found), expected, rtol=1e-9, atol=1e-9):
            return Norm(Line(x, axis, block), float(f"{eps:.6g}"), by_hand=True)
    return None


def only_centres(user: Node, line: Line) -> bool:
    """Tell whether an operation on a line is a step of x - mean(x), which no constant changes."""
    centred = (line.axis, line.block)
    name = str(user.target)
    if not name.startswith(("aten.mean.dim", "aten.var_mean.")):
        return centring(user) == centred and user.args[0] is line.node
    means = [user]
    if "var_mean" in name:
        if (reduced_axis(user), shape(line.node)[line.axis]) != centred:
            return False
        means = [piece for piece in user.users if piece.args[1] == 1]
    subs = [sub for mean in means for sub in mean.users]
    return all(centring(sub) == centred and sub.args[0] is line.node for sub in subs)
