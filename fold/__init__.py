"""Find the LayerNorms of a model that can become RMSNorms without changing its function, and change
them.

    report = analyze(model, {"input_ids": ids})
    print(report)                              # verdict and reason for each call of a LayerNorm
    folded, certificate = fold(model, report)
    trained = parametrize_cbwc(model, report)  # trains as the LayerNorm model would

Of any norms, move gains and biases into the linear layers that read them (gains.py):

    weightless, certificate = fold_gains(model, {"input_ids": ids})

Multiply the residual stream by a power of two, so that float16 holds it (rescaling.py):

    rescaled, certificate = rescale(model, {"input_ids": ids}, 2.0**-6)

Rotate the residual stream, for quantisation (rotation.py):

    rotated, certificate = rotate(model, {"input_ids": ids}, seed=0)

Say of each norm, of any kind, what it computes (norm_probes.py):

    print(norms_of(model, {"input_ids": ids}))

What goes in
    Any nn.Module that torch.export can export, and example inputs: a tuple of positional or a dict
    of keyword arguments. It is analysed in the mode (train or eval) that it is in.

What comes out
    A copy of the model; the model itself is left unchanged. In the copy, LayerNorm modules are
    replaced by modules that compute RMSNorm with the same gain and bias, and weights are centred.
    State dict keys, dtypes and (without `untie`) parameter count stay the same. The certificate
    says how far the two models differ, checked in float64 with random weights.

Why it works
    A LayerNorm subtracts the mean over the channels, then scales. If its input has zero mean
    already, RMSNorm is the same. Everything that is added up in that input has zero mean if the
    weights that produce it are centred: linears, convolutions, embeddings and plain parameters
    ("Enjoy Your Layer Normalization", CBWC, section 4.2). That is allowed only if nothing but
    LayerNorms would be changed by the centring (appendix D.2).

What is refused
    A norm is left as it is, with the reason in the report, where for example
        - its input comes through an activation, a concatenation along the channels, a depthwise
          convolution, or a norm whose gains differ: none of them keeps a zero mean,
        - its input is also read by something that would be changed by the centring, such as the
          model's output,
        - its input comes from a buffer that no state dict holds or that the model changes,
        - its input comes through dropout in training mode,
        - it averages over several axes, or its mean is used elsewhere,
        - it is called as a function, or together with other operations: there is no module to swap.
    LayerNorms that are written out by hand, from means and square roots, are found where they are
    LayerNorms to the letter. FoldError is raised for a model that cannot be exported,
    and for a report of another model.

Three counts of the norms that fold
    strict      nothing is added to the model
    untied      a parameter that is used elsewhere, too (a tied head), may get a centred copy;
                fold(..., untie=True) does that
    practical   centrings (x - mean(x)) may be inserted where zero mean is lost;
                fold(..., insert=True) does that where they fold more norms than they are

analyze(..., rules="paper") counts as the paper's Table 3 does: every LayerNorm's output has zero
mean, embeddings and parameters cannot be centred, and other readers of a centred weight are
ignored. That is not exact on trained weights, so such a report cannot be folded.

The modules of this package: choice.py decides which norms fold (cut.py: where to insert centrings),
rules.py says what each operation does to a zero mean, lines.py recognises norms,
graph.py follows the stream back to its sources, modules.py carries the fold out, certificate.py
checks it. gains.py folds gains on the same graph, rescaling.py and rotation.py (orthogonal.py: by
what) change its residual stream. norm_probes.py finds norms by calling modules:
formulas.py names the formula, gain_forms.py the gain, roundings.py the order of rounding,
hand_norms.py those in no module; alignment.py compares the norms of two models, streams.py measures
what they are given. hub.py is for models of transformers; the
repository also has gpt.py, for its own model.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from torch import nn

from .certificate import TOLERANCE, Certificate, Check, Inputs, changed
from .choice import Analysis, Finding
from .gains import fold_gains
from .graph import Graph
from .modules import Plan, carry_out, reparametrize, set_check
from .norm_probes import norms_of
from .rescaling import rescale
from .rotation import rotate
from .siblings import FoldError

__all__ = [
    "Certificate",
    "Check",
    "Finding",
    "FoldError",
    "Report",
    "analyze",
    "fold",
    "fold_gains",
    "norms_of",
    "parametrize_cbwc",
    "rescale",
    "rotate",
]


@dataclass
class Report:
    """The verdicts on all LayerNorm calls of a model. Prints as a table.

    Calls are counted: a module that is called twice counts twice.

    Attributes:
        model: name of the model's class.
        rules: "exact" or "paper".
        total: number of calls.
        strict: number of calls that fold with nothing added.
        untied: likewise, if parameters may get centred copies.
        practical: likewise, if centrings may be inserted.
        inserted: number of centrings that `practical` needs.
        worth: these are fewer than the norms that they fold.
        rows: one Finding for each call.
        inputs: the example inputs.
        analysis: what `fold` works from.
    """

    model: str
    rules: str
    total: int
    strict: int
    untied: int
    practical: int
    inserted: int
    worth: bool
    rows: list[Finding]
    inputs: Inputs = field(repr=False)
    analysis: Analysis = field(repr=False)

    def __str__(self) -> str:
        if not self.rows:
            return (
                f"{self.model}: no LayerNorm found. One that is written by hand takes the mean of "
                "squares, with eps, not x.std()"
            )
        lines = [("norm", "verdict", "reason")]
        lines += [(row.name, row.verdict, row.reason) for row in self.rows]
        name_width = max(len(name) for name, _, _ in lines)
        verdict_width = max(len(verdict) for _, verdict, _ in lines)
        table = [
            f"{name:{name_width}}  {verdict:{verdict_width}}  {reason}".rstrip()
            for name, verdict, reason in lines
        ]
        summary = (
            f"{self.model}: {self.total} LayerNorm calls; foldable: "
            f"{self.strict} strict, {self.untied} untied, {self.practical} practical"
        )
        if self.inserted:
            worth = "worth it" if self.worth else "not worth it"
            summary += f" (centrings inserted: {self.inserted}, {worth})"
        return "\n".join([*table, "", summary])

    def by(self, rules: str) -> "Report":
        """Return the report on the same graph by other rules: "exact" or "paper"."""
        return _report(self.analysis.graph, self.inputs, rules)

    def to_json(self) -> str:
        """Return counts and rows as JSON."""
        left_out = ("rows", "inputs", "analysis")
        counts = {name: value for name, value in vars(self).items() if name not in left_out}
        return json.dumps(counts | {"rows": [asdict(row) for row in self.rows]}, indent=1)


def analyze(model: nn.Module, example_inputs: Inputs, rules: str = "exact") -> Report:
    """Find the LayerNorms of a model that can be folded.

    Args:
        model: any nn.Module, in the mode (train or eval) that is meant. It is left unchanged.
        example_inputs: positional (tuple) or keyword (dict) arguments of the model. The analysis
            holds for their shapes and for the branches that the model takes on them. `fold` checks
            other sizes and ranks, too, as far as the model takes them.
        rules: "exact", or "paper" to count as the paper's Table 3 does.

    Returns:
        A report with one row for each call of a LayerNorm, for print() and for `fold`. GroupNorms
        of (N, C), without positions, are counted, too.

    Raises:
        FoldError: the model cannot be exported, or a size in it depends on values.
    """
    return _report(Graph(model, example_inputs), example_inputs, rules)


def _report(graph: Graph, inputs: Inputs, rules: str) -> Report:
    if rules not in ("exact", "paper"):
        raise FoldError(f"rules={rules!r}: it is exact or paper")
    analysis = Analysis(graph, paper=rules == "paper")
    ways = analysis.ways
    rows = [analysis.finding(norm) for norm in analysis.norms]
    strict = len(ways["strict"].norms)
    practical = len(ways["no gain"].norms)
    inserted = len(ways["no gain"].centrings())
    return Report(
        model=type(graph.model).__name__,
        rules=rules,
        total=len(rows),
        strict=strict,
        untied=len(ways["untied"].norms),
        practical=practical,
        inserted=inserted,
        worth=practical - strict > inserted,
        rows=rows,
        inputs=inputs,
        analysis=analysis,
    )


def fold(
    model: nn.Module,
    report: Report,
    untie: bool = False,
    insert: bool = False,
    check: bool = False,
) -> tuple[nn.Module, Certificate]:
    """Replace the foldable LayerNorms of a model by RMSNorms, in a copy.

    Args:
        model: the model that was analysed, in the same mode. It is left unchanged.
        report: what `analyze` returned for it, with rules="exact".
        untie: give a parameter that is used elsewhere, too, a centred copy. A tied head then keeps
            the uncentred weights, which costs the memory of an embedding matrix.
        insert: insert centrings where they fold more norms than they are.
        check: each of the RMSNorms checks that its input is centred, and raises FoldError if not.
            That costs two more reductions in each call.

    Returns:
        (folded copy, certificate). The certificate names the norms that were left and why: also
        those without which the check holds, if it fails with all of them. If it holds for none
        (certificate.ok is False), the model itself is returned instead of a copy, and
        certificate.reason says why.

    Raises:
        FoldError: the report is of another model or by the paper's rules, or the model cannot be
            run in float64.
    """
    _require_report_of(model, report)
    new, certificate = _exactly(model, report, carry_out, untie, insert)
    if certificate.ok:  # else this is the user's own model
        set_check(new, check)
    return new, certificate


def parametrize_cbwc(model: nn.Module, report: Report, insert: bool = False) -> nn.Module:
    """Return a copy that trains with RMSNorms as the model would have trained with LayerNorms.

    Weights are centred whenever they are read, by torch.nn.utils.parametrize (CBWC, equation 7).
    The optimiser sees the same parameters as before, and a tied one stays tied. Training is the
    same without dropout only.

    Args:
        model: the model that was analysed, in the same mode. It is left unchanged.
        report: what `analyze` returned for it, with rules="exact".
        insert: insert centrings where they fold more norms than they are.

    Raises:
        FoldError: the report is of another model or by the paper's rules, or the copy computes
            another function, checked as `fold` checks its own.
    """
    _require_report_of(model, report)
    new, certificate = _exactly(model, report, reparametrize, untie=True, insert=insert)
    if not certificate.ok:
        raise FoldError(
            f"{report.model} with centred weights and RMSNorms is another function "
            f"({certificate.reason}): keep its LayerNorms"
        )
    return new


def _exactly(
    model: nn.Module,
    report: Report,
    write: Callable[[Plan, nn.Module], None],
    untie: bool,
    insert: bool,
) -> tuple[nn.Module, Certificate]:
    """Write a fold into a copy of a model, of as many norms as leave its function unchanged.

    Where the check fails with all norms, halves are tried, and halves of these. So one norm that
    cannot be folded is found, and the others are folded. A norm that fails in tensors of another
    rank alone is folded for the example's rank, and refuses others.

    Args:
        write: carries a plan out on a model, in place.

    Returns:
        As `fold`.
    """

    def attempt(only: dict[str, bool] | None, why: str = "") -> tuple[nn.Module, Certificate]:
        plan, norms = report.analysis.plan(untie, insert, only)
        folded = {norm.name for norm in norms}
        refusals = {row.name: row.reason for row in report.rows if row.name not in folded}
        undone = {norm.name for norm in all_norms} - folded
        refusals |= dict.fromkeys(undone, f"its fold was undone: {why}")
        return changed(
            model,
            partial(write, plan),
            report.inputs,
            what=f"{report.model}: {len(norms)} of {report.total} LayerNorm calls folded",
            folded=len(norms),
            inserted=len(plan.insertions),
            refusals=refusals,
            to="rms",
        )

    def add(paths: list[str], kept: dict[str, bool]) -> dict[str, bool]:
        for of_one_rank in (False, True):
            more = kept | dict.fromkeys(paths, of_one_rank)
            if attempt(more)[1].ok:
                return more
        if len(paths) == 1:
            return kept
        half = len(paths) // 2
        return add(paths[half:], add(paths[:half], kept))

    _, all_norms = report.analysis.plan(untie, insert)
    new, first = attempt(None)
    if first.max_rel <= TOLERANCE:  # or its own type alone rounds too much: that is no norm's fault
        return new, first
    kept = add(list(dict.fromkeys(norm.swap.path for norm in all_norms)), {})
    return attempt(kept, first.reason) if kept else (new, first)


def _require_report_of(model: nn.Module, report: Report) -> None:
    """Raise FoldError unless `model` can be folded by this report."""
    if report.rules != "exact":
        raise FoldError(
            "a report by the paper's rules is for counting: "
            "analyze(model, inputs) makes one to fold by"
        )
    analysis = report.analysis
    if model is not analysis.graph.model or model.training != analysis.training:
        raise FoldError(
            f"this report is not of this {type(model).__name__} in this mode: analyze it first"
        )
