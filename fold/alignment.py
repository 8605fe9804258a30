"""Compare the norms of two models with the same weights: which differs first, and why.

    print(compare(model, other, example, other_example))

Norms are paired by width and the sorted values of their gains, up to 1 + w or w, then by the order
in which they run. Two runs cannot tell norms apart: two kernels of attention differ by 2e-2 in
bfloat16, ten times the eps by 3e-6 in float32. So each pair is called on the same input, the one
that the norm of `model` received: formula, eps and gain are compared in float64, orders of rounding
by bits in 16 bits (norm_probes.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .certificate import Inputs, run
from .formulas import NO_EPS, NOT_A_NORM, Found, difference
from .gain_forms import one_a_channel
from .norm_probes import SECOND, SUM, UNPROBED, NormRow, NormsFound, norms_of, pattern, tensors
from .roundings import WIDTHS, orders

# By how much inputs of a norm may differ between two runs of the same function, relative to the
# largest number: rounding, and other kernels
NOISE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
SAME_GAIN = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # in other types 1e-5
SAME_EPS = 1e-3
SAME_OUTPUT = 1e-6  # in float64
SAME_BITS = 0.01  # largest share of 16-bit outputs that differ
AMPLIFIED = 30  # a difference of a norm's outputs may have grown by this on the way to the next

# In what two norms differ
KIND = "kind"
EPS = "eps"
PLACE = "place of eps"
OFFSET = "offset"
PERMUTED = "gain permuted"
GAIN = "gain"
BIAS = "bias"
ROUNDING = "rounding"
OWN = "rounding in float32"
STATISTIC = "statistic"
OTHER = "cause not known"
MISSING = "missing"
MORE = "one more"
CALLS = "calls"
INPUT = "other input"


@dataclass(frozen=True)
class Difference:
    """What differs between two norms: a cause, and what each does."""

    cause: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.text})"


@dataclass
class Pair:
    """A norm of the model, and the same norm of the other one.

    Attributes:
        one, other: None where it is missing.
        by_gains: they were paired by the values of their gains, not by their order alone.
        differences: all that differ, the coarsest first.
        effect: largest difference of their outputs on the same input, each in its own type,
            relative; None: not known.
        inputs: largest difference of the inputs that they received, relative; None: not known.
        is_of_other_size: those inputs have other numbers of elements.
        is_unread: one is missing in a model whose graph could not be read: it may be in a forward.
        unnamed: where one is missing, what stands at its path there, if no formula is known of it.
    """

    one: NormRow | None
    other: NormRow | None
    by_gains: bool = False
    differences: list[Difference] = field(default_factory=list)
    effect: float | None = None
    inputs: float | None = None
    is_of_other_size: bool = False
    is_unread: bool = False
    unnamed: NormRow | None = None

    @property
    def is_rounding(self) -> bool:
        """Do the two differ in rounding alone?"""
        causes = {found.cause for found in self.differences}
        return bool(causes) and causes <= {ROUNDING, STATISTIC, OWN}


@dataclass
class Comparison:
    """The norms of two models side by side.

    Attributes:
        pairs: in the order in which the model runs its norms.
        first: the first pair that differs, or gets another input; None if none does.
        cause: why; "" if nothing differs.
        proof: what follows if that one thing is replaced; "" where that is not possible.
        noise: the difference of inputs up to which they count as the same.
        outputs: by how much the outputs of the two models differ on the same example.
        is_noise: whether that is no more than noise.
        uncompared: why the two models did not run on the same example; "" if they did.
        later: after a first difference of rounding, what first changes more, and is no rounding.
        left_out: how many norms of the model, and of the other, have no known formula.
    """

    pairs: list[Pair]
    first: Pair | None
    cause: str
    proof: str
    noise: float
    outputs: str = ""
    is_noise: bool = True
    uncompared: str = ""
    later: str = ""
    left_out: tuple[int, int] = (0, 0)

    @property
    def has_difference(self) -> bool:
        """Does a norm differ, or get another input?"""
        return self.first is not None

    def __str__(self) -> str:
        return "\n".join((*self.verdict(), *self.listed()))

    def verdict(self) -> Iterator[str]:
        """Say what differs first and why, and by how much the models do."""
        if self.first is None and self.is_noise:
            yield f"no norm differs; {self.outputs}"
        elif self.first is None:
            yield (
                f"no norm differs, but the models do: {self.outputs}: what differs is no norm, or "
                "the order of norms"
            )
        else:
            yield f"first: {name_of_pair(self.first)}: {self.cause}"
        if self.proof:
            yield self.proof
        if self.later:
            yield f"first that is no rounding: {self.later}"
        if self.first is not None:
            yield self.outputs
        if any(self.left_out):
            here, there = self.left_out
            yield f"NOT compared, since no formula is known: {counted(here)} here, {there} there"
        if self.uncompared:
            yield f"inputs were NOT compared: {self.uncompared}"
            return
        both = [pair for pair in self.pairs if pair.one and pair.other]
        known = [pair.inputs for pair in both if pair.inputs is not None]
        if self.first is None and known:
            yield (
                f"the inputs of {len(known)} of {counted(len(both))} differ by {max(known):.1e} at "
                f"most ({self.noise:.0e} is noise)"
            )
        if len(known) < len(both):
            yield (
                f"inputs were NOT compared of {counted(len(both) - len(known))}: of another size "
                "there, or not known"
            )

    def listed(self) -> Iterator[str]:
        """Say how norms were paired, and how each pair differs."""
        both = [pair for pair in self.pairs if pair.one and pair.other]
        by_gains = sum(pair.by_gains for pair in both)
        yield (
            f"{counted(len(both))} paired: {by_gains} by their gains, {len(both) - by_gains} by "
            "their order alone"
        )
        groups: dict[tuple[str, str], list[Pair]] = {}
        for pair in self.pairs:
            for said in described(pair):
                # All that differ in the same things are one line, whatever their effects are.
                key = (pattern(name_of_pair(pair)), said.removesuffix(said_effect([pair])))
                groups.setdefault(key, []).append(pair)
        for (name, said), pairs in groups.items():
            shown = f"{name} ({len(pairs)})" if len(pairs) > 1 else name_of_pair(pairs[0])
            yield f"{shown}: {said}{said_effect(pairs)}"

    def record(self) -> dict[str, Any]:
        """Return what was found, for JSON."""
        pairs = [
            {
                "path": pair.one and pair.one.path,
                "other_path": pair.other and pair.other.path,
                "by_gains": pair.by_gains,
                "differences": [vars(found) for found in pair.differences],
                "effect": pair.effect,
                "inputs": pair.inputs,
            }
            for pair in self.pairs
        ]
        first = self.first and (self.first.one or self.first.other).path
        return {"pairs": pairs, "first": first, "cause": self.cause, "proof": self.proof} | {
            "outputs": self.outputs,
            "uncompared": self.uncompared,
            "later": self.later,
            "left_out_norms": self.left_out,
        }


def name_of_pair(pair: Pair) -> str:
    """Return the path of the norm in the first model; in the other where it stands there alone."""
    return (pair.one or pair.other).path or "the model itself"


def counted(count: int) -> str:
    """Write a number of norms."""
    return f"{count} norm" if count == 1 else f"{count} norms"


def said_effect(pairs: Sequence[Pair]) -> str:
    """Say by how much the outputs of pairs differ at most; "" where that is not known."""
    known = [pair.effect for pair in pairs if pair.differences and pair.effect is not None]
    if not known:
        return ""
    return f"; on the same input their outputs differ by {max(known):.0e}"


def kind_and_width(row: NormRow) -> str:
    """Name the formula of a norm, and over how many numbers it goes."""
    return f"{row.kind} over {row.width}" if row.width else row.kind


def described(pair: Pair) -> Iterator[str]:
    """Say how the two norms of a pair differ."""
    if pair.is_unread:
        row = pair.one or pair.other
        which = "other" if pair.other is None else "first"
        found = f"{row.kind} over {row.width}"
        yield f"not found in the {which} model, whose graph cannot be read ({found})"
    elif pair.unnamed is not None:
        here, there = (row or pair.unnamed for row in (pair.one, pair.other))
        yield str(Difference(KIND, f"{kind_and_width(here)} here, {kind_and_width(there)} there"))
    elif pair.other is None:
        yield f"{MISSING} in the other model ({pair.one.kind} over {pair.one.width})"
    elif pair.one is None:
        yield f"{MORE}, in the other model alone ({pair.other.kind} over {pair.other.width})"
    elif pair.differences:
        yield ", ".join(map(str, pair.differences)) + said_effect([pair])


# ------------------------------------------------------------------------------------------ pairing


def gains(row: NormRow) -> Tensor:
    """Return the gain of a norm, one number a channel, sorted."""
    found = row.norm.found
    return one_a_channel(found.layout, found.gain, 1e-7).sort().values


def same_gain(*rows: NormRow) -> float:
    """Return by how much equal gains may differ, as the types say in which they are stored."""
    types = [getattr(torch, row.gain_dtype or "float32") for row in rows]
    return max(SAME_GAIN.get(dtype, 1e-5) for dtype in types)


def has_same_gains(one: NormRow, other: NormRow) -> bool:
    """Tell whether two norms have the same gains in some order, one's perhaps all greater by 1."""
    a, b = gains(one), gains(other).to(gains(one).device)
    if a.shape != b.shape:
        return False
    tolerance = same_gain(one, other) * max(1.0, float(a.abs().max()))
    return any(float((a + shift - b).abs().max()) <= tolerance for shift in (0, 1, -1))


