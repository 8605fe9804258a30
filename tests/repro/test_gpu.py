"""repro/gpu.sh on a GPU that is not there: each stage says what its program understands, and is
done once; the first quarter of an hour in order, with a stage that fails, one that hangs, SIGTERM.

    python -m pytest tests/repro/test_gpu.py
"""

import fnmatch
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ROOT

import bench_decode
import distill
from bench import fold, kernels, train
from configurator import parse_args
from train import TrainConfig

# Program -> its keys, and whether a model is named before them
PROGRAMS = {
    "train": (TrainConfig, False),
    "bench.train": (train.TrainBenchConfig, False),
    "bench_decode": (bench_decode.DecodeBenchConfig, True),
    "bench.kernels": (kernels.KernelBenchConfig, False),
    "bench.fold": (fold.FoldBenchConfig, True),
    "distill": (distill.DistillConfig, False),
}
# Stand for `python`, which notes its words and writes distill.py's log, and for nvidia-smi. What
# the file `fails` names fails; what `hangs` names runs until it is interrupted, and keeps what it
# has.
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" ::: >>"$SCRATCH/words"
is() { [ -f "$SCRATCH/$1" ] && expr "$*" : ".*$(cat "$SCRATCH/$1")" >/dev/null; }
case $* in
  *get_device_name*) echo h100 ;;
  distill.py*) mkdir "$SCRATCH/distill"; echo '{}' >"$SCRATCH/distill/log.jsonl" ;;
esac
if is fails "$@"; then echo the disk is full; exit 1; fi
if is hangs "$@"; then
  trap 'kill $!; echo kept what it has; exit 0' INT
  touch "$SCRATCH/begun"
  sleep 100 & wait
