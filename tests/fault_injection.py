"""Kill train.py and the data programs, or refuse what they write, and see whether they recover.

    python -m tests.fault_injection             at every call that changes a file (hours)
    python -m tests.fault_injection --points=3  at three calls of each program, always the same

A short run of a program meets its fault at one call that opens a file for writing, writes,
truncates, forces to the disk, renames, links, makes or removes (preload.c). Then the same command
runs again. It must end as the unbroken run: the same files and nothing else, the same log but for
times, the same weights, moments and plain values of each checkpoint to the last bit.

    kill    the process ends before the call, as by SIGKILL
    torn    half of a write is done, then the process is killed
    ENOSPC, EIO, EACCES  this one call fails
    full    from this call on the disk has no room

A call that fails ends the program with one error that names the path, and leaves checkpoints that
can be read and no half-written file; or the program can do without it.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from training.checkpoint import read_checkpoint

sys.path.append(str(Path(__file__).parent))  # as pytest has it
from helpers import BYTES, TINY, Job, same, write_items, write_tiny_shards

KILLS = ("kill", "torn")
MODES = (*KILLS, "ENOSPC", "EIO", "EACCES", "full")
TIMEOUT = 300.0  # seconds until a run counts as hanging, which ends everything

# What depends on the clock, or on who edits the repository meanwhile
CLOCK = {"tok_per_s", "mfu", "peak_bytes", "git"}
# A log without a checkpoint is put aside on purpose when its run begins again.
PUT_ASIDE = "log.jsonl.old"


class Fault(NamedTuple):
    """What happens, at which call of which rank."""

    mode: str
    point: int  # from 1
    rank: int


NONE = Fault("kill", 0, 0)


class Call(NamedTuple):
    """A call that changes a file, as preload.c describes it."""

    number: int
    name: str
    bytes: int
    needs_room: bool
    path: str

    def can_meet(self, mode: str) -> bool:
        if mode == "torn":
            return self.name == "write" and self.bytes > 1
        return mode != "full" or self.needs_room


@dataclass(frozen=True)
class Program:
    """A short run; FILES in its words is the folder where it writes and meets faults."""

    name: str
    module: str
    words: tuple[str, ...]
    ranks: int = 1


@dataclass(frozen=True)
class Ended:
    """What a start of a program led to; lists have one item a rank."""

    codes: list[int]
    texts: list[str]
    calls: list[list[Call]]
    state: dict[str, Any]  # path of each file -> what is compared of it

    @property
    def is_good(self) -> bool:
        return not any(code != 0 for code in self.codes)


def build(folder: Path) -> Path:
    """Compile preload.c into `folder`."""
    library, source = folder / "preload.so", Path(__file__).with_name("preload.c")
    command = ["gcc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


def programs(folder: Path) -> list[Program]:
    """Write what the programs read. Returns all programs under test."""
    data = write_tiny_shards(folder / "data", vocab=200, meta=BYTES)
    items = write_items(folder / "items.jsonl", 3)
    lines = ("the man sits under the table; the dog runs over it. " * 40).split(";")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    run = (*TINY, f"--data_dir={data}", "--out_dir=FILES/run", "--n_layer=1", "--n_embd=16")
    run += ("--eval_tokens=64", "--gradient_accumulation_steps=2", "--max_iters=4")
    run += ("--warmup_iters=1", "--eval_interval=2", "--dtype=float32", "--compile=False")
    fsdp = (*run, "--parallel=fsdp")
    own = ("--out_dir=FILES/shards", f"{folder / 'text.jsonl'}", "--tokenizer=bytes")
    return [
        Program(
            "train.py, one process", "train", (*run, "--sample_tokens=4", f"--hellaswag={items}")
        ),
        Program("train.py, DDP", "train", (*run, "--sample_tokens=4"), 2),
        Program("train.py, FSDP, one rank", "train", fsdp),
        Program("train.py, FSDP, two ranks", "train", fsdp, 2),
        Program("data/prepare.py", "data.prepare", (*own, "--shard_tokens=1000", "--processes=1")),
    ]


def start(program: Program, files: Path, fault: Fault = NONE) -> Ended:
    """Run a program with a fault, or without, to its end."""
    notes = files.with_name("notes")
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    words = tuple(word.replace("FILES", str(files)) for word in program.words)
    patch = ("fault_at", {"files": str(files), "trace": str(notes / "trace"), **fault._asdict()})
    job = Job(words, program.ranks, notes / "output", patch, program.module)
    codes = job.wait(TIMEOUT)
    texts = [path.read_text(errors="replace") for path in job.outputs]
    traces = [Path(f"{notes / 'trace'}.{rank}") for rank in range(program.ranks)]
    return Ended(codes, texts, [read_trace(path) for path in traces], state_of(files))


def read_trace(path: Path) -> list[Call]:
    """Read what preload.c noted of a rank."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        number, name, size, needs_room, where = line.split(" ", 4)
        found.append(Call(int(number), name, int(size), needs_room == "1", where))
    return found


