"""data/ and training/dataloader.py: shards, tokenizers, batches, and the two small prepare scripts.

python -m pytest tests/data/test_data.py
"""

import os
import struct
import subprocess
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import offline_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, DataError, UserError
from common.output import write_bytes_atomically
from data.shakespeare_char import prepare as shakespeare
from data.shards import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    find_shards,
    open_shard,
    read_meta,
    write_meta,
    write_shard,
)
from data.stdlib import prepare as stdlib
from data.tokenizers import END_OF_TEXT, CharTokenizer, byte_tokenizer, load_tokenizer
from training.dataloader import Blocks, TrainLoader, epoch_order, eval_batches

FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


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


def test_a_write_that_fails_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes_atomically(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError) as caught:
        write_bytes_atomically(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    for write in (lambda: write_meta(tmp_path, {}), lambda: write_shard(path, np.zeros(1))):
        with pytest.raises(
            DataError, match=r"cannot be written \(No space .*make room, and repeat"
        ):
            write()
    assert os.listdir(tmp_path) == ["file"]


GOOD = header(count=3) + b"\1\0\2\0\3\0"
DAMAGED = {
    "truncated": (GOOD[:-1], "header promises 3 tokens, the file has room for 2"),
    "truncated in the header": (GOOD[:100], "header promises 3 tokens, the file has room for 0"),
    "overlong": (GOOD + b"\4\0", "header promises 3 tokens, the file has room for 4"),
    "another magic": (
        header(magic=20240801, count=3) + b"123456",
        f"wrong magic number 20240801.*{MAGIC}",
    ),
    "another version": (header(version=2, count=3) + b"123456", "shard version 2"),
    "an empty file": (b"", "wrong magic number nothing"),
    "two bytes": (b"\1\2", "wrong magic number"),
    "no tokens": (header(), "holds no tokens"),
    "a negative count": (header(count=-1)[:-2], "header promises -1 tokens"),
    "no header": (b"\1\0\2\0\3\0" * 1000, "wrong magic number"),
    "text": (b"To be, or not to be\n" * 100, "wrong magic number"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_shard(tmp_path, case):
    content, message = DAMAGED[case]
    path = tmp_path / "x_train_000000.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_shard(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError):
        Blocks(str(tmp_path), "train", 1, 65536)


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=50),
        st.tuples(st.integers(-600, 600), st.integers(0, 1100)).map(
            lambda case: header(count=case[0])[: case[1]] + b"\1\0" * max(0, case[1] - HEADER_BYTES)
        ),
    )
)
def test_arbitrary_bytes_are_a_shard_or_a_data_error(tmp_path, content):
    for name in ("x_train_000000.bin", "train.bin"):
        path = tmp_path / name
        path.write_bytes(content)
        try:
            assert len(open_shard(path)) > 0
        except DataError as error:
            assert str(path) in str(error)


def test_headerless_nanogpt_shards(tmp_path):
    tokens = np.arange(100, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:10].tofile(tmp_path / "val.bin")
    assert find_shards(tmp_path, "train") == [tmp_path / "train.bin"]
    assert open_shard(tmp_path / "train.bin").tolist() == tokens.tolist()
    assert len(Blocks(str(tmp_path), "val", 3, 100)) == 3
    assert read_meta(tmp_path) == {}
    (tmp_path / "val.bin").write_bytes(b"\1\0\2")
    with pytest.raises(DataError, match="odd number of bytes"):
        open_shard(tmp_path / "val.bin")
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(DataError, match="no tokens"):
        open_shard(tmp_path / "val.bin")


def test_missing_data_says_what_to_do(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            DataError, match=r"no train shards in .*prepare the data, or set data_dir"
        ):
            find_shards(folder, "train")
    (tmp_path / "prepare.py").touch()
    with pytest.raises(DataError, match=rf"no val shards in .*run `python {tmp_path}/prepare\.py`"):
        find_shards(tmp_path, "val")


def test_shards_come_in_order_and_without_gaps(tmp_path):
    shards_of(tmp_path, 5, 5, 5, first=1)
    shards_of(tmp_path, 5, split="val")
    assert [path.name for path in find_shards(tmp_path, "train")] == [
        f"x_train_00000{n}.bin" for n in (1, 2, 3)
    ]
    (tmp_path / "x_train_000002.bin").unlink()
    with pytest.raises(DataError, match="train shard 000002 is missing"):
        find_shards(tmp_path, "train")
    assert len(find_shards(tmp_path, "val")) == 1


