"""Multiply the residual stream of a model by a power of two, and leave its function as it is.

    after, certificate = rescale(model, {"input_ids": ids}, 2.0**-6)

A stream that grows beyond 65504 is not finite in float16. A norm does not see the size of its
input, but for its eps:

    norm(s x, eps s^2) = norm(x, eps)

So all that is written into the stream is multiplied by s, eps of the norms by s^2 (by s where it is
added outside the root), and what reads the stream without a norm by 1 / s. Because s is a power of
two, nothing is rounded: in float32 the outputs are equal to the bit.

Every tensor of floats in the exported graph has a degree d: it is multiplied by s^d. What the
inputs of all norms have is 1, what the model returns has 0, and every operation relates the degrees
of its tensors (`relations`): a sum takes tensors of one degree, a product adds degrees, and an
operation that is not known takes and gives 0. Degrees of parameters follow. So a head that is the
embedding stays that: its degree is 1, and the gain of the final norm gets -1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from .certificate import Certificate, Inputs, changed, duplicate, run
from .graph import Graph
from .lines import argument, describe, is_tensor, made_by, module_path
from .modules import tensor_of
from .rules import CASTS, MOVES, READ_NO_NUMBERS, is_cast
from .siblings import FoldError

# Operations that give s^d times as much where all their tensors of floats are s^d times as large
HOMOGENEOUS = (
    *CASTS,
    *MOVES,
    "aten.neg.",
    "aten.relu.",
    "aten.abs.",
    "aten.embedding.",
    "aten.detach.",
    "aten.lift_fresh_copy.",
    "aten.flip.",
    "aten.index.",
    "aten.index_select.",
    "aten.index_add.",
    "aten.index_put.",
    "aten.gather.",
    "aten.unsafe_split",
    "aten.tensor_split.",
    "aten.repeat_interleave.",
    "aten.cat.",
    "aten.stack.",
    "aten.select_scatter.",
    "aten.slice_scatter.",
    "aten.scatter_add.",
    "aten.cumsum.",
    "aten.mean.",
    "aten.sum.",
    "aten.avg_pool",
    "aten.adaptive_avg_pool",
    "aten.upsample_",
    "aten.dropout.",
)
# Likewise where the number that they fill in is 0 or infinite
FILLS = ("aten.where.", "aten.masked_fill.", "aten.pad.", "aten.constant_pad_nd.", "aten.fill.")
# These read the type or the shape alone of their second tensor
LIKE_ANOTHER = ("aten.type_as.", "aten.view_as.", "aten.expand_as.")
ZEROS = ("aten.zeros_like.", "aten.new_zeros.", "aten.zeros.")
NORMS = ("aten.layer_norm.", "aten.native_layer_norm.", "aten.rms_norm.", "aten.group_norm.")
PRODUCTS = ("aten.mm.", "aten.matmul.", "aten.bmm.", "aten.einsum.", "aten.mul.")
# Operation -> positions of its two factors and of what is added
PRODUCTS_WITH_BIAS = {
    "aten.linear.": (0, 1, 2),
    "aten.conv": (0, 1, 2),
    "aten.addmm.": (1, 2, 0),
    "aten.baddbmm.": (1, 2, 0),
}
POWERS = {
    "aten.rsqrt.": Fraction(-1, 2),
    "aten.sqrt.": Fraction(1, 2),
    "aten.reciprocal.": Fraction(-1),
    "aten.square.": Fraction(2),
    "aten.var.": Fraction(2),
    "aten.std.": Fraction(1),
}
LARGEST_EPS = 0.1
# Beyond this a gain that is stored as 1 + weight would be another one.
LARGEST_ROUNDING = 1e-3
FLOAT16 = torch.finfo(torch.float16)
EMBEDDED_USE = "embeddings given by hand (inputs_embeds): multiply them by the factor first"


@dataclass(frozen=True)
class Relation:
    """A linear equation between degrees: the sum of coefficient * degree is `total`."""

    node: Node  # the operation that asks for it
    coefficients: dict[Node, Fraction]
    total: Fraction = Fraction(0)


@dataclass(frozen=True)
class Eps:
    """A number that a module adds to the variance of its input, or to the deviation.

    Attributes:
        path: of the module.
        attribute: of the module, which holds the number.
        value: of the attribute.
        power: it is multiplied by s^power.
    """

    path: str
    attribute: str
    value: float
    power: int


@dataclass
class Rescaling:
    """All that a factor s changes, by name.

    Attributes:
        powers: parameter -> it is multiplied by s^power.
        offsets: parameter of a gain -> the gain is offset + parameter, and that is multiplied.
        eps: of the norms.
    """

    powers: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    eps: list[Eps] = field(default_factory=list)

    def paths(self) -> set[str]:
        """Return the paths of the modules that read or write the stream."""
        return {eps.path for eps in self.eps} | {name.rpartition(".")[0] for name in self.powers}


def rescale(model: nn.Module, inputs: Inputs, factor: float) -> tuple[nn.Module, Certificate]:
    """Multiply the residual stream by a factor, in a copy.

    Args:
        model: any nn.Module that torch.export can export, in the mode that is meant.
        inputs: positional (tuple) or keyword (dict) arguments of the model.
        factor: a power of two.

    Returns:
        (copy, certificate). If its check fails (certificate.ok is False), the model itself is
        returned instead of a copy.

    Raises:
        FoldError: an operation does not allow it, or the factor is no power of two.
    """
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        raise FoldError(f"factor={factor}: it is a power of two, as 2^-6")
    plan = plan_rescaling(Graph(model, inputs))
    exponent = round(math.log2(factor))
    after, certificate = changed(
        model,
        partial(carry_out, plan, factor),
        inputs,
        what=f"{type(model).__name__}: the residual stream times 2^{exponent}",
        folded=len(plan.eps),
        to="rescaled",
    )
    if not certificate.ok:
        return after, certificate
    own = certificate.checks[-1]
    notes = [
        "weights that are subnormal in float16, with fewer bits: "
        f"{subnormal_share(model):.1%} before, {subnormal_share(after):.1%} after"
    ]
    if own.max_abs == 0:
        notes.append(f"equal to the bit in {own.dtype}")
    return after, replace(
        certificate, notes=notes, not_covered=[*certificate.not_covered, EMBEDDED_USE]
    )


def subnormal_share(model: nn.Module) -> float:
    """Return which part of the weights would be subnormal in float16, with fewer bits."""
    numbers = [p.detach().abs() for p in model.parameters() if p.is_floating_point()]
    subnormal = sum(int(((x > 0) & (x < FLOAT16.tiny)).sum()) for x in numbers)
    return subnormal / sum(x.numel() for x in numbers)


@torch.no_grad()
def automatic_factor(model: nn.Module, inputs: list[dict[str, Any]], plan: Rescaling) -> float:
    """Return the largest power of two that keeps the stream a quarter below float16's range.

    Args:
        model: a model of transformers; its stream is measured in float32.
        inputs: what it is run on.
        plan: says which modules read and write the stream.

    Raises:
        FoldError: the stream is as small as that already, or not finite in float32.
    """
    wide = duplicate(model).float()
    largest = 0.0

    def note(module: nn.Module, args: tuple, output: Any) -> None:
        nonlocal largest
        for x in (*args, output):
            if isinstance(x, Tensor) and x.is_floating_point():
                largest = max(largest, float(x.abs().max()))

    for path in plan.paths():
        wide.get_submodule(path).register_forward_hook(note)
    for one in inputs:
        run(wide, one, widen=False)
    if not math.isfinite(largest):
        raise FoldError("factor=auto: the stream is not finite in float32 either")
    factor = 2.0 ** math.floor(math.log2(FLOAT16.max / 4 / largest))
    if factor >= 1:
        raise FoldError(
            f"factor=auto: the largest number of the stream is {largest:.3g}, a quarter below "
            "float16's range already: give a factor to scale it nevertheless"
        )
    return factor


@torch.no_grad()
def carry_out(plan: Rescaling, factor: float, model: nn.Module) -> None:
    """Multiply parameters and eps, in place.

    Raises:
        FoldError: a gain that is stored as offset + weight would be rounded.
    """
    for name, power in plan.powers.items():
        parameter = tensor_of(model, name)
        offset = plan.offsets.get(name, 0.0)
        gain = factor**power * (offset + parameter.double())
        parameter.copy_(gain - offset)
        rounding = (offset + parameter.double() - gain).abs() / gain.abs()
        if offset and float(rounding.nan_to_num().max()) > LARGEST_ROUNDING:
            raise FoldError(
                f"{name} is stored as a gain - {offset:g} in {parameter.dtype}, which would round "
                f"the gain by {float(rounding.max()):.0%}: save the source in float32 first"
            )
    values: dict[float, float] = {}
    for eps in plan.eps:
        values[eps.value] = eps.value * factor**eps.power
        setattr(model.get_submodule(eps.path), eps.attribute, values[eps.value])
    if hasattr(model, "config"):
        unknown = values.keys() - _set_config(model.config, values)
        if unknown:
            raise FoldError(
                f"the eps of {min(unknown):g} is in the code of {type(model).__name__}, not in its "
                "config: what loads it would not see another one"
            )


def _set_config(config: Any, values: dict[float, float]) -> set[float]:
    """Give the eps of a config of transformers, and of its parts, new values.

    Returns:
        The old values that were found.
    """
    found = set()
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            found |= _set_config(value, values)
        elif "eps" in name and value in values:
            setattr(config, name, values[value])
            found.add(value)
    return found


# -------------------------------------------------------------------------------------- the degrees


def plan_rescaling(graph: Graph) -> Rescaling:
    """Find out what a factor changes.

    Raises:
        FoldError: an operation does not allow it.
    """
    rescaling = Rescaling()
    relations = [one for node in graph.nodes for one in _relations(graph, node, rescaling)]
    if not rescaling.eps:
        raise FoldError(f"{type(graph.model).__name__}: no norm with an eps found")
    degrees = _solve(graph, relations)
    for node, name in graph.names.items():
        power = degrees.get(node, Fraction(0))
        if power.denominator != 1:
            raise FoldError(f"{name} would be multiplied by the factor to the power {power}")
        if power:
            rescaling.powers[name] = int(power)
    rescaling.offsets = {
        name: offset for name, offset in rescaling.offsets.items() if name in rescaling.powers
    }
    by_value = defaultdict(set)
    for eps in rescaling.eps:
        by_value[eps.value].add(eps.power)
    if any(len(powers) > 1 for powers in by_value.values()):
        raise FoldError("one eps is added to a variance here and to a deviation there")
    return rescaling


def _solve(graph: Graph, relations: list[Relation]) -> dict[Node, Fraction]:
    """Find degrees that fulfil all relations.

    Where they leave a choice, results of operations get 0 in the order of the graph.
    """
    degrees: dict[Node, Fraction] = {}
    of_node = defaultdict(list)
    for relation in relations:
        for node in relation.coefficients:
            of_node[node].append(relation)

    def propagate(todo: list[Relation]) -> None:
        while todo:
            relation = todo.pop()
            unknown = [node for node in relation.coefficients if node not in degrees]
            if len(unknown) > 1:
                continue
            rest = relation.total - sum(
                coefficient * degrees[node]
                for node, coefficient in relation.coefficients.items()
                if node in degrees
            )
            if unknown:
                (node,) = unknown
                degrees[node] = rest / relation.coefficients[node]
                todo += of_node[node]
            elif rest:
                raise FoldError(
                    f"{type(graph.model).__name__}: the residual stream cannot be scaled: "
                    f"{describe(relation.node)} would not pass the factor on"
                )

    propagate(list(relations))
    operations = [node for node in graph.nodes if node.op == "call_function"]
    for node in (*operations, *graph.names):
        if node in of_node and node not in degrees:
            degrees[node] = Fraction(0)
            propagate(list(of_node[node]))
    return degrees


def _has_floats(node: Any) -> bool:
    """Tell whether a node gives floats: a tensor, or several."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in values)


