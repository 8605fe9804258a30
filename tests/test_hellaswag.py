"""HellaSwag: the rule against a naive loop, ranks and batch sizes, chance, lm-evaluation-harness,
bad input.

    python -m pytest tests/test_hellaswag.py
"""

import dataclasses
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    TINY,
    losses,
    offline_data,
    records,
    val_losses,
    write_items,
    write_tiny_shards,
)

from common.distributed import Ranks
from common.errors import DataError, UserError
from data.tokenizers import byte_tokenizer
from evals.hellaswag import evaluate_hellaswag, load_items, make_endings, score_endings
from hellaswag import items_file, main
from model import GPT, GPTConfig
from training.checkpoint import save_checkpoint

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
    folder.mkdir()
    model = tiny_gpt()
    save_checkpoint(
        folder / "ckpt_last.pt",
        {
            "step": 1,
            "config": dataclasses.asdict(model.config),
            "model": model.state_dict(),
            "meta": {"tokenizer": "bytes"},
        },
    )
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


# with 60 most texts lose their beginning, with 20 endings too
@pytest.mark.parametrize("block_size", [256, 60, 20])
def test_equals_a_naive_loop_on_200_items(tmp_path, block_size):
    items, model = load_items(str(write_items(tmp_path / "items.jsonl", 200))), tiny_gpt(block_size)
    scores = evaluate_hellaswag(model, byte_tokenizer(), items, ALONE, batch_size=24)
    assert [(i["acc_choice"], i["acc_norm_choice"]) for i in scores.items] == [
        naive(model, item) for item in items
    ]
    assert [i["item"] for i in scores.items] == [3 * number for number in range(200)]
    choices = np.array([[i["acc_choice"], i["acc_norm_choice"], i["label"]] for i in scores.items])
    share = (choices[:, 0] == choices[:, 2]).mean()
    assert scores.accuracy("acc") == (
        share,
        pytest.approx(np.std(choices[:, 0] == choices[:, 2], ddof=1) / 200**0.5),
    )
    assert (choices[:, 0] != choices[:, 1]).any()  # the two rules are not one
    assert {256: scores.texts_cut == 0, 60: 0 < scores.texts_cut < 1, 20: scores.texts_cut > 0.9}[
        block_size
    ]


