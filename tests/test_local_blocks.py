"""Local blocks, two rotary bases, gated GELU and the scales of scores and embeddings, as Gemma 3
and OLMo 3 have them, against an independent model in float64 and against transformers.

    python -m pytest tests/test_local_blocks.py
"""

import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from helpers import close, draw, shake

import model as model_file
from common.errors import ConfigError, HFError
from fold.gpt import to_folded
from hf.config import hf_config
from hf.hub import import_transformers
from load import SAME_FUNCTION
from model import GPT, GPTConfig, KVCache, rope_tables
from training.checkpoint import check_same_model

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
T = 16
GEMMA = GPTConfig(
    vocab_size=40,
    block_size=T,
    n_layer=4,
    n_head=4,
    n_kv_head=2,
    head_dim=6,
    n_embd=16,
    activation="geglu",
    norm_type="rms",
    position="rope",
    qk_norm="head",
    rope_theta=1000.0,
    rope_scaling=(8.0,),
    rope_scaling_kind="linear",
    window=5,
    local_blocks="llg",
    local_rope_theta=10.0,
    attn_scale=0.3,
    embed_scale=4.0,
    init_std=0.2,
)
OLMO = replace(
    GEMMA,
    n_kv_head=0,
    activation="swiglu",
    rope_theta=50.0,
    # the pairs turn 16, 4.3 and 1.2 times: kept, mixed and stretched
    rope_scaling=(8.0, 3.0, 0.5, 16.0, 1.2),
    rope_scaling_kind="yarn",
    window=3,
    local_blocks="lllg",
    local_rope_theta=0.0,
    attn_scale=0.0,
    embed_scale=1.0,
    tie_embeddings=False,
)
LEARNED = GPTConfig(
    vocab_size=40,
    block_size=T,
    n_layer=2,
    n_head=2,
    n_embd=16,
    norm_type="rms",
    window=4,
    local_blocks="l",
    embed_scale=3.0,
    init_std=0.2,
)
SHAPES = {"gemma": GEMMA, "olmo": OLMO, "learned": LEARNED}


def gpt(config):
    return shake(GPT(config)).eval()


def tokens(*shape, seed=0):
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------- the definition


