"""Checkpoints: what is saved is read, crashes, files that are damaged or made by hand.

    python -m pytest tests/training/test_checkpoint.py

A damaged file ends in one line that names the entry.
"""

import copy
import math
import os
import re
import shutil
import signal
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import TINY, Malice, contents, same

import train
from common.errors import CheckpointError, UserError
from load import load_model
from model import GPTConfig
from training.checkpoint import (
    BEST,
    LAST,
    check_same_model,
    find_checkpoint,
    load_moments,
    model_config,
    moments_of,
    read_checkpoint,
    save_checkpoint,
)
from training.optim import make_optimizer

WEIGHT = "blocks.0.attn.qkv.weight"
MISSING = object()
# Forms of a weight whose numbers are not, or not all, in the tensor itself
STRANGE = (
    lambda old: old.to(torch.float8_e4m3fn),
    lambda old: old.to(torch.float8_e5m2),
    lambda old: torch.quantize_per_tensor(old, 0.1, 0, torch.qint8),
    lambda old: torch.nested.nested_tensor([old, old]),
    lambda old: old.to("meta"),
    lambda old: old.to_sparse(),
)
WORDS = (*TINY, "--max_iters=2", "--norm_type=coupled", "--coupled_span=2", "--bias=True")


@pytest.fixture(scope="module")
def state(tiny_data, tmp_path_factory):
    """What a run of two steps saves."""
    out = tmp_path_factory.mktemp("saved") / "run"
    train.main([*WORDS, f"--data_dir={tiny_data}", f"--out_dir={out}"])
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


def test_round_trip(state, tmp_path):
    save_checkpoint(tmp_path / LAST, state)
    back = read_checkpoint(tmp_path / LAST)
    assert same(back, {"format": 2, **state})
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    model = load_model(str(tmp_path / LAST))
    assert model.config == model_config(state["config"], tmp_path)
    assert model.meta == state["meta"] and not model.training
    assert same(dict(model.state_dict()), state["model"])
    optimizer = make_optimizer(model, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    parameters = dict(model.named_parameters())
    load_moments(tmp_path / LAST, back, parameters, optimizer)
    assert same(moments_of(parameters, optimizer), state["optimizer"])


@pytest.mark.parametrize("place", ["torch.save", "os.replace"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), (CheckpointError, "last.pt.*No space left")),
        # as torch says it
        (RuntimeError("[enforce fail at inline_container.cc]"), (CheckpointError, "may be full")),
        (RuntimeError("boom"), (RuntimeError, "boom")),
        (KeyboardInterrupt(), (KeyboardInterrupt, "^$")),
    ],
    ids=repr,
)
def test_a_crash_while_saving_leaves_the_old_file(state, tmp_path, place, error, raised):
    path = tmp_path / LAST
    save_checkpoint(path, state)
    old = path.read_bytes()
    with mock.patch(place, side_effect=error), pytest.raises(raised[0], match=raised[1]):
        save_checkpoint(path, state | {"step": 8})
    assert path.read_bytes() == old
    save_checkpoint(path, state | {"step": 9})  # and what is left of it is not in the way
    assert read_checkpoint(path)["step"] == 9 and list(tmp_path.iterdir()) == [path]


