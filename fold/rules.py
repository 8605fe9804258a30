"""Find out which lines of an operation's inputs make up a line of its output, by trying it out.

An operation of the graph is run in float64 on random numbers of the shapes that it has there. Lines
of its inputs feed a line of its output if

    1. adding a constant to every block of them adds a constant to the blocks of the output;
    2. the blocks of the output have zero mean where those of all these inputs have (else there is a
       `failure`).

Masks are random too, and then have the opposite values: what a mask hides in the example counts.
graph.py asks backwards (which parameters must be centred for this LayerNorm?) and forwards (what
else would be changed by that?). Only operations that are linear in each of their tensors of floats
are tried (`is_linear`): a clamp is the identity on the numbers of a trial, and on no others. All
the same, the numbers of a second trial are larger.

What depends on the shapes alone may have other numbers in other sizes: torch.ones(T, C).triu(-40)
is 1 everywhere as long as T is small. So such numbers are random in a third trial, unless all of
them are equal in each size.

Source: "Enjoy Your Layer Normalization", section 4.2 (scalars, adds, linears) and appendix C
(convolutions, groups).
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .lines import (
    Feeds,
    Line,
    centered,
    centring,
    compute,
    describe,
    is_float,
    is_tensor,
    made_by,
    norm_of,
    only_centres,
    shape,
    wider,
)

# Operations that leave the numbers where they are, and those that move them
CASTS = (
    "aten._to_copy.",
    "aten.to.",
    "aten.type_as.",
    "aten.clone.",
    "aten.alias.",
    "aten.contiguous.",
)
MOVES = (
    "aten.permute.",
    "aten.transpose.",
    "aten.t.",
    "aten.numpy_T.",
    "aten.view.default",  # view.dtype reads the bits of a number as another
    "aten._unsafe_view.",
    "aten.reshape.",
    "aten.flatten.",
    "aten.unflatten.",
    "aten.unsqueeze.",
    "aten.squeeze.",
    "aten.expand",
    "aten.repeat.",
    "aten.slice.",
    "aten.select.",
    "aten.narrow.",
    "aten.split",
    "aten.chunk.",
    "aten.unbind.",
    "aten.roll.",
)
# Linear in each of their tensors of floats, but for some of their arguments (`is_linear`); and
# norms, whose output may have zero mean
LINEAR = (
    *CASTS,
    *MOVES,
    "aten.add.",
    "aten.sub.",
    "aten.mul.",
    "aten.div.",
    "aten.neg.",
    "aten.lerp.",
    "aten.linear.",
    "aten.addmm.",
    "aten.mm.",
    "aten.matmul.",
    "aten.bmm.",
    "aten.baddbmm.",
    "aten.einsum.",
    "aten.embedding.",
    "aten.scaled_dot_product_attention.",
    "aten.conv1d.",
    "aten.conv2d.",
    "aten.conv3d.",
    "aten.convolution.",
    "aten.conv_transpose",
    "aten.detach.",
    "aten.lift_fresh_copy.",
    "aten.view_as.",
    "aten.flip.",
    "aten.index.",
    "aten.index_select.",
    "aten.gather.",
    "aten.unsafe_split",
    "aten.tensor_split.",
    "aten.cat.",
    "aten.stack.",
    "aten.select_scatter.",
    "aten.slice_scatter.",
    "aten.scatter_add.",
    "aten.index_add.",
    "aten.masked_scatter.",
    "aten.where.",
    "aten.masked_fill.",
    "aten.copy.",
    "aten.fill.",
    "aten.pad.",
    "aten.constant_pad_nd.",
    "aten.cumsum.",
    "aten.mean.dim",
    "aten.sum.dim",
    "aten.nansum.",
    "aten.avg_pool",
    "aten.adaptive_avg_pool",
    "aten.upsample_nearest",
    "aten.upsample_bilinear",
    "aten.upsample_bicubic",
    "aten.dropout.",
    "aten.feature_dropout.",
    "aten.alpha_dropout.",
    "aten.layer_norm.",
    "aten.native_layer_norm.",
    "aten.zeros",
    "aten.full",
    "aten.new_zeros.",
)
# What does not change if a constant is added along the right axis
BLIND = ("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")
BLIND += ("aten.var.", "aten.std.")
# Operations that read the shape and the type of a tensor, but none of its numbers
READ_NO_NUMBERS = ("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_", "aten.empty")
READ_NO_NUMBERS += ("aten._assert", "aten.sym_")
# Arguments of the operations above that are indices. All other integers are numbers.
INDICES = ("index", "indices", "tensor_indices_or_sections", "start")
# Types that a cast may lead to: all others cut numbers off, or keep three bits of them.
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUNDING = 1e-9  # of the largest number of a trial's result
LARGE = 100.0  # how many times larger the numbers of the second trial are
# Operations that give the same number everywhere, whatever the shape
FILLS = ("aten.zeros", "aten.ones", "aten.full", "aten.scalar_tensor.")
FILLS += ("aten.new_zeros.", "aten.new_ones.", "aten.new_full.")
MOST = 127  # the largest integer that stands for one of another size


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of an ATen operation by the names that its schema gives them."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args)) | node.kwargs


def is_linear(node: Node) -> bool:
    """Tell whether an operation is linear in each of its tensors of floats, or a norm.

    Its name and its arguments say so, for no trial can: x.int() is 0 for all small x.
    """
    operation = made_by(node)
    if not str(operation.target).startswith(LINEAR):
        return False
    given = arguments(operation)
    rounds = given.get("rounding_mode") is not None
    drops = (given.get("p", 0) and given.get("train") is not False) or given.get("dropout_p", 0)
    results = operation.meta["val"]
    results = results if isinstance(results, list | tuple) else [results]
    return not rounds and not drops and all(result.dtype in FLOATS for result in results)


def is_cast(node: Node) -> bool:
    """Tell whether an operation leaves the numbers where and what they are, but for rounding."""
    return str(node.target).startswith(CASTS) and is_linear(node)


def is_move(node: Node) -> bool:
    """Tell whether an operation only moves numbers to other places."""
    return str(node.target).startswith(MOVES) and is_linear(node)


class Trial:
    """An operation on random numbers, or one result of an operation that has several.

    Args:
        node: the operation.
        second: its masks have the other values, its indices are all 0, and its numbers are larger.
            A mask may hide a tensor in the example, and show it for another input or length.
        resized: what depends on the shapes alone is random, too.
    """

    def __init__(self, node: Node, second: bool = False, resized: bool = False):
        self.node = node
        self.second = second
        self.resized = resized
        self.generator = torch.Generator().manual_seed(0)
        self.values = {x: self.sample(x) for x in made_by(node).all_input_nodes}
        # It may hold rows another time. (torch.cat leaves out a torch.tensor([]).)
        if any(x.numel() == 0 and x.dim() > 1 for x in self.values.values()):
            raise ValueError("nothing can be said of a tensor that is empty in the example")

    def sample(self, x: Node) -> Tensor:
        """Return random numbers for an input; what is the same for all inputs is computed."""
        found = x.meta["val"]
        if "constant" in x.meta:
            return x.meta["constant"].to(wider(found.dtype))
        is_mask = found.dtype == torch.bool
        is_index = not is_mask and not is_float(x) and _is_index(x, self.node)
        if self.resized and x.meta["fixed"]:
            return self.other_rows(x) if is_index else self.of_other_size(x)
        if is_mask:
            return self.mask(x)
        if x.op == "call_function" and (x.meta["fixed"] or is_index):
            # Of indices what depends on the shapes stays: such rows must exist.
            return Trial(x, self.second).run({})
        if is_index:
            numbers = self.draw_bits(found)
            return torch.zeros_like(numbers) if self.second else numbers
        return self.draw(found)

    def mask(self, x: Node) -> Tensor:
        """Return a mask, or its opposite in the second trial."""
        is_made = x.meta["fixed"] or not _is_new_mask(x)
        if x.op == "call_function" and is_made:
            # The masks that it is made of are those of the first trial: it is flipped once, here.
            mask = Trial(x, resized=self.resized).run({})
        else:
            mask = self.draw_bits(x.meta["val"])
        return ~mask if self.second else mask

    def draw_bits(self, like: Tensor) -> Tensor:
        """Draw numbers that are 0 or 1, in the type of `like`."""
        bits = torch.randint(2, like.shape, generator=self.generator)
        return bits.to(like.device, like.dtype)

    def draw(self, like: Tensor) -> Tensor:
        """Draw numbers between -0.5 and 0.5, or LARGE times as large, in float64."""
        numbers = torch.rand(like.shape, generator=self.generator, dtype=torch.float64)
        return (numbers.to(like.device) - 0.5) * (LARGE if self.second else 1.0)

    def of_other_size(self, x: Node) -> Tensor:
        """Return random numbers for what depends on the shapes alone.

        What is equal all along an axis in every size stays so.
        """
        if "constant" in x.meta:
            return self.sample(x)
        name = str(x.target)
        inputs = [y for y in x.all_input_nodes if is_tensor(y)]
        if name.startswith(MOVES) and inputs:
            return compute(x, {y: self.of_other_size(y) for y in inputs})
        numbers = Trial(x).run({})
        if name.startswith(FILLS) or not numbers.numel():
            return numbers
        differs = [size > 1 for size in numbers.shape]
        if name.startswith(CASTS) or torch.Tag.pointwise in getattr(x.target, "tags", ()):
            parts = [self.of_other_size(y).broadcast_to(numbers.shape) for y in inputs]
            differs = [any(_differs(part, axis) for part in parts) for axis in range(numbers.dim())]
        if not any(differs):
            return numbers
        some = [slice(None) if different else slice(1) for different in differs]
        return self.replaced(numbers[tuple(some)]).broadcast_to(numbers.shape)

    def replaced(self, numbers: Tensor) -> Tensor:
        """Return other numbers of this shape and type."""
        if numbers.is_floating_point():
            return self.draw(numbers)
        largest = 1 if numbers.dtype == torch.bool else MOST
        others = torch.randint(largest + 1, numbers.shape, generator=self.generator)
        others = others.to(numbers.device, numbers.dtype)
        return numbers ^ others if numbers.dtype == torch.bool else others

    def other_rows(self, x: Node) -> Tensor:
        """Return other indices of the same tensor."""
        given = arguments(made_by(self.node))
        read = next((given[name] for name in ("self", "input", "weight") if name in given), None)
        rows = self.of_other_size(x)
        return rows % min(shape(read)) if is_tensor(read) and read is not x else rows

    def run(self, changed: dict[Node, Tensor]) -> Any:
        """Return what the operation gives, with other numbers for some inputs."""
        return compute(self.node, self.values | changed)

    @cached_property
    def result(self) -> Tensor:
        return self.run({})

    @cached_property
    def rounding(self) -> float:
        """The largest number that counts as 0."""
        finite = self.result[self.result.isfinite()]  # masked scores may be -inf
        return ROUNDING * float(finite.abs().max()) if finite.numel() else 0.0

    def is_zero(self, change: Tensor) -> bool:
        """Tell whether a change of the result is 0, but for rounding."""
        return bool(change.abs().max() <= self.rounding)

    def is_even(self, change: Tensor, line: Line) -> bool:
        """Tell whether a change of the result is the same all along each block of a line."""
        blocks = blocks_of(change, line)
        return self.is_zero(blocks - blocks.narrow(line.axis + 1, 0, 1))

    def redrawn(self, x: Node) -> Tensor:
        """Return by how much the result changes with other numbers for an input."""
        return self.run({x: self.draw(self.values[x])}) - self.result

    def shifted(self, line: Line) -> Tensor:
        """Return by how much it changes if a constant is added to each block of a line."""
        x = self.values[line.node]
        blocks = blocks_of(x, line)
        constants = self.draw(blocks.narrow(line.axis + 1, 0, 1))
        return self.run({line.node: (blocks + constants).reshape(x.shape)}) - self.result


def trials(node: Node) -> Iterator[Trial]:
    """Make the trials of an operation: the third is for what depends on the shapes alone."""
    yield Trial(node)
    yield Trial(node, second=True)
    if any(is_tensor(x) and _has_fixed_part(x) for x in made_by(node).all_input_nodes):
        yield Trial(node, resized=True)


def _differs(numbers: Tensor, axis: int) -> bool:
    """Tell whether numbers differ along an axis."""
    return not torch.equal(numbers, numbers.narrow(axis, 0, 1).expand_as(numbers))


def _has_fixed_part(x: Node) -> bool:
    """Tell whether a tensor depends on the shapes alone, or is a mask made of one that does."""
    if x.meta["fixed"]:
        return "constant" not in x.meta and not str(x.target).startswith(FILLS)
    if x.op != "call_function" or x.meta["val"].dtype != torch.bool or _is_new_mask(x):
        return False
    return any(is_tensor(y) and _has_fixed_part(y) for y in made_by(x).all_input_nodes)


def _is_index(x: Node, node: Node) -> bool:
    """Tell whether a tensor of integers is read as indices, or makes integers that may be."""
    given = arguments(made_by(node))
    is_read = any(x in tree_leaves(given[name]) for name in INDICES if name in given)
    return is_read or not is_float(node)


def _is_random(node: Node) -> bool:
    """Tell whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_new_mask(x: Node) -> bool:
    """Tell whether a mask comes of numbers, or by chance, and not of other masks."""
    inputs = [y for y in made_by(x).all_input_nodes if is_tensor(y)]
    return _is_random(x) or any(y.meta["val"].dtype != torch.bool for y in inputs)


