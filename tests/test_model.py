"""Initial weights, decoding, the loss, compilation, dropout, counts and refusals of the model.

    python -m pytest tests/test_model.py

In float64 unless a test says otherwise.
"""

from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from helpers import close, draw, shake, tokens

from common.errors import ConfigError
from kernels import cross_entropy as loss_file
from kernels.cross_entropy import cross_entropy
from model import GPT, GPTConfig, KVCache, attends_wider, sample_token
from norm_types import NORM_TYPES

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


def gpt(norm_type="layer", **keys):
    """A small model; a taper is half way through its blend, with calibrated scales."""
    model = shake(GPT(replace(SHAPE, norm_type=norm_type, **NORMS[norm_type] | keys)))
    for step in range(1, 5 if norm_type == "taper" else 1):
        model.set_step(step, 10)
        model(tokens(2, 12, seed=step))
    return model


# -------------------------------------------------------------------------------- sizes and weights


def test_each_weight_has_a_random_stream_of_its_own():
    """That norm types begin with the same weights is in test_layouts.py."""
    models = [GPT(replace(SHAPE, tie_embeddings=False), seed) for seed in (3, 4)]
    drawn = [tensor for model in models for tensor in model.parameters() if tensor.dim() == 2]
    assert len(drawn) == 2 * (3 + 4 * 2)
    assert len({tensor.flatten()[0].item() for tensor in drawn}) == len(drawn)


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


@pytest.mark.parametrize(
    ("channels", "given", "std"),
    [(768, None, 0.02), (1600, None, 0.02), (256, None, 0.0456), (48, None, 0.16), (48, 0.5, 0.5)],
)
def test_initial_weights_by_width(channels, given, std):
    model = GPT(replace(WIDE, n_layer=1, n_head=1, n_embd=channels, init_std=given))
    assert float(model.blocks[0].attn.qkv.weight.std()) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize("init", ["gpt2", "torch"])
def test_initial_weights(init):
    """gpt2: normal, but for what writes into the stream; torch: PyTorch's own defaults.

    Those are unit-normal embeddings, and linears with biases uniform within 1 / sqrt(inputs).
    """
    model = GPT(replace(WIDE, init_std=0.05, init=init))
    for name, module in model.named_modules():
        for part, tensor in module.named_parameters(recurse=False):
            if isinstance(module, torch.nn.Embedding):
                assert is_like(tensor, 0.05 if init == "gpt2" else 1.0), name
            elif not isinstance(module, torch.nn.Linear):
                assert tensor.unique().tolist() == [float(part == "weight")]
            elif init == "torch":
                bound = module.in_features**-0.5
                assert tensor.abs().max() <= bound and is_like(tensor, bound / 3**0.5), name
            elif part == "bias":
                assert not tensor.any()
            else:
                writes = name.endswith(("proj", "down"))
                assert is_like(tensor, 0.05 / 16**0.5 if writes else 0.05), name


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("norm_type", ["layer", "coupled", "taper"])
def test_cached_generation_is_uncached_also_beyond_block_size(norm_type):
    model, idx = gpt(norm_type).eval(), tokens(3, 5)
    cached = model.generate(idx, 30, temperature=0)
    assert cached.shape == (3, 35) and torch.equal(cached[:, :5], idx)
    assert torch.equal(cached, model.generate(idx, 30, temperature=0, use_cache=False))
    # The first token beyond the context is predicted from the context's later half alone.
    assert torch.equal(cached[:, 13], model(cached[:, 7:13])[:, -1].argmax(-1))
    assert torch.equal(cached[:, 12], model(cached[:, :12])[:, -1].argmax(-1))
    longer = model.generate(cached, 3, temperature=0)  # from a prompt beyond block_size
    assert torch.equal(longer[:, 35:], model.generate(cached[:, -12:], 3, temperature=0)[:, 12:])
    with pytest.raises(ValueError, match="13 tokens do not fit block_size=12"):
        model(cached[:, :13])


@pytest.mark.parametrize(
    ("temperature", "top_k", "count"),
    [(0, 0, 1), (5.0, 1, 1), (0.7, 3, 3), (0.7, 0, 6), (2.0, 9, 6)],
)
def test_sampling_follows_the_softmax_of_the_likeliest(temperature, top_k, count):
    logits = draw(6)
    drawn = sample_token(
        logits.expand(20_000, 6), temperature, top_k, torch.Generator().manual_seed(0)
    )
    likeliest = logits.topk(count).indices
    p = torch.zeros(6, dtype=torch.float64)
    p[likeliest] = (logits[likeliest] / (temperature or 1)).softmax(0)
    counted = drawn.flatten().bincount(minlength=6) / 20_000
    assert ((counted - p).abs() <= 5 * (p * (1 - p) / 20_000).sqrt()).all()


