"""Read a model as a graph of ATen operations, and follow zero means through it.

The graph is that of torch.export in functional form. So in-place operations, functions and modules
all look alike, a shared parameter is one node with all its uses, and every call of a module is
there.

References to appendices and tables are to "Enjoy Your Layer Normalization".
"""

import warnings
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from .certificate import Inputs, duplicate, first_line, plain_operations
from .decompose import decompose, writes
from .lines import Feeds, Line, aligned, describe, is_tensor, made_by, module_path, shape
from .rules import feeds, keeps_order, mark, passes_on
from .siblings import FoldError

# What the paper's table counts as linear layers
PRODUCTS = ("aten.linear", "aten.addmm", "aten.conv", "aten.mm", "aten.matmul")


@dataclass(frozen=True)
class Source:
    """Parameters that are centred together, by name: along an axis, in blocks."""

    parameters: tuple[tuple[str, int], ...]  # (name, axis) of each
    block: int
    scale: str = ""  # a gain that is merged into them first (LayerScale), by name

    def __str__(self) -> str:
        names = [name for name, _ in self.parameters]
        if self.scale:
            names.append(self.scale)
        return " and ".join(names)


@dataclass
class Demand:
    """What must have zero mean so that a line has zero mean."""

    # for every line on the way back, the lines that feed it
    below: dict[Line, tuple[Line, ...]] = field(default_factory=dict)
    # where the way back ends in parameters that can be centred
    sources: dict[Line, Source] = field(default_factory=dict)
    # where it ends in something else: why that has no zero mean
    failures: dict[Line, str] = field(default_factory=dict)


def _is_norm_along(line: Line) -> bool:
    """Tell whether a line lies in the output of a norm, along what the norm averages."""
    norm = made_by(line.node).meta["norm"]
    return norm is not None and (norm.line.axis, norm.line.block) == (line.axis, line.block)


def _is_norm_output(line: Line) -> bool:
    """Tell whether a line lies in the output of a norm.

    Only the norm's bias feeds such a line, yet the line is more than the bias.
    """
    return "_norm" in str(made_by(line.node).target)