def _relations(graph: Graph, node: Node, plan: Rescaling) -> Iterator[Relation]:
    """Yield how an operation relates the degrees of its tensors of floats; note eps and offsets."""

    def sums(*terms: tuple[Node, int | Fraction], total: int = 0) -> Relation:
        coefficients: dict[Node, Fraction] = defaultdict(Fraction)
        for term, coefficient in terms:
            coefficients[term] += Fraction(coefficient)
        used = {term: number for term, number in coefficients.items() if number}
        return Relation(node, used, Fraction(total))

    def same(x: Node) -> Relation:
        return sums((node, 1), (x, -1))

    floats = [x for x in node.all_input_nodes if _has_floats(x)]
    name = str(node.target)
    if node.op == "output":
        yield from (sums((x, 1)) for x in floats)
        return
    if not _has_floats(node):
        # Such as comparisons: which of two numbers is larger does not change with their size.
        yield from (sums((x, 1)) for x in floats)
        return
    if node.op == "placeholder":
        if not isinstance(graph.values.get(graph.names.get(node, "")), nn.Parameter):
            yield sums((node, 1))
        return
    if made_by(node) is not node:
        yield from _of_piece(node, sums)
        return
    if name.startswith(NORMS):
        yield from _of_norm(graph, node, plan, sums)
        return
    if name.startswith(("aten.add.", "aten.sub.")):
        numbers = [x for x in node.args if isinstance(x, int | float)]
        if not numbers:
            yield from map(same, floats)
            return
        (x,) = floats
        power = _power_of_eps(node, numbers[0])
        if power:
            plan.eps.append(_eps(graph, node, float(numbers[0]), power))
            yield sums((x, 1), total=power)
            yield same(x)
            return
        parameter = _parameter_behind(graph, x)
        if parameter is not None and name.startswith("aten.add.") and not node.kwargs:
            plan.offsets[parameter] = float(numbers[0])
            yield same(x)
            return
    elif name.startswith(LIKE_ANOTHER):
        yield same(node.args[0])
        return
    elif name.startswith(ZEROS):
        return
    elif name.startswith(READ_NO_NUMBERS):
        yield sums((node, 1))
        return
    elif name.startswith(HOMOGENEOUS):
        yield from map(same, floats)
        return
    elif name.startswith(FILLS):
        numbers = [x for x in (*node.args[1:], *node.kwargs.values()) if isinstance(x, float | int)]
        if all(number == 0 or math.isinf(number) for number in numbers):
            yield from map(same, floats)
            return
    elif name.startswith("aten.pow.Tensor_Scalar"):
        yield sums((node, 1), (floats[0], -Fraction(node.args[1])))
        return
    elif name.startswith(tuple(POWERS)):
        power = next(number for start, number in POWERS.items() if name.startswith(start))
        yield sums((node, 1), (floats[0], -power))
        return
    elif name.startswith("aten.div.") and "rounding_mode" not in node.kwargs:
        signs = [(x, sign) for x, sign in zip(node.args, (-1, 1), strict=True) if x in floats]
        yield sums((node, 1), *signs)
        return
    elif name.startswith("aten.scaled_dot_product_attention."):
        query, key, value = node.args[:3]
        mask = argument(node, 3, None, "attn_mask")
        yield sums((query, 1), (key, 1))
        yield same(value)
        if _has_floats(mask):
            yield sums((mask, 1))
        return
    elif name.startswith(PRODUCTS):
        factors = node.args[1] if "einsum" in name else node.args
        yield sums((node, 1), *((x, -1) for x in factors if _has_floats(x)))
        return
    elif name.startswith(tuple(PRODUCTS_WITH_BIAS)):
        starts = PRODUCTS_WITH_BIAS.items()
        first, second, added = next(at for start, at in starts if name.startswith(start))
        yield sums((node, 1), (node.args[first], -1), (node.args[second], -1))
        bias = argument(node, added)
        if _has_floats(bias):
            yield same(bias)
        return
    # What is not known takes and gives numbers of the size that they have.
    yield sums((node, 1))
    yield from (sums((x, 1)) for x in floats)


