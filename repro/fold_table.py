"""Fold the LayerNorms of many architectures with random weights, and check each fold.

    python -m repro.fold_table --study=table3
        the paper's Table 3 beside ours, and small models of transformers: models.jsonl, README.md
    python -m repro.fold_table
        small models of timm, torchvision and transformers: table.jsonl, table.md

Models that the JSONL file holds are not measured again. Each model runs in a process of its own,
with a limit of time and of memory. Gains, biases and means are moved away from their initial
values. Every fold has a certificate, in float64. Beside it, the folded models and the original are
compared on fresh inputs of another batch size.
"""

import dataclasses
import json
import multiprocessing
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.environment import environment, installed
from common.errors import FoldError, failure_line, run_program
from common.output import markdown, read_json, write_bytes_atomically, writing
from configurator import key, parse_args
from fold import analyze, fold
from fold.certificate import TOLERANCE, Inputs, run
from repro import fold_models
from repro.fold_models import TABLE3

COUNTS = ("total", "strict", "untied", "practical", "inserted")
# Study -> its models, and the files of its results
STUDIES = {
    "table3": (list(dict.fromkeys([*TABLE3, *fold_models.MODELS])), "models.jsonl", "README.md"),
    "zoo": (fold_models.ZOO, "table.jsonl", "table.md"),
}
VMAMBA = """
VMamba's row is not reproduced. The paper prints 0 strict and 36 practical. Its model is not
transformers', so ours is a stand-in (repro/fold_models.py of commit 13b73f1): the 51 norms of
VMamba-T where they are there, small widths, random weights. By the paper's rules 36 of these
fold, but strictly, with nothing inserted: all but the 15 behind the selective scans, and each
of those would take a centring right in front (51 practical). So 36 is met as another count, and
why the paper has 0 strict, though its rules centre the convolutions in the stem, is not known:
it does not say how VMamba was counted. Exactly, 5 fold strictly and 10 with one centring: in
the first three stages the residual stream is read by a convolution that halves the picture, not
by a norm, and that would feel a centred stream.
"""


@dataclass(frozen=True)
class TableConfig:
    """Keys of fold_table.py."""

    study: str = key("zoo", "which models", tuple(STUDIES))
    out: str = key("out/fold", "folder for the JSONL file and the page")
    seconds: int = key(300, "limit of a model's time", least=1)
    gigabytes: int = key(12, "limit of a model's address space", least=1)


# --------------------------------------------------------------------------------------- one model


def measure(name: str) -> dict[str, Any]:
    """Analyse, fold and check one model, of either study."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    torch.manual_seed(0)
    model, inputs = fold_models.build(name)
    record: dict[str, Any] = {"class": type(model).__name__}
    run(model, inputs)  # what fails here is no fault of a fold
    try:
        report = analyze(model, inputs)
        strict, first = fold(model, report)
        folded, certificate = fold(model, report, untie=True, insert=True)
    except FoldError as error:
        return record | {"refused": str(error)}
    paper = report.by("paper")
    return record | {
        **{count: getattr(report, count) for count in COUNTS},
        "paper_rules": {count: getattr(paper, count) for count in COUNTS},
        "worth": report.worth,
        "by_hand": sum(row.by_hand for row in report.rows),
        "folded_strictly": first.folded,
        "folded": certificate.folded,
        "inserted_by_fold": certificate.inserted,
        "ok": first.ok and certificate.ok,
        "max_rel": max(first.max_rel, certificate.max_rel),
        "reason": certificate.reason,
        "refusals": [
            {"norm": norm, "reason": reason} for norm, reason in certificate.refusals.items()
        ],
        **compare(model, [strict, folded], inputs),
    }


def compare(model: nn.Module, folded: list[nn.Module], inputs: Inputs) -> dict[str, Any]:
    """Compare the outputs of folded models with the original's, at another batch size.

    This comparison is independent of the certificate's: other inputs, and code of its own.
    """
    fresh = fold_models.other_batch(inputs)
    batch = "other"
    try:
        expected = run(model, fresh)
    except Exception as error:  # a model that is written for one batch size may raise anything
        batch = f"same ({error})"[:200]
        fresh = fold_models.other_batch(inputs, examples=0)
        expected = run(model, fresh)
    worst = max(difference(expected, run(after, fresh)) for after in folded)
    return {"other_batch_rel": worst, "batch": batch}


def difference(expected: Any, found: Any) -> float:
    """Return the largest difference of any output tensor, relative to its largest number."""
    worst = 0.0
    for a, b in zip(floats(expected), floats(found), strict=True):
        if a.shape != b.shape or a.isnan().any() or b.isnan().any():
            return float("inf")
        gap = torch.where(a == b, 0.0, (a - b).abs())  # infinities at the same places
        scale = a[a.isfinite()].abs().max() if a.isfinite().any() else torch.tensor(1.0)
        worst = max(worst, float((gap / scale.clamp_min(1e-300)).max()))
    return worst


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output that have numbers."""
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.numel()]
    return [x for x in tensors if x.is_floating_point()]


