"""Choose which norms of a graph to fold, and at what price.

The price is untied parameters and inserted centrings. The result is a `Plan` for modules.py, and a
`Finding` for each norm.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Node

from .cut import cheapest_cut
from .graph import Demand, Graph, Source
from .lines import Line, Norm, describe, module_path, shape
from .modules import Insertion, Plan, Swap, find_swap

# A norm could be folded, but `fold` cannot write that into the modules, because ...
LEFT = "; fold leaves it: "
# verdict -> why, where {} is the first obstacle
REASONS = {
    "strict": "all that is added up in its input can be centred",
    "untied": "{}, unless it gets a centred copy of its own (option untie)",
    "inserted": "{}, unless fewer centrings than they fold norms are inserted (option insert)",
    "no gain": "{}: it would take as many centrings as norms would fold",
    "refused": "{}",
}


@dataclass(frozen=True)
class Finding:
    """What the analysis found for one call of a norm.

    Attributes:
        name: path of the module, with the number of the call from the second one on.
        verdict: one of
            "strict": it folds, and nothing is added to the model;
            "untied": it folds if parameters that are used elsewhere, too, get a centred copy;
            "inserted": it folds if centrings are inserted, fewer than the norms that they fold;
            "no gain": likewise, but that takes as many centrings as it folds norms;
            "refused": it does not fold.
        reason: of the verdict, for people.
        by_hand: the norm is written out, from means and square roots.
    """

    name: str
    verdict: str
    reason: str
    by_hand: bool = False


@dataclass(eq=False)
class NormCall:
    """What is known of one call of a norm."""

    node: Node
    norm: Norm
    name: str
    swap: Swap | str  # how its module is swapped, or why `fold` cannot do that
    demand: Demand = field(default_factory=Demand)
    # lines without zero mean that cannot be given one -> why
    obstacles: dict[Line, str] = field(default_factory=dict)
    # those of them that a copied parameter removes -> its names that get the copy
    untie: dict[Line, tuple[str, ...]] = field(default_factory=dict)

    @property
    def line(self) -> Line:
        return self.norm.line

    @property
    def key(self) -> Any:
        """Norms with the same key are swapped together."""
        return self.swap.path if isinstance(self.swap, Swap) else self.node

    def nodes(self) -> set[Node]:
        """Return all nodes that must keep zero mean for this norm, and the norm itself."""
        return {line.node for line in self.demand.below} | {self.node}


@dataclass
class Choice:
    """Norms to fold, and the lines on which centrings are inserted for them."""

    norms: list[NormCall]
    cut: set[Line]

    def way_back(self, norm: NormCall) -> list[Line]:
        """Return the lines that a norm depends on, as far back as lines of inserted centrings."""
        found: dict[Line, None] = {}  # a set in order
        todo = [norm.line]
        while todo:
            line = todo.pop()
            if line not in found:
                found[line] = None
                todo += () if line in self.cut else norm.demand.below.get(line, ())
        return list(found)

    def centrings(self) -> set[Line]:
        """Return the lines on which a centring is inserted for some norm."""
        return self.cut & {line for norm in self.norms for line in self.way_back(norm)}


class Analysis:
    """The norms of a graph, with what each of them needs.

    Args:
        graph: of the model.
        paper: follow the rules of the paper's Table 3 (fold/__init__.py).
    """

    def __init__(self, graph: Graph, paper: bool = False):
        self.graph = graph
        self.paper = paper
        self.training = graph.model.training
        self._calls = Counter()  # of norms, by name
        self.norms = [self._norm_call(node) for node in graph.nodes if node.meta["norm"]]

    def _norm_call(self, node: Node) -> NormCall:
        found = node.meta["norm"]
        path = module_path(node)
        name = path or describe(node)
        self._calls[name] += 1
        if self._calls[name] > 1:
            name += f" (call {self._calls[name]})"
        if found.refused:
            return NormCall(node, found, name, found.refused)
        norm = NormCall(node, found, name, find_swap(self.graph, path, found))
        norm.demand = self.graph.demand(norm.line, self.paper)
        norm.obstacles |= norm.demand.failures
        if self.paper:
            return norm  # the paper does not ask what else reads a centred parameter
        for at, source in norm.demand.sources.items():
            shown = self.graph.shows(at)
            if shown:
                self._add_unsafe_source(norm, at, source, shown)
        return norm

    def _add_unsafe_source(self, norm: NormCall, at: Line, source: Source, shown: str) -> None:
        """Add a source to the norm's obstacles, because centring it would change something else.

        It can be untied if other users read it under another name.
        """
        name = str(source)
        if at.node in self.graph.names:
            nodes = norm.nodes()
            own_names = self.graph.owners(at.node, [x for x in at.node.users if x in nodes])
            # Another call of the same module reads the copy, too.
            users = [x for x in at.node.users if self.graph.owners(at.node, [x]) <= own_names]
            other_users = [user for user in at.node.users if user not in users]
            other_names = self.graph.owners(at.node, other_users)
            name = min(own_names)
            if not own_names & other_names and not self.graph.shows(at, users):
                norm.untie[at] = tuple(sorted(own_names))
        norm.obstacles[at] = f"centring {name} would show in {shown}"

    # -------------------------------------------------------------------------------------- choices

    def choose(
        self,
        untie: bool = False,
        insert: bool = False,
        hooks: bool = False,
        at_no_loss: bool = False,
        only: Collection[str] | None = None,
    ) -> Choice:
        """Choose the norms to fold.

        Args:
            untie: parameters may be given copies.
            insert: centrings may be inserted, where they fold more norms than they are.
            hooks: only centrings and swaps that can be written into the modules.
            at_no_loss: insert centrings also where they fold as many norms as they are.
            only: paths of the modules that may be folded; None stands for all.
        """
        norms = []
        for norm in self.norms:
            cannot_be_written = hooks and isinstance(norm.swap, str)
            is_asked = only is None or norm.key in only
            if is_asked and not norm.norm.refused and not cannot_be_written:
                norms.append(norm)
        # To give up one norm may force others to be given up, so choose until nothing changes.
        while True:
            norms = self._whole_modules(norms)
            onwards = defaultdict(set)
            obstacles = set()
            for norm in norms:
                for line, below in norm.demand.below.items():
                    for feeding in below:
                        onwards[feeding].add(line)
                obstacles |= {at for at in norm.obstacles if not (untie and at in norm.untie)}
            ends = Counter(norm.line for norm in norms)
            may_cut = self._may_cut(norms, insert, hooks)
            cut, kept = cheapest_cut(onwards, obstacles, ends, may_cut, at_no_loss)
            remaining = [
                norm
                for norm in norms
                if norm.line in kept or norm.obstacles.keys().isdisjoint(obstacles)
            ]
            if len(remaining) == len(norms):
                return Choice(norms, cut)
            norms = remaining

    def _whole_modules(self, norms: list[NormCall]) -> list[NormCall]:
        """Keep those norms of whose module every call is among them."""
        chosen = {norm.node for norm in norms}
        incomplete = {norm.key for norm in self.norms if norm.node not in chosen}
        return [norm for norm in norms if norm.key not in incomplete]

    def _may_cut(
        self, norms: Collection[NormCall], insert: bool, hooks: bool
    ) -> Callable[[Line], bool]:
        """Return a function that tells whether a centring may be inserted on a line.

        It may not be without `insert`, nor where it would change something else. Nor may it be just
        before one norm alone: there it would be the norm's own mean under another name.
        """
        nodes = set().union(*(norm.nodes() for norm in norms))
        before_one_norm = set() if self.paper else _lines_before_one_norm(norms)

        def may_cut(line: Line) -> bool:
            if not insert or line.node in self.graph.names or line in before_one_norm:
                return False
            if self.paper:
                return True
            if self.graph.shows(line, nodes):
                return False
            return not hooks or self.insertion(line) is not None

        return may_cut

    # ---------------------------------------------------------------------------------------- plans

    def insertion(self, at: Line) -> Insertion | None:
        """Find where in the modules a centring on a line can be inserted; None if nowhere."""
        if self.graph.shows(at):  # a hook cannot choose which users get the centred tensor
            return None
        # A view of what was written may have turned axes, and sizes must tell them apart.
        sizes = shape(at.node)
        if self.graph.writes and sizes.count(sizes[at.axis]) > 1:
            return None
        # The last axis is that of tensors of any rank.
        axis, ndim = (-1, None) if at.axis == len(sizes) - 1 else (at.axis, len(sizes))
        path = self.graph.returned_by(at.node)
        return None if path is None else Insertion(path, axis, at.block, ndim)

    def plan(
        self, untie: bool = False, insert: bool = False, only: dict[str, bool] | None = None
    ) -> tuple[Plan, list[NormCall]]:
        """Plan what to change in the modules.

        Args:
            untie: as in `choose`.
            insert: as in `choose`.
            only: paths of the modules that may be folded -> whether only for tensors of the
                example's rank; None stands for all modules and ranks.

        Returns:
            The plan, and the norms that it folds.
        """
        choice = self.choose(untie, insert, hooks=True, only=only)
        # Dicts keep the order and drop what is there twice.
        sources: dict[tuple[Source, tuple[str, ...]], None] = {}
        for norm in choice.norms:
            for at in choice.way_back(norm):
                if at in norm.demand.sources and at not in choice.cut:
                    sources[norm.demand.sources[at], norm.untie.get(at, ())] = None
        of_one_rank = {path for path, is_bound in (only or {}).items() if is_bound}
        swaps = dict.fromkeys(norm.swap for norm in choice.norms)
        plan = Plan(
            sources=list(sources),
            swaps=[
                swap.of_one_rank(self.graph.taken[swap.path]) if swap.path in of_one_rank else swap
                for swap in swaps
            ],
            insertions=[self.insertion(line) for line in sorted(choice.centrings(), key=str)],
        )
        return plan, choice.norms

    @cached_property
    def ways(self) -> dict[str, Choice]:
        """What is folded with each verdict but "refused"; the strictest comes first."""
        return {
            "strict": self.choose(),
            "untied": self.choose(untie=True),
            "inserted": self.choose(insert=True),
            "no gain": self.choose(insert=True, at_no_loss=True),
        }

    def finding(self, norm: NormCall) -> Finding:
        """Give the verdict on a norm, and its reason."""
        obstacles = (norm.norm.refused, *norm.obstacles.values())
        obstacle = next(filter(None, obstacles), "another call of the same module cannot be folded")
        verdict = next((name for name, way in self.ways.items() if norm in way.norms), "refused")
        reason = REASONS[verdict].format(obstacle)
        if verdict != "refused" and isinstance(norm.swap, str):
            reason += LEFT + norm.swap
        elif verdict == "inserted" and norm not in self.choose(insert=True, hooks=True).norms:
            reason += f"{LEFT}no module returns what would have to be centred"
        return Finding(norm.name, verdict, reason, norm.norm.by_hand)


def _lines_before_one_norm(norms: Collection[NormCall]) -> set[Line]:
    """Find the lines just before each norm that no other norm depends on."""
    # how many norms depend on each line
    n_norms = Counter(line for norm in norms for line in norm.demand.below)
    found = set()
    for norm in norms:
        line = norm.line
        while n_norms[line] == 1:
            found.add(line)
            below = norm.demand.below.get(line, ())
            if len(below) != 1:
                break
            (line,) = below
    return found
