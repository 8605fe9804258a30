"""DDP and compilation together.

python -m pytest tests/training/test_ddp.py
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from common import distributed
from model import GPT, GPTConfig


@pytest.mark.parametrize(("bucket", "graphs"), [(distributed.BUCKET, 2), (25, 3)])
def test_the_graph_is_cut_only_between_large_buckets(one_rank, monkeypatch, bucket, graphs):
    """The block has 48 MiB of weights. DDP makes the last MiB a bucket of its own."""
    monkeypatch.setattr(distributed, "BUCKET", bucket)
    config = GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=2, n_embd=1024)
    model = GPT(config, seed=1)
    found = CompileCounter()
    forward = distributed.replicate(torch.compile(model, backend=found, dynamic=False))
    x = torch.arange(8)[None]
    loss, _ = forward(x, x)
    assert found.frame_count == graphs
    assert torch.equal(loss, model(x, x)[0])