def test_truncated_or_with_a_flipped_byte(state, tmp_path):
    """Refused in words, or harmless (in padding): never another state, never another exception."""
    path, refused = tmp_path / LAST, 0
    save_checkpoint(path, state)
    whole = path.read_bytes()
    for length in {0, 1, 4, *range(0, len(whole), len(whole) // 50), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=LAST):
            read_checkpoint(path)
    # every byte of an entry in the archive's directory, and others elsewhere
    entry = whole.find(b"PK\x01\x02")
    tensor = whole.find(b"PK\x01\x02", whole.find(b"/data/0", entry))
    places = [first + place for first in (entry, tensor) for place in range(60)]
    places += range(0, len(whole), len(whole) // 100)
    for place in places:
        torn = bytearray(whole)
        torn[place] ^= 0xFF
        path.write_bytes(torn)
        try:
            assert same(read_checkpoint(path), {"format": 2, **state}), place
        except CheckpointError:
            refused += 1
    assert refused > len(places) // 2


def test_a_foreign_pickle_is_never_executed(state, tmp_path):
    mark, path = tmp_path / "executed", tmp_path / LAST
    malicious = {**state, "meta": Malice(mark)}
    torch.save(malicious, path)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        read_checkpoint(path)
    torch.save(malicious, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=LAST):
        read_checkpoint(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # so it was malicious


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n" * 100,
        b"PK\x05\x06" + 18 * b"\0",
        [1, 2],
        {"wte.weight": torch.ones(2)},
        {"model": {}, "config": {}},
    ],
)
def test_not_a_checkpoint_at_all(content, tmp_path):
    write = Path.write_bytes if isinstance(content, bytes) else lambda to, it: torch.save(it, to)
    write(tmp_path / LAST, content)
    with pytest.raises(CheckpointError, match=r"not a.* checkpoint"):
        read_checkpoint(tmp_path / LAST)


def test_a_compressed_entry_is_refused(state, tmp_path):
    """torch.save compresses nothing: 1 MB of zeros here could be any number."""
    torch.save(state, tmp_path / LAST)
    with zipfile.ZipFile(tmp_path / LAST, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/99", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="archive/data/99"):
        read_checkpoint(tmp_path / LAST)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"format": 3}, "format 3, this program reads 2"), ({"shards": {}}, "commit d806d57")],
)
def test_what_this_program_does_not_read_is_refused(change, word, state, tmp_path):
    """It is the latest checkpoint all the same: a run does not go on from an earlier one."""
    torch.save({**state, **change}, tmp_path / LAST)
    save_checkpoint(tmp_path / BEST, state)
    with pytest.raises(UserError, match=word):
        read_checkpoint(tmp_path / LAST)
    with pytest.raises(UserError, match=word):
        find_checkpoint(tmp_path, "auto")


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantized tensor|TypedStorage)")
@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("config",), [1], "`config` is damaged"),
        (("step",), -3, "`step` is damaged"),
        (("config", "norm_type"), ["rms"], "`config` is damaged"),
        (("config", "arm"), torch.ones(2), "`config` is damaged"),
        (("model",), [1], "`model` is damaged"),
        (("model", WEIGHT), "x", "`model` is damaged"),
        *(
            (place, form, f"`{place[0]}` is damaged")
            for place in (("model", WEIGHT), ("optimizer", WEIGHT, "exp_avg"))
            for form in STRANGE
        ),
        (("optimizer",), [], "`optimizer` is damaged"),
        (("best_val_loss",), math.nan, "`best_val_loss` is damaged"),
        (("config", "dtype"), "float16", "`scaler` is damaged"),  # it is empty
        (("model", WEIGHT), lambda weight: weight * math.nan, f"{WEIGHT} is not finite"),
        (
            ("optimizer", WEIGHT, "exp_avg"),
            lambda moment: moment / 0,
            f"optimizer.{WEIGHT}.exp_avg is not finite",
        ),
    ],
)
def test_a_damaged_entry_is_named(state, tmp_path, place, value, part):
    """By whoever reads the file. A run that is resumed takes its other checkpoint."""
    path = tmp_path / LAST
    torch.save(damaged(state, place, value), path)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*{re.escape(part)}"):
        read_checkpoint(path)
    torch.save(state, tmp_path / BEST)
    found = find_checkpoint(tmp_path, "auto")
    assert found.path.name == BEST and part in found.problem


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("config", "n_layer"), 1 << 30, "GB of memory"),
        (("config", "n_layer"), 3, "blocks.2.attn.proj.bias is missing"),
        (("config", "vocab_size"), 128, "wte.weight is (64, 32) there, (128, 32) here"),
        (("config", "n_layer"), "2", "n_layer must be int"),
        *(
            (
                ("config", name),
                lambda _: 10**400,
                f"{name} must be int, got an integer of more than 64 bits",
            )
            for name in ("n_layer", "vocab_size", "coupled_first")
        ),
        # A table of positions that this machine cannot hold
        (("config",), lambda config: config | {"position": "rope", "block_size": 1 << 34}, "GB"),
        (("config", "norm_plan"), "R" * 100_000, "need 5 letters"),
        (("config", "norm_eps"), math.nan, "norm_eps must be float"),
        (("model", WEIGHT), MISSING, f"{WEIGHT} is missing"),
        (("model", WEIGHT), lambda weight: weight[:3], f"{WEIGHT} is (3, 32) there, (96, 32)"),
        (("model", "extra"), torch.ones(3), "extra is not part of this model"),
    ],
)
def test_config_and_weights_that_do_not_fit(state, tmp_path, place, value, part):
    path = tmp_path / LAST
    torch.save(damaged(state, place, value), path)
    with pytest.raises(
        CheckpointError, match=f"{re.escape(str(path))}.*{re.escape(part)}"
    ) as caught:
        load_model(str(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("optimizer",), {}, "the state of its optimizer lacks wte.weight"),
        (("optimizer", WEIGHT), MISSING, f"the state of its optimizer lacks {WEIGHT}"),
        (("optimizer", WEIGHT), [1], "the state of its optimizer"),
        (("optimizer", "foreign"), {}, "the state of its optimizer"),
        (("optimizer", WEIGHT, "exp_avg"), torch.ones(1), "the state of its optimizer"),
        (("optimizer", WEIGHT, "exp_avg"), MISSING, "the state of its optimizer"),
        (("optimizer", WEIGHT, "exp_avg"), lambda old: old.int(), "the state of its optimizer"),
        (("format",), 1, "the state of its optimizer"),
        (("scaler",), MISSING, "holds weights only"),
        (("config", "dtype"), "float17", "its config: dtype is one of"),
        (("config", "dtype"), 32, "its config: dtype must be str"),
    ],
)
def test_nothing_is_lost_in_a_resume(state, tmp_path, tiny_data, place, value, part):
    run = tmp_path / "run"
    run.mkdir()
    torch.save(damaged(state, place, value), run / LAST)
    (run / "lock").touch()
    before = contents(run)
    with pytest.raises(CheckpointError, match=part):
        train.main([*WORDS, "--max_iters=4", f"--data_dir={tiny_data}", f"--out_dir={run}"])
    assert contents(run) == before


