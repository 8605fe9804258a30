"""GPT -> Hugging Face folders: stock classes, and coupled classes in this process (test_alone.py:
without us).

    python -m pytest tests/hf/test_export.py
"""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers import offline_data, shake
from hf_models import edit_json, needs_transformers, save, tiny, tokens, transformers

from common.errors import HFError
from data.tokenizers import load_tokenizer
from fold import gpt
from hf import weights
from hf.coupled import register
from model import GPT, GPTConfig
from norm_types import NORM_TYPES, NormType, Recipe, post_letters, uniform
from norms import CenteredLinear, center

if transformers:
    register()

PLAN = "RR Rs ss R"  # a standard block, one that shares within itself, one that shares across
SHAPE = GPTConfig(vocab_size=67, block_size=64, n_layer=3, n_head=4, n_embd=32, n_inner=48)
GPT2_SHAPE = replace(SHAPE, activation="gelu_tanh", bias=True)
PLAIN_GPT2 = replace(GPT2_SHAPE, bias=False)


def couple(model, plan=PLAN):
    """`model` with a coupled plan and non-trivial alphas."""
    alphas = tuple(1 + 0.1 * position for position in range(7))
    config = gpt.retype(model.config, "coupled", norm_plan=plan, coupled_alpha=alphas)
    return gpt.rebuild(model, config, model.state_dict())


def auto(folder, **keys):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **keys
    ).eval()


def same(first, second, tolerance=1e-5):
    assert first.std() > 0.1  # not trivially equal
    assert (first - second).abs().max() <= tolerance * first.abs().max()


@needs_transformers
@pytest.mark.parametrize(
    "name", ["gpt2", "llama-untied-biases", "qwen3-untied-bias", "olmo2", "olmo3", "gemma3"]
)
@torch.no_grad()
def test_stock_models_come_back_as_they_were(name, tmp_path):
    theirs, idx = tiny(name), tokens(2, 40)
    model = weights.load_hf(save(theirs, tmp_path / "first"))
    again = auto(weights.export_hf(model, tmp_path / "second"))
    assert type(again) is type(theirs)
    assert torch.equal(again(idx).logits, theirs(idx).logits)
    assert weights.load_hf(tmp_path / "second").config == model.config


@needs_transformers
@torch.no_grad()
def test_threads_keep_their_statistics_apart(tmp_path):
    """One thread runs the model while another one is between a source and a norm that shares."""
    stock = weights.load_hf(save(tiny("llama"), tmp_path / "stock"))
    model = auto(weights.export_hf(couple(stock), tmp_path / "out"))
    first, second = tokens(2, 9, seed=1), tokens(2, 9, seed=2)
    expected = [model(idx).logits for idx in (first, second)]
    found = []

    def interrupt(*_):
        hook.remove()
        with ThreadPoolExecutor() as pool:
            found.append(pool.submit(model, second).result().logits)

    hook = model.model.layers[1].self_attn.register_forward_hook(interrupt)
    assert torch.equal(model(first).logits, expected[0])
    assert torch.equal(found[0], expected[1]) and not torch.equal(*expected)
    # A copy has no statistic yet, and finds its own sources.
    assert torch.equal(copy.deepcopy(model)(first).logits, expected[0])


@needs_transformers
def test_gradient_checkpointing_keeps_to_its_batch(tmp_path):
    """Blocks are computed again after another forward has left its statistics; across blocks that
    is refused.
    """
    stock = weights.load_hf(save(tiny("llama"), tmp_path / "stock"))

    def gradients(model):
        model.zero_grad()
        first, second = (
            model.train()(tokens(2, 9, seed=seed)).logits.square().sum() for seed in (1, 2)
        )
        (first + 3 * second).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    model = auto(weights.export_hf(couple(stock, "RR Rs Rs R"), tmp_path / "within")).double()
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    assert (gradients(model) - plain).abs().max() <= 1e-12 * plain.abs().max()
    assert model.is_gradient_checkpointing and plain.abs().max() > 0
    model = auto(weights.export_hf(couple(stock), tmp_path / "across"))
    with pytest.raises(ValueError, match="shares statistics across blocks"):
        model.gradient_checkpointing_enable()


TEXT = "def héllo():  \n\n  \t\r\n    return 'we\u2019ll' + \"日本 😀\" # it's 1234\x00 \n end  \n"


