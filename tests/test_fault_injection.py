"""Kills and refused writes: a fixed sample of `make faults`, and what the harness itself must see.

python -m pytest tests/test_fault_injection.py
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from tests.fault_injection import launch, table
from tests.fault_injection.judge import MODES, Unbroken
from tests.fault_injection.launch import Call, Fault

# Every call that changes a file, in a folder that is given
CALLS = """
import os, sys
os.chdir(sys.argv[1])
os.mkdir("folder")
with open("folder/a", "wb", buffering=0) as file:
    file.write(b"12345678")
    os.fsync(file.fileno())
    file.truncate(4)
os.replace("folder/a", "folder/b")
os.link("folder/b", "c")
os.symlink("c", "d")
os.unlink("c")
at = os.open(".", os.O_RDONLY)
os.unlink("d", dir_fd=at)
os.unlink("folder/b")
os.rmdir("folder")
open(os.devnull, "w").write("elsewhere")
"""
NAMES = ["mkdir", "open", "write", "fsync", "truncate", "rename", "link", "symlink", "unlink"]
NAMES += ["unlinkat", "unlink", "rmdir"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    try:
        return launch.build(tmp_path_factory.mktemp("preload"))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def meet(library, tmp_path):
    """meet(fault) -> exit code, what it printed, the calls: CALLS meets a fault."""

    def start(fault: Fault | None) -> tuple[int, str, list[Call]]:
        place = launch.Place(tmp_path)
        place.clear()
        env = {**os.environ, "LD_PRELOAD": str(library), **place.settings(fault, 0)}
        words = [sys.executable, "-c", CALLS, str(place.files)]
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        return done.returncode, done.stderr, place.calls(0)

    return start


def test_every_call_is_counted(meet, tmp_path):
    code, errors, calls = meet(None)
    assert code == 0, errors
    assert [call.name for call in calls] == NAMES
    assert [call.number for call in calls] == list(range(1, len(NAMES) + 1))
    assert calls[2].path == str(tmp_path / "files" / "folder" / "a") and calls[2].bytes == 8
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("point", range(1, len(NAMES) + 1))
def test_the_call_that_is_meant_fails(meet, point):
    code, errors, calls = meet(Fault("EIO", point))
    assert code == 1 and os.strerror(errno.EIO) in errors and len(calls) == point


def test_a_kill_comes_before_the_call_and_a_torn_write_is_half_done(meet, tmp_path):
    written = tmp_path / "files" / "folder" / "a"
    assert meet(Fault("kill", 3))[0] == -9 and written.read_bytes() == b""
    assert meet(Fault("torn", 3))[0] == -9 and written.read_bytes() == b"1234"
    assert meet(Fault("kill", 1))[0] == -9 and not written.parent.exists()


def test_a_full_disk_stays_full_and_takes_no_new_name(meet):
    code, errors, calls = meet(Fault("full", 2))
    assert code == 1 and os.strerror(errno.ENOSPC) in errors and len(calls) == 2
    assert meet(Fault("full", 8))[0] == 1  # a symbolic link is a new name, too
    assert meet(Fault("full", 9))[0] == 0  # removing needs no room


def test_of_a_row_of_writes_the_first_and_the_last_are_taken():
    names = ["open", "write", "write", "write", "write", "fsync", "write", "write"]
    calls = [Call(i + 1, name, 2, name != "fsync", "a") for i, name in enumerate(names)]
    whole = Unbroken([calls], {})
    assert [fault.point for fault in whole.points("kill")] == list(range(1, 9))
    assert [fault.point for fault in whole.points("kill", row=2)] == [1, 2, 5, 6, 7, 8]
    assert [fault.point for fault in whole.points("torn", row=3)] == [2, 3, 5, 7, 8]
    assert 6 not in {fault.point for fault in whole.points("full")}


def test_the_table_names_what_failed_and_keeps_other_programs(tmp_path):
    record = {"program": "a.py", "ranks": 1, "mode": "kill", "of": 9, "points": 3, "survived": 2}
    point = {"rank": 0, "point": 2, "call": "write", "path": "x", "problem": "hangs"}
    table.write(tmp_path, [{**record, "failed": [point]}], "then")
    other = {**record, "program": "b.py", "of": 3, "survived": 3, "failed": []}
    table.write(tmp_path, [other], "now")
    text = (tmp_path / "README.md").read_text()
    assert "| `a.py` | 1 | 2 / 3 (of 9) |" in text and "| `b.py` | 1 | 3 / 3 |" in text
    assert "6 of 12 points were tried" in text
    assert "- a.py, kill, write of x (rank 0): hangs" in text and "- then\n- now" in text


@pytest.mark.xdist_group("faults")
def test_a_sample_of_all_points(library):
    """A point of each program, the same every time."""
    for package in ("peft", "tokenizers", "safetensors"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "tests.fault_injection", "--points=1", "--turns"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [record for record in found if record["failed"]]
    assert not failed and done.returncode == 0, failed or done.stderr
    assert {record["mode"] for record in found} == set(MODES)
    assert [record["points"] for record in found] == [1] * 13
