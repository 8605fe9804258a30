"""Modules for the tests of folding: a function with the parts it needs, weights at random, in
float64.
"""

import torch
from torch import nn

from fold import analyze, fold
from fold.certificate import randomize

C = 8


class Net(nn.Module):
    """A module from a function of itself and its input, with the parts it needs."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def prepared(model: nn.Module) -> nn.Module:
    model = model.double().eval()
    randomize(model)
    return model


def net(forward, **parts) -> nn.Module:
    """A Net with two norms and three linears, and with parts of its own."""
    torch.manual_seed(0)
    common = {"ln": nn.LayerNorm(C), "ln2": nn.LayerNorm(C), "out": nn.Linear(C, 3)}
    common |= {"a": nn.Linear(C, C), "b": nn.Linear(C, C)}
    return prepared(Net(forward, **common | parts))


def counts(report) -> tuple[int, int, int, int, int]:
    return report.total, report.strict, report.untied, report.practical, report.inserted


def folded(model, inputs, number, **how):
    """Fold, and see that the certificate vouches for `number` calls."""
    report = analyze(model, inputs)
    after, certificate = fold(model, report, **how)
    assert certificate.ok and certificate.max_rel <= 1e-13, str(certificate)
    assert certificate.folded == number, str(report)
    return after, certificate
