"""What nanoGPT leaves: data (train.bin, val.bin, meta.pkl), checkpoints, config files and keys.

python -m pytest tests/data/test_nanogpt.py
"""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TINY, Malice, draw, val_losses
from torch import Tensor

from common.errors import CheckpointError, ConfigError, DataError
from configurator import parse_args
from data.shards import read_meta
from load import load_model
from sample import SampleConfig
from train import TrainConfig

# 65 characters, as Tiny Shakespeare has
CHARS = sorted({chr(code) for code in range(ord(" "), ord(" ") + 64)} | {"\n"})


def write_nanogpt(folder: Path, meta: object = None) -> Path:
    """Write what data/shakespeare_char/prepare.py of nanoGPT writes; without `meta` no meta.pkl."""
    folder.mkdir(exist_ok=True)
    random = np.random.RandomState(0)
    for split, count in (("train", 8000), ("val", 1000)):
        tokens = np.cumsum(random.randint(1, 4, count)) % len(CHARS)
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def meta_of(chars: list[str]) -> dict:
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {char: index for index, char in enumerate(chars)},
    }


def test_character_data_is_trained_with_its_vocabulary(train_ok, tmp_path):
    data = write_nanogpt(tmp_path / "data", meta_of(CHARS))
    run = tmp_path / "run"
    train_ok(*TINY, "--sample_tokens=20", f"--data_dir={data}", f"--out_dir={run}")
    config = json.loads((run / "config.json").read_text())
    assert (config["n_vocab"], config["vocab_size"]) == (65, 128)
    printed = train_ok(run, "--prompt=TO BE", "--max_new_tokens=30", program="sample").text()
    for text in ((run / "samples.txt").read_text()[:-1], printed[:-1]):
        assert len(text) > 25 and set(text) <= set(CHARS)
    assert printed.startswith("TO BE")


def test_without_meta_the_tokens_are_gpt2s_and_the_start_says_so(train_ok, train_fails, tmp_path):
    data = write_nanogpt(tmp_path / "data")
    job = train_ok(*TINY, "--max_iters=2", f"--data_dir={data}", f"--out_dir={tmp_path / 'run'}")
    assert json.loads((tmp_path / "run/config.json").read_text())["vocab_size"] == 50304
    assert "taken for GPT-2's" in job.text().partition("step 0")[0]
    np.full(99, 50257, np.uint16).tofile(data / "val.bin")
    told = train_fails(*TINY, f"--data_dir={data}", f"--out_dir={tmp_path / 'another'}")
    assert "50257 is beyond the vocabulary of 50257" in told and not (tmp_path / "another").exists()


