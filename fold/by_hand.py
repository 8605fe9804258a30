"""Recognise LayerNorms that are written out by hand, as means and square roots.

    (x - mean(x)) / sqrt(variance(x) + eps) * gain + bias

The variance is the mean of (x - mean(x))^2, or torch's without its correction. A model may multiply
by rsqrt instead, take any axis, and leave out the gain or the bias. Where eps is added to the
standard deviation, or the variance is divided by n - 1, it is another norm, and not found.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .axes import Line, aligned, argument, centring, is_tensor, reduced_axis, shape

# Operations that lay a vector of gains or biases along an axis
LAYING = (
    "aten.unsqueeze.",
    "aten.view.",
    "aten.reshape.",
    "aten.expand.",
    "aten.alias.",
    "aten._to_copy.",
)

CASTS = ("aten._to_copy.", "aten.type_as.")


@dataclass(frozen=True)
class HandNorm:
    """A LayerNorm that is written out by hand.

    Attributes:
        line: what it centres.
        eps: what is added to the variance.
        out: the operation whose result is the norm's.
        gain: the parameter that it multiplies by, if there is one.
        bias: the parameter that it adds, if there is one.
        nodes: all its operations.
        from_end: its axis is counted from the end, so that it may be called on any rank.
    """

    line: Line
    eps: float
    out: Node
    gain: Node | None
    bias: Node | None
    nodes: frozenset[Node]
    from_end: bool


def hand_norm(node: Node) -> HandNorm | None:
    """Return the norm that `node` scales the centred input of; None if it does not."""
    for centred, scale, exponent in _scaled(node):
        at = centring(centred)
        root = _root(scale, exponent)
        if at is None or root is None:
            continue
        variance, eps, nodes = root
        axis, block = at
        x = centred.args[0]
        inside = _variance(variance, x, axis)
        if inside is None or block == 1:
            continue
        nodes |= inside | {node, centred, centred.args[1]}
        reductions = [x for x in nodes if str(x.target).startswith(("aten.mean.", "aten.var"))]
        from_end = all(x.args[1][0] < 0 for x in reductions)
        out = node
        found: dict[str, Node | None] = {}
        for name, operation in (("gain", "aten.mul.Tensor"), ("bias", "aten.add.Tensor")):
            vector, after, laid = _vector_after(out, operation, axis, block)
            found[name] = vector
            out = after
            nodes |= laid | {after}
        line = Line(x, axis, block)
        return HandNorm(line, eps, out, found["gain"], found["bias"], frozenset(nodes), from_end)
    return None


def _scaled(node: Node) -> Iterator[tuple[Node, Node, float]]:
    """Yield (x, y, exponent) for each way in which a node is x * y ** exponent."""
    name = str(node.target)
    if node.kwargs or not all(is_tensor(x) for x in node.args):
        return
    if name == "aten.div.Tensor":
        yield *node.args, -1.0
    elif name == "aten.mul.Tensor":
        x, y = node.args
        yield x, y, 1.0
        yield y, x, 1.0


def _root(node: Node, exponent: float) -> tuple[Node, float, set[Node]] | None:
    """Return (variance, eps, operations) if node ** exponent is 1 / sqrt(variance + eps)."""
    nodes = set()
    while exponent != -0.5 or not str(node.target).startswith("aten.add."):
        match str(node.target):
            case "aten.sqrt.default":
                exponent *= 0.5
            case "aten.rsqrt.default":
                exponent *= -0.5
            case "aten.reciprocal.default":
                exponent *= -1
            case "aten.pow.Tensor_Scalar":
                exponent *= node.args[1]
            case _:
                return None
        nodes.add(node)
        node = node.args[0]
    variance, eps = node.args
    if node.kwargs or not isinstance(variance, Node) or not isinstance(eps, float):
        return None
    return variance, eps, nodes | {node}


def _variance(node: Node, x: Node, axis: int) -> set[Node] | None:
    """Return the operations by which `node` is the variance of x along an axis, else None."""
    nodes = {node}
    if node.target is operator.getitem and node.args[1] == 0:  # torch.var_mean: (variance, mean)
        node = node.args[0]
        nodes |= {node, *node.users}
    name = str(node.target)
    if name.startswith(("aten.var.", "aten.var_mean.")):
        if name.endswith(".dim"):
            correction = int(argument(node, 2, True, "unbiased"))
        else:
            correction = argument(node, 2, 1, "correction")
        of = node.args[0]
        if correction != 0 or reduced_axis(node) != axis:
            return None
        if of is x:
            return nodes
        return nodes | {of} if _centres(of, x, axis) else None
    if name != "aten.mean.dim" or reduced_axis(node) != axis:
        return None
    square = node.args[0]
    if not square.args:
        return None
    centred = square.args[0]
    match str(square.target):
        case "aten.pow.Tensor_Scalar" if square.args[1] == 2:
            pass
        case "aten.square.default":
            pass
        case "aten.mul.Tensor" if square.args[1] is centred:
            pass
        case _:
            return None
    if not _centres(centred, x, axis):
        return None
    return nodes | {square, centred, centred.args[1]}


def _centres(node: Any, x: Node, axis: int) -> bool:
    """Tell whether a node is x - mean(x) along an axis."""
    return isinstance(node, Node) and centring(node) == (axis, shape(x)[axis]) and node.args[0] is x


def _vector_after(
    node: Node, operation: str, axis: int, block: int
) -> tuple[Node | None, Node, set[Node]]:
    """Find the operation by which a vector of channels alone goes on with a node's result.

    Returns:
        The vector, the operation, and what else is in between: casts, and what lays the vector
        along the axis. (None, node, nothing) if there is no such operation.
    """
    nothing = (None, node, set())
    passed = set()
    while len(node.users) == 1:
        (user,) = node.users
        if not str(user.target).startswith(CASTS) or user.args[0] is not node:
            break
        passed.add(user)
        node = user
    if len(node.users) != 1:
        return nothing
    (user,) = node.users
    if str(user.target) != operation or user.kwargs or shape(user) != shape(node):
        return nothing
    others = [x for x in user.args if x is not node]
    if len(others) != 1 or aligned(others[0], Line(user, axis, block)) is None:
        return nothing
    (vector,) = others
    laid = passed
    if sorted(shape(vector))[:-1] != [1] * (len(shape(vector)) - 1):
        return nothing
    while vector.op != "placeholder" and str(vector.target).startswith(LAYING):
        laid.add(vector)
        vector = vector.args[0]
    if vector.op != "placeholder" or shape(vector) != (block,):
        return nothing
    return vector, user, laid
