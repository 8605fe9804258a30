"""data/ and training/dataloader.py: shards, tokenizers, batches, and the two small data sets.

python -m pytest tests/data/test_data.py
"""

import os
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import offline_data

from common.errors import DataError
from common.fingerprint import fingerprint
from data.shakespeare_char import prepare as shakespeare
from data.shards import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    find_shards,
    open_shard,
    read_meta,
    write_shard,
)
from data.stdlib import prepare as stdlib
from data.tokenizers import END_OF_TEXT, CharTokenizer, byte_tokenizer, load_tokenizer
from data.wheels import prepare as wheels
from training.dataloader import Blocks, TrainLoader, epoch_order, eval_batches


def header(magic: int = MAGIC, version: int = VERSION, count: int = 0) -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(HEADER_BYTES, b"\0")


def shards_of(folder: Path, *lengths: int, split: str = "train", first: int = 0) -> Path:
    """Shards whose tokens count on from 0, so that a token tells its place."""
    start = 0
    for number, length in enumerate(lengths, first):
        write_shard(folder / f"x_{split}_{number:06d}.bin", np.arange(start, start + length))
        start += length
    return folder


# ------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint64])
def test_write_and_open_round_trip(tmp_path, dtype):
    tokens = np.array([0, 1, 50256, 65535, 7], dtype)
    path = tmp_path / "x_train_000000.bin"
    write_shard(path, tokens)
    found = open_shard(path)
    assert found.dtype == np.dtype("<u2") and found.tolist() == tokens.tolist()
    assert path.read_bytes()[:HEADER_BYTES] == header(count=5)
    assert path.read_bytes()[HEADER_BYTES:] == struct.pack("<5H", *tokens.tolist())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # no partial file is left


@pytest.mark.parametrize("tokens", [[-1, 3], [65536]])
def test_tokens_that_fit_no_uint16_are_refused(tmp_path, tokens):
    with pytest.raises(DataError, match=r"0\.\.65535"):
        write_shard(tmp_path / "x_train_000000.bin", np.array(tokens))
    assert not list(tmp_path.iterdir())


GOOD = header(count=3) + b"\1\0\2\0\3\0"
DAMAGED = {
    "truncated": (GOOD[:-1], "truncated"),
    "truncated in the header": (GOOD[:100], "truncated"),
    "overlong": (GOOD + b"\4\0", "overlong"),
    "another magic": (header(magic=20240801, count=3) + b"123456", "another kind of file"),
    "another version": (header(version=2, count=3) + b"123456", "another kind of file"),
    "an empty file": (b"", "another kind of file"),
    "two bytes": (b"\1\2", "another kind of file"),
    "no tokens": (header(), "empty"),
    "a negative count": (header(count=-1)[:-2], "empty"),
    "no header": (b"\1\0\2\0\3\0" * 1000, "another kind of file"),
}


