"""The one front door to a model: `load_model(spec)`; `init_from(model, spec)` for a run that begins
with its weights.

A spec is a run folder (its best checkpoint), a checkpoint file, a Hugging Face folder or hub name
(owner/name), or `random:` and a published shape (hf/config.py).
"""

from dataclasses import asdict
from pathlib import Path

import torch.nn.functional as F

from common.errors import CheckpointError
from hf.config import random_model
from hf.hub import HUB_NAME, resolve_hub
from hf.weights import load_hf
from model import GPT
from training.checkpoint import (
    BEST,
    DISTILLING,
    LAST,
    check_same_model,
    load_weights,
    model_config,
    read_checkpoint,
)

# Keys that change what the same tensors compute.
SAME_FUNCTION = (
    "bias",
    "n_head",
    "n_kv_head",
    "head_dim",
    "activation",
    "position",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
)
# norm type -> what tapers it away
TAPER_BASE = {"layer": "layer", "cbwc": "layer", "rms": "rms", "coupled": "rms"}
NORM_NAMES = r"(blocks\.\d+\.norm[12]|norm_f)\..*"  # tensors of the 2L + 1 norms


def load_model(spec: str) -> GPT:
    """The model that `spec` names, on the CPU, in eval mode; `model.meta` says which tokenizer it
    has.

    Raises CheckpointError or HFError.
    """
    if spec.startswith("random:"):
        return random_model(spec.removeprefix("random:"))
    path = Path(spec)
    if not path.exists() and HUB_NAME.fullmatch(spec):
        return load_hf(resolve_hub(spec))
    if path.is_dir():
        names = [name for name in (BEST, LAST) if (path / name).exists()]
        if not names and any(path.glob("*.safetensors*")):
            return load_hf(path)
        if not names and (path / DISTILLING).exists():
            raise CheckpointError(
                f"{spec}: its distillation has not finished: the same distill.py command goes on"
            )
        if not names:
            raise CheckpointError(
                f"{spec}: no {BEST}, no {LAST} and no safetensors in this folder: check the path"
            )
        path = path / names[0]
    state = read_checkpoint(path)
    model = GPT(model_config(state["config"], path))
    load_weights(model, state["model"], path)
    model.meta = state.get("meta", {})
    return model.eval()


def init_from(model: GPT, spec: str) -> str:
    """Give `model` the weights of the model that `spec` names; a sentence about it.

    Only the norms may be of another type, and the padded vocabulary smaller. Raises CheckpointError
    otherwise.
    """
    source = load_model(spec)
    check_same_model(asdict(source.config), model.config, Path(spec), SAME_FUNCTION)
    theirs = {**TAPER_BASE, "taper": source.config.taper_base}.get(source.config.norm_type)
    if model.config.norm_type == "taper" and theirs and theirs != model.config.taper_base:
        raise CheckpointError(
            f"{spec} has norm_type={source.config.norm_type}, and this run tapers taper_base="
            f"{model.config.taper_base} away: add --taper_base={theirs}"
        )
    weights, own = source.state_dict(), model.state_dict()
    for name in {"wte.weight", "lm_head.weight"} & weights.keys() & own.keys():
        more = len(own[name]) - len(weights[name])  # padded rows: no token reads them
        weights[name] = F.pad(weights[name], (0, 0, 0, max(0, more)))
    new, dropped = load_weights(model, weights, Path(spec), free=NORM_NAMES)
    counts = (
        f"; of its norms' tensors {len(dropped)} are left out and {len(new)} are new"
        if new or dropped
        else ""
    )
    return f"weights of {spec}{counts}"
