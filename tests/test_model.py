"""The model against an independent one, decoding, the loss, the optimiser, checkpoints.

    python -m pytest tests/test_model.py

In float64 unless a test says otherwise.
"""

import os
import pickle
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from helpers import close, draw, shake
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from common.errors import CheckpointError, ConfigError, UserError
from kernels import cross_entropy as loss_file
from kernels.cross_entropy import cross_entropy
from load import load_model
from model import GPT, GPTConfig, sample_token
from norm_types import NORM_TYPES
from training.checkpoint import (
    BEST,
    LAST,
    check_same_model,
    find_checkpoint,
    load_moments,
    moments_of,
    read_checkpoint,
    save_checkpoint,
)
from training.optim import guarded_update, learning_rate, make_optimizer

SHAPE = GPTConfig(
    vocab_size=40,
    n_vocab=32,
    block_size=12,
    n_layer=2,
    n_head=2,
    n_embd=16,
    init_std=0.2,
    bias=True,
)
NORMS = {name: {} for name in NORM_TYPES} | {
    "rms": {"norm_groups": 2, "rms_fraction": 0.5},
    "coupled": {"coupled_alpha": 1.1, "coupled_span": 2},
    "taper": {"taper_warmup": 2.0, "taper_end": 6.0, "taper_final": True, "taper_anchor": 0.1},
}
LLAMA = {
    "position": "rope",
    "activation": "swiglu",
    "qk_norm": "head",
    "n_kv_head": 1,
    "tie_embeddings": False,
}


def tokens(*shape, seed=0, below=32):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def gpt(norm_type="layer", **keys):
    """A small model; a taper is half way through its blend, with calibrated scales."""
    model = shake(GPT(replace(SHAPE, norm_type=norm_type, **NORMS[norm_type] | keys)))
    for step in range(1, 5 if norm_type == "taper" else 1):
        model.set_step(step, 10)
        model(tokens(2, 12, seed=step))
    return model


# -------------------------------------------------------------------------------- sizes and weights


CHAPTER = GPTConfig(
    vocab_size=65, n_embd=64, n_layer=4, n_head=4, block_size=64, bias=True, attn_bias=False
)


def test_norm_types_start_from_the_same_weights():
    """Same seed, same names: bit for bit. Another seed: every one of them is another."""

    def weights(norm_type, seed):
        keys = {"norm_type": norm_type, "norm_recipe": "common", "tie_embeddings": False}
        model = GPT(replace(SHAPE, **keys), seed)
        return {name: tensor for name, tensor in model.named_parameters() if "norm" not in name}

    expected, other = weights("layer", 3), weights("layer", 4)
    for norm_type in NORM_TYPES:
        same = weights(norm_type, 3)
        assert same.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in same.items())
    drawn = [name for name in expected if not name.endswith("bias")]
    assert len(drawn) == 3 + 4 * 2 and not any(
        torch.equal(expected[name], other[name]) for name in drawn
    )
    # no two share a stream
    assert len({expected[name].flatten()[0].item() for name in drawn}) == len(drawn)


WIDE = GPTConfig(
    vocab_size=96, block_size=96, n_layer=8, n_head=2, n_embd=96, bias=True, tie_embeddings=False
)


def is_like(tensor, std):
    """Mean 0 and standard deviation `std`, each to five standard errors of normal numbers."""
    count = tensor.numel()
    return (
        abs(tensor.mean()) < 5 * std / count**0.5
        and abs(tensor.std() / std - 1) < 5 / (2 * count) ** 0.5
    )


@pytest.mark.parametrize("init", ["gpt2", "torch"])
def test_initial_weights(init):
    """gpt2: normal, but for what writes into the stream; torch: PyTorch's own defaults.

    Those are unit-normal embeddings, and linears with biases uniform within 1 / sqrt(inputs).
    """
    model = GPT(replace(WIDE, init_std=0.05, init=init))
    for name, module in model.named_modules():
        for part, tensor in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                assert is_like(tensor, 0.05 if init == "gpt2" else 1.0), name
            elif not isinstance(module, nn.Linear):
                assert tensor.unique().tolist() == [float(part == "weight")]
            elif init == "torch":
                bound = module.in_features**-0.5
                assert tensor.abs().max() <= bound and is_like(tensor, bound / 3**0.5), name
            elif part == "bias":
                assert not tensor.any()
            else:
                writes = name.endswith(("proj", "down"))
                assert is_like(tensor, 0.05 / 16**0.5 if writes else 0.05), name


