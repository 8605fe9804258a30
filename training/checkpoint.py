"""Checkpoints: atomic save, safe load, resume. load.py makes models of them.

A checkpoint is one file, a dict of tensors and plain values, on any number of ranks:

    format         version of this layout
    step           steps done
    config         every key of the run
    meta           the tokenizer
    model          uncompiled weights, and the state of the norms
    optimizer      moments by the name of their parameter, {name: {"exp_avg": ..., ...}}
    scaler, best_val_loss, stability
    provenance     data, machine, code of the run (training/run.py)

The random streams and the data position of a run are functions of (seed, step, rank), so `step`
restores them.
"""

import errno
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from common.distributed import Ranks, cut, gathered, share
from common.errors import (
    CheckpointError,
    ConfigError,
    NormFileError,
    UserError,
    cannot_write,
)
from common.inputs import check_regular
from common.nanogpt import as_ours
from common.output import replacing
from common.past import BEFORE_THE_KEY, RETIRED, check_retired, checkpoint_today, moments_by_name
from configurator import Overrides
from data.shards import read_meta
from model import GPT, GPTConfig
from norm_plan import foreign_keys
from training.optim import Optimizer

FORMAT = 2  # in format 1 moments had numbers
LAST = "ckpt_last.pt"
BEST = "ckpt_best.pt"
# What distill.py resumes from. The student is not in it as a model that load.py could make.
DISTILLING = "distill_last.pt"
Moments = dict[str, dict[str, torch.Tensor]]  # by the name of the parameter, and by their own
# Keys of the model that may differ between a checkpoint and the run that resumes it: no tensor
# depends on them.
FREE_KEYS = {"dropout", "init", "init_std", "kernels", "residual", "recompute", "coupled_impl"}


class FoundCheckpoint(NamedTuple):
    """The checkpoint that a run resumes from."""

    state: dict[str, Any]
    path: Path
    problem: str  # why a later checkpoint cannot be used; "" where this is the latest

    @property
    def provenance(self) -> dict[str, Any]:
        """Where its run trained; {} if it does not say."""
        return self.state.get("provenance", {})


# ----------------------------------------------------------------------------------- save and read