@pytest.mark.parametrize(("content", "told"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_shard(tmp_path, content, told):
    path = tmp_path / "x_train_000000.bin"
    path.write_bytes(content)
    for read in (lambda: open_shard(path), lambda: Blocks(str(tmp_path), "train", 1, 65536)):
        with pytest.raises(DataError, match=f"{path}.*{told}"):
            read()


def test_headerless_nanogpt_shards(tmp_path):
    tokens = np.arange(100, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:10].tofile(tmp_path / "val.bin")
    assert find_shards(tmp_path, "train") == [tmp_path / "train.bin"]
    assert open_shard(tmp_path / "train.bin").tolist() == tokens.tolist()
    assert len(Blocks(str(tmp_path), "val", 3, 100)) == 3
    assert read_meta(tmp_path) == {}
    for few in ([5], [5, 0], [5, 0, 7, 0]):  # too few to be taken for int32
        np.array(few, "<u2").tofile(tmp_path / "val.bin")
        assert open_shard(tmp_path / "val.bin").tolist() == few
    for content in (
        b"\1\0\2",
        b"",
        header(version=2, count=3) + b"123456",
        np.arange(99).tobytes(),
    ):
        (tmp_path / "val.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"val\.bin"):
            open_shard(tmp_path / "val.bin")


def test_shards_come_in_order_and_are_of_one_set_without_gaps(tmp_path):
    shards_of(tmp_path, 5, 5, 5, first=1)
    shards_of(tmp_path, 5, split="val")
    names = [path.name for path in find_shards(tmp_path, "train")]
    assert names == [f"x_train_00000{n}.bin" for n in (1, 2, 3)]
    (tmp_path / "x_train_000002.bin").unlink()
    with pytest.raises(DataError, match="train shard 000002 is missing"):
        find_shards(tmp_path, "train")
    write_shard(tmp_path / "y_val_000000.bin", np.arange(5))
    with pytest.raises(DataError, match="several data sets"):
        find_shards(tmp_path, "val")
    with pytest.raises(DataError, match=r"no train shards in .*set data_dir"):
        find_shards(tmp_path / "missing", "train")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe",
        b"{}",
        b'{"tokenizer": "gpt2"}',
        b'{"vocab_size": 5}',
        b'{"tokenizer": 3, "vocab_size": 5}',
        b'{"tokenizer": "gpt2", "vocab_size": 0}',
        b'{"tokenizer": "gpt2", "vocab_size": "50257"}',
        b'{"tokenizer": "gpt2", "vocab_size": 5.5}',
        b'{"tokenizer": "gpt2", "vocab_size": Infinity}',
        b'{"tokenizer": "gpt2", "vocab_size": NaN}',
        b'{"tokenizer": "gpt2", "vocab_size": null}',
        b'{"tokenizer": "gpt2", "vocab_size": 65537}',
        b"[" * 100_000,
    ],
)
def test_damaged_meta(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(DataError, match=r"meta\.json: needs tokenizer and vocab_size"):
        read_meta(tmp_path)


# --------------------------------------------------------------------------------------- tokenizers


def test_bytes_and_characters():
    tokenizer = byte_tokenizer()
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (257, 256)
    for text in ("aé中🙂\n\0", END_OF_TEXT):
        assert tokenizer.encode_ordinary(text) == list(text.encode())
    tokenizer = CharTokenizer("abé")
    assert tokenizer.encode_ordinary("béa") == [1, 2, 0] and tokenizer.decode([1, 2, 0]) == "béa"
    with pytest.raises(DataError, match="'x'"):
        tokenizer.encode_ordinary("ax")


@pytest.mark.parametrize(
    "meta", [{}, {"tokenizer": "word"}, {"tokenizer": "chars"}, {"tokenizer": "chars", "chars": 3}]
)
def test_unusable_tokenizer(meta):
    with pytest.raises(DataError, match="prepare it again"):
        load_tokenizer(meta)


# ------------------------------------------------------------------------------------------ batches


def test_blocks_cover_the_split_and_targets_are_shifted_by_one(tmp_path):
    shards_of(tmp_path, 41, 9, 3, 25)  # 10, 2, 0 and 6 whole blocks of 4
    blocks = Blocks(str(tmp_path), "train", 4, 100)
    starts = [*range(0, 40, 4), 41, 45, *range(53, 77, 4)]
    assert [int(block[0]) for block in (blocks[i] for i in range(len(blocks)))] == starts
    x, y = blocks.batch(list(range(len(blocks))))
    assert x.shape == y.shape == (18, 4) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)  # the tokens count up
    assert x[:, 0].tolist() == starts


def test_a_split_without_one_block(tmp_path):
    shards_of(tmp_path, 5, 8)
    assert len(Blocks(str(tmp_path), "train", 7, 100)) == 1
    with pytest.raises(
        DataError, match=r"block_size=8 needs 9 tokens, the longest train shard .* has 8"
    ):
        Blocks(str(tmp_path), "train", 8, 100)


def test_token_beyond_the_vocabulary(tmp_path, monkeypatch):
    shards_of(tmp_path, 10, 10)
    Blocks(str(tmp_path), "train", 4, 20)
    with pytest.raises(
        DataError, match=r"x_train_000001\.bin: token id 19 is beyond the vocabulary of 19"
    ):
        Blocks(str(tmp_path), "train", 4, 19)
    # large splits are not checked at the start, but when read
    monkeypatch.setattr("training.dataloader.SCAN_LIMIT", 0)
    blocks = Blocks(str(tmp_path), "train", 4, 15)
    blocks.batch([0, 1])
    with pytest.raises(DataError, match=r"x_train_000001\.bin: token id 18"):
        list(islice(TrainLoader(blocks, 2, 1, seed=0).batches(1, 0, 1, pin=False), 4))


@pytest.fixture
def few_descriptors():
    """This process may open some 150 more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 150, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_shards_than_descriptors(tmp_path, few_descriptors):
    paths = [tmp_path / f"x_train_{number:06d}.bin" for number in range(300)]
    for number, path in enumerate(paths):
        path.write_bytes(header(count=5) + np.arange(number, number + 5, dtype="<u2").tobytes())
    blocks = Blocks(str(tmp_path), "train", 4, 400)
    name = blocks.fingerprint()
    for order in (range(300), reversed(range(300))):
        assert all(blocks[number].tolist() == list(range(number, number + 5)) for number in order)
    assert name == fingerprint(paths[0].name, [np.fromfile(path, "<u2")[512:] for path in paths])
    # Another file under the name of one that was closed: the run would go on with other data.
    write_shard(paths[299], np.arange(5))
    with pytest.raises(DataError, match=r"x_train_000299\.bin has changed"):
        blocks[299]


@pytest.fixture
def blocks(tmp_path):
    return Blocks(str(shards_of(tmp_path, 101, 61)), "train", 4, 200)  # 25 + 15 blocks


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(5, 2), (7, 3)])
def test_every_block_of_an_epoch_is_visited_once(blocks, batch_size, micro_batches):
    """Also where no batch size divides the 40 blocks of an epoch."""

    def order(seed):
        loader = TrainLoader(blocks, batch_size, micro_batches, seed)
        batches = [
            loader.sample_ids(step, m) for step in range(1, 41) for m in range(micro_batches)
        ]
        return [block for batch in batches for block in batch]

    found = order(3)
    epochs = [found[start : start + 40] for start in range(0, len(found) - 39, 40)]
    assert len(epochs) == batch_size * micro_batches
    assert all(sorted(epoch) == list(range(40)) != epoch for epoch in epochs)
    assert epochs[0] != epochs[1] and order(3) == found and order(4)[:40] != epochs[0]


def test_the_order_of_an_epoch_never_changes():
    """Runs of old checkpoints resume with it, so it is written down here."""
    assert epoch_order(1337, 0, 10).tolist() == [3, 4, 5, 9, 7, 1, 6, 0, 8, 2]
    assert epoch_order(1337, 1, 10).tolist() == [0, 8, 2, 1, 3, 9, 6, 4, 5, 7]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_same_global_batches(blocks, world_size):
    def steps(first_step: int, count: int) -> list[list[list[list[int]]]]:
        """[step][micro-batch][sequence] -> tokens, the micro-batches of all ranks in their global
        order.
        """
        loaders = [
            TrainLoader(blocks, 3, 4, seed=7).batches(first_step, rank, world_size, pin=False)
            for rank in range(world_size)
        ]
        return [
            [next(loader)[0].tolist() for _ in range(4 // world_size) for loader in loaders]
            for _ in range(count)
        ]

    reference = TrainLoader(blocks, 3, 4, seed=7)
    expected = [
        [blocks.batch(reference.sample_ids(step, micro))[0].tolist() for micro in range(4)]
        for step in range(1, 13)
    ]
    # to start at step 9 is to have run there
    assert [steps(1, 12), steps(9, 4)] == [expected, expected[8:]]


def test_eval_batches_are_the_first_tokens_in_order(blocks):
    assert eval_batches(blocks, 3, 7 * 4) == [[0, 1, 2], [3, 4, 5], [6]]
    assert eval_batches(blocks, 3, 1) == [[0]]
    assert [block for batch in eval_batches(blocks, 7, 10**9) for block in batch] == list(range(40))


# ---------------------------------------------------------------------------------- prepare scripts


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The scripts write beside themselves: here they believe that they live in tmp_path."""
    for script in (stdlib, shakespeare, wheels):
        monkeypatch.setattr(script, "__file__", str(tmp_path / "prepare.py"))
    return tmp_path


@pytest.fixture
def small_library(monkeypatch, tmp_path):
    """A standard library of a few files, with their names as content."""
    names = [*map("{}.py".format, range(200)), "a/c.py", "a/test/d.py", "site-packages/e.py"]
    for name in names:
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "lib/empty.py").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    return ["", *names[:-2]]