def mark(nodes: list[Node]) -> None:
    """Mark the norms of a graph, and what depends on no numbers of the model and its inputs."""
    for node in nodes:
        inputs = [x.meta["fixed"] for x in node.all_input_nodes]
        is_made = str(node.target).startswith(READ_NO_NUMBERS) or all(inputs)
        is_made = is_made and node.op == "call_function" and not _is_random(node)
        node.meta["norm"] = norm_of(node)
        node.meta["fixed"] = "constant" in node.meta or is_made


def blocks_of(x: Tensor, line: Line) -> Tensor:
    """Return a line's blocks along an axis of their own, behind the line's."""
    return x.unflatten(line.axis, (-1, line.block))


def lines_of(x: Node, block: int) -> Iterator[Line]:
    """Yield the lines of a tensor in blocks of this size."""
    for axis, size in enumerate(shape(x)):
        if size and size % block == 0:
            yield Line(x, axis, block)


def feeds(line: Line) -> Feeds:
    """Return what feeds a line; its `failure` says why the line cannot be given zero mean."""
    node = line.node
    if centring(node) == (line.axis, line.block):
        return Feeds()  # x - mean(x) has zero mean whatever x is
    if node.op == "placeholder":
        return Feeds(failure=f"{describe(node)} need not have a zero mean")
    failure = f"{describe(node)} is not known to keep a zero mean"
    if not is_linear(node):
        return Feeds(failure=failure)
    inputs = []
    try:
        for trial in trials(node):
            found = list(_feeding(trial, line))
            inputs += found
            centred = {at.node: centered(trial.values[at.node], at.axis, at.block) for at in found}
            means = blocks_of(trial.run(centred), line).mean(line.axis + 1)
            if not trial.is_zero(means):
                return Feeds(tuple(inputs), failure)
    except Exception:  # an operation that does not take such numbers may raise anything
        return Feeds(failure=failure)
    return Feeds(tuple(dict.fromkeys(inputs)))


