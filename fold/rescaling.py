"""Multiply the residual stream of a model by a power of two, and leave its function as it is.

    after, certificate = rescale(model, {"input_ids": ids}, 2.0**-6)

A stream that grows beyond 65504 is not finite in float16. A norm does not see the size of its
input, but for its eps:

    norm(s x, eps s^2) = norm(x, eps)

So all that is written into the stream is multiplied by s, eps of the norms by s^2 (by s where it is
added outside the root), and what reads the stream without a norm by 1 / s. Because s is a power of
two, nothing is rounded: in float32 the outputs are equal to the bit.

Every tensor of floats in the exported graph has a degree d: it is multiplied by s^d. What the
inputs of norms have is 1, what the model returns has 0, and every operation relates the degrees of
its tensors (RULES): a sum takes tensors of one degree, a product adds degrees, and an operation
that is not known takes and gives 0. Degrees of parameters follow. So a head that is the embedding
stays that: its degree is 1, and the gain of the final norm gets -1.

A model of transformers is loaded by its config. So only an eps that is a key of the config can be
scaled; a norm whose eps is in the code has an input of degree 0.
"""

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .certificate import OWN_ERRORS, Certificate, Inputs, changed, duplicate, first_line, run
from .graph import Graph
from .hub import takes_embeddings
from .lines import argument, describe, is_tensor, made_by, module_path
from .modules import FoldedNorm, tensor_of
from .rules import CASTS, MOVES, READ_NO_NUMBERS, is_cast
from .siblings import FoldError

LARGEST_EPS = 0.1
# Beyond this a gain that is stored as 1 + weight would be another one.
LARGEST_ROUNDING = 1e-3
FLOAT16 = torch.finfo(torch.float16)
EMBEDDED_USE = "embeddings given by hand (inputs_embeds): multiply them by the factor first"


