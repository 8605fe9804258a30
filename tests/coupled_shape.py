"""A small coupled model's shape and a batch for it."""

import torch

from model import GPTConfig

SHAPE = GPTConfig(
    vocab_size=32, block_size=8, n_layer=4, n_head=2, n_embd=16, init_std=0.2, norm_type="coupled"
)
TOKENS = torch.randint(SHAPE.vocab_size, (3, 9), generator=torch.Generator().manual_seed(5))
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
