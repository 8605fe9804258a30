"""fold/gpt.py and convert.py: what is exact is exact in float64, the rest is refused, what is
written can be used.

    python -m pytest tests/test_convert.py
"""

import hashlib
import json
import shlex
from dataclasses import replace

import pytest
import torch
from helpers import TINY, chars_meta, close, losses, save_model, shake, tokens, val_losses
from hf_models import needs_transformers, save, tiny, transformers

import convert
import sample
from common.errors import ConfigError, UserError
from fold import gpt as fold
from fold.certificate import certify, weights_hash
from load import load_model
from model import GPT, GPTConfig
from norm_types import NORM_TYPES
from norms import LayerNorm, NoNorm, Norm, RMSNorm, SharedRMSNorm
from posthoc.coupling import view
from taper import tapers

SHAPE = GPTConfig(
    vocab_size=40, n_vocab=32, block_size=12, n_layer=3, n_head=2, n_embd=16, init_std=0.2
)
NO_GAIN = {"norm_gain": "none"}
ONE_PLUS = {"norm_gain": "one_plus"}
LLAMA = {"position": "rope", "activation": "swiglu", "qk_norm": "head", "n_kv_head": 1}
SHAPES = {
    "gpt2": {},
    "biases": {"bias": True},
    "no biases in attention": {"bias": True, "attn_bias": False},
    "untied": {"tie_embeddings": False},
    "untied, biases": {"tie_embeddings": False, "bias": True},
    "no gains": {"norm_gain": "none"},
    "llama": LLAMA,
    "llama, biases": {**LLAMA, "bias": True},
}


def gpt(steps=0, **keys):
    """A small float64 model whose gains and biases are not 1 and 0.

    A taper is at `steps` of its schedule 2 .. 6.
    """
    taper = {"taper_warmup": 2.0, "taper_end": 6.0} if keys.get("norm_type") == "taper" else {}
    model = shake(GPT(replace(SHAPE, **taper | keys)))
    for step in range(1, steps + 1):
        model.set_step(step, 10)
        model(tokens(2, 12, seed=step))
    for norm in tapers(model):
        if norm.weight_tilde is not None:
            norm.weight_tilde.data *= 1.2  # and not what the base has
    return model.eval()


def certified(model, rewrite, **options):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after, certificate = certify(model, rewrite, (tokens(2, 12),), **options)
    # as it was
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return after, certificate


def exact(model, rewrite):
    """The rewritten model, which computes the same but for rounding in float64."""
    after, certificate = certified(model, rewrite)
    assert certificate.ok and certificate.max_rel < 1e-13
    return after


# ----------------------------------------------------------------------------------------- rewrites


@pytest.mark.parametrize(
    ("norm_type", "shape"), [*(("layer", shape) for shape in SHAPES), ("cbwc", "biases")]
)
def test_layer_norm_becomes_rms_norm(norm_type, shape):
    model = gpt(norm_type=norm_type, **SHAPES[shape])
    after = exact(model, fold.to_rms)
    assert after.config.norm_type == "rms" and not after.config.tie_embeddings
    assert all(isinstance(place.norm, RMSNorm) for place in after.places())
    assert (after.norm_f.norm.bias is None) == (model.norm_f.norm.bias is None)
    assert torch.equal(after.lm_head.weight, model.head_weight())
    replaced = certified(model, lambda m: fold.rebuild(m, after.config, fold.untied(m)))[1]
    assert not replaced.ok and replaced.max_rel > 1e-2  # RMSNorm alone is another function


@pytest.mark.parametrize(
    ("keys", "type_after"),
    [
        ({"norm_type": "lns"}, "rms"),
        ({"norm_type": "lns", "bias": True, **ONE_PLUS}, "rms"),
        ({"norm_type": "rms", **ONE_PLUS, "qk_norm": "full", "norm_groups": 2}, "rms"),
        ({"norm_type": "cbwc", "bias": True, **ONE_PLUS}, "rms"),
        ({"norm_type": "peri", **ONE_PLUS}, "rms"),
        ({"norm_type": "olmo2", **ONE_PLUS}, "olmo2"),
        ({"norm_type": "keel", **ONE_PLUS, "residual_weight": 3.0}, "keel"),
        # an output LayerNorm, one of the embeddings, or both
        ({"norm_type": "peri", "norm_plan": "RRRRRRR|LLLLLL|R", "bias": True}, "rms"),
        ({"norm_type": "peri", "norm_plan": "RRRRRRR|LIIRRL|L", **LLAMA}, "rms"),
        ({"norm_type": "olmo2", "norm_plan": "IIIIIIR|LLLLLL", **ONE_PLUS}, "olmo2"),
        # without gains everything has zero mean
        (
            {"norm_type": "layer", "bias": True, "norm_plan": f"{'L' * 7}|{'L' * 6}|L", **NO_GAIN},
            "rms",
        ),
        ({"norm_type": "keel", "bias": True, "post_base": "layer", **NO_GAIN}, "keel"),
    ],
    ids=str,
)
def test_other_layouts_become_rms_norm(keys, type_after):
    model = gpt(**keys)
    after = exact(model, fold.to_rms)
    assert after.config.norm_type == type_after
    assert after.config.norm_gain == ("none" if model.config.norm_gain == "none" else "plain")
    parts = [module for module in after.modules() if isinstance(module, Norm)]
    assert not any(isinstance(part, LayerNorm) for part in parts)
    assert all(part.has_plain_gain for part in parts)
    # Alone where the embeddings are centred, the head needs weights of its own.
    assert after.config.tie_embeddings == torch.equal(after.wte.weight, model.wte.weight)


