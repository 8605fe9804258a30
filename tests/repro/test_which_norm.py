"""A worker of the study "which norm?" with real runs.

python -m pytest tests/repro/test_which_norm.py
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, TINY, write_tiny_shards
from study_rederived import Rederived, check, check_card
from study_runs import make_plan, write

from common.errors import ConfigError, UserError
from evidence.stages import RateStage, VerdictStage
from evidence.study import Plan, Wanted
from repro import which_norm
from repro.which_norm import PLAN, Worker, parse, together
from repro.which_norm_card import MARKERS, MEANING, Card, put

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


def test_a_seed_belongs_to_the_processor_that_began_it(worker, monkeypatch):
    class Begun:
        """Results of a stage of which a run of seed 3 was trained elsewhere."""

        def place_of(self, run):
            return {"device": "cpu (y)", "processor": "y"} if run.seed == 3 else None

    stage = SimpleNamespace(name="verdict")
    runs = [
        Wanted("verdict", "W", arm, arm, seed) for seed in (1, 2, 3) for arm in ("rms", "layer")
    ]
    place = {"device": "cpu (x)", "processor": "x"}
    monkeypatch.setattr(which_norm, "environment", lambda device: place)
    assert worker.own(stage, runs, Begun()) == runs[:2]  # a second worker on this machine adds one
    assert worker.own(stage, runs, Begun()) == worker.own(stage, runs, Begun()) == runs[:4]
    place = {"device": "cpu (x)", "processor": "z"}
    with pytest.raises(UserError, match=r"verdict, W: seed 1 was begun on another processor"):
        worker.own(stage, runs, Begun())
    assert worker.own(SimpleNamespace(name="rates"), runs, Begun()) == runs


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
        assert re.search(r"\| total \|  \| \d+ \| [\d,]+ \| \? \| 0 \|", done.stdout)


def test_a_stage_to_stop_after_is_one_of_the_scale(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    which_norm.main(["cpu", "--dry-run", "--until=rates"])
    out = capsys.readouterr().out
    assert "| rates |" in out and "| verdict |" not in out
    with pytest.raises(ConfigError, match="cpu has no such stage; its: rates, margin"):
        which_norm.main(["cpu", "--until=initialisation"])


def test_a_scale_may_have_rules_of_its_own():
    needed = {scale: Plan(ROOT / PLAN, scale).plan["verdict"] for scale in ("cpu", "30m", "124m")}
    assert {scale: rules["power"] for scale, rules in needed.items()} == {
        "cpu": 0.0,
        "30m": 0.8,
        "124m": 0.8,
    }
    assert all(rules["level"] == 0.05 for rules in needed.values())


def test_every_arm_of_the_plan_is_a_model():
    import shlex

    from configurator import parse_args
    from train import TrainConfig

    for scale in ("cpu", "30m", "124m"):
        plan = Plan(ROOT / PLAN, scale)
        assert set(MEANING) == set(plan.arms)
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


# ----------------------------------------------------------------------------------------- the card


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A worker of the made-up study, all stages of which are trained and concluded."""
    monkeypatch.chdir(ROOT)
    worker = Worker(make_plan(tmp_path), tmp_path / "out", tmp_path / "kept")

    def train(stage, runs):
        for run in runs:
            steps = re.search(r"max_iters=(\d+)", run.words)
            length = int(steps[1]) / 1000 if steps else 1.0
            write(worker.plan, worker.out / stage.name, run, loss_of(run, length))
        return False

    monkeypatch.setattr(worker, "train", train)
    for kind in worker.stages():
        worker.do(worker.stage(kind))
    return worker


def loss_of(run, length: float) -> float | None:
    """A loss with an optimum in the rate, a value of tokens, and noise by run."""
    rate = float(re.search(r"learning_rate=(\S+)", run.words)[1])
    if rate > 24e-3:
        return None
    best = {"rms": 4e-3, "layer": 3e-3, "shared": 6e-3}[run.arm]
    extra = {"rms": 0.0, "layer": 0.02, "shared": -0.03}[run.arm]
    noise = 0.004 * np.random.RandomState([run.seed, len(run.shape + run.arm)]).randn()
    return 1.4 + 0.03 * math.log2(rate / best) ** 2 + extra + noise - 0.4 * math.log(length)


