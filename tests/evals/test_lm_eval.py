"""lm-evaluation-harness on our models: likelihoods, its own command line, and the table of several
models on local MMLU rows and tasks of a folder.

    python -m pytest tests/evals/test_lm_eval.py
"""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers import save_model

from common.distributed import Ranks
from common.environment import Precision
from common.errors import ConfigError, DataError, UserError
from data.tokenizers import byte_tokenizer
from evals import lm_eval_model
from evals.likelihood import encode_pairs, log_likelihoods
from model import GPT, GPTConfig
from training.checkpoint import BEST

CPU = torch.device("cpu")
BFLOAT16 = Precision("bfloat16", CPU).autocast
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


def save(folder, **keys) -> str:
    """A run folder of gpt(**keys)."""
    model = gpt(**keys)
    save_model(folder / BEST, model, model.meta)
    return str(folder)


def score(model, pairs, size=48, autocast=nullcontext, batch_size=3):
    texts = encode_pairs(byte_tokenizer(), pairs, size)
    return log_likelihoods(model, texts, Ranks(0, 1, CPU), batch_size, autocast)


# ------------------------------------------------------------------------------------- likelihoods


def test_choices_share_a_forward_and_greedy_is_told(monkeypatch):
    """The likelihoods are compared with the harness's in tests/hf/test_tokens.py."""
    model = gpt()
    rows = []
    hidden = GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, idx: rows.extend(idx) or hidden(self, idx))
    pairs = [("Question? Answer:", f" {letter}") for letter in "ABCD"]
    pairs += [("A context that is cut to the last forty-eight tokens of all.", " yes")]
    found, _ = score(model, pairs)
    assert len(rows) == 2  # four choices, one forward
    monkeypatch.undo()
    apart = [score(model, [pair])[0].item() for pair in pairs]
    assert found.tolist() == pytest.approx(apart, abs=1e-4)
    texts = encode_pairs(byte_tokenizer(), pairs, 48)
    assert [text.is_cut for text in texts] == [False] * 4 + [True]
    best = int(model(torch.tensor([list(b"Hi")]))[0, -1, 32:127].argmax()) + 32
    is_best = int(model(torch.tensor([list(b"Hi")]))[0, -1].argmax()) == best
    assert score(model, [("Hi", chr(best))])[1].tolist() == [is_best]


def test_choices_are_not_decided_by_rounding():
    """Where bfloat16 logits are equal, and float32 products of the same hidden states are not."""
    model = gpt()
    with torch.no_grad():
        model.wte.weight[ord("B")] = model.wte.weight[ord("A")] * (1 + 1e-4)
        with BFLOAT16():
            hidden = model.hidden(torch.tensor([list(b"Answer:")]))[0, -1]
            rounded = model.logits(hidden)
        exact = hidden.double() @ model.wte.weight.double().T
    assert rounded[ord("A")] == rounded[ord("B")] and exact[ord("A")] != exact[ord("B")]
    a, b = score(model, [("Answer:", "A"), ("Answer:", "B")], autocast=BFLOAT16)[0].tolist()
    assert b - a == pytest.approx(float(exact[ord("B")] - exact[ord("A")]), abs=2e-6)
    assert (b > a) == (exact[ord("B")] > exact[ord("A")])


# ------------------------------------------------------------------------------------- the harness

ITEMS = 12
TASK = """
task: our_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/rows.jsonl}}}}
training_split: train
validation_split: train
output_type: multiple_choice
doc_to_text: "Q{{{{number}}}} {{{{choices|join(' ')}}}}:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
{more}
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
SHUFFLED = "process_docs: !function utils.process_docs\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """With each result the harness lists all installed packages, by pip, which takes seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


@pytest.fixture
def lm_eval():
    """The module of our model class; the test is skipped where there is no harness."""
    pytest.importorskip("lm_eval")
    from evals import lm_eval

    return lm_eval


@pytest.fixture
def our_tasks_only(monkeypatch, lm_eval):
    """To read the harness's own thousands of tasks takes eight seconds."""
    from lm_eval.tasks import TaskManager

    def init(self, include_path=None, include_defaults=False, **more):
        whole(self, include_path=include_path, include_defaults=False, **more)

    whole = TaskManager.__init__
    monkeypatch.setattr(TaskManager, "__init__", init)


