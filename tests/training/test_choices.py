"""What a run takes where its config says `auto`, and that it keeps it.

python -m pytest tests/training/test_choices.py
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY, losses, records, same_weights

from common.errors import CheckpointError, ConfigError
from common.old_keys import AUTO
from configurator import parse_args
from norm_types import NORM_TYPES
from train import TrainConfig
from training import choices

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 16}


@pytest.fixture
def processor(monkeypatch):
    """Let the processor have this instruction set."""

    def is_one(channels: int, feature: str, compiler: bool = True) -> None:
        monkeypatch.setattr(choices, "native_bfloat16", lambda: (channels, feature))
        monkeypatch.setattr(choices, "has_compiler", lambda: compiler)

    return is_one


def config(**keys) -> TrainConfig:
    return TrainConfig(**{**SHAPE, "gradient_accumulation_steps": 1, "max_iters": 1000, **keys})


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "bfloat16"),
        ({"n_embd": 64}, "bfloat16"),
        ({"n_embd": 32}, "float32"),
        ({"batch_size": 1}, "float32"),  # 128 tokens
        ({"batch_size": 1, "gradient_accumulation_steps": 8}, "bfloat16"),  # at once
        ({"dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_bfloat16_where_a_cpu_gains(processor, keys, dtype):
    processor(64, "AMX")
    chosen, line = choices.choose(config(**keys), CPU)
    assert chosen["dtype"] == dtype and line.startswith(dtype)
    processor(128, "AVX512-BF16")
    narrow, _ = choices.choose(config(**keys), CPU)
    assert narrow["dtype"] == ("float32" if keys.get("n_embd") == 64 else dtype)
    processor(0, "")
    assert choices.choose(config(**keys), CPU)[0]["dtype"] == "float32"


def test_a_long_run_is_compiled_where_there_is_a_compiler(processor):
    processor(64, "AMX")
    assert choices.choose(config(), CPU)[0]["compile"] is False
    chosen, line = choices.choose(config(max_iters=10000), CPU)
    assert chosen["compile"] is True and "long enough" in line
    processor(64, "AMX", compiler=False)
    chosen, line = choices.choose(config(max_iters=10000), CPU)
    assert chosen["compile"] is False and "no C++ compiler" in line
    assert choices.choose(config(max_iters=10000, compile=True), CPU)[0]["compile"] is True


@pytest.mark.parametrize(
    ("batch", "steps", "merged"), [(16, 4, 4), (16, 6, 3), (16, 7, 1), (64, 40, 1), (8, 40, 8)]
)
def test_micro_batches_at_once_divide_the_step(batch, steps, merged):
    made = config(batch_size=batch, gradient_accumulation_steps=steps)
    assert choices.choose(made, CPU)[0]["merge_micro_batches"] == merged
    assert merged * batch * 128 <= choices.MERGED_TOKENS or merged == 1


def test_a_gpu_is_as_before_and_norms_decide_nothing(processor):
    processor(64, "AMX")
    chosen, line = choices.choose(config(gradient_accumulation_steps=4), CUDA)
    assert chosen == {"dtype": "bfloat16", "compile": True, "merge_micro_batches": 1}
    assert line == "bfloat16 (on cuda), compiled (on cuda)"
    found = [choices.choose(config(norm_type=name), CPU) for name in NORM_TYPES]
    assert all(pair == found[0] for pair in found)
    told = config(dtype="float32", compile=False, merge_micro_batches=1)
    assert choices.choose(told, CPU)[1] == ""


def test_an_older_run_goes_on_as_it_was(processor):
    processor(64, "AMX")
    then = dataclasses.asdict(config())
    del then["merge_micro_batches"]
    before = {"dtype": "float32", "compile": False, "merge_micro_batches": 1}
    path = Path("ckpt_last.pt")
    assert choices.keep(config(), then, "cpu (some processor)", path)[0] == before
    on_gpu = {"dtype": "bfloat16", "compile": True, "merge_micro_batches": 1}
    assert choices.keep(config(), then, "NVIDIA H200", path)[0] == on_gpu
    assert choices.keep(config(dtype="float64"), then, "cpu", path)[0]["dtype"] == "float64"
    then |= {"dtype": "bfloat16", "merge_micro_batches": 4}
    told = choices.keep(config(dtype="float32"), then, "cpu", path)
    assert told[0]["dtype"] == "float32" and "dtype" not in told[1]
    kept, line = choices.keep(config(), then, "cpu", path)
    assert kept == before | {"dtype": "bfloat16", "merge_micro_batches": 4}
    assert line.startswith("dtype=bfloat16, compile=False") and "began" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "int8"),
        ("dtype", ["float32"]),
        ("compile", "yes"),
        ("merge_micro_batches", "4"),
        ("merge_micro_batches", 1.5),
        ("merge_micro_batches", -3),
    ],
)
def test_a_damaged_config_in_a_checkpoint_is_named(key, value):
    then = dataclasses.asdict(config()) | {key: value}
    with pytest.raises(CheckpointError, match=r"there\.pt: .*damaged"):
        choices.keep(config(), then, "cpu", Path("there.pt"))


def test_a_number_that_does_not_divide_the_step_is_refused():
    with pytest.raises(ConfigError, match="merge_micro_batches=3 does not divide"):
        config(gradient_accumulation_steps=4, merge_micro_batches=3)


def test_all_ranks_choose_as_the_main_one(train_ok, tiny_data, tmp_path):
    """The second rank's processor would have bfloat16. The line has the micro-batches of a rank."""
    out = tmp_path / "run"
    keys = ("--n_embd=128", "--batch_size=128", "--max_iters=2", "--warmup_iters=1")
    patch = ("fast_bfloat16", {"rank": 1})
    job = train_ok(*words(tiny_data, out, *keys), ranks=2, patch=patch)
    assert job.text().startswith("float32 (this processor has no fast bfloat16 products)")
    assert job.text().splitlines()[0].endswith("2 micro-batches at once")
    assert "bfloat16 (" not in job.text() and records(out)[0]["config"]["dtype"] == "float32"


