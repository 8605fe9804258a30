"""Certify that a conversion left a model's function unchanged.

The conversion is done again on float64 copies of the model, with its weights and with weights drawn
at random. Both sides are run on the given inputs and on fresh ones; where a conversion was found by
looking at an example (`sizes`), on inputs of other magnitudes, sizes and ranks as well.

    after, certificate = certify(model, convert, {"input_ids": ids})
    certificate.ok, certificate.max_rel, certificate.to_json()

Random weights are needed because initial weights hide mistakes: with gains of 1, biases of 0 and
centred embeddings, many a wrong conversion looks right. Float64 is needed because rounding hides
mistakes, too. So code that casts to float32 casts to float64 while it is checked.
"""

import copy
import ctypes
import hashlib
import inspect
import json
import math
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from .lines import WIDER, wider
from .siblings import FoldError, environment

# Largest allowed difference in float64, relative to the largest output. A wrong conversion differs
# by 1e-4 and more.
TOLERANCE = 1e-12
# Likewise in float32: 17 eps. In other types it is as many eps of that type.
OWN_TOLERANCE = 2e-6
# A model that itself differs more from its float64 form is allowed this multiple of that.
OWN_ERRORS = 4
SEED = 5489
LARGEST = 1 << 22  # numbers of an input with one axis more
MOST_KEPT = 1 << 18  # numbers of an output that are compared, where there are dozens of outputs
SCALES = (0.01, 100.0)  # what inputs are multiplied by, for a check at other magnitudes

Inputs = tuple | dict[str, Any]  # positional or keyword arguments of the model


@dataclass(frozen=True)
class Check:
    """The model before against the model after, on one set of weights and inputs.

    Attributes:
        weights: "given" or "random".
        inputs: "given", "fresh", "scaled" or "resized".
        dtype: type of the arithmetic.
        max_abs: largest difference of the outputs.
        max_rel: largest difference / largest magnitude, of the worst output tensor.
        tolerance: largest max_rel that is allowed.
    """

    weights: str
    inputs: str
    dtype: str
    max_abs: float
    max_rel: float
    tolerance: float


@dataclass(frozen=True)
class Written:
    """How far what is written is off, beside the model that it was made of.

    All three are largest differences to the float64 output of the model before, with its weights
    and on the given inputs, relative to the largest output.

    Attributes:
        dtype: the coarsest type of the weights.
        before: of the model before, computed in its own type.
        after: of the model after, computed in its own type.
        after_float64: of the weights after, computed in float64: what storing them has rounded.
    """

    dtype: str
    before: float
    after: float
    after_float64: float


@dataclass(frozen=True)
class Certificate:
    """What was converted, how far before and after differ, and what was changed.

    Prints as a short text; to_json() holds everything.

    Attributes:
        what: what was converted to what, for people.
        ok: every check is within its tolerance.
        max_abs: largest difference in float64.
        max_rel: the same, relative to the largest output.
        checks: in float64; then one in the model's own type, if that is another.
        folded: number of norms that were folded; None where a whole model of ours was converted.
        inserted: number of centrings that were inserted.
        refusals: norms that were left, and why.
        parameters: names of the parameters and buffers that changed, appeared or disappeared.
        environment: commit, versions and device.
        reason: why it is not ok.
        kl: mean KL divergence of next-token distributions in nats a token, of GPTs alone.
        written: of a model whose weights are not float64: how far off what is written is.
        not_covered: uses of the model of which the certificate says nothing, or that do change.
        examples: name or position of each argument -> type and shape, or value.
        seed: of random weights and fresh inputs.
        weights: SHA-256 of the weights "before" and "after" (`weights_hash`).
        to: name of the conversion.
        notes: what else is to be said, for people.
    """

    what: str
    ok: bool
    max_abs: float
    max_rel: float
    checks: list[Check]
    folded: int | None = 0
    inserted: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    kl: float | None = None
    written: Written | None = None
    not_covered: list[str] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    seed: int = SEED
    weights: dict[str, str] = field(default_factory=dict)
    to: str = ""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "exact" if self.ok else f"NOT exact ({self.reason})"
        lines = [
            f"{self.what}: {verdict}, largest float64 difference {self.max_abs:.1e}, "
            f"relative {self.max_rel:.1e}"
        ]
        lines += [
            f"  {check.dtype}, {check.weights} weights, {check.inputs} inputs: relative "
            f"{check.max_rel:.1e}"
            for check in self.checks
        ]
        if self.written is not None:
            lines.append(
                f"  what is written, in {self.written.dtype}: off from the float64 original by a "
                f"relative {self.written.after:.1e}, the original in that type by "
                f"{self.written.before:.1e}"
            )
        if self.kl is not None:
            lines.append(f"  KL {self.kl:.1e} nats a token")
        if self.ok:
            is_resized = any(check.inputs == "resized" for check in self.checks)
            sizes = ", in other sizes too" if is_resized else ""
            lines.append(f"  for the arguments, branches and mode of the given inputs{sizes}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  not covered: {use}" for use in self.not_covered]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=1)


