"""Which LayerNorms of a model can become RMSNorms without changing what it computes, and the change itself.

    report = analyze(model, {"input_ids": ids})      any nn.Module, in the mode it is in; or a tuple of arguments
    print(report)                                    one row for each call of a LayerNorm: verdict, sources, reason
    folded, certificate = fold(model, report)        a copy; also with untie=True, insert=True
    trained = parametrize_cbwc(model, report)        a copy that trains as the LayerNorm model would

A LayerNorm takes the mean away, then scales. Where all that is added up in its input has zero mean over the channels
already, RMSNorm is the same. Linears, convolutions, embeddings and plain parameters can be given a zero mean once and
for all by centring their weights ("Enjoy Your Layer Normalization", CBWC), provided that nothing but LayerNorms feels
the difference (appendix D.2). Three counts:

    strict      nothing is added to the model
    untied      a parameter that is used elsewhere, too (a tied head), gets a centred copy of its own
    practical   centrings are inserted where zero mean is lost: `inserted` of them, and worth it only if more norms fold

rules="paper" counts as the paper's Table 3 does: every LayerNorm's output has zero mean, embeddings and parameters
cannot be centred, and nothing is checked forwards. On trained weights that is not exact; it cannot be folded.
"""

import copy
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import Node

from certificate import TOLERANCE, Certificate, Inputs, certify
from fold_axes import Line, describe, forwards, module_path, norm_input
from fold_graph import Demand, FoldError, Graph
from fold_modules import Insertion, Plan, Swap, carry_out, find_swap, reparametrize


@dataclass(frozen=True)
class Row:
    """One call of a norm."""

    name: str  # module path, with the number of the call if there are several
    verdict: str  # strict, untied, inserted, refused; "no gain": inserting centrings would cost as much as it folds
    sources: tuple[str, ...]  # what is centred, and after which operations a centring is inserted
    reason: str


@dataclass
class Norm:
    """What is known of one call of a norm."""

    node: Node
    line: Line
    name: str
    refused: str  # why it can never be folded
    swap: Swap | str  # how it is swapped, or why `fold` cannot
    demand: Demand
    obstacles: dict[Line, str] = field(default_factory=dict)  # what has no zero mean -> why
    untie: dict[Line, tuple[str, ...]] = field(default_factory=dict)  # obstacles that go: names to be given a copy
    points: dict[Line, tuple[Line, ...]] = field(default_factory=dict)  # obstacles that go: where to centre

    def folds(self, untie: bool = False, insert: bool = False) -> bool:
        """On its own."""
        return not self.refused and all(
            (untie and line in self.untie) or (insert and line in self.points) for line in self.obstacles
        )

    def centrings(self, untie: bool = False) -> set[Line]:
        """Where centrings would be inserted for it."""
        return {at for line in self.obstacles if not (untie and line in self.untie) for at in self.points.get(line, ())}

    def reason(self) -> str:
        return self.refused or next((why for line, why in self.obstacles.items() if line not in self.points), "")


@dataclass
class Report:
    """Counts of LayerNorm calls; prints as a table. `rows` has one entry for each call."""

    model: str
    rules: str
    total: int
    strict: int
    untied: int
    practical: int
    inserted: int  # centrings that `practical` needs
    worth: bool  # they fold more norms than they are
    rows: list[Row]
    inputs: Inputs = field(repr=False)
    analysis: "Analysis" = field(repr=False)

    def __str__(self) -> str:
        lines = [("norm", "verdict", "reason"), *((row.name, row.verdict, row.reason) for row in self.rows)]
        wide = [max(len(line[i]) for line in lines) for i in range(2)]
        table = "\n".join(f"{a:{wide[0]}}  {b:{wide[1]}}  {c}".rstrip() for a, b, c in lines)
        gain = f"centrings inserted: {self.inserted}, {'worth it' if self.worth else 'not worth it'}"
        return (f"{table}\n\n{self.model}: {self.total} LayerNorm calls; foldable: {self.strict} strict, {self.untied} "
                f"untied, {self.practical} practical" + (f" ({gain})" if self.inserted else ""))  # fmt: skip

    def to_json(self) -> str:
        names = ("model", "rules", "total", "strict", "untied", "practical", "inserted", "worth")
        return json.dumps({name: getattr(self, name) for name in names} | {"rows": [asdict(r) for r in self.rows]},
                          indent=1)  # fmt: skip


