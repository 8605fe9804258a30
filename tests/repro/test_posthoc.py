"""repro/posthoc_table.py and posthoc_rate.py: windows, their intervals, and the rate."""

import json
import lzma
import subprocess
import sys

import numpy as np
import pytest
import small_rms
import torch
from helpers import ROOT
from torch.nn.functional import cross_entropy, kl_div

from common.errors import ConfigError, UserError
from common.stats import clustered, crossed
from model import GPT
from repro import posthoc_table


def write_windows(folder, models: dict[str, np.ndarray], seeds, documents) -> None:
    lines = [{"length": 4, "learning_rate": 1e-4, "documents": documents}]
    for name, losses in models.items():
        for seed, row in zip(seeds, losses, strict=True):
            kls = (row / 10).tolist()
            lines.append({"model": name, "seed": seed, "losses": row.tolist(), "kls": kls})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / posthoc_table.WINDOWS).write_bytes(lzma.compress(text.encode()))


def rows_of(folder) -> dict[str, dict]:
    lines = (folder / "models.jsonl").read_text().splitlines()
    return {row["model"]: row for row in map(json.loads, lines)}


def test_the_table_follows_from_the_windows(tmp_path, capsys):
    random = np.random.default_rng(0)
    documents = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    seeds = (2, 1, 3)
    teacher = random.normal(1, 0.1, (3, 10)) + np.array([[0.0], [0.1], [0.2]])
    student = teacher + random.normal(0.02, 0.01, (3, 10))
    control = teacher - random.normal(0.04, 0.01, (3, 10))
    models = {"teacher": teacher, "x, distilled": student, posthoc_table.CONTROL: control}
    write_windows(tmp_path, models, seeds, documents)
    posthoc_table.main([str(tmp_path)])
    found = rows_of(tmp_path)
    assert "interval" not in found["teacher"]
    assert all(list(row["seeds"]) == ["1", "2", "3"] for row in found.values())
    row = found["x, distilled"]
    # Each seed against a teacher of its own, by the order of the seeds.
    each = [student[i].mean() / teacher[i].mean() - 1 for i in (1, 0, 2)]
    assert [mean for mean, _, _ in row["each_seed"]] == pytest.approx(each)
    own = clustered(student[1] / teacher[1].mean() - teacher[1] / teacher[1].mean(), documents)
    assert row["each_seed"][0][1:] == pytest.approx(list(own.interval()))
    assert row["relative"] == pytest.approx(np.mean(each))
    assert row["difference"] == pytest.approx((student - teacher).mean())
    above = student - teacher
    expected = posthoc_table.difference(above, np.array(documents))
    assert row["interval"] == pytest.approx(expected.interval())
    shares = posthoc_table.difference(above / teacher.mean(1, keepdims=True), np.array(documents))
    assert row["relative_interval"] == pytest.approx(shares.interval())
    assert row["kl"] == pytest.approx(student.mean() / 10)
    assert row["control"][0] == pytest.approx((student - control).mean())
    assert row["control"][1] < row["control"][0] < row["control"][2]
    low, high = own.interval()
    shown = (tmp_path / "table.md").read_text()
    assert f"| x, distilled | {each[0]:+.3%} ({low:+.3%} .. {high:+.3%}) | " in shown

    one = {name: losses[:1] for name, losses in models.items()}
    write_windows(tmp_path, one, seeds[:1], documents)
    posthoc_table.main([str(tmp_path)])
    expected = clustered(student[0] - teacher[0], np.array(documents))
    assert rows_of(tmp_path)["x, distilled"]["interval"] == pytest.approx(expected.interval())
    assert "each seed" not in (tmp_path / "table.md").read_text()  # it has the one seed's above


def test_seeds_and_documents_widen_the_interval():
    random = np.random.default_rng(1)
    documents = np.repeat(np.arange(8), 5)
    same = np.tile(0.1 + 0.01 * random.normal(size=40), (3, 1))
    shifted = same + np.array([[-0.05], [0.0], [0.05]])
    over_documents = posthoc_table.difference(same, documents)
    over_both = posthoc_table.difference(shifted, documents)
    # Documents of equal size: as documents' means.
    assert over_documents.se == pytest.approx(crossed(same.reshape(3, 8, 5).mean(2)).se, rel=1e-9)
    # Of unequal size: as the windows of one seed, by document.
    unequal = np.repeat(np.arange(5), [1, 4, 9, 12, 14])
    assert posthoc_table.difference(same, unequal).se == pytest.approx(
        clustered(same[0], unequal).se
    )
    one = posthoc_table.difference(same[:1], documents)
    assert over_documents.se == pytest.approx(one.se) and one.mean == pytest.approx(0.1, abs=0.01)
    assert over_both.se > 5 * over_documents.se
    assert over_both.mean == pytest.approx(over_documents.mean)