# --------------------------------------------------------------------------------------- the checks


def certify(
    model: nn.Module,
    convert: Callable[[nn.Module], nn.Module],
    inputs: Inputs,
    *,
    what: str = "conversion",
    random_weights: bool = True,
    sizes: bool = False,
) -> tuple[nn.Module, Certificate]:
    """Convert a model and check that its function stayed the same.

    Args:
        model: it is left unchanged.
        convert: returns the new model; it may change its argument, a copy that is made for it. It
            is called again on float64 copies.
        inputs: positional (tuple) or keyword (dict) arguments of both models.
        what: a name of the conversion, for the certificate.
        random_weights: False for a conversion that is fitted to the weights it is given.
        sizes: with random weights, check also on inputs of other magnitudes (`scaled_inputs`), and
            of other sizes and ranks (`other_sizes`), for a conversion that was found by looking at
            one example.

    Returns:
        (convert(copy of model), its certificate)

    Raises:
        FoldError: a model cannot be run in float64, or its outputs cannot be compared.
    """
    kinds = ("given", "random") if random_weights else ("given",)
    # These come first: later there is one more copy of the model in memory.
    checks, exact_output = _checks_in_float64(model, convert, inputs, kinds, sizes)
    worst = max(checks, key=attrgetter("max_rel"))
    own_type = _own_type(model)
    if own_type is not None:
        # In a copy that is gone before `after` is made: both would be three models at once.
        stored_output = run(widened(convert(duplicate(model))), _double(inputs))
    after = convert(duplicate(model))
    written = None
    if own_type is not None:
        float64_outputs = exact_output, stored_output
        own, written = _checks_in_own_type(model, after, inputs, own_type, float64_outputs)
        checks.append(own)
    reasons = [
        f"off by a relative {check.max_rel:.1e} with {check.weights} weights on {check.inputs} "
        f"inputs in {check.dtype}, {check.tolerance:.0e} is allowed"
        for check in dict.fromkeys((worst, checks[-1]))
        if not check.max_rel <= check.tolerance
    ]
    certificate = Certificate(
        what=what,
        ok=not reasons,
        max_abs=max(check.max_abs for check in checks if check.dtype == worst.dtype),
        max_rel=worst.max_rel,
        checks=checks,
        parameters=touched(model, after),
        environment=environment(next((p.device for p in model.parameters()), torch.device("cpu"))),
        reason="; ".join(reasons),
        written=written,
        examples=_described(inputs),
        weights={"before": weights_hash(model), "after": weights_hash(after)},
    )
    return after, certificate


