"""The launch ledger: launches per block of every arm and shape, floors, predictions; the arms'
weights.

    python -m pytest tests/decode/test_ledger.py
"""

import dataclasses
import itertools
import re
from unittest import mock

import pytest
import torch
from decode_models import NORMS, definition, distance, make, prompt
from helpers import ROOT, json_lines
from torch._inductor import decomposition

from bench_decode import DecodeBenchConfig, run_ledger
from common.errors import ConfigError, UserError
from decode.arms import ARMS, OWN, arms_of, check_arm, exact_logits, find_arms, with_norms
from decode.ledger import LaunchLedger, floor_bytes, launches, per_block, total
from decode.pack import level_at, pack
from decode.step import TUNED, Decoder, decode_logits
from hf.config import shape_config
from model import GPT, GPTConfig
from norm_types import NORM_TYPES
from norms import NoNorm, Norm, Place
from study import cuda_codegen

PER_BLOCK = {
    "rms": (9, 2),
    "coupled": (8, 1),
    "rms_fused": (5, 0),
    "coupled_fused": (5, 0),
    "taper_folded": (5, 0),
    "layer": (9, 2),
    "layer_fused": (5, 0),
}
BY_LIBRARY = PER_BLOCK | {
    "rms_fused": (7, 1),
    "coupled_fused": (7, 1),
    "layer_fused": (7, 1),
    "taper_folded": (6, 0),
}
# sequences; 31 are the most that `fused` is for
SIZES = ((1, PER_BLOCK), (31, PER_BLOCK), (32, BY_LIBRARY))
FLOORS = {
    "qwen3-0.6b": 0.279,
    "qwen3-1.7b": 0.802,
    "qwen3-8b": 3.52,
    "llama3.2-1b": 0.575,
    "llama3.2-3b": 1.50,
}


def shallow(name: str, layers: int = 3) -> GPT:
    """A published shape with few blocks, without memory."""
    with torch.device("meta"):
        return GPT(dataclasses.replace(shape_config(name), n_layer=layers)).bfloat16().eval()


@pytest.mark.parametrize("name", ["gpt2", *FLOORS])
def test_launches_per_block(name):
    model, idx = shallow(name), torch.zeros(1, 4, dtype=torch.int64, device="meta")
    for arm in (arm for arm in ARMS.values() if arm.norm_type != OWN):
        twin = with_norms(model, arm.norm_type, idx)
        for batch, expected in SIZES if name in ("gpt2", "qwen3-0.6b") else SIZES[::2]:
            packed = pack(twin, level_at(arm.level, batch))
            ends, *blocks = launches(packed, batch, 16)
            assert tuple(per_block(blocks).values()) == expected[arm.name], arm
            head = {"project"} if packed.level == "fused" else {"norm", "matmul"}
            assert set(ends) == {"embed", "best", "take"} | head
            assert blocks == blocks[:1] * 3


def test_blocks_that_keep_or_share_more():
    """coupled_first blocks cost what rms does; a block that shares at both positions has no norm
    launch at all.
    """
    model, keys = shallow("qwen3-0.6b"), {"coupled_first": 1, "coupled_span": 2}
    blocks = launches(pack(with_norms(model, "coupled", **keys), "paper"), 1, 16)[1:]
    assert [(block.total(), block["norm"]) for block in blocks] == [(9, 2), (8, 1), (7, 0)]
    assert list(per_block(blocks[1:]).values()) == [7.5, 0.5]


@pytest.mark.parametrize("name", FLOORS)
def test_floors(name):
    """The bytes of an independent count: each matrix once, and keys and values of 80 tokens."""
    shape = shape_config(name)
    packed = pack(shallow(name), "plain")
    per_block = (floor_bytes(packed, 1, 80) - shape.vocab_size * shape.n_embd * 2) / 3
    floor = per_block * shape.n_layer + shape.vocab_size * shape.n_embd * 2
    assert 1e3 * floor / 4.3e12 == pytest.approx(FLOORS[name], rel=5e-3)


def test_floor_of_local_blocks():
    """A local block reads its window of keys and values, and no more than there are."""
    packed = pack(make("gemma3", "rms").bfloat16(), "fused")
    token = 2 * 16 * 2  # bytes of a key and a value, one head of 16 channels
    floors = [floor_bytes(packed, 3, context) for context in (0, 3, 20)]
    assert floors[1:] == [floors[0] + 3 * seen * token for seen in (3 + 3 * 3, 20 + 3 * 5)]


CALLS = re.compile(
    r"^\s+(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.\w+\.[\w.]+)\(", re.MULTILINE
)


def product_of_a_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product with one row as inductor writes it itself with coordinate descent tuning.

    It asks for the device while the graph is still on the CPU.
    """
    return (a.float().unsqueeze(2) * b.float().unsqueeze(0)).sum(dim=1).to(a.dtype)


@pytest.mark.skipif(
    bool(cuda_codegen.supported()), reason=f"cuda_codegen {cuda_codegen.supported()}"
)
@pytest.mark.parametrize(
    ("shape", "norm", "tuned"),
    [
        ("gpt2-bias", "layer", False),
        ("gpt2-bias", "coupled", False),
        ("qwen3", "rms", True),
        ("qwen3", "coupled", True),
    ],
)
def test_inductor_launches_what_the_ledger_counts(shape, norm, tuned):
    """The code that torch.compile generates for an H200: kernels and library calls of a block, by
    difference, and of a whole step, in which inductor embeds in the first norm's kernel and our
    operators search for the next token.

    With gpt-fast's options inductor writes the products of one row itself, and the activation into
    the one behind it: a launch less for A and for B alike.
    """
    pytest.importorskip("triton", reason="Triton has no wheels for this platform")
    from kernels.decode import triton_launches as decode_triton

    level, counts, ledger = "paper" if norm == "coupled" else "plain", [], []
    packed = pack(make(shape, norm).bfloat16(), level)
    products = {torch.ops.aten.mm.default: product_of_a_row} if tuned else {}
    for layers in (1, 2):
        part = dataclasses.replace(packed, blocks=packed.blocks[:layers])
        decoder = Decoder(part, 1, 16)

        def step(token, pos, part=part, decoder=decoder):
            ops = decode_triton.COMPILED_ROW if tuned else decode_triton.COMPILED
            logits = decode_logits(ops, part, decoder.caches, token, pos)
            ops.take(*ops.best(logits), token, pos, decoder.out)
            return logits

        with (
            torch.no_grad(),
            torch._inductor.config.patch(TUNED if tuned else {}),
            mock.patch.dict(decomposition.fast_random_decomps(), products),
        ):
            code, _ = cuda_codegen.cuda_code(step, (decoder.token, decoder.pos))
        calls = CALLS.findall(code)
        assert calls[-2:] == [
            "torch.ops.nanonorm.best.default",
            "torch.ops.nanonorm.take.default",
        ]
        counts.append(len(calls))
        ledger.append(total(launches(part, 1, 16)).total())
    assert launches(packed, 1, 16)[-1].total() == PER_BLOCK[norm][0]
    assert counts[1] - counts[0] == PER_BLOCK[norm][0] - tuned
    assert counts == [ledger[0] - 1 - tuned, ledger[1] - 1 - 2 * tuned]


@pytest.mark.parametrize("norm", NORM_TYPES)
def test_the_manual_counts_every_norm_type(norm):
    """A model's own norms, plain and fused: the table of docs/decode.md."""
    model, cells = make("llama", norm), []
    for arm in find_arms("O,P"):
        ends, *blocks = launches(pack(model, arm.level), 1, 16)
        found = [f"{block.total()} ({block['norm']})" for block in blocks]
        runs = [f"{len(list(run))} x {count}" for count, run in itertools.groupby(found)]
        cells += [", ".join(runs), str(ends.total())]
    _, section = (ROOT / "docs/decode.md").read_text().split("### The model's own norms")
    rows = [[cell.strip() for cell in row.split("|")] for row in section.splitlines()]
    told = [row[2:-1] for row in rows if len(row) > 1 and f"`{norm}`" in row[1]]
    assert told in ([], [cells])  # all are in docs/norms.md


@pytest.mark.parametrize("norm", NORM_TYPES)
def test_the_table_of_norm_types_has_both_ledgers(norm):
    """docs/norms.md: bytes of results/cpu/bytes, launches of the third of four blocks."""
    rows = (ROOT / "docs/norms.md").read_text().splitlines()
    found = [row for row in rows if row.startswith(f"| `{norm}` |") and row.count(" | ") >= 5]
    assert found, f"docs/norms.md has no row for {norm} in its table of norm types"
    [row] = found
    arms = json_lines(ROOT / "results/cpu/bytes/ledger.jsonl")
    counted = {arm["norms"]: arm["bytes_per_token"] for arm in arms}
    # a Pre-LN block of mixln, a block of taper before it tapers
    of_block = counted["rms" if norm in ("mixln", "taper") else norm]
    kilobytes = [f"{of_block[name] / 1000:.1f}" for name in ("bfloat16 stream", "float32 stream")]
    # LayerNorm is fused in its centred form, which is RMSNorm.
    models = (("plain", norm), ("fused", "rms" if norm == "layer" else norm))
    steps = [launches(pack(make("llama", kind), level), 1, 16)[3].total() for level, kind in models]
    assert f"| {', '.join(kilobytes)} | {', '.join(map(str, steps))} |" in row


@pytest.mark.parametrize("level", ["plain", "fused"])
@pytest.mark.parametrize(
    "keys",
    [
        {"norm_type": "lns"},
        {"norm_gain": "one_plus"},
        {"norm_type": "peri", "norm_gain": "one_plus"},
    ],
    ids=str,
)
def test_no_step_computes_gains(keys, level):
    """1 + weight and weight / sqrt(l) are computed when the model is packed."""
    config = GPTConfig(
        **{"norm_type": "rms", **keys}, n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=8
    )
    packed = pack(GPT(config), level)
    norms = [entry.norm for entry in packed.entries] + [packed.norm_e]
    parts = [part for norm in norms if norm is not None for part in norm.modules()]
    assert level == "fused" or parts
    assert all(part.has_plain_gain for part in parts if isinstance(part, Norm))


def test_only_pre_norm_layouts_take_other_arms():
    """The default arms are A to D where every norm can be replaced, O and P elsewhere."""
    models = {norm: make("gpt2", norm) for norm in NORMS}
    found = {norm: arms_of("auto", model) for norm, model in models.items()}
    own = {norm for norm in NORMS if found[norm] == find_arms("O,P")}
    assert all(found[norm] == find_arms("A,B,C,D") for norm in NORMS.keys() - own)
    pre_norm = {"layer", "rms", "coupled", "cbwc", "taper", "lns", "none"}
    assert NORM_TYPES.keys() - own == pre_norm
    assert {"dyt-common", "peri-layer", "coupled-outputs"} <= own
    with pytest.raises(ConfigError, match=r"arms: B coupled .*: take O,P"):
        arms_of("P,B", models["peri"])


def test_loose_work_is_counted():
    x, weight = torch.ones(1, 1, 4), torch.ones(4, 4)
    with LaunchLedger() as ledger:
        ledger.ops.matmul(x, weight, None)
        x * 2  # outside of every launch function: a launch of its own
        x.view(4).unsqueeze(0)  # no work
        ledger.ops.norm(Place(NoNorm(4, affine=False)), x, None, None)  # and no launch
    assert ledger.launches == ["matmul", "mul"]


def test_ledger_of_the_program(capsys):
    config = DecodeBenchConfig(arms="B,C", dtype="bfloat16", batch=(1, 64))
    one, many = run_ledger(config, "random:gpt2")
    assert one["floor_ms_per_token"] == pytest.approx(0.0581, rel=0.01)
    for row in one["arms"].values():
        expected = one["floor_ms_per_token"] + 1.3e-3 * row["launches_per_step"]
        assert row["predicted_ms_per_token"] == pytest.approx(expected)
    assert "| coupled | 8 (1): 0." in capsys.readouterr().out
    assert (many["batch"], many["arms"]["rms_fused"]["launches_per_block"]) == (64, 7)


# ------------------------------------------------------------------------------------ arms' weights


@pytest.mark.parametrize("shape", ("gpt2-bias", "qwen3"))
def test_arms_share_all_but_their_norms(shape):
    model, idx = make(shape, "layer" if shape == "gpt2-bias" else "rms"), prompt(2, 12)
    before = definition(model, idx, 12)
    for norm in ("rms", "coupled", "layer", "cbwc", "taper"):
        twin = with_norms(model, norm, idx)
        assert twin.blocks[0].attn.qkv.weight is model.blocks[0].attn.qkv.weight
        if norm == "cbwc" and shape == "gpt2-bias":  # the same function as layer
            assert distance(definition(twin, idx, 12), before) < 1e-13
        elif norm != model.config.norm_type:
            assert distance(definition(twin, idx, 12), before) > 1e-3
    assert torch.equal(definition(model, idx, 12), before)  # and the model itself is untouched


def test_arms_keep_the_gain_of_a_scaled_norm():
    """LayerNorm scaling's gain is not its weight."""
    model, idx = make("gpt2", "lns"), prompt(2, 12)
    twin = with_norms(model, "rms")
    assert torch.equal(twin.blocks[2].norm2.norm.weight, model.blocks[2].norm2.norm.gain)
    assert distance(definition(twin, idx, 12), definition(model, idx, 12)) < 1e-13


def test_exact_logits_and_the_check_before_timing():
    model, idx = make("llama", "coupled", init_std=0.3), prompt(1)
    for shape, norm in [("gemma3", "cbwc"), *(("llama", norm) for norm in NORM_TYPES)]:
        own = make(shape, norm)
        assert distance(exact_logits(own, idx), own(idx)) < 1e-13, norm
    model.float()
    found = check_arm(model, Decoder(pack(model, "fused"), 1, 20), idx, 6)
    assert found["same_tokens"] == 6 and 0 < found["error"] < 1.5 * found["error_unfused"] < 1e-5
    wrong = pack(model, "fused")
    wrong.blocks[2].up.eps = wrong.blocks[2].qkv.eps = 1.0
    with pytest.raises(UserError, match=r"; 1\.5 times is allowed"):
        check_arm(model, Decoder(wrong, 1, 20), idx, 6)


def test_the_manual_says_what_the_ledger_does():
    """The table of docs/decode.md, from results/cpu/launches, which the program wrote."""
    records = json_lines(ROOT / "results/cpu/launches/ledger.jsonl")
    every = [one for one in records if one["model"] != "random:gpt2"]
    assert [one["model"] for one in every] == [f"random:{name}" for name in FLOORS]
    manual = (ROOT / "docs/decode.md").read_text().splitlines()
    # With gpt-fast's options a block has a launch less.
    for arm, fewer in itertools.product(find_arms("A,B,C,D"), (0, 1)):
        cells = []
        for one in every:
            blocks = shape_config(one["model"].removeprefix("random:")).n_layer
            saved = 1e-3 * one["launch_us"] * blocks * fewer
            predicted = one["arms"][arm.name]["predicted_ms_per_token"] - saved
            cells.append(f"{predicted:.3f}, {one['floor_ms_per_token'] / predicted:.0%}")
        name = f"{arm.name}_tuned" if fewer else arm.name
        rows = [row for row in manual if row.startswith(f"| {arm.letter} `{name}` |")]
        assert len(rows) == (arm.level != "fused" or not fewer)
        assert all(row.endswith(" | ".join(["", *cells, ""]).rstrip()) for row in rows)
