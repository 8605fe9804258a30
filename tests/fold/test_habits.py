"""fold/__init__.py on what people's modules do beside: hooks, parametrisations, tensors kept as
attributes, buffers that are not saved, rows written in place, blocks without gradients.

    python -m pytest tests/fold/test_habits.py
"""

import copy
import functools
import warnings
import weakref

import pytest
import torch
from fold_nets import C, folded, net
from helpers import close, draw
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrize

from common.errors import FoldError
from fold import analyze, fold, parametrize_cbwc
from fold.certificate import run, touched
from fold.modules import FoldedNorm

X = draw(2, 4, C)


def plain(m, x):
    return m.out(m.ln(m.a(x)))


def test_hooks_of_a_norm_stay():
    """They run on the norm that takes its place, and may change what it returns."""
    seen, model = [], net(plain)
    model.ln.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model.ln.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append("before"), with_kwargs=True
    )
    report = analyze(model, (X,))
    for after in (fold(model, report)[0], parametrize_cbwc(model, report)):
        seen.clear()
        after(X).sum().backward()
        assert isinstance(after.ln, FoldedNorm) and seen == ["before", FoldedNorm]
    model.ln.register_forward_hook(lambda module, args, output: 2 * output)
    folded(model, (X,), 1)


def test_a_buffer_that_is_not_saved():
    """A model may build it anew, so it is left as it is, and the certificate looks at it."""
    model = net(lambda m, x: m.out(m.ln(m.a(x) + m.pe)))
    model.register_buffer("pe", draw(4, C, seed=3), persistent=False)
    report = analyze(model, (X,))
    assert report.strict == 0 and "pe, which no state dict holds," in report.rows[0].reason
    other = copy.deepcopy(model)
    other.pe += 1
    assert touched(model, other) == ["pe"]
    model.register_buffer("pe", model.pe)  # saved
    _, certificate = folded(model, (X,), 1)
    assert "pe" in certificate.parameters


def keeps(m, x):
    m.kept = m.a(x)
    m.seen.append(m.kept)
    return m.out(m.ln(m.kept))


def test_analysis_leaves_nothing_in_the_model():
    model = net(keeps, seen=[])
    before = dict(vars(model))
    report = analyze(model, (X,))
    assert vars(model) == before and model.seen == []
    assert fold(model, report)[1].folded == 1


def test_tensors_that_are_plain_attributes():
    """They are widened with the rest for the check, and no fold can centre them."""
    model = net(lambda m, x: m.out(m.ln(m.a(x)) @ m.proj[0])).float()
    model.proj = [draw(C, C, dtype=torch.float32)]
    after, certificate = fold(model, analyze(model, (X.float(),)))
    assert certificate.ok and certificate.folded == 1 and certificate.max_rel < 1e-13, str(
        certificate
    )
    assert after.proj[0].dtype == model.proj[0].dtype == torch.float32
    model = net(lambda m, x: m.out(m.ln(m.a(x) + m.pos)))
    model.pos = draw(4, C)
    assert "neither parameter nor buffer" in analyze(model, (X,)).rows[0].reason


def test_a_bias_that_is_a_buffer():
    """It is read, though it is zero now."""
    norm = nn.LayerNorm(C)
    del norm.bias
    norm.register_buffer("bias", torch.zeros(C))
    model = net(plain, ln=norm)
    after, _ = folded(model, (X,), 1)
    for one in (model, after):
        one.ln.bias += 1
    close(after(X), model(X))


def test_cbwc_of_a_model_that_reads_its_norm():
    model = net(lambda m, x: plain(m, x) * m.ln.eps)
    with pytest.raises(FoldError, match="keep its LayerNorms"):
        parametrize_cbwc(model, analyze(model, (X,)))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_modules_with_parametrisations_of_their_own(name):
    """Copies of a module share the class that torch makes for its parametrisations: the original
    must not feel ours.
    """
    model = net(plain)
    parametrize.register_parametrization(model.a, name, Doubled())
    expected, kind = run(model, (X,)), type(model.a)
    report = analyze(model, (X,))
    trained = parametrize_cbwc(model, report)
    assert type(model.a) is kind and not model.a.parametrizations.keys() - {name}
    for one in (model, trained, fold(model, report)[0], copy.deepcopy(trained)):
        close(run(one, (X,)), expected)
    close(trained.a.weight.mean(0), torch.zeros(C, dtype=torch.float64))
    parametrize.remove_parametrizations(trained.a, "bias" if name == "weight" else "weight")
    close(run(model, (X,)), expected)


