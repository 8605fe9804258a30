"""repro/h200.sh with stages of no weight, and the words of the real ones; repro/h200.py's aims on
made-up figures.

    python -m pytest tests/repro/test_h200.py
"""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ROOT

import bench_decode
import distill
from bench import fold as bench_fold
from bench import kernels, train
from common.errors import ConfigError, UserError
from common.output import append_json, read_json
from configurator import parse_args
from repro import h200
from train import TrainConfig

PROGRAMS = {
    "bench.train": (train.TrainBenchConfig, False),
    "bench_decode.py": (bench_decode.DecodeBenchConfig, True),
    "bench.kernels": (kernels.KernelBenchConfig, False),
    "bench.fold": (bench_fold.FoldBenchConfig, True),
    "distill.py": (distill.DistillConfig, False),
}
FIRST, LAST = "every_stage() {\n", "\n}\n\n# ---"  # around the stages


@pytest.fixture
def campaign(tmp_path):
    """campaign(stages, *words, **env) -> a process of a copy of the script with these stages ("":
    the real ones), on a GPU that is not there: the place that `python` names is in the file
    `place`.
    """
    script = (ROOT / "repro/h200.sh").read_text()
    (tmp_path / "repro").mkdir()
    shutil.copy(ROOT / "repro/start.sh", tmp_path / "repro")
    start = script.index(FIRST) + len(FIRST)
    rest = script.index(LAST, start)
    (tmp_path / "place").write_text("aaaa,NVIDIA H200\n")
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = repro/h200.py ] || cat place\n')
    (tmp_path / "python").chmod(0o755)

    def run(stages: str, *words: str, **env: str) -> subprocess.Popen:
        (tmp_path / "new.sh").write_text(
            f"{script[:start]}{stages or script[start:rest]}{script[rest:]}"
        )
        # bash reads on in the file that it has begun
        (tmp_path / "new.sh").replace(tmp_path / "repro/h200.sh")
        settings = {**os.environ, "OUT": "figures", "PYTHON": str(tmp_path / "python"), **env}
        return subprocess.Popen(
            ["bash", "repro/h200.sh", *words],
            cwd=tmp_path,
            env=settings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return run


def ended(job: subprocess.Popen, code: int = 0) -> str:
    output, _ = job.communicate(timeout=100)
    assert job.returncode == code, output
    return output


def noted(tmp_path) -> list[tuple[str, str]]:
    """(stage, state) of each attempt."""
    path = tmp_path / "figures/stages.csv"
    return (
        [tuple(line.split(",")[:2]) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def test_stages_are_done_once_and_a_failed_one_again_when_the_code_is_another(campaign, tmp_path):
    stages = "stage good 1 sh -c 'echo x >> good'\nstage bad 1 sh -c 'echo why; exit 3'"
    printed = ended(campaign(stages), 1)
    assert "    why\n" in printed and noted(tmp_path) == [("good", "done"), ("bad", "failed")]
    assert (tmp_path / "out/h200/bad.txt").read_text() == "why\n"
    ended(campaign(stages))
    assert len(noted(tmp_path)) == 2  # neither again
    (tmp_path / "place").write_text("bbbb,NVIDIA H200\n")
    ended(campaign(stages), 1)
    assert noted(tmp_path)[2:] == [("bad", "failed")]
    ended(campaign(stages, "go*"))  # named: done again
    assert (tmp_path / "good").read_text() == "x\nx\n"
    assert "good: done, 1 minutes\n    'sh' '-c'" in ended(campaign(stages, "--list"))
    assert "other: no such stage" in ended(campaign(stages, "good", "other"), 2)
    assert (tmp_path / "good").read_text() == "x\nx\n"  # nothing ran


def test_a_stage_beyond_its_limit_is_stopped_with_all_that_it_started(campaign, tmp_path):
    """One that ends well has kept something; one that does not is tried twice; a sweep goes on each
    time.
    """
    loop = (
        'sh -c \'trap "echo saved > {0}; exit {1}" INT; '
        "(while :; do sleep 0.1; date > {0}-child; done) & wait'"
    )
    stages = (
        f"goes_on=1 stage sweep 9 {loop.format('sweep', 130)}\nstage bench 9 "
        f"{loop.format('bench', 0)}\nstage tests 9 {loop.format('tests', 2)}"
    )
    ended(campaign(stages, LIMIT="0.02"), 1)
    assert noted(tmp_path) == [("sweep", "stopped"), ("bench", "cut short"), ("tests", "stopped")]
    assert all((tmp_path / name).exists() for name in ("sweep", "bench", "tests"))
    written = (tmp_path / "sweep-child").stat().st_mtime_ns
    time.sleep(0.5)
    assert written == (tmp_path / "sweep-child").stat().st_mtime_ns  # nothing has outlived it
    ended(campaign(stages, LIMIT="0.02"), 1)
    ended(campaign(stages, LIMIT="0.02"))
    assert noted(tmp_path)[3:] == [("sweep", "stopped"), ("tests", "stopped"), ("sweep", "stopped")]


def test_nothing_is_begun_that_does_not_fit(campaign, tmp_path):
    printed = ended(
        campaign(
            "stage long 9 true\nstage short 1 true\ngoes_on=1 stage sweep 30 true", MINUTES="3"
        )
    )
    assert "no time left for: long\n" in printed and noted(tmp_path) == [
        ("short", "done"),
        ("sweep", "done"),
    ]


def test_each_stage_fits_into_the_minutes_that_the_head_names(campaign, tmp_path):
    """The commands fail at once here: begun is begun."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/meta.json").write_text("{}")
    printed = ended(campaign("", MINUTES="9.5", DATA="shards"), 1)
    assert "no time left" not in printed and len(noted(tmp_path)) == 62


def test_a_distillation_that_fails_is_not_done(campaign, tmp_path):
    stage = "distil qwen3-0.6b 4"
    (tmp_path / "python").write_text(
        '#!/bin/sh\ncase "$*" in *distill.py*|*--keep*) exit 1;; -c*) cat place;; esac\n'
    )
    ended(campaign(stage), 1)
    assert noted(tmp_path) == [("distill-qwen3-0.6b", "failed")]
    (tmp_path / "python").write_text(
        '#!/bin/sh\ncase "$2" in *find_spec*) exit 1;; *import*) cat place;; esac\n'
    )
    assert "pip install peft" in ended(campaign(stage, "distill*"), 1)
    assert len(noted(tmp_path)) == 1


def test_a_torn_line_of_the_table_loses_no_other(campaign, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/stages.csv").write_text("one,done,1,aaaa,NVIDIA H200,,\ntwo,do")
    ended(campaign("stage one 1 true\nstage two 1 true\nstage three 1 true"))
    assert noted(tmp_path) == [("one", "done"), ("two", "do"), ("two", "done"), ("three", "done")]


@pytest.mark.parametrize(
    ("name", "value"),
    [("LIMIT", "x"), ("LIMIT", "0"), ("MINUTES", "-1"), ("OUT", "."), ("OUT", "..")],
)
def test_wrong_settings_are_refused(campaign, tmp_path, name, value):
    assert f"error: {name}={value}: " in ended(
        campaign("stage one 1 touch begun", **{name: value}), 2
    )
    assert not (tmp_path / "begun").exists()


def test_interrupted_it_stops_its_stage_and_goes_on_there(campaign, tmp_path):
    job = campaign("stage wait 1 sh -c 'echo $$ > pid; exec sleep 60'\nstage next 1 true")
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert "stopped; the same command goes on" in ended(job, 130)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert noted(tmp_path) == []


def test_one_campaign_at_a_time(campaign, tmp_path):
    first = campaign("stage wait 1 sh -c 'touch begun; sleep 60'")
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.05)
    assert "still runs in this folder: end it first" in ended(campaign("stage next 1 true"), 2)
    first.send_signal(signal.SIGTERM)
    ended(first, 130)


def test_what_the_user_has_exported_is_not_the_stages(campaign, tmp_path):
    ended(
        campaign(
            "stage one 1 sh -c 'echo $SEEDS-$ARMS-$KEEP > seen'",
            SEEDS="mine",
            ARMS="mine",
            KEEP="mine",
        )
    )
    assert (tmp_path / "seen").read_text() == "--\n"


@pytest.mark.parametrize(
    ("place", "out", "message"),
    [
        ("aaaa,cpu (AMD EPYC 2 cores)", "figures", "no GPU here"),
        (",NVIDIA H200", "figures", "NANONORM_COMMIT="),
        (
            "aaaa,NVIDIA A100",
            "results/h200/",
            "NVIDIA A100: give its figures a folder of their own",
        ),
    ],
)
def test_wrong_places_are_refused(campaign, tmp_path, place, out, message):
    (tmp_path / "place").write_text(place + "\n")
    assert message in ended(campaign("stage one 1 true", OUT=out), 2)


# ---------------------------------------------------------------------------------- the real stages


def test_every_stage_says_what_its_program_understands(tmp_path, monkeypatch):
    """Each word of each command, that of scripts as they pass it on: parsed by the program's own
    configuration.
    """
    monkeypatch.chdir(ROOT)
    for folder, file in (("nanogpt", "model.py"), ("gpt_fast", "model.py"), ("data", "meta.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    spy = tmp_path / "python"
    spy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" ::: >> {tmp_path}/words\n')
    spy.chmod(0o755)
    places = {
        "NANOGPT": f"{tmp_path}/nanogpt",
        "GPT_FAST": f"{tmp_path}/gpt_fast",
        "DATA": f"{tmp_path}/data",
        "OUT": f"{tmp_path}/figures",
        "SCRATCH": f"{tmp_path}/scratch",
        "PYTHON": str(spy),
    }
    listed = subprocess.run(
        ["bash", "repro/h200.sh", "--list"],
        env=os.environ | places,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    names, calls = [line.split(":")[0] for line in listed if not line.startswith(" ")], []
    for command in (line for line in listed if line.startswith(" ")):
        (tmp_path / "words").unlink(missing_ok=True)
        subprocess.run(
            ["bash", "-c", command],
            env=os.environ | {"PYTHON": str(spy)},
            check=False,
            capture_output=True,
        )
        calls += [
            part.strip("\n").split("\n")
            for part in (tmp_path / "words").read_text().split(":::\n")[:-1]
        ]
    seen = set()
    for program, *words in calls:
        if program == "-m" and words[0] in PROGRAMS:
            program, *words = words
        if words[:1] == ["evidence.claim"]:  # of sweep.sh; it becomes the command behind it
            program, *words = words[words.index("train.py") :]
        seen.add(program)
        if program in PROGRAMS:
            cls, takes_model = PROGRAMS[program]
            monkeypatch.setattr("torch.cuda.is_available", lambda: True)
            parse_args(cls, words, spec=takes_model and "--last_token" not in words)
        elif program == "train.py":
            parse_args(TrainConfig, words)
        elif program == "-m":
            assert words[0] in ("pytest", "evidence.archive")
            assert all(Path(word).is_file() for word in words if word.startswith("tests/"))
        else:
            # what sweep.sh checks, and what runs become
            assert program in ("-c", "report.py", "repro/h200.py")
    assert seen >= {*PROGRAMS, "train.py", "-m", "repro/h200.py"}
    assert len(set(names)) == len(names) == 62


def test_what_a_run_logs_at_its_end_is_kept(tmp_path):
    run, target = tmp_path / "run", tmp_path / "deep/kept.jsonl"
    run.mkdir()
    start = {"event": "start", "git": "a", "device": "NVIDIA H200", "config": {}}
    for reason in ("stopped", "done"):
        write(run / "log.jsonl", [start, {"event": "end", "reason": reason, "tok_per_s": 7}])
        if reason == "stopped":
            with pytest.raises(UserError, match="did not end well"):
                h200.main(["--keep", str(run), str(target), "qwen3-8b"])
    h200.main(["--keep", str(run), str(target), "qwen3-8b"])
    (row,) = read_json(target)
    assert (row["model"], row["tok_per_s"], row["device"]) == ("qwen3-8b", 7, "NVIDIA H200")
    with pytest.raises(ConfigError, match="needs the folder"):
        h200.main([])


def test_torn_lines_lose_no_others(tmp_path):
    path = tmp_path / "a.jsonl"
    append_json(path, {"x": 1})
    with open(path, "a") as file:
        file.write('{"x": 2')  # a kill here
    append_json(path, {"x": 3})
    append_json(path, {"x": 4})
    assert [row["x"] for row in read_json(path)] == [1, 3, 4]


# --------------------------------------------------------------------------------------------- aims


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder: Path) -> dict[str, h200.Target]:
    return {row.what: row for row in h200.render(folder)}


def test_verdicts():
    def verdict(value, low=None, high=None, aim=1.0):
        return h200.Target("area", "what", aim, value, low, high).verdict

    assert [
        verdict(2, 1.0, 3),
        verdict(2, 0.9, 3),
        verdict(0.5, 0.4, 0.9),
        verdict(0.5),
        verdict(1),
        verdict(None),
        verdict(2, aim=None),
    ] == ["met", "open", "missed", "missed", "met", "not measured", "stated"]
    make = h200.Target
    rows = [
        make("a", "open", 1.0, 0.5, 0.2, 1.5),
        make("a", "missed", 1.0, 0.9, 0.8, 0.95),
        make("a", "met", 1.0, 2.0),
    ]
    assert h200.worst(rows).what == "missed" and h200.worst(rows[:1] + rows[2:]).what == "open"


def test_figures_of_the_programs_themselves_are_read(tmp_path):
    """What the benches wrote on a CPU stands for what they will write on the GPU: same programs,
    same fields.
    """
    cpu = ROOT / "results/cpu"
    (tmp_path / "train").mkdir()
    shutil.copy(cpu / "train/steps.jsonl", tmp_path / "train/steps.jsonl")
    found = rows_of(tmp_path)
    fold = found["coupled coupled_impl=fold over rms, tokens/s, float32 stream"]
    recorded = {row["arm"]: row for row in read_json(tmp_path / "train/steps.jsonl")}
    ratio = recorded["coupled coupled_impl=fold"]["speed_over"]["rms"]
    assert [fold.value, fold.low, fold.high] == [ratio[end] for end in ("mean", "low", "high")]
    assert fold.verdict == "missed"
    assert found["rms over nanogpt, tokens/s, float32 stream"].verdict == "not measured"

    (row,) = read_json(cpu / "decode/decode.jsonl")
    write(tmp_path / "decode/decode.jsonl", [row | {"model": "random:qwen3-0.6b"}])
    for line in read_json(cpu / "fold/fold.jsonl")[:1]:
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
    # but shown, beside D/A
    assert rows_of(tmp_path)["qwen3-8b, D/C, batch 1"].verdict == "not measured"
    share = found["qwen3-0.6b, D's share of the bandwidth floor, batch 1"]
    assert share.value == pytest.approx(row["arms"]["coupled_fused"]["share_of_floor"], rel=1e-2)
    assert share.low <= share.value <= share.high
    # the later line counts
    assert found["gpt2, 256 tokens: time saved by the paper's protocol"].verdict == "met"
    assert found["bert, 256 tokens: time saved by the paper's protocol"].value == 0.08


def test_the_worst_kernel_is_shown_and_the_table_written(tmp_path):
    def kernel(operator, phase, channels, share, peer=1.5, **others):
        ratio = {"median": peer, "low": peer - 0.01, "high": peer + 0.01}
        return {
            "operator": operator,
            "phase": phase,
            "channels": channels,
            "ours": "triton",
            "share": {"triton": share},
            "share_interval": {"triton": [share - 0.01, share + 0.01]},
            "time_over_ours": {"Liger": ratio} | others,
        }

    unscaled = {"median": 0.995, "low": 0.991, "high": 0.999}
    write(
        tmp_path / "kernels/norms/kernels.jsonl",
        [
            kernel("rms_norm", "forward", 768, 0.86),
            kernel("rms_norm", "forward", 2048, 0.95),
            kernel("rms_norm", "forward", 4096, 0.895),
            kernel("rms_norm", "backward", 1024, 0.9, peer=1.2),
        ],
    )
    write(
        tmp_path / "kernels/coupled/kernels.jsonl",
        [kernel("scaled_gelu", "forward", 768, 0.9, **{h200.UNSCALED: unscaled})],
    )
    write(
        tmp_path / "taper/last_token.jsonl",
        [
            {
                "mode": "eager",
                "batch": batch,
                "context": 128,
                "speed_up": {
                    pair: {"median": 1.2 + batch / 100, "low": 1.2, "high": 1.4}
                    for pair in ("taper/rms", "taper_folded/rms", "taper_folded/rms_folded")
                },
            }
            for batch in range(1, 7)
        ],
    )
    distilled = {"model": "qwen3-8b", "tok_per_s": 900.0, "peak_bytes": 70e9}
    write(tmp_path / "distill/distill.jsonl", [distilled])
    (tmp_path / "stages.csv").write_text(
        "one,failed,9,a,b,c,d\none,done,60,ffff+,NVIDIA H200,1,2\ntorn,do"
    )
    found = rows_of(tmp_path)
    wide = found["rms_norm forward, share of a copy's bandwidth, C >= 2048"]
    assert (wide.value, wide.note, wide.verdict) == (0.895, "worst at C = 4096", "open")
    assert found["rms_norm forward, share of a copy's bandwidth, C < 2048"].verdict == "met"
    assert found["Liger-Kernel's backward over ours, C <= 1024"].verdict == "missed"
    assert found["the unscaled activation's time over the scaled one's"].verdict == "met"
    # unscaled does less
    assert found["scaled_gelu: the best other implementation's time over ours"].value == 1.5
    assert (
        "batch 1" in found["taper_folded over rms, eager"].note
        and found["taper over rms, eager"].verdict == "met"
    )
    assert found["qwen3-8b, 141 GB over the peak memory"].verdict == "met"
    assert "qwen3-0.6b, tokens/s" not in found  # no aim, no figure
    text = (tmp_path / "README.md").read_text()
    assert (
        text.count("| one |") == 1 and "| one | done | 60 | ffff+ | NVIDIA H200 | 1 | 2 |" in text
    )
    assert (
        ">= 90% | 90% | 88% .. 90% | open | worst at C = 4096 | [kernels/norms/kernels.jsonl]"
        in text
    )
    assert (tmp_path / "targets.png").stat().st_size > 10_000


def test_without_any_figure_every_aim_is_unmeasured(tmp_path):
    rows = h200.render(tmp_path / "empty")
    assert h200.counted(rows) == {
        "met": 0,
        "open": 0,
        "missed": 0,
        "stated": 0,
        "not measured": len(rows),
    }
    assert "targets.png" not in (tmp_path / "empty/README.md").read_text()
