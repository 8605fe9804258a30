"""What 26 short runs gave before "Half the house": made again, and compared digit for digit.

    git worktree add OLD d806d57
    python -m repro.before run OLD out/before/old      # in the worktree OLD: runs, and their halves
    python -m repro.before run . out/before/new        # in this checkout
    python -m repro.before same out/before/old/record.json out/before/new/record.json
    python -m repro.before resume out/before/old out/before/resumed   # halves of OLD, gone on here
    python -m repro.before same out/before/old/record.json out/before/resumed/record.json
    python -m repro.before run OLD out/before/compiled --compile      # counts recompilations too

A run has 12 steps of a small model on data/stdlib, in float32 eager mode unless its keys say
otherwise. Its record has losses, gradient norms and `rms` events to the last digit, and the SHA-256
of the weights and buffers, and of the optimiser's moments. A half is the same run stopped
after step 6, with its checkpoint. Digits depend on the processor: compare records of one machine.
results/cpu/before/record.json has those of d806d57. This file goes when the redesign is done.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

STEPS = 12
COMMON = (
    "--data_dir=data/stdlib --n_layer=3 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 "
    f"--gradient_accumulation_steps=2 --max_iters={STEPS} --warmup_iters=3 --learning_rate=4e-3 "
    "--min_lr=0 --eval_interval=6 --eval_tokens=512 --log_interval=1 --sample_tokens=0 --seed=3 "
    "--init_std=0.1 --dtype=float32 --compile=False --device=cpu"
)
TAPER = "--norm_type=taper --taper_warmup=4 --taper_end=9"
LLAMA = "--position=rope --activation=swiglu --n_kv_head=1 --tie_embeddings=False --norm_type=rms"
TYPES = "layer,rms,coupled,cbwc,taper,post,deepnorm,mixln,peri,olmo2,hybrid,keel,lns,dyt,derf,none"
RUNS = {name: f"--norm_type={name}" for name in TYPES.split(",")} | {
    "taper": TAPER,
    "fold": "--norm_type=coupled --coupled_impl=fold",
    "span": "--norm_type=coupled --coupled_span=2",
    "calibrated": "--norm_type=coupled --coupled_span=0 --coupled_calibrate=4",
    "autocast": "--norm_type=rms --dtype=bfloat16 --residual=autocast",
    "taper_final": f"{TAPER} --taper_final=True --taper_anchor=0.1",
    "llama": LLAMA,
    "full_gradient": "--norm_type=coupled --coupled_grad=full",
    "qk_norm": "--norm_type=rms --qk_norm=head",
    "outputs_autocast": "--norm_type=peri --dtype=bfloat16",
    "muon": "--norm_type=rms --optimizer=muon",
}
# Runs the program in the working directory, and stops it as a user would after half of the steps.
HALF = f"""
import os, signal, sys
import train
end_step = train.Trainer._end_step
def stop(self, report):
    if report.step == {STEPS // 2}:
        os.kill(os.getpid(), signal.SIGTERM)
    return end_step(self, report)
train.Trainer._end_step = stop
train.main(sys.argv[1:])
"""


def train(code: Path, folder: Path, keys: str, program: list[str]) -> str:
    """Train in the checkout `code`, into `folder`; return what was printed."""
    words = [*program, *COMMON.split(), *keys.split(), f"--out_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "recompiles"}
    done = subprocess.run(
        [sys.executable, *words], cwd=code, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{folder.name}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stderr


def digest(state: object) -> str:
    """Return the SHA-256 of all vectors and matrices in nested dicts and lists, whatever their
    names and order.
    """
    found = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
            found.append(hashlib.sha256(value.contiguous().numpy().tobytes()).digest())
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, list | tuple):
            for part in value:
                walk(part)

    walk(state)
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def record(folder: Path) -> dict[str, object]:
    """Return what a finished run gave."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    found: dict[str, object] = {
        "loss": [event["loss"] for event in steps],
        "grad_norm": [event["grad_norm"] for event in steps],
        "val_loss": [event["val_loss"] for event in events if event["event"] == "eval"],
    }
    for name in ("rms", "drift", "spread"):
        found[name] = [event[name] for event in events if event["event"] == "rms"]
    state = torch.load(folder / "ckpt_last.pt", weights_only=True)
    found |= {part: digest(state[part]) for part in ("model", "optimizer")}
    return found


def run(code: Path, out: Path, extra: str) -> None:
    """Make all runs in the checkout `code`, and their halves if it is d806d57's."""
    records = {}
    for name, keys in RUNS.items():
        folder = out.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)
        printed = train(code, folder, f"{keys} {extra}", ["train.py"])
        records[name] = record(folder)
        if extra:
            records[name] = {"recompiled": len(re.findall("Recompiling function", printed))}
        elif is_old(code):
            half = out.resolve() / "half" / name
            shutil.rmtree(half, ignore_errors=True)
            train(code, half, keys, ["-c", HALF])
        print(name, flush=True)
    (out / "record.json").write_text(json.dumps(records, indent=1) + "\n")


def is_old(code: Path) -> bool:
    """Is it the old train.py, whose halves HALF knows how to make?"""
    return (code / "training/sharded.py").exists()


def resume(old: Path, out: Path) -> None:
    """Go on in this checkout with the halves that the old one left."""
    records = {}
    for name, keys in RUNS.items():
        folder = out.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old / "half" / name, folder)
        train(Path.cwd(), folder, keys, ["train.py"])
        records[name] = record(folder)
        print(name, flush=True)
    (out / "record.json").write_text(json.dumps(records, indent=1) + "\n")


def same(first: Path, second: Path) -> None:
    """Print what differs between two records, and how far; exit with 1 if anything does."""
    one, other = (json.loads(path.read_text()) for path in (first, second))
    one = one.get("runs", one)  # of results/cpu/before
    different = 0
    for name in one:
        for what, value in one[name].items():
            if other[name].get(what) != value:
                different += 1
                print(f"{name} {what}: {value} and {other[name].get(what)}")
    print(f"{len(one)} runs, {different} differences")
    sys.exit(bool(different))


def main(argv: list[str]) -> None:
    match argv:
        case ["run", code, out]:
            run(Path(code), Path(out), "")
        case ["run", code, out, "--compile"]:
            run(Path(code), Path(out), "--compile=True")
        case ["resume", old, out]:
            resume(Path(old), Path(out))
        case ["same", first, second]:
            same(Path(first), Path(second))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
