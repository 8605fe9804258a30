"""Measure what folding GPT-2 124M costs: CPU seconds of each part, and bytes of parameters.

    python repro/fold_time.py --out=results/fold/time.jsonl

One process, random weights, batch 1, 16 tokens; the median of three. `export` makes the graph,
`analysis` reads it, `fold` copies the model and writes into the copy, `fold and certificate` is
fold.fold: both models in float64 four times, and hashes of what was touched. CPU seconds, not
seconds on a clock: other work on the machine counts less. The head is tied to the embedding, so
there are two ways to fold: `insert` keeps it tied and inserts one centring, `untie` (convert.py's
default) gives it weights of its own, an embedding matrix more.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from common.environment import timing_environment
from common.errors import run_program
from common.output import append_json, check_replaceable
from common.stats import cpu_seconds
from configurator import key, parse_args
from fold import analyze, fold
from fold.choice import Analysis
from fold.graph import Graph
from fold.modules import carry_out
from hf.hub import import_transformers


@dataclass(frozen=True)
class TimeConfig:
    """Keys of fold_time.py."""

    layers: int = key(12, "transformer blocks")
    out: str = key("", "JSONL file to add the result to ('': the screen alone)")


def main(argv: list[str]) -> None:
    config, _ = parse_args(TimeConfig, argv, __doc__)
    if config.out:
        check_replaceable(Path(config.out), rb'{"model": "gpt2"')
    hf = import_transformers()
    hf.logging.set_verbosity_error()
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=config.layers)).eval()
    inputs = {"input_ids": torch.randint(0, 50257, (1, 16)), "use_cache": False}
    model(**inputs)
    graph = Graph(model, inputs)
    report = analyze(model, inputs)

    def written(how: dict[str, bool]) -> nn.Module:
        """A folded copy, unchecked."""
        new = copy.deepcopy(model)
        carry_out(report.analysis.plan(**how)[0], new)
        return new

    parts: dict[str, Callable] = {
        "export": lambda: Graph(model, inputs),
        "analysis": lambda: Analysis(graph).ways,
    }
    record = {"model": "gpt2", "layers": config.layers}
    for name in ("insert", "untie"):
        how = {name: True}
        parts[f"fold, {name}"] = partial(written, how)
        parts[f"fold and certificate, {name}"] = partial(fold, model, report, **how)
        new, certificate = fold(model, report, **how)
        record[name] = {
            "folded": certificate.folded,
            "inserted": certificate.inserted,
            "bytes": sum(p.numel() * p.element_size() for p in new.parameters()),
            "ok": certificate.ok,
            "max_rel": certificate.max_rel,
        }
    record["cpu_seconds"] = {
        name: median(cpu_seconds(part) for _ in range(3)) for name, part in parts.items()
    }
    record |= timing_environment(torch.device("cpu"))
    if config.out:
        append_json(Path(config.out), record)
    print(json.dumps(record))


if __name__ == "__main__":
    run_program(main)
