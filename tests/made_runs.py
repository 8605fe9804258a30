"""Runs that never were: a kept one with another norm, seed, setting and loss."""

import functools
import json
import math

import numpy as np
from helpers import ROOT

from evidence.runs import Run, find_runs
from norm_plan import keys_of

WORDS = {
    "dyt": {"norm_type": "dyt"},
    "derf": {"norm_type": "derf"},
    "rms": {"norm_type": "rms"},
    "layer": {"norm_type": "layer"},
    "coupled": {"norm_type": "coupled"},
    "one-rms": {"norm_type": "coupled", "coupled_span": 0, "coupled_calibrate": 10},
    "peri": {"norm_type": "peri"},
}


@functools.cache
def kept() -> list[dict]:
    """The events of a run of `rms` in the wide shape."""
    return find_runs([ROOT / "results/cpu/leads/verdict-W.tar.xz"])[-1].events


def made(arm: str, seed: int, loss: float, wheels: float = 2.0, **settings) -> Run:
    """A run that ends at `loss` over the documents of data/stdlib, at `wheels` over two more."""
    kinds = ("start", "eval", "val_full", "end")
    last = {event["event"]: dict(event) for event in kept() if event["event"] in kinds}
    start, evaluated, val_full, end = (last[kind] for kind in kinds)
    assert start["config"]["norm_type"] == "rms"
    start["config"] = start["config"] | WORDS[arm] | {"seed": seed} | settings
    start["norm_keys"] = json.loads(json.dumps(keys_of(WORDS[arm]["norm_type"])))
    steps = start["config"]["max_iters"]
    tokens = np.array(val_full["document_tokens"])
    val_full |= {
        "step": steps,
        "document_tokens": [*tokens.tolist(), 1000, 3000],
        "document_nats": [*(tokens * loss).tolist(), 500 * wheels, 3500 * wheels],
        "val_loss_full": 9.0,  # over all of it: decides nothing
    }
    evaluated["step"] = end["step"] = steps
    events = [start, evaluated, val_full, end]
    if math.isinf(loss):
        events = [start, end | {"reason": "step 3: loss is not finite", "step": 3}]
    log = "".join(json.dumps(event) + "\n" for event in events).encode()
    return Run(ROOT / f"{arm}-{seed}", {"log.jsonl": log})
