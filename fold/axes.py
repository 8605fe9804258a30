"""Name the numbers that a norm averages, in a graph of ATen operations, and recognise norms.

A `Line` is an axis of a tensor in the graph, cut into blocks. The last axis in one block of C
numbers is what a LayerNorm over C channels averages; in blocks of C / G numbers it is what a
GroupNorm with G groups averages. How one line follows from others is the subject of rules.py.

References to sections, appendices and tables are to "Enjoy Your Layer Normalization".
"""

import math
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
    if node.target is operator.getitem:
        name = "getitem"
    else:
        name = str(node.target).removeprefix("aten.").split(".")[0]
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


# -------------------------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class NormInput:
    """The line that a norm centres."""

    line: Line
    refused: str = ""  # why this norm can never be folded ("": it may be)


def norm_input(node: Node) -> NormInput | None:
    """Return what a norm centres; None if the node is no norm.

    Norms are LayerNorms, and those GroupNorms whose statistics are over channels alone
    (appendix C.3).
    """
    name = str(node.target)
    if name.startswith(("aten.layer_norm", "aten.native_layer_norm")):
        x, sizes = node.args[:2]
        line = Line(x, len(shape(x)) - 1, int(sizes[-1]))
        return NormInput(line, _refused_layer_norm(node))
    if name.startswith("aten.group_norm"):
        x, groups = node.args[:2]
        channels = shape(x)[1]  # x is (N, C, ...)
        positions = math.prod(shape(x)[2:])
        if positions == 1:
            why = "" if channels > groups else "its mean is over one number"
            return NormInput(Line(x, 1, channels // groups), why)
    return None


def _refused_layer_norm(node: Node) -> str:
    """Return why a LayerNorm can never be folded; "" if it may be."""
    sizes = node.args[1]
    if len(sizes) != 1:
        return f"its mean is over {len(sizes)} axes"
    if sizes[0] == 1:
        return "its mean is over one number"
    for user in node.users:
        # native_layer_norm returns (y, mean, inv_std)
        if user.target is operator.getitem and user.args[1] > 0 and user.users:
            return "its mean or its deviation is used as well"
    return ""


def centring(node: Node) -> tuple[int, int] | None:
    """Return (axis, block) if the node is x - x.mean(axis, keepdim=True), else None."""
    if str(node.target) != "aten.sub.Tensor" or node.kwargs:
        return None
    if not all(is_tensor(x) for x in node.args):
        return None
    x, mean = node.args
    if str(mean.target) != "aten.mean.dim" or mean.args[0] is not x:
        return None
    if len(mean.args[1]) != 1 or not argument(mean, 2, False, "keepdim"):
        return None
    axis = mean.args[1][0] % len(shape(x))
    return axis, shape(x)[axis]


SOFTMAX = ("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")
DEVIATION = ("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim")


def ignores_constant(user: Node, line: Line) -> bool:
    """Tell whether `user` gives the same if a constant is added to the blocks of this line.

    `user` is an operation that reads the line's tensor.
    """
    name = str(user.target)
    ndim = len(shape(line.node))
    whole_axis = line.block == shape(line.node)[line.axis]
    norm = norm_input(user)
    if norm is not None:
        return norm == NormInput(line) and user.args.count(line.node) == 1
    if name.startswith(SOFTMAX):
        return whole_axis and user.args[1] % ndim == line.axis
    if name.startswith(DEVIATION):
        dims = list(argument(user, 1, [], "dim") or [])
        return whole_axis and dims in ([line.axis], [line.axis - ndim])
    if centring(user) == (line.axis, line.block):
        return True
    if name.startswith(("aten.copy.", "aten.fill.")):  # overwrites all its numbers
        return user.args[0] is line.node and user.args.count(line.node) == 1
    if name == "aten.mean.dim":  # the first half of a centring
        return bool(user.users) and all(
            centring(sub) == (line.axis, line.block) and sub.args == (line.node, user)
            for sub in user.users
        )
    if name.startswith(("aten._assert", "aten.sym_")):
        return True
    return not (user.users or user.op == "output")
