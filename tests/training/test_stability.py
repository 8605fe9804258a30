"""Clipped steps, spikes and the largest attention logit, against their definitions; the bar.

python -m pytest tests/training/test_stability.py
"""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch
from helpers import draw, shake

from model import GPT, GPTConfig
from training import stability
from training.log import RunLog
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
    for queries in (2, 1024):  # at once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stability, "QUERIES", queries)
            assert float(largest_logit(q, k, mask, 0.25)) == pytest.approx(largest / 4, rel=1e-6)
            default = float(largest_logit(q, k, mask, None))
            assert default == pytest.approx(largest / 8**0.5, rel=1e-6)


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
    before, expected = model(idx), []
    for layer in (block.attn for block in model.blocks):

        def attend(q, k, v, mask, layer=layer):
            expected.append(largest_logit(q, k, mask, layer.scale).item())
            return type(layer).attend(layer, q, k, v, mask)

        layer.attend = attend
    assert torch.equal(model(idx), before)
    for layer in (block.attn for block in model.blocks):
        del layer.attend
    assert largest_attention_logit(model, idx) == pytest.approx(max(expected), rel=1e-6)
    # Nothing of the measurement is left.
    assert torch.equal(model(idx), before) and model.training and len(expected) == 2


def test_the_bar_of_a_terminal_moves_at_each_step(tmp_path, monkeypatch):
    """It shows what is known of the last logged step; on a CPU there is no MFU."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log = RunLog(tmp_path, 10, True)
    log.open({"tracker": "off"}, None, {}, [])
    facts = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tok_per_s": 1500.0, "mfu": None}
    log.step(step=1, **facts)
    for step in (1, 2, 3):
        log.advance(step)
    assert log.bar.n == 3 and log.bar.total == 10
    assert log.bar.postfix == "loss 2.5000  lr 1.00e-03  grad norm 1.000  1.5 k tokens/s"
    log.close("done")
