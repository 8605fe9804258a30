"""Say which lines of an operation's inputs make up a line of its output: one rule for each kind of
ATen operation.

A rule gives, for a line of an operation's output, the lines of its inputs that feed it, such that

    1. adding a constant to every block of these inputs adds a constant to the blocks of the output,
    2. if the blocks of all these inputs have zero mean, those of the output have, too, unless the
       rule states a `failure`.

graph.py reads the same rules backwards (which parameters must be centred for this LayerNorm?) and
forwards (what else would be changed by that?). A rule returns None where an operation has neither
property along this axis. Operations without a rule have neither.

Source: "Enjoy Your Layer Normalization", section 4.2 (scalars, adds, linears) and appendix C
(convolutions, groups). The rules here are on ATen operations, so that in-place code, functions and
modules of any name are treated alike.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from .lines import Feeds, Line, aligned, argument, centring, describe, input_axes, is_float, shape

Rule = Callable[[Line], Feeds | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these ATen operations (name.overload)."""

    def register(function: Rule) -> Rule:
        RULES.update({f"aten.{name}": function for name in names})
        return function

    return register


def feeds(line: Line) -> Feeds:
    """Return what feeds a line; its `failure` says why the line cannot be given zero mean."""
    node = line.node
    found = None
    if node.target is operator.getitem:
        found = RULES["aten.getitem"](line)
    elif node.op == "call_function" and str(node.target) in RULES and is_float(node):
        found = RULES[str(node.target)](line)
    if found is not None:
        return found
    why = "need not have a zero mean" if node.op == "placeholder" else "does not keep a zero mean"
    return Feeds(failure=f"{describe(node)} {why}")


def _through(node: Any, axis: int, line: Line) -> Feeds | None:
    """Say that `axis` of one input feeds the line, and nothing else does."""
    return Feeds((Line(node, axis, line.block),)) if is_float(node) else None


def _any_of(parts: Iterable[Any], line: Line, why: str) -> Feeds:
    """Say that those parts feed the line that vary along its axis.

    A part that does not vary must be 0. Otherwise the rule fails, and `why` says how.
    """
    found = [(x, aligned(x, line)) for x in parts]
    fails = any(at is None and not is_zero(x) for x, at in found)
    return Feeds(
        tuple(at for _, at in found if at is not None),
        f"{describe(line.node)} {why}" if fails else "",
    )


def is_zero(x: Any) -> bool:
    """Tell whether a number or a tensor is known to be 0 everywhere."""
    if not isinstance(x, Node):
        return isinstance(x, int | float) and x == 0
    name = str(x.target)
    if name.startswith(("aten.clone", "aten._to_copy", "aten.lift_fresh_copy")):
        return is_zero(x.args[0])
    if name.startswith(("aten.full", "aten.scalar_tensor")):
        return is_zero(next(a for a in reversed(x.args) if isinstance(a, int | float)))
    if name.startswith(("aten.zeros", "aten.new_zeros")):
        return True
    return x.meta.get("zero", False)  # a constant of the graph, marked in graph.py


# --------------------------------------------------------------------------------- scalars and adds


@rule(
    "expand.default",
    "repeat.default",
    "clone.default",
    "alias.default",
    "detach.default",
    "contiguous.default",
    "_to_copy.default",
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "type_as.default",
    "neg.default",
    "lift_fresh_copy.default",
)
def _same(line: Line) -> Feeds | None:
    """The same numbers, perhaps repeated along other axes."""
    at = aligned(line.node.args[0], line)
    return None if at is None else Feeds((at,))


