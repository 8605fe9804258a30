"""Log-likelihoods for lm-evaluation-harness, and the harness itself on local MMLU rows and on tasks
of a folder.

    python -m pytest tests/evals/test_lm_eval_model.py
"""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from common.environment import Precision
from common.errors import ConfigError, DataError, UserError
from evals import lm_eval_model
from evals.likelihood import Scorer
from evals.lm_eval_tasks import import_lm_eval
from model import GPT, GPTConfig
from training.checkpoint import BEST, save_checkpoint

FLOAT32, BFLOAT16 = (Precision(name, torch.device("cpu")) for name in ("float32", "bfloat16"))
SHAPE = GPTConfig(
    vocab_size=320,
    n_vocab=257,
    block_size=48,
    n_layer=2,
    n_head=2,
    n_embd=32,
    init_std=0.1,
    norm_type="rms",
    position="rope",
    activation="swiglu",
)


def gpt(**keys) -> GPT:
    model = GPT(replace(SHAPE, **keys), seed=2).eval()
    model.meta = {"tokenizer": "bytes", "vocab_size": 257}
    return model


@torch.no_grad()
def by_hand(model: GPT, context: str, continuation: str, size: int) -> float:
    ids = list((context + continuation).encode())[-(size + 1) :]
    log_p = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    count = min(len(continuation.encode()), len(ids) - 1)
    return sum(float(log_p[i, ids[i + 1]]) for i in range(len(ids) - 1 - count, len(ids) - 1))


@pytest.mark.parametrize("size", [48, 24])
def test_likelihoods_are_those_of_the_model(size):
    model = gpt()
    scorer = Scorer(model, FLOAT32, batch_size=3, context=size)
    pairs = [("Question? Answer:", f" {letter}") for letter in "ABCD"]
    pairs += [
        ("A longer context that is cut to the last forty-eight tokens of all.", " yes"),
        ("Hi", " there, you"),
        ("", "no context"),
        ("a space ", "belongs to it"),
    ]
    found = scorer.score(pairs)
    assert scorer.seen == {"requests": 8, "cut": 1, "forwards": 5}  # four choices, one forward
    pairs[-1] = ("a space", " belongs to it")  # to the continuation, that is
    for pair, (likelihood, _) in zip(pairs, found, strict=True):
        if pair[0]:
            assert abs(likelihood - by_hand(model, *pair, size)) < 1e-4
    best = chr(int(model(torch.tensor([list(b"Hi")]))[0, -1, 32:127].argmax()) + 32)
    is_best = int(model(torch.tensor([list(b"Hi")]))[0, -1].argmax()) == ord(best)
    assert scorer.score([("Hi", best)])[0][1] == is_best
    with pytest.raises(DataError, match="'context'"):
        scorer.score([("context", "")])


def test_choices_are_not_decided_by_rounding():
    """Where bfloat16 logits are equal, and float32 products of the same hidden states are not."""
    model = gpt()
    with torch.no_grad():
        model.wte.weight[ord("B")] = model.wte.weight[ord("A")] * (1 + 1e-4)
        with BFLOAT16.autocast():
            hidden = model.hidden(torch.tensor([list(b"Answer:")]))[0, -1]
            rounded = model.logits(hidden)
        exact = hidden.double() @ model.wte.weight.double().T
    assert rounded[ord("A")] == rounded[ord("B")] and exact[ord("A")] != exact[ord("B")]
    (a, _), (b, _) = Scorer(model, BFLOAT16, batch_size=1).score(
        [("Answer:", "A"), ("Answer:", "B")]
    )
    assert b - a == pytest.approx(float(exact[ord("B")] - exact[ord("A")]), abs=2e-6) and (
        b > a
    ) == (exact[ord("B")] > exact[ord("A")])


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_weights_stored_in_bfloat16_compute_like_others(precision):
    """A Hugging Face teacher comes in bfloat16, its student in float32: the same numbers must give
    the same marks.
    """
    stored, wide = gpt(), gpt()
    for parameter, other in zip(stored.parameters(), wide.parameters(), strict=True):
        parameter.data = parameter.data.bfloat16()
        other.data = parameter.data.float()
    pairs = [("Question? Answer:", " yes"), ("Question? Answer:", " no")]
    found = [Scorer(model, precision, batch_size=2).score(pairs) for model in (stored, wide)]
    assert found[0] == found[1]


