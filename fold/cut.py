"""Choose where to insert centrings, as a minimum cut.

A line without zero mean (an obstacle) spoils every norm that it reaches. A centring on a line stops
the obstacle there and costs 1. Giving up a norm costs 1, too. The cheapest mixture of both is a
minimum cut between the obstacles and the norms (Ford and Fulkerson, 1956).

Every line becomes two nodes of the flow network, (line, "in") and (line, "out"). The edge between
them has the price of a centring on that line as its capacity.
"""

from collections.abc import Callable, Collection, Hashable

import networkx  # torch needs it, so it is there

START = "start"
END = "end"


def cheapest_cut(
    onwards: dict[Hashable, Collection[Hashable]],
    obstacles: Collection[Hashable],
    ends: dict[Hashable, int],
    may_cut: Callable[[Hashable], bool],
    at_no_loss: bool = False,
) -> tuple[set[Hashable], set[Hashable]]:
    """Find the cheapest set of lines to cut.

    Args:
        onwards: for each line, the lines that it feeds.
        obstacles: lines from which a nonzero mean spreads.
        ends: for each line that norms read, what giving it up costs (how many norms read it).
        may_cut: says whether this line may be cut, at a cost of 1.
        at_no_loss: keep an end also where that costs as much as giving it up; by default only
            where it costs less.

    Returns:
        The lines to cut, and the ends that no obstacle reaches any more.
    """
    lines = {*onwards, *obstacles, *ends}.union(*onwards.values())
    network = networkx.DiGraph()
    network.add_nodes_from((START, END))
    # An edge without a capacity cannot be cut.
    for line in lines:
        price = {"capacity": 1} if may_cut(line) else {}
        network.add_edge((line, "in"), (line, "out"), **price)
        network.add_edges_from(((line, "out"), (fed, "in")) for fed in onwards.get(line, ()))
    network.add_edges_from((START, (line, "in")) for line in obstacles)
    for line, cost in ends.items():
        network.add_edge((line, "out"), END, capacity=cost)
    # The network may have several cheapest cuts; networkx returns the one nearest to the target.
    if at_no_loss:
        # The one nearest to the obstacles keeps the most norms. No cut may cost more than the norms
        # that it keeps: "every norm at any price" gave FNet 6 centrings for 4 norms.
        _, (safe, _) = networkx.minimum_cut(network.reverse(), END, START)
    else:
        _, (_, safe) = networkx.minimum_cut(network, START, END)
    cut = {line for line in lines if (line, "in") not in safe and (line, "out") in safe}
    return cut, {line for line in ends if (line, "out") in safe}
