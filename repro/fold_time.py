"""Measure what folding GPT-2 124M costs: CPU seconds of each part, and bytes of parameters.

    python repro/fold_time.py --out=results/fold/time.jsonl

One process, random weights, batch 1, 16 tokens; medians over rounds. `export` makes the graph,
`analysis` reads it, `fold` copies the model and writes into the copy, `certificate` is the rest of
fold.fold: both models in float64 four times, and hashes of what was touched. CPU seconds, not
seconds on a clock: other work on the machine counts less. The head is tied to the embedding, so
there are two ways to fold: `insert` keeps it tied and inserts one centring, `untie` (convert.py's
default) gives it weights of its own, an embedding matrix more.
"""

import copy
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

import torch
from torch import nn

from common.environment import environment
from common.errors import run_program
from common.output import append_json, check_replaceable
from configurator import key, parse_args
from fold import analyze, fold
from fold.choice import Analysis
from fold.graph import Graph
from fold.modules import Plan, carry_out
from hf.hub import import_transformers


@dataclass(frozen=True)
class TimeConfig:
    """Keys of fold_time.py."""

    layers: int = key(12, "transformer blocks")
    rounds: int = key(3, "repetitions of each part but the certificate")
    out: str = key("", "JSONL file to add the result to ('': the screen alone)")


def written(model: nn.Module, plan: Plan) -> nn.Module:
    """A folded copy, unchecked."""
    new = copy.deepcopy(model)
    carry_out(plan, new)
    return new


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def main(argv: list[str]) -> None:
    config, _ = parse_args(TimeConfig, argv, __doc__)
    if config.out:
        check_replaceable(Path(config.out), rb'{"model": "gpt2"')
    hf = import_transformers()
    hf.logging.set_verbosity_error()
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=config.layers)).eval()
    inputs = {"input_ids": torch.randint(0, 50257, (1, 16)), "use_cache": False}
    model(**inputs)
    spent = defaultdict(list)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = function()
        spent[name].append(round(time.process_time() - start, 3))
        return result

    for _ in range(config.rounds):
        graph = timed("export", lambda: Graph(model, inputs))
        timed("analysis", lambda: Analysis(graph).ways)  # noqa: B023
    report = analyze(model, inputs)
    ways = {}
    for name, how in (("insert", {"insert": True}), ("untie", {"untie": True})):
        for _ in range(config.rounds):
            new = timed(
                f"fold, {name}",
                lambda: written(model, report.analysis.plan(**how)[0]),  # noqa: B023
            )
        certificate = timed(
            f"fold and certificate, {name}",
            lambda: fold(model, report, **how),  # noqa: B023
        )[1]
        ways[name] = {
            "folded": certificate.folded,
            "inserted": certificate.inserted,
            "bytes": parameter_bytes(new),
            "ok": certificate.ok,
            "max_rel": certificate.max_rel,
            "float32_rel": certificate.checks[-1].max_rel,
        }
    record = {
        "model": "gpt2",
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": parameter_bytes(model),
        **ways,
        "cpu_seconds": {name: statistics.median(times) for name, times in spent.items()},
        "rounds": dict(spent),
        "load": round(os.getloadavg()[0], 1),
        **environment(torch.device("cpu")),
    }
    if config.out:
        append_json(Path(config.out), record)
    print(json.dumps(record))


if __name__ == "__main__":
    run_program(main)
