"""Recognise norms in a graph of ATen operations, and other operations that a constant added to a
line does not change.

References to appendices are to "Enjoy Your Layer Normalization".
"""

import operator
from dataclasses import dataclass

from torch.fx import Node

from .axes import Line, argument, centring, reduced_axis, shape
from .by_hand import hand_norm


@dataclass(frozen=True)
class NormInput:
    """The line that a norm centres."""

    line: Line
    refused: str = ""  # why this norm can never be folded ("": it may be)


def norm_input(node: Node) -> NormInput | None:
    """Return what a norm centres; None if the node is no norm.

    Norms are LayerNorms, those written out by hand, too (by_hand.py), and GroupNorms without
    positions, whose statistics are over channels alone (appendix C.3).
    """
    name = str(node.target)
    if name.startswith(("aten.layer_norm", "aten.native_layer_norm")):
        x, sizes = node.args[:2]
        line = Line(x, len(shape(x)) - 1, int(sizes[-1]))
        return NormInput(line, _refused_layer_norm(node))
    # Of (N, C) alone: that (N, C, ...) has one position may be due to the example. (A U-Net's
    # deepest GroupNorms see one position of a small picture, and more of a larger one.)
    if name.startswith("aten.group_norm") and len(shape(node.args[0])) == 2:
        x, groups = node.args[:2]
        channels = shape(x)[1]
        why = "" if channels > groups else "its mean is over one number"
        return NormInput(Line(x, 1, channels // groups), why)
    by_hand = hand_norm(node)
    return None if by_hand is None else NormInput(by_hand.line)


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
