"""Checkpoints: atomic save, safe load, resume. load.py makes models of them.

    # after a run with --parallel=fsdp: make each of its checkpoints one file
    python -m training.checkpoint out/run

A checkpoint is a dict of tensors and plain values:

    format         version of this layout
    step           steps done
    config         every key of the run
    meta           the tokenizer
    model          uncompiled weights, and the state of the norms
    optimizer, scaler, best_val_loss
    provenance     data, machine, code of the run (training/provenance.py)

The random streams and the data position of a run are functions of (seed, step, rank), so `step`
restores them. A run under FSDP puts the tensors into a folder next to the file
(training/sharded.py). Every program reads both forms.
"""

import common.interrupt  # noqa: F401

import contextlib
import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from common.distributed import Ranks, StopSignal, is_sharded, whole
from common.errors import CheckpointError, ConfigError, cannot_write, run_program
from common.inputs import check_regular
from common.lock import FolderLock
from common.old_keys import RETIRED, as_today
from common.output import check_replaceable, refused
from configurator import Overrides, parse_args
from model import GPT, GPTConfig
from norm_plan import decays_gains, foreign_keys, has_v_norm, resolved

FORMAT = 1
LAST = "ckpt_last.pt"
BEST = "ckpt_best.pt"
# What distill.py resumes from. The student is not in it as a model that load.py could make.
DISTILLING = "distill_last.pt"
# Keys of the model that may differ between a checkpoint and the run that resumes it: no tensor
# depends on them.
FREE_KEYS = {"dropout", "init", "init_std", "kernels", "residual", "coupled_impl"}


class FoundCheckpoint(NamedTuple):
    """The checkpoint that a run resumes from."""

    state: dict[str, Any]  # if it is sharded, `restore` completes it
    path: Path
    problem: str  # why a later checkpoint cannot be used; "" where this is the latest


# ----------------------------------------------------------------------------------- save and read


def save_checkpoint(path: Path, state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Write a checkpoint atomically: after a crash, `path` holds the old one or the new one.

    Of several `ranks` the main one writes. If the model is sharded, each writes its share.
    """
    if any(map(is_sharded, state["model"].values())):
        from training.sharded import write_shards  # importing DCP takes a second

        state = write_shards(path, state, ranks)
    if ranks is not None and not ranks.is_main:
        return
    # In the same folder, since a rename is atomic within one file system only.
    check_replaceable(path)
    partial = path.with_name(path.name + ".tmp")
    shards = None
    if "shards" in state:
        shards = path.with_name(state["shards"]["folder"])
    is_there = False  # has the new checkpoint its name?
    try:
        # Whatever the file names must be on the disk before the file itself.
        if shards is not None:
            sync_folder(shards)
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before it gets its name
        os.replace(partial, path)
        is_there = True
        sync_folder(path.parent)  # the rename itself must reach the disk too
        _remove_shards_but(path, shards)
    except (OSError, RuntimeError) as error:
        problem = refused(error)
        if problem is None:
            raise
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if shards is not None and not is_there:
            shutil.rmtree(shards, ignore_errors=True)
        kept = "the previous checkpoint is untouched"
        if is_there:
            kept = "this checkpoint or the previous one is there"
        raise CheckpointError(cannot_write(path, problem, kept)) from None


def remove_old_shards(path: Path) -> None:
    """Remove what a save that was killed has left beside a checkpoint that is there.

    That is the previous checkpoint's shards, or those that no checkpoint names yet.
    """
    if not path.exists() or not any(path.parent.glob(f"{path.stem}.shards-*")):
        return
    try:
        named = _read_archive(path).get("shards", {}).get("folder")
    except (CheckpointError, AttributeError):
        return  # a torn file does not say which shards are its own
    _remove_shards_but(path, path.with_name(named) if named else None)


def _remove_shards_but(path: Path, kept: Path | None) -> None:
    """Remove all shards of checkpoints called `path` but one folder of them."""
    for old in path.parent.glob(f"{path.stem}.shards-*"):
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def read_checkpoint(path: Path, all_tensors: bool = True) -> dict[str, Any]:
    """Read and check what save_checkpoint wrote.

    Args:
        path: the file.
        all_tensors: read shards too. Without it they are only checked, and `model` and the
            optimiser's state are missing from a sharded checkpoint.

    Returns:
        The checkpoint's dict, tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, torn, of another program or of a newer version.
    """
    state = _read_archive(path)
    check_entries(path, state)
    if state.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {state['format']}, this program reads {FORMAT}: update it"
        )
    if "shards" in state:
        from training.sharded import check_shards, read_state  # importing DCP takes a second

        check_shards(path, state["shards"])
        if not all_tensors:
            return state
        state = read_state(path, state)
    check_finite(path, state)
    return state


def _read_archive(path: Path) -> Any:
    """Read a file of torch.save, after its checksums.

    Only tensors and plain values are unpickled (weights_only). The checksums are compared because
    torch itself would load a tensor with a flipped bit.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() or _false_folder(archive)
        if not damaged:
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint: check the path") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}): use another checkpoint"
        ) from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values: not a nanonorm checkpoint"
        ) from None
    except Exception:  # a foreign pickle can fail in any way
        raise CheckpointError(
            f"{path}: torn, or not a checkpoint at all: use another checkpoint"
        ) from None
    raise CheckpointError(
        f"{path}: {damaged} in it is damaged, the file is torn: use another checkpoint"
    )