# --------------------------------------------------------------------------------- padding and loss


@pytest.mark.parametrize("tied", [True, False])
def test_padded_vocabulary(tied):
    """Rows beyond n_vocab: no logits, no samples, no part in the loss, no gradient."""
    model, idx, targets = gpt(tie_embeddings=tied), tokens(3, 12), tokens(3, 12, seed=1)
    head = model.wte.weight if tied else model.lm_head.weight
    head.data[32:] += 50 * draw(8, 16, seed=2)  # would dominate everything, if it counted
    logits = model(idx)  # (3, 12, 32)
    loss, _ = model(idx, targets)
    close(loss, -logits.log_softmax(-1).gather(2, targets[..., None]).mean())
    loss.backward()
    assert (head.grad[32:] == 0).all()
    sampled = model.eval().generate(
        idx[:, :4], 200, temperature=1e6, generator=torch.Generator().manual_seed(0)
    )
    assert sampled[:, 4:].unique().tolist() == list(range(32))


def test_loss_of_nothing_but_ignored_targets_is_nan():
    """0 / 0: as PyTorch's own is, and the guarded update leaves such a step out."""
    x, head, targets = draw(4, 16), draw(40, 16), torch.full((4,), -1)
    assert cross_entropy(x, head, targets, 32).isnan()


@pytest.mark.parametrize("chunks", [2, 3, 7, 36])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_is_the_plain_loss(tied, chunks, monkeypatch):
    """Loss and all gradients; 36 tokens, in chunks that need not divide them; some targets left out
    (-1).
    """
    idx, targets = tokens(3, 12), tokens(3, 12, seed=1)
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
    for parameter, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        close(parameter.grad, other.grad)
    with torch.no_grad():
        close(chunked(idx, targets)[0], loss)


# -------------------------------------------------------------------------------- compiled, dropout


# What differs in the code that is compiled
GRAPHS = ("layer", "rms", "coupled", "cbwc", "keel", "lns", "derf", "bhyt", "gatednorm")


@pytest.mark.parametrize(
    ("norm_type", "shape"), [*((name, {}) for name in GRAPHS), ("coupled", LLAMA)]
)
def test_compiles_without_a_graph_break(norm_type, shape, monkeypatch):
    """With a loss in two chunks, too; of some types backward is compiled as well."""
    torch._dynamo.reset()
    monkeypatch.setattr(loss_file, "LOGITS_BYTES", 3000)
    monkeypatch.setattr(loss_file, "COMPILED_LOGITS_BYTES", 3000)
    model, eager = (gpt(norm_type, n_layer=1, **shape) for _ in range(2))
    compiled = torch.compile(
        model,
        fullgraph=True,
        backend="aot_eager" if norm_type in ("rms", "coupled", "cbwc", "bhyt") else "eager",
    )
    idx, targets = tokens(3, 12), tokens(3, 12, seed=1)
    pairs = [torch.stack(call(idx, targets)) for call in (compiled, eager)]
    close(*pairs)
    for pair in pairs:
        pair.sum().backward()
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        close(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("length", "head_dim", "wide"),
    [(191, 64, True), (192, 64, False), (511, 32, True), (512, 32, False)],
)
def test_short_attention_of_a_16_bit_run_is_float32_on_a_cpu(length, head_dim, wide):
    """In training alone, so that generation casts no cache. It returns 16 bits all the same."""
    attention = gpt(n_embd=2 * head_dim).blocks[0].attn
    q = torch.randn(1, 2, length, head_dim).bfloat16()
    assert attends_wider(q) == wide and not attends_wider(q.float())
    exact = attention.attend(q.float(), q.float(), q.float(), None).bfloat16()
    assert torch.equal(attention.attend(q, q, q, None), exact) == wide
    with torch.no_grad():
        assert not attends_wider(q)