def words(tiny_data, out, *more: str) -> list[str]:
    """The words of a tiny run that leaves everything to auto."""
    kept = [word for word in TINY if "merge" not in word]
    return [*kept, f"--data_dir={tiny_data}", f"--out_dir={out}", *more]


def test_a_run_says_what_it_chose_and_keeps_it(train_ok, tiny_data, tmp_path):
    out = tmp_path / "run"
    job = train_ok(*words(tiny_data, out, "--dtype=bfloat16", "--max_iters=10"))
    lines = job.text().splitlines()
    assert lines[0] == (
        "bfloat16 (as set), not compiled (too short to earn it back), 4 micro-batches at once"
    )
    start = records(out)[0]["config"]
    assert (start["dtype"], start["compile"], start["merge_micro_batches"]) == (
        "bfloat16",
        False,
        4,
    )
    # resumed without a word about them
    job = train_ok(*words(tiny_data, out, "--max_iters=20", "--learning_rate=0.01"))
    assert "dtype=bfloat16, compile=False, merge_micro_batches=4" in job.text().splitlines()[0]
    resume = next(record for record in records(out) if record["event"] == "resume")
    assert resume["changed"] == ["max_iters 10 -> 20"]


def test_a_run_of_before_these_keys_is_resumed_bit_for_bit(train_ok, tiny_data, tmp_path):
    """Its config says auto, and has no merge_micro_batches: float32, eager, one after the other."""
    told = ("--dtype=float32", "--compile=False", "--merge_micro_batches=1")
    out = tmp_path / "run"
    train_ok(*words(tiny_data, out, *told, "--max_iters=20", "--lr_schedule=constant"))
    path = out / "ckpt_last.pt"
    state = torch.load(path, weights_only=True)
    state["config"] |= AUTO
    del state["config"]["merge_micro_batches"]
    torch.save(state, path)
    train_ok(*words(tiny_data, out, "--lr_schedule=constant"))
    resume = next(record for record in records(out) if record["event"] == "resume")
    assert resume["changed"] == ["max_iters 20 -> 40"]
    constant = tmp_path / "constant"
    train_ok(*words(tiny_data, constant, *told, "--lr_schedule=constant"))
    assert losses(out) == losses(constant)
    assert same_weights(out, constant)


def test_at_once_is_one_after_the_other(train_ok, tiny_data, tmp_path):
    """1, 2 or 4 micro-batches at once, on 1 or 2 ranks: the same up to rounding."""
    found = []
    for merged, ranks in ((1, 1), (4, 1), (2, 2)):
        out = tmp_path / f"{merged}-{ranks}"
        keys = (f"--merge_micro_batches={merged}", "--dtype=float64", "--learning_rate=1e-3")
        train_ok(*words(tiny_data, out, *keys, "--norm_type=coupled"), ranks=ranks)
        found.append(losses(out))
    for other in found[1:]:
        assert max(abs(found[0][step] - other[step]) for step in found[0]) <= 1e-12


@pytest.mark.parametrize("study", ["table1_cpu", "mygpt", "posthoc_teacher"])
def test_studies_leave_nothing_to_auto(study):
    pinned, _ = parse_args(TrainConfig, [str(ROOT / "config" / f"{study}.py")], "")
    assert choices.choose(pinned, CPU)[1] == ""


def test_a_run_is_warned_of_a_processor_that_is_slow_in_bfloat16(processor):
    muon = config(dtype="float32", optimizer="muon")
    low = config(dtype="bfloat16")
    processor(0, "")
    assert "dtype=bfloat16 can make" in choices.slow_bfloat16(low, CPU)
    assert "optimizer=muon" in choices.slow_bfloat16(muon, CPU)
    assert not choices.slow_bfloat16(config(dtype="float32"), CPU)
    assert not choices.slow_bfloat16(low, CUDA)
    processor(64, "AMX")
    assert not choices.slow_bfloat16(low, CPU) and not choices.slow_bfloat16(muon, CPU)
