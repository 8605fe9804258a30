"""Run folders of a made-up study, written as train.py and sweep.sh would."""

import json
import shlex
from pathlib import Path

import numpy as np

from evidence.study import Plan, Wanted, name_of

PLAN = """
name = "toy"
baseline = "rms"
[arms]
rms = "rms"
layer = "layer"
shared = "coupled --norm_plan='{block_0}'"
[rates]
extensions = 2
tolerance = 0.05
seeds = [100, 101]
own_initialisation = ["layer"]
[margin]
lengths = [0.5, 1.0, 2.0]
seeds = [150, 151, 152]
share = 0.02
[verdict]
arms = 2
seeds = [200, 201, 202, 203, 204, 205]
level = 0.05
power = 0.8
[recommendation]
octaves = 1.0
[recommendation.bytes]
rms = "rms"
layer = "layer"
shared = "rms"
[check]
factors = [0.5, 2.0]
seeds = [300, 301]
[tokens]
factor = 4
arms = 1
shape = "W"
seeds = [400, 401]
[muon]
arms = 1
shape = "W"
factors = [0.5, 1.0, 2.0]
selection_seed = 100
seeds = [500, 501]
[scales.toy]
config = "config/which_norm_cpu.py"
rates = [2e-3, 4e-3, 8e-3]
[scales.toy.shapes.W]
n_layer = 2
n_embd = 32
init_std = 0.08
[scales.toy.shapes.D]
n_layer = 3
n_embd = 16
init_std = 0.1
"""
START = {
    "git": "0" * 40,
    "versions": {"python": "3", "torch": "2.13.0", "numpy": "2"},
    "device": "cpu (x)",
    "processor": "x",
    "data": "a",
    "n_params": 1,
    "tokens_per_step": 2048,
    "norm_keys": {},
    "other_norm_keys": [],
    "world_size": 1,
}


def make_plan(folder: Path) -> Plan:
    path = folder / "plan.toml"
    path.write_text(PLAN)
    return Plan(path, "toy")


def write(plan: Plan, folder: Path, wanted: Wanted, loss: float | None, **changes) -> Path:
    """Write the log of a run that ended with this loss, or diverged (None)."""
    run = folder / wanted.shape / f"{name_of(wanted.words)}-{wanted.seed}"
    run.mkdir(parents=True)
    norm_type, *words = shlex.split(wanted.words)
    config = {"norm_type": norm_type, "seed": wanted.seed, "max_iters": 1000}
    for word in words:
        name, text = word.removeprefix("--").split("=", 1)
        try:
            config[name] = json.loads(text)
        except ValueError:
            config[name] = text
    start = START | {name: changes.pop(name) for name in list(changes) if name in START}
    config |= {"study": plan.study, **changes}
    end = "done" if loss is not None else "step 7: the loss on rank 0 is not finite"
    events = [{"event": "start", "config": config, **start}]
    if loss is not None:
        tokens = np.array([10, 20, 30])
        nats = loss * np.array([13, 18, 29])
        full = {"val_loss_full": loss, "tokens": 60, "document_tokens": tokens.tolist()}
        last = config["max_iters"]
        events.append({"event": "eval", "step": last, "val_loss": loss})
        events.append({"event": "val_full", "step": last, **full, "document_nats": nats.tolist()})
    events.append({"event": "end", "reason": end, "step": config["max_iters"]})
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run
