"""Find the norms of a model by what they do, and say of each what it computes and how.

    print(norms_of(model, {"input_ids": ids}))

The model is run once. Each module that returns a tensor of the shape of one that it takes is tried
out in a copy: one that forgets the size of large inputs is a norm, or a point-wise function that
saturates. Its class and its name do not count. A module that contains such a module is not one
itself. Norms that are written out in a forward are found in the exported graph (hand_norms.py).

What is said of a norm comes from calls of it alone: the formula from its outputs in float64
(formulas.py), the gain's form from its outputs with random parameters (gain_forms.py), the order of
rounding from the bits of its outputs in 16 bits (roundings.py). Who reads it is in the graph. What
cannot be probed is "not known".
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .certificate import Inputs, duplicate, first_line, run, widened, widening
from .formulas import (
    NO_EPS,
    NOT_A_NORM,
    SINGLE,
    UNKNOWN,
    Found,
    Function,
    Precision,
    difference,
    fit_gain,
    forgets_size,
    holds,
    identify,
    numbers,
)
from .gain_forms import GainForm, gain_form, is_all_one, random_values, settled
from .graph import Graph
from .hand_norms import HandNorm, hand_norms, values_in_run
from .lines import describe, is_tensor, module_path, shape
from .roundings import (
    NOT_KNOWN,
    WIDTHS,
    Rounding,
    find_rounding,
    rounding_in_float32,
    type_of_eps,
)
from .rules import CASTS, MOVES
from .siblings import FoldError

ROWS = 256  # of the batch beside which one row is computed
UNPROBED = "not known"
SUM = "adds a second input first"
SECOND = "with a second input"


# ------------------------------------------------------------------------------- calls of modules


class Slot(NamedTuple):
    """An argument of a call, by position or by name."""

    at: int | str

    def get(self, args: Sequence, kwargs: dict[str, Any]) -> Tensor:
        return args[self.at] if isinstance(self.at, int) else kwargs[self.at]

    def put(self, args: list, kwargs: dict[str, Any], value: Tensor) -> None:
        if isinstance(self.at, int):
            args[self.at] = value
        else:
            kwargs[self.at] = value


@dataclass
class Call:
    """The first call of a module that returns a tensor like one that it takes.

    Attributes:
        path: of the module.
        args, kwargs: what it was given.
        slot: the argument that is normalised, if it is a norm.
        x: that argument.
        others: the slots of further tensors of floats of that shape.
        outputs: which of the tensors that it returns have that shape.
        count: of all calls.
    """

    path: str
    args: tuple
    kwargs: dict[str, Any]
    slot: Slot
    x: Tensor
    others: list[Slot]
    outputs: list[int]
    count: int = 1


class Bound(nn.Module):
    """A module as a function of one of its arguments; other tensors of its shape have one value."""

    def __init__(self, module: nn.Module, call: Call, output: int, others: float):
        super().__init__()
        self.module = module
        self.call = call
        self.output = output
        self.others = others

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        def like(value: Tensor) -> Tensor:
            return value.to(x.dtype) if value.is_floating_point() else value.clone()

        args, kwargs = tree_map_only(Tensor, like, (list(self.call.args), dict(self.call.kwargs)))
        for slot in self.call.others:
            slot.put(args, kwargs, torch.full_like(x, self.others) if second is None else second)
        self.call.slot.put(args, kwargs, x)
        return tensors(self.module(*args, **kwargs))[self.output]


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floats in what a module returns."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


@torch.no_grad()
def record(model: nn.Module, inputs: Inputs) -> list[Call]:
    """Run a model, and return the calls of its modules that return a tensor like one they take.

    In the order in which they end: a module comes after those within it.

    Raises FoldError where the model does not run on the inputs.
    """
    calls: dict[str, Call] = {}
    given: dict[str, list[tuple[tuple, dict]]] = defaultdict(list)

    def before(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # Copies, for a fused norm that writes into what it is given
        given[path].append(tree_map_only(Tensor, Tensor.clone, (args, kwargs)))

    def after(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        args, kwargs = given[path].pop()
        if path in calls:
            calls[path].count += 1
            return
        call = call_of(path, args, kwargs, output)
        if call is not None:
            calls[path] = call

    hooks = []
    for path, module in model.named_modules():
        if path:
            hooks.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(after, path), with_kwargs=True))
    try:
        run(model, inputs, widen=False)
    except Exception as error:  # what the model's forward may raise
        said = f"{type(error).__name__}: {first_line(error)}"
        raise FoldError(
            f"{type(model).__name__} does not run on its example inputs ({said}): give it others; "
            "with --against both models run on the first one's"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def call_of(path: str, args: tuple, kwargs: dict[str, Any], output: Any) -> Call | None:
    """Describe a call; None if nothing that it returns has the shape of something it takes."""
    taken = [
        (Slot(at), value)
        for at, value in (*enumerate(args), *kwargs.items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
    ]
    returned = tensors(output)
    for slot, x in taken:
        outputs = [i for i, y in enumerate(returned) if y.shape == x.shape]
        if outputs:
            others = [s for s, v in taken if v.shape == x.shape and s != slot]
            return Call(path, args, kwargs, slot, x, others, outputs)
    return None


# --------------------------------------------------------------------------------- what one norm is


@dataclass
class Norm:
    """A norm as functions: what was found of it, and how to call it.

    Attributes:
        found: its formula and gain as it is, with the eps of its own type.
        probed: the same with the eps of a copy in float64, if that is another one.
        form: how its gain is stored.
        x: the tensor that it was given in the run; None: not known.
        stored: the values of the gain's parameter, float64, flat; None without one.
        function: makes it callable in a type; gives None where that is not possible.
        call: the call that showed it, of a module.
        output, others: which tensor of its outputs it is, with which value of further inputs.
        roundings: type -> order of rounding.
        own: the norm itself as a function, in its own type.
        dtype: that type.
    """

    found: Found
    form: GainForm
    x: Tensor | None
    stored: Tensor | None
    function: Any = None
    call: Call | None = None
    output: int = 0
    others: float = 0.0
    roundings: dict[torch.dtype, Rounding] = field(default_factory=dict)
    own: Function | None = None
    dtype: torch.dtype | None = None
    probed: Found | None = None


@dataclass
class NormRow:
    """What is known of one norm of a model.

    Attributes:
        path: of its module; of the module that it is written out in, if `by_hand`.
        kind: name of the formula.
        width: how many numbers are averaged; 0 if that is not known.
        eps, place: what is added to the statistic, and where; None where there is none.
        eps_of: the type whose eps it is, where that is other in another type; "" for a number.
        gain: how it is stored.
        gain_dtype: its type.
        ones: all gains are 1: folded into what reads the norm, or never trained.
        bias: it has one.
        float32: what it rounds to 16 bits in a model in float32; "" for nothing.
        bfloat16, float16: order of rounding and width of the statistic.
        readers: the operations that read it.
        batch: on this device, do the bits of a row depend on the batch: "no", "yes", "not known".
        calls: how often it was called in the run.
        by_hand: it is no module.
        note: more about it.
    """

    path: str
    kind: str
    width: int = 0
    eps: float | None = None
    place: str = ""
    eps_of: str = ""
    gain: str = UNPROBED
    gain_dtype: str = ""
    ones: bool = False
    bias: bool = False
    float32: str = ""
    bfloat16: str = UNPROBED
    float16: str = UNPROBED
    readers: list[str] = field(default_factory=list)
    batch: str = UNPROBED
    calls: int = 1
    by_hand: bool = False
    note: str = ""
    norm: Norm | None = field(default=None, repr=False, compare=False)

    @property
    def is_named(self) -> bool:
        """Is its formula known?"""
        return self.norm is not None and self.norm.found.formula is not None

    def describe_eps(self) -> str:
        """Say eps and its place."""
        if self.place == NO_EPS:
            return "no eps"
        said = f"eps {self.eps:.5g} {self.place}"
        return f"{said} (the type's own eps, in {self.eps_of})" if self.eps_of else said

    def describe(self) -> str:
        """Say everything but the path, in one line."""
        said = [self.kind]
        if self.note:
            said.append(self.note)
        if self.is_named:
            said.append(f"over {self.width}")
            said.append(self.describe_eps())
            gain = f"gain {self.gain}"
            gain += f" in {self.gain_dtype}" if self.gain_dtype else ""
            said.append(gain + (", all 1 (folded, or never trained)" if self.ones else ""))
            said.append("bias" if self.bias else "no bias")
            if self.float32:
                said.append(f"float32: {self.float32}")
            if self.bfloat16 == self.float16:
                said.append(f"16 bits: {self.bfloat16}")
            else:
                said.append(f"bfloat16: {self.bfloat16}; float16: {self.float16}")
            said.append(f"a row's bits depend on its batch: {self.batch}")
        said.append(f"read by {', '.join(self.readers) or UNPROBED}")
        if self.calls > 1:
            said.append(f"called {self.calls} times")
        return "; ".join(said)


@dataclass(frozen=True)
class Known:
    """A module whose norm has been found, and the call that showed it."""

    module: nn.Module
    call: Call
    row: NormRow

    def is_like(self, module: nn.Module, call: Call) -> bool:
        """Tell whether another module runs the same code with the same settings."""
        if (self.call.x.shape, self.call.slot, self.call.others, self.call.outputs) != (
            call.x.shape,
            call.slot,
            call.others,
            call.outputs,
        ):
            return False
        pairs = zip(self.module.modules(), module.modules(), strict=False)
        same_size = len([*self.module.modules()]) == len([*module.modules()])
        return same_size and all(_has_same_settings(*pair) for pair in pairs)


def _has_same_settings(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two modules have one class, equal settings, and parameters of one shape."""
    if type(one) is not type(other) or vars(one).keys() != vars(other).keys():
        return False
    for name, value in vars(one).items():
        other_value = vars(other)[name]
        if name in ("_parameters", "_buffers"):
            described = [
                {key: None if t is None else (t.shape, t.dtype) for key, t in tensors.items()}
                for tensors in (value, other_value)
            ]
            if described[0] != described[1]:
                return False
        elif name == "_modules":
            if value.keys() != other_value.keys():
                return False
        elif isinstance(value, str | int | float | tuple | bool | dict | set | None):
            if value != other_value:
                return False
        elif value is not other_value:
            return False
    return True