def align(ones: Sequence[NormRow], others: Sequence[NormRow]) -> list[Pair]:
    """Pair the norms of two models; those without a partner stand alone, where they run."""
    partner: dict[int, int] = {}
    similar: dict[int, list[int]] = {}  # i -> the norms of the other model with its gains
    for i, one in enumerate(ones):
        gain = gains(one)
        # Equal gains, of a norm that was never trained, say nothing.
        is_telling = gain.numel() > 1 and gain.std() > 0
        similar[i] = []
        if is_telling:
            similar[i] = [j for j, other in enumerate(others) if has_same_gains(one, other)]
    for i, found in similar.items():
        is_only = len(found) == 1 and sum(found[0] in more for more in similar.values()) == 1
        if is_only:
            partner[i] = found[0]
    by_gains = set(partner)
    left = [i for i in range(len(ones)) if i not in partner]
    right = [j for j in range(len(others)) if j not in partner.values()]
    steps = in_order([ones[i] for i in left], [others[j] for j in right])
    partner |= {left[i]: right[j] for i, j in steps}
    pairs = []
    placed = set()
    for i, one in enumerate(ones):
        other = others[partner[i]] if i in partner else None
        # What the other model alone runs before this one
        for j in range(partner.get(i, 0)):
            if j not in placed and j not in partner.values():
                placed.add(j)
                pairs.append(Pair(None, others[j]))
        pairs.append(Pair(one, other, i in by_gains))
    rest = [j for j in range(len(others)) if j not in placed and j not in partner.values()]
    return [*pairs, *(Pair(None, others[j]) for j in rest)]


