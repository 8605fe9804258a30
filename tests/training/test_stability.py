"""Clipped steps, spikes and the largest attention logit, against their definitions.

python -m pytest tests/training/test_stability.py
"""

import math
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch
from helpers import draw, shake

from model import GPT, GPTConfig, rotate
from training.stability import SPIKE, WINDOW, Stability, largest_attention_logit, largest_logit

SHAPE = GPTConfig(
    vocab_size=11, block_size=12, n_layer=2, n_head=4, n_embd=16, norm_type="rms", attn_scale=0.3
)


def test_counts_are_those_of_the_definition():
    random = np.random.RandomState(0)
    losses = (3 + 0.3 * random.standard_normal(300)).tolist()
    losses[120] += 2
    losses[200] += 2
    norms = random.uniform(0, 2, 300).tolist()
    counted = Stability(grad_clip=1.0)
    for loss, norm in zip(losses, norms, strict=True):
        counted.add(loss, norm)
    spikes = [
        losses[step] > median(losses[step - WINDOW : step]) + SPIKE for step in range(WINDOW, 300)
    ]
    assert sum(spikes) >= 2
    expected = {"steps": 300, "clipped": np.mean(np.array(norms) > 1), "spikes": sum(spikes)}
    assert counted.record() == pytest.approx(expected)


def test_a_resumed_run_counts_as_if_it_had_not_been_stopped():
    losses = (3 + np.random.RandomState(1).standard_normal(150)).tolist()
    whole, first, second = Stability(1.0), Stability(1.0), Stability(1.0)
    for loss in losses:
        whole.add(loss, loss)
    for loss in losses[:77]:
        first.add(loss, loss)
    second.restore(first.state())
    for loss in losses[77:]:
        second.add(loss, loss)
    assert second.state() == whole.state()


def test_without_clipping_nothing_is_clipped():
    counted = Stability(grad_clip=0.0)
    counted.add(1.0, 100.0)
    assert counted.record()["clipped"] == 0
    counted.restore({})  # a checkpoint of before
    assert counted.record() == {"steps": 0, "clipped": 0.0, "spikes": 0}


@pytest.mark.parametrize("window", [0, 3])
def test_the_largest_logit_is_that_of_a_loop(window):
    q = draw(3, 4, 7, 8, seed=1)
    k = draw(3, 2, 7, 8, seed=2)  # two queries' heads share keys
    mask = None
    if window:
        mask = torch.ones(7, 7, dtype=torch.bool).tril().triu(1 - window)
    largest = -math.inf
    for b in range(3):
        for head in range(4):
            for query in range(7):
                first = max(0, query - window + 1) if window else 0
                for key in range(first, query + 1):
                    product = float(q[b, head, query] @ k[b, head // 2, key])
                    largest = max(largest, 0.25 * product)
    assert float(largest_logit(q, k, mask, 0.25)) == pytest.approx(largest, rel=1e-6)
    default = float(largest_logit(q, k, mask, None))
    assert default == pytest.approx(largest / 0.25 / 8**0.5, rel=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"window": 4, "local_blocks": "lg"},
        {"qk_norm": "head"},
        {"position": "rope", "n_kv_head": 2},
    ],
)
def test_of_a_model_it_is_the_largest_of_all_layers(keys):
    model = shake(GPT(replace(SHAPE, **keys)).double())
    idx = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    expected = []
    for layer in (block.attn for block in model.blocks):

        def note(layer, inputs, output):
            y, rope, _ = inputs
            widths = [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
            q, k, _ = layer.qkv(y).split(widths, dim=-1)
            q = layer.split_heads(q, layer.q_norm)
            k = layer.split_heads(k, layer.k_norm)
            if rope is not None:
                q, k = rotate(q, *rope), rotate(k, *rope)
            mask = layer.mask(12, 12, y.device)
            expected.append(largest_logit(q, k, mask, layer.scale).item())

        layer.register_forward_hook(note)
    before = model(idx)
    expected.clear()
    found = largest_attention_logit(model, idx)
    assert found == pytest.approx(max(expected), rel=1e-6)
    # Nothing of the measurement is left.
    assert torch.equal(model(idx), before) and model.training
    assert not any("attend" in vars(block.attn) for block in model.blocks)