def probe_call(module: nn.Module, call: Call, known: Sequence[Known] = ()) -> list[NormRow]:
    """Find out which norms a module is: of its input, or of each of several of one shape.

    (An output norm, and the norm of the sum that it is added to, may be one module.)
    """
    found = []
    for one in (call, *by_other_inputs(call)):
        row = probe_module(module, one, known)
        if row is None or (one is not call and not row.is_named):
            continue
        if one is not call:
            row.note = f"of another input, {one.slot.at}"
        found.insert(0, row)
        if row.note == SUM:
            break
    return found


def by_other_inputs(call: Call) -> Iterator[Call]:
    """Yield the same call as a function of its other inputs of that shape."""
    for slot in call.others:
        others = [call.slot, *(other for other in call.others if other != slot)]
        yield replace(call, slot=slot, x=slot.get(call.args, call.kwargs), others=others)


def probe_module(module: nn.Module, call: Call, known: Sequence[Known] = ()) -> NormRow | None:
    """Find out which norm a module is; None if it does not forget the size of its input.

    Args:
        known: norms of the model that have been found. One that runs the same code with the same
            settings has the same formula and rounding; that its formula gives the outputs of this
            module is checked.

    Raises what the module's forward may raise.
    """
    for other in known:
        if other.row.is_named and other.is_like(module, call):
            row = _probe_like(module, call, other.row)
            if row is not None:
                return row
    # A copy, because a call may leave something behind: what other norms take from this one.
    module = duplicate(module)
    if call.x.dtype != torch.float16 and not _may_be_norm(module, call):
        return None
    alone = widened(duplicate(module))
    random = widened(duplicate(module))
    randomize(random)
    unnamed = None
    for output in call.outputs:
        for others in (0.0, 1.0) if call.others else (0.0,):
            row = _probe_as(module, alone, random, call, output, others)
            if row is not None and row.is_named:
                return row
            unnamed = unnamed or row
    return unnamed


