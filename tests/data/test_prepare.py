"""data/prepare.py: every input format, hostile input, splits, and what a killed run leaves.

    python -m pytest tests/data/test_prepare.py

It is killed at every write by `make faults`. Needs the GPT-2 tokenizer of the offline data, and
skips without it.
"""

import json
import lzma
import os
import random
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from helpers import offline_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from data import prepare
from data.documents import Document
from data.shards import find_shards, open_shard, read_meta
from data.tokenizers import load_tokenizer

END = 50256
WORDS = [
    "the",
    "of",
    "attention",
    "12",
    "345,",
    "gradient\n\n",
    "'tis",
    "we'll",
    "straße",
    "中文字",
    "🙂",
    "\t",
    "",
]


@pytest.fixture(scope="module")
def gpt2() -> tiktoken.Encoding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(offline_data("tiktoken_cache")))
        yield tiktoken.get_encoding("gpt2")


pytestmark = pytest.mark.usefixtures("gpt2")


def some_texts(count: int, words: int = 200, seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    return [
        f"{number}: " + " ".join(choose.choices(WORDS, k=choose.randint(1, words)))
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def run(out: Path, *words: object, shard_tokens: int = 1000, processes: int = 1) -> None:
    """Prepare; unless the words say something of it, one document more is validation data."""
    words = [*map(str, words)]
    if not any(word.startswith("--val") for word in words):
        val = out.parent / "v.jsonl"
        words.append(f"--val={val if val.exists() else write_jsonl(val, ['validation'])}")
    keys = (f"--out_dir={out}", f"--shard_tokens={shard_tokens}", f"--processes={processes}")
    prepare.main([*words, *keys])


def tokens_of(out: Path, split: str = "train") -> np.ndarray:
    return np.concatenate([open_shard(path) for path in find_shards(out, split)])


def documents_of(out: Path, gpt2: tiktoken.Encoding, split: str = "train") -> list[str]:
    tokens = tokens_of(out, split)
    starts = np.flatnonzero(tokens == END)
    assert starts[0] == 0
    return [gpt2.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def contents(out: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in out.iterdir()
        if path.suffix == ".bin" or path.name == "meta.json"
    }


# ------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz", ".parquet", ".txt"])
def test_every_format_gives_the_same_shards(tmp_path, gpt2, suffix, capsys):
    texts = some_texts(60)
    if suffix == ".txt":
        paths = [tmp_path / f"{number:03d}.txt" for number in range(60)]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text.encode())
    elif suffix == ".parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        paths = [tmp_path / "x.parquet"]
        parquet.write_table(pa.table({"id": range(60), "text": texts}), paths[0])
    else:
        paths = [
            write_jsonl(tmp_path / f"a{suffix}", texts[:20]),
            write_jsonl(tmp_path / f"b{suffix}", texts[20:]),
        ]
    run(tmp_path / "out", *paths)
    tokens = tokens_of(tmp_path / "out")
    expected = [token for text in texts for token in [END, *gpt2.encode_ordinary(text)]]
    assert tokens.tolist() == expected
    assert read_meta(tmp_path / "out") == {"tokenizer": "gpt2", "vocab_size": 50257}
    shards = find_shards(tmp_path / "out", "train")
    assert shards[1].name == "text_train_000001.bin"
    assert {len(open_shard(path)) for path in shards[:-1]} == {1000}
    printed = capsys.readouterr().out
    assert f"train: {len(expected):,} tokens in {len(shards)} shards" in printed
    assert "val: 3 tokens in 1 shards" in printed and "61 documents; skipped: none\n" in printed


def test_named_validation_files(tmp_path, gpt2):
    train, val = some_texts(40), some_texts(15, seed=1)
    for name, texts in (("t-1", train[:20]), ("t-2", train[20:]), ("u", val)):
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    run(tmp_path / "out", tmp_path / "t-?.jsonl", f"--val={tmp_path / 'u.jsonl'}")
    assert documents_of(tmp_path / "out", gpt2) == train
    assert documents_of(tmp_path / "out", gpt2, "val") == val


@pytest.mark.parametrize(("share", "chosen"), [(0.1, {9, 19}), (0.3, {3, 6, 9, 13, 16, 19, 23})])
def test_a_share_of_many_documents(tmp_path, gpt2, share, chosen):
    texts = some_texts(25)
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), f"--val_share={share}")
    val = [text for number, text in enumerate(texts) if number in chosen]
    assert documents_of(tmp_path / "out", gpt2, "val") == val
    train = [text for number, text in enumerate(texts) if number not in chosen]
    assert documents_of(tmp_path / "out", gpt2) == train