def changed(
    model: nn.Module,
    change: Callable[[nn.Module], None],
    inputs: Inputs,
    *,
    what: str,
    **told: Any,
) -> tuple[nn.Module, Certificate]:
    """Change a copy of a model, if that leaves its function as it was.

    Args:
        change: changes a model in place.
        told: further fields of the certificate.

    The others are those of `certify`, which checks it on other sizes, too.

    Returns:
        (copy, certificate); if its check fails, (model, certificate).
    """

    def convert(new: nn.Module) -> nn.Module:
        change(new)
        return new

    # Before the check, after which there is one more copy of the model in memory
    uses = [*_not_read(model, inputs), *_other_outputs(model, change, inputs), *FOLDED_USES]
    new, certificate = certify(model, convert, inputs, what=what, sizes=True)
    if not certificate.ok:
        return model, replace(certificate, what=f"{type(model).__name__}: rolled back")
    if certificate.parameters:
        certificate = replace(certificate, not_covered=uses)
    return new, replace(certificate, **told)


def _checks_in_float64(
    model: nn.Module,
    convert: Callable[[nn.Module], nn.Module],
    inputs: Inputs,
    kinds: Collection[str],
    sizes: bool,
) -> tuple[list[Check], Any]:
    """Check the conversion of float64 copies; of other magnitudes and of other sizes the worst.

    There is one float64 copy at a time: it is run on all inputs, converted, and run again.

    Returns:
        The checks, and the model's float64 output for its given weights and the given inputs.
    """
    checks = []
    first_outputs = []
    inputs = _double(inputs)
    for kind in kinds:
        wide = widened(duplicate(model, wide=True))
        if kind == "random":
            randomize(wide)
        cases = [
            (source, x, _run_in_float64(wide, x))
            for source, x in (("given", inputs), ("fresh", fresh_inputs(inputs)))
        ]
        first_outputs.append(cases[0][2])
        others = list(_other_cases(wide, inputs)) if sizes and kind == "random" else []
        converted = convert(wide)
        del wide
        checks += [_check(kind, source, y, run(converted, x)) for source, x, y in cases]
        worst: dict[str, Check] = {}
        for source, x, y in others:
            try:
                check = _check(kind, source, y, _thinned(run(converted, x)))
            except Exception:  # such as a norm that was folded for one rank, and refuses others
                continue
            if source not in worst or check.max_rel > worst[source].max_rel:
                worst[source] = check
        checks += worst.values()
        del converted
    return checks, first_outputs[0]


def _run_in_float64(model: nn.Module, inputs: Inputs) -> Any:
    """Run a float64 model; raise FoldError if that is not possible."""
    try:
        return run(model, inputs)
    except Exception as error:  # the model's forward may raise anything
        remedy = (
            "keep its tensors in parameters or buffers, and no module of its own in a function, "
            "which would use that one in a copy"
        )
        if getattr(getattr(model, "config", None), "_experts_implementation", "") == "grouped_mm":
            remedy = 'model.set_experts_implementation("batched_mm"), as hub.load_pretrained does'
        raise FoldError(
            f"{type(model).__name__} cannot be run in float64, as its check is "
            f"({first_line(error)}): {remedy}"
        ) from error


def _other_cases(model: nn.Module, inputs: Inputs) -> Iterator[tuple[str, Inputs, Any]]:
    """Yield (kind, inputs, output) for inputs of other magnitudes, sizes and ranks.

    Of alternatives the first one that the model takes counts. What gives no finite output is left
    out.
    """
    for source, lists in (("scaled", scaled_inputs(inputs)), ("resized", other_sizes(inputs))):
        for alternatives in lists:
            for x in alternatives:
                try:
                    output = run(model, x)
                except Exception:  # the model's forward may raise anything
                    continue
                if all(y.isfinite().all() for y in _floats(output)):
                    yield source, x, _thinned(output)
                break


def _thinned(output: Any) -> Any:
    """Keep at most some MOST_KEPT numbers of each tensor of an output, from all over it.

    There are dozens of cases, and the logits of each may take as much memory as a model.
    """

    def thinned(x: Tensor) -> Tensor:
        step = math.ceil(x.numel() / MOST_KEPT)
        if step < 2:
            return x
        while math.gcd(step, x.shape[-1]) > 1:  # so that all channels are among them
            step += 1
        return x.flatten()[::step].clone()

    return tree_map_only(Tensor, thinned, output)


