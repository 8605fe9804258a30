"""The loss over a whole split, against a loop over its tokens.

python -m pytest tests/training/test_whole_split.py
"""

import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TINY, events, shake

from common.distributed import Ranks
from data import prepare
from data.shards import read_meta, write_shard
from data.tokenizers import Edges, document_begins
from model import GPT, GPTConfig
from training import evaluation
from training.dataloader import Blocks
from training.evaluation import Evaluator, split_loss, split_record

END = 10
SHAPE = GPTConfig(vocab_size=16, n_vocab=11, block_size=8, n_layer=1, n_head=2, n_embd=16)


@pytest.fixture
def shards(tmp_path):
    """Two shards, of 45 and 19 tokens, with documents that begin within them."""
    random = np.random.RandomState(0)
    tokens = [random.randint(0, END, 45), random.randint(0, END, 19)]
    tokens[0][[0, 7, 8, 30]] = END
    tokens[1][5] = END  # the first five tokens continue the last document
    for number, shard in enumerate(tokens):
        write_shard(tmp_path / f"x_val_{number:06d}.bin", shard)
    return tmp_path, tokens


def by_loop(model, tokens):
    """(targets, nats) of each document that has a target."""
    found, document = {}, 0
    for shard in tokens:
        for place, token in enumerate(shard):
            document += token == END
            if place == 0:
                continue
            start = (place - 1) // 8 * 8
            logits = model(torch.tensor(shard[start:place])[None])[0, -1]
            nats = F.cross_entropy(logits, torch.tensor(token))
            count, total = found.get(document, (0, 0.0))
            found[document] = count + 1, total + float(nats)
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_every_token_counts_once(shards, batch_size, monkeypatch):
    folder, tokens = shards
    model = shake(GPT(SHAPE).double())
    blocks = Blocks(folder, "val", 8, 11)
    words = (batch_size, Ranks.start("cpu", 1), contextlib.nullcontext)
    tokens_of, nats = split_loss(model, blocks, Edges(END, None), *words)
    expected = by_loop(model.eval(), tokens)
    assert tokens_of.tolist() == [count for count, _ in expected.values()]
    assert nats == pytest.approx([nats for _, nats in expected.values()], abs=1e-12)
    assert tokens_of.sum() == 44 + 18
    record = split_record(tokens_of, nats)
    assert record["document_nats"] == nats.tolist() and record["tokens"] == 62
    # Without documents it is one, and of too many the record has the mean alone.
    whole = split_loss(model, blocks, Edges(None, None), *words)
    monkeypatch.setattr(evaluation, "MAX_DOCUMENTS", 0)
    assert split_record(*whole) == {"tokens": 62, "val_loss_full": pytest.approx(nats.sum() / 62)}


@pytest.mark.parametrize(
    ("edges", "places"),
    [
        (Edges(1, None), [0, 3, 6, 9]),
        (Edges(1, 2), [0, 3, 6, 9]),
        (Edges(None, 2), [3, 6, 9, 12]),
        (Edges(7, 7), [6, 9]),  # the second of two
        (Edges(None, None), []),
    ],
)
def test_where_documents_begin_does_not_depend_on_the_shards(edges, places):
    tokens = np.array([1, 5, 2] * 4, np.uint16)
    if edges.begin == 7:
        tokens = np.array([7, 4, 5, 4, 5, 7, 7, 4, 7, 7, 5, 7], np.uint16)
    for length in range(1, 13):
        shards = [tokens[start : start + length] for start in range(0, 12, length)]
        assert document_begins(shards, edges).tolist() == places


@pytest.mark.parametrize(
    "template", ["<bos> $A", "$A <eos>", "<bos> $A <eos>", "<eos> $A <eos>", ""]
)
def test_documents_of_a_tokenizer_of_your_own(template, tmp_path):
    """The whole split of data that its template has prepared: each document counts once."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "<bos>": 1, "a": 2, "b": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if template:
        special = [("<bos>", 1), ("<eos>", 0)]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            template, special_tokens=special
        )
    made.save(str(tmp_path / "tokenizer.json"))
    named = json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    (tmp_path / "tokenizer_config.json").write_text(named)
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": "a b " * n}) + "\n" for n in range(1, 41)))
    out = tmp_path / "out"
    prepare.main([str(text), f"--tokenizer={tmp_path}", f"--out_dir={out}", "--val_share=0.2"])
    evaluator = Evaluator(
        SimpleNamespace(batch_size=2, eval_tokens=8),
        Blocks(out, "val", 8, 11),
        read_meta(out),
        Ranks.start("cpu", 1),
        contextlib.nullcontext,
    )
    log = mock.Mock()
    evaluator.log_split_loss(GPT(SHAPE), log, 1)
    record = log.event.call_args.kwargs
    framing = max(1, template.count("<"))
    expected = [2 * n + framing for n in range(5, 41, 5)]
    expected[0] -= 1  # the first token of all is no target
    assert record["document_tokens"] == expected


def test_a_run_measures_it_at_the_end_on_any_number_of_ranks(train_ok, tiny_data, tmp_path):
    words = (*TINY, "--max_iters=4", "--full_val=True", f"--data_dir={tiny_data}")
    for ranks in (1, 2):
        train_ok(*words, f"--out_dir={tmp_path / str(ranks)}", ranks=ranks)
    [one], [two] = (events(tmp_path / name, "val_full") for name in ("1", "2"))
    assert one["step"] == 4 and one["tokens"] == two["tokens"] == 1999
    assert one["val_loss_full"] == pytest.approx(two["val_loss_full"], abs=1e-5)
