"""Experiment trackers beside log.jsonl: packages that only note what they are told, and the real
ones where they are installed.

    python -m pytest tests/training/test_tracker.py
"""

import json
import sys

import pytest
import torch
from helpers import TINY, records, steps_of

from common.errors import UserError
from evidence.runs import Run
from train import main

# A package with the face of wandb and trackio. It writes one line a call.
FAKE = """
import json

runs = []

class Run:
    def write(self, *call):
        with open({notes!r}, "a") as notes:
            print(json.dumps(call), file=notes)

    def log(self, values, step):
        self.write("log", step, values)

    def finish(self):
        print("chatter")
        self.write("finish")

def init(**words):
    print("chatter")
    run = Run()
    run.write("init", words)
    runs.append(run)
    return run

def finish():
    runs[-1].finish()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(package) -> a function that reads its calls: (what, ...) each."""

    def install(package: str):
        notes = tmp_path / "notes.jsonl"
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / f"{package}.py").write_text(FAKE.format(notes=str(notes)))
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return lambda: [json.loads(line) for line in notes.read_text().splitlines()]

    yield install
    for package in ("wandb", "trackio"):
        sys.modules.pop(package, None)


@pytest.fixture(autouse=True)
def handlers_stay(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *words: None)


@pytest.fixture
def train(tiny_data, tmp_path):
    """train(*words): one run in out/, or the rest of it."""

    def run(*words: str) -> None:
        keys = (*TINY, "--device=cpu", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'out'}")
        main([*keys, *words])

    return run


def told(folder) -> list[tuple]:
    """What a tracker must be told: step and values of each step and evaluation of a log."""
    found = []
    for record in records(folder):
        if record.pop("event") in ("step", "eval"):
            step = record.pop("step")
            found.append((step, {name: v for name, v in record.items() if v is not None}))
    return found


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_is_told_what_the_log_says(package, fake, train, tmp_path, capsys):
    calls = fake(package)
    words = (f"--tracker={package}", "--tracker_project=ours")
    train(*words, "--max_iters=4")
    assert ("chatter" in capsys.readouterr().out) == (package == "wandb")
    (first, begun), *logged, (last,) = calls()
    assert (first, last) == ("init", "finish")
    assert begun["project"] == "ours" and begun["config"]["max_iters"] == 4
    assert [(step, values) for _, step, values in logged] == told(tmp_path / "out")
    assert [step for _, step, values in logged if "lr" in values] == [1, 2, 3, 4]
    # The same run, resumed, is the same run there.
    train(*words, "--max_iters=6")
    again, *logged, _ = calls()[len(logged) + 2 :]
    key = "id" if package == "wandb" else "name"
    assert again[1]["resume"] == "allow" and again[1][key] == begun[key]
    assert [step for _, step, values in logged if "lr" in values] == [5, 6]


def test_a_missing_package_is_one_line_before_anything_is_written(train, tmp_path, monkeypatch):
    """Also where Weights & Biases has left a folder of its name behind."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for left in (False, True):
        if left:
            (tmp_path / "wandb").mkdir()
        with pytest.raises(UserError, match="wandb is not installed: pip install wandb"):
            train("--tracker=wandb")
        assert not (tmp_path / "out").exists()


def test_a_tracker_that_cannot_start_leaves_the_log_alone(fake, train, tmp_path):
    train("--max_iters=2")
    before = (tmp_path / "out/log.jsonl").read_bytes()
    fake("trackio")
    (tmp_path / "packages/trackio.py").write_text("def init(**words): raise OSError('no room')")
    with pytest.raises(UserError, match=r"trackio cannot start \(OSError: no room\)"):
        train("--max_iters=3", "--tracker=trackio")
    assert (tmp_path / "out/log.jsonl").read_bytes() == before


def test_a_tracker_changes_no_result(fake, train, tmp_path):
    """A run of before the key goes on, and for report.py the key is no other setting."""
    fake("trackio")
    train("--max_iters=2", "--lr_schedule=constant")
    path = tmp_path / "out/ckpt_last.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["tracker"]
    torch.save(state, path)
    for steps, more in ((4, "--tracker=trackio"), (6, "--tracker=off")):
        train(f"--max_iters={steps}", "--lr_schedule=constant", more)
    changes = [record["changed"] for record in records(tmp_path / "out") if "changed" in record]
    assert changes == [["max_iters 2 -> 4"], ["max_iters 4 -> 6", "tracker trackio -> off"]]
    assert "tracker" not in Run(tmp_path / "out").problem()


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