@rule("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(line: Line) -> Feeds | None:
    x, p, training = line.node.args
    if training and p > 0:
        # Zeros at random positions change the mean of a row.
        return Feeds(
            failure=f"{describe(line.node)} is in training mode, and its zeros change the mean "
            "(call model.eval(), and analyze again)"
        )
    return _through(x, line.axis, line)


@rule("copy.default", "fill.Scalar", "fill.Tensor")
def _written(line: Line) -> Feeds:
    """A tensor that is overwritten as a whole has the mean of what is written."""
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
        # The input has one axis more than each output.
        axis = argument(source, 1, 0, "dim") % (len(shape(line.node)) + 1)
        return _through(source.args[0], line.axis + (axis <= line.axis), line)
    return None


@rule("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _add(line: Line) -> Feeds:
    if centring(line.node) == (line.axis, line.block):
        return Feeds()  # x - mean(x) has zero mean whatever x is
    return _any_of(line.node.args[:2], line, "adds the same number to a whole row")


@rule("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")
def _mul(line: Line) -> Feeds | None:
    """A factor keeps zero mean if it is a number, or the same all along the axis."""
    x, y = line.node.args[:2]
    if aligned(y, line) is None:
        at = aligned(x, line)
    elif aligned(x, line) is None and "mul" in str(line.node.target):
        at = aligned(y, line)
    else:
        return Feeds(failure=f"{describe(line.node)} gives every channel another factor")
    return None if at is None else Feeds((at,))


@rule("where.self", "masked_fill.Scalar", "masked_fill.Tensor")
def _choose(line: Line) -> Feeds | None:
    """A choice keeps zero mean if its condition is the same all along the axis."""
    args = line.node.args
    if "masked_fill" in str(line.node.target):
        condition = args[1]
        options = [args[0], *args[2:]]
    else:
        condition = args[0]
        options = args[1:]
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
    """A reshape keeps a block whole if an axis of its input has the same stride and whole blocks.

    Strides are those of contiguous tensors: the product of the sizes after an axis.
    """
    x = line.node.args[0]
    stride = math.prod(shape(line.node)[line.axis + 1 :])
    for axis, size in enumerate(shape(x)):
        whole_blocks = size >= line.block and size % line.block == 0
        if whole_blocks and math.prod(shape(x)[axis + 1 :]) == stride:
            return _through(x, axis, line)
    return None


@rule("permute.default", "transpose.int", "t.default", "numpy_T.default")
def _move(line: Line) -> Feeds | None:
    return _through(line.node.args[0], input_axes(line.node)[line.axis], line)


@rule(
    "slice.Tensor",
    "index_select.default",
    "narrow.default",
    "cumsum.default",
    "roll.default",
    "flip.default",
)
def _along_another_axis(line: Line) -> Feeds | None:
    """Picking, summing or moving whole blocks keeps zero mean, if it is along another axis."""
    position = 2 if "roll" in str(line.node.target) else 1
    dims = argument(line.node, position, 0, "dim")
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
    """A mean or sum over other axes keeps zero mean."""
    x, dims = line.node.args[:2]
    ndim = len(shape(x))
    dims = [dim % ndim for dim in dims or range(ndim)]
    keepdim = argument(line.node, 2, False, "keepdim")
    remaining = [axis for axis in range(ndim) if axis not in dims or keepdim]
    axis = remaining[line.axis]  # of x
    return _through(x, axis, line) if axis not in dims else None


@rule("pad.default", "constant_pad_nd.default")
def _pad(line: Line) -> Feeds | None:
    """Padding along other axes adds whole rows: of one number, or copies of those that are there.

    Widths are given in pairs (before, after), the last axis first.
    """
    node = line.node
    x, widths = node.args[:2]
    from_last = len(shape(node)) - 1 - line.axis
    if any(widths[2 * from_last : 2 * from_last + 2]) or not is_float(x):
        return None
    if "constant" in str(node.target):
        value = node.args[-1]
        copies_rows = False
    else:
        value = argument(node, 3, 0, "value")
        copies_rows = argument(node, 2, "constant", "mode") != "constant"  # reflects or repeats
    zero = copies_rows or len(node.args) == 2 or value is None or is_zero(value)
    failure = "" if zero else f"{describe(node)} adds rows of one number"
    return Feeds((Line(x, line.axis, line.block),), failure)


@rule("index.Tensor")
def _index(line: Line) -> Feeds | None:
    """Rows picked by index tensors at the front or, with `:` before them, further on."""
    x, indices = line.node.args
    used = [position for position, index in enumerate(indices) if index is not None]
    first = used[0]
    if used != list(range(first, used[-1] + 1)):
        return None
    removed = len(used)  # axes of x that the index tensors replace
    added = len(shape(line.node)) - (len(shape(x)) - removed)  # by as many axes of their own
    if first <= line.axis < first + added:
        return None
    axis = line.axis if line.axis < first else line.axis - added + removed
    return _through(x, axis, line)


@rule("gather.default", "scatter_add.default", "index_add.default")
def _rows_by_index(line: Line) -> Feeds | None:
    """Rows picked, or added, by an index that is the same all along the axis."""
    x, dim, index, *rows = line.node.args
    is_one = "index_add" in str(line.node.target)  # one index for a whole row
    if dim % len(shape(x)) == line.axis or not (is_one or _is_even(index, line)):
        return None
    return Feeds(tuple(Line(y, line.axis, line.block) for y in (x, *rows)))


@rule("masked_scatter.default")
def _masked_rows(line: Line) -> Feeds | None:
    """Whole rows are replaced by the next ones of another tensor."""
    x, mask, rows = line.node.args
    is_last = line.axis == len(shape(x)) - 1
    if not is_last or shape(rows)[-1:] != shape(x)[-1:] or not _is_even(mask, line):
        return None
    last = Line(rows, len(shape(rows)) - 1, line.block)
    return Feeds((Line(x, line.axis, line.block), last))


def _is_even(index: Node, line: Line) -> bool:
    """Tell whether an index or a mask is the same all along the axis."""
    if str(index.target) in ("aten.expand.default", "aten.repeat.default"):
        index = index.args[0]
    return aligned(index, line) is None


@rule("cat.default", "stack.default")
def _join(line: Line) -> Feeds | None:
    dim = argument(line.node, 1, 0, "dim") % len(shape(line.node))
    if dim == line.axis:
        return Feeds(failure=f"{describe(line.node)} joins pieces along the axis of the norm")
    axis = line.axis
    if "stack" in str(line.node.target) and dim < line.axis:
        axis -= 1  # stack adds the axis `dim`
    # torch.cat leaves out torch.tensor([]). Other empty pieces may hold rows another time.
    pieces = [x for x in line.node.args[0] if shape(x) != (0,)]
    return Feeds(tuple(Line(x, axis, line.block) for x in pieces))


@rule("select_scatter.default", "slice_scatter.default")
def _overwrite(line: Line) -> Feeds | None:
    """Rows of the first tensor are replaced by those of the second: h[:, 0] = row."""
    x, rows = line.node.args[:2]
    dim = argument(line.node, 2, 0, "dim") % len(shape(x))
    if dim == line.axis:
        return None
    axis = line.axis
    if "select" in str(line.node.target) and dim < line.axis:
        axis -= 1  # the rows lack the axis `dim`
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
    """Weighted means over positions keep zero mean along the channels.

    Zero rows at the border keep it, too, and shift all channels alike.
    """
    spatial = 1 if "1d" in str(line.node.target) else 2
    channel_axis = len(shape(line.node)) - spatial - 1
    position = line.axis - channel_axis - 1  # among the spatial axes
    apart = str(line.node.target).startswith("aten.avg_pool") and position >= 0
    if apart:  # Funnel pools over tokens alone: windows of 1 along the channels
        sizes = ((1, 1), (2, None), (3, 0))  # kernel, stride (none: as the kernel), padding
        along = [_of_axis(argument(line.node, i, default), position) for i, default in sizes]
        apart = along in ([1, 1, 0], [1, None, 0])
    return (
        _through(line.node.args[0], line.axis, line) if line.axis == channel_axis or apart else None
    )


def _of_axis(sizes: Any, position: int) -> Any:
    """Return the number for one spatial axis; one number stands for all axes."""
    if isinstance(sizes, list | tuple):
        return sizes[position if len(sizes) > 1 else 0] if sizes else None
    return sizes


# ----------------------------------------------------------------------------------------- products


def _with_bias(line: Line, weight: Line, bias: Any) -> Feeds:
    """Say that a weight feeds the line and, where there is one, a bias (channels,)."""
    bias = () if bias is None else (Line(bias, 0, line.block),)
    return Feeds((weight, *bias))


@rule("linear.default")
def _linear(line: Line) -> Feeds | None:
    """Along the outputs, the weight (out, in) and the bias; along another axis, the input."""
    x, weight = line.node.args[:2]
    bias = argument(line.node, 2, None, "bias")
    if line.axis == len(shape(line.node)) - 1:
        return _with_bias(line, Line(weight, 0, line.block), bias)
    failure = ""
    if bias is not None:
        failure = f"the bias of {describe(line.node)} is the same for a whole row"
    return Feeds((Line(x, line.axis, line.block),), failure)


@rule("addmm.default")
def _addmm(line: Line) -> Feeds | None:
    """bias + a b, b (in, out)."""
    bias, _, b = line.node.args
    if line.node.kwargs or line.axis != 1 or len(shape(bias)) != 1:
        return None
    return _with_bias(line, Line(b, 1, line.block), bias)


@rule("mm.default", "matmul.default", "bmm.default")
def _matmul(line: Line) -> Feeds | None:
    """The last axis comes from the second factor, the one before it from the first."""
    a, b = line.node.args
    from_last = len(shape(line.node)) - 1 - line.axis
    if len(shape(a)) < 2 or len(shape(b)) < 2 or from_last > 1:
        return None
    factor = a if from_last else b
    return _through(factor, len(shape(factor)) - 1 - from_last, line)


@rule("scaled_dot_product_attention.default", "embedding.default")
def _mix_rows(line: Line) -> Feeds | None:
    """Along the channels, the values of attention, which is linear in them (appendix D.3), or the
    weight of an embedding (rows, channels).
    """
    rows = line.node.args[0 if "embedding" in str(line.node.target) else 2]
    if line.axis != len(shape(line.node)) - 1:
        return None
    return _through(rows, len(shape(rows)) - 1, line)


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
    """Along the channels, the output axis of the weight, and the bias (appendix C.2.2).

    The weight is (out, in / groups, ...), or (in, out / groups, ...) if transposed.
    """
    node = line.node
    weight = node.args[1]
    bias = argument(node, 2, None, "bias")
    if str(node.target) == "aten.convolution.default":
        # (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        transposed = node.args[6]
        groups = argument(node, 8, 1, "groups")
    else:
        transposed = "transpose" in str(node.target)
        groups = argument(node, 6, 1, "groups")
    spatial = len(shape(weight)) - 2
    channel_axis = len(shape(node)) - spatial - 1
    if line.axis != channel_axis:
        return None
    # A block may lie within one group of output channels, but not across groups.
    if groups > 1 and (transposed or shape(node)[channel_axis] // groups % line.block):
        return Feeds(
            failure=f"{describe(node)} is a grouped convolution: "
            "each output channel has inputs of its own"
        )
    return _with_bias(line, Line(weight, 1 if transposed else 0, line.block), bias)


# -------------------------------------------------------------------------------------------- norms


@rule("layer_norm.default")
def _layer_norm(line: Line) -> Feeds | None:
    """A LayerNorm's output has zero mean without a gain, or with the same gain for all channels.

    The rule does not know the gain's values; graph.py looks at them.
    """
    x, sizes, weight, bias = (argument(line.node, i) for i in range(4))
    if len(sizes) != 1 or line.axis != len(shape(x)) - 1 or line.block != sizes[0]:
        return None
    failure = "" if weight is None else f"the gains of {describe(line.node)} make a mean"
    inputs = () if bias is None else (Line(bias, 0, line.block),)
    return Feeds(inputs, failure, weight)
