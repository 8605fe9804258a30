"""Find out which lines of an operation's inputs make up a line of its output, by trying it out.

An operation of the graph is run in float64 on random numbers of the shapes that it has there. Lines
of its inputs feed a line of its output if

    1. adding a constant to every block of them adds a constant to the blocks of the output;
    2. the blocks of the output have zero mean where those of all these inputs have (else there is a
       `failure`).

graph.py asks backwards (which parameters must be centred for this LayerNorm?) and forwards (what
else would be changed by that?). Only operations that are linear in each of their tensors of floats
are tried: a clamp is the identity on the numbers of a trial, and on no others.

Source: "Enjoy Your Layer Normalization", section 4.2 (scalars, adds, linears) and appendix C
(convolutions, groups).
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .lines import (
    Feeds,
    Line,
    centring,
    compute,
    describe,
    is_float,
    norm_of,
    only_centres,
    shape,
    wider,
)

# Linear in each of their tensors of floats; and norms, whose output may have zero mean
LINEAR = (
    *("aten.add.", "aten.sub.", "aten.mul.", "aten.div.", "aten.neg.", "aten.lerp."),
    *("aten.linear.", "aten.addmm.", "aten.mm.", "aten.matmul.", "aten.bmm.", "aten.baddbmm."),
    *("aten.einsum.", "aten.embedding.", "aten.scaled_dot_product_attention."),
    *("aten.conv1d.", "aten.conv2d.", "aten.conv3d.", "aten.convolution.", "aten.conv_transpose"),
    *("aten.expand", "aten.repeat.", "aten.clone.", "aten.alias.", "aten.detach."),
    *("aten.contiguous.", "aten._to_copy.", "aten.to.", "aten.type_as.", "aten.lift_fresh_copy."),
    *("aten.view.", "aten._unsafe_view.", "aten.view_as.", "aten.reshape.", "aten.flatten."),
    *("aten.unflatten.", "aten.unsqueeze.", "aten.squeeze.", "aten.permute.", "aten.transpose."),
    *("aten.t.", "aten.numpy_T.", "aten.roll.", "aten.flip.", "aten.slice.", "aten.select."),
    *("aten.narrow.", "aten.index.", "aten.index_select.", "aten.gather.", "aten.split"),
    *("aten.chunk.", "aten.unsafe_split", "aten.tensor_split.", "aten.unbind.", "aten.cat."),
    *("aten.stack.", "aten.select_scatter.", "aten.slice_scatter.", "aten.scatter_add."),
    *("aten.index_add.", "aten.masked_scatter.", "aten.where.", "aten.masked_fill."),
    *("aten.copy.", "aten.fill.", "aten.pad.", "aten.constant_pad_nd.", "aten.cumsum."),
    *("aten.mean.dim", "aten.sum.dim", "aten.nansum.", "aten.avg_pool", "aten.adaptive_avg_pool"),
    *("aten.upsample_nearest", "aten.upsample_bilinear", "aten.upsample_bicubic"),
    *("aten.dropout.", "aten.feature_dropout.", "aten.alpha_dropout.", "aten.native_dropout."),
    *("aten.layer_norm.", "aten.native_layer_norm.", "aten.zeros", "aten.full", "aten.new_zeros."),
)
# What does not change if a constant is added along the right axis
BLIND = ("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax")
BLIND += ("aten.var.", "aten.std.")
# Operations that read the shape and the type of a tensor, but none of its numbers
READ_NO_NUMBERS = ("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_", "aten.empty")
READ_NO_NUMBERS += ("aten._assert", "aten.sym_")
ROUNDING = 1e-9


class Trial:
    """An operation on random numbers, or one result of an operation that has several."""

    def __init__(self, node: Node):
        self.node = node
        made = node.args[0] if node.target is operator.getitem else node
        self.generator = torch.Generator().manual_seed(0)
        self.values = {x: self.sample(x) for x in made.all_input_nodes}
        # It may hold rows another time. (torch.cat leaves out a torch.tensor([]).)
        if any(x.numel() == 0 and x.dim() > 1 for x in self.values.values()):
            raise ValueError("nothing can be said of a tensor that is empty in the example")

    def sample(self, x: Node) -> Tensor:
        """Return random numbers for an input; what depends on no floats is computed."""
        found = x.meta["val"]
        if x.op == "call_function" and (x.meta["fixed"] or not is_float(x)):
            return Trial(x).run({})
        if "constant" in x.meta:
            return x.meta["constant"].to(wider(found.dtype))
        if found.is_floating_point():
            return self.draw(found)
        indices = torch.randint(2, found.shape, generator=self.generator)  # or a mask
        return indices.to(found.device, found.dtype)

    def draw(self, like: Tensor) -> Tensor:
        """Draw numbers between -0.5 and 0.5, in float64."""
        numbers = torch.rand(like.shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(like.device) - 0.5

    def run(self, changed: dict[Node, Tensor]) -> Any:
        """Return what the operation gives, with other numbers for some inputs."""
        return compute(self.node, self.values | changed)

    def changes(self, line: Line) -> tuple[Any, Any]:
        """Return by how much the result changes with a line of an input.

        Returns:
            If a constant is added to each of its blocks, and if any numbers are.
        """
        x = self.values[line.node]
        before = self.run({})
        blocks = blocks_of(x, line)
        constants = self.draw(blocks.narrow(line.axis + 1, 0, 1))
        shifted = (blocks + constants).reshape(x.shape)
        return tuple(self.run({line.node: y}) - before for y in (shifted, self.draw(x)))


def mark_fixed(nodes: list[Node]) -> None:
    """Mark the tensors of a graph that depend on no numbers of the model and its inputs."""
    for node in nodes:
        inputs = [x.meta["fixed"] for x in node.all_input_nodes]
        is_made = str(node.target).startswith(READ_NO_NUMBERS) or all(inputs)
        node.meta["fixed"] = "constant" in node.meta or (node.op == "call_function" and is_made)


def blocks_of(x: Tensor, line: Line) -> Tensor:
    """Return a line's blocks along an axis of their own, behind the line's."""
    return x.unflatten(line.axis, (-1, line.block))


def is_even(x: Tensor, line: Line) -> bool:
    """Tell whether a tensor is the same all along each block of a line."""
    blocks = blocks_of(x, line)
    return bool((blocks - blocks.narrow(line.axis + 1, 0, 1)).abs().max() < ROUNDING)


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
    failure = f"{describe(node)} does not keep a zero mean"
    try:
        if not (is_float(node) and _is_linear(node)):
            return Feeds(failure=failure)
        trial = Trial(node)
        found = tuple(_feeding(trial, line))
        centred = {}
        for at in found:
            blocks = blocks_of(trial.values[at.node], at)
            blocks = blocks - blocks.mean(at.axis + 1, keepdim=True)
            centred[at.node] = blocks.reshape(shape(at.node))
        means = blocks_of(trial.run(centred), line).mean(line.axis + 1)
        return Feeds(found, "" if means.abs().max() < ROUNDING else failure)
    except Exception:  # an operation that does not take such numbers may raise anything
        return Feeds(failure=failure)


def _is_linear(node: Node) -> bool:
    made = node.args[0] if node.target is operator.getitem else node
    return str(made.target).startswith(LINEAR)


def _feeding(trial: Trial, line: Line) -> Iterator[Line]:
    """Yield the lines of an operation's inputs of which it passes a constant on to `line`."""
    for x in trial.values:
        for at in lines_of(x, line.block) if is_float(x) and not x.meta["fixed"] else ():
            change, other = trial.changes(at)
            if _carries(change, other, line) and change.abs().max() > ROUNDING:
                yield at
                break


