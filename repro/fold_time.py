"""What folding GPT-2 124M costs: CPU seconds of each part, and parameter bytes before and after.

    python repro/fold_time.py --out=results/fold/time.jsonl

One process, random weights, batch 1, 16 tokens. `fold` is the copy and the writing back; `analysis` reads the exported
graph; `certificate` runs both models in float64 four times, and hashes what was touched. CPU seconds, not seconds on a
clock: other work on the machine counts less.
"""

import copy
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import key, parse_args
from errors import run_program
from fold_graph import Graph
from fold_modules import carry_out
from foldable import analyze, fold
from hf_coupled import import_transformers
from runlog import environment


@dataclass(frozen=True)
class TimeConfig:
    """Keys of fold_time.py."""

    layers: int = key(12, "transformer blocks")
    out: str = key("", "JSONL file to add the result to ('': the screen alone)")


def main(argv: list[str]) -> None:
    config, _ = parse_args(TimeConfig, argv, __doc__)
    hf = import_transformers()
    hf.logging.set_verbosity_error()
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=config.layers)).eval()
    inputs = {"input_ids": torch.randint(0, 50257, (1, 16)), "use_cache": False}
    marks = [("", time.process_time())]

    def mark(name: str) -> None:
        marks.append((name, time.process_time()))

    model(**inputs)
    mark("first forward")
    Graph(model, inputs)
    mark("export")
    report = analyze(model, inputs)
    mark("export and analysis")
    plan, norms = report.analysis.plan(insert=True)
    mark("plan")
    new = copy.deepcopy(model)
    carry_out(plan, new)
    mark("fold")
    _, certificate = fold(model, report, insert=True)
    mark("fold and certificate")
    spent = {name: round(now - before, 3) for (_, before), (name, now) in itertools.pairwise(marks)}
    sizes = {name: sum(p.numel() * p.element_size() for p in m.parameters()) for name, m in
             (("before", model), ("after", new))}  # fmt: skip
    record = {"model": "gpt2", "parameters": sum(p.numel() for p in model.parameters()), "folded": len(norms),
              "inserted": len(plan.insertions), "cpu_seconds": spent, "bytes": sizes, "ok": certificate.ok,
              "max_rel": certificate.max_rel, "float32_rel": certificate.checks[-1].max_rel,
              **environment(torch.device("cpu"))}  # fmt: skip
    if config.out:
        with open(config.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    run_program(main)
