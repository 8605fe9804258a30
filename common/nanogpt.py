"""nanoGPT's formats, read as ours: its keys, checkpoints and data (its commit 3adf61e).

Since ecb82de; nothing here can go while people come from nanoGPT. Its shards without a header:
data/shards.py.
"""

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, DataError
from common.inputs import read_regular
from common.output import parse_json

# --------------------------------------------------------------------------------------------- keys

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


# -------------------------------------------------------------------------------------- checkpoints

FILE = "ckpt.pt"
# Their module -> ours; compiled, all names have a prefix.
NAMES = {
    r"(_orig_mod\.)?(transformer\.)?": "",
    r"h\.": "blocks.",
    r"ln_f\.": "norm_f.norm.",
    r"(.*\.)ln_([12])\.": r"\1norm\2.norm.",
    r"(.*)\.c_attn\.": r"\1.qkv.",
    r"(.*)\.attn\.c_proj\.": r"\1.attn.proj.",
    r"(.*)\.c_fc\.": r"\1.up.",
    r"(.*)\.mlp\.c_proj\.": r"\1.mlp.down.",
}
MASK = re.compile(r"blocks\.\d+\.attn\.bias")  # causal, of versions without flash attention


def as_ours(
    state: dict[str, Any], path: Path, read_meta: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Return a checkpoint of nanoGPT as one of ours, with the tokenizer of its data.

    Linears are stored as ours are. The optimiser's state is left out. The data are in data/DATASET
    beside the run folder or here; else they are GPT-2's, if the vocabulary is.

    Args:
        state: what the file holds.
        path: of the file.
        read_meta: data folder -> what tells its tokenizer, {} where nothing does (data/shards.py).

    Raises:
        CheckpointError: its entries are not what nanoGPT saves.
    """
    try:
        weights = {our_name(name): tensor for name, tensor in state["model"].items()}
        head = weights.pop("lm_head.weight")
        is_tied = head.equal(weights["wte.weight"])
        config = {"bias": True, **state["model_args"], "tie_embeddings": is_tied}
        meta: dict[str, Any] = {}
        dataset = state.get("config", {}).get("dataset")
        if dataset:
            for folder in (path.resolve().parents[1], Path()):
                meta = meta or read_meta(folder / "data" / dataset)
        if not meta and config["vocab_size"] >= GPT2["vocab_size"]:
            meta = GPT2
    except (LookupError, TypeError, AttributeError):  # a foreign file may hold anything
        raise CheckpointError(
            f"{path}: its model_args are nanoGPT's, its other entries are not: use another one"
        ) from None
    if not is_tied:
        weights["lm_head.weight"] = head
    weights = {name: tensor for name, tensor in weights.items() if not MASK.fullmatch(name)}
    return {"step": state.get("iter_num", 0), "config": config, "meta": meta, "model": weights}


def our_name(name: str) -> str:
    """Return our name of one of their tensors."""
    for theirs, ours in NAMES.items():
        name = re.sub(f"^{theirs}", ours, name)
    return name


# --------------------------------------------------------------------------------------------- data

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257}  # of data that do not say
ROWS = 50304  # of the embedding then; those beyond the tokens take part in the loss
MOST_PICKLED = 1 << 24  # bytes that are read of a meta.pkl; nanoGPT's have about 1,000


def read_pickled_meta(path: Path) -> dict:
    """Read the meta.pkl of nanoGPT's character data, as the meta.json of ours. Raises DataError."""
    try:
        with path.open("rb") as file:
            meta = PlainUnpickler(io.BytesIO(file.read(MOST_PICKLED))).load()
        text = "".join(meta["itos"][index] for index in range(meta["vocab_size"]))
        text.encode()  # no half of a surrogate pair
        if meta["stoi"] != {char: index for index, char in enumerate(text)}:
            raise ValueError
    except Exception:  # an unpickler raises nearly every kind
        raise DataError(
            f"{path}: not what nanoGPT writes for characters (vocab_size, itos, stoi): prepare the "
            "data again, or remove the file if the tokens are GPT-2's"
        ) from None
    return {"tokenizer": "chars", "vocab_size": len(text), "chars": text}


class PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, strings and containers. Without classes a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}")