fi
"""
EIGHT = "#!/bin/sh\nseq 8\n"
QUARTER = ["tests", "compile", "train", "decode", "kernels", "bytes", "llama", "profile"]


@pytest.fixture
def campaign(tmp_path):
    """campaign(*stages) -> (exit code, what is printed); its commands are in scratch/words."""
    for name in ("nanogpt", "gpt_fast", "scratch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").touch()
    for name, text in (("python", PYTHON), ("nvidia-smi", EIGHT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    places = {name: f"{tmp_path}/{name.lower()}" for name in ("NANOGPT", "GPT_FAST", "DATA")}
    places |= {"OUT": f"{tmp_path}/out", "SCRATCH": f"{tmp_path}/scratch", "SEEDS": "1"}
    places |= {"PYTHON": f"{tmp_path}/python", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(*stages: str, **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", "repro/gpu.sh", *stages],
            cwd=ROOT,
            env=os.environ | places | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A script in the background ignores SIGINT, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(*stages: str, **more: str) -> tuple[int, str]:
        job = start(*stages, **more)
        printed, _ = job.communicate(timeout=100)
        return job.returncode, printed

    run.start = start
    return run


def calls(folder: Path) -> list[list[str]]:
    """The words behind each `python`."""
    text = (folder / "scratch/words").read_text()
    return [call.strip("\n").split("\n") for call in text.split(":::\n")[:-1]]


def understood(words: list[str]) -> str:
    """The program whose own parser has accepted the words; "" for a test, a report or code."""
    if words[:2] == ["-m", "torch.distributed.run"]:
        words = words[4:]
    elif words[:2] == ["-m", "pytest"]:
        files = [word for word in words if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files)
    if words[0] == "-m":
        words = words[1:]
    program = words[0].removesuffix(".py")
    if program == "study.sweep":  # its words are train.py's
        program = "train"
    if program not in PROGRAMS:
        assert program in ("-c", "pytest", "report"), words
        return ""
    keys, takes_model = PROGRAMS[program]
    parse_args(keys, words[1:], spec=takes_model and "--last_token" not in words)
    return program


def test_every_stage_says_what_its_program_understands(campaign, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    names = campaign()[1].split()
    assert len(set(names)) == len(names) == 61 + len(QUARTER) + 1 + 2  # on several GPUs
    code, printed = campaign("*")
    assert code == 0, printed
    assert {path.stem for path in (tmp_path / "out/log").iterdir()} == set(names)
    made = calls(tmp_path)
    assert {understood(words) for words in made} == {*PROGRAMS, ""}
    assert not any("--seed=1" in words for words in made)  # a stage gets its own
    code, printed = campaign("*")
    assert code == 0 and printed.count("done before") == len(names)
    assert len(calls(tmp_path)) == len(made) + 1  # which asks where it runs


def test_the_manual_has_all_stages_and_no_others(campaign):
    """In the tables of `Stages`: capitals stand for any word, and -word for another end."""
    page = (ROOT / "docs/reproduce.md").read_text()
    tables = page.split("### Stages")[1].split("###")[0]
    patterns = []
    for cell in re.findall(r"^\| ([a-z][^|]*) \|", tables, re.M):
        first, *others = cell.split(", ")
        patterns.append(first)
        for word in others:
            patterns.append(first.split("-")[0] + word if word.startswith("-") else word)
    patterns = [re.sub("[A-Z]+", "*", pattern) for pattern in patterns if pattern != "stages"]
    names = campaign()[1].split()
    for pattern in patterns:
        assert fnmatch.filter(names, pattern), pattern
    assert [name for name in names if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []


def test_the_quarter_runs_by_value(campaign, tmp_path, monkeypatch):
    """All arms are compiled before the first is timed, with the same keys; each stage once."""
    monkeypatch.chdir(ROOT)
    code, printed = campaign("quarter")
    assert code == 0, printed
    assert [line.split(":")[0] for line in printed.splitlines()] == [
        f"quarter-{name}" for name in QUARTER
    ]
    logs = sorted(path.name for path in (tmp_path / "out/log").iterdir())
    assert logs == sorted(f"quarter-{name}.txt" for name in QUARTER)
    place, tests, *made = calls(tmp_path)
    assert "-c" in place and "pytest" in tests
    compiled, timed = made[:8], made[8:]
    for words in compiled:
        assert "--rounds=0" in words and not any(word.startswith("--out") for word in words)
    [train] = [words for words in timed if "--rounds=16" in words]
    alike = {"--rounds=16", "--rounds=0"}
    arms = set()
    for words in compiled:
        if "bench.train" in words:
            arms |= {word for word in words if word.startswith("--arms=")}
            shape = {word for word in words if not word.startswith("--arms=")} - alike
            assert shape == {w for w in train if not w.startswith(("--arms=", "--out="))} - alike
    [listed] = [word for word in train if word.startswith("--arms=")]
    assert arms == {f"--arms={arm}" for arm in listed.removeprefix("--arms=").split("; ") if arm}
    assert len(arms) == 6
    code, printed = campaign("quarter")
    assert code == 0 and printed.count("done before") == len(QUARTER)


def test_a_stage_that_fails_is_named_and_leaves_its_output(campaign, tmp_path):
    """In the folder that comes back. The others run; the same command runs it again."""
    (tmp_path / "scratch/fails").write_text("--arms=A,B,C,D")
    code, printed = campaign("quarter")
    assert code == 1 and "quarter-decode: failed: " in printed and "\n    the disk is" in printed
    log = tmp_path / "out/log"
    assert "the disk is full" in (log / "quarter-decode.unfinished.txt").read_text()
    assert len([*log.glob("*.txt")]) == len(QUARTER) and (log / "quarter-profile.txt").exists()
    (tmp_path / "scratch/fails").unlink()
    code, printed = campaign("quarter")
    assert code == 0 and printed.count("done before") == len(QUARTER) - 1
    assert not (log / "quarter-decode.unfinished.txt").exists()
    code, printed = campaign("train", "trian")
    assert code == 2 and "trian" in printed and not (log / "train.txt").exists()


@pytest.mark.parametrize(
    ("stage", "word"), [("quarter-train", "--rounds=16"), ("quarter-compile", "--rounds=0")]
)
def test_a_stage_that_is_late_is_cut_and_keeps_what_it_has(stage, word, campaign, tmp_path):
    """Here after 1 % of its time; with all its processes. The next stages run."""
    (tmp_path / "scratch/hangs").write_text(word)
    code, printed = campaign(stage, "quarter-decode", PACE="1")
    log = tmp_path / "out/log"
    assert code == 1 and f"{stage}: cut after 1 s" in printed
    kept = (log / f"{stage}.unfinished.txt").read_text()
    assert "kept what it has" in kept or stage == "quarter-compile"  # its figures are thrown away
    assert (log / "quarter-decode.txt").exists() and not (log / f"{stage}.txt").exists()


def test_what_there_is_no_time_for_is_named(campaign, tmp_path):
    code, printed = campaign("quarter", MINUTES="0")
    assert code == 1 and printed.count("no time is left") == len(QUARTER)
    assert not [*(tmp_path / "out/log").iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_the_stage_that_runs(number, campaign, tmp_path):
    """As Ctrl-C ends it, so that it keeps what it has; no later stage begins."""
    (tmp_path / "scratch/hangs").write_text("--rounds=16")
    job = campaign.start("quarter-train", "quarter-decode")
    end = time.monotonic() + 60
    while not (tmp_path / "scratch/begun").exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(number)
    job.communicate(timeout=60)
    assert job.returncode == 130
    [log] = (tmp_path / "out/log").iterdir()
    assert log.name == "quarter-train.unfinished.txt" and "kept what it has" in log.read_text()
