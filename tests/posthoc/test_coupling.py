"""KL in chunks; the choice of positions that share, and of alpha, on a small trained model;
posthoc/rms_stats.py.

    python -m pytest tests/posthoc/test_coupling.py
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import close, draw
from small_rms import SHAPE, L, sequences, write_run

from common.errors import ConfigError, FoldError
from model import GPT
from posthoc import rms_stats
from posthoc.coupling import (
    GRID,
    Calibration,
    first_plan,
    greedy,
    ratios,
    sources,
    spell,
    suggest_first,
    text_windows,
    view,
)
from posthoc.kl import kl_divergence
from posthoc.rms_stats import summary


@pytest.fixture(scope="module")
def calibration(trained_rms) -> Calibration:
    return Calibration(trained_rms, sequences(32, 1000))


@pytest.fixture(scope="module")
def judge(trained_rms) -> Calibration:
    return Calibration(trained_rms, sequences(32, 2000))


# ----------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_kl_is_kl(chunk):
    """Against torch's own, float64: value and gradients, with rows of padding in the heads."""
    x, head = draw(5, 8, seed=1).requires_grad_(), draw(24, 8, seed=2).requires_grad_()
    x_teacher, head_teacher, weight = draw(5, 8, seed=3), draw(24, 8, seed=4), draw(5, seed=5)
    ours = kl_divergence(x, head, x_teacher, head_teacher, 20, chunk)
    p = (x_teacher @ head_teacher.T)[:, :20].log_softmax(-1)
    q = (x @ head.T)[:, :20].log_softmax(-1)
    theirs = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    close(ours, theirs)
    got, expected = (torch.autograd.grad((kl * weight).sum(), (x, head)) for kl in (ours, theirs))
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs)


def test_the_gradient_of_chunked_kl_is_rounded_once():
    x, x_teacher = (draw(5, 8, seed=seed).bfloat16() for seed in (1, 3))
    head = draw(20, 8, seed=2).bfloat16()
    x.requires_grad_()
    in_chunks, at_once = (
        torch.autograd.grad(kl_divergence(x, head, x_teacher, head, 20, chunk).sum(), x)[0]
        for chunk in (2, 20)
    )
    assert at_once.dtype == torch.bfloat16 and torch.equal(in_chunks, at_once)


# ------------------------------------------------------------------------------------ views, ratios


def test_a_view_is_another_plan_on_the_same_tensors(trained_rms):
    student = view(trained_rms, "Rs RR ss R", 1.3)
    assert str(student.plan) == "Rs RR ss R"
    for name, tensor in student.state_dict().items():
        assert tensor.data_ptr() == trained_rms.state_dict()[name].data_ptr()
    idx = sequences(2, 0)
    assert not torch.equal(student(idx), trained_rms(idx))
    # coupled_first = L, bit for bit
    assert torch.equal(view(student, first_plan(L, L))(idx), trained_rms(idx))


def test_ratios_and_summary_leave_out_first_positions():
    rms = 1 + draw(2 * L + 1, 6, 24).square()
    rms[:, :, 0] = 1e9  # an attention sink
    for row in summary(rms):
        assert row["first"] == 1e9 and max(row["mean"], row["sd"], *row["quantiles"]) < 100
    r = rms[3, :, 1:] / rms[2, :, 1:]
    got = ratios(rms, 3, 2)
    errors = [float((1 - r / got["least_squares"] * by).square().mean()) for by in (0.99, 1, 1.01)]
    assert min(errors) == errors[1]
    assert got["geometric"] == pytest.approx(float(r.log().mean().exp()))
    assert got["means"] == pytest.approx(float(rms[3, :, 1:].mean() / rms[2, :, 1:].mean()))
    assert sources("Rs ss RR R") == [0, 0, 0, 0, 4, 5, 6] and spell("RsssRRR") == "Rs ss RR R"


# ------------------------------------------------------------------------------------------ choices


def test_suggested_alpha_is_near_the_best_of_a_grid(calibration, judge):
    """On text that it was not chosen on, for every k < L; and the suggested k is the smallest
    within the budget.
    """
    _, choices = suggest_first(calibration, budget=1e-2)
    for k, choice in enumerate(choices[:L]):
        grid = [(round(choice.alpha / GRID) + step) * GRID for step in range(-15, 16, 5)]
        best = min(judge.kl(choice.plan, alpha) for alpha in grid)
        assert judge.kl(choice.plan, choice.alpha) <= 1.1 * best
        layers = calibration.alpha(choice.plan)
        assert judge.kl(choice.plan, layers) < judge.kl(choice.plan, 1.0)  # calibrating helps
        assert choice.saved == L - k
    assert choices[L].kl == 0 and choices[L].alpha == 1
    kls = [choice.kl for choice in choices]
    for budget in (kls[1], kls[0], 0.0):
        wanted = min(k for k in range(L + 1) if kls[k] <= budget)
        assert suggest_first(calibration, budget)[0] == wanted


def test_calibrated_takes_the_lowest_kl_of_three_kinds(calibration, monkeypatch):
    plan = first_plan(L, 1)
    choice = calibration.calibrated(plan)
    kinds = (1.0, calibration.best_alpha(plan)[0], calibration.alpha(plan))
    assert choice.kl == pytest.approx(min(calibration.kl(plan, alpha) for alpha in kinds), rel=1e-6)
    kept = {a for a, letter in zip(choice.alpha, plan.replace(" ", "")) if letter == "R"}
    assert len(choice.alpha) == 2 * L + 1 and kept == {1.0}
    # Where sizes mislead, as in results/cpu/posthoc with every block coupled, alpha stays at one.
    monkeypatch.setattr(calibration, "alpha", lambda plan: (9.0,) * (2 * L + 1))
    monkeypatch.setattr(calibration, "best_alpha", lambda plan: (9.0, math.inf))
    assert calibration.calibrated(plan).alpha == (1.0,) * (2 * L + 1)