def save_checkpoint(path: Path, state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Write a checkpoint atomically: after a crash, `path` holds the old one or the new one.

    Of several `ranks` the main one writes. All must call this if tensors are sharded.
    """
    is_main = ranks is None or ranks.is_main
    state = gathered(state, keep=is_main)
    if not is_main:
        return
    try:
        with replacing(path) as file:
            torch.save({"format": FORMAT, **state}, file)
        sync_folder(path.parent)  # the rename itself must reach the disk too
    except (OSError, RuntimeError) as error:
        # torch hides what the system said behind an error of its own; most often the disk is full.
        is_torchs = re.search("inline_container|PytorchStreamWriter", str(error))
        if isinstance(error, RuntimeError) and not is_torchs:
            raise
        problem: Any = OSError(errno.ENOSPC, "the disk may be full") if is_torchs else error
        kept = "this checkpoint or the previous one is there"
        raise CheckpointError(cannot_write(path, problem, kept)) from None


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read and check what save_checkpoint wrote, or nanoGPT.

    Returns:
        The checkpoint's dict, tensors on the CPU, keys and names as they are today.

    Raises:
        CheckpointError: the file is missing, torn or of another program.
        UserError: it is a pipe or a device; or it is good, but of a layout that this program does
            not read. No other checkpoint of its run may take its place, which would be written over
            it.
    """
    state = _read_archive(path)
    if isinstance(state, dict) and "model_args" in state:
        state = as_ours(state, path, read_meta)
    check_entries(path, state)
    if state.get("format", 1) not in (1, FORMAT):
        raise UserError(
            f"{path}: checkpoint format {state['format']}, this program reads {FORMAT}: update it"
        )
    state = checkpoint_today(state, path)
    name = first_not_finite(state)
    if name:
        raise CheckpointError(f"{path}: {name} is not finite: use another checkpoint")
    return state


def _read_archive(path: Path) -> Any:
    """Read a file of torch.save, after its checksums.

    Only tensors and plain values are unpickled (weights_only). The checksums are compared because
    torch itself would load a tensor with a flipped bit. All ranks of a machine share one copy in
    memory (mmap).
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = _false_entry(archive) or archive.testzip()
        if not damaged:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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


def _false_entry(archive: zipfile.ZipFile) -> str | None:
    """Name an entry that torch.save does not write, if there is one.

    It writes no folders: torch takes an entry whose attributes say so to be empty, and no checksum
    covers attributes. It compresses nothing: a small file could hold more than any disk.
    """
    for entry in archive.infolist():
        if entry.external_attr & 0x10 or entry.compress_type != zipfile.ZIP_STORED:
            return entry.filename
    return None


# ------------------------------------------------------------------------------- what is in a file


def check_entries(path: Path, state: Any) -> None:
    """Check that what a file holds has the form of a checkpoint.

    Whatever decides what is built or trained is checked here; a wrong value of another entry fails
    where it is used.

    Raises:
        CheckpointError: it has not.
    """
    foreign = f"{path}: a PyTorch file, but not a nanonorm checkpoint"
    if not isinstance(state, dict) or not {"config", "step"} <= state.keys():
        raise CheckpointError(foreign)
    best = state.get("best_val_loss", math.inf)
    is_sound = {
        "config": _is_config(state["config"]),
        # True is an int to isinstance.
        "step": type(state["step"]) is int and state["step"] >= 0,
        "model": "shards" in state or _are_tensors(state.get("model")),
        "optimizer": _are_moments(state.get("optimizer", {})),
        # No loss is lower than NaN: the best checkpoint would never be written again.
        "best_val_loss": isinstance(best, float) and not math.isnan(best),
        "scaler": "scaler" not in state or _has_loss_scale(state),
    }
    for name, sound in is_sound.items():
        if not sound:
            raise CheckpointError(
                f"{foreign}: its entry `{name}` is damaged: use another checkpoint"
            )


def _are_moments(value: Any) -> bool:
    return _is_dict(value) and all(_is_plain(tensor) for _, tensor in _tensors_in(value, ""))


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_config(value: Any) -> bool:
    """Is it a dict of what JSON can say, with a norm type that is a name?"""
    if not _is_dict(value) or not isinstance(value.get("norm_type", ""), str):
        return False
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _has_loss_scale(state: dict[str, Any]) -> bool:
    """Has the checkpoint of a float16 run its loss scale? Without it the run would take another."""
    if not _is_config(state["config"]) or state["config"].get("dtype") != "float16":
        return True
    saved = state["scaler"]
    own = torch.amp.GradScaler("cpu").state_dict()
    return _is_dict(saved) and saved.keys() == own.keys() and all(map(_is_number, saved.values()))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_tensors(value: Any) -> bool:
    return _is_dict(value) and all(_is_plain(part) for part in value.values())


def _is_plain(value: Any) -> bool:
    """Is it a tensor of ordinary numbers, all of which are in the file?

    Those of a quantised tensor, or of 8 bits, have a scale elsewhere; those of a meta tensor are
    nowhere. A view can repeat one number 2^40 times.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_quantized)
        and not (value.is_floating_point() and value.element_size() < 2)
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def first_not_finite(state: dict[str, Any]) -> str:
    """Name the first tensor of a checkpoint's dict with a NaN or infinite number; "" if none.

    Of a sharded tensor this rank looks at its own share.
    """
    for name in ("model", "optimizer"):
        for where, tensor in _tensors_in(state.get(name), name):
            if not share(tensor).isfinite().all():
                return where.removeprefix("model.")
    return ""


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts, each with its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{name}.{key}")


# ------------------------------------------------------------------------------------------ resume


def find_checkpoint(
    out_dir: Path, resume: str, names: tuple[str, ...] = (LAST, BEST)
) -> FoundCheckpoint | None:
    """Find the checkpoint to resume from. None: start from scratch.

    Args:
        out_dir: the run folder.
        resume: "auto" takes the first of `names` that is not torn; "never" refuses to overwrite a
            run; anything else is a path.
        names: of checkpoints in the folder, the latest first.

    Raises:
        CheckpointError: a checkpoint is there that must not be overwritten, or cannot be read.
    """
    if resume not in ("auto", "never"):
        return _checkpoint_at(Path(resume), out_dir)
    present = [out_dir / name for name in names if (out_dir / name).exists()]
    if resume == "never" and present:
        raise CheckpointError(
            f"{out_dir} holds a run already: choose another out_dir, remove it, or --resume=auto"
        )
    problems = []
    for path in present:
        try:
            state = read_checkpoint(path)
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
    folder, name = os.path.split(os.path.realpath(path))
    is_elsewhere = folder != os.path.realpath(out_dir)
    if (out_dir / "log.jsonl").exists() and is_elsewhere:
        raise CheckpointError(
            f"{out_dir} holds a run already, and {path} is not of it: --resume=auto continues "
            "that run; or choose another out_dir"
        )
    # However it was spelt: who writes into out_dir must know it as its own.
    return FoundCheckpoint(read_checkpoint(path), path if is_elsewhere else out_dir / name, "")


def restore(path: Path, saved: dict[str, Any], config: Any, model: nn.Module) -> None:
    """Put the weights of a checkpoint into a model, which may be sharded.

    Args:
        path: of the checkpoint.
        saved: what it holds.
        config: every key of the run that goes on.
        model: the run's.

    Raises:
        CheckpointError: the checkpoint is of another model, or of the other optimiser.
    """
    then = saved["config"].get("optimizer", BEFORE_THE_KEY["optimizer"])
    if then != config.optimizer:
        raise CheckpointError(
            f"{path} has the state of optimizer={then}, this run has {config.optimizer}: add "
            f"--optimizer={then}, or choose another out_dir and --init_from={path}"
        )
    check_same_model(saved["config"], config, path)
    check_retired(saved["config"], config, path, RETIRED)
    load_weights(model, saved["model"], path)


