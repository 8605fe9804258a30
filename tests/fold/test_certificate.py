"""fold/certificate.py: what it lets pass, what it does not, and what it tells."""

import copy
import json

import pytest
import torch
from helpers import draw
from torch import nn

from fold.certificate import certify, fresh_inputs, randomize, weights_hash

X = draw(3, 8, dtype=torch.float32)


class Head(nn.Module):
    """LayerNorm after a linear; some of it in float32, as in many models."""

    def __init__(self, change=lambda y: y, shift=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 5)
        self.change = change
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.inner(x) + self.shift - self.shift)
        return self.change(self.head(h.float().softmax(-1, dtype=torch.float32).type_as(x)))


@torch.no_grad()
def centered(model: nn.Module) -> nn.Module:
    after = copy.deepcopy(model)
    after.inner.weight -= after.inner.weight.mean(0, keepdim=True)
    after.inner.bias -= after.inner.bias.mean()
    return after


@torch.no_grad()
def without_bias(model: nn.Module) -> nn.Module:
    """Wrong, but not on initial weights, where the norm's bias is 0."""
    after = centered(model)
    after.norm.bias.zero_()
    return after


@torch.no_grad()
def shifted(model: nn.Module) -> nn.Module:
    """Right in float64. In float32 1e6 leaves little of the weights."""
    after = copy.deepcopy(model)
    after.inner.weight += 1e6
    return after


def nan(model: nn.Module) -> nn.Module:
    after = copy.deepcopy(model)
    after.change = lambda y: y * float("nan")
    return after


def test_exact_conversion():
    certificate = certify(Head(), centered, (X,), what="centring")[1]
    assert certificate.ok and certificate.max_rel < 1e-13
    assert [check.dtype for check in certificate.checks] == ["float64"] * 4 + ["float32"]
    assert certificate.checks[-1].max_rel < 2e-6 == certificate.checks[-1].tolerance
    assert certificate.parameters == ["inner.weight", "inner.bias"]
    told = json.loads(certificate.to_json())
    assert told["ok"] and told["environment"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("convert", "named"), [(without_bias, "random"), (shifted, "in float32"), (nan, "inf")]
)
def test_what_is_not_exact(convert, named):
    certificate = certify(Head(), convert, (X,))[1]
    assert not certificate.ok and named in certificate.reason and "NOT exact" in str(certificate)
    assert certify(Head(), convert, (X,), random_weights=False)[1].ok == (convert is without_bias)


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.float32, 1e2), (torch.bfloat16, 0.0), (torch.float16, 0.0)]
)
def test_a_model_that_rounds_more_is_allowed_more(dtype, shift):
    certificate = certify(Head(shift=shift).to(dtype), centered, (X.to(dtype),))[1]
    own = certificate.checks[-1]
    assert certificate.ok and own.dtype == str(dtype).removeprefix("torch.")
    assert own.max_rel <= own.tolerance
    least = 16.8 * torch.finfo(dtype).eps
    assert own.tolerance > 2 * least if shift else own.tolerance == pytest.approx(least, rel=0.01)


def test_model_and_random_stream_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    certificate = certify(model, copy.deepcopy, (X,))[1]
    # the same dropout on both sides
    assert certificate.ok and certificate.max_abs == 0 and not certificate.parameters
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_default_dtype() is torch.float32


def test_random_weights_have_no_zero_means():
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    nn.init.zeros_(model[0].weight)
    mask = torch.tensor([[0, -torch.inf]])
    model.mask = nn.Parameter(mask.clone())  # as in swin_transformer_pytorch
    randomize(model)
    assert torch.equal(model.mask, mask)
    for weight in (model[0].weight, model[2].weight):
        assert min(weight.mean(0).abs().min(), weight.mean(1).abs().min()) > 1e-4
    assert model[1].bias.abs().max() > 0 and model[1].weight.std() > 0.05


def test_fresh_inputs():
    ids, mask, x = torch.tensor([[3, 9, 4, 11]]), torch.tensor([[1, 1, 1, 0]]), draw(40, 30) * 2 + 5
    fresh = fresh_inputs({"ids": ids, "mask": mask, "x": x, "flag": True})
    assert set(fresh["ids"].flatten().tolist()) <= {3, 9, 4, 11} and fresh["flag"]
    assert torch.equal(fresh["mask"], mask) and not torch.equal(fresh["x"], x)
    assert abs(fresh["x"].mean() - 5) < 0.3 and abs(fresh["x"].std() - 2) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_certificate_says_how_far_off_what_is_written_is(dtype):
    """From the float64 original, beside the original in its own type."""
    model, x = Head().to(dtype), X.to(dtype)
    after, certificate = certify(model, centered, (x,))
    exact = copy.deepcopy(model).double()(x.double())
    own, stored = (one.double() for one in (after(x), copy.deepcopy(after).double()(x.double())))
    written = certificate.written
    for told, output in (
        (written.before, model(x).double()),
        (written.after, own),
        (written.after_float64, stored),
    ):
        off = (output - exact).abs().max() / exact.abs().max()
        # Where the model casts to float32, float64 is exact only in the certificate.
        assert told == pytest.approx(off.item(), rel=0.1, abs=1e-7)
    assert f"in {written.dtype}: off from the float64 original" in str(certificate)
    assert certificate.examples == {"0": f"{written.dtype} (3, 8)"} and certificate.seed
    assert certificate.weights == {"before": weights_hash(model), "after": weights_hash(after)}
    assert weights_hash(model) != weights_hash(after)
