"""Every figure that wants a GPU, in stages of under ten minutes: what `make gpu` runs.

    make gpu                                           # all that is not done yet: hours on an H200 (estimates: --list)
    python repro/gpu.py --list                         # the stages, their state and their commands
    python repro/gpu.py --minutes=9.5                  # as much of it as fits; the same command goes on
    python repro/gpu.py --stages="train* decode-qwen*" # these, done before or not
    python repro/gpu.py --rehearse --out=out/rehearsal # the same commands at toy size, anywhere

It needs no network, and of packages torch, triton, transformers, matplotlib, scipy, tqdm, tiktoken and pytest. Peers
take part where they are: Liger-Kernel and quack installed, checkouts of nanoGPT and gpt-fast in folders beside this
one. Training wants token shards:

    python data/fineweb_edu/prepare.py --local FILES --val FILES --out_dir=data/offline

A stage is one command of the repository, and its figures are what this writes into `out`. `out`/stages.jsonl has a line
for each attempt, with commit, device, versions, and the GPU's clocks before and after; what a stage printed is in
out/gpu/. A stage that is done is not done again; nor is one that failed, until the code is another (or
it is named). Sweeps go on where they were stopped. `out`/README.md and targets.png, rendered each time, set what was
measured beside what was aimed at (gpu_targets.py). The last line is JSON.
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import key, parse_args
from errors import ConfigError, UserError, run_program
from ranks import find_device
from repro import gpu_targets
from repro.gpu_stages import STAGES, Stage
from runlog import append_json, environment

ROOT = Path(__file__).resolve().parents[1]
GRACE = 45  # seconds that a stage has to save what it can, once it is told to stop


@dataclass(frozen=True)
class GpuConfig:
    """Keys of repro/gpu.py."""

    stages: str = key("", "names or patterns (train*), blanks between: these alone, done before or not ('': what is "
                          "not done)")  # fmt: skip
    minutes: float = key(0.0, "begin nothing that will not be over so many minutes from now (0: no such limit)")
    limit: float = key(9.5, "minutes after which a stage is stopped")
    out: str = key("results/h200", "folder of the figures")
    data: str = key("data/offline", "folder of token shards, for training")
    nanogpt: str = key("../nanoGPT", "clone of karpathy/nanoGPT; takes part in `train` if it is there")
    gpt_fast: str = key("../gpt-fast", "clone of gpt-fast; takes part in decoding if it is there")
    rehearse: bool = key(False, "toy sizes on whatever is here, to see that everything runs: want another `out`")
    list: bool = key(False, "only show the stages, their state and their commands")

    def __post_init__(self) -> None:
        if self.minutes < 0 or self.limit <= 0:
            raise ConfigError("minutes must not be below 0, limit must be above 0")
        if self.rehearse and Path(self.out) == Path("results/h200"):
            raise ConfigError("rehearse: its figures are no results: give another folder, --out=out/rehearsal")


def chosen(words: str) -> list[Stage]:
    """The stages that these names and patterns mean, in the order of STAGES. Raises ConfigError for one without any."""
    for word in words.split():
        if not any(fnmatch(stage.name, word) for stage in STAGES):
            raise ConfigError(f"stages: {word!r} is no stage: --list shows them")
    return [stage for stage in STAGES if any(fnmatch(stage.name, word) for word in words.split() or ["*"])]


def scratch_of(config: GpuConfig) -> Path:
    """Where run folders and logs go, which are no results."""
    return Path("out/gpu") / Path(config.out).name


def filled_in(stage: Stage, config: GpuConfig) -> tuple[list[str], dict[str, str]]:
    """(words of the command, what it adds to the environment)."""
    scratch = scratch_of(config)
    values = {
        "python": sys.executable, "out": config.out, "scratch": scratch, "data": config.data, "tiny": scratch / "tiny",
        "jobs": max(1, (os.cpu_count() or 1) - 4),
        "nanogpt": f"--nanogpt={config.nanogpt}" if Path(config.nanogpt, "model.py").is_file() else "",
        "gpt_fast": f"--gpt_fast={config.gpt_fast}" if Path(config.gpt_fast, "model.py").is_file() else "",
    }  # fmt: skip
    words = shlex.split(f"{stage.command} {stage.toy if config.rehearse else ''}".format(**values))
    env = stage.env | (stage.toy_env if config.rehearse else {}) | {"PYTHON": "{python}"}
    return words, {name: value.format(**values) for name, value in env.items()}


# ------------------------------------------------------------------------------------------------------------- running


class Campaign:
    """Runs stages, and notes each attempt in `out`/stages.jsonl."""

    def __init__(self, config: GpuConfig, device: torch.device):
        self.config, self.device, self.start = config, device, time.monotonic()
        self.out, self.notes = Path(config.out), Path(config.out) / "stages.jsonl"
        self.logs = scratch_of(config) / "logs"

    def attempts(self) -> dict[str, dict[str, Any]]:
        """The last attempt at each stage."""
        return {row["stage"]: row for row in gpu_targets.read_lines(self.notes)}

    def is_left(self, stage: Stage) -> bool:
        """To be run if it is not named: neither done, nor failed by the same code."""
        last = self.attempts().get(stage.name, {"state": "never"})
        here = environment(self.device)["git"]
        return last["state"] in ("never", "goes on", "interrupted") or (
            last["state"] not in ("done", "cut short") and (here is None or here != last["git"]))  # fmt: skip

    def seconds_for(self, stage: Stage) -> float:
        """How long it may take; 0 where it does not fit into what is left of `minutes`."""
        limit = 60 * self.config.limit
        if not self.config.minutes:
            return limit
        left = 60 * self.config.minutes - (time.monotonic() - self.start) - GRACE
        fits = left >= (120 if stage.goes_on else 60 * min(stage.minutes, self.config.limit) - GRACE)
        return min(limit, left) if fits else 0

    def run(self, stage: Stage, seconds: float) -> str:
        """One attempt; its state. At its limit a stage is told to stop, as by Ctrl-C: sweeps go on at the next call,
        benches end well with the rounds that they have (cut short), others have nothing (too long)."""
        words, env = filled_in(stage, self.config)
        place = environment(self.device)
        self.logs.mkdir(parents=True, exist_ok=True)
        log, start = self.logs / f"{stage.name}.txt", time.monotonic()
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(words, cwd=ROOT, env=os.environ | env, stdout=output, stderr=output,
                                       stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
            try:
                in_time, state = self._wait(process, stage, seconds), ""
            except KeyboardInterrupt:
                state = "interrupted"
            finally:
                stop(process)
        good = process.returncode == 0
        if not state and in_time:
            state = "done" if good else "failed"
        elif not state:
            state = "goes on" if stage.goes_on else "cut short" if good else "too long"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        if stage.keep and state == "done":
            state = self._keep(stage, lines[-1], place)
        said = "" if lines[-1].startswith(("{", "[")) else lines[-1][:300]
        append_json(self.notes, {
            "stage": stage.name, "state": state, "seconds": round(time.monotonic() - start, 1), "said": said,
            "exit_code": process.returncode, "command": shown(words, env), **place,
            "clocks_after": environment(self.device).get("clocks"),
        })  # fmt: skip
        if state in ("failed", "too long"):
            print("\n".join(f"    {line[:200]}" for line in lines[-12:]))
        return state

    def _keep(self, stage: Stage, last: str, place: dict[str, Any]) -> str:
        """The last line of a program that writes no results of its own, with the place."""
        try:
            found = json.loads(last)
        except ValueError:
            return "failed"
        append_json(self.out / stage.keep, {"stage": stage.name, **found, **place})
        shutil.rmtree(scratch_of(self.config) / Path(stage.keep).parent, ignore_errors=True)  # nobody wants its weights
        return "done"

    def _wait(self, process: subprocess.Popen, stage: Stage, seconds: float) -> bool:
        """Waits for its end, or for so many seconds; whether it has ended."""
        end = time.monotonic() + seconds
        with tqdm(total=int(seconds), desc=stage.name, unit="s", leave=False, disable=not sys.stderr.isatty()) as bar:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                bar.update(int(seconds - end + time.monotonic()) - bar.n)
        return process.returncode is not None


def stop(process: subprocess.Popen) -> None:
    """Ends a stage and all that it started: a word first, so that it saves; what outlives it shares no GPU."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            end = time.monotonic() + GRACE
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            break  # all of them have ended
    process.wait()


