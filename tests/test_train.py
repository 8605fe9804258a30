"""train.py itself, run in fresh processes: equality of norms, resume, evaluation, ranks, faults.

python -m pytest tests/test_train.py
"""

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    Job,
    apart,
    contents,
    events,
    keys_of,
    losses,
    records,
    run_python,
    same,
    same_run,
    same_weights,
    steps_of,
    val_losses,
    weights,
    write_tiny_shards,
)
from warm_python import warm_python

import common.fingerprint
import train
import training.run
from common import environment
from common.code_digest import UNCOMMITTED, code_digest
from common.distributed import Ranks
from common.errors import UserError
from common.fingerprint import data_difference
from evidence.runs import Run
from taper import TaperSchedule
from training.checkpoint import FoundCheckpoint
from training.config import TrainConfig
from training.dataloader import Blocks
from training.run import RunFolder


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
    assert apart(layer, cbwc) <= 1e-12 < 1e-3 < apart(layer, rms)


@pytest.mark.parametrize(
    ("norm_type", "ranks", "dtype"),
    [("coupled", 1, "bfloat16"), ("taper", 2, "float32")],
)
def test_resume_is_bit_exact(
    launch, train_ok, train_fails, tiny_data, tmp_path, norm_type, ranks, dtype
):
    """40 steps in one go; and with SIGTERM, resume, SIGKILL, resume from an earlier checkpoint.

    Both signals fall into the taper's decay. All norm types: tests/test_layouts_train.py.
    """

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = (*TINY, *keys_of(norm_type), f"--dtype={dtype}", f"--data_dir={tiny_data}")
    words += ("--checkpoint_interval=6", "--eval_interval=15", "--dropout=0.1")
    words += (f"--out_dir={broken}",)
    train_ok(*words, f"--out_dir={whole}", ranks=ranks)
    assert sorted(losses(whole)) == list(range(1, 41))

    job = launch(*words, ranks=ranks, patch=("slow_steps", {"seconds": 0.02}))
    job.signal_at(broken, 12, signal.SIGTERM)
    assert set(job.wait()) == {0}, job.text()
    end = records(broken)[-1]
    assert end["event"] == "end" and "SIGTERM" in end["reason"] and 12 <= end["step"] < 25
    stopped = losses(broken)
    assert "give more steps" in train_fails(*words, "--max_iters=12", code=2, ranks=ranks)

    job = launch(*words, ranks=ranks, patch=("slow_steps", {"seconds": 0.02}))
    job.signal_at(broken, 25, signal.SIGKILL)
    assert set(job.wait()) == {-9}
    assert torch.load(broken / "ckpt_last.pt", weights_only=True)["step"] == 24

    train_ok(*words, ranks=ranks)
    resumes = [record["step"] for record in events(broken, "resume")]
    assert resumes == [end["step"], 24] and max(stopped) == end["step"]
    assert same_run(broken, whole)