# Names that lead to a key of a config, as ("text_config", "rms_norm_eps")
Key = tuple[str, ...]


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
        attribute: of the module, which holds the number; of a FoldedNorm that of its `swap`.
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
        keys: key of a config of transformers -> it is multiplied by s^power.
        reads: paths of the modules that take tensors of the stream alone.
        writes: likewise of those that return such.
    """

    powers: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    eps: list[Eps] = field(default_factory=list)
    keys: dict[Key, int] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)


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
        FoldError: an operation does not allow it, the factor is no power of two, small weights of
            float16 lose too many bits, or the model is not finite in its own type.
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
    written = certificate.written
    if not certificate.ok and written is not None and not math.isfinite(written.before):
        raise FoldError(
            f"{type(model).__name__} is not finite in {written.dtype} on these inputs, so nothing "
            "can be compared in that type: save the source in float32 first"
        )
    if not certificate.ok:
        return after, certificate
    _require_small_rounding(certificate, factor)
    notes = [
        "weights that are subnormal in float16, with fewer bits: "
        f"{subnormal_share(model):.1%} before, {subnormal_share(after):.1%} after"
    ]
    # The last of these is in the model's own type.
    own = [one for one in certificate.checks if (one.weights, one.inputs) == ("given", "given")][-1]
    if own.max_abs == 0:
        notes.append(f"equal to the bit in {own.dtype} with the given weights on the given inputs")
    uses = [*certificate.not_covered]
    if takes_embeddings(model):
        uses.append(EMBEDDED_USE)
    return after, replace(certificate, notes=notes, not_covered=uses)


def _require_small_rounding(certificate: Certificate, factor: float) -> None:
    """Raise FoldError if what is written is off by much more than the model before in its type.

    The certificate's verdict is about the algebra. In float16, small weights and what is computed
    of them lose bits; in other types they do not.
    """
    written = certificate.written
    if written is None:
        return
    eps = torch.finfo(getattr(torch, written.dtype)).eps
    bound = OWN_ERRORS * max(written.before, eps)
    if not written.after <= bound:
        raise FoldError(
            f"factor=2^{round(math.log2(factor))}: what is written would be off by a relative "
            f"{written.after:.1e} in {written.dtype}, the original is by {written.before:.1e}, and "
            f"{bound:.1e} is allowed: take a factor nearer to 1, or save the source in float32 "
            "first"
        )


def subnormal_share(model: nn.Module) -> float:
    """Return which part of the weights would be subnormal in float16, with fewer bits."""
    numbers = [p.detach().abs() for p in model.parameters() if p.is_floating_point()]
    subnormal = sum(int(((x > 0) & (x < FLOAT16.tiny)).sum()) for x in numbers)
    return subnormal / sum(x.numel() for x in numbers)


@torch.no_grad()
def automatic_factor(model: nn.Module, inputs: list[dict[str, Any]], plan: Rescaling) -> float:
    """Return the largest power of two that keeps the stream at most a quarter of float16's range.

    A warning says if numbers that no factor makes smaller are beyond that range.

    Args:
        model: a model of transformers; its stream is measured in float32.
        inputs: what it is run on.
        plan: says which modules read and write the stream.

    Raises:
        FoldError: the stream is as small as that already, or not finite in float32.
    """
    stream, others = _largest(duplicate(model).float(), inputs, plan)
    if not math.isfinite(stream.size):
        raise FoldError("factor=auto: the stream is not finite in float32 either")
    beyond = (
        f"{others.path} reads or returns {others.size:.3g}, which is beyond float16's range, and "
        "which no factor makes smaller"
    )
    if stream.size <= FLOAT16.max / 4:
        more = f". {beyond}" if others.size > FLOAT16.max else ""
        raise FoldError(
            f"factor=auto: the largest number of the stream is {stream.size:.3g} ({stream.path}), "
            "at most a quarter of float16's range already: give a factor to scale it "
            f"nevertheless{more}"
        )
    if others.size > FLOAT16.max:
        warnings.warn(beyond, stacklevel=2)
    return 2.0 ** math.floor(math.log2(FLOAT16.max / 4 / stream.size))


@dataclass
class Largest:
    """The largest magnitude that was seen, and the module that reads or returns it."""

    size: float = 0.0
    path: str = ""

    def see(self, path: str, values: Any) -> None:
        """Look at all tensors of floats among some values."""
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                size = float(x.abs().max())
                if size > self.size:
                    self.size, self.path = size, path


def _largest(
    model: nn.Module, inputs: list[dict[str, Any]], plan: Rescaling
) -> tuple[Largest, Largest]:
    """Run a model, and return the largest number of its stream, and of all else.

    Modules without parts are looked at: what they read and what they return.
    """
    stream, others = Largest(), Largest()

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        (stream if path in plan.reads else others).see(path, (args, kwargs))
        (stream if path in plan.writes else others).see(path, output)

    for path, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(partial(note, path), with_kwargs=True)
    for one in inputs:
        run(model, one, widen=False)
    return stream, others


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
    for eps in plan.eps:
        _set_eps(model, eps, factor)
    for names, power in plan.keys.items():
        part = _part(model.config, names)
        setattr(part, names[-1], getattr(part, names[-1]) * factor**power)


def _set_eps(model: nn.Module, eps: Eps, factor: float) -> None:
    """Scale the eps of one norm, in place."""
    module = model.get_submodule(eps.path)
    value = eps.value * factor**eps.power
    if not isinstance(module, FoldedNorm):
        setattr(module, eps.attribute, value)
        return
    module.swap = replace(module.swap, eps=value)
    folded = getattr(getattr(model, "config", None), "folded", None)
    if folded is not None:  # what modeling_folded.py reads
        folded["norms"][eps.path] = value


# ----------------------------------------------------------------------------------- eps in configs


def eps_of(module: nn.Module) -> dict[str, float]:
    """Return the numbers that a module itself holds as eps: attribute -> number."""
    if isinstance(module, FoldedNorm):
        return {"eps": module.swap.eps}
    return _named_eps(module)


def _named_eps(owner: Any) -> dict[str, float]:
    """Return the attributes of anything that are numbers called eps."""
    return {
        name: value
        for name, value in vars(owner).items()
        if isinstance(value, float) and "eps" in name
    }


def keys_of_eps(model: nn.Module) -> dict[Key, set[str]]:
    """Find out which modules take their eps from which key of the config.

    That is tried out: the class is built from a config with another number, without weights.

    Args:
        model: one with a config, from which its class builds it.

    Returns:
        key -> paths of the modules; those that hold another eps than the config says are left out.

    Raises:
        FoldError: the class cannot be built from the config alone.
    """

    def built(key: Key | None) -> dict[str, list[float]]:
        config = copy.deepcopy(model.config)
        if key:
            part = _part(config, key)
            setattr(part, key[-1], 2 * getattr(part, key[-1]))
        with torch.device("meta"):
            new = type(model)(config)
        return {path: [*eps_of(module).values()] for path, module in new.named_modules()}

    try:
        before = built(None)
        others = {key: built(key) for key in _keys(model.config)}
    except Exception as error:  # a constructor may raise anything
        raise FoldError(
            f"{type(model).__name__} cannot be built from its config ({first_line(error)}), which "
            "would say where the eps of its norms are"
        ) from error
    held = {path: [*eps_of(module).values()] for path, module in model.named_modules()}
    same = [path for path in before if before[path] == held.get(path)]
    return {
        key: {path for path in same if other.get(path) != before[path]}
        for key, other in others.items()
    }


def _keys(config: Any) -> Iterator[Key]:
    """Yield the keys of a config of transformers, and of its parts, that are called eps."""
    for name in _named_eps(config):
        yield (name,)
    for name, part in vars(config).items():
        if hasattr(part, "to_dict"):
            yield from ((name, *key) for key in _keys(part))


def _part(config: Any, key: Key) -> Any:
    """Return the config, or the part of it, that holds a key."""
    for name in key[:-1]:
        config = getattr(config, name)
    return config


# -------------------------------------------------------------------------------------- the degrees


def plan_rescaling(graph: Graph) -> Rescaling:
    """Find out what a factor changes.

    Raises:
        FoldError: an operation does not allow it.
    """
    rules = Rules(graph)
    relations = [one for node in graph.nodes for one in rules.of(node)]
    if not rules.eps:
        why = rules.kept[0][1] if rules.kept else "no norm with an eps found"
        raise FoldError(f"{type(graph.model).__name__}: {why}")
    degrees = _solve(graph, relations, rules.kept)
    rescaling = Rescaling(eps=rules.eps, keys=_keys_of(rules))
    rescaling.reads, rescaling.writes = _readers_and_writers(graph, degrees)
    for node, name in graph.names.items():
        power = degrees.get(node, Fraction(0))
        if power.denominator != 1:
            raise FoldError(f"{name} would be multiplied by the factor to the power {power}")
        if power:
            rescaling.powers[name] = int(power)
    rescaling.offsets = {
        name: offset for name, offset in rules.offsets.items() if name in rescaling.powers
    }
    return rescaling


def _readers_and_writers(graph: Graph, degrees: dict[Node, Fraction]) -> tuple[set[str], set[str]]:
    """Return the paths of modules that take, and of those that return, scaled tensors alone."""
    taken, returned = defaultdict(set), defaultdict(set)
    for node in graph.nodes:
        if node.op != "call_function" or not _has_floats(node):
            continue
        is_scaled = degrees.get(node, 0) > 0
        made_in = node.meta.get("nn_module_stack", {})
        for user in node.users:
            used_in = user.meta.get("nn_module_stack", {})
            for key in used_in.keys() - made_in.keys():
                taken[used_in[key][0]].add(is_scaled)
            for key in made_in.keys() - used_in.keys():
                returned[made_in[key][0]].add(is_scaled)
    reads, writes = (
        {path for path, found in each.items() if found == {True}} for each in (taken, returned)
    )
    return reads, writes


def _keys_of(rules: "Rules") -> dict[Key, int]:
    """Return the keys of the config that hold the eps that are scaled -> by which power.

    Raises:
        FoldError: a norm that is not scaled would see another eps.
    """
    powers = {eps.path: eps.power for eps in rules.eps}
    found = {}
    for key, paths in (rules.keys or {}).items():
        scaled = {powers[path] for path in paths & powers.keys()}
        if not scaled:
            continue
        if len(scaled) > 1:
            raise FoldError("one eps is added to a variance here and to a deviation there")
        for path in sorted(paths - powers.keys()):
            if not any(rules.graph.model.get_submodule(path).children()):
                raise FoldError(
                    f"{path} takes its eps from {'.'.join(key)} of the config, as the norms of the "
                    "stream do, but is no norm that these inputs run: give inputs that run it "
                    "(--inputs=FILE)"
                )
        (found[key],) = scaled
    return found


def _solve(
    graph: Graph, relations: list[Relation], kept: list[tuple[Relation, str]]
) -> dict[Node, Fraction]:
    """Find degrees that fulfil all relations.

    Args:
        kept: relations of norms whose eps stays -> why it does.

    Raises:
        FoldError: there are none. If they are there without a norm whose eps stays, it says so.
    """
    try:
        return _degrees(graph, [*relations, *(relation for relation, _ in kept)])
    except FoldError:
        _degrees(graph, relations)
        for relation, why in kept:
            try:
                _degrees(graph, [*relations, relation])
            except FoldError:
                raise FoldError(f"{type(graph.model).__name__}: {why}") from None
        raise


def _degrees(graph: Graph, relations: list[Relation]) -> dict[Node, Fraction]:
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


def related(node: Node, *terms: tuple[Node, int | Fraction], total: int = 0) -> Relation:
    """Return the relation of an operation: the sum of coefficient * degree is `total`."""
    coefficients: dict[Node, Fraction] = defaultdict(Fraction)
    for term, coefficient in terms:
        coefficients[term] += Fraction(coefficient)
    used = {term: number for term, number in coefficients.items() if number}
    return Relation(node, used, Fraction(total))


def same(node: Node, x: Node) -> Relation:
    """Return the relation of an operation that gives as many times as much as its input."""
    return related(node, (node, 1), (x, -1))


def stays(node: Node, x: Node) -> Relation:
    """Return the relation of an operation that needs x as large as it is."""
    return related(node, (x, 1))


class Rules:
    """How the operations of a graph relate the degrees of their tensors of floats.

    Attributes:
        keys: of the config, as `keys_of_eps` says; None for a model without a config.
        eps: found in norms, which can be scaled.
        kept: of norms whose eps stays: the relation that their input stays, too -> why.
        offsets: parameter -> number that is added to it.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.keys = keys_of_eps(graph.model) if hasattr(graph.model, "config") else None
        self.eps: list[Eps] = []
        self.kept: list[tuple[Relation, str]] = []
        self.offsets: dict[str, float] = {}

    def of(self, node: Node) -> list[Relation]:
        """Return the relations of a node of the graph."""
        if node.op == "placeholder":
            value = self.graph.values.get(self.graph.names.get(node, ""))
            is_free = isinstance(value, nn.Parameter) or _has_no_size(node)
            return [] if is_free or not _has_floats(node) else [stays(node, node)]
        if node.op == "output":
            return [stays(node, x) for x in _floats(node)]
        if made_by(node) is not node:
            return [*_piece(self, node)] if _has_floats(node) else []
        name = str(node.target)
        table = RULES if _has_floats(node) else RULES_WITHOUT_FLOATS
        rule = next((rule for starts, rule in table if name.startswith(starts)), _unknown)
        return [*rule(self, node)]

    def of_norm(
        self, node: Node, x: Node, degree: int, eps: float | None, power: int
    ) -> Iterator[Relation]:
        """Yield the degree that a norm asks of x; note its eps.

        Args:
            x: what the norm takes, or its variance or deviation.
            degree: of x, if that of what the norm takes is 1.
            power: of the factor, by which eps is multiplied then.
        """
        path = module_path(node)
        module = self.graph.model.get_submodule(path)
        names = [name for name, value in eps_of(module).items() if value == eps]
        count = sum(path in paths for paths in (self.keys or {}).values())
        if not eps:
            why = f"{describe(node)} has no eps of its own that could be scaled"
        elif len(names) != 1:
            why = (
                f"{describe(node)}: its eps of {eps:g} is no attribute of its module, so it cannot "
                "be scaled"
            )
        elif self.keys is not None and count != 1:
            name = type(self.graph.model).__name__
            why = (
                f"the eps of {eps:g} of {path} is in the code of {name}, not in its config, so "
                "that what loads it would not see another one: bfloat16 has the range of float32"
            )
        else:
            self.eps.append(Eps(path, names[0], eps, power))
            yield related(node, (x, 1), total=degree)
            return
        self.kept.append((stays(node, x), why))

    def parameter_behind(self, x: Node) -> str | None:
        """Return the name of the parameter that x is, but for casts."""
        while is_cast(x) and is_tensor(x.args[0]):
            x = x.args[0]
        value = self.graph.values.get(self.graph.names.get(x, ""))
        return self.graph.names[x] if isinstance(value, nn.Parameter) else None


