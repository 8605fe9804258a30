"""Load models: `load_model(spec)`, and `init_from(model, spec)` for a run that starts from weights.

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
    "output_eps",
)
# norm type of a source -> the taper_base of a run that starts from it
TAPER_BASE = {"layer": "layer", "cbwc": "layer", "rms": "rms", "coupled": "rms"}
# Names of tensors of the 2L + 1 norms.
NORM_NAMES = r"(blocks\.\d+\.norm[12]|norm_f)\..*"


def load_model(spec: str) -> GPT:
    """Load the model that `spec` names, on the CPU and in eval mode.

    `model.meta` names its tokenizer. Raises CheckpointError or HFError.
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
        if not names:
            raise _no_model_in(path)
        path = path / names[0]
    state = read_checkpoint(path)
    model = GPT(model_config(state["config"], path))
    load_weights(model, state["model"], path)
    model.meta = state.get("meta", {})
    return model.eval()


def _no_model_in(folder: Path) -> CheckpointError:
    """Make the error for a folder without a model."""
    if (folder / DISTILLING).exists():
        return CheckpointError(
            f"{folder}: its distillation has not finished: the same distill.py command continues it"
        )
    return CheckpointError(
        f"{folder}: no {BEST}, no {LAST} and no safetensors in this folder: check the path"
    )


def init_from(model: GPT, spec: str) -> str:
    """Give `model` the weights of the model that `spec` names.

    Only the norms may be of another type, and the padded vocabulary smaller.

    Returns:
        A line about it, for people.

    Raises:
        CheckpointError: the two differ in more.
    """
    source = load_model(spec)
    check_same_model(asdict(source.config), model.config, Path(spec), SAME_FUNCTION)
    _check_taper_base(source, model, spec)
    _check_norm_kinds(source, model, spec)
    weights = source.state_dict()
    own = model.state_dict()
    for name in {"wte.weight", "lm_head.weight"} & weights.keys() & own.keys():
        more = len(own[name]) - len(weights[name])  # rows of padding: no token reads them
        weights[name] = F.pad(weights[name], (0, 0, 0, max(0, more)))
    new, dropped = load_weights(model, weights, Path(spec), free=NORM_NAMES)
    note = f"weights of {spec}"
    if new or dropped:
        note += f"; of its norms' tensors {len(dropped)} are left out and {len(new)} are new"
    return note


def _check_norm_kinds(source: GPT, model: GPT, spec: str) -> None:
    """Raise CheckpointError if gains or norms within attention would mean something else."""
    kinds = {
        "qk_norm": (source.plan.qk_kind, model.plan.qk_kind),
        "v_norm": (source.plan.has_v_norm, model.plan.has_v_norm),
    }
    gains = (source.config.norm_gain, model.config.norm_gain)
    if "none" not in gains:  # else no gain is loaded, and those of the model are 1
        kinds["norm_gain"] = gains
    for name, (then, now) in kinds.items():
        if then != now:
            raise CheckpointError(
                f"{spec} is of another model: {name}={then} there, {now} here: add --{name}={then}"
            )


def _check_taper_base(source: GPT, model: GPT, spec: str) -> None:
    """Raise CheckpointError if `model` tapers another norm away than `source` has."""
    if model.config.norm_type != "taper":
        return
    norm_type = source.config.norm_type
    theirs = source.config.taper_base if norm_type == "taper" else TAPER_BASE.get(norm_type)
    if theirs and theirs != model.config.taper_base:
        raise CheckpointError(
            f"{spec} has norm_type={norm_type}, and this run tapers taper_base="
            f"{model.config.taper_base} away: add --taper_base={theirs}"
        )
