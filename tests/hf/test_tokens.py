"""Texts for the model of a Hugging Face folder begin as its tokenizer says, with BOS where its
template adds one: as in lm-evaluation-harness and in transformers.

    python -m pytest tests/hf/test_tokens.py
"""

import json
import os
import string
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hf_models import GPT2, MODELS, needs_transformers, save, tiny, transformers

import sample
from common.distributed import Ranks
from common.errors import DataError, UserError
from convert import foreign_inputs
from data.tokenizers import load_tokenizer
from evals.likelihood import encode_pairs, log_likelihoods
from hf.weights import load_hf
from load import take_shape
from posthoc.coupling import text_windows
from posthoc.text import open_stream

pytestmark = needs_transformers
CPU = torch.device("cpu")
# Words and spaces are joined, so that a continuation may change how its context is cut.
MERGES = ["▁ t", "▁t h", "a t", "s at", "▁ s", "▁s at", "▁ ▁", "▁ a", "t h", "i s", "o r"]
FAMILIES = ("llama", "gemma3", "qwen3", "gpt2", "gpt2-wide", "olmo2")
GPT2_WIDE = ("GPT2", {**GPT2, "vocab_size": 50257})  # as many as GPT-2's own tokenizer has
PAIRS = [
    ("The cat", " sat"),
    ("Question? ", "this"),
    ("the cat", "hat"),  # one word
    ("<bos>the cat", " sat"),
    ("the cat sat on a mat. " * 9, "that is that"),  # the beginning does not fit
    ("a", " b. " * 12),
    ("", "that"),
    ("", " sat"),
    ("", "<bos>that"),
    ("", "<eos>that"),
]


def folder_of(family, template, folder):
    """The folder of a tiny model and a tokenizer with this TemplateProcessing ("": none)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    merges = [tuple(pair.split()) for pair in MERGES]
    tokens = ["<bos>", "<eos>", *string.ascii_lowercase, "▁", *map("".join, merges), "T", "Q"]
    tokens += "?.:,0123456789ABCDEFGHIJKLMNOPQRSUVWXYZ"[: 67 - len(tokens)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # A continuation encoded by itself would begin with two spaces.
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if template:
        special = [("<bos>", 0), ("<eos>", 1)]
        made.post_processor = processors.TemplateProcessing(template, special_tokens=special)
        made.enable_truncation(7)  # as after a call with max_length=7, and saved
        made.enable_padding(length=5, pad_token="<eos>", pad_id=1)
    bos = {"bos_token": "<bos>"} if template or family == "olmo2" else {}
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", additional_special_tokens=["<bos>"], **bos
    )
    saved.save_pretrained(folder)
    return save(tiny(family), folder)


@pytest.mark.parametrize("template", ["", "<bos> $A"], ids=["plain", "bos"])
@pytest.mark.parametrize("family", FAMILIES)
def test_likelihoods_are_those_of_lm_evaluation_harness(family, template, tmp_path, monkeypatch):
    """Of pairs of texts, as HellaSwag and the harness's tasks have them."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(MODELS, "gpt2-wide", GPT2_WIDE)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = folder_of(family, template, tmp_path / "model")
    harness = HFLM(str(folder), device="cpu", dtype="float32", batch_size=4)

    model = load_hf(folder)
    texts = encode_pairs(load_tokenizer(model.meta), PAIRS, model.config.block_size)
    ours, is_greedy = log_likelihoods(model, texts, Ranks(0, 1, CPU), 3, nullcontext)
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS]
    theirs, is_theirs = zip(*harness.loglikelihood(requests, disable_tqdm=True), strict=True)
    close = pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert ours.tolist() == close and is_greedy.tolist() == list(is_theirs)


@pytest.mark.parametrize("template", ["$A <eos>", "<bos> $A <eos>"])
def test_scored_texts_have_no_eos_that_a_template_appends(template, tmp_path):
    """All else is as if the template did not append it."""
    found = []
    for name in (template, template.removesuffix(" <eos>").removeprefix("$A")):
        folder = folder_of("qwen3", name, tmp_path / f"model{len(found)}")
        meta = {"tokenizer": "hf", "path": str(folder)}
        pairs = [pair for pair in PAIRS if "<" not in "".join(pair)]
        if "<bos>" not in name:  # an empty context is <eos> without a template, too
            pairs = [pair for pair in pairs if pair[0]]
        found.append(encode_pairs(load_tokenizer(meta), pairs, 64))
    assert found[0] == found[1] and all(text.count for text in found[0])