def analyze(model: nn.Module, example_inputs: Inputs | dict[str, Any], rules: str = "exact") -> Report:
    """Find the foldable norms of `model`, in the mode (train or eval) it is in. The model is not changed.

    example_inputs: positional (tuple) or keyword (dict) arguments; their shapes and the branches that the model takes
    on them are those of the analysis. Raises FoldError if the model cannot be exported.
    """
    if rules not in ("exact", "paper"):
        raise FoldError(f"rules={rules!r}: it is exact or paper")
    analysis = Analysis(Graph(model, example_inputs), rules == "paper")
    norms = analysis.norms
    strict = analysis.chosen()
    practical = analysis.closed([norm for norm in norms if norm.folds(insert=True)])
    if rules == "exact":
        practical = analysis.closed([norm for norm in practical if not analysis.is_own_centring(norm, practical)])
    inserted = {at for norm in practical for at in norm.centrings()}
    return Report(
        type(model).__name__, rules, len(norms), len(strict), len(analysis.chosen(untie=True)), len(practical),
        len(inserted), len(practical) - len(strict) > len(inserted), analysis.rows(practical), example_inputs, analysis,
    )  # fmt: skip


class Analysis:
    """The norms of a graph, with what each needs."""

    def __init__(self, graph: Graph, paper: bool = False):
        self.graph, self.paper, self.training = graph, paper, graph.model.training
        self.norms = [self._norm(node, *found) for node in graph.nodes if (found := norm_input(node)) is not None]
        self._check_calls()

    def _norm(self, node: Node, line: Line, refused: str) -> Norm:
        path = module_path(node)
        calls = sorted(self.graph.calls[path]) if path else []
        name = path or describe(node)
        if len(calls) > 1:
            name += f" (call {calls.index(self.graph.call(node)) + 1})"
        norm = Norm(node, line, name, refused, find_swap(self.graph, node), Demand())
        if refused:
            return norm
        norm.demand = demand = self.graph.demand(line, self.paper)
        nodes = demand.nodes | {node}
        for at, why in demand.failures.items():
            self._obstacle(norm, at, why, nodes)
        if not self.paper:
            for at, source in demand.sources.items():
                if shown := self.graph.shows(at):
                    if self._is_zero(at):
                        demand.keep.add(self.graph.names[at.node])
                    else:
                        name = min(self.graph.owners(at.node, nodes & set(at.node.users)), default=str(source))
                        self._obstacle(norm, at, f"centring {name} would show in {shown}", nodes)
        return norm

    def _obstacle(self, norm: Norm, at: Line, why: str, nodes: Collection[Node]) -> None:
        """Something without zero mean: can it be untied, can a centring be inserted behind it?"""
        norm.obstacles[at] = why
        users = [user for user in at.node.users if user in nodes]
        if at.node in self.graph.names and not self.paper and not self.graph.shows(at, users):
            mine = self.graph.owners(at.node, users)
            others = self.graph.owners(at.node, [user for user in at.node.users if user not in users])
            if not mine & others:
                norm.untie[at] = tuple(sorted(mine))
        norm.points[at] = tuple(self._points(norm, at, nodes))

    def _points(self, norm: Norm, at: Line, nodes: Collection[Node]) -> set[Line]:
        """The first lines behind an obstacle where a centring on the way to the norm would not show elsewhere."""
        found, todo, done = set(), [at], set()
        while todo:
            at = todo.pop()
            if at.node not in self.graph.names and (self.paper or not self.graph.shows(at, nodes)):
                found.add(at)
            elif at not in done:
                done.add(at)
                onwards = (line for user in at.node.users if user in nodes for line in forwards(user, at) or [])
                todo += [line for line in onwards if line in norm.demand.lines]
        return found

    def _is_zero(self, line: Line) -> bool:
        """A bias that nobody has moved yet needs no centring; whoever relies on that must say so."""
        return not self.graph.values[self.graph.names[line.node]].any() if line.node in self.graph.names else False

    def _check_calls(self) -> None:
        """A module can be swapped only where all its calls are calls of one and the same foldable norm."""
        for norm in self.norms:
            others = [n for n in self.norms if isinstance(n.swap, Swap) and isinstance(norm.swap, Swap)
                      and n.swap.path == norm.swap.path]  # fmt: skip
            if any(other.swap != norm.swap for other in others):
                norm.swap = f"{norm.swap.path} is called on inputs of several kinds"

    def closed(self, norms: list[Norm]) -> list[Norm]:
        """Of these norms, those whose module is called by no other norm."""
        while True:
            chosen = {norm.node for norm in norms}
            bad = {self.key(norm) for norm in self.norms if norm.node not in chosen}
            kept = [norm for norm in norms if self.key(norm) not in bad]
            if len(kept) == len(norms):
                return kept
            norms = kept

    @staticmethod
    def key(norm: Norm) -> Any:
        return norm.swap.path if isinstance(norm.swap, Swap) else norm.node

    def is_own_centring(self, norm: Norm, norms: list[Norm]) -> bool:
        """Would all that feeds this norm go through one centring, which is of use for no other norm?"""
        inserted = norm.centrings()
        alone = inserted == {norm.line} or norm.demand.sources.keys() <= norm.obstacles.keys()
        others = set().union(*(other.centrings() for other in norms if other is not norm))
        return len(inserted) == 1 and alone and not inserted & others

    def chosen(self, untie: bool = False, insert: bool = False, trained: bool = False) -> list[Norm]:
        """The norms to fold. Centrings are inserted only where they fold more than they are.

        With `insert`, a set of norms is wanted that has as many more members than it needs centrings as possible. By
        Koenig's theorem these are the norms that alternating paths reach from the norms which a maximum matching of
        norms with centrings leaves out. `trained`: nothing may rely on values that training moves.
        """
        able = [norm for norm in self.norms if not (trained and norm.demand.keep)]
        free = self.closed([norm for norm in able if norm.folds(untie)])
        if not insert:
            return free
        can = self.closed([norm for norm in able if norm.folds(untie, insert) and isinstance(norm.swap, Swap)
                           and all(self.insertion(at) for at in norm.centrings(untie))])  # fmt: skip
        needs = {i: norm.centrings(untie) for i, norm in enumerate(can)}
        taken: dict[Line, int] = {}

        def match(i: int, seen: set[Line]) -> bool:
            for at in needs[i] - seen:
                seen.add(at)
                if at not in taken or match(taken[at], seen):
                    taken[at] = i
                    return True
            return False

        left = [i for i in needs if not match(i, set())]
        reached, todo = set(left), list(left)
        while todo:
            for at in needs[todo.pop()]:
                if (other := taken[at]) not in reached:
                    reached.add(other)
                    todo.append(other)
        return self.closed([norm for i, norm in enumerate(can) if i in reached or norm in free])

    def insertion(self, at: Line) -> Insertion | None:
        """Where in the modules a centring behind a line goes: behind a module, or in front of the model."""
        if self.graph.shows(at):  # a hook cannot choose between users
            return None
        if at.node in self.graph.user_inputs:
            argument = self.graph.argument(at.node)
            return argument and Insertion("", at.axis, at.block, argument)
        path = self.graph.returned_by(at.node)
        return None if path is None else Insertion(path, at.axis, at.block)

    def plan(self, untie: bool = False, insert: bool = False, trained: bool = False) -> tuple[Plan, list[Norm]]:
        """What to change, and the norms that are folded by it."""
        norms = [norm for norm in self.chosen(untie, insert, trained) if isinstance(norm.swap, Swap)]
        sources, untied, points = {}, {}, {}
        for norm in norms:
            for at, source in norm.demand.sources.items():
                if at not in norm.obstacles:
                    if not (len(source.parameters) == 1 and source.parameters[0][0] in norm.demand.keep):
                        sources[source] = None
                elif untie and at in norm.untie:
                    untied.setdefault((source, norm.untie[at]))
            points |= dict.fromkeys(norm.centrings(untie))
        keep = {name for norm in norms for name in norm.demand.keep}
        swaps = list(dict.fromkeys(norm.swap for norm in norms))
        return Plan(list(sources), list(untied), swaps, [self.insertion(at) for at in points], keep), norms

    def rows(self, practical: list[Norm]) -> list[Row]:
        """Verdicts, the strictest that holds."""
        ways = [("strict", self.chosen()), ("untied", self.chosen(untie=True)), ("inserted", self.chosen(insert=True)),
                ("no gain", practical)]  # fmt: skip
        found = []
        for norm in self.norms:
            verdict = next((name for name, norms in ways if norm in norms), "refused")
            sources = [str(source) for at, source in norm.demand.sources.items() if at not in norm.obstacles]
            sources += [f"centring behind {describe(at.node)}" for at in sorted(norm.centrings(), key=str)]
            found.append(Row(norm.name, verdict, tuple(dict.fromkeys(sources)), self._reason(norm, verdict)))
        return found

    def _reason(self, norm: Norm, verdict: str) -> str:
        why = norm.reason()
        obstacle = next(iter(norm.obstacles.values()), "")
        if verdict == "refused" and not why:
            why = obstacle if norm.obstacles else "another call of the same module cannot be folded"
        text = {
            "strict": f"centred parameters ({len(norm.demand.sources)}) give its input zero mean",
            "untied": f"{obstacle}: a copy of its own is centred",
            "inserted": f"{obstacle}: one centring serves several norms",
            "no gain": f"{obstacle}: centrings would be as many as the norms they fold",
            "refused": why,
        }[verdict]
        return text + (f"; fold leaves it: {norm.swap}" if isinstance(norm.swap, str) and verdict != "refused" else "")


