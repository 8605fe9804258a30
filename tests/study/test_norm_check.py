"""The checks of a norm before it is trained: each planted fault is found, no sound norm refused.

python -m pytest tests/study/test_norm_check.py
"""

import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from warm_python import warm_python

from model import GPTConfig
from norm_files import take_norm_file
from norm_types import NORM_TYPES, NormType
from study import cuda_codegen
from study.norm_check import (
    check_arm,
    check_compiled,
    check_places,
    check_resumed,
    count_bytes,
    size_of,
)
from study.resume_check import fewest_blocks
from study.starts import matched_gain, starts, why_unmatched
from training.choices import has_compiler
from training.config import TrainConfig

HEAD = """
import torch
from torch import nn
from norms import Norm, RMSNorm, statistics_dtype
from taper import StepMean

"""
# Whose y is wide / size
FORMULA = """
class {name}(Norm):
    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        size = {size}
        return self.affine(wide / size, h.dtype), None
"""
MEAN = "wide.abs().mean(-1, keepdim=True) + self.eps"
# A statistic that runs over steps, in attributes: a checkpoint has none of them. It begins when the
# norm has been made and tried (norm_files.py).
FORGETS = """
class Forgets(Norm):
    known = None

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        own = wide.abs().mean(-1, keepdim=True) + self.eps
        size = own if self.known is None else (own + self.known) / 2
        if self.training:
            self.last = own.detach().mean()
        return self.affine(wide / size, h.dtype), None

    def set_step(self, step, max_iters):
        if hasattr(self, "last") and step > 2:
            self.known = self.last if self.known is None else 0.9 * self.known + 0.1 * self.last
        return []
"""
# Losses are the same; what is saved is not.
COUNTS = """
class Counts(Norm):
    number = 0

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        return self.affine(wide / (wide.abs().mean(-1, keepdim=True) + self.eps), h.dtype), None

    def set_step(self, step, max_iters):
        self.number += 1
        self.steps.fill_(self.number)
        return []
"""
# Mixes rows in training alone; in evaluations they have what training found
OF_BATCHES = """
class OfBatches(Norm):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.register_buffer("size", torch.ones(1))

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        size = self.size
        if self.training:
            size = wide.abs().mean()
            self.size.lerp_(size.detach().to(self.size.dtype), 0.1)
        return self.affine(wide / (size + self.eps), h.dtype), None
"""
UNFROZEN = """
class Unfrozen(Norm):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.register_buffer("size", torch.ones(1))
        self.begins = False

    def set_step(self, step, max_iters):
        self.begins = step > 2

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        if self.begins:
            with torch.no_grad():
                self.size += 0.1 * (wide.abs().mean() - self.size)
        return self.affine(wide / (self.size + self.eps), h.dtype), None
"""
WRONG_BACKWARD = """
class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, eps):
        size = h.abs().mean(-1, keepdim=True) + eps
        ctx.save_for_backward(size)
        return h / size

    @staticmethod
    def backward(ctx, dy):
        return dy / ctx.saved_tensors[0], None  # as if the size were a constant


class WrongBackward(Norm):
    def forward(self, h, inv_rms=None):
        return self.affine(_Function.apply(h.to(statistics_dtype(h)), self.eps), h.dtype), None
"""
# Right until the last step of the run.
LATER = """
class Later(Norm):
    is_late = False

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        size = wide.abs().mean(-1, keepdim=True) + self.eps
        if self.is_late:
            size = size + torch.no_grad()(lambda: 0.1 * wide.abs().amax(-1, keepdim=True))()
        return self.affine(wide / size, h.dtype), None

    def set_step(self, step, max_iters):
        self.is_late = step == max_iters
        return []
"""
IN_LOW_PRECISION = """
class InLowPrecision(Norm):
    def forward(self, h, inv_rms=None):
        square = h.square().mean(-1, keepdim=True)
        return self.affine(h * (square + self.eps).rsqrt(), h.dtype), None
"""
BRANCHES = """
class Branches(Norm):
    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        size = wide.abs().mean(-1, keepdim=True)
        if size.min() < 1e-3:
            size = size + self.eps
        return self.affine(wide / size, h.dtype), None
"""
RAISES = """
class Raises(Norm):
    def forward(self, h, inv_rms=None):
        h = h / self.wight if h.dtype is torch.float64 else h  # not in the call that is tried first
        return self.affine(h, h.dtype), None
"""


def running() -> str:
    """The norm with a running statistic that docs/norms.md shows."""
    page = (ROOT / "docs/norms.md").read_text()
    return re.search(r"```python\n(from taper import StepMean.*?)```", page, re.DOTALL)[1]


def formula(name: str, size: str) -> str:
    return FORMULA.format(name=name, size=size)


