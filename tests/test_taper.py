"""TaperNorm and its scale anchor: schedule, calibration, phases, statistics over ranks, resuming.

    python -m pytest tests/test_taper.py

In float64 unless a test says otherwise.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from helpers import TINY, close, draw, records, shake
from hf_models import save as hf_save
from hf_models import tiny as hf_tiny

import train
from common.errors import CheckpointError, ConfigError
from fold.gpt import to_folded
from load import init_from, load_model
from model import GPT, GPTConfig
from norms import LayerNorm, RMSNorm
from taper import EMA_DECAY, ScaleAnchor, StepMean, TaperNorm, TaperSchedule, tapers
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


TOKENS = torch.randint(SHAPE.vocab_size, (3, 9), generator=torch.Generator().manual_seed(5))
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


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


def test_gate_falls_and_one_step_at_least_is_warm():
    gates = [TaperSchedule(0.1, 0.75).at(step, 1000)[1] for step in range(1, 1001)]
    assert gates == sorted(gates, reverse=True)
    assert gates.count(1.0) == 100 and gates.count(0.0) == 251
    assert (
        TaperSchedule(0.0, 0.5).at(1, 10)[0] == "warm"
        and TaperSchedule(0.0, 0.5).at(2, 10)[0] == "blend"
    )
    abrupt = TaperSchedule(0.5, 0.5)
    assert [abrupt.at(step, 10) for step in (1, 5, 6, 10)] == [("warm", 1.0)] * 2 + [
        ("fixed", 0.0)
    ] * 2


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
            gradients.append(
                {name.replace("base.", ""): p.grad for name, p in model.named_parameters()}
            )
        assert torch.equal(*losses)
        assert gradients[0].keys() - gradients[1].keys() == {
            f"blocks.{i}.norm{j}.norm.weight_tilde" for i in range(2) for j in (1, 2)
        }
        assert all(
            torch.equal(gradient, gradients[0][name]) for name, gradient in gradients[1].items()
        )


@pytest.mark.parametrize("base", BASES)
def test_blend_and_fixed_are_their_formulas(base):
    """y = g norm(h) + (1 - g) c h gamma~, then c h gamma~ alone; h centred, and + bias, for a
    LayerNorm base.
    """
    norm, h = taper(base), draw(2, 5, 16, seed=9) + 0.5
    step_of(norm, 5)
    with torch.no_grad():
        norm.weight_tilde += 0.2 * draw(16, seed=3)  # gamma~ has been trained on since
    c, gamma, gamma_tilde = norm.scale, norm.base.weight, norm.weight_tilde
    centred = h - h.mean(-1, keepdim=True) if base == "layer" else h
    bias = norm.base.bias if base == "layer" else 0.0
    normed = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * gamma + bias
    fixed = c * centred * gamma_tilde + bias
    assert (normed - fixed).abs().max() > 0.1
    close(norm.gate, torch.tensor(0.5, dtype=torch.float64))
    close(norm(h)[0], 0.5 * normed + 0.5 * fixed)
    norm.set_step(8, ITERS)
    close(norm(h)[0], fixed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("base", BASES)
def test_low_precision(base, phase, dtype):
    norm, x = step_of(taper(base), PHASES[phase]).float().eval(), (1e4 * draw(2, 5, 16)).to(dtype)
    with torch.no_grad():
        norm.scale.fill_(1e-4)
    y = norm(x)[0]
    exact = copy.deepcopy(norm).double()(x.double())[0]
    assert y.dtype == dtype and y.isfinite().all()
    assert (y.double() - exact).abs().max() <= 16 * torch.finfo(dtype).eps


def test_a_schedule_in_two_units_keeps_its_order():
    assert TaperSchedule(10, 0.5).steps(40) == (10, 20) and TaperSchedule(0.5, 30).steps(40) == (
        20,
        30,
    )
    assert TaperSchedule(0, 0.01).steps(40) == (1, 2)
    for keys in (
        {"taper_warmup": 30.0, "taper_end": 0.5},
        {"taper_warmup": 0.5, "taper_end": 10.0},
    ):
        with pytest.raises(ConfigError, match=r"is step .* of 40, after taper_end"):
            train.TrainConfig(norm_type="taper", max_iters=40, **keys)


@pytest.mark.parametrize(("reached", "asked"), [(5, 3), (8, 5), (8, 1)])
def test_a_taper_never_runs_backwards(reached, asked):
    with pytest.raises(ConfigError, match="backwards"):
        step_of(taper("rms"), reached).set_step(asked, ITERS)


# -------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("base", BASES)
def test_c_is_the_least_squares_optimum_for_the_gain_of_that_moment(base):
    """The objective E|h gamma / r - c h gamma|^2, computed directly on the collected data, step
    means weighted as the moving average weighs them. gamma moves after collecting, as the last warm
    step moves it.
    """
    norm = taper(base)
    data = [
        (1 + step) * draw(4, 6, 16, seed=step) * torch.linspace(0.2, 3, 16) for step in range(3)
    ]
    for step, h in enumerate(data, start=1):
        norm.set_step(step, ITERS)
        norm(h)
    old_gain = norm.base.weight.detach().clone()
    with torch.no_grad():
        norm.base.weight.mul_(torch.linspace(3, 0.3, 16))
    norm.set_step(4, ITERS)

    def objective(c, gain):
        total = 0.0
        for step, h in enumerate(data):
            centred = h - h.mean(-1, keepdim=True) if base == "layer" else h
            r = (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
            error = centred * gain / r - c * centred * gain
            total += EMA_DECAY ** (2 - step) * error.square().sum(-1).mean()
        return total.item()

    gain, c = norm.base.weight.detach(), norm.scale.item()
    assert objective(c, gain) < min(objective(1.01 * c, gain), objective(0.99 * c, gain))
    low, middle, high = (objective(c + d, gain) for d in (-0.1, 0, 0.1))  # a parabola in c
    assert 0.1 * (low - high) / (2 * (low + high - 2 * middle)) == pytest.approx(0, abs=1e-6 * c)
    # With the gain as it was when the data were collected, c would be another one: so the test can
    # fail.
    assert objective(c, old_gain) > min(
        objective(1.01 * c, old_gain), objective(0.99 * c, old_gain)
    )


@pytest.mark.parametrize("base", BASES)
def test_a_channel_may_have_its_own_least_squares_optimum(base):
    """c_i = E[h_i^2 / r] / E[h_i^2] minimises E[(h_i / r - c_i h_i)^2], whatever the gain; blend
    and fixed use it.
    """
    plain = LayerNorm(16, 0.1, bias=True) if base == "layer" else RMSNorm(16, 0.1)
    norm, data = shake(TaperNorm(plain, TaperSchedule(1, 3), fit_channels=True)), draw(40, 6, 16)
    data = data * torch.linspace(0.2, 3, 16)
    data[..., 3] = data.mean(-1) if base == "rms" else 2.0
    norm.train().set_step(1, ITERS)
    norm(data)
    norm.set_step(2, ITERS)
    h = data - data.mean(-1, keepdim=True) if base == "layer" else data
    r = (h.square().mean(-1, keepdim=True) + 0.1).sqrt()
    close(norm.scale, (h.square() / r).mean((0, 1)) / h.square().mean((0, 1)))

    def objective(scale):
        return (h / r - scale * h).square().mean((0, 1))

    assert (objective(norm.scale) < objective(1.01 * norm.scale)).all()
    assert (objective(norm.scale) < objective(0.99 * norm.scale)).all()
    # so one c for all would be another function
    assert (norm.scale.max() / norm.scale.min()) > 1.05
    bias = norm.base.bias if base == "layer" else 0.0
    fixed = norm.scale * norm.weight_tilde * h
    close(norm(data)[0], norm.gate * h / r * norm.base.weight + (1 - norm.gate) * fixed + bias)
    norm.set_step(3, ITERS)
    close(norm(data)[0], fixed + bias)


def test_a_channel_that_is_always_zero_takes_the_common_factor():
    norm, h = (
        TaperNorm(RMSNorm(16, 0.1), TaperSchedule(1, 3), fit_channels=True).double(),
        draw(4, 6, 16),
    )
    h[..., 5] = 0
    norm.set_step(1, ITERS)
    norm(h)
    norm.set_step(2, ITERS)
    r = (h.square().mean(-1) + 0.1).sqrt()
    close(norm.scale[5], (h.square().sum(-1) / r).mean() / h.square().sum(-1).mean())
    assert norm.scale.isfinite().all()


def test_without_gains_there_is_only_c():
    norm = TaperNorm(RMSNorm(16, 0.1, affine=False), TaperSchedule(1, 3)).double()
    h = draw(4, 6, 16) * 3
    norm.set_step(1, ITERS)
    norm(h)
    assert norm.set_step(2, ITERS) == [] and list(norm.parameters()) == []
    r = (h.square().mean(-1) + 0.1).sqrt()
    close(norm.scale, (h.square().sum(-1) / r).mean() / h.square().sum(-1).mean())
    norm.set_step(3, ITERS)
    close(norm(h)[0], norm.scale * h)


def test_training_hands_over_and_its_best_model_has_lost_its_norms(
    tiny_data, tmp_path, monkeypatch
):
    """A taper may cost some loss: the best checkpoint is the best of those that can be folded."""
    monkeypatch.setattr("signal.signal", lambda *words: None)  # the handlers of this process stay
    # norms whole until step 16, gone from step 24 on
    scripted = iter([2.0, 0.5, 0.9, 1.5, 1.3, 1.4])
    monkeypatch.setattr(train.Evaluator, "val_loss", lambda *words: next(scripted))
    words = (*TINY, "--norm_type=taper", "--taper_warmup=16", "--taper_end=24", "--eval_interval=8")
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
    evals = [event for event in records(tmp_path) if event["event"] == "eval"]
    assert [event["gate"] for event in evals] == [1, 1, pytest.approx(0.9619, abs=1e-3), 0, 0, 0]
    assert torch.load(tmp_path / "ckpt_best.pt", weights_only=True)["step"] == 32
    assert "T" not in to_folded(load_model(str(tmp_path))).plan.letters


def test_gpt2_of_hugging_face_is_tapered_and_folded(tmp_path):
    source = load_model(str(hf_save(hf_tiny("gpt2"), tmp_path)))
    keys = dict(norm_type="taper", taper_base="layer", taper_warmup=1.0, taper_end=2.0)
    model, idx = GPT(replace(source.config, **keys)), torch.randint(67, (2, 16))
    with pytest.raises(
        CheckpointError,
        match="activation='gelu_tanh' there, 'relu2' here: add --activation=gelu_tanh",
    ):
        init_from(GPT(replace(source.config, **keys, activation="relu2")), str(tmp_path))
    init_from(model, str(tmp_path))
    source, model = source.double(), model.double()
    with torch.no_grad():
        close(model.eval()(idx), source(idx))  # warm: the very same function
    model.train().set_step(1, 10)
    model(idx)
    model.set_step(2, 10)
    with torch.no_grad():
        fixed = model.eval()(idx)
        close(to_folded(model)(idx), fixed, 1e-12)
        assert (fixed - source(idx)).abs().max() > 1e-3


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


def average_of(*micro_batches_of_steps):
    mean = StepMean(5).double()
    for micro_batches in micro_batches_of_steps:
        for values in micro_batches:
            mean.add(values)
        mean.update()
    return mean


def test_step_mean_is_a_bias_corrected_average_of_step_means():
    first, second = draw(8, 5) + 1, draw(20, 5, seed=1) - 3
    mean, decay = average_of([first], [second]), EMA_DECAY
    weighted = (1 - decay) * (decay * first.mean(0) + second.mean(0))
    close(mean.average, weighted, 1e-8)  # the rate is a float32
    close(mean.value(), weighted / (1 - decay**2), 1e-7)
    close(average_of([first]).value(), first.mean(0))


@pytest.mark.parametrize("sizes", [[24], [12, 12], [6] * 4, [1] * 24, [1, 20, 3]], ids=str)
def test_step_mean_does_not_depend_on_micro_batches(sizes):
    steps = [draw(24, 5, seed=seed) + seed for seed in range(3)]
    mean, whole = (
        average_of(*(step.split(sizes) for step in steps)),
        average_of(*([step] for step in steps)),
    )
    close(mean.value(), whole.value())
    assert torch.equal(mean.weight, whole.weight)


def test_eval_collects_nothing():
    model = gpt(taper_anchor=0.1)
    train_to(model, 2)
    before = copy.deepcopy(dict(model.named_buffers()))
    model.eval()
    with torch.no_grad():
        model(IDX, TARGETS)
        model(IDX)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model.train()(IDX, TARGETS)
    moved = {
        name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])
    }
    assert moved == {f"blocks.{i}.norm{j}.norm.moments.sum" for i in range(2) for j in (1, 2)} | {
        "norm_f.anchor.target.sum"
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("base", BASES)
def test_a_state_dict_restores_the_phase(base, phase, training):
    model, loaded = (
        gpt(taper_base=base, taper_final=True),
        gpt(taper_base=base, taper_final=True).train(training),
    )
    train_to(model, PHASES[phase])
    loaded.load_state_dict(model.state_dict())
    for norm, other in zip(tapers(model), tapers(loaded), strict=True):
        assert norm.phase == other.phase == phase
        assert torch.equal(norm.gate, other.gate) and torch.equal(norm.scale, other.scale)
        assert (norm.scale == 1) == (phase == "warm")
    model.train(training)
    assert torch.equal(loaded(IDX), model(IDX))


# --------------------------------------------------------------------------------- the scale anchor


def scales(h, base, eps=0.1):
    centred = h - h.mean(-1, keepdim=True) if base == "layer" else h
    return (centred.square().mean(-1) + eps).sqrt()


def anchor(base, weight=0.3):
    return ScaleAnchor(replace(SHAPE, taper_base=base, taper_anchor=weight, norm_eps=0.1)).double()


@pytest.mark.parametrize("base", BASES)
def test_anchor_target_is_bias_corrected_and_frozen_when_the_taper_starts(base):
    norm, means = anchor(base), []
    for step in range(1, 9):
        norm.set_step(step, ITERS)
        h = step * draw(4, 6, 16, seed=step) + 0.5
        for micro_batch in h.split(2):
            norm(micro_batch)
        assert torch.is_tensor(norm.loss) == (step > 3)  # no loss before the target is fixed
        means.append(scales(h, base).mean())
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
    target, s = norm.target.value(), scales(h, base)
    close(norm.loss, 0.3 * (s - target).square().mean())
    norm.loss.backward()
    with torch.no_grad():
        centred = h - h.mean(-1, keepdim=True) if base == "layer" else h
        close(h.grad, 2 * 0.3 / 24 * ((s - target) / s)[..., None] * centred / 16)
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
        s = scales(streams[0], "rms", SHAPE.norm_eps)
        close(aux, 0.3 * (s - model.norm_f.anchor.target.value()).square().mean())
        assert aux > 1e-6
    assert model.eval()(IDX, TARGETS)[1] == 0


# -------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("base", BASES)
def test_three_graphs_and_none_for_a_gate_that_moves(base):
    """And as many for evaluation, which has a mode of its own."""
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    model, eager = (gpt(n_layer=1, taper_base=base, taper_anchor=0.1) for _ in range(2))
    compiled, counts = torch.compile(model, backend=counting, fullgraph=True), []
    for step in range(1, 10):
        pairs = []
        for this, call in ((model, compiled), (eager, eager)):
            this.set_step(step, ITERS)
            pairs.append(torch.stack(call(IDX, TARGETS)))
            pairs[-1].sum().backward()
        close(*pairs)
        counts.append(len(graphs))
        with torch.no_grad():
            compiled.eval()(IDX, TARGETS)
        compiled.train()
        counts.append(len(graphs))
    assert counts == [1, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6, 6, 6, 6, 6]
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        close(parameter.grad, other.grad)
