"""A worker of the study "which norm?" with real runs.

python -m pytest tests/repro/test_which_norm.py
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, TINY, write_tiny_shards

from common.errors import UserError
from evidence.stages import RateStage
from evidence.study import Plan
from repro.which_norm import PLAN, Worker, parse, together

TOY = """
name = "toy"
baseline = "rms"
[arms]
rms = "rms"
shared = "coupled --norm_plan='{{block_0}}'"
[rates]
extensions = 0
tolerance = 0.05
seeds = [1, 2]
own_initialisation = []
[scales.cpu]
config = "{config}"
rates = [1e-2]
[scales.cpu.shapes.W]
n_layer = 2
init_std = 0.05
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    data = write_tiny_shards(tmp_path / "data")
    keys = dict(word.removeprefix("--").split("=") for word in TINY) | {"max_iters": "10"}
    lines = [
        f"{name} = {value!r}" if name == "device" else f"{name} = {value}"
        for name, value in keys.items()
        if name not in ("n_layer", "learning_rate")
    ]
    config = tmp_path / "config.py"
    config.write_text("\n".join([*lines, f"data_dir = {str(data)!r}", "full_val = True"]))
    plan = tmp_path / "plan.toml"
    plan.write_text(TOY.format(config=config))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Worker(Plan(plan, "cpu"), tmp_path / "out", tmp_path / "kept")


def test_a_stage_is_trained_kept_and_concluded(worker, capfd):
    stage = worker.stage(RateStage)
    worker.do(stage)
    path = worker.conclusion_of("rates")
    found = json.loads(path.read_text())
    assert found["study"] == worker.plan.study and len(found["commits"]) == 1
    assert found["ranking"] == ["shared"]
    assert set(found["shapes"]["W"]["shared"]["losses"]["0.01"]) == {"1", "2"}
    assert "done" in capfd.readouterr().out
    # Everything is in the archive: without the folders nothing is trained again.
    shutil.rmtree(worker.out)
    before = path.read_bytes()
    worker.do(stage)
    assert not worker.out.exists() and path.read_bytes() == before
    # A conclusion that no longer follows from the runs is not written over.
    path.write_text(path.read_text().replace('"rate": 0.01', '"rate": 0.02'))
    with pytest.raises(UserError, match="the runs now give another conclusion"):
        worker.do(stage)
    # Nor is one of another plan read.
    path.write_text(path.read_text().replace(worker.plan.study, "toy cpu 0"))
    with pytest.raises(UserError, match="of another plan"):
        worker.stage(RateStage)


def test_the_committed_plan_says_what_lies_ahead():
    for scale in ("cpu", "30m", "124m"):
        command = [sys.executable, "-m", "repro.which_norm", scale, "--dry-run"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"OUT": "/none", "RESULTS": "/none"},
        )
        assert done.returncode == 0 and "| rates | W | 86 |" in done.stdout, done.stderr
        assert "non-inferior" in done.stdout
        assert ("initialisation" in done.stdout) == (scale != "cpu")


def test_every_arm_of_the_plan_is_a_model():
    import shlex

    from configurator import parse_args
    from train import TrainConfig

    for scale in ("cpu", "30m", "124m"):
        plan = Plan(ROOT / PLAN, scale)
        for shape in plan.shapes:
            for arm in plan.arms:
                norm_type, *words = shlex.split(plan.words(arm, shape))
                keys = [f"--{name}={value}" for name, value in shape.keys.items()]
                config, _ = parse_args(
                    TrainConfig,
                    [str(ROOT / plan.config), *keys, f"--norm_type={norm_type}", *words],
                )
                assert config.norm_type == norm_type


def test_seeds_that_want_the_same_share_a_sweep():
    assert together({1: ["a", "b"], 2: ["a", "b"], 3: ["a"]}) == [
        ([1, 2], ["a", "b"]),
        ([3], ["a"]),
    ]
    assert parse(["cpu", "--until=rates"]) == ("cpu", False, "rates")
