"""Committed records give the committed tables, and what fold_table.py and the scripts of
posthoc.sh do at toy sizes.

    python -m pytest tests/repro/test_tables.py
"""

import copy
import json
import lzma
import math
import shutil
import signal
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import small_rms
import torch
from fold_nets import C, net
from helpers import ROOT, draw

pytest.importorskip("transformers")

from common.errors import ConfigError
from common.stats import clustered, crossed
from model import GPT
from repro import (
    bfloat16_table,
    cbwc,
    fold_models,
    fold_table,
    mygpt_table,
    posthoc_table,
)

RESULTS = ROOT / "results"

# ------------------------------------------------------------------------------- committed records


def mygpt(words):
    [folder] = map(Path, words)
    for log in folder.glob("*.jsonl"):
        run = folder / "runs" / log.stem
        run.mkdir(parents=True)
        log.rename(run / "log.jsonl")
    mygpt_table.main([str(folder / "runs"), str(folder)])


@pytest.mark.parametrize(
    ("place", "page", "main", "words"),
    [
        ("cpu/posthoc", "table.md", posthoc_table.main, "COPY"),
        ("cpu/mygpt", "README.md", mygpt, "COPY"),
        ("cpu/bfloat16", "README.md", bfloat16_table.main, "COPY"),
        ("fold", "README.md", fold_table.main, "--study=table3 --out=COPY"),
        ("fold", "table.md", fold_table.main, "--study=zoo --out=COPY"),
        ("cpu/cbwc_training", "README.md", cbwc.main, "--study=training --table --out=COPY"),
        ("cpu/cbwc_centering", "README.md", cbwc.main, "--study=centering --table --out=COPY"),
        ("cpu/cbwc_classify", "README.md", cbwc.main, "--study=classify --table --out=COPY"),
    ],
)
def test_committed_records_give_the_committed_tables(
    place, page, main, words, tmp_path, monkeypatch
):
    shutil.copytree(RESULTS / place, tmp_path / "copy")
    (tmp_path / "copy" / page).unlink()
    monkeypatch.setattr(cbwc, "plot", lambda *words, **keys: None)
    main(words.replace("COPY", str(tmp_path / "copy")).split())
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


@pytest.fixture
def sigterm_is_noted():
    """As in a process in which a training has begun."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_limits_end_a_model(monkeypatch, sigterm_is_noted):
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
    wrong.a.weight.data[0] += 1e-6  # not all rows: a constant would not show
    inputs = (draw(2, 4, C),)
    assert fold_table.compare(right, [right], inputs)["other_batch_rel"] == 0
    found = fold_table.compare(right, [right, wrong], inputs)["other_batch_rel"]
    assert 1e-8 < found < 1e-4
    for error in (found, math.nan):
        record = {"ok": True, "total": 1, "folded": 1, "other_batch_rel": error}
        assert fold_table.verdict(record) == "wrong"


def test_difference_of_outputs():
    x = torch.tensor([1.0, -4.0, -math.inf])
    for first, second, expected in (
        ({"x": x}, {"x": x.clone()}, 0),
        (x, x + torch.tensor([1.0, 0.0, 0.0]), 0.25),
        (x, torch.tensor([1.0, -4.0, 0.0]), math.inf),
        (x, x * math.nan, math.inf),
    ):
        assert fold_table.difference(first, second) == expected


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
    # Documents of equal size: as documents' means.
    assert over_documents.se == pytest.approx(crossed(same.reshape(3, 8, 5).mean(2)).se, rel=1e-9)
    # Of unequal size: as the windows of one seed, by document.
    unequal = np.repeat(np.arange(5), [1, 4, 9, 12, 14])
    one = clustered(same[0], unequal)
    assert posthoc_table.difference(same, unequal).se == pytest.approx(one.se)
    assert posthoc_table.difference(same[:1], unequal).interval() == one.interval()
    assert posthoc_table.difference(shifted, documents).se > 5 * over_documents.se


def write_documents(path, count: int, seed: int) -> torch.Tensor:
    """Write texts of four windows of a toy model each, and a rest that no window takes.

    Returns the windows, token ids (4 * count, 24).
    """
    tokens = small_rms.sequences(count * 5, seed).view(count, -1)[:, :100]
    with (lzma.open if path.suffix == ".xz" else open)(path, "wt") as file:
        for row in tokens.tolist():
            text = "".join(chr(48 + token) for token in row)
            file.write(json.dumps({"text": text}) + "\n")
    return tokens[:, :96].reshape(-1, 24)


def write_settings(run, learning_rate: float) -> None:
    config = {"learning_rate": learning_rate, "dtype": "bfloat16"}
    (run / "log.jsonl").write_text(json.dumps({"event": "start", "config": config}) + "\n")


def test_a_seed_is_judged_beside_the_others(tmp_path):
    """Models of two seeds, in folders as posthoc.sh leaves them."""
    runs, results, text = (tmp_path / name for name in ("runs", "results", "val.jsonl.xz"))
    results.mkdir()
    models = {}
    kinds = ("teacher", "student-0", "student-1", "teacher-longer")
    for seed, (place, name) in product((1, 2), enumerate(kinds)):
        run = runs / f"{name}-{seed}"
        run.mkdir(parents=True)
        models[name, seed] = GPT(small_rms.SHAPE, seed=10 * seed + place).eval()
        small_rms.write_run(models[name, seed], run)
        write_settings(run, learning_rate=1e-3 if name == "teacher" else 1e-4)
    write_documents(runs / "b.jsonl", 40, seed=1)
    idx = write_documents(text, 3, seed=2)
    for seed in ("2", "1", "2"):  # a seed that is judged again takes the place of what it had
        posthoc_table.main([str(runs), seed, str(text), str(results)])
    table = (results / "table.md").read_text()
    assert table.startswith("Seeds 1, 2, learning rate 0.0001.")
    head, found = posthoc_table.read_windows(results)
    assert head["length"] == 24 and head["documents"] == [0] * 4 + [1] * 4 + [2] * 4
    shown = ("teacher", "coupled_first=0, distilled", "coupled_first=1, distilled")
    for name, run in zip((*shown, posthoc_table.CONTROL), kinds):
        for seed, row in enumerate(found[name], 1):
            # The teacher is that of the same seed. Its KL has no first place.
            model, teacher = models[run, seed], models["teacher", seed]
            logits, taught = (m.logits(m.hidden(idx)) for m in (model, teacher))
            expected = torch.nn.functional.cross_entropy(
                logits[:, :-1].transpose(1, 2), idx[:, 1:], reduction="none"
            )
            assert row["losses"] == pytest.approx(expected.mean(1).tolist(), abs=1e-5)
            log_q, log_p = (x[:, 1:].log_softmax(-1) for x in (logits, taught))
            kl = (
                torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True)
                .sum(-1)
                .mean(1)
            )
            assert row["kls"] == pytest.approx(kl.tolist(), abs=1e-5)
    # Another text, though with as many windows; other settings.
    write_documents(tmp_path / "other.jsonl", 3, seed=3)
    with pytest.raises(ConfigError, match="another text"):
        posthoc_table.main([str(runs), "1", str(tmp_path / "other.jsonl"), str(results)])
    write_settings(runs / "teacher-longer-1", learning_rate=2e-4)
    with pytest.raises(ConfigError, match=r"longer-1: has learning_rate=0\.0002"):
        posthoc_table.main([str(runs), "1", str(text), str(results)])
    assert (results / "table.md").read_text() == table