@pytest.mark.parametrize(("norm_type", "ranks"), [("rms", 1), ("taper", 2)])
def test_a_finished_run(launch, train_ok, train_fails, tiny_data, tmp_path, norm_type, ranks):
    """Killed before its end it gets one. Then it is left alone, and a longer run goes on."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    words = (*TINY, *keys_of(norm_type), "--sample_tokens=20", "--lr_schedule=constant")
    words += (f"--data_dir={tiny_data}", f"--out_dir={out}", "--max_iters=14")
    train_ok(*words, f"--out_dir={whole}", ranks=ranks)
    job = launch(*words, ranks=ranks, patch=("die_in_sample", {}))
    assert set(job.wait()) == {9} and not (out / "samples.txt").exists()
    train_ok(*words, ranks=ranks)
    assert losses(out) == losses(whole)
    assert (out / "samples.txt").read_text() == (whole / "samples.txt").read_text()
    assert [event["event"] for event in records(out)[-2:]] == ["resume", "end"]
    assert records(out)[-1]["reason"] == "done"
    before = contents(out)
    assert "finished already" in train_ok(*words, "--log_interval=3", ranks=ranks).text()
    for name, then, value in (("seed", 1337, 2), ("max_iters", 14, 8)):
        told = train_fails(*words, f"--{name}={value}", code=2, ranks=ranks)
        assert f"{name} {then} -> {value}" in told
    assert contents(out) == before
    text = train_ok(*words, "--max_iters=17", ranks=ranks).text()
    assert "changed since then: max_iters 14 -> 17" in text
    assert sorted(losses(out)) == list(range(1, 18))


@pytest.fixture(scope="module")
def twenty_steps(tiny_data, tmp_path_factory):
    """The folder of a run that others go on from."""
    folder = tmp_path_factory.mktemp("twenty")
    words = (*TINY, "--max_iters=20", "--lr_schedule=constant", f"--data_dir={tiny_data}")
    job = Job((*words, f"--out_dir={folder / 'run'}"), 1, folder / "job", None)
    assert job.wait() == [0], job.text()
    return folder / "run"


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
def test_a_gap_in_the_log_is_recorded(twenty_steps, train_ok, tiny_data, tmp_path, damage, gap):
    """Also where it has lost its start event: then it gets another one."""
    shutil.copytree(twenty_steps, tmp_path / "run")
    words = (*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}", "--max_iters=24")
    log = tmp_path / "run/log.jsonl"
    left = damage(log.read_text())
    log.unlink() if left is None else log.write_text(left)
    train_ok(*words, "--lr_schedule=constant")
    assert records(tmp_path / "run")[0]["event"] == "start"
    assert events(tmp_path / "run", "resume")[0].get("gap") == gap


BAD = {"rank": None, "step": 3, "name": "blocks.1.mlp.up.weight", "value": "nan"}


@pytest.mark.parametrize(
    ("fault", "keys", "told"),
    [
        ("main_rank_fails", {"step": 3}, "log.jsonl: cannot be written"),
        ("other_data", {"rank": 1}, "ranks see different data"),
        ("nan_loss", {"rank": 1, "step": 7}, "step 7: the loss on rank 1 is not finite"),
        ("bad_share", BAD, f"step 3: the gradient of {BAD['name']} is not finite"),
        # Where out_dir is a folder of each machine, only one of which has the run
        ("other_out_dir", {"rank": 1, "folder": "nowhere"}, "ranks found different checkpoints"),
    ],
)
def test_ranks_end_together(launch, train_ok, tiny_data, tmp_path, fault, keys, told):
    """With one line of what it is; the other rank says no more than that it lost one."""
    out = tmp_path / "run"
    words = (*TINY, "--gradient_accumulation_steps=12", f"--data_dir={tiny_data}")
    words += (f"--out_dir={out}", "--checkpoint_interval=5")
    if fault == "other_out_dir":
        train_ok(*words, "--max_iters=2")
    job = launch(*words, ranks=2, patch=(fault, keys))
    assert job.wait() == [1, 1] and "Traceback" not in job.text()
    errors = [line for line in job.text().splitlines() if line.startswith("error:")]
    [own] = [line for line in errors if "has lost another rank" not in line]
    assert told in own
    assert (out / "log.jsonl").exists() == (fault != "other_data")
    if fault == "nan_loss":  # what is left is good
        assert torch.load(out / "ckpt_last.pt", weights_only=True)["step"] == 5
        assert max(losses(out)) == 6 and "step 7" in records(out)[-1]["reason"]
        train_ok(*words, ranks=2)


NOTED = """
import signal, sys
from common.distributed import StopSignal
# What this process has of its parent is not asked: the tests themselves may run under nohup.
is_ignored = "nohup" in sys.argv
signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
stop = StopSignal()
for number in sys.argv[2:]:
    signal.raise_signal(int(number))
