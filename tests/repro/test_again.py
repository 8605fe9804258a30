"""Studies that are made again: beside the committed archives, and compared with them.

python -m pytest tests/repro/test_again.py
"""

import os
import subprocess

import pytest
from helpers import ROOT

from evidence import archive
from repro import again

KEPT = "cpu/rivals/rates-W.tar.xz"


def test_runs_made_again_are_compared_to_the_bit(tmp_path, capsys):
    """One that is equal, one whose loss parts in the last digit, one that was never committed."""
    content = archive.read(again.RESULTS / KEPT)
    runs = archive.by_run(content)
    same, other = sorted(runs)[:2]
    log = runs[other]["log.jsonl"].decode()
    digits = log.rpartition('"val_loss_full": ')[2].split(",")[0]
    changed = log.replace(digits, f"{float(digits) + 1e-12!r}").encode()
    logs = {same: runs[same]["log.jsonl"], other: changed, "new-1": runs[same]["log.jsonl"]}
    made = {f"{run}/log.jsonl": log for run, log in logs.items()}
    archive.write(tmp_path / "rates-W.tar.xz", made)
    again.main([str(tmp_path)])
    *lines, last = capsys.readouterr().out.splitlines()
    words = dict(line.removeprefix("rates-W.tar.xz/").split(": ", 1) for line in lines)
    assert words[same].startswith("equal to the bit in ")
    assert words[other].startswith("parts at step 1000: val_loss_full")
    assert words["new-1"] == "no committed run of this name"
    assert last == "1 of 3 runs equal the committed ones to the bit"


@pytest.mark.parametrize(
    ("script", "words"), [("muon_rate.sh", ["curve"]), ("layer_coupled.sh", ["."])]
)
def test_an_archive_is_not_ignored_where_a_study_has_several(script, words):
    done = subprocess.run(
        ["bash", f"repro/{script}", *words],
        cwd=ROOT,
        env=os.environ | {"KEEP": "mine.tar.xz"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "give RESULTS=FOLDER" in done.stderr
