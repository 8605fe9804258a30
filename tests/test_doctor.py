"""doctor.py and fold.norms_of: what norms a model has.

python -m pytest tests/test_doctor.py
"""

import pytest
import torch
from hand_written_norms import SHAPE, WRITTEN, Hand, Inline
from torch import nn

from fold import norms_of


class Beside(nn.Module):
    """Modules side by side."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return [part(x) for part in self.parts]


def found_in(kind) -> dict:
    """Name of a norm by hand -> the rows that are said of it."""
    parts = [kind(one.function, name == "one gain of zero") for name, one in WRITTEN.items()]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    found = norms_of(Beside(parts).eval(), (x,))
    assert not found.unread
    rows = {name: [] for name in WRITTEN}
    for row in found.rows:
        rows[[*WRITTEN][int(row.path.split(".")[1])]].append(row)
    return rows


@pytest.fixture(scope="module")
def modules():
    return found_in(Hand)


@pytest.fixture(scope="module")
def inline():
    return found_in(Inline)


def is_right(rows, kind, one) -> None:
    """One row, of this kind, eps, place and gain; or none."""
    if not kind:
        assert not rows
        return
    (row,) = rows
    assert row.kind == kind
    if row.is_named:
        assert (row.place, row.gain) == (one.place, one.gain)
        assert row.eps == (one.eps if one.eps is None else pytest.approx(one.eps, rel=1e-6))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_module_by_hand(name, modules):
    is_right(modules[name], WRITTEN[name].kind, WRITTEN[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_in_a_forward(name, inline):
    one = WRITTEN[name]
    is_right(inline[name], one.kind if one.inline is None else one.inline, one)
