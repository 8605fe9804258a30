"""sweep.sh with real runs: arms and seeds, killed and continued, failed runs, what is kept; then
report.py on them.

    python -m pytest tests/test_sweep.py
"""

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import BYTES, ROOT, TINY, records, write_items, write_tiny_shards
from warm_python import warm_python

import report
from common.errors import ConfigError
from common.stats import power_of_t, power_of_tost
from evidence import archive
from evidence.runs import find_runs
from study.arms import read_arms, read_seeds
from study.checks import check_sweep, power

ARMS = "rms 'coupled --coupled_span=2'"
WORDS = (*TINY, "--checkpoint_interval=10")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = write_tiny_shards(tmp_path_factory.mktemp("sweep") / "data", vocab=200, meta=BYTES)
    write_items(folder / "items.jsonl", 12)
    return folder


def start(data: Path, out: Path, *words: str, **env: str) -> subprocess.Popen:
    settings = {
        "ARMS": ARMS,
        "SEEDS": "1 2",
        "OUT": str(out),
        "HELLASWAG": str(data / "items.jsonl"),
        "PYTHON": warm_python(),
        "PYTHON_EXEC": warm_python(),  # which torchrun starts
        "OMP_NUM_THREADS": "1",
        **env,
    }
    command = ["./sweep.sh", "config/demo.py", *WORDS, f"--data_dir={data}", *words]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(job: subprocess.Popen, code: int = 0) -> list[str]:
    output, _ = job.communicate(timeout=300)
    assert job.returncode == code, output
    return output.splitlines()


def table(folder: Path, out: Path) -> list[dict]:
    """seeds.csv of a sweep, without the throughput."""
    report.main([str(folder), "--baseline=rms", f"--out={out}"])
    return [
        {k: v for k, v in row.items() if k != "tok_per_s"}
        for row in csv.DictReader((out / "seeds.csv").open())
    ]


@pytest.mark.xdist_group("sweep")
def test_a_killed_sweep_ends_with_the_same_table(train_ok, data, tmp_path):
    """Killed by SIGTERM in one run and, with the training process, by SIGKILL in another; what is
    done stays done.

    The table is that of the same four runs, each trained alone and without a break.
    """
    whole, broken, keep = (tmp_path / name for name in ("whole", "broken", "runs.tar.xz"))

    def kept() -> set[str]:
        return {name.split("/")[0] for name in archive.read(keep)}

    for seed in (1, 2):
        for name, keys in (("rms", ()), ("coupled", ("--coupled_span=2",))):
            train_ok(
                ROOT / "config/demo.py",
                *WORDS,
                f"--data_dir={data}",
                f"--norm_type={name}",
                *keys,
                f"--seed={seed}",
                f"--out_dir={whole / name}-{seed}",
                f"--hellaswag={data / 'items.jsonl'}",
            )

    def kill_at(run: str, step: int, number: int) -> None:
        job = start(data, broken, KEEP=str(keep))
        end = time.monotonic() + 120
        while not any(record.get("step") == step for record in records(broken / run)):
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.005)
        if number == signal.SIGKILL:
            os.killpg(job.pid, number)
            job.wait()
        else:
            job.send_signal(number)
            assert finish(job, 130)[-1].startswith("stopped")

    kill_at("coupled+coupled_span=2-1", 15, signal.SIGTERM)
    assert kept() == {"rms-1"} and "rms-1/hellaswag.jsonl" in archive.read(keep)
    kill_at("coupled+coupled_span=2-2", 25, signal.SIGKILL)
    (broken / "rms-1" / "log.jsonl").unlink()  # kept, so not looked at again
    one_left = {
        name: part for name, part in archive.read(keep).items() if name.startswith("rms-1/")
    }
    archive.write(keep, one_left)  # the other is done, so kept again
    plan, *rest, last = finish(start(data, broken, KEEP=str(keep)))
    assert last == f"4 of 4 runs done; next: python report.py {keep} --baseline=rms"
    assert plan.startswith("power: 2 seeds ")
    assert [line.split(":")[0] for line in rest] == [
        "[1/4] rms-1",
        "[2/4] coupled+coupled_span=2-1",
        "[3/4] coupled+coupled_span=2-2",
        "[4/4] rms-2",
    ]
    assert "[1/4] rms-1: in " in rest[0] and rest[1].endswith("done already")
    assert all("done: best val loss" in line for line in rest[2:])
    found = table(keep, tmp_path / "b")
    assert len(found) == 4 and found == table(whole, tmp_path / "a")
    for seed in (1, 2):
        log = archive.read(keep)[f"coupled+coupled_span=2-{seed}/log.jsonl"].decode()
        assert '"event": "resume"' in log


