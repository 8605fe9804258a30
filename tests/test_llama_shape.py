"""Every norm type in the Llama shape: rotary positions, SwiGLU, grouped heads, QK-norm.

python -m pytest tests/test_llama_shape.py
"""

import math
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig, KVCache

SHAPE = GPTConfig(
    vocab_size=64,
    block_size=32,
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=32,
    head_dim=12,
    n_inner=48,
    activation="swiglu",
    position="rope",
    qk_norm="head",
    init_std=0.15,
)
NORMS = {
    "layer": {},
    "rms": {"norm_groups": 2},
    "coupled": {"coupled_alpha": 1.1},
    "cbwc": {},
    "dyt": {},
    "taper": {"taper_warmup": 0.2, "taper_end": 0.8},
}


def tokens(batch, length):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(3))


def train(norm_type, bias, steps=20, dtype=torch.float64):
    """(model, losses) after AdamW on random tokens that repeat, so that the loss can fall."""
    model = GPT(replace(SHAPE, norm_type=norm_type, bias=bias, **NORMS[norm_type])).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data = tokens(4, 33)
    losses = []
    for step in range(1, steps + 1):
        model.set_step(step, 20)
        loss, aux = model(data[:, :-1], data[:, 1:])
        optimizer.zero_grad()
        (loss + aux).backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("bias", [False, True])
def test_cbwc_trains_as_layer_norm_does(bias):
    layer, expected = train("layer", bias)
    cbwc, losses = train("cbwc", bias)
    assert max(abs(loss - other) for loss, other in zip(losses, expected, strict=True)) <= 1e-12
    idx = tokens(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(cbwc.eval()(idx), layer.eval()(idx), rtol=1e-12, atol=1e-12)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize("norm_type", [name for name in NORMS if name not in ("layer", "cbwc")])
def test_every_other_norm_type_trains(norm_type):
    _, losses = train(norm_type, bias=False, dtype=torch.float32)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("norm_type", NORMS)
def test_cache_is_no_cache(norm_type):
    model, _ = train(norm_type, bias=True, steps=10)  # a taper is half way
    model.eval()
    idx, cache = tokens(2, 32), KVCache(model.config, 2, 32, model.wte.weight)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in idx.split([7, 1, 1, 9, 14], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(idx), rtol=1e-12, atol=1e-12)
    # 40 new tokens in a context of 32: the window is cut, and read again, on the way
    greedy = [
        model.generate(idx[:, :7], 40, temperature=0, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*greedy)
