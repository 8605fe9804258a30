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
        self.ln, self.ln2, self.out = nn.LayerNorm(C), nn.LayerNorm(C), nn.Linear(C, 3)
        self.a, self.b = nn.Linear(C, C), nn.Linear(C, C)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def net(forward, **parts) -> nn.Module:
    torch.manual_seed(0)
    model = Net(forward, **parts).double().eval()
    randomize(model)
    return model


def counts(report) -> tuple[int, int, int, int, int]:
    return report.total, report.strict, report.untied, report.practical, report.inserted


def folded(model, inputs, number, **how):
    """Fold, and see that the certificate vouches for `number` calls."""
    report = analyze(model, inputs)
    after, certificate = fold(model, report, **how)
    assert certificate.ok and certificate.max_rel <= 1e-13, str(certificate)
    assert certificate.folded == number, str(report)
    return after, certificate
