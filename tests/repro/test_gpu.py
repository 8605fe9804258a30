"""repro/gpu.py, with commands of no weight in place of its stages; the real ones' words; aims on made-up figures.

    python -m pytest tests/repro/test_gpu.py
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, start_code

import bench_decode
import distill
from bench import fold as bench_fold
from bench import kernels, train
from common.errors import ConfigError, UserError
from common.output import append_json
from configurator import parse_args
from repro import gpu, gpu_report, gpu_targets
from repro.gpu_stages import STAGES, Stage
from train import TrainConfig

PROGRAMS = {"bench.train": (train.TrainBenchConfig, False), "bench_decode.py": (bench_decode.DecodeBenchConfig, True),
            "bench.kernels": (kernels.KernelBenchConfig, False), "bench.fold": (bench_fold.FoldBenchConfig, True),
            "distill.py": (distill.DistillConfig, False)}  # fmt: skip


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """campaign(*stages) -> a function (*words) -> exit code, in an empty repository without a GPU."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "find_device", lambda _: torch.device("cpu"))

    def make(*stages: Stage):
        monkeypatch.setattr(gpu, "STAGES", stages)
        return lambda *words: gpu.main(["--rehearse", "--out=out/figures", *words])

    before, handler = Path.cwd(), signal.getsignal(signal.SIGTERM)
    yield make
    os.chdir(before)
    signal.signal(signal.SIGTERM, handler)


def noted(tmp_path) -> list[tuple[str, str]]:
    """(stage, state) of each attempt."""
    return [(row["stage"], row["state"]) for row in gpu_targets.read_lines(tmp_path / "out/figures/stages.jsonl")]


def test_stages_are_done_once_and_a_failed_one_again_when_the_code_is_another(campaign, tmp_path, monkeypatch, capsys):
    run = campaign(Stage("good", 1, "sh -c 'echo $A; echo x >> good'", env={"A": "a {out}"}),
                   Stage("bad", 1, "sh -c 'echo why; echo x >> bad; exit 3'"))  # fmt: skip
    assert run() == 1 and noted(tmp_path) == [("good", "done"), ("bad", "failed")]
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert "    why\n" in printed and last["stages"] == {"good": "done", "bad": "failed"}
    first = gpu_targets.read_lines(tmp_path / "out/figures/stages.jsonl")[0]
    assert first["said"] == "a out/figures" and first["device"].startswith("cpu") and first["versions"]["torch"]
    assert run() == 0 and len(noted(tmp_path)) == 2  # neither again
    real = gpu.environment
    monkeypatch.setattr(gpu, "environment", lambda device: real(device) | {"git": "another"})
    assert run() == 1 and noted(tmp_path)[2:] == [("bad", "failed")]
    assert run("--stages=go*") == 0 and (tmp_path / "good").read_text() == "x\nx\n"  # named: done again
    assert (tmp_path / "out/figures/README.md").read_text().count("| good |") == 1


def test_a_stage_beyond_its_limit_is_stopped_and_a_sweep_goes_on(campaign, tmp_path, monkeypatch):
    """Both with all that they have started, even what does not listen; they get the time to save."""
    monkeypatch.setattr(gpu, "GRACE", 1)
    loop = "sh -c 'trap \"sleep 0.2; echo saved > saved; exit 1\" INT; (while :; do sleep 0.1; date > {}; done) & wait'"
    run = campaign(Stage("slow", 0.01, loop.format("slow")), Stage("sweep", 9, loop.format("sweep"), goes_on=True),
                   Stage("bench", 9, "sh -c 'trap \"exit 0\" INT; sleep 60 & wait'"))  # fmt: skip
    assert run("--limit=0.02", "--stages=slow") == 1 and noted(tmp_path) == [("slow", "too long")]
    assert (tmp_path / "saved").exists()
    (tmp_path / "saved").unlink()
    assert run("--limit=0.02", "--stages=sweep") == 0 and noted(tmp_path)[1:] == [("sweep", "goes on")]
    assert (tmp_path / "saved").exists()
    written = [(tmp_path / name).stat().st_mtime_ns for name in ("slow", "sweep")]
    time.sleep(0.5)
    assert written == [(tmp_path / name).stat().st_mtime_ns for name in ("slow", "sweep")]  # nothing has outlived it
    assert run("--limit=0.02") == 1
    assert noted(tmp_path)[2:] == [("slow", "too long"), ("sweep", "goes on"), ("bench", "cut short")]
    assert run("--limit=0.02") == 0 and noted(tmp_path)[5:] == [("sweep", "goes on")]