def begin_child(size: int) -> None:
    """Set the limit of a process's memory, bytes, and let SIGTERM end it.

    It may have the handler of whoever started it, which only notes the signal: then the pool that
    ends it would wait for ever.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def measure_in_child(name: str, config: TableConfig) -> dict[str, Any]:
    """Run `measure` in a process of its own, which the limits may end."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1, begin_child, (config.gigabytes << 30,)) as pool:
        try:
            return pool.apply_async(measure, (name,)).get(config.seconds)
        except multiprocessing.TimeoutError:
            return {"limit": f"it took more than {config.seconds} seconds"}
        except Exception as error:  # models, and what they import, may raise anything
            kind = "limit" if "memory" in f"{type(error).__name__} {error}".lower() else "failed"
            return {kind: failure_line(error)[:200]}


# ---------------------------------------------------------------------------------------- the pages

MEANING = {
    "all": "every norm folds",
    "some": "some norms fold; the others are left, each with its reason",
    "none": "no norm folds; each has its reason",
    "no norms": "the exported graph has no LayerNorm",
    "refused": "the model cannot be analysed or checked; the message names why",
    "wrong": "an output differs: a fault of ours",
    "limit": "beyond the limit of time or memory",
    "failed": "it cannot be built or run here",
}


def verdict(record: dict[str, Any]) -> str:
    """Say in one word what came out."""
    for word in ("limit", "failed", "refused"):
        if word in record:
            return word
    # Table 3's committed records were not compared at another batch size.
    if not record["ok"] or not record.get("other_batch_rel", 0.0) <= TOLERANCE:
        return "wrong"
    if record["total"] == 0:
        return "no norms"
    if record["folded"] == record["total"]:
        return "all"
    return "some" if record["folded"] else "none"


def why(record: dict[str, Any]) -> str:
    """Return what stands in the way: of the whole model, or of one norm."""
    found = next((record[word] for word in ("limit", "failed", "refused") if word in record), "")
    for refusal in record.get("refusals", ())[:1]:
        found = refusal
        if isinstance(refusal, dict):
            found = f"{refusal['norm']}: {refusal['reason']}"
    return " ".join(found.replace("|", "/").split())


def models_table(records: list[dict[str, Any]]) -> str:
    """Return a table of all models; what was not measured is left empty."""
    lines = []
    for record in records:
        line = [record["model"], verdict(record)]
        if "total" in record:
            errors = (record["max_rel"], record.get("other_batch_rel"))
            line += [record[count] for count in ("total", "strict", "untied")]
            line += [f"{record['practical']} ({record['inserted']})"]
            line += [f"{record['folded']} ({record['inserted_by_fold']})"]
            line += ["" if error is None else f"{error:.0e}" for error in errors]
        line += [""] * (9 - len(line))
        lines.append([*line, why(record)])
    head = "model, verdict, norms, strict, untied, practical (inserted), folded (inserted), error"
    return markdown([*head.split(", "), "another batch", "what stands in the way, for one"], lines)


