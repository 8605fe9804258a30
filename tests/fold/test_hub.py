"""fold/hub.py, and convert.py --to=rms on models of transformers: what is written is the folded
model, to them as well.

    python -m pytest tests/fold/test_hub.py
"""

import hashlib
import inspect
import json
import os
from contextlib import nullcontext

import pytest
import torch
from helpers import close, shake
from tiny_configs import ENCODER_DECODER, OPT, SIZE, T5, WORDS

pytest.importorskip("transformers")
from safetensors.torch import save_file

import convert
from common.errors import ConfigError, FoldError, HFError, UserError
from common.hub import import_transformers
from fold import analyze, fold, fold_gains, hub
from fold.certificate import weights_hash
from fold.modules import FoldedNorm

hf = import_transformers()
GPT2 = dict(n_embd=16, n_layer=1, n_head=2, n_positions=32, **WORDS)

SEQ2SEQ = ENCODER_DECODER | {"decoder_start_token_id": 2}


@pytest.fixture
def folder(tmp_path):
    """folder(class name, **config) -> path of a saved float32 model whose gains, biases and means
    are not initial.
    """

    def make(name, **config):
        torch.manual_seed(0)
        cls = getattr(hf, name)
        path = tmp_path / name
        shake(cls(cls.config_class(**config))).float().save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")
        return path

    return make


@torch.no_grad()
def run(model, inputs):
    return model.eval()(**inputs)[0]


@pytest.mark.parametrize(
    ("name", "shape", "words", "folded", "inserted"),
    [
        ("OPTForCausalLM", OPT, [], 3, 0),  # its tied head gets weights of its own
        ("OPTForCausalLM", OPT, ["--untie=False", "--insert"], 3, 1),
        (
            "BloomForCausalLM",
            dict(hidden_size=16, n_layer=1, n_head=2, **WORDS),
            ["--insert"],
            4,
            1,
        ),
        ("BertModel", dict(vocab_size=50, **SIZE), [], 1, 0),
        ("ViTForImageClassification", dict(image_size=16, patch_size=8, **SIZE), [], 3, 0),
        ("GPT2LMHeadModel", GPT2, ["--transformers"], 3, 0),
    ],
    ids=str,
)
def test_what_is_written_is_the_folded_model(
    name, shape, words, folded, inserted, folder, tmp_path, capsys
):
    source, out = folder(name, **shape), tmp_path / "out"
    convert.main([str(source), "--to=rms", f"--out={out}", "--json", *words])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["ok"] and (told["folded"], told["inserted"]) == (folded, inserted)
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["max_rel"] < 1e-13 and certificate["checks"][-1]["max_rel"] < 2e-6
    assert (out / "tokenizer.json").exists()
    before, after = hub.load_pretrained(source), hub.load(out)
    theirs = type(before).from_pretrained(out)  # LayerNorms, and nothing inserted
    assert sum(isinstance(module, FoldedNorm) for module in after.modules()) == folded
    assert not any(isinstance(module, FoldedNorm) for module in theirs.modules())
    assert after.state_dict().keys() == theirs.state_dict().keys()
    x = hub.example_inputs(before, seed=5)
    expected = run(before, x)
    for model in (after, theirs):
        torch.testing.assert_close(
            run(model, x), expected, rtol=0, atol=3e-6 * float(expected.abs().max())
        )
    # a folded model can be loaded, trained on and saved again
    hub.save(after.train(), tmp_path / "again")
    assert torch.equal(run(hub.load(tmp_path / "again"), x), run(after, x))


def test_what_is_saved_again_says_no_more_than_is_there(folder, tmp_path):
    """No certificate of the folder before, and no code that save_pretrained does not write."""
    source = folder("OPTForCausalLM", **OPT)
    for to in ("rms", "weightless"):
        convert.main([str(source), f"--to={to}", f"--out={tmp_path / to}"])
        model = hub.load_as_saved(tmp_path / to)
        hub.save(model, tmp_path / to / "again")
        config = json.loads((tmp_path / to / "again" / "config.json").read_text())
        assert not config.keys() & {"converted_from", "weightless_norms"}
        assert ("folded" in config) == ("auto_map" in config) == (to == "rms")
    model = hub.load(tmp_path / "rms")
    model.save_pretrained(tmp_path / "plain")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    x = hub.example_inputs(model, seed=5)
    close(run(plain, x), run(model, x), 1e-5)


