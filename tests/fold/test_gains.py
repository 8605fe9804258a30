"""fold/gains.py: gains and biases go into the linears that alone read them, in any module; what
cannot go stays, and the certificate says why.

    python -m pytest tests/fold/test_gains.py
"""

import hashlib
import json
import re

import pytest
import torch
import torch.nn.functional as F
from fold_nets import net
from helpers import draw
from hf_models import needs_transformers, save, tiny, tokens
from torch import nn

import convert
from common.errors import FoldError
from fold import fold_gains
from fold.certificate import run
from fold.hub import load_pretrained

WITHOUT = "a.weight has no bias of its own that could take it over"


X = draw(2, 3, 8, seed=1)


class OnePlus(nn.Module):
    """An RMSNorm written by hand: 1 + weight, in float32 at least, cast back, and a bias."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        h = x.float()
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * (1.0 + self.weight.float())
        return y.type_as(x) + self.bias


def folded(model):
    """The weightless model and its certificate, once they are checked."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after, certificate = fold_gains(model, (X,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert certificate.ok and certificate.max_rel < 1e-13
    assert after.state_dict().keys() == before.keys()
    assert (run(after, (X,)) - run(model, (X,))).abs().max() < 1e-12
    return after, certificate


NORMS = {
    "LayerNorm": (nn.LayerNorm, 1),
    "RMSNorm": (nn.RMSNorm, 1),
    "one plus": (OnePlus, 0),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_and_two_linears(norm, bias):
    make, neutral = NORMS[norm]

    def read(m, x):
        y = m.norm(x)
        return m.a(y).tanh() + m.b(y[:, 1:].transpose(0, 1).transpose(0, 1)).mean(1, keepdim=True)

    model = net(read, norm=make(8), a=nn.Linear(8, 5, bias=bias), b=nn.Linear(8, 5))
    after, certificate = folded(model)
    assert certificate.folded == 1 and (after.norm.weight == neutral).all()
    has_bias = getattr(model.norm, "bias", None) is not None
    stays = has_bias and not bias
    assert list(certificate.refusals) == (["norm.bias"] if stays else [])
    if has_bias:
        assert after.norm.bias.any() == stays


def heads(m, x):
    """A gain of each head's channels, read by a linear that has all heads side by side."""
    return m.a(m.norm(x.unflatten(-1, (2, 4))).flatten(-2))


def twice(m, x):
    return m.a(m.norm(m.b(m.norm(x))))


READS = {
    "product": (
        lambda m, x: m.norm(x) @ m.w,
        {"norm": OnePlus(8), "w": nn.Parameter(draw(8, 5))},
    ),
    "transposed": (
        lambda m, x: m.norm(x) @ m.w.T,
        {"norm": nn.RMSNorm(8), "w": nn.Parameter(draw(5, 8))},
    ),
    "times a number": (
        lambda m, x: m.a(0.5 * m.norm(x) / 3),
        {"norm": nn.RMSNorm(8), "a": nn.Linear(8, 5)},
    ),
    "heads": (heads, {"norm": nn.LayerNorm(4), "a": nn.Linear(8, 5)}),
    "norm twice": (twice, {"norm": nn.LayerNorm(8), "a": nn.Linear(8, 5), "b": nn.Linear(8, 8)}),
    "linear twice": (
        lambda m, x: m.a(m.norm(x)) + m.a(m.norm(2 * x + 1)),
        {"norm": nn.LayerNorm(8), "a": nn.Linear(8, 5)},
    ),
    "dropout": (
        lambda m, x: m.a(m.b(m.norm(x))),
        {"norm": nn.RMSNorm(8), "b": nn.Dropout(0.5), "a": nn.Linear(8, 5)},
    ),
}


@pytest.mark.parametrize("name", READS)
def test_other_ways_to_read(name):
    read, parts = READS[name]
    after, certificate = folded(net(read, **parts))
    assert certificate.folded == 1
    assert (after.norm.weight == (0 if isinstance(after.norm, OnePlus) else 1)).all()


def tied(read, bias=True):
    """A model with two linears of one weight, the second perhaps without a bias."""
    model = net(read, norm=nn.LayerNorm(8), a=nn.Linear(8, 5), b=nn.Linear(8, 5, bias=bias))
    model.b.weight = model.a.weight
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_tied_linears_take_a_gain_over_once(bias):
    """The norm's bias stays: no one sum is to be added to both of them."""
    after, certificate = folded(tied(lambda m, x: m.a(m.norm(x)).tanh() + m.b(m.norm(x)), bias))
    assert certificate.folded == 1 and list(certificate.refusals) == ["norm.bias"]
    assert (after.norm.weight == 1).all() and after.b.weight is after.a.weight


def test_tied_linears_that_read_other_channels_keep_the_gain():
    model = tied(lambda m, x: m.a(m.norm(x)) + m.b(m.norm(x).roll(1, -1)))
    with pytest.raises(FoldError, match=r"norm.weight stays: .*several ways"):
        fold_gains(model, (X,))


def test_tied_linears_of_two_norms_get_a_weight_each():
    model = tied(lambda m, x: m.a(m.norm(x)) + m.b(m.ln(x)))
    after, certificate = fold_gains(model, (X,))
    assert certificate.ok and certificate.folded == 2 and certificate.max_rel < 1e-13
    assert not torch.equal(after.a.weight, after.b.weight)


STAYS = {
    "residual": (lambda m, x: m.a(m.norm(x)) + m.norm(x)[..., :5].sum(), "sum"),
    "output": (lambda m, x: m.norm(x), "the model's output"),
    "activation": (lambda m, x: m.a(m.norm(x).tanh()), "tanh"),
    # as Swin pads: rows of zeros, which have no bias
    "padded": (lambda m, x: m.a(F.pad(m.norm(x), (0, 0, 1, 0))), "pad"),
    "times a number": (lambda m, x: m.a(0.5 * m.norm(x)), "mul"),  # so would the bias be
    "added": (lambda m, x: m.a(x + m.norm(x)), "add"),
    "other axis": (lambda m, x: m.a(m.norm(x.mT).mT), "linear in a"),
    "the weight itself": (lambda m, x: m.a(m.norm(x)) @ m.a.weight.relu(), "relu reads a.weight"),
    "the gain itself": (lambda m, x: m.a(m.norm(x)) * m.norm.weight.sum(), "sum reads it too"),
    "one linear, two inputs": (lambda m, x: m.a(m.norm(x)) + m.a(x), "linear in a reads a.weight"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_anything_else_reads_stays(name):
    """Beside it a norm that folds, so that there is a certificate."""
    read, why = STAYS[name]
    norm = OnePlus(3 if name == "other axis" else 8)
    model = net(
        lambda m, x: (read(m, x), m.c(m.other(x))),
        norm=norm,
        a=nn.Linear(8, 8 if name == "the weight itself" else 5),
        other=nn.RMSNorm(8),
        c=nn.Linear(8, 5),
    )
    after, certificate = fold_gains(model, (X,))
    assert certificate.ok and certificate.folded == 1
    assert why in certificate.refusals["norm.weight"]
    assert torch.equal(after.norm.weight, model.norm.weight)
    with pytest.raises(FoldError, match=r"none of its norms.*norm.weight stays: "):
        fold_gains(net(read, norm=norm, a=model.a), (X,))


def test_a_bias_that_stays_where_the_gain_is_0_keeps_the_gain():
    model = net(lambda m, x: m.a(m.norm(x)), norm=nn.LayerNorm(8), a=nn.Linear(8, 5, bias=False))
    model.norm.weight.data[3] = 0
    with pytest.raises(FoldError, match="its bias has to stay, and the gain is 0"):
        fold_gains(model, (X,))


def test_a_bias_that_is_read_twice_takes_nothing_over():
    model = net(lambda m, x: m.a(m.norm(x)) * m.a.bias.relu(), norm=OnePlus(8), a=nn.Linear(8, 5))
    after, certificate = folded(model)
    assert torch.equal(after.a.bias, model.a.bias) and after.norm.bias.any()
    assert certificate.refusals == {"norm.bias": WITHOUT}


# ------------------------------------------------------------------------- models of transformers


L = "model.layers.N."
QK = {f"{L}self_attn.q_norm.weight", f"{L}self_attn.k_norm.weight"}
OUTPUTS = {f"{L}post_attention_layernorm.weight", f"{L}post_feedforward_layernorm.weight"}
LEFT = {
    "gpt2": {"transformer.ln_f.bias"},
    "qwen3": QK,
    "gemma3": QK | OUTPUTS,
}


def gains(model):
    """Name -> gain of every norm of a model of transformers (Gemma's: 1 + weight)."""
    offset = 1 if "gemma" in model.config.model_type else 0
    return {
        name: offset + parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 1 and name.endswith("weight")
    }


@needs_transformers
@pytest.mark.parametrize("name", LEFT)
def test_what_is_written_has_the_architecture_and_gains_of_1(name, tmp_path, capsys):
    """By transformers' own classes in float64, gains and biases random."""
    source, out = save(tiny(name).double(), tmp_path / "source"), tmp_path / "out"
    convert.main([str(source), "--to=weightless", f"--out={out}", "--json"])
    printed = capsys.readouterr().out
    certificate = json.loads((out / "certificate.json").read_text())
    assert {re.sub(r"\.\d\.", ".N.", key) for key in certificate["refusals"]} == LEFT[name]
    assert all(f"left: {key}" in printed for key in LEFT[name])
    theirs = load_pretrained(source)
    ours = load_pretrained(out)  # no weight is missing
    assert not (out / "fold.json").exists() and type(ours) is type(theirs)
    config, before = (json.loads((path / "config.json").read_text()) for path in (out, source))
    hashed = hashlib.sha256((out / "certificate.json").read_bytes()).hexdigest()
    assert config.pop("converted_from")["certificate"] == hashed
    assert config == before | {"tie_word_embeddings": False, "weightless_norms": hashed}
    assert {key for key, gain in gains(ours).items() if (gain != 1).any()} == {
        key for key in certificate["refusals"] if key.endswith("weight")
    }
    assert torch.equal(ours.get_input_embeddings().weight, theirs.get_input_embeddings().weight)
    x = (tokens(2, 20, seed=3),)
    logits, reference = run(ours, x).logits, run(theirs, x).logits
    assert (logits - reference).abs().max() < 1e-12 * reference.abs().max()


@needs_transformers
def test_without_untie_a_tied_head_keeps_the_final_gain(tmp_path, capsys):
    source = save(tiny("qwen3"), tmp_path / "source")
    out = tmp_path / "out"
    convert.main([str(source), "--to=weightless", "--untie=False", f"--out={out}", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["folded"] == 6
    refusals = json.loads((out / "certificate.json").read_text())["refusals"]
    assert refusals["model.norm.weight"].endswith("reads lm_head.weight too, which is tied")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"]