def table3(records: list[dict[str, Any]]) -> str:
    """Return the paper's Table 3 beside our counts, by its rules and exactly."""
    lines = []
    for record in records:
        if record["model"] in TABLE3 and "total" in record:
            total, strict, practical = TABLE3[record["model"]]
            rules = record["paper_rules"]
            line = [record["model"], total, f"{strict}, {practical}"]
            line += [f"{rules['strict']}, {rules['practical']}", record["strict"], record["untied"]]
            lines.append([*line, f"{record['practical']} ({record['inserted']})"])
    head = ["model", "norms", "paper: strict, practical", "by its rules: strict, practical"]
    return (
        markdown([*head, "ours: strict", "untied", "practical (inserted)"], lines)
        + "\n"
        + VMAMBA.rstrip()
    )


def totals(records: list[dict[str, Any]]) -> str:
    """Return how many models have each verdict, and sums over them."""
    verdicts = Counter(map(verdict, records))
    counted = [record for record in records if verdict(record) in ("all", "some", "none")]
    sums = Counter()
    for record in counted:
        sums.update({name: int(value) for name, value in record.items() if name in SUMMED})
    table = markdown(
        ["verdict", "models", "meaning"],
        [[word, verdicts[word], MEANING[word]] for word in MEANING if verdicts[word]],
    )
    worst = [
        max((record[name] for record in counted), default=0)
        for name in ("max_rel", "other_batch_rel")
    ]
    return (
        f"{table}\n\nOf {sums['total']} norm calls ({sums['by_hand']} of them written out by "
        f"hand), {sums['folded_strictly']} fold strictly and {sums['folded']} with untied "
        f"parameters and {sums['inserted_by_fold']} centrings. Largest error: {worst[0]:.0e} in "
        f"the certificates, {worst[1]:.0e} at another batch size. Wrong outputs: "
        f"{verdicts['wrong']}."
    )


SUMMED = ("total", "by_hand", "folded_strictly", "folded", "inserted_by_fold")


def page(study: str, records: list[dict[str, Any]]) -> str:
    """Return the study's page."""
    _, data, _ = STUDIES[study]
    title, summary = "LayerNorms of other people's models", totals
    if study == "table3":
        title, summary = "Which LayerNorms fold", table3
    return f"""# {title}

Made by `python -m repro.fold_table --study={study} --out=results/fold`; {data} has the commit of
each line. Models are small variants or small configurations with random weights in float64. Gains,
biases and means are moved away from their initial values. Folded: by
`fold(untie=True, insert=True)`, with centrings only where they fold more norms than they are.
Error: the largest of the certificate's checks, relative to the largest output. Another batch: the
same for fresh inputs of another batch size, computed apart from the certificate.

{summary(records)}

## All models

{models_table(records)}
"""


def main(argv: list[str]) -> None:
    config, _ = parse_args(TableConfig, argv, __doc__)
    names, data, name_of_page = STUDIES[config.study]
    out = Path(config.out)
    place = environment(torch.device("cpu"))
    place["versions"] |= installed("timm", "torchvision", "transformers")
    made = {"git": place["git"], "versions": place["versions"], "date": time.strftime("%Y-%m-%d")}
    records = {record["model"]: record for record in read_json(out / data)}
    with writing(out):
        for name in names:
            if name not in records:
                records[name] = {"model": name} | measure_in_child(name, config) | made
                print(json.dumps(records[name]), flush=True)
                lines = [json.dumps(records[n]) + "\n" for n in names if n in records]
                write_bytes_atomically(out / data, "".join(lines).encode())
        ordered = [records[name] for name in names]
        write_bytes_atomically(out / name_of_page, page(config.study, ordered).encode())


if __name__ == "__main__":
    run_program(main)
