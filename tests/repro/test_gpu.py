"""repro/gpu.sh on a GPU that is not there: each stage says what its program understands, and is
done once.

    python -m pytest tests/repro/test_gpu.py
"""

import os
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

import bench_decode
import distill
from bench import fold, kernels, train
from configurator import parse_args
from repro import gpu_first
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
# Stand for `python`, which notes its words and writes distill.py's log, and for nvidia-smi.
PYTHON = """#!/bin/sh
printf '%s\\n' "$@" ::: >>"$SCRATCH/words"
case $* in
  *get_device_name*) echo h100 ;;
  *first-kernels-aten*) [ ! -f "$SCRATCH/full" ] || { echo the disk is full; exit 1; } ;;
  distill.py*) mkdir "$SCRATCH/distill"; echo '{}' >"$SCRATCH/distill/log.jsonl" ;;
esac
"""
EIGHT = "#!/bin/sh\nseq 8\n"


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

    def run(*stages: str) -> tuple[int, str]:
        command = ["bash", "repro/gpu.sh", *stages]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    return run


def calls(folder: Path) -> list[list[str]]:
    """The words behind each `python`."""
    text = (folder / "scratch/words").read_text()
    return [call.strip("\n").split("\n") for call in text.split(":::\n")[:-1]]


def understood(words: list[str]) -> str:
    """The program whose own parser has accepted the words; "" for a test, a report or code."""
    if words[:2] == ["-m", "torch.distributed.run"]:
        assert words[4:6] == ["-m", "repro.gpu_first"]
        words = words[4:]
    if words[:2] == ["-m", "repro.gpu_first"]:
        assert words[2].partition("=")[0] in gpu_first.__doc__ and words[3] in gpu_first.PROGRAMS
        words = words[3:]
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
    assert len(set(names)) == len(names) == 61 + 12 + 4  # with the first minutes, and eight GPUs
    code, printed = campaign("*")
    assert code == 0, printed
    assert {path.stem for path in (tmp_path / "out/log").iterdir()} == set(names)
    made = calls(tmp_path)
    assert {understood(words) for words in made} == {*PROGRAMS, ""}
    assert not any("--seed=1" in words for words in made)  # a stage gets its own
    code, printed = campaign("*")
    assert code == 0 and printed.count("done before") == len(names)
    assert len(calls(tmp_path)) == len(made) + 1  # which asks where it runs


def test_torchs_own_norm_can_be_asked_for():
    assert gpu_first.apply("aten") is not None  # an interface of torch's that is not public


def test_a_stage_that_fails_is_named_and_runs_again(campaign, tmp_path):
    (tmp_path / "scratch/full").touch()
    code, printed = campaign("first")
    assert code == 1 and "first-kernels-aten: failed\n    " in printed
    assert "the disk is full" in printed
    (tmp_path / "scratch/full").unlink()
    code, printed = campaign("first")
    assert code == 0 and printed.count("done before") == 15
    code, printed = campaign("train", "trian")
    assert code == 2 and "trian" in printed and not (tmp_path / "out/log/train.txt").exists()
