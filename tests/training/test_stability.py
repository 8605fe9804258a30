"""Clipped steps, spikes and the largest attention logit, against their definitions.

python -m pytest tests/training/test_stability.py
"""

from statistics import median

import numpy as np
import pytest
import torch
from helpers import draw, shake, tokens

from model import GPT, GPTConfig
from training.stability import SPIKE, WINDOW, Stability, largest_attention_logit, largest_logit

SHAPE = GPTConfig(
    vocab_size=11, block_size=12, n_layer=2, n_head=4, n_embd=16, norm_type="rms", attn_scale=0.3
)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_counts_are_those_of_the_definition(clip):
    """In one go, and stopped after step 177."""
    random = np.random.RandomState(0)
    losses = (3 + 0.3 * random.standard_normal(300)).tolist()
    losses[120] += 2
    losses[200] += 2
    norms = random.uniform(0, 2, 300).tolist()
    whole, counted = Stability(clip), Stability(clip)
    for step, pair in enumerate(zip(losses, norms, strict=True)):
        if step == 177:
            counted = Stability(clip, **counted.state())
        counted.add(*pair)
        whole.add(*pair)
    assert counted.state() == whole.state()
    spikes = [
        losses[step] > median(losses[step - WINDOW : step]) + SPIKE for step in range(WINDOW, 300)
    ]
    assert sum(spikes) >= 2
    clipped = np.mean(np.array(norms) > clip) if clip else 0
    assert counted.record() == pytest.approx(
        {"steps": 300, "clipped": clipped, "spikes": sum(spikes)}
    )


@pytest.mark.parametrize("window", [0, 3])
def test_the_largest_logit_is_that_of_all_scores(window):
    q = draw(3, 4, 7, 8, seed=1)
    k = draw(3, 2, 7, 8, seed=2)  # two queries' heads share keys
    sees = torch.ones(7, 7, dtype=torch.bool).tril()
    if window:
        sees = sees.triu(1 - window)
    products = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1))
    largest = float(products[..., sees].max())
    mask = sees if window else None
    assert float(largest_logit(q, k, mask, 0.25)) == pytest.approx(largest / 4, rel=1e-6)
    assert float(largest_logit(q, k, mask, None)) == pytest.approx(largest / 8**0.5, rel=1e-6)


def test_of_a_model_it_is_the_largest_of_all_layers():
    model = shake(GPT(SHAPE).double())
    idx = tokens(3, 12, below=11)
    before, computed = largest_attention_logit(model, idx), model(idx)
    for block in model.blocks:
        block.attn.qkv.weight.data[:16] *= 100  # queries
        assert largest_attention_logit(model, idx) > 20 * before
        block.attn.qkv.weight.data[:16] /= 100
    # Nothing of the measurement is left.
    assert torch.allclose(model(idx)[0], computed[0]) and model.training
