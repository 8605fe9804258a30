"""Kills and refused writes: a fixed sample of `make faults`.

python -m pytest tests/test_fault_injection.py
"""

import json
import subprocess
import sys

import pytest
from fault_injection import build
from helpers import ROOT


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return build(tmp_path_factory.mktemp("preload"))
    except FileNotFoundError:
        pytest.skip("gcc is not installed, which compiles preload.c")


@pytest.mark.xdist_group("faults")
def test_a_sample_of_all_points(library):
    """The same every time."""
    command = [sys.executable, "-m", "tests.fault_injection", "--points=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["points"] for record in found] == [1] * 5