class Graph:
    """The graph of `model` run on `inputs`, in the mode (train or eval) that the model is in.

    Args:
        model: it is left unchanged.
        inputs: positional (tuple) or keyword (dict) arguments of the model.

    Raises:
        FoldError: the model cannot be exported, or a size in it depends on values.
    """

    def __init__(self, model: nn.Module, inputs: Inputs):
        self.model = model
        # path of a module that returns one tensor -> its shape
        self.returned: dict[str, tuple[int, ...]] = {}
        # path of a module -> the shapes that it takes, if it takes one tensor and returns one like
        # it; None for other calls
        self.taken: dict[str, set[tuple[int, ...] | None]] = defaultdict(set)
        # whether it writes into tensors: then the exporter makes their views again behind modules
        self.writes = False
        # paths of the modules that are being run; the innermost comes last
        self._running: list[str] = []
        program = self._export(inputs)
        for node in reversed(program.graph.nodes):
            # Checks of shapes and types would count as uses of a tensor.
            if not node.users and str(node.target).startswith("aten._assert"):
                program.graph.erase_node(node)
        self.nodes: list[Node] = list(program.graph.nodes)
        # path of a module -> its calls
        self.calls: dict[str, set[str]] = defaultdict(set)
        self._use_first_names()
        # nodes of those parameters and buffers that a fold may change, or rely on -> names
        self.names: dict[Node, str] = {}
        self._name_placeholders(program)
        self.node_of = {name: node for node, name in self.names.items()}
        mark(self.nodes)
        # all names of all parameters and buffers -> values
        self.values: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        # nodes of what the graph is given -> values: parameters, buffers, constants, the example
        self.given: dict[Node, Any] = self._given(program, inputs)
        # Each operation is tried once, however many norms it lies below.
        self._feeds = cache(feeds)
        self._passes_on = cache(passes_on)

    # --------------------------------------------------------------------------------- construction

    def _export(self, inputs: Inputs) -> torch.export.ExportedProgram:
        """Export the model, and note what each of its modules takes and returns."""
        args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise FoldError(
                f"{type(self.model).__name__} is on the meta device, and rules are tried out on "
                "numbers: load its weights first"
            )
        try:
            # A copy, because a forward may keep the exporter's tensors as attributes. Without
            # gradients, which FlexAttention does not have on a CPU.
            model = duplicate(self.model).requires_grad_(False)
            for path, module in model.named_modules():
                module.register_forward_pre_hook(partial(self._note_start, path))
                module.register_forward_hook(partial(self._note_call, path), with_kwargs=True)
            # These warnings are about torch's own code.
            with (
                plain_operations(),
                warnings.catch_warnings(action="ignore", category=FutureWarning),
            ):
                # In a block without gradients the exporter would lose sight of the modules.
                with patch.object(torch._C, "_set_grad_enabled", lambda mode: None):
                    program = torch.export.export(model, args, kwargs, strict=False)
                self.writes = writes(program.graph)
                program = decompose(program)
            for node in filter(is_tensor, program.graph.nodes):
                self._running = [module_path(node)]
                shape(node)  # raises if the size depends on values
            for parameter in model.parameters():
                # The copy is in a cycle, so it would stay in memory for long.
                parameter.data = parameter.data.new_empty(0)
            return program
        except Exception as error:  # a model's forward and the exporter may raise anything
            path = self._running[-1] if self._running else ""
            where = f"in {path}: " if path else ""
            raise FoldError(
                f"{type(self.model).__name__} cannot be exported with these inputs "
                f"({where}{first_line(error)}): "
                "leave out caches (use_cache=False), branches on values and ScriptModules"
            ) from error

    def _use_first_names(self) -> None:
        """Call a module that has several names by its first one, throughout; note its calls."""
        first = {module: path for path, module in self.model.named_modules()}
        names = {
            path: first[module] for path, module in self.model.named_modules(remove_duplicate=False)
        }
        for node in self.nodes:
            stack = node.meta.get("nn_module_stack", {})
            for key, (path, kind) in stack.items():
                first_name = names.get(path, path)
                stack[key] = (first_name, kind)
                self.calls[first_name].add(key)

    def _note_start(self, path: str, module: nn.Module, args: tuple) -> None:
        """Note that the module at `path` is run (a forward pre-hook)."""
        self._running.append(path)

    def _note_call(
        self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a call of the module at `path` takes and returns (a forward hook)."""
        while self._running.pop() != path:
            pass  # a module whose error the model caught
        values = [*args, *kwargs.values()]
        same = all(isinstance(x, Tensor) for x in (*values, output)) and len(values) == 1
        same = same and (output.shape, output.dtype) == (values[0].shape, values[0].dtype)
        self.taken[path].add(tuple(output.shape) if same else None)
        if isinstance(output, Tensor):
            self.returned[path] = tuple(output.shape)

    def _name_placeholders(self, program: torch.export.ExportedProgram) -> None:
        """Name the parameters and buffers; describe, for messages, what may not be centred."""
        signature = program.graph_signature
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        mutated = {
            *signature.buffers_to_mutate.values(),
            *getattr(signature, "parameters_to_mutate", {}).values(),
        }
        unsaved = signature.non_persistent_buffers
        constants = signature.inputs_to_lifted_tensor_constants
        for node in self.nodes:
            if node.op != "placeholder":
                continue
            name = targets.get(node.name)
            if name is None and node.name in constants:
                name = constants[node.name]
                node.meta["kind"] = (
                    f"{name}, a tensor that is neither parameter nor buffer, or is in a module "
                    "that a function holds,"
                )
                value = program.constants.get(name)
                if isinstance(value, Tensor) and value.dim() == 0:  # as in h[:, 0] = 0
                    node.meta["constant"] = value
            elif name is None:
                node.meta["kind"] = f"{node.name}, an input of the model,"
            elif name in mutated:
                node.meta["kind"] = f"{name}, which the model changes,"
            elif name in unsaved:
                # The model may build it again, without the centring, when it is loaded or reads a
                # longer text. (XGLM's positions: its output was off by 0.3.)
                node.meta["kind"] = f"{name}, which no state dict holds,"
            else:
                self.names[node] = name

    def _given(self, program: torch.export.ExportedProgram, inputs: Inputs) -> dict[Node, Any]:
        """Return the value of each placeholder."""
        constants = program.constants
        example = iter(tree_leaves(inputs))
        found = {}
        placeholders = (node for node in self.nodes if node.op == "placeholder")
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                found[node] = next(example)
            else:
                found[node] = self.values.get(spec.target, constants.get(spec.target))
        return found

    # ------------------------------------------------------------------------------------ backwards

    def demand(self, start: Line, paper: bool = False) -> Demand:
        """Follow a line back to everything that feeds it.

        Args:
            start: the line that must have zero mean.
            paper: follow the rules of the paper's Table 3 (fold/__init__.py).
        """
        demand = Demand()
        todo: list[tuple[Line, Node | None]] = [(start, None)]
        while todo:
            line, user = todo.pop()
            if line in demand.below:
                continue
            demand.below[line] = ()
            if line.node in self.names:
                name = self.names[line.node]
                if paper and not str(getattr(user, "target", "")).startswith(PRODUCTS):
                    demand.failures[line] = f"{name} is no weight of a linear layer"
                else:
                    demand.sources[line] = Source(((name, line.axis),), line.block)
                continue
            found = self._feeds(line)
            if paper and _is_norm_along(line):
                found = Feeds()  # the table takes the output of every LayerNorm to have zero mean
            if not found.failure:
                demand.below[line] = found.inputs
                todo += [(below, line.node) for below in found.inputs]
                continue
            scaled = self._layer_scale(line)
            if scaled is not None:
                demand.sources[line] = scaled
            else:
                demand.failures[line] = found.failure
        return demand

    def _layer_scale(self, line: Line) -> Source | None:
        """Find a LayerScale: a gain times the output of linears or convolutions.

        The gain can be merged into their weights if none of these is used anywhere else, and if
        nothing but them is scaled by it, in the same order.
        """
        if str(line.node.target) != "aten.mul.Tensor":
            return None
        for x, gain in (line.node.args, line.node.args[::-1]):
            at = aligned(x, line)
            gain_at = self._back_to_parameter(aligned(gain, line))
            if at is None or gain_at is None or gain_at.node not in self.names:
                continue
            size = shape(gain_at.node)
            is_vector = size.count(1) == len(size) - 1 and size[gain_at.axis] == line.block
            if not is_vector or len(gain_at.node.users) != 1:
                continue
            demand = self.demand(at)
            weights = {leaf: s for leaf, s in demand.sources.items() if not s.scale}
            leaves = {part for part, fed in demand.below.items() if not fed}
            only_weights = bool(weights) and leaves == weights.keys()
            if not only_weights or any(_is_norm_output(part) for part in demand.below):
                continue
            if all(
                len(part.node.users) == 1
                and shape(part.node)[part.axis] == line.block
                and (not fed or keeps_order(part, fed))
                for part, fed in demand.below.items()
            ):
                merged = tuple(source.parameters[0] for source in weights.values())
                return Source(merged, line.block, self.names[gain_at.node])
        return None

    def _back_to_parameter(self, at: Line | None) -> Line | None:
        """Follow a line back through operations that nothing else uses, as far as a parameter."""
        while at is not None and at.node not in self.names and len(at.node.users) == 1:
            found = self._feeds(at)
            single = len(found.inputs) == 1 and not found.failure and not _is_norm_output(at)
            at = found.inputs[0] if single else None
        return at

    # ------------------------------------------------------------------------------------- forwards

    def shows(self, line: Line, edges: Collection[Node] | None = None) -> str:
        """Describe the operation at which a constant added to this line would change the result.

        Follows the line forwards until all operations ignore the constant (appendix D.2).

        Args:
            line: the constant is added to each of its blocks.
            edges: only these users of the line's node get it; None stands for all.

        Returns:
            The first such operation that is found, for messages; "" if there is no such operation.
        """
        todo = [(line, user) for user in line.node.users if edges is None or user in edges]
        done = set()
        while todo:
            at, user = todo.pop()
            if (at, user) in done:
                continue
            done.add((at, user))
            if user.op == "output":
                return "the model's output"
            onwards = self._passes_on(user, at)
            if onwards is None:
                return describe(user)
            todo += [(out, next_user) for out in onwards for next_user in out.node.users]
        return ""

    # ---------------------------------------------------------------------------- modules and names

    def owners(self, parameter: Node, users: Collection[Node]) -> set[str]:
        """Return the names under which these users read a parameter.

        They are the names in the module that each user belongs to, or else in its children.
        """
        tensor = self.values[self.names[parameter]]
        names = [name for name, value in self.values.items() if value is tensor]
        found = set()
        for user in users:
            path = module_path(user)
            prefix = f"{path}." if path else ""
            own = [name for name in names if name.rpartition(".")[0] == path]
            inside = [name for name in names if name.startswith(prefix)]
            found.update(own or inside or names)
        return found

    def returned_by(self, node: Node) -> str | None:
        """Return the path of a module that returns this node's tensor and nothing else.

        The module must be called once. Returns None if no module does.
        """
        stack = node.meta.get("nn_module_stack", {})
        for key, (path, _) in reversed(stack.items()):
            outside = all(key not in user.meta.get("nn_module_stack", {}) for user in node.users)
            once = len(self.calls[path]) == 1
            # After an in-place operation the exporter makes views again, where they are used. So a
            # module may return this tensor with other axes.
            same = self.returned.get(path) == shape(node)
            if path and outside and once and same:
                return path
        return None
