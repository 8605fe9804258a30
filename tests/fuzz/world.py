"""The folder in which cases run: data, a trained run, texts, items, and odd files of all kinds."""

import json
import lzma
import os
import shutil
from pathlib import Path

import numpy as np

from data.shards import write_meta, write_shard

SENTENCE = "the man sits under the table and the dog runs slowly over the house. "
CHOICES = ["one", "two", "three", "four"]
# A training run that takes a tenth of a second, on the data of this folder.
TRAINED = (
    "--data_dir=data",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=16",
    "--batch_size=2",
    "--gradient_accumulation_steps=2",
    "--max_iters=2",
    "--warmup_iters=1",
    "--eval_interval=2",
    "--eval_tokens=64",
    "--log_interval=1",
    "--sample_tokens=4",
    "--device=cpu",
    "--dtype=float32",
)


def write_inputs(folder: Path) -> None:
    """Write what programs read, but for the runs: they are trained in it afterwards."""
    folder.mkdir(parents=True)
    for split, count in (("train", 6000), ("val", 1000)):
        text = (SENTENCE * 100).encode()[:count]
        (folder / "data").mkdir(exist_ok=True)
        shard = np.frombuffer(text, np.uint8).astype(np.uint16)
        write_shard(folder / "data" / f"tiny_{split}_000000.bin", shard)
    write_meta(folder / "data", {"tokenizer": "bytes", "vocab_size": 257})
    (folder / "text.txt").write_text(SENTENCE * 30)
    (folder / "other.txt").write_text(SENTENCE[::-1] * 30)
    item = {"ctx": "the man", "endings": CHOICES, "label": 1}
    _write_lines(folder / "items.jsonl", [item | {"ind": number} for number in range(3)])
    row = {"subject": "law", "question": "How many?", "choices": CHOICES, "answer": 2}
    for name in ("dev.jsonl", "test.jsonl"):
        _write_lines(folder / name, [row | {"question": f"{i}?"} for i in range(5)])
    _write_lines(folder / "documents.jsonl", [{"text": SENTENCE}] * 20)


def _write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_odd_files(folder: Path) -> None:
    """Write files that no program can use."""
    for name in ("folder", "folder.jsonl", "folder.txt", "folder.py", "sp ace"):
        (folder / name).mkdir()
    for name in ("empty", "empty.jsonl"):
        (folder / name).touch()
    noise = np.random.RandomState(0).bytes(3000)
    for name in ("binary", "binary.jsonl", "binary.safetensors", "binary.parquet"):
        (folder / name).write_bytes(noise)
    items = (folder / "items.jsonl").read_bytes()
    (folder / "torn.jsonl").write_bytes(items[:-20])
    (folder / "torn.jsonl.xz").write_bytes(lzma.compress(items)[:-20])
    checkpoint = folder / "run" / "ckpt_best.pt"
    if checkpoint.exists():
        (folder / "torn").write_bytes(checkpoint.read_bytes()[:-100])


def copy(source: Path, target: Path) -> None:
    """Give a case its own copy; FIFOs and links, which cannot be copied, are made anew."""
    shutil.copytree(source, target)
    for name in ("fifo", "fifo.txt", "fifo.jsonl", "fifo.py"):
        os.mkfifo(target / name)
    for name in ("loop", "loop.py"):
        (target / name).symlink_to(name)
    (target / "dangling").symlink_to("nowhere")