def test_a_card_says_what_the_stages_concluded(finished, tmp_path):
    card = Card(finished)
    assert card.missing() == []
    text = card.text()
    assert "**Recommendation: `shared`**, for it is better in all shapes." in text
    tables = text.split("\n| loss minus that of ")[0]  # but for that of the later stages
    rows = {row.split("`")[1]: row for row in tables.splitlines() if row.startswith("| `")}
    assert "| worse in both shapes; the deficit is beyond the margin (p 1.00) |" in rows["layer"]
    assert "| better in both shapes |" in rows["shared"] and re.search(
        r"\+\d+\.\d % \(\+", rows["shared"]
    )
    assert "| the baseline |" in rows["rms"] and "43.4" in rows["rms"]
    page = card.page()
    for heading in ("Learning rates", "Margin", "Verdict", "Check", "Tokens", "Muon"):
        assert f"## {heading}" in page
    card.figure().draw(tmp_path / "card.png")
    assert (tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")
    put_here = tmp_path / "page.md"
    put_here.write_text(f"before\n{MARKERS[0].format('cpu')}\nold\n{MARKERS[1]}\nafter\n")
    put(put_here, "30m", text)  # a card of another scale stays
    assert "\nold\n" in put_here.read_text()
    put(put_here, "cpu", text)
    assert "old" not in put_here.read_text() and put_here.read_text().endswith("after\n")


def test_a_card_shows_what_diverged_and_what_is_not_settled(finished):
    path = finished.conclusion_of("check")
    found = json.loads(path.read_text())
    found["shapes"]["W"]["shared"]["learning_rate x 2"] = None
    found["not_settled"] = ["shared, D: learning_rate x 0.5", "rms, W: init_std x 2"]
    path.write_text(json.dumps(found))
    page = Card(finished).page()
    assert "| diverged |" in page
    row = next(row for row in page.splitlines() if row.startswith("| `shared` |"))
    assert "| better in both shapes; rate not settled in D |" in row
    tokens = finished.conclusion_of("tokens")
    found = json.loads(tokens.read_text())
    found["arms"]["shared"] |= {"difference": 0.03, "low": 0.02, "high": 0.04}
    found["arms"]["shared"]["contradicts"] = True
    tokens.write_text(json.dumps(found))
    text = Card(finished).text()
    assert (
        "| in W, verdict runs | in W, 4 times the tokens, the same rates (2 seeds) "
        "| in W, Muon, the best of 3 rates (2 seeds) |"
    ) in text
    assert re.search(r"\| `shared` .* \(\+0\.0200 to \+0\.0400\), worse, better before \|", text)
    assert "Better by half a margin with another `init_std`: rms, W: init_std x 2." in text
    verdict = finished.conclusion_of("verdict")
    found = json.loads(verdict.read_text())
    found["arms"]["shared"]["shapes"]["W"] |= {"low": -0.1, "high": 0.1}
    verdict.write_text(json.dumps(found))
    assert "+0.0300 (+0.0200 to +0.0400), worse, open before |" in Card(finished).text()
    found["diverged"]["rms"] = 1
    found["arms"] = {}
    verdict.write_text(json.dumps(found))
    assert "| not judged: 1 runs of the baseline diverged" in Card(finished).table(["layer"])


def test_a_card_says_what_is_missing(finished):
    for name in ("verdict", "check", "tokens", "muon"):
        finished.conclusion_of(name).unlink()
    text = Card(finished).text()
    assert "There is no recommendation before the verdicts." in text and "| none yet |" in text
    assert "`verdict` (the tests; " in text and "better" not in text
    finished.conclusion_of("margin").unlink()
    finished.conclusion_of("rates").unlink()
    assert "| arm |" not in Card(finished).text()


def test_an_amended_plan_keeps_the_stages_that_it_leaves_alone(finished, monkeypatch):
    old = finished.plan
    text = old.path.read_text().replace("205]", "205, 206]")
    old.path.write_text(text + f'[amends]\n"{old.hash[:16]}" = ["rates", "margin"]\n')
    plan = Plan(old.path, "toy")
    assert plan.study != old.study
    assert plan.studies("rates") == [plan.study, old.study] and plan.studies("tokens") == [
        plan.study
    ]
    worker = Worker(plan, finished.out, finished.kept)
    with pytest.raises(UserError, match=r"verdict\.json: of another plan"):
        worker.before()
    power = json.loads(finished.conclusion_of("margin").read_text())["power"]
    for name in ("margin", "verdict", "check", "tokens", "muon"):
        finished.conclusion_of(name).unlink()
    before = worker.conclusion_of("rates").read_bytes()
    monkeypatch.setattr(worker, "train", None)  # there is nothing to train
    for kind in worker.stages()[:2]:
        worker.do(worker.stage(kind))
    assert worker.conclusion_of("rates").read_bytes() == before
    found = json.loads(worker.conclusion_of("margin").read_text())
    assert found["power"]["1"] > power["1"] and found["study"] == plan.study
    stage = worker.stage(VerdictStage)
    with pytest.raises(UserError, match="the plan was changed after the run"):
        worker.results(stage)


def test_stages_have_the_same_data_and_versions(finished):
    path = finished.conclusion_of("rates")
    found = json.loads(path.read_text())
    assert found["conditions"]["data"] == "a"
    found["conditions"]["data"] = "b"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match="data a, but an earlier stage had b"):
        finished.results(finished.stage(VerdictStage))


