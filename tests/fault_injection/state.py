"""What a run has left in its folder, in a form that can be compared."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from evidence import archive
from training.checkpoint import read_checkpoint

# What depends on the clock, or on who edits the repository meanwhile
CLOCK = {"tok_per_s", "mfu", "peak_bytes", "git"}
# Locks and the output of programs: only whether they are there is compared.
NAMES_ONLY = {"lock", "claim", "train.txt"}
# A log without a checkpoint is put aside on purpose when its run begins again (training/log.py).
PUT_ASIDE = "log.jsonl.old"
OWN = {"git"}  # of a checkpoint: the code that wrote it
LEFT = "left over"

State = dict[str, Any]  # path below the folder -> its content


def names_in(folder: Path) -> set[str]:
    """List the files and empty folders below `folder`."""
    found = set()
    for path in folder.rglob("*"):
        is_empty = path.is_dir() and not any(path.iterdir())
        if (path.is_file() or is_empty) and path.name != PUT_ASIDE:
            found.add(str(path.relative_to(folder)))
    return found


def state_of(folder: Path) -> State:
    """Read everything below `folder`, without what may differ between equal runs."""
    found: State = dict.fromkeys(names_in(folder))
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name in found and path.is_file() and path.name not in NAMES_ONLY:
            found[name] = content_of(path)
    return found


def content_of(path: Path) -> Any:
    """Read one file."""
    if path.suffix == ".pt":
        try:
            return comparable(read_checkpoint(path))
        except UserError as error:
            return f"not readable: {error}"
    if path.name == "log.jsonl":
        return events(path.read_bytes())
    if path.name.endswith(".tar.xz"):
        members = archive.read(path).items()
        return {
            name: events(part) if name.endswith("log.jsonl") else part for name, part in members
        }
    return hashlib.sha256(path.read_bytes()).hexdigest()


def events(log: bytes) -> list[Any]:
    """Read a log: all events but `resume`, without what depends on the clock."""
    found = []
    for line in log.decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            found.append(f"torn: {line}")
            continue
        if event["event"] != "resume":
            found.append(without_clock(event))
    return found


def without_clock(value: Any) -> Any:
    """Remove the entries of CLOCK at any depth."""
    if isinstance(value, dict):
        return {name: without_clock(part) for name, part in value.items() if name not in CLOCK}
    return value


def comparable(value: Any) -> Any:
    """Replace tensors by their bits."""
    if isinstance(value, torch.Tensor):
        bits = np.ascontiguousarray(value.detach().cpu().numpy()).tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest()
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items() if name not in OWN}
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    return value


def difference(found: State, expected: State) -> str:
    """Say in which way a state differs; "" if it does not."""
    if extra := sorted(found.keys() - expected.keys()):
        return f"{LEFT}: {', '.join(extra)}"
    if missing := sorted(expected.keys() - found.keys()):
        return f"missing: {', '.join(missing)}"
    for name in sorted(expected):
        if found[name] != expected[name]:
            return f"{name} differs{_where(found[name], expected[name])}"
    return ""


def _where(found: Any, expected: Any) -> str:
    """Name the first part in which two values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in sorted({*found, *expected}, key=str):
            if found.get(name) != expected.get(name):
                return f", {name}{_where(found.get(name), expected.get(name))}"
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f": {len(found)} items, not {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours != theirs:
                return f", item {index}{_where(ours, theirs)}"
    return f": {found!r:.100}, not {expected!r:.100}"
