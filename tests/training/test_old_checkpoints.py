"""Checkpoints of format 1 (until commit d806d57), whose moments had numbers instead of names.

python -m pytest tests/training/test_old_checkpoints.py
"""

import re
from pathlib import Path

import pytest
import torch
from helpers import TINY, keys_of, losses, same_weights

from model import GPT
from training.checkpoint import LAST, model_config


def as_format_1(state: dict) -> dict:
    """Write a checkpoint down as d806d57 did, for a model whose parameters had another order."""
    model = GPT(model_config(state["config"], Path()))
    weights = dict(reversed(state["model"].items()))
    names = [name for name in weights if name in dict(model.named_parameters())]
    moments = state["optimizer"]
    matrices = [name for name in names if "momentum.0" in moments.get(name, {})]
    rest = [name for name in names if name not in matrices]
    # what decays, then the others
    groups = [[name for name in rest if (weights[name].dim() < 2) == last] for last in (0, 1)]
    numbers = {name: number for number, name in enumerate(groups[0] + groups[1])}
    old = {
        "state": {numbers[name]: moments[name] for name in sorted(numbers) if name in moments},
        "param_groups": [{"params": [numbers[name] for name in group]} for group in groups],
    }
    if matrices:
        momenta = [part for name in matrices for part in moments[name].values()]
        old = {"momenta": momenta, "adamw": old}
    weights = {old_name(name, model): tensor for name, tensor in weights.items()}
    return {**state, "format": 1, "model": weights, "optimizer": old}


def old_name(name: str, model: GPT) -> str:
    """Return what d806d57 called a parameter or buffer: a place had those of its norm itself."""
    found = re.fullmatch(r"(.*norm[12_fe]+)\.norm\.(.*)", name)
    if found is None:
        return name
    place = model.get_submodule(found[1])
    part = "base." if place.replaces else "input." if place.output is not None else ""
    return f"{found[1]}.{part}{found[2]}"


@pytest.mark.parametrize("case", ["rms", "taper", "muon", "peri", "keel"])
def test_a_run_goes_on_bit_for_bit(train_ok, tiny_data, tmp_path, case):
    """Every gain has the same shape: with the order of today's model they would get each other's
    moments. The taper is in its decay, where some parameters have none yet.
    """
    keys = keys_of("rms" if case == "muon" else case)
    keys += ("--taper_warmup=3", "--taper_end=9") if case == "taper" else ()
    keys += ("--optimizer=muon", "--activation=swiglu") if case == "muon" else ()
    words = (*TINY, *keys, "--bias=True", "--lr_schedule=constant", f"--data_dir={tiny_data}")
    train_ok(*words, "--max_iters=8", f"--out_dir={tmp_path / 'whole'}")
    train_ok(*words, "--max_iters=5", f"--out_dir={tmp_path / 'half'}")
    path = tmp_path / "half" / LAST
    torch.save(as_format_1(torch.load(path, weights_only=True)), path)
    train_ok(*words, "--max_iters=8", f"--out_dir={tmp_path / 'half'}")
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "half", tmp_path / "whole")
