"""bench_decode.py to its end on tiny models: records, tables, peers, traces, the last-token
protocol.

    python -m pytest tests/test_bench_decode.py
"""

import dataclasses
import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from decode_models import make, prompt
from helpers import ROOT

import bench_decode
from common.errors import ConfigError, UserError
from decode import arms, last_token, peers, report, trace
from decode.pack import pack
from decode.step import Decoder
from hf.config import SHAPES
from training.checkpoint import save_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run folder with a trained model's checkpoint, as far as a bench can tell."""
    model = make("qwen3", "rms", init_std=0.3, n_layer=2).float()
    state = {
        "step": 1,
        "config": dataclasses.asdict(model.config),
        "meta": {},
        "model": model.state_dict(),
    }
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run" / "ckpt_last.pt", state)
    return tmp_path / "run"


def run_of(folder, norm):
    """A run folder like `run` of another norm type, on the shape of GPT-2."""
    model = make("gpt2", norm, init_std=0.3, n_layer=2).float()
    config = dataclasses.asdict(model.config)
    folder.mkdir()
    state = {"step": 1, "config": config, "meta": {}, "model": model.state_dict()}
    save_checkpoint(folder / "ckpt_last.pt", state)
    return folder


FAST = ("--tokens=4", "--rounds=6", "--compiled=false", "--device=cpu")


def test_every_arm_is_checked_timed_and_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    bench_decode.main([str(run), "--arms=A,B,C,D,E,L,M", "--batch=1,3", f"--out={out}", *FAST])
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    assert [record["batch"] for record in summary["batches"]] == [1, 3]
    for record in map(json.loads, (out / "decode.jsonl").read_text().splitlines()):
        names = {
            "rms",
            "coupled",
            "rms_fused",
            "coupled_fused",
            "taper_folded",
            "layer",
            "layer_fused",
        }
        assert set(record["arms"]) == names | {"A/A"} and all(
            len(times) == 6 for times in record["seconds"].values()
        )
        assert {"coupled/rms", "coupled_fused/rms", "coupled_fused/rms_fused", "A/A/rms"} <= set(
            record["speed_ups"]
        )
        for name in names:
            row = record["arms"][name]
            assert row["same_tokens"] == 4 and row["error"] < 1e-5
            assert row["tokens_per_s"] == pytest.approx(record["batch"] * 1e3 / row["ms_per_token"])
        # no Hugging Face model of a run folder
        assert not record["random_weights"] and record["missing"]
    text = (out / "README.md").read_text()
    assert "coupled_fused/rms_fused" in text and "A mixes" in text and (out / "decode.png").exists()
    assert "| coupled |" in printed and "floor:" in printed

    # A second time only the batch that is measured again takes the place of the old record.
    bench_decode.main([str(run), "--arms=A,C", "--batch=3", "--peers=false", f"--out={out}", *FAST])
    records = [json.loads(line) for line in (out / "decode.jsonl").read_text().splitlines()]
    assert [(record["batch"], len(record["arms"])) for record in records] == [(1, 8), (3, 3)]


@pytest.mark.parametrize("norm", ("peri", "olmo2"))
def test_other_layouts_keep_their_norms(norm, tmp_path, capsys):
    """Without --arms they are timed as they are; an arm with other norms is refused by name."""
    spec = str(run_of(tmp_path / "run", norm))
    bench_decode.main([spec, "--peers=false", f"--out={tmp_path / 'out'}", *FAST])
    (record,) = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"]
    assert set(record["arms"]) == {"own", "own_fused", "A/A"} and record["missing"] == []
    assert {"own_fused/own", "A/A/own"} == set(record["speed_ups"])
    for name in ("own", "own_fused"):
        row = record["arms"][name]
        assert row["same_tokens"] == 4 and row["error"] < 1e-5
        assert row["norm_launches_per_block"] > 0
    assert record["norm_type"] == norm and (tmp_path / "out" / "decode.png").exists()
    with pytest.raises(UserError, match=f"A rms puts other norms .*norm_type={norm}"):
        bench_decode.main([spec, "--arms=O,A", "--peers=false", *FAST])


