"""The machine code of every kernel, compiled without a GPU.

python -m pytest tests/bench/test_aot.py
"""

import json

import pytest
from helpers import ROOT, run_python

from bench import aot
from kernels import rows

if not all((aot.TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")):
    pytest.skip("Triton came without NVIDIA's tools", allow_module_level=True)


def told_by(*words: object) -> dict:
    """The JSON line of a program as a user starts it: never in the interpreter."""
    done = run_python(*words, code=None, TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))
    lines = done.stdout.splitlines() or ["null"]
    return {"rc": done.returncode, "stderr": done.stderr} | (json.loads(lines[-1]) or {})


SUMS = {"layer_norm": 2, "norm_add_norm": 2}  # passes over a row, forward; else 1


def test_no_spills_wide_loads_and_no_barrier_that_no_sum_needs():
    told = told_by("-m", "bench.aot", "--sm=90", "--channels=768,4096,16384")
    assert told["rc"] == 0, told
    found = {
        (record["operator"], record["kernel"], record["C"]): record for record in told["kernels"]
    }
    assert {"rms_norm_backward, float32", "rms_norm, bias"} <= {name for name, _, _ in found}
    for (operator, kernel, C), record in found.items():
        assert record["stack"] == record["spill"] == record["FP64"] == 0, record
        assert record["load bits"] == 128, record
        if kernel == "sum_kernel":
            continue
        # A stream read in pieces would be at least four loads a thread. Without a gain some loops
        # are unrolled by four.
        assert C > 768 or record["narrow loads"] <= (8 if "no gain" in operator else 4), record
        assert record["store bits"] == 128 or kernel == "dots_kernel", record
        coupled = operator.startswith(("shared", "add_shared"))
        if coupled or operator.startswith(("gelu", "relu2", "swiglu", "geglu")):
            assert record["SHFL"] == 0, record
        # else the sums come from a kernel of their own
        elif "backward" not in operator or C <= 8192:
            assert record["SHFL"] > 0, record
        # One warp needs no barrier; more need two for each sum, and one between two sums. Gains
        # and biases need none: they are loaded in the layout of the row.
        if kernel == "activation_kernel":
            assert record["BAR"] == 0, record
        if kernel == "forward_kernel":
            sums = 0 if coupled or C == 768 else SUMS.get(operator.split(",")[0], 1)
            assert C == 16384 or record["BAR"] <= max(0, 3 * sums - 1), record
        # A multiprocessor holds two programs, of whatever norm.
        if kernel == "backward_kernel" and C == 4096:
            assert rows.resident(record["registers"], record["warps"], 65536) >= 2, record
        if coupled and "backward" in operator:
            rival = found[(operator.replace("shared_rms_scale", "rms_norm"), "backward_kernel", C)]
            assert record["registers"] <= rival["registers"], (record, rival)


@pytest.mark.parametrize("words", ["--sm=80", "--sm=100 --variants=false"])
def test_an_older_and_a_newer_gpu(words):
    """At a width of its own. A kernel that spills or computes in float64 is exit code 1."""
    told = told_by("-m", "bench.aot", "--channels=8192", *words.split())
    assert (told["rc"], told["spills"], told["float64"]) == (0, 0, 0), told


def test_kernels_of_a_decoding_step_do_not_spill():
    """Of one row and of as many as our own products take. Where launches overlap, nothing but what
    is meant to begins before the wait.
    """
    told = told_by("-m", "bench.aot", "--sm=90", "--shapes=qwen3-0.6b", "--batch=1,31")
    assert (told["rc"], told["spills"], told["float64"]) == (0, 0, 0), told
    found = {record["kernel"].removesuffix("_kernel") for record in told["kernels"]}
    kinds = "activation attend best combine embed heads matrix take vector"
    assert " ".join(sorted(found)) == kinds
    facts = [(record["kernel"], {*record["operator"].split()}) for record in told["kernels"]]
    for kernel in ("heads_kernel", "attend_kernel"):
        assert any(kernel == name and {"INV", "V_GAIN"} <= given for name, given in facts)
    # of logits, which lack the statistic that a final norm shares
    assert any(name == "activation_kernel" and "KIND=swiglu" not in given for name, given in facts)
    for record in told["kernels"]:
        # of attention that makes heads: 64 keys and values of 128 channels by 8 warps; the position
        wanted = 9 if record["joint"] else record.get("tile", 0)
        assert record["early"] == (wanted if record["PDL"] else None), record


def test_a_spill_and_float64_arithmetic_are_reported_and_exit_1(tmp_path):
    """The check itself: a kernel with float64 arithmetic and one with far too much in registers."""
    program = tmp_path / "bad.py"
    program.write_text(BAD)
    told = told_by(program)
    assert (told["rc"], told["spills"], told["float64"]) == (1, 1, 1), told
    by_name = {record["operator"]: record for record in told["kernels"]}
    assert by_name["double"]["FP64"] > 0 and by_name["double"]["spill"] == 0
    assert by_name["hoard"]["spill"] > 0 and by_name["hoard"]["FP64"] == 0


BAD = """
import sys, torch, triton, triton.language as tl
from common.errors import run_program
from bench import aot

@triton.jit
def double(X, Y, C: tl.constexpr):
    col = tl.arange(0, C)
    tl.store(Y + col, (tl.load(X + col).to(tl.float64) * 1.1).to(tl.float32))

@triton.jit
def hoard(X, Y, C: tl.constexpr):
    col = tl.arange(0, C)
    x = tl.load(X + col)
    tl.store(Y + col, x / tl.sum(x, 0))

def operators(channels, all_variants):
    x = torch.empty(65536, device="meta")
    yield "double", "", lambda: double[(1,)](x, x, C=1024, num_warps=4)
    yield "hoard", "", lambda: hoard[(1,)](x, x, C=32768, num_warps=4)

aot.operators = operators
sys.argv = ["aot", "--sm=90", "--channels=768"]
run_program(aot.main)
"""
