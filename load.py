"""Load models: `load_model(spec)`, and `init_from(model, spec, ...)` for runs that start from one.

A spec is a run folder (its best checkpoint) or a checkpoint file, of nanoGPT too, a Hugging Face
folder or hub name (owner/name), or `random:` and a published shape (hf/config.py).
"""

from dataclasses import asdict
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from common.errors import CheckpointError, ConfigError
from common.hub import MOST_JSON, model_folder, read_config
from common.inputs import read_regular
from common.nanogpt import FILE as NANOGPT
from common.output import check_apart, parse_json
from common.past import PLACE
from configurator import Overrides
from hf.config import gpt_config, random_model, shape_config
from hf.weights import load_hf
from model import GPT, GPTConfig
from norm_plan import keys_of
from norms import LearnedScale, Norm, Place, RMSNorm, SharedRMSNorm
from taper import tapers
from training.checkpoint import (
    BEST,
    DISTILLING,
    FREE_KEYS,
    LAST,
    check_same_model,
    config_today,
    load_weights,
    model_config,
    read_checkpoint,
    saved_model,
)
from training.same_norms import is_same_function

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
    "rope_scaling_kind",
    "window",
    "local_blocks",
    "local_rope_theta",
    "attn_scale",
    "embed_scale",
    "norm_eps",
)
SHAPE = ("n_layer", "n_embd", "n_inner", "block_size", "tie_embeddings", "attn_bias")
# Names of tensors that one of two models may lack: of the norms in a norm plan (output norms and
# that of the embeddings included) and of those within attention.
NORM_NAMES = rf"{PLACE.pattern}|blocks\.\d+\.attn\.[qkv]_norm\..*"


def load_model(spec: str) -> GPT:
    """Load the model that `spec` names, on the CPU and in eval mode.

    `model.meta` names its tokenizer. Raises CheckpointError or HFError.
    """
    if spec.startswith("random:"):
        return random_model(spec.removeprefix("random:"))
    path = file_of(spec)
    if path.is_dir():
        return load_hf(path)
    state = read_checkpoint(path)
    model = saved_model(path, state)
    model.meta = state.get("meta", {})
    return model.eval()


def load_config(spec: str) -> GPTConfig:
    """Return the config of the model that `spec` names. Raises as load_model."""
    if spec.startswith("random:"):
        return shape_config(spec.removeprefix("random:"))
    path = file_of(spec)
    if path.is_dir():
        return gpt_config(read_config(path), spec)
    return model_config(read_checkpoint(path)["config"], path)


def file_of(spec: str) -> Path:
    """Return the checkpoint or Hugging Face folder that `spec` names. Raises CheckpointError."""
    path = model_folder(spec)
    if not path.is_dir():
        return path
    for name in (BEST, LAST, NANOGPT):
        if (path / name).exists():
            return path / name
    if any(path.glob("*.safetensors*")):
        return path
    what = f"no {BEST}, no {LAST} and no safetensors in this folder: check the path"
    if (path / DISTILLING).exists():
        what = "its distillation has not finished: the same distill.py command continues it"
    raise CheckpointError(f"{path}: {what}")


def take_shape(given: Overrides) -> None:
    """Give a run that starts from a model (init_from) the model's shape, where no key is given.

    Its norms are taken too, unless the run has another norm type. A run that has begun keeps its
    own shape, so that it goes on without that model.

    Args:
        given: the keys of the run.

    Raises:
        UserError: that model cannot be read, or the run would write over it.
    """
    spec = given.values.get("init_from")
    if not spec:
        return
    out_dir = Path(given.values.get("out_dir", given.fields["out_dir"].default))
    check_apart(spec, out_dir)
    begun = out_dir / "config.json"
    if begun.exists():
        try:
            saved = dict(parse_json(read_regular(begun, MOST_JSON)))
            source = model_config(config_today(saved, begun), begun)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"out_dir: {begun} is damaged ({error}): remove it, or choose another out_dir"
            ) from None
    else:
        source = load_config(spec)
    names = {*SAME_FUNCTION, *SHAPE}
    if given.values.get("norm_type", source.norm_type) == source.norm_type:
        names |= {"norm_type", *keys_of(source.norm_type)}
    for name in names - given.values.keys() - FREE_KEYS:
        given.set(name, getattr(source, name), spec)