# ----------------------------------------------------------------------------------- what is left


def state_of(files: Path) -> dict[str, Any]:
    """Read all files and empty folders, without what may differ between equal runs."""
    found = {}
    for path in files.rglob("*"):
        if path.name != PUT_ASIDE and (path.is_file() or not any(path.iterdir())):
            name = str(path.relative_to(files))
            # Of locks only that they are there.
            is_compared = path.is_file() and path.name != "lock"
            found[name] = content_of(path) if is_compared else None
    return found


def content_of(path: Path) -> Any:
    """Read one file."""
    if path.suffix == ".pt":
        state = read_checkpoint(path)  # whatever happens to a run, it can be read
        state["provenance"].pop("git", None)  # the code that wrote it
        return state
    if path.name == "log.jsonl":
        return events(path.read_text(errors="replace"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def events(log: str) -> list[dict]:
    """Read a log: all events but `resume`, without what depends on the clock."""
    found = []
    for line in log.splitlines():
        try:
            event = json.loads(line, object_hook=without_clock)
        except ValueError:
            event = {"event": f"torn: {line}"}
        if event["event"] != "resume":
            found.append(event)
    return found


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in CLOCK}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Name the files in which two states differ; "" if they do not."""
    names = [
        name
        for name in sorted(found.keys() | expected.keys())
        if not same(found.get(name, "absent"), expected.get(name, "absent"))
    ]
    return f"not as in the unbroken run: {', '.join(names)}" if names else ""


# -------------------------------------------------------------------------------------- one point


def problem_at(program: Program, files: Path, fault: Fault, whole: Ended) -> str:
    """Try one point. Returns what went wrong, or ""."""
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    ended = start(program, files, fault)
    if len(ended.calls[fault.rank]) < fault.point:
        return "not reached"
    if fault.mode not in KILLS and (found := problem_of_error(ended, files, whole)):
        return found
    if fault.mode in KILLS and ended.is_good:
        return "not killed"
    again = start(program, files)
    if not again.is_good:
        return f"the same command again ends with {again.codes}: {again.texts}"
    return difference(again.state, whole.state)


def problem_of_error(ended: Ended, files: Path, whole: Ended) -> str:
    """Look at a program whose call failed. Returns what is wrong, or ""."""
    expected = whole.state
    if ended.is_good:  # It could do without that call; what it could not remove may stay a while.
        return difference({name: ended.state.get(name) for name in expected}, expected)
    text = "\n".join(ended.texts)
    if "Traceback (most recent call last)" in text:
        return f"traceback: {text.splitlines()[-1]}"
    # A folder on the way to a file may stay.
    known = expected.keys() | {str(parent) for name in expected for parent in Path(name).parents}
    if rubble := ended.state.keys() - known:
        return f"rubble: {', '.join(sorted(rubble))}"
    errors = re.findall("^error: .*", text, re.MULTILINE)
    if len(errors) > len(ended.codes) or not any(str(files) in line for line in errors):
        return f"no one error names the path: {errors}"
    return ""


def try_program(program: Program, files: Path, limit: int) -> bool:
    """Try the points of a program, or `limit` of them, and print what failed. Did none fail?"""
    files.mkdir(parents=True)
    whole = start(program, files)
    assert whole.is_good, whole
    points = [
        Fault(mode, call.number, rank)
        for mode in MODES
        for rank, calls in enumerate(whole.calls)
        for call in calls
        if call.can_meet(mode)
    ]
    chosen = random.Random(program.name).sample(points, min(limit or len(points), len(points)))
    failed = 0
    for fault in chosen:
        if problem := problem_at(program, files, fault, whole):
            failed += 1
            call = whole.calls[fault.rank][fault.point - 1]
            print(f"{program.name}: {fault} {call}: {problem}", flush=True)
    record = {"program": program.name, "of": len(points), "points": len(chosen), "failed": failed}
    print(json.dumps(record), flush=True)
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_injection")
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--points", type=int, default=0, help="points of each program (0: all)")
    options = parser.parse_args()
    memory = "/dev/shm"  # where fsync takes no time
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=place) as name:
        folder = Path(name).resolve()
        os.environ["LD_PRELOAD"] = str(build(folder))  # of the server that forks the runs
        chosen = [one for one in programs(folder) if one.name.startswith(options.only)]
        good = [
            try_program(one, folder / str(number) / "files", options.points)
            for number, one in enumerate(chosen)
        ]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
