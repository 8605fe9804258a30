"""fold/rescaling.py and convert.py --to=rescaled: equal to the bit, and finite in float16.

python -m pytest tests/fold/test_rescale.py
"""

import json

import pytest
import torch
from fold_nets import C, net
from helpers import shake

pytest.importorskip("transformers")

from tiny_configs import SIZE, T5, WORDS

import convert
from common.errors import ConfigError, FoldError
from common.hub import import_transformers
from fold import analyze, fold, hub, rescale
from fold.graph import Graph
from fold.rescaling import automatic_factor, plan_rescaling

hf = import_transformers()
LLAMA = dict(num_key_value_heads=1, **SIZE, **WORDS)
OPT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24, word_embed_proj_dim=16
)
SWIN = dict(image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
MODELS = {
    "LlamaForCausalLM": LLAMA | {"tie_word_embeddings": True},
    "GPT2LMHeadModel": dict(n_embd=16, n_layer=1, n_head=2, n_positions=32, **WORDS),
    "T5ForConditionalGeneration": T5,
    "Olmo2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 8},
    "Gemma3ForCausalLM": LLAMA | {"head_dim": 8},
    "GPTNeoXForCausalLM": SIZE | WORDS,
    "PhiForCausalLM": SIZE | WORDS,
    "BloomForCausalLM": dict(hidden_size=16, n_layer=1, n_head=2, **WORDS),
    "ViTForImageClassification": dict(image_size=16, patch_size=8, **SIZE),
    # Norms with an eps in the code, which stays: that of the embeddings, those in attention
    "SwinForImageClassification": SWIN,
    "DeepseekV3ForCausalLM": LLAMA
    | dict(num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4)
    | dict(qk_nope_head_dim=4, v_head_dim=4, head_dim=4, first_k_dense_replace=1),
}


@torch.no_grad()
def made(name, large=False):
    """A model whose gains have the few bits of bfloat16. A `large` one has a stream of some 1e5."""
    torch.manual_seed(0)
    cls = getattr(hf, name)
    model = shake(cls(cls.config_class(**MODELS[name]))).float().eval()
    for path, parameter in model.named_parameters():
        if large and path.endswith(("gate_proj.weight", "up_proj.weight", "wi.weight")):
            parameter *= 0.5 / parameter.std()
        if large and path.endswith(("down_proj.weight", "wo.weight")):
            parameter *= 2e4 / parameter.abs().max()
        parameter.copy_(parameter.bfloat16())
    return model


@torch.no_grad()
def run(model, x):
    return model.eval()(**x)[0]


# Attention written out too, with grouped heads, without, and with norms of queries and keys
EAGER = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM")
CASES = [*((name, "sdpa") for name in MODELS), *((name, "eager") for name in EAGER)]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_equal_to_the_bit(name, attention, tmp_path):
    """Loaded again by the stock class; the head of a tied model stays the embedding."""
    model = made(name)
    x = hub.example_inputs(model, seed=0)
    model.set_attn_implementation(attention)
    after, certificate = rescale(model, x, 2.0**-6)
    assert certificate.ok and certificate.folded and "subnormal in float16" in str(certificate)
    # The head of a tied model reads the final norm's output times 1 / s.
    assert ("inputs_embeds" in str(certificate)) == (model.main_input_name == "input_ids")
    assert "equal to the bit in float32 with the given weights on the given inputs" in str(
        certificate
    )
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    assert not is_tied or "AutoModel where it returns one" in str(certificate)
    other = hub.example_inputs(model, seed=7)
    if attention == "sdpa":
        hub.save(after, tmp_path / "out", certificate)
        after = type(model).from_pretrained(tmp_path / "out")
        ties = [getattr(one.config, "tie_word_embeddings", None) for one in (after, model)]
        assert ties[0] == ties[1]
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["converted_from"]["to"] == "rescaled" and "weightless_norms" not in config
    assert torch.equal(run(after, other), run(model, other))


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "T5ForConditionalGeneration"]
)
def test_float16_is_finite(name):
    """It is not before (T5's own code cuts it off at 64504, and is wrong); after it is right."""
    model = made(name, large=True)
    x = hub.example_inputs(model, seed=0)
    after, certificate = rescale(model, x, 2.0**-8)
    assert certificate.ok
    expected = run(model, x)
    before = run(model.half(), x)
    if name.startswith("T5"):
        assert (before - expected).abs().max() > 0.2 * expected.abs().max()
    else:
        assert not before.isfinite().all()
    assert (run(after.half(), x) - expected).abs().max() < 0.02 * expected.abs().max()


def test_gains_that_would_be_rounded_are_refused():
    model = made("Gemma3ForCausalLM").bfloat16()
    with pytest.raises(FoldError, match=r"would round the gain by .*: save the source in float32"):
        rescale(model, hub.example_inputs(model, 0), 2.0**-6)


def test_after_rms(tmp_path):
    """The eps of its RMSNorms is in fold.json and in the config, and LayerNorms see it, too."""
    model = made("GPTNeoXForCausalLM")
    x = hub.example_inputs(model, seed=0)
    rms, _ = fold(model, analyze(model, x), untie=True)
    hub.save(rms, tmp_path / "rms")
    before = hub.load(tmp_path / "rms")
    after, certificate = rescale(before, x, 2.0**-6)
    assert certificate.ok and certificate.folded == 3
    hub.save(after, tmp_path / "out", certificate, inputs=x)
    other = hub.example_inputs(model, seed=7)
    expected = run(model, other)
    assert torch.equal(run(hub.load(tmp_path / "out"), other), run(before, other))
    for again in (
        type(model).from_pretrained(tmp_path / "out"),
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True),
    ):
        assert (run(again, other) - expected).abs().max() < 1e-5 * expected.abs().max()
    folded = json.loads((tmp_path / "out" / "config.json").read_text())["folded"]["norms"]
    assert folded == after.config.folded["norms"]
    assert {*folded.values()} == {before.gpt_neox.final_layer_norm.swap.eps * 2.0**-12}


