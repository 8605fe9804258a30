"""Composite operators of an exported graph, replaced by the operators that they are made of.

The rules know some hundred operators. torch.export leaves composite ones in a graph, such as
reshape, flatten, chunk and to; `ExportedProgram.run_decompositions({})` replaces those that may
return a view, and keeps all others, such as linear. It does so by tracing the program again, which
is the slower half of an export. Where nothing in the graph writes, that is not needed: `decompose`
replaces each composite operator by itself, ten times faster, and the nodes are the same.
"""

import operator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def writes(graph: fx.Graph) -> bool:
    """Tell whether an operator of the graph writes into a tensor, as aten.add_ does."""
    return any(
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for node in graph.nodes
    )


def is_simple(target: Any) -> bool:
    """Tell whether a call can be taken by itself.

    Blocks, as those of autocast, must be taken apart. And some operators may write, or write in
    their parts, though their schema does not say so: BatchNorm, dropout of channels.
    """
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    may_write = torch.Tag.maybe_aliasing_or_mutating in target.tags
    may_write = may_write or target is torch.ops.aten.native_batch_norm.default
    return not may_write or target is torch.ops.aten.dropout.default


@cache
def is_replaced(target: OpOverload) -> bool:
    """Tell whether an operator is composite, and may return a view of what it takes.

    Dropout may as well, in evaluation, though its schema does not say so.
    """
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), COMPOSITE)
    return is_composite and (target.is_view or target is torch.ops.aten.dropout.default)


def parts_of(node: Node) -> fx.Graph:
    """Return the operators that a composite one is made of.

    The placeholders stand for the nodes that it takes, in the order of `all_input_nodes`.
    """
    inputs = node.all_input_nodes

    def composed(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        return node.target.decompose(*args, **kwargs)

    return make_fx(composed)(*[x.meta["val"] for x in inputs]).graph


def replace(node: Node) -> None:
    """Replace a composite operator in its graph; what replaces it lies in the same module."""
    given = iter(node.all_input_nodes)
    outer: dict[Node, Node] = {}  # node of the parts -> node here
    with node.graph.inserting_before(node):
        for part in parts_of(node).nodes:
            if part.op == "placeholder":
                outer[part] = next(given)
            elif part.op == "output":
                found = map_arg(part.args[0], outer.__getitem__)
            else:
                outer[part] = node.graph.node_copy(part, outer.__getitem__)
                outer[part].meta = {**node.meta, "val": part.meta.get("val")}
    if isinstance(found, Node):
        node.replace_all_uses_with(found)
    else:  # a list of tensors, of which each is taken by getitem
        for user in list(node.users):
            user.replace_all_uses_with(found[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program without composite operators that may return a view.

    The given program may be changed.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if writes(program.graph) or not all(is_simple(node.target) for node in calls):
        return program.run_decompositions({})
    for node in calls:
        if isinstance(node.target, OpOverload) and is_replaced(node.target):
            replace(node)
    program.graph.eliminate_dead_code()
    return program