print(stop.name)
"""


@pytest.mark.parametrize(
    ("how", "raised", "code", "said"),
    [
        ("", [signal.SIGINT], 0, "SIGINT\n"),
        ("", [signal.SIGINT] * 2, -signal.SIGINT, ""),  # a second Ctrl-C ends at once
        ("", [signal.SIGHUP], 0, "SIGHUP\n"),
        ("nohup", [signal.SIGHUP], 0, "\n"),  # a closed terminal is nothing
    ],
)
def test_signals_are_noted(how, raised, code, said):
    words = ("-c", NOTED, how, *map(int, raised))
    assert run_python(*words, code=code, python=warm_python()).stdout == said


def test_a_reader_that_leaves_does_not_end_the_training(tiny_data, tmp_path):
    """As `python train.py ... | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "train.py", *TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "parameters" in process.stdout.readline() + process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 0
    assert records(tmp_path)[-1]["reason"] == "done" and len(losses(tmp_path)) == 40


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_taper_killed_in_each_phase_goes_on_bit_for_bit(
    launch, train_ok, tiny_data, tmp_path, kind
):
    """One run that dies while it is warm, in its decay and after its end, each time beyond its last
    checkpoint. Its gains hand over AdamW's moments.
    """

    words = (*TINY, *keys_of("taper"), "--n_kv_head=1", "--activation=swiglu", "--dropout=0.1")
    words += (f"--optimizer={kind}", "--checkpoint_interval=6", f"--data_dir={tiny_data}")
    words += (f"--out_dir={tmp_path / 'killed'}", "--gradient_accumulation_steps=4")
    text = train_ok(*words, f"--out_dir={tmp_path / 'whole'}").text()
    assert ("muon for 14 matrices, adamw for the rest" in text) == (kind == "muon")
    for step, phase in ((8, "warm"), (21, "blend"), (33, "fixed")):
        assert TaperSchedule(10, 30).at(step, 40)[0] == phase
        assert set(launch(*words, patch=("die_after", {"step": step})).wait()) == {9}
    train_ok(*words)
    assert [event["step"] for event in events(tmp_path / "killed", "resume")] == [6, 18, 30]
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "killed") == whole and whole[40] < 0.8 * whole[1]
    states = [
        torch.load(tmp_path / name / "ckpt_last.pt", weights_only=True)
        for name in ("whole", "killed")
    ]
    assert all(same(states[0][name], states[1][name]) for name in ("model", "optimizer"))


# Of a taper, for runs of 12 steps
SOON = ("--taper_warmup=4", "--taper_end=9")


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
            *(SOON if norm_type == "taper" else ()),
            "--gradient_accumulation_steps=4",
            "--max_iters=12",
            "--eval_interval=6",
            "--learning_rate=1e-3",
            f"--data_dir={tiny_data}",
            f"--out_dir={out}",
            ranks=ranks,
            patch=("record_samples", {"path": str(tmp_path / f"ids{ranks}")}),
        )
        text = "".join((tmp_path / f"ids{ranks}.{rank}").read_text() for rank in range(ranks))
        samples[ranks] = sorted(line for line in text.splitlines() if int(line.split()[0]) <= 12)
        runs[ranks] = losses(out), val_losses(out)
    assert len(samples[1]) == 48 and samples[1] == samples[2] == samples[4]
    for ranks in (2, 4):
        assert apart(runs[1][0], runs[ranks][0]) <= 1e-5
        assert runs[ranks][1].keys() == runs[1][1].keys() == {0, 6, 12}
        # before training: the very same sum, in the same order
        assert runs[ranks][1][0] == runs[1][1][0]


def test_blocks_that_are_computed_again_train_alike(train_ok, tiny_data, tmp_path):
    """Under FSDP, to the bit, dropout included."""
    words = (*TINY, "--parallel=fsdp", "--max_iters=6", "--dropout=0.1", f"--data_dir={tiny_data}")
    for value in ("False", "True"):
        out = f"--out_dir={tmp_path / value}"
        train_ok(*words, "--norm_type=coupled", f"--recompute={value}", out, ranks=2)
    assert same_run(tmp_path / "True", tmp_path / "False")


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", "adamw"), ("float16", "adamw"), ("float16", "muon")]
)
def test_low_precision_trains(train_ok, tiny_data, tmp_path, dtype, kind):
    train_ok(
        *TINY,
        f"--dtype={dtype}",
        f"--optimizer={kind}",
        f"--data_dir={tiny_data}",
        f"--out_dir={tmp_path}",
    )
    assert losses(tmp_path)[40] < 0.8 * losses(tmp_path)[1]


def test_alpha_is_set_at_the_start_and_again(tiny_data, tmp_path, monkeypatch, capsys):
    """Of the coupled norms: before the first step, and after steps 5 and 10. The bar of a terminal
    tells all steps.
    """
    calls = []
    monkeypatch.setattr(train, "calibrate", lambda model, x: calls.append(x))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    train.main(
        [
            *TINY,
            *("--norm_type=coupled", "--coupled_calibrate=5", "--max_iters=12"),
            *(f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"),
        ]
    )
    assert len(calls) == 3 and " 12/12 " in capsys.readouterr().err


def test_log_format(train_ok, tiny_data, tmp_path):
    train_ok(*TINY, "--eval_interval=20", f"--data_dir={tiny_data}", f"--out_dir={tmp_path}")
    start, *_, end = records(tmp_path)
    assert {"event", "config", "git", "versions", "device", "n_params"} <= start.keys()
    assert sorted(val_losses(tmp_path)) == [0, 20, 40]
    first, *_, last = steps_of(tmp_path)
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tok_per_s", "mfu"} <= last.keys()
    assert last["tokens"] == 40 * 2 * 2 * 16 and last["tok_per_s"] > 0
    assert first["tok_per_s"] is None  # warm-up
    assert end == {"event": "end", "reason": "done", "step": 40, "tok_per_s": end["tok_per_s"]}
    assert [event["steps"] for event in events(tmp_path, "stability")] == [0, 20, 40]


def test_init_from_another_norm_and_no_other_function(train_ok, train_fails, tiny_data, tmp_path):
    """A taper of the norm that the weights are of begins as the same function; padding is free."""
    words = (*TINY, f"--data_dir={tiny_data}", "--max_iters=20")
    train_ok(*words, "--norm_type=rms", f"--out_dir={tmp_path / 'rms'}")
    gains = weights(tmp_path / "rms")["blocks.0.norm1.norm.weight"]
    assert not torch.allclose(gains, torch.ones_like(gains), atol=1e-3)
    words += (*keys_of("taper"), f"--init_from={tmp_path / 'rms'}")
    text = train_ok(*words, "--vocab_size=128", f"--out_dir={tmp_path / 'taper'}").text()
    after = val_losses(tmp_path / "rms")[20]
    assert "0 are left out" in text
    assert val_losses(tmp_path / "taper")[0] == pytest.approx(after, abs=1e-6)
    for key, told in (("n_head=4", "add --n_head=2"), ("taper_base=layer", "add --taper_base=rms")):
        assert told in train_fails(*words, f"--{key}", f"--out_dir={tmp_path / 'other'}")


def test_resume_from_a_path(train_ok, train_fails, tiny_data, tmp_path):
    words = (*TINY, f"--data_dir={tiny_data}")
    train_ok(*words, "--max_iters=20", f"--out_dir={tmp_path / 'a'}")
    last = f"--resume={tmp_path / 'a' / 'ckpt_last.pt'}"
    words += (last, f"--out_dir={tmp_path / 'b'}")
    train_ok(*words)
    assert records(tmp_path / "b")[0]["event"] == "start"
    assert sorted(losses(tmp_path / "b")) == list(range(21, 41))
    assert "--resume=auto continues" in train_fails(*words, "--max_iters=60")


def test_resume_takes_new_settings_and_refuses_a_taper_backwards(
    train_ok, train_fails, tiny_data, tmp_path
):
    run, same = tmp_path / "run", tmp_path / "same"
    words = (*TINY, "--norm_type=taper", f"--data_dir={tiny_data}")
    train_ok(*words, f"--out_dir={run}")  # its schedule is in shares of max_iters
    before = contents(run)
    told = train_fails(*words, f"--out_dir={run}", "--max_iters=80", code=2)
    assert "backwards" in told and "keep max_iters" in told and before == contents(run)
    shutil.copytree(run, same)
    for folder, decay in ((run, 0.2), (same, 0.1)):
        train_ok(*words, f"--weight_decay={decay}", "--max_iters=42", f"--out_dir={folder}")
    assert not same_weights(run, same)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_waits_and_sees_what_the_first_one_leaves(
    launch, tiny_data, tmp_path, ranks
):
    """The same command twice, the second while the first one trains: it must not start from scratch
    and overwrite.
    """
    run = tmp_path / "run"
    words = (*TINY, "--max_iters=10", f"--data_dir={tiny_data}", f"--out_dir={run}")
    first = launch(*words, ranks=ranks, patch=("slow_steps", {"seconds": 0.3}))
    first.signal_at(run, 1, signal.SIGCONT)  # it trains, and there is no checkpoint yet
    second = launch(*words, ranks=ranks)
    assert set(first.wait()) == {0}
    before = contents(run)
    assert set(second.wait()) == {0} and "finished already" in second.text()
    assert "another process is working there: waiting for its end, 60 s" in second.text()
    assert contents(run) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_data_is_refused_on_resume(train_ok, train_fails, tmp_path, ranks):
    data, out = write_tiny_shards(tmp_path / "data"), tmp_path / "run"
    words = (*TINY, "--lr_schedule=constant", f"--data_dir={data}", f"--out_dir={out}")
    train_ok(*words, "--max_iters=4", ranks=ranks)
    before = contents(out)
    for name in ("tiny_train_000000.bin", "tiny_val_000000.bin"):
        whole = (data / name).read_bytes()
        half = len(whole) // 2  # of whole tokens
        (data / name).write_bytes(whole[:half] + whole[half + 2 :] + whole[half : half + 2])
        told = train_fails(*words, ranks=ranks)
        assert f"ckpt_last.pt was trained on other data ({name}:" in told
        assert before == contents(out)
        assert "finished already" in train_ok(*words, "--max_iters=4", ranks=ranks).text()
        (data / name).write_bytes(whole)
    for path in data.iterdir():  # the name of a shard is not its contents
        path.rename(path.with_name(path.name.replace("tiny", "other")))
    train_ok(*words, ranks=ranks)


def test_a_fingerprint_covers_the_middle_of_a_long_shard(tmp_path, monkeypatch):
    data = write_tiny_shards(tmp_path / "data", train=(1 << 20) + 5000)
    path = data / "tiny_train_000000.bin"
    shard = np.fromfile(path, np.uint16)
    middle = len(shard) // 2
    # A sample of pages can miss one token, not all.
    for limit, last in ((common.fingerprint.WHOLE, middle + 1), (1 << 20, -(1 << 19))):
        monkeypatch.setattr(common.fingerprint, "WHOLE", limit)
        before = Blocks(str(data), "train", 16, 60).fingerprint()
        shard[middle:last] = 59 - shard[middle:last]
        shard.tofile(path)
        after = Blocks(str(data), "train", 16, 60).fingerprint()
        # the part that differs
        then, now = (f"tiny_val.bin:9:00000000 {part}" for part in (before, after))
        assert data_difference(then, now) == f"{before} there, {after} here"
        assert not data_difference(now, now)


def test_another_place_is_told_on_resume(launch, train_ok, tmp_path):
    """Other code, other versions, another number of ranks: the run goes on, its log says so, and
    report.py leaves it out. The same data in another folder are no change.
    """
    data, moved, run = (tmp_path / name for name in ("data", "moved", "run"))
    words = (*TINY, "--lr_schedule=constant", f"--out_dir={run}")
    write_tiny_shards(data)
    train_ok(*words, "--max_iters=4", f"--data_dir={data}", "--device=auto")
    data.rename(moved)
    words += (f"--data_dir={moved}",)
    # It trains nothing that is kept.
    job = launch(*words, "--max_iters=9", ranks=2, patch=("die_after", {"step": 6}))
    assert set(job.wait()) == {9} and "changed since then: max_iters 4 -> 9, " in job.text()
    train_ok(*words, "--max_iters=7")
    there = {"git": "another", "code": "edited", "versions": {"python": "3", "torch": "9.9"}}
    other = ("other_place", there)
    said = f"--same_code={code_digest()}"
    train_ok(*words, "--max_iters=8", said, ranks=2, patch=other)
    first, second = (event["changed"] for event in events(run, "resume"))
    assert first == ["max_iters 4 -> 7"]
    names = ("git ", "code ", "world_size 1 -> 2", "torch ")
    told = [line for line in second if line.startswith(names)]
    assert [line.partition(" ")[0] for line in told] == [name.split()[0] for name in names]
    assert told[1] == f"code {code_digest()} -> edited" and told[3].endswith("-> 9.9")
    assert Run(run).codes == {code_digest()[:12], "edited"}
    assert "world_size 1 -> 2" in Run(run).problem() and "edited" not in Run(run).problem()


def test_code_that_is_not_committed_stays_with_the_run(monkeypatch, tmp_path):
    """Of the run that began last; another file of that name is not replaced."""
    config = TrainConfig(out_dir=str(tmp_path), same_code=("a" * 12,))
    path = tmp_path / UNCOMMITTED

    def begin(diff: bytes, resumed: bool = False) -> None:
        monkeypatch.setattr(training.run, "uncommitted_changes", lambda: diff)
        with RunFolder(config, Ranks.start("cpu")) as run:
            run.compare(config, "data", "")
            if resumed:
                run.found = FoundCheckpoint({"step": 1}, tmp_path / "elsewhere/ckpt.pt", "")
            run.open_log(config, {})
            run.log.close("done")

    begin(b"diff --git a/x.py b/x.py\n")
    begin(b"diff --git a/y.py b/y.py\n", resumed=True)
    assert path.read_bytes() == b"diff --git a/x.py b/x.py\n"
    begin(b"")
    assert not path.exists()
    path.write_text("a user's own")
    with pytest.raises(UserError, match=UNCOMMITTED):
        begin(b"")
    assert records(tmp_path)[0]["config"]["same_code"] == ["a" * 12]


def test_commits_that_differ_in_results_and_texts_are_one_code(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    commits = []
    texts = ("results/log.jsonl", "README.md", "tests/test.py", "docs/page.md", "config/a.py")
    for name in ("train.py", *texts, "bench/b.py", "report.py", "model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    first, *alike, other = commits
    assert all(environment.is_same_code(first, commit) for commit in (first, *alike))
    for there in (other, first + "+", None, "0" * 40, "--output=x"):
        assert not environment.is_same_code(there, first)
        assert not environment.is_same_code(first, there)
    (tmp_path / "tests/test.py").write_text("changed")
    found = {environment._git_commit()}
    for text in ("changed", "caf\xe9"):  # two uncommitted changes are not the same code
        (tmp_path / "train.py").write_text(text, encoding="latin-1")
        found.add(environment._git_commit())
    assert other in found and len(found) == 3