# ------------------------------------------------------------------------------------ the reference


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("norm_type", ["layer", "coupled", "taper"])
def test_cached_generation_is_uncached_also_beyond_block_size(norm_type):
    model, idx = gpt(norm_type).eval(), tokens(3, 5)
    cached, plain = (
        model.generate(idx, 30, temperature=0, use_cache=cache) for cache in (True, False)
    )
    assert (
        cached.shape == (3, 35) and torch.equal(cached, plain) and torch.equal(cached[:, :5], idx)
    )
    # The first token beyond the context is predicted from the context's later half alone.
    assert torch.equal(cached[:, 13], model(cached[:, 7:13])[:, -1].argmax(-1))
    assert torch.equal(cached[:, 12], model(cached[:, :12])[:, -1].argmax(-1))
    longer = model.generate(cached, 3, temperature=0)  # from a prompt beyond block_size
    assert torch.equal(longer[:, 35:], model.generate(cached[:, -12:], 3, temperature=0)[:, 12:])
    with pytest.raises(ValueError, match="13 tokens do not fit block_size=12"):
        model(cached[:, :13])


def test_temperature_zero_and_top_k():
    logits = draw(4, 20)
    stream = torch.Generator().manual_seed(0)
    best = logits.argmax(-1, keepdim=True)
    assert torch.equal(sample_token(logits, 0, 0, stream), best)
    assert torch.equal(sample_token(logits, 5.0, 1, stream), best)
    for top_k, count in ((3, 3), (0, 20), (50, 20)):
        # (4, 600)
        drawn = torch.cat([sample_token(logits, 100.0, top_k, stream) for _ in range(600)], 1)
        likeliest = logits.topk(count).indices.sort().values
        assert all(torch.equal(row.unique(), best) for row, best in zip(drawn, likeliest))


