"""nanoGPT's keys, and what they are called here. Its checkpoints: training/nanogpt.py."""

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.inputs import read_regular
from common.output import parse_json

MOST = 1 << 24  # bytes of a config.json
MODEL = "the model"  # stands for the argument that names it
# Both checkpoints are kept, a tracker's run has its folder's name, the device decides.
NOT_NEEDED = ("always_save_checkpoint", "wandb_run_name", "backend")


def of_train(name: str, value: Any, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return our keys for a key of its train.py: none where nothing here needs it.

    None for a key, or a value, that is not nanoGPT's.

    Args:
        settings: every key of the run with its value.

    Raises:
        ConfigError: nothing here means the same; says what comes near.
    """
    match name, value:
        case "dataset", _:
            return {"data_dir": f"data/{value}"}
        case "eval_iters", int():
            tokens = settings["batch_size"] * settings["block_size"]
            return {"eval_tokens": value * tokens}
        case "decay_lr", False:
            return {"lr_schedule": "constant", "warmup_iters": 0}
        case "lr_decay_iters", _ if value != settings["max_iters"]:
            end = settings["max_iters"]
            raise ConfigError(f"the schedule ends at max_iters={end}: add --lr_decay_iters={end}")
        case "eval_only", True:
            raise ConfigError(
                "add --eval_only=False --max_iters=1, which evaluates before its only step"
            )
        case "wandb_log", bool():
            return {"tracker": "wandb" if value else "off"}
        case "wandb_project", _:
            return {"tracker_project": str(value)}
        case "init_from", "scratch":
            return {"init_from": ""}
        case "init_from", "resume":
            last = Path(settings["out_dir"], "ckpt_last.pt")
            if last.with_name("ckpt.pt").exists() and not last.exists():
                raise ConfigError(
                    f"nanoGPT's run in {last.parent} is only a start: add "
                    f"--init_from={last.parent} and another --out_dir"
                )
            return {"init_from": start_of(last.parent), "resume": str(last)}
        case (("lr_decay_iters" | "decay_lr" | "eval_only"), _):
            return {}
    return {} if name in NOT_NEEDED else None


def start_of(run: Path) -> str:
    """Return the `init_from` with which a run has started; empty where there is none."""
    file = run / "config.json"
    try:
        return parse_json(read_regular(file, MOST))["init_from"] if file.exists() else ""
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{file} is damaged: give --resume={run / 'ckpt_last.pt'}") from None


def of_sample(name: str, value: Any) -> dict[str, Any] | None:
    """Return our keys for a key of its sample.py, as of_train; MODEL for what names the model."""
    match name, value:
        case "start", _:
            return {"prompt": str(value)}
        case "init_from", "resume":
            return {}
        case (("init_from" | "out_dir"), _):
            return {MODEL: str(value)}
        case (("dtype" | "compile"), _):
            raise ConfigError("a model computes as it is stored, in eager mode: leave it out")
    return None