@needs_transformers
@pytest.mark.parametrize(
    "meta",
    [
        {"tokenizer": "bytes"},
        {"tokenizer": "chars", "chars": "".join(sorted(set(TEXT)))},
        {"tokenizer": "gpt2"},
    ],
    ids=lambda meta: meta["tokenizer"],
)
def test_tokenizers_of_our_own_data_go_along(meta, tmp_path, monkeypatch):
    if meta["tokenizer"] == "gpt2":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(offline_data("tiktoken_cache")))
    ours = load_tokenizer(meta)
    llama = {"position": "rope", "activation": "swiglu", "norm_type": "rms"}
    model = GPT(replace(SHAPE, n_layer=1, vocab_size=ours.n_vocab, **llama))
    model.meta = meta
    folder = weights.export_hf(model.eval(), tmp_path / "out")
    theirs, ids = transformers.AutoTokenizer.from_pretrained(folder), ours.encode_ordinary(TEXT)
    assert theirs(TEXT, add_special_tokens=False).input_ids == ids and theirs.decode(ids) == TEXT
    assert theirs.model_max_length == SHAPE.block_size and len(theirs) == ours.n_vocab
    config = transformers.AutoConfig.from_pretrained(folder)
    end = None if meta["tokenizer"] == "chars" else ours.eot_token
    for one in (theirs, config):
        assert one.eos_token_id == one.bos_token_id == end
    again = load_tokenizer(weights.load_hf(folder).meta)  # and back
    assert again.encode_ordinary(TEXT) == ids and again.decode(ids) == TEXT


@needs_transformers
def test_an_export_goes_on_without_the_tokenizer(tmp_path, monkeypatch):
    """GPT-2's is downloaded at first use: weights are not lost for want of a network."""
    monkeypatch.setattr(
        "tiktoken.get_encoding", lambda name: (_ for _ in ()).throw(OSError("no network"))
    )
    model = GPT(GPT2_SHAPE)
    model.meta = {"tokenizer": "gpt2", "vocab_size": 50257}
    with pytest.warns(
        UserWarning,
        match="the folder has no tokenizer: the GPT-2 tokenizer could not be downloaded",
    ):
        folder = weights.export_hf(model.eval(), tmp_path / "out")
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names


# On the shapes that Llama, OLMo 2 and Gemma 3 share, with gains in all their ways.
ROTARY = replace(SHAPE, position="rope", activation="swiglu", norm_type="rms")
GEMMA = replace(
    ROTARY,
    activation="geglu",
    norm_type="peri",
    norm_plan="RR RR RR R | RR RR RR",
    qk_norm="head",
    output_eps=1e-5,
    embed_scale=32**0.5,
)


@needs_transformers
@pytest.mark.parametrize(
    "config, architecture",
    [
        (replace(ROTARY, norm_gain="one_plus"), "LlamaForCausalLM"),
        (replace(ROTARY, norm_gain="one_plus", norm_type="coupled"), "CoupledLlamaForCausalLM"),
        (replace(ROTARY, norm_type="lns", qk_norm="head"), "Qwen3ForCausalLM"),
        (
            replace(ROTARY, norm_type="olmo2", norm_gain="one_plus", output_eps=1e-5),
            "Olmo2ForCausalLM",
        ),
        (GEMMA, "Gemma3ForCausalLM"),
        (replace(GEMMA, norm_gain="one_plus", window=6, local_blocks="lg"), "Gemma3ForCausalLM"),
        (replace(GEMMA, norm_gain="none", attn_scale=20**-0.5), "Gemma3ForCausalLM"),
        (replace(PLAIN_GPT2, norm_type="rms"), "CoupledGPT2LMHeadModel"),
        (replace(PLAIN_GPT2, norm_type="layer"), "GPT2LMHeadModel"),
        (replace(PLAIN_GPT2, norm_type="coupled", norm_gain="none"), "CoupledGPT2LMHeadModel"),
        (
            replace(PLAIN_GPT2, norm_type="coupled", coupled_calibrate=1, n_vocab=60),
            "CoupledGPT2LMHeadModel",
        ),
    ],
    ids=str,
)
@torch.no_grad()
def test_what_the_architecture_always_has_is_written_as_it_stores_it(
    config, architecture, tmp_path
):
    """1 + weight becomes a gain and the other way round; gains that are missing are one, biases
    zero; alpha is a number of the config, and rows of padding are left out.
    """
    ours, idx = shake(GPT(config)).float().eval(), tokens(2, 20) % 60
    for name, buffer in ours.named_buffers():
        if name.endswith("alpha"):
            buffer.fill_(1.3)
    folder = weights.export_hf(ours, tmp_path / "out")
    theirs = auto(folder)
    assert type(theirs).__name__ == architecture
    same(theirs(idx).logits, ours(idx))
    same(weights.load_hf(folder)(idx), ours(idx))
    # Computed in float64, rounded once.
    norm = ours.norm_f.core
    if norm.weight is not None and config.position == "rope":
        gain = norm.weight.double() + (config.norm_gain == "one_plus")
        stored = theirs.model.norm.weight.flatten()
        offset = 1 if architecture == "Gemma3ForCausalLM" else 0
        assert torch.equal(stored, (gain - offset).float())


