"""Checkpoints of format 1 (until commit d806d57), whose moments had numbers instead of names.

python -m pytest tests/training/test_old_checkpoints.py
"""

from pathlib import Path

import pytest
import torch
from helpers import TINY, keys_of, losses, same_weights

from model import GPT
from train import TrainConfig, optimizer_of
from training.checkpoint import LAST, load_moments, model_config, moments_of


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
    return {**state, "format": 1, "model": weights, "optimizer": old}


@pytest.mark.parametrize("case", ["rms", "taper", "muon"])
def test_a_run_goes_on_bit_for_bit(train_ok, tiny_data, tmp_path, case):
    """Every gain has the same shape: with the order of today's model they would get each other's
    moments. The taper is in its decay, where some parameters have none yet.
    """
    keys = keys_of("rms" if case == "muon" else case)
    keys += ("--optimizer=muon", "--activation=swiglu") if case == "muon" else ()
    words = (*TINY, *keys, "--bias=True", "--lr_schedule=constant", f"--data_dir={tiny_data}")
    train_ok(*words, "--max_iters=20", f"--out_dir={tmp_path / 'whole'}")
    train_ok(*words, "--max_iters=14", f"--out_dir={tmp_path / 'half'}")
    path = tmp_path / "half" / LAST
    torch.save(as_format_1(torch.load(path, weights_only=True)), path)
    train_ok(*words, "--max_iters=20", f"--out_dir={tmp_path / 'half'}")
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "half", tmp_path / "whole")


def test_moments_find_parameters_that_have_new_names():
    """Of both formats; the parameters had other names then, and another order."""
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=16, norm_type="rms"
    )
    source = GPT(config)
    optimizer = optimizer_of(config, source)
    source(torch.arange(8)[None], torch.arange(8)[None])[0].backward()
    optimizer.step()
    expected = moments_of(dict(source.named_parameters()), optimizer)
    new = {"config": vars(config), "model": source.state_dict(), "optimizer": expected}
    for saved in ({"format": 2, **new}, as_format_1(new)):
        model = GPT(config)
        parameters = dict(model.named_parameters())
        optimizer = optimizer_of(config, model)
        saved["model"] = {f"old.{name}": tensor for name, tensor in saved["model"].items()}
        if saved["format"] == 2:
            saved["optimizer"] = {f"old.{name}": values for name, values in expected.items()}
        load_moments(Path(), saved, parameters, optimizer, lambda name: name.removeprefix("old."))
        found = moments_of(parameters, optimizer)
        assert found.keys() == expected.keys() == parameters.keys()
        for name, values in expected.items():
            assert all(torch.equal(found[name][key], value) for key, value in values.items())
