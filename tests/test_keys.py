"""Every key of every program, with odd values: a config that keeps them, or one line of error.

    python -m pytest tests/test_keys.py

tests/test_configurator.py has the grammar; here are types, bounds and contradictions of the keys.
"""

import contextlib
import dataclasses
import importlib
import io
import math
import re
import sys
import typing

import pytest
from helpers import ROOT

from common.errors import run_program
from configurator import parse_args
from train import TrainConfig

# Module -> its config class, and what the class asks for besides.
CONFIGS = {
    "train": ("TrainConfig",),
    "distill": ("DistillConfig", "--teacher=run", "--out_dir=out"),
    "sample": ("SampleConfig",),
    "report": ("ReportConfig",),
    "judge": ("JudgeConfig",),
    "hellaswag": ("HellaSwagConfig",),
    "convert": ("ConvertConfig", "--to=rms", "--out=out"),
    "doctor": ("DoctorConfig",),
    "bench_decode": ("DecodeBenchConfig",),
    "bench.train": ("TrainBenchConfig",),
    "bench.kernels": ("KernelBenchConfig",),
    "bench.fold": ("FoldBenchConfig",),
    "bench.bytes": ("LedgerConfig",),
    "posthoc.rms_stats": ("StatsConfig", "--text=text"),
    "data.prepare": ("PrepareConfig",),
    "data.fineweb_edu.prepare": ("FineWebConfig",),
    "evals.lm_eval_model": ("EvalConfig", "--tasks=piqa"),
}
ODD = (
    *("", " ", "é", "日本😎", "\udcff", "a\nb", "\x1b[31mred", "\x01", "%s{0}", "*", "x" * 3000),
    *("0", "1", "-1", "0.5", "1e-320", "1e308", "1e999", "nan", "-inf", "2147483648", "1" * 5000),
    *("9223372036854775808", "None", "auto", "True", "yes", "1,2", ",", "1,nan", "(1,2)", "1_0"),
    *("missing/under/it", "/dev/full", "FILE:missing", "random:x", "--help", "=", "٣"),
)


def values_of(field: dataclasses.Field) -> list[str]:
    """List what a key is tried with: beside its bounds and its choices, too."""
    found = [*ODD, *field.metadata["choices"], *map(str.upper, field.metadata["choices"])]
    for bound in (field.metadata["least"], field.metadata["most"]):
        if bound is not None:
            far = (math.nextafter(bound, sign * 9e99) for sign in (1, -1))
            found += map(str, (bound, bound - 1, bound + 1, *far))
    return found


def outcome(main: typing.Callable, words: list[str], names: list[str]) -> object:
    """Return what `main` makes of the words; None if that is one line of error.

    It names one of `names`, or a setting that contradicts it.
    """
    stderr, found = io.StringIO(), []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as end:
            run_program(lambda argv: found.append(main(argv)))
    lines = stderr.getvalue().splitlines()
    if not end.value.code:
        assert found and not lines
        return found[0]
    assert len(lines) == 1 and lines[0].startswith("error: "), words
    assert lines[0].isprintable() and len(lines[0]) < 1200
    if max(map(len, words)) > 255:  # a file of this name is another error, which names the file
        return None
    assert end.value.code == 2, words
    is_named = any(name in lines[0] for name in names)
    assert is_named or re.search(r"\b[a-z_]+=", lines[0]), (words, lines)
    return None


def check_keys(main: typing.Callable, cls: type) -> None:
    """Try each key with each value."""
    # The programs that take train.py's keys too are tried with their own.
    own = [
        f for f in dataclasses.fields(cls) if cls is TrainConfig or f.name in cls.__annotations__
    ]
    for field in own:
        for text in values_of(field):
            config = outcome(main, [f"--{field.name}={text}"], [field.name])
            if config is None:
                continue
            value = getattr(config, field.name)
            if type(value) in (int, float):
                assert math.isfinite(value) and value == float(text)


@pytest.mark.parametrize("name", CONFIGS)
def test_keys(name):
    cls, *base = CONFIGS[name]
    cls = getattr(importlib.import_module(name), cls)
    check_keys(lambda argv: parse_args(cls, [*base, *argv])[0], cls)


def test_the_demo_takes_the_defaults_that_a_newcomer_is_told_of():
    """RMSNorm, and the rule for `init_std`, so that another width begins as it should."""
    config, _ = parse_args(TrainConfig, [str(ROOT / "config/demo.py"), "--n_embd=64"])
    assert config.norm_type == "rms" and config.init_std is None
