"""bench_decode.py to its end on tiny models: records, tables, peers, traces, the last-token protocol.

    python -m pytest tests/test_bench_decode.py
"""

import dataclasses
import json
from importlib.util import find_spec

import pytest
import torch
from test_decode import make

import bench_decode
import decode_trace
import hf
import last_token
from checkpoint import save_checkpoint
from errors import UserError


@pytest.fixture
def run(tmp_path):
    """A run folder with a trained model's checkpoint, as far as a bench can tell."""
    model = make("qwen3", "rms", init_std=0.3).float()
    state = {"step": 1, "config": dataclasses.asdict(model.config), "meta": {}, "model": model.state_dict()}
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run" / "ckpt_last.pt", state)
    return tmp_path / "run"


FAST = ("--tokens=4", "--rounds=6", "--compiled=false", "--device=cpu")


def test_every_arm_is_checked_timed_and_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    bench_decode.main([str(run), "--arms=A,B,C,D,E,L,M", "--batch=1,3", f"--out={out}", *FAST])
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    assert [record["batch"] for record in summary["batches"]] == [1, 3]
    for record in map(json.loads, (out / "decode.jsonl").read_text().splitlines()):
        names = {"rms", "coupled", "rms_fused", "coupled_fused", "taper_folded", "layer", "layer_fused"}
        assert set(record["arms"]) == names | {"A/A"} and all(len(times) == 6 for times in record["seconds"].values())
        assert {"coupled/rms", "coupled_fused/rms", "coupled_fused/rms_fused", "A/A/rms"} <= set(record["speed_ups"])
        for name in names:
            row = record["arms"][name]
            assert row["same_tokens"] == 4 and row["error"] < 1e-5 and row["prefill_ms"] > 0
            assert row["tokens_per_s"] == pytest.approx(record["batch"] * 1e3 / row["ms_per_token"])
        for ratio in record["speed_ups"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
        assert not record["random_weights"] and record["missing"]  # no Hugging Face model of a run folder
    text = (out / "README.md").read_text()
    assert "coupled_fused/rms_fused" in text and "A mixes" in text and (out / "decode.png").exists()
    assert "| coupled |" in printed and "floor:" in printed

    # A second time only the batch that is measured again takes the place of the old record.
    bench_decode.main([str(run), "--arms=A,C", "--batch=3", "--peers=false", f"--out={out}", *FAST])
    records = [json.loads(line) for line in (out / "decode.jsonl").read_text().splitlines()]
    assert [(record["batch"], len(record["arms"])) for record in records] == [(1, 8), (3, 3)]


def test_a_compiled_step_decodes_the_same(run, capsys):
    """torch.compile and the cache that it writes in place: the program's own checks pass."""
    bench_decode.main([str(run), "--arms=B,D", "--peers=false", "--tokens=4", "--rounds=6", "--device=cpu"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]["arms"]
    assert rows["coupled"]["same_tokens"] == rows["coupled_fused"]["same_tokens"] == 4


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_hugging_faces_generate_takes_part(monkeypatch, capsys):
    tiny = hf.SHAPES["gpt2"] | {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    monkeypatch.setitem(hf.SHAPES, "tiny", tiny)
    bench_decode.main(["random:tiny", "--arms=L,M", *FAST])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["batches"][0]
    assert record["arms"]["hf_eager"]["ms_per_token"] > 0 and "layer/hf_eager" in record["speed_ups"]
    assert "arbitrary ids" in record["prompt"] and record["random_weights"] and record["missing"] == []


def test_traces(run, tmp_path, capsys):
    bench_decode.main([str(run), "--arms=A,C", "--trace", f"--out={tmp_path / 'trace'}", *FAST])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]
    assert rows["rms"]["kernels_per_step"] > 4 * rows["rms"]["kernels_per_block"] > 0
    assert json.loads((tmp_path / "trace" / "rms.json").read_text())["traceEvents"]
    assert (tmp_path / "trace" / "trace.png").exists()
    kinds = {"triton_per_fused_add_mul_rsqrt_0": "norm", "vector_kernel": "product", "attend_kernel": "attention",
             "ampere_bf16_s16816gemm_bf16_64x64": "product", "triton_poi_fused_mean_rsqrt_silu_split_3": "activation",
             "heads_kernel": "heads", "take_kernel": "other", "triton_poi_fused_addmm_gelu_0": "activation",
             "aten::scaled_dot_product_attention": "attention", "aten::addmm": "product"}  # fmt: skip
    assert {name: decode_trace.kind(name) for name in kinds} == kinds


def test_last_token_protocol(monkeypatch, tmp_path, capsys):
    shape = dataclasses.replace(last_token.SHAPE, n_layer=2, n_embd=32, n_head=2, vocab_size=50304, block_size=128)
    monkeypatch.setattr(last_token, "SHAPE", shape)
    monkeypatch.setattr(last_token, "PUBLISHED", {(2, 24): (79.3, 96.8)})
    bench_decode.main(["--last_token", "--rounds=6", "--compiled=false", "--device=cpu", f"--out={tmp_path}"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["batch"], row["context"], row["mode"]) for row in rows] == [
        (2, 24, mode) for mode in ("eager", "compiled", "cached")]
    assert all(set(row["speed_up"]) == {"taper", "taper_folded"} for row in rows)
    text = (tmp_path / "last_token.md").read_text()
    assert "| 2 | 24 | eager |" in text and "Launches of an eager forward pass: rms " in text
    bench_decode.main(["--last_token", "--ledger", "--dtype=float32", "--device=cpu", f"--out={tmp_path}"])
    launches = json.loads(capsys.readouterr().out.splitlines()[-1])["launches"]
    assert {name: sum(counts.values()) for name, counts in launches.items()} == rows[0]["launches"]
    # Of 5 norms, the 4 internal ones lose square, mean, + eps, root and a product when tapered, and the rest folded.
    assert [launches[name].get("mean", 0) for name in ("rms", "taper", "taper_folded")] == [5, 1, 1]
    assert rows[0]["launches"]["rms"] - rows[0]["launches"]["taper"] == 4 * 4
    assert rows[0]["launches"]["taper"] - rows[0]["launches"]["taper_folded"] == 4 * 2
    assert "| taper_folded |" in (tmp_path / "launches.md").read_text()


def test_what_cannot_be_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="out="):
        bench_decode.main([str(run), "--arms=A", "--peers=false", f"--out={tmp_path / 'file'}", *FAST])
    with pytest.raises(UserError, match="do not fit"):
        bench_decode.main([str(run), "--tokens=100"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no such device"):
            bench_decode.main([str(run), "--device=cuda"])