def test_a_wrong_arm_costs_itself_alone_and_a_failed_batch_only_later_ones(
    run, tmp_path, monkeypatch, capsys
):
    """The first arm, in bfloat16, is refused; peers compile for one batch size each; and the third
    of them fails.
    """
    sizes = []

    def double(x):
        return 2 * x

    def wrong(twin, level):
        packed = pack(twin, level)
        for block in packed.blocks if level == "paper" else ():
            block.up.weight = block.up.weight * 1.2
        return packed

    def calls_of(config, spec, model, idx, missing):
        torch.compile(double, backend=lambda graph, inputs: sizes.append(inputs) or graph.forward)(
            torch.ones(len(idx))
        )
        if len(idx) == 4:
            raise UserError("no more memory")
        return {}, {}

    monkeypatch.setattr(arms, "pack", wrong)
    monkeypatch.setattr(peers, "calls_of", calls_of)
    monkeypatch.setattr(
        bench_decode.DecodeBenchConfig, "variants", lambda *words: [(words[1].name, False, False)]
    )
    with pytest.raises(UserError, match="no more memory"):
        bench_decode.main(
            [
                str(run),
                "--arms=B,A,D",
                "--batch=2,3,4",
                "--dtype=bfloat16",
                f"--out={tmp_path / 'out'}",
                *FAST,
                "--compiled=true",
            ]
        )
    # no size is open
    assert [[tuple(part.shape) for part in inputs] for inputs in sizes] == [[(2,)], [(3,)], [(4,)]]
    records = [
        json.loads(line) for line in (tmp_path / "out" / "decode.jsonl").read_text().splitlines()
    ]
    assert [record["batch"] for record in records] == [2, 3]
    for record in records:
        assert (
            set(record["arms"]) == {"rms", "coupled_fused", "A/A"} and len(record["missing"]) == 1
        )
        assert (
            record["missing"][0].startswith("coupled: ")
            and "1.5 times is allowed" in record["missing"][0]
        )
        assert set(record["speed_ups"]) == {"coupled_fused/rms", "A/A/rms"}
    printed = capsys.readouterr().out
    assert "- not timed: coupled: logits are" in printed
    monkeypatch.setattr(
        bench_decode, "check_arm", lambda *words: (_ for _ in ()).throw(UserError("it is off"))
    )
    with pytest.raises(UserError, match="batch 1: no arm passed its check: rms: it is off"):
        bench_decode.main([str(run), "--arms=A", *FAST])


def test_a_compiled_step_decodes_the_same(run, capsys):
    """torch.compile and the cache that it writes in place: the program's own checks pass."""
    bench_decode.main(
        [str(run), "--arms=D", "--peers=false", "--tokens=4", "--rounds=6", "--device=cpu"]
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]["arms"]
    assert rows["coupled_fused"]["same_tokens"] == 4


def test_an_interrupt_keeps_the_rounds_so_far(run, tmp_path, monkeypatch):
    """And no other size is begun."""
    turns, decode_tokens = [], bench_decode.decode_tokens

    def interrupted(*words):
        turns.append(words)
        if len(turns) == 2 + 2 * 7 + 1:  # two to warm up, seven rounds
            raise KeyboardInterrupt
        decode_tokens(*words)

    monkeypatch.setattr(bench_decode, "decode_tokens", interrupted)
    bench_decode.main(
        [
            str(run),
            "--arms=A",
            "--batch=1,2",
            f"--out={tmp_path}",
            "--peers=false",
            *FAST,
            "--rounds=40",
        ]
    )
    (record,) = (json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines())
    assert record["batch"] == 1 and record["rounds"] == 7 == len(record["seconds"]["rms"])
    assert record["missing"] == ["rounds 8 to 40: interrupted"]


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
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]
    assert (
        record["arms"]["hf_eager"]["ms_per_token"] > 0 and "layer/hf_eager" in record["speed_ups"]
    )
    assert "arbitrary ids" in record["prompt_ids"] and record["prompt"] == "Who was Alan Turing?"
    assert record["random_weights"] and record["missing"] == []
    assert "not compiled" not in report.table(record)
    record["arms"]["hf_static"] = record["arms"]["hf_eager"]
    assert "hf_static is not compiled here" in report.table(record)


