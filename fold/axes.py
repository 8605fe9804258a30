"""Lines of numbers in a graph of ATen operations: the rows that a norm averages, and which
operations are norms.

A `Line` is an axis of a tensor in the graph, cut into blocks: the last axis in one block of C
numbers is what a LayerNorm over C averages; in blocks of C / G it is G groups. How lines follow
from one another: fold/rules.py.
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
    axis: int
    block: int


@dataclass(frozen=True)
class Feeds:
    """The lines that feed a line. No inputs and nothing that spoils: it has zero mean already."""

    inputs: tuple[Line, ...] = ()
    spoils: str = ""
    # of a norm along this very line: only this spoils, and not if it is one number for all
    gain: Node | None = None


# ------------------------------------------------------------------------------------------ helpers


def shape(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def is_float(value: Any) -> bool:
    return is_tensor(value) and value.meta["val"].is_floating_point()


def argument(node: Node, position: int, default: Any = None, name: str = "") -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def moved(node: Node) -> list[int]:
    """For each axis of the output of a permutation, the axis of its input; other operations move
    none.
    """
    name, ndim = str(node.target), len(shape(node))
    axes = list(range(ndim))
    if "permute" in name:
        return [axis % ndim for axis in node.args[1]]
    if "transpose" in name:
        a, b = node.args[1] % ndim, node.args[2] % ndim
        axes[a], axes[b] = axes[b], axes[a]
    return axes[::-1] if name in ("aten.t.default", "aten.numpy_T.default") else axes


def describe(node: Node) -> str:
    """The operation and the module it is called in, for people."""
    if node.op == "placeholder":
        return node.meta.get("kind", node.name)  # fold/graph.py
    name = (
        str(node.target).removeprefix("aten.").split(".")[0]
        if node.target is not operator.getitem
        else "getitem"
    )
    where = module_path(node)
    return f"{name} in {where}" if where else name


def module_path(node: Node) -> str:
    """Path of the innermost module whose forward the node belongs to; "" for the whole model."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


def aligned(x: Any, line: Line) -> Line | None:
    """The line of x that lies on `line` when x is broadcast to it; None where x is the same all
    along the axis.
    """
    if not is_tensor(x):
        return None
    axis = line.axis - (len(shape(line.node)) - len(shape(x)))
    return (
        Line(x, axis, line.block)
        if axis >= 0 and shape(x)[axis] == shape(line.node)[line.axis]
        else None
    )


# -------------------------------------------------------------------------------------------- norms


def norm_input(node: Node) -> tuple[Line, str] | None:
    """The line that a norm centres, and why it is none that can be folded ("" if it is); None if
    node is no norm.

    Norms are LayerNorms, and GroupNorms whose statistics are over channels alone (appendix C.3).
    """
    name = str(node.target)
    if name.startswith(("aten.layer_norm", "aten.native_layer_norm")):
        x, sizes = node.args[:2]
        line, why = Line(x, len(shape(x)) - 1, int(sizes[-1])), ""
        if len(sizes) != 1:
            why = f"its mean is over {len(sizes)} axes"
        elif sizes[0] == 1:
            why = "its mean is over one number"
        elif any(
            user.args[1] > 0 and user.users
            for user in node.users
            if user.target is operator.getitem
        ):
            why = "its mean or its deviation is used as well"
        return line, why
    if name.startswith("aten.group_norm"):
        x, groups = node.args[:2]
        if math.prod(shape(x)[2:]) == 1:
            return Line(x, 1, shape(x)[1] // groups), "" if shape(x)[
                1
            ] > groups else "its mean is over one number"
    return None


def centring(node: Node) -> tuple[int, int] | None:
    """(axis, block) if node is x - x.mean(axis, keepdim=True)."""
    if (
        str(node.target) != "aten.sub.Tensor"
        or node.kwargs
        or not all(is_tensor(x) for x in node.args)
    ):
        return None
    x, mean = node.args
    if str(mean.target) != "aten.mean.dim" or mean.args[0] is not x or len(mean.args[1]) != 1:
        return None
    axis = mean.args[1][0] % len(shape(x))
    return (axis, shape(x)[axis]) if argument(mean, 2, False, "keepdim") else None


def ignores(user: Node, line: Line) -> bool:
    """Is `user` blind to a constant on the blocks of this line of its input?"""
    whole = line.block == shape(line.node)[line.axis]
    name, ndim = str(user.target), len(shape(line.node))
    if (norm := norm_input(user)) is not None:
        return norm == (line, "") and user.args.count(line.node) == 1
    if name.startswith(("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")):
        return whole and user.args[1] % ndim == line.axis
    if name.startswith(
        ("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim")
    ):
        return whole and list(argument(user, 1, [], "dim") or []) in (
            [line.axis],
            [line.axis - ndim],
        )
    if centring(user) == (line.axis, line.block):
        return True
    if name.startswith(("aten.copy.", "aten.fill.")):  # writes over it
        return user.args[0] is line.node and user.args.count(line.node) == 1
    if name == "aten.mean.dim":  # the other half of a centring
        return bool(user.users) and all(
            centring(sub) == (line.axis, line.block) and sub.args == (line.node, user)
            for sub in user.users
        )
    return name.startswith(("aten._assert", "aten.sym_")) or not (user.users or user.op == "output")
