"""Size and drift of the residual stream, and alpha calibrated to it.

    python -m pytest tests/test_rms_stats.py
"""

from dataclasses import replace

import pytest
import torch
from conftest import TINY, close, losses, records, shake
from test_coupled_fold import IDX, SHAPE

from model import GPT
from rms_stats import calibrate, measure

L = SHAPE.n_layer


def gpt(**keys) -> GPT:
    return shake(GPT(replace(SHAPE, **keys)))


def streams(model: GPT) -> list[torch.Tensor]:
    """The residual stream at every norm position, by hand."""
    found, x, delta, inv_rms = [], model.wte(IDX) + model.wpe.weight[: IDX.shape[1]], None, None
    for block in model.blocks:
        y, x, inv_rms = block.norm1(x, delta, inv_rms)
        found.append(x)
        y, x, inv_rms = block.norm2(x, block.attn(y, None, None), inv_rms)
        found.append(x)
        delta = block.mlp(y, block.norm2.debt(x, inv_rms))
    return [*found, x + delta]


@pytest.mark.parametrize("keys", [{"coupled_span": 0}, {"coupled_span": 2, "coupled_impl": "fold"}], ids=str)
def test_drift_is_the_ratio_of_the_rms(keys):
    model = gpt(**keys)
    stats, found = measure(model, IDX), streams(model)
    rms = [(h.square().mean(-1) + SHAPE.norm_eps).sqrt() for h in found]  # (B, T) each
    span = 2 * (keys["coupled_span"] or L)
    sources = [position - position % span for position in range(2 * L)] + [2 * L]
    for position, source in enumerate(sources):
        ratio = (rms[position] / rms[source]).log()
        close(stats.drift[position], ratio.mean().exp())
        close(stats.spread[position], ratio.std(correction=0))
        close(stats.rms[position], found[position].square().mean().sqrt())
    assert stats.drift.max() > 1.1 and stats.spread.max() > 0.01


@pytest.mark.parametrize("norm_type", ["layer", "rms", "taper", "dyt"])
def test_norms_with_their_own_statistic_have_no_drift(norm_type):
    stats = measure(shake(GPT(replace(SHAPE, norm_type=norm_type))), IDX)
    assert stats.rms.shape == (2 * L + 1,) and (stats.rms > 0).all()
    assert torch.equal(stats.drift, torch.ones_like(stats.drift)) and not stats.spread.any()


def test_measuring_leaves_no_trace():
    model = gpt(dropout=0.5, coupled_span=0).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    measure(model, IDX)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_calibrated_alpha_is_the_drift_of_the_uncalibrated_model():
    model = gpt(coupled_span=0, coupled_calibrate=1)
    drift = measure(gpt(coupled_span=0), IDX).drift
    calibrate(model, IDX)
    for position, norm in enumerate(model.norms()):
        if position % (2 * L):
            close(norm.alpha, drift[position])
    # Absorbed into the gains, it is the same function without a buffer.
    plain = gpt(coupled_span=0)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("alpha")}
    plain.load_state_dict(weights)
    with torch.no_grad():
        for mine, its in zip(model.norms(), plain.norms(), strict=True):
            if hasattr(mine, "alpha"):
                its.weight /= mine.alpha
    close(model(IDX), plain(IDX))


def test_a_fixed_alpha_stays():
    model = gpt(coupled_span=0, coupled_alpha=1.5)
    calibrate(model, IDX)
    assert {norm.alpha for norm in model.norms() if hasattr(norm, "alpha")} == {1.5}


@pytest.mark.parametrize("ranks", [1, 2])
def test_calibration_in_training_resumes_exactly_and_is_logged(train_ok, tiny_data, tmp_path, ranks):
    """alpha is set from one training batch, the same on any number of ranks, and is part of the checkpoint."""

    def run(name: str, *words: str) -> None:
        train_ok(*TINY, "--norm_type=coupled", "--coupled_span=0", "--coupled_calibrate=7", "--eval_interval=10",
                 "--lr_schedule=constant", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / name}", *words,
                 ranks=ranks)  # fmt: skip

    run("whole", "--max_iters=20")
    run("halves", "--max_iters=10")
    run("halves", "--max_iters=20")
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    whole, halves = (torch.load(tmp_path / name / "ckpt_last.pt", weights_only=True)["model"]
                     for name in ("whole", "halves"))  # fmt: skip
    alphas = [name for name in whole if name.endswith("alpha")]
    assert len(alphas) == 3 and all(torch.equal(whole[name], halves[name]) for name in alphas)
    assert all(whole[name] != 1 for name in alphas)
    logged = [event for event in records(tmp_path / "whole") if event["event"] == "rms"]
    assert [event["step"] for event in logged] == [0, 10, 20]
    assert all(len(event[name]) == 5 for event in logged for name in ("rms", "drift", "spread"))
