"""The fuzzer of tests/fuzz: a fixed sample of its cases, and that it finds what is planted.

python -m pytest tests/test_fuzz.py
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from configurator import help_text, key
from tests.fuzz.cases import Case, single_cases, values_for
from tests.fuzz.execute import Outcome
from tests.fuzz.keys import Key, keys_in
from tests.fuzz.programs import PROGRAMS, Program
from tests.fuzz.regressions import REGRESSIONS
from tests.fuzz.verdict import fault
from train import TrainConfig

SAMPLED = ("train", "sample", "hellaswag", "convert", "report", "fineweb_edu", "archive")


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_sample_of_the_cases():
    """Those that were faults once are among them."""
    done = run("-m", "tests.fuzz", *SAMPLED, "--sample=8", "--short", "--seconds=30")
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^\| all \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", done.stdout, re.MULTILINE)
    keys, cases, refused, ran = map(int, total.groups())
    assert keys >= len(fields(TrainConfig)) and refused and ran
    sampled = [one for one in REGRESSIONS if one.program in SAMPLED]
    assert cases >= 8 * len(SAMPLED) + len(sampled) - 3 and len(sampled) == len(REGRESSIONS)


PLANTED = """
import sys, tempfile, types
from pathlib import Path
from tests.fuzz import execute
from tests.fuzz.cases import Case
from tests.fuzz.programs import Program
from tests.fuzz.verdict import fault

def main(argv):
    {"raise": lambda: 1 / 0, "memory": lambda: bytearray(1 << 40), "fine": lambda: None,
     "wait": lambda: open("fifo"), "nan": lambda: print('{"loss": NaN}')}[argv[0]]()

sys.modules["planted"] = module = types.ModuleType("planted")
module.main, module.__file__ = main, "planted.py"
import os
with tempfile.TemporaryDirectory() as scratch:
    os.mkfifo(Path(scratch) / "fifo")
    for word in sys.argv[1:]:
        case = Case("planted", (word,), (word,))
        program = Program("planted", "planted")
        outcome = execute.run(program, case, Path(scratch), 1)
        print(word, outcome.code, fault(program, case, outcome, Path(scratch)), sep="|")
"""


def test_what_is_planted_is_found():
    done = run("-c", PLANTED, "raise", "memory", "wait", "nan", "fine")
    found = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert found["raise"][1].startswith("traceback: ZeroDivisionError"), done.stderr
    assert found["memory"] == ["1", ""]  # one line says so
    assert found["wait"][1].startswith("hangs")
    assert found["nan"] == ["0", "exit code 0, and stdout has NaN"]
    assert found["fine"] == ["0", ""]


def test_keys_are_read_from_the_help():
    listed = keys_in(help_text(TrainConfig, "a program"))
    assert [one.name for one in listed] == [field.name for field in fields(TrainConfig)]
    assert all(one.kinds or one.choices for one in listed)
    by_name = {one.name: one for one in listed}
    assert by_name["lr_schedule"].choices == ("cosine", "wsd", "constant")
    assert by_name["initial_gain"].kinds == ("float", "tuple")
    assert by_name["batch_size"].kinds == ("int",) and by_name["batch_size"].bounds[0] == 1
    in_text = keys_in("python x.py [--local=FILE] --delta.val_loss=0.002 --pictures=False")
    assert in_text == [
        Key("local", ("str",)),
        Key("delta.val_loss", ("float",)),
        Key("pictures", ("bool",)),
    ]


def test_a_new_key_is_tried_at_its_bounds():
    import dataclasses

    @dataclasses.dataclass
    class Config:
        width: int = key(3, "a new one", least=2)

    (found,) = keys_in(help_text(Config, ""))
    assert {"1", "2", "3", "nan", "-1", "9223372036854775808"} <= set(values_for(found))
    cases = single_cases("train", ("--a=1",), found)
    assert ("--a=1", "--width=1") in [case.argv for case in cases]
    assert len({case.id for case in cases}) == len(cases)


PROGRAM = Program("convert", "convert", ("run",))


@pytest.mark.parametrize(
    ("code", "stderr", "expected"),
    [
        (2, "error: seed=-1: must not be negative\n", ""),
        (2, "error: must not be negative\n", "the error names neither key nor value"),
        (2, "error: seed\nmore\n", "exit code 2 without one last line"),
        (2, "error: seed\x1b[31m\n", "the error line has control characters"),
        (1, "error: seed " + "x" * 2000 + "\n", "the error line has 2012 characters"),
        (3, "", "exit code 3"),
        (-11, "", "exit code -11"),
        (1, "Traceback (most recent call last):\nKeyError: 1\n", "traceback: KeyError: 1"),
    ],
)
def test_verdicts_on_refusals(code, stderr, expected, tmp_path):
    case = Case("convert", ("run", "--seed=-1"), ("seed",))
    found = fault(PROGRAM, case, Outcome(code, "", stderr, 0.1, False), tmp_path)
    assert found.startswith(expected) and bool(found) == bool(expected)


def finished_run(folder: Path, **changes: object) -> None:
    """What a training run of two steps leaves, with something changed."""
    found = {"reason": "done", "loss": 1.5, "last": 2, "weight": 1.0, "beta1": 0.8} | changes
    (folder / "out").mkdir()
    config = {"max_iters": 2, "beta1": found["beta1"]}
    (folder / "out" / "config.json").write_text(json.dumps(config))
    events = [
        {"event": "step", "step": found["last"], "loss": found["loss"]},
        {"event": "end", "reason": found["reason"]},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "out" / "log.jsonl").write_text(lines)
    torch.save({"model": {"w": torch.tensor(found["weight"])}}, folder / "out" / "ckpt.pt")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"loss": float("nan")}, "log.jsonl has NaN"),
        ({"weight": float("inf")}, "ckpt.pt has .model.w that is not finite"),
        ({"last": 1}, "after step 1 of 2"),
        ({"reason": "stopped"}, "the run's end is"),
        ({"beta1": 0.9}, "beta1=0.8 became 0.9"),
    ],
)
def test_verdicts_on_nonsense_that_is_taken(changes, expected, tmp_path):
    finished_run(tmp_path, **changes)
    case = Case("train", ("--beta1=0.8",), ("beta1",))
    found = fault(PROGRAMS[0], case, Outcome(0, "", "", 0.1, False), tmp_path)
    assert expected in found and bool(found) == bool(expected)