def _false_folder(archive: zipfile.ZipFile) -> str | None:
    """Name an entry whose attributes say "folder", if there is one.

    torch takes such an entry to be empty, and no checksum covers attributes. torch.save writes no
    folders.
    """
    for entry in archive.infolist():
        if entry.external_attr & 0x10:
            return entry.filename
    return None


# ------------------------------------------------------------------------------- what is in a file

# A foreign file may hold anything, so every entry is checked before it is used.


def check_entries(path: Path, state: Any) -> None:
    """Check that what a file holds has the form of a checkpoint.

    Raises:
        CheckpointError: names the entry that is damaged.
    """
    foreign = f"{path}: a PyTorch file, but not a nanonorm checkpoint"
    if not isinstance(state, dict):
        raise CheckpointError(foreign)
    if not ({"config", "step"} <= state.keys() and state.keys() & {"model", "shards"}):
        raise CheckpointError(foreign)
    for name, is_sound in ENTRIES.items():
        if name in state and not is_sound(state[name]):
            raise CheckpointError(
                f"{foreign}: its entry `{name}` is damaged: use another checkpoint"
            )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_config(value: Any) -> bool:
    return _is_dict(value) and all(map(_is_plain, value.values()))


def _is_meta(value: Any) -> bool:
    return _is_dict(value) and isinstance(value.get("path", ""), str)


def _is_plain(value: Any) -> bool:
    """Is it a value that a key can have?"""
    if isinstance(value, list | tuple):
        return all(isinstance(part, int | float | str) for part in value)
    return value is None or isinstance(value, int | float | str)


def _is_step(value: Any) -> bool:
    # True is an int to isinstance, and ranks compare the step as int64.
    return type(value) is int and 0 <= value < 1 << 62


def _is_loss(value: Any) -> bool:
    return type(value) is float and not math.isnan(value)