def in_order(ones: Sequence[NormRow], others: Sequence[NormRow]) -> list[tuple[int, int]]:
    """Pair norms of one width or one path in the order in which they run, as many as possible.

    Of equally many, those with the same path, then those of one kind.
    """

    def worth(i: int, j: int) -> float:
        one, other = ones[i], others[j]
        if one.width != other.width and one.path != other.path:
            return 0.0
        return 1 + 0.01 * (one.path == other.path) + 0.001 * (one.kind == other.kind)

    best = [[0.0] * (len(others) + 1) for _ in range(len(ones) + 1)]
    for i in reversed(range(len(ones))):
        for j in reversed(range(len(others))):
            both = worth(i, j)
            taken = both + best[i + 1][j + 1] if both else 0.0
            best[i][j] = max(taken, best[i + 1][j], best[i][j + 1])
    found = []
    i = j = 0
    while i < len(ones) and j < len(others):
        both = worth(i, j)
        if both and best[i][j] == both + best[i + 1][j + 1]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


# ---------------------------------------------------------------------------------- what differs


def differences(one: NormRow, other: NormRow) -> list[Difference]:
    """Return what differs between two norms, the coarsest first."""
    a, b = one.norm.found, other.norm.found
    found = []
    same_formula = replace(a.formula, eps=0, place=NO_EPS) == replace(
        b.formula, eps=0, place=NO_EPS
    )
    if not same_formula or a.layout.size[2] != b.layout.size[2]:
        here, there = kind_and_width(one), kind_and_width(other)
        return [Difference(KIND, f"{here} here, {there} there")]
    if a.formula.place != b.formula.place:
        text = f"{_eps(one)} here, {_eps(other)} there"
        found.append(Difference(PLACE, text))
    elif abs(a.formula.eps - b.formula.eps) > SAME_EPS * max(a.formula.eps, b.formula.eps):
        here, there = (
            f"{row.eps:.5g}" + (f", {row.eps_of}'s own," if row.eps_of else "")
            for row in (one, other)
        )
        text = f"{here} here, {there} there"
        found.append(Difference(EPS, text))
    found += _gain_difference(one, other)
    zero = torch.zeros(1, dtype=torch.float64)
    biases = [zero if f.bias is None else one_a_channel(f.layout, f.bias, 1e-7) for f in (a, b)]
    if float((biases[0].cpu() - biases[1].cpu()).abs().max()) > 1e-2:
        if one.bias == other.bias:
            text = "other values"
        elif one.bias:
            text = "one here, none there"
        else:
            text = "none here, one there"
        found.append(Difference(BIAS, text))
    if one.calls != other.calls and not (one.by_hand or other.by_hand):
        text = f"called {times(one.calls)} here, {times(other.calls)} there"
        found.append(Difference(CALLS, text))
    return found + _rounding_differences(one, other, compare_bits=not found)