@pytest.fixture
def soon():
    """What waits for ever ends."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (LAST, "--resume=auto"),
        ("config.json", f"--init_from={BEST}"),
        ("config.json", "--init_from=resume"),  # nanoGPT's word
        ("log.jsonl", "--resume=auto"),
        ("lock", "--resume=auto"),
        ("lock.owner", "--resume=auto"),
        ("../data/tiny_train_000000.bin", "--resume=auto"),
    ],
)
def test_a_pipe_ends_in_one_line(state, tiny_data, tmp_path, soon, name, word):
    """To open it waits for its writer."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(tiny_data, tmp_path / "data")
    save_checkpoint(run / LAST, state)
    path = run / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    words = [*WORDS, f"--data_dir={tmp_path / 'data'}", f"--out_dir={run}", word]
    with pytest.raises(UserError, match=f"{path.name}: this is a device, a pipe or a socket"):
        train.main(words)


@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 1), ("fsdp", 2)])
def test_weights_that_became_infinite_are_not_saved(
    train_fails, tiny_data, tmp_path, parallel, ranks
):
    """Losses and gradients of the step are finite; its update is not. All ranks stop, whichever
    holds the weight.
    """
    words = (*TINY, "--max_iters=3", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    words += ("--checkpoint_interval=2", f"--parallel={parallel}")
    told = train_fails(*words, ranks=ranks, patch=("infinite_weight", {"step": 3}))
    assert "wte.weight is not finite; it was not saved, the last checkpoint" in told
    assert read_checkpoint(tmp_path / "run" / LAST)["step"] == 2


def test_a_config_without_norm_type_is_layer(tmp_path):
    """Checkpoints from before there were norm types: only the keys of the shape."""
    shape: Any = {"vocab_size": 40, "block_size": 12, "n_layer": 2, "n_head": 2, "n_embd": 16}
    config = model_config(shape, tmp_path)
    assert config.norm_type == "layer" and config == GPTConfig(**shape)


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        ("n_layer", 3, {}),
        ("n_embd", 64, {}),
        ("coupled_span", 1, {}),
        ("bias", False, {}),
        ("norm_type", "rms", {"coupled_span": 1}),
    ],
)
def test_another_model_names_the_key(key, value, more, state):
    path = Path("run") / LAST
    config = model_config(state["config"], path)
    # These decide no tensor.
    check_same_model(asdict(config), replace(config, dropout=0.1, init="torch"), path)
    told = f"{path} is of another model: {key}={getattr(config, key)!r} there, {value!r} here"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        check_same_model(asdict(config), replace(config, **{key: value}, **more), path)


def test_find_checkpoint(state, tmp_path):
    last, best = tmp_path / LAST, tmp_path / BEST
    assert find_checkpoint(tmp_path, "auto") is None and find_checkpoint(tmp_path, "never") is None
    save_checkpoint(last, state)
    save_checkpoint(best, state | {"step": 5})
    # No descriptor of the folder stays open.
    assert tmp_path not in [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    detour = f"{tmp_path}/../{tmp_path.name}/{BEST}"
    for resume, step, path in (("auto", 2, last), (str(best), 5, best), (detour, 5, best)):
        found = find_checkpoint(tmp_path, resume)
        assert (found.state["step"], found.path, found.problem) == (step, path, "")
    # torn: the best one, and it says so
    last.write_bytes(last.read_bytes()[:1000])
    found = find_checkpoint(tmp_path, "auto")
    assert (found.state["step"], found.path) == (5, best)
    assert LAST in found.problem and "torn" in found.problem
    best.write_bytes(b"")
    # Both torn: it does not start afresh over them.
    for resume, words in (
        ("never", "resume=auto"),
        (str(last), "torn"),
        ("auto", f"{LAST}.*{BEST}"),
        (str(tmp_path / "nowhere.pt"), "no such checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            find_checkpoint(tmp_path, resume)