@pytest.mark.parametrize("count", [1, 9])
def test_the_end_of_each_of_few_documents(tmp_path, gpt2, capsys, count):
    texts = [f"{number}" + "word " * (20 + number) for number in range(count)]
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), "--val_share=0.1")
    train, val = (documents_of(tmp_path / "out", gpt2, name) for name in ("train", "val"))
    assert [a + b for a, b in zip(train, val, strict=True)] == texts
    assert [len(text) for text in train] == [int(0.9 * len(text)) for text in texts]
    assert f"\n{count} documents; skipped: none\n" in capsys.readouterr().out


def test_single_characters(tmp_path):
    texts = ["größer", "als: 中文字"]
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), "--tokenizer=chars")
    meta = read_meta(tmp_path / "out")
    assert meta["chars"] == "".join(sorted({*"".join(texts), *"validation"}))
    assert load_tokenizer(meta).decode(tokens_of(tmp_path / "out").tolist()) == "".join(texts)


@pytest.mark.parametrize("has_bos", [False, True])
def test_a_hugging_face_tokenizer(tmp_path, has_bos):
    """BOS of its template, or its end of text, stands before each document, however long."""
    model = folder_of_tokenizer(tmp_path / "model", has_bos)
    texts = ["one", "two " * 9000]
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), f"--tokenizer={model}")
    meta = read_meta(tmp_path / "out")
    assert len(meta.pop("checksum")) == 64
    assert meta == {"tokenizer": "hf", "path": str(model), "vocab_size": 5}
    first = 4 if has_bos else 3
    assert tokens_of(tmp_path / "out").tolist() == [first, 0, first, *[1] * 9000]


