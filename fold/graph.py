"""A model as a graph of ATen operations: parameters by name, what centring one of them would reach,
who owns it.

The graph is that of torch.export, functionalised: in-place operations, functions and modules all
look alike, a shared parameter is one node with all its uses, and every call of a module is there.
"""

import copy
import inspect
import operator
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .axes import Feeds, Line, aligned, describe, ignores, is_float, module_path, shape
from .beside import FoldError
from .certificate import Inputs, plain_encoders
from .rules import feeds


@dataclass(frozen=True)
class Source:
    """Parameters that are centred together, by name: along `axis`, in blocks. With `scale`, that
    gain is merged into them first (LayerScale).
    """

    parameters: tuple[tuple[str, int], ...]  # name, axis
    block: int
    scale: str = ""

    def __str__(self) -> str:
        return " and ".join(
            [*(name for name, _ in self.parameters), *([self.scale] if self.scale else [])]
        )


@dataclass
class Demand:
    """What has to have zero mean for a line to have zero mean."""

    # every line on the way -> what feeds it
    below: dict[Line, tuple[Line, ...]] = field(default_factory=dict)
    sources: dict[Line, Source] = field(default_factory=dict)  # where the way ends in parameters
    # where it ends in something else -> why
    failures: dict[Line, str] = field(default_factory=dict)
    keep: set[str] = field(default_factory=set)  # parameters whose values it relies on

    @property
    def lines(self) -> Collection[Line]:
        return self.below.keys()