def write_rows(path, count):
    choices = ["one", "two", "three", "four"]
    rows = [
        {
            "subject": subject,
            "question": f"What is {i}?",
            "choices": choices,
            "answer": (i + len(subject)) % 4,
        }
        for subject in ("high_school_art", "law")
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save(folder, **keys) -> str:
    """A run folder of gpt(**keys)."""
    model = gpt(**keys)
    folder.mkdir()
    save_checkpoint(
        folder / BEST,
        {
            "step": 0,
            "config": asdict(model.config),
            "meta": model.meta,
            "model": model.state_dict(),
        },
    )
    return str(folder)


def test_harness_runs_mmlu_offline(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    plans = {"teacher": ("RR RR R", 1024), "student": ("Rs Rs R", 1024), "short": ("RR RR R", 300)}
    teacher, student, short = (
        save(tmp_path / name, norm_type="coupled", norm_plan=plan, block_size=size)
        for name, (plan, size) in plans.items()
    )
    files = f"{write_rows(tmp_path / 'dev.jsonl', 5)},{write_rows(tmp_path / 'test.jsonl', 6)}"
    words = [f"--mmlu={files}", "--limit=4", "--device=cpu"]
    lm_eval_model.main([teacher, student, *words, f"--out={tmp_path / 'items.jsonl'}"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = found["groups"]
    assert found["dtype"] == "float32" and found["versions"]["lm_eval"]
    # four choices each, one forward
    assert first["items"] == second["items"] == first["forwards"] == 8
    assert (first["group"], first["shots"], first["cut"], first["requests"]) == (
        "local_mmlu",
        [5],
        0,
        32,
    )
    assert second["difference"] == pytest.approx(second["acc"] - first["acc"], abs=1e-12)
    for record, mean, interval in (
        (first, "acc", "interval"),
        (second, "difference", "difference_interval"),
    ):
        low, high = record[interval]
        assert low <= record[mean] <= high
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    subjects = ("local_mmlu_high_school_art", "local_mmlu_law")
    assert [(row["task"], row["item"]) for row in rows] == [
        (name, i) for name in subjects for i in range(4)
    ]
    for spec, record in ((teacher, first), (student, second)):
        assert sum(row["correct"][spec] for row in rows) / 8 == record["acc"]
    # The same weights with less context: all are cut alike, so they agree on every item.
    lm_eval_model.main([teacher, short, *words, "--num_fewshot=4"])
    shown = capsys.readouterr().out
    first, second = json.loads(shown.splitlines()[-1])["groups"]
    assert first["cut"] == second["cut"] > 0 and first["context"] == second["context"] == 300
    assert second["difference"] == 0 and first["shots"] == [4] and "incomplete prompt" in shown
    with pytest.raises(UserError, match=r"num_fewshot=7, limit=4 .*exceeds the 5"):
        lm_eval_model.main([teacher, *words, "--num_fewshot=7"])


TASK_FILE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/rows.jsonl}}}}
training_split: train
validation_split: train
output_type: multiple_choice
doc_to_text: "Q{{{{number}}}} {{{{choices|join(' ')}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
SHUFFLE = """
import random
rng = random.Random(42)
def process_docs(dataset):
    def shuffled(doc):
        choices = ["right", "wrong", "bad", "ill"]
        rng.shuffle(choices)
        return {"number": doc["number"], "choices": choices, "answer": choices.index("right")}
    return dataset.map(shuffled)
"""