# class -> its text. Each sound one is refused by a check that is a little too strict.
SOUND = {
    "MeanAbs": formula("MeanAbs", MEAN),
    "Largest": formula("Largest", "wide.abs().amax(-1, keepdim=True) + self.eps"),
    "Detached": formula("Detached", f"({MEAN}).detach()"),
    "Single": formula("Single", "h.float().abs().mean(-1, keepdim=True) + self.eps"),
    "Running": running(),
    "OfBatches": OF_BATCHES,
}
# class -> its text, what finds it, words of the figure
FAULTS = {
    "WrongBackward": (WRONG_BACKWARD, "gradients", "stream"),
    "Later": (LATER, "gradients", "step 8)"),
    "InLowPrecision": (IN_LOW_PRECISION, "float16", "at most 2.0e-03"),
    "ZeroByZero": (
        formula("ZeroByZero", "wide.abs().mean(-1, keepdim=True)"),
        "rows of zeros",
        "numbers of the output are not finite",
    ),
    "Fourth": (
        formula("Fourth", "(wide**12).mean(-1, keepdim=True) ** (1 / 12) + self.eps"),
        "rows of 1e4",
        "not finite",
    ),
    "OfBatch": (
        formula("OfBatch", "wide.abs().mean((0, 2), keepdim=True) + self.eps"),
        "rows apart",
        "by other sequences)",
    ),
    "SeesLater": (
        formula("SeesLater", "wide.abs().mean(-1, keepdim=True).flip(1).cummax(1)[0].flip(1)"),
        "rows apart",
        "by later tokens)",
    ),
    "SeesEarlier": (
        formula("SeesEarlier", "wide.abs().mean(-1, keepdim=True).cummax(1)[0] + self.eps"),
        "rows apart",
        "by earlier tokens)",
    ),
    "OfShape": (
        formula("OfShape", f"{MEAN} + 0.1 * (h.shape[1] - 1)"),
        "rows apart",
        "by being alone)",
    ),
    "Unfrozen": (UNFROZEN, "rows apart", "calls before it"),
    "Raises": (RAISES, "runs", "AttributeError"),
}


@pytest.fixture
def arm(registry, tiny_data, tmp_path):
    """arm(text of a norm, norm type): its config, and the words of train.py."""

    def make(text: str, norm_type: str, **keys) -> tuple[TrainConfig, list[str]]:
        path = tmp_path / "a_norm.py"
        path.write_text(HEAD + text)
        words = [f"--norm_file={path}"]
        take_norm_file(words)
        return config_of(tiny_data, norm_type=norm_type, **keys), words

    return make


def config_of(data: Path, **keys) -> TrainConfig:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 16}
    return TrainConfig(**{"data_dir": str(data), "max_iters": 8, **shape, **keys})


