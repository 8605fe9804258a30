"""fold/__init__.py on architectures of transformers: counts, and folds that are exact on random
weights.

Small configurations (repro/fold_models.py) whose gains, biases and means are all moved away from
their initial values. OPT has the twelve blocks of the paper's Table 3. More are in results/fold/.
"""

import pytest
import torch
from fold_nets import counts

pytest.importorskip("transformers")

from fold import analyze, fold
from repro.fold_models import MODELS, TABLE3, build

# name -> ((total, strict, untied, practical, inserted), (folded, inserted) by fold(untie=True,
# insert=True))
EXPECTED = {
    "opt": ((25, 25, 25, 25, 0), (25, 0)),
    "gpt2_lm": ((5, 0, 5, 5, 1), (5, 0)),  # the head is tied
    "bert": ((5, 1, 1, 5, 4), (1, 0)),  # post-norm: 4 centrings would fold 4 norms
    "bloom": ((6, 1, 1, 6, 1), (6, 1)),  # a norm after the embedding
    "falcon": ((5, 5, 5, 5, 0), (5, 0)),  # two norms of one input
    "stablelm": ((17, 17, 17, 17, 0), (17, 0)),  # a norm for each head of queries and keys
    "xglm": ((5, 0, 0, 5, 1), (5, 1)),  # sinusoidal positions in a buffer that is not saved
    "albert": ((5, 1, 1, 5, 4), (1, 0)),  # one layer, called again and again
    "mbart": ((14, 2, 2, 14, 2), (14, 2)),  # encoder and decoder
    "whisper": ((12, 7, 7, 12, 1), (10, 1)),  # GELU in the stem, in no module
    "wav2vec2": ((8, 2, 2, 7, 1), (7, 1)),
    "dinov2": ((5, 5, 5, 5, 0), (5, 0)),  # LayerScale
    "swin": ((11, 6, 6, 6, 0), (6, 0)),  # windows; patch merging joins channels
    "segformer": ((14, 4, 4, 14, 2), (14, 2)),
    "clip": ((11, 6, 6, 6, 0), (6, 0)),  # the picture's last states are an output
}
# Two blocks show what twelve do: gpt2_lm's are those of opt, and each of bert's has two norms,
# strictly foldable by the paper's rule.
SHALLOW = {"gpt2_lm": {"num_hidden_layers": 2}, "bert": {"num_hidden_layers": 2}}
OF_TEN_BLOCKS = {"bert": 20}


@pytest.mark.parametrize("name", EXPECTED)
def test_architecture(name, monkeypatch):
    expected, done = EXPECTED[name]
    family, kind, config = MODELS[name]
    monkeypatch.setitem(MODELS, name, (family, kind, {**config, **SHALLOW.get(name, {})}))
    model, inputs = build(name)
    model, inputs = (
        model.float(),
        torch.utils._pytree.tree_map(
            lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x, inputs
        ),
    )
    report = analyze(model, inputs)
    assert counts(report) == expected, str(report)
    certificate = fold(model, report, untie=True, insert=True)[1]
    assert certificate.ok and (certificate.folded, certificate.inserted) == done, str(certificate)
    assert certificate.max_rel <= 1e-13 and certificate.checks[-1].max_rel <= 2e-6, str(certificate)
    assert len(certificate.refusals) == report.total - done[0]
    if name in TABLE3:
        paper = report.by("paper")
        found = (paper.total, paper.strict, paper.practical)
        missing = OF_TEN_BLOCKS.get(name, 0)
        assert found == tuple(count and count - missing for count in TABLE3[name])
