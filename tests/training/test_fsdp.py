"""--parallel=fsdp on CPU ranks: the same as DDP, exact resume, one-file checkpoints.

python -m pytest tests/training/test_fsdp.py
"""

import string
from pathlib import Path

import pytest
from helpers import (
    TINY,
    apart,
    chars_meta,
    events,
    keys_of,
    losses,
    same,
    steps_of,
    val_losses,
    write_items,
    write_tiny_shards,
)

from load import load_model
from training.checkpoint import BEST, LAST, read_checkpoint

# 15 evaluation batches, and HellaSwag's rows are one batch: the ranks have unequal shares. A calm
# learning rate, as in test_world_size_invariance. The 4 rows of some weights leave a third rank
# without any.
FSDP = (
    *TINY,
    "--learning_rate=1e-3",
    "--eval_tokens=480",
    "--n_inner=4",
    "--bias=True",
    "--parallel=fsdp",
)


@pytest.fixture(scope="module")
def spaced_data(tmp_path_factory) -> Path:
    """The tiny data with an alphabet that HellaSwag's items can be written in."""
    meta = chars_meta(60) | {"chars": f" {string.ascii_letters}1234567"}
    return write_tiny_shards(tmp_path_factory.mktemp("spaced"), meta=meta)


@pytest.mark.parametrize(
    "keys",
    [
        # It centres whole weights: a share's own column means would give other losses at once.
        ("--norm_type=cbwc", "--gradient_accumulation_steps=4"),
        # all of its phases
        (*keys_of("taper"), "--taper_warmup=5", "--taper_end=12"),
        # What reads hidden states before the first step, and a weight folded with another one
        ("--norm_type=coupled", "--coupled_impl=fold", "--coupled_calibrate=5", "--bias=False"),
        # Output norms and that of the embeddings; one number as scale, alpha and shift
        ("--norm_type=peri",),
        ("--norm_type=derf", "--learning_rate=4e-3"),  # it learns slowly
        # What reads the weights of attention between steps
        ("--norm_type=bhyt",),
    ],
    ids=str,
)
def test_equals_ddp(train_ok, spaced_data, tmp_path, keys):
    """18 float32 steps on 2 ranks: losses, val losses and gradient norms; HellaSwag, sample, and
    the model afterwards.
    """
    words = (*FSDP, *keys, "--max_iters=18", "--eval_interval=9", "--lr_schedule=constant")
    words += ("--sample_tokens=8", f"--data_dir={spaced_data}")
    words += (f"--hellaswag={write_items(tmp_path / 'items.jsonl', 3)}",)
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    for out in (ddp, fsdp):
        train_ok(*words, f"--parallel={out.name}", f"--out_dir={out}", ranks=2)
    assert len(losses(ddp)) == 18 and losses(ddp)[18] < 0.98 * losses(ddp)[1]
    assert apart(losses(ddp), losses(fsdp)) <= 1e-6
    assert apart(val_losses(ddp), val_losses(fsdp)) <= 1e-6
    assert apart(losses(ddp, "grad_norm"), losses(fsdp, "grad_norm")) <= 1e-5
    [score], models = events(ddp, "hellaswag"), [load_model(str(out)) for out in (ddp, fsdp)]
    assert events(fsdp, "hellaswag") == [score]
    assert (ddp / "samples.txt").read_text() == (fsdp / "samples.txt").read_text()
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.double() - second[name].double()).abs().max() < 1e-4
    if "--coupled_calibrate=5" in keys:
        assert first["blocks.1.norm2.norm.alpha"] != 1


