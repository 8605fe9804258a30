"""Which LayerNorms of a model can become RMSNorms without changing what it computes, and the change
itself.

    report = analyze(model, {"input_ids": ids})
        any nn.Module, in the mode it is in; or a tuple of arguments
    print(report)
        one row for each call of a LayerNorm: verdict, sources, reason
    folded, certificate = fold(model, report)
        a copy; also with untie=True, insert=True
    trained = parametrize_cbwc(model, report)
        a copy that trains as the LayerNorm model would

A LayerNorm takes the mean away, then scales. Where all that is added up in its input has zero mean
over the channels already, RMSNorm is the same. Linears, convolutions, embeddings and plain
parameters can be given a zero mean once and for all by centring their weights ("Enjoy Your Layer
Normalization", CBWC), provided that nothing but LayerNorms feels the difference (appendix D.2).
Three counts:

    strict      nothing is added to the model
    untied      a parameter that is used elsewhere, too (a tied head), gets a centred copy of its
                own
    practical   centrings are inserted where zero mean is lost: `inserted` of them, no more than the
                norms that they fold, and worth it only if fewer

choice.py decides which norms fold, rules.py says what each operation does to a zero mean, graph.py
follows the stream back to its sources, modules.py carries the change out, certificate.py checks it.
hub.py is for models of transformers, gpt.py for ours.

rules="paper" counts as the paper's Table 3 does: every LayerNorm's output has zero mean, embeddings
and parameters cannot be centred, and nothing is checked forwards. On trained weights that is not
exact; it cannot be folded.
"""

import json
from dataclasses import asdict, dataclass, field, replace

from torch import nn

from .beside import FoldError
from .certificate import TOLERANCE, Certificate, Inputs, certify, copied
from .choice import Analysis
from .graph import Graph
from .modules import carry_out, reparametrize


@dataclass(frozen=True)
class Finding:
    """One call of a norm."""

    name: str  # module path, with the number of the call if there are several
    # strict, untied, inserted, refused; "no gain": inserting centrings would cost as much as it
    # folds
    verdict: str
    sources: tuple[str, ...]  # what is centred, and after which operations a centring is inserted
    reason: str


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
    rows: list[Finding]
    inputs: Inputs = field(repr=False)
    analysis: Analysis = field(repr=False)

    def __str__(self) -> str:
        lines = [
            ("norm", "verdict", "reason"),
            *((row.name, row.verdict, row.reason) for row in self.rows),
        ]
        wide = [max(len(line[i]) for line in lines) for i in range(2)]
        table = "\n".join(f"{a:{wide[0]}}  {b:{wide[1]}}  {c}".rstrip() for a, b, c in lines)
        gain = (
            f"centrings inserted: {self.inserted}, {'worth it' if self.worth else 'not worth it'}"
        )
        return (
            f"{table}\n\n{self.model}: {self.total} LayerNorm calls; foldable: "
            f"{self.strict} strict, {self.untied} untied, {self.practical} practical"
            + (f" ({gain})" if self.inserted else "")
        )

    def by(self, rules: str) -> "Report":
        """The same graph by other rules: exact or paper."""
        return _report(self.analysis.graph, self.inputs, rules)

    def to_json(self) -> str:
        names = ("model", "rules", "total", "strict", "untied", "practical", "inserted", "worth")
        return json.dumps(
            {name: getattr(self, name) for name in names}
            | {"rows": [asdict(r) for r in self.rows]},
            indent=1,
        )


def analyze(
    model: nn.Module, example_inputs: Inputs, rules: str = "exact", trained: bool = True
) -> Report:
    """Find the foldable norms of `model`, in the mode (train or eval) it is in. The model is not
    changed.

    example_inputs: positional (tuple) or keyword (dict) arguments; their shapes and the branches
    that the model takes on them are those of the analysis. trained: verdicts hold whatever values
    training gives the parameters; False relies on those of now as well, such as initial gains that
    are all 1. Frozen ones are relied upon either way. Raises FoldError if the model cannot be
    exported.
    """
    return _report(Graph(model, example_inputs, trained), example_inputs, rules)


def _report(graph: Graph, inputs: Inputs, rules: str) -> Report:
    if rules not in ("exact", "paper"):
        raise FoldError(f"rules={rules!r}: it is exact or paper")
    analysis = Analysis(graph, rules == "paper")
    strict, untied, _, practical = (len(choice.norms) for choice in analysis.ways.values())
    inserted = len(analysis.ways["no gain"].centrings())
    rows = [
        Finding(norm.name, verdict, tuple(sources), reason)
        for norm in analysis.norms
        for verdict, sources, reason in [analysis.verdict(norm)]
    ]
    return Report(
        type(graph.model).__name__,
        rules,
        len(rows),
        strict,
        untied,
        practical,
        inserted,
        practical - strict > inserted,
        rows,
        inputs,
        analysis,
    )


def fold(
    model: nn.Module,
    report: Report,
    untie: bool = False,
    insert: bool = False,
    tolerance: float = TOLERANCE,
) -> tuple[nn.Module, Certificate]:
    """(a folded copy of `model`, its certificate); if the check fails, the model itself, and the
    certificate says why.

    untie   give parameters that are used elsewhere, too, a centred copy of their own
    insert  insert centrings where they fold more norms than they are

    Raises FoldError for a report of another model or by the paper's rules.
    """
    _check(model, report)
    plan, norms = report.analysis.plan(untie, insert)
    folded = {norm.name for norm in norms}
    refusals = {row.name: row.reason for row in report.rows if row.name not in folded}

    def convert(old: nn.Module) -> nn.Module:
        new = copied(old)
        carry_out(plan, new)
        return new

    new, certificate = certify(
        model,
        convert,
        report.inputs,
        what=f"{report.model}: {len(norms)} of {report.total} LayerNorm calls folded",
        folded=len(norms),
        inserted=len(plan.insertions),
        refusals=refusals,
        keep=plan.keep,
        tolerance=tolerance,
    )
    if certificate.ok:
        return new, certificate
    return model, replace(
        certificate, folded=0, inserted=0, what=f"{report.model}: fold rolled back"
    )


def parametrize_cbwc(model: nn.Module, report: Report, insert: bool = False) -> nn.Module:
    """A copy of `model` to train with RMSNorms as it would have trained with LayerNorms (without
    dropout).

    Weights are centred whenever they are read, by torch.nn.utils.parametrize; the optimiser sees
    the same parameters as before, and a tied one stays tied. With `insert`, also centrings that
    fold more norms than they are. Zero means that hold only for the present values (uniform gains)
    are not relied upon. Raises FoldError as fold.
    """
    _check(model, report)
    new = copied(model)
    reparametrize(report.analysis.plan(True, insert, trained=True)[0], new)
    return new


def _check(model: nn.Module, report: Report) -> None:
    if report.rules != "exact":
        raise FoldError(
            "a report by the paper's rules is for counting: "
            "analyze(model, inputs) makes one to fold by"
        )
    wanted = {name: value.shape for name, value in report.analysis.graph.values.items()}
    have = {
        name: value.shape
        for name, value in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    if wanted != have or model.training != report.analysis.training:
        raise FoldError(
            f"this report is not of this {type(model).__name__} in this mode: analyze it first"
        )