def _may_be_norm(module: nn.Module, call: Call) -> bool:
    """Tell at little cost, in the module's own type, whether a closer look can find a norm."""
    rough = Precision(call.x.dtype, 2.0**20, 0.05)
    for output in call.outputs:
        for others in (0.0, 1.0) if call.others else (0.0,):
            f = _as_is(module, call, output, others)
            if forgets_size(f, call.x, rough):
                return True
    return False


def _caller(bound: Bound, widen: bool = True) -> Function:
    """Return a copy of a module as a function, in float64 throughout if `widen` is set."""

    @torch.no_grad()
    def call(x: Tensor) -> Tensor:
        with widening() if widen else nullcontext():
            return bound(x)

    return call


def _as_is(module: nn.Module, call: Call, output: int, others: float) -> Function:
    """Return the module itself as a function; a call leaves its buffers as they are."""
    bound = Bound(module, call, output, others)
    return lambda x: run(bound, (x,), widen=False)


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Give all parameters random values that 16 bits hold exactly, in place."""
    generator = torch.Generator().manual_seed(98)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.copy_(random_values(parameter, generator))


def _probe_as(
    module: nn.Module,
    alone: nn.Module,
    random: nn.Module,
    call: Call,
    output: int,
    others: float,
) -> NormRow | None:
    """Find out which norm one of the outputs of a module is."""
    exact = _caller(Bound(alone, call, output, others))
    if not forgets_size(exact, call.x, Precision(torch.float64, 2.0**40, 1e-3)):
        return None
    f = _caller(Bound(random, call, output, others))
    found = identify(f, call.x)
    if found.formula is None and _is_single(exact, call.x):
        found = identify(f, call.x, SINGLE)
    row = form = None
    if found.formula is not None:
        found, form = gain_form(found, dict(random.named_parameters()))
        row = _row_with_weights(module, alone, call, found, form, output, others)
    if row is None and is_other_function(found):
        random, form = alone, GainForm(UNPROBED)
        found = identify(exact, call.x)
        if found.formula is not None:
            row = _row_with_weights(module, alone, call, found, form, output, others)
    if found.kind == NOT_A_NORM and list(module.children()):
        return None  # a larger module that chooses or squashes, such as attention
    note = _note_on_others(exact, alone, call, output, others, found)
    if row is None:
        given = identify(exact, call.x) if found.kind.startswith("point-wise") else found
        return NormRow(
            call.path,
            UNKNOWN if given.formula else given.kind,
            note="; ".join(filter(None, (given.note, note))),
            calls=call.count,
            norm=Norm(found, GainForm(UNPROBED), call.x, None),
        )
    row.note = note
    for dtype in WIDTHS:
        function = partial(_in_type, random, call, output, others)
        rounding = rounding_of(function, found, form, dtype, call.x.device)
        row.norm.roundings[dtype] = rounding
        setattr(row, str(dtype).removeprefix("torch."), str(rounding))
    if has_further_tensors(call):
        # They may have to match the batch. torch's weight norm does not check that, and writes
        # beyond its memory.
        return row
    row.batch = batch_matters(_as_is(module, call, output, others), call.x)
    return row


def is_other_function(found: Found) -> bool:
    """Tell whether random weights have made another function of a norm, or none.

    Where eps is a parameter, or the root of one is taken. The formula is then sought with the
    norm's own weights, and the form of its gain is not known.
    """
    return found.formula is not None or (found.kind == NOT_A_NORM and not found.note)


def _probe_like(module: nn.Module, call: Call, other: NormRow) -> NormRow | None:
    """Describe a norm that runs the code of another; None if it has not that norm's formula."""
    norm = other.norm
    module = duplicate(module)
    alone = widened(duplicate(module))
    row = _row_with_weights(module, alone, call, norm.probed, norm.form, norm.output, norm.others)
    if row is not None:
        for name in ("bias", "note", "float32", "bfloat16", "float16", "batch"):
            setattr(row, name, getattr(other, name))
        row.norm.roundings = norm.roundings
    return row