def test_a_model_is_saved_with_the_attention_that_it_has(folder, tmp_path):
    model = hub.load_pretrained(folder("LlamaForCausalLM", **LLAMA))
    model.set_attn_implementation("eager")
    after, certificate = fold_gains(model, hub.example_inputs(model, 0))
    hub.save(after, tmp_path / "out", certificate)


def test_who_saves_a_trained_model_is_warned(folder, tmp_path):
    """Transformers alone would read it, without a word, as another function."""
    source, out = folder("OPTForCausalLM", **OPT), tmp_path / "out"
    convert.main([str(source), "--to=rms", f"--out={out}"])
    model = hub.load(out)
    model.model.decoder.embed_tokens.weight.data += 1
    x = hub.example_inputs(model, seed=5)
    with pytest.warns(UserWarning, match="trained.*trust_remote_code"):
        hub.save(model, tmp_path / "again")
    assert torch.equal(*(run(one, x) for one in (model, hub.load(tmp_path / "again"))))


def test_nothing_is_left_of_a_folder_that_is_another_model(folder, tmp_path, monkeypatch):
    source, load = folder("OPTForCausalLM", **OPT), hub.load

    def damaged(path):
        model = load(path)
        model.model.decoder.final_layer_norm.bias.data += 1
        return model

    monkeypatch.setattr(hub, "load", damaged)
    with pytest.raises(UserError, match=r"nothing written: .* \(.*final_layer_norm\.bias differs"):
        convert.main([str(source), "--to=rms", f"--out={tmp_path / 'new' / 'out'}"])
    assert list((tmp_path / "new").iterdir()) == []