def test_ranks_and_batch_size_change_nothing(launch, tmp_path):
    """Two ranks under torchrun itself, then as processes of our own."""
    run, items, found = save_run(tmp_path / "run"), write_items(tmp_path / "items.jsonl", 60), []
    for ranks, size, torchrun in ((2, 64, True), (1, 64, False), (1, 1, False), (2, 1, False)):
        out = tmp_path / f"{ranks}-{size}.jsonl"
        words = [
            str(run),
            f"--data={items}",
            f"--out={out}",
            f"--batch_size={size}",
            "--device=cpu",
        ]
        if torchrun:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={ranks}",
            ]
            env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(
                [*command, "hellaswag.py", *words],
                cwd=ROOT,
                capture_output=True,
                text=True,
                env=env,
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        else:
            job = launch(*words, ranks=ranks, program="hellaswag")
            assert set(job.wait()) == {0}, job.text()
            printed = job.outputs[0].read_text()
        found.append((json.loads(printed.splitlines()[-1]), out.read_text()))
    assert all(each == found[0] for each in found[1:])
    assert found[0][0]["n_items"] == 60 and len(found[0][1].splitlines()) == 60


def test_an_untrained_model_is_at_chance():
    """Within three standard errors of 25 % on all 10,042 items, by both rules."""
    path = offline_data("hellaswag/hellaswag_val.jsonl.xz")
    config = GPTConfig(vocab_size=257, n_layer=1, n_head=1, n_embd=16, block_size=32)
    items = load_items(str(path))
    scores = evaluate_hellaswag(GPT(config), byte_tokenizer(), items, ALONE, batch_size=512)
    assert len(items) == 10042
    for rule in ("acc", "acc_norm"):
        share, error = scores.accuracy(rule)
        assert abs(share - 0.25) < 3 * error, (rule, share)


def test_lm_evaluation_harness_agrees_on_acc(tmp_path, monkeypatch):
    """The same items and model through lm-evaluation-harness, ending by ending; its acc_norm
    divides by bytes.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from hf.hub import import_transformers
    from hf.weights import load_hf

    transformers = import_transformers()
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=alphabet[0], pad_token=alphabet[0]
    )
    torch.manual_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=256,
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    theirs = transformers.GPT2LMHeadModel(shape).eval()
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = load_hf(tmp_path)
    items = load_items(str(write_items(tmp_path / "items.jsonl", 40)))
    rows = make_endings(items, tokenizer_of(ours), 256)
    with torch.no_grad():
        scores = -score_endings(ours, rows, torch.device("cpu"))
    harness = HFLM(
        pretrained=theirs, tokenizer=tokenizer, batch_size=4, max_length=256, device="cpu"
    )
    requests = [
        Instance("loglikelihood", {}, (item["ctx"], " " + ending), 0)
        for item in items
        for ending in item["endings"]
    ]
    expected = torch.tensor(
        [log_p for log_p, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    )
    torch.testing.assert_close(scores, expected.double(), rtol=1e-4, atol=1e-4)
    # And as a task of its own multiple-choice scorer, the one that its hellaswag uses
    task = {
        "task": "items",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "doc_to_text": "{{ctx}}",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval.simple_evaluate(harness, tasks=[task], bootstrap_iters=0, log_samples=True)
    right = [
        sample["acc"]
        for sample in sorted(found["samples"]["items"], key=lambda sample: sample["doc_id"])
    ]
    ours_right = [
        item["acc_choice"] == item["label"]
        for item in evaluate_hellaswag(ours, tokenizer_of(ours), items, ALONE).items
    ]
    assert right == [float(each) for each in ours_right] and 0 < sum(right) < len(right)


def tokenizer_of(model: GPT):
    from data.tokenizers import load_tokenizer

    return load_tokenizer(model.meta)


def test_training_scores_it_and_is_not_disturbed(train_ok, tmp_path):
    """With a score at the end and without: the same losses; the log has the score, the folder the
    items.
    """
    data = write_tiny_shards(tmp_path / "data", vocab=200)
    (data / "meta.json").write_text(json.dumps({"tokenizer": "bytes", "vocab_size": 257}))
    items = write_items(tmp_path / "items.jsonl", 12)
    arguments = (*TINY, "--eval_interval=20", "--dropout=0.1", f"--data_dir={data}")
    scoring = (f"--hellaswag={items}", "--hellaswag_items=10")
    train_ok(*arguments, f"--out_dir={tmp_path / 'without'}")
    train_ok(*arguments, *scoring, f"--out_dir={tmp_path / 'with'}")
    train_ok(*arguments, *scoring, f"--out_dir={tmp_path / 'two'}", ranks=2)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert val_losses(tmp_path / "with") == val_losses(tmp_path / "without")
    scores = [record for record in records(tmp_path / "with") if record["event"] == "hellaswag"]
    assert [record["step"] for record in scores] == [40] and scores[0]["n_items"] == 10
    assert len((tmp_path / "with" / "hellaswag.jsonl").read_text().splitlines()) == 10
    # dropout differs by rank
    assert len((tmp_path / "two" / "hellaswag.jsonl").read_text().splitlines()) == 10


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
        "[]",
    ):
        bad.write_text(good + line + "\n")
        with pytest.raises(DataError, match=r"bad.jsonl:4: no HellaSwag item"):
            load_items(str(bad))
    bad.write_text("")
    with pytest.raises(DataError, match="holds 0 items"):
        load_items(str(bad))
    with pytest.raises(DataError, match="11 were wanted"):
        load_items(str(tmp_path / "items.jsonl"), 11)
    with pytest.raises(DataError, match="cannot be read"):
        load_items(str(tmp_path / "none.jsonl"))
    deep = tmp_path / "deep.jsonl"
    for text in ("[" * 200_000, '{"a":' * 200_000, '{"ctx": "a", "label": 1e999, "endings": []}'):
        deep.write_text(text)
        with pytest.raises(DataError, match=r"deep\.jsonl:1: no HellaSwag item"):
            load_items(str(deep))
    torn = tmp_path / "torn.jsonl.xz"
    torn.write_bytes(lzma.compress(good.encode())[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        load_items(str(torn))


def test_bad_models_and_places(tmp_path):
    items, run = write_items(tmp_path / "items.jsonl", 3), save_run(tmp_path / "run")
    with pytest.raises(UserError, match="cannot be written"):
        main(
            [
                str(run),
                f"--data={items}",
                f"--out={tmp_path / 'no' / 'folder.jsonl'}",
                "--device=cpu",
            ]
        )
    assert items_file(str(run)) == items_file(str(run / "ckpt_last.pt")) == run / "hellaswag.jsonl"
    assert items_file("random:gpt2") is None
    broken = tiny_gpt()
    broken.norm_f.norm.weight.data.fill_(float("nan"))
    with pytest.raises(DataError, match="not finite"):
        evaluate_hellaswag(broken, byte_tokenizer(), load_items(str(items)), ALONE)