def _is_tensor(value: Any) -> bool:
    """Is it an ordinary tensor, whose numbers are all in the file?

    A view can repeat one number 2^40 times.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    if value.device.type != "cpu" or value.is_complex():
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _are_tensors(value: Any) -> bool:
    return _is_dict(value) and all(map(_is_tensor, value.values()))


def _is_stability(value: Any) -> bool:
    """Is it what Stability.state returns?"""
    if not _is_dict(value) or not isinstance(value.get("recent", []), list):
        return False
    counts = [part for name, part in value.items() if name != "recent"]
    return all(isinstance(part, int | float) for part in [*counts, *value.get("recent", [])])


# The form of each entry that a checkpoint may have
ENTRIES = {
    "config": _is_config,
    "step": _is_step,
    "meta": _is_meta,
    "model": _are_tensors,
    "optimizer": _is_dict,
    "scaler": _is_dict,
    "best_val_loss": _is_loss,
    "shards": _is_dict,
    "stability": _is_stability,
}


def check_finite(path: Path, state: dict[str, Any]) -> None:
    """Check that no number of weights and moments is NaN or infinite.

    All ranks call it if tensors are sharded.

    Raises:
        CheckpointError: names the first tensor with such a number.
    """
    name = first_not_finite(state)
    if name:
        raise CheckpointError(f"{path}: {name} is not finite: use another checkpoint")


def first_not_finite(state: dict[str, Any]) -> str:
    """Name the first tensor of a checkpoint's dict with a NaN or infinite number; "" if none."""
    for name in ("model", "optimizer"):
        for where, tensor in _tensors_in(state.get(name), name):
            if not whole(tensor.isfinite().all()):
                return where.removeprefix("model.")
    return ""


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts and lists, each with its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{name}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _tensors_in(part, f"{name}.{index}")


# ------------------------------------------------------------------------------------------ resume


def find_checkpoint(out_dir: Path, resume: str) -> FoundCheckpoint | None:
    """Find the checkpoint to resume from. None: start from scratch.

    Args:
        out_dir: the run folder.
        resume: "auto" takes the last checkpoint, or the best one if the last is torn; "never"
            refuses to overwrite a run; anything else is a path.

    Raises:
        CheckpointError: a checkpoint is there that must not be overwritten, or cannot be read.
        ConfigError: `resume` is empty.
    """
    if not resume:
        raise ConfigError("resume='': give auto, never, or a checkpoint's path")
    if resume not in ("auto", "never"):
        return _checkpoint_at(Path(resume), out_dir)
    present = [out_dir / name for name in (LAST, BEST) if (out_dir / name).exists()]
    if resume == "never" and present:
        raise CheckpointError(
            f"{out_dir} holds a run already: choose another out_dir, remove it, or --resume=auto"
        )
    problems = []
    for path in present:
        try:
            # Without the tensors of a sharded checkpoint: in `restore` each rank reads its own
            # share.
            state = read_checkpoint(path, all_tensors=False)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return FoundCheckpoint(state, path, "; ".join(problems))
    if problems:
        raise CheckpointError("; ".join(problems) + "; to start again, choose another out_dir")
    return None


def _checkpoint_at(path: Path, out_dir: Path) -> FoundCheckpoint:
    """Read the checkpoint `path`, unless `out_dir` holds another run."""
    # Not Path.resolve, which raises RuntimeError where links form a loop.
    is_elsewhere = os.path.dirname(os.path.realpath(path)) != os.path.realpath(out_dir)
    if (out_dir / "log.jsonl").exists() and is_elsewhere:
        raise CheckpointError(f"{out_dir} holds another run than {path}: choose another out_dir")
    return FoundCheckpoint(read_checkpoint(path, all_tensors=False), path, "")


def different_checkpoints(out_dir: Path) -> CheckpointError:
    """Make the error for ranks that would resume from different steps."""
    return CheckpointError(
        f"ranks found different checkpoints in {out_dir}: it must be a shared folder"
    )


