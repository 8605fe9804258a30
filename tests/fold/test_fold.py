"""fold/__init__.py on hand-written modules: what folds, what must be refused and why, and what
comes after a fold.

Every expectation is a table of counts and a certificate in float64 on random weights; nothing here
needs a download.
"""

import copy
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fold_nets import C, counts, folded, net
from helpers import close, draw
from torch import nn

from common.errors import FoldError
from fold import analyze, fold, fold_gains, parametrize_cbwc
from fold.certificate import run
from fold.modules import FoldedNorm

X = draw(2, 4, C)
IDS = torch.arange(11)[None]


def in_place(m, x):
    h = m.a(x)
    h += m.b(x)
    h.mul_(2.0)
    return m.out(m.ln(h))


def layer_scale(m, x):
    h = m.emb + m.gain * m.a(x)
    return m.out(m.ln2(h + m.b(m.ln(h).relu())))


def channels_first(m, x):
    h = m.conv(x.transpose(1, 2).unsqueeze(-1))  # (B, T, C) -> (B, C, T, 1)
    return m.out(m.ln(F.avg_pool2d(F.pad(h, (0, 0, 1, 1)), (2, 1)).squeeze(-1).transpose(1, 2)))


def rnn_cell(m, x):
    h = x[:, 0]
    for t in range(3):  # appendix C.2.1: the same two matrices at every step
        h = torch.tanh(m.ln(m.a(x[:, t]) + m.b(h)))
    return m.out(h)


def class_token(m, x):
    h = torch.cat([m.emb.expand(x.shape[0], 1, C), m.a(x)], 1) + m.pos[:, : x.shape[1] + 1]
    return m.out(m.ln(torch.roll(h, 1, 1)[:, 0]))


