"""fold/lines.py: LayerNorms written out from means and square roots are counted and folded."""

import pytest
import torch
from fold_nets import C, counts, folded, net
from helpers import draw
from torch import Tensor, nn

from fold import analyze

X = draw(2, 4, C)


def pow_and_sqrt(x: Tensor, axis: int) -> Tensor:
    mean = x.mean(axis, keepdim=True)
    variance = (x - mean).pow(2).mean(axis, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-6)


def variance_and_rsqrt(x: Tensor, axis: int) -> Tensor:
    variance = x.var(axis, unbiased=False, keepdim=True)
    return torch.rsqrt(variance + 1e-6) * (x - x.mean(axis, keepdim=True))


def both_at_once(x: Tensor, axis: int) -> Tensor:
    variance, mean = torch.var_mean(x, dim=axis, correction=0, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + 1e-6)).type_as(x)


def corrected(x: Tensor, axis: int) -> Tensor:
    variance = x.var(axis, keepdim=True)  # divided by n - 1
    return (x - x.mean(axis, keepdim=True)) * torch.rsqrt(variance + 1e-6)


def eps_outside(x: Tensor, axis: int) -> Tensor:
    return (x - x.mean(axis, keepdim=True)) / (x.std(axis, keepdim=True, correction=0) + 1e-6)


NORMS = (pow_and_sqrt, variance_and_rsqrt, both_at_once)
OTHERS = (corrected, eps_outside)


class Hand(nn.Module):
    """A LayerNorm by hand, with names of its own."""

    def __init__(self, normalise, bias: bool = True, first: bool = False):
        super().__init__()
        self.normalise = normalise
        self.axis = 1 if first else -1
        shape = (C, 1) if first else (C,)
        self.gamma = nn.Parameter(torch.ones(shape))
        self.beta = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, hidden, unused=None):
        y = self.gamma * self.normalise(hidden, self.axis)
        return y if self.beta is None else y + self.beta


def plain(m, x):
    return m.out(m.norm(m.a(x)))


def channels_first(m, x):
    return m.out(m.norm(m.a(x).mT).mT)


FOLDS = [
    *((normalise, bias, plain) for normalise in NORMS for bias in (True, False)),
    (pow_and_sqrt, True, channels_first),
    (pow_and_sqrt, True, lambda m, x: m.out(m.norm(hidden=m.a(x)))),
]


@pytest.mark.parametrize(("normalise", "bias", "forward"), FOLDS)
def test_a_module_by_hand_folds(normalise, bias, forward):
    norm = Hand(normalise, bias, first=forward is channels_first)
    model = net(forward, norm=norm)
    after, certificate = folded(model, (X,), 1)
    assert after.norm.swap.eps == 1e-6 and after.state_dict().keys() == model.state_dict().keys()
    assert after.norm.swap.axis == (1 if forward is channels_first else -1)
    assert certificate.checks[-1].inputs == "resized"
    assert analyze(model, (X,)).rows[0].by_hand


@pytest.mark.parametrize(
    ("forward", "normalise", "expected", "why"),
    [
        *((plain, normalise, (0, 0), "") for normalise in OTHERS),
        # something else reads its input
        (lambda m, x: m.out(m.norm(h := m.a(x)) + h), pow_and_sqrt, (1, 0), "linear in out"),
        # its gain makes a mean for the next norm
        (lambda m, x: m.out(m.ln(m.norm(m.a(x)))), pow_and_sqrt, (2, 1), "mul in norm"),
        (lambda m, x: m.out(pow_and_sqrt(m.a(x), -1)), None, (1, 1), "called by the model itself"),
        (lambda m, x: m.out(m.norm(m.a(x), x)), pow_and_sqrt, (1, 1), "does more"),
    ],
)
def test_what_is_another_norm_or_stays(forward, normalise, expected, why):
    report = analyze(net(forward, norm=Hand(normalise)), (X,))
    assert counts(report)[:2] == expected
    assert not why or why in report.rows[-1].reason
