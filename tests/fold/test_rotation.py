"""fold/rotation.py and convert.py --to=rotated: exact, and refused where a channel is seen alone.

python -m pytest tests/fold/test_rotation.py
"""

import json

import pytest
import torch
from fold_nets import C, net
from helpers import shake
from torch import nn

import convert
from common.errors import ConfigError, FoldError
from common.hub import import_transformers
from fold import analyze, fold, hub, rotate
from fold.certificate import run
from fold.graph import Graph
from fold.orthogonal import hadamard_matrix, keeping_mean, random_orthogonal
from fold.rotation import carry_out, plan_rotation
from model import GPT, GPTConfig

WORDS = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZE = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BARE = SIZE | WORDS
LLAMA = dict(num_key_value_heads=1, **BARE)
HEADS = dict(n_embd=24, n_layer=1, n_head=2, n_positions=32, **WORDS)
T5 = dict(d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
OPT = dict(num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
OPT |= dict(hidden_size=24, word_embed_proj_dim=24, **WORDS)
MODELS = {
    "LlamaForCausalLM": LLAMA | {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": LLAMA,
    "Phi3ForCausalLM": LLAMA,
    "GemmaForCausalLM": LLAMA | {"head_dim": 8},
    "MixtralForCausalLM": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "CohereForCausalLM": LLAMA,
    "StableLmForCausalLM": LLAMA | {"partial_rotary_factor": 0.5},
    "GPT2LMHeadModel": HEADS,
    "GPTNeoXForCausalLM": BARE,
    "FalconForCausalLM": BARE,
    "T5ForConditionalGeneration": T5 | WORDS,
    "ViTForImageClassification": dict(image_size=16, patch_size=8, **SIZE),
}
OTHERS = {
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 8},
    "OPTForCausalLM": OPT,
    "Gemma2ForCausalLM": LLAMA | {"head_dim": 8},
    "Olmo2ForCausalLM": LLAMA,
    "Glm4ForCausalLM": LLAMA | {"head_dim": 8},
    "BertForMaskedLM": BARE,
}


def made(name):
    """A model of transformers in float64, with gains and biases away from 1 and 0."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    cls = getattr(import_transformers(), name)
    model = shake(cls(cls.config_class(**(MODELS | OTHERS)[name]))).eval()
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("batched_mm")
    return model


def output(model, seed=7):
    """What it returns first; of float64 weights all is computed in float64."""
    inputs = hub.example_inputs(model, seed)
    return run(model.eval(), inputs, widen=model.dtype == torch.float64)[0]


def off(one, other):
    return float(((one - other).abs().max() / one.abs().max()).detach())


def table(model):
    """The embedding (V, C), or what takes its place in a model of images."""
    if model.main_input_name == "pixel_values":
        return model.vit.embeddings.patch_embeddings.projection.weight.detach().flatten(1).T
    return model.get_input_embeddings().weight.detach()


@pytest.mark.parametrize("name", MODELS)
def test_exact_in_float64(name):
    """A rotated embedding has rows of the same length and other numbers; a seed is one rotation."""
    model = made(name)
    after, certificate = rotate(model, hub.example_inputs(model, seed=0))
    assert certificate.ok and certificate.folded >= 2 and "Hadamard" in str(certificate)
    assert off(output(model), output(after)) < 1e-10
    before, rotated = table(model), table(after)
    assert torch.allclose(before.norm(dim=-1), rotated.norm(dim=-1), rtol=1e-9)
    assert off(before, rotated) > 0.1
    # LayerNorms subtract a mean: it stays.
    keeps_mean = torch.allclose(before.mean(-1), rotated.mean(-1), atol=1e-9)
    assert keeps_mean == ("made to keep means" in str(certificate))
    is_split = getattr(model.config, "is_encoder_decoder", False)
    assert ("encoder_last_hidden_state" in str(certificate)) == is_split
    assert ("inputs_embeds" in str(certificate)) == (model.main_input_name == "input_ids")
    assert not after._forward_hooks and not model._forward_hooks


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("LlamaForCausalLM", torch.bfloat16), ("Qwen3ForCausalLM", torch.float32)],
)
def test_stock_folders(name, dtype, tmp_path, capsys):
    """Folded and rotated in float64, and rounded once."""
    source, out = tmp_path / "source", tmp_path / "out"
    model = made(name).to(dtype)
    model.save_pretrained(source)
    convert.main([str(source), "--to=rotated", "--seed=3", f"--out={out}"])
    assert "(seed 3)" in capsys.readouterr().out
    again = type(model).from_pretrained(out)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert off(output(model), output(again)) < bound
    wide = model.double()
    graph = Graph(wide, hub.example_inputs(wide, seed=0))
    other = plan_rotation(graph, seed=2)
    plan = plan_rotation(graph, seed=3)
    assert off(plan.streams[0][1], other.streams[0][1]) > 0.1
    carry_out(plan, wide)
    pairs = zip(again.parameters(), wide.parameters(), strict=True)
    assert all(torch.equal(one, expected.to(dtype)) for one, expected in pairs)
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["to"] == "rotated" and certificate["max_rel"] < 1e-10
    assert 0 < certificate["written"]["after_float64"] < bound
    config = json.loads((out / "config.json").read_text())
    assert config["converted_from"]["to"] == "rotated" and config["weightless_norms"]


def test_after_rms(tmp_path):
    """transformers alone reads the folder with LayerNorms: the stream's mean is still 0."""
    model = made("OPTForCausalLM").float()
    x = hub.example_inputs(model, seed=0)
    rms, _ = fold(model, analyze(model, x), untie=True)
    after, certificate = rotate(rms, x)
    assert certificate.ok and "made to keep means" in str(certificate)
    hub.save(after, tmp_path / "out", certificate, inputs=x)
    for again in (type(model).from_pretrained(tmp_path / "out"), hub.load(tmp_path / "out")):
        assert off(output(model), output(again)) < 1e-5


def test_our_model():
    sizes = dict(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=40)
    model = shake(GPT(GPTConfig(**sizes, norm_type="rms", tie_embeddings=False))).eval()
    idx = torch.arange(16)[None]
    after, certificate = rotate(model, (idx,))
    assert certificate.ok and certificate.folded == 5
    assert off(model(idx), after(idx)) < 1e-10


@pytest.mark.parametrize("name", [*OTHERS][2:])
def test_output_norms_are_refused(name):
    model = made(name)
    named = "LayerNorm.weight" if name.startswith("Bert") else "layernorm.weight"
    with pytest.raises(FoldError, match=rf"cannot be rotated: \S+{named} has a number for each"):
        rotate(model, hub.example_inputs(model, seed=0))


GROUPS = "conv1d in conv takes its channels in 2 groups"


class Partial(nn.Module):
    """RMSNorm whose mean is over half of the channels (Zhang & Sennrich 2019, section 3)."""

    def forward(self, x):
        return x * torch.rsqrt(x[..., : C // 2].square().mean(-1, keepdim=True) + 1e-5)


def test_refusals(tmp_path):
    x = (torch.randn(2, 5, C, dtype=torch.float64),)

    def stream(norm, read=lambda m, s: s, write=lambda m, y: y, **parts):
        """A block: the norm reads the stream, and b writes into it."""
        return net(lambda m, x: m.out(m.ln2(block(m, norm, read, write, x))), **parts)

    def block(m, norm, read, write, x):
        s = m.a(x)
        return read(m, s + write(m, m.b(norm(m, s))))

    _, certificate = rotate(stream(lambda m, s: m.ln(s)), x)
    assert certificate.ok and certificate.folded == 2
    group = nn.GroupNorm(2, C, affine=False)
    conv = {"conv": nn.Conv1d(C, C, 1, groups=2)}
    for model, named in (
        (stream(lambda m, s: group(s.mT).mT), "group_norm sees its channels one by one"),
        (stream(lambda m, s: m.ln(s), write=lambda m, y: m.conv(y.tanh().mT).mT, **conv), GROUPS),
        (stream(lambda m, s: m.ln(s), read=lambda m, s: m.conv(s.mT).mT, **conv), GROUPS),
        (stream(lambda m, s: m.part(s), part=Partial()), "slice in part sees"),
        (stream(lambda m, s: m.ln(s), read=lambda m, s: s.tanh()), "tanh sees"),
        (stream(lambda m, s: m.ln(s), write=lambda m, y: y.relu()), "relu sees"),
        (stream(lambda m, s: m.ln(s), read=lambda m, s: s + s.flip(-1)), "flip sees"),
        (net(lambda m, x: m.out(m.ln(x + m.a(x)))), "x, an input of the model, is added to it"),
        (net(lambda m, x: m.ln(m.a(x) + m.b(x))), r"ln\.weight .* the model's output reads"),
        (net(lambda m, x: m.out(m.a(x))), "no norm over all channels of a residual stream"),
    ):
        with pytest.raises(FoldError, match=named):
            rotate(model, x)
    llama = made("LlamaForCausalLM")  # its head is the embedding
    with pytest.raises(FoldError, match=r"model\.norm\.weight has a number .* which is tied"):
        rotate(llama, hub.example_inputs(llama, 0), untie=False)
    llama.float().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="factor is a key of --to=rescaled"):
        convert.main([str(tmp_path), "--to=rotated", "--factor=2^-6"])


def test_orthogonal_matrices():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 12, 20, 24, 28, 32, 80, 768):
        hadamard = hadamard_matrix(size)
        assert (hadamard is None) == (size in (7, 28))
        one = torch.eye(size, dtype=torch.float64)
        if hadamard is not None:
            assert torch.equal(hadamard @ hadamard.T, size * one)
            assert torch.equal(hadamard.abs(), torch.ones_like(hadamard))
        q, _ = random_orthogonal(size, generator)
        kept = keeping_mean(q)
        for matrix in (q, kept):
            assert torch.allclose(matrix @ matrix.T, one, atol=1e-12)
        assert torch.allclose(kept.sum(0), one[0].new_ones(size), atol=1e-12)
