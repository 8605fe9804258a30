"""Checkpoints: atomic save, safe load, resume. load.py makes models of them.

    python -m training.checkpoint out/run
        a run of --parallel=fsdp: make each of its checkpoints one file

A checkpoint is a dict of tensors and plain values: format, step, config (every key of the run),
meta (tokenizer), model (uncompiled weights and norm state), optimizer, scaler, best_val_loss, place
(training/place.py). The random streams and the data position of a run are functions of (seed, step,
rank), so `step` restores them. A run under FSDP leaves the tensors in a folder beside the file
(training/sharded.py); every program reads both forms.
"""

import os
import pickle
import re
import shutil
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.distributed import Ranks, is_sharded
from common.errors import CheckpointError, run_program
from configurator import Overrides, parse_args
from model import GPTConfig
from norm_plan import foreign_keys
from training.lock import FolderLock

FORMAT = 1
LAST, BEST = "ckpt_last.pt", "ckpt_best.pt"
DISTILLING = "distill_last.pt"  # what distill.py goes on from; the student is not in it as a model
# Keys of the model that may differ between a checkpoint and the run that resumes it: they decide no
# tensor.
FREE_KEYS = {"dropout", "init", "init_std", "kernels", "residual", "coupled_impl"}


def save_checkpoint(path: Path, state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Write, fsync, rename: after a crash at any moment `path` holds the old checkpoint or the new
    one.

    Of several `ranks` the main one writes; where the model is sharded, each writes its share.
    """
    if any(map(is_sharded, state["model"].values())):
        from training.sharded import write_shards  # DCP takes a second to import

        state = write_shards(path, state, ranks)
    if ranks is not None and not ranks.is_main:
        return
    partial = path.with_name(path.name + ".tmp")
    shards = path.with_name(state["shards"]["folder"]) if "shards" in state else None
    try:
        if shards is not None:
            sync_folder(shards)
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)  # the rename itself must reach the disk too
        for old in path.parent.glob(
            f"{path.stem}.shards-*"
        ):  # of the one before, or of a save that did not end
            if old != shards:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror}); the one before is untouched"
        ) from None


def sync_folder(folder: Path) -> None:
    """Until the names in `folder` are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def read_checkpoint(path: Path, whole: bool = True) -> dict[str, Any]:
    """The dict that save_checkpoint wrote, on the CPU. Raises CheckpointError for torn and foreign
    files.

    Shards are checked too, and read unless not `whole`: then `model` and the optimiser's state may
    be missing. Only tensors and plain values are unpickled (weights_only), and the archive's
    checksums are compared first: a flipped bit in a tensor would otherwise load without a word.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch takes an entry whose attributes say "folder" for an empty one, and no checksum
            # covers attributes.
            torn = archive.testzip() or next(
                (e.filename for e in archive.infolist() if e.external_attr & 0x10), None
            )
        state = torch.load(path, map_location="cpu", weights_only=True) if not torn else None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint: check the path") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values: not a nanonorm checkpoint"
        ) from None
    except Exception:  # a foreign pickle can fail in any way
        raise CheckpointError(
            f"{path}: torn, or not a checkpoint at all: use another checkpoint"
        ) from None
    if torn:
        raise CheckpointError(
            f"{path}: {torn} in it is damaged, the file is torn: use another checkpoint"
        )
    if not isinstance(state, dict) or not (
        {"config", "step"} <= state.keys() and state.keys() & {"model", "shards"}
    ):
        raise CheckpointError(f"{path}: a PyTorch file, but not a nanonorm checkpoint")
    if state.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path}: checkpoint format {state['format']}, this program reads {FORMAT}: update it"
        )
    if "shards" in state:
        from training.sharded import check_shards, read_state  # DCP takes a second to import

        check_shards(path, state["shards"])
        state = read_state(path, state) if whole else state
    return state


def find_checkpoint(out_dir: Path, resume: str) -> tuple[dict[str, Any], Path, str] | None:
    """(state, path, note) of the checkpoint to resume from, or None to start afresh.

    resume: "auto" takes the last checkpoint, or the best one if the last is torn, and says so in
    the note; "never" refuses to overwrite a run; anything else is a path. A sharded state is not
    whole: `restore` completes it.
    """
    if resume not in ("auto", "never"):
        path, log = Path(resume), out_dir / "log.jsonl"
        if log.exists() and path.resolve().parent != out_dir.resolve():
            raise CheckpointError(
                f"{out_dir} holds another run than {path}: choose another out_dir"
            )
        return read_checkpoint(path, whole=False), path, ""
    present = [out_dir / name for name in (LAST, BEST) if (out_dir / name).exists()]
    if resume == "never" and present:
        raise CheckpointError(
            f"{out_dir} holds a run already: choose another out_dir, remove it, or --resume=auto"
        )
    complaints = []
    for path in present:
        try:
            return read_checkpoint(path, whole=False), path, "; ".join(complaints)
        except CheckpointError as error:
            complaints.append(str(error))
    if complaints:
        raise CheckpointError("; ".join(complaints) + "; to start afresh, choose another out_dir")
    return None


def different_checkpoints(out_dir: Path) -> CheckpointError:
    """What ranks raise that go on from different steps."""
    return CheckpointError(
        f"ranks found different checkpoints in {out_dir}: it must be a shared folder"
    )


def model_config(saved: dict[str, Any], path: Path) -> GPTConfig:
    """The model's part of a saved config. Keys that an older config lacks, and those of other norm
    types, have their defaults; norm_type is layer.
    """
    overrides, foreign = (
        Overrides(GPTConfig),
        foreign_keys(saved.get("norm_type", GPTConfig.norm_type)),
    )
    for field in fields(GPTConfig):
        if field.name in saved and field.name not in foreign:
            overrides.set(field.name, saved[field.name], str(path))
    return overrides.build()


def check_same_model(
    saved: dict[str, Any], config: GPTConfig, path: Path, keys: tuple[str, ...] = ()
) -> None:
    """Raise CheckpointError naming the first of `keys` (all that matter) in which a saved model
    differs from ours.
    """
    theirs = model_config(saved, path)
    for name in keys or [field.name for field in fields(GPTConfig) if field.name not in FREE_KEYS]:
        then, now = getattr(theirs, name), getattr(config, name)
        if then != now:
            raise CheckpointError(
                f"{path} is of another model: {name}={then!r} there, {now!r} here: "
                + (f"add --{name}={then}" if keys else "use its settings, or another out_dir")
            )


def load_weights(
    model: nn.Module, weights: dict[str, torch.Tensor], path: Path, free: str = ""
) -> tuple[list[str], list[str]]:
    """Copy `weights` into `model`: (tensors that kept their initial values, weights that found no
    place).

    Only names that match the pattern `free` may be among those. Raises CheckpointError naming what
    does not fit.
    """
    own = model.state_dict()
    for name, tensor in weights.items():
        if name in own and own[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensor.shape)} there, {tuple(own[name].shape)} here"
            )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    for name in sorted({*missing, *unexpected}):
        if not (free and re.fullmatch(free, name)):
            hint = (
                ": its head has weights of its own, say --tie_embeddings=False"
                if name == "lm_head.weight"
                else ""
            )
            word = "missing" if name in missing else f"not part of this model{hint}"
            raise CheckpointError(f"{path}: {name} is {word}")
    return missing, unexpected


def restore(
    path: Path,
    state: dict[str, Any],
    config: GPTConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put `state` of find_checkpoint into a run of `config`, whose model and optimiser may be
    sharded, or not.

    Betas and weight decay stay the run's own. Raises CheckpointError for another model, and for
    weights alone.
    """
    if "optimizer" not in state:
        raise CheckpointError(
            f"{path} holds weights alone: choose another out_dir, and --init_from={path}"
        )
    check_same_model(state["config"], config, path)
    if "shards" in state or is_sharded(model):
        from training.sharded import place_state  # DCP takes a second to import

        state = place_state(path, state, model, optimizer)
    load_weights(model, state["model"], path)
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state["optimizer"])
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])


@dataclass(frozen=True)
class MergeConfig:
    """training/checkpoint.py has no keys."""


def main(argv: list[str]) -> None:
    _, spec = parse_args(MergeConfig, argv, __doc__, spec=True)
    folder = Path(spec)
    paths = (
        [folder / name for name in (LAST, BEST) if (folder / name).exists()]
        if folder.is_dir()
        else [folder]
    )
    if not paths:
        raise CheckpointError(f"{spec}: no {LAST} and no {BEST} in this folder: check the path")
    if not paths[0].exists():
        raise CheckpointError(f"{paths[0]}: no such checkpoint: check the path")
    lock = FolderLock(paths[0].parent, lambda: False)  # a run that goes on there would save over it
    for path in paths:
        save_checkpoint(path, read_checkpoint(path))
        print(f"{path} is one file")
    lock.release()


if __name__ == "__main__":
    run_program(main)