@pytest.mark.parametrize(
    "forward",
    [
        # A mask has numbers 0 and 1, whatever is multiplied by it, before or after.
        lambda m, x: m.a(x) * (x > 0).double(),
        # Which of two numbers is larger, and which is larger than 0
        lambda m, x: torch.where(m.a(x) > m.b(x), m.a(x), m.b(x)),
        lambda m, x: torch.where(m.a(x) > 0, m.a(x), m.b(x)),
        lambda m, x: m.a(x).masked_fill(x > 0, torch.tensor(0.0)),
        lambda m, x: m.a(x) * torch.ones_like(m.a(x), dtype=torch.bool).cumsum(1),
    ],
)
def test_what_does_not_see_the_size(forward):
    x = (torch.randn(2, 3, C, dtype=torch.float64),)
    _, certificate = rescale(net(lambda m, x: m.out(m.ln(forward(m, x)))), x, 2.0**-6)
    assert certificate.ok and certificate.max_abs == 0 and certificate.parameters, str(certificate)
    assert "equal to the bit in float64 with the given weights on the given" in str(certificate)


@torch.no_grad()
def test_the_stream_alone_is_measured():
    """Activations in the MLP are none of it: they are named where float16 does not hold them."""
    model = made("LlamaForCausalLM")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight *= 1e7
    mlp.down_proj.weight *= 1e-7
    x = hub.example_inputs(model, seed=0)
    plan = plan_rescaling(Graph(model, x))
    named = r"stream is \d\.\S+ \(.*at most a quarter .*mlp.up_proj reads or returns \S+e\+0"
    with pytest.raises(FoldError, match=named):
        automatic_factor(model, [x], plan)
    embedding = model.model.embed_tokens.weight
    embedding *= 2.0**17 / embedding.abs().max()
    with pytest.warns(UserWarning, match="mlp.up_proj reads or returns"):
        assert automatic_factor(model, [x], plan) == 2.0**-4


@torch.no_grad()
def test_float16_weights_that_would_be_rounded_are_refused():
    """The algebra is exact, and what is written is not."""
    model = made("LlamaForCausalLM")
    for parameter in model.parameters():
        parameter *= 1.0037  # more bits than bfloat16 has
    model = model.half()
    x = hub.example_inputs(model, 0)
    with pytest.raises(FoldError, match=r"off by a relative .* in float16, .* factor nearer to 1"):
        rescale(model, x, 2.0**-12)
    _, certificate = rescale(model, x, 2.0**-4)
    assert certificate.ok and certificate.parameters
    with pytest.raises(FoldError, match=r"not finite in float16 .* save the source in float32"):
        rescale(made("LlamaForCausalLM", large=True).half(), x, 2.0**-8)


def test_refusals(tmp_path):
    opt = hf.OPTForCausalLM(hf.OPTConfig(**OPT, **WORDS)).eval()
    # Its second stage begins with a norm of the stream whose eps is in the code.
    stages = SWIN | dict(depths=[1, 1], num_heads=[2, 2])
    swin = hf.SwinForImageClassification(hf.SwinConfig(**stages)).eval()
    # One key of the config is the eps of a norm that these inputs do not run.
    across = MODELS["GPT2LMHeadModel"] | {"add_cross_attention": True}
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(**across)).eval()
    for model, named in (
        (opt, "the eps of 1e-05 of .*norm is in the code of OPTForCausalLM"),
        (swin, r"the eps of 1e-05 of \S*downsample.norm is in the code of Swin"),
        (gpt2, "ln_cross_attn takes its eps from layer_norm_epsilon .*--inputs=FILE"),
    ):
        with pytest.raises(FoldError, match=named):
            rescale(model, hub.example_inputs(model, 0), 2.0**-6)
    x = (torch.randn(2, 3, C, dtype=torch.float64),)
    for forward, named in (
        (lambda m, x: m.out(m.ln(m.a(x)).tanh() + m.ln2(m.b(x).exp())), "exp would not pass"),
        (lambda m, x: m.ln(x), "x, an input of the model, would not pass"),
        (lambda m, x: m.a(x), "no norm with an eps"),
    ):
        with pytest.raises(FoldError, match=named):
            rescale(net(forward), x, 2.0**-6)
    with pytest.raises(FoldError, match=r"factor=0\.3: it is a power of two"):
        rescale(net(lambda m, x: m.out(m.ln(m.a(x)))), x, 0.3)
    made("LlamaForCausalLM").save_pretrained(tmp_path)
    for words, named in ((["--factor=0.3"], "factor=0.3"), ([], "--text=FILE")):
        with pytest.raises(ConfigError, match=named):
            convert.main([str(tmp_path), "--to=rescaled", *words])


def test_the_factor_is_measured_on_a_text(tmp_path, capsys):
    """So that the largest number of the stream is at most a quarter of float16's range."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = made("LlamaForCausalLM", large=True)
    source, out, text = (tmp_path / name for name in ("llama", "out", "text.txt"))
    model.save_pretrained(source)
    words = {str(number): number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    text.write_text(" ".join(str(number % 50) for number in range(3000)))
    convert.main([str(source), "--to=rescaled", f"--text={text}", f"--out={out}"])
    assert "the residual stream times 2^-" in capsys.readouterr().out
    after = hub.load_pretrained(out)
    x = hub.example_inputs(model, seed=7)
    seen = []
    after.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert torch.equal(run(after, x), run(model, x))
    assert 65504 / 64 < seen[0].abs().max() < 65504 / 2
