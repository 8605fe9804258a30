"""fold/__init__.py on what people's modules do beside: hooks, parametrisations, tensors kept as
attributes, buffers that are not saved, rows written in place, blocks without gradients.

    python -m pytest tests/fold/test_habits.py
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fold_nets import C, folded, net
from helpers import close, draw
from torch import nn
from torch.nn.utils import parametrize

from common.errors import FoldError
from fold import analyze, fold, parametrize_cbwc
from fold.certificate import run, touched
from fold.modules import FoldedNorm


def plain(m, x):
    return m.out(m.ln(m.a(x)))


def test_inputs_are_a_tuple_or_a_dict():
    with pytest.raises(
        FoldError, match=r"the inputs are a Tensor: give a tuple of positional arguments, as \(x,\)"
    ):
        analyze(net(plain), draw(2, 4, C))
    assert analyze(net(plain), {"x": draw(2, 4, C)}).strict == 1


def test_hooks_of_a_norm_stay():
    """They run on the norm that takes its place, and may change what it returns."""
    seen, model = [], net(plain)
    model.ln.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model.ln.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append("before"), with_kwargs=True
    )
    x = draw(2, 4, C)
    report = analyze(model, (x,))
    for after in (fold(model, report)[0], parametrize_cbwc(model, report)):
        seen.clear()
        after(x).sum().backward()
        assert isinstance(after.ln, FoldedNorm) and seen == ["before", FoldedNorm]
    # torch puts operations around the norm for it
    model.ln.register_full_backward_hook(lambda module, *grads: None)
    report = analyze(model, (x,))
    assert (
        fold(model, report)[1].folded == 0
        and "together with other operations" in report.rows[0].reason
    )
    doubling = net(plain)
    doubling.ln.register_forward_hook(lambda module, args, output: 2 * output)
    report = analyze(doubling, (x,))
    after, certificate = fold(doubling, report)
    assert certificate.ok
    close(run(after, (x,)), run(doubling, (x,)))


def write_rows(m, x):
    h = m.a(x)
    h[:, 0] += m.b(x)[:, 0]
    h[:, 1] = m.token
    h[:, 2:] = m.c(x)[:, 2:]
    h[:, 3] = 0
    return m.out(m.ln(h))


def write_channels(m, x):
    h = m.a(x)
    h[..., 0] = m.b(x)[..., 0]
    return m.out(m.ln(h))


def write_a_number(m, x):
    h = m.a(x)
    h[:, 0] = 1
    return m.out(m.ln(h))


def write_and_read(m, x):
    h = m.a(x)
    h[:, 0] = h[:, 1].relu()
    return m.out(m.ln(h))


def test_rows_written_in_place():
    """Along the rows a mean of zero stays; not along the channels, nor with one number in all of
    them.
    """
    x, more = (draw(2, 4, C),), dict(token=nn.Parameter(torch.randn(C)), c=nn.Linear(C, C))
    _, certificate = folded(net(write_rows, **more), x, 1)
    assert {"a.weight", "b.weight", "c.weight", "token"} <= certificate.parameters.keys()
    for forward, why in (
        (write_channels, "select_scatter"),
        (write_a_number, "one number"),
        (write_and_read, "relu"),
    ):
        report = analyze(net(forward), x)
        assert report.strict == 0 and why in report.rows[0].reason, str(report)


def test_a_buffer_that_is_not_saved():
    """A model may build it anew, so it is left as it is, and the certificate looks at it."""
    model = net(lambda m, x: m.out(m.ln(m.a(x) + m.pe)))
    model.register_buffer("pe", draw(4, C, seed=3), persistent=False)
    report = analyze(model, (draw(2, 4, C),))
    assert report.strict == 0 and "pe, which no state dict holds," in report.rows[0].reason
    other = copy.deepcopy(model)
    other.pe += 1
    assert list(touched(model, other)) == ["pe"]
    model.register_buffer("pe", model.pe)  # saved
    _, certificate = folded(model, (draw(2, 4, C),), 1)
    assert "pe" in certificate.parameters


def keeps(m, x):
    m.kept = m.a(x)
    m.seen.append(m.kept)
    return m.out(m.ln(m.kept))


def test_analysis_leaves_nothing_in_the_model():
    model, x = net(keeps, seen=[]), (draw(2, 4, C),)
    before = dict(vars(model))
    report = analyze(model, x)
    assert vars(model) == before and model.seen == []
    assert fold(model, report)[1].folded == 1
    model(*x)  # now it keeps a tensor with a gradient, which cannot be copied
    with pytest.raises(FoldError, match=r"Net cannot be copied \(.*\): remove tensors"):
        fold(model, analyze(model, x))
    with torch.no_grad():
        model(*x)
    model.seen.clear()
    assert fold(model, analyze(model, x))[1].folded == 1


def test_tensors_that_are_plain_attributes():
    """They are widened with the rest for the check, and no fold can centre them."""
    model = net(lambda m, x: m.out(m.ln(m.a(x)) @ m.proj[0])).float()
    model.proj = [draw(C, C, dtype=torch.float32)]
    x = (draw(2, 4, C, dtype=torch.float32),)
    after, certificate = fold(model, analyze(model, x))
    assert certificate.ok and certificate.folded == 1 and certificate.max_rel < 1e-13, str(
        certificate
    )
    assert after.proj[0].dtype == model.proj[0].dtype == torch.float32
    model = net(lambda m, x: m.out(m.ln(m.a(x) + m.pos)))
    model.pos = draw(4, C)
    assert (
        "pos, a tensor that is neither parameter nor buffer,"
        in analyze(model, x64(x)).rows[0].reason
    )
    model = net(lambda m, x: m.out(m.ln(m.a(m.b(x).bfloat16().to(x.dtype)) @ m.made(x)))).float()
    model.made = lambda x: torch.from_numpy(np.eye(C, dtype=np.float32))
    with pytest.raises(FoldError, match="cannot be run in float64, as its check is"):
        fold(model, analyze(model, x))


def x64(inputs):
    return tuple(x.double() for x in inputs)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_modules_with_parametrisations_of_their_own(name):
    """Copies of a module share the class that torch makes for its parametrisations: the original
    must not feel ours.
    """
    model, x = net(plain), draw(2, 4, C)
    parametrize.register_parametrization(model.a, name, Doubled())
    expected, kind = run(model, (x,)), type(model.a)
    report = analyze(model, (x,))
    trained = parametrize_cbwc(model, report)
    assert (
        isinstance(trained.ln, FoldedNorm)
        and type(model.a) is kind
        and not model.a.parametrizations.keys() - {name}
    )
    for one in (model, trained, fold(model, report)[0], copy.deepcopy(trained)):
        close(run(one, (x,)), expected)
    close(trained.a.weight.mean(0), torch.zeros(C, dtype=torch.float64))
    parametrize.remove_parametrizations(trained.a, "bias" if name == "weight" else "weight")
    close(run(model, (x,)), expected)


def without_gradients(m, x):
    with torch.no_grad():
        h = m.ln(m.a(x))
    return m.out(h)


def in_autocast(m, x):
    h = m.b(x)
    with torch.autocast("cpu", enabled=False):
        h = m.ln(m.a(h))
    return m.out(h)


@pytest.mark.parametrize("forward", [without_gradients, in_autocast])
def test_blocks_in_which_modules_cannot_be_told(forward):
    report = analyze(net(forward), (draw(2, 4, C),))
    assert "in a no_grad or autocast block" in report.rows[0].reason
    assert fold(net(forward), report)[1].folded == 0


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
        x = x + m.a(m.ln(x))
        return m.out(m.ln2(x))

    model = net(forward, positions=Positions())
    report = analyze(model, (draw(2, rows, C),))
    for line in report.analysis.norms[0].demand.lines:
        insertion = report.analysis.insertion(line)
        assert insertion is None or insertion.path != "positions" or insertion.axis == 2
    after, certificate = fold(model, report, insert=True)
    assert certificate.ok, str(certificate)
    other = (draw(3, rows, C, seed=1),)
    close(run(after, other), run(model, other))


def test_an_export_that_fails_names_the_line_and_the_module():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = net(lambda m, x: m.out(m.ln(m.branches(m.a(x)))), branches=Branches())
    with pytest.raises(FoldError, match=r"at `return x if x.sum\(\) > 0 else -x`, in branches\)"):
        analyze(model, (draw(2, 4, C),))


def test_reading_a_shape_or_a_type_is_no_use():
    def forward(m, x):
        h = m.a(x)
        return m.out(m.ln(h).type_as(h) + torch.zeros_like(h).expand_as(h))

    folded(net(forward), (draw(2, 4, C),), 1)


def test_a_norm_of_a_tensor_that_was_written_in_place():
    """The exporter makes the view again in the norm's module: it is no operation of the norm."""

    def forward(m, x):
        y = m.conv(x.transpose(1, 2))
        y += m.conv2(x.transpose(1, 2))
        y = y.transpose(1, 2)
        return m.out(m.ln2(y + m.a(m.ln(y))))

    model = net(forward, conv=nn.Conv1d(C, C, 1), conv2=nn.Conv1d(C, C, 1))
    folded(model, (draw(2, 4, C),), 2)


def test_one_of_several_results_has_the_name_of_its_operation():
    report = analyze(net(lambda m, x: m.out(m.ln(m.a(x).max(1)[0]))), (draw(2, 4, C),))
    assert report.rows[0].reason.startswith("max does not keep a zero mean")


@pytest.mark.parametrize("window", [(2, 1), (1, 2)])
def test_tokens_pooled_apart_from_channels(window):
    def forward(m, x):
        pooled = F.avg_pool2d(m.a(x)[:, None], window)[:, 0]
        return m.out(m.ln(pooled.repeat(1, 1, window[1])))

    model = net(forward)
    assert analyze(model, (draw(2, 4, C),)).strict == (window == (2, 1))
    assert fold(model, analyze(model, (draw(2, 4, C),)))[1].ok
