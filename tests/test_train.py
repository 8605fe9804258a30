"""train.py itself, run in fresh processes: equality of norms, resume, evaluation, ranks, faults.

python -m pytest tests/test_train.py
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import (
    COMPARED_TYPES,
    ROOT,
    TINY,
    contents,
    keys_of,
    losses,
    records,
    same_weights,
    steps_of,
    val_losses,
    weights,
    write_tiny_shards,
)

import common.fingerprint
from common import environment, lock
from common.distributed import StopSignal
from common.errors import CheckpointError, UserError
from common.fingerprint import data_difference
from configurator import parse_args
from evidence.runs import Run
from load import init_from
from model import GPT
from taper import TaperSchedule
from train import TrainConfig
from training.dataloader import Blocks


@pytest.mark.parametrize("bias", [True, False])
def test_cbwc_trains_as_layer_and_rms_does_not(train_ok, tiny_data, tmp_path, bias):
    """40 float64 steps with weight decay, clipping, accumulation and a tied head."""
    for norm_type in ("layer", "cbwc", "rms"):
        train_ok(
            *TINY,
            "--dtype=float64",
            f"--bias={bias}",
            f"--norm_type={norm_type}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / norm_type}",
        )
    layer, cbwc, rms = (losses(tmp_path / name) for name in ("layer", "cbwc", "rms"))
    assert len(layer) == 40 and layer[40] < 0.8 * layer[1]
    assert max(abs(layer[step] - cbwc[step]) for step in layer) <= 1e-12
    assert max(abs(layer[step] - rms[step]) for step in layer) > 1e-3


@pytest.mark.parametrize(
    ("norm_type", "ranks", "dtype"),
    [
        ("layer", 1, "float32"),
        ("rms", 2, "float32"),
        ("coupled", 1, "bfloat16"),
        ("cbwc", 2, "float32"),
        ("taper", 2, "bfloat16"),
    ],
)
def test_resume_is_bit_exact(launch, train_ok, tiny_data, tmp_path, norm_type, ranks, dtype):
    """40 steps in one go; and with SIGTERM, resume, SIGKILL, resume from an earlier checkpoint.

    Every norm type meets both signals, and so does every number of ranks; not every type every
    number. One rank and a taper: the next test. Both signals fall into the taper's decay.
    """

    def words(name: str) -> tuple[str, ...]:
        return (
            *TINY,
            *keys_of(norm_type),
            "--checkpoint_interval=6",
            "--eval_interval=15",
            "--dropout=0.1",
            f"--dtype={dtype}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / name}",
        )

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_ok(*words("whole"), ranks=ranks)
    assert sorted(losses(whole)) == list(range(1, 41))

    job = launch(*words("broken"), ranks=ranks, patch=("slow_steps", {"seconds": 0.02}))
    job.signal_at(broken, 12, signal.SIGTERM)
    assert set(job.wait()) == {0}, job.text()
    end = records(broken)[-1]
    assert end["event"] == "end" and "SIGTERM" in end["reason"] and 12 <= end["step"] < 25
    stopped = losses(broken)

    job = launch(*words("broken"), ranks=ranks, patch=("slow_steps", {"seconds": 0.02}))
    job.signal_at(broken, 25, signal.SIGKILL)
    assert set(job.wait()) == {-9}
    assert torch.load(broken / "ckpt_last.pt", weights_only=True)["step"] == 24

    train_ok(*words("broken"), ranks=ranks)
    resumes = [record["step"] for record in records(broken) if record["event"] == "resume"]
    assert resumes == [end["step"], 24] and max(stopped) == end["step"]
    assert losses(broken) == losses(whole)
    assert val_losses(broken) == val_losses(whole)
    assert same_weights(broken, whole)


@pytest.mark.parametrize(("norm_type", "ranks"), [("rms", 1), ("taper", 2)])
def test_killed_before_its_end_a_run_gets_one(
    launch, train_ok, tiny_data, tmp_path, norm_type, ranks
):
    def words(name: str) -> tuple[str, ...]:
        keys = ("--sample_tokens=20", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / name}")
        return *TINY, *keys_of(norm_type), *keys

    train_ok(*words("whole"), ranks=ranks)
    job = launch(*words("run"), ranks=ranks, patch=("die_in_sample", {}))
    assert set(job.wait()) == {9}
    assert not (tmp_path / "run/samples.txt").exists()
    train_ok(*words("run"), ranks=ranks)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    found, whole = ((tmp_path / name / "samples.txt").read_text() for name in ("run", "whole"))
    assert found == whole
    assert [event["event"] for event in records(tmp_path / "run")[-2:]] == ["resume", "end"]
    assert records(tmp_path / "run")[-1]["reason"] == "done"
    job = train_ok(*words("run"), ranks=ranks)
    assert "finished already" in job.text()


@pytest.mark.parametrize(
    ("damage", "gap"),
    [
        (lambda text: text, None),
        (lambda text: "".join(text.splitlines(keepends=True)[:8]), [5, 20]),
        (lambda text: "", [1, 20]),
        (lambda text: text[40:], [1, 20]),
        (lambda text: None, [1, 20]),
    ],
    ids=["whole", "cut", "empty", "half a start", "gone"],
)
def test_a_gap_in_the_log_is_recorded(train_ok, tiny_data, tmp_path, damage, gap):
    """Also where it has lost its start event: then it gets another one."""
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    train_ok(*words, "--max_iters=20", "--lr_schedule=constant")
    log = tmp_path / "run/log.jsonl"
    left = damage(log.read_text())
    log.unlink() if left is None else log.write_text(left)
    train_ok(*words, "--lr_schedule=constant")
    assert records(tmp_path / "run")[0]["event"] == "start"
    resume = next(event for event in records(tmp_path / "run") if event["event"] == "resume")
    assert resume.get("gap") == gap
    run = Run(tmp_path / "run")
    run.check()
    run.events[:] = [event | {"changed": []} for event in run.events]  # max_iters was
    assert ("has lost steps" in run.problem()) == (gap is not None)


def test_a_rank_that_loses_another_says_so_in_one_line(launch, tiny_data, tmp_path):
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    job = launch(*words, ranks=2, patch=("main_rank_fails", {"step": 3}))
    assert job.wait() == [1, 1]
    main, other = (output.read_text() for output in job.outputs)
    assert main.splitlines()[-1] == "error: log.jsonl: cannot be written (No space left on device)"
    assert other.splitlines() == ["error: rank 1 has lost another rank, whose own message says why"]


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGHUP,), (signal.SIGTERM, signal.SIGTERM)],
    ids=["a closed terminal", "a launcher, which repeats it"],
)
def test_a_signal_stops_and_saves(launch, tiny_data, tmp_path, signals):
    words = (*TINY, "--max_iters=4000", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    job = launch(*words, patch=("slow_steps", {"seconds": 0.05}))
    for number in signals:
        job.signal_at(tmp_path, 5, number)
    assert job.wait() == [0]
    end = records(tmp_path)[-1]
    assert signals[0].name in end["reason"]
    assert torch.load(tmp_path / "ckpt_last.pt", weights_only=True)["step"] == end["step"] >= 5


@pytest.mark.parametrize("ignored", [True, False])
def test_under_nohup_a_closed_terminal_is_nothing(ignored):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        StopSignal()
        assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == ignored
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("count", "code", "said"), [(1, 0, "SIGINT\n"), (2, -signal.SIGINT, "")])
def test_a_second_ctrl_c_ends_at_once(count, code, said):
    program = (
        "import signal; from common.distributed import StopSignal; stop = StopSignal(); "
        f"[signal.raise_signal(signal.SIGINT) for _ in range({count})]; print(stop.name)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, said)


def test_a_reader_that_leaves_does_not_end_the_training(tiny_data, tmp_path):
    """As `python train.py ... | head -1`."""
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    process = subprocess.Popen(
        [sys.executable, "train.py", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "parameters" in process.stdout.readline() + process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 0
    assert records(tmp_path)[-1]["reason"] == "done" and len(losses(tmp_path)) == 40


def test_a_taper_killed_in_each_phase_goes_on_bit_for_bit(launch, train_ok, tiny_data, tmp_path):
    """One run that dies while it is warm, in its decay and after its end, each time beyond its last
    checkpoint.
    """

    def words(name: str) -> tuple[str, ...]:
        return (
            *TINY,
            *keys_of("taper"),
            "--checkpoint_interval=6",
            "--dropout=0.1",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / name}",
        )

    train_ok(*words("whole"))
    for step, phase in ((8, "warm"), (21, "blend"), (33, "fixed")):
        assert TaperSchedule(10, 30).at(step, 40)[0] == phase
        assert set(launch(*words("killed"), patch=("die_after", {"step": step})).wait()) == {9}
    train_ok(*words("killed"))
    resumes = [
        record["step"] for record in records(tmp_path / "killed") if record["event"] == "resume"
    ]
    assert resumes == [6, 18, 30]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "killed", tmp_path / "whole")


def test_evaluation_is_neutral(train_ok, tiny_data, tmp_path):
    """Evaluating every 5 steps or never changes no training loss of a taper, dropout included."""
    for interval in (5, 1000):
        train_ok(
            *TINY,
            *keys_of("taper"),
            "--dropout=0.2",
            f"--eval_interval={interval}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / str(interval)}",
        )
    often, never = (losses(tmp_path / name) for name in ("5", "1000"))
    assert len(often) == 40 and often == never
    assert len(val_losses(tmp_path / "5")) == 9


@pytest.mark.parametrize("norm_type", ["coupled", "taper"])
def test_world_size_invariance(train_ok, tiny_data, tmp_path, norm_type):
    """1, 2 and 4 ranks at equal tokens a step: the same samples, losses within 1e-5, the same
    validation set.
    """
    samples, runs = {}, {}
    for ranks in (1, 2, 4):
        out = tmp_path / str(ranks)
        # A calm learning rate: a violent taper amplifies the last bit of a sum to 0.1 within 30
        # steps.
        train_ok(
            *TINY,
            *keys_of(norm_type),
            "--max_iters=24",
            "--eval_interval=12",
            "--learning_rate=1e-3",
            f"--data_dir={tiny_data}",
            f"--out_dir={out}",
            ranks=ranks,
            patch=("record_samples", {"path": str(tmp_path / f"ids{ranks}")}),
        )
        lines = [
            line
            for rank in range(ranks)
            for line in (tmp_path / f"ids{ranks}.{rank}").read_text().splitlines()
        ]
        samples[ranks] = sorted(line for line in lines if int(line.split()[0]) <= 24)
        runs[ranks] = losses(out), val_losses(out)
    assert len(samples[1]) == 96 and samples[1] == samples[2] == samples[4]
    for ranks in (2, 4):
        assert max(abs(runs[1][0][step] - runs[ranks][0][step]) for step in runs[1][0]) <= 1e-5
        assert runs[ranks][1].keys() == runs[1][1].keys() == {0, 12, 24}
        assert (
            runs[ranks][1][0] == runs[1][1][0]
        )  # before training: the very same sum, in the same order


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, ()), (2, ()), (2, ("--parallel=fsdp",))], ids=["one", "DDP", "FSDP"]
)
def test_blocks_that_are_computed_again_train_alike(train_ok, tiny_data, tmp_path, ranks, words):
    """To the bit, dropout included."""
    words = (*TINY, *words, "--max_iters=6", "--dropout=0.1", f"--data_dir={tiny_data}")
    for value in ("False", "True"):
        out = f"--out_dir={tmp_path / value}"
        train_ok(*words, "--norm_type=coupled", f"--recompute={value}", out, ranks=ranks)
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert same_weights(tmp_path / "True", tmp_path / "False")


def test_norm_types_share_weights_and_data(train_ok, tiny_data, tmp_path):
    """Runs that differ in norm_type share the initial non-norm weights and see the same samples."""
    seen, start = {}, {}
    for norm_type in COMPARED_TYPES:
        train_ok(
            *TINY,
            f"--norm_type={norm_type}",
            "--max_iters=1",
            "--learning_rate=1e-30",
            "--min_lr=0",
            "--bias=True",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / norm_type}",
            patch=("record_samples", {"path": str(tmp_path / norm_type) + ".ids"}),
        )
        seen[norm_type] = (tmp_path / f"{norm_type}.ids.0").read_text().splitlines()[:4]
        start[norm_type] = {
            name: w for name, w in weights(tmp_path / norm_type).items() if "norm" not in name
        }
    assert len(seen["layer"]) == 4
    for norm_type in COMPARED_TYPES[1:]:
        assert seen[norm_type] == seen["layer"]
        assert start[norm_type].keys() == start["layer"].keys()
        for name, w in start[
            norm_type
        ].items():  # zero biases have moved by the 1e-31 of the one step
            assert torch.allclose(w, start["layer"][name], rtol=0, atol=1e-29), name


@pytest.mark.parametrize(("ranks", "bad_rank"), [(1, 0), (2, 1)])
def test_nan_loss_stops_all_ranks_and_keeps_the_checkpoint(
    launch, tiny_data, tmp_path, ranks, bad_rank
):
    out = tmp_path / "run"
    words = (*TINY, "--checkpoint_interval=5", f"--data_dir={tiny_data}", f"--out_dir={out}")
    job = launch(*words, ranks=ranks, patch=("nan_loss", {"rank": bad_rank, "step": 7}))
    assert set(job.wait()) == {1}
    errors = [line for line in job.text().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"step 7: the loss on rank {bad_rank} is not finite" in errors[0]
    assert torch.load(out / "ckpt_last.pt", weights_only=True)["step"] == 5
    assert max(losses(out)) == 6 and "step 7" in records(out)[-1]["reason"]
    job = launch(*words, ranks=ranks)  # without the fault, the run goes on from the good checkpoint
    assert set(job.wait()) == {0} and max(losses(out)) == 40


def test_nan_gradient_is_named(launch, tiny_data, tmp_path):
    job = launch(
        *TINY,
        f"--data_dir={tiny_data}",
        f"--out_dir={tmp_path / 'run'}",
        patch=("nan_gradient", {"name": "blocks.1.mlp.up.weight", "step": 3}),
    )
    assert job.wait() == [1]
    assert "step 3: the gradient of blocks.1.mlp.up.weight is not finite" in job.text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_trains(train_ok, tiny_data, tmp_path, dtype):
    train_ok(*TINY, f"--dtype={dtype}", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / dtype}")
    assert losses(tmp_path / dtype)[40] < 0.8 * losses(tmp_path / dtype)[1]


def test_log_format(train_ok, tiny_data, tmp_path):
    train_ok(
        *TINY, "--eval_interval=20", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}"
    )
    log = records(tmp_path / "run")
    assert (
        log[0]["event"] == "start"
        and log[0]["norm_keys"].items() >= {"norm_plan": "", "norm_eps": 1e-5}.items()
    )
    assert {"config", "git", "versions", "device", "n_params", "norm_plan"} <= log[0].keys()
    assert [r["step"] for r in log if r["event"] == "eval"] == [0, 20, 40]
    step = steps_of(tmp_path / "run")[-1]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tok_per_s", "mfu"} <= step.keys()
    assert step["tokens"] == 40 * 2 * 4 * 16 and step["mfu"] is None and step["tok_per_s"] > 0
    assert steps_of(tmp_path / "run")[0]["tok_per_s"] is None  # warm-up
    assert log[-1] == {
        "event": "end",
        "reason": "done",
        "step": 40,
        "tok_per_s": log[-1]["tok_per_s"],
    }
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "log.jsonl", "ckpt_last.pt", "ckpt_best.pt"} <= names


def test_finished_run_is_left_alone_and_longer_run_goes_on(launch, train_ok, tiny_data, tmp_path):
    out = tmp_path / "run"
    words = (*TINY, "--lr_schedule=constant", f"--data_dir={tiny_data}", f"--out_dir={out}")
    train_ok(*words)
    before = contents(out)
    assert "finished already" in train_ok(*words, "--log_interval=3").text()
    for other in ("--seed=2", "--max_iters=20"):
        job = launch(*words, other)
        name, value = other[2:].split("=")
        assert job.wait() == [2] and f"{name} " in job.text() and f" -> {value}" in job.text()
    assert contents(out) == before
    text = train_ok(*words, "--max_iters=45").text()
    assert "changed since then: max_iters 40 -> 45" in text
    assert sorted(losses(out)) == list(range(1, 46))


def test_init_from_turns_rms_into_taper(train_ok, tiny_data, tmp_path):
    train_ok(*TINY, "--norm_type=rms", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'rms'}")
    final = val_losses(tmp_path / "rms")[40]
    text = train_ok(
        *TINY,
        *keys_of("taper"),
        f"--init_from={tmp_path / 'rms'}",
        f"--data_dir={tiny_data}",
        "--learning_rate=1e-3",
        f"--out_dir={tmp_path / 'taper'}",
    ).text()
    assert "0 are left out" in text
    assert val_losses(tmp_path / "taper")[0] == pytest.approx(
        final, abs=1e-6
    )  # still the same function
    gains = weights(tmp_path / "rms")["blocks.0.norm1.norm.weight"]
    assert not torch.allclose(gains, torch.ones_like(gains), atol=1e-3)


def test_init_from_refuses_another_function(launch, train_ok, tiny_data, tmp_path):
    job = train_ok(
        *TINY, "--max_iters=2", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}"
    )
    assert "warning: warm-up takes warmup_iters=5 of max_iters=2" in job.text()
    for key in ("--n_head=4", "--activation=relu2"):
        job = launch(
            *TINY,
            key,
            f"--init_from={tmp_path / 'run'}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / 'other'}",
        )
        assert job.wait() == [1]
        assert "add --" in job.text()
    taper = GPT(parse_args(TrainConfig, [*TINY, "--norm_type=taper", "--vocab_size=128"])[0])
    with pytest.raises(
        CheckpointError, match=r"norm_type=layer.*taper_base=rms away: add --taper_base=layer"
    ):
        init_from(taper, str(tmp_path / "run"))
    padded = ("--vocab_size=128", f"--init_from={tmp_path / 'run'}", f"--data_dir={tiny_data}")
    train_ok(*TINY, *padded, "--max_iters=1", f"--out_dir={tmp_path / 'padded'}")
    after = val_losses(tmp_path / "run")[2]
    assert val_losses(tmp_path / "padded")[0] == pytest.approx(after, abs=1e-6)


def test_resume_takes_new_optimiser_settings_and_refuses_a_taper_backwards(
    launch, train_ok, tiny_data, tmp_path
):
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    train_ok(*words, "--weight_decay=0.3")
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    train_ok(*words, "--weight_decay=0.2", "--max_iters=42")
    train_ok(*words, "--weight_decay=0.3", "--max_iters=42", f"--out_dir={tmp_path / 'same'}")
    assert not same_weights(tmp_path / "run", tmp_path / "same")
    words = (
        *TINY,
        "--norm_type=taper",
        f"--data_dir={tiny_data}",
        f"--out_dir={tmp_path / 'taper'}",
    )
    train_ok(*words)  # its schedule is in shares of max_iters
    before = {path: path.read_bytes() for path in (tmp_path / "taper").iterdir()}
    job = launch(*words, "--max_iters=80")
    assert job.wait() == [2] and "backwards" in job.text() and "keep max_iters" in job.text()
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "taper").iterdir()
    }  # the run is as it was


def test_resume_from_a_path(launch, train_ok, tiny_data, tmp_path):
    words = (*TINY, f"--data_dir={tiny_data}")
    train_ok(*words, "--max_iters=20", f"--out_dir={tmp_path / 'a'}")
    last = f"--resume={tmp_path / 'a' / 'ckpt_last.pt'}"
    train_ok(*words, last, f"--out_dir={tmp_path / 'b'}")
    assert records(tmp_path / "b")[0]["event"] == "start" and sorted(
        losses(tmp_path / "b")
    ) == list(range(21, 41))
    job = launch(*words, last, "--max_iters=60", f"--out_dir={tmp_path / 'b'}")
    assert job.wait() == [1] and "holds another run" in job.text()


def test_two_processes_do_not_train_in_one_folder(launch, tiny_data, tmp_path):
    """The second is told so and touches nothing; a killed one keeps nobody out."""
    words = (
        *TINY,
        "--max_iters=100000",
        f"--data_dir={tiny_data}",
        f"--out_dir={tmp_path / 'run'}",
    )
    first = launch(*words)
    first.signal_at(tmp_path / "run", 1, signal.SIGCONT)  # it trains
    config = (tmp_path / "run/config.json").read_text()
    for ranks in (1, 2):
        second = launch(
            *words, "--learning_rate=1e-4", ranks=ranks, patch=("impatient", {"seconds": 0.5})
        )
        assert second.wait() == [1] * ranks and "waiting for its end, 0 s at most" in second.text()
        assert "another process is working there: wait for it" in second.text()
        assert second.text().count("error:") == 1 and "Traceback" not in second.text()
    assert (tmp_path / "run/config.json").read_text() == config and first.processes[0].is_alive()
    first.signal_at(tmp_path / "run", 2, signal.SIGKILL)
    assert first.wait() == [-signal.SIGKILL]
    assert launch(*words, "--max_iters=3").wait() == [0] and sorted(losses(tmp_path / "run")) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_waits_and_sees_what_the_first_one_leaves(
    launch, tiny_data, tmp_path, ranks
):
    """The same command twice, the second while the first one trains: it must not start from scratch
    and overwrite.
    """
    words = (*TINY, "--max_iters=10", f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    first = launch(*words, ranks=ranks, patch=("slow_steps", {"seconds": 0.3}))
    first.signal_at(
        tmp_path / "run", 1, signal.SIGCONT
    )  # it trains, and there is no checkpoint yet
    second = launch(*words, ranks=ranks)
    wait_for(second, "another process is working there: waiting for its end, 60 s")
    assert set(first.wait()) == {0}
    before = contents(tmp_path / "run")
    assert (
        set(second.wait()) == {0}
        and "finished already" in second.text()
        and contents(tmp_path / "run") == before
    )


def wait_for(job, text: str, timeout: float = 60) -> None:
    """Until a job has printed `text`."""
    end = time.monotonic() + timeout
    while text not in job.text():
        assert time.monotonic() < end, job.text()
        time.sleep(0.02)


def test_a_second_start_that_waits_can_be_stopped(launch, tiny_data, tmp_path):
    words = (*TINY, "--max_iters=100000", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    launch(*words).signal_at(tmp_path, 1, signal.SIGCONT)
    second = launch(*words)
    wait_for(second, "waiting for its end")
    second.signal_at(tmp_path, 1, signal.SIGTERM)
    assert second.wait() == [1] and "told to stop while another process" in second.text()


def test_a_rank_does_not_wait_for_ever_for_the_others(launch, tiny_data, tmp_path):
    words = (*TINY, "--gradient_accumulation_steps=6", f"--data_dir={tiny_data}")
    job = launch(*words, f"--out_dir={tmp_path / 'run'}", ranks=2, patch=("alone", {"seconds": 1}))
    assert job.wait() == [1, 1] and "Traceback" not in job.text()
    assert "does not find all other ranks" in job.text() and not (tmp_path / "run").exists()


def test_ranks_that_see_different_data_end(launch, tiny_data, tmp_path):
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    job = launch(*words, ranks=2, patch=("other_data", {"rank": 1}))
    assert job.wait() == [1, 1] and job.text().count("error:") == 1
    assert "ranks see different data" in job.text() and not (tmp_path / "run").exists()


def test_the_same_data_in_another_folder_are_no_change(train_ok, tmp_path):
    run = tmp_path / "run"
    words = (*TINY, "--lr_schedule=constant", f"--out_dir={run}")
    first = write_tiny_shards(tmp_path / "data")
    train_ok(*words, "--max_iters=4", f"--data_dir={first}", "--device=auto")
    first.rename(tmp_path / "moved")
    train_ok(*words, "--max_iters=5", f"--data_dir={tmp_path / 'moved'}", "--device=cpu")
    told = [record["changed"] for record in records(run) if record["event"] == "resume"]
    assert told == [["max_iters 4 -> 5"]]


def test_a_folder_in_which_nothing_happened_is_taken_away(launch, tiny_data, tmp_path):
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'new'}")
    assert (
        launch(*words, "--init_from=nowhere.pt").wait() == [1] and not (tmp_path / "new").exists()
    )
    (tmp_path / "new").mkdir()
    assert launch(*words, "--init_from=nowhere.pt").wait() == [1] and (tmp_path / "new").is_dir()


def test_a_lock_is_on_the_file_that_others_open(tmp_path, monkeypatch):
    """Another process takes its empty folder away just after we have opened the lock in it."""
    folder, lockf = tmp_path / "run", lock.fcntl.lockf

    def late(file: object, kind: int) -> None:
        if not (tmp_path / "taken").exists():
            (tmp_path / "taken").touch()
            (folder / "lock").unlink()
            folder.rmdir()
        lockf(file, kind)

    monkeypatch.setattr(lock.fcntl, "lockf", late)
    held = lock.FolderLock(folder, lambda: False)
    assert os.path.samestat(os.fstat(held.file.fileno()), os.stat(folder / "lock"))
    held.release()
    assert not folder.exists()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def fail(file: object, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "lockf", fail)
    number, said = errno.ENOLCK, []
    lock.FolderLock(tmp_path, lambda: False, say=said.append)
    assert "without locks" in said[0]
    number = errno.EIO
    with pytest.raises(UserError, match="cannot be locked"):
        lock.FolderLock(tmp_path, lambda: False)


def test_ranks_that_find_different_checkpoints_end(launch, train_ok, tiny_data, tmp_path):
    """Where out_dir is a folder of each machine, only one of which has the run."""
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
    train_ok(*words, "--max_iters=2")
    job = launch(
        *words, ranks=2, patch=("other_out_dir", {"rank": 1, "folder": str(tmp_path / "elsewhere")})
    )
    assert (
        job.wait() == [1, 1] and job.text().count("error:") == 1 and "Traceback" not in job.text()
    )
    assert "ranks found different checkpoints" in job.text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_data_is_refused_on_resume(launch, train_ok, tmp_path, ranks):
    data, out = write_tiny_shards(tmp_path / "data"), tmp_path / "run"
    words = (*TINY, "--lr_schedule=constant", f"--data_dir={data}", f"--out_dir={out}")
    train_ok(*words, "--max_iters=4", ranks=ranks)
    before = contents(out)
    for name in ("tiny_train_000000.bin", "tiny_val_000000.bin"):
        whole = (data / name).read_bytes()
        half = len(whole) // 2  # of whole tokens
        (data / name).write_bytes(whole[:half] + whole[half + 2 :] + whole[half : half + 2])
        job = launch(*words, ranks=ranks)
        assert (
            set(job.wait()) == {1}
            and job.text().count("error:") == 1
            and "Traceback" not in job.text()
        )
        assert (
            f"ckpt_last.pt was trained on other data ({name}:" in job.text()
            and "--init_from=" in job.text()
        )
        assert before == contents(out)
        assert "finished already" in train_ok(*words, "--max_iters=4", ranks=ranks).text()
        (data / name).write_bytes(whole)
    for path in data.iterdir():  # the name of a shard is not its contents
        path.rename(path.with_name(path.name.replace("tiny", "other")))
    train_ok(*words, ranks=ranks)


def test_a_fingerprint_covers_the_middle_of_a_long_shard(tmp_path, monkeypatch):
    data = write_tiny_shards(tmp_path / "data", train=(1 << 20) + 5000)
    path = data / "tiny_train_000000.bin"
    short, before = (Blocks(str(data), split, 16, 60).fingerprint() for split in ("val", "train"))
    assert short.startswith("tiny_val_000000.bin:2000:")
    shard = np.fromfile(path, np.uint16)
    shard[len(shard) // 2] = (shard[len(shard) // 2] + 1) % 60
    shard.tofile(path)
    after = Blocks(str(data), "train", 16, 60).fingerprint()
    assert before.split(":")[:3] == after.split(":")[:3] and before != after
    # the part that differs
    there = f"{after} there, {before} here"
    assert data_difference(f"{short} {after}", f"{short} {before}") == there
    assert not data_difference(before, before)
    # a sample, which can miss one token, not all
    monkeypatch.setattr(common.fingerprint, "WHOLE", 1 << 20)
    sampled = Blocks(str(data), "train", 16, 60).fingerprint()
    shard[1 << 19 : -(1 << 19)] = 0
    shard.tofile(path)
    assert sampled != Blocks(str(data), "train", 16, 60).fingerprint() != after


def test_another_place_is_told_on_resume(launch, train_ok, tiny_data, tmp_path):
    """Other code, other versions, another number of ranks: the run goes on, its log says so, and
    report.py leaves it out.
    """
    words = (*TINY, "--lr_schedule=constant", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    train_ok(*words, "--max_iters=4")
    train_ok(*words, "--max_iters=6")
    assert [record["changed"] for record in records(tmp_path) if record["event"] == "resume"] == [
        ["max_iters 4 -> 6"]
    ]
    other = ("other_place", {"git": "another", "versions": {"python": "3", "torch": "9.9"}})
    job = launch(*words, "--max_iters=9", ranks=2, patch=other)  # it trains nothing that is kept
    job.signal_at(tmp_path, 6, signal.SIGCONT)
    wait_for(job, "changed since then: max_iters 6 -> 9, ")
    for process in job.processes:
        process.kill()
    job.wait()
    train_ok(*words, "--max_iters=7")
    told = [record["changed"] for record in records(tmp_path) if record["event"] == "resume"]
    assert told == [["max_iters 4 -> 6"], ["max_iters 6 -> 7"]]
    train_ok(*words, "--max_iters=8", ranks=2, patch=other)
    told = [record["changed"] for record in records(tmp_path) if record["event"] == "resume"][-1]
    assert "world_size 1 -> 2" in told and any(line.startswith("git ") for line in told)
    assert any(line.startswith("torch ") and line.endswith("-> 9.9") for line in told)
    assert "world_size 1 -> 2" in Run(tmp_path).problem()


def test_commits_that_differ_in_results_and_texts_are_one_code(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    git("init", "-q")
    commits = []
    for name in (
        "train.py",
        "results/log.jsonl",
        "README.md",
        "tests/test.py",
        "docs/page.md",
        "config/a.py",
        "bench/b.py",
        "report.py",
        "model.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    first, *same, other = commits
    assert all(environment.is_same_code(first, commit) for commit in (first, *same))
    option = f"--output={tmp_path / 'written'}"  # a checkpoint may hold anything
    for there in (other, first + "+", None, "0" * 40, "HEAD", option, first[:20]):
        assert not environment.is_same_code(there, first) and not environment.is_same_code(
            first, there
        )
    assert not (tmp_path / "written").exists()
    (tmp_path / "tests/test.py").write_text("changed")
    assert environment._git_commit() == other
    found = []
    for text in ("changed", "caf\xe9"):  # two uncommitted changes are not the same code
        (tmp_path / "train.py").write_text(text, encoding="latin-1")
        found.append(environment._git_commit())
    assert found[0] != found[1] and all(re.fullmatch(other + r"\+[0-9a-f]{8}", x) for x in found)
    assert not environment.is_same_code(*found)
