"""Experiment trackers beside log.jsonl: Weights & Biases, Trackio, TensorBoard.

Each is a package of its own, imported only where it is asked for.

A run has an id of its own, which its folder keeps: two folders of one name, on two machines or one
after the other, are two runs.
"""

import contextlib
import importlib.util
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.inputs import read_regular
from common.output import write_bytes_atomically

ID = "tracker_id"  # the file in the run folder
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

        # What was written after the checkpoint is hidden: those steps are done again. From 0 on,
        # what an earlier run has left here is hidden.
        purge_step = 0 if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(folder, purge_step=purge_step)

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):  # a list is no curve
                self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class _Trackio:
    """A run of Trackio, whose messages go to stderr: a program's output may end with JSON."""

    def __init__(self, config: dict[str, Any], run_id: str):
        import trackio

        name = Path(config["out_dir"]).as_posix().replace("/", "-")
        self.trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):
            self.run = trackio.init(
                project=config["tracker_project"],
                name=f"{name.lstrip('-')}-{run_id}",  # `trackio get --run` takes it
                config=config,
                resume="allow",
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


def start_tracker(config: dict[str, Any], resume_step: int | None, is_another: bool) -> Any:
    """Start the run's tracker: something with `log(values, step)` and `finish()`, or None.

    Args:
        config: every key of the run.
        resume_step: step of the checkpoint that the run goes on from; None: a new run.
        is_another: for Weights & Biases and Trackio this is another run than the folder had before,
            if any. Neither takes back what it was told of a step.

    Raises:
        UserError: it cannot start.
    """
    tracker = config.get("tracker", "off")
    if tracker == "off":
        return None
    out_dir = Path(config["out_dir"])
    try:
        if tracker == "tensorboard":
            return _TensorBoard(out_dir / "tensorboard", resume_step)
        # A resumed run has the same id, so it goes on with the same curves.
        run_id = None if is_another else kept_id(out_dir)
        run_id = run_id or uuid.uuid4().hex[:12]
        started = (_Trackio if tracker == "trackio" else _start_wandb)(config, run_id)
        write_bytes_atomically(out_dir / ID, f"{run_id}\n".encode())
        return started
    except Exception as error:  # whatever its network, its database and the disk raise
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{tracker} cannot start ({reason}): pip install {tracker}, put right what it says, or "
            "leave the tracker off"
        ) from None


def kept_id(out_dir: Path) -> str | None:
    """Return the id that a run folder keeps; None where it keeps none."""
    path = out_dir / ID
    if not path.exists():
        return None
    found = re.fullmatch(r"([0-9a-f]{12})\n", read_regular(path, 1 << 10).decode("latin-1"))
    return found and found[1]


def _start_wandb(config: dict[str, Any], run_id: str) -> Any:
    import wandb

    return wandb.init(
        project=config["tracker_project"],
        name=Path(config["out_dir"]).name,
        config=config,
        dir=config["out_dir"],
        resume="allow",
        id=run_id,
    )
