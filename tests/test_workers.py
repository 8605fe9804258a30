"""Workers of a sweep, with training processes that are one line of Python.

python -m pytest tests/test_workers.py
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, UserError
from common.norm_file import split_norm_file
from evidence import archive
from study.arms import Arm, PlannedRun
from study.sweep import next_command, pin_norm_file, runs_in
from study.workers import Job, Sweep

DONE = '{"event": "start", "config": {}}\n{"event": "end", "reason": "done"}\n'


def sweep_of(out: Path, program: str, keep: Path | None = None) -> Sweep:
    command = (sys.executable, "-c", program)
    job = Job(command=command, common=(), hellaswag="off", out=out, keep=keep, gpus=(), machine="")
    return Sweep(job, [PlannedRun(Arm("rms", ()), 1)], set())


@pytest.fixture
def signals():
    """The handlers of this process, put back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_error_of_an_earlier_attempt_is_not_that_of_this_one(tmp_path, capsys, signals):
    """A run that was busy once, and now ends in a traceback, has failed."""
    text = "error: rms-1: another process is working there\nwarning: of then\n"
    (tmp_path / "rms-1").mkdir()
    (tmp_path / "rms-1/train.txt").write_text(text)
    sweep = sweep_of(tmp_path, "raise ValueError('now')")
    assert sweep.run(1) == 1 and not sweep.elsewhere
    [line] = capsys.readouterr().out.splitlines()
    assert "FAILED with exit code 1: ValueError: now" in line


def test_a_run_that_cannot_be_kept_says_why(tmp_path, monkeypatch, capsys, signals):
    """Also where the run itself has its line: it is done."""

    def add(*_: Path, diff: bool) -> None:
        raise UserError("no room in k.tar.xz")

    monkeypatch.setattr(archive, "add", add)
    (tmp_path / "rms-1").mkdir()
    (tmp_path / "rms-1/log.jsonl").write_text(DONE)
    assert sweep_of(tmp_path, "", tmp_path / "k.tar.xz").run(1) == 1
    done, failed = capsys.readouterr().out.splitlines()
    assert done.endswith("done already") and failed.endswith("FAILED: no room in k.tar.xz")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_breaks_off_is_no_success(tmp_path, monkeypatch, signals):
    def attend(*_: object) -> None:
        raise RuntimeError("a fault of the sweep")

    sweep = sweep_of(tmp_path, "")
    monkeypatch.setattr(sweep, "attend", attend)
    assert sweep.run(1) == 1


def test_a_second_signal_while_the_first_is_handled(tmp_path, signals):
    """A terminal that closes may send SIGHUP and SIGTERM: the handler must not wait for itself."""
    sweep = sweep_of(tmp_path, "")
    signal.signal(signal.SIGTERM, lambda number, frame: sweep.stop(130))
    with sweep.lock:
        os.kill(os.getpid(), signal.SIGTERM)
    assert sweep.stopped.is_set() and sweep.code == 130


def test_a_signal_that_is_ignored_stays_so(tmp_path, signals):
    """Of a script in the background Ctrl-C is not meant for this sweep."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert sweep_of(tmp_path, "import os, signal; os.kill(os.getppid(), signal.SIGINT)").run(1) == 0


def test_what_can_be_called_next_needs_the_baseline_alone(tmp_path):
    """Other folders in OUT may be damaged; the archive may lack a run that could not be kept."""
    (tmp_path / "rms-1").mkdir()
    config = '"config": {"norm_type": "rms", "arm": "mine"}'
    (tmp_path / "rms-1/log.jsonl").write_text(DONE.replace('"config": {}', config))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/log.jsonl").write_text("no log")
    keep = tmp_path / "k.tar.xz"
    for archive_of_runs, place in ((None, tmp_path), (keep, keep)):
        found = next_command(tmp_path, archive_of_runs, "rms-1")
        assert found == f"python report.py {place} --baseline=mine"


def test_a_norm_file_that_is_edited_ends_a_sweep(tmp_path):
    """The words that all runs have hold its digest; without a norm file they are as they were."""
    file = tmp_path / "norm.py"
    file.write_text("# one\n")
    words = pin_norm_file(["config/demo.py", f"--norm_file={file}"])
    assert split_norm_file(words)[0] == ["config/demo.py"]
    file.write_text("# another\n")
    with pytest.raises(ConfigError, match="give the file that it is of"):
        split_norm_file(words)
    assert pin_norm_file(["config/demo.py"]) == ["config/demo.py"]


def test_a_kept_run_that_is_not_over_is_trained(tmp_path):
    """Somebody may have put a run into the archive that was stopped."""
    keep = tmp_path / "k.tar.xz"
    stopped = DONE.replace("done", "stopped by SIGTERM")
    logs = {"rms-1": DONE, "rms-2": stopped, "rms-3": ""}
    archive.write(keep, {f"{name}/log.jsonl": log.encode() for name, log in logs.items()})
    assert runs_in(keep) == {"rms-1"}
