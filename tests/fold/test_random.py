"""fold/__init__.py on random programs: whatever it says can be folded must fold exactly.
NANONORM_FOLDS=100: more.
"""

import os
import random

import torch
from helpers import draw
from torch import Tensor, nn

from fold import analyze, fold
from fold.certificate import randomize

C = 8
SEEDS = int(os.environ.get("NANONORM_FOLDS", 5))
KINDS = {
    "linear": 5,
    "add": 4,
    "norm": 4,
    "vector": 1,
    "gain": 1,
    "scale": 1,
    "relu": 1,
    "roll": 1,
    "rows": 1,
    "cut": 1,
    "mean": 1,
}


class RandomNet(nn.Module):
    """Twelve random operations on (B, T, C): linears and norms, some shared, adds, gains, and much
    that spoils.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.linears = nn.ModuleList(nn.Linear(C, C, bias=i % 2 == 0) for i in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(C, elementwise_affine=i % 4 != 3) for i in range(4))
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(C)) for _ in range(4))
        self.out = nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:
        choose, values, normed = random.Random(self.seed), [x], [torch.zeros_like(x)]
        for _ in range(12):
            kind = choose.choices(list(KINDS), KINDS.values())[0]
            values.append(
                self.operation(kind, choose, choose.choice(values[-4:]), choose.choice(values[-4:]))
            )
            if kind == "norm":
                normed.append(values[-1])
        if choose.random() < 0.3:
            normed.append(values[-1])
        return self.out(torch.stack(normed).tanh().sum(0))

    def operation(self, kind: str, choose: random.Random, a: Tensor, b: Tensor) -> Tensor:
        match kind:
            case "linear":
                return choose.choice(self.linears)(a)
            case "norm":
                return choose.choice(self.norms)(a)
            case "add":
                return a + b
            case "vector":
                return a + choose.choice(self.vectors)
            case "gain":
                return a * choose.choice(self.vectors)
            case "scale":
                return a.mul(0.5).neg_()
            case "roll":
                return a.roll(1, 1)
            case "rows":
                return a * b[..., :1]
            case "cut":
                return torch.cat([a[..., :3], b[..., 3:]], -1)
            case "mean":
                return a.mean(1, True).expand_as(b) + b
        return a.relu()


def test_random_programs():
    number = 0
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = RandomNet(seed).double().eval()
        randomize(model)
        report = analyze(model, (draw(2, 3, C),))
        assert report.strict <= report.untied and report.strict <= report.practical <= report.total
        for how in ({}, {"untie": True, "insert": True}):
            certificate = fold(model, report, **how)[1]
            assert certificate.ok, f"seed {seed}: {certificate}\n{report}"
            number += certificate.folded
    assert number > 0