def restore(
    path: Path,
    state: dict[str, Any],
    config: GPTConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put the `state` of find_checkpoint into a run.

    The model and its optimiser may be sharded or not, whichever the checkpoint is. The optimiser
    keeps its own settings (learning rate, betas, weight decay).

    Raises:
        CheckpointError: the checkpoint is of another model, or holds weights only.
    """
    if not {"optimizer", "scaler", "best_val_loss"} <= state.keys():
        raise CheckpointError(
            f"{path} holds weights only: choose another out_dir, and --init_from={path}"
        )
    check_same_model(state["config"], config, path)
    check_retired(state["config"], config, path, RETIRED)
    if "shards" in state or is_sharded(model):
        from training.sharded import place_state  # importing DCP takes a second

        if "shards" not in state:
            _check_moments(path, optimizer, state["optimizer"])
        state = place_state(path, state, model, optimizer)
        check_finite(path, state)
    load_weights(model, state["model"], path)
    load_moments(path, optimizer, state["optimizer"])
    load_scaler(path, scaler, state["scaler"])


def load_scaler(path: Path, scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
    """Load the loss scale of the checkpoint `path`, if the run had one. Raises CheckpointError."""
    own = scaler.state_dict()
    if not state or not own:
        return
    is_sound = all(type(state.get(name)) is type(value) for name, value in own.items())
    if not is_sound or not all(0 <= state[name] < math.inf for name in own):
        raise CheckpointError(f"{path}: its loss scale is damaged: use another checkpoint")
    scaler.load_state_dict(state)


def load_moments(path: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of an optimiser, but not its settings.

    Raises:
        CheckpointError: those of the checkpoint `path` are damaged, or of another model.
    """
    _check_moments(path, optimizer, state)
    # load_state_dict brings the saved settings too. Those of this run's config count.
    settings = []
    for group in optimizer.param_groups:
        settings.append({name: value for name, value in group.items() if name != "params"})
    optimizer.load_state_dict(state)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def _check_moments(path: Path, optimizer: Any, state: Any) -> None:
    """Raise CheckpointError unless each moment has the shape of its parameter."""
    groups = optimizer.param_groups
    is_sound = True
    if hasattr(optimizer, "momenta"):  # MuonWithAdamW
        momenta = state.get("momenta")
        is_sound = isinstance(momenta, list) and all(map(_is_tensor, momenta))
        shapes = [momentum.shape for momentum in optimizer.momenta]
        is_sound = is_sound and [tensor.shape for tensor in momenta] == shapes
        state = state.get("adamw")
        groups = groups[1:]
    if not is_sound or not _is_adamw_state(state, groups):
        raise CheckpointError(
            f"{path}: the state of its optimizer is damaged, or of another model: "
            f"use another checkpoint, or another out_dir and --init_from={path}"
        )


def _is_adamw_state(state: Any, groups: list[dict[str, Any]]) -> bool:
    """Has it the form of AdamW's state_dict for these groups of parameters?"""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    saved = state.get("param_groups")
    if not isinstance(saved, list) or not all(map(_is_dict, saved)):
        return False
    # The parameters of all groups are numbered from 0 on.
    count = 0
    for group, then in zip(groups, saved, strict=False):
        end = count + len(group["params"])
        if then.get("params") != list(range(count, end)):
            return False
        count = end
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(saved) != len(groups) or not set(state["state"]) <= set(range(count)):
        return False
    for index, moments in state["state"].items():
        if not isinstance(moments, dict) or moments.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            return False
        if not all(isinstance(moment, torch.Tensor) for moment in moments.values()):
            return False
        shape = parameters[index].shape
        if any(moments[name].shape != shape for name in ("exp_avg", "exp_avg_sq")):
            return False
        if moments["step"].numel() != 1:
            return False
    return True


# ----------------------------------------------------------------------------- models and weights


def saved_model(path: Path, state: dict[str, Any]) -> GPT:
    """Build the model of a checkpoint that read_checkpoint has read, with its weights.

    Raises:
        CheckpointError: weights and config do not fit together, or make no model.
    """
    config = model_config(state["config"], path)
    weights = state["model"]
    # Before anything is built: a damaged config may ask for more than this machine has.
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    stored = sum(tensor.numel() for tensor in weights.values())
    if len(blocks) < config.n_layer or 2 * stored < config.n_weights:
        raise CheckpointError(
            f"{path}: it holds {len(blocks)} blocks and {stored:,} numbers, its config asks for "
            f"{config.n_layer} and {config.n_weights:,}: use another checkpoint"
        )
    try:
        model = GPT(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    load_weights(model, weights, path)
    return model


def model_config(saved: dict[str, Any], path: Path) -> GPTConfig:
    """Take the model's keys from a saved config.

    Keys that an older config lacks have their defaults, and so have those of other norm types. An
    older config without norm_type is of type layer.

    Raises:
        CheckpointError: names the key whose value makes no model.
    """
    overrides = Overrides(GPTConfig)
    try:
        saved = as_today(saved)
        foreign = foreign_keys(saved.get("norm_type", GPTConfig.norm_type))
        for field in fields(GPTConfig):
            if field.name in saved and field.name not in foreign:
                overrides.set(field.name, saved[field.name], "its config")
        config = overrides.build()
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}: use another checkpoint") from None
    except TypeError:  # a list where a name belongs
        raise CheckpointError(f"{path}: its config is damaged: use another checkpoint") from None
    # The other keys that are gone do not change what the model computes.
    check_retired(saved, config, path, ("qk_gain", "v_norm"))
    return config


def check_retired(
    saved: dict[str, Any], config: GPTConfig, path: Path, names: Iterable[str]
) -> None:
    """Check that no key that is gone had a value which `config` cannot have.

    Raises:
        CheckpointError: names the key.
    """
    meant = {"v_norm": has_v_norm(config), "decay_gains": decays_gains(config)}
    for name in names:
        value = as_today(saved).get(name)
        if value not in (None, RETIRED[name], meant.get(name)):
            raise CheckpointError(
                f"{path}: {name}={value!r} in its config, a key that is gone: use commit d806d57, "
                "which has it, or another checkpoint"
            )


def check_same_model(
    saved: dict[str, Any], config: GPTConfig, path: Path, keys: tuple[str, ...] = ()
) -> None:
    """Check that a saved model and ours agree in `keys`, or in all that decide tensors.

    Raises:
        CheckpointError: names the first key in which they differ.
    """
    theirs = model_config(saved, path)
    names = keys or [field.name for field in fields(GPTConfig) if field.name not in FREE_KEYS]
    for name in names:
        then = resolved(theirs, name)
        now = resolved(config, name)
        if then != now:
            remedy = f"add --{name}={then}" + ("" if keys else ", or use another out_dir")
            raise CheckpointError(
                f"{path} is of another model: {name}={then!r} there, {now!r} here: {remedy}"
            )


def load_weights(
    model: nn.Module, weights: dict[str, torch.Tensor], path: Path, free: str = ""
) -> tuple[list[str], list[str]]:
    """Copy `weights` into `model`.

    Args:
        model: a GPT.
        weights: tensors by name.
        path: where they are from, for error messages.
        free: a pattern; names that match it may be in one of the two only.

    Returns:
        Names in the model only, which keep their initial values, and names in `weights` only.

    Raises:
        CheckpointError: names the first tensor that does not fit.
    """
    own = model.state_dict()
    for name, tensor in weights.items():
        if name in own and own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
            )
        if name in own and own[name].is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype} there, {own[name].dtype} here: "
                "use another checkpoint"
            )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    for name in sorted({*missing, *unexpected}):
        if free and re.fullmatch(free, name):
            continue
        if name in missing:
            raise CheckpointError(f"{path}: {name} is missing")
        hint = ""
        if name == "lm_head.weight":
            hint = ": its head has weights of its own: add --tie_embeddings=False"
        raise CheckpointError(f"{path}: {name} is not part of this model{hint}")
    return missing, unexpected


# ----------------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class MergeConfig:
    """training/checkpoint.py has no keys."""


def main(argv: list[str]) -> None:
    """Make the sharded checkpoints of a run one file each."""
    _, spec = parse_args(MergeConfig, argv, __doc__, spec=True)
    folder = Path(spec)
    paths = [folder]
    if folder.is_dir():
        paths = [folder / name for name in (LAST, BEST) if (folder / name).exists()]
    if not paths:
        raise CheckpointError(f"{spec}: no {LAST} and no {BEST} in this folder: check the path")
    if not paths[0].exists():
        raise CheckpointError(f"{paths[0]}: no such checkpoint: check the path")
    # A run that is resumed meanwhile would save over the merged file.
    stop_signal = StopSignal()
    with FolderLock(paths[0].parent, lambda: stop_signal.name):
        for path in paths:
            save_checkpoint(path, read_checkpoint(path))
            print(f"{path} is one file")


if __name__ == "__main__":
    run_program(main)
