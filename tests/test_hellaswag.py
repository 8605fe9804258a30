"""HellaSwag: the rule against a naive loop, ranks and batch sizes, chance, bad input. Likelihoods
are compared with lm-evaluation-harness's in tests/hf/test_tokens.py.

    python -m pytest tests/test_hellaswag.py
"""

import json
import lzma
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BYTES,
    TINY,
    events,
    same_run,
    save_model,
    write_items,
    write_tiny_shards,
)

from common.distributed import Ranks
from common.errors import DataError
from data.tokenizers import byte_tokenizer, load_tokenizer
from evals.hellaswag import HellaSwag, load_items
from hellaswag import main
from model import GPT, GPTConfig

ALONE = Ranks(0, 1, torch.device("cpu"))


def tiny_gpt(block_size: int = 128) -> GPT:
    """A byte-level GPT with weights large enough to have opinions."""
    config = GPTConfig(
        vocab_size=264,
        n_vocab=257,
        n_layer=2,
        n_head=2,
        n_embd=16,
        block_size=block_size,
        init_std=0.3,
    )
    return GPT(config, seed=1).eval()


def save_run(folder: Path) -> Path:
    save_model(folder / "ckpt_last.pt", tiny_gpt(), {"tokenizer": "bytes"})
    (folder / "log.jsonl").write_text("")
    return folder


@torch.no_grad()
def naive(model: GPT, item: dict) -> tuple[int, int]:
    """The rule, one ending at a time, as its definition reads."""
    encode, sums, means = byte_tokenizer().encode_ordinary, [], []
    for ending in item["endings"]:
        context, tokens = encode(item["ctx"]), encode(" " + ending)
        ids = (context + tokens)[-(model.config.block_size + 1) :]
        log_p = F.log_softmax(model(torch.tensor([ids[:-1]]))[0], -1)
        # of an ending longer than the context, only the end is there
        first = max(1, len(ids) - len(tokens))
        each = [-log_p[position - 1, ids[position]].item() for position in range(first, len(ids))]
        sums.append(sum(each))
        means.append(sum(each) / len(each))
    return int(np.argmin(sums)), int(np.argmin(means))


def scores_of(model: GPT, items: Path, batch_size: int = 64, count: int = 0):
    tokenizer = load_tokenizer({"tokenizer": "bytes"})
    return HellaSwag(str(items), count, tokenizer, ALONE, nullcontext, batch_size)(model)


# with 60 most texts lose their beginning, with 20 endings too
@pytest.mark.parametrize(("block_size", "least", "most"), [(256, 0, 0), (60, 0.1, 1), (20, 0.9, 1)])
def test_equals_a_naive_loop(tmp_path, block_size, least, most):
    path, model = write_items(tmp_path / "items.jsonl", 100), tiny_gpt(block_size)
    scores = scores_of(model, path, 24)
    assert [(i["acc_choice"], i["acc_norm_choice"]) for i in scores.items] == [
        naive(model, item) for item in load_items(str(path))
    ]
    assert [i["item"] for i in scores.items] == [3 * number for number in range(100)]
    choices = np.array([[i["acc_choice"], i["acc_norm_choice"], i["label"]] for i in scores.items])
    right = choices[:, 0] == choices[:, 2]
    error = np.std(right, ddof=1) / 100**0.5
    assert scores.accuracy("acc") == (right.mean(), pytest.approx(error))
    assert (choices[:, 0] != choices[:, 1]).any()  # the two rules are not one
    assert least <= scores.texts_cut <= most


def test_ranks_and_batch_size_change_nothing(train_ok, tmp_path):
    run, items = save_run(tmp_path / "run"), write_items(tmp_path / "items.jsonl", 60)
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.jsonl"
        words = (f"--data={items}", "--device=cpu", f"--out={out}", "--json")
        words += (f"--batch_size={63 * ranks}",)
        job = train_ok(run, *words, ranks=ranks, program="hellaswag")
        summary = json.loads(job.outputs[0].read_text().splitlines()[-1])
        found.append((summary, out.read_text()))
    assert found[0] == found[1] and found[0][0]["n_items"] == 60
    assert len(found[0][1].splitlines()) == 60


def test_training_scores_it_and_is_not_disturbed(train_ok, tmp_path):
    """With a score at the end and without: the same losses; the log has the score, the folder the
    items.
    """
    data = write_tiny_shards(tmp_path / "data", vocab=200, meta=BYTES)
    items = write_items(tmp_path / "items.jsonl", 12)
    arguments = (*TINY, "--eval_interval=20", "--dropout=0.1", f"--data_dir={data}")
    scoring = (f"--hellaswag={items}", "--hellaswag_items=10")
    train_ok(*arguments, f"--out_dir={tmp_path / 'without'}")
    train_ok(*arguments, *scoring, f"--out_dir={tmp_path / 'with'}")
    assert same_run(tmp_path / "with", tmp_path / "without")
    scores = events(tmp_path / "with", "hellaswag")
    assert [record["step"] for record in scores] == [40] and scores[0]["n_items"] == 10
    assert len((tmp_path / "with" / "hellaswag.jsonl").read_text().splitlines()) == 10


def test_items_are_spread_evenly(tmp_path):
    path = write_items(tmp_path / "items.jsonl", 10)
    assert [item["item"] // 3 for item in load_items(str(path), 4)] == [0, 2, 5, 7]
    packed = tmp_path / "items.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert load_items(str(packed)) == load_items(str(path))


def test_bad_items_are_named(tmp_path):
    good = write_items(tmp_path / "items.jsonl", 3).read_text()
    bad = tmp_path / "bad.jsonl"
    for line in (
        "{",
        '{"ctx": "a", "endings": ["b"], "label": 0}',
        '{"ctx": "a", "endings": [1, 2, 3, 4], "label": 0}',
        '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 7}',
        "[" * 200_000,
    ):
        bad.write_text(good + line + "\n")
        with pytest.raises(DataError, match=r"bad.jsonl:4: no HellaSwag item"):
            load_items(str(bad))
    torn = tmp_path / "torn.jsonl.xz"
    torn.write_bytes(lzma.compress(good.encode())[:-20])
    with pytest.raises(DataError, match="torn"):
        load_items(str(torn))


def test_per_item_results_have_their_place(tmp_path):
    """Next to a run's checkpoints, unless there is one; a model gone wrong has none."""
    items, run = write_items(tmp_path / "items.jsonl", 3), save_run(tmp_path / "run")
    words = [str(run), f"--data={items}", "--device=cpu"]
    main([*words, "--items=2"])
    assert not (run / "hellaswag.jsonl").exists()
    main(words)
    assert len((run / "hellaswag.jsonl").read_text().splitlines()) == 3
    (run / "hellaswag.jsonl").write_text("of the training")
    main(words)
    assert (run / "hellaswag.jsonl").read_text() == "of the training"
    broken = tiny_gpt()
    broken.norm_f.norm.weight.data.fill_(float("nan"))
    with pytest.raises(DataError, match="not finite"):
        scores_of(broken, items)