def test_prepare_stdlib(out, small_library):
    stdlib.main([])
    assert read_meta(out) == {"tokenizer": "bytes", "vocab_size": 257}
    found = []
    for split in ("train", "val"):
        tokens = open_shard(*find_shards(out, split))
        parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
        assert 1 <= len(parts) < 201
        found += [bytes(part[1:].tolist()).decode() for part in parts]
    assert sorted(found) == sorted(small_library)


def test_prepare_wheels(out, small_library, monkeypatch):
    """Sources of two wheels, each once, no tests; validation begins with the library's."""
    library = [document.text for document in stdlib.documents(out / "lib", "val")]
    held = max(library)
    contents = {
        "a": {f"a/{number}.py": f"a{number}" for number in range(100)} | {"a/tests/t.py": "test"},
        "b": {"b/same.py": "a7", "b/held.py": held, "b/data.txt": "no source"},
    }
    files = []
    for name, content in contents.items():
        files.append(out / f"{name}.whl")
        with zipfile.ZipFile(files[-1], "w") as archive:
            for path, text in content.items():
                archive.writestr(path, text)
    monkeypatch.setattr(wheels, "fetch", lambda folder: files)
    wheels.main([])
    found = {}
    for split in ("train", "val"):
        tokens = open_shard(*find_shards(out, split))
        parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
        found[split] = [bytes(part[1:].tolist()).decode() for part in parts]
    assert held and found["val"][: len(library)] == library
    from_wheels = found["val"][len(library) :]
    assert 1 <= len(from_wheels) < 10
    assert sorted(found["train"] + from_wheels) == sorted(f"a{number}" for number in range(100))


def test_prepare_shakespeare(out):
    source = offline_data("tinyshakespeare/input.txt")
    shutil.copy(source, out)
    shakespeare.main([])
    meta = read_meta(out)
    tokenizer = load_tokenizer(meta)
    train, val = (open_shard(*find_shards(out, split)) for split in ("train", "val"))
    assert (meta["vocab_size"], len(train), len(val)) == (65, 1_003_854, 111_540)
    assert tokenizer.decode(train.tolist()) + tokenizer.decode(val.tolist()) == source.read_text()


HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1] + "/lock", "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1)
sys.exit(any(name.endswith(".bin") for name in os.listdir(sys.argv[1])))
"""


def test_prepare_waits_for_another_process_in_its_folder(out, small_library):
    words = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        stdlib.main([])
    assert other.returncode == 0  # it saw no shard while it held the folder
    assert find_shards(out, "train") and read_meta(out)
