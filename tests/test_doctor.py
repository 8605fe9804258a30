"""doctor.py and fold.norms_of: what norms a model has.

python -m pytest tests/test_doctor.py
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from hand_written_norms import SHAPE, WRITTEN, Hand, Inline
from hf_models import needs_transformers
from norm_faults import FAULTS, Case
from torch import nn

import doctor
from fold import norms_of
from fold.alignment import compare
from fold.norm_probes import NormRow
from fold.streams import streams


class Beside(nn.Module):
    """Modules side by side."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return [part(x) for part in self.parts]


def found_in(kind) -> dict:
    """Name of a norm by hand -> the rows that are said of it."""
    parts = [kind(one.function, name == "one gain of zero") for name, one in WRITTEN.items()]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found = norms_of(Beside(parts).eval(), (x,))
    assert not found.unread
    rows = {name: [] for name in WRITTEN}
    for row in found.rows:
        rows[[*WRITTEN][int(row.path.split(".")[1])]].append(row)
    return rows


@pytest.fixture(scope="module")
def modules():
    return found_in(Hand)


@pytest.fixture(scope="module")
def inline():
    return found_in(Inline)


def is_right(rows, kind, one) -> None:
    """One row, of this kind, eps, place and gain; or none."""
    if not kind:
        assert not rows
        return
    (row,) = rows
    assert row.kind == kind
    if row.is_named:
        assert (row.place, row.gain) == (one.place, one.gain)
        assert row.eps == (one.eps if one.eps is None else pytest.approx(one.eps, rel=1e-6))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_module_by_hand(name, modules):
    is_right(modules[name], WRITTEN[name].kind, WRITTEN[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_in_a_forward(name, inline):
    one = WRITTEN[name]
    is_right(inline[name], one.kind if one.inline is None else one.inline, one)


class Reading(nn.Module):
    """Queries, a softmax over what they read, and a linear with a weight norm.

    At large inputs the softmax chooses: then attention does not change with the size of its
    queries.
    """

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x, y):
        return self.linear(self.attention(x, y, y)[0])


def test_attention_is_no_norm_and_a_weight_norm_is_one_with_a_gain_from_outside():
    torch.manual_seed(0)
    (row,) = norms_of(Reading().eval(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8))).rows
    assert "weight" in row.path and row.kind == "RMSNorm"
    assert (row.gain, row.batch) == ("not known", "not known")


@needs_transformers
@pytest.mark.parametrize(
    "name", ["CpmAntModel", "M2M100Model", "SEWModel", "YosoModel", "convnext"]
)
def test_the_norms_of_other_peoples_models_are_those_of_their_source(name):
    """tests/norm_kinds.py has 124 more models."""
    from norm_kinds import by_source, check  # needs transformers

    found, counts, comparison = check(name)
    assert counts == by_source(name), str(found)
    assert not comparison.has_difference, str(comparison)


# ------------------------------------------------------------------------------ one against another

# tests/norm_faults.py has five more architectures
ARCHITECTURES = ("qwen3", "gemma3", "stablelm")


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Name of an architecture -> the model and the other one, made once."""
    made = {}

    def case(name):
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return case


@needs_transformers
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pair_without_a_fault_differs_nowhere(name, cases):
    assert not cases(name).plain.has_difference, str(cases(name).plain)


@needs_transformers
@pytest.mark.parametrize(
    ("name", "fault", "scope"),
    [
        *(("qwen3", fault, "one") for fault in FAULTS),
        ("gemma3", "offset", "all"),
        ("gemma3", "missing", "one"),
        ("stablelm", "eps", "all"),
    ],
)
def test_a_planted_fault_is_named_and_proved(name, fault, scope, cases):
    is_named, said = cases(name).is_named(fault, scope)
    assert is_named and "proved" in said, said


MODEL = """
from types import SimpleNamespace

import torch
from torch import nn


class RMS(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def make(eps=1e-6, slope=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), RMS(eps), nn.GELU(), nn.Linear(8, 8), RMS(1e-6))
    model[3].weight.data *= slope
    return model, (torch.randn(2, 4, 8),)


