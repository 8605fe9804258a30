"""Certify that a conversion left a model's function unchanged.

The conversion is done again on float64 copies of the model, with its weights and with weights drawn
at random. Both sides are run on the given inputs and on fresh ones; where a conversion was found by
looking at an example (`sizes`), on inputs of other sizes and ranks as well.

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
import os
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

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

Inputs = tuple | dict[str, Any]  # positional or keyword arguments of the model
FindLogits = Callable[[Any], Tensor | None]  # output of a model -> logits (..., classes)


@dataclass(frozen=True)
class Check:
    """The model before against the model after, on one set of weights and inputs.

    Attributes:
        weights: "given" or "random".
        inputs: "given", "fresh" or "resized".
        dtype: type of the arithmetic.
        max_abs: largest difference of the outputs.
        max_rel: largest difference / largest magnitude, of the worst output tensor.
        kl: mean KL divergence in nats per position; None without logits.
        argmax_agreement: share of positions with the same most likely class; None without logits.
    """

    weights: str
    inputs: str
    dtype: str
    max_abs: float
    max_rel: float
    kl: float | None = None
    argmax_agreement: float | None = None


@dataclass(frozen=True)
class Certificate:
    """What was converted, how far before and after differ, and what was changed.

    Prints as a short text; to_json() holds everything.

    Attributes:
        what: name of the conversion.
        ok: every float64 check is within `tolerance`, and the check in the model's own type within
            `own_tolerance`.
        max_abs: largest difference in float64.
        max_rel: the same, relative to the largest output.
        tolerance: largest max_rel that is allowed in float64.
        own_tolerance: likewise in the model's own type; None for a model in float64.
        checks: in float64; then one in the model's own type, if that is another.
        folded: number of norms that were folded.
        inserted: number of centrings that were inserted.
        refusals: norms that were left, and why.
        parameters: parameters and buffers that changed: name -> {"before": hash, "after": hash}.
        kept: parameters that were not randomised; the conversion is exact for their present values
            alone.
        environment: commit, versions and device.
        reason: why it is not ok.
    """

    what: str
    ok: bool
    max_abs: float
    max_rel: float
    tolerance: float
    own_tolerance: float | None
    checks: list[Check]
    folded: int = 0
    inserted: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, dict[str, str | None]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def __str__(self) -> str:
        verdict = "exact" if self.ok else f"NOT exact ({self.reason})"
        lines = [
            f"{self.what}: {verdict}, largest float64 difference {self.max_abs:.1e}, "
            f"relative {self.max_rel:.1e}"
        ]
        for check in self.checks:
            line = (
                f"  {check.dtype}, {check.weights} weights, {check.inputs} inputs: "
                f"{check.max_rel:.1e}"
            )
            if check.kl is not None:
                line += f", KL {check.kl:.1e}, argmax agrees {check.argmax_agreement:.2%}"
            lines.append(line)
        if self.kept:
            lines.append(f"  only for the present values of {', '.join(self.kept)}")
        lines.append(
            "  for the arguments, branches and mode of the given inputs, in other sizes too"
        )
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all fields as JSON; differences that are not finite become null."""

        def finite_or_null(x: Any) -> Any:
            return None if isinstance(x, float) and not math.isfinite(x) else x

        return json.dumps(tree_map(finite_or_null, asdict(self)), indent=1)


# --------------------------------------------------------------------------------------- the checks


