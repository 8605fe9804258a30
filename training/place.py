"""Where a run trains: its data, the number of ranks, the device, the versions, the commit.

The log and each checkpoint keep it, and whoever goes on with a run compares: other data would be
another experiment and is refused; all else is told, and report.py leaves the run out.
"""

import json
from pathlib import Path
from typing import Any

from common.distributed import Ranks
from common.environment import environment, is_same_code
from common.errors import CheckpointError
from common.fingerprint import data_difference

# Not compared: clocks differ from minute to minute, and the data have a check of their own.
NOT_COMPARED = ("versions", "clocks", "data")
# What is read of it, if it is there
KINDS = {
    "data": str | None,
    "world_size": int | None,
    "git": str | None,
    "versions": dict | None,
    "device": str | None,
}


def find_place(data: str, ranks: Ranks) -> dict[str, Any]:
    """Where this process trains, on data of this fingerprint."""
    return {"data": data, "world_size": ranks.world_size, **environment(ranks.device)}


def saved_place(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Where the run of the checkpoint `path` trained: as the checkpoint tells it; of an older one,
    as the log beside it does; {} where neither knows. Raises CheckpointError for what is no place.
    """
    place = state.get("place")
    if place is None:
        place = _logged_place(path.with_name("log.jsonl"))
    if not isinstance(place, dict) or not all(
        isinstance(place.get(name), kinds) for name, kinds in KINDS.items()
    ):
        raise CheckpointError(
            f"{path}: a PyTorch file, but not a nanonorm checkpoint: what it says of its place is "
            "damaged"
        )
    return place


def _logged_place(path: Path) -> dict[str, Any]:
    """What the first event of a log tells about the place, {} where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as log:
            start = json.loads(log.readline())
        return start if start["event"] == "start" else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_same_data(then: dict[str, Any], now: dict[str, Any], path: Path, remedy: str) -> None:
    """Raise CheckpointError if the run of the checkpoint `path` has seen other data."""
    if then.get("data") and (difference := data_difference(then["data"], now["data"])):
        raise CheckpointError(f"{path} was trained on other data ({difference}): {remedy}")


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between the place in which a run was saved and this one, as "torch 2.11.0 ->
    2.13.0".

    What the older one does not tell, and commits that differ in no code, are left out.
    """
    then, now = ({**place, **(place.get("versions") or {})} for place in (then, now))
    names = [
        name
        for name in now
        if name in then and name not in NOT_COMPARED and then[name] != now[name]
    ]
    if "git" in names and is_same_code(then["git"], now["git"]):
        names.remove("git")
    return [f"{name} {then[name]} -> {now[name]}" for name in names]
