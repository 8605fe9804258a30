"""data/fineweb_edu/prepare.py with the real `datasets`, which reads a folder for each commit.

python -m pytest tests/data/test_hub.py
"""

from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data.documents import read_hub
from data.fineweb_edu import prepare as fineweb_edu
from data.shards import find_shards, open_shard, read_meta

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CARD = """---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
OLD, NEW = "a" * 40, "b" * 40


def publish(commit: Path) -> Path:
    """A data set in four parquet files. Returns the last one."""
    folder = commit / "sample/10BT"
    folder.mkdir(parents=True)
    (commit / "README.md").write_text(CARD)
    texts = texts_of(commit.name)
    for part in range(4):
        some = pa.table({"text": texts[50 * part : 50 * part + 50]})
        parquet.write_table(some, folder / f"{part}.parquet")
    return folder / "3.parquet"


def texts_of(commit: str) -> list[str]:
    return [f"{commit} {number} " * 9 for number in range(200)]


def test_a_resumed_preparation_keeps_to_its_commit(tmp_path, monkeypatch):
    """The last file is torn at first, and fetched again when the hub has a newer commit.

    The first shard is validation data, and the last one ends at max_tokens.
    """
    last, out = publish(tmp_path / OLD), tmp_path / "out"
    publish(tmp_path / NEW)

    def read(dataset: str, revision: str, **options: object):
        return read_hub(str(tmp_path / revision), **options)

    def prepare(newest: str) -> None:
        monkeypatch.setattr(fineweb_edu, "newest_commit", lambda dataset: newest)
        words = ["--tokenizer=bytes", "--shard_tokens=9000", "--max_tokens=70000"]
        fineweb_edu.main([*words, "--processes=1", f"--out_dir={out}"])

    monkeypatch.setattr(fineweb_edu, "read_hub", read)
    content = last.read_bytes()
    last.write_bytes(content[:-9])
    with pytest.raises(DataError, match=OLD):
        prepare(OLD)
    assert len(list(out.glob("*.bin"))) > 2
    last.write_bytes(content)
    prepare(NEW)
    assert read_meta(out) == {"tokenizer": "bytes", "vocab_size": 257, "revision": OLD}
    (val,), train = (find_shards(out, split) for split in ("val", "train"))
    tokens = np.concatenate([open_shard(path) for path in (val, *train)])
    expected = [token for text in texts_of(OLD) for token in [256, *text.encode()]]
    assert tokens.tolist() == expected[:70_000]
