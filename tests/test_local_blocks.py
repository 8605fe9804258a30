"""Local blocks, two rotary bases, gated GELU and the scales of scores and embeddings, as Gemma 3
and OLMo 3 have them, against an independent model in float64 and against transformers.

    python -m pytest tests/test_local_blocks.py
"""

import math
from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from helpers import close, draw, shake

import model as model_file
from common.errors import CheckpointError, ConfigError, HFError
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


def gpt(config):
    return shake(GPT(config)).eval()


def tokens(*shape, seed=0):
    return torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------- the cache, plain paths


def test_plain_attention_wherever_the_window_cuts_nothing(monkeypatch):
    """No mask where all old tokens are seen; keys are read within the window and nowhere else.

    Grouped keys are copied for their heads with a mask, and only then: so that no call falls to the
    kernel that keeps all scores.
    """
    calls = []

    def attention(q, k, v, attn_mask, is_causal, **keys):
        calls.append((q.shape[2], k.shape[2], attn_mask is not None, is_causal, keys["scale"]))
        # Flash attention takes no mask, memory-efficient attention no grouped heads.
        assert (k.shape[1] == q.shape[1]) == (attn_mask is not None) == (not keys["enable_gqa"])
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
        model = GPT(replace(GEMMA, embed_scale=1152**0.5)).to(dtype)
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
        ({"local_blocks": "gg"}, ["window=5", "local_blocks='gg'"]),
        ({"window": 0}, ["window=0", "local_blocks='llg'"]),
        ({"window": 0, "local_blocks": ""}, ["local_rope_theta=10.0"]),
        ({"rope_scaling": ()}, ["rope_scaling=()", "linear needs factor"]),
        ({"rope_scaling": (8.0, 1.0)}, ["linear needs factor"]),
        ({"rope_scaling": (0.0,)}, ["rope_scaling=(0.0,)"]),
        ({"attn_scale": -0.1}, ["attn_scale=-0.1"]),
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
    other = replace(GEMMA, **{name: 2 * getattr(GEMMA, name)})
    check_same_model(asdict(GEMMA), GEMMA, tmp_path, SAME_FUNCTION)
    with pytest.raises(CheckpointError, match=name):
        check_same_model(asdict(other), GEMMA, tmp_path, SAME_FUNCTION)
