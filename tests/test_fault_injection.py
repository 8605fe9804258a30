"""Kills and refused writes: a fixed sample of `make faults`, and what the harness itself must see.

python -m pytest tests/test_fault_injection.py
"""

import errno
import json
import os

import pytest
from fault_injection import build, read_trace
from helpers import run_python
from warm_python import warm_python

# Every call that changes a file, in a folder that is given
CALLS = """
import ctypes, os, sys
folder, trace, point, mode = map(os.fsencode, sys.argv[1:])
ctypes.CDLL(None).fault_arm(folder, trace, ctypes.c_long(int(point)), mode)
os.chdir(folder)
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
def library(tmp_path_factory):
    try:
        return build(tmp_path_factory.mktemp("preload"))
    except FileNotFoundError:
        pytest.skip("gcc is not installed, which compiles preload.c")


def test_every_call_is_counted_and_the_one_that_is_meant_meets_its_fate(library, tmp_path):
    def meet(mode: str, point: int) -> tuple[int, str, list]:
        files, trace = tmp_path / f"{mode}{point}", tmp_path / "trace"
        files.mkdir()
        done = run_python(
            "-c", CALLS, files, trace, point, mode, code=None, LD_PRELOAD=str(library)
        )
        return done.returncode, done.stderr, read_trace(trace)

    code, errors, calls = meet("kill", 0)
    assert code == 0, errors
    assert [call.name for call in calls] == NAMES
    assert [call.number for call in calls] == list(range(1, len(NAMES) + 1))
    assert calls[2].path == str(tmp_path / "kill0" / "folder" / "a") and calls[2].bytes == 8
    for point in range(1, len(NAMES) + 1):
        code, errors, calls = meet(str(errno.EIO), point)
        assert code == 1 and os.strerror(errno.EIO) in errors and len(calls) == point
    # A kill comes before the call, half of a torn write is done.
    assert meet("kill", 3)[0] == -9 and (tmp_path / "kill3/folder/a").read_bytes() == b""
    assert meet("torn", 3)[0] == -9 and (tmp_path / "torn3/folder/a").read_bytes() == b"1234"
    # A full disk takes no new name, a symbolic link neither; removing needs no room.
    assert [meet("full", point)[0] for point in (2, 8, 9)] == [1, 1, 0]


def test_a_sample_of_all_points(library):
    """The same every time."""
    done = run_python("-m", "tests.fault_injection", "--points=1", python=warm_python())

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["points"] for record in found] == [1] * 5