BART = dict(max_position_embeddings=20, **SEQ2SEQ)
TIED = {
    "BartForConditionalGeneration": BART,
    "BertForMaskedLM": dict(**SIZE, **WORDS),
    "RobertaForMaskedLM": dict(max_position_embeddings=40, **SIZE, **WORDS),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("to", ["weightless", "rms"])
def test_untying_one_tie_keeps_the_others(to, name, folder, tmp_path):
    """In what save_pretrained writes and from_pretrained reads, as well."""
    before = hub.load_pretrained(folder(name, **TIED[name]))
    x = hub.example_inputs(before, seed=5)
    if to == "rms":
        after, certificate = fold(before, analyze(before, x), untie=True)
    else:
        after, certificate = fold_gains(before, x)
    assert certificate.ok and not after.config.tie_word_embeddings
    after.save_pretrained(tmp_path / "plain")
    hub.save(after, tmp_path / "out", certificate)
    for path in (tmp_path / "plain", tmp_path / "out"):
        close(run(type(before).from_pretrained(path), x), run(before, x), 1e-5)


LLAMA = dict(num_key_value_heads=1, **SIZE, **WORDS)
CLIP_VISION = dict(image_size=16, patch_size=8, projection_dim=8, **SIZE)


@pytest.mark.parametrize("words", [[], ["--keep_final_gain"]])
@pytest.mark.parametrize(
    ("name", "shape", "base"),
    [
        ("LlamaForCausalLM", LLAMA, "AutoModel"),
        ("CLIPVisionModelWithProjection", CLIP_VISION, "CLIPVisionModel"),
    ],
)
def test_the_base_model_of_a_weightless_folder(name, shape, base, words, folder, tmp_path, capsys):
    """It is the same function, too, or the certificate says that it is not."""
    source, out = folder(name, **shape), tmp_path / "out"
    convert.main([str(source), "--to=weightless", f"--out={out}", *words])
    before, after = (getattr(hf, base).from_pretrained(path) for path in (source, out))
    x = hub.example_inputs(before, seed=5)
    pairs = zip(before.eval()(**x).values(), after.eval()(**x).values(), strict=True)
    differs = any(not torch.allclose(a, b, 0, 1e-5) for a, b in pairs)
    assert differs == (words == [])
    certificate = json.loads((out / "certificate.json").read_text())
    told = [use for use in certificate["not_covered"] if use.startswith("AutoModel of this")]
    assert bool(told) == differs and all(use in capsys.readouterr().out for use in told)


@pytest.mark.parametrize("keep", [False, True])
def test_the_final_gain_where_no_part_is_the_base_model(keep, folder):
    """T5's decoder is a part of the model itself; BERT's last norm is a part of its head."""
    t5 = hub.load_pretrained(folder("T5ForConditionalGeneration", **T5))
    _, certificate = fold_gains(t5, hub.example_inputs(t5, 0), keep_final_gain=keep)
    assert ("decoder.final_layer_norm.weight" in certificate.parameters) != keep
    assert any("outside" in why for why in certificate.refusals.values()) == keep
    assert any("AutoModel" in use for use in certificate.not_covered) != keep
    bert = hub.load_pretrained(folder("BertForMaskedLM", **SIZE, **WORDS))
    _, certificate = fold_gains(bert, hub.example_inputs(bert, 0), keep_final_gain=keep)
    assert "cls.predictions.transform.LayerNorm.weight" in certificate.parameters


def test_a_part_that_another_class_loads(folder):
    """CLIPVisionModel loads the tower alone, without the projection that gets the norm's gain."""
    keys = dict(text_config=dict(max_position_embeddings=16, **SIZE, **WORDS), projection_dim=8)
    clip = hub.load_pretrained(folder("CLIPModel", vision_config=CLIP_VISION, **keys))
    x = hub.example_inputs(clip, 0)
    _, certificate = fold_gains(clip, x)
    assert any("CLIPVisionModel (vision_model)" in use for use in certificate.not_covered)
    _, certificate = fold_gains(clip, x, keep_final_gain=True)
    assert not any("vision_model" in use for use in certificate.not_covered)
    assert "vision_model.post_layernorm.weight" in certificate.refusals


def test_a_folder_says_what_it_was_made_of_and_for_what_not(folder, tmp_path, capsys):
    """Both conversions in turn: norms stay RMSNorms, and hashes are those of the files."""
    source = folder("OPTForCausalLM", **OPT)
    before = hub.load_pretrained(source)
    x = hub.example_inputs(before, seed=5)
    for order in (("rms", "weightless"), ("weightless", "rms")):
        at = source
        for to in order:
            out = tmp_path / "-".join(order) / to
            convert.main([str(at), f"--to={to}", f"--out={out}"])
            assert "not covered: adapters of the original" in capsys.readouterr().out
            config = json.loads((out / "config.json").read_text())
            told = (out / "certificate.json").read_bytes()
            made = config["converted_from"]
            assert (made["source"], made["to"]) == (str(at), to)
            assert made["weights"] == weights_hash(hub.load_as_saved(at))
            assert made["certificate"] == hashlib.sha256(told).hexdigest()
            assert config.get("weightless_norms", made["certificate"]) == made["certificate"]
            at = out
        assert json.loads(told)["source_certificate"]["to"] == order[0]
        assert "weightless_norms" in config
        after = hub.load(out)
        assert sum(isinstance(module, FoldedNorm) for module in after.modules()) == 3
        close(run(after, x), run(before, x), 1e-5)


WHISPER = dict(num_mel_bins=8, max_source_positions=8, max_target_positions=20, **SEQ2SEQ)


@pytest.mark.parametrize(
    ("name", "shape", "argument", "words"),
    [
        ("OPTForCausalLM", OPT, "inputs_embeds", []),
        # the embedding's rows stay as they are, and what it returns is centred
        ("OPTForCausalLM", OPT, "inputs_embeds", ["--untie=False", "--insert"]),
        ("WhisperModel", WHISPER, "decoder_inputs_embeds", []),
        ("BartModel", BART, "inputs_embeds", []),
        ("GPT2LMHeadModel", GPT2, "inputs_embeds", []),  # written as coupled_gpt2
    ],
)
def test_embeddings_given_by_hand(name, shape, argument, words, folder, tmp_path):
    """Whatever their mean: the LayerNorms did not see it."""
    source, out = folder(name, **shape), tmp_path / "out"
    before = hub.load_pretrained(source)
    x = {argument: torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)) + 1}
    if name == "WhisperModel":
        x["input_features"] = torch.randn(2, 8, 16)
        ids = torch.ones(2, 5, dtype=torch.int64)
        example = {"input_features": x["input_features"], "decoder_input_ids": ids}
        save_file(example, tmp_path / "x")
        words = [f"--inputs={tmp_path / 'x'}"]
    if name == "BartModel":
        x["decoder_input_ids"] = torch.tensor([[3, 4], [5, 6]])
    convert.main([str(source), "--to=rms", f"--out={out}", *words])
    if name == "GPT2LMHeadModel":
        after = hf.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    else:
        after = hub.load(out, check=True)
    close(run(after, x), run(before, x), 1e-5)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("OPTForCausalLM", OPT, ["model.decoder"]),
        ("BartForConditionalGeneration", BART, ["model.encoder", "model.decoder"]),
    ],
)
def test_embeddings_given_to_a_part_or_by_position(name, shape, parts, trust, folder, tmp_path):
    """generate(inputs_embeds=...) calls an encoder by itself."""
    source, out = folder(name, **shape), tmp_path / "out"
    before = hub.load_pretrained(source)
    convert.main([str(source), "--to=rms", f"--out={out}"])
    after = hub.load(out)
    if trust:
        auto = hf.AutoModelForCausalLM if name == "OPTForCausalLM" else hf.AutoModelForSeq2SeqLM
        after = auto.from_pretrained(out, trust_remote_code=True)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)) + 1
    for path in parts:
        models = [model.get_submodule(path) for model in (before, after)]
        place = [*inspect.signature(models[0].forward).parameters].index("inputs_embeds")
        with torch.no_grad():
            named = [model(inputs_embeds=x)[0] for model in models]
            by_position = [model(*[None] * place, x)[0] for model in models]
        # After the final norm, which does not see the mean either
        close(named[1], named[0], 1e-5)
        close(by_position[1], by_position[0], 1e-5)