def _own_type(model: nn.Module) -> torch.dtype | None:
    """Return the coarsest type of a model's parameters; None for a float64 model."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float64}
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _checks_in_own_type(
    model: nn.Module,
    after: nn.Module,
    inputs: Inputs,
    own_type: torch.dtype,
    float64_outputs: tuple[Any, Any],
) -> tuple[Check, Written]:
    """Compare both models in their own type, each with the other and with the float64 output.

    Args:
        own_type: that of `_own_type`.
        float64_outputs: of the model, and of the weights that `after` stores.
    """
    exact_output, stored_output = float64_outputs
    before_output = run(model, inputs, widen=False)
    after_output = run(after, inputs, widen=False)
    rounding, written, stored = (
        _check("given", "given", exact_output, output).max_rel
        for output in (before_output, after_output, stored_output)
    )
    tolerance = OWN_TOLERANCE * torch.finfo(own_type).eps / torch.finfo(torch.float32).eps
    if math.isfinite(rounding):
        tolerance = max(tolerance, OWN_ERRORS * rounding)
    own = _check("given", "given", before_output, after_output)
    dtype = str(own_type).removeprefix("torch.")
    return replace(own, tolerance=tolerance), Written(dtype, rounding, written, stored)


# ------------------------------------------------------------------------------ what is not covered


# Uses that no run of the model itself shows
FOLDED_USES = (
    "adapters of the original (LoRA, prompts): merge them first, and convert the merged model",
    "rows of the original's embeddings that are copied into this model",
    "training: the same function of other weights takes other steps",
)


class _Reads(TorchFunctionMode):
    """Note which parameters a model's functions get."""

    def __init__(self):
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter):
                self.found.add(id(value))
        return function(*args, **(kwargs or {}))


def _not_read(model: nn.Module, inputs: Inputs) -> list[str]:
    """Say which parameters the example does not use: nothing that reads them is checked."""
    try:
        with _Reads() as reads:
            run(model, inputs, widen=False)
    except Exception:  # it cannot be run, which is said where it is checked
        return []
    names = [name for name, one in model.named_parameters() if id(one) not in reads.found]
    if not names:
        return []
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    return [f"what the example does not run: it uses neither {names[0]}{more}"]


def _other_outputs(
    model: nn.Module, change: Callable[[nn.Module], None], inputs: Inputs
) -> list[str]:
    """Say what a model of transformers gives in other uses that the conversion changes.

    These are its base model, which AutoModel loads from the same folder, and hidden states. They
    are compared in float64, where a change is told from rounding.
    """
    if not isinstance(inputs, dict) or not hasattr(model, "base_model_prefix"):
        return ["values inside it (attributes, what hooks see): they are those of changed weights"]
    base = model.base_model
    takes = inspect.signature(base.forward).parameters
    inputs = _double(inputs)
    base_inputs = {name: value for name, value in inputs.items() if name in takes}
    hidden_inputs = inputs | {"output_hidden_states": True}
    base_use = f"AutoModel of this folder ({type(base).__name__})"
    # AutoModel of a T5 returns the last of them, though it has no base model of its own.
    hidden_use = "hidden states (output_hidden_states), and AutoModel where it returns one"

    def outputs(wide: nn.Module) -> dict[str, Any]:
        found = {base_use: _output_or_error(wide.base_model, base_inputs)}
        with _outputs_of_parts(wide) as parts:
            found[hidden_use] = _output_or_error(wide, hidden_inputs)
        return parts | found

    wide = widened(duplicate(model, wide=True))
    before = outputs(wide)
    change(wide)
    after = outputs(wide)
    found = []
    for use in before:
        errors = [one for one in (before[use], after[use]) if isinstance(one, Exception)]
        if errors:
            found.append(f"{use}: not compared ({first_line(errors[0])})")
            continue
        differences = _named_differences(before[use], after[use])
        name, difference = max(differences, key=itemgetter(1), default=("", 0.0))
        if not difference <= TOLERANCE:
            found.append(f"{use}: {name} is another, off by a relative {difference:.1e}")
    return found


