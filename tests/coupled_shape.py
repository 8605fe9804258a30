"""A small coupled model's shape and a batch for it."""

from dataclasses import replace

from helpers import shake, tokens

from model import GPT, GPTConfig

SHAPE = GPTConfig(
    vocab_size=32, block_size=8, n_layer=4, n_head=2, n_embd=16, init_std=0.2, norm_type="coupled"
)
TOKENS = tokens(3, 9, seed=5)
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def gpt(**keys) -> GPT:
    return shake(GPT(replace(SHAPE, **keys)))
