"""Experiment trackers beside log.jsonl: what they are told, and TensorBoard where it is installed.

python -m pytest tests/training/test_tracker.py
"""

import shutil
import sys
from unittest import mock

import pytest
from helpers import TINY, events, steps_of

from common.errors import UserError
from train import main
from training.checkpoint import LAST
from training.loop import Loop

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


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_what_is_another_run_to_a_tracker(package, train, tmp_path, monkeypatch):
    """Neither takes back what it was told of a step: told again under the same id, it is lost."""
    out = tmp_path / "out"

    def id_of(*words: str) -> str:
        fake = mock.MagicMock()
        monkeypatch.setitem(sys.modules, package, fake)
        train(f"--tracker={package}", "--checkpoint_interval=2", *words)
        return fake.init.call_args.kwargs["id" if package == "wandb" else "name"]

    def keep(self: Loop, name: str, save=Loop.save) -> None:
        save(self, name)
        shutil.copy(self.folder.path / name, tmp_path / f"step{self.step}.pt")

    monkeypatch.setattr(Loop, "save", keep)
    ids = [id_of("--max_iters=4")]
    ids.append(id_of("--max_iters=6"))  # the same run, with more steps
    shutil.copy(tmp_path / "step2.pt", out / LAST)
    ids.append(id_of("--max_iters=4"))  # from an earlier step, done as before
    assert set(ids) == {ids[0]}
    shutil.copy(tmp_path / "step2.pt", out / LAST)
    ids.append(id_of("--max_iters=4", "--learning_rate=1e-3"))  # and not as before
    ids.append(id_of("--max_iters=6", "--learning_rate=1e-3"))  # the same as that one
    assert ids[4] == ids[3]
    out.rename(tmp_path / "moved")
    ids.append(id_of("--max_iters=2"))  # a new run in a folder of the same name
    (out / "log.jsonl").unlink()
    ids.append(id_of("--max_iters=4", f"--resume={tmp_path / 'step2.pt'}"))  # a run that branches
    assert len(set(ids[2:])) == 4


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


def test_tensorboard_hides_the_run_before(train, tmp_path):
    """It left no checkpoint, and the run that begins in its folder is another one."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("--max_iters=5", "--tracker=tensorboard")
    for path in (tmp_path / "out").glob("*.pt"):
        path.unlink()
    train("--max_iters=2", "--tracker=tensorboard")
    found = EventAccumulator(str(tmp_path / "out/tensorboard")).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2]
