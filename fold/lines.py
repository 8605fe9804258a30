"""Name the numbers that a norm averages, in a graph of ATen operations, and recognise norms.

A `Line` is an axis of a tensor in the graph, cut into blocks. The last axis in one block of C
numbers is what a LayerNorm over C channels averages; in blocks of C / G numbers it is what a
GroupNorm with G groups averages. How one line follows from others is the subject of rules.py.

Norms are LayerNorms, and GroupNorms of (N, C), whose statistics are over channels alone ("Enjoy
Your Layer Normalization", appendix C.3). A LayerNorm may be written out by hand:

    (x - mean(x)) / sqrt(variance(x) + eps)

The variance is the mean of (x - mean(x))^2, or torch's without its correction. A model may multiply
by rsqrt instead, and take any axis. Where eps is added to the standard deviation, or the variance
is divided by n - 1, it is another norm, and not found.
"""

import operator
from collections.abc import Iterator
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


# -------------------------------------------------------------------------------------------- norms


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
    if name.startswith(("aten.layer_norm", "aten.native_layer_norm")):
        x, sizes = node.args[:2]
        line = Line(x, len(shape(x)) - 1, int(sizes[-1]))
        return Norm(line, argument(node, 4, 1e-5), refused=_refused_layer_norm(node))
    # Of (N, C) alone: that (N, C, ...) has one position may be due to the example. (A U-Net's
    # deepest GroupNorms see one position of a small picture, and more of a larger one.)
    if name.startswith("aten.group_norm") and len(shape(node.args[0])) == 2:
        x, groups = node.args[:2]
        block = shape(x)[1] // groups
        why = "" if block > 1 else "its mean is over one number"
        return Norm(Line(x, 1, block), argument(node, 4, 1e-5), groups, refused=why)
    return next(_by_hand(node), None)


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


# ------------------------------------------------------------------------------ written out by hand


def _by_hand(node: Node) -> Iterator[Norm]:
    """Yield the norm that `node` scales the centred input of, if it does."""
    for centred, scale, exponent in _scaled(node):
        at = centring(centred)
        root = _root(scale, exponent)
        if at is None or root is None:
            continue
        variance, eps = root
        axis, block = at
        x = centred.args[0]
        if block > 1 and _is_variance(variance, x, axis):
            yield Norm(Line(x, axis, block), eps, by_hand=True)


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


POWERS = {"aten.sqrt.default": 0.5, "aten.rsqrt.default": -0.5, "aten.reciprocal.default": -1.0}


def _root(node: Node, exponent: float) -> tuple[Node, float] | None:
    """Return (variance, eps) if node ** exponent is 1 / sqrt(variance + eps)."""
    while not str(node.target).startswith("aten.add."):
        name = str(node.target)
        power = node.args[1] if name == "aten.pow.Tensor_Scalar" else POWERS.get(name)
        if power is None:
            return None
        exponent *= power
        node = node.args[0]
    variance, eps = node.args
    if node.kwargs or exponent != -0.5 or not isinstance(eps, float) or not is_tensor(variance):
        return None
    return variance, eps


def _is_variance(node: Node, x: Node, axis: int) -> bool:
    """Tell whether a node is the variance of x along an axis."""
    if node.target is operator.getitem and node.args[1] == 0:  # torch.var_mean: (variance, mean)
        node = node.args[0]
    name = str(node.target)
    if not name.startswith(("aten.mean.dim", "aten.var.", "aten.var_mean.")):
        return False
    if reduced_axis(node) != axis:
        return False
    of = node.args[0]
    if name.startswith(("aten.var.", "aten.var_mean.")):
        corrections = (2, True, "unbiased") if name.endswith(".dim") else (2, 1, "correction")
        return argument(node, *corrections) == 0 and (of is x or _centres(of, x, axis))
    match str(of.target):
        case "aten.pow.Tensor_Scalar":
            squares = of.args[1] == 2
        case "aten.mul.Tensor":
            squares = of.args[1] is of.args[0]
        case target:
            squares = target == "aten.square.default"
    return name == "aten.mean.dim" and squares and _centres(of.args[0], x, axis)


def _centres(node: Any, x: Node, axis: int) -> bool:
    """Tell whether a node is x - mean(x) along an axis."""
    return is_tensor(node) and centring(node) == (axis, shape(x)[axis]) and node.args[0] is x


# --------------------------------------------------------------------------- what ignores constants

SOFTMAX = ("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")
DEVIATION = ("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim")

# Operations that read the shape or the type of their input, or of all but the first
READ_NO_NUMBERS = (
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
    "aten.empty_like",
    "aten.new_",
)
READ_FIRST_ALONE = ("aten.type_as", "aten.to.other", "aten.view_as", "aten.expand_as")


def ignores_constant(user: Node, line: Line) -> bool:
    """Tell whether `user` gives the same if a constant is added to the blocks of this line.

    `user` is an operation that reads the line's tensor.
    """
    name = str(user.target)
    ndim = len(shape(line.node))
    whole_axis = line.block == shape(line.node)[line.axis]
    norm = norm_of(user)
    if norm is not None:
        return norm.line == line and not norm.refused and user.args.count(line.node) == 1
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
        return bool(user.users) and _only_centres(user, line)
    if name.startswith("aten.var_mean."):
        means = [piece for piece in user.users if piece.args[1] == 1]
        whole = whole_axis and reduced_axis(user) == line.axis
        return whole and all(_only_centres(mean, line) for mean in means)
    if name.startswith(("aten._assert", "aten.sym_", *READ_NO_NUMBERS)):
        return True
    if name.startswith(READ_FIRST_ALONE):
        return line.node is not user.args[0]
    return not (user.users or user.op == "output")


def _only_centres(mean: Node, line: Line) -> bool:
    """Tell whether a mean of a line is only subtracted from it."""
    return all(
        centring(sub) == (line.axis, line.block) and sub.args == (line.node, mean)
        for sub in mean.users
    )
