"""Learning rate, weight decay, clipping, the guarded update; AdamW and Muon.

python -m pytest tests/training/test_optim.py
"""

import copy

import pytest
import torch
from helpers import TINY, apart, close, draw, losses, same, val_losses
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from common.errors import ConfigError
from configurator import parse_args
from model import GPT, GPTConfig
from norm_types import NORM_TYPES
from train import TrainConfig, optimizer_of
from training.checkpoint import moments_of
from training.optim import Optimizer, guarded_update, learning_rate, make_optimizer

# Grouped keys and values, so that q, k and v have unequal rows.
SHAPE = GPTConfig(
    vocab_size=64,
    block_size=16,
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=32,
    n_inner=40,
    activation="swiglu",
    bias=True,
)
LR, DECAY = 1e-2, 0.1
MUON = (*TINY, "--optimizer=muon", "--n_kv_head=1", "--activation=swiglu")


def make(dtype=torch.float64, kind="muon") -> tuple[GPT, Optimizer]:
    model = GPT(SHAPE).to(dtype)
    return model, make_optimizer(model, LR, (0.9, 0.95), 1e-8, DECAY, kind=kind)


def give_gradients(model, seed: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = draw(*parameter.shape, seed=100 * seed + index, dtype=parameter.dtype)


def update(model, optimizer, bad=0.0, clip=0.0, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    bad = torch.tensor(bad, dtype=next(model.parameters()).dtype)
    return guarded_update(optimizer, scaler, list(model.parameters()), clip, bad)


def matrices(model) -> list[torch.Tensor]:
    """Copies of the hidden matrices, as a person would list them."""
    found = []
    for block in model.blocks:
        q, k, v = block.attn.qkv.weight.split([32, 16, 16])
        gate, up = block.mlp.up.weight.chunk(2)
        found += [q, k, v, block.attn.proj.weight, gate, up, block.mlp.down.weight]
    return [matrix.detach().clone() for matrix in found]


def gradients(model) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    for parameter, own in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.data = own.grad.clone()
    return matrices(twin)


@pytest.mark.parametrize(
    ("clip", "dtype"), [(0.0, torch.float32), (0.5, torch.float32), (0.5, torch.float64)]
)
def test_update_is_that_of_separate_parameters(clip, dtype, monkeypatch):
    """torch.optim.Muon on matrices held apart, and AdamW on the rest: bit for bit in float32 with
    bfloat16 inside, and as a formula in float64. Clipping divides by the norm of all gradients
    together.
    """
    if dtype == torch.float64:
        # torch 2.13 calls Tensor.bfloat16, 2.15 Tensor.to.
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.double().clone())
        monkeypatch.setattr(torch, "bfloat16", torch.float64)
    model, optimizer = make(dtype)
    apart = [torch.nn.Parameter(matrix) for matrix in matrices(model)]
    muon = torch.optim.Muon(apart, LR, DECAY, adjust_lr_fn="match_rms_adamw")
    other, adamw = make(dtype, "adamw")  # the same weights
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(other, seed)
        total = update(other, adamw, clip=clip).total
        divisor = (total + 1e-6) / clip if clip else torch.ones(())
        for parameter, gradient in zip(apart, gradients(model), strict=True):
            parameter.grad = gradient / divisor
        muon.step()
        assert torch.equal(update(model, optimizer, clip=clip).total, total)
    for actual, parameter in zip(matrices(model), apart, strict=True):
        close(actual, parameter.detach(), 0 if dtype == torch.float32 else 1e-12)
    hidden = model.hidden_matrices()
    twins = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twins[name]) == (parameter not in hidden), name
    assert len(hidden) == 2 * 4 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("fault", "scaled"),
    [(fault, scaled) for fault in ("nan", "inf", "loss") for scaled in (False, True)],
)
@pytest.mark.parametrize("where", ["wte.weight", "blocks.1.attn.qkv.weight"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_that_is_not_finite_is_not_applied(kind, where, fault, scaled):
    """Weights, momenta, moments and step counts stay bit for bit, in the first step and later; and
    the run goes on as if that step had never been.
    """
    (model, optimizer), (other, its) = make(torch.float32, kind), make(torch.float32, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.zeros(()))  # the scaler makes its scale when it first meets a loss
    for seed in range(2):
        before = copy.deepcopy((model.state_dict(), moments(model, optimizer)))
        give_gradients(model, 50 + seed)
        if fault != "loss":
            dict(model.named_parameters())[where].grad[1, 2] = float(fault)
        norms = update(model, optimizer, bad=float(fault == "loss"), clip=1.0, scaler=scaler)
        assert norms.total.isfinite() == norms.each.isfinite().all() == (fault == "loss")
        after = (model.state_dict(), moments(model, optimizer))
        # AdamW makes its moments, zero, in the first step.
        made = {name: after[1][name] for name in before[1]}
        assert same(before[0], after[0]) and same(before[1], made)
        assert all(parameter.grad is None for parameter in model.parameters())
        give_gradients(model, seed)
        give_gradients(other, seed)
        update(model, optimizer, clip=1.0)
        update(other, its, clip=1.0)
    assert same(model.state_dict(), other.state_dict())
    assert same(moments(model, optimizer), moments(other, its))
    assert not same(before[0], model.state_dict())


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipping_and_the_norms_reported(clip):
    model, optimizer = make(kind="adamw")
    give_gradients(model, 1)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    total = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    reported = update(model, optimizer, clip=clip)
    # before clipping
    close(reported.total, total)
    close(reported.each, torch.stack([gradient.norm() for gradient in gradients]))
    factor = clip / (total + 1e-6) if clip and clip < total else 1.0
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        # (1 - beta1) times what was applied
        close(optimizer.state[parameter]["exp_avg"], 0.1 * factor * gradient)


@pytest.mark.parametrize(
    ("schedule", "keys", "step", "expected"),
    [
        # up to step 10 of 100 a line to the highest rate
        *((schedule, {}, step, step / 10 * 6e-4) for schedule in ("cosine", "wsd", "constant")
          for step in (1, 3, 10)),
        ("constant", {}, 100, 6e-4),
        ("cosine", {}, 40, 6e-5 + 0.75 * 5.4e-4),  # a third of the way: cos 60 degrees
        ("cosine", {}, 55, 3.3e-4),
        ("cosine", {}, 100, 6e-5),
        ("wsd", {}, 80, 6e-4),
        ("wsd", {}, 85, 6e-4 - 0.25 * 5.4e-4),
        ("wsd", {}, 100, 6e-5),
        ("wsd", {"wsd_decay": 0.999999}, 55, 3.3e-4),  # the decay never begins in the warm-up
        ("cosine", {"warmup_iters": 0}, 50, 3.3e-4),
        ("cosine", {"warmup_iters": 100}, 100, 6e-4),
    ],
)  # fmt: skip
def test_learning_rate(schedule, keys, step, expected):
    given = {"warmup_iters": 10, "max_iters": 100, "lr_schedule": schedule}  # 6e-4 to 6e-5
    assert learning_rate(step, TrainConfig(**given | keys)) == pytest.approx(expected, rel=1e-12)


def moments(model, optimizer) -> dict:
    return moments_of(dict(model.named_parameters()), optimizer)


def test_the_host_does_not_wait():
    """A fake tensor has no numbers: whoever asks the device for one gets an error."""
    with FakeTensorMode():
        model = GPT(SHAPE)
        optimizer = make_optimizer(model, LR, (0.9, 0.95), 1e-8, DECAY, kind="muon")
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        update(model, optimizer, clip=1.0)
        with pytest.raises(DataDependentOutputException):
            bool(optimizer.found_inf)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_matrices_decay_and_gains_if_they_are_told_to(norm_type, kind):
    model = GPT(GPTConfig(**vars(SHAPE) | {"norm_type": norm_type}))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for decay_gains in (False, True):
        optimizer = make_optimizer(model, LR, (0.9, 0.95), 1e-8, DECAY, decay_gains, kind)
        decay = {
            names[id(parameter)]: group["weight_decay"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        assert decay.keys() == set(names.values())
        for name in decay:
            # of a taper, weight_tilde too
            gains = ("alpha", "beta") if norm_type == "seednorm" else "weight"
            part = name.split(".")[-1]
            decays = part == "weight"
            if "norm" in name and "gate" not in name:  # but matrices of gates
                decays = decay_gains and part.startswith(gains)
            assert decay[name] == DECAY * decays, name


def test_ranks_agree(train_ok, tiny_data, tmp_path):
    """In float64. In float32 the last bits of gradients differ, and where one of them decides how
    an entry is rounded to bfloat16, the update differs by a 256th there.
    """
    for ranks in (1, 2):
        run = (f"--data_dir={tiny_data}", f"--out_dir={tmp_path / str(ranks)}")
        train_ok(*MUON, "--dtype=float64", "--max_iters=20", *run, ranks=ranks)
    for read, count in ((losses, 20), (val_losses, 2)):
        one, two = (read(tmp_path / name) for name in ("1", "2"))
        assert len(one) == count and apart(one, two) <= 1e-13


def test_the_other_optimiser_is_refused_on_resume(train_ok, train_fails, tiny_data, tmp_path):
    words = (*TINY, "--lr_schedule=constant", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    train_ok(*words, "--max_iters=2")
    state = torch.load(tmp_path / "ckpt_last.pt", weights_only=True)
    del state["config"]["optimizer"]  # as in a run from before the key
    torch.save(state, tmp_path / "ckpt_last.pt")
    assert "add --optimizer=adamw" in train_fails(*words, "--max_iters=3", "--optimizer=muon")
    train_ok(*words, "--max_iters=3")
    assert sorted(losses(tmp_path)) == [1, 2, 3]


def test_the_product_of_rate_and_decay_is_constant():
    for kind in ("adamw", "muon"):
        for rate in (1e-3, 3e-3):
            words = ("--vocab_size=64", f"--learning_rate={rate}", "--decay_per_step=6e-5")
            config = parse_args(TrainConfig, [*TINY, *words, f"--optimizer={kind}"])[0]
            groups = optimizer_of(config, GPT(config)).param_groups
            products = [group["lr"] * group["weight_decay"] for group in groups]
            assert [p for p in products if p] == pytest.approx([6e-5] * (1 + (kind == "muon")))
    with pytest.raises(ConfigError, match=r"weight_decay=0.2 and decay_per_step=0.01 both set"):
        parse_args(TrainConfig, ["--weight_decay=0.2", "--decay_per_step=0.01"])