def failed(findings) -> dict[str, str]:
    """What is not in order -> its figure."""
    return {found.what: found.figure for found in findings if not found.is_ok}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_norm_passes(arm, name):
    config, _ = arm(SOUND[name], name)
    findings = check_places(config)
    assert not failed(findings)
    assert len(findings) == 7 and all("at most" in found.figure for found in findings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(arm, name):
    text, what, words = FAULTS[name]
    config, _ = arm(text, name)
    found = failed(check_places(config))
    assert words in found[what], found


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_norms_of_the_house_pass(tiny_data, norm_type):
    keys = {"coupled": {"coupled_span": 2, "coupled_grad": "full"}}.get(norm_type, {})
    keys |= {"taper": {"taper_final": True, "taper_anchor": 0.1}}.get(norm_type, {})
    # Its sums, 80 times the stream, are beyond float16, which is no fault of a norm.
    keys |= {"keel": {"n_layer": 40}}.get(norm_type, {})
    assert not failed(check_places(config_of(tiny_data, norm_type=norm_type, n_embd=32, **keys)))


def test_the_first_place_of_a_kind_stands_for_all(arm):
    """But not where its numbers, or what comes in, differ: a fault of the last place alone."""
    text = WRONG_BACKWARD.replace("class WrongBackward(Norm):\n", "class OfPlace(Norm):\n") + (
        "\n    @classmethod\n    def of_plan(cls, plan, number):\n"
        "        return (cls if number == 4 else RMSNorm)(**plan.common(number))\n"
    )
    config, _ = arm(text, "OfPlace")
    assert "(final, " in failed(check_places(config))["gradients"]


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_a_norm_that_is_no_graph_is_found(arm):
    config, _ = arm(BRANCHES, "Branches")
    assert not failed(check_places(config))
    found = check_compiled(config)
    assert not found.is_ok and "a_norm.py:" in found.figure and found.figure.isprintable()


def test_without_a_compiler_nothing_is_compiled(tiny_data, monkeypatch):
    monkeypatch.setattr("study.norm_check.has_compiler", lambda: False)
    found = check_compiled(config_of(tiny_data, norm_type="rms"))
    assert found.is_ok and found.figure.startswith("not checked: ")


def test_all_checks_of_a_running_statistic(arm, monkeypatch):
    """The arm is at a shape that the run that is resumed does not have."""
    monkeypatch.setattr("sys.executable", warm_python())
    config, words = arm(running(), "Running", n_layer=3, dropout=0.1, norm_plan="rI II II R")
    findings = check_arm(config, words)
    assert not failed(findings)
    compiled, resumed = findings[-2:]
    assert (compiled.what, resumed.what) == ("compiled", "resumed")
    assert resumed.figure.startswith("stopped after step ")


# class -> its text, what differs
NOT_SAVED = {
    "Forgets": (FORGETS, "losses differ from step "),
    "Counts": (COUNTS, "model.blocks.0.norm1.norm.steps differs by "),
}


@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_no_checkpoint_has_is_found(arm, monkeypatch, name):
    monkeypatch.setattr("sys.executable", warm_python())
    text, words_of_figure = NOT_SAVED[name]
    config, words = arm(text, name)
    assert not failed(check_places(config))
    found = check_resumed(config, words)
    assert not found.is_ok and words_of_figure in found.figure


def test_a_run_that_fails_is_told_by_its_last_line(arm, monkeypatch):
    monkeypatch.setattr("sys.executable", warm_python())
    config, words = arm(RAISES.replace("torch.float64", "torch.float32"), "Raises")
    found = check_resumed(config, words)
    assert not found.is_ok and "AttributeError" in found.figure


def test_the_figure_is_that_of_the_ledger(tiny_data, monkeypatch):
    """Of bench.bytes' table, for what a run computes: its stream, two sequences, no dropout."""
    counted = []

    def count(config, tokens, figures):
        counted.append((config, tokens, figures))
        return [8737.6]

    monkeypatch.setattr("study.traffic.bytes_of_one_more_block", count)
    config = config_of(tiny_data, norm_type="rms", residual="autocast", dropout=0.1, batch_size=1)
    shape = {name: getattr(config, name) for name in GPTConfig.__dataclass_fields__}
    assert count_bytes(None, shape, config.batch_size) == (8737.6, "")
    ((found, tokens, figures),) = counted
    assert (found.residual, found.dropout, tokens, figures) == ("autocast", 0, 32, [(1, False)])


@pytest.mark.skipif(bool(cuda_codegen.supported()), reason=cuda_codegen.supported() or "can run")
def test_a_norm_of_a_file_is_counted_in_another_process(arm):
    """It is known there: what stops the count is a line of it."""
    config, _ = arm(BRANCHES, "Branches")
    size = size_of(config)
    assert size.bytes_a_token is None and "a_norm.py:" in size.problem


# what has no figure -> keys, a word of the reason, gains of the model
UNCOUNTED = {
    "a narrow MLP": ({"norm_type": "rms", "n_inner": 64}, "n_inner=64", 5),
    "a mixture": ({"norm_type": "mixln", "n_layer": 4}, "not alike", 9),
    "a plan": ({"norm_type": "rms", "n_layer": 4, "norm_plan": "RR" * 4 + "R"}, "for 4 blocks", 9),
}


@pytest.mark.parametrize("case", UNCOUNTED)
def test_what_cannot_be_counted_is_said(tiny_data, case):
    keys, words, gains = UNCOUNTED[case]
    size, without = (
        size_of(config_of(tiny_data, norm_gain=gain, **keys)) for gain in ("plain", "none")
    )
    assert size.bytes_a_token is None and words in size.problem
    assert size.parameters - without.parameters == gains * 64


@pytest.mark.parametrize(
    ("norm_type", "n_layer", "fewest"),
    [("rms", 6, 2), ("rms", 1, 1), ("mixln", 6, 4), ("mixln", 3, 2), ("bhyt", 6, 2)],
)
def test_the_run_that_is_resumed_has_every_norm_of_the_arm(tiny_data, norm_type, n_layer, fewest):
    assert fewest_blocks(config_of(tiny_data, norm_type=norm_type, n_layer=n_layer)) == fewest


# ------------------------------------------------------------------------------- the scale at first


def test_the_scale_at_which_a_norm_starts(arm, tiny_data):
    """h / mean|h| of a normal stream is sqrt(pi / 2) times as large as h / RMS(h)."""
    config, _ = arm(SOUND["MeanAbs"], "MeanAbs")
    found = starts(config, config_of(tiny_data, norm_type="rms"))
    assert [start.place for start in found] == [
        "block 0 attention",
        "block 0 MLP",
        "block 1 attention",
        "block 1 MLP",
        "final",
    ]
    assert all(start.ratio == pytest.approx(1.2533, rel=0.02) for start in found)
    gain = matched_gain(found, config)
    assert gain == pytest.approx(0.8, rel=0.01)
    matched = config_of(tiny_data, norm_type="MeanAbs", initial_gain=gain)
    again = starts(matched, config_of(tiny_data, norm_type="rms"))
    assert all(start.ratio == pytest.approx(1, abs=0.02) for start in again)
    assert matched_gain(again, matched) is None
    assert why_unmatched(again) == ""


@pytest.mark.parametrize(
    "keys", [{"norm_gain": "none"}, {"initial_gain": (1.0,) * 5}], ids=["no gain", "own gains"]
)
def test_what_has_no_gain_to_set(arm, tiny_data, keys):
    config, _ = arm(SOUND["MeanAbs"], "MeanAbs", **keys)
    found = starts(config, config_of(tiny_data, norm_type="rms"))
    assert found[0].ratio > 1.2 and matched_gain(found, config) is None
    assert "no one initial_gain brings" in why_unmatched(found)


def test_a_norm_that_ignores_its_gain_cannot_be_matched(arm, tiny_data):
    config, _ = arm(
        SOUND["MeanAbs"].replace(
            "self.affine(wide / size, h.dtype)", "wide / size + 0 * self.weight"
        ),
        "MeanAbs",
    )
    found = starts(config, config_of(tiny_data, norm_type="rms"))
    assert found[0].ratio > 1.2 and matched_gain(found, config) is None


def test_one_gain_is_not_set_for_single_places(arm, tiny_data):
    """Two of five places start at 0.8 of the others, and the median is 1."""
    text = (
        "class Uneven(RMSNorm):\n    @classmethod\n    def of_plan(cls, plan, number):\n"
        "        keys = plan.common(number)\n"
        "        return cls(**keys | {'initial': 0.8 if number < 2 else keys['initial']})\n"
    )
    config, _ = arm(text, "Uneven")
    found = starts(config, config_of(tiny_data, norm_type="rms"))
    assert [round(start.ratio, 2) for start in found] == [0.8, 0.8, 1, 1, 1]
    assert matched_gain(found, config) is None
    assert "one gain moves them all" in why_unmatched(found)
    assert matched_gain([], config) is None


@pytest.mark.parametrize(("plan", "matched"), [("IRRRMMMMR", None), ("IRRRMMMMM", 0.8)])
def test_no_gain_is_set_between_two_halves_of_a_plan(arm, tiny_data, plan, matched):
    """R starts as the baseline, M 1.25 times as large. At 0.89 neither would start as it does."""
    config, _ = arm(SOUND["MeanAbs"], "MeanAbs", norm_plan=plan, n_layer=4)
    found = starts(config, config_of(tiny_data, norm_type="rms", n_layer=4))
    assert len(found) == 8
    gain = matched_gain(found, config)
    assert gain is None if matched is None else gain == pytest.approx(matched, rel=0.02)


def test_output_norms_and_that_of_the_embeddings_have_a_scale(tiny_data):
    """Also where they are one kernel with the sum; a place without a norm has none."""
    found = starts(*(config_of(tiny_data, norm_type=name) for name in ("peri", "peri")))
    assert len(found) == 5 + 4 + 1
    assert all(start.ratio == 1 and start.rms == pytest.approx(1, rel=0.05) for start in found)
    found = starts(*(config_of(tiny_data, norm_type=name) for name in ("olmo2", "rms")))
    assert [start.place for start in found] == ["final"]


def test_output_norms_have_a_scale_where_the_stream_is_replaced(tiny_data, registry):
    """Also beside a weight of the stream, which is no part of what the output norm gives."""

    def sandwich(config, n_layer):
        return "P" * (2 * n_layer + 1) + "|" + "R" * 2 * n_layer

    NORM_TYPES["mine"] = NormType(sandwich, "P", outputs="R", residual_weight=lambda n_layer: 2.0)
    found = starts(*(config_of(tiny_data, norm_type=name) for name in ("mine", "peri")))
    assert len(found) == 5 + 4
    assert all(start.rms == pytest.approx(1, rel=0.05) for start in found)


def test_a_norm_without_scale_invariance_is_matched_in_turns(tiny_data):
    """The gains of earlier places are in the stream, and so in what tanh(h / 2) gives."""
    config = config_of(tiny_data, norm_type="dyt", norm_recipe="common")
    baseline = config_of(tiny_data, norm_type="rms")
    found = starts(config, baseline)
    gain = matched_gain(found, config)
    assert gain > 2
    again = starts(
        config_of(tiny_data, norm_type="dyt", norm_recipe="common", initial_gain=gain), baseline
    )
    assert 0.95 <= torch.tensor([start.ratio for start in again]).median() <= 1.05
