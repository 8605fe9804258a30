"""Which lines of numbers make up a line of numbers? The rules of folding, one for each kind of ATen
operation.

A rule says for the output of an operation which lines of its inputs feed a line of the output, such
that

    adding a constant to every block of these inputs adds a constant to the blocks of the output,
    and if the blocks of all these inputs have zero mean, the output's have, unless something
    `spoils` it.

The same rules are read backwards (which parameters must be centred for this LayerNorm?) and
forwards (what else would feel it?): fold/graph.py. A rule gives None where an operation does
neither along this axis, and so do operations that have no rule. Source: "Enjoy Your Layer
Normalization", section 4.2 (scalars, adds, linears) and appendix C (convolutions, groups), but on
ATen operations, so that in-place code, functions and modules of any name are alike.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from .axes import Feeds, Line, aligned, argument, centring, describe, is_float, moved, shape

Rule = Callable[[Line], Feeds]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of these ATen operations (name.overload)."""

    def register(function: Rule) -> Rule:
        RULES.update({f"aten.{name}": function for name in names})
        return function

    return register


def feeds(line: Line) -> Feeds:
    """What feeds a line; `spoils` says in words why it cannot be made to have zero mean through its
    inputs.
    """
    node = line.node
    if node.target is operator.getitem:
        found = RULES["aten.getitem"](line)
    elif node.op == "call_function" and str(node.target) in RULES and is_float(node):
        found = RULES[str(node.target)](line)
    else:
        found = None
    why = "need not have a zero mean" if node.op == "placeholder" else "does not keep a zero mean"
    return found or Feeds(spoils=f"{describe(node)} {why}")


def _through(node: Any, axis: int, line: Line) -> Feeds | None:
    return Feeds((Line(node, axis, line.block),)) if is_float(node) else None


def _any_of(parts: Iterable[Any], line: Line, why: str) -> Feeds:
    """Lines of the parts that vary along the axis; another part, unless it is 0, spoils, and `why`
    says how.
    """
    found = [(x, aligned(x, line)) for x in parts]
    spoils = any(at is None and not is_zero(x) for x, at in found)
    return Feeds(
        tuple(at for _, at in found if at is not None),
        f"{describe(line.node)} {why}" if spoils else "",
    )


def is_zero(x: Any) -> bool:
    """A number or a tensor that is known to be 0 everywhere."""
    if not isinstance(x, Node):
        return isinstance(x, int | float) and x == 0
    name = str(x.target)
    if name.startswith(("aten.clone", "aten._to_copy", "aten.lift_fresh_copy")):
        return is_zero(x.args[0])
    if name.startswith(("aten.full", "aten.scalar_tensor")):
        return is_zero(next(a for a in reversed(x.args) if isinstance(a, int | float)))
    # a constant: fold/graph.py
    return name.startswith(("aten.zeros", "aten.new_zeros")) or x.meta.get("zero", False)


# --------------------------------------------------------------------------------- scalars and adds


@rule(
    "clone.default",
    "alias.default",
    "detach.default",
    "contiguous.default",
    "_to_copy.default",
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "neg.default",
    "lift_fresh_copy.default",
)
def _same(line: Line) -> Feeds | None:
    return _through(line.node.args[0], line.axis, line)


