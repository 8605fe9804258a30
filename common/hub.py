"""Get models of Hugging Face: from a folder, the hub, the package transformers.

Nothing here knows our GPT.
"""

import hashlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import HFError
from .inputs import read_regular
from .output import parse_json

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.pt)")  # owner/name, but not the path of a checkpoint
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # as nanoGPT names them
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # {"weight_map": {tensor: file}} of weights in several files
MOST_JSON = 1 << 24  # bytes of a config.json
MOST_LAYERS = 2048  # of a foreign config.json
# Files next to the weights that an export copies.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
)


def resolve_hub(name: str) -> Path:
    """Return the folder of the hub repository `name`, e.g. "Qwen/Qwen3-0.6B".

    It is downloaded into Hugging Face's cache if it is not there. Raises HFError where it cannot
    be.
    """
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.jinja", WEIGHTS, "tokenizer*", "*.txt"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        names = weight_names(folder) if (folder / "config.json").exists() else [WEIGHTS]
        if names != [WEIGHTS]:
            snapshot_download(name, revision=folder.name, allow_patterns=names)
        return folder
    except HFError:
        raise
    except Exception as error:  # whatever the hub, the HTTP library and the disk raise
        raise HFError(
            f"{name}: not a local folder, and the hub did not give it ({type(error).__name__}): "
            "check name, network and access rights, or give a folder"
        ) from None


def weight_names(folder: Path) -> list[str]:
    """Return the names of the safetensors files that transformers reads of a model's folder.

    They are the file that config.json names (`transformers_weights`), else model.safetensors, else
    the shards that the index names. Other files, as of an older version, do not count. Raises
    HFError for an index that is damaged, or names files outside the folder.
    """
    name = read_config(folder).get("transformers_weights")
    if name is None:
        is_one = (folder / WEIGHTS).is_file() or not (folder / INDEX).exists()
        name = WEIGHTS if is_one else INDEX
    names = [name]
    if str(name).endswith(".index.json"):
        shards = read_config(folder, name).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
    is_good = all(isinstance(file, str) and file.endswith(".safetensors") for file in names)
    if not names or not is_good or any({"", "..", "/"} & {*Path(file).parts} for file in names):
        raise HFError(
            f"{folder / str(name)}: names no safetensors files of this folder: get the folder again"
        )
    return sorted(set(names))


def model_folder(spec: str | Path) -> Path:
    """Return the path of a model, or the folder that a hub name stands for. Raises HFError."""
    path = Path(spec)
    if str(spec) in GPT2 and not path.exists():
        return resolve_hub(f"openai-community/{spec}")
    return resolve_hub(str(spec)) if not path.exists() and HUB_NAME.fullmatch(str(spec)) else path


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON file of a model's folder. Raises HFError."""
    path = folder / name
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise HFError(f"{folder}: an adapter, no model: merge it into its model, and name that")
        raise HFError(f"{folder}: no {name} there, so not the folder of such a model: check it")
    try:
        return dict(parse_json(read_regular(path, MOST_JSON)))
    except (OSError, ValueError, TypeError) as error:
        raise HFError(f"{path}: not a JSON object ({error}): get the folder again") from None


def converted_from(certificate: bytes) -> dict[str, str]:
    """Return what config.json says of a conversion: its weights alone would not show it.

    Args:
        certificate: JSON of certificate.json; older ones say less.

    Returns:
        The "source" and the SHA-256 of its "weights", what it was converted "to", and the SHA-256
        of the "certificate".
    """
    told = parse_json(certificate)
    return {
        "source": told.get("source", ""),
        "weights": told.get("weights", {}).get("before", ""),
        "to": told.get("to", ""),
        "certificate": hashlib.sha256(certificate).hexdigest(),
    }


def companions(source: Path) -> Iterator[Path]:
    """Yield the files of COMPANIONS in a folder, for a copy that people may publish.

    A link counts only if it leads to a regular file of the folder, or of the hub's cache that the
    folder is part of (models--OWNER--NAME/snapshots/COMMIT, its files in blobs).
    """
    folder = source.resolve()
    own = [folder]
    if folder.parent.name == "snapshots":
        own.append(folder.parent.with_name("blobs"))
    for name in COMPANIONS:
        real = (folder / name).resolve()
        if real.is_file() and real.parent in own:
            yield folder / name


def import_transformers() -> ModuleType:
    """Import transformers.

    It must not take our folder kernels/ for Hugging Face's package of that name. transformers looks
    once for a module `kernels` and remembers the answer, so the name is hidden while it looks, and
    it always runs its own plain PyTorch code. Installed we have no folder of that name.
    """
    if __package__ != "common":  # installed, as nanonorm.common
        return importlib.import_module("transformers")
    hidden = sys.modules.get("kernels")
    # None makes find_spec and import report that there is no such module.
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.integrations.hub_kernels")  # where it looks
        return transformers
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden
