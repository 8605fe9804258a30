"""Which norms of a graph to fold, and at what price: obstacles, untying, inserted centrings, the
plan.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Node

from .axes import Line, describe, module_path, norm_input
from .cut import cheapest_cut
from .graph import Demand, Graph, Source
from .modules import Insertion, Plan, Swap, find_swap

LEFT = "; fold leaves it: "  # a norm could be folded, but `fold` cannot write that into the modules


def _never(line: Line) -> bool:
    return False


@dataclass(eq=False)
class NormCall:
    """What is known of one call of a norm."""

    node: Node
    line: Line
    name: str
    refused: str  # why it can never be folded
    swap: Swap | str  # how it is swapped, or why `fold` cannot
    demand: Demand = field(default_factory=Demand)
    # what has no zero mean and cannot be given one -> why
    obstacles: dict[Line, str] = field(default_factory=dict)
    # obstacles that go -> names to be given a copy
    untie: dict[Line, tuple[str, ...]] = field(default_factory=dict)

    @property
    def key(self) -> Any:
        """Norms with the same key are swapped together."""
        return self.swap.path if isinstance(self.swap, Swap) else self.node

    def nodes(self) -> set[Node]:
        return {line.node for line in self.demand.lines} | {self.node}


@dataclass
class Choice:
    """Norms to fold, and the lines on which centrings are inserted for them."""

    norms: list[NormCall]
    cut: set[Line]

    def ends(self, norm: NormCall) -> tuple[list[Line], list[Line]]:
        """Where the way back from a norm ends: (sources and obstacles, inserted centrings)."""
        leaves, centrings, todo, done = [], [], [norm.line], set()
        while todo:
            line = todo.pop()
            if line in done:
                continue
            done.add(line)
            if line in self.cut:
                centrings.append(line)
            elif below := norm.demand.below.get(line):
                todo += below
            else:
                leaves.append(line)
        return leaves, centrings

    def centrings(self) -> set[Line]:
        return {line for norm in self.norms for line in self.ends(norm)[1]}


class Analysis:
    """The norms of a graph, with what each needs.

    `paper`: by the rules of the paper's table (fold/__init__.py).
    """

    def __init__(self, graph: Graph, paper: bool = False):
        self.graph, self.paper, self.training = graph, paper, graph.model.training
        self.norms: list[NormCall] = []
        for node in graph.nodes:
            if (found := norm_input(node)) is not None:
                self.norms.append(self._norm(node, *found))
        swaps = defaultdict(set)
        for norm in self.norms:
            swaps[norm.key].add(norm.swap)
        for norm in self.norms:
            if len(swaps[norm.key]) > 1:
                norm.swap = f"{norm.key} is called on inputs of several kinds"

    def _norm(self, node: Node, line: Line, refused: str) -> NormCall:
        path = module_path(node)
        calls = list(
            dict.fromkeys(self.graph.call(n) for n in self.graph.nodes if module_path(n) == path)
        )
        name = path or describe(node)
        if len(calls) > 1 and path:
            name += f" (call {calls.index(self.graph.call(node)) + 1})"
        if any(norm.name == name for norm in self.norms):  # two norms in one call of one module
            name += f" ({node.name})"
        norm = NormCall(node, line, name, refused, find_swap(self.graph, node))
        if refused:
            return norm
        norm.demand = self.graph.demand(line, self.paper)
        nodes = norm.nodes()
        for at, why in norm.demand.failures.items():
            shown = "" if at.node in self.graph.names or self.paper else self.graph.shows(at, nodes)
            norm.obstacles[at] = why + (
                f", and a centring behind it would show in {shown}" if shown else ""
            )
        for at, source in {} if self.paper else norm.demand.sources.items():
            if shown := self.graph.shows(at):
                self._unsafe(norm, at, source, shown)
        return norm

    def _unsafe(self, norm: NormCall, at: Line, source: Source, shown: str) -> None:
        """A source that something else would feel: nothing to do if it is and stays 0; perhaps it
        can be untied.
        """
        name = str(source)
        if at.node in self.graph.names:
            users = [user for user in at.node.users if user in norm.nodes()]
            mine = self.graph.owners(at.node, users)
            others = self.graph.owners(
                at.node, [user for user in at.node.users if user not in users]
            )
            name = min(mine)
            value = self.graph.values[self.graph.names[at.node]]
            if self.graph.stays(value) and not value.any():
                norm.demand.keep.add(self.graph.names[at.node])
                return
            if not mine & others and not self.graph.shows(at, users):
                norm.untie[at] = tuple(sorted(mine))
        norm.obstacles[at] = f"centring {name} would show in {shown}"

    # -------------------------------------------------------------------------------------- choices

    def choose(
        self,
        untie: bool = False,
        insert: bool = False,
        trained: bool = False,
        hooks: bool = False,
        at_no_loss: bool = False,
    ) -> Choice:
        """The norms to fold. Centrings are inserted only where they fold more norms than they are.

        untie       parameters may be given copies
        insert      centrings may be inserted
        trained     nothing may rely on values that training moves
        hooks       only centrings and swaps that can be written into the modules
        at_no_loss  centrings also where they fold as many norms as they are
        """
        norms = [
            norm
            for norm in self.norms
            if not norm.refused
            and not (trained and norm.demand.keep)
            and not (hooks and isinstance(norm.swap, str))
        ]
        while True:
            norms = self._closed(norms)
            onwards, obstacles, ends = defaultdict(set), set(), defaultdict(int)
            for norm in norms:
                for line, below in norm.demand.below.items():
                    for feeding in below:
                        onwards[feeding].add(line)
                obstacles |= {at for at in norm.obstacles if not (untie and at in norm.untie)}
                ends[norm.line] += 1
            may_cut = self._may_cut(norms, hooks) if insert else _never
            cut, kept = cheapest_cut(onwards, obstacles, ends, may_cut, at_no_loss)
            left = [
                norm for norm in norms if norm.line in kept or not self._spoilt(norm, obstacles)
            ]
            if len(left) == len(norms):
                return Choice(norms, cut)
            norms = left

    @staticmethod
    def _spoilt(norm: NormCall, obstacles: set[Line]) -> bool:
        return not norm.obstacles.keys().isdisjoint(obstacles)

    def _closed(self, norms: list[NormCall]) -> list[NormCall]:
        """Of these norms, those whose module is called by no other norm."""
        bad = {norm.key for norm in self.norms} - {norm.key for norm in norms}
        chosen = {norm.node for norm in norms}
        bad |= {norm.key for norm in self.norms if norm.node not in chosen}
        return [norm for norm in norms if norm.key not in bad]

    def _may_cut(self, norms: Collection[NormCall], hooks: bool):
        """May a centring be inserted on this line? Not where it would show, nor where it would be a
        norm's own mean under another name: in front of one norm alone.
        """
        nodes = set().union(*(norm.nodes() for norm in norms))
        wanted = defaultdict(int)
        for norm in norms:
            for line in norm.demand.lines:
                wanted[line] += 1
        own = set()
        for norm in norms if not self.paper else ():
            line = norm.line
            while wanted[line] == 1:
                own.add(line)
                below = norm.demand.below.get(line, ())
                if len(below) != 1:
                    break
                line = below[0]

        def may_cut(line: Line) -> bool:
            if line.node in self.graph.names or line in own:
                return False
            return self.paper or (
                not self.graph.shows(line, nodes) and not (hooks and self.insertion(line) is None)
            )

        return may_cut

    # ---------------------------------------------------------------------------------------- plans

    def insertion(self, at: Line) -> Insertion | None:
        """Where in the modules a centring on a line goes; None if there is no place."""
        if self.graph.shows(at):  # a hook cannot choose between users
            return None
        if (path := self.graph.returned_by(at.node)) is not None:
            return Insertion(path, at.axis, at.block)
        if (taken := self.graph.taken_by(at.node)) is not None:
            return Insertion(taken[0], at.axis, at.block, taken[1])
        return None

    def plan(
        self, untie: bool = False, insert: bool = False, trained: bool = False
    ) -> tuple[Plan, list[NormCall]]:
        """What to change, and the norms that are folded by it."""
        choice = self.choose(untie, insert, trained, hooks=True)
        sources, untied, keep = {}, {}, set()
        for norm in choice.norms:
            keep |= norm.demand.keep
            for at in choice.ends(norm)[0]:
                if at in norm.obstacles:
                    untied[norm.demand.sources[at], norm.untie[at]] = None
                elif (
                    at in norm.demand.sources
                    and self.graph.names.get(at.node) not in norm.demand.keep
                ):
                    sources[norm.demand.sources[at]] = None
        insertions = [self.insertion(line) for line in sorted(choice.centrings(), key=str)]
        swaps = list(dict.fromkeys(norm.swap for norm in choice.norms))
        return Plan(list(sources), list(untied), swaps, insertions, keep), choice.norms

    @cached_property
    def ways(self) -> dict[str, Choice]:
        """Verdict -> what is folded that way; the strictest comes first."""
        return {
            "strict": self.choose(),
            "untied": self.choose(untie=True),
            "inserted": self.choose(insert=True),
            "no gain": self.choose(insert=True, at_no_loss=True),
        }

    def verdict(self, norm: NormCall) -> tuple[str, list[str], str]:
        """(verdict, what gives its input zero mean, the reason in one sentence)."""
        verdict, choice = next(
            (way for way in self.ways.items() if norm in way[1].norms), ("refused", None)
        )
        why = norm.refused or next(
            iter(norm.obstacles.values()), "another call of the same module cannot be folded"
        )
        if choice is None:
            return verdict, [], why
        leaves, centrings = choice.ends(norm)
        sources = [
            " and ".join(norm.untie.get(at, [str(norm.demand.sources[at])]))
            for at in leaves
            if at in norm.demand.sources
        ]
        sources += [f"a centring behind {describe(at.node)}" for at in centrings]
        reason = {
            "strict": "all that is added up in its input can be centred "
            f"({len(sources)} parameters)",
            "untied": f"{why}, unless it gets a centred copy of its own",
            "inserted": f"{why}, unless centrings are inserted: they fold more norms than they are",
            "no gain": f"{why}: it would take as many centrings as norms would fold",
        }[verdict]
        if isinstance(norm.swap, str):
            reason += LEFT + norm.swap
        elif verdict == "inserted" and norm not in self.choose(insert=True, hooks=True).norms:
            reason += f"{LEFT}no module returns or takes what would have to be centred"
        return verdict, sources, reason