def init_from(model: GPT, spec: str, meta: dict) -> str:
    """Give `model` the weights of the model that `spec` names.

    Only the norms may be of another type, the padded vocabulary smaller and the context shorter. An
    input norm keeps its gains, also where only one of the two models has output norms. Norms within
    attention may be new; those of the source are left out only if the run says so (qk_norm=none).

    Args:
        meta: of the run's data, which names their tokenizer.

    Returns:
        A line about it, for people.

    Raises:
        CheckpointError: the two differ in more.
    """
    source = load_model(spec)
    keys = ("n_layer", "n_embd", *SAME_FUNCTION)
    if all(set(gpt.plan.outputs) != {"I"} for gpt in (source, model)):
        keys += ("output_eps",)
    if model.config.position == "learned" and model.config.block_size > source.config.block_size:
        keys += ("block_size",)
    check_same_model(asdict(source.config), model.config, Path(spec), keys)
    _check_taper_base(source, model, spec)
    _check_attention_norms(source, model, spec)
    _check_learned_scale(source, model, spec)
    weights = source.state_dict() | _gains(source, model)
    own = model.state_dict()
    if "wpe.weight" in weights:  # of a longer context
        weights["wpe.weight"] = weights["wpe.weight"][: model.config.block_size]
    left_out = _other_sums(source, model, weights)
    for name in left_out:
        del weights[name]
    for name in {"wte.weight", "lm_head.weight"} & weights.keys() & own.keys():
        more = len(own[name]) - len(weights[name])  # rows of padding: no token reads them
        weights[name] = F.pad(weights[name], (0, 0, 0, max(0, more)))
    new, dropped = load_weights(model, weights, Path(spec), free=NORM_NAMES)
    # The block numbers of lns are no weights.
    new = [name for name in new if not name.endswith(".depth")]
    dropped = [name for name in [*dropped, *left_out] if not name.endswith(".depth")]
    note = f"weights of {spec}"
    if not is_same_function(source, model):
        note += "; its function has changed with its norms"
        if source.config.norm_type in ("layer", "cbwc") and model.config.norm_type == "rms":
            note += (
                f": `python convert.py {spec} --to=rms --out=FOLDER` keeps it exactly, for "
                "--init_from=FOLDER"
            )
    for name, what in (("chars", "alphabet"), ("checksum", "tokenizer")):
        if source.meta.get(name) not in (None, meta.get(name)):
            note += f"; warning: its {what} is not that of the data, so tokens change their meaning"
    if new or dropped:
        note += f"; of its norms' tensors {len(dropped)} are left out and {len(new)} are new"
    return note


def _check_taper_base(source: GPT, model: GPT, spec: str) -> None:
    """Raise CheckpointError if `model` tapers another norm away than `source` has."""
    if not tapers(model):
        return
    cores = [place.core for place in source.places()]
    # RMSNorm on a centred stream is LayerNorm.
    centers = any(norm.centers for norm in cores) or source.plan.type.embed is not None
    is_rms = any(isinstance(norm, RMSNorm | SharedRMSNorm) for norm in cores)
    theirs = "layer" if centers else "rms"
    if (centers or is_rms) and theirs != model.config.taper_base:
        raise CheckpointError(
            f"{spec} has norm_type={source.config.norm_type}, and this run tapers taper_base="
            f"{model.config.taper_base} away: add --taper_base={theirs}"
        )


def _gains(source: GPT, model: GPT) -> dict[str, Tensor]:
    """Return the gains of `source` as the norms of `model` store them, where both have one.

    lns and norm_gain=one_plus store them in other ways than the rest.
    """
    theirs = dict(source.named_modules())
    found = {}
    for name, norm in model.named_modules():
        if not isinstance(norm, Norm) or norm.weight is None:
            continue
        # The norm that is tapered away is within a TaperNorm, which takes its name too.
        name = name.removesuffix(".base")
        old = theirs.get(name)
        if isinstance(old, Norm) and old.weight is not None and old.channels == norm.channels:
            found[f"{name}.weight"] = norm.weight_for(old)
    return found


def _other_sums(source: GPT, model: GPT, weights: dict[str, Tensor]) -> list[str]:
    """Name the weights of norms that replace the stream in one of two models alone.

    Such a norm is not the one that the other model has at this place.
    """
    names = {place: name for name, place in model.named_modules() if isinstance(place, Place)}
    pairs = zip(source.places(), model.places(), strict=True)
    other = [f"{names[new]}.norm." for old, new in pairs if old.replaces != new.replaces]
    return [name for name in weights if name.startswith(tuple(other))]


def _has_learned_scale(model: GPT) -> bool:
    return model.norm_e is not None and isinstance(model.norm_e.norm, LearnedScale)


def _check_learned_scale(source: GPT, model: GPT, spec: str) -> None:
    """Raise CheckpointError if only one of the two scales its embeddings by a learned number."""
    own, theirs = _has_learned_scale(model), _has_learned_scale(source)
    if own != theirs:
        one, other = ("this run", spec) if own else (spec, "this run")
        raise CheckpointError(
            f"{one} multiplies its embeddings by a learned number, and {other} does not: make both "
            "with --norm_recipe=common"
        )


def _check_attention_norms(source: GPT, model: GPT, spec: str) -> None:
    """Raise CheckpointError if norms within attention would be lost, unless the run asks for it."""
    if model.config.qk_norm == "none":
        return
    theirs = source.config.qk_kind
    if theirs not in ("none", model.config.qk_kind):
        raise CheckpointError(
            f"{spec} has qk_norm={theirs}, and this run {model.config.qk_kind}: add --qk_norm="
            f"{theirs}, or --qk_norm=none to leave it out"
        )
    if source.config.has_v_norm and not model.config.has_v_norm:
        raise CheckpointError(
            f"{spec} normalises values, and norm_type={model.config.norm_type} does not: add "
            f"--norm_type={source.config.norm_type}, or --qk_norm=none to leave all norms of "
            "attention out"
        )
