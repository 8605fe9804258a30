"""Data that nanoGPT prepared: train.bin and val.bin, and meta.pkl where tokens are characters.

python -m pytest tests/data/test_nanogpt.py
"""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from helpers import TINY

from common.errors import DataError
from data.shards import read_meta

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
        with open(folder / "meta.pkl", "wb") as file:
            pickle.dump(meta, file)
    return folder


def meta_of(chars: list[str]) -> dict:
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {char: index for index, char in enumerate(chars)},
    }


def test_character_data_is_trained_with_its_vocabulary(launch, train_ok, tmp_path):
    data = write_nanogpt(tmp_path / "data", meta_of(CHARS))
    run = tmp_path / "run"
    job = train_ok(*TINY, "--sample_tokens=20", f"--data_dir={data}", f"--out_dir={run}")
    config = json.loads((run / "config.json").read_text())
    assert (config["n_vocab"], config["vocab_size"]) == (65, 128)
    assert "meta" not in job.text()
    job = launch(run, "--prompt=TO BE", "--max_new_tokens=30", program="sample")
    assert job.wait() == [0], job.text()
    for text in ((run / "samples.txt").read_text()[:-1], job.text()[:-1]):
        assert len(text) > 25 and set(text) <= set(CHARS)
    assert job.text().startswith("TO BE")


def test_without_meta_the_tokens_are_gpt2s_and_the_start_says_so(train_ok, tmp_path):
    data = write_nanogpt(tmp_path / "data")
    job = train_ok(*TINY, "--max_iters=2", f"--data_dir={data}", f"--out_dir={tmp_path / 'run'}")
    assert json.loads((tmp_path / "run/config.json").read_text())["vocab_size"] == 50304
    at_start = job.text().partition("step 0")[0]
    assert "GPT-2" in at_start and "no text sample" in at_start


class Code:
    def __reduce__(self):
        return os.mkdir, ("harm",)


GOOD = meta_of(CHARS)
REFUSED = {
    "code": pickle.dumps(Code()),
    "code beside it": pickle.dumps(GOOD | {"more": Code()}),
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