def _row_with_weights(
    module: nn.Module,
    alone: nn.Module,
    call: Call,
    found: Found,
    form: GainForm,
    output: int,
    others: float,
) -> NormRow | None:
    """Describe a norm of known formula with its own weights; None if they do not give it.

    Args:
        alone: a copy of the module in float64.
    """
    exact = _in_type(alone, call, output, others, torch.float64)
    own = with_own_gain(exact, found, call.x)
    if own is None:
        return None
    form = settled(form, found, own)
    if has_further_tensors(call) and not form.name:
        form = GainForm(UNPROBED)  # it may be one of them
    row = row_of(own, form, call.path)
    row.bias = found.bias is not None
    row.calls = call.count
    stored = None
    if form.name:
        parameter = module.get_parameter(form.name)
        stored = parameter.detach().double().flatten()
        row.gain_dtype = str(parameter.dtype).removeprefix("torch.")
    function = partial(_in_type, alone, call, output, others)
    row.norm = Norm(own, form, call.x, stored, function, call, output, others)
    _add_own_type(row, _as_is(module, call, output, others), call.x.dtype, call.x)
    return row


def _add_own_type(row: NormRow, function: Function, dtype: torch.dtype, like: Tensor) -> None:
    """Add what calls of a norm in its own type tell: an eps of the type, rounding in float32.

    Args:
        function: the norm itself, with its own weights.
        dtype: of what it is given.
        like: a tensor of the shape of its input.
    """
    norm = row.norm
    own = torch.no_grad()(function)
    norm.own, norm.dtype, norm.probed = own, dtype, norm.found
    try:
        of = type_of_eps(own, norm.found, dtype, like)
        if of is not None:
            row.eps_of = str(of).removeprefix("torch.")
            row.eps = torch.finfo(of).eps
            formula = replace(norm.found.formula, eps=row.eps)
            norm.found = replace(norm.found, formula=formula)
        if dtype == torch.float32:
            row.float32 = rounding_in_float32(own, norm.found, like)
    except Exception:  # what the module's forward may raise on other numbers
        row.float32 = UNPROBED