@pytest.mark.parametrize("across", [False, True])
def test_greedy_takes_the_cheapest_first_and_keeps_the_budget(calibration, across):
    everything = greedy(calibration, float("inf"), across)
    assert [choice.saved for choice in everything] == list(range(2 * L if across else L + 1))
    assert everything[-1].plan == ("Rs ss ss R" if across else "Rs Rs Rs R")
    budget = everything[2].kl
    within = greedy(calibration, budget, across)
    assert all(choice.kl <= budget for choice in within) and len(within) >= 3


def test_greedy_measures_again_what_a_position_costs(calibration, monkeypatch):
    """Sharing at 3 is cheap alone and dear after 1 shares: 5 comes second."""
    costs = {
        (): 0.0,
        (1,): 1.0,
        (3,): 1.5,
        (5,): 2.0,
        (1, 3): 9.0,
        (1, 5): 3.0,
        (3, 5): 3.6,
        (1, 3, 5): 12.0,
    }

    def kl(plan, alpha):
        letters = plan.replace(" ", "")
        return costs[tuple(i for i, letter in enumerate(letters) if letter == "s")]

    monkeypatch.setattr(calibration, "kl", kl)
    monkeypatch.setattr(calibration, "alpha", lambda plan: ())
    assert [choice.kl for choice in greedy(calibration, 100.0)] == [0.0, 1.0, 3.0, 12.0]


@torch.no_grad()
def test_kl_is_the_teachers_against_the_student_and_without_first_positions(calibration):
    student = view(calibration.model, "Rs Rs Rs R", 3.0)
    p, q = (
        m(calibration.windows)[..., :60].double().log_softmax(-1)
        for m in (calibration.model, student)
    )
    kl, reverse = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    close(calibration.token_kl("Rs Rs Rs R", 3.0).double(), kl, 1e-4)
    assert calibration.kl("Rs Rs Rs R", 3.0) == pytest.approx(float(kl[:, 1:].mean()), rel=1e-3)
    for other in (reverse[:, 1:], kl):  # another figure
        assert abs(float(other.mean()) / float(kl[:, 1:].mean()) - 1) > 0.01


@pytest.mark.parametrize(
    "keys", [{"norm_type": "layer"}, {"norm_groups": 2}, {"norm_plan": "RRRRRRR||R"}], ids=str
)
def test_what_cannot_be_coupled_is_refused(keys):
    with pytest.raises(FoldError, match="coupling is for rms"):
        view(GPT(replace(SHAPE, **keys)), "Rs Rs Rs R")


def test_what_shares_already_is_no_teacher():
    """Its own statistics would make another function of it."""
    with pytest.raises(ConfigError, match=r"shares statistics already \(norm plan Rs Rs Rs R\)"):
        Calibration(GPT(replace(SHAPE, norm_type="coupled")), sequences(4, 1))


# ------------------------------------------------------------------------------------------ program


def test_windows_of_text(run_folder, tmp_path):
    meta = {"tokenizer": "bytes"}
    assert text_windows(str(run_folder / "text.txt"), meta, 24, 10).shape == (10, 24)
    rows = "".join(json.dumps({"text": chr(65 + i) * 480}) + "\n" for i in range(26))
    (tmp_path / "many.jsonl").write_text(rows)
    assert text_windows(str(tmp_path / "many.jsonl"), meta, 13 * 480, 10).shape == (2, 13 * 480)
    with pytest.raises(ConfigError, match="two windows"):
        text_windows(str(tmp_path / "many.jsonl"), meta, 13 * 480 + 1, 10)
    first = text_windows(str(tmp_path / "many.jsonl"), meta, 24, 8)[:, 0].tolist()
    assert first == sorted(set(first)) and first[-1] - first[0] == 15
    # more of each, where there are few
    assert len(text_windows(str(tmp_path / "many.jsonl"), meta, 24, 400)) == 400


def test_program(run_folder, tmp_path, capsys):
    out, text = tmp_path / "o.jsonl", f"--text={run_folder / 'text.txt'}"
    words = [text, "--windows=16", f"--out={out}"]
    plot = f"--plot={tmp_path / 'fig3.png'}"
    rms_stats.main([str(run_folder), *words, "--across", plot, "--budget=0.5"])
    result = json.loads(out.read_text())
    assert len(result["blocks"]) == L and result["curve"][-1]["kl"] <= 0.5
    assert len(result["one_alpha"]["kl"]) == len(result["per_layer"]["kl"]) == L + 1
    for block in result["blocks"]:
        low, middle, high = block["mlp"]["quantiles"]
        assert low < middle < high and low < block["mlp"]["mean"] < high
    assert (tmp_path / "fig3.png").stat().st_size > 10_000
    (tmp_path / "coupled").mkdir()
    write_run(GPT(replace(SHAPE, norm_type="coupled")).eval(), tmp_path / "coupled")
    rms_stats.main([str(tmp_path / "coupled"), *words])  # its own sizes, and no suggestion
    assert "norm plan Rs Rs Rs R: it shares statistics already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="text: name a file"):
        rms_stats.main([str(run_folder)])
