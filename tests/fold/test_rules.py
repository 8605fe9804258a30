"""fold/rules.py on operations that look linear near zero, or by chance, and are not.

python -m pytest tests/fold/test_rules.py
"""

import pytest
import torch
import torch.nn.functional as F
from fold_nets import C, folded, net
from helpers import close, draw
from torch import nn

from fold import analyze, fold
from fold.certificate import run

X = draw(2, 4, C)
WIDE = 64


class Clamped(nn.LayerNorm):
    """A module that is a LayerNorm as long as no channel stands out."""

    def forward(self, x):
        return super().forward(x).clamp(-5, 5)


def feeds(rows, **parts):
    return net(lambda m, x: m.out(m.ln(rows(m, x))), **parts)


def reads(rows):
    """What a norm reads is read by something else, too."""

    def forward(m, x):
        h = m.a(x)
        return m.out(m.ln(h)) + rows(h).sum(-1, keepdim=True)

    return net(forward)


CUT = {
    "div by trunc feeds": feeds(lambda m, x: torch.div(m.a(x), 20, rounding_mode="trunc")),
    "cast to integers feeds": feeds(lambda m, x: (m.a(x) / 20).to(torch.int32).to(x.dtype)),
    "div by trunc reads": reads(lambda h: torch.div(h, 20, rounding_mode="trunc")),
    "cast to integers reads": reads(lambda h: (h / 20).long().to(h.dtype)),
    "a sum of integers reads": reads(lambda h: (h / 20).cumsum(1, dtype=torch.int64).to(h.dtype)),
    "a clamp in the norm's module": net(
        lambda m, x: m.last(m.norm(m.first(x))),
        first=nn.Linear(C, WIDE),
        norm=Clamped(WIDE),
        last=nn.Linear(WIDE, 3),
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_what_cuts_numbers_off(name):
    """On small numbers each of these gives zeros, whatever is added to them."""
    model = CUT[name]
    example = 0.01 * X
    after, certificate = fold(model, analyze(model, (example,)))
    assert certificate.ok and certificate.folded == 0, str(certificate)
    close(run(after, (100 * X,)), run(model, (100 * X,)))


INTEGERS = {
    "shifted": lambda m, k: (k >> 4).double(),
    "divided": lambda m, k: torch.div(k, 16, rounding_mode="trunc").double(),
    "added": lambda m, k: m.emb(k[..., 0]) + (k >> 4),
    "a factor of another": lambda m, k: m.emb(k[..., 0]) + (k >> 4) * m.emb(k).relu().sum(-2),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_are_numbers(name):
    model = feeds(INTEGERS[name], emb=nn.Embedding(256, C))
    ids = torch.arange(2 * C).reshape(2, C)
    for example in (ids % 16, ids):
        after, certificate = fold(model, analyze(model, (example,)))
        assert certificate.ok and certificate.folded == 0, str(certificate)
        close(after(7 * ids), model(7 * ids))


def test_integers_that_are_indices_or_factors():
    """Neither changes a zero mean."""

    def forward(m, k):
        h = m.emb(k >> 1) * (k + 1)[..., None]
        return m.out(m.ln(h.gather(-2, (k >> 4)[..., None].expand_as(h))))

    model = net(forward, emb=nn.Embedding(256, C))
    ids = torch.arange(2 * C).reshape(2, C)
    after, _ = folded(model, (ids,), 1)
    close(after(7 * ids), model(7 * ids))


def _by_hand(mask):
    return lambda m, x: m.a(x) * mask(x).to(x.dtype)


# Rarely a number is dropped, so that a trial and a check see none.
CHANCE = {
    "dropout": lambda m, x: F.dropout(m.a(x), 1e-7),
    "bernoulli": _by_hand(lambda x: torch.bernoulli(torch.full_like(x, 1 - 1e-7))),
    "bernoulli_": _by_hand(lambda x: torch.empty_like(x).bernoulli_(1 - 1e-7)),
    "rand": _by_hand(lambda x: torch.rand(x.shape) > 1e-7),
    "rand_like": lambda m, x: torch.where(torch.rand_like(x) > 1e-7, m.a(x), 0),
}


@pytest.mark.parametrize("name", CHANCE)
def test_what_chance_decides(name):
    report = analyze(feeds(CHANCE[name]).train(), (X,))
    assert report.strict == 0, str(report)


def test_whole_rows_that_are_dropped_keep_their_mean():
    model = feeds(lambda m, x: m.a(x) * torch.bernoulli(torch.full_like(x[..., :1], 0.5)))
    folded(model, (X,), 1)


def _rows(h):
    return torch.arange(h.shape[1])


def _ones(h, dtype=torch.float64):
    return torch.ones(h.shape[1], C, dtype=dtype)


# In the example nothing is hidden, and each factor is 1: from 40 positions on that is not so.
OF_LENGTH_ALONE = {
    "a triangle": lambda m, h: h * _ones(h).triu(-40),
    "a sum with one": lambda m, h: h + _ones(h).tril(-40),
    "a ramp": lambda m, h: h * (1 + (_rows(h) // 64)[:, None] * torch.arange(C)),
    "a ramp far away": lambda m, h: h * (1 + _rows(h)[:, None] // 90 * torch.arange(C)),
    "a line": lambda m, h: h * torch.linspace(1, 1 + h.shape[1] // 64, C, dtype=h.dtype),
    "a comparison": lambda m, h: h.masked_fill(_ones(h).cumsum(0).cumsum(1) > 300, 0),
    "a mask": lambda m, h: h.masked_fill(_ones(h, torch.bool).tril(-40), 0),
    "where": lambda m, h: torch.where(_rows(h)[:, None] - 40 > torch.arange(C), 0, h),
    "a mask with one of the input": lambda m, h: h.masked_fill(
        (h[..., :1] > 0) & _ones(h, torch.bool).tril(-40), 0
    ),
    "indices": lambda m, h: h * m.w[(_rows(h) // 64)[:, None] * torch.arange(C)],
}
OF_EACH_ROW = {
    "a factor": lambda m, h: h * (1 + _rows(h))[:, None],
    "a factor that is expanded": lambda m, h: h * torch.log1p(_rows(h) + 1)[:, None].expand(-1, C),
    "a mask": lambda m, h: h.masked_fill((_rows(h) > 40)[:, None].expand(-1, C), 0),
    "a mean of what came before": lambda m, h: (
        torch.ones(h.shape[1], h.shape[1], dtype=h.dtype).tril() / (1 + _rows(h))[:, None] @ h
    ),
    "ones": lambda m, h: h * _ones(h).sqrt(),
    "positions": lambda m, h: h + m.emb(_rows(h) // 4),
    "gathered": lambda m, h: h.gather(1, (_rows(h) // 2)[None, :, None].expand(len(h), -1, C)),
}


@pytest.mark.parametrize(
    "rows, number",
    [
        *(pytest.param(rows, 0, id=f"not {name}") for name, rows in OF_LENGTH_ALONE.items()),
        *(pytest.param(rows, 1, id=name) for name, rows in OF_EACH_ROW.items()),
    ],
)
def test_what_the_length_alone_decides(rows, number):
    """What is equal along the channels in the example may differ along them in a longer one."""
    model = feeds(
        lambda m, x: rows(m, m.a(x)), w=nn.Parameter(torch.ones(64 * C)), emb=nn.Embedding(64, C)
    )
    after, certificate = fold(model, analyze(model, (draw(2, 6, C),)))
    assert certificate.ok and certificate.folded == number, str(certificate)
    far = draw(2, 100, C)
    close(run(after, (far,)), run(model, (far,)))
