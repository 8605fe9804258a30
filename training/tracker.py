"""Experiment trackers beside log.jsonl: Weights & Biases, Trackio, TensorBoard.

Each is a package of its own, imported only where it is asked for.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError

TRACKERS = ("off", "wandb", "trackio", "tensorboard")  # each needs the package of its name


def check_tracker(tracker: str) -> None:
    """Check that the run's tracker is installed. Raises UserError."""
    if tracker == "off":
        return
    package = importlib.util.find_spec(tracker)
    # A folder wandb/, which Weights & Biases leaves behind, is found as a package without a file.
    if package is None or package.origin is None:
        raise UserError(f"{tracker} is not installed: pip install {tracker}, or --tracker=off")


class _TensorBoard:
    """Event files in the run folder. Methods as of a run of Weights & Biases."""

    def __init__(self, folder: Path, resume_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        # What was written after the checkpoint is hidden: those steps are done again.
        purge_step = None if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(folder, purge_step=purge_step)

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):  # a list is no curve
                self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class _Trackio:
    """A run of Trackio, whose messages go to stderr: a program's output may end with JSON."""

    def __init__(self, config: dict[str, Any], name: str, resume_step: int | None):
        import trackio

        self.trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):
            self.run = trackio.init(
                project=config["tracker_project"],
                name=name.lstrip("-"),  # `trackio get --run` takes it
                config=config,
                resume="never" if resume_step is None else "allow",
                embed=False,
                # Its threads would take time from a run whose speed is measured.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, values: dict[str, Any], step: int) -> None:
        self.run.log(values, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            # Not run.finish(), after which Trackio finishes it, and prints, when Python ends.
            self.trackio.finish()


def start_tracker(config: dict[str, Any], resume_step: int | None) -> Any:
    """Start the run's tracker: something with `log(values, step)` and `finish()`, or None.

    Args:
        config: every key of the run.
        resume_step: step of the checkpoint that the run goes on from; None: a new run.

    Raises:
        UserError: it cannot start.
    """
    tracker = config.get("tracker", "off")
    if tracker == "off":
        return None
    out_dir = Path(config["out_dir"])
    # A resumed run has the same name, so it goes on with the same curves.
    name = out_dir.as_posix().replace("/", "-")
    try:
        if tracker == "tensorboard":
            return _TensorBoard(out_dir / "tensorboard", resume_step)
        if tracker == "trackio":
            return _Trackio(config, name, resume_step)
        return _start_wandb(config, name)
    except Exception as error:  # whatever its network, its database and the disk raise
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{tracker} cannot start ({reason}): pip install {tracker}, put right what it says, or "
            "leave the tracker off"
        ) from None


def _start_wandb(config: dict[str, Any], name: str) -> Any:
    import wandb

    return wandb.init(
        project=config["tracker_project"],
        name=Path(config["out_dir"]).name,
        config=config,
        dir=config["out_dir"],
        resume="allow",
        id=name,
    )