def test_what_the_user_has_exported_is_not_the_stages(campaign, tmp_path, monkeypatch):
    for name in ("SEEDS", "ARMS", "KEEP"):
        monkeypatch.setenv(name, "mine")
    run = campaign(Stage("one", 1, "sh -c 'echo $SEEDS-$ARMS-$KEEP'", env={"ARMS": "a b"}))
    assert run() == 0
    (row,) = gpu_targets.read_lines(tmp_path / "out/figures/stages.jsonl")
    assert row["said"] == "-a b-" and row["command"].startswith("ARMS='a b' sh")


def test_a_rehearsal_and_a_campaign_share_nothing(campaign, tmp_path, monkeypatch):
    run = campaign(Stage("one", 1, "sh -c 'echo {scratch}'"))
    assert run() == 0 and "A rehearsal" in (tmp_path / "out/figures/README.md").read_text()
    assert gpu_targets.read_lines(tmp_path / "out/figures/stages.jsonl")[0]["said"] == "out/gpu/figures-rehearsal"
    monkeypatch.setattr(gpu, "check_place", lambda config: torch.device("cpu"))
    with pytest.raises(ConfigError, match="what is there is a rehearsal's"):
        gpu.main(["--out=out/figures"])
    for out in ("results/h200", f"{tmp_path}/results/mine", "out/../results/x"):
        with pytest.raises(ConfigError, match="no results: give another folder"):
            run(f"--out={out}")
    with pytest.raises(ConfigError, match="would overwrite"):
        run("--out=.")