def test_groups_are_the_harnesss(tmp_path, capsys, monkeypatch):
    """A group with a mean is one line, what has none is a line a task; GPQA's way to shuffle
    choices does no harm.
    """
    pytest.importorskip("lm_eval")
    manager = import_lm_eval().tasks.TaskManager

    class OurTasksOnly(manager):  # to read the harness's own thousands takes eight seconds
        def __init__(self, include_path, include_defaults):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", OurTasksOnly)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"number": {i}}}\n' for i in range(12)))
    (tmp_path / "utils.py").write_text(SHUFFLE)
    for name, more in {
        "one": "",
        "two": "num_fewshot: 2",
        "apart": "num_fewshot: 3",
        "other": "",
    }.items():
        metric = "acc_norm" if name == "other" else "acc"
        (tmp_path / f"{name}.yaml").write_text(
            TASK_FILE.format(name=f"our_{name}", folder=tmp_path, metric=metric)
            + f"process_docs: !function utils.process_docs\n{more}\n"
        )
    (tmp_path / "pair.yaml").write_text(
        "group: our_pair\ntask: [our_one, our_two]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    (tmp_path / "loose.yaml").write_text("group: our_loose\ntask: [our_apart, our_other]\n")
    asked: dict[Scorer, list] = {}

    def oracle(self, pairs):
        asked.setdefault(self, []).extend(pairs)
        return [(float("right" in continuation), False) for _, continuation in pairs]

    monkeypatch.setattr(Scorer, "score", oracle)
    specs = [save(tmp_path / name) for name in ("a", "b")]
    lm_eval_model.main(
        [*specs, "--tasks=our_pair,our_loose", f"--include={tmp_path}", "--device=cpu"]
    )
    shown = capsys.readouterr().out
    assert "our_other: left out" in shown
    records = {
        (record["group"], record["model"]): record
        for record in json.loads(shown.splitlines()[-1])["groups"]
    }
    assert list(records) == [(group, spec) for group in ("our_pair", "our_apart") for spec in specs]
    # what is marked is what was asked
    assert all(record["acc"] == 1 for record in records.values())
    assert [records[group, specs[1]]["shots"] for group in ("our_pair", "our_apart")] == [
        [0, 2],
        [3],
    ]
    first, second = asked.values()
    assert first == second and len({context for context, _ in first}) == 4 * 12
    for context, _ in first:  # no question is among its own examples
        numbers = [part.split()[0] for part in context.split("\n\n")]
        assert len(set(numbers)) == len(numbers)


def test_an_interval_is_students():
    mean, (low, high) = lm_eval_model.mean_and_interval(np.array([1.0, 0, 0, 1, 1, 0, 0, 0]))
    assert mean == 0.375 and (low, high) == pytest.approx((-0.0577, 0.8077), abs=1e-3)


def test_bad_input_is_one_line(tmp_path):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"question": "?"}\n')
    cases = [
        (["model"], ConfigError, "say what to evaluate on"),
        (["--mmlu=a,b"], ConfigError, "name a model first"),
        (["model", "model", "--mmlu=a,b"], ConfigError, "named twice"),
        (
            ["model", "--mmlu=a,b", "--num_fewshot=-1"],
            ConfigError,
            "num_fewshot=-1: must not be negative",
        ),
        (["model", "--mmlu=a,b", f"--out={tmp_path}"], UserError, "this is a folder"),
        (["model", "--mmlu=a"], ConfigError, "two files"),
        (["model", f"--mmlu={broken},{broken}"], DataError, "no MMLU rows"),
        (["model", "--mmlu=nowhere.jsonl,b"], DataError, "nowhere.jsonl: cannot be read"),
    ]
    for words, error, match in cases:
        with pytest.raises(error, match=match) as caught:
            lm_eval_model.main(words)
        assert "\n" not in str(caught.value)
