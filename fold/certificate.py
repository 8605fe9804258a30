"""A certificate that a conversion left a model's function as it was: the conversion is done again
on float64 copies, with the weights as they are and with weights drawn at random, and both sides are
run on the given and on fresh inputs.

    after, certificate = certify(model, convert, {"input_ids": ids})
    certificate.ok, certificate.max_rel, certificate.to_json()

Initial weights hide mistakes: gains of 1, biases of 0 and centred embeddings make many a wrong
conversion look right. Rounding hides them too, so code that casts to float32 on its way casts to
float64 while it is checked.
"""

import copy
import ctypes
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from .beside import FoldError, environment

# float64, relative to the largest output; a wrong conversion is off by 1e-4 and more
TOLERANCE = 1e-12
OWN_TOLERANCE = 2e-6  # float32, likewise; in other types as many units of rounding: 17 eps
# or, where that is more, so many times what the model itself is off from its float64 form
OWN_ERRORS = 4
SEED = 5489
PIECE = 1 << 22  # numbers of an output that are compared at a time

Inputs = tuple | dict[str, Any]  # positional or keyword arguments of the model


@dataclass(frozen=True)
class Check:
    """Before against after on one set of weights and inputs.

    KL in nats a position, mean; None without logits.
    """

    weights: str  # given or random
    inputs: str  # given or fresh
    dtype: str
    max_abs: float
    max_rel: float  # of each output: largest difference / largest magnitude
    kl: float | None = None
    argmax_agreement: float | None = None  # share of positions whose most likely class is the same