@pytest.mark.xdist_group("sweep")
def test_a_failed_run_does_not_stop_the_others(data, tmp_path):
    """A run whose folder cannot be used fails, is named, and the sweep goes on and exits 1."""
    bad = tmp_path / "out" / "rms-1"
    bad.mkdir(parents=True)
    (bad / "ckpt_last.pt").write_text("torn")
    lines = finish(start(data, tmp_path / "out", ARMS="rms layer", SEEDS="1", JOBS="2"), 1)
    [failed] = [line for line in lines if "rms-1" in line]
    assert "rms-1: FAILED with exit code 1: error:" in failed and "torn" in failed
    [done] = [line for line in lines if "layer-1" in line]
    assert "layer-1: done: best val loss" in done and lines[2:] == ["1 of 2 runs done"]


@pytest.mark.xdist_group("sweep")
def test_keys_with_blanks_and_two_processes(data, tmp_path):
    """An arm's keys may hold blanks, in quotes; NPROC=2 goes through torchrun.

    The arm before it has a name of its own, and is done already.
    """
    arms = """plain:layer "coupled  --norm_plan='Rs Rs R' --coupled_alpha=1.5" """
    done = tmp_path / "out" / "plain-1" / "log.jsonl"
    done.parent.mkdir(parents=True)
    done.write_text(
        '{"event": "start", "config": {"norm_type": "layer", "arm": "plain"}}\n'
        '{"event": "end", "reason": "done"}\n'
    )
    keys = {"ARMS": arms, "SEEDS": "1", "NPROC": "2"}
    lines = finish(start(data, tmp_path / "out", "--warmup_iters=99", **keys))
    assert lines[0] == "[1/2] plain-1: done already"
    assert lines[-1].endswith("--baseline=plain")
    assert "[2/2] coupled+norm_plan=Rs_Rs_R+coupled_alpha=1.5-1: done" in lines[2]
    assert "-1: warning: warm-up takes warmup_iters=99 of " in lines[1]
    [run] = [run for run in find_runs([tmp_path / "out"]) if run.config["norm_type"] == "coupled"]
    assert (
        run.arm == "coupled --norm_plan='Rs Rs R' --coupled_alpha=1.5"
        and run.start["world_size"] == 2
    )


@pytest.mark.xdist_group("sweep")
def test_a_sweep_from_a_model_goes_on(data, tmp_path):
    """Its runs take their shape from the model, and are the same runs when it starts again."""
    source, keys = tmp_path / "source", {"ARMS": "rms", "SEEDS": "1"}
    finish(start(data, source, "--activation=relu2", **keys))
    for ending in ("done: best val loss", "done already"):
        lines = finish(start(data, tmp_path / "out", f"--init_from={source / 'rms-1'}", **keys))
        assert any(ending in line for line in lines)


