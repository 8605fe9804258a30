"""fold/cut.py: where centrings are worth their price, against every subset of lines."""

import itertools
import random

import pytest

from fold.cut import cheapest_cut


def best(onwards, obstacles, ends, may_cut) -> int:
    """The smallest price over all subsets of lines that may be cut: lines cut + ends given up."""

    def price(cut: tuple) -> int:
        reached, todo = set(), list(obstacles)
        while todo:
            line = todo.pop()
            if line not in reached and line not in cut:
                reached.add(line)
                todo += onwards.get(line, ())
        return len(cut) + sum(cost for line, cost in ends.items() if line in reached)

    able = [line for line in {*onwards, *ends, *obstacles} if may_cut(line)]
    return min(
        price(cut) for size in range(len(able) + 1) for cut in itertools.combinations(able, size)
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("at_no_loss", [False, True])
def test_no_subset_is_cheaper(seed, at_no_loss):
    draw = random.Random(seed)
    onwards = {a: {b for b in range(a + 1, 9) if draw.random() < 0.3} for a in range(9)}
    obstacles, ends = (
        {a for a in range(4) if draw.random() < 0.5},
        {a: draw.randint(1, 2) for a in range(5, 9)},
    )
    fixed = {a for a in range(9) if draw.random() < 0.3}
    cut, kept = cheapest_cut(onwards, obstacles, ends, lambda line: line not in fixed, at_no_loss)
    assert not cut & fixed
    paid = len(cut) + sum(cost for line, cost in ends.items() if line not in kept)
    assert paid == best(onwards, obstacles, ends, lambda line: line not in fixed)


@pytest.mark.parametrize(
    ("obstacles", "cost", "at_no_loss", "expected"),
    [
        ({"x"}, 1, False, (set(), set())),
        ({"x"}, 1, True, ({"x"}, {"y"})),
        ({"x"}, 2, False, ({"x"}, {"y"})),
        (set(), 1, False, (set(), {"y"})),  # and nothing may be cut
    ],
)
def test_ties(obstacles, cost, at_no_loss, expected):
    """One centring for one norm: no gain, and no loss either."""
    found = cheapest_cut(
        {"x": {"y"}}, obstacles, {"y": cost}, lambda line: line in obstacles, at_no_loss
    )
    assert found == expected