def other_eps():
    return make(1e-5)


def exported():
    model, inputs = make(1e-5)
    return torch.export.export(model, inputs).module(), inputs


def traced():
    model, inputs = make()
    return torch.jit.trace(model, inputs), inputs


def other_linear():
    return make(slope=-2.0)


class Named(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x, scale=None):
        return self.model(x)


def as_dict():
    return Named(make()[0]), {"x": torch.randn(2, 4, 8)}


def as_tuple():
    return Named(make(slope=-2.0)[0]), (torch.randn(3, 4, 8), None)


def other_name():
    model, _ = make(slope=-2.0)
    return torch.export.export(model, (x := torch.randn(2, 4, 8),)).module(), (x[0],)


def two_inputs():
    model = Named(make(slope=-2.0)[0])
    return model, {"x": torch.randn(2, 4, 8), "scale": torch.ones(1)}


class Times(Named):
    def forward(self, x, times=1.0):
        return self.model(x + times)


def times_two():
    return Times(make()[0]), {"x": torch.randn(2, 4, 8), "times": 2.0}


def times_one():
    return Times(make()[0]), {"x": torch.randn(2, 4, 8), "times": 1.0}


def wrong_size():
    return make()[0], (torch.randn(2, 4, 9),)


def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("make", ("no norm differs; outputs differ by 0 (relative 0.0e+00)",)),
        ("other_eps", ("first: 1: eps (1e-06 here, 1e-05 there)", "proved")),
        ("exported", ("2 norms paired", "first: 1: eps (1e-06 here, 1e-05 there)")),
        ("traced", ("first: 1: not found in the other model, whose graph cannot be read",)),
        ("other_linear", ("first: 4: other input",)),
    ],
)
def test_the_program_on_a_model_in_a_file(tmp_path, capsys, against, said):
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    doctor.main([f"{file}:make", f"--against={file}:{against}", "--json"])
    shown = capsys.readouterr().out
    assert "\n1: RMSNorm; over 8; eps 1e-06 inside the root; gain w in float32; no" in shown
    assert all(part in shown for part in said), shown


@pytest.mark.parametrize(
    ("first", "against", "said"),
    [
        ("as_dict", "make", "no norm differs; outputs differ by 0 (relative 0.0e+00)"),
        ("make", "as_dict", "no norm differs; outputs differ by 0 (relative 0.0e+00)"),
        ("as_dict", "as_tuple", "first: model.4: other input"),
        ("as_tuple", "as_dict", "first: model.4: other input"),
        ("as_dict", "other_name", "first: model.4: other input"),
        ("two_inputs", "as_dict", "the other model's example has no place for scale\n"),
        ("times_two", "times_one", "no norm differs; outputs differ by 0 (relative 0.0e+00)"),
        ("as_dict", "two_inputs", "inputs were NOT compared: scale of the other model"),
    ],
)
def test_both_models_run_on_the_first_ones_example(tmp_path, capsys, first, against, said):
    """In whatever form each has it; where that cannot be, it is said."""
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    doctor.main([f"{file}:{first}", f"--against={file}:{against}"])
    shown = capsys.readouterr().out
    assert said in shown.split("norms of")[0], shown