@contextmanager
def _outputs_of_parts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Keep what parts of a model of transformers return that other classes load by themselves.

    Yields:
        A dictionary that is filled: a part's class and path -> its output at its latest call.
    """
    outputs: dict[str, Any] = {}
    hooks = []
    for path, part in model.named_modules():
        if path and part is not model.base_model and hasattr(part, "base_model_prefix"):
            use = f"{type(part).__name__} ({path}) by itself"

            def keep(module: nn.Module, args: tuple, output: Any, use: str = use) -> None:
                # A copy of the container: CLIP puts what it projects into it later.
                outputs[use] = tree_map(lambda x: x, output)

            hooks.append(part.register_forward_hook(keep))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _output_or_error(model: nn.Module, inputs: Inputs) -> Any:
    """Return a float64 model's output, or what its forward raises."""
    try:
        return run(model, inputs)
    except Exception as error:  # it may raise anything
        return error


def _named_differences(before: Any, after: Any) -> Iterator[tuple[str, float]]:
    """Yield (path, largest relative difference) for the floating-point tensors of two outputs."""
    first, second = (tree_flatten_with_path(one)[0] for one in (before, after))
    for (path, a), (_, b) in zip(first, second, strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            yield keystr(path), _difference(a, b)[1]


# ------------------------------------------------------------------------------- running in float64


def duplicate(model: nn.Module, wide: bool = False) -> nn.Module:
    """Copy a model, and let functions that hold its modules by weak references hold the copies.

    copy.deepcopy leaves weak references as they are: a module in fairscale's checkpoint_wrapper,
    whose forward is such a function, would go on running the original.

    Args:
        wide: parameters are copied in float64 at once, without a copy in their own type.
    """
    memo: dict[int, Any] = {}
    if wide:
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.dtype in WIDER:
                wide_one = nn.Parameter(parameter.detach().double(), parameter.requires_grad)
                memo[id(parameter)] = wide_one
    new = copy.deepcopy(model, memo)
    known = {
        id(part): memo[id(part)]
        for part in (*model.modules(), *model.parameters(), *model.buffers())
        if id(part) in memo
    }
    for module in model.modules():
        weak = {id(ref): weakref.ref(memo[id(module)]) for ref in weakref.getweakrefs(module)}
        for name, value in vars(module).items():
            if weak and isinstance(value, partial):
                vars(memo[id(module)])[name] = copy.deepcopy(value, known | weak)
    return new


class _Widen(TorchFunctionMode):
    """Turn casts to floats into casts to float64: the algebra is checked, not the rounding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (Tensor.float, Tensor.bfloat16, Tensor.half):
            function = Tensor.double
        args = tuple(map(wider, args))
        kwargs = {name: wider(arg) for name, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def widening() -> Iterator[None]:
    """Compute in float64 also where code casts to float32, or makes tensors without a type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(default)


def widened(model: nn.Module) -> nn.Module:
    """Convert the model to float64, in place.

    That is its parameters, its buffers, and tensors that are plain attributes, also in lists.
    """
    for module in model.double().modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and _floats(value):
                vars(module)[name] = _double(value)
    return model


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _both(
    pred: bool | Tensor, true_fn: Callable, false_fn: Callable, operands: tuple | list = ()
) -> Any:
    """Compute both branches of a torch.cond, and choose."""
    choose = partial(torch.where, torch.as_tensor(pred).reshape(()))
    return tree_map(choose, true_fn(*operands), false_fn(*operands))


@contextmanager
def plain_operations() -> Iterator[None]:
    """Let nn.TransformerEncoder and torch.cond compute with plain operations.

    Without gradients torch may take a fast path through the encoder, which hides the norms in one
    operation and puts zeros at padded positions. torch.cond hides what is in its branches.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with patch.object(torch, "cond", _both):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs, widen: bool = True) -> Any:
    """Run a model, in the mode (train or eval) that it is in, and return its output.

    Every call uses the same random numbers. The model's buffers (a BatchNorm's averages, say) are
    put back afterwards.

    Args:
        model: in float64, if `widen` is set.
        inputs: positional (tuple) or keyword (dict) arguments.
        widen: compute in float64 also where the model's code casts to float32.
    """
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    buffers = [buffer.clone() for buffer in model.buffers()]
    default = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), plain_operations():
            torch.manual_seed(SEED)
            # Copies, because a model may write into its inputs.
            args, kwargs = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            if not widen:
                return model(*args, **kwargs)
            torch.set_default_dtype(torch.float64)
            with _Widen():
                return model(*args, **kwargs)
    finally:
        torch.set_default_dtype(default)
        for buffer, old in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(old)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move all parameters by random amounts, in place; masks, which have infinities, stay.

    Vectors (gains, biases) move by 0.3 times a standard normal. In all others every row, every
    column and so on gets an offset of its own, so that no mean is zero by accident.
    """
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.isfinite().all():
            continue
        is_vector = parameter.dim() < 2
        spread = 1.0 if is_vector else float(parameter.std(correction=0))
        size = 0.3 * spread or 0.02  # where all its numbers are equal
        for axis in range(parameter.dim()):
            shape = [1] * parameter.dim()
            shape[axis] = parameter.shape[axis]
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            if not is_vector:
                noise = noise + 0.5
            parameter += size * noise.to(parameter)