def test_one_campaign_at_a_time_and_none_beside_what_outlived_another(campaign, tmp_path):
    (tmp_path / "out/gpu").mkdir()
    run = campaign(Stage("one", 1, "true"))
    with open(tmp_path / "out/gpu/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        orphan = subprocess.Popen(["sleep", "60"], pass_fds=[held.fileno()])
    with pytest.raises(UserError, match="still runs in this folder: end it first"):
        run()
    orphan.kill()
    orphan.wait()
    assert run() == 0


def test_torn_lines_lose_no_others(tmp_path):
    path = tmp_path / "a.jsonl"
    append_json(path, {"x": 1})
    with open(path, "a") as file:
        file.write('{"x": 2')  # a kill here
    append_json(path, {"x": 3})
    append_json(path, {"x": 4})
    assert [row["x"] for row in gpu_targets.read_lines(path)] == [1, 3, 4]


def test_nothing_is_begun_that_does_not_fit(campaign, tmp_path, capsys):
    run = campaign(Stage("long", 9, "true"), Stage("short", 1.5, "true"), Stage("data", 1, "true", needs_data=True),
                   Stage("package", 1, "true", needs="no_such_package"))  # fmt: skip
    assert run("--minutes=2") == 0 and noted(tmp_path) == [("short", "done")]
    printed = capsys.readouterr().out
    assert "[4/4] package: left out: it needs a package: pip install no_such_package\n" in printed
    assert "no time left for: long\n" in printed and "no token shards in data/offline" in printed


def test_what_a_run_without_results_logs_at_its_end_is_kept(campaign, tmp_path):
    """Even if it fails while it writes its weights; and the next attempt finds nothing of it."""
    (tmp_path / "end.json").write_text('{"event": "end", "reason": "done", "x": 7}')
    log = "mkdir -p {scratch}/run; test ! -e {scratch}/run/log.jsonl; cp end.json {scratch}/run/log.jsonl; exit 1"
    run = campaign(Stage("kept", 1, f"sh -ec '{log}'", run_folder="run", keep="deep/kept.jsonl"),
                   Stage("not", 1, "sh -ec 'test ! -e {scratch}/run'", run_folder="run", keep="deep/kept.jsonl"))
    assert run() == 1 and noted(tmp_path) == [("kept", "done"), ("not", "failed")]
    (row,) = gpu_targets.read_lines(tmp_path / "out/figures/deep/kept.jsonl")
    assert row["x"] == 7 and row["stage"] == "kept" and "git" in row


def test_interrupted_it_stops_its_stage_and_goes_on_there(tmp_path):
    code = ("import sys; from pathlib import Path; from repro import gpu; from repro.gpu_stages import Stage\n"
            "gpu.ROOT = Path(sys.argv[1])\n"
            "gpu.STAGES = (Stage('wait', 1, \"sh -c 'echo $$ > pid; exec sleep 60'\"), Stage('next', 1, 'true'))\n"
            "sys.exit(gpu.main(['--rehearse', '--out=out/figures']))")  # fmt: skip
    job = start_code(code, tmp_path / "printed", tmp_path)
    end = time.monotonic() + 100
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end and job.is_alive()
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGTERM)
    job.join(100)
    assert job.exitcode == 130 and noted(tmp_path) == [("wait", "interrupted")]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_wrong_words_and_wrong_places_are_refused(campaign, monkeypatch):
    run = campaign(Stage("one", 1, "true"))
    with pytest.raises(ConfigError, match="'two' is no stage: --list"):
        run("--stages=one two")
    with pytest.raises(UserError, match="no GPU here: --rehearse"):
        gpu.main([])
    monkeypatch.setattr(gpu, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(gpu, "environment", lambda _: {"git": None})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(UserError, match="NVIDIA A100: give its figures a folder of their own"):
        gpu.main([])
    with pytest.raises(UserError, match="NANONORM_COMMIT="):
        gpu.main(["--out=results/a100"])


# --------------------------------------------------------------------------------------------------- the real stages


@pytest.mark.parametrize("rehearse", (False, True))
def test_every_stage_says_what_its_program_understands(rehearse, tmp_path, monkeypatch):
    """Each word of each command, that of scripts as they pass it on: parsed by the program's own configuration."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spy = tmp_path / "python"
    spy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" ::: >> {tmp_path}/words\n')
    spy.chmod(0o755)
    config, calls = gpu.GpuConfig(out="out/figures", rehearse=rehearse), []
    for stage in STAGES:
        words, env = gpu.filled_in(stage, config)
        if words[0] == sys.executable:
            calls.append(words[1:])
        else:
            (tmp_path / "words").unlink(missing_ok=True)
            inherited = {name: value for name, value in os.environ.items() if name not in gpu.OURS}
            subprocess.run(words, env=inherited | env | {"PYTHON": str(spy), "KEEP": str(tmp_path)}, check=False,
                           capture_output=True)  # fmt: skip
            own = [part.strip("\n").split("\n") for part in (tmp_path / "words").read_text().split(":::\n")[:-1]]
            assert own[0][0] == ("-c" if stage.needs_data else "bench_decode.py"), stage.name
            calls += own
    seen = set()
    for program, *words in calls:
        if program == "-m" and words[0] in PROGRAMS:
            program, *words = words
        seen.add(program)
        if program in PROGRAMS:
            cls, takes_model = PROGRAMS[program]
            parse_args(cls, words, spec=takes_model and "--last_token" not in words)
        elif program == "train.py":
            parse_args(TrainConfig, words)
        elif program == "-m":
            assert all(Path(word).is_file() for word in words if word.startswith("tests/"))
        else:
            assert program in ("-c", "report.py")  # sweep.sh's own check of its words, and what its runs become
    assert seen >= {*PROGRAMS, "train.py", "report.py", "-m"}
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names) and all(stage.minutes < 9.5 or stage.goes_on for stage in STAGES)


# --------------------------------------------------------------------------------------------------------------- aims


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder: Path) -> dict[str, gpu_targets.Target]:
    return {row.what: row for row in gpu_report.render(folder)}


def test_verdicts():
    def verdict(value, low=None, high=None, aim=1.0):
        return gpu_targets.Target("area", "what", aim, value, low, high).verdict

    assert [verdict(2, 1.0, 3), verdict(2, 0.9, 3), verdict(0.5, 0.4, 0.9), verdict(0.5), verdict(1), verdict(None),
            verdict(2, aim=None)] == ["met", "open", "missed", "missed", "met", "not measured", "stated"]  # fmt: skip
    make = gpu_targets.Target
    rows = [make("a", "open", 1.0, 0.5, 0.2, 1.5), make("a", "missed", 1.0, 0.9, 0.8, 0.95), make("a", "met", 1.0, 2.0)]
    assert gpu_targets.worst(rows).what == "missed" and gpu_targets.worst(rows[:1] + rows[2:]).what == "open"


def test_figures_of_the_programs_themselves_are_read(tmp_path):
    """What the benches wrote on a CPU stands for what they will write on the GPU: same programs, same fields."""
    cpu = ROOT / "results/cpu"
    (tmp_path / "train").mkdir()
    shutil.copy(cpu / "train/steps.jsonl", tmp_path / "train/steps.jsonl")
    found = rows_of(tmp_path)
    fold = found["coupled coupled_impl=fold over rms, tokens/s, float32 stream"]
    recorded = {row["arm"]: row for row in gpu_targets.read_lines(tmp_path / "train/steps.jsonl")}
    ratio = recorded["coupled coupled_impl=fold"]["speed_over"]["rms"]
    assert [fold.value, fold.low, fold.high] == [ratio[end] for end in ("mean", "low", "high")]
    assert fold.verdict == "missed"
    assert found["rms over nanogpt, tokens/s, float32 stream"].verdict == "not measured"

    (row,) = gpu_targets.read_lines(cpu / "decode/decode.jsonl")
    write(tmp_path / "decode/decode.jsonl", [row | {"model": "random:qwen3-0.6b"}])
    for line in gpu_targets.read_lines(cpu / "fold/fold.jsonl")[:1]:
        line |= {"length": 256, "mode": "eager", "sequential": {"saved": 0.05}}
        swapped = line | {"sequential": {"saved": 0.0, "saved_swapped": 0.08}}
        write(tmp_path / "fold/gpt2.jsonl", [line | {"sequential": {"saved": 0.01}}, line])
        write(tmp_path / "fold/bert.jsonl", [swapped])
    found = rows_of(tmp_path)
    paper, ratio = found["qwen3-0.6b, B/A, batch 1"], row["speed_ups"]["coupled/rms"]
    assert (paper.value, paper.low, paper.high) == (ratio["median"], ratio["low"], ratio["high"])
    assert found["qwen3-0.6b, A/A, batch 1"].value == row["speed_ups"]["A/A/rms"]["median"]
    lame = row | {"model": "random:qwen3-8b", "speed_ups": {"coupled_fused/rms": ratio}}
    write(tmp_path / "decode/decode.jsonl", [row | {"model": "random:qwen3-0.6b"}, lame])
    assert rows_of(tmp_path)["qwen3-8b, D/C, batch 1"].verdict == "not measured"  # but shown, beside D/A
    share = found["qwen3-0.6b, D's share of the bandwidth floor, batch 1"]
    assert share.value == pytest.approx(row["arms"]["coupled_fused"]["share_of_floor"], rel=1e-2)
    assert share.low <= share.value <= share.high
    assert found["gpt2, 256 tokens: time saved by the paper's protocol"].verdict == "met"  # the later line counts
    assert found["bert, 256 tokens: time saved by the paper's protocol"].value == 0.08


def test_the_worst_kernel_is_shown_and_the_table_written(tmp_path):
    def kernel(operator, phase, channels, share, peer=1.5, **others):
        ratio = {"median": peer, "low": peer - 0.01, "high": peer + 0.01}
        return {"operator": operator, "phase": phase, "channels": channels, "ours": "triton",
                "share": {"triton": share}, "share_interval": {"triton": [share - 0.01, share + 0.01]},
                "time_over_ours": {"Liger": ratio} | others}  # fmt: skip

    unscaled = {"median": 0.995, "low": 0.991, "high": 0.999}
    write(tmp_path / "kernels/norms/kernels.jsonl",
          [kernel("rms_norm", "forward", 768, 0.86), kernel("rms_norm", "forward", 2048, 0.95),
           kernel("rms_norm", "forward", 4096, 0.895),
           kernel("rms_norm", "backward", 1024, 0.9, peer=1.2)])  # fmt: skip
    write(tmp_path / "kernels/coupled/kernels.jsonl",
          [kernel("scaled_gelu", "forward", 768, 0.9, **{gpu_targets.UNSCALED: unscaled})])
    write(tmp_path / "taper/last_token.jsonl", [
        {"mode": "eager", "batch": batch, "context": 128, "speed_up": {
            pair: {"median": 1.2 + batch / 100, "low": 1.2, "high": 1.4} for pair in
            ("taper/rms", "taper_folded/rms", "taper_folded/rms_folded")}} for batch in range(1, 7)])  # fmt: skip
    distilled = {"stage": "distill-qwen3-8b", "tok_per_s": 900.0, "peak_bytes": 70e9}
    write(tmp_path / "distill/distill.jsonl", [distilled])
    write(tmp_path / "stages.jsonl", [{
        "stage": "one", "state": "done", "seconds": 60, "said": "a | b", "git": "f" * 40 + "+", "rehearsal": False,
        "device": "NVIDIA H200", "clocks": "1", "clocks_after": "2",
    }])  # fmt: skip
    found = rows_of(tmp_path)
    wide = found["rms_norm forward, share of a copy's bandwidth, C >= 2048"]
    assert (wide.value, wide.note, wide.verdict) == (0.895, "worst at C = 4096", "open")
    assert found["rms_norm forward, share of a copy's bandwidth, C < 2048"].verdict == "met"
    assert found["Liger-Kernel's backward over ours, C <= 1024"].verdict == "missed"
    assert found["the unscaled activation's time over the scaled one's"].verdict == "met"
    assert found["scaled_gelu: the best other implementation's time over ours"].value == 1.5  # unscaled does less
    assert "batch 1" in found["taper_folded over rms, eager"].note and found["taper over rms, eager"].verdict == "met"
    assert found["qwen3-8b, 141 GB over the peak memory"].verdict == "met"
    assert "qwen3-0.6b, tokens/s" not in found  # no aim, no figure
    text = (tmp_path / "README.md").read_text()
    assert "| one | done | 1.0 | ffffffff+, NVIDIA H200 | 1; 2 | a / b |" in text and "rehearsal" not in text
    assert ">= 90% | 90% | 88% .. 90% | open | worst at C = 4096 | [kernels/norms/kernels.jsonl]" in text
    assert (tmp_path / "targets.png").stat().st_size > 10_000


def test_without_any_figure_every_aim_is_unmeasured(tmp_path):
    rows = gpu_report.render(tmp_path / "empty")
    assert gpu_targets.counted(rows) == {"met": 0, "open": 0, "missed": 0, "stated": 0, "not measured": len(rows)}
    assert "targets.png" not in (tmp_path / "empty/README.md").read_text()
