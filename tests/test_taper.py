"""TaperNorm and its scale anchor: schedule, calibration, phases, statistics over ranks, resuming.

    python -m pytest tests/test_taper.py

In float64 unless a test says otherwise.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from coupled_shape import IDX, TARGETS
from helpers import TINY, close, draw, events, same, shake
from hf_models import save as hf_save
from hf_models import tiny as hf_tiny
from torch._dynamo.testing import CompileCounter

import train
from common.errors import ConfigError
from fold.gpt import to_folded
from load import init_from, load_model
from model import GPT, GPTConfig
from norms import LayerNorm, RMSNorm
from taper import EMA_DECAY, ScaleAnchor, TaperNorm, TaperSchedule, tapers
from training.optim import carry_state, make_optimizer

SHAPE = GPTConfig(
    vocab_size=32,
    block_size=8,
    n_layer=2,
    n_head=2,
    n_embd=16,
    init_std=0.2,
    norm_type="taper",
    taper_warmup=3.0,
    taper_end=7.0,
)
PHASES = {"warm": 2, "blend": 5, "fixed": 8}  # a training step in each, with SHAPE's schedule
BASES = ["rms", "layer"]
ITERS = 10  # max_iters


def taper(base, eps=0.1, warmup=3, end=7):
    norm = LayerNorm(16, eps, bias=True) if base == "layer" else RMSNorm(16, eps)
    return shake(TaperNorm(norm, TaperSchedule(warmup, end)))


def gpt(**keys):
    return shake(GPT(replace(SHAPE, **keys)))


def train_to(model, step, lr=1e-2):
    """The optimiser, when `model` has been trained up to the beginning of `step`, as the training
    loop does it.
    """
    optimizer = make_optimizer(model.train(), lr, (0.9, 0.95), 1e-8, 0.1)
    for now in range(1, step + 1):
        for source, target in model.set_step(now, ITERS):
            carry_state(optimizer, source, target)
        if now == step:
            return optimizer
        loss, aux = model(IDX, TARGETS)
        (loss + aux).backward()
        optimizer.step()
        optimizer.zero_grad()


def centred_and_scale(h, base, eps=0.1):
    """What a norm of this base divides, and what it divides by."""
    centred = h - h.mean(-1, keepdim=True) if base == "layer" else h
    return centred, (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def step_of(norm, step):
    """Move a norm to `step` as if it had been trained from step 1 on, on fixed data."""
    norm.train()
    for now in range(1, step + 1):
        norm.set_step(now, ITERS)
        if now < step:
            norm(draw(2, 5, 16, seed=now))
    return norm


# ------------------------------------------------------------------------------------- the schedule


@pytest.mark.parametrize(
    ("step", "phase", "gate"),
    [
        (1, "warm", 1.0),
        (20, "warm", 1.0),
        (21, "blend", 0.5 * (1 + math.cos(math.pi / 60))),
        (40, "blend", 0.75),
        (50, "blend", 0.5),
        (60, "blend", 0.25),
        (79, "blend", 0.5 * (1 + math.cos(math.pi * 59 / 60))),
        (80, "fixed", 0.0),
        (1000, "fixed", 0.0),
    ],
)
@pytest.mark.parametrize(
    ("warmup", "end", "max_iters"), [(20, 80, 100), (0.2, 0.8, 100), (0.05, 80, 400)]
)
def test_gate(step, phase, gate, warmup, end, max_iters):
    """Steps, shares of max_iters, or one of each: the same schedule."""
    assert TaperSchedule(warmup, end).at(step, max_iters) == (phase, pytest.approx(gate, abs=1e-12))


@pytest.mark.parametrize(
    ("warmup", "end", "max_iters", "steps"),
    [
        # One step at least is warm, and the end comes after it.
        (0.0, 0.5, 10, (1, 5)),
        (0, 0.01, 40, (1, 2)),
        (0.5, 0.5, 10, (5, 6)),
        # Two units keep their order.
        (10, 0.5, 40, (10, 20)),
        (0.5, 30, 40, (20, 30)),
    ],
)
def test_the_steps_of_a_schedule(warmup, end, max_iters, steps):
    assert TaperSchedule(warmup, end).steps(max_iters) == steps


# --------------------------------------------------------------------------------- the three phases


@pytest.mark.parametrize("base", BASES)
def test_a_warm_model_trains_as_its_base_bit_for_bit(base):
    """Three steps of AdamW: losses and all shared gradients."""
    plain = {
        name: getattr(GPTConfig(), name) for name in ("norm_type", "taper_warmup", "taper_end")
    }
    models = gpt(taper_base=base, bias=True), gpt(**plain | {"norm_type": base}, bias=True)
    optimizers = [make_optimizer(model, 1e-2, (0.9, 0.95), 1e-8, 0.1) for model in models]
    for step in range(1, 4):
        losses, gradients = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            model.set_step(step, ITERS)
            losses.append(model(IDX, TARGETS)[0])
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
            named = model.named_parameters()
            gradients.append({name.replace("base.", ""): p.grad for name, p in named})
        assert torch.equal(*losses)
        ours = {name: grad for name, grad in gradients[0].items() if "tilde" not in name}
        assert same(ours, gradients[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("base", BASES)
def test_low_precision(base, phase, dtype):
    norm, x = step_of(taper(base), PHASES[phase]).float().eval(), (1e4 * draw(2, 5, 16)).to(dtype)
    norm.scale.fill_(1e-4)
    y = norm(x)[0]
    exact = copy.deepcopy(norm).double()(x.double())[0]
    assert y.dtype == dtype and y.isfinite().all()
    assert (y.double() - exact).abs().max() <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("reached", "asked"), [(5, 3), (8, 5), (8, 1)])
def test_a_taper_never_runs_backwards(reached, asked):
    with pytest.raises(ConfigError, match="backwards"):
        step_of(taper("rms"), reached).set_step(asked, ITERS)


# -------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("fit", ["norm", "channel", "no gains"])
@pytest.mark.parametrize("base", BASES)
def test_calibration_and_the_maps_that_follow(base, fit):
    """c is the least squares of h gamma / r - c h gamma over the collected data.

    Step means are weighted as the moving average weighs them. gamma moves after collecting, as the
    last warm step moves it. A channel may have its own c, but for one that has always been 0.

    Then y = g norm(h) + (1 - g) c h gamma~, and c h gamma~ alone; h centred, and + bias, for a
    LayerNorm base.
    """
    keys = {"affine": fit != "no gains", "bias": base == "layer"}
    plain = (LayerNorm if base == "layer" else RMSNorm)(16, 0.1, **keys)
    norm = shake(TaperNorm(plain, TaperSchedule(3, 7), fit == "channel")).train()

    rows = []
    for step in range(3):
        h = (1 + step) * draw(4, 6, 16, seed=step) * torch.linspace(0.2, 3, 16)
        h[..., 5] *= base == "layer"
        norm.set_step(step + 1, ITERS)
        norm(h)
        centred, r = centred_and_scale(h, base)
        rows.append(EMA_DECAY ** ((2 - step) / 2) * torch.stack([centred, centred / r]))
    gain = gain_tilde = torch.ones(16, dtype=torch.float64)
    with torch.no_grad():
        if fit != "no gains":
            gain = norm.base.weight.mul_(torch.linspace(3, 0.3, 16)).clone()
        assert len(norm.set_step(4, ITERS)) == (fit != "no gains")
        if fit != "no gains":
            assert torch.equal(norm.weight_tilde, gain)
            gain_tilde = norm.weight_tilde.add_(0.2 * draw(16, seed=3))  # it has been trained on
    x, y = (torch.cat(rows, 1) * gain).flatten(1, 2)  # (72, 16) each
    expected = torch.linalg.lstsq(x.reshape(-1, 1), y.reshape(-1, 1)).solution[0, 0]
    if fit == "channel":
        apart = torch.linalg.lstsq(x.T[..., None], y.T[..., None]).solution[:, 0, 0]
        is_zero = (x == 0).all(0)
        assert is_zero.sum() == (base == "rms")
        expected = torch.where(is_zero, expected, apart)
        assert norm.scale.max() / norm.scale.min() > 1.05  # one c for all is another function
    elif fit == "norm":
        ungained = (x * y / gain**2).sum() / (x / gain).square().sum()
        assert abs(norm.scale - ungained) > 1e-3  # so the gain of the moment counts
    close(norm.scale, expected, 1e-7)  # the rate of the average is a float32
    h = draw(2, 5, 16, seed=9) + 0.5
    centred, r = centred_and_scale(h, base)
    bias = 0.0 if norm.base.bias is None else norm.base.bias
    fixed, normed = norm.scale * centred * gain_tilde + bias, centred / r * gain + bias
    assert norm.gate == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    close(norm(h)[0], norm.gate * normed + (1 - norm.gate) * fixed)
    norm.set_step(7, ITERS)
    close(norm(h)[0], fixed)


@pytest.mark.usefixtures("handlers_stay")
def test_training_hands_over_and_its_best_model_has_lost_its_norms(
    tiny_data, tmp_path, monkeypatch
):
    """A taper may cost some loss: the best checkpoint is the best of those that can be folded."""
    # norms whole until step 16, gone from step 24 on
    scripted = iter([2.0, 0.5, 0.9, 1.5, 1.3, 1.4])
    monkeypatch.setattr(train.Evaluator, "val_loss", lambda *words: next(scripted))
    words = (*TINY, "--norm_type=taper", "--taper_warmup=16", "--taper_end=24", "--eval_interval=8")
    words += ("--paired_gains=0.1",)  # a key that the folded model must not have
    move, moments = train.NextToken.prepare, []

    def watched(self, loop):
        move(self, loop)
        if loop.step == 16:
            state = loop.optimizer.state
            for norm in tapers(self.model):
                pair = [state[gain]["exp_avg"] for gain in (norm.base.weight, norm.weight_tilde)]
                moments.append(bool(torch.equal(*pair) and pair[0].any()))

    monkeypatch.setattr(train.NextToken, "prepare", watched)
    train.main([*words, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"])
    assert moments == [True] * 4
    gates = [event["gate"] for event in events(tmp_path, "eval")]
    assert gates == [1, 1, pytest.approx(0.9619, abs=1e-3), 0, 0, 0]
    assert torch.load(tmp_path / "ckpt_best.pt", weights_only=True)["step"] == 32
    assert "T" not in to_folded(load_model(str(tmp_path))).plan.letters


def test_gpt2_of_hugging_face_begins_as_it_is(tmp_path):
    source = load_model(str(hf_save(hf_tiny("gpt2"), tmp_path)))
    keys = dict(norm_type="taper", taper_base="layer", taper_warmup=1.0, taper_end=2.0)
    model, idx = GPT(replace(source.config, **keys)), torch.randint(67, (2, 16))
    init_from(model, str(tmp_path), {})
    source, model = source.double(), model.double()
    close(model.eval()(idx), source(idx))  # warm: the very same function


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("final", [False, True])
def test_every_parameter_gets_a_gradient_in_every_phase(base, final):
    """DDP waits for a gradient of each.

    Those that a phase leaves out get zero, the others do not.
    """
    idle = {"warm": "weight_tilde", "blend": "none of them", "fixed": "base.weight"}
    for phase, step in PHASES.items():
        model = gpt(taper_base=base, taper_final=final, taper_anchor=0.1, bias=True)
        train_to(model, step)
        loss, aux = model(IDX, TARGETS)
        (loss + aux).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (phase, name)
            assert (parameter.grad.abs().max() == 0) == name.endswith(idle[phase]), (phase, name)


# ----------------------------------------------------------------------------------- the statistics


def test_eval_collects_nothing():
    model, seen = gpt(taper_anchor=0.1), []
    train_to(model, 2)
    for training in (False, False, True):
        model.train(training)(IDX, TARGETS)
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert same(seen[0], seen[1])
    moved = {name for name, buffer in seen[2].items() if not torch.equal(buffer, seen[1][name])}
    assert moved == {f"blocks.{i}.norm{j}.norm.moments.sum" for i in range(2) for j in (1, 2)} | {
        "norm_f.anchor.target.sum"
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("base", BASES)
def test_a_state_dict_restores_the_phase(base, phase, training):
    model, loaded = (gpt(taper_base=base, taper_final=True) for _ in range(2))
    train_to(model, PHASES[phase])
    assert not any(name.endswith(".sum") for name in model.state_dict())  # 0 between steps
    loaded.train(training).load_state_dict(model.state_dict())
    assert {norm.phase for norm in tapers(loaded)} == {phase}
    assert torch.equal(loaded(IDX), model.train(training)(IDX))


# --------------------------------------------------------------------------------- the scale anchor


def anchor(base, weight=0.3):
    return ScaleAnchor(replace(SHAPE, taper_base=base, taper_anchor=weight, norm_eps=0.1)).double()


@pytest.mark.parametrize("base", BASES)
def test_anchor_target_is_bias_corrected_and_frozen_when_the_taper_starts(base):
    norm, means = anchor(base), []
    for step in range(1, 9):
        norm.set_step(step, ITERS)
        h = step * draw(4, 6, 16, seed=step) + 0.5
        for micro_batch in h.split([1, 3]):
            norm(micro_batch)
        assert torch.is_tensor(norm.loss) == (step > 3)  # no loss before the target is fixed
        means.append(centred_and_scale(h, base)[1].mean())
    weights = torch.tensor([EMA_DECAY ** (2 - k) for k in range(3)], dtype=torch.float64)
    expected = (weights * torch.stack(means[:3])).sum() / weights.sum()
    close(norm.target.value(), expected.view(1), 1e-6)
    assert abs(expected - means[0]) > 0.1 and abs(expected - means[-1]) > 0.1


@pytest.mark.parametrize("base", BASES)
def test_anchor_loss_and_gradient(base):
    """weight * mean (s - t)^2; its gradient 2 weight / N * (s - t) * h / (C s), h centred for
    layer.
    """
    norm, h = anchor(base), draw(4, 6, 16, seed=1).requires_grad_()
    norm(3 * draw(4, 6, 16) + 1)
    norm.set_step(4, ITERS)
    norm(h)
    centred, s = centred_and_scale(h, base)
    error = s - norm.target.value()
    close(norm.loss, 0.3 * error.square().mean())
    norm.loss.backward()
    close(h.grad, 2 * 0.3 / 24 * error / s * centred / 16)
    assert h.grad.abs().max() > 1e-4


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_anchor_in_a_model(phase, final):
    """It weighs the stream before the final norm, whichever norm that is; in training only, and
    only after warm-up.
    """
    model, streams = gpt(taper_anchor=0.3, taper_final=final), []
    assert [place.anchor is not None for place in model.places()] == [False] * 4 + [True]
    train_to(model, PHASES[phase])
    model.norm_f.register_forward_hook(lambda module, args, output: streams.append(output[1]))
    aux = model(IDX, TARGETS)[1]
    if phase == "warm":
        assert aux == 0
    else:
        _, s = centred_and_scale(streams[0], "rms", SHAPE.norm_eps)
        close(aux, 0.3 * (s - model.norm_f.anchor.target.value()).square().mean())
        assert aux > 1e-6
    assert model.eval()(IDX, TARGETS)[1] == 0


# -------------------------------------------------------------------------------------- compilation


def test_three_graphs_and_none_for_a_gate_that_moves():
    torch._dynamo.reset()
    model, eager = (gpt(n_layer=1, taper_base="layer", taper_anchor=0.1) for _ in range(2))
    graphs, counts = CompileCounter(), []
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for step in range(1, 10):
        pairs = []
        for this, call in ((model, compiled), (eager, eager)):
            this.set_step(step, ITERS)
            pairs.append(torch.stack(call(IDX, TARGETS)))
            pairs[-1].sum().backward()
        close(*pairs)
        counts.append(graphs.frame_count)
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        close(parameter.grad, other.grad)
