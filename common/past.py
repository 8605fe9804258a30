"""The past: what older logs and checkpoints wrote, as it is called and done today.

A commit beside an entry is the one that ended it: runs from before it wrote the old form. The entry
can go when nobody reads such runs any more; the archives below results/ are read. Formats of
nanoGPT: common/nanogpt.py.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.auto import AUTO, by_device, device_kind
from common.errors import CheckpointError, UserError
from common.norm_file import check_none_is_named

# --------------------------------------------------------------------------------- keys of a config

# (key, value) of older runs -> those of today. None stands for any value, which stays.
SPELLINGS = {
    # Once a bool: RMSNorm over the channels of each head, or none.
    ("qk_norm", True): ("qk_norm", "head"),  # 8bcb1ab
    ("qk_norm", False): ("qk_norm", None),  # 8bcb1ab
    ("norm_affine", True): ("norm_gain", "plain"),  # 8bcb1ab
    ("norm_affine", False): ("norm_gain", "none"),  # 8bcb1ab
    ("wandb", "online"): ("tracker", "wandb"),  # 6789f67
    ("wandb", "offline"): ("tracker", "wandb"),  # 6789f67
    ("wandb_project", None): ("tracker_project", None),  # 6789f67
}
# Keys that are gone, and their old defaults: what every run of today does.
RETIRED = {
    "qk_gain": True,  # 6789f67
    "v_norm": None,  # c1e8207
    "decay_gains": None,  # c1e8207
    "compile_mode": "default",  # 6789f67
    "hellaswag_interval": 0,  # 6789f67
    "wandb": "off",  # 6789f67
}
# Norm types whose recipe came later: once alpha of dyt was 0.5 everywhere, and the embeddings were
# not scaled.
OLD_RECIPES = {"dyt": "common"}  # 8bcb1ab
# What a program did that does not have the key: not yet, or no more.
BEFORE_THE_KEY = {
    **RETIRED,
    "residual": "float32",  # f858277
    "optimizer": "adamw",  # 6edc157
    "decay_per_step": 0.0,  # 6edc157
    "rope_scaling_kind": "llama3",  # 7649d91
    "window": 0,  # 7649d91
    "local_blocks": "",  # 7649d91
    "local_rope_theta": 0.0,  # 7649d91
    "attn_scale": 0.0,  # 7649d91
    "embed_scale": 1.0,  # 7649d91
    "study": "",  # 53aae68
    "planned_seeds": 0,  # 53aae68
}
# The same of what a log's start event tells beside the config.
BEFORE_THE_ENTRY = {"float32_products": "highest"}  # 21cd4c0
# Norm keys and their defaults, for logs that do not record them (until fab6a2d): those of every
# norm type (""), and those that one norm type adds.
OLD_NORM_KEYS: dict[str, dict[str, Any]] = {
    "": {
        "norm_plan": "",
        "norm_eps": 1e-5,
        "norm_affine": True,
        "qk_norm": False,
        "kernels": "auto",
    },
    "rms": {"rms_fraction": 1.0, "norm_groups": 1, "rms_bias": False},
    "coupled": {
        "coupled_first": 0,
        "coupled_span": 1,
        "coupled_alpha": 1.0,
        "coupled_calibrate": 0,
        "coupled_grad": "detach",
        "coupled_impl": "scale",
    },
    "taper": {
        "taper_base": "rms",
        "taper_warmup": 0.5,
        "taper_end": 0.75,
        "taper_fit": "norm",
        "taper_final": False,
        "taper_anchor": 0.0,
    },
}


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config, or a part of one, with today's keys and values.

    Keys that the config lacks stay absent: their defaults are what older programs did, but for
    norm_recipe, which older dyt runs did not have. Keys of RETIRED stay: whoever builds a model or
    resumes a run looks at their values (check_retired).

    Raises:
        ConfigError: it names a norm file, which no run saves: code never runs because of it.
    """
    check_none_is_named(config)
    # In the order of the saved keys, in which report.py names an arm.
    config = dict(_translated(name, value) for name, value in config.items())
    for norm_type, recipe in OLD_RECIPES.items():
        if config.get("norm_type") == norm_type:
            config.setdefault("norm_recipe", recipe)
    return config


