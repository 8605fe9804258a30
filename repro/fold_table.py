"""Fold the LayerNorms of many architectures of timm, torchvision and transformers, and check them.

    python repro/fold_table.py --out=results/fold
        all models of repro/fold_zoo.py that table.jsonl lacks, then table.md
    python repro/fold_table.py --models=timm/cait_xxs24_224,torchvision/swin_t
        these alone, on the screen

Each model runs in a process of its own, with a limit of time and of memory. Weights are random, and
gains, biases and means are moved away from their initial values. Every fold has a certificate, in
float64. Beside it, the folded model and the original are compared on fresh inputs of another batch
size.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.environment import environment
from common.errors import ConfigError, FoldError, run_program
from common.output import write_bytes_atomically
from configurator import key, parse_args
from fold import Certificate, Report, analyze, fold
from fold.certificate import TOLERANCE, Inputs, run
from repro.fold_zoo import MODELS, build, import_libraries, other_batch

PACKAGES = ("torch", "timm", "torchvision", "transformers")
COUNTS = ("total", "strict", "untied", "practical", "inserted")


@dataclass(frozen=True)
class TableConfig:
    """Keys of fold_table.py."""

    models: str = key("", "names of models, separated by commas ('': all)")
    out: str = key("", "folder for table.jsonl and table.md ('': the screen alone)")
    seconds: int = key(60, "limit of a model's processor time", least=1)
    gigabytes: int = key(12, "limit of a model's address space", least=1)
    again: bool = key(False, "measure models again that table.jsonl holds")


# ----------------------------------------------------------------------------------- one model


def measure(name: str) -> dict[str, Any]:
    """Analyse, fold and check one model."""
    torch.manual_seed(0)
    model, inputs = build(name)
    record: dict[str, Any] = {"class": type(model).__name__}
    run(model, inputs)  # what fails here is no fault of a fold
    try:
        report = analyze(model, inputs)
        record |= {count: getattr(report, count) for count in COUNTS}
        record |= {
            "worth": report.worth,
            "by_hand": sum(row.by_hand for row in report.rows),
        }
        strict, certificate = fold(model, report)
        record |= {"folded_strictly": certificate.folded, "max_rel": certificate.max_rel}
        ok = certificate.ok
        if report.untied > report.strict or report.practical > report.strict:
            folded, certificate = fold(model, report, untie=True, insert=True)
            record["max_rel"] = max(record["max_rel"], certificate.max_rel)
            ok = ok and certificate.ok
        else:
            folded = strict
        record |= {
            "ok": ok,
            "folded": certificate.folded,
            "inserted_by_fold": certificate.inserted,
            "reason": certificate.reason,
        }
        record |= compare(model, {"strict": strict, "folded": folded}, inputs)
        record["refusals"] = refusals(report, certificate)
    except FoldError as error:
        record["refused"] = str(error)
    return record


def compare(model: nn.Module, folded: dict[str, nn.Module], inputs: Inputs) -> dict[str, Any]:
    """Compare the outputs of folded models with the original's, at another batch size.

    This comparison is independent of the certificate's: other inputs, and code of its own.
    """
    fresh = other_batch(inputs)
    batch = "other"
    try:
        expected = run(model, fresh)
    except (
        Exception
    ) as error:  # some models are written for one batch size; they may raise anything
        batch = f"same ({first_line(error)})"
        fresh = other_batch(inputs, examples=0)
        expected = run(model, fresh)
    worst = 0.0
    for after in {id(one): one for one in folded.values()}.values():
        worst = max(worst, difference(expected, run(after, fresh)))
    return {"other_batch_rel": worst, "batch": batch, "spread": spread(expected)}


def spread(output: Any) -> float:
    """Return how much an output differs between examples, relative to its largest number.

    Where that is nothing, a comparison says nothing.
    """
    found = [0.0]
    for x in floats(output):
        x = torch.where(x.isfinite(), x, 0.0)
        if x.dim() and x.numel():
            found.append(float((x - x[:1]).abs().max() / x.abs().max().clamp_min(1e-300)))
    return max(found)


def difference(expected: Any, found: Any) -> float:
    """Return the largest difference of any output tensor, relative to its largest number."""
    pairs = zip(floats(expected), floats(found), strict=True)
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.isnan().any() or b.isnan().any():
            return float("inf")
        scale = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 1.0
        same = (a == b) | ((a - b).abs() <= 1e-300)  # infinities at the same places
        gap = torch.where(same, 0.0, (a - b).abs())
        worst = max(worst, float(gap.max()) / max(scale, 1e-300) if gap.numel() else 0.0)
    return worst


def floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output."""
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def refusals(report: Report, certificate: Certificate) -> list[dict[str, Any]]:
    """Return why norms were left: each reason by its operation, with a norm as an example."""
    found: dict[str, dict[str, Any]] = {}
    for norm, reason in certificate.refusals.items():
        kind = kind_of(reason)
        found.setdefault(kind, {"kind": kind, "norms": 0, "norm": norm, "reason": reason})
        found[kind]["norms"] += 1
    return sorted(found.values(), key=lambda one: -one["norms"])


