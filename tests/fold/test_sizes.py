"""fold/__init__.py: what is analysed on one shape is right on others, or refused.
NANONORM_FOLDS=100: more.
"""

import os
import random

import pytest
import torch
from fold_nets import C, Net, net, prepared
from helpers import close, draw
from torch import Tensor, nn

from common.errors import FoldError
from fold import analyze, fold
from fold.certificate import run

SEEDS = 4 * int(os.environ.get("NANONORM_FOLDS", 5))


class Do(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def steps(*parts) -> nn.Module:
    """Put modules and functions one after another."""
    return nn.Sequential(*(x if isinstance(x, nn.Module) else Do(x) for x in parts))


def whitened(m, x: Tensor) -> Tensor:
    """Apply a LayerNorm by hand without gains, over an axis and so of any size."""
    centred = x - x.mean(m.axis, keepdim=True)
    return centred / (centred.pow(2).mean(m.axis, keepdim=True) + 1e-5).sqrt()


def axis_one(m, x: Tensor) -> Tensor:
    """Apply a LayerNorm to the channels of (N, C, ...)."""
    return m.norm(x.transpose(1, -1)).transpose(1, -1)


class Viewed(nn.LayerNorm):
    """Rows of C numbers, which mixes channels and positions if there are several."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(len(x), -1, C)).reshape(x.shape)


def beside(m, x: Tensor) -> Tensor:
    """Apply a norm, and something else that reads its input and may call it again."""
    return m.norm(x) + m.other(x, m.norm)


def residual(m, x: Tensor) -> Tensor:
    """Apply a sublayer with its norm, and its sum."""
    return x + m.linear(m.norm(x))


def with_norm(forward, **parts) -> nn.Module:
    """Make a module of one of these functions, with a norm."""
    return Net(forward, norm=nn.LayerNorm(C), **parts)


def agrees(model: nn.Module, after: nn.Module, *shape: int) -> bool:
    """Tell whether a folded model takes a shape that the model takes, and compare them."""
    x = draw(*shape, seed=sum(shape))
    try:
        expected = run(model, (x,))
    except Exception:  # the model has no such inputs
        return False
    try:
        found = run(after, (x,))
    except FoldError:
        return False
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))
    return True


def front(*between) -> nn.Module:
    return prepared(steps(nn.Linear(C, C), *between, nn.Linear(C, 4)))


def conv(norm: nn.Module) -> nn.Module:
    return prepared(nn.Sequential(nn.Conv1d(3, C, 1), norm, nn.Conv1d(C, 4, 1)))


# model, shape of the example, other shapes, how many calls fold
CASES = {
    "GroupNorm with one position": (conv(nn.GroupNorm(1, C)), (2, 3, 1), [(2, 3, 7)], 0),
    "GroupNorm without positions": (front(nn.GroupNorm(2, C)), (2, C), [(5, C)], 1),
    "LayerNorm": (front(nn.LayerNorm(C)), (2, C), [(2, C, C), (2, 5, C), (3, 2, 5, C)], 1),
    "LayerNorm called on two ranks": (
        front(with_norm(beside, other=lambda h, norm: norm(h.mean(1))[:, None])),
        (2, 4, C),
        [(3, C, C), (1, 1, C)],
        2,
    ),
    "by hand, from the end": (front(Net(whitened, axis=-1)), (2, C), [(2, C, C), (2, 5, C)], 1),
    "a turn that two axes do not show": (front(with_norm(axis_one)), (2, C), [(3, C, C)], 1),
    "likewise, outside the norm's module": (
        front(lambda h: h.transpose(1, -1), nn.LayerNorm(C)),
        (2, C),
        [(5, C), (3, C, C)],
        1,
    ),
    "squeezed positions": (
        front(with_norm(beside, other=lambda h, norm: h.squeeze().softmax(1))),
        (2, 1, C),
        [(2, C, C)],
        0,
    ),
    "channels and positions mixed up": (
        front(lambda h: h.view(len(h), C, -1).transpose(1, 2), nn.LayerNorm(C)),
        (2, 1, C),
        [(2, C, C), (2, 5, C)],
        0,
    ),
    "a cache that is empty in the example": (
        net(
            lambda m, x: m.ln(torch.cat([x, m.token.expand(len(x), 1, C)], 1)),
            token=nn.Parameter(torch.randn(1, 1, C)),
        ),
        (2, 0, C),
        [(2, 3, C)],
        0,
    ),
    "a view of one position, in the norm's module": (
        conv(Viewed(C)),
        (2, 3, 1),
        [(2, 3, C)],
        0,
    ),
    "a convolution without a batch": (
        prepared(
            nn.Sequential(
                nn.Conv1d(3, C, 2, 2),
                Net(whitened, axis=1),
                with_norm(residual, linear=nn.Linear(C, C)),
                nn.LayerNorm(C),
            )
        ),
        (3, 2 * C),
        [(1, 3, 2 * C), (2, 3, 2 * C)],
        2,
    ),
    "keys that a longer input alone has several of": (
        net(
            lambda m, x: (
                m.ln(m.a(x))
                + nn.functional.scaled_dot_product_attention(m.a(x), x[:, ::4], x[:, ::4])
            )
        ),
        (2, 4, C),
        [(2, 8, C)],
        0,
    ),
    "positions that begin beyond the example": (
        net(
            lambda m, x: m.b(m.ln(m.a(x) + torch.arange(x.shape[1])[:, None] // 4 * m.p)),
            p=nn.Parameter(torch.randn(C)),
        ),
        (2, 4, C),
        [(2, 7, C)],
        1,
    ),
    "a norm of pictures, whose channels are in front": (
        front(with_norm(lambda m, x: axis_one(m, x) if x.dim() == 4 else m.norm(x))),
        (C,),
        [(2, C, 5, C), (5, C)],
        1,
    ),
    "a cumulative sum": (front(lambda h: h.cumsum(1), nn.LayerNorm(C)), (2, 3, C), [(3, C)], 1),
    "two axes that are not there": (
        front(lambda h: h.cumsum(1), lambda h: h.squeeze(), nn.LayerNorm(C)),
        (1, 1, 3, C),
        [(3, C)],
        0,
    ),
}


# These fold for the rank of the example, and refuse others.
OF_ONE_RANK = {
    "a turn that two axes do not show",
    "likewise, outside the norm's module",
    "a convolution without a batch",
    "a norm of pictures, whose channels are in front",
    "a cumulative sum",
}


@pytest.mark.parametrize("name", CASES)
def test_other_shapes(name):
    model, example, others, number = CASES[name]
    after, certificate = fold(model, analyze(model, (draw(*example),)))
    assert certificate.folded == number, str(certificate)
    takes_all = all(agrees(model, after, *shape) for shape in others)
    assert takes_all == (name not in OF_ONE_RANK)
    agrees(model, after, 3, C, C)  # or it is refused


def test_a_folded_norm_under_vmap():
    model, example, _, _ = CASES["LayerNorm"]
    after, _ = fold(model, analyze(model, (draw(*example),)))
    x = draw(3, 2, C)
    close(torch.vmap(torch.vmap(after))(x), model(x))


STEPS = (
    lambda h: h.cumsum(1),
    lambda h: h + h.mean(1, keepdim=True),
    lambda h: h * h[:, :1],
    lambda h: h * h.mean(-1, keepdim=True),
    lambda h: h[:, :2],
    lambda h: h.roll(1, 1),
    lambda h: h.squeeze(),
    lambda h: h.unsqueeze(1),
    lambda h: h.flatten(1),
    lambda h: h.flatten(0, 1),
    lambda h: h.transpose(0, 1),
    lambda h: h.transpose(1, -1),
    lambda h: h.reshape(len(h), C, -1),
    lambda h: h.reshape(len(h), -1, C),
    lambda h: torch.cat([h, h[:1]]),
)


def awkward(choose: random.Random) -> tuple[nn.Module, list[tuple[int, ...]]]:
    """Return random steps around norms, and shapes that it may take; the first is the example's."""
    others = (
        lambda h, norm: h.softmax(1),
        lambda h, norm: norm(h.mean(0)),
        lambda h, norm: h.std(1, keepdim=True, correction=0),
    )
    norms = (
        nn.LayerNorm(C),
        nn.GroupNorm(2, C),
        Net(whitened, axis=-1),
        Net(whitened, axis=1),
        with_norm(axis_one),
        with_norm(beside, other=choose.choice(others)),
    )
    parts = [nn.Linear(C, C)]
    for norm in choose.sample(norms, choose.choice([1, 1, 2])):
        parts += choose.choices(STEPS, k=choose.choice([0, 0, 1, 1, 2]))
        sublayer = with_norm(residual, linear=nn.Linear(C, C))
        parts += [norm, *choose.sample([nn.Linear(C, C), nn.GELU(), sublayer], k=1)]
    ranks = choose.choices([1, 1, 2, 2, 3], k=8)
    shapes = [(*choose.choices((1, 1, 2, 3, C), k=rank), C) for rank in ranks]
    return prepared(steps(*parts)), shapes


def test_random_modules():
    """None is wrong on another shape: a module is right there, refused, or was not folded.

    Counts of the verdicts grow with what is allowed.
    """
    folded = right = 0
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, shapes = awkward(random.Random(seed))
        takes = [shape for shape in shapes if agrees(model, model, *shape)]
        if len(takes) < 2:
            continue
        report = analyze(model, (draw(*takes[0]),))
        assert report.strict <= report.untied and report.strict <= report.practical <= report.total
        after, certificate = fold(model, report, insert=True)
        folded += certificate.folded > 0
        right += sum(agrees(model, after, *shape) for shape in takes[1:])
    assert folded > 0 and right > 0