@rule("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(line: Line) -> Feeds | None:
    x, p, training = line.node.args
    if training and p > 0:
        return Feeds(
            spoils=f"{describe(line.node)} is in training mode: zeros at random make a mean"
        )
    return _through(x, line.axis, line)


@rule("copy.default", "fill.Scalar", "fill.Tensor")
def _written(line: Line) -> Feeds:
    """What is written, as a whole, over another tensor."""
    return _any_of(line.node.args[1:2], line, "puts one number into a whole row")


@rule("getitem")
def _getitem(line: Line) -> Feeds | None:
    """One output of a split, or the result of a norm."""
    source, index = line.node.args
    name = str(source.target)
    if name.startswith("aten.native_dropout"):
        return _dropout(Line(source, line.axis, line.block))
    if name.startswith("aten.native_layer_norm") and index == 0:
        return _layer_norm(Line(source, line.axis, line.block))
    if name.startswith(("aten.split", "aten.chunk", "aten.unsafe_split", "aten.tensor_split")):
        axis = argument(source, 2, 0, "dim") % len(shape(line.node))
        return _through(source.args[0], line.axis, line) if axis != line.axis else None
    if name.startswith("aten.unbind"):
        axis = argument(source, 1, 0, "dim") % (len(shape(line.node)) + 1)
        return _through(source.args[0], line.axis + (axis <= line.axis), line)
    return None


@rule("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _add(line: Line) -> Feeds:
    if centring(line.node) == (line.axis, line.block):
        return Feeds()
    return _any_of(line.node.args[:2], line, "adds the same number to a whole row")


@rule("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
def _mul(line: Line) -> Feeds | None:
    """By a number, or by a tensor that is the same all along the axis."""
    x, y = line.node.args[:2]
    if aligned(y, line) is None:
        at = aligned(x, line)
    elif aligned(x, line) is None and "mul" in str(line.node.target):
        at = aligned(y, line)
    else:
        return Feeds(spoils=f"{describe(line.node)} gives every channel another factor")
    return None if at is None else Feeds((at,))


@rule("where.self", "masked_fill.Scalar", "masked_fill.Tensor")
def _choose(line: Line) -> Feeds | None:
    """Where the condition is the same all along the axis."""
    masked = "masked_fill" in str(line.node.target)
    condition, options = (
        line.node.args[masked],
        [x for i, x in enumerate(line.node.args) if i != masked],
    )
    if aligned(condition, line) is not None:
        return None
    return _any_of(options, line, "puts one number into a whole row")


@rule(
    "zeros.default", "zeros_like.default", "new_zeros.default", "full.default", "full_like.default"
)
def _zeros(line: Line) -> Feeds | None:
    return Feeds() if is_zero(line.node) else None


# ----------------------------------------------------------------------------------- moving numbers


@rule(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "flatten.using_ints",
    "unflatten.int",
    "unsqueeze.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "view_as.default",
)
def _view(line: Line) -> Feeds | None:
    """A reshape keeps a block whole if some axis of its input has the same stride and holds whole
    blocks.
    """
    x = line.node.args[0]
    stride = math.prod(shape(line.node)[line.axis + 1 :])
    for axis, size in enumerate(shape(x)):
        if (
            size >= line.block
            and size % line.block == 0
            and math.prod(shape(x)[axis + 1 :]) == stride
        ):
            return _through(x, axis, line)
    return None


@rule("permute.default", "transpose.int", "t.default", "numpy_T.default")
def _move(line: Line) -> Feeds | None:
    return _through(line.node.args[0], moved(line.node)[line.axis], line)


@rule("expand.default", "repeat.default")
def _expand(line: Line) -> Feeds | None:
    at = aligned(line.node.args[0], line)
    return None if at is None else Feeds((at,))


@rule(
    "slice.Tensor",
    "index_select.default",
    "narrow.default",
    "cumsum.default",
    "roll.default",
    "flip.default",
)
def _along_another_axis(line: Line) -> Feeds | None:
    """Picks, sums or moves whole blocks, as long as it works along another axis."""
    dims = argument(line.node, 2 if "roll" in str(line.node.target) else 1, 0, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or line.axis in [dim % len(shape(line.node)) for dim in dims]:
        return None
    return _through(line.node.args[0], line.axis, line)


@rule("select.int")
def _select(line: Line) -> Feeds | None:
    x, dim = line.node.args[:2]
    return _through(x, line.axis + (dim % len(shape(x)) <= line.axis), line)


@rule("mean.dim", "sum.dim_IntList", "nansum.default")
def _reduce(line: Line) -> Feeds | None:
    x, dims = line.node.args[:2]
    dims = [dim % len(shape(x)) for dim in dims or range(len(shape(x)))]
    left = [
        axis
        for axis in range(len(shape(x)))
        if axis not in dims or argument(line.node, 2, False, "keepdim")
    ]
    return _through(x, left[line.axis], line) if left[line.axis] not in dims else None


@rule("pad.default", "constant_pad_nd.default")
def _pad(line: Line) -> Feeds | None:
    x, widths = line.node.args[:2]
    from_last = len(shape(line.node)) - 1 - line.axis
    if any(widths[2 * from_last : 2 * from_last + 2]) or not is_float(x):
        return None
    value = (
        line.node.args[-1]
        if "constant" in str(line.node.target)
        else argument(line.node, 3, 0, "value")
    )
    zero = len(line.node.args) == 2 or value is None or is_zero(value)
    if (
        "constant" not in str(line.node.target)
        and argument(line.node, 2, "constant", "mode") != "constant"
    ):
        zero = True  # reflects or repeats whole rows
    return Feeds(
        (Line(x, line.axis, line.block),),
        "" if zero else f"{describe(line.node)} adds rows of one number",
    )


@rule("index.Tensor")
def _index(line: Line) -> Feeds | None:
    """Rows picked by one index tensor at the front or, with `:` before it, further on."""
    x, indices = line.node.args
    used = [position for position, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[-1] + 1)):
        return None
    gone = len(used)  # axes of x that the index tensors replace, by as many as these have together
    came = len(shape(line.node)) - (len(shape(x)) - gone)
    if used[0] <= line.axis < used[0] + came:
        return None
    return _through(x, line.axis if line.axis < used[0] else line.axis - came + gone, line)


@rule("gather.default")
def _gather(line: Line) -> Feeds | None:
    """Rows picked by an index that is the same all along the axis."""
    x, dim, index = line.node.args[:3]
    even = (
        str(index.target) in ("aten.expand.default", "aten.repeat.default")
        and aligned(index.args[0], line) is None
    )
    return _through(x, line.axis, line) if even and dim % len(shape(x)) != line.axis else None


@rule("cat.default", "stack.default")
def _join(line: Line) -> Feeds | None:
    dim = argument(line.node, 1, 0, "dim") % len(shape(line.node))
    if dim == line.axis:
        return Feeds(spoils=f"{describe(line.node)} joins pieces along the axis of the norm")
    axis = line.axis - ("stack" in str(line.node.target) and dim < line.axis)
    return Feeds(tuple(Line(x, axis, line.block) for x in line.node.args[0] if math.prod(shape(x))))


@rule("select_scatter.default", "slice_scatter.default")
def _overwrite(line: Line) -> Feeds | None:
    """Rows of the first tensor are replaced by those of the second: h[:, 0] = row."""
    x, rows = line.node.args[:2]
    dim = argument(line.node, 2, 0, "dim") % len(shape(x))
    if dim == line.axis:
        return None
    axis = line.axis - ("select" in str(line.node.target) and dim < line.axis)
    return Feeds((Line(x, line.axis, line.block), Line(rows, axis, line.block)))


@rule(
    "avg_pool1d.default",
    "avg_pool2d.default",
    "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default",
    "upsample_nearest2d.default",
    "upsample_nearest2d.vec",
    "upsample_bilinear2d.default",
    "upsample_bilinear2d.vec",
    "upsample_bicubic2d.default",
    "upsample_bicubic2d.vec",
)
def _pool(line: Line) -> Feeds | None:
    """Means over positions; zero rows at the border keep a mean of zero, and shift a row evenly."""
    spatial = 1 if "1d" in str(line.node.target) else 2
    return (
        _through(line.node.args[0], line.axis, line)
        if line.axis == len(shape(line.node)) - spatial - 1
        else None
    )


# ----------------------------------------------------------------------------------------- products


def _with_bias(line: Line, weight: Line, bias: Any) -> Feeds:
    bias = () if bias is None else (Line(bias, 0, line.block),)
    return Feeds((weight, *bias))


@rule("linear.default")
def _linear(line: Line) -> Feeds | None:
    x, weight, bias = line.node.args[0], line.node.args[1], argument(line.node, 2, None, "bias")
    if line.axis == len(shape(line.node)) - 1:
        return _with_bias(line, Line(weight, 0, line.block), bias)
    spoils = (
        "" if bias is None else f"the bias of {describe(line.node)} is the same for a whole row"
    )
    return Feeds((Line(x, line.axis, line.block),), spoils)


@rule("addmm.default")
def _addmm(line: Line) -> Feeds | None:
    bias, _, b = line.node.args
    if line.node.kwargs or line.axis != 1 or len(shape(bias)) != 1:
        return None
    return _with_bias(line, Line(b, 1, line.block), bias)


@rule("mm.default", "matmul.default", "bmm.default")
def _matmul(line: Line) -> Feeds | None:
    """The last axis comes from the second factor, the one before from the first."""
    a, b = line.node.args
    from_last = len(shape(line.node)) - 1 - line.axis
    if len(shape(a)) < 2 or len(shape(b)) < 2 or from_last > 1:
        return None
    factor = a if from_last else b
    return _through(factor, len(shape(factor)) - 1 - from_last, line)


@rule("scaled_dot_product_attention.default")
def _attention(line: Line) -> Feeds | None:
    """Linear in the values (appendix D.3)."""
    value = line.node.args[2]
    return (
        _through(value, len(shape(value)) - 1, line)
        if line.axis == len(shape(line.node)) - 1
        else None
    )


@rule("embedding.default")
def _embedding(line: Line) -> Feeds | None:
    return _through(line.node.args[0], 1, line) if line.axis == len(shape(line.node)) - 1 else None


@rule(
    "conv1d.default",
    "conv2d.default",
    "conv3d.default",
    "conv1d.padding",
    "conv2d.padding",
    "conv3d.padding",
    "conv_transpose1d.default",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution.default",
)
def _conv(line: Line) -> Feeds | None:
    """Along the channels: the kernels' output axis (appendix C.2.2)."""
    node, name = line.node, str(line.node.target)
    weight, bias = node.args[1], argument(node, 2, None, "bias")
    general = "convolution" in name
    transposed = node.args[6] if general else "transpose" in name
    groups = argument(node, 8 if general else 6, 1, "groups")
    channel_axis = len(shape(node)) - (len(shape(weight)) - 2) - 1
    if line.axis != channel_axis:
        return None
    if groups > 1 and (transposed or shape(node)[channel_axis] // groups % line.block):
        return Feeds(
            spoils=f"{describe(node)} is a grouped convolution: "
            "each output channel has inputs of its own"
        )
    return _with_bias(line, Line(weight, 1 if transposed else 0, line.block), bias)


# -------------------------------------------------------------------------------------------- norms


@rule("layer_norm.default")
def _layer_norm(line: Line) -> Feeds | None:
    """Zero mean already if it has no gain, or one for all: fold/graph.py looks at the values."""
    x, sizes, weight, bias = (argument(line.node, i) for i in range(4))
    if len(sizes) != 1 or line.axis != len(shape(x)) - 1 or line.block != sizes[0]:
        return None
    spoils = "" if weight is None else f"the gains of {describe(line.node)} make a mean"
    return Feeds(() if bias is None else (Line(bias, 0, line.block),), spoils, weight)