@pytest.mark.parametrize(
    "keys",
    [
        {"norm_type": "layer", "norm_plan": f"{'L' * 7}|{'L' * 6}"},
        {"norm_type": "keel", "post_base": "layer"},
        {"norm_type": "peri", "norm_plan": f"{'L' * 7}|{'R' * 6}", **NO_GAIN},
        {"norm_type": "post", "post_base": "layer", **NO_GAIN},
        {"norm_type": "peri", "norm_plan": "LRLLLLL"},
    ],
    ids=str,
)
def test_without_an_exact_form_the_layout_is_refused(keys):
    with pytest.raises(fold.FoldError, match=f"{keys['norm_type']} -> rms is not exact"):
        convert.convert(gpt(**keys), convert.ConvertConfig(to="rms"))


@pytest.mark.parametrize(
    ("base", "final", "shape"),
    [
        *(("layer", True, shape) for shape in SHAPES),
        ("layer", False, "no biases in attention"),
        ("rms", True, "llama"),
        ("rms", False, "biases"),
    ],
)
def test_taper_at_gate_0_becomes_nothing(base, final, shape):
    fit = "channel" if "biases" in shape else "norm"
    model = gpt(
        steps=7,
        norm_type="taper",
        taper_base=base,
        taper_final=final,
        taper_fit=fit,
        **SHAPES[shape],
    )
    after = exact(model, fold.to_folded)
    norms = [place.norm for place in after.places()]
    assert all(isinstance(norm, NoNorm) and not list(norm.parameters()) for norm in norms[:-1])
    assert str(after.plan) == "II II II " + ("I" if final else "R" if base == "rms" else "L")
    assert after.config.tie_embeddings == (model.config.tie_embeddings and not final)


def test_a_plan_with_tapers_here_and_there():
    model = gpt(
        steps=7,
        norm_type="taper",
        taper_base="layer",
        bias=True,
        attn_bias=False,
        norm_plan="LT TL RT L",
        embed_scale=4.0,
    )
    assert str(exact(model, fold.to_folded).plan) == "LI IL RI L"
    model = gpt(steps=7, norm_type="taper", taper_base="layer", bias=True, norm_plan="LT TL RT T")
    with pytest.raises(fold.FoldError, match="LT TL RT T: the final taper's bias"):
        fold.to_folded(model)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_taper_whose_gate_is_open_is_refused(steps):
    model = gpt(steps=steps, norm_type="taper")
    with pytest.raises(fold.FoldError, match=r"position 0: its gate is at .*train to the end"):
        fold.to_folded(model)
    if not steps:  # half way its scaling is known, and can be had if one wants it
        with pytest.raises(fold.FoldError):
            fold.to_folded(model, exact=False)


