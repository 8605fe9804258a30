"""Experiment trackers beside log.jsonl: what they are told, and TensorBoard where it is installed.

python -m pytest tests/training/test_tracker.py
"""

import sys
from unittest import mock

import pytest
from helpers import TINY, events, steps_of

from common.errors import UserError
from train import main

pytestmark = pytest.mark.usefixtures("handlers_stay")


@pytest.fixture
def train(tiny_data, tmp_path):
    """train(*words): one run in out/, or the rest of it."""

    def run(*words: str) -> None:
        main([*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'out'}", *words])

    return run


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_is_told_what_the_log_says(package, train, tmp_path, monkeypatch):
    begun = []  # what each run was begun with
    for steps, logged in ((4, [1, 2, 3, 4]), (6, [5, 6])):
        fake = mock.MagicMock()
        monkeypatch.setitem(sys.modules, package, fake)
        train(f"--tracker={package}", "--tracker_project=ours", f"--max_iters={steps}")
        begun.append(fake.init.call_args.kwargs)
        told = [(call.kwargs["step"], *call.args) for call in fake.init().log.call_args_list]
        assert [step for step, values in told if "lr" in values] == logged
    last = events(tmp_path / "out", "eval")[-1]
    assert told[-1][0] == 6 and told[-1][1].items() <= last.items()
    assert begun[0]["project"] == "ours" and begun[0]["config"]["max_iters"] == 4
    # The same run, resumed, is the same run there.
    key = "id" if package == "wandb" else "name"
    assert begun[1]["resume"] == "allow" and begun[1][key] == begun[0][key]


def test_a_tracker_that_cannot_start_leaves_the_log_alone(train, tmp_path, monkeypatch):
    """Also where Weights & Biases has left a folder of its name behind."""
    train("--max_iters=2")
    before = (tmp_path / "out/log.jsonl").read_bytes()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for said in ("No module named 'wandb'", "has no attribute 'init'"):
        with pytest.raises(UserError, match=rf"wandb cannot start \(.*{said}.*pip install wandb"):
            train("--max_iters=3", "--tracker=wandb")
        (tmp_path / "wandb").mkdir(exist_ok=True)
    assert (tmp_path / "out/log.jsonl").read_bytes() == before


def test_tensorboard_itself(train, tmp_path):
    """A resumed run hides what the first wrote after its checkpoint."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("--max_iters=3", "--tracker=tensorboard")
    train("--max_iters=5", "--tracker=tensorboard")
    found = EventAccumulator(str(tmp_path / "out/tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (record["step"], pytest.approx(record["loss"], rel=1e-6))
        for record in steps_of(tmp_path / "out")
    ]
    assert found.Scalars("val_loss")
