"""slurm/*.sbatch under a real Slurm on this machine, which the tests start and stop.

    python -m pytest tests/test_slurm.py      # as root, after apt-get install slurm-wlm munge

Every result equals that of an undisturbed run to the bit.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from helpers import ROOT, TINY, losses, records, same_weights, steps_of, write_tiny_shards
from test_judge import World

pytestmark = [
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
        reason="needs root, slurm-wlm and munge",
    ),
]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16827
SlurmdPort=16828
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
# judge.py, whose checks and timings would take minutes
WITHOUT_CHECKS = """
import sys
sys.path.insert(0, {root!r})
import judge
import study.prepare
from study.norm_check import Finding, Size
study.prepare.check_arm = lambda *_: [Finding("rows", True, "0")]
study.prepare.time_arm = lambda *_: 60.0
study.prepare.size_of = lambda _: Size(36000, 5120.0, "")
judge.run_program(judge.main)
"""
T = TypeVar("T")
WORDS = ("config/demo.py", *TINY, "--max_iters=300", "--checkpoint_interval=30")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Path]:
    """A folder with data; SLURM_CONF names a cluster of this one machine."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    write_tiny_shards(folder / "data", vocab=200)
    conf = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    conf.write_text(CONF.format(folder=folder, host=host, cpus=os.cpu_count()))
    os.environ["SLURM_CONF"] = str(conf)
    start_munge(folder)
    for name in ("slurmctld", "slurmd"):
        subprocess.run([name], check=True)
    wait_for(lambda: said("sinfo", "-h", "-o", "%T") == "idle")
    yield folder
    said("scancel", "--user=root")  # of a test that has failed
    wait_for(lambda: not said("squeue", "-h"))
    for name in ("slurmd", "slurmctld", "munge"):
        os.kill(int((folder / f"{name}.pid").read_text()), 15)
    del os.environ["SLURM_CONF"]


def start_munge(folder: Path) -> None:
    """Start a munged of this test: one of the machine may run for others, or have died as root."""
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    # --force: the folder of the test is not open to other users of the machine
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", *files]
    subprocess.run(munged, check=True)


def said(*command: str, **env: str) -> str:
    settings = os.environ | {"OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, cwd=ROOT, env=settings, text=True, stdout=subprocess.PIPE, check=True
    ).stdout.strip()


def wait_for(find: Callable[[], T], seconds: float = 900) -> T:
    """Return what `find` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def submit(
    script: str, folder: Path, *words: str, options: tuple[str, ...] = (), **env: str
) -> str:
    """Start a job that has a core for each of its tasks. Returns its number."""
    told = f"--output={folder}/job-%j.txt"
    return said("sbatch", "--parsable", told, *options, f"slurm/{script}.sbatch", *words, **env)


def finish(*jobs: str) -> None:
    wait_for(lambda: not said("squeue", "-h", "-o", "%i", "-j", ",".join(jobs)))


def resumes(run: Path, undisturbed: Path) -> int:
    """Check that `run` equals the undisturbed one. Returns how often it was resumed."""
    assert losses(run) == losses(undisturbed)
    assert same_weights(run, undisturbed)
    return sum(record["event"] == "resume" for record in records(run))


def test_a_run_on_two_nodes_goes_on(train_ok, slurm, tmp_path):
    """Two tasks stand for two nodes: the signal before a time limit, then a requeue."""
    words = (*WORDS, f"--data_dir={slurm / 'data'}")
    alone = tmp_path / "alone"
    train_ok(*words, f"--out_dir={alone}", ranks=2)
    run = tmp_path / "run"
    tasks = ("--ntasks-per-node=2",)
    job = submit("train", slurm, *words, f"--out_dir={run}", options=tasks, NPROC="1")
    wait_for(lambda: (run / "log.jsonl").exists() and len(steps_of(run)) >= 60)
    said("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: len(steps_of(run)) >= 180)
    said("scontrol", "requeue", job)
    finish(job)
    assert resumes(run, alone) == 2


def place_of(run: Path) -> dict[str, str]:
    """Return the environment of the process that trains `run`, {} if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"--out_dir={run}" in (process / "cmdline").read_text().split("\0"):
                words = (process / "environ").read_text().split("\0")
                return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def in_the_middle(runs: list[Path], disturbed: list[Path]) -> list[Path]:
    others = [run for run in runs if run not in disturbed]
    return [run for run in others if len(steps_of(run)) >= 60 and place_of(run)]