def angles(config, local):
    """Angles (T, head_dim / 2) of tokens 0 .. T - 1 in float64, pair by pair, and their factor."""
    D = config.head_channels
    theta = config.local_rope_theta or config.rope_theta if local else config.rope_theta
    found, factor = [], 1.0
    for i in range(D // 2):
        frequency = theta ** (-2 * i / D)
        if config.rope_scaling_kind == "linear" and not local:
            frequency /= config.rope_scaling[0]
        if config.rope_scaling_kind == "yarn" and not local:
            stretch, fast, slow, original, factor = config.rope_scaling
            # the pair that turns so often, by theta^(-2 i / D) original = 2 pi turns
            first, last = (
                D / 2 * math.log(original / (2 * math.pi * turns), theta) for turns in (fast, slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), D - 1)
            ramp = min(max((i - first) / (last - first), 0), 1)
            frequency = frequency / stretch * ramp + frequency * (1 - ramp)
        found.append(frequency)
    position = torch.arange(config.block_size, dtype=torch.float64)
    return position[:, None] * torch.tensor(found, dtype=torch.float64), factor


def defined_logits(config, w, idx):
    """Written down from the weights: dense masks, complex rotations, a loop over blocks."""
    B, length = idx.shape
    H, G, D = config.n_head, config.kv_heads, config.head_channels

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * gain

    def turned(x, local):
        if config.position != "rope":
            return x
        angle, factor = angles(config, local)
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:length, None] * factor
        return torch.cat([pairs.real, pairs.imag], -1)

    x = w["wte.weight"][idx] * config.embed_scale
    if config.position == "learned":
        x = x + w["wpe.weight"][:length]
    for block in range(config.n_layer):
        at = f"blocks.{block}."
        local = config.local_blocks[block % len(config.local_blocks)] == "l"
        qkv = norm(x, w[at + "norm1.norm.weight"]) @ w[at + "attn.qkv.weight"].T
        q, k, v = qkv.view(B, length, H + 2 * G, D).split([H, G, G], 2)
        if config.qk_norm:
            q, k = norm(q, w[at + "attn.q_norm.weight"]), norm(k, w[at + "attn.k_norm.weight"])
        q, k = turned(q, local), turned(k, local)
        k, v = (part.repeat_interleave(H // G, 2) for part in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * (config.attn_scale or 1 / math.sqrt(D))
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) & (j > i - config.window) if local else j <= i
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        mixed = torch.einsum("bhij,bjhd->bihd", weights, v).reshape(B, length, H * D)
        x = x + mixed @ w[at + "attn.proj.weight"].T
        z = norm(x, w[at + "norm2.norm.weight"]) @ w[at + "mlp.up.weight"].T
        if config.activation == "gelu":
            z = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
        else:
            gate, up = z.chunk(2, -1)
            if config.activation == "swiglu":
                z = gate / (1 + torch.exp(-gate)) * up
            else:
                t = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
                z = 0.5 * gate * (1 + torch.tanh(t)) * up
        x = x + z @ w[at + "mlp.down.weight"].T
    head = w["wte.weight"] if config.tie_embeddings else w["lm_head.weight"]
    return norm(x, w["norm_f.norm.weight"]) @ head.T


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_are_those_of_the_definition(name):
    """More than three windows long. The model's tables are float32: here it gets exact ones."""
    config = SHAPES[name]
    model, idx, targets = gpt(config), tokens(3, T), tokens(3, T, seed=1)
    for prefix, local in (("rope", False), ("local_rope", True)):
        if hasattr(model, f"{prefix}_cos"):
            angle, factor = angles(config, local)
            angle = torch.cat([angle, angle], -1)
            for table, exact in (("cos", angle.cos()), ("sin", angle.sin())):
                close(getattr(model, f"{prefix}_{table}"), exact * factor, 2e-6)
                setattr(model, f"{prefix}_{table}", exact * factor)
    w = dict(model.named_parameters())
    expected = defined_logits(config, w, idx)
    close(model(idx), expected)
    close(model(idx[:, :7]), expected[:, :7])
    loss, _ = model(idx, targets)
    defined = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    ours, theirs = (torch.autograd.grad(one, list(w.values())) for one in (loss, defined))
    for gradient, exact in zip(ours, theirs, strict=True):
        assert exact.abs().max() > 1e-4
        close(gradient, exact)


@pytest.mark.parametrize(
    "change",
    [
        {"window": 4},
        {"local_blocks": "lgl"},
        {"local_rope_theta": 11.0},
        {"rope_scaling": (7.0,)},
        {"attn_scale": 0.31},
        {"embed_scale": 4.1},
        {"activation": "swiglu"},
    ],
    ids=str,
)
def test_every_key_changes_the_function(change):
    idx = tokens(1, T)
    assert (gpt(replace(GEMMA, **change))(idx) - gpt(GEMMA)(idx)).abs().max() > 1e-4


# --------------------------------------------------------------------------- the cache, plain paths


@pytest.mark.parametrize("pieces", [[16], [7, 9], [1] * 16, [3, 1, 6, 1, 5]], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_cached_is_uncached_beyond_the_window(name, pieces):
    model, idx = gpt(SHAPES[name]), tokens(2, T)
    cache = KVCache(model.config, 2, T, model.wte.weight)
    parts = [model(piece, cache=cache) for piece in idx.split(pieces, dim=1)]
    close(torch.cat(parts, 1), model(idx))


def test_generation_is_uncached_generation():
    model, idx = gpt(OLMO), tokens(2, 7)
    cached, plain = (model.generate(idx, 20, temperature=0, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain) and cached[:, 7:].unique().numel() > 3


def test_plain_attention_wherever_the_window_cuts_nothing(monkeypatch):
    """No mask where all old tokens are seen; keys are read within the window and nowhere else."""
    calls = []

    def attention(q, k, v, attn_mask, is_causal, **keys):
        calls.append((q.shape[2], k.shape[2], attn_mask is not None, is_causal, keys["scale"]))
        return original(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **keys)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(model_file.F, "scaled_dot_product_attention", attention)
    model = gpt(replace(GEMMA, n_layer=2, local_blocks="lg"))

    def run(idx, cache=None):
        calls.clear()
        with torch.no_grad():
            model(idx, cache=cache)
        return calls

    assert run(tokens(1, 5)) == [(5, 5, False, True, 0.3)] * 2
    assert run(tokens(1, 6)) == [(6, 6, True, False, 0.3), (6, 6, False, True, 0.3)]
    cache = KVCache(model.config, 1, T, model.wte.weight)
    assert run(tokens(1, 9), cache) == [(9, 9, True, False, 0.3), (9, 9, False, True, 0.3)]
    assert run(tokens(1, 1), cache) == [(1, 5, False, False, 0.3), (1, 10, False, False, 0.3)]
    assert run(tokens(1, 3), cache) == [(3, 7, True, False, 0.3), (3, 13, True, False, 0.3)]
    model = gpt(replace(GEMMA, n_layer=1, window=T, attn_scale=0.0))
    assert run(tokens(1, T)) == [(T, T, False, True, None)]


def test_training_copies_no_keys(monkeypatch):
    """A slice of keys and values, even of all, would cost a copy of its gradient in backward."""
    names = []

    def attend(q, k, v, mask):
        names.extend((k.grad_fn.name(), v.grad_fn.name()))
        return q

    model = gpt(GEMMA)
    for block in model.blocks:
        monkeypatch.setattr(block.attn, "attend", attend)
    model(tokens(1, T))
    assert len(names) == 8 and not [name for name in names if "Slice" in name]


def test_defaults_have_nothing_new():
    """No second pair of tables where blocks turn alike, and no state that is saved."""
    plain = replace(GEMMA, window=0, local_blocks="", local_rope_theta=0.0)
    same = replace(OLMO, rope_scaling=(), rope_scaling_kind="llama3", local_rope_theta=50.0)
    for config, local in ((plain, False), (same, False), (OLMO, True), (GEMMA, True)):
        names = {name for name, _ in GPT(config).named_buffers()}
        pair = {"local_rope_cos", "local_rope_sin"} if local else set()
        assert names == {"rope_cos", "rope_sin"} | pair
    assert GPT(plain).state_dict().keys() == GPT(GEMMA).state_dict().keys()
    ropes = GPT(OLMO).ropes(0, T)
    assert ropes[0] is ropes[1] is ropes[2] and ropes[3] is not ropes[0]


def test_flops_count_the_window():
    """Two local blocks of 5 tokens, a global one of 16, and again a local one."""
    wide, local = (GPT(replace(GEMMA, **keys)).flops_per_token() for keys in ({"window": 16}, {}))
    assert wide - local == 12 * 4 * 6 * 3 * (16 - 5)


def test_a_taper_with_a_bias_folds_under_a_scaled_embedding():
    config = replace(
        GEMMA,
        norm_type="taper",
        taper_base="layer",
        taper_warmup=1.0,
        taper_end=2.0,
        taper_final=True,
        bias=True,
        tie_embeddings=False,
    )
    model = shake(GPT(config)).train()
    model.set_step(1, 10)
    model(tokens(4, T, seed=3))
    model.set_step(5, 10)
    model.eval()
    close(to_folded(model)(tokens(2, T)), model(tokens(2, T)), 1e-11)


# ------------------------------------------------------------------------------------- transformers


@needs_transformers
@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_rotary_tables_are_bit_for_bit_those_of_transformers(family):
    """Positions of the published context lengths; YaRN's factor is 0.1 ln 8 + 1."""
    transformers = import_transformers()
    if family == "gemma3":
        theirs = transformers.Gemma3TextConfig(
            hidden_size=2560,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
        module = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(theirs)
        keys = {
            "head_dim": 256,
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "rope_scaling": (8.0,),
            "rope_scaling_kind": "linear",
        }
    else:
        yarn = {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"}
        theirs = transformers.Olmo3Config(rope_scaling=yarn, rope_theta=5e5)
        module = transformers.models.olmo3.modeling_olmo3.Olmo3RotaryEmbedding(theirs)
        keys = {
            "head_dim": 128,
            "rope_theta": 5e5,
            "local_rope_theta": 0.0,
            "rope_scaling": (8.0, 32.0, 1.0, 8192.0, 0.1 * math.log(8) + 1),
            "rope_scaling_kind": "yarn",
        }
    ours = replace(GEMMA, block_size=65536, **keys)
    positions = torch.tensor([0, 1, 2, 1000, 8191, 8192, 40959, 65535])
    for local, kind in ((False, "full_attention"), (True, "sliding_attention")):
        expected = module(torch.zeros(1), positions[None], kind)
        for table, exact in zip(rope_tables(ours, local), expected, strict=True):
            assert torch.equal(table[positions], exact[0]), kind


@needs_transformers
def test_the_window_and_the_scaled_embedding_are_those_of_transformers():
    from transformers.masking_utils import sliding_window_causal_mask_function
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    sees = sliding_window_causal_mask_function(5)
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    expected = sees(0, 0, i, j)
    assert torch.equal(GPT(GEMMA).blocks[0].attn.mask(T, T, "cpu"), expected)

    weight, idx = draw(40, 16), tokens(2, T)
    for dtype in (torch.float32, torch.bfloat16):
        model = GPT(replace(LEARNED, embed_scale=1152**0.5)).to(dtype)
        model.wte.weight.data.copy_(weight)
        theirs = Gemma3TextScaledWordEmbedding(40, 16, None, 1152**0.5).to(dtype)
        theirs.weight.data.copy_(weight)
        found = (model.wte(idx) * model.token_scale()).detach()
        assert found.dtype == dtype and torch.equal(found, theirs(idx))
    assert model.token_scale() == 34.0  # 33.94 in bfloat16


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"window": -1}, ["window=-1"]),
        ({"local_blocks": "lxg"}, ["local_blocks='lxg'"]),
        ({"local_blocks": ""}, ["window=5", "local_blocks=''"]),
        ({"local_blocks": "gg"}, ["window=5", "local_blocks='gg'"]),
        ({"window": 0}, ["local_blocks=llg", "window"]),
        ({"window": 0, "local_blocks": ""}, ["local_rope_theta=10.0", "window"]),
        ({"local_rope_theta": -1.0}, ["local_rope_theta=-1.0"]),
        ({"rope_scaling": ()}, ["rope_scaling=()", "linear needs factor"]),
        ({"rope_scaling": (8.0, 1.0)}, ["linear needs factor"]),
        ({"rope_scaling": (0.0,)}, ["linear needs factor"]),
        ({"rope_scaling_kind": "llama3"}, ["llama3 needs factor,low_freq_factor"]),
        (
            {"rope_scaling_kind": "yarn", "rope_scaling": (8.0, 1.0, 32.0, 16.0, 1.0)},
            ["beta_slow", "beta_fast"],
        ),
        ({"attn_scale": -0.1}, ["attn_scale=-0.1"]),
        ({"embed_scale": 0.0}, ["embed_scale=0.0"]),
    ],
    ids=str,
)
def test_impossible_values_are_refused(keys, words):
    with pytest.raises(ConfigError) as error:
        replace(GEMMA, **keys)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("name", ["window", "attn_scale", "embed_scale", "activation"])
def test_export_refuses_what_no_supported_architecture_computes(name):
    plain = GPTConfig(
        vocab_size=40, norm_type="rms", position="rope", activation="swiglu", local_blocks=""
    )
    hf_config(plain)
    keys = {name: getattr(GEMMA, name)}
    if name == "window":
        keys["local_blocks"] = "l"
    with pytest.raises(HFError, match=name):
        hf_config(replace(plain, **keys))


@pytest.mark.parametrize("name", ["window", "attn_scale", "embed_scale", "local_rope_theta"])
def test_a_start_from_another_function_is_refused(name, tmp_path):
    from dataclasses import asdict

    from common.errors import CheckpointError

    other = replace(GEMMA, **{name: 2 * getattr(GEMMA, name)})
    check_same_model(asdict(GEMMA), GEMMA, tmp_path, SAME_FUNCTION)
    with pytest.raises(CheckpointError, match=name):
        check_same_model(asdict(other), GEMMA, tmp_path, SAME_FUNCTION)