def _of_piece(node: Node, sums: Any) -> Iterator[Relation]:
    """Yield the degree of one result of an operation with several."""
    whole = made_by(node)
    is_norm = str(whole.target).startswith("aten.native_layer_norm.")
    if is_norm and node.args[1]:  # the mean, or 1 / deviation
        yield sums((node, 1), total=1 if node.args[1] == 1 else -1)
        return
    yield sums((node, 1), (whole, -1))


def _of_norm(graph: Graph, node: Node, plan: Rescaling, sums: Any) -> Iterator[Relation]:
    """Yield the degrees of a norm that is one operation: 1 of its input, that of gain and bias."""
    is_rms = str(node.target).startswith("aten.rms_norm.")
    # aten.rms_norm(x, shape, gain, eps), aten.layer_norm(x, shape, gain, bias, eps)
    eps = argument(node, 3) if is_rms else argument(node, 4, 1e-5)
    if not eps:
        raise FoldError(f"{describe(node)} has no eps of its own that could be scaled")
    plan.eps.append(_eps(graph, node, eps, 2))
    yield sums((node.args[0], 1), total=1)
    gain = argument(node, 2)
    bias = None if is_rms else argument(node, 3)
    for x in (gain, bias):
        if _has_floats(x):
            yield sums((node, 1), (x, -1))
    if not _has_floats(gain):
        yield sums((node, 1))