def with_own_gain(f: Function, found: Found, x: Tensor) -> Found | None:
    """Fit the gain and the bias of a norm of known formula; None if they do not give its outputs.

    Args:
        f: the norm in float64, with its own weights.
    """
    fitted = fit_gain(f, found.layout, found.formula, x, found.precision)
    if fitted is None:
        return None
    own = replace(found, gain=fitted[0], bias=fitted[1])
    return own if holds(f, own, x) else None


def _in_type(
    source: nn.Module, call: Call, output: int, others: float, dtype: torch.dtype
) -> Function:
    """Return a float64 copy of a module as a function in a type."""
    is_double = dtype == torch.float64
    copy = source if is_double else duplicate(source).to(dtype)
    return _caller(Bound(copy, call, output, others), widen=is_double)


def row_of(found: Found, form: GainForm, path: str) -> NormRow:
    """Describe a norm whose formula is known."""
    formula = found.formula
    return NormRow(
        path,
        found.kind,
        width=formula.counted,
        eps=formula.eps if formula.place != NO_EPS else None,
        place=formula.place,
        gain=form.text,
        ones=bool(form.name) and is_all_one(found.gain),
        bias=found.bias is not None,
    )


def rounding_of(
    function: Any, found: Found, form: GainForm, dtype: torch.dtype, device: torch.device
) -> Rounding:
    """Find the order of rounding; NOT_KNOWN where the norm does not run in this type."""
    try:
        return find_rounding(function(dtype), found, form, dtype, device)
    except Exception:  # what the module's forward may raise
        return NOT_KNOWN


def _is_single(f: Function, x: Tensor) -> bool:
    """Tell whether outputs have the digits of float32 alone, though inputs are in float64."""
    y = f(numbers(tuple(x.shape), 21, x, torch.float64))
    return bool((y == y.float().to(y.dtype)).all())


def _note_on_others(
    f: Function, module: nn.Module, call: Call, output: int, others: float, found: Found
) -> str:
    """Say what a norm does with further tensors of the shape of its input."""
    if not call.others or found.kind == NOT_A_NORM:
        return ""
    if others:
        return f"{SECOND}, here 1"
    x, second = (numbers(tuple(call.x.shape), seed, call.x, torch.float64) for seed in (22, 23))
    bound = Bound(module, call, output, 0.0)
    is_sum = difference(run(bound, (x, second)), f(x + second)) <= 1e-6
    return SUM if is_sum else f"{SECOND}, here 0"


def has_further_tensors(call: Call) -> bool:
    """Tell whether a module is given tensors of other shapes than its input's."""
    given = [*call.args, *call.kwargs.values()]
    count = sum(isinstance(value, Tensor) and value.dim() > 0 for value in given)
    return count > 1 + len(call.others)


