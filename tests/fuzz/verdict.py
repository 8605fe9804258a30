"""Say what is wrong with what a case did; "" if nothing is.

A fault is
- a traceback, or an exit code other than 0, 1, 2 and 130;
- a run that neither ends in time nor, where its keys mean a long run, at Ctrl-C;
- an error that is not one last line `error: ...`, or that names neither a key of the case, nor a
  value, nor the memory that was asked for;
- nonsense that is taken, which is: exit code 0 though a number that was written (JSON on stdout, a
  JSON file, a checkpoint's tensor) is not finite; though a training run has no log that ends with
  `done` after all its steps; though config.json holds another value than was given; or though a
  file or folder that --out names is not there.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.cases import Case
from tests.fuzz.execute import Outcome
from tests.fuzz.programs import Program

CODES = (0, 1, 2, 130)
# What an error may name instead of a key: where a run of valid keys fails, it is these.
THINGS = ("memory", "is not finite", "in the input", "make room")
LONGEST = 1200  # characters of an error line
# Programs whose exit 0 is a finished training run.
TRAINING = ("train", "distill")


def fault(program: Program, case: Case, outcome: Outcome, folder: Path) -> str:
    """Return what is wrong, in one line, or ""."""
    if "Traceback (most recent call last)" in outcome.stderr:
        return f"traceback: {outcome.stderr.strip().splitlines()[-1][:200]}"
    if outcome.interrupted:
        return _long_run(program, case, outcome)
    if outcome.code not in CODES:
        return f"exit code {outcome.code}"
    if outcome.code:
        return _error_line(program, case, outcome)
    # What follows claim's command is the command's own.
    if program.name != "claim" and ("--help" in case.argv or "-h" in case.argv):
        return "" if outcome.stdout else "no help"
    return _nonsense(program, case, outcome, folder)


def _long_run(program: Program, case: Case, outcome: Outcome) -> str:
    if not program.is_long(case.names):
        return f"hangs: not done after {outcome.seconds:.0f} s"
    # A second Ctrl-C ends a process by the signal.
    if outcome.code not in (*CODES, -2):
        return f"a long run that Ctrl-C does not end: exit code {outcome.code}"
    return ""


def _error_line(program: Program, case: Case, outcome: Outcome) -> str:
    lines = outcome.stderr.rstrip("\n").split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or lines[-1] != errors[0]:
        return f"exit code {outcome.code} without one last line `error: ...`: {lines[-1][:200]!r}"
    line = errors[0]
    if not line.isprintable():
        return f"the error line has control characters: {line[:200]!r}"
    if len(line) > LONGEST:
        return f"the error line has {len(line)} characters"
    # It may name another key, which contradicts those of the case.
    names_a_setting = re.search(r"\b[a-z_]+=\S", line)
    names_a_part = any(part.lower() in line.lower() for part in _parts(program, case))
    if not names_a_setting and not names_a_part:
        return f"the error names neither key nor value: {line[:300]}"
    return ""


def _parts(program: Program, case: Case) -> Iterator[str]:
    """Yield what an error may name: keys, changed arguments, their values, the config file."""
    yield from (*THINGS, *case.names)
    words = list(set(case.argv) - set(program.base))
    if case.config is not None:
        words += re.findall(r"""["'](.+?)["']""", case.config.decode("latin-1"), re.DOTALL)
    for word in words:
        if word.endswith(":"):
            yield "''"
        value = word.partition("=")[2]
        for part in (word, value, *value.split(","), word.rpartition(":")[2]):
            if part.strip("/"):
                # As paths are shown, and as an error line shows what cannot be printed.
                yield part.rstrip("/")[:30]
                yield _escaped(part)[:30]


def _escaped(text: str) -> str:
    """Return `text` with an escape in the place of each character that does not print."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


# ---------------------------------------------------------------------------------------- nonsense


def _nonsense(program: Program, case: Case, outcome: Outcome, folder: Path) -> str:
    last = outcome.stdout.rstrip("\n").rpartition("\n")[2]
    if last.startswith("{") and (wrong := _not_finite(last)):
        return f"exit code 0, and stdout has {wrong}"
    for path in _written(folder):
        if path.suffix in (".json", ".jsonl") and (wrong := _in_file(path)):
            return f"exit code 0, and {path.relative_to(folder)} has {wrong}"
        if path.suffix == ".pt" and (wrong := _in_checkpoint(path)):
            return f"exit code 0, and {path.relative_to(folder)} has {wrong}"
    settings = _settings(case)
    out = settings.get("out")
    if out and case.config is None and not (folder / out).exists():
        return f"exit code 0, and out={out[:80]!r} is not there"
    is_estimate = settings.get("estimate", "False") in ("", "True", "true")
    if program.name in TRAINING and not is_estimate:
        return _not_trained(program, case, folder, settings)
    return ""


def _settings(case: Case) -> dict[str, str]:
    words = [word.removeprefix("--").partition("=") for word in case.argv if word.startswith("--")]
    return {name: value for name, _, value in words}


def _written(folder: Path) -> Iterator[Path]:
    """Yield the regular files that a case wrote."""
    for path in folder.rglob("*"):
        given = path.relative_to(folder).parts[0]
        if given not in GIVEN and path.is_file() and not path.is_symlink():
            yield path


# What world.py puts there; report.py writes a picture into a run, no number.
GIVEN = ("data", "run", "runs", "folder", "binary.jsonl", "torn.jsonl", "empty.jsonl")


def _refuse(name: str) -> None:
    raise OverflowError(name)


def _not_finite(text: str) -> str:
    """Return the first number in a line of JSON that is not finite, or ""."""
    try:
        json.loads(text, parse_constant=_refuse)
    except OverflowError as error:
        return str(error)
    except ValueError as error:
        return f"a line that is not JSON ({error})"
    return ""


def _in_file(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return next(filter(None, map(_not_finite, lines)), "")


def _in_checkpoint(path: Path) -> str:
    state = torch.load(path, weights_only=True)
    for name, tensor in _tensors(state):
        if not torch.isfinite(tensor).all():
            return f"{name} that is not finite"
    return ""


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}")


def _not_trained(program: Program, case: Case, folder: Path, settings: dict[str, str]) -> str:
    # A run may also go to a folder that was there.
    logs = {path for path in _written(folder) if path.name == "log.jsonl"}
    named = folder / settings.get("out_dir", "") / "log.jsonl"
    logs = list(logs | ({named} if named.exists() else set()))
    if len(logs) != 1:
        return f"exit code 0, and {len(logs)} runs are there"
    events = [json.loads(line) for line in logs[0].read_text().splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    if len(ends) != 1 or ends[0].get("reason") != "done":
        return f"exit code 0, and the run's end is {ends}"
    config = json.loads((logs[0].parent / "config.json").read_text())
    # distill.py's config.json is that of its student, which has other keys.
    is_own = program.name == "train"
    steps = config.get("max_iters", int(settings.get("max_iters") or 0))
    done = [event["step"] for event in events if event["event"] == "step"]
    if max(done, default=0) != steps:
        return f"exit code 0 after step {max(done, default=0)} of {steps}"
    return _not_kept(case, config, settings) if is_own else ""


def _not_kept(case: Case, config: dict[str, Any], settings: dict[str, str]) -> str:
    """Compare numbers of the command line with those in config.json."""
    for name in set(case.names) & set(config):
        kept = config[name]
        text = settings.get(name, "")
        if type(kept) not in (int, float) or not re.fullmatch(r"-?[\d.]+(e-?\d+)?", text):
            continue
        # vocab_size and n_vocab of 0 are filled in from the data.
        if not math.isclose(kept, float(text), rel_tol=1e-12) and float(text):
            return f"exit code 0, and {name}={text} became {kept}"
    return ""