def test_sampling_follows_the_softmax_at_its_temperature():
    logits = draw(1, 4).expand(20_000, 4)
    drawn = sample_token(logits, 0.7, 0, torch.Generator().manual_seed(0))
    p = torch.exp(logits[0] / 0.7) / torch.exp(logits[0] / 0.7).sum()
    counted = drawn.flatten().bincount(minlength=4) / 20_000
    assert ((counted - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt()).all()


# --------------------------------------------------------------------------------- padding and loss


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary(tied):
    """Rows beyond n_vocab: no logits, no samples, no part in the loss, no gradient."""
    model, idx, targets = gpt(tie_embeddings=tied), tokens(3, 12), tokens(3, 12, seed=1)
    head = model.wte.weight if tied else model.lm_head.weight
    with torch.no_grad():
        head[32:] += 50 * draw(8, 16, seed=2)  # would dominate everything, if it counted
    logits = model(idx)
    assert logits.shape == (3, 12, 32)
    loss, _ = model(idx, targets)
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    close(loss, -log_p.gather(2, targets[..., None]).mean())
    loss.backward()
    assert (head.grad[32:] == 0).all() and (head.grad[:32].abs().amax(1) > 0).all()
    sampled = model.eval().generate(
        idx[:, :4], 200, temperature=1e6, generator=torch.Generator().manual_seed(0)
    )
    assert sampled[:, 4:].unique().tolist() == list(range(32))


def test_loss_of_nothing_but_ignored_targets_is_nan():
    """0 / 0: as PyTorch's own is, and the guarded update leaves such a step out."""
    x, head, targets = draw(4, 16), draw(40, 16), torch.full((4,), -1)
    assert cross_entropy(x, head, targets, 32).isnan()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("chunks", [2, 3, 7, 36])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_is_the_plain_loss(tied, chunks, ignored, monkeypatch):
    """Loss and all gradients; 36 tokens, in chunks that need not divide them; some targets left out
    (-1).
    """
    idx, targets = tokens(3, 12), tokens(3, 12, seed=1)
    if ignored:
        targets[0] = -1  # a whole chunk, and single tokens
        targets[2, ::3] = -1
    plain, chunked = gpt(tie_embeddings=tied), gpt(tie_embeddings=tied)
    loss = plain(idx, targets)[0]
    kept = targets >= 0
    close(loss, F.cross_entropy(plain(idx)[kept], targets[kept]))
    (2.5 * loss).backward()
    monkeypatch.setattr(loss_file, "LOGITS_BYTES", -(-4 * 36 * 40 // chunks))
    split_loss = chunked(idx, targets)[0]
    assert "_ChunkedCrossEntropy" in split_loss.grad_fn.next_functions[0][0].name()
    close(split_loss, loss)
    (2.5 * split_loss).backward()
    for (name, parameter), other in zip(
        chunked.named_parameters(), plain.parameters(), strict=True
    ):
        close(parameter.grad, other.grad)
        assert parameter.grad.abs().max() > 0, name
    with torch.no_grad():
        close(chunked(idx, targets)[0], loss)


# -------------------------------------------------------------------------------- compiled, dropout


@pytest.mark.parametrize(
    ("norm_type", "shape"), [*((name, {}) for name in NORM_TYPES), ("coupled", LLAMA)]
)
def test_compiles_without_a_graph_break(norm_type, shape):
    torch._dynamo.reset()
    model, eager = (gpt(norm_type, n_layer=1, **shape) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    idx, targets = tokens(3, 12), tokens(3, 12, seed=1)
    pairs = [torch.stack(call(idx, targets)) for call in (compiled, eager)]
    close(*pairs)
    for pair in pairs:
        pair.sum().backward()
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        close(parameter.grad, other.grad)


@pytest.mark.parametrize(("narrow", "chunks"), [(False, 3), (True, 2)])
def test_a_chunked_loss_compiles(narrow, chunks, monkeypatch):
    """Chunks are larger where logits are of low precision."""
    torch._dynamo.reset()
    counts = []

    def compiler(graph, inputs):
        counts.append(sum("log_softmax" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(loss_file, "LOGITS_BYTES", 2000)  # of 5760
    monkeypatch.setattr(loss_file, "COMPILED_LOGITS_BYTES", 3000)
    model, eager = (gpt("rms", n_layer=1) for _ in range(2))
    model, eager = (model.float(), eager.float()) if narrow else (model, eager)
    idx, targets = tokens(3, 12), tokens(3, 12, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(
            idx, targets
        )[0]
        monkeypatch.setattr(loss_file, "LOGITS_BYTES", 1 << 29)
        whole = eager(idx, targets)[0]
    assert counts[0] == chunks
    close(loss, whole, 1e-4 if narrow else 1e-12)
    loss.backward()
    whole.backward()
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() <= (
            0.02 if narrow else 1e-12
        ) * other.grad.norm()


@pytest.mark.parametrize(
    ("length", "head_dim", "wide"),
    [(191, 64, True), (192, 64, False), (511, 32, True), (512, 32, False)],
)
def test_short_attention_of_a_16_bit_run_is_float32_on_a_cpu(length, head_dim, wide, monkeypatch):
    """In training and in backward; the block hands on 16 bits as it does without that."""
    seen = []
    attention = F.scaled_dot_product_attention

    def spy(q, k, v, **keys):
        result = attention(q, k, v, **keys)
        seen.append(result.dtype)
        return result

    monkeypatch.setattr("model.F.scaled_dot_product_attention", spy)
    config = GPTConfig(
        n_layer=1, n_head=2, n_embd=2 * head_dim, vocab_size=64, block_size=length, norm_type="rms"
    )
    block = GPT(config).blocks[0]
    y = torch.randn(1, length, config.n_embd, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        a = block.attn.mix(y, None, None)
    assert seen == [torch.float32 if wide else torch.bfloat16] and a.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # so generation casts no cache
        block.attn.mix(y, None, None)
    assert seen[-1] == torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("norm_type", "keys"),
    [
        ("layer", {"dropout": 0.3}),
        ("coupled", {"coupled_impl": "fold"} | LLAMA),
        ("peri", {}),
        ("taper", {"taper_base": "layer"}),
    ],
)
def test_recompute_is_the_same_to_the_bit(norm_type, keys, compiled):
    """Losses, gradients and the statistics of a taper: backward computes blocks once more."""
    if compiled and "dropout" in keys:
        pytest.skip("a compiled graph draws other numbers")
    found, calls = [], []
    for recompute in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = replace(SHAPE, norm_type=norm_type, recompute=recompute, **keys)
        model = shake(GPT(config)).float()
        calls.clear()
        for block in model.blocks if not compiled else ():
            block.attn.qkv.register_forward_hook(lambda *words: calls.append(1))
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        model.set_step(1, 10)
        for seed in range(2):  # micro-batches
            loss, aux = forward(tokens(2, 12, seed=seed), tokens(2, 12, seed=seed + 1))
            (loss + aux).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([loss.detach(), *gradients, *model.buffers()])
        assert len(calls) == (0 if compiled else 2 * 2 * (1 + recompute))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_dropout_in_training_only():
    plain, idx = gpt(), tokens(3, 12)
    model = gpt(dropout=0.5)
    places = [model.dropout, *(block.dropout for block in model.blocks)]
    attention = [block.attn for block in model.blocks]
    # With all other places silenced, two passes still differ.
    for chosen in ([model.dropout], places[1:], attention):
        for place in places:
            place.p = 0.5 if place in chosen else 0.0
        for part in attention:
            part.dropout = 0.5 if part in chosen else 0.0
        assert not torch.equal(model(idx), model(idx))
    assert torch.equal(model.eval()(idx), plain(idx))
    torch.manual_seed(0)
    first = model.train()(idx)
    torch.manual_seed(0)
    assert torch.equal(model(idx), first)


# ------------------------------------------------------------------------------ counts and refusals


@pytest.mark.parametrize(
    ("keys", "weights", "attention"),
    [
        ({}, 2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 40 * 16, 2 * 2 * 8),
        ({"tie_embeddings": False}, 2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 40 * 16, 2 * 2 * 8),
        # one key and value head; gate, up, down
        (LLAMA, 2 * (16 * 32 + 16 * 16 + 3 * 16 * 64) + 40 * 16, 2 * 2 * 8),
        (
            {"head_dim": 6, "n_inner": 10},
            2 * (16 * 36 + 12 * 16 + 2 * 16 * 10) + 40 * 16,
            2 * 2 * 6,
        ),
    ],
    ids=["tied", "untied", "llama", "head_dim"],
)
def test_flops_per_token(keys, weights, attention):
    """6 per weight in a product, 12 L H D T for attention.

    The head counts once, embeddings that are read do not.
    """
    assert gpt(**keys).flops_per_token() == 6 * weights + 12 * attention * 12


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_embd": 30, "n_head": 4}, ["n_embd=30", "n_head=4"]),
        ({"n_head": 4, "n_kv_head": 3}, ["n_head=4", "n_kv_head=3"]),
        ({"n_kv_head": -1}, ["n_kv_head=-1"]),
        ({"rope_scaling": (8.0, 1.0, 4.0)}, ["rope_scaling"]),
        ({"vocab_size": 30, "n_vocab": 31}, ["vocab_size=30", "n_vocab=31"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({"n_layer": 0}, ["n_layer=0"]),
    ],
    ids=str,
)
def test_bad_shapes_are_refused(keys, words):
    with pytest.raises(ConfigError) as error:
        GPT(replace(SHAPE, **keys))
    assert [word for word in words if word not in str(error.value)] == []
    assert error.value.exit_code == 2


# ------------------------------------------------------------------------------------ learning rate


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
        ("wsd", {"wsd_decay": 1.0}, 55, 3.3e-4),  # the decay never begins in the warm-up
        ("cosine", {"warmup": 0}, 50, 3.3e-4),
        ("cosine", {"warmup": 100}, 100, 6e-4),
    ],
)  # fmt: skip
def test_learning_rate(schedule, keys, step, expected):
    given = {"warmup": 10, "max_iters": 100, "highest": 6e-4, "lowest": 6e-5, "wsd_decay": 0.2}
    assert learning_rate(step, schedule, **given | keys) == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------------------------- optimiser


def optimizer_of(model, lr=1e-2):
    return make_optimizer(model, lr, (0.9, 0.95), 1e-8, 0.1)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_weight_decay_is_for_matrices(norm_type):
    model = gpt(norm_type)
    decay = {
        id(p): group["weight_decay"]
        for group in optimizer_of(model).param_groups
        for p in group["params"]
    }
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.1 if parameter.dim() >= 2 else 0.0), name
        assert (parameter.dim() >= 2) == (name.endswith("weight") and "norm" not in name), name


def step_with(optimizer, model, clip=0.0, bad=0.0, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    return guarded_update(
        optimizer, scaler, list(model.parameters()), clip, torch.tensor(bad, dtype=torch.float64)
    )


def everything(model, optimizer):
    """Copies of all weights, all moments and all step counts, by name."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {
            f"{name} {key}": value.clone() for key, value in optimizer.state[parameter].items()
        }
    return state


def backward(model, seed):
    model(tokens(3, 12, seed=seed), tokens(3, 12, seed=seed + 1))[0].backward()


@pytest.mark.parametrize(
    ("fault", "scaled"),
    [
        ("nan gradient", False),
        ("inf gradient", False),
        ("nan loss", False),
        # with loss scaling, a bad loss shows in the gradients
        ("nan gradient", True),
        ("inf gradient", True),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_is_not_applied(fault, clip, scaled):
    """Weights, moments and step counts stay bit for bit, and the run goes on as if that step had
    never been.
    """
    model, other = gpt(), gpt()
    optimizer, optimizer_other = optimizer_of(model), optimizer_of(other)
    for this, its in ((model, optimizer), (other, optimizer_other)):
        backward(this, 1)
        step_with(its, this, clip)
    before = everything(model, optimizer)
    assert len(before) == 4 * len(list(model.parameters()))
    backward(model, 2)
    if fault != "nan loss":
        model.blocks[1].mlp.up.weight.grad[3, 4] = float(fault.split()[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    scaler.scale(torch.zeros(()))  # the scaler makes its scale when it first meets a loss
    norms = step_with(optimizer, model, clip, bad=float(fault == "nan loss"), scaler=scaler)
    assert norms.total.isfinite() == norms.each.isfinite().all() == (fault == "nan loss")
    after = everything(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for this, its in ((model, optimizer), (other, optimizer_other)):
        backward(this, 3)
        step_with(its, this, clip)
    expected = everything(other, optimizer_other)
    assert all(
        torch.equal(value, expected[name]) for name, value in everything(model, optimizer).items()
    )
    assert not torch.equal(expected["wte.weight"], before["wte.weight"])


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipping_and_the_norms_reported(clip):
    model = gpt()
    optimizer = optimizer_of(model)
    backward(model, 1)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    total = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    reported = step_with(optimizer, model, clip)
    # before clipping
    close(reported.total, total)
    close(reported.each, torch.stack([gradient.norm() for gradient in gradients]))
    factor = clip / (total + 1e-6) if clip and clip < total else 1.0
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        # (1 - beta1) times what was applied
        close(optimizer.state[parameter]["exp_avg"], 0.1 * factor * gradient)
    applied = (
        torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()]).norm()
        / 0.1
    )
    assert applied == pytest.approx(clip if 0 < clip < total else total.item(), rel=1e-4)


# -------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def trained():
    """(model, optimizer, what train.py saves of them)"""
    model = gpt("coupled").float()
    model.meta = {"tokenizer": "bytes"}
    optimizer = optimizer_of(model)
    backward(model, 1)
    optimizer.step()
    return (
        model,
        optimizer,
        {
            "step": 7,
            "config": asdict(model.config) | {"learning_rate": 1e-3},
            "meta": model.meta,
            "model": model.state_dict(),
            "optimizer": moments_of(dict(model.named_parameters()), optimizer),
            "scaler": {},
            "best_val_loss": 1.5,
        },
    )


def same_state(state, other):
    """Equal dicts of dicts, lists, tensors and plain values; equal tensors are equal bit for bit,
    and in type.
    """
    if isinstance(state, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and state.dtype == other.dtype
            and torch.equal(state, other)
        )
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(
            same_state(value, other[key]) for key, value in state.items()
        )
    if isinstance(state, list | tuple):
        return len(state) == len(other) and all(map(same_state, state, other))
    return state == other


def test_round_trip(trained, tmp_path):
    model, optimizer, state = trained
    save_checkpoint(tmp_path / LAST, state)
    back = read_checkpoint(tmp_path / LAST)
    assert same_state(back, {"format": 2, **state})
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    loaded = load_model(str(tmp_path / LAST))
    assert loaded.config == model.config and loaded.meta == model.meta and not loaded.training
    assert torch.equal(loaded(tokens(2, 12)), model(tokens(2, 12)))
    again = optimizer_of(loaded)
    load_moments(tmp_path / LAST, back, dict(loaded.named_parameters()), again)
    assert same_state(everything(loaded, again), everything(model, optimizer))


@pytest.mark.parametrize("moment", ["write", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("boom"), KeyboardInterrupt()]
)
def test_a_crash_while_saving_leaves_the_old_file(trained, tmp_path, monkeypatch, moment, error):
    state, path = trained[2], tmp_path / LAST
    save_checkpoint(path, state)
    old, save = path.read_bytes(), torch.save

    def half(data, file):
        save(data, file)
        file.seek(len(old) // 2)
        file.truncate()
        raise error

    def fail(*words):
        raise error

    monkeypatch.setattr(*((torch, "save", half) if moment == "write" else (os, "replace", fail)))
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
        save_checkpoint(path, state | {"step": 8})
    if isinstance(error, OSError):
        assert str(path) in str(caught.value) and "No space left" in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == [LAST]
    assert path.read_bytes() == old
    monkeypatch.undo()
    save_checkpoint(path, state | {"step": 9})  # and what is left of it is not in the way
    assert read_checkpoint(path)["step"] == 9 and [path.name for path in tmp_path.iterdir()] == [
        LAST
    ]


def test_truncated_at_any_length(trained, tmp_path):
    path = tmp_path / LAST
    save_checkpoint(path, trained[2])
    whole = path.read_bytes()
    for length in {0, 1, 4, *range(0, len(whole), len(whole) // 50), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=LAST):
            read_checkpoint(path)


def test_a_flipped_byte_anywhere(trained, tmp_path):
    """Refused in words, or harmless (in padding): never another state, never another exception."""
    path = tmp_path / LAST
    save_checkpoint(path, trained[2])
    whole, refused = path.read_bytes(), 0
    # every byte of an entry in the archive's directory, and others elsewhere
    entry = whole.find(b"PK\x01\x02")
    tensor = whole.find(b"PK\x01\x02", whole.find(b"/data/0", entry))
    places = [
        *range(entry, entry + 60),
        *range(tensor, tensor + 60),
        *range(0, len(whole), len(whole) // 100),
    ]
    for place in places:
        torn = bytearray(whole)
        torn[place] ^= 0xFF
        path.write_bytes(torn)
        try:
            assert same_state(read_checkpoint(path), {"format": 2, **trained[2]}), place
        except CheckpointError:
            refused += 1
    assert refused > len(places) // 2


class Malice:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_foreign_pickle_is_never_executed(trained, tmp_path):
    mark, path = tmp_path / "executed", tmp_path / LAST
    torch.save({**trained[2], "meta": Malice(mark)}, path)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        read_checkpoint(path)
    torch.save({**trained[2], "meta": Malice(mark)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=LAST):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps(Malice(mark)))
    with pytest.raises(CheckpointError, match=LAST):
        load_model(str(path))
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # so it was malicious


def nonsense(content: bytes, path: Path) -> None:
    """An archive whose checksums are right, and whose unpickler fails in ways of its own."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in (("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", part)


@pytest.mark.parametrize(
    ("write", "content"),
    [
        *((lambda content, path: path.write_bytes(content), text) for text in
          (b"", b"hello\n" * 100, b"PK\x05\x06" + 18 * b"\0")),
        *((nonsense, text) for text in
          (b"", b".", b"0.", b"h\x05.", b"}s.", b"\x80\x02\x8c\xff", b"X\xff\xff")),
        *((torch.save, state) for state in
          ([1, 2], {"wte.weight": torch.ones(2)}, {"model": {}, "config": {}})),
    ],
)  # fmt: skip
def test_not_a_checkpoint_at_all(write, content, tmp_path):
    write(content, tmp_path / LAST)
    with pytest.raises(CheckpointError, match=r"not a.* checkpoint"):
        read_checkpoint(tmp_path / LAST)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"format": 3}, "format 3, this program reads 2"), ({"shards": {}}, "commit d806d57")],
)
def test_what_this_program_does_not_read_is_refused(change, word, trained, tmp_path):
    """It is the latest checkpoint all the same: a run does not go on from an earlier one."""
    torch.save({**trained[2], **change}, tmp_path / LAST)
    save_checkpoint(tmp_path / BEST, trained[2] | {"step": 5})
    with pytest.raises(UserError, match=word):
        read_checkpoint(tmp_path / LAST)
    with pytest.raises(UserError, match=word):
        find_checkpoint(tmp_path, "auto")


def test_a_config_without_norm_type_is_layer(tmp_path):
    """Checkpoints from before there were norm types: only the keys of the shape."""
    model = gpt("layer")
    shape = {
        name: getattr(SHAPE, name)
        for name in ("vocab_size", "n_vocab", "block_size", "n_layer", "n_head", "n_embd", "bias")
    }
    save_checkpoint(
        tmp_path / LAST, {"step": 1, "config": shape, "model": model.float().state_dict()}
    )
    loaded = load_model(str(tmp_path))
    assert loaded.config.norm_type == "layer" and str(loaded.plan) == "LL LL L"
    assert torch.equal(loaded(tokens(2, 12)), model(tokens(2, 12)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 3}, ["n_layer=2 there, 3 here"]),
        ({"n_embd": 32}, ["n_embd=16 there, 32 here"]),
        (
            {"norm_type": "rms", "coupled_alpha": 1.0, "coupled_span": 1},
            ["norm_type='coupled' there, 'rms' here"],
        ),
        ({"coupled_span": 1}, ["coupled_span=2 there, 1 here"]),
        ({"bias": False}, ["bias=True there, False here"]),
    ],
)
def test_another_model_names_the_key(change, words, trained):
    model, path = trained[0], Path("run") / LAST
    saved = asdict(model.config)
    check_same_model(saved, model.config, path)
    # decide no tensor
    check_same_model(saved, replace(model.config, dropout=0.1, init="torch", init_std=0.01), path)
    with pytest.raises(CheckpointError) as error:
        check_same_model(saved, replace(model.config, **change), path)
    assert all(word in str(error.value) for word in [*words, str(path)])