STAGES = ("rates", "margin", "verdict", "check", "tokens", "muon")


def moved(plan) -> dict[str, float]:
    """Read the bytes that the plan's rule compares: arm -> bytes."""
    lines = (ROOT / "results/cpu/bytes/ledger.jsonl").read_text().splitlines()
    rows = {
        row["norms"]: row["bytes_per_token"]["float32 stream"] for row in map(json.loads, lines)
    }
    return {arm: rows[name] for arm, name in plan.plan["recommendation"]["bytes"].items()}


def test_a_second_implementation_agrees(finished):
    logs = {
        (stage, shape): {
            log.parent.name: log.read_text()
            for log in (finished.out / stage / shape).glob("*/log.jsonl")
        }
        for stage in STAGES
        for shape in ("W", "D")
    }
    plan = finished.plan
    assert check(plan.path, "toy", finished.kept, logs) > 30
    anew = Rederived(plan.path, "toy", logs, moved(plan))
    text = Card(finished).text()
    # Two judged arms, the baseline, the sentences, of which four have numbers of their own
    assert check_card(anew, text) == 2 * 5 + 2 + 9 + 4
    # It can fail: one digit of the card, one run of the logs.
    wrong = re.sub(
        r"\+(\d)(\d*\.\d %)", lambda found: f"+{9 - int(found[1])}{found[2]}", text, count=1
    )
    assert wrong != text
    with pytest.raises(AssertionError):
        check_card(anew, wrong)
    runs = logs["verdict", "W"]
    name = next(name for name in runs if name.startswith("layer"))
    runs[name] = runs[name].replace('"val_loss_full": 1.4', '"val_loss_full": 1.5')
    with pytest.raises(AssertionError):
        check_card(anew, text)


def test_a_second_implementation_agrees_on_the_committed_study():
    kept = ROOT / "results/cpu/which_norm"
    if not (kept / "rates.json").exists():
        pytest.skip("the study's first stage is not finished")
    logs = {}
    for path in kept.glob("*.tar.xz"):
        if not (kept / f"{path.name.split('-')[0]}.json").exists():
            continue  # a stage that is not finished
        with tarfile.open(path) as file:
            logs[tuple(path.name.removesuffix(".tar.xz").split("-"))] = {
                member.name.split("/")[0]: file.extractfile(member).read().decode()
                for member in file.getmembers()
                if member.name.endswith("/log.jsonl")
            }
    assert check(ROOT / PLAN, "cpu", kept, logs) > 30
    if (kept / "verdict.json").exists():
        anew = Rederived(ROOT / PLAN, "cpu", logs, moved(Plan(ROOT / PLAN, "cpu")))
        for page in ("README.md", "docs/which_norm.md"):
            assert check_card(anew, (ROOT / page).read_text()) > 4 * 5 + 2
        if all((kept / f"{stage}.json").exists() for stage in STAGES):
            for page in (kept / "README.md", ROOT / "docs/which_norm.md"):
                assert check_card(anew, page.read_text()) > 30
