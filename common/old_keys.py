"""Config keys of older runs, in the spelling of today.

Checkpoints and logs keep the config of their run. Where a key was renamed or has got new values,
its old value is translated here, so that an older run means what it meant.
"""

from typing import Any

from common.norm_file import check_none_is_named

# (key, value) of older runs -> those of today. None stands for any value, which stays.
SPELLINGS = {
    # Once a bool: RMSNorm over the channels of each head, or none.
    ("qk_norm", True): ("qk_norm", "head"),
    ("qk_norm", False): ("qk_norm", None),
    ("norm_affine", True): ("norm_gain", "plain"),
    ("norm_affine", False): ("norm_gain", "none"),
    ("wandb", "online"): ("tracker", "wandb"),
    ("wandb", "offline"): ("tracker", "wandb"),
    ("wandb_project", None): ("tracker_project", None),
}
# Keys that are gone, and their old defaults: what every run of today does.
RETIRED = {
    "qk_gain": True,
    "v_norm": None,
    "decay_gains": None,
    "compile_mode": "default",
    "hellaswag_interval": 0,
    "wandb": "off",
}
# Norm types whose recipe came later: once alpha of dyt was 0.5 everywhere, and the embeddings were
# not scaled.
OLD_RECIPES = {"dyt": "common"}

# Keys that a run chooses a value for, and their values that say so.
AUTO = {"dtype": "auto", "compile": None, "merge_micro_batches": 0}


def device_kind(name: str) -> str:
    """Return cpu, mps or cuda for a device as a run's provenance names it."""
    return next((kind for kind in ("cpu", "mps") if name.startswith(kind)), "cuda")


def by_device(kind: str) -> dict[str, Any]:
    """Return what the keys of AUTO stand for where the kind of device alone decides."""
    on_gpu = kind == "cuda"
    return {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu,
        "merge_micro_batches": 1,
    }


def chosen_then(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Return a saved config with what its run took for keys that are at auto.

    Runs log what they have chosen. Older ones logged `auto` itself, which went by the device alone,
    and had no `jobs`.

    Args:
        config: of a checkpoint or a log.
        device: as its provenance names it.
    """
    config = {"jobs": 1, **config}
    meant = by_device(device_kind(device))
    open_keys = [key for key, auto in AUTO.items() if config.get(key, auto) == auto]
    return config | {key: meant[key] for key in open_keys}


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config, or a part of one, with today's keys and values.

    Keys that the config lacks stay absent: their defaults are what older programs did, but for
    norm_recipe, which older dyt runs did not have. Keys of RETIRED stay: whoever builds a model or
    resumes a run looks at their values.

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
