"""repro/fold_table.py: its own comparison finds wrong outputs, and its limits end a model."""

import copy
import json
import math
import time
from dataclasses import replace

import pytest
import torch
from fold_nets import C, net
from helpers import draw

pytest.importorskip("transformers")

from repro import fold_table
from repro.fold_table import TableConfig, compare, difference, kind_of, measure_in_child, verdict
from repro.fold_zoo import other_batch


def model():
    return net(lambda m, x: m.out(m.ln2(m.a(x) + m.b(m.ln(x).relu()))))


def test_one_model(monkeypatch):
    monkeypatch.setattr(fold_table, "build", lambda name: (model(), (draw(2, 4, C),)))
    record = measure_in_child("net", TableConfig())
    assert verdict(record) == "some" and (record["total"], record["folded"]) == (2, 1), record
    assert record["max_rel"] <= 1e-13 and record["other_batch_rel"] <= 1e-13
    assert record["spread"] > 0.01 and record["batch"] == "other"
    assert record["refusals"][0]["norm"] == "ln" and json.dumps(record)


def test_a_wrong_fold_would_be_seen():
    right = model()
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        wrong.a.weight[0] += 1e-6  # not all rows: a constant would not show
    inputs = (draw(2, 4, C),)
    assert compare(right, {"folded": copy.deepcopy(right)}, inputs)["other_batch_rel"] == 0
    found = compare(right, {"strict": right, "folded": wrong}, inputs)["other_batch_rel"]
    assert 1e-8 < found < 1e-4
    assert verdict({"ok": True, "total": 1, "folded": 1, "other_batch_rel": found}) == "wrong"
    assert verdict({"ok": True, "total": 1, "folded": 1, "other_batch_rel": math.nan}) == "wrong"


def test_difference():
    x = torch.tensor([1.0, -4.0, -math.inf])
    assert difference({"x": x}, {"x": x.clone()}) == 0
    assert difference(x, x + torch.tensor([1.0, 0.0, 0.0])) == 0.25
    assert difference(x, torch.tensor([1.0, -4.0, 0.0])) == math.inf
    assert difference(x, x * math.nan) == math.inf


def test_another_batch():
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.tensor([[1, 1], [1, 0]])
    fresh = other_batch({"ids": ids, "mask": mask, "x": draw(2, 4), "use_cache": False})
    assert fresh["ids"].shape == (3, 7) and not torch.equal(fresh["ids"][:2], ids)
    assert torch.equal(fresh["mask"], mask[[0, 1, 0]]) and fresh["x"].shape == (3, 4)


def test_limit_of_time(monkeypatch):
    def build(name):
        while True:
            time.perf_counter()

    monkeypatch.setattr(fold_table, "build", build)
    record = measure_in_child("net", replace(TableConfig(), seconds=1))
    assert verdict(record) == "limit" and "1 seconds of processor time" in record["limit"], record


def test_reasons_without_names():
    reason = "the gains of layer_norm in encoder.layer.6.norm make a mean, and a centring after it"
    reason += " would show in conv2d in stem.0"
    assert kind_of(reason) == "the gains of layer_norm make a mean"
    reason = "centring stages.0.1.bias would show in linear in head, unless it gets a centred copy"
    assert kind_of(reason) == "centring a parameter would show in linear"
    reason = (
        "cat in patches joins pieces along the axis of the norm: it would take as many centrings"
    )
    assert kind_of(reason) == "cat joins pieces along the axis of the norm"
