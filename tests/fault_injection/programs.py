"""The short runs under test."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.shards import write_meta, write_shard
from tests.fault_injection.launch import ROOT, Ended, Fault, Place, run_ranks, run_script

TINY = (
    "--n_layer=1",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=16",
    "--batch_size=2",
    "--eval_tokens=64",
    "--gradient_accumulation_steps=2",
    "--merge_micro_batches=1",
    "--max_iters=4",
    "--warmup_iters=1",
    "--learning_rate=1e-2",
    "--eval_interval=2",
    "--log_interval=1",
    "--sample_tokens=4",
    "--device=cpu",
    "--dtype=float32",
    "--compile=False",
)
WORDS = ["a", "the", "man", "dog", "table", "sits", "runs", "over", "under", "it"]


@dataclass(frozen=True)
class Program:
    """A command that writes below a folder."""

    name: str
    start: Callable[[Place, Fault | None], Ended]
    ranks: int = 1
    setup: Callable[[Place], None] = lambda place: None  # before the first start
    is_script: bool = False  # several commands, each of which may end with a line of error


class Inputs:
    """What the programs read: token shards, text, items of HellaSwag, a trained model."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = folder / "data"
        self.text = folder / "text.txt"
        self.jsonl = folder / "text.jsonl"
        self.items = folder / "items.jsonl"
        self.data.mkdir(parents=True)
        random = np.random.RandomState(0)
        for split, count in (("train", 2000), ("val", 200)):
            tokens = 60 + np.cumsum(1 + random.randint(0, 3, count)) % 60
            write_shard(self.data / f"tiny_{split}_000000.bin", tokens)
        write_meta(self.data, {"tokenizer": "bytes", "vocab_size": 257})
        lines = [" ".join(random.choice(WORDS, 12)) for _ in range(40)]
        self.text.write_text("\n".join(lines))
        self.jsonl.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        items = [
            {
                "ind": index,
                "ctx": line,
                "endings": list(random.choice(WORDS, 4)),
                "label": index % 4,
            }
            for index, line in enumerate(lines[:3])
        ]
        self.items.write_text("".join(json.dumps(item) + "\n" for item in items))
        self.model = self._train("model", "--norm_type=rms")

    def train(self, folder: Path, *keys: str) -> list[str]:
        """Return the command line of a run in `folder`."""
        return ["train.py", *TINY, f"--data_dir={self.data}", f"--out_dir={folder}", *keys]

    def _train(self, name: str, *keys: str) -> Path:
        """Train a model. Returns its run folder."""
        place = Place(self.folder / name)
        place.clear()
        words = self.train(place.files / "run", *keys)
        ended = run_ranks(place, words, 1, "--parallel=fsdp" in keys, None)
        assert ended.is_good, ended.texts
        return place.files / "run"


def programs(inputs: Inputs) -> list[Program]:
    """List all programs under test."""
    return [
        _train(inputs, "train.py, one process", 1, False, f"--hellaswag={inputs.items}"),
        _train(inputs, "train.py, DDP", 2, True),
        _train(inputs, "train.py, FSDP", 1, True, "--parallel=fsdp"),
        _train(inputs, "train.py, FSDP", 2, True, "--parallel=fsdp"),
        _distill(inputs, "distill.py, one process", 1, "--method=full", "--export=True"),
        _distill(inputs, "distill.py, DDP", 2, "--method=full", "--export=True"),
        _distill(inputs, "distill.py, DoRA", 1, "--method=dora", "--rank=2", "--adapter_alpha=4"),
        _convert(inputs, "hf"),
        _convert(inputs, "coupled", "--inexact", f"--text={inputs.text}"),
        _shakespeare(inputs),
        _fineweb(inputs),
        _sweep(inputs),
    ]


def _train(inputs: Inputs, name: str, ranks: int, is_job: bool, *keys: str) -> Program:
    def start(place: Place, fault: Fault | None) -> Ended:
        return run_ranks(place, inputs.train(place.files / "run", *keys), ranks, is_job, fault)

    return Program(name, start, ranks)


def _distill(inputs: Inputs, name: str, ranks: int, *keys: str) -> Program:
    def start(place: Place, fault: Fault | None) -> Ended:
        words = [
            "distill.py",
            f"--teacher={inputs.model}",
            f"--local={inputs.text}",
            f"--out_dir={place.files / 'run'}",
            "--coupled_first=0",
            "--batch_size=2",
            "--gradient_accumulation_steps=2",
            "--max_iters=4",
            "--eval_interval=2",
            "--log_interval=1",
            "--eval_blocks=4",
            "--calibration_blocks=4",
            "--learning_rate=1e-3",
            "--warmup_iters=1",
            "--shuffle=8",
            "--device=cpu",
            *keys,
        ]
        return run_ranks(place, words, ranks, ranks > 1, fault)

    return Program(name, start, ranks)


def _convert(inputs: Inputs, to: str, *keys: str) -> Program:
    def start(place: Place, fault: Fault | None) -> Ended:
        out = place.files / "out" / to
        words = ["convert.py", str(inputs.model), f"--to={to}", f"--out={out}", *keys]
        return run_ranks(place, words, 1, False, fault)

    return Program(f"convert.py --to={to}", start)


def _shakespeare(inputs: Inputs) -> Program:
    name = "data/shakespeare_char/prepare.py"

    def setup(place: Place) -> None:
        # It writes next to itself.
        (place.files / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, place.files / name)

    def start(place: Place, fault: Fault | None) -> Ended:
        words = [str(place.files / name), f"--local={inputs.text}"]
        return run_ranks(place, words, 1, False, fault)

    return Program(name, start, setup=setup)


def _fineweb(inputs: Inputs) -> Program:
    name = "data/fineweb_edu/prepare.py"

    def start(place: Place, fault: Fault | None) -> Ended:
        words = [
            name,
            f"--local={inputs.jsonl}",
            f"--out_dir={place.files / 'shards'}",
            "--tokenizer=bytes",
            "--shard_tokens=1000",
            "--processes=1",
        ]
        return run_ranks(place, words, 1, False, fault)

    return Program(name, start)


def _sweep(inputs: Inputs) -> Program:
    def start(place: Place, fault: Fault | None) -> Ended:
        words = ["./sweep.sh", "config/demo.py", *TINY, f"--data_dir={inputs.data}"]
        env = {
            "ARMS": "rms coupled",
            "SEEDS": "1",
            "HELLASWAG": "off",
            "OUT": str(place.files / "runs"),
            "KEEP": str(place.files / "kept" / "runs.tar.xz"),
        }
        return run_script(place, words, env, fault)

    return Program("sweep.sh", start, is_script=True)
