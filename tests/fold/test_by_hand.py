"""fold/by_hand.py: LayerNorms written out from means and square roots are counted and folded."""

import pytest
import torch
from fold_nets import C, counts, folded, net
from helpers import draw
from torch import Tensor, nn

from fold import analyze, fold, parametrize_cbwc
from fold.certificate import run
from fold.modules import FoldedNorm


def pow_and_sqrt(x: Tensor, axis: int) -> Tensor:
    mean = x.mean(axis, keepdim=True)
    variance = (x - mean).pow(2).mean(axis, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-6)


def square_and_power(x: Tensor, axis: int) -> Tensor:
    centred = x - x.mean(axis, keepdim=True)
    return centred / ((centred * centred).mean(axis, keepdim=True) + 1e-6) ** 0.5


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


def of_another_mean(x: Tensor, axis: int) -> Tensor:
    variance = x.relu().var(axis, correction=0, keepdim=True)
    return (x - x.mean(axis, keepdim=True)) * torch.rsqrt(variance + 1e-6)


NORMS = (pow_and_sqrt, square_and_power, variance_and_rsqrt, both_at_once)
OTHERS = (corrected, eps_outside, of_another_mean)


class Hand(nn.Module):
    """A LayerNorm by hand, with names of its own."""

    def __init__(self, normalise, bias: bool = True, first: bool = False):
        super().__init__()
        self.normalise = normalise
        self.axis = 1 if first else -1
        self.gamma = nn.Parameter(torch.ones(C))
        self.beta = nn.Parameter(torch.zeros(C)) if bias else None

    def forward(self, hidden, unused=None):
        y = self.normalise(hidden, self.axis)
        gain, bias = self.gamma, self.beta
        if self.axis == 1:
            gain = gain[:, None]
            bias = bias if bias is None else bias[:, None]
        y = gain * y
        return y if bias is None else y + bias


@pytest.mark.parametrize("normalise", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_module_by_hand_folds(normalise, bias):
    model = net(lambda m, x: m.out(m.norm(m.a(x))), norm=Hand(normalise, bias))
    after, _ = folded(model, (draw(2, 4, C),), 1)
    assert isinstance(after.norm, FoldedNorm) and after.norm.eps == 1e-6
    assert after.state_dict().keys() == model.state_dict().keys()
    assert analyze(model, (draw(2, 4, C),)).rows[0].by_hand
    other = (draw(3, 5, C, seed=1),)
    torch.testing.assert_close(run(after, other), run(model, other), rtol=0, atol=1e-12)


def test_channels_first_by_hand():
    def forward(m, x):
        return m.out(m.norm(m.a(x).transpose(1, 2)).transpose(1, 2))

    after, _ = folded(net(forward, norm=Hand(pow_and_sqrt, first=True)), (draw(2, 4, C),), 1)
    assert after.norm.axis == 1


@pytest.mark.parametrize("normalise", OTHERS)
def test_other_norms_are_not_taken_for_it(normalise):
    model = net(lambda m, x: m.out(m.norm(m.a(x))), norm=Hand(normalise))
    assert analyze(model, (draw(2, 4, C),)).total == 0


def test_refused_by_hand():
    """An input that something else reads; a norm among other operations; a residual behind it."""
    norm = Hand(pow_and_sqrt)
    report = analyze(net(lambda m, x: m.out(m.norm(h := m.a(x)) + h), norm=norm), (draw(2, 4, C),))
    assert counts(report)[:2] == (1, 0) and "linear in out" in report.rows[0].reason
    model = net(lambda m, x: m.out(pow_and_sqrt(m.a(x), -1)))
    report = analyze(model, (draw(2, 4, C),))
    assert report.strict == 1 and "called by the model itself" in report.rows[0].reason
    assert fold(model, report)[1].folded == 0
    # its gain makes a mean for the next norm
    report = analyze(net(lambda m, x: m.out(m.ln(m.norm(m.a(x)))), norm=norm), (draw(2, 4, C),))
    assert counts(report)[:2] == (2, 1) and "another factor" in report.rows[1].reason


def test_it_trains_as_before():
    model = net(lambda m, x: m.out(m.norm(m.a(x))), norm=Hand(variance_and_rsqrt))
    x = draw(2, 4, C)
    trained = parametrize_cbwc(model, analyze(model, (x,)))
    grads = []
    for one in (model, trained):
        one(x).square().sum().backward()
        grads.append([p.grad for p in one.norm.parameters()])
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LayerNorm, Hand])
def test_a_norm_called_by_the_name_of_its_argument(kind):
    """Its argument may have another name than LayerNorm's, and further ones may stay unset."""
    if kind is Hand:
        norm = Hand(pow_and_sqrt)
        model = net(lambda m, x: m.out(m.norm(hidden=m.a(x))), norm=norm)
    else:
        model = net(lambda m, x: m.out(m.ln(input=m.a(x))))
    folded(model, (draw(2, 4, C),), 1)


def test_a_norm_that_takes_more():
    model = net(lambda m, x: m.out(m.norm(m.a(x), unused=x)), norm=Hand(pow_and_sqrt))
    report = analyze(model, (draw(2, 4, C),))
    assert "takes more than the tensor" in report.rows[0].reason
    assert fold(model, report)[1].folded == 0
