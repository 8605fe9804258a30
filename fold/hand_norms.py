"""Find norms in the exported graph of a model that are written out in a forward, in no module.

    x * rsqrt(mean(x^2) + eps)

From each operation that may be a statistic (a mean, a sum, a length, a maximum) the graph is
followed back to the tensor that it is of, and on to the product or quotient that applies it. What
lies between is tried out as a function of that tensor (formulas.py). Norms that are one operation
of torch, called as a function, are found in the same way.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map

from .certificate import SEED
from .formulas import Function
from .graph import Graph
from .lines import PRODUCTS, centring, compute, is_float, is_tensor, module_path, shape
from .rules import CASTS, MOVES

STATISTICS = (
    "aten.mean.",
    "aten.sum.",
    "aten.var.",
    "aten.var_mean.",
    "aten.std.",
    "aten.std_mean.",
    "aten.linalg_vector_norm.",
    "aten.linalg_matrix_norm.",
    "aten.norm.",
    "aten.amax.",
    "aten.max.",
    "aten.median.",
)
WHOLE = (
    "aten.layer_norm.",
    "aten.native_layer_norm.",
    "aten.rms_norm.",
    "aten._fused_rms_norm.",
    "aten.group_norm.",
    "aten.native_group_norm.",
    "aten.instance_norm.",
    "aten.batch_norm.",
    "aten._native_batch_norm_legit",
)
# What stands between a tensor and the statistic of it
STEPS = (
    *CASTS,
    *MOVES,
    "aten.pow.Tensor_Scalar",
    "aten.square.",
    "aten.abs.",
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.mul.Tensor",
    "aten.neg.",
)
LONGEST = 12  # operations from a statistic to where it is applied


@dataclass(frozen=True)
class HandNorm:
    """A piece of the graph that normalises: from the tensor x to y.

    Attributes:
        path: of the innermost module that it stands in; "" for the model.
        names: the parameters that it reads.
    """

    path: str
    x: Node
    y: Node
    names: dict[Node, str]

    def function(self, values: dict[str, Tensor]) -> Function:
        """Return it as a function in float64, with these values of its parameters by name."""
        known = {node: values[name].detach().double() for node, name in self.names.items()}
        return lambda x: compute(self.y, {**known, self.x: x})

    @property
    def given(self) -> Node:
        """Return the tensor that x is a cast of, if it is one."""
        node = self.x
        while str(node.target).startswith(CASTS) and shape(node.args[0]) == shape(node):
            node = node.args[0]
        return node

    def function_in_its_type(self, values: dict[str, Tensor]) -> Function:
        """Return it as a function of what is given, in the types of the graph, casts and all."""
        known = {node: values[name].detach() for node, name in self.names.items()}
        return lambda x: as_written(self.y, {**known, self.given: x})


def as_written(node: Node, known: dict[Node, Any]) -> Any:
    """Compute a tensor of the graph from known ones, which become more."""
    if node not in known:

        def value(x: Any) -> Any:
            return as_written(x, known) if isinstance(x, Node) else x

        args, kwargs = tree_map(value, (node.args, node.kwargs))
        known[node] = node.target(*args, **kwargs)
    return known[node]


@torch.no_grad()
def values_in_run(graph: Graph, wanted: Collection[Node]) -> dict[Node, Any]:
    """Run a graph on the model's example, and return the values of some of its nodes.

    Returns none if an operation does not run outside the exporter.
    """
    needed = set(wanted)
    last_reader: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        if node in needed:
            for read in node.all_input_nodes:
                needed.add(read)
                last_reader.setdefault(read, node)
    values = dict(graph.given)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            for node in graph.nodes:
                if node not in needed or node.op == "placeholder":
                    continue
                if node.op == "get_attr":
                    values[node] = operator.attrgetter(node.target)(node.graph.owning_module)
                else:
                    values[node] = as_written(node, values)
                for read in node.all_input_nodes:
                    if last_reader[read] is node and read not in wanted:
                        del values[read]  # a large model has many
    except Exception:  # what the operations may raise
        return {}
    return {node: values[node] for node in wanted}


def hand_norms(graph: Graph, taken: Collection[str]) -> Iterator[HandNorm]:
    """Yield the pieces of a graph that may be norms, in order.

    Args:
        taken: paths of modules that are norms: what is in them is theirs.
    """
    found: set[Node] = set()

    def is_taken(node: Node) -> bool:
        stack = node.meta.get("nn_module_stack", {}).values()
        return any(path in taken for path, _ in stack)

    for node in graph.nodes:
        for piece in () if is_taken(node) else _pieces(graph, node):
            if piece.y not in found and not is_taken(piece.y):
                found.add(piece.y)
                yield piece
                break


def _pieces(graph: Graph, node: Node) -> Iterator[HandNorm]:
    """Yield what one operation may be the statistic of, the likeliest first."""
    name = str(node.target)
    if name.startswith(WHOLE):
        y = node
        if not is_tensor(node):  # several tensors: the first is the norm's
            firsts = [user for user in node.users if _is_first(user)]
            if not firsts:
                return
            (y,) = firsts[:1]
        yield from _piece(graph, node.args[0], y)
    elif name.startswith(STATISTICS):
        for x in _roots(graph, node.args[0]):
            for y in _applied(node, x):
                yield from _piece(graph, x, y)


def _is_first(node: Node) -> bool:
    return node.target is operator.getitem and node.args[1] == 0


def _piece(graph: Graph, x: Node, y: Node) -> Iterator[HandNorm]:
    """Yield the piece from x to y, and what parameters alone are done to y, if it can be run."""
    own = _parameters(graph, x, y)
    if own is None:
        return
    while len(y.users) == 1:
        (user,) = y.users
        name = str(user.target)
        if not name.startswith((*PRODUCTS, "aten.add.Tensor", *CASTS)) or shape(user) != shape(x):
            break
        # type_as may read x again; a product with it is no gain.
        others = [a for a in user.all_input_nodes if a is not y and not name.startswith(CASTS)]
        more = _parameters(graph, x, user)
        if more is None or any(_parameters(graph, None, a) is None for a in others):
            break
        y, own = user, more
    yield HandNorm(module_path(y), x, y, own)


def _roots(graph: Graph, node: Node) -> list[Node]:
    """Return the tensors that a statistic of `node` may be of, the nearest first.

    Not one that is centred: what is centred comes next. Parameters and constants are weights in the
    statistic.
    """
    found = [node]
    while str(node.target).startswith(STEPS):
        inputs = {
            a for a in node.all_input_nodes if is_float(a) and _parameters(graph, None, a) is None
        }
        if centring(node) is not None:
            found.remove(node)
            inputs = {node.args[0]}
        if len(inputs) != 1:
            break
        (node,) = inputs
        found.append(node)
    return found


def _applied(statistic: Node, x: Node) -> list[Node]:
    """Return the products of the shape of x that a statistic comes to first."""
    reached = {statistic}
    found = []
    edge = [statistic]
    for _ in range(LONGEST):
        edge = [user for node in edge for user in node.users if user not in reached]
        reached.update(edge)
        onwards = []
        for user in edge:
            if not is_tensor(user):
                onwards.append(user)
            elif str(user.target).startswith(PRODUCTS) and shape(user) == shape(x):
                found.append(user)
            else:
                onwards.append(user)
        edge = onwards
    return found


def _parameters(graph: Graph, x: Node | None, y: Node) -> dict[Node, str] | None:
    """Return the parameters that y is computed from, with x given; None if it reads more."""
    names = {}
    todo = [y]
    seen = set()
    while todo:
        node = todo.pop()
        if node is x or node in seen:
            continue
        seen.add(node)
        if len(seen) > 10 * LONGEST:
            return None
        if node.op == "placeholder":
            if node not in graph.names:
                return None
            names[node] = graph.names[node]
        elif node.op != "call_function":
            return None
        todo += node.all_input_nodes
    return names