def test_a_sweep_of_four_workers_loses_nothing(train_ok, slurm, tmp_path):
    """Of four workers on two cores one meets its time limit, one is requeued, one is cancelled."""
    words = (*WORDS, f"--data_dir={slurm / 'data'}")
    out = tmp_path / "out"
    runs = [out / f"{name}-{seed}" for seed in (1, 2) for name in ("rms", "layer")]
    for run in runs:
        name, seed = run.name.split("-")
        where = f"--out_dir={tmp_path / 'alone' / run.name}"
        train_ok(*words, f"--norm_type={name}", f"--seed={seed}", where)
    settings = {"ARMS": "rms layer", "SEEDS": "1 2", "OUT": str(out), "PYTHON": sys.executable}
    job = submit("sweep", slurm, *words, options=("--array=1-4",), **settings)
    disturbed = []
    for how in ("limit", "requeue", "scancel"):
        disturbed.append(wait_for(lambda: in_the_middle(runs, disturbed))[0])
        place = place_of(disturbed[-1])
        if how == "limit":  # scancel repeats a signal to a job of an array
            os.kill(int(place["SLURM_TASK_PID"]), signal.SIGUSR1)
        elif how == "requeue":
            said("scontrol", "requeue", place["SLURM_JOB_ID"])
        else:
            said("scancel", place["SLURM_JOB_ID"])
    finish(job)
    finish(submit("sweep", slurm, *words, **settings))  # what the cancelled worker had begun
    # A worker may be between two runs when it is disturbed.
    assert sum(resumes(run, tmp_path / "alone" / run.name) for run in runs) >= 2


def test_the_workers_of_a_study_end_with_one_page(slurm, tmp_path, monkeypatch):
    """Three workers on two cores, with runs that are written at once: one is requeued, one meets
    its time limit. The page is that of a study by one process."""
    world = World(slurm / "data", tmp_path, monkeypatch)
    with monkeypatch.context() as alone:
        alone.setattr("signal.signal", lambda *_: None)
        world.judge("rms peri", "--seeds=3")
    whole = world.report()
    world.plan["seconds"] = 2
    (tmp_path / "plan.json").write_text(json.dumps(world.plan))
    program = tmp_path / "judge_alone.py"
    program.write_text(WITHOUT_CHECKS.format(root=str(ROOT)))
    (tmp_path / "either").write_text(
        f'#!/bin/bash\n[ "$1" != judge.py ] || PYTHON={tmp_path}/python exec {sys.executable} '
        f'{program} "${{@:2}}"\nexec {tmp_path}/python "$@"\n'
    )
    (tmp_path / "either").chmod(0o755)
    shutil.rmtree(world.out)
    words = (*world.words, "--arms=rms peri", "--seeds=3", f"--out={world.out}", "--jobs=1")
    settings = {"PYTHON": str(tmp_path / "either"), "FAKE_LOSSES": str(tmp_path / "plan.json")}
    job = submit("judge", slurm, *words, options=("--array=1-3",), **settings)
    wait_for(lambda: [*(world.out / "rates").glob("*/claim")])
    said("scontrol", "requeue", f"{job}_1")
    wait_for(lambda: len([*(world.out / "rates").glob("*/log.jsonl")]) > 2)
    said("scancel", "--signal=USR1", "--batch", f"{job}_2")
    finish(job)
    assert world.report() == whole
