"""Move the gains and biases of norms into the linear layers that alone read them.

    after, certificate = fold_gains(model, {"input_ids": ids})

With the normalised n, the gain g and the bias b of a norm, and the linear W y + c after it,

    W (n g + b) + c = W diag(g) n + (c + W b)

(FlashNorm, arXiv 2407.09577, proposition 1, with biases). So the linear takes over g and b, and the
norm is left with a gain of 1 and a bias of 0: it is weightless. All modules stay what they are, and
so do the names and shapes of the parameters. What loads the model loads the weightless one.

A gain is found in the exported graph, not by names: a vector that multiplies channel by channel,
also as 1 + weight. It stays where anything but linears reads the product; attention may be between
them and the values, in which it is linear. A bias stays where such a linear has no bias of its own;
it is divided by the gain then, so that W diag(g) (b / g) = W b.
"""

import operator
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from .certificate import Certificate, Inputs, changed
from .graph import Graph
from .lines import argument, describe, is_tensor, shape
from .modules import end_ties, merged, tensor_of, untie
from .rules import ROUNDING, Trial, is_cast, is_move
from .siblings import FoldError

PRODUCTS = (
    "aten.linear.",
    "aten.addmm.",
    "aten.mm.",
    "aten.bmm.",
    "aten.matmul.",
    "aten.einsum.",
)
NORMS = ("aten.layer_norm.", "aten.native_layer_norm.", "aten.rms_norm.")


@dataclass(frozen=True)
class Affine:
    """What a norm does after it has normalised: multiply by a gain, and add a bias.

    Attributes:
        first: the operation that reads the gain.
        last: the operation whose result the model goes on with.
        gain: name of the parameter.
        offset: the gain is offset + parameter.
        bias: name of the parameter, if there is one.
    """

    first: Node
    last: Node
    gain: str
    offset: float
    bias: str | None