@pytest.mark.parametrize("other", ["y_train_000001.bin", "y_val_000000.bin"])
def test_two_data_sets_in_one_folder(tmp_path, other):
    shards_of(tmp_path, 5)
    shards_of(tmp_path, 5, split="val")
    write_shard(tmp_path / other, np.arange(5))
    with pytest.raises(DataError, match="several data sets"):
        find_shards(tmp_path, "train")


def test_meta_round_trip(tmp_path):
    meta = {"tokenizer": "chars", "vocab_size": 3, "chars": "aé中"}
    write_meta(tmp_path, meta)
    assert read_meta(tmp_path) == meta
    assert load_tokenizer(meta).decode([2, 0, 1]) == "中aé"


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


@FUZZ
@given(st.text())
def test_byte_tokenizer_is_the_raw_bytes(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode_ordinary(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_byte_tokenizers_end_token():
    tokenizer = byte_tokenizer()
    assert (tokenizer.n_vocab, tokenizer.encode_single_token(END_OF_TEXT)) == (257, 256)
    assert tokenizer.encode_ordinary(END_OF_TEXT) == list(END_OF_TEXT.encode())


def test_char_tokenizer():
    tokenizer = CharTokenizer("abé")
    assert tokenizer.encode_ordinary("béa") == [1, 2, 0] and tokenizer.decode([1, 2, 0]) == "béa"
    with pytest.raises(DataError, match="character 'x' is not in this model's alphabet of 3"):
        tokenizer.encode_ordinary("ax")


@pytest.mark.parametrize(
    "meta", [{}, {"tokenizer": "word"}, {"tokenizer": "chars"}, {"tokenizer": "chars", "chars": 3}]
)
def test_unusable_tokenizer(meta):
    with pytest.raises(DataError, match="prepare it again"):
        load_tokenizer(meta)


def test_gpt2_tokenizer(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(offline_data("tiktoken_cache")))
    assert load_tokenizer({"tokenizer": "gpt2"}).encode_ordinary("hello world") == [31373, 995]


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
        blocks.batch([0, 3])
    with pytest.raises(DataError, match="token id"):
        list(islice(TrainLoader(blocks, 2, 1, seed=0).batches(1, 0, 1, pin=False), 4))


@pytest.fixture
def blocks(tmp_path):
    return Blocks(str(shards_of(tmp_path, 101, 61)), "train", 4, 200)  # 25 + 15 blocks


def test_every_block_of_an_epoch_is_visited_once(blocks):
    loader = TrainLoader(blocks, batch_size=5, micro_batches=2, seed=3)  # 4 steps an epoch
    order = [
        block
        for step in range(1, 13)
        for micro in range(2)
        for block in loader.sample_ids(step, micro)
    ]
    epochs = [order[start : start + 40] for start in (0, 40, 80)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(40)) and epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = TrainLoader(blocks, batch_size=5, micro_batches=2, seed=4)
    assert other.sample_ids(1, 0) != loader.sample_ids(1, 0)


def test_epochs_that_no_batch_size_divides(blocks):
    loader = TrainLoader(blocks, batch_size=7, micro_batches=3, seed=0)
    ids = [
        block
        for step in range(1, 41)
        for micro in range(3)
        for block in loader.sample_ids(step, micro)
    ]
    assert len(ids) == 840
    for epoch in range(21):
        assert sorted(ids[40 * epoch : 40 * epoch + 40]) == list(range(40))


def test_the_order_of_an_epoch_never_changes():
    """Runs of old checkpoints resume with it, so it is written down here."""
    assert epoch_order(1337, 0, 10).tolist() == [3, 4, 5, 9, 7, 1, 6, 0, 8, 2]
    assert epoch_order(1337, 1, 10).tolist() == [0, 8, 2, 1, 3, 9, 6, 4, 5, 7]


def test_a_batch_is_a_pure_function_of_seed_step_and_micro_batch(blocks):
    def fresh() -> TrainLoader:
        return TrainLoader(blocks, batch_size=3, micro_batches=4, seed=7)

    forwards = {
        (step, micro): fresh().sample_ids(step, micro)
        for step in range(1, 30)
        for micro in range(4)
    }
    torch.manual_seed(0)
    np.random.seed(0)  # the loader draws from nobody else's stream
    used = fresh()
    for step, micro in reversed(forwards):
        list(eval_batches(blocks, 3, 100))
        assert used.sample_ids(step, micro) == forwards[step, micro]


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
    assert steps(1, 12) == expected
    assert steps(9, 4) == expected[8:]  # to start at step 9 is to have run there


def test_batches_are_inputs_and_targets(blocks):
    x, y = next(TrainLoader(blocks, 3, 2, seed=0).batches(1, 0, 1, pin=False))
    assert (
        x.shape == (3, 4)
        and x.is_contiguous()
        and y.is_contiguous()
        and torch.equal(y[:, :-1], x[:, 1:])
    )


def test_eval_batches_are_the_first_tokens_in_order(blocks):
    assert eval_batches(blocks, 3, 7 * 4) == [[0, 1, 2], [3, 4, 5], [6]]
    assert eval_batches(blocks, 3, 1) == [[0]]
    assert [block for batch in eval_batches(blocks, 7, 10**9) for block in batch] == list(range(40))


# ---------------------------------------------------------------------------------- prepare scripts


@pytest.fixture
def out(tmp_path, monkeypatch):
    """The scripts write beside themselves: here they believe that they live in tmp_path."""
    for script in (stdlib, shakespeare):
        monkeypatch.setattr(script, "__file__", str(tmp_path / "prepare.py"))
    return tmp_path


def test_prepare_stdlib(out, capsys):
    stdlib.main([])
    assert read_meta(out) == {"tokenizer": "bytes", "vocab_size": 257}
    printed, tokenizer = capsys.readouterr().out, load_tokenizer(read_meta(out))
    sources = stdlib.documents(Path(sysconfig.get_paths()["stdlib"]))
    for split, least in (("train", 3_000_000), ("val", 50_000)):
        tokens = open_shard(*find_shards(out, split))
        starts = np.flatnonzero(tokens == 256)
        assert len(tokens) > least and starts[0] == 0 and len(starts) == len(sources[split])
        for number, source in ((0, sources[split][0]), (-1, sources[split][-1])):
            end = starts[1] if number == 0 else len(tokens)
            assert tokenizer.decode_bytes(tokens[starts[number] + 1 : end].tolist()) == source
        assert f"{split}: {len(starts)} files, {len(tokens):,} tokens" in printed
    with pytest.raises(ConfigError):
        stdlib.main(["--local=x"])


def test_prepare_stdlib_documents(tmp_path):
    for name in ("b.py", "a/c.py", "a/test/d.py", "site-packages/e.py", "f.txt", "a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() + b"\xff")
    found = stdlib.documents(tmp_path)
    assert sorted(found["train"] + found["val"]) == [b"a.py\xff", b"a/c.py\xff", b"b.py\xff"]
    assert stdlib.documents(tmp_path) == found


@pytest.mark.parametrize("words", [["--local={}"], ["--local", "{}"]])
def test_prepare_shakespeare(out, words):
    source = offline_data("tinyshakespeare/input.txt")
    shakespeare.main([word.format(source) for word in words])
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
time.sleep(2)
sys.exit(any(name.endswith(".bin") for name in os.listdir(sys.argv[1])))
"""


@pytest.mark.parametrize("script", [stdlib, shakespeare])
def test_prepare_waits_for_another_process_in_its_folder(out, script):
    (out / "in").write_text("some text of a few lines\n" * 9)
    words = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        script.main([f"--local={out / 'in'}"] if script is shakespeare else [])
    assert other.returncode == 0  # it saw no shard while it held the folder
    assert find_shards(out, "train") and read_meta(out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "fetch it by hand"),
        (b"\xff\xfe" * 100, "not UTF-8"),
        (b"too short", "not the expected text"),
        ("".join(map(chr, range(0x4E00, 0x5300))).encode(), "1280 distinct"),
    ],
)
def test_prepare_shakespeare_refuses_other_texts(out, content, message):
    if content is not None:
        (out / "in").write_bytes(content)
    with pytest.raises(DataError, match=message):
        shakespeare.main([f"--local={out / 'in'}"])
    assert not list(out.glob("*.bin"))


@pytest.mark.parametrize("argv", [["--local"], ["x"], ["--locale=x"], ["--local=x", "y"]])
def test_prepare_shakespeare_usage(out, argv):
    with pytest.raises(ConfigError, match="usage"):
        shakespeare.main(argv)


def test_prepare_shakespeare_without_a_network(out, monkeypatch):
    monkeypatch.setattr(shakespeare, "URL", "http://127.0.0.1:1/input.txt")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/input\.txt: .*pass --local=FILE"):
        shakespeare.main([])


def test_data_errors_are_for_people():
    assert issubclass(DataError, UserError) and DataError.exit_code == 1
