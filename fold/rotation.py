"""Rotate the residual stream of a model, and leave its function as it is.

    after, certificate = rotate(model, {"input_ids": ids}, seed=0)

Quantisation to few bits suffers from channels with large numbers. A random rotation Q of the stream
spreads them over all channels. A norm without a gain does the same in any basis, so that for rows x

    RMSNorm(x Q) = RMSNorm(x) Q

(SliceGPT, Ashkboos et al. 2024, arXiv 2401.15024, equation 2 and theorem 1; QuaRot, Ashkboos et al.
2024, arXiv 2404.00456, section 4, stage 1a; R1 of SpinQuant, Liu et al. 2024, arXiv 2405.16406). So
the gains go into the linears first (gains.py), then all that is written into the stream is
multiplied by Q (embeddings, and weights and biases of linears, along their outputs), and what reads
it by Q, too (weights, along their inputs): (x Q) (W Q)^T = x W^T. Norms that subtract the mean need
Q 1 = 1, which leaves the mean of a row as it is.

An axis of a tensor in the exported graph is rotated or not, and every operation says which axes
must be rotated together (`_together`): the same axis of all that is added up, an input of a linear
and that axis of its weight. From what a norm is given, all that is rotated with it is followed,
backwards and forwards, through parameters that are used twice as well (a head that is the
embedding). An operation that is not known, or sees the channels one by one, ends it: no rotation.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_map

from . import gains
from .certificate import Certificate, Inputs, changed
from .gains import Fold
from .graph import Graph
from .hub import takes_embeddings
from .lines import Line, aligned, argument, describe, is_float, is_tensor, made_by, module_path
from .lines import shape as shape_of
from .modules import FoldedNorm, tensor_of
from .orthogonal import keeping_mean, random_orthogonal
from .rules import CASTS, MOVES, READ_NO_NUMBERS, is_linear
from .siblings import FoldError

# What encoder-decoder models return beside their output: like all hidden states it is of the
# rotated stream, and the decoder reads it so.
ENCODED = "encoder_last_hidden_state"
EMBEDDED_USE = "embeddings given by hand (inputs_embeds): they would have to be rotated"
ENCODED_USE = f"{ENCODED}: it is that of the rotated stream"


@dataclass(frozen=True)
class Together:
    """Axes that an operation leaves rotated if they are: all of them, by the same matrix.

    Attributes:
        lines: whole axes of its inputs and results.
        keeps_mean: the matrix must leave the mean of the axis as it is.
        norm: the operation takes the size of the axis: it is one of a norm.
        residual: it adds results of two other operations.
    """

    lines: tuple[Line, ...]
    keeps_mean: bool = False
    norm: bool = False
    residual: bool = False


@dataclass
class Stream:
    """All that is rotated together.

    Attributes:
        channels: numbers along the axis.
        parameters: name, of parameters and buffers -> axes.
        norms: paths of the modules that take the size of the stream.
        keeps_mean: the matrix must leave the mean of a row as it is.
        is_residual: something is added to it.
        failures: what allows no rotation.
    """

    channels: int
    parameters: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    norms: set[str] = field(default_factory=set)
    keeps_mean: bool = False
    is_residual: bool = False
    failures: list[str] = field(default_factory=list)


@dataclass
class Rotation:
    """All that a rotation changes.

    Attributes:
        folds: gains that go into linears first.
        left: parameters of norms that stay -> why.
        streams: with the matrix (C, C) of each, in float64.
        notes: about each stream, for people.
    """

    folds: list[Fold]
    left: dict[str, str]
    streams: list[tuple[Stream, Tensor]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rotate(
    model: nn.Module, inputs: Inputs, seed: int = 0, untie: bool = True
) -> tuple[nn.Module, Certificate]:
    """Fold the gains of a model into linears and rotate its residual stream, in a copy.

    Args:
        model: any nn.Module that torch.export can export, in the mode that is meant.
        inputs: positional (tuple) or keyword (dict) arguments of the model.
        seed: of the rotation.
        untie: a head that shares the embedding's weights may get weights of its own, which take
            the gain of the final norm over.

    Returns:
        (copy, certificate). If its check fails (certificate.ok is False), the model itself is
        returned instead of a copy. An encoder's output that a decoder reads is rotated, and not
        compared where the model returns it besides.

    Raises:
        FoldError: an operation does not allow it.
    """
    handle = model.register_forward_hook(_without_encoded)
    try:
        plan = plan_rotation(Graph(model, inputs), seed, untie)
        norms = sum(len(stream.norms) for stream, _ in plan.streams)
        after, certificate = changed(
            model,
            partial(carry_out, plan),
            inputs,
            what=f"{type(model).__name__}: the residual stream rotated",
            folded=norms,
            refusals=plan.left,
            to="rotated",
        )
    finally:
        handle.remove()
    if not certificate.ok:
        return after, certificate
    after._forward_hooks.pop(handle.id)
    is_split = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    uses = [*certificate.not_covered]
    if takes_embeddings(model):
        uses.append(EMBEDDED_USE)
    if is_split:
        uses.append(ENCODED_USE)
    return after, replace(certificate, notes=plan.notes, not_covered=uses)


def _without_encoded(module: nn.Module, args: tuple, output: Any) -> Any:
    """Leave out what an encoder gave, in the output of a whole model (a forward hook)."""
    if not isinstance(output, dict) or ENCODED not in output:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != ENCODED})


@torch.no_grad()
def carry_out(plan: Rotation, model: nn.Module) -> None:
    """Fold gains and rotate parameters, in place; in float64, rounded once."""
    types = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    gains.carry_out(plan.folds, model)
    for stream, q in plan.streams:
        # A tensor with several names is rotated once; a copy that it got by the folds, too.
        axes_of = {tensor_of(model, name): axes for name, axes in stream.parameters.items()}
        for tensor, axes in axes_of.items():
            for axis in axes:
                tensor.copy_(_rotated(tensor.double(), q.to(tensor.device), axis))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.data = parameter.data.to(types[name])


def _rotated(x: Tensor, q: Tensor, axis: int) -> Tensor:
    """Multiply the rows along an axis by Q."""
    return (x.movedim(axis, -1) @ q).movedim(-1, axis)


# ---------------------------------------------------------------------------------------- the plan


def plan_rotation(graph: Graph, seed: int = 0, untie: bool = True) -> Rotation:
    """Find out what a rotation changes; the arguments are those of `rotate`.

    Raises:
        FoldError: an operation does not allow it.
    """
    # Gains that are 1 now as well: the check does it with random ones.
    folds, left = gains.find_folds(graph, untie, with_ones=True)
    rules = Rules(graph, {fold.affine.gain for fold in folds})
    streams = [stream for stream in _streams(rules, left) if stream.is_residual]
    name = type(graph.model).__name__
    if not streams:
        raise FoldError(f"{name}: no norm over all channels of a residual stream found")
    failures = [failure for stream in streams for failure in stream.failures]
    if failures:
        # A gain that stays says more than what comes after it.
        why = next((one for one in failures if one.partition(" ")[0] in left), failures[0])
        raise FoldError(f"{name}: the residual stream cannot be rotated: {why}")
    plan = Rotation(folds, left)
    generator = torch.Generator().manual_seed(seed)
    # transformers alone reads a folded LayerNorm as a LayerNorm, which needs a mean of 0.
    is_folded = any(isinstance(module, FoldedNorm) for module in graph.model.modules())
    for stream in streams:
        q, how = random_orthogonal(stream.channels, generator)
        if stream.keeps_mean or is_folded:
            q = keeping_mean(q)
            how += ", made to keep means"
        plan.streams.append((stream, q))
        plan.notes.append(
            f"a stream of {stream.channels} channels with {len(stream.norms)} norms: {how} "
            f"(seed {seed})"
        )
    return plan


def _streams(rules: "Rules", left: dict[str, str]) -> Iterator[Stream]:
    """Yield what is rotated together with the input of each norm."""
    done: set[Line] = set()
    for node in rules.graph.nodes:
        name = str(node.target)
        found = rules.of(node) if name.startswith(SIZES) else []
        starts = [together.lines[0] for together in found if together.norm]
        if name.startswith(NORMS) and not found:  # its gain stays, which _follow says
            starts = [_axis(node.args[0], -1)]
        for start in starts:
            if start not in done:
                stream, lines = _follow(rules, start, left)
                done |= lines
                yield stream


def _follow(rules: "Rules", start: Line, left: dict[str, str]) -> tuple[Stream, set[Line]]:
    """Find all that is rotated together with a line. Returns it, and its lines."""
    stream = Stream(start.block)
    names = rules.graph.names
    lines = {start}
    todo = [start]
    while todo:
        line = todo.pop()
        if line.node in names:
            value = rules.graph.values[names[line.node]]
            for alias, other in rules.graph.values.items():
                if other is value:
                    stream.parameters[alias].add(line.axis)
        elif line.node.op == "placeholder":
            stream.failures.append(f"{describe(line.node)} is added to it")
        made = [made_by(line.node)] if line.node.op == "call_function" else []
        for operation in (*made, *line.node.users):
            found = [one for one in rules.of(operation) if line in one.lines]
            if not found:
                stream.failures.append(_failure(rules, operation, left))
            for one in found:
                stream.keeps_mean |= one.keeps_mean
                stream.is_residual |= one.residual
                if one.norm:
                    stream.norms.add(module_path(operation))
                todo += set(one.lines) - lines
                lines.update(one.lines)
    return stream, lines


def _failure(rules: "Rules", operation: Node, left: dict[str, str]) -> str:
    """Say why an operation allows no rotation."""
    if operation.op == "output":
        return "the model returns it"
    for x in operation.all_input_nodes:
        name = rules.parameter_behind(x)
        if name in left:
            return f"{name} has a number for each channel and stays, as {left[name]}"
    is_convolution = str(operation.target).startswith(CONVOLUTIONS)
    if is_convolution and _groups(operation) > 1:
        return f"{describe(operation)} takes its channels in {_groups(operation)} groups"
    return f"{describe(operation)} sees its channels one by one"


# ---------------------------------------------------------------------------------- the operations


class Rules:
    """Which axes the operations of a graph leave rotated.

    Args:
        graph: of the model.
        folded: names of gains, which are 1 when the stream is rotated.
    """

    def __init__(self, graph: Graph, folded: set[str]):
        self.graph = graph
        self.folded = folded
        self.of = cache(self._of)

    def _of(self, node: Node) -> list[Together]:
        """Return the axes that an operation leaves rotated together; [] where it is not known."""
        if node.op != "call_function":
            return []
        name = str(node.target)
        for starts, rule in RULES:
            if name.startswith(starts):
                found = rule(self, node)
                return [one for one in found if all(is_float(x.node) for x in one.lines)]
        return []

    def parameter_behind(self, x: Any) -> str:
        """Return the name of the parameter that x is, but for casts and a number that is added."""
        while isinstance(x, Node) and x not in self.graph.names:
            name = str(x.target)
            is_offset = name.startswith("aten.add.") and len(x.all_input_nodes) == 1
            if not is_offset and not name.startswith((*CASTS, *MOVES)):
                return ""
            x = x.all_input_nodes[0]
        return self.graph.names.get(x, "")


def _axes(node: Node) -> Iterator[Line]:
    """Yield all axes of a tensor that have more than one number."""
    for axis, size in enumerate(shape_of(node)):
        if size > 1:
            yield Line(node, axis, size)


def _axis(node: Node, axis: int) -> Line:
    """Return an axis of a tensor, also counted from the back."""
    size = shape_of(node)
    return Line(node, axis % len(size), size[axis])


def _pieces(node: Node) -> list[Node]:
    """Return the results of an operation."""
    if is_tensor(node):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def _stays(rules: Rules, node: Node) -> Iterator[Together]:
    """Of operations that leave every number where it is, or all with the other sign."""
    if is_linear(node):  # no dropout in training mode, no cast to integers
        for line in _axes(node):
            yield Together((replace(line, node=node.args[0]), line))
    for other in node.all_input_nodes[1:]:  # as in x.type_as(other)
        for line in _axes(other):
            yield Together((line,))


def _moves(rules: Rules, node: Node) -> Iterator[Together]:
    """Of operations that move numbers: their channels are moved, to see where they are then."""
    x = node.args[0]

    def given(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        return torch.zeros(shape_of(value), dtype=value.meta["val"].dtype)  # indices

    args, kwargs = tree_map(given, (node.args[1:], node.kwargs))
    for line in _axes(x):
        channels = _channels(shape_of(x), line.axis)  # of a large weight it takes no memory
        if "view" in str(node.target):
            channels = channels.contiguous()
        moved = node.target(channels, *args, **kwargs)
        for piece in _pieces(node):
            there = moved if piece is node else moved[piece.args[1]]
            for at in _axes(piece):
                is_whole = at.block == line.block
                if is_whole and torch.equal(there, _channels(shape_of(piece), at.axis)):
                    yield Together((line, at))


def _channels(size: tuple[int, ...], axis: int) -> Tensor:
    """Return a tensor of this shape that says where each number is along an axis."""
    along = [1] * len(size)
    along[axis] = -1
    return torch.arange(size[axis]).view(along).expand(size)


def _sums(rules: Rules, node: Node) -> Iterator[Together]:
    """Of sums: all terms. One that is the same for all channels has a mean."""
    if any(is_tensor(x) and not is_float(x) for x in node.args):
        return
    for line in _axes(node):
        lines = [aligned(x, line) for x in node.args]
        computed = [at for at in lines if at and not rules.parameter_behind(at.node)]
        yield Together(
            (line, *filter(None, lines)),
            keeps_mean=None in lines,
            residual=len(computed) > 1,
        )


def _choices(rules: Rules, node: Node) -> Iterator[Together]:
    """Of choices between tensors, or a tensor and 0, that are the same for all channels."""
    masks = [x for x in node.args if is_tensor(x) and not is_float(x)]
    others = [x for x in node.args if x not in masks]
    for line in _axes(node):
        lines = [aligned(x, line) for x in others]
        numbers = [x for x, at in zip(others, lines, strict=True) if at is None and x != 0]
        if not any(aligned(mask, line) for mask in masks):
            yield Together((line, *filter(None, lines)), keeps_mean=bool(numbers))


def _joins(rules: Rules, node: Node) -> Iterator[Together]:
    """Of tensors that are joined along another axis."""
    along = argument(node, 1, 0, "dim")
    is_stack = str(node.target).startswith("aten.stack.")
    along %= len(shape_of(node))
    for line in _axes(node):
        if line.axis != along:
            axis = line.axis - (is_stack and line.axis > along)
            yield Together((line, *(Line(x, axis, line.block) for x in node.args[0])))


def _scaled(rules: Rules, node: Node) -> Iterator[Together]:
    """Of products with numbers that are the same for all channels, and with a folded gain."""
    if node.kwargs.get("rounding_mode") is not None:
        return
    first, second = node.args
    if first is second:
        yield from _squares(rules, node)
        return
    factors = [x for x in (first, second) if rules.parameter_behind(x) not in rules.folded]
    is_quotient = str(node.target).startswith("aten.div.")
    for line in _axes(node):
        varying = [at for at in (aligned(x, line) for x in factors) if at is not None]
        if len(varying) == 1 and not (is_quotient and varying[0].node is second):
            yield Together((line, *varying))


def _squares(rules: Rules, node: Node) -> Iterator[Together]:
    """Of squares, where their mean or their sum over the axis is all that is read."""
    is_power = str(node.target).startswith("aten.pow.")
    if is_power and node.args[1] != 2:
        return
    readers = _readers(node)
    for line in _axes(node.args[0]):
        if readers and all(_averages_over(reader, line.axis) for reader in readers):
            yield Together((line,), norm=True)


def _readers(node: Node) -> list[Node]:
    """Return the operations that read a tensor, perhaps cast."""
    found = []
    for user in node.users:
        found += _readers(user) if str(user.target).startswith(CASTS) else [user]
    return found


def _averages_over(node: Node, axis: int) -> bool:
    """Tell whether an operation is a mean, or a sum, over an axis of its first argument."""
    is_average = str(node.target).startswith(AVERAGES)
    return is_average and axis in _averaged(node)


def _averaged(node: Node) -> list[int]:
    """Return the axes of its first argument over which an operation takes one number."""
    rank = len(shape_of(node.args[0]))
    position = 2 if str(node.target).startswith("aten.linalg_vector_norm.") else 1
    axes = argument(node, position, None, "dim") or range(rank)
    return [axis % rank for axis in axes]


def _averages(rules: Rules, node: Node) -> Iterator[Together]:
    """Of means and sums: over the axis, where the mean is kept, or over others."""
    x = node.args[0]
    averaged = _averaged(node)
    is_kept = len(shape_of(x)) == len(shape_of(node))
    for line in _axes(x):
        if line.axis in averaged:
            yield Together((line,), keeps_mean=True)
        else:
            before = 0 if is_kept else sum(axis < line.axis for axis in averaged)
            yield Together((line, Line(node, line.axis - before, line.block)))


def _variances(rules: Rules, node: Node) -> Iterator[Together]:
    """Of variances and standard deviations over the axis, with the mean perhaps."""
    averaged = _averaged(node)
    for line in _axes(node.args[0]):
        if line.axis in averaged:
            yield Together((line,), keeps_mean=True, norm=True)


def _lengths(rules: Rules, node: Node) -> Iterator[Together]:
    """Of the Euclidean length of rows along the axis."""
    averaged = _averaged(node)
    for line in _axes(node.args[0]):
        if line.axis in averaged and argument(node, 1, 2, "ord") == 2:
            yield Together((line,), norm=True)


def _norms(rules: Rules, node: Node) -> Iterator[Together]:
    """Of a norm that is one operation, over the last axis, if its gain is folded."""
    is_rms = str(node.target).startswith("aten.rms_norm.")
    x, sizes = node.args[:2]
    gain = argument(node, 2)
    bias = None if is_rms else argument(node, 3)
    if len(sizes) > 1 or (gain is not None and rules.parameter_behind(gain) not in rules.folded):
        return
    result = next(piece for piece in _pieces(node) if piece is node or piece.args[1] == 0)
    biases = [_axis(bias, -1)] if bias is not None else []
    lines = (_axis(x, -1), _axis(result, -1), *biases)
    yield Together(lines, keeps_mean=not is_rms, norm=True)


def _embeddings(rules: Rules, node: Node) -> Iterator[Together]:
    """Of rows of a table: its columns are the last axis."""
    yield Together((_axis(node.args[0], 1), _axis(node, -1)))


def _linears(rules: Rules, node: Node) -> Iterator[Together]:
    """Of x W^T + b: the inputs of the weight (O, C), and its outputs."""
    x, weight = node.args[:2]
    bias = argument(node, 2)
    yield Together((_axis(x, -1), _axis(weight, 1)))
    biases = [_axis(bias, 0)] if bias is not None else []
    yield Together((_axis(weight, 0), _axis(node, -1), *biases))


def _matrix_products(rules: Rules, node: Node) -> Iterator[Together]:
    """Of x W, or b + x W: rows of W, and its columns."""
    has_bias = str(node.target).startswith("aten.addmm.")
    x, weight = node.args[1:3] if has_bias else node.args[:2]
    if len(shape_of(x)) < 2 or len(shape_of(weight)) < 2:
        return
    yield Together((_axis(x, -1), _axis(weight, -2)))
    biases = [_axis(node.args[0], -1)] if has_bias else []
    yield Together((_axis(weight, -1), _axis(node, -1), *biases))
    if not has_bias:
        yield Together((_axis(x, -2), _axis(node, -2)))


def _einsums(rules: Rules, node: Node) -> Iterator[Together]:
    """Of products that name their axes: an axis in two of three tensors."""
    equation, factors = node.args[:2]
    given, _, result = equation.replace(" ", "").partition("->")
    terms = list(zip([*given.split(","), result], [*factors, node], strict=True))
    for letter in set(given):
        lines = [_axis(x, names.index(letter)) for names, x in terms if letter in names]
        if letter.isalpha() and len(lines) == 2 and len(terms) == 3 and "." not in equation:
            yield Together(tuple(lines))


def _convolutions(rules: Rules, node: Node) -> Iterator[Together]:
    """Of convolutions (N, C, ...) with a weight (O, C, ...): its inputs, and its outputs."""
    x, weight = node.args[:2]
    if len(shape_of(x)) != len(shape_of(weight)) or _groups(node) > 1:
        return
    bias = argument(node, 2)
    yield Together((_axis(x, 1), _axis(weight, 1)))
    biases = [_axis(bias, 0)] if bias is not None else []
    yield Together((_axis(weight, 0), _axis(node, 1), *biases))


def _groups(node: Node) -> int:
    """Return in how many groups a convolution (N, C, ...) takes its channels."""
    x, weight = node.args[:2]
    return shape_of(x)[1] // shape_of(weight)[1]


def _reads_no_numbers(rules: Rules, node: Node) -> Iterator[Together]:
    """Of what reads the shape of a tensor; zeros are zeros when they are rotated, too."""
    for x in node.all_input_nodes:
        for line in _axes(x):
            yield Together((line,))
    if str(node.target).startswith(ZEROS):
        for line in _axes(node):
            yield Together((line,))


ZEROS = ("aten.zeros_like.", "aten.new_zeros.", "aten.zeros.")
PRODUCTS = ("aten.mul.", "aten.div.")
SQUARES = ("aten.pow.Tensor_Scalar", "aten.square.")
VARIANCES = ("aten.var.", "aten.std.", "aten.var_mean.")
LENGTHS = ("aten.linalg_vector_norm.",)
NORMS = ("aten.layer_norm.", "aten.native_layer_norm.", "aten.rms_norm.")
# Where a norm takes the size of what it is given
SIZES = (*PRODUCTS, *SQUARES, *VARIANCES, *LENGTHS, *NORMS)
AVERAGES = ("aten.mean.dim", "aten.sum.dim_IntList")
CONVOLUTIONS = ("aten.conv1d.", "aten.conv2d.", "aten.conv3d.")
STAYS = (*CASTS, "aten.neg.", "aten.dropout.", "aten.detach.", "aten.lift_fresh_copy.")
Rule = Callable[[Rules, Node], Iterator[Together]]
# Operations -> which of their axes are rotated together
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (STAYS, _stays),
    ((*MOVES, "aten.index.", "aten.index_select.", "aten.repeat_interleave.self_int"), _moves),
    (("aten.add.", "aten.sub."), _sums),
    (("aten.where.", "aten.masked_fill."), _choices),
    (("aten.cat.", "aten.stack."), _joins),
    (PRODUCTS, _scaled),
    (SQUARES, _squares),
    (AVERAGES, _averages),
    (VARIANCES, _variances),
    (LENGTHS, _lengths),
    (NORMS, _norms),
    (("aten.embedding.",), _embeddings),
    (("aten.linear.",), _linears),
    (("aten.addmm.", "aten.mm.", "aten.matmul.", "aten.bmm."), _matrix_products),
    (("aten.einsum.",), _einsums),
    (CONVOLUTIONS, _convolutions),
    ((*READ_NO_NUMBERS, *ZEROS), _reads_no_numbers),
)
