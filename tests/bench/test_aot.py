"""The machine code of every kernel, compiled without a GPU.

python -m pytest tests/bench/test_aot.py
"""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from bench import aot
from bench import aot_decode as decode_aot
from bench.stand_in import replaced
from common.errors import ConfigError
from hf.config import SHAPES, shape_config

if not all((aot.TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump", "nvdisasm")):
    pytest.skip("Triton came without NVIDIA's tools", allow_module_level=True)

# C for each architecture: all of the program's for one, and three of them for the others
FEW = (768, 4096, 16384)
CHANNELS = {80: FEW, 90: aot.AotConfig.channels, 100: FEW}


def run_aot(*words, module="bench.aot"):
    """The program as a user starts it: never in the interpreter."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("sm", CHANNELS)  # one test each: two workers share them
def test_no_spills_wide_loads_no_shuffles_where_nothing_is_reduced(sm, tmp_path):
    channels = CHANNELS[sm]
    words = ",".join(map(str, channels))
    done = run_aot(f"--sm={sm}", f"--channels={words}", f"--out={tmp_path / 'aot.md'}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    found = {
        (record["operator"], record["kernel"], record["C"]): record for record in summary["kernels"]
    }
    assert {C for _, _, C in found} == set(channels) and {
        record["sm"] for record in found.values()
    } == {sm}
    assert (tmp_path / "aot.md").read_text().count("\n| rms_norm |") == len(channels)
    variants = {
        "rms_norm_backward, float32",
        "rms_norm_backward, no gain",
        "rms_norm_backward, ds",
        "rms_norm, bias",
    }
    assert variants <= {name for name, _, _ in found}
    for (operator, kernel, C), record in found.items():
        assert record["stack"] == record["spill"] == record["FP64"] == 0, record
        assert record["load bits"] == 128, record
        # A stream read in pieces would be at least four loads a thread. Without a gain some loops
        # are unrolled by four.
        assert C > 768 or record["narrow loads"] <= (8 if "no gain" in operator else 3), record
        assert record["store bits"] == 128 or kernel == "dots_kernel", record
        coupled = operator.startswith(("shared", "add_shared"))
        if coupled or operator.startswith(("gelu", "relu2", "swiglu", "geglu")):
            assert record["SHFL"] == 0, record
        # else the sums come from a kernel of their own
        elif "backward" not in operator or C <= 8192:
            assert record["SHFL"] > 0, record
        if coupled and "backward" in operator:
            rival = found[(operator.replace("shared_rms_scale", "rms_norm"), "backward_kernel", C)]
            assert record["registers"] <= rival["registers"], (record, rival)


def test_kernels_of_a_decoding_step_do_not_spill():
    """Of one row and of as many as our own products take; the program's default is all shapes and
    four batch sizes.
    """
    done = run_aot("--shapes=qwen3-0.6b", "--batch=1,31", module="bench.aot_decode")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    names = {record["kernel"] for record in summary["kernels"]}
    assert names == {
        "vector_kernel",
        "matrix_kernel",
        "heads_kernel",
        "attend_kernel",
        "combine_kernel",
        "epilogue_kernel",
        "embed_kernel",
        "best_kernel",
        "take_kernel",
    }
    assert (
        summary["spills"] == summary["float64"] == 0 and decode_aot.SHAPES.keys() == SHAPES.keys()
    )
    for record in summary["kernels"]:  # where launches overlap, nothing else begins before the wait
        joint = record["kernel"] == "attend_kernel" and "heads" in record["operator"]
        # 64 keys and values of 128 channels by 8 warps; the position
        wanted = 9 if joint else record.get("tile", 0)
        assert record["early"] == (wanted if record["PDL"] else None), record
    for name, shape in decode_aot.SHAPES.items():  # the matrices are the published models'
        config = shape_config(name)
        heads = (config.n_head, config.kv_heads, config.head_channels)
        width, qkv = config.n_embd, (heads[0] + 2 * heads[1]) * heads[2]
        assert shape == (
            (qkv, width),
            (config.inner, width),
            (width, heads[0] * heads[2]),
            (width, config.inner),
            config.activation,
            config.n_vocab or config.vocab_size,
            heads,
        )


def test_every_operator_is_compiled():
    from kernels import binding

    names = {name for name, _ in aot.cases(768)}
    operators = {name for name, value in vars(binding).items() if hasattr(value, "_opoverload")}
    kinds = {"scaled_activation": "gelu", "scaled_activation_backward": "gelu_backward"}
    assert {kinds.get(name, name) for name in operators} <= names


def test_a_spill_and_float64_arithmetic_are_reported_and_exit_1(tmp_path):
    """The check itself: a kernel with float64 arithmetic and one with far too much in registers."""
    program = tmp_path / "bad.py"
    program.write_text(BAD)
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    by_name = {record["operator"]: record for record in summary["kernels"]}
    assert by_name["double"]["FP64"] > 0 and by_name["double"]["spill"] == 0
    assert by_name["hoard"]["spill"] > 0 and by_name["hoard"]["FP64"] == 0
    assert summary["spills"] == summary["float64"] == 1


BAD = """
import sys, torch, triton, triton.language as tl
from bench.stand_in import replaced
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

def cases(channels):
    x = torch.empty(65536, device="meta")
    yield "double", lambda: double[(1,)](x, x, C=1024, num_warps=4)
    yield "hoard", lambda: hoard[(1,)](x, x, C=65536, num_warps=4)

aot.cases, aot.variants = cases, lambda channels: ()
sys.argv = ["aot", "--sm=90", "--channels=768"]
run_program(aot.main)
"""


def test_wrong_settings_are_refused():
    for words in (["--sm=9.5"], ["--sm=91"], ["--sm="], ["--channels=0"], ["--channels="]):
        with pytest.raises(ConfigError, match=words[0][2:4]):
            aot.main(words)
    for word in ("--batch=0", "--batch=", "--shapes=qwen3"):
        with pytest.raises(ConfigError, match=word[2:7]):
            decode_aot.main([word])


def test_the_program_starts_by_name_and_by_path():
    done = run_aot("--sm=91")
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: sm")
        and len(done.stderr.splitlines()) == 1
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.aot"], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "unset" in done.stderr


def test_replaced_attributes_come_back():
    """Of a class: its own, as it was written; an inherited one; and none that is not there."""

    class Base:
        @staticmethod
        def kind():
            return "base"

    class Own(Base):
        size = property(lambda self: 1)

    before = dict(vars(Own))
    with pytest.raises(ZeroDivisionError), replaced(Own, kind=staticmethod(lambda: "new"), size=2):
        assert Own().kind() == "new" and Own().size == 2
        raise ZeroDivisionError
    assert dict(vars(Own)) == before and Own().kind() == "base" and Own().size == 1
    with pytest.raises(AttributeError, match="gone"), replaced(Own, size=3, gone=4):
        pass
    assert dict(vars(Own)) == before