def certify(
    model: nn.Module,
    convert: Callable[[nn.Module], nn.Module],
    inputs: Inputs,
    *,
    what: str = "conversion",
    keep: Collection[str] = (),
    random_weights: bool = True,
    logits: FindLogits | None = None,
    tolerance: float = TOLERANCE,
    sizes: bool = False,
) -> tuple[nn.Module, Certificate]:
    """Convert a model and check that its function stayed the same.

    Args:
        model: it is left unchanged.
        convert: makes the new model; it must not change its argument. It is called again on
            float64 copies.
        inputs: positional (tuple) or keyword (dict) arguments of both models.
        what: a name of the conversion, for the certificate.
        keep: parameters that random weights leave alone, because the conversion relies on their
            values.
        random_weights: False for a conversion that is fitted to the weights it is given.
        logits: finds the logits (..., classes) in an output; the default takes the attribute or
            key `logits`, if there is one.
        tolerance: largest allowed difference in float64, relative to the largest output.
        sizes: with random weights, check also on inputs of other sizes and ranks (`other_sizes`),
            for a conversion that was found by looking at one example.

    Returns:
        (convert(model), its certificate)

    Raises:
        FoldError: a model cannot be run in float64, or its outputs cannot be compared.
    """
    after = convert(model)
    compare = partial(_check, logits=logits or _logits)
    kinds = ("given", "random") if random_weights else ("given",)
    checks, exact_output = _checks_in_float64(model, convert, inputs, kinds, keep, compare, sizes)
    worst = max(checks, key=attrgetter("max_rel"))
    limits = {worst: tolerance}
    own_tolerance = None
    own_types = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float64}
    if own_types:
        coarsest = max(own_types, key=lambda dtype: torch.finfo(dtype).eps)
        before = run(model, inputs, widen=False)
        own_check = compare("given", "given", before, run(after, inputs, widen=False))
        checks.append(replace(own_check, dtype=str(coarsest).removeprefix("torch.")))
        own_tolerance = OWN_TOLERANCE * torch.finfo(coarsest).eps / torch.finfo(torch.float32).eps
        rounding = compare("given", "given", exact_output, before).max_rel
        if math.isfinite(rounding):
            own_tolerance = max(own_tolerance, OWN_ERRORS * rounding)
        limits[checks[-1]] = own_tolerance
    reasons = [
        f"off by {check.max_rel:.1e} with {check.weights} weights on {check.inputs} inputs in "
        f"{check.dtype}, {limit:.0e} is allowed"
        for check, limit in limits.items()
        if not check.max_rel <= limit
    ]
    certificate = Certificate(
        what=what,
        ok=not reasons,
        max_abs=worst.max_abs,
        max_rel=worst.max_rel,
        tolerance=tolerance,
        own_tolerance=own_tolerance,
        checks=checks,
        parameters=touched(model, after),
        kept=sorted(keep) if random_weights else [],
        environment=environment(next((p.device for p in model.parameters()), torch.device("cpu"))),
        reason="; ".join(reasons),
    )
    return after, certificate


def changed(
    model: nn.Module,
    change: Callable[[nn.Module], None],
    inputs: Inputs,
    *,
    what: str,
    keep: Collection[str] = (),
    tolerance: float = TOLERANCE,
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

    def convert(old: nn.Module) -> nn.Module:
        new = copy.deepcopy(old)
        change(new)
        return new

    new, certificate = certify(
        model, convert, inputs, what=what, keep=keep, tolerance=tolerance, sizes=True
    )
    if certificate.ok:
        return new, replace(certificate, **told)
    return model, replace(certificate, what=f"{type(model).__name__}: rolled back")


def _checks_in_float64(
    model: nn.Module,
    convert: Callable[[nn.Module], nn.Module],
    inputs: Inputs,
    kinds: Collection[str],
    keep: Collection[str],
    compare: Callable[[str, str, Any, Any], Check],
    sizes: bool,
) -> tuple[list[Check], Any]:
    """Check the conversion of float64 copies, of `sizes` the worst.

    Returns:
        The checks, and the model's float64 output for its given weights and the given inputs.
    """
    checks = []
    outputs = []
    wide = widened(copy.deepcopy(model))
    inputs = _double(inputs)
    for kind in kinds:
        if kind == "random":
            randomize(wide, keep)
        converted = convert(wide)
        for source, x in (("given", inputs), ("fresh", fresh_inputs(inputs))):
            outputs.append(_run_wide(wide, x))
            checks.append(compare(kind, source, outputs[-1], run(converted, x)))
    resized = []
    for alternatives in other_sizes(inputs) if sizes else ():
        for x in alternatives:
            try:
                expected = run(wide, x)
                found = run(converted, x)
            except Exception:  # the model's forward may raise anything
                continue
            if all(y.isfinite().all() for y in _floats(expected)):
                resized.append(compare("random", "resized", expected, found))
            break
    return checks + sorted(resized, key=attrgetter("max_rel"))[-1:], outputs[0]


# ------------------------------------------------------------------------------- running in float64


WIDER = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)


class _Widen(TorchFunctionMode):
    """Turn casts to floats into casts to float64: the algebra is checked, not the rounding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (Tensor.float, Tensor.bfloat16, Tensor.half):
            function = Tensor.double
        args = tuple(WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {
            name: WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg
            for name, arg in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def widened(model: nn.Module) -> nn.Module:
    """Convert the model to float64, in place.

    That is its parameters, its buffers, and tensors that are plain attributes, also in lists.
    """
    for module in model.double().modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and _floats(value):
                vars(module)[name] = _double(value)
    return model


def _run_wide(model: nn.Module, inputs: Inputs) -> Any:
    """Run a model in float64; raise FoldError if it cannot be."""
    try:
        return run(model, inputs)
    except Exception as error:  # the model's forward may raise anything
        raise FoldError(
            f"{type(model).__name__} cannot be run in float64, as its check is "
            f"({first_line(error)}{code_line(error)}): keep its tensors in parameters or "
            "buffers, and no module of its own in a function, which would use that one in a copy"
        ) from error


def code_line(error: Exception) -> str:
    """Return, for messages, the line of a model's code at which an error arose; "" if none did."""
    folders = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(folders)]
    return f", at `{own[-1].line}`" if own and own[-1].line else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def plain_encoders() -> Iterator[None]:
    """Let nn.TransformerEncoder compute as it does with gradients.

    Without gradients torch may take a fast path, which hides the norms in one operation and puts
    zeros at padded positions.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
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
        with torch.random.fork_rng(), plain_encoders():
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
def randomize(model: nn.Module, keep: Collection[str] = ()) -> None:
    """Move all parameters but those named in `keep` by random amounts, in place.

    Vectors (gains, biases) move by 0.3 times a standard normal. In all others every row, every
    column and so on gets an offset of its own, so that no mean is zero by accident.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name in keep or not parameter.is_floating_point():
            continue
        is_vector = parameter.dim() < 2
        size = 0.3
        if not is_vector:  # 0.02 where all its numbers are equal
            size = 0.3 * float(parameter.std(correction=0)) or 0.02
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
        values = x.unique()
        if x.dim() == 0 or len(values) <= 2:
            return x
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            return x.mean() + x.std() * noise
        return values[torch.randint(len(values), x.shape, generator=generator).to(x.device)]

    return tree_map_only(Tensor, fresh, inputs)