def _translated(name: str, value: Any) -> tuple[str, Any]:
    """Return one key with today's name and value."""
    for (old, given), today in SPELLINGS.items():
        if name == old and given is None:
            return today[0], value
        if name == old and given == value:
            return today
    return name, value


def chosen_then(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Return a saved config with what its run took for keys that are at auto.

    Runs log what they have chosen. Those from before 2e99114 logged `auto` itself, which went by
    the device alone; those from before 8485d86 had no `jobs`.

    Args:
        config: of a checkpoint or a log.
        device: as its provenance names it.
    """
    config = {"jobs": 1, **config}
    meant = by_device(device_kind(device))
    open_keys = [key for key, auto in AUTO.items() if config.get(key, auto) == auto]
    return config | {key: meant[key] for key in open_keys}


def check_retired(saved: dict[str, Any], config: Any, path: Path, names: Iterable[str]) -> None:
    """Check that no key that is gone had a value which the model or run of today cannot have.

    Args:
        saved: a config of as_today.
        config: a GPTConfig of today.
        path: of the checkpoint.
        names: of the keys, in RETIRED.

    Raises:
        CheckpointError: names the key.
    """
    meant = {"v_norm": config.has_v_norm, "decay_gains": config.decays_gains}
    for name in names:
        value = saved.get(name)
        if value not in (None, RETIRED[name], meant.get(name)):
            raise CheckpointError(
                f"{path}: {name}={value!r} in its config, a key that is gone: use commit d806d57, "
                "which has it, or another checkpoint"
            )


# -------------------------------------------------------------------------- tensors of a checkpoint

PLACE = re.compile(r"((?:blocks\.\d+\.norm[12]|norm_f|norm_e)\.)(.+)")
PARTS = ("norm", "output", "reader", "anchor")  # of a Place


def name_today(name: str, config: dict[str, Any]) -> str:
    """Return the name of a parameter or buffer of a model of `config`; today's stay as they are.

    Until ad08f86 the norm of a place had its parameters in the place itself: norm1.weight. Beside
    an output norm it was called `input`, where it replaced the stream `base`.
    """
    found = PLACE.fullmatch(name)
    if found is None:
        return name
    place, part = found.groups()
    first, _, rest = part.partition(".")
    if first in PARTS and rest:
        return name
    # The base of a taper keeps its name: it is within the norm.
    if first == "input" or (first == "base" and config.get("norm_type") != "taper"):
        part = rest
    return f"{place}norm.{part}"


def check_whole(state: dict[str, Any], path: Path) -> None:
    """Raise UserError for a checkpoint of FSDP that is a folder of shards, as until a88e4da."""
    if "shards" in state:
        raise UserError(
            f"{path}: its tensors are in a folder next to it: merge them first, with commit "
            f"d806d57 (`python -m training.checkpoint {path.parent}` there)"
        )


def moments_by_name(
    saved: dict[str, Any], names: list[str], parameters: dict[str, Any], optimizer: Any
) -> dict[str, dict[str, Any]]:
    """Give the moments of checkpoint format 1, which have numbers, the names of their parameters.

    Format 2 came with a88e4da. AdamW numbered the parameters that decay, then the others. Muon had
    a list of momenta. Both were in the order that the model had then, which need not be today's.

    Args:
        saved: the checkpoint's `optimizer`.
        names: those in its `model`, in their order there, as they are called today.
        parameters: those of today's optimiser, by name.
        optimizer: today's, of training/optim.py.
    """
    groups = []  # names for each group of the optimiser; those of buffers are in none
    for group in optimizer.param_groups:
        members = set(group["params"])
        groups.append([name for name in names if parameters.get(name) in members])
    found = {}
    if "momenta" in saved:
        momenta = list(saved["momenta"])
        for name in groups.pop(0):
            found[name] = {key: momenta.pop(0) for key in optimizer.state[parameters[name]]}
        saved = saved["adamw"]
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group) for group in groups]:
        raise ValueError("groups of other parameters")
    by_number = [name for group in groups for name in group]
    for number, moments in saved["state"].items():
        found[by_number[number]] = moments
    return found