def fresh_inputs(inputs: Inputs) -> Inputs:
    """Draw other inputs of the same kind.

    Floats are drawn with their mean and spread, token ids from those that are present. Masks (at
    most two different values) and scalars stay.
    """
    generator = torch.Generator().manual_seed(SEED)

    def fresh(x: Tensor) -> Tensor:
        if _is_mask(x):
            return x
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            return x.mean() + x.std() * noise
        values = x.unique()
        return values[torch.randint(len(values), x.shape, generator=generator).to(x.device)]

    return tree_map_only(Tensor, fresh, inputs)


def _is_mask(x: Tensor) -> bool:
    """Tell whether a tensor is a mask or a scalar, whose values mean something."""
    return x.dim() == 0 or len(x.unique()) <= 2


def scaled_inputs(inputs: Inputs) -> Iterator[list[Inputs]]:
    """Multiply the floats of the inputs by SCALES; masks and scalars stay.

    Yields:
        Lists of one, as `other_sizes` does; none where there is nothing to multiply.
    """
    if all(_is_mask(x) for x in _floats(inputs)):
        return
    for scale in SCALES:

        def scaled(x: Tensor, scale: float = scale) -> Tensor:
            return x * scale if x.is_floating_point() and not _is_mask(x) else x

        yield [tree_map_only(Tensor, scaled, inputs)]