def folder_of_tokenizer(folder: Path, has_bos: bool) -> Path:
    """A tokenizer of words: one, two, any other, end, BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"one": 0, "two": 1, "<unk>": 2, "<|endoftext|>": 3, "<bos>": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if has_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 4)]
        )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("size", [1, 7])
def test_documents_end_anywhere_in_a_shard(tmp_path, gpt2, size):
    texts = ["one", "two words", "", "three words here", "x " * size]
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), shard_tokens=size)
    expected = [token for text in texts if text for token in [END, *gpt2.encode_ordinary(text)]]
    assert tokens_of(tmp_path / "out").tolist() == expected
    assert {len(open_shard(path)) for path in find_shards(tmp_path / "out", "train")[:-1]} <= {size}


# ------------------------------------------------------------------------------------------- pieces


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.sampled_from(
            ["a", " ", "\n", "'s", "\r\n", "é", "中", "🙂", "12", "\u00a0", "\x1c", "!?"]
        )
    ),
    st.integers(1, 12),
)
def test_pieces_keep_the_text_and_where_possible_the_tokens(gpt2, monkeypatch, parts, longest):
    text = "".join(parts)
    monkeypatch.setattr(prepare, "MAX_PIECE", longest)
    found = list(prepare.pieces(text))
    assert "".join(found) == text and all(len(piece) <= longest for piece in found)
    tokens = [token for piece in found for token in gpt2.encode_ordinary(piece)]
    assert gpt2.decode(tokens) == text
    if all(not before[-1].isspace() and after[0] in " \n" for before, after in pairwise(found)):
        assert tokens == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("unit", ["a", " ", "ab1!", "a\u00a0"])
def test_long_runs_take_linear_time(gpt2, unit):
    text = unit * (500_000 // len(unit))
    start = time.monotonic()
    tokens = prepare.encode(Document(text, ""), gpt2)
    assert time.monotonic() - start < 5  # a fraction of a second; quadratic would be minutes
    assert gpt2.decode(tokens[1:].tolist()) == text


# ------------------------------------------------------------------------------------ hostile input


def test_hostile_jsonl_is_used_or_counted(tmp_path, gpt2, capsys):
    lines = [
        b"\xef\xbb\xbf" + json.dumps({"text": "after a byte order mark"}).encode(),
        b'{"text": "ends early',
        b"not json",
        b"\xff\xfe\x00",
        b"[" * 5000,
        b'{"text": ' + b"9" * 5000 + b"}",
        b"",
        b"   ",
        b'{"text": ""}',
        b'{"text": " \\n\\t"}',
        b'{"title": "no text"}',
        b'{"text": null}',
        b'{"text": 3}',
        b'["text"]',
        b'"text"',
        b"null",
        b'{"text": "caf\xe9 latin-1"}',
        b'{"text": "half a pair \\ud83d."}',
        b'{"text": "a pair \\ud83d\\ude42"}',
        b'{"text": "<|endoftext|> stays text<|endoftext|>"}',
        b'{"text": "nul \\u0000 and a line\\nbreak"}',
        '{"text": "separators\u2028inside\u0085lines"}'.encode(),
        json.dumps({"text": "x" * 40_000}).encode(),
        b'{"text": "no newline at the end"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    expected = [
        "after a byte order mark",
        "caf\ufffd latin-1",
        "half a pair \ufffd.",
        "a pair 🙂",
        "<|endoftext|> stays text<|endoftext|>",
        "nul \0 and a line\nbreak",
        "separators\u2028inside\u0085lines",
        "x" * 40_000,
        "no newline at the end",
    ]
    run(tmp_path / "out", tmp_path / "a.jsonl", processes=2)
    assert documents_of(tmp_path / "out", gpt2) == expected
    assert capsys.readouterr().out.splitlines()[-1] == (
        '10 documents; skipped: 2 empty, 5 broken JSON, 6 no "text"; 2 with invalid UTF-8, replaced'
    )


def test_hostile_parquet(tmp_path, gpt2, capsys):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pa.array([b"good " * 600, b"caf\xe9", b"", None], pa.binary())
    # a string that is no UTF-8
    text = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    for kind, column in (("string", text), ("binary", raw), ("large", raw.cast(pa.large_binary()))):
        parquet.write_table(pa.table({"text": column}), tmp_path / f"{kind}.parquet")
        run(tmp_path / kind, tmp_path / f"{kind}.parquet", shard_tokens=500)
        assert documents_of(tmp_path / kind, gpt2) == ["good " * 600, "caf\ufffd"]
        last = '3 documents; skipped: 1 empty, 1 no "text"; 1 with invalid UTF-8, replaced\n'
        assert capsys.readouterr().out.endswith(last)
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "body.parquet")
    parquet.write_table(pa.table({"text": [[1]]}), tmp_path / "list.parquet")
    whole = bytearray((tmp_path / "string.parquet").read_bytes())
    (tmp_path / "torn.parquet").write_bytes(whole[:-20])
    whole[4:24] = bytes(20)  # the header of its first page
    (tmp_path / "page.parquet").write_bytes(whole)
    for name in ("body", "list", "torn", "page"):
        with pytest.raises(DataError, match=rf"{name}\.parquet: "):
            run(tmp_path / name, tmp_path / f"{name}.parquet")


def test_damaged_xz(tmp_path):
    whole = write_jsonl(tmp_path / "a.jsonl.xz", some_texts(100)).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for content in (whole[:-4], b"", b"not xz at all", bytes(flipped)):
        (tmp_path / "torn.jsonl.xz").write_bytes(content)
        with pytest.raises(DataError, match=r"torn\.jsonl\.xz"):
            run(tmp_path / "out", tmp_path / "torn.jsonl.xz", "--val_share=0.5", shard_tokens=10**6)


def test_nothing_usable(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": 1}\n\n{\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"no usable document .*1 broken JSON"):
        run(tmp_path / "out", tmp_path / "a.jsonl", "--val_share=0.5")
    assert not list((tmp_path / "out").glob("*.bin"))


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("missing.jsonl", DataError, "no file missing.jsonl"),
        ("x.csv", ConfigError, "x.csv: .*jsonl, .jsonl.xz, .parquet, .txt"),
        ("", ConfigError, "name at least one file"),
        ("a.txt a.txt", ConfigError, "named twice"),
        ("a.txt --val=hard.txt", ConfigError, "named twice"),
        ("a.txt --val_share=0.6", ConfigError, "val_share"),
        ("a.txt --tokenizer=word", ConfigError, "tokenizer=word: give gpt2, bytes, chars"),
        ("a.txt --tokenizer=.", DataError, "the tokenizer of .* cannot be read"),
        ("many.txt --tokenizer=chars", ConfigError, "65,600 tokens, and shards hold ids"),
    ],
)
def test_user_errors(tmp_path, monkeypatch, words, error, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("hello world")
    Path("many.txt").write_text("".join(map(chr, range(0x10000, 0x10000 + 65600))))
    os.link("a.txt", "hard.txt")
    with pytest.raises(error, match=message) as caught:
        prepare.main(["--out_dir=out", "--processes=1", *words.split()])
    assert "\n" not in str(caught.value)
    assert not list(Path().glob("out/*.*"))


# --------------------------------------------------------------------------------- kills and resume


def test_the_shards_do_not_depend_on_the_number_of_threads(tmp_path):
    texts = [*some_texts(300), "x" * 20_000, *some_texts(300, seed=1)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    run(tmp_path / "one", source, processes=1)
    run(tmp_path / "three", source, processes=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(contents(tmp_path / "one")) > 20


def test_other_settings_in_a_used_folder_are_refused(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", some_texts(40))
    b = write_jsonl(tmp_path / "b.jsonl", some_texts(40, seed=1))
    out = tmp_path / "out"
    run(out, a)
    before = contents(out)
    for words, named in (
        ([a, b], "files"),
        ([a, f"--val={b}"], "val"),
        ([a, "--tokenizer=bytes"], "tokenizer"),
    ):
        with pytest.raises(DataError, match=rf"other settings \({named}\): choose another"):
            run(out, *words)
    with a.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(DataError, match=r"other settings \(files\)"):
        run(out, a)
    assert contents(out) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_has_changed_is_refused(tmp_path, name):
    """Its folder has the same path, but not the same files."""
    model = folder_of_tokenizer(tmp_path / "model", has_bos=False)
    (model / "tokenizer_config.json").write_text("{}")
    source = write_jsonl(tmp_path / "a.jsonl", ["one two " * 300] * 12)
    words = (source, f"--tokenizer={model}")
    run(tmp_path / "out", *words)
    sorted((tmp_path / "out").glob("*_train_*.bin"))[-1].unlink()  # as after a kill
    before = contents(tmp_path / "out")
    content = json.loads((model / name).read_text())
    if name == "tokenizer.json":
        content["model"]["vocab"] |= {"one": 1, "two": 0}
    else:
        content["eos_token"] = "one"
    (model / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"other settings \(tokenizer files\)"):
        run(tmp_path / "out", *words)
    assert contents(tmp_path / "out") == before
    # Nor does a model that was trained on them read or write text with it.
    meta = read_meta(tmp_path / "out")
    with pytest.raises(DataError, match="has changed since the data were prepared"):
        load_tokenizer(meta)
    # What decides about no id may change.
    if name == "tokenizer_config.json":
        (model / name).write_text('{"chat_template": "other"}')
        load_tokenizer(meta)


def test_shards_of_others_and_a_damaged_progress_file_are_refused(tmp_path):
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(40)), tmp_path / "out"
    run(out, source, "--tokenizer=bytes")
    progress = (out / "progress.json").read_text()
    for content in ("", "[]", '{"settings": {}}', progress[:-9]):
        (out / "progress.json").write_text(content)
        with pytest.raises(DataError, match=r"progress\.json"):
            run(out, source, "--tokenizer=bytes")
    (out / "progress.json").write_text(progress)
    (out / "text_train_000099.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"text_train_000099\.bin"):
        run(out, source, "--tokenizer=bytes")
    # Begun again as the message says. meta.json of the old shards is still there.
    for path in [*out.glob("*.bin"), out / "progress.json"]:
        path.unlink()
    run(out, source)
    assert read_meta(out) == {"tokenizer": "gpt2", "vocab_size": 50257}


def test_a_missing_or_torn_shard_is_made_again(tmp_path, capsys):
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(100)), tmp_path / "out"
    run(out, source)
    before, printed = contents(out), capsys.readouterr().out.splitlines()[-3:]
    for name in ("text_val_000000.bin", "text_train_000003.bin"):
        (out / name).write_bytes(before[name][:-2])
    max(out.glob("text_train_*")).unlink()
    run(out, source)
    assert contents(out) == before
    assert capsys.readouterr().out.splitlines()[-3:] == printed


@pytest.mark.parametrize("crash_at", range(1, 7))
def test_a_crash_at_each_write(tmp_path, monkeypatch, crash_at):
    """Whatever the last thing on disk is, the next run ends with the same bytes."""
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    run(tmp_path / "whole", source)
    writes = []

    def crash(write, *words: object) -> None:
        writes.append(words)
        if len(writes) == crash_at:
            raise KeyboardInterrupt
        write(*words)

    out = tmp_path / "out"
    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
    ):
        for name in ("write_bytes_atomically", "write_meta", "write_shard"):
            patch.setattr(prepare, name, partial(crash, getattr(prepare, name)))
        run(out, source)
    run(out, source)
    assert contents(out) == contents(tmp_path / "whole")
