"""Size and drift of the residual stream, and alpha calibrated to it.

python -m pytest tests/posthoc/test_rms_stats.py
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from coupled_shape import IDX, SHAPE, TARGETS, gpt
from helpers import TINY, close, events, losses, weights

from common.distributed import Ranks
from model import GPT
from norm_types import NORM_TYPES
from norms import SharedRMSNorm
from train import TrainConfig
from training.dataloader import Blocks
from training.evaluation import Evaluator
from training.stream import calibrate, measure, token_rms

L = SHAPE.n_layer


def shared(model: GPT) -> list[SharedRMSNorm]:
    return [module for module in model.modules() if isinstance(module, SharedRMSNorm)]


def streams(model: GPT) -> list[torch.Tensor]:
    """The stream after the add, or what replaces it, by a plain walk through the blocks."""
    x = model.wte(IDX) + model.wpe.weight[: IDX.shape[1]]
    x = model.plan.embed(x if model.norm_e is None else model.norm_e(x)[0])
    sublayers = [part for block in model.blocks for part in (block.attn, block.mlp)]
    delta, inv_rms, found = None, None, []
    for place, sublayer in zip(model.places(), [*sublayers, None], strict=True):
        if place.output is not None:
            delta = place.output(delta)[0]
        h = x if delta is None else place.residual_weight * x + delta
        y, inv_rms = place.norm(h, inv_rms)
        if place.replaces:
            h = y
            y = h if place.reader is None else place.reader(h)[0]
        found.append(h)
        x = h
        delta = None if sublayer is None else sublayer(y)
    return found


@pytest.mark.parametrize(
    "keys", [{"coupled_span": 0}, {"coupled_span": 2, "coupled_impl": "fold"}], ids=str
)
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
        squares = found[position].sum(-1).square().sum() / SHAPE.n_embd  # of the means, times C
        close(stats.mean_share[position], (squares / found[position].square().sum()).sqrt())
    assert stats.mean_share.min() > 0.1 and stats.mean_share.max() < 1
    assert stats.drift.max() > 1.1 and stats.spread.max() > 0.01


def test_a_run_measures_windows_from_all_of_its_evaluation_text(tiny_data):
    config = TrainConfig(block_size=16, batch_size=2, eval_tokens=16 * 9)
    blocks = Blocks(str(tiny_data), "val", 16, 61)
    evaluator = Evaluator(config, blocks, {}, Ranks(0, 1, torch.device("cpu")), nullcontext)
    assert all(map(torch.equal, evaluator.spread_windows(), blocks.batch([0, 5])))  # two of nine


@pytest.mark.parametrize("base", ["rms", "layer"])
def test_drift_of_a_taper_is_the_size_of_what_it_scales(base):
    """1 while the norm has a statistic of its own, then RMS(c h), h centred with LayerNorm; c for
    each channel too.
    """
    model = gpt(
        norm_type="taper",
        taper_base=base,
        taper_fit="channel" if base == "layer" else "norm",
        taper_warmup=1.0,
        taper_end=3.0,
    ).train()
    model.set_step(1, 10)
    model(IDX, IDX)
    for step, phase in ((1, "warm"), (2, "blend"), (3, "fixed")):
        model.train().set_step(step, 10)
        stats, found = measure(model, IDX), streams(model.eval())
        assert model.blocks[0].norm1.norm.phase == phase
        for position, place in enumerate(list(model.places())[:-1]):
            h = found[position]
            if base == "layer":
                h = h - h.mean(-1, keepdim=True)
            scaled = (place.norm.scale * h).square().mean(-1) + SHAPE.norm_eps
            log_ratio = scaled.log().double() / 2 * (phase != "warm")
            close(stats.drift[position], log_ratio.mean().exp())
            close(stats.spread[position], log_ratio.std(correction=0))
        assert stats.drift[-1] == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_type": "layer", "bias": True, "tie_embeddings": False},
        {"norm_type": "taper", "taper_final": True},
        {"norm_type": "none"},
        {"norm_plan": "Rs ss ss ss s"},
        {"norm_type": "rms", "n_vocab": 29},
        {"norm_type": "peri", "norm_plan": "RRRRRRRRI|RRRRRRRR"},
        {"norm_type": "dyt"},
        {"norm_type": "keel"},
    ],
    ids=str,
)
def test_the_output_is_measured_as_defined(keys):
    """Against all logits and the gradient along what the final norm normalises, by hand; a
    measurement without targets has no output.
    """
    model = gpt(**keys)
    idx, targets = IDX % model.n_vocab, TARGETS % model.n_vocab
    stats, h = measure(model, idx, targets), []

    def keep(place, inputs):
        x, delta, inv_rms = inputs
        if place.output is not None:
            delta, _ = place.output(delta)
        h.append((place.residual_weight * x + delta).detach().requires_grad_())
        return h[0], None, inv_rms

    model.norm_f.register_forward_pre_hook(keep)
    logits = model.eval()(idx)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    centred = logits - logits.mean(-1, keepdim=True)
    size = centred.square().sum(-1).mean().sqrt().item()
    assert stats.logit_norm == pytest.approx(size, rel=1e-12)
    radial = (h[0].grad * h[0]).sum().item()
    assert stats.radial_gradient == pytest.approx(radial, rel=1e-9, abs=1e-12)
    at_norms = {"rms", "drift", "spread", "mean_share"}
    assert stats.record().keys() == at_norms | {"logit_norm", "radial_gradient"}
    assert measure(model, idx).record().keys() == at_norms


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_position_of_every_norm_type(norm_type):
    model = gpt(norm_type=norm_type)
    stats, found = measure(model, IDX, TARGETS), streams(model)
    close(stats.rms, torch.stack([h.double().square().mean().sqrt() for h in found]))
    windows = token_rms(model, IDX)
    for position, (place, h) in enumerate(zip(model.places(), found, strict=True)):
        close(windows[position], (h.square().mean(-1) + place.norm.eps).sqrt())
    # Only s, h and a taper can drift.
    if norm_type not in ("coupled", "bhyt", "taper"):
        assert (stats.drift == 1).all() and not stats.spread.any()


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
    for position, place in enumerate(model.places()):
        if position % (2 * L):
            close(place.norm.alpha, drift[position])
    # Loaded into a model without calibration, alpha is absorbed into the gains: the same function
    # without a buffer.
    for alpha in (1.0, 1.5):
        plain = gpt(coupled_span=0, coupled_alpha=alpha)
        plain.load_state_dict(model.state_dict())
        close(plain(IDX), model(IDX))
    with pytest.raises(RuntimeError, match="alpha"):  # no gain could take it
        gpt(coupled_span=0, norm_gain="none").load_state_dict(model.state_dict())


def test_a_model_gone_wrong_keeps_its_alpha():
    model = gpt(coupled_span=0, coupled_calibrate=1)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = torch.inf
    stats = calibrate(model, IDX)
    assert not stats.drift.isfinite().all()
    assert all(norm.alpha.isfinite() for norm in shared(model))
    model = gpt(coupled_span=0, coupled_alpha=1.5)  # a fixed one stays
    calibrate(model, IDX)
    assert {norm.alpha for norm in shared(model)} == {1.5}


def test_calibration_in_training_resumes_exactly_and_is_logged(train_ok, tiny_data, tmp_path):
    """alpha is set from one training batch, the same on any number of ranks, and is part of the
    checkpoint.
    """
    words = [*TINY, "--norm_type=coupled", "--coupled_span=0", "--coupled_calibrate=7"]
    words += ["--eval_interval=10", "--lr_schedule=constant", f"--data_dir={tiny_data}"]
    for name, steps in (("whole", 20), ("halves", 10), ("halves", 20)):
        train_ok(*words, f"--out_dir={tmp_path / name}", f"--max_iters={steps}", ranks=2)
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    whole, halves = (weights(tmp_path / name) for name in ("whole", "halves"))
    alphas = [name for name in whole if name.endswith("alpha")]
    assert len(alphas) == 3 and all(torch.equal(whole[name], halves[name]) for name in alphas)
    assert all(whole[name] != 1 for name in alphas)
    logged = events(tmp_path / "whole", "rms")
    assert [event["step"] for event in logged] == [0, 10, 20]
    assert all(len(event[name]) == 5 for event in logged for name in ("rms", "drift", "spread"))
    assert all(event["logit_norm"] > 0 > event["radial_gradient"] - 1e-3 for event in logged)
