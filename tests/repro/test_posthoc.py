"""repro/posthoc_table.py and posthoc_rate.py: intervals from the kept windows, and the rate."""

import json
import lzma
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

from common.errors import UserError
from common.stats import clustered, crossed
from repro import posthoc_table


def write_windows(folder, models: dict[tuple[str, int | None], np.ndarray], documents) -> None:
    lines = [{"length": 4, "documents": documents, "git": "0"}]
    for (name, seed), losses in models.items():
        kls = (losses / 10).tolist()
        lines.append({"model": name, "seed": seed, "losses": losses.tolist(), "kls": kls})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / posthoc_table.WINDOWS).write_bytes(lzma.compress(text.encode()))


def test_the_table_follows_from_the_windows(tmp_path, capsys):
    random = np.random.default_rng(0)
    documents = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    teacher = random.normal(1, 0.1, 10)
    coupled = teacher + random.normal(0.1, 0.01, 10)
    students = {seed: teacher + random.normal(0.02, 0.01, 10) for seed in (1, 2, 3)}
    models = {("teacher", None): teacher, ("coupled", None): coupled}
    models |= {("distilled", seed): losses for seed, losses in students.items()}
    control = {seed: teacher - random.normal(0.04, 0.01, 10) for seed in students}
    models |= {(posthoc_table.CONTROL, seed): losses for seed, losses in control.items()}
    write_windows(tmp_path, models, documents)
    posthoc_table.main([str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    found = {row["model"]: row for row in rows}
    expected = clustered(coupled - teacher, np.array(documents))
    assert found["coupled"]["interval"] == pytest.approx(expected.interval())
    assert "seeds" not in found["coupled"] and "interval" not in found["teacher"]
    each = [losses.mean() / teacher.mean() - 1 for losses in students.values()]
    assert list(found["distilled"]["seeds"].values()) == pytest.approx(each)
    assert found["distilled"]["relative"] == pytest.approx(np.mean(each))
    assert found["distilled"]["kl"] == pytest.approx(np.mean(list(students.values())) / 10)
    pairs = np.mean([students[seed] - control[seed] for seed in students])
    assert found["distilled"]["control"][0] == pytest.approx(pairs)
    assert f"{each[1]:+.3%}" in (tmp_path / "table.md").read_text()


def test_seeds_and_documents_widen_the_interval():
    random = np.random.default_rng(1)
    documents = np.repeat(np.arange(8), 5)
    base = np.ones(40)
    same = np.tile(1.1 + 0.01 * random.normal(size=40), (3, 1))
    shifted = same + np.array([[-0.05], [0.0], [0.05]])
    over_documents = posthoc_table.difference(same, base, documents)
    over_both = posthoc_table.difference(shifted, base, documents)
    # Documents of equal size: as documents' means.
    assert over_documents.se == pytest.approx(
        crossed((same - base).reshape(3, 8, 5).mean(2)).se, rel=1e-9
    )
    # Of unequal size: as the windows of one seed, by document.
    unequal = np.repeat(np.arange(5), [1, 4, 9, 12, 14])
    assert posthoc_table.difference(same, base, unequal).se == pytest.approx(
        clustered(same[0] - base, unequal).se
    )
    one = posthoc_table.difference(same[:1], base, documents)
    assert over_documents.se == pytest.approx(one.se) and one.mean == pytest.approx(0.1, abs=0.01)
    assert over_both.se > 5 * over_documents.se
    assert over_both.mean == pytest.approx(over_documents.mean)


def test_torn_windows_are_named(tmp_path):
    (tmp_path / posthoc_table.WINDOWS).write_bytes(lzma.compress(b"{}\n")[:-8])
    with pytest.raises(UserError, match=r"windows.jsonl.xz: cannot be read"):
        posthoc_table.write_table(tmp_path)


def test_the_rate_with_the_lowest_kl_is_taken(tmp_path):
    for rate, kl in (("5e-5", 2e-3), ("1e-4", 1e-3), ("2e-4", 3e-3)):
        (tmp_path / rate).mkdir()
        end = {"event": "end", "reason": "done", "summary": {"kl": kl}}
        (tmp_path / rate / "log.jsonl").write_text(json.dumps(end) + "\n")
    command = [sys.executable, "repro/posthoc_rate.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1e-4\n")
    assert "warning" not in done.stderr
    (tmp_path / "5e-5" / "log.jsonl").unlink()
    (tmp_path / "5e-5").rmdir()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1e-4\n" and "1e-4 is at the end of the grid" in done.stderr
    (tmp_path / "2e-4" / "log.jsonl").write_text('{"event": "step"}\n')
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "2e-4: not finished" in done.stderr