@dataclass(frozen=True)
class Target:
    """A weight that takes over a gain, by name.

    Attributes:
        weight: name of the parameter.
        axis: of the weight, along the channels that it reads.
        channels: of the norm, in the order in which it reads them.
        bias: the parameter that is added after it, if there is one.
        copied_to: the names of a copy that takes the gain over, of a weight with other readers.
    """

    weight: str
    axis: int
    channels: tuple[int, ...]
    bias: str | None
    copied_to: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name under which the linears read it."""
        return self.copied_to[0] if self.copied_to else self.weight


class Read(NamedTuple):
    """A linear operation that reads the channels of a norm.

    Attributes:
        target: the weight that it reads them with.
        user: the operation.
        entry: the operation that reads the parameter: `user`, or a cast before it.
    """

    target: Target
    user: Node
    entry: Node


@dataclass(frozen=True)
class Fold:
    """A gain with its bias, and the linears that take both over."""

    affine: Affine
    bias_stays: bool
    targets: tuple[Target, ...]


def fold_gains(
    model: nn.Module, inputs: Inputs, untie: bool = True, keep_final_gain: bool = False
) -> tuple[nn.Module, Certificate]:
    """Fold the gains and biases that linear layers alone read into these layers, in a copy.

    Args:
        model: any nn.Module that torch.export can export, in the mode that is meant.
        inputs: positional (tuple) or keyword (dict) arguments of the model.
        untie: a head that shares the embedding's weights may get weights of its own. It costs the
            memory of an embedding matrix.
        keep_final_gain: of a model of transformers, leave the gains and biases that linears outside
            of its base model read, such as the head. So the base model alone, which AutoModel loads
            from the same folder, is the same function, too.

    Returns:
        (copy, certificate). The certificate names the gains and biases that stay, and why. If its
        check fails (certificate.ok is False), the model itself is returned instead of a copy.

    Raises:
        FoldError: no gain folds, or the model cannot be exported or run in float64.
    """
    folds, left = plan_folds(Graph(model, inputs), untie, keep_final_gain)
    return changed(
        model,
        partial(carry_out, folds),
        inputs,
        what=f"{type(model).__name__}: {len(folds)} gains folded into linears",
        folded=len(folds),
        refusals=left,
        to="weightless",
    )


def plan_folds(
    graph: Graph, untie: bool, keep_final_gain: bool = False
) -> tuple[list[Fold], dict[str, str]]:
    """Find the gains that fold, as `find_folds` does.

    Raises:
        FoldError: there is no fold.
    """
    folds, left = find_folds(graph, untie, keep_final_gain)
    if not folds:
        reason = (
            f"{type(graph.model).__name__}: none of its norms has a gain but 1 that linears alone "
            "read"
        )
        if left:
            name, why = next(iter(left.items()))
            reason += f"; {name} stays: {why}"
        raise FoldError(reason)
    return folds, left


def find_folds(
    graph: Graph, untie: bool, keep_final_gain: bool = False, with_ones: bool = False
) -> tuple[list[Fold], dict[str, str]]:
    """Find the gains that fold; the arguments are those of `fold_gains`.

    Args:
        with_ones: also gains of 1 with biases of 0, which change nothing now.

    Returns:
        The folds, and the parameters that stay: name -> why.
    """
    groups: dict[str, list[Affine]] = defaultdict(list)
    for affine in filter(None, [_affine(graph, node) for node in graph.nodes]):
        groups[affine.gain].append(affine)
    folds = []
    left = {}
    for gain, affines in groups.items():
        if _is_neutral(graph, affines[0]) and not with_ones:
            continue
        found = _plan(graph, affines, untie)
        if keep_final_gain and isinstance(found, Fold):
            found = _reader_outside(graph.model, found) or found
        if isinstance(found, str):
            left[gain] = found
            biases = {affine.bias for affine in affines if affine.bias is not None}
            left |= dict.fromkeys(biases, found)
            continue
        folds.append(found)
        if found.bias_stays:
            without_bias = next(
                (target for target in found.targets if target.bias is None), found.targets[0]
            )
            why = f"{without_bias.name} has no bias of its own that could take it over"
            left[affines[0].bias] = why
    return folds, left


@torch.no_grad()
def carry_out(folds: list[Fold], model: nn.Module) -> None:
    """Let the weights of linears take over gains and biases, in place; in float64, rounded once."""
    for fold in folds:
        affine = fold.affine
        parameter = tensor_of(model, affine.gain)
        gain = affine.offset + parameter.double().flatten()
        bias = None if affine.bias is None else tensor_of(model, affine.bias)
        for target in fold.targets:
            # A copy of a tied weight, which a fold before may have taken the first name of.
            old = tensor_of(model, target.name)
            weight = old.double()
            channels = list(target.channels)
            if bias is not None and not fold.bias_stays:
                added = weight.movedim(target.axis, -1) @ bias.double().flatten()[channels]
                into = tensor_of(model, target.bias)
                into.copy_(into.double() + added)
            weight = merged(weight, gain[channels], target.axis)
            if target.copied_to:
                untie(model, target.copied_to, weight.to(old.dtype))
            else:
                old.copy_(weight)
        parameter.fill_(1 - affine.offset)
        if bias is not None and fold.bias_stays:
            # Where both are 0 so is the quotient; a gain of 0 alone is refused (_plan).
            divisor = torch.where(gain == 0, 1.0, gain).reshape(bias.shape)
            bias.copy_(bias.double() / divisor)
        elif bias is not None:
            bias.zero_()
    if any(target.copied_to for fold in folds for target in fold.targets):
        end_ties(model)


# ------------------------------------------------------------------------------------- finding them


def _affine(graph: Graph, node: Node) -> Affine | None:
    """Return the gain that an operation multiplies by, and the bias after it; None without one."""
    name = str(node.target)
    if name.startswith(NORMS):
        gain = argument(node, 2)
        bias = argument(node, 3) if "layer_norm" in name else None
        if len(node.args[1]) != 1 or not _is_parameter(graph, gain):
            return None
        if bias is not None and not _is_parameter(graph, bias):
            return None
        # native_layer_norm returns (y, mean, inv_std)
        y = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        last = y[0] if y else node
        return Affine(node, last, graph.names[gain], 0.0, bias and graph.names[bias])
    if name != "aten.mul.Tensor":
        return None
    for x, factor in (node.args, node.args[::-1]):
        found = _vector(graph, factor, node)
        if found is not None and is_tensor(x) and x not in graph.names:
            last, bias = _bias_after(graph, node)
            return Affine(node, last, *found, bias)
    return None


def _is_parameter(graph: Graph, node: object) -> bool:
    """Tell whether a node is a parameter of floats of the model."""
    if node not in graph.names:
        return False
    value = graph.values[graph.names[node]]
    # Integers (a quantised weight) can take no gain over.
    return isinstance(value, nn.Parameter) and value.is_floating_point()


def _vector(graph: Graph, x: object, like: Node) -> tuple[str, float] | None:
    """Return (name, offset) if x is offset + a parameter with one number for each channel.

    Channels are the last axis of the tensor of `like`.
    """
    offset = 0.0
    while isinstance(x, Node) and x not in graph.names:
        if is_cast(x):
            x = x.args[0]
            continue
        if not str(x.target).startswith("aten.add.") or x.kwargs:
            return None
        numbers = [arg for arg in x.args if isinstance(arg, int | float)]
        if len(numbers) != 1:
            return None
        offset += numbers[0]
        x = next(arg for arg in x.args if isinstance(arg, Node))
    if not _is_parameter(graph, x) or not shape(x):
        return None
    channels = shape(like)[-1]
    # A single channel would be a factor of the whole tensor.
    if channels == 1 or shape(x)[-1] != channels or set(shape(x)[:-1]) - {1}:
        return None
    return graph.names[x], offset


def _bias_after(graph: Graph, node: Node) -> tuple[Node, str | None]:
    """Return the addition of a bias to what a gain gave, and the bias; (node, None) without one."""
    at = node
    users = list(at.users)
    while len(users) == 1 and is_cast(users[0]) and users[0].args[0] is at:
        at = users[0]
        users = list(at.users)
    if len(users) == 1 and str(users[0].target) == "aten.add.Tensor" and not users[0].kwargs:
        other = next((arg for arg in users[0].args if arg is not at), None)
        found = _vector(graph, other, users[0])
        if found is not None and found[1] == 0 and shape(users[0]) == shape(at):
            return users[0], found[0]
    return node, None


def _is_neutral(graph: Graph, affine: Affine) -> bool:
    """Tell whether a gain is 1 and the bias 0 already."""
    gain = affine.offset + graph.values[affine.gain].detach()
    bias = torch.zeros(()) if affine.bias is None else graph.values[affine.bias]
    return bool((gain == 1).all()) and not bias.any()


# ---------------------------------------------------------------------------------- who reads them


def _plan(graph: Graph, affines: list[Affine], untie: bool) -> Fold | str:
    """Plan to fold a gain, or say why it stays.

    Args:
        affines: all operations that were found to multiply by it.
        graph: of the model.
        untie: weights that are used elsewhere, too, may be copied.
    """
    first = affines[0]
    if len({(affine.offset, affine.bias) for affine in affines}) > 1:
        return "it is used with several biases"
    known = {node for affine in affines for node in (affine.first, affine.last)}
    for name in filter(None, (first.gain, first.bias)):
        other = _other_use(graph, name, known)
        if other is not None:
            return f"{describe(other)} reads it too"
    reads: list[Read] = []
    for affine in affines:
        found = _readers(graph, affine)
        if isinstance(found, str):
            return f"{found} reads what it multiplies"
        reads += found
    if not reads:
        return "nothing reads what it multiplies"
    targets = _targets(graph, reads, untie)
    if isinstance(targets, str):
        return targets
    bias_stays = first.bias is not None and not _can_take_bias(graph, reads)
    if bias_stays:
        gain = first.offset + graph.values[first.gain].flatten()
        if (graph.values[first.bias].flatten()[gain == 0] != 0).any():
            return "its bias has to stay, and the gain is 0 where the bias is not"
    return Fold(first, bias_stays, targets)


def _reader_outside(model: nn.Module, fold: Fold) -> str:
    """Say which linear outside of a part that has a norm would take over its gain, if any.

    Parts are those that transformers also loads by themselves: the base model, a decoder, a tower.
    """
    for path, part in model.named_modules():
        if not path or not hasattr(part, "base_model_prefix"):
            continue
        for target in fold.targets:
            within = target.name.startswith(f"{path}.")
            if fold.affine.gain.startswith(f"{path}.") and not within:
                return f"{target.name}, outside of {path}, reads what it multiplies"
    return ""


def _other_use(graph: Graph, name: str, known: Collection[Node]) -> Node | None:
    """Return an operation that reads a vector, apart from those that are known; None without."""
    todo = [graph.node_of[name]]
    while todo:
        for user in todo.pop().users:
            if user in known:
                continue
            # casts, and the 1 of 1 + weight
            if not is_cast(user) and not str(user.target).startswith("aten.add."):
                return user
            todo.append(user)
    return None


def _readers(graph: Graph, affine: Affine) -> list[Read] | str:
    """Return the linears that alone read what a norm gives, or describe what else reads it.

    Beside each tensor goes one of its shape that says which of the norm's channels each number is.
    """
    out = affine.last
    todo = [(out, torch.arange(shape(out)[-1]).expand(shape(out)))]
    reads = []
    while todo:
        node, channels = todo.pop()
        for user in node.users:
            if user.op == "output":
                return "the model's output"
            read = _read(graph, user, node, channels)
            if read is not None:
                reads.append(read)
                continue
            moved = _moved(user, node, channels)
            # T5's decoder before a tied head. With a bias b it would be W b times the number, too.
            if affine.bias is None and _is_times_number(user, node):
                moved = [(user, channels)]
            if moved is None:
                return describe(user)
            todo += moved
    return reads


def _is_times_number(user: Node, node: Node) -> bool:
    """Tell whether an operation multiplies a node by a number, or divides it by one."""
    is_product = str(user.target).startswith(("aten.mul.", "aten.div."))
    if not is_product or "rounding_mode" in user.kwargs:
        return False
    first, second = user.args
    return first is node and isinstance(second, int | float)


def _moved(user: Node, node: Node, channels: Tensor) -> list[tuple[Node, Tensor]] | None:
    """Return the results of an operation that only moves a node's numbers, with their channels.

    Attention counts as one for its values: it mixes tokens, whose channels are all alike.
    """
    name = str(user.target)
    if name.startswith("aten.scaled_dot_product_attention"):
        is_value = user.args[2] is node and node not in user.args[:2]
        heads = shape(user)[-3] // channels.shape[-3]  # that share a value
        is_even = bool((channels == channels[..., :1, :]).all())
        if not is_value or not is_even or argument(user, 4, 0.0, "dropout_p"):
            return None
        mixed = channels[..., :1, :].repeat_interleave(heads, -3)
        return [(user, mixed.expand(shape(user)))]
    is_off = name.startswith("aten.dropout") and not (user.args[2] and user.args[1])
    if user.args[0] is not node:
        return None
    if is_cast(user) or is_off:
        return [(user, channels)]
    is_moved = is_move(user) or name.startswith("aten.repeat_interleave.")
    if not is_moved or user.all_input_nodes != [node]:
        return None  # such as rows that another tensor picks
    moved = user.target(channels.contiguous(), *user.args[1:], **user.kwargs)
    if isinstance(moved, Tensor):
        return [(user, moved)]
    return [(piece, moved[piece.args[1]]) for piece in user.users]


def _read(graph: Graph, user: Node, x: Node, channels: Tensor) -> Read | None:
    """Return how a product reads x along its input channels; None if it does not.

    That is tried out: to scale the channels must be the same as to scale an axis of the weight.
    """
    if not str(user.target).startswith(PRODUCTS):
        return None
    along = _axis_of(channels)
    if along is None:
        return None
    order = channels.movedim(along, -1).reshape(-1, channels.shape[along])[0]
    trial = Trial(user)
    factors = trial.draw(order)
    scaled = trial.run({x: merged(trial.values[x], factors, along)})
    for entry, value in trial.values.items():
        for axis, size in enumerate(value.shape):
            if entry is x or size != len(factors):
                continue
            other = trial.run({entry: merged(value, factors, axis)})
            if torch.allclose(scaled, other, rtol=0, atol=ROUNDING):
                return _target(graph, user, entry, axis, order)
    return None


def _axis_of(channels: Tensor) -> int | None:
    """Return the axis along which alone the channels differ; the last one that does it, or None."""
    for axis in reversed(range(channels.dim())):
        rows = channels.movedim(axis, -1).reshape(-1, channels.shape[axis])
        if channels.shape[axis] > 1 and bool((rows == rows[0]).all()):
            return axis
    return None


def _target(graph: Graph, user: Node, weight: Node, axis: int, channels: Tensor) -> Read | None:
    """Return the parameter that an operation reads as `weight`; None if that is not one alone.

    Of several experts in one parameter, along its first axis, the operation may read some.
    """
    entry = user
    while weight not in graph.names:
        if len(weight.users) != 1:
            return None
        if str(weight.target).startswith("aten.transpose."):
            first, second = (place % len(shape(weight)) for place in weight.args[1:])
            axis = {first: second, second: first}.get(axis, axis)
        elif str(weight.target).startswith("aten.permute."):  # as W.T
            axis = weight.args[1][axis]
        elif not is_cast(weight) and not (_picks_experts(weight) and axis > 0):
            return None
        entry = weight
        weight = weight.args[0]
    if not _is_parameter(graph, weight):
        return None
    added = {"aten.linear.default": 2, "aten.addmm.default": 0}.get(str(user.target))
    bias = None if added is None else argument(user, added)
    bias = graph.names[bias] if _is_parameter(graph, bias) else None
    target = Target(graph.names[weight], axis, tuple(channels.tolist()), bias)
    return Read(target, user, entry)


def _picks_experts(node: Node) -> bool:
    """Tell whether an operation picks slices along the first axis of a tensor, and no more."""
    if str(node.target) != "aten.index.Tensor":
        return False
    indices = node.args[1]
    return len(indices) == 1 and is_tensor(indices[0]) and len(shape(indices[0])) == 1


def _targets(graph: Graph, reads: list[Read], untie: bool) -> tuple[Target, ...] | str:
    """Return the weights that these operations read, or say which cannot take over a gain."""
    by_weight: dict[str, list[Read]] = defaultdict(list)
    for read in reads:
        by_weight[read.target.weight].append(read)
    targets = []
    for name, own in by_weight.items():
        target = own[0].target
        # Tied linears may have different biases (_can_take_bias).
        if any(replace(read.target, bias=target.bias) != target for read in own):
            return f"linears read channels of {name} in several ways"
        weight = graph.node_of[name]
        users = {read.entry for read in own}
        others = [user for user in weight.users if user not in users]
        if others:
            names = graph.owners(weight, users)
            if names & graph.owners(weight, others):
                return f"{describe(others[0])} reads {name} too"
            if not untie:
                return f"{describe(others[0])} reads {min(names)} too, which is tied"
            target = replace(target, copied_to=tuple(sorted(names)))
        targets.append(target)
    return tuple(targets)


def _can_take_bias(graph: Graph, reads: list[Read]) -> bool:
    """Tell whether each of these operations adds a bias that nothing else reads."""
    nodes = {read.user for read in reads}
    pairs = {(read.target.weight, read.target.bias) for read in reads}
    if any(bias is None for _, bias in pairs):
        return False
    # A bias that two weights share would have to take over two sums, and the other way round.
    weights, biases = zip(*pairs, strict=True)
    alone = len(set(weights)) == len(set(biases)) == len(pairs)
    return alone and all(nodes.issuperset(graph.node_of[bias].users) for bias in biases)