def moments_of(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> Moments:
    """Return the moments of an optimiser by the names of their parameters."""
    state = optimizer.state
    return {name: state[p] for name, p in parameters.items() if p in state}


def load_moments(
    path: Path,
    state: dict[str, Any],
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
) -> None:
    """Load the moments of an optimiser, but not its settings.

    Args:
        path: of the checkpoint, for error messages.
        state: what it holds, of either format.
        parameters: those of the optimiser, by name.
        optimizer: without moments; not stepped yet.

    Raises:
        CheckpointError: the moments are damaged, or of another model; or those of a parameter are
            missing.
    """
    missing: list[str] = []
    try:
        saved = state["optimizer"]
        if state.get("format", 1) == 1:
            saved = moments_by_name(saved, list(state["model"]), parameters, optimizer)
        for name, moments in saved.items():
            parameter = parameters[name]
            # Muon has made its own; AdamW makes them in its first step.
            own = optimizer.state.get(parameter) or {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            if {key: tensor.shape for key, tensor in moments.items()} != {
                key: tensor.shape for key, tensor in own.items()
            }:
                raise ValueError(name)
            for key, tensor in own.items():
                if not moments[key].is_floating_point():
                    raise ValueError(name)
                tensor.copy_(cut(moments[key], tensor))
            optimizer.state[parameter] = own
        # Every parameter has a gradient, and so moments, from the first step on.
        missing = [name for name in parameters if name not in saved]
    except (LookupError, ValueError, TypeError, AttributeError):  # a foreign file may hold anything
        raise CheckpointError(
            f"{path}: the state of its optimizer is damaged, or of another model: "
            f"use another checkpoint, or another out_dir and --init_from={path}"
        ) from None
    if missing:
        raise CheckpointError(
            f"{path}: the state of its optimizer lacks {missing[0]}: use another checkpoint, or "
            f"another out_dir and --init_from={path}"
        )


# ----------------------------------------------------------------------------- models and weights


def saved_model(path: Path, state: dict[str, Any]) -> GPT:
    """Build the model of a checkpoint that read_checkpoint has read, with its weights.

    Raises:
        CheckpointError: weights and config do not fit together, or make no model.
    """
    config = model_config(state["config"], path)
    try:
        model = GPT(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    load_weights(model, state["model"], path)
    return model


def model_config(saved: dict[str, Any], path: Path) -> GPTConfig:
    """Take the model's keys from a saved config of today (common/past.py).

    Keys that an older config lacks have their defaults, and so have those of other norm types. An
    older config without norm_type is of type layer.

    Raises:
        CheckpointError: names the key whose value makes no model.
    """
    overrides = Overrides(GPTConfig)
    try:
        foreign = foreign_keys(saved.get("norm_type", GPTConfig.norm_type))
        for field in fields(GPTConfig):
            if field.name in saved and field.name not in foreign:
                overrides.set(field.name, saved[field.name], "its config")
        config = overrides.build()
    except NormFileError as error:  # it says which file to give
        raise CheckpointError(f"{path}: {error}") from None
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}: use another checkpoint") from None
    # The other keys that are gone do not change what the model computes.
    check_retired(saved, config, path, ("qk_gain", "v_norm"))
    return config


def check_same_model(
    saved: dict[str, Any], config: GPTConfig, path: Path, keys: tuple[str, ...] = ()
) -> None:
    """Check that a saved model and ours agree in `keys`, or in all that decide tensors.

    Raises:
        CheckpointError: names the keys in which they differ.
    """
    theirs = model_config(saved, path)
    names = keys or [field.name for field in fields(GPTConfig) if field.name not in FREE_KEYS]
    found = []
    wanted = []
    for name in names:
        # What auto means depends on the norm type.
        what = "qk_kind" if name == "qk_norm" else name
        then = getattr(theirs, what)
        now = getattr(config, what)
        if then != now:
            found.append(f"{name}={then!r} there, {now!r} here")
            wanted.append(f"--{name}={then}")
    if found:
        remedy = f"add {' '.join(wanted)}" + ("" if keys else ", or use another out_dir")
        raise CheckpointError(f"{path} is of another model: {'; '.join(found)}: {remedy}")


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
    weights = {name: cut(tensor, own.get(name)) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if name not in own:
            continue
        if own[name].shape != tensor.shape:
            hint = ""
            if free and name == "wte.weight":
                hint = ": tokenise the data with its tokenizer"
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
                f"{hint}"
            )
        if own[name].is_floating_point() != tensor.is_floating_point():
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
