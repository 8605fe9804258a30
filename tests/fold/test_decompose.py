"""What composite operators are replaced by is what torch's own way, slower, gives."""

import operator

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fold import decompose as module
from fold.decompose import decompose

DOUBLE = torch.float64


class Forward(nn.Module):
    """A linear layer, then a function of its output and of the module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("var", torch.ones(12))

    def forward(self, x):
        return self.function(self.linear(x), self)


PLAIN = {
    "views": lambda h, net: h.reshape(2, 20, 3).flatten(1).unflatten(1, (4, 15)).view_as(h) + 1,
    "pieces": lambda h, net: torch.cat([*h.chunk(2, -1), *h.tensor_split(3, -1)], -1),
    "one of many": lambda h, net: h.unbind(1)[2] * h.chunk(3, 1)[0].sum(),
    "axes": lambda h, net: h.mT @ h + h.movedim(1, 2) @ h + h[0].T.sum() + h.swapaxes(0, 2).mean(),
    "types": lambda h, net: h.to(DOUBLE).type_as(h).float().to(h) + h.to("cpu").contiguous(),
    "sizes": lambda h, net: h.mean(0).expand_as(h) + h[:1].squeeze() + h.select(0, 1)[None],
    "a copy": lambda h, net: h.permute(2, 0, 1).contiguous().reshape(-1, 10),
    "dropout": lambda h, net: F.dropout(h, 0.5, training=False) + F.dropout(h, 0.0),
    "kept": lambda h, net: F.gelu(F.layer_norm(h, (12,))) + F.softmax(h @ h.mT, -1) @ h,
    "unused": lambda h, net: torch.std_mean(h, -1)[0] + h.chunk(2, -1)[1].sum(),
}
OTHERS = {
    "dropout in training": lambda h, net: F.dropout(h, 0.5),
    "dropout of channels": lambda h, net: F.dropout1d(h, 0.5) + F.alpha_dropout(h, 0.5, True),
    "writes": lambda h, net: h.reshape(2, 60).add_(1).view(2, 5, 12)[:, 1:],
    "autocast": lambda h, net: autocast(h, net),
    "a norm of batches": lambda h, net: net.norm.eval()(h.flatten(0, 1)),
    "a statistic": lambda h, net: F.batch_norm(h[:, 0], net.mean, net.var, training=True),
}


def autocast(h, net):
    with torch.autocast("cpu", torch.bfloat16):
        return net.linear(h[..., :6].reshape(10, 6))


def nodes_of(program) -> list[tuple]:
    """What each node but checks computes of which, its shape, strides and type, and where."""
    place: dict[Node, int] = {}
    found = []
    for node in program.graph.nodes:
        if str(node.target).startswith("aten._assert"):
            continue
        place[node] = len(place)
        given = tree_map(
            lambda x: place[x] if isinstance(x, Node) else x,
            (node.args, node.kwargs),
            is_leaf=lambda x: isinstance(x, Node),
        )
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            value = (value.shape, value.stride(), value.dtype)
        path = [path for path, _ in node.meta.get("nn_module_stack", {}).values()][-1:]
        is_call = node.op == "call_function"
        found.append((node.op, str(node.target) if is_call else "", str(given), str(value), path))
    return found


def exported(function) -> torch.export.ExportedProgram:
    net = Forward(function).requires_grad_(False)
    return torch.export.export(net, (torch.ones(2, 5, 6),), strict=False)


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_the_nodes_are_those_that_torch_gives(name, monkeypatch):
    function = PLAIN.get(name) or OTHERS[name]
    expected = exported(function).run_decompositions({})
    if name in PLAIN:  # not by torch's own way
        monkeypatch.delattr(torch.export.ExportedProgram, "run_decompositions")
    found = decompose(exported(function))
    assert nodes_of(found) == nodes_of(expected)


def test_what_is_kept_and_what_is_replaced():
    aten = torch.ops.aten
    kept = (aten.linear.default, aten.layer_norm.default, aten.view.default, aten.add.Tensor)
    replaced = (aten.reshape.default, aten.to.dtype, aten.chunk.default, aten.dropout.default)
    assert not any(map(module.is_replaced, kept)) and all(map(module.is_replaced, replaced))
    graph = exported(PLAIN["pieces"]).graph
    assert operator.getitem in [node.target for node in graph.nodes] and not module.writes(graph)