def _carries(change: Tensor, other: Tensor, line: Line) -> bool:
    """Tell whether an added constant comes out as one along a line, and other numbers do not.

    Along an axis that an input has not, whatever is added to it comes out as a constant.
    """
    return is_even(change, line) and not is_even(other, line)


def passes_on(user: Node, line: Line) -> list[Line] | None:
    """Return the lines of an operation to which it passes on a constant that is added to `line`.

    Args:
        user: the operation, which reads the line's tensor.

    Returns:
        None if the constant would change something else; an empty list if nothing changes.
    """
    name = str(user.target)
    norm = norm_of(user)
    if norm is not None:
        return [] if norm.line == line and not norm.refused else None
    if not user.users or name.startswith(READ_NO_NUMBERS) or only_centres(user, line):
        return []
    if not name.startswith((*LINEAR, *BLIND)):
        return None
    several = isinstance(user.meta["val"], list | tuple)
    found = []
    for piece in user.users if several else [user]:
        try:
            change, other = Trial(piece).changes(line)
        except Exception:  # as in `feeds`
            return None
        if change.abs().max() < ROUNDING:
            continue
        onwards = [at for at in lines_of(piece, line.block) if _carries(change, other, at)]
        if not onwards or not name.startswith(LINEAR):
            return None
        found.append(onwards[0])
    return found
