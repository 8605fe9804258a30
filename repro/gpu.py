"""Every figure that wants a GPU, in stages of under ten minutes: what `make gpu` runs.

    make gpu                                           # all that is not done yet: hours on an H200 (estimates: --list)
    python repro/gpu.py --list                         # the stages, their state and their commands
    python repro/gpu.py --minutes=9.5                  # as much of it as fits; the same command goes on
    python repro/gpu.py --stages="train* decode-qwen*" # these, done before or not
    python repro/gpu.py --rehearse --out=out/rehearsal # the same commands at toy size, anywhere

It needs no network, and of packages torch, triton, transformers, matplotlib, scipy, tqdm, tiktoken, pytest and
pytest-xdist; to distil, peft. Peers take part where they are: Liger-Kernel and quack installed, checkouts of nanoGPT
and gpt-fast in folders beside this one. Training wants token shards:

    python data/fineweb_edu/prepare.py --local FILES --val FILES --out_dir=data/offline

A stage is one command of the repository, and its figures are what this writes into `out`. `out`/stages.jsonl has a line
for each attempt, with commit, device, versions, and the GPU's clocks before and after; what a stage printed is in
out/gpu/. A stage that is done is not done again; nor is one that failed, or was too long twice, until the code is
another (or it is named). At its limit a stage is told to stop, as by Ctrl-C: sweeps go on at the next call, and
bench/train.py and bench_decode.py end well with the rounds that they have. `out`/README.md and targets.png, rendered
each time, set what was measured beside what was aimed at (gpu_targets.py, gpu_report.py). A copy of the files without
.git says its commit in NANONORM_COMMIT. The last line is JSON.
"""

import dataclasses
import difflib
import fcntl
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.environment import environment, find_device
from common.errors import ConfigError, UserError, run_program
from common.output import append_json
from configurator import key, parse_args
from model import GPT, GPTConfig
from repro.gpu_report import render
from repro.gpu_stages import STAGES, Stage
from repro.gpu_targets import counted, read_lines
from training.checkpoint import BEST, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
GRACE = 30  # seconds that a stage has to save what it can, once it is told to stop
RENDERING = 10  # seconds for the rest
OURS = ("ARMS", "SEEDS", "OUT", "KEEP", "MODEL", "MODELS", "NPROC", "HELLASWAG", "RESULTS", "NANONORM_FULL",
        "TRITON_INTERPRET")  # what scripts and tests read: a stage gets its own, not the user's


@dataclass(frozen=True)
class GpuConfig:
    """Keys of repro/gpu.py."""

    stages: str = key("", "names or patterns (train*), blanks between: these alone, done before or not ('': what is "
                          "not done)")  # fmt: skip
    minutes: float = key(0.0, "begin nothing that will not be over so many minutes from now (0: no such limit)")
    limit: float = key(9.2, "minutes after which a stage is told to stop")
    out: str = key("results/h200", "folder of the figures")
    data: str = key("data/offline", "folder of token shards, for training")
    nanogpt: str = key("../nanoGPT", "clone of karpathy/nanoGPT; takes part in `train` if it is there")
    gpt_fast: str = key("../gpt-fast", "clone of gpt-fast; takes part in decoding if it is there")
    rehearse: bool = key(False, "toy sizes on whatever is here, to see that everything runs; wants another `out`")
    list: bool = key(False, "only show the stages, their state and their commands")

    def __post_init__(self) -> None:
        if self.minutes < 0 or self.limit <= 0:
            raise ConfigError("minutes must not be below 0, limit must be above 0")
        out = Path(self.out).resolve()
        if self.rehearse and out.is_relative_to(ROOT / "results"):
            raise ConfigError("rehearse: its figures are no results: give another folder, --out=out/rehearsal")
        if ROOT.is_relative_to(out):
            raise ConfigError(f"out={self.out}: it would overwrite the README.md there: give a folder of its own")

    @property
    def scratch(self) -> Path:
        """Where run folders and logs go, which are no results."""
        return Path("out/gpu") / (Path(self.out).resolve().name + ("-rehearsal" if self.rehearse else ""))


