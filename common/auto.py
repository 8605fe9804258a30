"""The keys that a run chooses a value for (`auto`), and what they are where the device decides."""

from typing import Any

# Key -> its value that says so. How a run chooses: training/choices.py.
AUTO = {"dtype": "auto", "compile": None, "merge_micro_batches": 0}


def device_kind(name: str) -> str:
    """Return cpu, mps or cuda for a device as a run's provenance names it."""
    return next((kind for kind in ("cpu", "mps") if name.startswith(kind)), "cuda")


def by_device(kind: str) -> dict[str, Any]:
    """Return what the keys of AUTO stand for where the kind of device alone decides."""
    on_gpu = kind == "cuda"
    return {
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": on_gpu,
        "merge_micro_batches": 1,
    }