def kind_of(reason: str) -> str:
    """Shorten a reason to the operation or the property that it is about, without names."""
    if "; fold leaves it: " in reason:
        reason = "left: " + reason.split("; fold leaves it: ")[1]
    reason = reason.split(", unless")[0]
    if ": it would take as many centrings" in reason:
        reason = reason.split(": it would")[0]
    reason, _, _ = reason.partition(", and a centring after it would show in ")
    reason = re.sub(
        r"centring \S+( and \S+)* would show", "centring a parameter would show", reason
    )
    reason = re.sub(r"\b(?!show\b|computed\b)(\w+) in [\w.]+", r"\1", reason)
    reason = re.sub(r"\b\w+(\.\w+)+\b", "a module", reason)
    return reason


# ----------------------------------------------------------------------------------- all of them


def measure_in_child(name: str, config: TableConfig) -> dict[str, Any]:
    """Run `measure` in a process of its own, which the limits may end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _limited(name, config, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if text:
        record = json.loads(text)
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        record = {"limit": f"it took more than {config.seconds} seconds of processor time"}
    else:
        record = {"limit": f"the process ended with status {status}"}
    return record | {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}


def _limited(name: str, config: TableConfig, writer: int) -> None:
    """Do the work of the child, and end it."""
    # Processor time: a busy machine does not change what comes out.
    resource.setrlimit(resource.RLIMIT_CPU, (config.seconds, config.seconds + 5))
    size = config.gigabytes << 30
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        record = measure(name)
    except MemoryError:
        record = {"limit": f"it took more than {config.gigabytes} GiB of address space"}
    except Exception as error:  # models, and what they import, may raise anything
        print(traceback.format_exc(), file=sys.stderr)
        memory = "allocate memory" in str(error)
        record = {"limit" if memory else "failed": f"{type(error).__name__}: {first_line(error)}"}
    text = json.dumps(record).encode()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(text)
    os._exit(0)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def verdict(record: dict[str, Any]) -> str:
    """Say in one word what came out."""
    if "limit" in record:
        return "limit"
    if "failed" in record:
        return "failed"
    if "refused" in record:
        return "refused"
    if not record["ok"] or not record["other_batch_rel"] <= TOLERANCE:
        return "wrong"
    if record["total"] == 0:
        return "no norms"
    if record["folded"] == record["total"]:
        return "all"
    return "some" if record["folded"] else "none"


def versions() -> dict[str, str]:
    """Return the versions of the packages that models come from."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --------------------------------------------------------------------------------------- the page

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


def page(records: list[dict[str, Any]], config: TableConfig) -> str:
    """Return table.md."""
    verdicts = Counter(verdict(r) for r in records)
    folded = [r for r in records if verdict(r) in ("all", "some", "none")]
    errors = [r["max_rel"] for r in folded]
    others = [r["other_batch_rel"] for r in folded]
    libraries = Counter(r["model"].partition("/")[0] for r in records)
    used = sorted({f"{name} {v}" for r in records for name, v in r["versions"].items()})
    dates = sorted(r["date"] for r in records)
    lines = [
        "# LayerNorms of other people's models",
        "",
        f"{len(records)} architectures: "
        + ", ".join(f"{number} of {name}" for name, number in sorted(libraries.items()))
        + ". `python repro/fold_table.py --out=results/fold` makes table.jsonl and this page. It "
        "skips models that table.jsonl holds. Each line has its commit.",
        "",
        f"{', '.join(used)}; {dates[0]} to {dates[-1]}, on a CPU. A model has "
        f"{config.seconds} seconds of processor time and {config.gigabytes} GiB of address space.",
        "",
        "Models are small variants or small configurations (repro/fold_zoo.py) with random weights "
        "in float64. Gains, biases and means are moved away from their initial values. `error` is "
        "the largest of the certificate's checks, relative to the largest output. `another batch` "
        "is the same for fresh inputs of another batch size, computed apart from the certificate.",
        "",
        "| verdict | models | meaning |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {v} | {verdicts[v]} | {MEANING[v]} |" for v in MEANING if verdicts[v]]
    total = sum(r["total"] for r in folded)
    lines += [
        "",
        f"Of {total} norm calls ({sum(r['by_hand'] for r in folded)} of them written out by hand), "
        f"{sum(r['folded_strictly'] for r in folded)} fold strictly and "
        f"{sum(r['folded'] for r in folded)} with untied parameters and "
        f"{sum(r['inserted_by_fold'] for r in folded)} centrings. Largest error: "
        f"{max(errors, default=0):.0e} in the certificates, {max(others, default=0):.0e} at "
        f"another batch size. Wrong outputs: {verdicts['wrong']}.",
        "",
        *_older(records),
        "## Why norms were left",
        "",
        "| reason | norms | models | for one |",
        "| --- | --- | --- | --- |",
    ]
    norms: Counter[str] = Counter()
    models: Counter[str] = Counter()
    example = {}
    for r in folded:
        for one in r["refusals"]:
            kind = kind_of(one["reason"])
            norms[kind] += one["norms"]
            models[kind] += 1
            example.setdefault(kind, f"{one['norm']} of {r['model']}")
    lines += [
        f"| {kind} | {number} | {models[kind]} | {example[kind]} |"
        for kind, number in norms.most_common()
    ]
    stopped = [r for r in records if verdict(r) in ("refused", "limit", "failed", "wrong")]
    if stopped:
        lines += ["", "## Models that were not folded", "", "| model | verdict | message |"]
        lines.append("| --- | --- | --- |")
        for r in stopped:
            why = next(r[k] for k in ("refused", "limit", "failed", "reason") if k in r)
            lines.append(f"| {r['model']} | {verdict(r)} | {cell(why)} |")
    lines += [
        "",
        "## All models",
        "",
        "| model | verdict | norms (by hand) | strict | untied | practical (inserted) "
        "| folded (inserted) | error | another batch | left, for one |",
        "| --- " * 10 + "|",
    ]
    for r in folded:
        why = f"{r['refusals'][0]['norm']}: {r['refusals'][0]['reason']}" if r["refusals"] else ""
        lines.append(
            f"| {r['model']} | {verdict(r)} | {r['total']} ({r['by_hand']}) | {r['strict']} | "
            f"{r['untied']} | {r['practical']} ({r['inserted']}) | {r['folded']} "
            f"({r['inserted_by_fold']}) | {r['max_rel']:.0e} | {r['other_batch_rel']:.0e} | "
            f"{cell(why)} |"
        )
    return "\n".join(lines) + "\n"


def _older(records: list[dict[str, Any]]) -> list[str]:
    """Say how many lines were measured by an older version of this program."""
    older = [r["model"] for r in records if "total" in r and "spread" not in r]
    if not older:
        return []
    return [
        f"{len(older)} of these models were measured at an older commit, at which LayerNorms "
        "written out by hand were not counted, nor weights near zero drawn anew.",
        "",
    ]


def cell(text: str) -> str:
    """Fit a text into a cell of a Markdown table."""
    return " ".join(text.replace("|", "/").split())


def main(argv: list[str]) -> None:
    config, _ = parse_args(TableConfig, argv, __doc__)
    names = config.models.split(",") if config.models else list(MODELS)
    if unknown := set(names) - set(MODELS):
        raise ConfigError(f"models={min(unknown)}: repro/fold_zoo.py has no such model")
    torch.set_num_threads(1)  # a forked process could not use the threads of its parent
    if config.out:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    stored = Path(config.out) / "table.jsonl" if config.out else None
    git = environment(torch.device("cpu"))["git"]
    import_libraries()  # once, not in each process
    records = {}
    if stored and stored.exists():
        for line in stored.read_text().splitlines():
            record = json.loads(line)
            records[record["model"]] = record
    for name in names:
        if name in records and not config.again:
            continue
        record = {"model": name} | measure_in_child(name, config)
        record |= {"git": git, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
        print(json.dumps(record), flush=True)
        records[name] = record
        if stored:
            lines = [json.dumps(records[n]) + "\n" for n in MODELS if n in records]
            write_bytes_atomically(stored, "".join(lines).encode())
    if config.out:
        ordered = [records[name] for name in MODELS if name in records]
        write_bytes_atomically(Path(config.out) / "table.md", page(ordered, config).encode())


if __name__ == "__main__":
    run_program(main)