@needs_transformers
@pytest.mark.parametrize("beside", ["nothing", "another model", "its own config"])
def test_an_export_ends_texts_as_its_tokenizer_does(beside, tmp_path):
    """A tokenizer of your own: its EOS stops `generate`, whatever model lies beside it."""
    from tokenizers import Tokenizer, models

    config = replace(ROTARY, n_layer=1)
    source = tmp_path / "source"
    if beside == "nothing":
        source.mkdir()
    else:
        other = config if beside == "its own config" else replace(config, n_layer=2)
        weights.export_hf(GPT(other), source)
        edit_json(source / "config.json", eos_token_id=5, bos_token_id=6, pad_token_id=8)
        edit_json(source / "generation_config.json", eos_token_id=5, bos_token_id=6)
    words = {f"w{i}": i for i in range(9)}
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w3",
        bos_token="w4",
        pad_token="w7",
    )
    saved.save_pretrained(source)
    model = GPT(config).eval()
    model.meta = {"tokenizer": "hf", "path": str(source), "vocab_size": 9}
    found = auto(weights.export_hf(model, tmp_path / "out"))
    end, start = (5, 6) if beside == "its own config" else (3, 4)
    for one in (found.config, found.generation_config):
        assert (one.eos_token_id, one.bos_token_id) == (end, start)
    assert found.config.pad_token_id == (8 if beside == "its own config" else 7)


@needs_transformers
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        None,  # no file
    ],
)
def test_an_export_reads_text_as_its_tokenizer_json_says(settings, tmp_path):
    """Whatever class is named: transformers would build parts of it in another way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = ["<unk>", "[X]", *"abcdefgh0123456789", "\u0120"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(letters)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing("$A [X]", special_tokens=[("[X]", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = GPT(replace(ROTARY, n_layer=1, n_vocab=len(letters), vocab_size=len(letters)))
    model.meta = {"tokenizer": "hf", "path": str(tmp_path), "vocab_size": len(letters)}
    out = weights.export_hf(model, tmp_path / "out")
    found = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("abc 12", " a  b", "zz9", ""):
        assert found(text)["input_ids"] == made.encode(text).ids
    # What ends each text of the data ends a generated one.
    assert found.eos_token_id == auto(out).generation_config.eos_token_id == 1


def test_an_export_has_no_tokenizer_that_has_changed(tmp_path):
    """Since the data of its model were prepared: tokens would mean other texts."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    model = GPT(replace(ROTARY, n_layer=1))
    model.meta = {"tokenizer": "hf", "path": str(tmp_path), "vocab_size": 9}
    model.meta["checksum"] = load_tokenizer(model.meta).checksum
    assert (weights.export_hf(model, tmp_path / "a") / "tokenizer.json").exists()
    edit_json(tmp_path / "tokenizer.json", added_tokens=[])
    with pytest.warns(UserWarning, match="no tokenizer: .* has changed"):
        folder = weights.export_hf(model, tmp_path / "b")
    assert not (folder / "tokenizer.json").exists()


