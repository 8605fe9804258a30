"""fold/__init__.py where a fold is not exact for all norms, or not in all ranks: the others are
folded.

    python -m pytest tests/fold/test_undone.py
"""

import pytest
import torch
from fold_nets import C, folded, net
from helpers import close, draw
from torch import nn

from common.errors import FoldError
from fold import analyze, fold, parametrize_cbwc
from fold.modules import FoldedNorm

X = draw(2, 4, C)


@pytest.mark.parametrize("convert", [fold, parametrize_cbwc])
def test_one_wrong_norm(convert):
    """The analysis errs about the second of three norms, and the other two are folded."""

    def forward(m, x):
        h = m.ln2(m.a(m.ln(m.b(x)).relu())).relu()
        return m.out(m.ln3(m.c(h)))

    model = net(forward, c=nn.Linear(C, C), ln3=nn.LayerNorm(C))
    report = analyze(model, (X,))
    assert report.strict == 3
    report.analysis.norms[1].demand.sources.clear()  # a.weight is not centred
    after = convert(model, report)
    if convert is fold:
        after, certificate = after
        assert certificate.ok and certificate.folded == 2, str(certificate)
        assert certificate.refusals.keys() == {"ln2"}
        assert "undone: off by" in certificate.refusals["ln2"]
    kinds = [isinstance(norm, FoldedNorm) for norm in (after.ln, after.ln2, after.ln3)]
    assert kinds == [True, False, True]
    close(after(X), model(X))


def test_right_in_one_rank_alone():
    """Of (T, C), axis 1 is the channels'. Such an input is refused, and others compute the same."""
    model = net(lambda m, x: m.out(m.ln(m.a(x).cumsum(1))))
    after, _ = folded(model, (X,), 1)
    other = draw(3, 7, C, seed=1)
    close(after(other), model(other))
    with pytest.raises(FoldError, match="of 3 axes"):
        after(X[0])


@pytest.mark.parametrize("turn", [lambda h: h.roll(1, -1), lambda h: h.flip(-1)])
def test_layer_scale_of_turned_channels(turn):
    """Its gain would be merged in another order, so that norm is left, and the other folds."""

    def forward(m, x):
        h = m.ln(m.a(x)).relu()
        return m.out(m.ln2(m.a(h) + m.gain * turn(m.b(h))))

    model = net(forward, gain=nn.Parameter(torch.rand(C)), c=nn.Linear(C, C))
    after, certificate = folded(model, (X,), 1)
    assert "mul is not known" in certificate.refusals["ln2"]
    close(after(X), model(X))