def _has_floats(node: Any) -> bool:
    """Tell whether a node gives floats: a tensor, or several."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in values)


def _floats(node: Node) -> list[Node]:
    """Return the inputs of an operation that are floats with a size."""
    return [x for x in node.all_input_nodes if _has_floats(x) and not _has_no_size(x)]


def _has_no_size(x: Any) -> bool:
    """Tell whether all numbers of a tensor are 0 or infinite, which no factor changes."""
    while isinstance(x, Node) and str(x.target).startswith((*CASTS, *MOVES, *CONSTANTS)):
        x = x.args[0]
    if not isinstance(x, Node):
        return False
    if "constant" in x.meta:
        return _is_without_size(float(x.meta["constant"]))
    return str(x.target).startswith(ZEROS)


def _is_without_size(number: float) -> bool:
    return number == 0 or math.isinf(number)


# ---------------------------------------------------------------------------------- the operations


def _unknown(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of what is not known: it takes and gives numbers of the size that they have."""
    if _has_floats(node):
        yield stays(node, node)
    yield from (stays(node, x) for x in _floats(node))


def _free(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of what neither sees nor has a size."""
    yield from ()


def _new(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of new numbers, in the shape and the type of a tensor."""
    yield stays(node, node)


def _homogeneous(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of what gives s^d times as much where all its tensors are s^d times as large."""
    yield from (same(node, x) for x in _floats(node))
    if not any(map(_has_floats, node.all_input_nodes)):  # a mask, or integers
        yield stays(node, node)


def _like_another(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of what reads the type or the shape alone of its second tensor."""
    if _has_floats(node.args[0]):
        yield same(node, node.args[0])
    else:
        yield stays(node, node)


def _fill(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of what puts a number at some places."""
    numbers = [x for x in (*node.args[1:], *node.kwargs.values()) if isinstance(x, float | int)]
    if all(map(_is_without_size, numbers)):
        yield from (same(node, x) for x in _floats(node))
    else:
        yield from _unknown(rules, node)


def _comparison(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of which of two numbers is larger: it stays if both are multiplied, or if one is 0."""
    floats = _floats(node)
    others = [x for x in node.args if x not in floats and not _has_no_size(x)]
    if all(isinstance(x, float | int) and _is_without_size(x) for x in others):
        yield from (related(node, (floats[0], 1), (x, -1)) for x in floats[1:])
    else:
        yield from _unknown(rules, node)


def _sum(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of sums: of tensors, of a variance and eps, of a parameter and an offset."""
    floats = _floats(node)
    others = [x for x in node.args if x not in floats and not _has_no_size(x)]
    if not others:
        yield from (same(node, x) for x in floats)
        return
    number = others[0]
    is_offset = isinstance(number, float | int) and str(node.target).startswith("aten.add.")
    if not is_offset or len(floats) != 1:
        yield from _unknown(rules, node)
        return
    (x,) = floats
    power = _power_of_eps(node, number)
    parameter = rules.parameter_behind(x)
    if power:
        yield from rules.of_norm(node, x, power, float(number), power)
        yield same(node, x)
    elif parameter is not None and not node.kwargs:
        rules.offsets[parameter] = float(number)
        yield same(node, x)
    else:
        yield from _unknown(rules, node)


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


def _power(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of powers, and what is a power of the size of its input."""
    name = str(node.target)
    power = next((power for start, power in POWERS.items() if name.startswith(start)), None)
    yield related(node, (node, 1), (node.args[0], -(power or Fraction(node.args[1]))))


def _quotient(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of quotients that are not rounded to integers."""
    if node.kwargs.get("rounding_mode") is not None:
        yield from _unknown(rules, node)
        return
    signs = [(x, sign) for x, sign in zip(node.args, (-1, 1), strict=True) if _has_floats(x)]
    yield related(node, (node, 1), *signs)


def _product(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of products of two tensors, or of one and a number."""
    yield related(node, (node, 1), *((x, -1) for x in node.args if _has_floats(x)))


def _einsum(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of products that name their axes."""
    yield related(node, (node, 1), *((x, -1) for x in node.args[1] if _has_floats(x)))


def _linear(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of x W + b."""
    yield related(node, (node, 1), (node.args[0], -1), (node.args[1], -1))
    bias = argument(node, 2)
    if _has_floats(bias):
        yield same(node, bias)


def _sum_and_product(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of b + x W."""
    yield related(node, (node, 1), (node.args[1], -1), (node.args[2], -1))
    yield same(node, node.args[0])


def _attention(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of softmax(q k^T + mask) v."""
    query, key, value = node.args[:3]
    mask = argument(node, 3, None, "attn_mask")
    yield related(node, (query, 1), (key, 1))
    yield same(node, value)
    if _has_floats(mask):
        yield stays(node, mask)


def _norm(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of a norm that is one operation: its result is as large as gain and bias."""
    is_rms = str(node.target).startswith("aten.rms_norm.")
    # aten.rms_norm(x, shape, gain, eps), aten.layer_norm(x, shape, gain, bias, eps)
    eps = argument(node, 3) if is_rms else argument(node, 4, 1e-5)
    yield from rules.of_norm(node, node.args[0], 1, eps, 2)
    gain = argument(node, 2)
    bias = None if is_rms else argument(node, 3)
    for x in (gain, bias):
        if _has_floats(x):
            yield same(node, x)
    if not _has_floats(gain):
        yield stays(node, node)


def _piece(rules: Rules, node: Node) -> Iterator[Relation]:
    """Of one result of an operation with several."""
    whole = made_by(node)
    is_norm = str(whole.target).startswith("aten.native_layer_norm.")
    if is_norm and node.args[1]:  # the mean, or 1 / deviation
        sign = -1 if node.args[1] == 1 else 1
        yield related(node, (node, 1), (whole.args[0], sign))
        return
    yield same(node, whole)


CONSTANTS = ("aten.detach.", "aten.lift_fresh_copy.")
HOMOGENEOUS = (
    *CASTS,
    *MOVES,
    *CONSTANTS,
    "aten.neg.",
    "aten.relu.",
    "aten.abs.",
    "aten.embedding.",
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
FILLS = ("aten.where.", "aten.masked_fill.", "aten.pad.", "aten.constant_pad_nd.", "aten.fill.")
LIKE_ANOTHER = ("aten.type_as.", "aten.view_as.", "aten.expand_as.")
ZEROS = ("aten.zeros_like.", "aten.new_zeros.", "aten.zeros.")
NORMS = ("aten.layer_norm.", "aten.native_layer_norm.", "aten.rms_norm.", "aten.group_norm.")
PRODUCTS = ("aten.mm.", "aten.matmul.", "aten.bmm.", "aten.mul.")
POWERS = {
    "aten.rsqrt.": Fraction(-1, 2),
    "aten.sqrt.": Fraction(1, 2),
    "aten.reciprocal.": Fraction(-1),
    "aten.square.": Fraction(2),
    "aten.var.": Fraction(2),
    "aten.std.": Fraction(1),
}
Rule = Callable[[Rules, Node], Iterator[Relation]]
# Operations that give floats -> how the degrees of their tensors are related
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (NORMS, _norm),
    (("aten.add.", "aten.sub."), _sum),
    (LIKE_ANOTHER, _like_another),
    (ZEROS, _free),
    (READ_NO_NUMBERS, _new),
    (HOMOGENEOUS, _homogeneous),
    (FILLS, _fill),
    (("aten.pow.Tensor_Scalar", *POWERS), _power),
    (("aten.div.",), _quotient),
    (("aten.scaled_dot_product_attention.",), _attention),
    (PRODUCTS, _product),
    (("aten.einsum.",), _einsum),
    (("aten.linear.", "aten.conv"), _linear),
    (("aten.addmm.", "aten.baddbmm."), _sum_and_product),
)
# Likewise of operations that give integers or a mask
RULES_WITHOUT_FLOATS: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (READ_NO_NUMBERS, _free),
    (("aten.isnan.", "aten.isinf.", "aten.argmax.", "aten.argmin."), _free),
    (("aten.eq.", "aten.ne.", "aten.lt.", "aten.le.", "aten.gt.", "aten.ge."), _comparison),
)