def test_a_model_that_transformers_cannot_load_is_not_timed(monkeypatch):
    def refused(spec, model):
        raise RuntimeError("Error(s) in loading state_dict\n\tMissing key(s)")

    monkeypatch.setattr(peers, "hf_model", refused)
    missing = []
    config = bench_decode.DecodeBenchConfig()
    assert peers.calls_of(config, "random:gpt2", None, None, missing) == ({}, {})
    assert missing == ["Hugging Face: RuntimeError: Error(s) in loading state_dict"]


def test_a_folder_without_gpt_fast_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"there is no generate\.py"):
        bench_decode.main([str(run), "--arms=A", "--peers=false", f"--gpt_fast={tmp_path}", *FAST])


def test_gpt_fasts_model_takes_part(monkeypatch, run, capsys):
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
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]
    assert record["missing"] == [] and record["arms"]["gpt_fast"]["same_tokens"] == 4
    assert {"rms/gpt_fast", "coupled_fused/gpt_fast"} <= set(record["speed_ups"])
    assert torch._inductor.config.get_config_copy() == before and sys.modules["model"] is modules
    bench_decode.main([str(run), "--arms=A", "--peers=false", f"--gpt_fast={folder}", *FAST])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]
    assert record["missing"][0].startswith("gpt-fast: ") and "gpt_fast" not in record["arms"]


def test_traces(run, tmp_path, capsys):
    bench_decode.main([str(run), "--arms=A,C", "--trace", f"--out={tmp_path / 'trace'}", *FAST])
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"]
    rows = found["arms"]
    assert (
        rows["rms"]["kernels_per_step"]
        > 2 * rows["rms"]["kernels_per_block"]
        > rows["rms"]["ledger_per_block"]
        == 9
    )
    assert json.loads((tmp_path / "trace" / "rms-1.json").read_text())["traceEvents"]
    assert (tmp_path / "trace" / "trace-1.png").exists()
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


def test_a_trace_without_kernels_is_refused(monkeypatch):
    """A profiler that sees nothing would count none in every arm, all equal."""
    monkeypatch.setattr(trace, "profiled", lambda call, cuda: (None, []))
    decoder = Decoder(pack(make("gpt2", "rms"), "plain"), 1, 8)
    with pytest.raises(UserError, match="the profiler saw no kernels"):
        trace.traced(decoder, prompt(1, 3), None)


def test_a_trace_is_compared_with_the_ledger():
    """A made-up trace of two blocks: as many kernels as launches; one copy more; a norm that came
    back.
    """
    kernels = Counter(
        {
            "triton_red_fused_add_mean_rsqrt_1": 2,
            "nvjet_qkv": 2,
            "heads_kernel": 2,
            "attend_kernel": 2,
            "gemv2T_kernel": 4,
            "triton_poi_fused_silu_3": 2,
            "nvjet_addmm": 2,
        }
    )
    ledger = Counter(
        {"norm": 2, "matmul": 4, "heads": 2, "attend": 2, "matmul_add": 4, "activation": 2}
    )
    found = trace.compare(kernels, ledger, 2)
    assert found["equal"] and found["line"] == "8 kernels per block, the ledger's 8: equal"
    assert found["per_block_by_class"] == {
        "norm": 1,
        "product": 4,
        "heads": 1,
        "attention": 1,
        "activation": 1,
    }
    copies = Counter({"Memcpy DtoD (Device -> Device)": 2})
    found = trace.compare(kernels + copies, ledger, 2)
    assert not found["equal"] and "copy +1 (Memcpy DtoD (Device -> Device))" in found["line"]
    assert found["line"].startswith("9 kernels per block, the ledger's 8: differs")
    # 8, and a copy
    assert not trace.compare(kernels - Counter({"nvjet_qkv": 2}) + copies, ledger, 2)["equal"]
    assert (
        "norm -1 (none)"
        in trace.compare(kernels - Counter({"triton_red_fused_add_mean_rsqrt_1": 2}), ledger, 2)[
            "line"
        ]
    )
    # Two compilations: the shorter one has other numbers, and a kernel that the longer one lacks.
    whole = kernels + Counter({"embed_kernel": 1, "triton_red_fused_mean_9": 1})
    whole["triton_poi_fused_silu_3"] += 1
    shorter = Counter({"embed_kernel": 1, "triton_red_fused_mean_5": 1, "triton_poi_fused_gelu": 1})
    again = trace.compare(trace.difference(whole, shorter), ledger, 2)
    assert again == trace.compare(kernels, ledger, 2)
    shorter["argmax_kernel"] = 2
    again = trace.compare(trace.difference(whole, shorter), ledger, 2)
    assert not again["equal"] and "other -1 (argmax_kernel)" in again["line"]


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
    times = {
        "rms": [3.0] * 6,
        "rms_tuned": [2.0] * 6,
        "coupled": [1.0] * 6,
        "coupled_tuned": [4.0] * 6,
        "A/A": [3.0] * 6,
    }
    found = bench_decode.speed_ups(
        times, ["rms", "coupled"], {"rms": "rms_tuned", "coupled": "coupled"}, "rms"
    )
    assert {name: ratio["median"] for name, ratio in found.items()} == {
        "coupled/rms": 2,
        "A/A/rms": 1,
        "rms_tuned/rms": 1.5,
        "coupled_tuned/coupled": 0.25,
    }