def _feeding(trial: Trial, line: Line) -> Iterator[Line]:
    """Yield the lines of an operation's inputs of which it passes a constant on to `line`."""
    for x in trial.values:
        if not is_float(x) or x.meta["fixed"]:
            continue
        for at in lines_of(x, line.block):
            change = trial.shifted(at)
            if trial.is_zero(change) or not trial.is_even(change, line):
                continue
            # Along an axis that an input has not, whatever is added to it comes out as a constant.
            if not trial.is_even(trial.redrawn(x), line):
                yield at
                break


def keeps_order(line: Line, inputs: tuple[Line, ...]) -> bool:
    """Tell whether factors along the lines that feed a line come out as the same factors along it.

    That is not so behind a roll or a flip of channels. Each line is one block, a whole axis.
    """

    def times(x: Tensor, factors: Tensor, axis: int) -> Tensor:
        return (x.movedim(axis, -1) * factors).movedim(-1, axis)

    for trial in trials(line.node):
        factors = trial.draw(trial.result.new_empty(line.block))
        scaled = {at.node: times(trial.values[at.node], factors, at.axis) for at in inputs}
        expected = times(trial.result, factors, line.axis)
        if not trial.is_zero(trial.run(scaled) - expected):
            return False
    return True


def passes_on(user: Node, line: Line) -> list[Line] | None:
    """Return the lines of an operation to which it passes on a constant that is added to `line`.

    Args:
        user: the operation, which reads the line's tensor.

    Returns:
        None if the constant would change something else; an empty list if nothing changes.
    """
    name = str(user.target)
    norm = user.meta["norm"]
    if norm is not None:
        return [] if norm.line == line and not norm.refused else None
    if not user.users or name.startswith(READ_NO_NUMBERS) or only_centres(user, line):
        return []
    if not is_linear(user) and not name.startswith(BLIND):
        return None
    pieces = user.users if isinstance(user.meta["val"], list | tuple) else [user]
    found = []
    try:
        for trial in (trial for piece in pieces for trial in trials(piece)):
            change = trial.shifted(line)
            if trial.is_zero(change):
                continue
            other = trial.redrawn(line.node)
            onwards = [
                at
                for at in lines_of(trial.node, line.block)
                if trial.is_even(change, at) and not trial.is_even(other, at)
            ]
            if not onwards or not is_linear(user):
                return None
            found.append(onwards[0])
    except Exception:  # as in `feeds`
        return None
    return found
