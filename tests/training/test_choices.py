"""What a run takes where its config says `auto`, and that it keeps it.

python -m pytest tests/training/test_choices.py
"""

import pytest
import torch
from helpers import ROOT, TINY, apart, events, losses, records, same_weights

from common.auto import AUTO
from common.past import chosen_then
from configurator import parse_args
from norm_types import NORM_TYPES
from train import TrainConfig
from training import choices

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 16}
MERGED = "gradient_accumulation_steps"
AMX, AVX512, NONE = 64, 128, 0  # the fewest channels that pay


def config(**keys) -> TrainConfig:
    return TrainConfig(**{**SHAPE, MERGED: 1, "max_iters": 1000, **keys})


@pytest.mark.parametrize(
    ("processor", "keys", "expected"),
    [
        (AMX, {}, {"dtype": "bfloat16", "compile": False, "merge_micro_batches": 1}),
        (AVX512, {}, {"dtype": "bfloat16"}),
        (NONE, {}, {"dtype": "float32"}),
        (AMX, {"n_embd": 64}, {"dtype": "bfloat16"}),
        (AVX512, {"n_embd": 64}, {"dtype": "float32"}),
        (AMX, {"n_embd": 32}, {"dtype": "float32"}),
        (AMX, {"batch_size": 1}, {"dtype": "float32"}),  # 128 tokens
        (AMX, {"batch_size": 1, MERGED: 8}, {"dtype": "bfloat16"}),  # at once
        (AMX, {"max_iters": 10_000}, {"compile": True}),
        # The number at once divides the step, and holds at most MERGED_TOKENS.
        (AMX, {MERGED: 4}, {"merge_micro_batches": 4}),
        (AMX, {MERGED: 6}, {"merge_micro_batches": 3}),
        (AMX, {MERGED: 7}, {"merge_micro_batches": 1}),
        (AMX, {MERGED: 40, "batch_size": 64}, {"merge_micro_batches": 1}),
        (AMX, {MERGED: 40, "batch_size": 8}, {"merge_micro_batches": 8}),
    ],
    ids=str,
)
def test_what_a_cpu_gains_from(processor, keys, expected, monkeypatch):
    monkeypatch.setattr(choices, "native_bfloat16", lambda: processor)
    for compiler in (True, False):
        monkeypatch.setattr(choices, "has_compiler", lambda found=compiler: found)
        chosen = choices.choose(config(**keys), CPU)
        wanted = expected | ({} if compiler else {"compile": False})
        assert chosen.items() >= wanted.items()
    # The norm type plays no part, and what is set stays.
    assert chosen == choices.choose(config(**keys, norm_type="taper"), CPU)
    assert "dtype" not in choices.choose(config(**keys, dtype="float32"), CPU)


def test_a_gpu_and_studies():
    chosen = choices.choose(config(**{MERGED: 4}), CUDA)
    assert chosen == {"dtype": "bfloat16", "compile": True, "merge_micro_batches": 1}
    # What older runs took, whose logs say auto or have no such key
    assert chosen_then({"dtype": "auto"}, "NVIDIA H200") == {"jobs": 1, **chosen}
    for study in ("table1_cpu", "mygpt", "posthoc_teacher"):
        pinned, _ = parse_args(TrainConfig, [str(ROOT / "config" / f"{study}.py")], "")
        assert choices.choose(pinned, CPU) == {}
    for norm_type in NORM_TYPES:
        assert choices.choose(config(norm_type=norm_type), CUDA) == chosen


def words(tiny_data, out, *more: str) -> list[str]:
    """The words of a tiny run that leaves everything to auto."""
    kept = [word for word in TINY if "merge" not in word]
    return [*kept, f"--data_dir={tiny_data}", f"--out_dir={out}", *more]


def test_all_ranks_choose_as_the_main_one(train_ok, tiny_data, tmp_path):
    """The second rank's processor would have bfloat16, and is slow at it where the run has it."""
    large = ("--n_embd=64", "--batch_size=32")
    for dtype, keys, is_told in (("auto", large, False), ("bfloat16", (), True)):
        keys = (*keys, f"--dtype={dtype}", "--max_iters=2", f"--warmup_iters={1 + is_told}")
        run = words(tiny_data, tmp_path / dtype, *keys)
        text = train_ok(*run, ranks=2, patch=("fast_bfloat16", {"rank": 1})).text()
        assert ("no fast bfloat16 products are known" in text) == is_told
        assert ("warm-up takes warmup_iters=2 of max_iters=2" in text) == is_told
    assert records(tmp_path / "auto")[0]["config"]["dtype"] == "float32"


def test_a_run_says_what_it_chose_and_keeps_it(train_ok, tiny_data, tmp_path):
    out = tmp_path / "run"
    job = train_ok(*words(tiny_data, out, "--dtype=bfloat16", "--max_iters=10"))
    chosen = "compile=False, merge_micro_batches=2"
    assert job.text().startswith(f"{chosen}: chosen for this run")
    told = {"dtype": "bfloat16", "compile": False, "merge_micro_batches": 2}
    assert records(out)[0]["config"].items() >= told.items()
    # resumed without a word about them
    job = train_ok(*words(tiny_data, out, "--max_iters=20", "--learning_rate=0.01"))
    assert job.text().startswith(f"dtype=bfloat16, {chosen}: as when the run began")
    assert events(out, "resume")[0]["changed"] == ["max_iters 10 -> 20"]


def test_a_run_of_before_these_keys_is_resumed_bit_for_bit(train_ok, tiny_data, tmp_path):
    """Its config says auto, and has no merge_micro_batches: float32, eager, one after the other."""
    told = ("--dtype=float32", "--compile=False", "--merge_micro_batches=1")
    out, whole = tmp_path / "run", tmp_path / "whole"
    constant = "--lr_schedule=constant"
    train_ok(*words(tiny_data, out, *told, "--max_iters=10", constant))
    state = torch.load(out / "ckpt_last.pt", weights_only=True)
    state["config"] |= AUTO
    del state["config"]["merge_micro_batches"]
    torch.save(state, out / "ckpt_last.pt")
    train_ok(*words(tiny_data, out, "--max_iters=20", constant))
    assert events(out, "resume")[0]["changed"] == ["max_iters 10 -> 20"]
    train_ok(*words(tiny_data, whole, *told, "--max_iters=20", constant))
    assert losses(out) == losses(whole) and same_weights(out, whole)


def test_at_once_is_one_after_the_other(train_ok, tiny_data, tmp_path):
    """1, 2 or 4 micro-batches at once, on 1 or 2 ranks: the same up to rounding."""
    found = []
    for merged, ranks in ((1, 1), (4, 1), (2, 2)):
        out = tmp_path / f"{merged}-{ranks}"
        keys = (f"--merge_micro_batches={merged}", "--dtype=float64", "--learning_rate=1e-3")
        train_ok(*words(tiny_data, out, *keys, "--norm_type=coupled"), ranks=ranks)
        found.append(losses(out))
    for other in found[1:]:
        assert apart(found[0], other) <= 1e-12