@pytest.mark.parametrize(
    ("norm_type", "keys"),
    [
        ("layer", {"dropout": 0.3}),
        ("coupled", {"coupled_impl": "fold"} | LLAMA),
        ("taper", {"taper_base": "layer"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True])
def test_recompute_is_the_same_to_the_bit(norm_type, keys, compiled):
    """Losses, gradients and the statistics of a taper: backward computes blocks once more."""
    if compiled:
        keys = keys | {"dropout": 0.0}  # a compiled graph draws other numbers for it
    found, calls = [], []
    for recompute in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = replace(SHAPE, norm_type=norm_type, recompute=recompute, n_layer=1, **keys)
        model = shake(GPT(config)).float()
        if compiled:
            model.compile(backend="aot_eager")
        else:
            model.blocks[0].attn.qkv.register_forward_hook(lambda *words: calls.append(1))
        model.set_step(1, 10)
        for seed in range(2):  # micro-batches
            loss, aux = model(tokens(2, 12, seed=seed), tokens(2, 12, seed=seed + 1))
            (loss + aux).backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        found[-1] += model.buffers()
    assert len(calls) == (0 if compiled else 2 + 4)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("chosen", ["embeddings", "sublayers", "attention"])
def test_dropout_in_training_only(chosen):
    """Each of the three places alone."""
    idx, model = tokens(3, 12), gpt(dropout=0.5)
    model.dropout.p *= chosen == "embeddings"
    for block in model.blocks:
        block.dropout.p *= chosen == "sublayers"
        block.attn.dropout *= chosen == "attention"
    assert not torch.equal(model(idx), model(idx))
    assert torch.equal(model.eval()(idx), gpt()(idx))


# ------------------------------------------------------------------------------------ local blocks


def test_plain_attention_wherever_the_window_cuts_nothing(monkeypatch):
    """No mask where all old tokens are seen; keys are read within the window and nowhere else.

    Grouped keys are copied for their heads with a mask, and only then: so that no call falls to the
    kernel that keeps all scores.
    """
    calls = []

    def attention(q, k, v, attn_mask, is_causal, enable_gqa, **keys):
        calls.append((q.shape[2], k.shape[2], attn_mask is not None, is_causal))
        # Flash attention takes no mask, memory-efficient attention no grouped heads.
        assert (k.shape[1] == q.shape[1]) == (attn_mask is not None) == (not enable_gqa)
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = gpt("rms", **LLAMA | {"window": 5, "local_blocks": "lg"}).eval()

    @torch.no_grad()
    def run(count, cache=None):
        calls.clear()
        model(tokens(1, count), cache=cache)
        return calls

    assert run(5) == [(5, 5, False, True)] * 2
    assert run(6) == [(6, 6, True, False), (6, 6, False, True)]
    cache = KVCache(model.config, 1, 12, draw(1))
    assert run(7, cache) == [(7, 7, True, False), (7, 7, False, True)]
    assert run(1, cache) == [(1, 5, False, False), (1, 8, False, False)]
    assert run(3, cache) == [(3, 7, True, False), (3, 11, True, False)]


def test_the_scale_of_embeddings_is_rounded_to_their_type():
    """As Gemma's is: 33.94 is 34 in bfloat16."""
    assert gpt(embed_scale=1152**0.5).bfloat16().token_scale() == 34.0


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
        # a block that sees 3 of 12 tokens
        (
            {"window": 3, "local_blocks": "lg"},
            2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 40 * 16,
            2 * 8 * (1 + 3 / 12),
        ),
    ],
    ids=["tied", "untied", "llama", "head_dim", "window"],
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
        ({"position": "rope", "head_dim": 5}, ["position=rope", "head_dim"]),
        ({"rope_scaling": (8.0, 1.0, 4.0)}, ["rope_scaling"]),
        ({"vocab_size": 30, "n_vocab": 31}, ["vocab_size=30", "n_vocab=31"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({"n_layer": 0}, ["n_layer=0"]),
        ({"window": 5, "local_blocks": "lxg"}, ["local_blocks='lxg'"]),
        ({"window": 5, "local_blocks": "gg"}, ["window=5", "local_blocks='gg'"]),
        ({"local_blocks": "lg"}, ["window=0", "local_blocks='lg'"]),
        ({"local_rope_theta": 10.0}, ["local_rope_theta=10.0"]),
        ({"rope_scaling_kind": "linear"}, ["rope_scaling=()", "linear needs factor"]),
        ({"position": "rope", "block_size": 4 * 10**9}, ["block_size=4000000000", "GB of memory"]),
    ],
    ids=str,
)
def test_bad_shapes_are_refused(keys, words):
    with pytest.raises(ConfigError) as error:
        GPT(replace(SHAPE, **keys))
    assert [word for word in words if word not in str(error.value)] == []
    assert error.value.exit_code == 2