@dataclass(frozen=True)
class Certificate:
    """What was converted, how far before and after are apart, and what was touched."""

    what: str
    # every float64 check is within the tolerance, and that in the model's own dtype within
    # own_tolerance
    ok: bool
    max_abs: float  # of the worst float64 check
    max_rel: float
    tolerance: float
    own_tolerance: float | None  # None: the model is in float64
    checks: list[Check]  # in float64; then one in the model's own dtype, if it is another
    folded: int = 0
    inserted: int = 0
    refusals: dict[str, str] = field(default_factory=dict)  # what was left as it was -> why
    # name -> hash before, hash after
    parameters: dict[str, dict[str, str | None]] = field(default_factory=dict)
    # not randomised: it is exact for their present values alone
    kept: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why it is not ok

    def __str__(self) -> str:
        verdict = "exact" if self.ok else f"NOT exact ({self.reason})"
        lines = [
            f"{self.what}: {verdict}, largest float64 difference {self.max_abs:.1e}, "
            f"relative {self.max_rel:.1e}"
        ]
        for check in self.checks:
            kl = (
                ""
                if check.kl is None
                else f", KL {check.kl:.1e}, argmax agrees {check.argmax_agreement:.2%}"
            )
            lines.append(
                f"  {check.dtype}, {check.weights} weights, {check.inputs} inputs: "
                f"{check.max_rel:.1e}{kl}"
            )
        if self.kept:
            lines.append(f"  only for the present values of {', '.join(self.kept)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Differences that are not finite become null."""
        clean = tree_map(
            lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, asdict(self)
        )
        return json.dumps(clean, indent=1)


def certify(
    model: nn.Module,
    convert: Callable[[nn.Module], nn.Module],
    inputs: Inputs,
    *,
    what: str = "conversion",
    folded: int = 0,
    inserted: int = 0,
    refusals: dict[str, str] | None = None,
    keep: Collection[str] = (),
    random_weights: bool = True,
    logits: Callable[[Any], Tensor | None] | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[nn.Module, Certificate]:
    """(convert(model), its certificate). The model itself is left as it is.

    convert         new model from a model; must not change its argument. It is called again on
                    float64 copies
    inputs          positional (tuple) or keyword (dict) arguments of both models
    keep            parameters that random weights leave alone, because the conversion relies on
                    their values
    random_weights  False for conversions fitted to the weights they are given
    logits          finds the logits (..., classes) in an output; default: its attribute or key
                    `logits`, if any
    """
    after = convert(model)
    logits = logits or _logits
    checks, truth = [], None
    wide, wide_inputs = widened(copied(model)), _double(inputs)
    for weights in ("given", "random") if random_weights else ("given",):
        if weights == "random":
            randomize(wide, keep)
        converted = convert(wide)
        for source in ("given", "fresh"):
            x = wide_inputs if source == "given" else fresh_inputs(wide_inputs)
            before = _run_wide(wide, x)
            truth = before if truth is None else truth  # of given weights on given inputs
            checks.append(_check(weights, source, before, _run_wide(converted, x), logits))
    del wide, converted
    worst = max(checks, key=lambda check: check.max_rel)
    reasons = (
        []
        if worst.max_rel <= tolerance
        else [
            f"off by {worst.max_rel:.1e} with {worst.weights} weights on {worst.inputs} inputs, "
            f"{tolerance:.0e} is allowed"
        ]
    )
    own_tolerance = None
    if own := {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float64}:
        coarsest = max(own, key=lambda dtype: torch.finfo(dtype).eps)
        own_tolerance = OWN_TOLERANCE * torch.finfo(coarsest).eps / torch.finfo(torch.float32).eps
        before = run(model, inputs, widen=False)
        rounding = _check("given", "given", truth, before, logits).max_rel
        if math.isfinite(rounding):
            own_tolerance = max(own_tolerance, OWN_ERRORS * rounding)
        own_check = _check("given", "given", before, run(after, inputs, widen=False), logits)
        checks = [*checks, replace(own_check, dtype=_name(coarsest))]
        if not checks[-1].max_rel <= own_tolerance:
            reasons.append(
                f"off by {checks[-1].max_rel:.1e} in {_name(coarsest)}, "
                f"{own_tolerance:.0e} is allowed"
            )
    ok, reason = not reasons, "; ".join(reasons)
    certificate = Certificate(
        what,
        ok,
        worst.max_abs,
        worst.max_rel,
        tolerance,
        own_tolerance,
        checks,
        folded,
        inserted,
        refusals or {},
        touched(model, after),
        sorted(keep) if random_weights else [],
        environment(_device(model)),
        reason,
    )
    return after, certificate


class _Widen(TorchFunctionMode):
    """Casts to float32 become casts to float64: the algebra is checked, not the rounding."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            function = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {
            name: torch.float64 if arg is torch.float32 else arg
            for name, arg in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy.

    Raises FoldError for what cannot be copied, such as a result with gradients kept as an
    attribute.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever its attributes raise
        raise FoldError(
            f"{type(model).__name__} cannot be copied ({_first_line(error)}): remove tensors that "
            "its forward left in it, or run it without gradients"
        ) from error


def widened(model: nn.Module) -> nn.Module:
    """The model in float64, in place: parameters, buffers, and tensors that are plain attributes,
    also in lists.
    """
    for module in model.double().modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and _floats(value):
                vars(module)[name] = _double(value)
    return model


def _run_wide(model: nn.Module, inputs: Inputs) -> Any:
    try:
        return run(model, inputs)
    except Exception as error:  # whatever its forward raises
        raise FoldError(
            f"{type(model).__name__} cannot be run in float64, as its check is "
            f"({_first_line(error)}): keep its tensors in parameters or buffers"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def plain_encoders() -> Iterator[None]:
    """nn.TransformerEncoder as it computes with gradients. Without, torch may take another path,
    which hides its norms in one operation and puts zeros at padded positions.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs, widen: bool = True) -> Any:
    """The model's output, in the mode the model is in; randomness is the same for every call. The
    model's buffers (a BatchNorm's averages, say) are put back. With `widen`, everything is computed
    in float64.
    """
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    buffers = [buffer.clone() for buffer in model.buffers()]
    default = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(), plain_encoders():
            torch.manual_seed(SEED)
            if not widen:
                return model(*_copies(args), **_copies(kwargs))
            torch.set_default_dtype(torch.float64)
            with _Widen():
                return model(*_copies(args), **_copies(kwargs))
    finally:
        torch.set_default_dtype(default)
        for buffer, old in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(old)


@torch.no_grad()
def randomize(model: nn.Module, keep: Collection[str] = ()) -> None:
    """Move all parameters but those named in `keep`, in place: vectors (gains, biases) by 0.3 of a
    standard normal; in all others every row, column, ... gets an offset, so that no mean is zero by
    accident.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name in keep or not parameter.is_floating_point():
            continue
        size = 0.3 if parameter.dim() < 2 else 0.3 * float(parameter.std(correction=0)) or 0.02
        for axis in range(parameter.dim()):
            shape = [1] * parameter.dim()
            shape[axis] = parameter.shape[axis]
            noise = (
                torch.randn(shape, generator=generator, dtype=torch.float64)
                + (parameter.dim() > 1) * 0.5
            )
            parameter += size * noise.to(parameter)


def fresh_inputs(inputs: Inputs) -> Inputs:
    """Other inputs of the same kind: floats are drawn anew with their mean and spread, token ids
    anew from those present. Masks (two values or fewer) and scalars stay.
    """
    generator = torch.Generator().manual_seed(SEED)

    def fresh(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0 or x.numel() < 2:
            return x
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            return x if len(x.unique()) <= 2 else x.mean() + x.std() * noise
        values = x.unique()
        if len(values) <= 2:
            return x
        return values[torch.randint(len(values), x.shape, generator=generator).to(x.device)]

    return tree_map(fresh, inputs)


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 (first 16 digits) of type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    whole = tensor.detach().cpu().contiguous()
    # its memory; NumPy may not be there
    digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
    return digest.hexdigest()[:16]


def touched(before: nn.Module, after: nn.Module) -> dict[str, dict[str, str | None]]:
    """Parameters and buffers, saved or not, that differ, appeared or went: name -> their hashes
    before and after.
    """
    old, new = (
        {
            name: x
            for name, x in (
                *module.state_dict().items(),
                *module.named_buffers(remove_duplicate=False),
            )
            if isinstance(x, Tensor)
        }
        for module in (before, after)
    )
    found = {}
    for name in [*old, *(new.keys() - old.keys())]:
        a, b = old.get(name), new.get(name)
        if (
            a is None
            or b is None
            or a.shape != b.shape
            or a.dtype != b.dtype
            or not torch.equal(a, b)
        ):
            found[name] = {
                side: None if x is None else tensor_hash(x)
                for side, x in (("before", a), ("after", b))
            }
    return found


def _check(
    weights: str, inputs: str, before: Any, after: Any, logits: Callable[[Any], Tensor | None]
) -> Check:
    """Largest differences over all floating-point tensors of two outputs. NaNs, infinities in other
    places and other shapes are infinitely far apart.
    """
    first, second = _floats(before), _floats(after)
    if len(first) != len(second):
        raise FoldError(
            f"the model returned {len(first)} floating-point tensors, the converted one "
            f"{len(second)}: nothing can be compared"
        )
    if not first:
        raise FoldError(
            "the model's output holds no floating-point tensor: nothing can be compared"
        )
    apart = [_apart(a, b) for a, b in zip(first, second)]
    kl = agreement = None
    p, q = logits(before), logits(after)
    if p is not None and p.shape == q.shape:
        rows = [
            _kl(a, b) for a, b in zip(_pieces(p, p.shape[-1]), _pieces(q, q.shape[-1]), strict=True)
        ]
        kl, agreement = torch.cat(rows).mean(0).tolist()
    return Check(weights, inputs, _name(first[0].dtype), *map(max, zip(*apart)), kl, agreement)


def _pieces(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Rows of `width` numbers, a few at a time: logits of many positions are copied in pieces."""
    return x.reshape(-1, width).split(max(1, PIECE // width))


def _apart(a: Tensor, b: Tensor) -> tuple[float, float]:
    """(largest difference, relative to the largest magnitude of a)."""
    if a.shape != b.shape:
        return math.inf, math.inf
    difference = size = 0.0
    for x, y in zip(_pieces(a, 1), _pieces(b, 1)):
        if x.isnan().any() or not torch.equal(x.isfinite(), y.isfinite()):
            return math.inf, math.inf
        finite = x.isfinite()  # masked scores may be -inf
        if finite.any():
            x, y = x[finite].double(), y[finite].double()
            difference, size = (
                max(difference, float((x - y).abs().max())),
                max(size, float(x.abs().max())),
            )
    return difference, difference / max(size, torch.finfo(torch.float64).tiny)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """(N, 2): KL of each of N rows of logits in nats, and whether the most likely class is the
    same.
    """
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    terms = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p - log_q))
    return torch.stack([terms.sum(-1), (p.argmax(-1) == q.argmax(-1)).double()], -1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _logits(output: Any) -> Tensor | None:
    found = (
        output.get("logits")
        if isinstance(output, dict)
        else inspect.getattr_static(output, "logits", None)
    )
    return found if isinstance(found, Tensor) else None


def _floats(output: Any) -> list[Tensor]:
    return [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]


def _double(inputs: Any) -> Any:
    return tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs
    )


def _copies(inputs: Any) -> Any:
    """A model may write into its inputs."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)


def _device(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device