@pytest.mark.xdist_group("sweep")
def test_a_wrong_setting_stops_at_once(data, tmp_path):
    for name, value, error in (
        ("ARMS", "rms 'coupled", "quote is not closed"),
        ("ARMS", "rms rms", "is named twice"),
        ("ARMS", "a:rms 'a:rms --norm_eps=1e-6'", "is named twice"),
        ("ARMS", "rms 'peri --learning_rate=1e-4'", "has learning_rate=0.0001"),
        ("SEEDS", "1,2", "1,2 is no seed"),
        ("ARMS", "rms copled", "did you mean coupled"),
        ("ARMS", "rms 'coupled --coupled_span=1' coupled", "coupled+coupled_span=1"),
        ("SEEDS", "1 1", "is named twice"),
        ("SEEDS", "8 08", "08"),
        ("JOBS", "two", "JOBS=two: needs a number"),
        ("HELLASWAG", "nowhere.jsonl", "nowhere.jsonl"),
        ("SEEDS", " ", "no seed is named"),
        ("ARMS", " ", "no arm is named"),
        ("SEEDS", "8\n4294967296", "4294967296"),
        ("ARMS", "rms 'layer --seed=5'", "the sweep sets seed itself"),
        ("ARMS", "'rms --arm=a' 'layer --arm=a'", "the sweep sets arm itself"),
        ("ARMS", "rms 'rms --norm_type=layer'", "the sweep sets norm_type itself"),
        ("ARMS", "layer 'layer --norm_recipe=common'", "is named twice"),
        ("ARMS", "rms 'rms --qk_norm=none'", "is named twice"),
        ("ARMS", "rms 'rms --kernels=torch'", "is named twice"),
        ("ARMS", "rms 'layer config/small.py'", "config/small.py is no key"),
        ("ARMS", "..:rms", "..:rms"),
        ("SEEDS", "9" * 5000, "is no seed"),
        ("OUT", "README.md/out", "OUT=README.md/out: cannot be made"),
    ):
        lines = finish(start(data, tmp_path / "out", **{name: value}), 2)
        assert any(error in line for line in lines)
    environment = {**os.environ, "PYTHON": warm_python()}
    help_text = subprocess.run(
        ["./sweep.sh"], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert "ARMS" in help_text and "set -euo" not in help_text


def test_what_a_sweep_will_show_needs_no_sd():
    """In SDs of paired differences, and as the largest SD for a verdict about the margin; by the
    planned seeds, of which a sweep may train a part.
    """
    line = power(16, 4, 0.01)
    smallest, largest = (float(re.search(rf"([\d.]+){end}", line)[1]) for end in (" SD", "$"))
    assert power_of_t(smallest, 1.0, 16, 0.05 / 4) == pytest.approx(0.8, abs=0.01)
    assert power_of_tost(0.0, 0.01, largest, 16, 0.05 / 4) == pytest.approx(0.8, abs=0.01)
    assert power(1, 4, 0.01) == power(8, 0, 0.01) == ""
    found = check_sweep(["--planned_seeds=16"], read_arms("rms layer"), [1, 2], Path("no"), None)
    assert found == power(16, 1, 0.0)


def test_arms_and_seeds_may_stand_on_several_lines():
    text = "rms\n\"coupled\n --norm_plan='Rs Rs R'\" a:peri"
    assert [arm.name for arm in read_arms(text)] == ["rms", "coupled+norm_plan=Rs_Rs_R", "a"]
    assert read_seeds("3\n4 5\n") == [3, 4, 5]


def test_other_settings_are_not_done_already(train_ok, data, tmp_path):
    """The same folder of data may be written in another way."""
    words = [str(ROOT / "config/demo.py"), *WORDS, f"--data_dir={data}"]
    train_ok(*words, "--norm_type=rms", "--seed=1", f"--out_dir={tmp_path / 'rms-1'}")

    keep = tmp_path / "kept.tar.xz"
    archive.add(keep, tmp_path / "rms-1")

    def check_with(*more: str, out: Path = tmp_path, keep: Path | None = None) -> None:
        check_sweep([*words, *more], read_arms("rms"), read_seeds("2\n1"), out, keep)

    check_with(f"--data_dir={data}/../data", keep=keep)
    for place in ({}, {"out": tmp_path / "b", "keep": keep}):
        with pytest.raises(ConfigError, match=r"rms-1.*learning_rate=0\.02"):
            check_with("--learning_rate=0.02", **place)
    log = tmp_path / "rms-1/log.jsonl"
    log.write_text(re.sub('"code": "[0-9a-f]+"', '"code": "0123456789ab"', log.read_text()))
    with pytest.raises(ConfigError, match=r"rms-1: other code.*--same_code=0123456789ab"):
        check_with()
    check_with("--same_code=0123456789ab")
    log.write_text(re.sub('"code": "[0-9a-f]+", ', "", log.read_text()))
    check_with()
    log.write_text(re.sub('("data": "[^"]*:)[0-9a-f]{8}', r"\g<1>00000000", log.read_text()))
    with pytest.raises(ConfigError, match="rms-1: it was trained on other data"):
        check_with()


@pytest.mark.parametrize("start", ['{"event": "sta', '{"event": "start"}', ""])
def test_a_run_whose_settings_are_lost_is_not_done_already(tmp_path, start):
    """One that is not over is left to train.py, which goes on from its checkpoint."""
    log = tmp_path / "rms-1" / "log.jsonl"
    log.parent.mkdir()
    for end in ('{"event": "end", "reason": "stopped"}', '{"event": "end", "reason": "done"}'):
        log.write_text(f"{start}\n{end}\n")
        wrong = pytest.raises(ConfigError, match=r"rms-1: .*remove its folder")
        with wrong if "done" in end else contextlib.nullcontext():
            check_sweep([], read_arms("rms"), [1], tmp_path, None)


@pytest.mark.xdist_group("sweep")
def test_config_files_are_those_of_the_folder_from_which_it_is_called(tmp_path):
    """Also the second one, of which the project has another of the same name."""
    (tmp_path / "config").mkdir()
    for name, key in (("own.py", "seed"), ("demo.py", "no_such_key")):
        (tmp_path / "config" / name).write_text(f"{key} = 1\n")
    found = subprocess.run(
        [ROOT / "sweep.sh", "config/own.py", "config/demo.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": warm_python(), "ARMS": "no_such_norm"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and "no_such_key" in found.stderr


@pytest.mark.xdist_group("sweep")
@pytest.mark.parametrize("kind", ["eval", "val_full"])
def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_diverged(data, tmp_path, kind):
    for arm, loss in (("rms", "null"), ("layer", "2.5")):
        log = tmp_path / f"{arm}-1" / "log.jsonl"
        log.parent.mkdir()
        name = "val_loss" if kind == "eval" else "val_loss_full"
        log.write_text(
            f'{{"event": "start", "config": {{"norm_type": "{arm}"}}}}\n'
            '{"event": "eval", "step": 20, "val_loss": null}\n'
            '{"event": "eval", "step": 40, "val_loss": 2.5}\n'
            f'{{"event": "{kind}", "step": 40, "{name}": {loss}}}\n'
            '{"event": "end", "reason": "done"}\n'
        )
    bad, good, _ = finish(start(data, tmp_path, ARMS="rms layer", SEEDS="1"), 1)
    assert "rms-1: diverged" in bad and good.endswith("layer-1: done already")


@pytest.mark.xdist_group("sweep")
def test_workers_share_out_the_runs(data, tmp_path):
    """Two sweeps with two workers each work on one folder: each run is trained once, and its log
    says that it had neighbours. A claimed run is passed over.
    """
    out = tmp_path / "out"
    held = out / "rms-2"
    held.mkdir(parents=True)
    waiter = [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"]
    holder = subprocess.Popen(
        ["flock", held / "claim", *waiter],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "here\n"
    jobs = [start(data, out, ARMS="rms layer", JOBS="2") for _ in range(2)]
    lines = [line for job in jobs for line in finish(job)]
    holder.communicate("")
    trained = [line for line in lines if "done: best val loss" in line]
    assert sorted(line.split()[1] for line in trained) == ["layer-1:", "layer-2:", "rms-1:"]
    others = [line for line in lines if line.startswith("others are training:")]
    assert len(others) == 2 and all("rms-2" in line for line in others)
    assert not records(held)
    for run in find_runs([out]):
        assert run.config["jobs"] == 2
        assert [event["event"] for event in run.events if event["event"] in ("start", "end")] == [
            "start",
            "end",
        ]


@pytest.mark.xdist_group("sweep")
def test_stopped_workers_leave_nothing_running(data, tmp_path):
    """SIGTERM stops the runs of all workers, which save."""
    out = tmp_path / "out"
    job = start(data, out, "--max_iters=4000", "--warmup_iters=1", JOBS="2")
    end = time.monotonic() + 120
    runs = [out / "rms-1", out / "coupled+coupled_span=2-1"]
    while not all(any("step" in record for record in records(run)) for run in runs):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert finish(job, 130)[-1].startswith("stopped")
    for run in runs:
        assert "SIGTERM" in records(run)[-1]["reason"]
