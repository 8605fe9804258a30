"""Where to insert centrings: a smallest cut.

Lines without zero mean (obstacles) spoil every norm that they reach. A centring on a line stops
them there and costs 1; giving up a norm costs 1, too. The cheapest mixture of both is a minimum cut
between obstacles and norms (Ford and Fulkerson).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable

NEVER = 10**9  # the price of what is not for sale
START, END = "start", "end"


def cheapest_cut(
    onwards: dict[Hashable, Collection[Hashable]],
    obstacles: Collection[Hashable],
    ends: dict[Hashable, int],
    may_cut: Callable[[Hashable], bool],
    at_no_loss: bool = False,
) -> tuple[set[Hashable], set[Hashable]]:
    """(lines to cut, ends that no obstacle reaches any more).

    onwards     line -> the lines that it feeds
    ends        line -> what giving it up costs: how many norms it is the input of
    may_cut     may this line be cut, at a cost of 1?
    at_no_loss  keep ends also where that costs as much as giving them up; else only where it is
                cheaper
    """
    # node -> node -> what may still flow
    edges: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    for line in (
        onwards.keys()
        | {below for fed in onwards.values() for below in fed}
        | set(obstacles)
        | ends.keys()
    ):
        edges[line, "in"][line, "out"] = 1 if may_cut(line) else NEVER
        for fed in onwards.get(line, ()):
            edges[line, "out"][fed, "in"] = NEVER
    for line in obstacles:
        edges[START][line, "in"] = NEVER
    for line, cost in ends.items():
        edges[line, "out"][END] = cost
    for node in list(edges):
        for other in edges[node]:
            edges[other].setdefault(node, 0)
    while path := _path(edges):
        flow = min(edges[a][b] for a, b in path)
        for a, b in path:
            edges[a][b] -= flow
            edges[b][a] += flow
    if at_no_loss:  # of several cheapest cuts, the one nearest to the obstacles
        safe = edges.keys() - _connected(edges, START, lambda a, b: edges[a][b])
    else:  # the one nearest to the ends
        safe = _connected(edges, END, lambda a, b: edges[b][a])
    lines = onwards.keys() | ends.keys() | set(obstacles)
    cut = {line for line in lines if (line, "in") not in safe and (line, "out") in safe}
    return cut, {line for line in ends if (line, "out") in safe}


def _path(edges: dict) -> list[tuple]:
    """A shortest path from START to END on which something may still flow, as edges."""
    came, todo = {START: None}, deque([START])
    while todo and END not in came:
        node = todo.popleft()
        for other, room in edges[node].items():
            if room > 0 and other not in came:
                came[other] = node
                todo.append(other)
    path, node = [], END
    while came.get(node) is not None:
        path.append((came[node], node))
        node = came[node]
    return path


def _connected(
    edges: dict, start: Hashable, room: Callable[[Hashable, Hashable], int]
) -> set[Hashable]:
    """All nodes that are connected to `start` by edges with room."""
    found, todo = {start}, [start]
    while todo:
        node = todo.pop()
        for other in edges[node]:
            if other not in found and room(node, other) > 0:
                found.add(other)
                todo.append(other)
    return found