def test_resume_is_bit_exact(launch, train_ok, tiny_data, tmp_path):
    """Killed while it saves step 9, in the taper's decay: goes on from step 7, and ends in the
    very same numbers.
    """

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = (*FSDP, *keys_of("taper"), "--max_iters=15", "--eval_interval=7", "--dropout=0.1")
    words += ("--taper_warmup=5", "--taper_end=13", "--checkpoint_interval=3")
    words += (f"--data_dir={tiny_data}", f"--out_dir={broken}")
    train_ok(*words, f"--out_dir={whole}", ranks=2)
    job = launch(*words, ranks=2, patch=("die_in_save", {"step": 9}))
    assert set(job.wait()) == {9}, job.text()
    assert read_checkpoint(broken / LAST)["step"] == 7
    assert (broken / (LAST + ".partial")).exists()  # the new one, without its name
    train_ok(*words, ranks=2)
    assert [record["step"] for record in events(broken, "resume")] == [7]
    assert losses(broken) == losses(whole) and val_losses(broken) == val_losses(whole)
    for name in (LAST, BEST):
        whole_state, state = (read_checkpoint(out / name) for out in (whole, broken))
        assert all(same(whole_state[part], state[part]) for part in ("model", "optimizer"))
    assert not (broken / (LAST + ".partial")).exists()


def test_a_run_goes_on_under_the_other_on_any_number_of_ranks(train_ok, tiny_data, tmp_path):
    """FSDP on 2 ranks, on 3, DDP on 2, FSDP on 2, one process: as one process all the time.

    A taper is in its decay at each change.
    """
    words = (*FSDP, *keys_of("taper"), f"--data_dir={tiny_data}", "--lr_schedule=constant")
    words += ("--gradient_accumulation_steps=6", "--taper_warmup=5", "--taper_end=15")
    train_ok(*words, "--parallel=ddp", "--max_iters=18", f"--out_dir={tmp_path / 'whole'}")
    for parallel, ranks, end in (
        ("fsdp", 2, 6),
        ("fsdp", 3, 8),
        ("ddp", 2, 10),
        ("fsdp", 2, 13),
        ("ddp", 1, 18),
    ):
        text = train_ok(
            *words,
            f"--parallel={parallel}",
            f"--max_iters={end}",
            f"--out_dir={tmp_path / 'run'}",
            ranks=ranks,
        ).text()
        assert "changed since then" in text or end == 6
    assert apart(losses(tmp_path / "whole"), losses(tmp_path / "run")) <= 1e-5


def test_a_model_that_rank_0_could_not_save_is_refused_at_the_start(
    train_fails, tiny_data, tmp_path
):
    """Its 11,264 weights fit the machine, but not with their moments."""
    words = (*FSDP, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    patch = ("small_machine", {"size": 100_000})
    assert "11,264 weights" in train_fails(*words, code=2, ranks=2, patch=patch)
    assert not (tmp_path / "run/log.jsonl").exists()


def test_compiled(train_ok, tiny_data, tmp_path):
    for compiled in (False, True):
        train_ok(
            *FSDP,
            f"--compile={compiled}",
            "--n_layer=1",
            "--max_iters=3",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / str(compiled)}",
            ranks=2,
            patch=("compile_with", {"backend": "aot_eager"}),
            timeout=300,  # dynamo takes its time
        )
    assert apart(losses(tmp_path / "True"), losses(tmp_path / "False")) <= 1e-6
    assert apart(val_losses(tmp_path / "True"), val_losses(tmp_path / "False")) <= 1e-6


def test_float16_skips_a_step_on_all_ranks(train_ok, tiny_data, tmp_path):
    """An infinite gradient in one rank's share, under the loss scale: the step is left out as under
    DDP.
    """
    for parallel, rank in (("ddp", None), ("fsdp", 1)):  # under DDP every rank has the sum
        fault = {"rank": rank, "step": 3, "name": "blocks.1.mlp.up.weight", "value": float("inf")}
        train_ok(
            *FSDP,
            "--dtype=float16",
            "--max_iters=8",
            f"--parallel={parallel}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / parallel}",
            ranks=2,
            patch=("bad_share", fault),
        )
        assert [
            step["step"] for step in steps_of(tmp_path / parallel) if step["grad_norm"] is None
        ] == [3]
    assert apart(losses(tmp_path / "ddp"), losses(tmp_path / "fsdp")) <= 1e-5