def times(count: int) -> str:
    """Write how often something happens."""
    return "once" if count == 1 else f"{count} times"


def _eps(row: NormRow) -> str:
    return "no eps" if row.place == NO_EPS else f"{row.eps:.5g} {row.place}"


def _gain_difference(one: NormRow, other: NormRow) -> list[Difference]:
    """Compare the gains of two norms, channel by channel."""
    founds = (one.norm.found, other.norm.found)
    a, b = (one_a_channel(found.layout, found.gain, 1e-7).cpu() for found in founds)
    if a.shape != b.shape and 1 not in (a.numel(), b.numel()):
        return [Difference(GAIN, f"{a.numel()} numbers here, {b.numel()} there")]
    tolerance = same_gain(one, other) * max(1.0, float(a.abs().max()))
    off = float((a - b).abs().max())
    if off <= tolerance:
        return []
    for shift in (1, -1):
        if float((a + shift - b).abs().max()) <= tolerance:
            more = "greater" if shift == 1 else "smaller"
            text = f"{one.gain} here, {other.gain} there: the gain there is {more} by 1"
            return [Difference(OFFSET, text)]
    if a.shape == b.shape and float((a.sort().values - b.sort().values).abs().max()) <= tolerance:
        return [Difference(PERMUTED, "the same values in another order")]
    return [Difference(GAIN, f"values differ by {off:.3g}")]


def _rounding_differences(one: NormRow, other: NormRow, compare_bits: bool) -> list[Difference]:
    """Compare orders of rounding; by the bits where one of them is not known.

    Args:
        compare_bits: false where the norms differ otherwise: then the bits say nothing.
    """
    both = one.float32, other.float32
    is_float32 = one.norm.dtype == other.norm.dtype == torch.float32
    differs = both[0].split(" (")[0] != both[1].split(" (")[0]  # not by how much alone
    if is_float32 and differs and UNPROBED not in both:
        here, there = (said or "nothing in 16 bits" for said in both)
        return [Difference(OWN, f"{here} here, {there} there")]
    for dtype in WIDTHS:
        a, b = (row.norm.roundings.get(dtype) for row in (one, other))
        name = str(dtype).removeprefix("torch.")
        if a is None or b is None:
            continue  # written out in a forward
        found = []
        known = "not known"
        if known not in (a.statistic, b.statistic) and a.statistic != b.statistic:
            text = f"{a.statistic} here, {b.statistic} there, in {name}"
            found.append(Difference(STATISTIC, text))
        offsets = {a.offset, b.offset} - {"", known}
        if known not in (a.gain, b.gain) and (a.gain != b.gain or len(offsets) > 1):
            here, there = (
                ", ".join(filter(None, (r.gain, r.offset and f"1 + w in {r.offset}"))) or "no gain"
                for r in (a, b)
            )
            found.append(Difference(ROUNDING, f"{here} here, {there} there, in {name}"))
        if found:
            return found
        if compare_bits and known in (a.statistic, b.statistic):
            share = different_bits(one, other, dtype)
            if share > SAME_BITS:
                text = f"{share:.0%} of the outputs in {name} differ: rounding or statistic"
                return [Difference(OTHER, text)]
    return []