def chosen(words: str) -> list[Stage]:
    """The stages that these names and patterns mean, in the order of STAGES. Raises ConfigError for one without any."""
    for word in words.split():
        if not any(fnmatch(stage.name, word) for stage in STAGES):
            near = difflib.get_close_matches(word, [stage.name for stage in STAGES], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "--list shows them, with blanks between"
            raise ConfigError(f"stages: {word!r} is no stage: {hint}")
    return [stage for stage in STAGES if any(fnmatch(stage.name, word) for word in words.split() or ["*"])]


def filled_in(stage: Stage, config: GpuConfig) -> tuple[list[str], dict[str, str]]:
    """(words of the command, what it adds to the environment)."""
    values = {
        "python": sys.executable, "out": config.out, "scratch": config.scratch, "data": config.data,
        "tiny": config.scratch / "tiny", "jobs": max(1, (os.cpu_count() or 1) - 4),
        "nanogpt": f"--nanogpt={config.nanogpt}" if Path(config.nanogpt, "model.py").is_file() else "",
        "gpt_fast": f"--gpt_fast={config.gpt_fast}" if Path(config.gpt_fast, "model.py").is_file() else "",
    }  # fmt: skip
    words = [word.format(**values) for word in shlex.split(f"{stage.command} {stage.toy if config.rehearse else ''}")]
    env = stage.env | (stage.toy_env if config.rehearse else {}) | {"PYTHON": "{python}"}
    return [word for word in words if word], {name: value.format(**values) for name, value in env.items()}


# ------------------------------------------------------------------------------------------------------------- running


class Campaign:
    """Runs stages, and notes each attempt in `out`/stages.jsonl."""

    def __init__(self, config: GpuConfig, device: torch.device):
        self.config, self.device, self.start = config, device, time.monotonic()
        self.out, self.notes = Path(config.out), Path(config.out) / "stages.jsonl"
        self.commit = environment(device)["git"]  # once: it asks git, and the driver for clocks
        self.attempts: dict[str, list[dict[str, Any]]] = {}
        for row in read_lines(self.notes):
            self.attempts.setdefault(row["stage"], []).append(row)
            if row["rehearsal"] != config.rehearse:
                other = "a rehearsal's" if row["rehearsal"] else "no rehearsal's"
                raise ConfigError(f"out={config.out}: what is there is {other}: give another folder")

    def lock(self) -> None:
        """One campaign at a time: two would time each other. The lock is handed on to each stage, so that one which has
        outlived a killed campaign holds it, too. Raises UserError."""
        Path("out/gpu").mkdir(parents=True, exist_ok=True)
        self.held = open("out/gpu/lock", "a+")
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.held.seek(0)
            raise UserError(f"{self.held.read().strip() or 'another campaign'}, or a stage that has outlived it, still "
                            "runs in this folder: end it first") from None  # fmt: skip
        self.held.truncate(0)
        print(f"the campaign for {self.config.out} (process {os.getpid()})", file=self.held, flush=True)

    def is_left(self, stage: Stage) -> bool:
        """To be run if it is not named: neither done, nor failed, nor too long twice, by the same code."""
        attempts = self.attempts.get(stage.name, [])
        if {"done", "cut short"} & {row["state"] for row in attempts}:
            return False
        states = [row["state"] for row in attempts if row["git"] == self.commit]
        return "failed" not in states and states.count("too long") < 2

    def minutes_of(self, stage: Stage) -> float:
        """As long as it took when it was done, else the estimate."""
        took = [row["seconds"] / 60 for row in self.attempts.get(stage.name, []) if row["state"] == "done"]
        return took[-1] if took and not stage.goes_on else stage.minutes

    def seconds_for(self, stage: Stage) -> float:
        """How long it may take; 0 where it does not fit into what is left of `minutes`."""
        limit = 60 * self.config.limit
        if not self.config.minutes:
            return limit
        left = 60 * self.config.minutes - (time.monotonic() - self.start) - GRACE - RENDERING
        wanted = 120 if stage.goes_on else 60 * min(self.minutes_of(stage), self.config.limit) - GRACE
        return min(limit, left) if left >= wanted else 0

    def run(self, stage: Stage, seconds: float) -> str:
        """One attempt; its state."""
        words, env = filled_in(stage, self.config)
        inherited = {name: value for name, value in os.environ.items() if name not in OURS}
        place, log = environment(self.device), self.config.scratch / f"logs/{stage.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        run_folder = self.config.scratch / stage.run_folder if stage.run_folder else None
        if run_folder:
            shutil.rmtree(run_folder, ignore_errors=True)
        start = time.monotonic()
        with open(log, "w", encoding="utf-8") as output:
            process = subprocess.Popen(words, cwd=ROOT, env=inherited | env, stdout=output, stderr=output,
                                       stdin=subprocess.DEVNULL, start_new_session=True,
                                       pass_fds=[self.held.fileno()])  # fmt: skip
            try:
                in_time, interrupted = self._wait(process, stage, seconds), False
            except KeyboardInterrupt:
                in_time, interrupted = False, True
            stop(process)
        state = "interrupted" if interrupted else outcome(stage, in_time, process.returncode == 0)
        if run_folder:
            state = self._keep(stage, run_folder, state, place)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        record = {
            "stage": stage.name, "state": state, "rehearsal": self.config.rehearse,
            "seconds": round(time.monotonic() - start, 1), "exit_code": process.returncode,
            "said": "" if lines[-1].startswith(("{", "[")) else lines[-1][:300], "command": shown(words, env), **place,
            "clocks_after": environment(self.device).get("clocks"),
        }  # fmt: skip
        append_json(self.notes, record)
        self.attempts.setdefault(stage.name, []).append(record)
        if state not in ("done", "goes on"):
            print("\n".join([*(f"    {line[:200]}" for line in lines[-12:]), f"    all of it: {log}"]))
        return state

    def _keep(self, stage: Stage, folder: Path, state: str, place: dict[str, Any]) -> str:
        """What the log of a run says at its end, with the place, becomes a line in `out`; then the run goes, whose
        weights nobody wants. The log has it before they are written, which may be more than the disk holds."""
        ends = [row for row in read_lines(folder / "log.jsonl") if row["event"] == "end"]
        shutil.rmtree(folder, ignore_errors=True)
        if not ends or ends[-1]["reason"] != "done":
            return "failed" if state == "done" else state
        append_json(self.out / stage.keep, {"stage": stage.name, **ends[-1], **place})
        return "done"

    def _wait(self, process: subprocess.Popen, stage: Stage, seconds: float) -> bool:
        """Waits for its end, or for so many seconds; whether it has ended."""
        end = time.monotonic() + seconds
        with tqdm(total=int(seconds), desc=stage.name, unit="s", leave=False, disable=not sys.stderr.isatty()) as bar:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                bar.update(int(seconds - end + time.monotonic()) - bar.n)
        return process.returncode is not None


def outcome(stage: Stage, in_time: bool, good: bool) -> str:
    """The state of a stage that has ended, in time or because it was told to; `good`: with exit code 0."""
    if in_time:
        return "done" if good else "failed"
    return "goes on" if stage.goes_on else "cut short" if good else "too long"


def stop(process: subprocess.Popen) -> None:
    """Ends a stage and all that it started: a word first, so that it saves; what outlives it shares no GPU. Nobody's
    impatience interrupts this."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
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
    for number, handler in before.items():
        signal.signal(number, handler)


def shown(words: list[str], env: dict[str, str]) -> str:
    """The command as a person would type it in the repository, without this machine's paths."""
    named = [f"{name}={shlex.quote(value)}" for name, value in env.items() if name != "PYTHON" and value]
    words = ["python" if word == sys.executable else word.replace(f"{ROOT}/", "") for word in words]
    return " ".join([*named, shlex.join(words)])


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def terminated(*_: Any) -> None:
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------------- the program


def check_place(config: GpuConfig) -> torch.device:
    """The GPU; for a rehearsal or a list, anything. Raises UserError where the figures would be of another machine, or
    nobody could say of which code."""
    device = find_device("auto")
    if config.list or config.rehearse:
        return device
    if device.type != "cuda":
        raise UserError("there is no GPU here: --rehearse --out=out/rehearsal runs the same stages at toy size")
    name = torch.cuda.get_device_name(device)
    if Path(config.out).resolve() == ROOT / "results/h200" and "H200" not in name:
        raise UserError(f"this GPU is a {name}: give its figures a folder of their own, --out=results/...")
    if environment(device)["git"] is None:
        raise UserError("there is no .git here: say which commit these files are, NANONORM_COMMIT=...")
    return device


def lacks(stage: Stage, config: GpuConfig) -> str:
    """What there is not for it here, and the remedy; empty if it can run."""
    if stage.needs_data and not Path(config.data, "meta.json").is_file():
        return f"there are no token shards in {config.data}: --help says how to make them"
    return f"it needs a package: pip install {stage.needs}" if stage.needs and not find_spec(stage.needs) else ""


def show(campaign: Campaign, stages: list[Stage]) -> None:
    """A line for each stage, and its command."""
    for stage in stages:
        last = campaign.attempts.get(stage.name, [{}])[-1]
        took = f", {last['seconds'] / 60:.1f} minutes" if last else f", {stage.minutes:g} minutes by estimate"
        words, env = filled_in(stage, campaign.config)
        print(f"{stage.name}: {last.get('state', 'not done')}{took}\n    {shown(words, env)}")


def make_tiny(target: Path) -> None:
    """A model of a few thousand random weights, as a run folder: what a rehearsal decodes and distils."""
    shape = GPTConfig(norm_type="rms", n_layer=2, n_head=2, n_embd=32, block_size=64, n_vocab=257)
    target.mkdir(parents=True, exist_ok=True)
    meta = {"tokenizer": "bytes", "vocab_size": 257}
    state = {"step": 0, "config": dataclasses.asdict(shape), "model": GPT(shape).state_dict(), "meta": meta}
    save_checkpoint(target / BEST, state)


def main(argv: list[str]) -> int:
    os.chdir(ROOT)
    config, _ = parse_args(GpuConfig, argv, __doc__)
    stages, device = chosen(config.stages), check_place(config)
    campaign = Campaign(config, device)
    if config.list:
        show(campaign, stages)
        return 0
    campaign.lock()
    for number in SIGNALS:
        signal.signal(number, terminated)
    if config.rehearse:
        make_tiny(config.scratch / "tiny")
    states, no_time = {}, []  # by stage; names of stages
    for number, stage in enumerate(stages, 1):
        if not config.stages and not campaign.is_left(stage):
            continue
        label = f"[{number}/{len(stages)}] {stage.name}"
        if reason := lacks(stage, config):
            print(f"{label}: left out: {reason}")
            states[stage.name] = "left out"
            continue
        seconds = campaign.seconds_for(stage)
        if not seconds:
            no_time.append(stage.name)
            continue
        print(f"{label}: about {campaign.minutes_of(stage):.1f} minutes, at most {seconds / 60:.1f}", flush=True)
        start = time.monotonic()
        state = states[stage.name] = campaign.run(stage, seconds)
        how = "stopped at its limit, to go on at the next call," if state == "goes on" else state
        print(f"{label}: {how} after {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
        if state == "interrupted":
            break
    if no_time:
        print(f"no time left for: {' '.join(no_time)}")
    rows = render(campaign.out)
    print(json.dumps({"stages": states, "targets": counted(rows), "out": config.out}))
    bad = {"failed", "too long"} | ({"left out"} if config.stages else set())
    return 130 if "interrupted" in states.values() else int(bool(bad & set(states.values())))


if __name__ == "__main__":
    run_program(main)