@pytest.mark.parametrize(
    "keys",
    [
        {"coupled_alpha": 1.3},
        {"coupled_calibrate": 2},
        {"coupled_span": 0},
        {**ONE_PLUS, "norm_plan": "Rs ss Rs R | RR IR RR | R"},
        LLAMA,
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_alpha_goes_into_the_gains(keys):
    model = gpt(
        norm_type="coupled", **{"coupled_alpha": (1.0, 1.2, 1.0, 0.7, 1.0, 2.0, 1.0)} | keys
    )
    after = exact(model, fold.absorb_alpha)
    assert after.config.coupled_alpha == 1.0 and {
        place.norm.alpha for place in after.places() if hasattr(place.norm, "alpha")
    } == {1}


# ----------------------------------------------------------------------------------------- programs


@pytest.fixture
def saved(tmp_path):
    """saved(**keys) -> path of a checkpoint."""

    def save(steps=0, **keys):
        return save_model(tmp_path / "saved.pt", gpt(steps, **keys).float(), chars_meta(32))

    return save


CONVERTED = {
    "layer": ["rms"],
    "cbwc": ["rms"],
    "lns": ["rms"],
    "taper": ["folded"],
    "rms": ["coupled"],
    "coupled": ["coupled"],
}


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_every_norm_type_converts_or_says_why(norm_type):
    """A refusal is one line that names the type."""
    layout = {"norm_plan": "RI LI R"} if norm_type == "none" else {}
    layout |= {"mixln_share": 0.5} if norm_type == "mixln" else {}
    model = gpt(7 if norm_type == "taper" else 0, norm_type=norm_type, n_layer=2, **layout)
    done = []
    for to in ("rms", "folded", "coupled"):
        config = convert.ConvertConfig(to=to, inexact=to == "coupled")
        try:
            _, certificate = convert.convert(model, config)
        except UserError as error:
            assert norm_type in str(error) and "\n" not in str(error)
            continue
        assert certificate.ok or to == "coupled"
        done.append(to)
    assert done == CONVERTED.get(norm_type, [])


@pytest.mark.parametrize(
    ("to", "source", "words"),
    [
        ("rms", {"norm_type": "layer", "bias": True}, []),
        ("rms", {"norm_type": "cbwc"}, []),
        ("folded", {"norm_type": "taper", "steps": 7}, []),
        ("folded", {"norm_type": "taper", "steps": 4}, ["--inexact"]),
        ("coupled", {"norm_type": "rms"}, ["--inexact"]),
        ("coupled", {"norm_type": "coupled", "coupled_alpha": 1.2}, []),
    ],
)
def test_what_is_written_is_the_converted_model(to, source, words, saved, tmp_path, capsys):
    path, out = saved(**source), tmp_path / "out"
    convert.main([str(path), f"--to={to}", f"--out={out}", "--json", *words])
    printed = capsys.readouterr().out.splitlines()
    told, certificate = json.loads(printed[-1]), json.loads((out / "certificate.json").read_text())
    assert told["ok"] == certificate["ok"] == (words == [])
    before, after, idx = load_model(str(path)), load_model(str(out)), tokens(2, 12, seed=5)
    difference = (before(idx) - after(idx)).abs().max() / before(idx).abs().max()
    assert difference < 2e-6 if told["ok"] else difference > 1e-5
    sample.main([str(out), "--prompt=579", "--max_new_tokens=5", "--device=cpu"])
    assert capsys.readouterr().out.startswith("579")
    with pytest.raises(ConfigError, match="something in it"):
        convert.main([str(path), f"--to={to}", f"--out={out}"])


def test_text_calibrates_and_judges(saved, tmp_path, capsys):
    path, text = saved(norm_type="rms"), tmp_path / "text.txt"
    text.write_text("0123456789:;<=>?@ABCDEFGHIJKLMNO" * 20)
    words = ["--norm_plan=RR Rs Rs R", "--json", f"--out={tmp_path / 'coupled'}"]
    convert.main([str(path), "--to=coupled", "--inexact", f"--text={text}", *words])
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["kl"] > 0 and "KL" in printed
    alpha = torch.tensor(load_model(str(tmp_path / "coupled")).config.coupled_alpha).expand(7)
    assert f"alpha of each s in turn: {alpha[3]:.4g}, {alpha[5]:.4g}\n" in printed


@pytest.mark.parametrize(
    "broken", ["wte.weight", "wpe.weight", "blocks.1.attn.proj.bias", "blocks.2.mlp.down.weight"]
)
def test_a_mistake_is_found_and_nothing_written(broken, saved, tmp_path, monkeypatch):
    """One tensor that is not centred: the random weights of the certificate show it."""
    path, centered = saved(norm_type="layer", bias=True), fold.center_stream

    def forget(weights):
        kept = weights[broken]
        centered(weights)
        weights[broken] = kept

    monkeypatch.setattr(fold, "center_stream", forget)
    with pytest.raises(fold.FoldError, match="layer -> rms is not exact"):
        convert.main([str(path), "--to=rms", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_training_goes_on_from_a_converted_run(train_ok, train_fails, tiny_data, tmp_path, capsys):
    """train.py reads it with the words that convert.py prints, and the loss is where it was; it
    does not take it for a run to resume.
    """
    words = (*TINY, f"--data_dir={tiny_data}", "--bias=True", "--eval_interval=40")
    train_ok(*words, f"--out_dir={tmp_path / 'run'}")
    convert.main([str(tmp_path / "run"), "--to=rms", f"--out={tmp_path / 'rms'}"])
    (told,) = (line for line in capsys.readouterr().out.splitlines() if "to train on: " in line)
    keys = shlex.split(told.partition("python train.py ")[2].partition(" --data_dir")[0])
    # those of training alone: the shape is the model's
    shape = {"--n_layer", "--n_head", "--n_embd", "--block_size", "--bias"}
    settings = [word for word in words if word.partition("=")[0] not in shape]
    train_ok(*keys, *settings, "--max_iters=10", f"--out_dir={tmp_path / 'tuned'}")
    run, tuned = (val_losses(tmp_path / name) for name in ("run", "tuned"))
    assert tuned[0] == pytest.approx(run[40], abs=1e-5)
    assert losses(tmp_path / "tuned")[10] < losses(tmp_path / "run")[1]
    same = ("--norm_type=rms", "--rms_bias=True", "--tie_embeddings=False")
    assert "--init_from" in train_fails(*words, *same, f"--out_dir={tmp_path / 'rms'}")


@needs_transformers
def test_a_hugging_face_gpt2_becomes_rms_and_coupled(tmp_path, capsys):
    """In folders that transformers reads, with RMSNorms."""
    theirs, idx = shake(tiny("gpt2")).float().eval(), tokens(2, 12)
    source, rms, coupled = (tmp_path / name for name in ("gpt2", "rms", "coupled"))
    save(theirs, source)
    convert.main([str(source), "--to=rms", f"--out={rms}"])
    printed = capsys.readouterr().out
    assert "trust_remote_code=True" in printed.splitlines()[0]
    assert "not covered: adapters of the original (LoRA, prompts): merge them first" in printed
    told = (rms / "certificate.json").read_bytes()
    assert json.loads(told)["ok"]
    assert json.loads((rms / "config.json").read_text())["converted_from"] == {
        "source": str(source),
        "weights": weights_hash(load_model(str(source))),
        "to": "rms",
        "certificate": hashlib.sha256(told).hexdigest(),
    }
    after = load_model(str(rms))
    assert after.config.norm_type == "rms" and after.config.rms_bias
    close(after(idx), theirs(idx).logits, 1e-5)
    convert.main([str(rms), "--to=coupled", "--inexact", f"--out={coupled}"])
    convert.main([str(coupled), "--to=weightless", f"--out={tmp_path / 'weightless'}"])
    assert "not covered: the last hidden state (AutoModel" in capsys.readouterr().out
    close(load_model(str(tmp_path / "weightless"))(idx), load_model(str(coupled))(idx), 1e-5)
    for folder in (rms, coupled, tmp_path / "weightless"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
        assert str(load_model(str(folder)).plan) == model.config.norm_plan
        close(model.eval()(idx).logits, load_model(str(folder))(idx), 1e-5)


@pytest.mark.parametrize("attn_bias", [None, False])
def test_biases_of_norms_that_share_move_into_linears(attn_bias):
    """Exactly: with its own statistic, a norm that shares would leave the function as it was."""
    model = gpt(norm_type="rms", rms_bias=True, bias=True, attn_bias=attn_bias)
    shared = view(model, "RR Rs ss R")
    has_bias = [place.norm.bias is not None for place in shared.places()]
    assert has_bias == [letter == "R" for letter in "RRRsssR"]
    for place in shared.places():
        if isinstance(place.norm, SharedRMSNorm):
            gain = place.norm.weight
            place.norm = RMSNorm(16, place.norm.eps)
            place.norm.weight = gain
    close(shared(tokens(2, 12)), model(tokens(2, 12)), 1e-12)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "say what to do"),
        ("--to=rms --analyze", "say what to do"),
        ("--to=layer", "to"),
        ("--to=rms --text=x", "text is a key of"),
        ("--to=folded --insert", "insert is a key of"),
        ("--to=folded --transformers", "transformers is a key of"),
        ("--to=rms --rules=paper", "rules"),
        ("--to=coupled", "add --inexact"),
        ("--to=rms --out", "out"),
        ("--to=rms --transformers", "no Hugging Face folder"),
        ("--to=rms --insert", "for models of transformers"),
        ("--to=rms --inputs=x", "for models of transformers"),
        ("--to=rms --untie=False", "--untie gives it weights of its own"),
    ],
)
def test_refusals(words, named, saved):
    norm_type = "rms" if "--to=coupled" in words else "layer"
    with pytest.raises(ConfigError, match=named):
        convert.main([saved(norm_type=norm_type), *words.split()])


@pytest.mark.parametrize("tied", [False, True])
def test_analyze_prints_verdicts(tied, saved, capsys):
    """Of our checkpoints (models of transformers: fold/test_hub.py): what --to=rms does, head and
    embedding by name.
    """
    convert.main([saved(norm_type="layer", n_layer=1, tie_embeddings=tied), "--analyze", "--json"])
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert (told["total"], told["strict"], told["untied"]) == (
        3,
        0 if tied else 3,
        3,
    ) and "leaves it" not in printed
    assert f"blocks.0.norm2.norm  {'untied' if tied else 'strict'}" in printed
    assert (
        "centring wte.weight would show in linear in lm_head, unless it gets a centred copy"
        in printed
    ) == tied