def shown(words: list[str], env: dict[str, str]) -> str:
    """The command as a person would type it in the repository, without this machine's paths."""
    named = shlex.join([f"{name}={value}" for name, value in env.items() if name != "PYTHON" and value])
    words = ["python" if word == sys.executable else word.replace(f"{ROOT}/", "") for word in words]
    return f"{named} {shlex.join(words)}".strip()


def terminated(*_: Any) -> None:
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------------- the program


def check_place(config: GpuConfig) -> torch.device:
    """The GPU; for a rehearsal, anything. Raises UserError where the figures would be of another machine."""
    if not torch.cuda.is_available() and not config.rehearse and not config.list:
        raise UserError("there is no GPU here: --rehearse --out=out/rehearsal runs the same stages at toy size")
    device = find_device("auto")
    if device.type == "cuda" and Path(config.out) == Path("results/h200"):
        name = torch.cuda.get_device_name(device)
        if "H200" not in name:
            raise UserError(f"this GPU is a {name}: give its figures a folder of their own, --out=results/...")
    return device


def show(campaign: Campaign, stages: list[Stage]) -> None:
    """A line for each stage, and its command."""
    attempts = campaign.attempts()
    for stage in stages:
        last = attempts.get(stage.name, {})
        took = f", {last['seconds'] / 60:.1f} minutes" if last else f", {stage.minutes:g} minutes by estimate"
        words, env = filled_in(stage, campaign.config)
        print(f"{stage.name}: {last.get('state', 'not done')}{took}\n    {shown(words, env)}")


