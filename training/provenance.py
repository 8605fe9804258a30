"""Where a run trains: its data, the number of ranks, the device, the versions, the commit.

The log and each checkpoint keep the provenance, and a run that is resumed compares it. Other data
would be another experiment, and are refused. Every other change is noted in the log, and report.py
leaves the run out.
"""

import json
from pathlib import Path
from typing import Any

from common.distributed import Ranks
from common.environment import environment, is_same_code
from common.errors import CheckpointError
from common.fingerprint import data_difference
from common.old_keys import as_today, chosen_then

# Entries that are compared, and their types; versions are compared too, one by one. An older one
# may lack some.
COMPARED = {
    "git": str,
    "world_size": int,
    "device": str,
    "processor": str,
    "float32_products": str,
}


def find_provenance(data: str, ranks: Ranks) -> dict[str, Any]:
    """Describe where this process trains.

    Args:
        data: the fingerprint of its data.
        ranks: the processes of the run.

    Raises:
        UserError: ranks see different data; on every rank.
    """
    ranks.check_same(data, "ranks see different data: copy the same to each machine")
    return {"data": data, "world_size": ranks.world_size, **environment(ranks.device)}


def saved_provenance(state: dict[str, Any]) -> dict[str, Any]:
    """Return where the run of a checkpoint trained, without entries of a wrong type.

    {} if the checkpoint does not say.
    """
    found = state.get("provenance", {})
    # A checkpoint may come from elsewhere, so each entry's type is checked.
    kinds = {"data": str, "versions": dict, **COMPARED}
    return {name: found[name] for name, kind in kinds.items() if type(found.get(name)) is kind}


def config_then(state: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the config of a checkpoint's run, with what that run took for keys that are at auto.

    Args:
        state: the checkpoint.
        device: where the run was, if the checkpoint does not say.
    """
    place = saved_provenance(state).get("device", device)
    return chosen_then(state["config"], place)


def check_same_data(then: dict[str, Any], now: dict[str, Any], path: Path, remedy: str) -> None:
    """Check that the run of the checkpoint `path` has seen the same data.

    Raises:
        CheckpointError: it has seen other data. `remedy` is part of the message.
    """
    if not then.get("data"):
        return
    difference = data_difference(then["data"], now["data"])
    if difference:
        raise CheckpointError(f"{path} was trained on other data ({difference}): {remedy}")


def changed_keys(then: dict[str, Any], now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """List the keys that differ between two configs, as "max_iters 40 -> 45".

    Left out: data_dir and device, if the older provenance `saved` tells the data and the real
    device, which are compared instead.
    """
    # Through JSON, so that a tuple equals a list of the same numbers.
    then = json.loads(json.dumps(as_today(then)))
    now = json.loads(json.dumps(now))
    compared = {"data_dir": "data", "device": "device"}
    names = [name for name in sorted(now.keys() & then.keys()) if now[name] != then[name]]
    names = [name for name in names if compared.get(name) not in saved]
    return [f"{name} {then[name]} -> {now[name]}" for name in names]


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what has changed between two provenances, as "torch 2.11.0 -> 2.13.0".

    Left out: what the older one does not tell, and commits between which training did not change.
    """
    names = [name for name in COMPARED if name in then and name in now and then[name] != now[name]]
    # Another commit is a change only if the code that trains has changed between the two.
    if "git" in names and is_same_code(then["git"], now["git"]):
        names.remove("git")
    found = [f"{name} {then[name]} -> {now[name]}" for name in names]
    old = then.get("versions", {})
    new = now.get("versions", {})
    packages = [name for name in new if name in old and old[name] != new[name]]
    return found + [f"{name} {old[name]} -> {new[name]}" for name in packages]