def write_tasks(folder, rows, **tasks):
    """Task files; `tasks` has the further lines of each, by its name."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "utils.py").write_text(SHUFFLE)
    for name, more in tasks.items():
        metric = "acc_norm" if name == "other" else "acc"
        text = TASK.format(name=name, folder=folder, metric=metric, more=more)
        (folder / f"{name}.yaml").write_text(text)


def marks_of(capsys, *words) -> dict:
    """What the table's program prints as JSON."""
    lm_eval_model.main([*map(str, words), "--device=cpu", "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_harness_itself_gives_our_marks(tmp_path, capsys, monkeypatch, our_tasks_only):
    """By its own command line; some examples do not fit."""
    from lm_eval.__main__ import cli_evaluate

    spec = save(tmp_path / "run", block_size=64)
    rows = [
        {"number": i, "choices": [f"one {i}", f"{i * i} two", "three"], "answer": i % 3}
        for i in range(ITEMS)
    ]
    write_tasks(tmp_path, rows, task="")
    words = f"""--model nanonorm --model_args spec={spec},dtype=float32 --tasks our_task
        --include_path {tmp_path} --num_fewshot 3 --limit {ITEMS - 2} --batch_size auto:4
        --output_path {tmp_path / "marks.json"}"""
    monkeypatch.setattr("sys.argv", ["lm-eval", *words.split()])
    cli_evaluate()
    assert "|our_task|" in capsys.readouterr().out
    (path,) = tmp_path.glob("marks_*.json")
    theirs = json.loads(path.read_text())

    words = ["--tasks=our_task", f"--include={tmp_path}", "--num_fewshot=3", "--dtype=float32"]
    out = tmp_path / "a new folder" / "items.jsonl"
    found = marks_of(capsys, spec, *words, f"--limit={ITEMS - 2}", f"--out={out}")
    [ours] = found["groups"]
    assert theirs["results"]["our_task"]["acc,none"] == ours["acc"]["mean"]
    assert 0 < ours["acc"]["mean"] < 1 and ours["items"] == ITEMS - 2
    items = [json.loads(line) for line in out.read_text().splitlines()]
    assert [item["item"] for item in items] == list(range(ITEMS - 2))
    assert sum(item["correct"][spec] for item in items) / len(items) == ours["acc"]["mean"]
    config = theirs["config"]
    assert (config["model_dtype"], config["model_context"]) == ("float32", 64)
    assert found["requests"][spec] == {key: config[key] for key in ("requests", "requests_cut")}
    assert config["requests_cut"] > 0


def write_rows(path, count):
    choices = ["one", "two", "three", "four"]
    rows = [
        {"subject": subject, "question": f"What is {i}?", "choices": choices, "answer": i % 4}
        for subject in ("high_school_art", "law")
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mmlu_offline(tmp_path, capsys, monkeypatch, lm_eval):
    plans = {"teacher": ("RR RR R", 1024), "student": ("Rs Rs R", 1024), "short": ("RR RR R", 300)}
    teacher, student, short = (
        save(tmp_path / name, norm_type="coupled", norm_plan=plan, block_size=size)
        for name, (plan, size) in plans.items()
    )
    files = f"{write_rows(tmp_path / 'dev.jsonl', 5)},{write_rows(tmp_path / 'test.jsonl', 6)}"
    words = [f"--mmlu={files}", "--limit=4"]
    asked = []
    encode = lm_eval.encode_pairs
    monkeypatch.setattr(
        lm_eval, "encode_pairs", lambda a, pairs, b: asked.extend(pairs) or encode(a, pairs, b)
    )
    found = marks_of(capsys, teacher, student, *words)
    examples = "".join(
        f"What is {i}?\nA. one\nB. two\nC. three\nD. four\nAnswer: {'ABCDA'[i]}\n\n"
        for i in range(5)
    )
    about = "The following are multiple choice questions (with answers) about high school art.\n\n"
    question = "What is 0?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    assert asked[:4] == [(about + examples + question, f" {choice}") for choice in "ABCD"]
    first, second = found["groups"]
    assert (first["group"], first["items"], second["items"]) == ("local_mmlu", 8, 8)
    assert set(found["shots"].values()) == {5}
    difference = second["acc"]["mean"] - first["acc"]["mean"]
    assert second["difference"]["mean"] == pytest.approx(difference, abs=1e-12)
    for each in (first["acc"], second["difference"]):
        assert each["interval"][0] <= each["mean"] <= each["interval"][1]
    # The same weights with less context: all are cut alike, so they agree on every item.
    found = marks_of(capsys, teacher, short, *words, "--num_fewshot=4")
    assert found["context"] == 300 and set(found["shots"].values()) == {4}
    assert len({seen["requests_cut"] for seen in found["requests"].values()} - {0}) == 1
    assert found["groups"][1]["difference"]["mean"] == 0


ROW = {"subject": "law", "question": "What?", "choices": list("wxyz"), "answer": 0}


@pytest.mark.parametrize(
    ("dev", "test", "named"),
    [
        ([ROW] * 4, [ROW], "dev.jsonl: 4 rows of law, and 5"),
        ([ROW] * 5, [{**ROW, "subject": "art"}], "dev.jsonl: 0 rows of art"),
        ([ROW] * 5, [{"question": "What?", "choices": list("wxyz"), "answer": 0}], "test.jsonl:1"),
        ([ROW] * 5, [ROW, {**ROW, "choices": list("xyz")}], "test.jsonl:2"),
        ([ROW] * 5, [{**ROW, "answer": 4}], "test.jsonl:1"),
        ([ROW] * 5, [{**ROW, "answer": "A"}], "test.jsonl:1"),
        ([ROW] * 5, ["{"], "test.jsonl:1"),
        ([ROW] * 5, [], "test.jsonl: no rows"),
    ],
)
def test_rows_of_mmlu_that_cannot_be_asked_are_named(dev, test, named, tmp_path):
    pytest.importorskip("datasets")
    paths = []
    for name, rows in (("dev", dev), ("test", test)):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        paths.append(str(path))
    with pytest.raises(DataError, match=named):
        lm_eval_model.local_mmlu(",".join(paths), 5)
    for files in (paths[0], ",".join([*paths, paths[0]])):
        with pytest.raises(ConfigError, match="two files"):
            lm_eval_model.local_mmlu(files, 5)


def test_blank_lines_and_fewer_examples_are_no_fault(tmp_path):
    pytest.importorskip("datasets")
    text = f"{json.dumps(ROW)}\n\n"
    (tmp_path / "dev.jsonl").write_text(text * 2)
    (tmp_path / "test.jsonl").write_text(text * 3)
    files = f"{tmp_path / 'dev.jsonl'},{tmp_path / 'test.jsonl'}"
    [task] = lm_eval_model.local_mmlu(files, 2)
    splits = task["custom_dataset"]()
    assert (task["num_fewshot"], len(splits["dev"]), len(splits["test"])) == (2, 2, 3)


def test_groups_are_the_harnesss(tmp_path, capsys, monkeypatch, our_tasks_only, lm_eval):
    """A group with a mean is one line, what has none is a line a task; GPQA's way to shuffle
    choices does no harm.
    """
    more = {"one": "", "two": "num_fewshot: 2", "apart": "num_fewshot: 3", "other": ""}
    rows = [{"number": i} for i in range(ITEMS)]
    write_tasks(tmp_path, rows, **{name: SHUFFLED + line for name, line in more.items()})
    (tmp_path / "pair.yaml").write_text(
        "group: our_pair\ntask: [our_one, our_two]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    (tmp_path / "loose.yaml").write_text("group: our_loose\ntask: [our_apart, our_other]\n")
    asked: dict[object, list] = {}

    def oracle(self, requests):
        asked.setdefault(self, []).extend(request.args for request in requests)
        return [(float("right" in request.args[1]), False) for request in requests]

    monkeypatch.setattr(lm_eval.NanonormLM, "loglikelihood", oracle)
    specs = [save(tmp_path / name) for name in ("a", "b")]
    found = marks_of(capsys, *specs, "--tasks=our_pair,our_loose", f"--include={tmp_path}")
    groups = [(record["group"], record["model"]) for record in found["groups"]]
    assert groups == [(group, spec) for group in ("our_pair", "our_apart") for spec in specs]
    # what is marked is what was asked
    assert all(record["acc"]["mean"] == 1 for record in found["groups"])
    assert found["shots"] == {"our_one": 0, "our_two": 2, "our_apart": 3, "our_other": 0}
    # The harness keeps a question out of its own examples, and asks both models the same.
    first, second = asked.values()
    assert first == second and len(first) == 4 * 4 * ITEMS
    for context, _ in first:
        questions = [line.split()[0] for line in context.split("\n\n")]
        assert len(set(questions)) == len(questions)


def test_what_cannot_be_asked_is_refused(tmp_path, capsys, our_tasks_only):
    spec = save(tmp_path / "run")
    row = {"number": 1, "choices": ["a"], "answer": 0}
    write_tasks(tmp_path, [row], text="output_type: generate_until")
    for words, named in (
        (["--tasks=x"], "x"),
        (["--tasks=our_text", f"--include={tmp_path}"], "our_text"),
    ):
        with pytest.raises(UserError, match=named):
            marks_of(capsys, spec, *words)
