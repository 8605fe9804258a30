"""coupled_impl=fold: the same function as scale, by other arithmetic.

python -m pytest tests/test_coupled_fold.py
"""

from dataclasses import replace

import pytest
import torch
from coupled_shape import IDX, SHAPE, TARGETS
from helpers import TINY, close, losses, shake

from common.errors import ConfigError
from model import GPT, FoldedBlock
from norm_plan import NormConfig
from norms import Place, SharedRMSNorm

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


def gpt(**keys) -> GPT:
    return shake(GPT(replace(SHAPE, **keys)))


def loss_and_gradients(model, **compilation):
    forward = torch.compile(model, **compilation) if compilation else model
    loss, _ = forward(IDX, TARGETS)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def same_gradients(ours: dict, theirs: dict, tolerance: float = 1e-12) -> None:
    """Relative to the global gradient norm."""
    size = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    assert ours.keys() == theirs.keys() and size > 0.1
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() <= tolerance * size, name


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
    (loss, gradients), (loss_scale, gradients_scale) = (
        loss_and_gradients(fold),
        loss_and_gradients(scale),
    )
    close(loss, loss_scale)
    same_gradients(gradients, gradients_scale)


@pytest.mark.parametrize("bias", [False, True])
def test_fold_compiles_to_one_graph_with_the_same_gradients(bias):
    torch._dynamo.reset()
    plain, compiled = gpt(bias=bias, n_layer=2), gpt(bias=bias, n_layer=2, coupled_impl="fold")
    # both ways to add are tested
    assert compiled.blocks[0].adds_in_products(torch.ones(1, 1, 16)) != bias
    loss, gradients = loss_and_gradients(compiled, backend="aot_eager", fullgraph=True)
    loss_plain, gradients_plain = loss_and_gradients(plain)
    close(loss, loss_plain)
    same_gradients(gradients, gradients_plain)


def test_generation_is_the_same():
    idx = IDX[:, :3]
    assert torch.equal(gpt().generate(idx, 12, 0), gpt(coupled_impl="fold").generate(idx, 12, 0))


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


def test_a_deferred_norm_leaves_its_scale_to_the_caller():
    norm = SharedRMSNorm(4, alpha=0.5)
    x, delta = torch.randn(2, 1, 3, 4)
    inv_rms = torch.rand(1, 3, 1)
    place = Place(norm)
    y, h, handed_on = place(x, delta, inv_rms, defer=True)
    assert torch.equal(y, x + delta) and torch.equal(h, y) and handed_on is inv_rms
    close(y * norm.scale(inv_rms) * norm.weight, place(x, delta, inv_rms)[0])


@pytest.mark.parametrize("impl", ["scale", "fold"])
def test_the_stream_in_autocasts_precision(impl):
    """residual=autocast: a bfloat16 stream under bfloat16 autocast, and a loss near float64's; else
    nothing.
    """
    exact = gpt(coupled_impl=impl)(IDX, TARGETS)[0]
    found = {}
    for residual in ("float32", "autocast"):
        model = gpt(coupled_impl=impl, residual=residual).float()
        with torch.autocast("cpu", torch.bfloat16):
            x = model.dropout(
                model.wte(IDX).to(torch.bfloat16 if residual == "autocast" else torch.float32)
            )
            stream = model.blocks[0](x, None, None, None, None)[0]
            found[residual] = model(IDX, TARGETS)[0]
        assert stream.dtype == x.dtype
        found[residual].backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert abs(found[residual].item() - exact.item()) < 0.02 * exact.item()
        assert torch.equal(model(IDX, TARGETS)[0], gpt(coupled_impl=impl).float()(IDX, TARGETS)[0])
    assert found["float32"] != found["autocast"]


def test_training_is_the_same_and_checkpoints_are_interchangeable(train_ok, tiny_data, tmp_path):
    """float64 steps through train.py with accumulation; half of them in one form, the rest in the
    other.
    """

    def run(name: str, impl: str, steps: int) -> None:
        train_ok(
            *TINY,
            f"--max_iters={steps}",
            "--dtype=float64",
            "--bias=True",
            "--norm_type=coupled",
            "--lr_schedule=constant",
            f"--coupled_impl={impl}",
            f"--data_dir={tiny_data}",
            f"--out_dir={tmp_path / name}",
            ranks=2,
        )

    run("scale", "scale", 40)
    run("both", "scale", 20)
    run("both", "fold", 40)
    run("fold", "fold", 40)
    scale, fold, both = (losses(tmp_path / name) for name in ("scale", "fold", "both"))
    assert len(scale) == 40 and scale[40] < 0.95 * scale[1]
    assert scale.keys() == fold.keys() == both.keys()
    assert max(abs(scale[step] - fold[step]) for step in scale) <= 1e-10
    assert max(abs(scale[step] - both[step]) for step in scale) <= 1e-10


def test_fold_has_no_gradient_through_the_statistic():
    with pytest.raises(ConfigError, match="coupled_grad=detach"):
        NormConfig(norm_type="coupled", coupled_impl="fold", coupled_grad="full")
