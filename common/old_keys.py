"""Config keys of older runs, in the spelling of today.

Checkpoints and logs keep the config of their run. Where a key was renamed or has got new values,
its old value is translated here, so that an older run means what it meant.
"""

from typing import Any


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """Return a saved config, or a part of one, with today's keys and values.

    Keys that the config lacks stay absent: their defaults are what older programs did, but for
    norm_recipe, which older dyt runs did not have.
    """
    config = dict(config)
    # Once a bool: RMSNorm over the channels of each head, or none.
    if isinstance(config.get("qk_norm"), bool):
        config["qk_norm"] = "head" if config["qk_norm"] else None
    # Replaced by norm_gain.
    if "norm_affine" in config:
        config.setdefault("norm_gain", "plain" if config.pop("norm_affine") else "none")
    # Once alpha was 0.5 everywhere, and the embeddings were not scaled.
    if config.get("norm_type") == "dyt":
        config.setdefault("norm_recipe", "common")
    return config
