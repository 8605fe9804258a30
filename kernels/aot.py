"""Compile every kernel for GPUs that are not here, and count what matters in the machine code.

    python -m kernels.aot                                      # all kernels, channels, architectures: some minutes
    python -m kernels.aot --sm=90 --channels=768 --out=aot.md  # some of them; the table as a file too

The launchers run on tensors without memory, and each launch they make is compiled as on a GPU, with ptxas,
cuobjdump and nvdisasm out of Triton's wheel. Columns: registers a thread; stack bytes; shared memory bytes a program;
bits of the widest load and store of global memory, and how many loads are of fewer bits than 128 (a row's statistics
are); instructions that shuffle between threads (SHFL), wait for other warps (BAR), move spilled registers (spill),
compute in float64 (FP64).

The last line of output is JSON. Exit code 1 if a kernel spills or computes in float64.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python kernels/aot.py`

from configurator import key, parse_args
from errors import ConfigError, UserError, run_program
from kernels import activation, binding, row_norm, shared_rms, taper

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
ROWS = 65536
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)  # with bfloat16 that Triton compiles for; another one aborts in LLVM
COLUMNS = ("registers", "stack", "shared", "load bits", "store bits", "narrow loads", "SHFL", "BAR", "spill", "FP64")


@dataclass(frozen=True)
class AotConfig:
    """Keys of kernels/aot.py."""

    sm: tuple[int, ...] = key((80, 90, 100), f"compute capabilities times ten: {', '.join(map(str, ARCHITECTURES))}")
    channels: tuple[int, ...] = key((768, 1024, 2048, 4096, 8192, 16384), "C; variants at the first")
    out: str = key("", "write the table to this Markdown file")

    def __post_init__(self) -> None:
        if not self.sm or not {*self.sm} <= {*ARCHITECTURES}:
            raise ConfigError(f"sm: give some of {', '.join(map(str, ARCHITECTURES))}, separated by commas")
        if not self.channels or min(self.channels) < 1:
            raise ConfigError("channels: give whole numbers from 1 on, separated by commas")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases(channels: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Callable]]:
    """(name, launch) of every operator at C channels: activations in `dtype`, float32 gains, as in training."""
    x, x2 = meta(ROWS, channels, dtype=dtype), meta(ROWS, 2 * channels, dtype=dtype)
    w, w2, s, gate_c = meta(channels), meta(2 * channels), meta(ROWS, 1), meta(2)
    C, eps = channels, 1e-5
    yield "rms_norm", lambda: row_norm.rms_norm(x, w, None, eps, 1, C)
    yield "rms_norm_backward", lambda: row_norm.rms_norm_backward(x, None, None, x, w, None, s, C, True)
    yield "add_rms_norm", lambda: row_norm.add_rms_norm(x, x, w, None, eps, 1, C)
    yield "add_rms_norm_backward", lambda: row_norm.rms_norm_backward(x, x, None, x, w, None, s, C, True)
    yield "layer_norm", lambda: row_norm.layer_norm(x, w, w, eps)
    yield "layer_norm_backward", lambda: row_norm.layer_norm_backward(x, x, w, w, s, s, True)
    yield "shared_rms_scale", lambda: shared_rms.shared_rms_scale(x, s, w)
    yield "shared_rms_scale_backward", lambda: shared_rms.shared_rms_scale_backward(x, None, x, s, w, True)
    yield "add_shared_rms_scale", lambda: shared_rms.add_shared_rms_scale(x, x, s, w)
    yield "add_shared_rms_scale_backward", lambda: shared_rms.shared_rms_scale_backward(x, x, x, s, w, True)
    yield "taper_norm", lambda: taper.taper_norm(x, w, w, gate_c, eps)
    yield "taper_norm_backward", lambda: taper.taper_norm_backward(x, x, w, w, gate_c, s, True)
    for kind in ("gelu", "gelu_tanh", "relu2", "swiglu"):
        given = (x2, s, w2, kind) if kind == "swiglu" else (x, s, w, kind)
        yield f"{kind}", lambda given=given: activation.scaled_activation(*given)
        yield f"{kind}_backward", lambda given=given: activation.scaled_activation_backward(x, *given, True)


def variants(channels: int) -> Iterator[tuple[str, Callable]]:
    """What training meets more rarely: a float32 stream (train.py's autocast), a bias, a gradient of the statistic, no
    gains, frozen gains."""
    for name, launch in cases(channels, torch.float32):
        yield f"{name}, float32", launch
    x, w, s, C, eps = meta(ROWS, channels, dtype=torch.bfloat16), meta(channels), meta(ROWS, 1), channels, 1e-5
    yield "rms_norm, bias", lambda: row_norm.rms_norm(x, w, w, eps, 1, C)
    yield "rms_norm_backward, bias", lambda: row_norm.rms_norm_backward(x, None, None, x, w, w, s, C, True)
    yield "rms_norm_backward, ds", lambda: row_norm.rms_norm_backward(x, None, s, x, w, None, s, C, True)
    yield "add_rms_norm_backward, bias, ds", lambda: row_norm.rms_norm_backward(x, x, s, x, w, w, s, C, True)
    yield "rms_norm, no gain", lambda: row_norm.rms_norm(x, None, None, eps, 1, C)
    yield "rms_norm_backward, no gain", lambda: row_norm.rms_norm_backward(x, None, None, x, None, None, s, C, True)
    yield "rms_norm_backward, frozen", lambda: row_norm.rms_norm_backward(x, None, None, x, w, None, s, C, False)
    yield "layer_norm_backward, no gain", lambda: row_norm.layer_norm_backward(x, x, None, None, s, s, True)
    yield "shared_rms_scale, no gain", lambda: shared_rms.shared_rms_scale(x, s, None)
    yield "shared_rms_scale_backward, no gain", lambda: shared_rms.shared_rms_scale_backward(x, None, x, s, None, True)
    yield "shared_rms_scale_backward, frozen", lambda: shared_rms.shared_rms_scale_backward(x, None, x, s, w, False)
    yield "taper_norm_backward, no gain", lambda: taper.taper_norm_backward(x, x, None, None, meta(2), s, True)


def launches(launch: Callable) -> list[tuple[triton.JITFunction, tuple, dict]]:
    """(kernel, arguments, keywords) of every kernel that `launch` would start; nothing is started."""
    made: list[tuple[triton.JITFunction, tuple, dict]] = []

    def record(kernel, *arguments, grid, warmup, **keywords):
        made.append((kernel, arguments, keywords))

    with mock.patch.object(triton.JITFunction, "run", record):
        launch()
    return made


def compile_launch(kernel: triton.JITFunction, arguments: tuple, keywords: dict, sm: int) -> tuple[bytes, int]:
    """(machine code, shared memory in bytes), specialised to its arguments as Triton does on a GPU."""
    signature, constants, attributes = {}, {}, {}
    given = dict(zip(kernel.arg_names, arguments)) | {k: v for k, v in keywords.items() if k in kernel.arg_names}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if value is None or name in keywords or (isinstance(value, int) and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "fp32"
        if isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: keywords[name] for name in ("num_warps", "num_stages", "launch_pdl") if name in keywords}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def measure(code: bytes, shared: int) -> dict[str, int | None]:
    """The table's columns for one kernel's machine code; and `early`, the loads and stores, copies to shared memory
    included, that it begins before it waits for the kernel before (None: it does not wait)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, assembly = (
            subprocess.run([str(TOOLS / words[0]), *words[1:], file.name], capture_output=True, text=True, check=True)
            for words in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c", "-ndf"))
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups())
    start, wait, _ = assembly.stdout.partition("ACQBULK")
    early = len(re.findall(r"\b(?:LDG|LDGSTS|STG|LD|ST|UBLKCP)\b", start)) if wait else None

    def count(pattern: str) -> int:
        return len(re.findall(pattern, assembly.stdout))

    def widths(instruction: str) -> list[int]:
        found = re.findall(rf"\b{instruction}\.E([.\w]*)", assembly.stdout)
        return [next((bits for bits in (128, 64) if f".{bits}" in word), 32) for word in found] or [0]

    return dict(zip(COLUMNS, (
        registers, stack, shared, max(widths("LDG")), max(widths("STG")), sum(bits < 128 for bits in widths("LDG")),
        count(r"\bSHFL\b"), count(r"\bBAR\b"),
        count(r"\b(?:LDL|STL)\b"), count(r"\b(?:DADD|DMUL|DFMA|DSETP|DMNMX)\b|\.F64\b|64H\b"),
    ))) | {"early": early}  # fmt: skip


def table(records: list[dict]) -> str:
    """Markdown."""
    head = ("operator", "kernel", "C", "sm", *COLUMNS)
    lines = [head, ["---"] * len(head)] + [[str(record[name]) for name in head] for record in records]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def finish(records: list[dict], out: str) -> int:
    """Prints the table, what spills or computes in float64, and the summary; writes the table. The exit status."""
    text = table(records)
    print(text)
    if out:
        try:
            Path(out).write_text(f"triton {triton.__version__}\n\n{text}\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"out={out}: cannot be written ({error.strerror})") from None
    spills = [record for record in records if record["stack"] or record["spill"]]
    doubles = [record for record in records if record["FP64"]]
    for record in spills + doubles:
        print(f"{'float64 arithmetic' if record in doubles else 'spill'}: {record}")
    summary = {"triton": triton.__version__, "spills": len(spills), "float64": len(doubles), "kernels": records}
    print(json.dumps(summary))
    return 1 if spills or doubles else 0


def main(argv: list[str]) -> int:
    config, _ = parse_args(AotConfig, argv, __doc__)
    if binding.INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so there is nothing to compile: unset it")
    records = []
    for sm in config.sm:
        for place, channels in enumerate(config.channels):
            for name, launch in itertools.chain(cases(channels), variants(channels) if place == 0 else ()):
                for kernel, arguments, keywords in launches(launch):
                    record = {"operator": name, "kernel": kernel.__name__, "C": channels, "sm": sm}
                    records.append(record | measure(*compile_launch(kernel, arguments, keywords, sm)))
    return finish(records, config.out)


if __name__ == "__main__":
    run_program(main)
