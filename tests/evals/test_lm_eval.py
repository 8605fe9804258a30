"""lm-evaluation-harness's own command line on a run folder of ours.

python -m pytest tests/evals/test_lm_eval.py
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from helpers import ROOT

from common.errors import CheckpointError, ConfigError, UserError
from evals import lm_eval, lm_eval_model
from model import GPT, GPTConfig
from training.checkpoint import BEST, save_checkpoint

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
from evals.harness_model import NamedModel

ITEMS = 12
TASK = """
task: our_task
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/rows.jsonl}}}}
training_split: train
validation_split: train
output_type: multiple_choice
doc_to_text: "Question {{{{number}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a task, its rows, and run/, a run folder."""
    shape = GPTConfig(
        vocab_size=320, n_vocab=257, block_size=64, n_layer=2, n_head=2, n_embd=32, init_std=0.1
    )
    meta = {"tokenizer": "bytes", "vocab_size": 257}
    model = GPT(shape, seed=2).state_dict()
    state = {"step": 0, "config": asdict(shape), "meta": meta, "model": model}
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run" / BEST, state)
    rows = [
        {"number": i, "choices": [f"one {i}", f"{i * i} two", "three"], "answer": i % 3}
        for i in range(ITEMS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def our_tasks_only(monkeypatch):
    """To read the harness's own thousands of tasks takes eight seconds."""
    import lm_eval.tasks

    class OurTasksOnly(lm_eval.tasks.TaskManager):
        def __init__(self, include_path=None, include_defaults=False, **more):
            super().__init__(include_path=include_path, include_defaults=False, **more)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OurTasksOnly)
    monkeypatch.setattr("sys.argv", sys.argv)  # the program replaces it


def test_the_harness_itself_gives_our_marks(folder, capsys, our_tasks_only):
    """Its command line in a process of its own, offline, in which some examples do not fit."""
    words = f"""--model nanonorm --model_args spec={folder / "run"},dtype=float32 --tasks our_task
        --include_path {folder} --num_fewshot 3 --limit {ITEMS - 2} --batch_size 4 --log_samples
        --output_path {folder / "marks.json"}"""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "evals.lm_eval", *words.split()],
        cwd=ROOT,
        env=offline,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "|our_task|" in done.stdout, done.stderr[-2000:]
    (path,) = folder.glob("marks_*.json")
    found = json.loads(path.read_text())
    (path,) = folder.glob("samples_our_task_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]

    lm_eval_model.main(
        [
            str(folder / "run"),
            "--tasks=our_task",
            f"--include={folder}",
            "--num_fewshot=3",
            f"--limit={ITEMS - 2}",
            "--dtype=float32",
            f"--out={folder / 'items.jsonl'}",
        ]
    )
    (ours,) = json.loads(capsys.readouterr().out.splitlines()[-1])["groups"]
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    assert found["results"]["our_task"]["acc,none"] == ours["acc"]
    assert 0 < ours["acc"] < 1 and ours["items"] == ITEMS - 2
    assert {sample["doc_id"]: sample["acc"] for sample in samples} == {
        item["item"]: item["correct"][str(folder / "run")] for item in items
    }
    config = found["config"]
    assert (config["model_dtype"], config["model_context"]) == ("float32", 64)
    assert (config["requests"], config["requests_cut"]) == (ours["requests"], ours["cut"])
    assert ours["cut"] > 0


def test_what_the_harness_refuses_is_one_line(folder, our_tasks_only):
    model = ["--model", "nanonorm", "--model_args", f"spec={folder / 'run'}"]
    for words, match in [
        ([*model, "--tasks", "no_such_task"], "Tasks not found: no_such_task"),
        (["--model", "nanonrm", "--tasks", "our_task", "--include_path", folder], "no model for"),
    ]:
        with pytest.raises(UserError, match=rf"(?i)lm-evaluation-harness: .*{match}") as caught:
            lm_eval.main(list(map(str, words)))
        assert "\n" not in str(caught.value)


def test_the_harnesss_own_models_are_there_too():
    """It registers them only if there are no others yet."""
    code = """
import evals.harness_model
from lm_eval.api.registry import get_model
print(get_model("nanonorm").__name__, get_model("dummy").__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["NamedModel", "DummyLM"], done.stderr[-2000:]


def test_model_arguments(folder):
    spec = str(folder / "run")
    found = NamedModel(spec, context=24, batch_size="auto:4", device="cpu").scorer
    assert (found.context, found.batch_size) == (24, 8)
    for words, error, match in [
        ({}, ConfigError, "--model_args spec=MODEL"),
        ({"spec": "nowhere"}, CheckpointError, "nowhere"),
        ({"spec": spec, "contxt": 3}, ConfigError, "contxt: unknown, did you mean context"),
        ({"spec": spec, "context": 65}, ConfigError, "up to the model's 64"),
        ({"spec": spec, "context": "all"}, ConfigError, "up to the model's 64"),
        ({"spec": spec, "dtype": "int8"}, ConfigError, "must be one of auto, float32"),
        ({"spec": spec, "batch_size": "0"}, ConfigError, "must be auto or at least 1"),
        ({"spec": spec, "device": "tpu"}, ConfigError, "device=tpu: must be"),
    ]:
        with pytest.raises(error, match=match):
            NamedModel(**words)