def _power_of_eps(node: Node, number: float) -> int:
    """Return 2 if an addition adds eps to a variance, 1 if to a deviation, 0 if it is no eps."""
    if not 0 < number < LARGEST_EPS or not node.users:
        return 0
    kinds = set()
    for user in node.users:
        name = str(user.target)
        is_half = name.startswith("aten.pow.Tensor_Scalar") and abs(user.args[1]) == 0.5
        if name.startswith(("aten.rsqrt.", "aten.sqrt.")) or is_half:
            kinds.add(2)
        elif name.startswith(("aten.reciprocal.", "aten.div.")) and user.args[-1] is node:
            kinds.add(1)
        else:
            return 0
    return kinds.pop() if len(kinds) == 1 else 0


def _eps(graph: Graph, node: Node, value: float, power: int) -> Eps:
    """Find the attribute that holds the eps of a norm. Raises FoldError if the code does."""
    path = module_path(node)
    found = [
        name
        for name, held in vars(graph.model.get_submodule(path)).items()
        if isinstance(held, float) and held == value and "eps" in name
    ]
    if len(found) != 1:
        raise FoldError(
            f"{describe(node)}: its eps of {value:g} is no attribute of its module, so it cannot "
            "be scaled"
        )
    return Eps(path, found[0], value, power)


def _parameter_behind(graph: Graph, x: Node) -> str | None:
    """Return the name of the parameter that x is, but for casts."""
    while is_cast(x) and is_tensor(x.args[0]):
        x = x.args[0]
    value = graph.values.get(graph.names.get(x, ""))
    return graph.names[x] if isinstance(value, nn.Parameter) else None