def test_an_empty_context_is_that_of_the_harness_where_a_template_appends_eos(
    tmp_path, monkeypatch
):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = folder_of("llama", "$A <eos>", tmp_path / "model")
    pairs = [("", "that"), ("", " sat"), ("", "that is that")]
    harness = HFLM(str(folder), device="cpu", dtype="float32", batch_size=4)
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    theirs = [value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    model = load_hf(folder)
    texts = encode_pairs(load_tokenizer(model.meta), pairs, model.config.block_size)
    ours, _ = log_likelihoods(model, texts, Ranks(0, 1, CPU), 3, nullcontext)
    assert ours.tolist() == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_a_pattern_that_takes_too_long_is_one_line(tmp_path):
    """The library panics, which is no Exception."""
    folder = folder_of("qwen3", "", tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    slow = {"type": "Split", "pattern": {"Regex": "(a|aa)+b"}, "behavior": "Isolated"}
    path.write_text(json.dumps({**content, "pre_tokenizer": {**slow, "invert": False}}))
    with pytest.raises(DataError, match="fails on 'aaaa"):
        load_tokenizer({"tokenizer": "hf", "path": str(folder)}).encode_ordinary("a" * 60_000)


@pytest.mark.parametrize(
    ("template", "starts", "ends"),
    [("", [], 0), ("<bos> $A", [0], 0), ("$A <eos>", [], 1), ("<bos> $A <eos>", [0], 1)],
)
def test_prompts_begin_as_in_transformers(template, starts, ends, tmp_path, capsys):
    """An EOS that the template appends is no part of a text that goes on."""
    folder = folder_of("llama", template, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The cat", return_tensors="pt").input_ids
    ids = ids[:, : ids.shape[1] - ends]
    assert 1 not in ids
    assert ids[0, : len(starts)].tolist() == starts and ids.shape[1] > 4
    model = load_hf(folder)
    made = model.generate(ids, 30, temperature=0)[0].tolist()
    words = ["--prompt=The cat", "--max_new_tokens=30", "--temperature=0", "--device=cpu"]
    sample.main([str(folder), *words])
    assert capsys.readouterr().out == f"{load_tokenizer(model.meta).decode(made)}\n"


@pytest.mark.parametrize(
    ("template", "before"),
    [("", "<eos>"), ("<bos> $A", "<bos>"), ("$A <eos>", "")],
    ids=["plain", "bos", "eos"],
)
def test_documents_are_kept_apart(template, before, tmp_path):
    """For distillation. A chat that a template has begun with BOS gets no second one."""
    folder = folder_of("qwen3", template, tmp_path / "model")
    texts = ["the cat.", "Answer: yes", "<bos>that is that"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    meta = {"tokenizer": "hf", "path": str(folder)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    end = ids("<eos>") if template.endswith("<eos>") else []
    expected = [[*ids(before), *ids(text), *end] for text in texts]
    if template:
        expected[2] = [*ids(texts[2]), *end]
    config = SimpleNamespace(dataset="", split="train", seed=0)
    packed = torch.cat(list(open_stream(config, meta, 67, 1, str(path)))).tolist()
    assert packed == [token for document in expected for token in document] and len(packed) > 25
    windows = text_windows(str(path), meta, 4, 100)  # to calibrate
    assert (windows[0, 0] == 0) == (before == "<bos>")


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    """Its ids are beyond the vocabulary."""
    folder = folder_of("qwen3", "", tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["?"] = 67
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="67"):
        sample.main([str(folder), "--prompt=The cat?", "--device=cpu"])


def test_a_text_without_context_has_no_likelihood_without_bos_and_eos():
    """Token 0 is a character like others."""
    characters = load_tokenizer({"tokenizer": "chars", "chars": "text"})
    for pair, named in ((("", "text"), "'text'"), (("tex", ""), "'tex'")):
        with pytest.raises(DataError, match=named):
            encode_pairs(characters, [pair], 16)


def words_of(folder, template="", ids=(0, 1, 2, 3, 4), **settings):
    """The tokenizer of a folder whose files are written by hand: five words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = dict(zip(("<bos>", "<eos>", "a", "b", "c"), ids, strict=True))
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(name, words[name]) for name in ("<bos>", "<eos>")]
        made.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer({"tokenizer": "hf", "path": str(folder)})


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
SWAPPED = {"bos_token": "<eos>", "eos_token": {"content": "<bos>"}}


@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {"2": {"content": "a"}}}])
def test_which_file_names_bos_and_eos(more, tmp_path):
    files = {"tokenizer_config": CONFIG | more, "special_tokens_map": SWAPPED}
    ours = words_of(tmp_path, **files).special
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours == {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}


@pytest.mark.parametrize(
    "more",
    [
        {"eos_token": "</s>"},
        {"bos_token": {"content": "</s>"}},
        {"added_tokens_decoder": {"5": {"content": "</s>"}}},
    ],
)
def test_a_named_token_without_an_id_is_refused(more, tmp_path):
    """transformers would give it one."""
    with pytest.raises(DataError, match=r"names '</s>', which its tokenizer\.json does not have"):
        words_of(tmp_path, tokenizer_config=CONFIG | more)


def test_ids_may_have_gaps(tmp_path):
    assert words_of(tmp_path, ids=(0, 1, 5, 7, 90)).n_vocab == 91


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        ("$A <eos>", "<bos> a", [0, 2, 1]),
        ("<bos> $A <eos>", "<bos> a", [0, 2, 1]),
        ("<bos> $A <eos>", "a", [0, 2, 1]),
        ("<bos> $A", "<bos> a", [0, 2]),
    ],
)
def test_a_text_with_bos_in_writing_has_one_and_its_eos(template, text, ids, tmp_path):
    ours = words_of(tmp_path, template, tokenizer_config=CONFIG)
    assert ours.encode_ordinary(text) == ids
    assert ours.encode_open(text) == [id for id in ids if id != 1]


def test_a_pipe_is_refused_before_it_is_opened(tmp_path):
    """To read one would never end."""
    pipe, out = tmp_path / "pipe", tmp_path / "run"
    out.mkdir()
    os.mkfifo(pipe)
    os.mkfifo(out / "config.json")
    start = SimpleNamespace(values={"init_from": "random:gpt2", "out_dir": str(out)}, fields={})
    start.fields["out_dir"] = SimpleNamespace(default="")
    for reads in (
        lambda: sample.read_prompt(f"FILE:{pipe}"),
        lambda: foreign_inputs(None, SimpleNamespace(inputs=str(pipe))),
        lambda: take_shape(start),
    ):
        with pytest.raises(UserError, match="a pipe"):
            reads()