def in_layout(rows: Tensor, found: Found) -> Tensor | None:
    """Arrange rows (R, G, n) of one norm as the input of another; None if they do not fit."""
    repeats, groups, count = found.layout.size
    if rows.shape[1:] != (groups, count):
        if rows.shape[-1] != count:
            return None
        rows = rows.reshape(-1, 1, count)
        rows = rows[: len(rows) // groups * groups].reshape(-1, groups, count)
    times = -(-repeats // max(1, len(rows)))
    return found.layout.tensor(rows.repeat(times, 1, 1)[:repeats])


def both_outputs(
    one: NormRow, other: NormRow, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return what two norms make of the input that the first received, as rows (R, G, n).

    Args:
        dtype: in which both are computed; None: each as it is, in its own type.
    """
    a, b = one.norm, other.norm
    functions = [norm.own if dtype is None else norm.function(dtype) for norm in (a, b)]
    if None in functions or a.x is None:
        return None
    rows = a.found.layout.rows(a.x.detach())
    there = in_layout(rows, b.found)
    if there is None:
        return None
    y = a.found.layout.rows(functions[0](a.found.layout.tensor(rows).to(dtype or a.dtype)))
    z = b.found.layout.rows(functions[1](there.to(a.x.device, dtype or b.dtype)))
    z = z.reshape(-1, z.shape[-1])
    y = y.reshape(-1, y.shape[-1])
    count = min(len(y), len(z))
    return y[:count], z[:count]


def own_effect(one: NormRow, other: NormRow) -> float | None:
    """Return by how much the outputs of two norms differ, each in its own type; None: not known."""
    try:
        both = both_outputs(one, other)
    except Exception:  # what a forward may raise for another input
        return None
    return None if both is None else difference(both[1].double(), both[0].double())


def different_bits(one: NormRow, other: NormRow, dtype: torch.dtype) -> float:
    """Return the share of outputs whose bits differ, on the same input in 16 bits; 0: not known."""
    try:
        both = both_outputs(one, other, dtype)
    except Exception:  # a norm that does not run in this type
        return 0.0
    return 0.0 if both is None else float((both[0].to(dtype) != both[1].to(dtype)).float().mean())


def input_difference(one: NormRow, other: NormRow) -> float | None:
    """Return by how much the inputs of two norms differ, relative to the largest number.

    Where one model arranges them in another way, the sorted numbers are compared. None if an input
    is not known.
    """
    a, b = given(one), given(other)
    if a is None or b is None or a.numel() != b.numel():
        return None
    a, b = a.double().cpu(), b.double().cpu()
    if a.shape == b.shape:
        return difference(b, a)
    return difference(b.flatten().sort().values, a.flatten().sort().values)


def is_of_other_size(one: NormRow, other: NormRow) -> bool:
    """Tell whether the inputs of two norms are known and have other numbers of elements."""
    a, b = given(one), given(other)
    return a is not None and b is not None and a.numel() != b.numel()


def given(row: NormRow) -> Tensor | None:
    """Return what a norm received: the sum, if it adds a second input first; None: not known."""
    call = row.norm.call
    if row.note.startswith(SECOND):
        return None
    if row.note != SUM:
        return row.norm.x
    return row.norm.x + sum(slot.get(call.args, call.kwargs) for slot in call.others)


# ------------------------------------------------------------------------------------------- proof


def patched(row: NormRow, found: Found | None) -> Callable:
    """Return a forward hook: the module's output becomes that of a formula; None: its input."""
    norm = row.norm

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        x = norm.call.slot.get(args, kwargs)
        if row.note == SUM:
            x = x + sum(slot.get(args, kwargs) for slot in norm.call.others)
        y = x
        if found is not None:
            y = found.layout.tensor(found.apply(found.layout.rows(x.double()))).to(x.dtype)
        if isinstance(output, Tensor):
            return y
        place = [i for i, value in enumerate(output) if value is tensors(output)[norm.output]]
        return type(output)(y if i == place[0] else value for i, value in enumerate(output))

    return hook


def is_replaceable(row: NormRow) -> bool:
    """Tell whether the output of a norm's module can be replaced: it is the norm and no more."""
    is_alone = row.norm.call is not None and (row.note == SUM or not row.norm.call.others)
    return is_alone and not row.by_hand


def with_one_thing(cause: str, one: Found, other: Found) -> Found | None:
    """Return the other norm with one thing as in the first; None for what no formula says."""
    formula = other.formula
    if cause == EPS:
        return replace(other, formula=replace(formula, eps=one.formula.eps))
    if cause == PLACE:
        new = replace(formula, eps=one.formula.eps, place=one.formula.place)
        return replace(other, formula=new)
    if cause in (OFFSET, GAIN, PERMUTED, BIAS):
        if one.gain.shape != other.gain.shape:
            return None
        return replace(other, bias=one.bias) if cause == BIAS else replace(other, gain=one.gain)
    if cause == OWN:
        return other  # computed without its casts
    if cause == KIND and one.layout.shape == other.layout.shape:
        return one
    return None


@torch.no_grad()
def outputs(model: nn.Module, inputs: Inputs, hooks: dict[str, Callable]) -> Tensor:
    """Return the first tensor of floats that a model returns, with hooks on some modules.

    A model that returns none gives an empty tensor.
    """
    handles = [
        model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
        for path, hook in hooks.items()
    ]
    try:
        return next(iter(tensors(run(model, inputs, widen=False))), torch.empty(0))
    finally:
        for handle in handles:
            handle.remove()


def prove(
    comparison: Comparison,
    model: nn.Module,
    other: nn.Module,
    inputs: Inputs,
    other_inputs: Inputs,
) -> str:
    """Replace the one thing that differs first, wherever it does, and say what follows."""
    first = comparison.first
    if first.is_unread or first.unnamed is not None or first.one is None or first.one.by_hand:
        return ""
    if first.other is not None and first.differences:
        cause = first.differences[0].cause
        if cause in (ROUNDING, STATISTIC):
            return _prove_bits(first)
        if cause == OWN and first.one.float32:
            return ""  # no formula has its casts
        hooks = {}
        for pair in comparison.pairs:
            is_alike = pair.one and pair.other and not pair.other.by_hand
            if is_alike and any(found.cause == cause for found in pair.differences):
                new = with_one_thing(cause, pair.one.norm.found, pair.other.norm.found)
                if new is None or not is_replaceable(pair.other):
                    return ""
                hooks[pair.other.path] = patched(pair.other, new)
        if not hooks:
            return ""
        return _said(
            f"with the {cause} of the first model in {counted(len(hooks))} of the other",
            outputs(model, inputs, {}),
            outputs(other, other_inputs, {}),
            outputs(other, other_inputs, hooks),
        )
    if first.other is None:
        missing = [pair.one for pair in comparison.pairs if pair.one and pair.other is None]
        if not all(map(is_replaceable, missing)):
            return ""
        hooks = {row.path: patched(row, None) for row in missing}
        return _said(
            f"without {counted(len(hooks))} in the first model",
            outputs(other, other_inputs, {}),
            outputs(model, inputs, {}),
            outputs(model, inputs, hooks),
        )
    return ""


def _said(how: str, aim: Tensor, before: Tensor, after: Tensor) -> str:
    """Say whether outputs agree once something is replaced."""
    if aim.shape != before.shape:
        return ""
    was, now = difference(before, aim), difference(after, aim)
    noise = NOISE.get(aim.dtype, 1e-3)
    verdict = "not the only cause"
    if max(was, now) <= noise:
        verdict = "no more than noise in the outputs"
    if was <= noise < now:
        verdict = "made up for elsewhere"
    if now <= noise and now < was:
        verdict = "proved"
    return f"{verdict}: {how}, the outputs of the two models differ by {now:.1e} (before {was:.1e})"


def _prove_bits(pair: Pair) -> str:
    """Compute the other norm in the first one's order of rounding, and compare the bits."""
    one, other = pair.one, pair.other
    for dtype in WIDTHS:
        order = one.norm.roundings[dtype]
        both = both_outputs(one, other, dtype)
        if both is None:
            continue
        a, b = both
        found, form = other.norm.found, other.norm.form
        there = in_layout(one.norm.found.layout.rows(one.norm.x.detach()).to(dtype), found)
        rows = found.layout.rows(there)
        weight = form.stored(found.gain).to(rows) if form.name else None
        bias = None if found.bias is None else found.bias.to(rows)
        shares = []
        for candidate, y in orders(rows, weight, bias, found.formula, form):
            if (candidate.statistic, candidate.gain) == (order.statistic, order.gain):
                y = y.reshape(-1, y.shape[-1])[: len(a)]
                shares.append(float((y != a.to(dtype)).float().mean()))
        if not shares:
            continue
        was, now = float((a.to(dtype) != b.to(dtype)).float().mean()), min(shares)
        if was <= SAME_BITS:
            continue
        verdict = "proved" if now <= SAME_BITS else "not the only cause"
        name = str(dtype).removeprefix("torch.")
        return (
            f"{verdict}: on the same input {was:.0%} of its bits in {name} differ, and {now:.1%} "
            "once it rounds in the order of the first model"
        )
    return ""


# --------------------------------------------------------------------------------------- comparison


def compare(
    model: nn.Module,
    other: nn.Module,
    example: Inputs,
    other_example: Inputs | None = None,
) -> Comparison:
    """Compare the norms of two models that should be the same function.

    Args:
        model, other: both are left unchanged.
        example: positional (tuple) or keyword (dict) arguments of the model.
        other_example: the same input as the other model takes it; None: as the first.

    Returns:
        All pairs of norms, which differs first, and why. Norms whose formula is unknown are
        counted alone.
    """
    other_example = example if other_example is None else other_example
    return compare_found(
        norms_of(model, example),
        norms_of(other, other_example),
        model,
        other,
        example,
        other_example,
    )


def compare_found(
    ones: NormsFound,
    others: NormsFound,
    model: nn.Module,
    other: nn.Module,
    example: Inputs,
    other_example: Inputs,
    uncompared: str = "",
) -> Comparison:
    """Compare norms that have been found; the other arguments are those of `compare`.

    Args:
        uncompared: why the examples are not the same input; "" if they are.
    """
    named = [row for row in ones.rows if row.is_named]
    other_named = [row for row in others.rows if row.is_named]
    pairs = align(named, other_named)
    first = None
    cause = ""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    noise = NOISE.get(dtype, 1e-3)
    for number, pair in enumerate(pairs):
        if pair.one is None or pair.other is None:
            lacking = ones if pair.one is None else others
            path = (pair.one or pair.other).path
            pair.is_unread = lacking.is_unreadable
            same_path = (row for row in lacking.rows if row.path == path and not row.is_named)
            pair.unnamed = next(same_path, None)
        else:
            pair.differences = differences(pair.one, pair.other)
            if not uncompared:
                pair.inputs = input_difference(pair.one, pair.other)
                pair.is_of_other_size = is_of_other_size(pair.one, pair.other)
            both = both_outputs(pair.one, pair.other, torch.float64)
            wide = 0.0 if both is None else difference(both[1], both[0])
            pair.effect = own_effect(pair.one, pair.other)
            # In float64 an eps of the type is another one.
            has_type_eps = pair.one.eps_of or pair.other.eps_of
            is_off = wide > SAME_OUTPUT + same_gain(pair.one, pair.other)
            if not pair.differences and is_off and not has_type_eps:
                text = f"outputs differ by {wide:.0e} on the same input"
                pair.differences = [Difference(OTHER, text)]
        if first is None:
            cause = _cause(pairs, number, noise)
            first = pair if cause else None
    comparison = Comparison(pairs, first, cause, "", noise, uncompared=uncompared)
    comparison.left_out = len(without_formula(ones)), len(without_formula(others))
    comparison.later = later_cause(comparison)
    comparison.outputs = "outputs were NOT compared"
    if not uncompared:
        a, b = (outputs(*pair, {}) for pair in ((model, example), (other, other_example)))
        comparison.outputs = output_difference(a, b)
        comparison.is_noise = a.shape != b.shape or difference(b, a) <= noise
    # The proof of a rounding runs the two norms alone.
    if first is not None and (not uncompared or first.is_rounding):
        comparison.proof = prove(comparison, model, other, example, other_example)
    return comparison


def output_difference(a: Tensor, b: Tensor) -> str:
    """Say by how much the outputs of two models differ."""
    if a.shape != b.shape or a.numel() == 0:
        return f"outputs were NOT compared: {tuple(a.shape)} here, {tuple(b.shape)} there"
    a, b = a.double().cpu(), b.double().cpu()
    off = float((a - b).abs().max())
    relative = difference(b, a)
    return f"outputs differ by {off:.2g} (relative {relative:.1e})"


def later_cause(comparison: Comparison) -> str:
    """Return the first difference that is no rounding and changes more; "" if there is none.

    Only where the first of all is one of rounding alone.
    """
    first = comparison.first
    if first is None or not first.is_rounding:
        return ""
    for number, pair in enumerate(comparison.pairs):
        is_alone = pair.one is None or pair.other is None
        is_another = bool(pair.differences) and not pair.is_rounding
        is_less = None not in (pair.effect, first.effect) and pair.effect <= first.effect
        said = other_input(comparison.pairs, number, comparison.noise)
        if is_alone or (is_another and not is_less):
            (said,) = described(pair)
        if said:
            return f"{name_of_pair(pair)}: {said}"
    return ""


def without_formula(found: NormsFound) -> list[NormRow]:
    """Return the norms that cannot be compared: of unknown formula, point-wise, or not known."""
    return [row for row in found.rows if not row.is_named and row.kind != NOT_A_NORM]


def _cause(pairs: Sequence[Pair], number: int, noise: float) -> str:
    """Say why one of the pairs differs; "" if it does not."""
    pair = pairs[number]
    if pair.one is None or pair.other is None or pair.differences:
        (said,) = described(pair)
        return said
    return other_input(pairs, number, noise)


def other_input(pairs: Sequence[Pair], number: int, noise: float) -> str:
    """Say that a norm gets another input, which no norm before it explains; "" if it is not so."""
    pair, before = pairs[number], pairs[:number]
    if pair.one is None or pair.other is None:
        return ""
    paths = {known.one.path for known in pairs if known.one}
    is_elsewhere = pair.by_gains and pair.other.path != pair.one.path and pair.other.path in paths
    where = f"the norm with its gains is {pair.other.path} there" if is_elsewhere else ""
    if pair.is_of_other_size and where:
        return f"{INPUT}: it has another size; {where}"
    if pair.inputs is None or pair.inputs <= noise:
        return ""
    effects = [earlier.effect for earlier in before if earlier.differences]
    if any(effect is None or AMPLIFIED * effect >= pair.inputs for effect in effects):
        return ""
    agree = f"those before it differ by {max(effects):.0e}" if effects else "all before it agree"
    blind = sum(earlier.inputs is None for earlier in before)
    unknown = f" (the inputs of {counted(blind)} before it were not compared)" if blind else ""
    said = (
        f"{INPUT}: it differs by {pair.inputs:.0e} ({noise:.0e} is noise), and {agree}{unknown}: "
        "what differs is no norm, or the order of norms"
    )
    return f"{said}; {where}" if where else said