def head_norm(m, x):
    # one LayerNorm for each head of C / 2
    heads = m.a(x).view(*x.shape[:-1], 2, C // 2).transpose(1, 2)
    return m.out(m.norm(heads).transpose(1, 2).flatten(-2))


def without_gradients(m, x):
    with torch.no_grad():
        return m.out(m.ln(m.a(x)))


INDEX = torch.tensor([0, 2, 1, 1])


def write_rows(m, x):
    h = m.a(x)
    h[:, 0] += m.b(x)[:, 0]
    h[:, 1] = m.token
    h[:, 2:] = m.b(x)[:, 2:]
    h[:, 3] = 0
    return h


def add_to_turned(m, x):
    """The exporter makes the view again in the norm's module: it is no operation of the norm."""
    y = m.a(x).transpose(1, 2)
    y += m.b(x).transpose(1, 2)
    return y.transpose(1, 2)


def read_a_shape(m, x):
    h = m.a(x)
    return h.type_as(x) + torch.zeros_like(h).expand_as(h)


ROWS = {
    "rows written in place": write_rows,
    "adds in place to a turned tensor": add_to_turned,
    "a shape and a type are read": read_a_shape,
    "tokens pooled": lambda m, x: F.avg_pool2d(m.a(x)[:, None], (2, 1))[:, 0],
    "einsum": lambda m, x: torch.einsum("btc,dc->btd", x, m.a.weight),
    "einsum of heads": lambda m, x: torch.einsum("bthd,hdc->btc", x.unflatten(-1, (2, -1)), m.w),
    "lerp": lambda m, x: torch.lerp(m.a(x), m.b(x), 0.3),
    "baddbmm": lambda m, x: torch.baddbmm(m.a(x), x, m.b.weight.expand(2, C, C)),
    "index_add": lambda m, x: m.a(x).index_add(1, m.index, m.b(x)),
    "scatter_add": lambda m, x: m.a(x).scatter_add(-2, m.index[:, None].expand_as(x), m.b(x)),
    "masked_scatter": lambda m, x: m.a(x).masked_scatter(x[..., :1] > 0, m.b(x)),
    "with a mask of all": lambda m, x: m.a(x).masked_scatter((x[..., :1] > 0).expand_as(x), m.b(x)),
}

FOLDS = {
    "called by its second name": (net(lambda m, x: m.out(m.again(m.a(x))), again=None), 1),
    "an attribute of the norm is read": (
        net(lambda m, x: m.out(m.ln(m.a(x)) if m.ln.elementwise_affine else x)),
        1,
    ),
    "a forward without gradients": (net(without_gradients), 1),
    **{
        name: (
            net(
                lambda m, x, rows=rows: m.out(m.ln(rows(m, x))),
                w=nn.Parameter(torch.randn(2, C // 2, C)),
                index=INDEX,
                token=nn.Parameter(torch.randn(C)),
            ),
            1,
        )
        for name, rows in ROWS.items()
    },
    "in-place adds and scaling": (net(in_place), 1),
    "LayerScale": (
        net(layer_scale, emb=nn.Parameter(torch.randn(1, 1, C)), gain=nn.Parameter(torch.rand(C))),
        2,
    ),
    "LayerScale, its gain in a view": (
        net(
            lambda m, x: m.out(m.ln(m.a(x) + m.gain.view(1, 1, C) * m.b(x))),
            gain=nn.Parameter(torch.rand(C)),
        ),
        1,
    ),
    "convolution, padding, pooling": (net(channels_first, conv=nn.Conv2d(C, C, 1)), 1),
    "recurrent cell": (net(rnn_cell), 3),
    "LSTM and a projection": (
        net(lambda m, x: m.out(m.ln(m.a(m.lstm(x)[0]))), lstm=nn.LSTM(C, C)),
        1,
    ),
    "class token, positions": (
        net(
            class_token,
            emb=nn.Parameter(torch.randn(1, 1, C)),
            pos=nn.Parameter(torch.randn(1, 9, C)),
        ),
        1,
    ),
    "norm of each head": (net(head_norm, norm=nn.LayerNorm(C // 2)), 1),
    "GroupNorm": (net(lambda m, x: m.out(m.norm(m.a(x[:, 0]))), norm=nn.GroupNorm(2, C)), 1),
    "attention": (
        net(
            lambda m, x: m.out(m.ln(m.mha(x, x, x, need_weights=False)[0])),
            mha=nn.MultiheadAttention(C, 2, batch_first=True),
        ),
        1,
    ),
    "no gain above": (
        net(
            lambda m, x: m.out(m.ln(m.plain(x) + m.a(x))),
            plain=nn.LayerNorm(C, elementwise_affine=False),
        ),
        1,
    ),
    "masked rows": (net(lambda m, x: m.out(m.ln(m.a(x).masked_fill(x[..., :1] > 0, 0)))), 1),
    "shared by two places that fold": (
        net(lambda m, x: m.out(m.ln(m.a(x)) + m.ln2(m.a(x.relu())))),
        2,
    ),
    "its own softmax": (net(lambda m, x: m.out(m.ln(h := m.a(x)) + h.softmax(-1))), 1),
}


FOLDS["called by its second name"][0].again = FOLDS["called by its second name"][0].ln


@pytest.mark.parametrize("name", FOLDS)
def test_folds(name):
    model, number = FOLDS[name]
    before = copy.deepcopy(model.state_dict())
    after, certificate = folded(model, (X,), number)
    assert after.state_dict().keys() == before.keys() and certificate.parameters
    # a copy was folded
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    unfolded = copy.deepcopy(model)
    # the weights are right for the LayerNorm model, too
    unfolded.load_state_dict(after.state_dict())
    x = (draw(2, 4, C, seed=1),)
    torch.testing.assert_close(run(unfolded, x), run(model, x), rtol=0, atol=1e-12)


def concatenated(m, x):
    return m.out(m.ln(torch.cat([m.a(x)[..., : C // 2], m.b(x)[..., : C // 2]], -1)))


def write(part, value):
    """Return a forward that writes into a part of the norm's input."""

    def forward(m, x):
        h = m.a(x)
        h[part] = value(m, h)
        return m.out(m.ln(h))

    return net(forward)


def double_use(m, x):
    h = m.a(x)
    return m.out(m.ln(h @ h.transpose(-1, -2) @ h))


FIRST = (slice(None), 0)
GAIN = {  # merges into nothing: it is on what has no weights, or not only weights
    "norm": lambda m, x: m.gain * m.plain(x) + m.a(x),
    "norm and linear": lambda m, x: m.gain * (m.plain(x) + m.a(x)),
    "norm with a bias": lambda m, x: m.gain * F.layer_norm(x, (C,), None, m.bias),
    "centring": lambda m, x: m.gain * (x - x.mean(-1, keepdim=True)),
}
REFUSED = {
    **{
        f"gain of a {name}": (
            net(
                lambda m, x, rows=rows: m.out(m.ln(rows(m, x))),
                gain=nn.Parameter(torch.rand(C)),
                bias=nn.Parameter(torch.randn(C)),
                plain=nn.LayerNorm(C, elementwise_affine=False),
            ),
            "mul is not known",
        )
        for name, rows in GAIN.items()
    },
    "channels written": (write((..., 0), lambda m, h: h[:, :, 1]), "select_scatter"),
    "one number written": (write(FIRST, lambda m, h: 1), "is not known to keep a zero mean"),
    "an activation written": (write(FIRST, lambda m, h: h[:, 1].relu()), "relu"),
    "channels pooled": (
        net(lambda m, x: m.out(m.ln(F.avg_pool2d(m.a(x)[:, None], (1, 2))[:, 0].repeat(1, 1, 2)))),
        "repeat",
    ),
    "one of several results": (net(lambda m, x: m.out(m.ln(m.a(x).max(1)[0]))), "max is not known"),
    "input also to a linear": (net(lambda m, x: m.out(m.ln(h := m.a(x)) + h)), "linear in out"),
    "input also to a ReLU": (net(lambda m, x: m.out(m.ln(h := m.a(x)) + h.relu())), "relu"),
    "input also to the output": (
        net(lambda m, x: (m.out(m.ln(h := m.a(x))), h)),
        "the model's output",
    ),
    "in-place activation": (net(lambda m, x: m.out(m.ln(m.a(x).relu_()))), "relu"),
    "concatenated channels": (net(concatenated), "cat is not known"),
    "depthwise convolution": (
        net(
            lambda m, x: m.out(m.ln(m.conv(x.transpose(1, 2)).transpose(1, 2))),
            conv=nn.Conv1d(C, C, 1, groups=C),
        ),
        "conv1d",
    ),
    "RMSNorm above": (net(lambda m, x: m.out(m.ln(m.rms(m.a(x)))), rms=nn.RMSNorm(C)), "rms_norm"),
    "another number for every channel": (
        net(lambda m, x: m.out(m.ln(m.a(x) * x))),
        "mul is not known",
    ),
    "a layer that multiplies itself": (net(double_use), "matmul"),
    "one number added to a row": (
        net(lambda m, x: m.out(m.ln(m.a(x) + x[..., :1]))),
        "add is not known",
    ),
    "a weight that is used as a matrix, too": (
        net(lambda m, x: m.out(m.ln(m.a(x))) + (x @ m.a.weight).sum(-1, keepdim=True)),
        "centring a.weight",
    ),
    "proj_size feeds back": (
        net(lambda m, x: m.out(m.ln(m.lstm(x)[0])), lstm=nn.LSTM(C, 2 * C, proj_size=C)),
        "lstm",
    ),
    "one call of a norm": (net(lambda m, x: m.out(m.ln(m.a(x)) + m.ln(x.relu()))), "another call"),
    "mean over two axes": (
        net(lambda m, x: m.out(m.ln3(m.a(x)).flatten(-1)), ln3=nn.LayerNorm([4, C])),
        "2 axes",
    ),
    "statistics of positions": (
        net(lambda m, x: m.out(m.ln(m.gn(m.a(x)))), gn=nn.GroupNorm(2, 4)),
        "group_norm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, why = REFUSED[name]
    report = analyze(model, (X,))
    assert counts(report)[1:3] == (0, 0) and not report.worth, str(report)
    assert any(why in row.reason for row in report.rows), str(report)
    after, certificate = fold(model, report, untie=True, insert=True)
    assert certificate.ok and certificate.folded == 0 and not certificate.parameters
    assert certificate.refusals == {row.name: row.reason for row in report.rows}
    assert not any(isinstance(module, FoldedNorm) for module in after.modules())


# rows of a norm's input, of which the example shows one part alone; how many norms fold
HIDDEN = {
    "rows": (lambda m, x: torch.where(x[..., :1] > 50, m.b(x), m.a(x)), 1),
    "all or nothing": (lambda m, x: torch.where(x.sum() > 500, m.b(x), m.a(x)), 1),
    "by length": (lambda m, x: torch.where(torch.arange(x.shape[1])[:, None] < 30, x, m.a(x)), 0),
    "torch.cond": (lambda m, x: torch.cond(x.sum() > 500, m.b, m.a, (x,)), 1),
    "an activation": (lambda m, x: torch.where(x[..., :1] > 50, m.b(x).relu(), m.a(x)), 0),
    "an activation in torch.cond": (lambda m, x: torch.cond(x.sum() > 500, F.relu, m.a, (x,)), 0),
    "a factor": (lambda m, x: m.a(x) + m.b(x).relu() * (x[..., :1] > 50), 0),
    "a number": (lambda m, x: m.a(x).masked_fill(x[..., :1] > 50, 1), 0),
    "an integer": (lambda m, x: m.a(x) + (1 - (x[..., :1] < 50).long()) * m.b(x).relu(), 0),
    "channels": (lambda m, x: torch.where(x > 50, m.b(x), m.a(x)), 0),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_example_does_not_show(name):
    rows, number = HIDDEN[name]
    model = net(lambda m, x: m.out(m.ln(rows(m, x))))
    after, certificate = fold(model, analyze(model, (X,)))
    assert certificate.ok and certificate.folded == number, str(certificate)
    for other in (X, X + 100, 60 * draw(2, 90, C, seed=1)):
        close(after(other), model(other))


def test_norms_in_the_branches_of_cond():
    """In a model that is used, torch.cond compiles them; a module of both has two calls."""
    model = net(
        lambda m, x: m.out(
            torch.cond(x.sum() > 0, lambda h: m.ln(m.a(h)), lambda h: m.ln2(m.ln(m.b(h))), (x,))
        )
    )
    report = analyze(model, (X,))
    assert counts(report)[:2] == (3, 2) and "layer_norm in ln" in report.rows[2].reason
    after, certificate = fold(model, report)
    assert certificate.folded == 2
    for other in (X, X + 9, X - 9):
        close(after(other), model(other))


def test_dropout_in_training_mode():
    model = net(lambda m, x: m.out(m.ln(F.dropout(m.a(x), 0.5, m.training))))
    assert counts(analyze(model, (X,)))[:2] == (1, 1)
    report = analyze(model.train(), (X,))
    assert report.strict == 0 and "dropout" in report.rows[0].reason
    with pytest.raises(FoldError, match="in this mode"):
        fold(model.eval(), report)


def stack(norm: nn.Module | None = None, **layer) -> nn.Module:
    layer = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True, **layer)
    encoder = nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)
    return net(lambda m, x: m.encoder(m.first(x)), first=nn.ReLU(), encoder=encoder)


def test_an_encoder_without_a_folded_norm_keeps_nested_tensors():
    layer = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True)
    model = net(lambda m, x: m.out(m.ln(m.a(x))), encoder=nn.TransformerEncoder(layer, 1))
    after, _ = folded(model, (X,), 1)
    assert model.encoder.use_nested_tensor and after.encoder.use_nested_tensor


def test_pre_norm_encoder():
    model = stack(nn.LayerNorm(C), norm_first=True)
    report = analyze(model, (X,))
    assert counts(report) == (7, 0, 0, 7, 1) and report.worth
    assert "7 practical (centrings inserted: 1, worth it)" in str(report)
    told = json.loads(report.to_json())
    assert told["practical"] == 7 and told["rows"][0]["verdict"] == "inserted"
    assert fold(model, report)[1].folded == 0
    after, certificate = folded(model, (X,), 7, insert=True)
    assert certificate.inserted == 1
    close(run(after, (X,)), run(model, (X,)))
    # torch's fast path, taken without gradients, passes over the norms of a layer.
    forward = FoldedNorm.forward
    with (
        torch.no_grad(),
        mock.patch.object(FoldedNorm, "forward", autospec=True, side_effect=forward) as called,
    ):
        close(after(X), model(X))
    assert called.call_count == 7
    single = fold(model.float(), replace(report, inputs=(X.float(),)), insert=True)[1].checks[-1]
    assert single.dtype == "float32" and single.max_rel <= 2e-6


def tied() -> nn.Module:
    def forward(m, ids):
        x = m.wte(ids)
        return {"logits": m.head(m.ln2(x + m.a(m.ln(x))))}

    model = net(forward, wte=nn.Embedding(11, C), head=nn.Linear(C, 11, bias=False))
    model.head.weight = model.wte.weight
    return model


def test_tied_head():
    model = tied()
    report = analyze(model, (IDS,))
    assert counts(report) == (2, 0, 2, 2, 1) and report.worth
    assert "centring wte.weight would show in linear in head" in report.rows[0].reason
    untied, _ = folded(model, (IDS,), 2, untie=True)
    assert torch.equal(untied.head.weight, model.head.weight)
    centred, certificate = folded(model, (IDS,), 2, insert=True)
    assert certificate.inserted == 1 and centred.wte.weight is centred.head.weight
    assert fold(model, report)[1].folded == 0


@pytest.mark.parametrize("first", ["wte", "head"])
def test_an_untied_model_is_not_taken_for_a_tied_one(first):
    """Loading gives both names the last of two values: right, if that is the uncentred one."""
    model = tied()
    if first == "head":
        model._modules["wte"] = model._modules.pop("wte")
    untied, _ = folded(model, (IDS,), 2, untie=True)
    wrong = untied if first == "head" else fold_gains(model, (IDS,))[0]
    with pytest.raises(RuntimeError, match="untied"):
        copy.deepcopy(model).load_state_dict(wrong.state_dict())
    if first == "wte":
        expected = model(IDS)["logits"]
        model.load_state_dict(untied.state_dict())
        close(model(IDS)["logits"], expected)


def test_a_folded_norm_that_checks():
    """A branch that is taken later is no case of the certificate; the norms can look."""
    model, x = net(lambda m, x: m.out(m.ln(x if m.skip else m.a(x))), skip=False), draw(2, C)
    report = analyze(model, (x,))
    after, certificate = fold(model, report)
    checked, _ = fold(model, report, check=True)
    assert certificate.ok and "branches" in str(certificate)
    close(checked(x), model(x))
    for one in (model, after, checked):
        one.skip = True
    assert (after(x + 1) - model(x + 1)).abs().max() > 1e-2
    with pytest.raises(FoldError, match="ln: its input is not centred"):
        checked(x + 1)


def test_a_wrong_fold_is_rolled_back():
    model = net(in_place)
    model.before = folded(net(lambda m, x: m.out(m.ln(m.a(x)))), (X,), 1, check=True)[0]
    report = analyze(model, (X,))
    norm = report.analysis.norms[0]
    # forget to centre one of the weights
    norm.demand.sources = dict(list(norm.demand.sources.items())[1:])
    after, certificate = fold(model, report)
    assert after is model and not certificate.ok and certificate.folded == 0
    assert model.before.ln.check  # which a fold before has set
    assert "rolled back" in certificate.what and "off by" in certificate.reason


def test_after_a_fold():
    """float32: compiled; the memory is the same."""
    model = tied().float()
    after, _ = folded(model, (IDS,), 2, insert=True)
    sizes = [sum(p.numel() for p in one.parameters()) for one in (model, after)]
    assert sizes[0] == sizes[1] and after.state_dict().keys() == model.state_dict().keys()
    compiled = torch.compile(after, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS)["logits"], after(IDS)["logits"], rtol=1e-5, atol=1e-5)


def step(model, optimizer) -> float:
    loss = F.cross_entropy(model(IDS)["logits"].flatten(0, 1), IDS.flatten().roll(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("insert", [False, True])
def test_cbwc_trains_as_layer_norm_does(insert):
    """A tied head, weight decay, 50 steps in float64: losses and all parameters stay together."""
    model = tied()
    cbwc = parametrize_cbwc(model, analyze(model, (IDS,)), insert=insert)
    assert sum(isinstance(module, FoldedNorm) for module in cbwc.modules()) == 2
    runs, model_ = [], copy.deepcopy(model)
    for net_ in (model_, cbwc):
        optimizer = torch.optim.AdamW(net_.parameters(), lr=1e-2, weight_decay=0.1)
        runs.append([step(net_, optimizer) for _ in range(50)])
    torch.testing.assert_close(*map(torch.tensor, runs), rtol=0, atol=1e-10)
    assert runs[0][-1] < 0.5 * runs[0][0]
    trained = {
        name.replace("parametrizations.", "").removesuffix(".original"): value
        for name, value in cbwc.named_parameters()
    }
    torch.testing.assert_close(trained, dict(model_.named_parameters()), rtol=0, atol=1e-10)


def branches(m, x):
    return m.out(m.ln(x)) if x.sum() > 0 else x


BAD = {
    "branch": (net(branches), (draw(2, C),), "exported"),
    "size": (net(lambda m, x: m.out(m.ln(m.a(x)[x[..., 0] > 0]))), (draw(2, C),), "on values"),
    "tensor": (net(in_place), draw(2, C), "exported"),
    "meta": (net(in_place).to("meta"), (draw(2, C),), "meta device"),
    "script": (net(in_place, b=torch.jit.script(nn.Linear(C, C))), (draw(2, C),), "exported"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_analysed(name):
    model, inputs, why = BAD[name]
    with pytest.raises(FoldError, match=why):
        analyze(model, inputs)
    assert not any(part._forward_hooks for part in (model, model.a, model.ln))


def test_report_of_another_model():
    model = net(in_place)
    report = analyze(model, (draw(2, C),))
    for other, given in ((nn.Linear(C, C), report), (model, report.by("paper"))):
        with pytest.raises(FoldError):
            fold(other, given)


def test_a_function_that_holds_the_original():
    """A copy would go on with the original's modules: nothing folds, and that is why."""
    model = net(in_place)
    for forward in (lambda m, x: m.out(model.ln(m.a(x))), lambda m, x: m.out(m.ln(model.a(x)))):
        model.function = forward
        assert "a function" in analyze(model, (X,)).rows[0].reason
        after, certificate = fold(model, analyze(model, (X,)))
        assert certificate.folded == 0
        close(after(X), model(X))
    model.float()
    with pytest.raises(FoldError, match="function"):
        fold(model, analyze(model, (X.float(),)))


def in_autocast(m, x):
    with torch.autocast("cpu", enabled=False):
        return m.out(m.ln(m.a(x)))


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda m, x: m.out(F.layer_norm(m.a(x), (C,), m.ln.weight, m.ln.bias)), "no module"),
        (in_autocast, "in an autocast block"),
    ],
)
def test_a_norm_without_a_module_is_counted_and_left(forward, why):
    model = net(forward)
    report = analyze(model, (draw(2, C),))
    assert report.strict == 1 and why in report.rows[0].reason
    assert fold(model, report)[1].folded == 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # centrings that gain nothing are not inserted
        (stack(), (6, 0, 0, 6, 6)),
        # one centring of what two norms read
        (net(lambda m, x: m.out(m.ln(h := x.relu()) + m.ln2(h))), (2, 0, 0, 2, 1)),
    ],
)
def test_what_centrings_are_worth(model, expected):
    report = analyze(model, (X,))
    assert counts(report) == expected
    certificate = fold(model, report, insert=True)[1]
    assert certificate.ok and certificate.inserted == 0  # nor before an operation of no module
