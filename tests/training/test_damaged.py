"""Checkpoints that were damaged or made by hand: one line that names the entry, before anything
large is built.

python -m pytest tests/training/test_damaged.py
"""

import copy
import math
import time
import zipfile

import pytest
import torch
from helpers import TINY, contents, write_items

from common.errors import CheckpointError
from load import load_model
from training.checkpoint import LAST, find_checkpoint, read_checkpoint

WEIGHT = "blocks.0.attn.qkv.weight"
MISSING = object()


@pytest.fixture(scope="module")
def state(tiny_data, tmp_path_factory):
    """What a run of two steps saves."""
    import train

    out = tmp_path_factory.mktemp("damaged") / "run"
    words = [*TINY, "--max_iters=2", f"--data_dir={tiny_data}", f"--out_dir={out}"]
    train.main(words)
    return torch.load(out / LAST, weights_only=True)


def damaged(state: dict, place: tuple, value: object) -> dict:
    """A copy of `state` with another value at `place`; a function makes it of the old one."""
    state = copy.deepcopy(state)
    inner = state
    for name in place[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value(inner[place[-1]]) if callable(value) else value
    return state


def test_a_compressed_entry_is_refused_unread(state, tmp_path):
    """torch.save compresses nothing: 100 MB of zeros here could be any number."""
    path = tmp_path / LAST
    torch.save(state, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/99", bytes(100 << 20))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="archive/data/99"):
        read_checkpoint(path)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("config",), [1], "`config`"),
        (("config",), {1: 2}, "`config`"),
        (("config", "seed"), torch.ones(3), "`config`"),
        (("step",), -3, "`step`"),
        (("model",), [1], "`model`"),
        (("model", WEIGHT), "x", "`model`"),
        (("model", WEIGHT), lambda weight: weight.to_sparse(), "`model`"),
        (("model", WEIGHT), lambda weight: torch.zeros(1).expand(1 << 40), "`model`"),
        (("optimizer",), [], "`optimizer`"),
        (("scaler",), [1], "`scaler`"),
        (("meta",), [1], "`meta`"),
        (("meta",), {"tokenizer": "hf", "path": 3}, "`meta`"),
        (("best_val_loss",), math.nan, "`best_val_loss`"),
        (("stability",), 5, "`stability`"),
        (("stability",), {"recent": 3}, "`stability`"),
        (("model", WEIGHT), lambda weight: weight * math.nan, f"{WEIGHT} is not finite"),
        (
            ("optimizer", WEIGHT, "exp_avg"),
            lambda moment: moment / 0,
            f"optimizer.{WEIGHT}.exp_avg is not finite",
        ),
    ],
)
def test_a_damaged_entry_is_named(state, tmp_path, place, value, part):
    path = tmp_path / LAST
    torch.save(damaged(state, place, value), path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value) and part in str(caught.value)
    # as a run that is resumed finds it, whose other checkpoint is good
    torch.save(state, tmp_path / "ckpt_best.pt")
    found = find_checkpoint(tmp_path, "auto")
    assert found.path.name == "ckpt_best.pt" and part in found.problem


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("config", "n_layer"), 1 << 30, "its config asks for 1073741824"),
        (("config", "n_layer"), 2000, "it holds 2 blocks"),
        (("config", "n_layer"), "2", "n_layer must be int"),
        (("config", "n_embd"), 1 << 19, "its config asks for"),
        (("config", "vocab_size"), 1 << 24, "its config asks for"),
        (("config", "norm_type"), ["rms"], "its config is damaged"),
        (("config", "norm_plan"), "R" * 100_000, "need 5 letters"),
        (("config", "norm_eps"), math.nan, "norm_eps must be float"),
        (("config",), {}, "its config asks for"),
        (("model", WEIGHT), MISSING, f"{WEIGHT} is missing"),
        (("model", WEIGHT), lambda weight: weight.long(), f"{WEIGHT} is torch.int64"),
    ],
)
def test_config_and_weights_that_do_not_fit(state, tmp_path, place, value, part):
    path = tmp_path / LAST
    torch.save(damaged(state, place, value), path)
    with pytest.raises(CheckpointError) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value) and part in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_context_beyond_this_machine(state, tmp_path):
    """Rotary positions have a table, which is no weight."""
    state = copy.deepcopy(state)
    state["config"] |= {"position": "rope", "block_size": 1 << 30, "n_head": 1}
    del state["model"]["wpe.weight"]
    path = tmp_path / LAST
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"block_size=1073741824 takes .* GB"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("optimizer", WEIGHT), [1], "the state of its optimizer"),
        (("optimizer", "foreign"), {}, "the state of its optimizer"),
        (("optimizer", WEIGHT, "exp_avg"), torch.ones(1), "the state of its optimizer"),
        (("optimizer", WEIGHT, "exp_avg"), MISSING, "the state of its optimizer"),
        (("optimizer", WEIGHT, "step"), "x", "the state of its optimizer"),
        (("format",), 1, "the state of its optimizer"),
        (("scaler",), MISSING, "holds weights only"),
        (("provenance",), ["no place"], "`provenance`"),
        (("config", "dtype"), [1], "its config is damaged"),
    ],
)
def test_nothing_is_lost_in_a_resume(state, tmp_path, tiny_data, launch, place, value, part):
    run = tmp_path / "run"
    run.mkdir()
    torch.save(damaged(state, place, value), run / LAST)
    (run / "lock").touch()
    before = contents(run)
    job = launch(*TINY, "--max_iters=4", f"--data_dir={tiny_data}", f"--out_dir={run}")
    assert job.wait() == [1], job.text()
    errors = [line for line in job.text().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and part in errors[0] and "Traceback" not in job.text(), job.text()
    assert contents(run) == before


@pytest.mark.parametrize("program", ["sample", "hellaswag"])
def test_a_tokenizer_of_another_model(state, tmp_path, launch, program):
    path = tmp_path / LAST
    torch.save(damaged(state, ("meta",), {"tokenizer": "bytes"}), path)
    items = write_items(tmp_path / "items.jsonl", 2)
    words = [f"--data={items}"] if program == "hellaswag" else ["--prompt=a"]
    job = launch(path, *words, "--device=cpu", program=program)
    assert job.wait() == [1] and "Traceback" not in job.text()
    assert "the model has 60 tokens, its tokenizer 257" in job.text()


def test_weights_that_became_infinite_are_not_saved(launch, tiny_data, tmp_path):
    """Losses and gradients of the step are finite; its update is not."""
    words = (*TINY, "--max_iters=3", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    patch = ("infinite_weight", {"step": 3})
    job = launch(*words, "--checkpoint_interval=2", patch=patch)
    assert job.wait() == [1] and "Traceback" not in job.text()
    assert "wte.weight is not finite; it was not saved, the last checkpoint" in job.text()
    assert read_checkpoint(tmp_path / "run" / LAST)["step"] == 2
