"""foldable.py on what people's modules do beside: hooks, parametrisations, tensors kept as attributes, buffers that are
not saved, rows written in place, blocks without gradients.

    python -m pytest tests/test_fold_habits.py
"""

import pytest
import torch
from conftest import close, draw
from test_foldable import C, folded, net
from torch import nn

from certificate import run
from errors import FoldError
from fold_modules import FoldedNorm
from foldable import analyze, fold, parametrize_cbwc


def plain(m, x):
    return m.out(m.ln(m.a(x)))


def test_inputs_are_a_tuple_or_a_dict():
    with pytest.raises(FoldError, match=r"the inputs are a Tensor: give a tuple of positional arguments, as \(x,\)"):
        analyze(net(plain), draw(2, 4, C))
    assert analyze(net(plain), {"x": draw(2, 4, C)}).strict == 1


def test_hooks_of_a_norm_stay():
    """They run on the norm that takes its place, and may change what it returns."""
    seen, model = [], net(plain)
    model.ln.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model.ln.register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True)
    x = draw(2, 4, C)
    report = analyze(model, (x,))
    for after in (fold(model, report)[0], parametrize_cbwc(model, report)):
        seen.clear()
        after(x).sum().backward()
        assert isinstance(after.ln, FoldedNorm) and seen == ["before", FoldedNorm]
    model.ln.register_full_backward_hook(lambda module, *grads: None)  # torch puts operations around the norm for it
    report = analyze(model, (x,))
    assert fold(model, report)[1].folded == 0 and "together with other operations" in report.rows[0].reason
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
    """Along the rows a mean of zero stays; not along the channels, nor with one number in all of them."""
    x, more = (draw(2, 4, C),), dict(token=nn.Parameter(torch.randn(C)), c=nn.Linear(C, C))
    _, certificate = folded(net(write_rows, **more), x, 1)
    assert {"a.weight", "b.weight", "c.weight", "token"} <= certificate.parameters.keys()
    for forward, why in ((write_channels, "select_scatter"), (write_a_number, "one number"), (write_and_read, "relu")):
        report = analyze(net(forward), x)
        assert report.strict == 0 and why in report.rows[0].reason, str(report)