def make_tiny(target: Path) -> None:
    """A model of a few thousand random weights, as a run folder: what a rehearsal distils."""
    from checkpoint import BEST, save_checkpoint
    from model import GPT, GPTConfig

    shape = GPTConfig(norm_type="rms", n_layer=2, n_head=2, n_embd=32, block_size=64, n_vocab=257)
    model = GPT(shape)
    target.mkdir(parents=True, exist_ok=True)
    save_checkpoint(target / BEST, {"step": 0, "config": dataclasses.asdict(shape), "model": model.state_dict(),
                                    "meta": {"tokenizer": "bytes", "vocab_size": 257}})  # fmt: skip


def main(argv: list[str]) -> int:
    config, _ = parse_args(GpuConfig, argv, __doc__)
    os.chdir(ROOT)
    stages, device = chosen(config.stages), check_place(config)
    campaign = Campaign(config, device)
    if config.list:
        show(campaign, stages)
        return 0
    signal.signal(signal.SIGTERM, terminated)
    if config.rehearse:
        make_tiny(scratch_of(config) / "tiny")
    states: dict[str, str] = {}
    for number, stage in enumerate(stages, 1):
        if not config.stages and not campaign.is_left(stage):
            continue
        label = f"[{number}/{len(stages)}] {stage.name}"
        if stage.needs_data and not Path(config.data, "meta.json").is_file():
            print(f"{label}: left out: there are no token shards in {config.data}: --help says how to make them")
            continue
        seconds = campaign.seconds_for(stage)
        if not seconds:
            print(f"{label}: no time left for it")
            continue
        print(f"{label}: {stage.minutes:g} minutes by estimate, at most {seconds / 60:.1f}", flush=True)
        start = time.monotonic()
        states[stage.name] = campaign.run(stage, seconds)
        print(f"{label}: {states[stage.name]} after {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if states[stage.name] == "interrupted":
            break
    rows = gpu_targets.render(campaign.out)
    print(json.dumps({"stages": states, "targets": gpu_targets.counted(rows), "out": config.out}))
    interrupted = "interrupted" in states.values()
    return 130 if interrupted else int(any(state in ("failed", "too long") for state in states.values()))


if __name__ == "__main__":
    run_program(main)
