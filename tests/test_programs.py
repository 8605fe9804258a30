"""sample.py, the configs and the README's claims about them.

python -m pytest tests/test_programs.py
"""

import ast
import contextlib
import dataclasses
import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, TINY, events, val_losses

import sample
from common.errors import ConfigError, UserError, run_program
from configurator import parse_args, read_config_file
from data.tokenizers import CharTokenizer, byte_tokenizer, token_bytes
from distill import DistillConfig
from model import GPT
from train import TrainConfig


@pytest.fixture
def run(train_ok, tiny_data, tmp_path) -> Path:
    train_ok(
        *TINY,
        "--norm_type=taper",
        "--eval_interval=20",
        "--sample_tokens=30",
        f"--data_dir={tiny_data}",
        f"--out_dir={tmp_path / 'run'}",
    )
    return tmp_path / "run"


def test_sample_continues_the_prompt_or_refuses(run, capsys):
    """Deterministic by seed; several samples; the run's own sample begins with val text."""
    words = ["--prompt=579", "--max_new_tokens=20", "--num_samples=2", "--device=cpu"]
    sample.main([str(run), *words])
    text = capsys.readouterr().out
    assert len(text.split("-" * 80)) == 2 and re.fullmatch("579.{20}", text.split("\n")[0])
    sample.main([str(run / "ckpt_last.pt"), *words])
    assert capsys.readouterr().out == text  # the last step was the best, too
    assert len((run / "samples.txt").read_text().strip()) == 16 + 30
    for words, told in (
        ([str(run), "--prompt=~"], "alphabet"),
        ([str(run), "--prompt="], "empty"),
        (["nowhere"], "no such checkpoint"),
    ):
        with pytest.raises(UserError, match=told):
            sample.main(words)


def test_bits_per_byte(run):
    """One character of this data is one byte, so bits per byte are nats per token over ln 2."""
    for record in events(run, "eval"):
        expected = record["val_loss"] / math.log(2)
        assert record["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert np.array_equal(token_bytes(byte_tokenizer()), [1] * 256 + [0])
    assert token_bytes(CharTokenizer("aé€")).tolist() == [1, 2, 3]
    assert val_losses(run)[40] < val_losses(run)[0]


def settings_of(path: Path) -> dict[str, object]:
    return {name: value for name, (value, _) in read_config_file(path).items()}


def test_the_five_recipes_differ_in_norm_type_and_names_alone():
    names = ("layer", "rms", "coupled", "cbwc", "taper")
    configs = {name: settings_of(ROOT / "config" / f"{name}.py") for name in names}
    for name, values in configs.items():
        assert values.pop("norm_type") == name and name in values.pop("out_dir")
        assert values == configs["layer"]
    config, _ = parse_args(TrainConfig, [str(ROOT / "config" / "coupled.py")])
    expected = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
    expected |= {"data_dir": "data/fineweb_edu", "max_iters": 20345, "warmup_iters": 2000}
    assert vars(config).items() >= (expected | {"learning_rate": 6e-4, "min_lr": 6e-5}).items()
    assert config.batch_size * config.gradient_accumulation_steps * config.block_size == 491_520


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.name)
def test_every_config_is_valid_and_repeats_no_default(path):
    """But for norm_type, which a recipe names."""
    kind = DistillConfig if path.name.startswith("distill") else TrainConfig
    config, _ = parse_args(kind, [str(path)])
    assert config.out_dir.startswith("out/") and ast.get_docstring(ast.parse(path.read_text()))
    settings = settings_of(path).items()
    assert [name for name, value in settings if value == getattr(kind, name)] in (
        [],
        ["norm_type"],
    )


@pytest.mark.parametrize(
    ("name", "rows", "millions"),
    [("demo", 320, 0.84), ("small", 50304, 30.1), ("coupled", 50304, 124.4)],
)
def test_model_sizes(name, rows, millions):
    config, _ = parse_args(TrainConfig, [str(ROOT / "config" / f"{name}.py")])
    model = GPT(dataclasses.replace(config, vocab_size=rows))
    assert model.num_params() / 1e6 == pytest.approx(millions, rel=0.01)


PROGRAMS = [
    "train",
    "sample",
    "report",
    "bench.train",
    "hellaswag",
    "convert",
    "doctor",
    "bench.fold",
    "bench_decode",
    "bench.kernels",
    "bench.bytes",
    "distill",
    "judge",
    "posthoc.rms_stats",
    "evals.lm_eval_model",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program, capsys):
    """--help exits 0 and shows how the program is called."""
    with contextlib.suppress(SystemExit):
        importlib.import_module(program).main(["--help"])
    command = f"python -m {program}" if "." in program else f"python {program}.py"
    shown = capsys.readouterr().out
    assert command in shown
    for field in dataclasses.fields(TrainConfig) if program == "train" else ():
        assert re.search(rf"--{field.name}=.*\(.+\)\n +\S", shown), field.name


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("train", f"--seed={2**32}", "seed"),
        ("train", "--vocab_size=1 --n_vocab=2", "vocab_size"),
        (
            "train",
            "--norm_type=taper --max_iters=40 --taper_warmup=30 --taper_end=0.5",
            "is step .* of 40, after taper_end",
        ),
        (
            "train",
            "--norm_type=taper --max_iters=40 --taper_end=10",
            "is step .* of 40, after taper_end",
        ),
        ("sample", "out --dtype=float16 --compile=True", "dtype.*compile"),
        ("sample", "", "name a model"),
        ("hellaswag", "", "name a model"),
        ("doctor", "", "name a model"),
        ("doctor", "missing.py:make", "no such file"),
        ("bench_decode", "random:gpt2 --arms=A,Z", "arms"),
        ("bench_decode", "random:gpt2 --batch=0", "batch"),
        ("bench_decode", "random:gpt2 --batch=1.5", "batch"),
        ("bench_decode", "random:gpt2 --trace", "trace"),
        ("bench_decode", "random:gpt2 --bandwidth=5e-324", "bandwidth"),
        ("bench.fold", "hf:gpt5", "hf:gpt2"),
        ("bench.fold", "x --rounds=5", "rounds"),
        ("bench.fold", "x --modes=eager,fast", "fast"),
        ("bench.fold", "x --lengths=0", "length"),
        ("bench.kernels", "--ops=rmsnorm", "ops"),
        ("bench.kernels", "--rounds=5", "rounds"),
        ("bench.kernels", "--channels=0", "channels"),
        ("bench.kernels", "--dtype=int8", "dtype"),
        ("bench.aot", "--sm=91", "sm"),
        ("bench.aot", "--sm=", "sm"),
        ("bench.aot", "--channels=0", "channels"),
        ("bench.aot", "--batch=0", "batch"),
        ("bench.bytes", "--tokens=1000", "multiple of block_size=1024"),
        ("bench.bytes", "--tokens=1024", "two sequences"),
        ("bench.bytes", "--n_inner=768", "n_inner"),
        ("bench.bytes", "--dropout=0.1", "dropout"),
        ("evals.lm_eval_model", "run", "--tasks=NAMES"),
        ("evals.lm_eval_model", "--tasks=x", "model"),
        ("evals.lm_eval_model", "run run --tasks=x", "once"),
    ],
)
def test_settings_that_a_program_refuses(program, words, named):
    """bench.aot alone wants Triton, which not every platform has."""
    with pytest.raises(ConfigError, match=named):
        pytest.importorskip(program).main(words.split())


def test_help_of_a_program_without_keys(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["table.py", "--help"])
    with pytest.raises(SystemExit):
        run_program(None, "python table.py FOLDER")
    assert "FOLDER" in capsys.readouterr().out