def documents(count: int, seed: int) -> list[str]:
    """Texts of four windows of a toy model, and a rest that no window takes."""
    texts = small_rms.sequences(count * 5, seed).view(count, -1)[:, :100]
    return ["".join(chr(48 + i) for i in row.tolist()) for row in texts]


def write_documents(path, texts: list[str]) -> str:
    with (lzma.open if path.suffix == ".xz" else open)(path, "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return str(path)


def write_settings(run, learning_rate: float, dtype: str = "bfloat16") -> None:
    config = {"learning_rate": learning_rate, "dtype": dtype}
    (run / "log.jsonl").write_text(json.dumps({"event": "start", "config": config}) + "\n")


def test_a_seed_is_judged_beside_the_others(tmp_path, capsys):
    """Models of two seeds, in folders as posthoc.sh leaves them."""
    runs = tmp_path / "runs"
    results = tmp_path / "results"
    results.mkdir()
    models = {}
    for seed in (1, 2):
        for place, name in enumerate(("teacher", "student-0", "student-1", "teacher-longer")):
            model = GPT(small_rms.SHAPE, seed=10 * seed + place).eval()
            (runs / f"{name}-{seed}").mkdir(parents=True)
            small_rms.write_run(model, runs / f"{name}-{seed}")
            write_settings(runs / f"{name}-{seed}", learning_rate=1e-3 if place == 0 else 1e-4)
            models[name, seed] = model
    write_documents(runs / "b.jsonl", documents(40, 1))
    held_out = documents(3, 2)
    text = write_documents(tmp_path / "val.jsonl.xz", held_out)
    for seed in (2, 1):
        posthoc_table.main([str(runs), str(seed), text, str(results)])
    table = (results / "table.md").read_text()
    head, found = posthoc_table.read_windows(results)
    assert (head["length"], head["learning_rate"]) == (24, 1e-4)
    assert head["documents"] == [0] * 4 + [1] * 4 + [2] * 4
    assert table.startswith("Seeds 1, 2, learning rate 0.0001.")
    idx = torch.tensor([[ord(c) - 48 for c in document[:96]] for document in held_out])
    idx = idx.view(12, 24)
    kinds = {
        "teacher": "teacher",
        "coupled_first=0, distilled": "student-0",
        "coupled_first=1, distilled": "student-1",
        posthoc_table.CONTROL: "teacher-longer",
    }
    for name, run in kinds.items():
        for row in found[name]:
            model = models[run, row["seed"]]
            logits = model.logits(model.hidden(idx))
            expected = cross_entropy(logits[:, :-1].transpose(1, 2), idx[:, 1:], reduction="none")
            assert row["losses"] == pytest.approx(expected.mean(1).tolist(), abs=1e-5)
            # KL(teacher || model), against the teacher of the same seed, without the first place.
            taught = models["teacher", row["seed"]]
            log_p = taught.logits(taught.hidden(idx))[:, 1:].log_softmax(-1)
            log_q = logits[:, 1:].log_softmax(-1)
            kl = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean(1)
            assert row["kls"] == pytest.approx(kl.tolist(), abs=1e-5)
            assert (kl.max() < 1e-9) == (name == "teacher")
    # A seed that is judged again takes the place of what it had.
    posthoc_table.main([str(runs), "2", text, str(results)])
    assert (results / "table.md").read_text() == table
    assert all(len(rows) == 2 for rows in posthoc_table.read_windows(results)[1].values())
    # Another text, though with as many windows; other settings.
    other = write_documents(tmp_path / "other.jsonl", documents(3, 3))
    with pytest.raises(ConfigError, match="has windows of models with another text"):
        posthoc_table.main([str(runs), "1", other, str(results)])
    write_settings(runs / "teacher-longer-1", learning_rate=2e-4)
    with pytest.raises(ConfigError, match=r"longer-1: has learning_rate=0\.0002, the student"):
        posthoc_table.main([str(runs), "1", text, str(results)])
    write_settings(runs / "teacher-1", learning_rate=1e-3, dtype="float32")
    with pytest.raises(ConfigError, match="teacher-1: has dtype=float32, the student bfloat16"):
        posthoc_table.main([str(runs), "1", text, str(results)])
    for name in ("student-0", "student-1", "teacher-longer"):
        write_settings(runs / f"{name}-2", learning_rate=2e-4)
    with pytest.raises(ConfigError, match=r"has windows of models with learning_rate=0\.0001"):
        posthoc_table.main([str(runs), "2", text, str(results)])
    assert (results / "table.md").read_text() == table


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