def other_sizes(inputs: Inputs) -> Iterator[list[Inputs]]:
    """Draw inputs of other sizes and ranks, as far as one can tell which sizes go together.

    Yields:
        Lists of alternatives: the next one is for a model that does not take the last. Axes change
        together that have the same size, or the same place in their tensors. Longer is tried after
        shorter, and on a GPU only where that is not taken: an index beyond a table of positions
        breaks a process there.
    """
    leaves, structure = tree_flatten(inputs)
    tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.numel()}

    def changed(new: dict[int, Tensor]) -> Inputs:
        return fresh_inputs(
            tree_unflatten([new.get(i, x) for i, x in enumerate(leaves)], structure)
        )

    def resized(axes: Collection[tuple[int, int]], size: Callable[[int], int]) -> Inputs:
        new = dict(tensors)
        for i, axis in axes:
            old = new[i].shape[axis]
            index = torch.arange(size(old), device=new[i].device) % old
            new[i] = new[i].index_select(axis, index)
        return changed(new)

    on_cpu = all(x.device.type == "cpu" for x in tensors.values())
    sizes = {(i, axis): size for i, x in tensors.items() for axis, size in enumerate(x.shape)}
    by_size = [[at for at in sizes if sizes[at] == size] for size in sizes.values()]
    by_place = [[at for at in sizes if at[1] == axis] for _, axis in sizes]
    for axes in dict.fromkeys(map(tuple, (*by_size, *by_place))):
        yield [
            resized(axes, lambda size: size - 1 if size > 2 else size + 1),
            resized(axes, lambda size: 2 * size if size < 32 else size // 2),
        ]
        if on_cpu:
            yield [resized(axes, lambda size: 2 * size if size < 32 else size + 1)]
    # Axes more, of the last one's size: so norms of a fixed size take it, if it comes last. Axes
    # less: an example of (1, 1, T, C) may hide what happens to (T, C). In front: an example without
    # a batch, as convolutions take it, may hide what happens to a batch.
    deeper = tensors
    for n in (1, 2, 3):
        deeper = {i: _deeper(x) for i, x in deeper.items()}
        first_of_axes = {i: x[(0,) * n] for i, x in tensors.items() if x.dim() >= n}
        axes_in_front = {i: x[(None,) * n] for i, x in tensors.items()}
        for new in (deeper, first_of_axes, axes_in_front):
            yield [changed(new)]


def _deeper(x: Tensor) -> Tensor:
    """Repeat x along a new axis after the first one."""
    if not x.dim():
        return x
    axis = min(1, x.dim() - 1)
    # Token ids have no channels, and each may cost a model a row of them.
    size = x.shape[-1] if x.is_floating_point() and x.numel() * x.shape[-1] <= LARGEST else 3
    return x.unsqueeze(axis).repeat_interleave(size, axis)


# -------------------------------------------------------------------------------- comparing tensors


def touched(before: nn.Module, after: nn.Module) -> list[str]:
    """Name the parameters and buffers, saved or not, that changed, appeared or disappeared."""
    old, new = ({**one.state_dict(), **dict(one.named_buffers())} for one in (before, after))
    return [name for name in old | new if not _same(old.get(name), new.get(name))]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)  # what a module saves beside its tensors
    return a.dtype == b.dtype and torch.equal(a.to_dense(), b.to_dense())


def _check(weights: str, inputs: str, before: Any, after: Any) -> Check:
    """Compare all floating-point tensors of two outputs.

    NaNs, infinities at different places and different shapes count as an infinite difference.
    """
    first = _floats(before)
    second = _floats(after)
    if len(first) != len(second) or not first:
        raise FoldError(
            f"the model returned {len(first)} floating-point tensors, the converted one "
            f"{len(second)}: nothing can be compared"
        )
    differences = [_difference(a, b) for a, b in zip(first, second)]
    return Check(
        weights=weights,
        inputs=inputs,
        dtype=str(first[0].dtype).removeprefix("torch."),
        max_abs=max(absolute for absolute, _ in differences),
        max_rel=max(relative for _, relative in differences),
        tolerance=TOLERANCE,
    )


def _difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest difference, and that divided by the largest magnitude of a."""
    if a.shape != b.shape or a.isnan().any() or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf, math.inf
    finite = a.isfinite()  # masked scores may be -inf
    if not finite.any():
        return 0.0, 0.0
    a = a[finite].double()
    difference = float((a - b[finite].double()).abs().max())
    return difference, difference / max(float(a.abs().max()), torch.finfo(torch.float64).tiny)


def _floats(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def _described(inputs: Inputs) -> dict[str, str]:
    """Return name or position of each argument -> type and shape of a tensor, or the value."""

    def described(value: Any) -> str:
        if not isinstance(value, Tensor):
            return str(value)
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"

    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return {str(name): str(tree_map(described, value)) for name, value in named}


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of all names, types, shapes and numbers of a state dict."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue  # what a module saves beside its tensors
        tensor = value.detach().to_dense().contiguous().cpu()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():
            sha.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return sha.hexdigest()
