"""fold/__init__.py on architectures of transformers: counts, and folds that are exact on random
weights.

Small configurations (repro/fold_models.py) whose gains, biases and means are all moved away from
their initial values. The first six have the full number of layers of the paper's Table 3. More are
in results/fold/.
"""

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

pytest.importorskip("transformers")

from fold import analyze, fold, hub, parametrize_cbwc
from fold.certificate import randomize
from fold.modules import FoldedNorm
from repro.fold_models import MODELS, TABLE3, build, hf

# name -> ((total, strict, untied, practical, inserted), (folded, inserted) by fold(untie=True,
# insert=True))
EXPECTED = {
    "gpt2": ((25, 25, 25, 25, 0), (25, 0)),
    "opt": ((25, 25, 25, 25, 0), (25, 0)),
    "gpt2_lm": ((5, 0, 5, 5, 1), (5, 0)),  # the head is tied
    "opt_lm": ((5, 0, 5, 5, 1), (5, 0)),
    "bert": ((25, 1, 1, 25, 24), (1, 0)),  # post-norm: 24 centrings would fold 24 norms
    "vit": ((25, 25, 25, 25, 0), (25, 0)),  # class token and positions are centred as parameters
    "phi": ((25, 25, 25, 25, 0), (25, 0)),
    "bloom": ((6, 1, 1, 6, 1), (6, 1)),  # a norm after the embedding
    "gpt_neox": ((5, 5, 5, 5, 0), (5, 0)),  # parallel residuals
    "falcon": ((5, 5, 5, 5, 0), (5, 0)),  # two norms of one input
    "stablelm": ((17, 17, 17, 17, 0), (17, 0)),  # a norm for each head of queries and keys
    "olmo": ((5, 5, 5, 5, 0), (5, 0)),  # norms without gains, in float32 inside
    "xglm": ((5, 0, 0, 5, 1), (5, 1)),  # sinusoidal positions in a buffer that is not saved
    "albert": ((5, 1, 1, 5, 4), (1, 0)),  # one layer, called again and again
    "fnet": ((5, 1, 1, 3, 2), (1, 0)),  # Fourier transforms
    "mbart": ((14, 2, 2, 14, 2), (14, 2)),  # encoder and decoder
    "whisper": ((12, 7, 7, 12, 1), (12, 1)),  # GELU in the stem
    "wav2vec2": ((8, 2, 2, 7, 1), (7, 1)),
    "ast": ((5, 5, 5, 5, 0), (5, 0)),
    "dinov2": ((5, 5, 5, 5, 0), (5, 0)),  # LayerScale
    "beit": ((5, 5, 5, 5, 0), (5, 0)),
    "swin": ((11, 6, 6, 6, 0), (6, 0)),  # windows; patch merging joins channels
    "swinv2": ((11, 10, 10, 10, 0), (10, 0)),
    "convnext": ((7, 1, 1, 1, 0), (1, 0)),  # depthwise convolutions
    "segformer": ((14, 4, 4, 14, 2), (14, 2)),
    "clip": ((11, 6, 6, 6, 0), (6, 0)),  # the picture's last states are an output
}
# their blocks are those of gpt2 and opt
SHALLOW = {"gpt2_lm": {"n_layer": 2}, "opt_lm": {"num_hidden_layers": 2}}


@pytest.mark.parametrize("name", EXPECTED)
def test_architecture(name, monkeypatch):
    counts, done = EXPECTED[name]
    family, config, kind = MODELS[name]
    monkeypatch.setitem(MODELS, name, (family, {**config, **SHALLOW.get(name, {})}, kind))
    model, inputs = build(name)
    model, inputs = (
        model.float(),
        tree_map(
            lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x, inputs
        ),
    )
    report = analyze(model, inputs)
    found = report.total, report.strict, report.untied, report.practical, report.inserted
    assert found == counts, str(report)
    assert report.worth == (report.practical - report.strict > report.inserted)
    certificate = fold(model, report, untie=True, insert=True)[1]
    assert certificate.ok and (certificate.folded, certificate.inserted) == done, str(certificate)
    assert certificate.max_rel <= 1e-13 and certificate.checks[-1].max_rel <= 2e-6, str(certificate)
    assert (
        certificate.checks[-1].dtype == "float32"
        and len(certificate.refusals) == report.total - done[0]
    )
    if name in TABLE3:
        paper = report.by("paper")
        assert (paper.total, paper.strict, paper.practical) == TABLE3[name]


def test_initial_bert_is_not_another_model():
    """Initial gains are all 1; the verdicts are those of trained weights all the same."""
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=50,
    )
    model, ids = hf.BertModel(config).eval(), torch.randint(3, 50, (2, 7))
    assert [
        analyze(model, {"input_ids": ids}, trained=trained).strict for trained in (True, False)
    ] == [1, 5]


def gpt2(train: bool = False, layers: int = 2) -> tuple[nn.Module, dict]:
    """GPT-2 with a tied head, without dropout, in float64."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=4,
        n_positions=16,
        vocab_size=50,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = hf.GPT2LMHeadModel(config).double().train(train)
    randomize(model)
    return model, {"input_ids": torch.randint(3, 50, (4, 8)), "use_cache": False}


def train(model: nn.Module, inputs: dict) -> Tensor:
    """Losses of 50 AdamW steps with weight decay and clipping."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    for _ in range(50):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_cbwc_trains_gpt2_as_layer_norm_does():
    """Appendix H.4: losses and parameters, 50 steps in float64; the tied head stays tied."""
    model, inputs = gpt2(train=True)
    cbwc = parametrize_cbwc(model, analyze(model, inputs))
    assert sum(isinstance(module, FoldedNorm) for module in cbwc.modules()) == 5
    initial = copy.deepcopy(model.state_dict())
    ours, theirs = train(cbwc, inputs), train(model, inputs)
    assert theirs[-1] < theirs[0] - 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    trained = {
        name.replace("parametrizations.", "").removesuffix(".original"): value
        for name, value in cbwc.named_parameters()
    }
    torch.testing.assert_close(trained, dict(model.named_parameters()), rtol=0, atol=1e-10)
    assert all(
        (value - initial[name]).abs().max() > 1e-3 for name, value in model.named_parameters()
    )


def test_gpt2_after_a_fold(tmp_path):
    """float32, untied: compiled by inductor, saved and loaded with and without fold.hub,
    fine-tuned.
    """
    model, inputs = gpt2(layers=1)
    model = model.float()
    untied, certificate = fold(model, analyze(model, inputs), untie=True)
    assert certificate.ok and certificate.folded == 3 and model.config.tie_word_embeddings
    with torch.no_grad():
        expected = untied(**inputs).logits
        if shutil.which("g++"):
            compiled = torch.compile(untied, backend="inductor")
            torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=0, atol=1e-5)
            torch.compiler.reset()
        hub.save(untied, tmp_path)
        assert torch.equal(hub.load(tmp_path)(**inputs).logits, expected)
        # LayerNorms again, and not tied
        theirs = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(theirs(**inputs).logits, expected, rtol=0, atol=1e-5)
    losses = train(untied.train(), inputs)
    assert losses.isfinite().all() and losses[-1] < losses[0] - 1