def test_checks_are_saved(folder, tmp_path):
    before = hub.load_pretrained(folder("OPTForCausalLM", **OPT))
    after, certificate = fold(
        before, analyze(before, hub.example_inputs(before, 0)), untie=True, check=True
    )
    hub.save(after, tmp_path / "out", certificate)
    tokens = {"input_ids": torch.tensor([[3, 4]])}
    for check, fails in ((None, True), (False, False)):
        model = hub.load(tmp_path / "out", check=check)
        model.model.decoder.embed_tokens.weight.data += 1
        with pytest.raises(FoldError, match="not centred") if fails else nullcontext():
            run(model, tokens)


def test_experts_take_gains_over(folder, tmp_path):
    """Of a mixture of experts, whose product of groups has no float64."""
    source = folder("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, **LLAMA)
    grouped = hf.MixtralForCausalLM.from_pretrained(source).eval()
    grouped.set_experts_implementation("grouped_mm")
    with pytest.raises(FoldError, match="batched_mm"):
        fold_gains(grouped, hub.example_inputs(grouped, 0))
    convert.main([str(source), "--to=weightless", f"--out={tmp_path / 'out'}"])
    before, after = (hf.MixtralForCausalLM.from_pretrained(at) for at in (source, tmp_path / "out"))
    gains = [norm.weight for name, norm in after.named_modules() if name.endswith("norm")]
    assert len(gains) == 3 and all((gain == 1).all() for gain in gains)
    x = hub.example_inputs(before, seed=5)
    close(run(after, x), run(before, x), 1e-5)


# facebook/opt-350m has Post-LN, and gets refused
OPT_350M = OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=8)