def test_an_export_copies_only_the_models_own_files(tmp_path):
    """Whatever links are in the folder, here of the hub's cache: it will be uploaded."""
    folder = weights.export_hf(GPT(GPT2_SHAPE), tmp_path / "m/snapshots/c0ffee").resolve()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "m/blobs").mkdir()
    (tmp_path / "m/blobs/1").write_text("merges")
    for name, target in (
        ("tokenizer_x", tmp_path / "secret"),
        ("tokenizer.json", tmp_path / "secret"),
        ("vocab.json", "/dev/zero"),
        ("merges.txt", "../../blobs/1"),
        ("added_tokens.json", "config.json"),
    ):
        (folder / name).symlink_to(target)
    (folder / "special_tokens_map.json").write_text("{}")
    edit_json(folder / "config.json", eos_token_id=[1, 6], bos_token_id=2)
    out = weights.export_hf(weights.load_hf(folder), tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "added_tokens.json",
        "special_tokens_map.json",
        "merges.txt",
    }
    assert not any(path.is_symlink() for path in out.iterdir())
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([1, 6], 2)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (replace(ROTARY, norm_type="post"), "norm_type"),
        (replace(ROTARY, norm_type="deepnorm"), "norm_type"),
        (replace(ROTARY, norm_type="cbwc"), "norm_type"),
        (replace(ROTARY, norm_type="layer"), "norm_type"),
        (replace(ROTARY, norm_plan="RR RR RR R | II II II | R"), "norm_type"),
        (replace(ROTARY, qk_norm="full"), "qk_norm"),
        (replace(ROTARY, norm_type="hybrid", norm_plan="RR RR RR R"), "qk_norm"),
        (replace(ROTARY, qk_norm="head", bias=True), "bias"),
        (replace(ROTARY, attn_scale=0.3), "attn_scale"),
        (replace(ROTARY, window=6, local_blocks="lg"), "window"),
        (replace(ROTARY, norm_type="olmo2"), "output_eps"),
        (replace(ROTARY, norm_type="olmo2", output_eps=1e-5, qk_norm="head"), "qk_norm"),
        (replace(ROTARY, norm_type="olmo2", output_eps=1e-5, bias=True), "bias"),
        (replace(GEMMA, norm_plan=""), "norm_type"),
        (replace(GEMMA, norm_plan="RR RR RR R | IR RR RR"), "norm_type"),
        (replace(GEMMA, qk_norm="none"), "qk_norm"),
        (replace(GEMMA, activation="swiglu"), "activation"),
        (replace(GEMMA, embed_scale=1.0), "embed_scale"),
        (replace(GEMMA, attn_scale=0.3), "attn_scale"),
        (replace(GPT2_SHAPE, norm_type="peri"), "norm_type"),
        (replace(GPT2_SHAPE, norm_type="dyt"), "norm_type"),
        (replace(GPT2_SHAPE, norm_type="cbwc"), "norm_type"),
        (replace(GPT2_SHAPE, qk_norm="head"), "qk_norm"),
        (replace(GPT2_SHAPE, norm_type="rms", norm_groups=2), "norm_groups"),
        (replace(GPT2_SHAPE, norm_type="rms", rms_fraction=0.5), "rms_fraction"),
        (replace(GPT2_SHAPE, activation="relu2"), "activation"),
        (replace(GPT2_SHAPE, n_kv_head=2), "n_kv_head"),
        (replace(GPT2_SHAPE, head_dim=4), "head_dim"),
        (replace(GPT2_SHAPE, position="rope", norm_type="rms"), "activation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_architecture_computes_is_refused(config, key, tmp_path):
    with pytest.raises(HFError, match=rf"\b{key}") as caught:
        weights.export_hf(GPT(config), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


# What the row of a norm file may say beside its letters, which are those of the house
ROWS = {
    "a learned scale": NormType(uniform("R"), "R", recipe=Recipe(learned_scale=True)),
    "centred linears": NormType(uniform("R"), "R", residual_linear=CenteredLinear),
    "a centred stream": NormType(uniform("R"), "R", embed=center),
    "a weight": NormType(post_letters, "IP", residual_weight=lambda n_layer: 2.0),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_that_no_architecture_computes_is_refused(row, registry, tmp_path):
    NORM_TYPES["mine"] = row
    with pytest.raises(HFError, match="norm_type='mine'"):
        weights.export_hf(GPT(replace(ROTARY, norm_type="mine")), tmp_path / "out")


def test_a_row_whose_norms_have_biases_is_written_with_them(registry, tmp_path):
    NORM_TYPES["mine"] = NormType(uniform("R"), "R", rms_has_bias=True)
    model = shake(GPT(replace(ROTARY, norm_type="mine", bias=True))).eval()
    again = weights.load_hf(weights.export_hf(model, tmp_path / "out"))
    idx = torch.arange(20)[None]
    same(model(idx), again(idx))


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HFError, match="not empty"):
        weights.export_hf(GPT(GPT2_SHAPE), tmp_path)