class Rounding(nn.Module):
    """A norm that rounds before its gain or after it."""

    def __init__(self, is_before: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.is_before = is_before

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.is_before:
            return (wide * self.weight.float()).to(x.dtype)
        return wide.to(x.dtype) * self.weight


class Weighted(nn.Module):
    """A function of x and a weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


class Small(nn.Module):
    """A model with one norm, a function of x and the weight, in a module or in the forward."""

    def __init__(self, function, is_inline=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 32)
        self.norm = Weighted(function)
        self.last = nn.Linear(32, 4)
        self.function = function
        self.is_inline = is_inline

    def forward(self, x):
        x = self.first(x)
        y = self.function(x, self.norm.weight) if self.is_inline else self.norm(x)
        return self.last(y)


def root(x, like, eps=1e-6):
    return x * torch.rsqrt(like.pow(2).mean(-1, keepdim=True) + eps)


EXAMPLE = (torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3)),)
OF_THE_TYPE = {
    "torch's": lambda x, w: nn.functional.rms_norm(x, (32,)) * w,
    "finfo": lambda x, w: root(x, x, torch.finfo(x.dtype).eps) * w,
    "a number": lambda x, w: nn.functional.rms_norm(x, (32,), eps=2.0**-23) * w,
}


@pytest.mark.parametrize("is_inline", [False, True])
def test_an_eps_of_the_type_is_that_of_the_model(is_inline):
    said = "eps 1.1921e-07 inside the root"
    models = {name: Small(f, is_inline).eval() for name, f in OF_THE_TYPE.items()}
    for name, model in models.items():
        (row,) = norms_of(model, EXAMPLE).rows
        own = "" if name == "a number" or row.eps_of == "" else " (the type's own eps, in float32)"
        assert f"{said}{own};" in row.describe()
    assert norms_of(models["torch's"], EXAMPLE).rows[0].eps_of == "float32"
    alike = compare(models["a number"], models["torch's"], EXAMPLE)
    assert not alike.has_difference, str(alike)
    other = Small(lambda x, w: root(x, x, 1e-6) * w, is_inline).eval()
    found = compare(other, models["torch's"], EXAMPLE)
    assert "eps (1e-06 here, 1.1921e-07, float32's own, there)" in found.cause
    assert "on the same input" in found.cause and "0e+00" not in found.cause


ROUNDED = {
    "": lambda x, w: root(x, x) * w,
    "input rounded to bfloat16": lambda x, w: root(x.bfloat16().float(), x.bfloat16().float()) * w,
    "statistic in 16 bits": lambda x, w: root(x, x.bfloat16()) * w,
    "gain rounded to float16": lambda x, w: root(x, x) * w.half().float(),
    "output rounded to bfloat16": lambda x, w: (root(x, x) * w).bfloat16().float(),
    "rounds more than float32 does": lambda x, w: root(x, x).half().float() * w,
}


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("said", ROUNDED)
def test_what_a_norm_of_a_model_in_float32_rounds_to_16_bits(said, is_inline):
    (row,) = norms_of(Small(ROUNDED[said], is_inline).eval(), EXAMPLE).rows
    assert row.kind == "RMSNorm"
    assert row.float32.startswith(said) and bool(row.float32) is bool(said)


@pytest.mark.parametrize("said", [*ROUNDED][1:])
def test_such_a_rounding_is_named_against_another_model(said):
    """By how much outputs differ is that of the model's own type, not of a copy in float64."""
    found = compare(Small(ROUNDED[""]).eval(), Small(ROUNDED[said]).eval(), EXAMPLE)
    assert found.cause.startswith(f"rounding in float32 (nothing in 16 bits here, {said}")
    assert 1e-5 < found.first.effect < 1e-2


class Several(nn.Module):
    """Norms one after the other, each a function of x and the weight."""

    def __init__(self, *functions):
        super().__init__()
        self.parts = nn.Sequential(*(Small(f) for f in functions))
        self.between = nn.Linear(4, 8)

    def forward(self, x):
        for part in self.parts:
            x = self.between(part(x))
        return x


def test_norms_that_differ_in_the_same_thing_are_one_line():
    model = Several(ROUNDED[""], ROUNDED[""]).eval()
    other = Several(*[ROUNDED["input rounded to bfloat16"]] * 2).eval()
    other.load_state_dict(model.state_dict())
    found = compare(model, other, EXAMPLE)
    (line,) = (line for line in str(found).splitlines() if line.startswith("parts."))
    largest = max(pair.effect for pair in found.pairs)
    assert line.startswith("parts.*.norm (2): rounding in float32")
    assert line.endswith(f"differ by {largest:.0e}")


def test_after_a_rounding_the_first_difference_that_is_none_is_named():
    model, other = (
        Several(ROUNDED[first], second).eval()
        for first, second in (
            ("", ROUNDED[""]),
            ("input rounded to bfloat16", lambda x, w: root(x, x, 0.1) * w),
        )
    )
    other.load_state_dict(model.state_dict())
    found = compare(model, other, EXAMPLE)
    assert "first: parts.0.norm: rounding in float32" in str(found)
    assert "first that is no rounding: parts.1.norm: eps (1e-06 here, 0.1 there)" in str(found)


def test_a_rounding_hides_no_other_input():
    model = Several(ROUNDED[""], ROUNDED[""]).eval()
    other = Several(ROUNDED["input rounded to bfloat16"], ROUNDED[""]).eval()
    other.load_state_dict(model.state_dict())
    other.between.weight.data[0] *= -3
    found = compare(model, other, EXAMPLE)
    assert "first: parts.0.norm: rounding in float32" in str(found)
    assert "first that is no rounding: parts.1.norm: other input: it differs by" in str(found)


def in_heads(x, w):
    y = x.unflatten(-1, (4, 8))
    return root(y, y).flatten(-2) * w


def cubic(x, w):
    return x / (x.abs().pow(3).mean(-1, keepdim=True) + 1e-6).pow(1 / 3) * w


class Twice(nn.Module):
    """A norm that is applied twice."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(self.norm(x))


def swap(model):
    model.parts[0].norm, model.parts[1].norm = model.parts[1].norm, model.parts[0].norm


def set_norms(norm):
    return lambda model: [setattr(part, "norm", norm(part.norm)) for part in model.parts]


# what is done to a model with two norms -> what is said of it
OTHER_FORMS = {
    "over each head": (
        set_norms(lambda old: Weighted(in_heads)),
        ("parts.0.norm: kind (RMSNorm over 32 here, RMSNorm (4 groups) over 8 there)", "proved"),
    ),
    "clamped first": (
        set_norms(lambda old: Weighted(lambda x, w: root(x.clamp(-9, 9), x.clamp(-9, 9)) * w)),
        ("parts.0.norm: kind (RMSNorm over 32 here, not a norm there)",),
    ),
    "of unknown formula": (
        set_norms(lambda old: Weighted(cubic)),
        (
            "parts.0.norm: kind (RMSNorm over 32 here, unknown formula there)",
            "NOT compared, since no formula is known: 0 norms here, 2 there",
        ),
    ),
    "applied twice": (
        set_norms(Twice),
        ("parts.0.norm: calls (called once here, 2 times there)",),
    ),
    "swapped": (
        swap,
        ("parts.0.norm: other input", "the norm with its gains is parts.1.norm there"),
    ),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_norms_in_another_form_are_no_missing_ones(form):
    change, said = OTHER_FORMS[form]
    model = Several(ROUNDED[""], ROUNDED[""]).eval()
    model.parts[0].norm.weight.data.pow_(2)
    other = copy.deepcopy(model)
    change(other)
    if form == "over each head":
        other.load_state_dict(model.state_dict())
    found = str(compare(model, other, EXAMPLE))
    assert found.startswith("first: parts.") and all(part in found for part in said), found


def test_a_bias_that_is_dropped_is_proved():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
    model[1].bias.data.normal_()
    other = copy.deepcopy(model)
    other[1].bias = None
    found = compare(model, other, EXAMPLE)
    assert found.cause.startswith("bias (one here, none there)") and "proved" in found.proof


def test_gains_that_were_folded_are_made_up_for():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 4)).eval()
    model[1].weight.data.normal_()
    other = copy.deepcopy(model)
    other[2].weight.data *= other[1].weight.data
    other[1].weight.data.fill_(1)
    found = compare(model, other, EXAMPLE)
    assert found.cause.startswith("gain") and found.proof.startswith("made up for elsewhere")


def test_queries_and_keys_norms_that_are_swapped_though_keys_have_fewer_heads():
    torch.manual_seed(0)
    model = Heads().eval()
    other = copy.deepcopy(model)
    other.q_norm, other.k_norm = other.k_norm, other.q_norm
    found = compare(model, other, EXAMPLE)
    assert found.first.one.path == "q_norm"
    assert (
        found.cause == "other input: it has another size; the norm with its gains is k_norm there"
    )


class Heads(nn.Module):
    """Norms of four heads of queries and of two of keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 32), nn.Linear(8, 16)
        self.q_norm, self.k_norm = (nn.RMSNorm(8, eps=1e-6) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data.normal_()

    def forward(self, x):
        q, k = (
            self.q_norm(self.q(x).unflatten(-1, (4, 8))),
            self.k_norm(self.k(x).unflatten(-1, (2, 8))),
        )
        return q.sum(-2) * k.sum(-2)


def test_all_digits_of_an_eps_are_shown():
    """GLM-4 has 1.5625e-07."""
    row = NormRow("norm", "RMSNorm", eps=1.5625e-07, place="inside the root")
    assert row.describe_eps() == "eps 1.5625e-07 inside the root"


def test_the_example_of_the_page_runs(tmp_path, capsys):
    page = (Path(__file__).parents[1] / "docs/conventions.md").read_text()
    code, shown = re.search(
        r"```python\n(# mine\.py.*?)```.*?against=mine.py:exported\n```\n.*?```text\n(.*?)```",
        page,
        re.DOTALL,
    ).groups()
    file = tmp_path / "mine.py"
    file.write_text(code)
    doctor.main([f"{file}:trained", f"--against={file}:exported"])
    assert capsys.readouterr().out.replace(str(file), "mine.py").startswith(shown)


def test_a_mean_that_is_rounded_is_named():
    def mean_in_16_bits(x, w):
        h = x.float()
        mean = h.pow(2).mean(-1, keepdim=True).to(x.dtype).float()
        return w * (h * torch.rsqrt(mean + 1e-6)).to(x.dtype)

    row = norms_of(Small(mean_in_16_bits).eval(), EXAMPLE).rows[0]
    assert row.bfloat16 == "statistic in float32, then mean in 16 bits, gain after the rounding"


@pytest.mark.parametrize(
    ("is_before", "dtype"),
    [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float16)],
)
def test_the_rounding_of_an_exported_norm(is_before, dtype):
    x = (torch.randn(4, 6, 32).to(dtype),)
    model = nn.Sequential(Rounding(True), nn.Linear(32, 32)).to(dtype).eval()
    other = nn.Sequential(Rounding(is_before), nn.Linear(32, 32)).to(dtype).eval()
    found = compare(model, torch.export.export(other, x).module(), x)
    assert found.cause.startswith("" if is_before else "rounding"), str(found)
    assert found.has_difference is not is_before


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "must return"),
        ("wrong_size", r"Sequential does not run on its example inputs \(RuntimeError: mat1 and"),
    ],
)
def test_a_function_that_returns_no_model_with_its_inputs_is_named(tmp_path, function, said):
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    with pytest.raises(doctor.ConfigError, match=said):
        doctor.main([f"{file}:{function}"])


def test_what_a_norm_is_given():
    """As computed from what is given to it: 8 texts of 5 tokens, the first of which is large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.RMSNorm(8), nn.Linear(8, 3)).eval()
    model[0].weight.data[7] *= 100
    ids = torch.randint(8, 50, (8, 5))
    ids[:, 0] = 7
    found = norms_of(model, (ids,))
    (stream,) = streams(model, found, [(part,) for part in ids.split(2)])
    x = model[0](ids).detach().double()
    square = x.square()
    assert stream.path == "1" and stream.largest == x.abs().max()
    assert stream.rms == pytest.approx(float(square.mean().sqrt()))
    means = x.mean(-1).square().mean() / square.mean()
    assert stream.mean_share == pytest.approx(float(means))
    assert stream.first == pytest.approx(float(square[:, 0].sum() / square.sum()))
    assert stream.first > 0.9
    centred = x - x.mean(-1, keepdim=True)
    tails = centred.pow(4).mean(-1) / centred.square().mean(-1).square()
    assert stream.kurtosis == pytest.approx(float(tails.mean()))