def _normed(line: Line) -> bool:
    """Is this the output of a norm? Only its bias feeds it, yet it is more than its bias."""
    node = line.node.args[0] if "getitem" in str(line.node.target) else line.node
    return "_norm" in str(node.target)


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that gives all modules the attributes that they have now: a forward that keeps a
    tensor would leave one of the exporter's behind.
    """
    plain = (dict, OrderedDict, list, set)
    state = [(module, dict(vars(module))) for module in model.modules()]
    inside = [
        (value, copy.copy(value))
        for _, attributes in state
        for value in attributes.values()
        if type(value) in plain
    ]

    def restore() -> None:
        for module, attributes in state:
            vars(module).clear()
            vars(module).update(attributes)
        for value, old in inside:
            value.clear()
            value.extend(old) if type(value) is list else value.update(old)

    return restore


def _forwards(user: Node, line: Line) -> list[Line] | None:
    """The lines of `user` that a constant on `line` of its input turns into a constant; None where
    it would show.
    """
    # of a split: each piece is a node of its own
    if isinstance(user.meta.get("val"), list | tuple):
        pieces = [piece for piece in user.users if piece.target is operator.getitem]
        found = [_forwards_of_node(piece, line, user) for piece in pieces]
        return (
            None
            if None in found or len(pieces) < len(user.users)
            else [out for part in found for out in part]
        )
    return _forwards_of_node(user, line, user)


def _forwards_of_node(output: Node, line: Line, user: Node) -> list[Line] | None:
    """`_forwards` for one output tensor.

    Every use of the input must be on the way, as in x + x, and not in x * x.
    """
    if not is_float(output):
        return None
    uses = sum(x is line.node for x in tree_leaves((user.args, user.kwargs)))
    for axis, size in enumerate(shape(output)):
        if size % line.block == 0:
            out = Line(output, axis, line.block)
            if feeds(out).inputs.count(line) == uses:
                return [out]
    return None


class Graph:
    """The graph of `model` run on `inputs`, in the mode the model is in. Raises FoldError if it
    cannot be exported.

    trained     its parameters will move: none but frozen ones may be relied upon to have the values
                that they have
    """

    def __init__(self, model: nn.Module, inputs: Inputs, trained: bool = True):
        self.model, self.trained = model, trained
        # paths of modules that return something else than one tensor
        self.structured: set[str] = set()
        # path -> (position, name, shape) of the tensors a module takes
        self.arguments: dict[str, list[tuple]] = {}
        # its forward has blocks like `with torch.no_grad():`, in which modules cannot be told
        self.blocks = False
        program = self._export(inputs)
        for node in program.graph.nodes:
            if any(
                not isinstance(size, int)
                for x in tree_leaves(node.meta.get("val"))
                if isinstance(x, Tensor)
                for size in x.shape
            ):
                raise FoldError(
                    f"{type(model).__name__} has a tensor whose size depends on values "
                    f"({describe(node)}): analyze a part of it that has none"
                )
        # checks of shapes and types, and what only they use
        for node in reversed(program.graph.nodes):
            if not node.users and str(node.target).startswith("aten._assert"):
                program.graph.erase_node(node)
        self.nodes = list(program.graph.nodes)
        self.calls = defaultdict(set)  # module path -> its calls
        for node in self.nodes:
            for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
                self.calls[path].add(key)
        signature = program.graph_signature
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        mutated = {
            *signature.buffers_to_mutate.values(),
            *getattr(signature, "parameters_to_mutate", {}).values(),
        }
        unsaved, constants = (
            signature.non_persistent_buffers,
            signature.inputs_to_lifted_tensor_constants,
        )
        # parameters and buffers that a fold may change, or rely upon
        self.names: dict[Node, str] = {}
        for node in self.nodes:
            if node.op != "placeholder":
                continue
            name = targets.get(node.name)
            if name is None:
                node.meta["kind"] = (
                    f"{constants[node.name]}, a tensor that is neither parameter nor buffer,"
                    if node.name in constants
                    else f"{node.name}, an input of the model,"
                )
            elif name in mutated:
                node.meta["kind"] = f"{name}, which the model changes,"
            elif name in unsaved:  # and might be built anew
                node.meta["kind"] = f"{name}, which no state dict holds,"
            else:
                self.names[node] = name
        for node in self.nodes:  # the number in h[:, 0] = 0
            constant = program.constants.get(
                signature.inputs_to_lifted_tensor_constants.get(node.name)
            )
            node.meta["zero"] = (
                isinstance(constant, Tensor) and constant.dim() == 0 and not constant.any()
            )
        self.inputs = {
            node
            for node in self.nodes
            if node.op == "placeholder" and node.name in signature.user_inputs
        }
        self.values = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        self.aliases = defaultdict(list)  # id of a tensor -> all its names
        for name, value in self.values.items():
            self.aliases[id(value)].append(name)
        self._reached: dict[Any, str] = {}

    def _export(self, inputs: Inputs) -> torch.export.ExportedProgram:
        if not isinstance(inputs, tuple | dict):
            raise FoldError(
                f"the inputs are a {type(inputs).__name__}: give a tuple of positional arguments, "
                "as (x,), or a dict of named ones"
            )
        args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)

        def note(
            path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
        ) -> None:
            if not isinstance(output, Tensor):
                self.structured.add(path)
            names = list(inspect.signature(module.forward).parameters)
            given = [*zip(names, args), *kwargs.items()]
            self.arguments[path] = [
                (names.index(name), name, tuple(value.shape))
                for name, value in given
                if name in names and isinstance(value, Tensor)
            ]

        hooks = [
            module.register_forward_hook(partial(note, path), with_kwargs=True)
            for path, module in self.model.named_modules()
        ]
        restore = _snapshot(self.model)
        try:
            # torch's own
            with plain_encoders(), warnings.catch_warnings(action="ignore", category=FutureWarning):
                program = torch.export.export(self.model, args, kwargs, strict=False)
                self.blocks = any("wrap_with" in str(node.target) for node in program.graph.nodes)
                return program.run_decompositions({})
        except Exception as error:  # whatever a model's forward and the exporter may raise
            first = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise FoldError(
                f"{type(self.model).__name__} cannot be exported with these inputs ({first}): "
                "leave out caches (use_cache=False) and branches on values"
            ) from error
        finally:
            restore()
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------ backwards

    def demand(self, start: Line, paper: bool = False) -> Demand:
        """Follow a line back to everything that feeds it.

        `paper`: by the paper's table (fold/__init__.py).
        """
        demand, todo = Demand(), [(start, None)]
        while todo:
            line, user = todo.pop()
            if line in demand.lines:
                continue
            demand.below[line] = ()
            if line.node in self.names:
                if paper and not (
                    user
                    and str(user.target).startswith(
                        ("aten.linear", "aten.addmm", "aten.conv", "aten.mm", "aten.matmul")
                    )
                ):
                    demand.failures[line] = (
                        f"{self.names[line.node]} is no weight of a linear layer"
                    )
                else:
                    demand.sources[line] = Source(((self.names[line.node], line.axis),), line.block)
                continue
            found = feeds(line)
            if found.gain in self.names:
                value = self.values[self.names[found.gain]]
                if paper:
                    found = Feeds()
                elif self.stays(value) and bool((value == value.flatten()[0]).all()):
                    demand.keep.add(self.names[found.gain])
                    found = Feeds(found.inputs)
            if found.spoils and (scaled := self._layer_scale(line)):
                demand.sources[line] = scaled
            elif found.spoils:
                demand.failures[line] = found.spoils
            else:
                demand.below[line] = found.inputs
                todo += [(below, line.node) for below in found.inputs]
        return demand

    def stays(self, value: Tensor) -> bool:
        """May a fold rely on the present value of this parameter or buffer?"""
        return not (self.trained and value.requires_grad)

    def _layer_scale(self, line: Line) -> Source | None:
        """Parameter gain times the output of a linear or convolution: the gain merges into the
        weights, if none of them is used anywhere else, and nothing but them is scaled by it.
        """
        if str(line.node.target) != "aten.mul.Tensor":
            return None
        for x, gain in (line.node.args, line.node.args[::-1]):
            at, gain_at = aligned(x, line), aligned(gain, line)
            while (
                gain_at is not None
                and gain_at.node not in self.names
                and len(gain_at.node.users) == 1
            ):
                below = feeds(gain_at)
                single = len(below.inputs) == 1 and not below.spoils and not _normed(gain_at)
                gain_at = below.inputs[0] if single else None
            if at is None or gain_at is None or gain_at.node not in self.names:
                continue
            size = shape(gain_at.node)
            if (
                size.count(1) != len(size) - 1
                or size[gain_at.axis] != line.block
                or len(gain_at.node.users) != 1
            ):
                continue
            below = self.demand(at)
            parameters = [
                (source, leaf) for leaf, source in below.sources.items() if not source.scale
            ]
            leaves = {part for part, fed in below.below.items() if not fed}
            if (
                parameters
                and leaves == {leaf for _, leaf in parameters}
                and not any(map(_normed, below.lines))
                and all(
                    len(part.node.users) == 1 and shape(part.node)[part.axis] == line.block
                    for part in below.lines
                )
            ):
                merged = tuple(source.parameters[0] for source, _ in parameters)
                return Source(merged, line.block, self.names[gain_at.node])
        return None

    # ------------------------------------------------------------------------------------- forwards

    def shows(self, line: Line, edges: Collection[Node] | None = None) -> str:
        """Where a constant on the blocks of this line would show (the operation, in words); "" if
        nowhere.

        With `edges`, only these users of the line's node get it. Appendix D.2.
        """
        users = [user for user in line.node.users if edges is None or user in edges]
        key = (line, frozenset(users))
        if key not in self._reached:
            self._reached[key] = self._search(line, users)
        return self._reached[key]

    def _search(self, line: Line, users: list[Node]) -> str:
        todo, done = [(line, user) for user in users], set()
        while todo:
            at, user = todo.pop()
            if (at, user) in done:
                continue
            done.add((at, user))
            if user.op == "output":
                return "the model's output"
            if ignores(user, at):
                continue
            onwards = _forwards(user, at)
            if onwards is None:
                return describe(user)
            todo += [(out, next_user) for out in onwards for next_user in out.node.users]
        return ""

    # ---------------------------------------------------------------------------- modules and names

    def owners(self, parameter: Node, users: Collection[Node]) -> set[str]:
        """Names under which these users read a parameter: those of the module they belong to, or of
        its children.
        """
        names, found = self.aliases[id(self.values[self.names[parameter]])], set()
        for user in users:
            path = module_path(user)
            prefix = f"{path}." if path else ""
            own = [name for name in names if name.rpartition(".")[0] == path]
            found.update(own or [name for name in names if name.startswith(prefix)] or names)
        return found

    def call(self, node: Node) -> str:
        """The module call that a node belongs to: unlike a path, another one each time the module
        is called.
        """
        return next(reversed(node.meta.get("nn_module_stack", {})), "")

    def returned_by(self, node: Node) -> str | None:
        """Path of a module that is called once and returns this node's tensor and nothing else;
        None if there is none.

        A copy of the same value (dropout in eval mode) will do.
        """
        while True:
            stack = node.meta.get("nn_module_stack", {})
            for key, (path, _) in reversed(stack.items()):
                outside = all(
                    key not in user.meta.get("nn_module_stack", {}) for user in node.users
                )
                if path and outside and path not in self.structured and len(self.calls[path]) == 1:
                    return path
            copies = [
                user
                for user in node.users
                if str(user.target) in ("aten.clone.default", "aten.alias.default")
            ]
            if len(node.users) != 1 or not copies:
                return None
            node = copies[0]

    def taken_by(self, node: Node) -> tuple[str, tuple[int, str]] | None:
        """(path, (position, name)) of the argument by which a module, called once, takes this
        node's tensor, which nobody else uses; the path of the whole model is "".
        """
        stacks = [user.meta.get("nn_module_stack", {}) for user in node.users]
        keys = [key for key in stacks[0] if all(key in stack for stack in stacks)] if stacks else []
        for key in keys:
            path = stacks[0][key][0]
            if key in node.meta.get("nn_module_stack", {}) or (
                not path and node not in self.inputs
            ):
                continue
            fitting = [
                argument[:2]
                for argument in self.arguments.get(path, ())
                if argument[2] == shape(node)
            ]
            return (path, fitting[0]) if len(fitting) == 1 and len(self.calls[path]) == 1 else None
        return None