def fold(
    model: nn.Module, report: Report, untie: bool = False, insert: bool = False, tolerance: float = TOLERANCE
) -> tuple[nn.Module, Certificate]:
    """(a folded copy of `model`, its certificate); if the check fails, the model itself, and the certificate says why.

    untie   give parameters that are used elsewhere, too, a centred copy of their own
    insert  insert centrings where they fold more norms than they are

    Raises FoldError for a report of another model or by the paper's rules.
    """
    _check(model, report)
    plan, norms = report.analysis.plan(untie, insert)
    folded = {norm.name for norm in norms}
    refusals = {row.name: row.reason for row in report.rows if row.name not in folded}

    def convert(old: nn.Module) -> nn.Module:
        new = copy.deepcopy(old)
        carry_out(plan, new)
        return new

    new, certificate = certify(
        model, convert, report.inputs, what=f"{report.model}: {len(norms)} of {report.total} LayerNorm calls folded",
        folded=len(norms), inserted=len(plan.insertions), refusals=refusals, keep=plan.keep, tolerance=tolerance,
    )  # fmt: skip
    if certificate.ok:
        return new, certificate
    return model, replace(certificate, folded=0, inserted=0, what=f"{report.model}: fold rolled back")


def parametrize_cbwc(model: nn.Module, report: Report, insert: bool = False) -> nn.Module:
    """A copy of `model` to train with RMSNorms as it would have trained with LayerNorms (without dropout).

    Weights are centred whenever they are read, by torch.nn.utils.parametrize; the optimiser sees the same parameters as
    before, and a tied one stays tied. With `insert`, also centrings that fold more norms than they are. Zero means that
    hold only for the present values (uniform gains) are not relied upon. Raises FoldError as fold.
    """
    _check(model, report)
    new = copy.deepcopy(model)
    reparametrize(report.analysis.plan(True, insert, trained=True)[0], new)
    return new


def _check(model: nn.Module, report: Report) -> None:
    if report.rules != "exact":
        raise FoldError("a report by the paper's rules is for counting: analyze(model, inputs) makes one to fold by")
    wanted = {name: value.shape for name, value in report.analysis.graph.values.items()}
    have = {name: value.shape for name, value in [*model.named_parameters(remove_duplicate=False),
                                                  *model.named_buffers(remove_duplicate=False)]}  # fmt: skip
    if wanted != have or model.training != report.analysis.training:
        raise FoldError(f"this report is not of this {type(model).__name__} in this mode: analyze it first")
