"""Name the numbers that a norm averages, in a graph of ATen operations.

A `Line` is an axis of a tensor in the graph, cut into blocks. The last axis in one block of C
numbers is what a LayerNorm over C channels averages; in blocks of C / G numbers it is what a
GroupNorm with G groups averages. How one line follows from others is the subject of rules.py.

References to sections, appendices and tables are to "Enjoy Your Layer Normalization".
"""

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node


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
    # the gain of a norm along this line: the failure holds only if its numbers differ
    gain: Node | None = None


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


def input_axes(node: Node) -> list[int]:
    """Return, for each axis of a permutation's output, the axis of its input.

    Operations that move no axes give 0, 1, 2, ...
    """
    name = str(node.target)
    ndim = len(shape(node))
    axes = list(range(ndim))
    if "permute" in name:
        return [axis % ndim for axis in node.args[1]]
    if "transpose" in name:
        a = node.args[1] % ndim
        b = node.args[2] % ndim
        axes[a], axes[b] = axes[b], axes[a]
    if name in ("aten.t.default", "aten.numpy_T.default"):
        axes.reverse()
    return axes


def describe(node: Node) -> str:
    """Name an operation, and the module that calls it, for messages."""
    if node.op == "placeholder":
        return node.meta.get("kind", node.name)  # set in graph.py
    made = node.args[0] if node.target is operator.getitem else node  # one of several results
    name = str(made.target).removeprefix("aten.").split(".")[0]
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
    if str(node.target) != "aten.sub.Tensor" or node.kwargs:
        return None
    if not all(is_tensor(x) for x in node.args):
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
    flags = (argument(node, 2, False, "keepdim"), argument(node, 3, False, "keepdim"))
    dims = argument(node, 1, None, "dim")
    # `keepdim` of a variance comes after its correction.
    keepdim = flags[str(node.target) != "aten.mean.dim"]
    if not dims or len(dims) != 1 or keepdim is not True:
        return None
    return dims[0] % len(shape(node.args[0]))
