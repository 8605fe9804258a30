"""Log-likelihoods for lm-evaluation-harness, and the harness itself on local MMLU rows.

    python -m pytest tests/test_lm_eval_model.py
"""

import json
from dataclasses import asdict, replace

import pytest
import torch

import lm_eval_model
from checkpoint import BEST, save_checkpoint
from data.shards import DataError
from errors import ConfigError
from lm_eval_model import Scorer, local_mmlu
from model import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=320, n_vocab=257, block_size=48, n_layer=2, n_head=2, n_embd=32, init_std=0.1,
                  norm_type="rms", position="rope", activation="swiglu")  # fmt: skip


def gpt(**keys) -> GPT:
    model = GPT(replace(SHAPE, **keys), seed=2).eval()
    model.meta = {"tokenizer": "bytes", "vocab_size": 257}
    return model


@torch.no_grad()
def by_hand(model: GPT, context: str, continuation: str) -> float:
    ids = list((context + continuation).encode())[-(model.config.block_size + 1) :]
    log_p = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    count = min(len(continuation.encode()), len(ids) - 1)
    return sum(float(log_p[i, ids[i + 1]]) for i in range(len(ids) - 1 - count, len(ids) - 1))


def test_likelihoods_are_those_of_the_model():
    model = gpt()
    scorer = Scorer(model, batch_size=3)
    pairs = [("Question? Answer:", f" {letter}") for letter in "ABCD"]
    pairs += [("A longer context that is cut to the last forty-eight tokens of all.", " yes"), ("Hi", " there, you"),
              ("", "no context"), ("a space ", "belongs to it")]  # fmt: skip
    found = scorer.score(pairs)
    assert scorer.forwards == 5  # four choices, one forward
    pairs[-1] = ("a space", " belongs to it")  # to the continuation, that is
    for pair, (likelihood, _) in zip(pairs, found, strict=True):
        if pair[0]:
            assert abs(likelihood - by_hand(model, *pair)) < 1e-4
    best = chr(int(model(torch.tensor([list(b"Hi")]))[0, -1, 32:127].argmax()) + 32)
    is_best = int(model(torch.tensor([list(b"Hi")]))[0, -1].argmax()) == ord(best)
    assert scorer.score([("Hi", best)])[0][1] == is_best
    with pytest.raises(DataError, match="likelihood of no text"):
        scorer.score([("context", "")])


def write_rows(path, count):
    choices = ["one", "two", "three", "four"]
    rows = [{"subject": subject, "question": f"What is {i}?", "choices": choices, "answer": (i + len(subject)) % 4}
            for subject in ("high_school_art", "law") for i in range(count)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_harness_runs_mmlu_offline(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    for name, plan in (("teacher", "RR RR R"), ("student", "Rs Rs R")):
        model = gpt(norm_type="coupled", norm_plan=plan, block_size=1024)  # no text is cut
        (tmp_path / name).mkdir()
        save_checkpoint(tmp_path / name / BEST, {"step": 0, "config": asdict(model.config), "meta": model.meta,
                                                 "model": model.state_dict()})  # fmt: skip
    files = f"{write_rows(tmp_path / 'dev.jsonl', 5)},{write_rows(tmp_path / 'test.jsonl', 6)}"
    words = [str(tmp_path / "teacher"), str(tmp_path / "student"), f"--mmlu={files}", "--limit=4", "--device=cpu"]
    lm_eval_model.main([*words, f"--out={tmp_path / 'items.jsonl'}"])
    teacher, student = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert teacher["items"] == student["items"] == teacher["forwards"] == 8  # four choices each, one forward
    assert student["difference"] == student["acc"] - teacher["acc"]
    low, high = student["interval"]
    assert low <= student["difference"] <= high
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and sum(row[words[0]] for row in rows) / 8 == teacher["acc"]


def test_bad_input_is_one_line(tmp_path):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"question": "?"}\n')
    cases = [
        (["model"], ConfigError, "say what to evaluate on"),
        (["--mmlu=a,b"], ConfigError, "name a model first"),
        (["model", "--mmlu=a"], ConfigError, "two files"),
        (["model", f"--mmlu={broken},{broken}"], DataError, "no MMLU rows"),
        (["model", "--mmlu=nowhere.jsonl,b"], DataError, "nowhere.jsonl: cannot be read"),
    ]
    for words, error, match in cases:
        with pytest.raises(error, match=match) as caught:
            lm_eval_model.main(words)
        assert "\n" not in str(caught.value)
    assert local_mmlu(f"{write_rows(tmp_path / 'a.jsonl', 2)},{tmp_path / 'a.jsonl'}", tmp_path) == [
        "local_mmlu_high_school_art", "local_mmlu_law"]  # fmt: skip
