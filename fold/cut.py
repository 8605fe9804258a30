"""Choose where to insert centrings, as a minimum cut.

A line without zero mean (an obstacle) spoils every norm that it reaches. A centring on a line stops
the obstacle there and costs 1. Giving up a norm costs 1, too. The cheapest mixture of both is a
minimum cut between the obstacles and the norms (Ford and Fulkerson, 1956).

Every line becomes two nodes of the flow network, (line, "in") and (line, "out"). The edge between
them has the price of a centring on that line as its capacity.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable

FORBIDDEN = 10**9  # the price of a cut that is not allowed
START = "start"
END = "end"

# node -> neighbour -> capacity that is left
Edges = dict[Hashable, dict[Hashable, int]]


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
    edges = _network(onwards, obstacles, ends, may_cut)
    _send_flow(edges)
    # The network may have several cheapest cuts.
    if at_no_loss:
        # Take the one nearest to the obstacles: it keeps the most norms. No cut may cost more than
        # the norms that it keeps: "every norm at any price" gave FNet 6 centrings for 4 norms.
        reached = _connected(edges, START, lambda a, b: edges[a][b])
        safe = edges.keys() - reached
    else:
        # Take the one nearest to the ends.
        safe = _connected(edges, END, lambda a, b: edges[b][a])
    lines = onwards.keys() | ends.keys() | set(obstacles)
    cut = {line for line in lines if (line, "in") not in safe and (line, "out") in safe}
    kept = {line for line in ends if (line, "out") in safe}
    return cut, kept


def _network(
    onwards: dict[Hashable, Collection[Hashable]],
    obstacles: Collection[Hashable],
    ends: dict[Hashable, int],
    may_cut: Callable[[Hashable], bool],
) -> Edges:
    """Build the flow network, with a reverse edge of capacity 0 where an edge has none."""
    edges: Edges = defaultdict(dict)
    fed_lines = {fed for successors in onwards.values() for fed in successors}
    for line in onwards.keys() | fed_lines | set(obstacles) | ends.keys():
        edges[line, "in"][line, "out"] = 1 if may_cut(line) else FORBIDDEN
        for fed in onwards.get(line, ()):
            edges[line, "out"][fed, "in"] = FORBIDDEN
    for line in obstacles:
        edges[START][line, "in"] = FORBIDDEN
    for line, cost in ends.items():
        edges[line, "out"][END] = cost
    for node in list(edges):
        for neighbour in edges[node]:
            edges[neighbour].setdefault(node, 0)
    return edges


def _send_flow(edges: Edges) -> None:
    """Send a maximum flow from START to END, in place (Edmonds and Karp, 1972)."""
    while path := _path(edges):
        flow = min(edges[a][b] for a, b in path)
        for a, b in path:
            edges[a][b] -= flow
            edges[b][a] += flow


def _path(edges: Edges) -> list[tuple[Hashable, Hashable]]:
    """Find a shortest path from START to END with capacity left; return its edges, last first."""
    previous = {START: None}
    todo = deque([START])
    while todo and END not in previous:
        node = todo.popleft()
        for neighbour, capacity in edges[node].items():
            if capacity > 0 and neighbour not in previous:
                previous[neighbour] = node
                todo.append(neighbour)
    path = []
    node = END
    while previous.get(node) is not None:
        path.append((previous[node], node))
        node = previous[node]
    return path


def _connected(
    edges: Edges, start: Hashable, capacity: Callable[[Hashable, Hashable], int]
) -> set[Hashable]:
    """Find all nodes that are connected to `start` by edges with capacity left."""
    found = {start}
    todo = [start]
    while todo:
        node = todo.pop()
        for neighbour in edges[node]:
            if neighbour not in found and capacity(node, neighbour) > 0:
                found.add(neighbour)
                todo.append(neighbour)
    return found
