"""Committed records give the committed tables, and what fold_table.py and the scripts of
posthoc.sh do at toy sizes.

    python -m pytest tests/repro/test_tables.py
"""

import copy
import json
import lzma
import math
import shutil
import time

import numpy as np
import pytest
import small_rms
import torch
from fold_nets import C, net
from helpers import ROOT, draw
from torch.nn.functional import cross_entropy, kl_div

pytest.importorskip("transformers")

from common.errors import ConfigError
from common.output import read_json
from common.stats import clustered, crossed
from model import GPT
from repro import (
    bfloat16_table,
    cbwc,
    fold_models,
    fold_table,
    mygpt_table,
    posthoc_table,
    taper_output,
)

RESULTS = ROOT / "results"

# ------------------------------------------------------------------------------- committed records


def mygpt(folder):
    for log in folder.glob("*.jsonl"):
        run = folder / "runs" / log.stem
        run.mkdir(parents=True)
        log.rename(run / "log.jsonl")
    mygpt_table.main([str(folder / "runs"), str(folder)])


def taper(folder):
    page = taper_output.page(read_json(folder / "output_end.jsonl"))
    (folder / "output_end.md").write_text(page + "\n")


def fold(study):
    return lambda folder: fold_table.main([f"--study={study}", f"--out={folder}"])


def cbwc_table(study):
    return lambda folder: cbwc.main([f"--study={study}", "--table", f"--out={folder}"])


@pytest.mark.parametrize(
    ("place", "page", "again"),
    [
        ("cpu/posthoc", "table.md", lambda folder: posthoc_table.main([str(folder)])),
        ("cpu/posthoc", "models.jsonl", lambda folder: posthoc_table.main([str(folder)])),
        ("cpu/mygpt", "README.md", mygpt),
        ("cpu/bfloat16", "README.md", lambda folder: bfloat16_table.main([str(folder)])),
        ("cpu/taper", "output_end.md", taper),
        ("fold", "README.md", fold("table3")),
        ("fold", "table.md", fold("zoo")),
        ("cpu/cbwc_training", "README.md", cbwc_table("training")),
        ("cpu/cbwc_centering", "README.md", cbwc_table("centering")),
        ("cpu/cbwc_classify", "README.md", cbwc_table("classify")),
    ],
)
def test_committed_records_give_the_committed_tables(place, page, again, tmp_path, monkeypatch):
    shutil.copytree(RESULTS / place, tmp_path / "copy")
    (tmp_path / "copy" / page).unlink()
    monkeypatch.setattr(cbwc, "plot", lambda *words, **keys: None)
    again(tmp_path / "copy")
    old, new = (
        [line for line in (folder / page).read_text().splitlines() if line.startswith(("|", "{"))]
        for folder in (RESULTS / place, tmp_path / "copy")
    )
    assert new == old and len(old) > 3


# ------------------------------------------------------------------------------------------- folds


def a_net():
    return net(lambda m, x: m.out(m.ln2(m.a(x) + m.b(m.ln(x).relu()))))


def test_one_model_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(fold_models, "build", lambda name: (a_net(), (draw(2, 4, C),)))
    record = fold_table.measure_in_child("net", fold_table.TableConfig())
    assert fold_table.verdict(record) == "some", record
    assert (record["total"], record["folded"]) == (2, 1) and json.dumps(record)
    assert record["max_rel"] <= 1e-13 and record["other_batch_rel"] <= 1e-13
    assert record["batch"] == "other" and fold_table.why(record).startswith("ln: ")


def test_limits_end_a_model(monkeypatch):
    config = fold_table.TableConfig(seconds=1)
    monkeypatch.setattr(fold_models, "build", lambda name: time.sleep(60))
    record = fold_table.measure_in_child("net", config)
    assert fold_table.verdict(record) == "limit" and "1 seconds" in record["limit"]
    monkeypatch.setattr(fold_models, "build", lambda name: 1 / 0)
    record = fold_table.measure_in_child("net", config)
    assert fold_table.verdict(record) == "failed" and "ZeroDivisionError" in record["failed"]


def test_a_wrong_fold_would_be_seen():
    right = a_net()
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong.a.weight[0] += 1e-6  # not all rows: a constant would not show
    inputs = (draw(2, 4, C),)
    same = fold_table.compare(right, [copy.deepcopy(right)], inputs)
    assert same["other_batch_rel"] == 0
    found = fold_table.compare(right, [right, wrong], inputs)["other_batch_rel"]
    assert 1e-8 < found < 1e-4
    for error in (found, math.nan):
        record = {"ok": True, "total": 1, "folded": 1, "other_batch_rel": error}
        assert fold_table.verdict(record) == "wrong"


def test_difference_of_outputs():
    x = torch.tensor([1.0, -4.0, -math.inf])
    assert fold_table.difference({"x": x}, {"x": x.clone()}) == 0
    assert fold_table.difference(x, x + torch.tensor([1.0, 0.0, 0.0])) == 0.25
    assert fold_table.difference(x, torch.tensor([1.0, -4.0, 0.0])) == math.inf
    assert fold_table.difference(x, x * math.nan) == math.inf


def test_another_batch():
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.tensor([[1, 1], [1, 0]])
    fresh = fold_models.other_batch({"ids": ids, "mask": mask, "x": draw(2, 4), "use_cache": False})
    assert fresh["ids"].shape == (3, 7) and not torch.equal(fresh["ids"][:2], ids)
    assert torch.equal(fresh["mask"], mask[[0, 1, 0]]) and fresh["x"].shape == (3, 4)


# ---------------------------------------------------------------------------------- after training


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
    one = clustered(same[0], unequal)
    assert posthoc_table.difference(same, unequal).se == pytest.approx(one.se)
    assert posthoc_table.difference(same[:1], unequal).interval() == one.interval()
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


def write_settings(run, learning_rate: float) -> None:
    config = {"learning_rate": learning_rate, "dtype": "bfloat16"}
    (run / "log.jsonl").write_text(json.dumps({"event": "start", "config": config}) + "\n")


def test_a_seed_is_judged_beside_the_others(tmp_path):
    """Models of two seeds, in folders as posthoc.sh leaves them."""
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    models = {}
    kinds = ("teacher", "student-0", "student-1", "teacher-longer")
    for seed in (1, 2):
        for place, name in enumerate(kinds):
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
    shown = ("teacher", "coupled_first=0, distilled", "coupled_first=1, distilled")
    for name, run in zip((*shown, posthoc_table.CONTROL), kinds):
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
    # A seed that is judged again takes the place of what it had.
    posthoc_table.main([str(runs), "2", text, str(results)])
    assert (results / "table.md").read_text() == table
    # Another text, though with as many windows; other settings.
    other = write_documents(tmp_path / "other.jsonl", documents(3, 3))
    with pytest.raises(ConfigError, match="another text"):
        posthoc_table.main([str(runs), "1", other, str(results)])
    write_settings(runs / "teacher-longer-1", learning_rate=2e-4)
    with pytest.raises(ConfigError, match=r"longer-1: has learning_rate=0\.0002"):
        posthoc_table.main([str(runs), "1", text, str(results)])
    assert (results / "table.md").read_text() == table
