"""An RMSNorm model that is trained in a second on sequences it can learn, for the tests of coupling
after training.
"""

from pathlib import Path

import torch
from helpers import chars_meta, save_model

from model import GPT, GPTConfig
from training.checkpoint import BEST

SHAPE = GPTConfig(
    vocab_size=64,
    n_vocab=60,
    block_size=24,
    n_layer=3,
    n_head=2,
    n_embd=32,
    norm_type="rms",
    position="rope",
    activation="swiglu",
    init_std=0.1,
)
L = SHAPE.n_layer


def sequences(count: int, seed: int) -> torch.Tensor:
    """Token ids (count, 24) that can be learned: each is one to three more than the one before."""
    steps = torch.randint(1, 4, (count, 24), generator=torch.Generator().manual_seed(seed))
    return steps.cumsum(1) % 60


def train() -> GPT:
    model = GPT(SHAPE, seed=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(60):
        idx = sequences(16, step)
        model(idx[:, :-1], idx[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def write_run(model: GPT, folder: Path) -> Path:
    """A run folder with the model's best checkpoint, and a text that it knows."""
    meta = chars_meta(60)
    save_model(folder / BEST, model, meta)
    text = "".join(meta["chars"][i] for i in sequences(200, 7).flatten())
    (folder / "text.txt").write_text(text)
    return folder
