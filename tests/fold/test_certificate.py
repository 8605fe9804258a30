"""fold/certificate.py: what it lets pass, what it does not, and what it tells."""

import copy
import json

import pytest
import torch
from helpers import draw
from torch import nn

from fold.certificate import certify, fresh_inputs, randomize, run, tensor_hash


class Head(nn.Module):
    """LayerNorm after a linear, then logits; some of it in float32, as in many models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "logits": self.head(
                self.norm(self.inner(x)).float().softmax(-1, dtype=torch.float32).type_as(x)
            )
        }


def centered(model: nn.Module) -> nn.Module:
    after = copy.deepcopy(model)
    with torch.no_grad():
        after.inner.weight -= after.inner.weight.mean(0, keepdim=True)
        after.inner.bias -= after.inner.bias.mean()
    return after


def without_bias(model: nn.Module) -> nn.Module:
    """Wrong, but not on initial weights, where the norm's bias is 0."""
    after = centered(model)
    with torch.no_grad():
        after.norm.bias.zero_()
    return after


def test_exact_conversion():
    model, x = Head(), draw(3, 8, dtype=torch.float32)
    after, certificate = certify(model, centered, (x,), what="centring")
    assert certificate.ok and certificate.max_rel < 1e-13
    assert [check.dtype for check in certificate.checks] == ["float64"] * 4 + ["float32"]
    assert certificate.checks[-1].max_rel < 2e-6
    assert all(
        abs(check.kl) < 1e-12 and check.argmax_agreement == 1 for check in certificate.checks[:4]
    )
    assert certificate.parameters.keys() == {"inner.weight", "inner.bias"}
    hashes = certificate.parameters["inner.weight"]
    assert hashes == {
        "before": tensor_hash(model.inner.weight),
        "after": tensor_hash(after.inner.weight),
    }
    told = json.loads(certificate.to_json())
    assert told["ok"] and told["environment"]["versions"]["torch"] == torch.__version__
    assert "exact" in str(certificate)


def test_a_mistake_that_initial_weights_hide():
    x = draw(3, 8, dtype=torch.float32)
    certificate = certify(Head(), without_bias, (x,))[1]
    assert (
        not certificate.ok and certificate.max_rel > 1e-4 and "random weights" in certificate.reason
    )
    assert "NOT exact" in str(certificate)
    assert certify(Head(), without_bias, (x,), random_weights=False)[1].ok
    assert certify(Head(), without_bias, (x,), keep=("norm.bias",))[1].ok


def test_exact_in_float64_alone_is_not_enough():
    """Rounded to float32, 1e4 in every weight of a linear leaves little of what the norm behind it
    reads.
    """

    def uncentered(model: nn.Module) -> nn.Module:
        after = copy.deepcopy(model)
        with torch.no_grad():
            after.inner.weight += 1e4
        return after

    certificate = certify(Head(), uncentered, (draw(3, 8, dtype=torch.float32),), tolerance=1e-9)[1]
    assert certificate.max_rel <= 1e-9 and not certificate.ok
    assert (
        "in float32, 2e-06 is allowed" in certificate.reason and certificate.own_tolerance == 2e-6
    )


def test_a_model_that_rounds_more_is_allowed_more():
    class Rough(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.inner(x) + 1e2 - 1e2))

    x = draw(3, 8, dtype=torch.float32)
    certificate = certify(Rough(), centered, (x,))[1]
    assert certificate.ok and certificate.own_tolerance > 1e-5 > certificate.own_tolerance / 40
    assert 2e-6 < certificate.checks[-1].max_rel <= certificate.own_tolerance
    plain = certify(Head(), centered, (x,))[1]
    assert plain.ok and plain.own_tolerance == 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    model, x = Head().to(dtype), draw(3, 8, dtype=dtype)
    certificate = certify(model, centered, (x,))[1]
    assert certificate.ok and certificate.checks[-1].dtype == str(dtype).removeprefix("torch.")
    assert certificate.own_tolerance == pytest.approx(16.8 * torch.finfo(dtype).eps, rel=0.01)


def test_nan_is_not_exact():
    class Nan(Head):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)["logits"] * float("nan")

    certificate = certify(Nan(), centered, (draw(3, 8, dtype=torch.float32),))[1]
    assert not certificate.ok and certificate.checks[0].kl is None
    assert json.loads(certificate.to_json())["max_rel"] is None


def test_model_and_random_stream_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before, x = copy.deepcopy(model.state_dict()), draw(4, 8, dtype=torch.float32)
    state = torch.get_rng_state()
    certificate = certify(model, copy.deepcopy, (x,))[1]
    # the same dropout on both sides
    assert certificate.ok and certificate.max_abs == 0 and not certificate.parameters
    assert all(
        torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values())
    )
    assert torch.equal(state, torch.get_rng_state()) and torch.get_default_dtype() is torch.float32


def test_random_weights_have_no_zero_means():
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    nn.init.zeros_(model[0].weight)
    randomize(model, keep=("2.bias",))
    assert all(
        abs(float(p.detach().mean(axis).abs().min())) > 1e-4
        for p in model.parameters()
        for axis in range(p.dim())
        if p.dim() > 1
    )
    assert not torch.equal(model[1].bias, torch.zeros(6)) and model[1].weight.std() > 0.05


def test_fresh_inputs():
    ids, mask, x = torch.tensor([[3, 9, 4, 11]]), torch.tensor([[1, 1, 1, 0]]), draw(40, 30) * 2 + 5
    fresh = fresh_inputs({"ids": ids, "mask": mask, "x": x, "flag": True})
    assert (
        set(fresh["ids"].flatten().tolist()) <= {3, 9, 4, 11}
        and torch.equal(fresh["mask"], mask)
        and fresh["flag"]
    )
    assert (
        abs(fresh["x"].mean() - 5) < 0.3
        and abs(fresh["x"].std() - 2) < 0.2
        and not torch.equal(fresh["x"], x)
    )


def test_casts_are_widened():
    model = Head().double()
    x = draw(2, 8)
    assert run(model, (x,))["logits"].dtype is torch.float64
    assert (
        run(model, (x,))["logits"].sub(run(model, (x,), widen=False)["logits"]).abs().max() > 1e-10
    )