def other_sizes(inputs: Inputs) -> Iterator[list[Inputs]]:
    """Draw inputs of other sizes and ranks, as far as one can tell which sizes go together.

    Yields:
        Lists of alternatives: the next one is for a model that does not take the last. Axes change
        together that have the same size, or the same place in their tensors. Shorter comes before
        longer, because an index beyond a table of positions breaks a process on a GPU.
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

    sizes = {(i, axis): size for i, x in tensors.items() for axis, size in enumerate(x.shape)}
    by_size = [[at for at in sizes if sizes[at] == size] for size in sizes.values()]
    by_place = [[at for at in sizes if at[1] == axis] for _, axis in sizes]
    for axes in dict.fromkeys(map(tuple, (*by_size, *by_place))):
        yield [
            resized(axes, lambda size: size - 1 if size > 2 else size + 1),
            resized(axes, lambda size: 2 * size if size < 32 else size // 2),
        ]
    # Axes more, of the last one's size: so norms of a fixed size take it, if it comes last. Axes
    # less: an example of (1, 1, T, C) may hide what happens to (T, C).
    deeper = tensors
    for n in (1, 2):
        deeper = {i: _deeper(x) for i, x in deeper.items()}
        yield [changed(deeper)]
        yield [changed({i: x[(0,) * n] for i, x in tensors.items() if x.dim() >= n})]


def _deeper(x: Tensor) -> Tensor:
    """Repeat x along a new axis after the first one."""
    if not x.dim():
        return x
    axis = min(1, x.dim() - 1)
    size = x.shape[-1] if x.numel() * x.shape[-1] <= LARGEST else 3
    return x.unsqueeze(axis).repeat_interleave(size, axis)


# -------------------------------------------------------------------------------- comparing tensors


def tensor_hash(tensor: Tensor) -> str:
    """Return the first 16 digits of the SHA-256 of a tensor's type, shape and numbers."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    whole = tensor.detach().cpu()
    whole = (whole.to_dense() if whole.layout is not torch.strided else whole).contiguous()
    # Read its memory, because NumPy may not be installed.
    digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
    return digest.hexdigest()[:16]


def touched(before: nn.Module, after: nn.Module) -> dict[str, dict[str, str | None]]:
    """Find the parameters and buffers, saved or not, that changed, appeared or disappeared.

    Returns:
        For each name, the hashes before and after; None stands for a tensor that is not there.
    """
    old, new = (
        {
            name: tensor_hash(x)
            for name, x in {**model.state_dict(), **dict(model.named_buffers())}.items()
            if isinstance(x, Tensor)
        }
        for model in (before, after)
    )
    return {
        name: {"before": old.get(name), "after": new.get(name)}
        for name in old | new
        if old.get(name) != new.get(name)
    }


def _check(weights: str, inputs: str, before: Any, after: Any, logits: FindLogits) -> Check:
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
    kl = agreement = None
    p = logits(before)
    q = logits(after)
    if p is not None and p.shape == q.shape:
        log_p = p.double().log_softmax(-1)
        log_q = q.double().log_softmax(-1)
        # A class of probability 0 adds nothing; -inf - -inf would be NaN.
        terms = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p - log_q))
        kl = terms.sum(-1).mean().item()
        agreement = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    return Check(
        weights=weights,
        inputs=inputs,
        dtype=str(first[0].dtype).removeprefix("torch."),
        max_abs=max(absolute for absolute, _ in differences),
        max_rel=max(relative for _, relative in differences),
        kl=kl,
        argmax_agreement=agreement,
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


def _logits(output: Any) -> Tensor | None:
    """Find the logits in an output: its key or attribute `logits`."""
    if isinstance(output, dict):
        found = output.get("logits")
    else:
        found = inspect.getattr_static(output, "logits", None)
    return found if isinstance(found, Tensor) else None


def _floats(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _double(inputs: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