def test_last_token_protocol(monkeypatch, tmp_path, capsys):

    def compiled_alone(function):
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(last_token, "compiled_alone", compiled_alone)
    shape = dataclasses.replace(
        last_token.SHAPE, n_layer=2, n_embd=32, n_head=2, vocab_size=50304, block_size=128
    )
    monkeypatch.setattr(last_token, "SHAPE", shape)
    monkeypatch.setattr(last_token, "PUBLISHED", {(2, 24): (79.3, 96.8)})
    bench_decode.main(
        ["--last_token", "--rounds=6", "--compiled=false", "--device=cpu", f"--out={tmp_path}"]
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["batch"], row["context"], row["mode"]) for row in rows] == [
        (2, 24, mode) for mode in ("eager", "compiled", "cached")
    ]
    ratios = {"taper/rms", "rms_folded/rms", "taper_folded/rms", "taper_folded/rms_folded"}
    assert all(set(row["speed_up"]) == ratios for row in rows)
    text = (tmp_path / "last_token.md").read_text()
    assert "| 2 | 24 | eager |" in text and "Launches of an eager forward pass: rms " in text
    bench_decode.main(
        ["--last_token", "--ledger", "--dtype=float32", "--device=cpu", f"--out={tmp_path}"]
    )
    launches = json.loads(capsys.readouterr().out.splitlines()[-1])["launches"]
    assert {name: sum(counts.values()) for name, counts in launches.items()} == rows[0]["launches"]
    # Of 5 norms, the 4 internal ones lose square, mean, + eps, root and a product when tapered, and
    # the rest folded.
    assert [launches[name].get("mean", 0) for name in ("rms", "taper", "taper_folded")] == [5, 1, 1]
    # products with gains
    assert rows[0]["launches"]["rms"] - rows[0]["launches"]["rms_folded"] == 5
    assert rows[0]["launches"]["rms"] - rows[0]["launches"]["taper"] == 4 * 4
    assert rows[0]["launches"]["taper"] - rows[0]["launches"]["taper_folded"] == 4 * 2
    assert "| taper_folded |" in (tmp_path / "launches.md").read_text()


def test_what_cannot_be_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="bandwidth=5e-324"):
        bench_decode.main([str(run), "--bandwidth=5e-324"])
    with pytest.raises(UserError, match="out="):
        bench_decode.main(
            [str(run), "--arms=A", "--peers=false", f"--out={tmp_path / 'file'}", *FAST]
        )
    with pytest.raises(UserError, match=r"context=9999: .* tokens at most: lower it"):
        bench_decode.main([str(run), "--ledger", "--context=9999"])
    with pytest.raises(UserError, match="do not fit"):
        bench_decode.main([str(run), "--tokens=100"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no such device"):
            bench_decode.main([str(run), "--device=cuda"])