def batch_matters(f: Function, x: Tensor) -> str:
    """Tell whether the bits of a row depend on the batch: "no", "yes" or "not known"."""
    many = numbers((ROWS, *x.shape[1:]), 24, x, x.dtype)
    try:
        whole = f(many)
        # Every size has its own blocks and its own kernel.
        for count in (1, 3, 64):
            if not torch.equal(f(many[:count].clone()), whole[:count]):
                return "yes"
    except Exception:  # what the module's forward may raise for another batch
        return UNPROBED
    return "no"


# ----------------------------------------------------------------------------- all norms of a model


@dataclass
class NormsFound:
    """The norms of a model, in the order in which they run. Prints as one line for each kind.

    Attributes:
        model: name of the model's class.
        rows: one for each norm.
        unread: why the model's graph could not be read; "" if it could.
    """

    model: str
    rows: list[NormRow]
    unread: str = ""

    @property
    def is_unreadable(self) -> bool:
        """May there be norms in a forward that could not be looked for?"""
        return self.unread.startswith(UNPROBED)

    def __str__(self) -> str:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            path = row.path or "the model itself"
            groups.setdefault((pattern(path), row.describe()), []).append(path)
        lines = []
        for (name, said), paths in groups.items():
            shown = f"{name} ({len(paths)})" if len(paths) > 1 else paths[0]
            lines.append(f"{shown}: {said}")
        if not self.rows:
            lines = [f"{self.model}: no norm found"]
        if self.unread:
            lines.append(f"norms written out in a forward, and who reads a norm: {self.unread}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return all that is known, for JSON."""
        rows = [
            {name: value for name, value in vars(row).items() if name != "norm"}
            for row in self.rows
        ]
        return {"model": self.model, "unread": self.unread, "norms": rows}


def pattern(path: str) -> str:
    """Replace the numbers in a path."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def norms_of(model: nn.Module, example: Inputs, graph: bool = True) -> NormsFound:
    """Find the norms of a model, and what each computes.

    Args:
        model: any nn.Module, in the mode (train or eval) that is meant. It is left unchanged.
        example: positional (tuple) or keyword (dict) arguments of the model. What is found holds
            for the modules that it runs on them.
        graph: export the model, for norms written out in a forward and for who reads a norm.

    Returns:
        Norms in modules and norms written out in a forward, in the order in which they run.
    """
    modules = dict(model.named_modules())
    rows: list[NormRow] = []
    known: list[Known] = []
    for call in record(model, example):
        module = modules[call.path]
        if any(is_within(row.path, call.path) for row in rows if row.kind != NOT_A_NORM):
            continue
        try:
            found = probe_call(module, call, known)
        except Exception as error:  # what the module's forward may raise
            found = unprobed(module, call, error)
        rows += found
        known += [Known(module, row.norm.call, row) for row in found if row.is_named]
    name = type(model).__name__
    if not graph:
        return NormsFound(name, rows, "not looked for")
    try:
        rows = with_graph(Graph(model, example), rows, modules)
    except FoldError as error:
        return NormsFound(name, rows, f"{UNPROBED}: {error}")
    return NormsFound(name, rows)


def is_within(path: str, outer: str) -> bool:
    """Tell whether a module is in another, by their paths."""
    return path.startswith(f"{outer}.")


def unprobed(module: nn.Module, call: Call, error: Exception) -> list[NormRow]:
    """Return a row that says so, for a module that may be a norm and does not run alone."""
    small = all(p.numel() <= call.x.shape[-1] for p in module.parameters())
    if list(module.children()) or not small or not list(module.parameters()):
        return []
    return [NormRow(call.path, UNPROBED, note=f"it does not run alone: {first_line(error)}")]


def with_graph(
    graph: Graph, rows: Sequence[NormRow], modules: dict[str, nn.Module]
) -> list[NormRow]:
    """Add what the graph tells: norms in no module, who reads each, and the order."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    # A norm in a larger module, with more around it, is found in the graph.
    leaves = [
        row.path for row in rows if row.kind != UNKNOWN or not list(modules[row.path].children())
    ]
    found: list[tuple[int, NormRow]] = []
    by_hand: list[tuple[Norm, HandNorm]] = []
    replaced = set()
    for piece in hand_norms(graph, leaves):
        row = hand_row(graph, piece)
        if row is not None:
            row.readers = readers(piece.y)
            found.append((place[piece.y], row))
            if row.norm is not None:
                by_hand.append((row.norm, piece))
            replaced |= {r.path for r in rows if r.path not in leaves and r.path == row.path}
    given = values_in_run(graph, {piece.given for _, piece in by_hand}) if by_hand else {}
    for norm, piece in by_hand:
        norm.x = given.get(piece.given)
    last = 0
    for row in rows:
        if row.path in replaced:
            continue
        output = output_of(graph, row)
        if output is not None:
            row.readers = readers(output)
            last = place[output]
        found.append((last, row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def hand_row(graph: Graph, piece: HandNorm) -> NormRow | None:
    """Find out which norm a piece of the graph is; None if it is none."""
    like = piece.x.meta["val"]
    x = torch.empty(tuple(int(size) for size in like.shape), device=like.device)
    generator = torch.Generator().manual_seed(99)
    values = {name: random_values(graph.values[name], generator) for name in piece.names.values()}
    own = piece.function(graph.values)
    try:
        found = identify(piece.function(values), x)
        own_found = None
        if found.formula is not None:
            found, form = gain_form(found, values)
            own_found = with_own_gain(own, found, x)
        if own_found is None and is_other_function(found):
            found, form = identify(own, x), GainForm(UNPROBED)
            own_found = found
    except Exception:  # operations that do not run in float64, or on other numbers
        return None
    if found.kind == NOT_A_NORM or found.kind.startswith("point-wise"):
        return None
    if own_found is None or own_found.formula is None:
        return NormRow(piece.path, found.kind, note=found.note, by_hand=True)
    form = settled(form, found, own_found)
    row = row_of(own_found, form, piece.path)
    row.by_hand = True
    row.note = "written out in the forward"
    stored = None
    if form.name:
        stored = graph.values[form.name].detach().double().flatten()
        row.gain_dtype = str(graph.values[form.name].dtype).removeprefix("torch.")
    functions = {torch.float64: own}
    row.norm = Norm(own_found, form, None, stored, functions.get)
    dtype = piece.given.meta["val"].dtype
    _add_own_type(row, piece.function_in_its_type(graph.values), dtype, x)
    if dtype in WIDTHS:
        # The casts of a model in 16 bits are in its graph.
        functions[dtype] = piece.function_in_its_type(graph.values)
        random = piece.function_in_its_type(values)
        rounding = rounding_of(lambda _: random, found, form, dtype, x.device)
        row.norm.roundings[dtype] = rounding
        setattr(row, str(dtype).removeprefix("torch."), str(rounding))
    return row


def output_of(graph: Graph, row: NormRow) -> Any:
    """Return the node in which the module of a norm returns its output; None if there is none."""
    size = None if row.norm is None else tuple(row.norm.x.shape)
    found = None
    for node in graph.nodes:
        if not is_tensor(node) or (size is not None and shape(node) != size):
            continue
        if _is_in(node, row.path) and any(not _is_in(user, row.path) for user in node.users):
            found = node
    return found


def _is_in(node: Any, path: str) -> bool:
    return any(name == path for name, _ in node.meta.get("nn_module_stack", {}).values())


def readers(node: Any) -> list[str]:
    """Name the operations that read a node, through casts and moves."""
    found = []
    todo = list(node.users)
    while todo:
        user = todo.pop(0)
        if user.op == "output":
            found.append("the model's output")
        elif str(user.target).startswith((*CASTS, *MOVES)):
            todo += user.users
        else:
            path = module_path(user)
            is_linear = str(user.target).startswith(("aten.linear", "aten.addmm"))
            said = path if is_linear and path else describe(user)
            found.append(said)
    return list(dict.fromkeys(shortened(said) for said in found))


def shortened(said: str) -> str:
    """Leave out of a reader's name what is before its last module; a number stands for a block."""
    *words, path = said.split(" ")
    parts = path.split(".")
    last = f"{parts[-2]}.*" if len(parts) > 1 and parts[-1].isdigit() else parts[-1]
    return " ".join((*words, last))
