"""Get models of Hugging Face: from a folder, the hub, the package transformers.

Nothing here knows our GPT.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import HFError
from common.output import parse_json

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.pt)")  # owner/name, but not the path of a checkpoint


def resolve_hub(name: str) -> Path:
    """Return the folder of the hub repository `name`, e.g. "Qwen/Qwen3-0.6B".

    It is downloaded into Hugging Face's cache if it is not there. Raises HFError where
    huggingface_hub is not installed or the repository cannot be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise HFError(
            f"{name}: hub names need a package: pip install huggingface_hub, or give a folder"
        ) from None
    try:
        patterns = ["*.json", "*.jinja", "model*.safetensors", "tokenizer*", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # whatever the hub, the HTTP library and the disk raise
        raise HFError(
            f"{name}: not a local folder{_neighbours(Path(name))}, and the hub did not give it "
            f"({type(error).__name__}): check name, network and access rights, or give a folder"
        ) from None


def _neighbours(path: Path) -> str:
    """Name the folders beside a path that does not exist: the name may be mistyped; or ""."""
    if not path.parent.is_dir():
        return ""
    names = sorted(folder.name for folder in path.parent.iterdir() if folder.is_dir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f" ({path.parent} has {shown or 'no folders'})"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder. Raises HFError."""
    path = folder / "config.json"
    if not path.is_file():
        raise HFError(
            f"{folder}: no config.json there, so not a Hugging Face model folder: check the path"
        )
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise HFError(f"{path}: not a JSON object ({error}): download it again") from None


def import_transformers() -> ModuleType:
    """Import transformers.

    It must not take our folder kernels/ for Hugging Face's package of that name. transformers looks
    once for a module `kernels` and remembers the answer, so the name is hidden while it looks, and
    it always runs its own plain PyTorch code. Raises HFError if transformers is not installed.
    """
    hidden = sys.modules.get("kernels")
    # None makes find_spec and import report that there is no such module.
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.integrations.hub_kernels")  # where it looks
        return transformers
    except ModuleNotFoundError as error:
        raise HFError(
            f"this needs a package ({error.name} is missing): pip install transformers"
        ) from None
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden
