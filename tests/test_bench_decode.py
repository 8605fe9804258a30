"""bench_decode.py to its end on tiny models: records, tables, peers, traces, the last-token
protocol.

    python -m pytest tests/test_bench_decode.py
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from decode_models import make
from helpers import ROOT, json_lines, save_model

import bench_decode
from common.errors import UserError
from decode import arms, last_token, trace
from hf.config import SHAPES


def save(folder, shape, norm):
    """Write a trained model's checkpoint, as far as a bench can tell. Returns its path."""
    return save_model(folder / "ckpt_last.pt", make(shape, norm, init_std=0.3, n_layer=2).float())


@pytest.fixture
def run(tmp_path):
    save(tmp_path / "run", "qwen3", "rms")
    return tmp_path / "run"


def printed(capsys, name):
    """What the program prints under a name in its last line."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])[name]


FAST = ("--tokens=4", "--rounds=6", "--compiled=false", "--device=cpu")


def test_every_arm_is_checked_timed_and_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    bench_decode.main([str(run), "--arms=A,B,C,D,E,L,M", "--batch=1,3", f"--out={out}", *FAST])
    assert [record["batch"] for record in printed(capsys, "batches")] == [1, 3]
    names = {arm.name for arm in arms.find_arms("A,B,C,D,E,L,M")}
    for record in json_lines(out / "decode.jsonl"):
        assert set(record["arms"]) == names | {"A/A"}
        assert {len(times) for times in record["seconds"].values()} == {6}
        wanted = {"coupled/rms", "coupled_fused/rms", "coupled_fused/rms_fused", "A/A/rms"}
        assert wanted <= set(record["speed_ups"])
        for name in names:
            row = record["arms"][name]
            assert row["same_tokens"] == 4 and row["error"] < 1e-5
            assert row["tokens_per_s"] == pytest.approx(record["batch"] * 1e3 / row["ms_per_token"])
        # no Hugging Face model of a run folder
        assert not record["random_weights"] and record["missing"]
    text = (out / "README.md").read_text()
    assert "coupled_fused/rms_fused" in text and "A mixes" in text and (out / "decode.png").exists()

    # A second time only the batch that is measured again takes the place of the old record.
    bench_decode.main([str(run), "--arms=A,C", "--batch=3", "--peers=false", f"--out={out}", *FAST])
    records = json_lines(out / "decode.jsonl")
    assert [(record["batch"], len(record["arms"])) for record in records] == [(1, 8), (3, 3)]


def test_other_layouts_keep_their_norms(tmp_path, capsys):
    """Without --arms they are timed as they are."""
    bench_decode.main([save(tmp_path / "run", "gpt2", "peri"), "--peers=false", *FAST])
    [record] = printed(capsys, "batches")
    assert set(record["arms"]) == {"own", "own_fused", "A/A"} and record["missing"] == []
    assert {"own_fused/own", "A/A/own"} == set(record["speed_ups"])
    assert record["arms"]["own_fused"]["same_tokens"] == 4


def test_a_wrong_arm_costs_itself_alone_and_a_failed_batch_only_later_ones(
    run, tmp_path, monkeypatch
):
    def refusing(model, decoder, idx, tokens):
        if decoder.packed.level == "paper" or len(idx) == 3:
            raise UserError("it is off")
        return arms.check_arm(model, decoder, idx, tokens)

    monkeypatch.setattr(bench_decode, "check_arm", refusing)
    words = ["--arms=B,A,D", "--batch=2,3", "--peers=false", f"--out={tmp_path}", *FAST]
    with pytest.raises(UserError, match="batch 3: no arm passed its check: coupled: it is off"):
        bench_decode.main([str(run), *words])
    [record] = json_lines(tmp_path / "decode.jsonl")
    assert set(record["arms"]) == {"rms", "coupled_fused", "A/A"}
    assert record["missing"] == ["coupled: it is off"]
    assert set(record["speed_ups"]) == {"coupled_fused/rms", "A/A/rms"}


def test_an_arm_is_on_disk_as_soon_as_it_is_ready(run, tmp_path, monkeypatch):
    """The machine is taken away while the second arm compiles."""
    checked = []

    def check(*given):
        if checked:
            raise KeyboardInterrupt
        checked.append(given)
        return arms.check_arm(*given)

    monkeypatch.setattr(bench_decode, "check_arm", check)
    with pytest.raises(KeyboardInterrupt):
        bench_decode.main([str(run), "--arms=A,D", "--peers=false", f"--out={tmp_path}", *FAST])
    [row] = json_lines(tmp_path / "unpaired.jsonl")
    assert row["arm"] == "rms" and len(row["seconds"]) == bench_decode.ALONE and "git" in row
    assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])


def test_without_rounds_each_arm_is_timed_by_itself(run, tmp_path, capsys):
    words = ["--arms=A,D", "--batch=1,2", *FAST, "--rounds=0", f"--out={tmp_path}"]
    bench_decode.main([str(run), *words])
    assert printed(capsys, "batches") == []
    rows = json_lines(tmp_path / "unpaired.jsonl")
    found = [(row["batch"], row["arm"]) for row in rows]
    assert found == [(n, arm) for n in (1, 2) for arm in ("rms", "coupled_fused")]
    assert not (tmp_path / "decode.jsonl").exists()
    with pytest.raises(UserError, match="rounds=0"):
        bench_decode.main(["--last_token", "--rounds=0"])


def test_a_compiled_step_decodes_the_same(run, capsys):
    """torch.compile and the cache that it writes in place: the program's own checks pass."""
    bench_decode.main([str(run), "--arms=D", "--peers=false", *FAST, "--compiled=true"])
    assert printed(capsys, "batches")[0]["arms"]["coupled_fused"]["same_tokens"] == 4


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_hugging_faces_generate_takes_part(monkeypatch, capsys):
    tiny = SHAPES["gpt2"] | {
        "vocab_size": 97,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
    }
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    bench_decode.main(["random:tiny", "--arms=L,M", *FAST])
    [record] = printed(capsys, "batches")
    assert record["arms"]["hf_eager"]["ms_per_token"] > 0
    assert "layer/hf_eager" in record["speed_ups"]
    assert record["random_weights"] and record["missing"] == []


def test_gpt_fasts_model_takes_part(monkeypatch, capsys):
    """Its cache, its loop and its rotary pairs, our weights: the same tokens, and its options stay
    its own.
    """
    folder = Path(os.environ.get("NANONORM_GPT_FAST", ROOT.parent / "gpt-fast"))
    if not (folder / "generate.py").is_file():
        pytest.skip(f"no gpt-fast checkout at {folder}; NANONORM_GPT_FAST names one")
    tiny = SHAPES["llama3.2-1b"] | {
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    before, modules = torch._inductor.config.get_config_copy(), sys.modules["model"]
    bench_decode.main(
        ["random:tiny", "--arms=A,D", "--peers=false", "--batch=2", f"--gpt_fast={folder}", *FAST]
    )
    [record] = printed(capsys, "batches")
    assert record["missing"] == []
    assert {"rms/gpt_fast", "coupled_fused/gpt_fast"} <= set(record["speed_ups"])
    assert torch._inductor.config.get_config_copy() == before and sys.modules["model"] is modules


def test_traces(run, tmp_path, capsys):
    bench_decode.main([str(run), "--arms=A,C", "--trace", f"--out={tmp_path / 'trace'}", *FAST])
    row = printed(capsys, "batches")[0]["arms"]["rms"]
    assert row["kernels_per_step"] > 2 * row["kernels_per_block"] > row["ledger_per_block"] == 9
    assert json.loads((tmp_path / "trace/rms-1.json").read_text())["traceEvents"]
    assert (tmp_path / "trace/trace-1.png").exists()
    kinds = {
        "triton_per_fused_add_mul_rsqrt_0": "norm",
        "vector_kernel": "product",
        "attend_kernel": "attention",
        "ampere_bf16_s16816gemm_bf16_64x64": "product",
        "triton_poi_fused_mean_rsqrt_silu_split_3": "activation",
        "heads_kernel": "heads",
        "take_kernel": "other",
        "Memset (Device)": "copy",
        "activation_kernel": "activation",
        "combine_kernel": "attention",
        "forward_kernel": "norm",
        "triton_poi_fused_addmm_gelu_0": "activation",
        "triton_red_fused_mm_t_view_2": "product",
        "triton_red_fused__to_copy_add_mean_mm_pow_3": "product",
        "triton_red_fused_mm_silu_split_4": "product",
        "triton_red_fused__unsafe_view_argmax_4": "other",
        "triton_red_fused_mean_mm": "product",
        "aten::scaled_dot_product_attention": "attention",
        "aten::addmm": "product",
    }
    assert {name: trace.kind(name) for name in kinds} == kinds


def test_a_trace_is_compared_with_the_ledger():
    """A made-up trace: as many kernels as launches; one copy more; one kernel less, and a copy."""
    kernels = Counter({"triton_red_fused_rsqrt": 2, "nvjet_qkv": 2, "attend_kernel": 2})
    ledger = Counter({"norm": 2, "matmul": 2, "attend": 2})
    copies = Counter({"Memcpy DtoD (Device -> Device)": 2})
    found = trace.compare(kernels, ledger, 2)
    assert found["equal"] and found["line"] == "3 kernels per block, the ledger's 3: equal"
    found = trace.compare(kernels + copies, ledger, 2)
    assert not found["equal"] and found["kernels_per_block"] == 4
    assert not trace.compare(kernels - Counter({"nvjet_qkv": 2}) + copies, ledger, 2)["equal"]
    # Two compilations: the shorter one has other numbers, and a kernel that the longer one lacks.
    shorter = Counter({"embed_kernel": 1, "triton_red_fused_mean_5": 1, "argmax_kernel": 2})
    whole = kernels + Counter({"embed_kernel": 1, "triton_red_fused_mean_9": 1})
    left = trace.difference(whole, shorter)
    assert +left == kernels and left["argmax_kernel"] == -2


def test_both_variants_are_arms_and_ratios_are_of_the_faster(monkeypatch):
    """Launches overlap on some GPUs, but never the library's."""
    config = bench_decode.DecodeBenchConfig()
    cuda, cpu, (a, c) = torch.device("cuda"), torch.device("cpu"), arms.find_arms("A,C")
    forced = dataclasses.replace(config, tuning="on")
    plain, tuned = ("rms_fused", False, False), ("rms_fused_tuned", False, True)
    both = [("rms", True, False), ("rms_tuned", True, True)]
    for its, arm, level, device, overlap, expected in (
        (config, a, "plain", cuda, True, both),
        (config, c, "fused", cuda, True, [plain, tuned]),
        (config, c, "library", cuda, True, [plain]),
        (config, a, "plain", cpu, True, both[:1]),
        (config, c, "fused", cpu, False, [("rms_fused", True, False)]),
        (forced, a, "plain", cuda, True, [("rms", True, True)]),
        (forced, c, "fused", cuda, True, [("rms_fused", False, True)]),
        (config, c, "fused", cuda, False, [plain]),
    ):
        monkeypatch.setattr(bench_decode, "can_overlap", lambda _, overlap=overlap: overlap)
        assert its.variants(arm, level, device) == expected
    measured = {"rms": 3.0, "rms_tuned": 2.0, "coupled": 1.0, "coupled_tuned": 4.0, "A/A": 3.0}
    times = {name: [value] * 6 for name, value in measured.items()}
    faster = bench_decode.faster_variants(times, ["rms", "coupled", "layer"])
    assert faster == {"rms": "rms_tuned", "coupled": "coupled"}
    found = bench_decode.speed_ups(times, ["rms", "coupled"], faster, "rms")
    medians = {name: ratio["median"] for name, ratio in found.items()}
    assert medians == {"coupled/rms": 2, "A/A/rms": 1}


def test_last_token_protocol(monkeypatch, tmp_path, capsys):
    compiled_alone = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(last_token, "compiled_alone", compiled_alone)
    shape = dataclasses.replace(
        last_token.SHAPE, n_layer=2, n_embd=32, n_head=2, vocab_size=50304, block_size=128
    )
    monkeypatch.setattr(last_token, "SHAPE", shape)
    monkeypatch.setattr(last_token, "PUBLISHED", {(2, 24): (79.3, 96.8)})
    words = ["--last_token", "--device=cpu", f"--out={tmp_path}"]
    bench_decode.main([*words, "--rounds=6"])
    rows = printed(capsys, "rows")
    assert [row["mode"] for row in rows] == ["eager", "compiled", "cached"]
    ratios = {"taper/rms", "rms_folded/rms", "taper_folded/rms", "taper_folded/rms_folded"}
    assert all(set(row["speed_up"]) == ratios for row in rows)
    assert "| 2 | 24 | eager |" in (tmp_path / "last_token.md").read_text()
    bench_decode.main([*words, "--ledger"])
    launches = printed(capsys, "launches")
    count = {name: sum(counts.values()) for name, counts in launches.items()}
    assert count == rows[0]["launches"]
    # Of 5 norms, the 4 internal ones lose square, mean, + eps, root and a product when tapered, and
    # the rest folded.
    assert [launches[name].get("mean", 0) for name in ("rms", "taper", "taper_folded")] == [5, 1, 1]
    assert count["rms"] - count["rms_folded"] == 5  # products with gains
    assert (count["rms"] - count["taper"], count["taper"] - count["taper_folded"]) == (4 * 4, 4 * 2)
    assert "| taper_folded |" in (tmp_path / "launches.md").read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--arms=A", "--peers=false", "--out=FILE", *FAST], "out"),
        (["--tokens=100"], "tokens"),
        (["--gpt_fast=FILE"], "gpt_fast"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(words, named, run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=named):
        bench_decode.main(
            [str(run), *(word.replace("FILE", str(tmp_path / "file")) for word in words)]
        )