def test_the_documented_example_folds_and_another_layout_is_refused(folder, tmp_path):
    """The example of the manual is an OPT of the layout of facebook/opt-125m."""
    assert "facebook/opt-125m --to=rms" in convert.__doc__
    convert.main([str(folder("OPTForCausalLM", **OPT)), "--to=rms", f"--out={tmp_path / 'out'}"])
    with pytest.raises(FoldError, match="none of 2 LayerNorms"):
        convert.main([str(folder("OPTForCausalLM", **OPT_350M)), "--to=rms"])


def test_what_more_insert_would_fold_is_said(folder, capsys):
    source = folder("BloomForCausalLM", hidden_size=16, n_layer=2, n_head=2, **WORDS)
    convert.main([str(source), "--to=rms", "--json"])
    printed = capsys.readouterr().out
    folded = json.loads(printed.splitlines()[-1])["folded"]
    convert.main([str(source), "--to=rms", "--insert", "--json"])
    more = json.loads(capsys.readouterr().out.splitlines()[-1])["folded"]
    assert folded < more and f"with --insert {more} fold" in printed


def test_refusals(folder, tmp_path):
    opt = folder("OPTForCausalLM", **OPT)
    with pytest.raises(
        FoldError,
        match=r"none of 3 .*\(3 fold untied, 3 with centrings inserted\) folds: .* unless it gets",
    ):
        convert.main([str(opt), "--to=rms", "--untie=False", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(FoldError, match="none of 0 LayerNorms"):
        convert.main([str(folder("LlamaModel", vocab_size=50, **SIZE)), "--to=rms"])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(HFError, match="an adapter, no model: merge"):
        hub.load_pretrained(adapter)
    os.mkfifo(opt / "fold.json")  # to open it waits for its writer
    with pytest.raises(HFError, match=r"no fold\.json there"):
        hub.load(opt)


def test_weights_that_are_missing_are_not_made_up(folder):
    from safetensors.torch import load_file, save_file

    path = folder("BertModel", vocab_size=50, **SIZE)
    weights = load_file(path / "model.safetensors")
    del weights["encoder.layer.0.attention.self.query.bias"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"layer\.0\.attention\.self\.query\.bias is not there \(1 are missing\)"
    ):
        convert.main([str(path), "--to=rms"])


def test_inputs_of_a_file(folder, tmp_path, capsys):
    from safetensors.torch import save_file

    path = folder("OPTForCausalLM", **OPT)
    save_file({"inputs_embeds": torch.randn(1, 3, 16)}, tmp_path / "x.safetensors")
    # so the embedding is not in it
    words = ["--analyze", f"--inputs={tmp_path / 'x.safetensors'}", "--json", "--rules=paper"]
    convert.main([str(path), *words])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["strict"] == 0 and told["rules"] == "paper"
    save_file({"input_idz": torch.ones(1, 3)}, tmp_path / "other")
    (tmp_path / "half").write_bytes((tmp_path / "other").read_bytes()[:20])
    for name, why in {
        "none": "not a safetensors file",
        "half": "not a safetensors file",
        "other": "no input_ids in it.*it has input_idz",
    }.items():
        with pytest.raises(ConfigError, match=f"inputs=.*{name}: {why}"):
            convert.main([str(path), "--analyze", f"--inputs={tmp_path / name}"])


KINDS = {
    "BartModel": dict(max_position_embeddings=20, **SEQ2SEQ),
    "CLIPModel": dict(
        text_config=dict(max_position_embeddings=16, **SIZE, **WORDS),
        projection_dim=8,
        vision_config=dict(image_size=16, patch_size=8, **SIZE),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_example_inputs(name):
    """The model runs on what is made for it, and another seed is other inputs."""
    cls = getattr(hf, name)
    model = cls(cls.config_class(**KINDS[name])).eval()
    x, other = (hub.example_inputs(model, seed) for seed in (0, 1))
    assert isinstance(run(model, x), torch.Tensor)
    assert any(
        isinstance(a, torch.Tensor) and not torch.equal(a, other[key]) for key, a in x.items()
    )