def test_a_tensor_of_another_shape_is_named(trained, tmp_path):
    state = trained[2]
    for change, word in (
        ({"norm_f.norm.weight": torch.ones(3)}, "norm_f.norm.weight is (3,) there, (16,) here"),
        ({"extra": torch.ones(3)}, "extra is not part of this model"),
    ):
        save_checkpoint(tmp_path / LAST, state | {"model": state["model"] | change})
        with pytest.raises(CheckpointError) as error:
            load_model(str(tmp_path))
        assert word in str(error.value)
    less = {name: tensor for name, tensor in state["model"].items() if name != "norm_f.norm.weight"}
    save_checkpoint(tmp_path / LAST, state | {"model": less})
    with pytest.raises(CheckpointError, match=r"norm_f\.norm\.weight is missing"):
        load_model(str(tmp_path))


def test_find_checkpoint(trained, tmp_path):
    state = trained[2]
    assert find_checkpoint(tmp_path, "auto") is None and find_checkpoint(tmp_path, "never") is None
    save_checkpoint(tmp_path / LAST, state)
    save_checkpoint(tmp_path / BEST, state | {"step": 5})
    found, path, note = find_checkpoint(tmp_path, "auto")
    assert (found["step"], path, note) == (7, tmp_path / LAST, "")
    found, path, note = find_checkpoint(tmp_path, str(tmp_path / BEST))
    assert (found["step"], path, note) == (5, tmp_path / BEST, "")
    with pytest.raises(CheckpointError, match="resume=auto"):
        find_checkpoint(tmp_path, "never")

    # torn: the best one, and it says so
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:1000])
    found, path, note = find_checkpoint(tmp_path, "auto")
    assert (found["step"], path) == (5, tmp_path / BEST) and LAST in note and "torn" in note
    with pytest.raises(CheckpointError, match="torn"):
        find_checkpoint(tmp_path, str(tmp_path / LAST))
    (tmp_path / BEST).write_bytes(b"")
    with pytest.raises(CheckpointError) as error:  # both torn: it does not start afresh over them
        find_checkpoint(tmp_path, "auto")
    assert LAST in str(error.value) and BEST in str(error.value)
    (tmp_path / LAST).unlink()
    with pytest.raises(CheckpointError, match="resume=auto"):
        find_checkpoint(tmp_path, "never")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        find_checkpoint(tmp_path, str(tmp_path / "nowhere.pt"))