def test_a_linear_in_sixteen_bits():
    """A written cast is widened with the linear behind it; a sparse buffer does no harm."""
    model = net(lambda m, x: m.b(m.ln(m.a(x)).bfloat16()).double())
    model.b = nn.Linear(C, 4, dtype=torch.bfloat16)
    model.register_buffer("heads", torch.eye(3).to_sparse())
    folded(model, (X,), 1)


class Positions(nn.Module):
    """Twins' position encoding: it adds in place, then turns channels and positions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(C, C, 1, groups=C)

    def forward(self, x):
        channels_first = x.transpose(1, 2)
        y = self.conv(channels_first)
        y += channels_first
        return y.transpose(1, 2)


@pytest.mark.parametrize("rows", [4, C])
def test_a_module_that_returns_a_view_of_what_it_wrote(rows):
    """The exporter makes the view again behind the module, so the centring must not go there along
    the axis of the tensor that was written.
    """

    def forward(m, x):
        x = m.positions(x)
        return m.out(m.ln2(x + m.a(m.ln(x))))

    model = net(forward, positions=Positions())
    certificate = fold(model, analyze(model, (draw(2, rows, C),)), insert=True)[1]
    assert certificate.ok, str(certificate)


def test_one_embedding_called_twice_with_a_tied_head():
    def forward(m, ids):
        return m.head(m.ln(m.wte(ids))) + m.head(m.ln2(m.wte(ids.flip(-1))))

    model = net(forward, wte=nn.Embedding(11, C), head=nn.Linear(C, 11, bias=False))
    model.head.weight = model.wte.weight
    ids = torch.arange(11)[None]
    after, _ = folded(model, (ids,), 2, untie=True)
    assert torch.equal(after.head.weight, model.head.weight)
    close(after(ids % 5), model(ids % 5))


@torch.no_grad()
def flex(m, x):
    q, k, v = (m.qkv(x)[..., i * C : (i + 1) * C].unflatten(-1, (2, -1)) for i in range(3))
    y = flex_attention(*(part.transpose(-2, -3) for part in (q, k, v)))
    return m.out(m.ln(m.a(y.transpose(-2, -3).flatten(-2))))


def test_flex_attention_on_a_cpu():
    """It has no gradients there, so the model is used in a block without them."""
    model = net(flex, qkv=nn.Linear(C, 3 * C)).float()
    after, certificate = fold(model, analyze(model, (X.float(),)))
    assert certificate.ok and certificate.folded == 1, str(certificate)
    torch.testing.assert_close(after(X.float()), model(X.float()), rtol=1e-5, atol=1e-5)


def run_weakly(function, module, *args):
    return function(module(), *args)


def test_a_forward_that_holds_its_module_weakly():
    """As in fairscale's checkpoint_wrapper: a copy runs its own weights, not the original's."""
    inner = net(plain)
    inner.forward = functools.partial(run_weakly, type(inner).forward, weakref.ref(inner))
    model = nn.Sequential(nn.Linear(C, C), inner).double()
    after, _ = folded(model, (X,), 1)
    before = run(model, (X,))
    close(run(after, (X,)), before)
    with torch.no_grad():
        inner.out.weight.zero_()
    close(run(after, (X,)), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_a_layer_norm_model_in_a_folded_one(dtype):
    """The keys are the same, and the function is another: a warning says so."""
    model, other = net(plain).to(dtype), net(plain).to(dtype)
    after, certificate = fold(model, analyze(model, (X.to(dtype),)))
    assert certificate.ok and certificate.folded == 1
    with warnings.catch_warnings(action="error"):
        after.load_state_dict(after.state_dict())
        copy.deepcopy(after).load_state_dict(after.state_dict())
    whole = nn.ModuleDict({"part": after})
    with pytest.warns(UserWarning, match=r"part\.a\.bias is not centred"):
        whole.load_state_dict(nn.ModuleDict({"part": other}).state_dict())


def test_a_certificate_is_about_what_a_model_returns():
    _, certificate = folded(net(plain), (X,), 1)
    assert "values inside it" in str(certificate)
    _, certificate = folded(net(lambda m, x: m.out(m.ln(x))), (X,), 0)
    assert "values inside it" not in str(certificate)


BRANCHES = {
    "a branch on values": lambda m, x: m.a(x) if x.sum() > 0 else x,
    "a size of values": lambda m, x: m.a(x[x[..., 0] > 0]),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_an_export_that_fails_names_the_module(name):
    part = net(BRANCHES[name])
    model = net(lambda m, x: m.parts["second"](m.a(x)), parts=nn.ModuleDict({"second": part}))
    with pytest.raises(FoldError, match=r"in parts\.second"):
        analyze(model, (X,))