GOOD, HARM = meta_of(CHARS), Malice(Path("harm"))
REFUSED = {
    "code": pickle.dumps(HARM),
    "code beside it": pickle.dumps(GOOD | {"more": HARM}),
    "an array": pickle.dumps(GOOD | {"more": np.zeros(1)}),
    "torn": pickle.dumps(GOOD)[:-9],
    "empty": b"",
    "text": b"text",
    "a list": pickle.dumps([1]),
    "no characters": pickle.dumps({"vocab_size": 65}),
    "too small": pickle.dumps(GOOD | {"vocab_size": 64}),
    "too large": pickle.dumps(GOOD | {"vocab_size": 10**9}),
    "another stoi": pickle.dumps(GOOD | {"stoi": {}}),
    "words": pickle.dumps(meta_of(["a", "word"])),
    "half a surrogate pair": pickle.dumps(meta_of(["a", "\ud800"])),
    "bytes": pickle.dumps(meta_of([b"a"])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_meta_pkl_that_is_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    Path("meta.pkl").write_bytes(REFUSED[case])
    with pytest.raises(DataError, match=r"meta\.pkl: "):
        read_meta(tmp_path)
    assert not Path("harm").exists()


# ------------------------------------------------------------------------------------- checkpoints

ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 65}


def state_of(bias: bool) -> dict[str, Tensor]:
    """Weights as nanoGPT names and stores them, float32."""
    shapes = {"wte.weight": (65, 16), "wpe.weight": (12, 16), "ln_f.weight": (16,)}
    for block in ("h.0.", "h.1."):
        shapes |= {f"{block}{name}.weight": (16,) for name in ("ln_1", "ln_2")}
        shapes |= {f"{block}attn.c_attn.weight": (48, 16), f"{block}attn.c_proj.weight": (16, 16)}
        shapes |= {f"{block}mlp.c_fc.weight": (64, 16), f"{block}mlp.c_proj.weight": (16, 64)}
    weights = [name for name in shapes if not name.startswith("w")]
    if bias:
        shapes |= {name.replace("weight", "bias"): shapes[name][:1] for name in weights}
    return {
        name: 0.3 * draw(*shape, seed=seed).float() + (".ln_" in f".{name}")
        for seed, (name, shape) in enumerate(shapes.items())
    }


def reference(state: dict[str, Tensor], idx: Tensor) -> Tensor:
    """Logits of nanoGPT's model, from its formulas."""

    def layer(name: str, x: Tensor) -> Tensor:
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        if weight.dim() == 1:
            return F.layer_norm(x, (16,), weight, bias, 1e-5)
        return F.linear(x, weight, bias)

    x = state["wte.weight"][idx] + state["wpe.weight"][: idx.shape[1]]  # (B, T, C)
    for block in ("h.0", "h.1"):
        qkv = layer(f"{block}.attn.c_attn", layer(f"{block}.ln_1", x))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in qkv.split(16, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, C / H)
        x = x + layer(f"{block}.attn.c_proj", mixed.transpose(1, 2).flatten(2))
        inner = F.gelu(layer(f"{block}.mlp.c_fc", layer(f"{block}.ln_2", x)))
        x = x + layer(f"{block}.mlp.c_proj", inner)
    return layer("ln_f", x) @ state["wte.weight"].T


def write_checkpoint(folder: Path, bias: bool = False, prefix: str = "", **more: object) -> Path:
    state = state_of(bias)
    model = {f"{prefix}transformer.{name}": tensor for name, tensor in state.items()}
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    model[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
    args = {**ARGS, "bias": bias, "dropout": 0.2}
    saved = {"model": model, "optimizer": {}, "model_args": args, "iter_num": 7}
    saved |= {"best_val_loss": torch.tensor(1.0), "config": {"dataset": "missing"}}
    folder.mkdir(exist_ok=True)
    torch.save(saved | more, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize(("bias", "prefix"), [(True, ""), (False, "_orig_mod.")])
def test_a_checkpoint_is_the_same_function(tmp_path, bias, prefix):
    model = load_model(str(write_checkpoint(tmp_path, bias, prefix))).double()
    state = {name: tensor.double() for name, tensor in state_of(bias).items()}
    idx = torch.arange(24).view(2, 12) * 5 % 65
    torch.testing.assert_close(model(idx), reference(state, idx), rtol=0, atol=1e-12)


@pytest.mark.parametrize("entry", ["model", "model_args", "config"])
def test_a_damaged_checkpoint_is_refused(tmp_path, entry):
    with pytest.raises(CheckpointError, match=r"ckpt\.pt"):
        load_model(str(write_checkpoint(tmp_path, **{entry: [1]})))


def test_training_starts_from_a_checkpoint_of_its_shape(train_ok, tmp_path):
    """But for a shorter context; it goes on without the checkpoint. sample.py reads both."""
    data = write_nanogpt(tmp_path / "data", meta_of(CHARS))
    theirs = write_checkpoint(tmp_path / "theirs", config={"dataset": str(data)})
    words = [word for word in TINY if not word.startswith("--n_")]
    words += [f"--init_from={theirs}", f"--data_dir={data}", f"--out_dir={tmp_path / 'run'}"]
    train_ok(*words, "--block_size=8", "--max_iters=2")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert {name: config[name] for name in ARGS} == ARGS | {"block_size": 8, "vocab_size": 128}
    tokens = torch.from_numpy(np.fromfile(data / "val.bin", np.uint16).astype(np.int64))[:129]
    logits = reference(state_of(False), tokens[:-1].view(-1, 8))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:])
    assert val_losses(tmp_path / "run")[0] == pytest.approx(float(loss), abs=1e-5)
    (theirs / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    train_ok(*words, "--block_size=8", "--max_iters=4", "--init_from=resume")
    for model in (f"--out_dir={tmp_path / 'run'}", f"{tmp_path / 'ckpt.pt'}"):
        job = train_ok(model, "--start=TO BE", "--max_new_tokens=9", program="sample")
        assert "TO BE" in job.text()


# -------------------------------------------------------------------------------------------- keys

FILE = """
out_dir = 'out-shakespeare-char'
eval_iters = 200
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
batch_size = 64
block_size = 256
max_iters = 5000
lr_decay_iters = 600000
"""


def test_a_config_file_is_translated(tmp_path, capsys):
    file = tmp_path / "theirs.py"
    file.write_text(FILE)
    words = [str(file), "--lr_decay_iters=5000", "--init_from=scratch", "--block_size=128"]
    config, _ = parse_args(TrainConfig, words)
    assert config == TrainConfig(
        out_dir="out-shakespeare-char",
        eval_tokens=200 * 64 * 128,
        tracker_project="shakespeare-char",
        data_dir="data/shakespeare_char",
        batch_size=64,
        block_size=128,
        max_iters=5000,
    )
    assert "dataset is data_dir=data/shakespeare_char" in capsys.readouterr().err
    for words, ours in (
        ("--wandb_log=True", {"tracker": "wandb"}),
        ("--decay_lr=False", {"lr_schedule": "constant", "warmup_iters": 0}),
        ("--init_from=resume", {"resume": "out-shakespeare-char/ckpt_last.pt"}),
        # what comes later wins, and leaves nothing of what came before
        ("--init_from=resume --init_from=gpt2", {"resume": "auto", "init_from": "gpt2"}),
        ("--data_dir=data/mine", {"data_dir": "data/mine"}),
        ("--data_dir=data/mine --dataset=more", {"data_dir": "data/more"}),
    ):
        config, _ = parse_args(TrainConfig, [str(file), "--lr_decay_iters=5000", *words.split()])
        assert {name: getattr(config, name) for name in ours} == ours


def test_their_config_for_fine_tuning(tmp_path):
    """As theirs has it: a name made of the time, which is not needed, and a low constant rate."""
    file = tmp_path / "finetune_shakespeare.py"
    file.write_text(
        "import time\nwandb_run_name = 'ft-' + str(time.time())\ndataset = 'shakespeare'\n"
        "init_from = 'gpt2-xl'\nlearning_rate = 3e-5\ndecay_lr = False\n"
    )
    config, _ = parse_args(TrainConfig, [str(file)])
    assert (config.init_from, config.learning_rate) == ("gpt2-xl", 3e-5)
    assert (config.lr_schedule, config.data_dir) == ("constant", "data/shakespeare")


def test_what_means_nothing_here_is_refused_all_at_once(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("eval_only = True\nn_layers = 3\n")
    with pytest.raises(ConfigError) as caught:
        parse_args(TrainConfig, [str(file), "--lr_decay_iters=5", "--device=cuda:0"])
    for part in ("max_iters=1", "n_layer?", "max_iters=20345", "theirs.py:1", "cuda, mps"):
        assert part in str(caught.value)


def test_keys_of_their_sample():
    config, spec = parse_args(SampleConfig, ["--out_dir=out", "--start=FILE:x"], spec=True)
    assert (config.prompt, spec) == ("FILE:x", "out")
    assert parse_args(SampleConfig, ["--init_from=gpt2-xl"], spec=True)[1] == "gpt2-xl"
