"""FineWeb-Edu sample-10BT as GPT-2 token shards. Your own text: data/prepare.py.

    python data/fineweb_edu/prepare.py
        stream sample-10BT from the Hugging Face hub
    python data/fineweb_edu/prepare.py --max_tokens=1000000000
        only its first 1 B tokens

It writes fineweb_edu_val_000000.bin, fineweb_edu_train_000001.bin, ...: the first shard is
validation data. meta.json and progress.json name the commit of the data on the hub, which a folder
keeps to.

The whole sample has about 9.7 M documents and 10 B tokens: 100 shards, 20 GB, from a download of
some 27 GB. One thread tokenises about 2.5 M tokens a second, an hour for all; with several, the
download sets the pace. It can be killed at any moment, as data/prepare.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from configurator import key, parse_args
from data.documents import Document, newest_commit, read_hub
from data.prepare import Progress, ShardKeys, meta_of, shard_name, write_shards

HUB = "HuggingFaceFW/fineweb-edu"
SUBSET = "sample-10BT"


@dataclass(frozen=True)
class FineWebConfig(ShardKeys):
    """FineWeb-Edu"""

    out_dir: str = key(str(Path(__file__).resolve().parent), "folder for the shards")
    tokenizer: str = key(
        "gpt2", "GPT-2's BPE, or single bytes for models of few parameters", ("gpt2", "bytes")
    )
    max_tokens: int = key(0, "stop after this many tokens (0: all)", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_tokens <= self.shard_tokens:
            raise ConfigError(
                "max_tokens fits in the first shard, which is validation data: "
                "set a smaller shard_tokens"
            )


def read_sample(progress: Progress, skip: int) -> Iterator[Document]:
    """Stream sample-10BT from the hub without the first `skip` documents.

    A folder stays with the commit that it began with. Raises DataError.
    """
    revision = progress.settings.get("revision")
    if revision is None:
        raise DataError(
            f"{progress.path} was written by an older version, and does not name the commit of "
            f"{HUB} that its shards are from: choose another --out_dir"
        )
    if not revision:
        revision = newest_commit(HUB)
        progress.settings["revision"] = revision
    yield from read_hub(HUB, skip=skip, name=SUBSET, split="train", revision=revision)


def name_of(index: int) -> str:
    """Return the name of a shard: the first one is validation data."""
    return shard_name("fineweb_edu", "train" if index else "val", index)


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, _ = parse_args(FineWebConfig, argv, __doc__)
    folder = Path(config.out_dir)
    settings = {
        "local": f"{HUB} {SUBSET}",
        "shard_tokens": config.shard_tokens,
        "max_tokens": config.max_tokens,
        "tokenizer": config.tokenizer,
    }
    with FolderLock(folder):
        progress = Progress(folder, settings, meta_of(config.tokenizer, iter(())))
        read = partial(read_sample, progress)
        progress.say(write_shards(read, name_of, config, progress, config.max_tokens))


if __name__ == "__main__":
    run_program(main)
