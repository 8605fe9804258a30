"""coupled_impl=fold: the same function as scale, by other arithmetic.

python -m pytest tests/test_coupled_fold.py
"""

from dataclasses import replace

import pytest
import torch
from coupled_shape import IDX, SHAPE, TARGETS, gpt
from helpers import close

from common.errors import ConfigError
from model import GPT, FoldedBlock
from norm_plan import NormConfig

LLAMA = {"position": "rope", "activation": "swiglu", "n_kv_head": 1, "tie_embeddings": False}
CASES = [
    {},
    {"bias": True},
    {"activation": "gelu_tanh", "bias": True},
    {"activation": "relu2"},
    LLAMA,
    {**LLAMA, "bias": True, "qk_norm": "head"},
    {"coupled_span": 2},
    {"coupled_span": 0, "coupled_alpha": 1.3},
    {"coupled_first": 1, "norm_gain": "none"},
    {"coupled_calibrate": 5, "coupled_span": 3},
]


def same_loss_and_gradients(model: GPT, other: GPT) -> None:
    """Gradients to 1e-12 of the global norm."""
    found = [each(IDX, TARGETS)[0] for each in (model, other)]
    close(*found)
    for loss in found:
        loss.backward()
    size = torch.stack([parameter.grad.norm() for parameter in other.parameters()]).norm()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-12 * size


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_fold_is_scale_in_loss_and_every_gradient(keys):
    scale, fold = gpt(**keys), gpt(**keys, coupled_impl="fold")
    for name, buffer in scale.named_buffers():
        if name.endswith("alpha"):
            buffer.fill_(1.3)
    fold.load_state_dict(scale.state_dict())  # the same tensors under the same names
    folded = [isinstance(block, FoldedBlock) for block in fold.blocks]
    first = keys.get("coupled_first", 0)
    assert folded == [False] * first + [True] * (SHAPE.n_layer - first)
    assert not any(isinstance(block, FoldedBlock) for block in scale.blocks)
    same_loss_and_gradients(fold, scale)


@pytest.mark.parametrize("bias", [False, True])
def test_fold_compiles_to_one_graph_with_the_same_gradients(bias):
    torch._dynamo.reset()
    plain, compiled = gpt(bias=bias, n_layer=2), gpt(bias=bias, n_layer=2, coupled_impl="fold")
    # both ways to add are tested
    assert compiled.blocks[0].adds_in_products(torch.ones(1, 1, 16)) != bias
    compiled.compile(backend="aot_eager", fullgraph=True)
    same_loss_and_gradients(compiled, plain)


def test_auto_folds_where_there_are_many_tokens_to_a_channel():
    block = gpt(coupled_impl="auto").blocks[0]

    def forward(x):
        return x + 1, block.folds(x)

    compiled = torch.compile(forward, backend="eager", fullgraph=True, dynamic=False)
    for tokens, run, folds in ((100, compiled, True), (90, compiled, False), (100, forward, False)):
        assert run(torch.ones(1, tokens, 16))[1] == folds


def test_a_block_that_does_not_fold_is_the_plain_block():
    """coupled_impl=auto in eager mode: bit for bit."""
    assert torch.equal(gpt(coupled_impl="auto")(IDX), gpt()(IDX))


@pytest.mark.parametrize("impl", ["scale", "fold"])
def test_the_stream_in_autocasts_precision(impl):
    """residual=autocast: a bfloat16 stream under autocast, and a loss near float64's."""
    exact = gpt(coupled_impl=impl)(IDX, TARGETS)[0]
    model = gpt(coupled_impl=impl, residual="autocast").float()
    plain = model(IDX)
    types = []
    model.norm_f.register_forward_pre_hook(lambda place, words: types.append(words[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDX, TARGETS)[0]
        model.config = replace(model.config, residual="float32")
        model(IDX)
    assert types == [torch.bfloat16, torch.float32]
    assert abs(loss - exact) < 0.02 * exact
    assert torch.equal(model(IDX), plain)  # without autocast it makes no difference
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_fold_has_no_gradient_through_the_statistic():
    with pytest.raises(ConfigError, match="coupled_grad=detach"):
        NormConfig(norm_type="coupled", coupled_impl="fold", coupled_grad="full")
