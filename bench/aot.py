"""Compile every kernel for GPUs that are not here, and count what matters in the machine code.

    python -m bench.aot                            # those of training: some minutes
    python -m bench.aot --sm=90 --channels=768 --out=aot.md  # some of them; the table as a file too
    python -m bench.aot --sm=90 --batch=1,8,31,128  # those of decoding, for all published shapes

The launchers run on tensors without memory, and each launch they make is compiled as on a GPU, with
ptxas, cuobjdump and nvdisasm out of Triton's wheel. Columns: registers a thread; stack bytes;
shared memory bytes a program; bits of the widest load and store of global memory, and how many
loads are of fewer bits than 128 (a row's statistics are); instructions that shuffle between threads
(SHFL), wait for other warps (BAR), move spilled registers (spill), compute in float64 (FP64). Loads
that go to shared memory ahead of use (LDGSTS) are not among the load bits.

Users of a GPU get the triton that their torch names, which need not be the one here. Its tables:

    pip install --target=DIR --no-deps triton==$(python -m bench.aot --named)
    PYTHONPATH=DIR python -m bench.aot

In decoding, C is the number of inputs of a product, of a head's channels, or of a row. From sm_90
on kernels are those of overlapping launches; the JSON line has how many loads each begins before it
waits. The last line of output is JSON. Exit code 1 if a kernel spills or computes in float64.
"""

import bisect
import importlib.metadata
import itertools
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench import aot_decode
from bench.stand_in import meta, replaced
from common.errors import ConfigError, UserError, run_program
from common.output import check_replaceable, markdown, write_bytes_atomically
from configurator import key, parse_args
from hf.config import SHAPES
from kernels import activation, binding, row_norm
from kernels.binding import Inputs
from kernels.decode.overlap import overlapping
from kernels.reference import GATED, KINDS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}
ROWS = 65536
# with bfloat16 that Triton compiles for; another one aborts in LLVM
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120)
COLUMNS = (
    "registers",
    "stack",
    "shared",
    "load bits",
    "store bits",
    "narrow loads",
    "SHFL",
    "BAR",
    "spill",
    "FP64",
)
TABLE = rb"triton \d"  # how the file of a table begins
# The triton of a CUDA build of torch; the metadata of a CPU build names none.
NAMED = {"2.11": "3.6.0", "2.13": "3.7.1"}


@dataclass(frozen=True)
class AotConfig:
    """Keys of bench/aot.py."""

    sm: tuple[int, ...] = key(
        (80, 90, 100), f"compute capabilities times ten: {', '.join(map(str, ARCHITECTURES))}"
    )
    channels: tuple[int, ...] = key(
        (768, 1024, 2048, 4096, 8192, 16384), "C; variants at the first"
    )
    batch: tuple[int, ...] = key((), "kernels of decoding: sequences decoded at once")
    shapes: tuple[str, ...] = key(tuple(SHAPES), "of decoding: shapes, separated by commas")
    named: bool = key(False, "only print the version of triton that torch names")
    out: str = key("", "write the table to this Markdown file")

    def __post_init__(self) -> None:
        if not self.sm or not {*self.sm} <= {*ARCHITECTURES}:
            raise ConfigError(
                f"sm: give some of {', '.join(map(str, ARCHITECTURES))}, separated by commas"
            )
        if not {*self.shapes} <= {*SHAPES}:
            raise ConfigError(f"shapes: give some of {', '.join(SHAPES)}, separated by commas")
        if min(*self.channels, *self.batch, 1) < 1:
            raise ConfigError("channels and batch are whole numbers from 1 on")


def named_triton() -> str:
    """Return the version of triton that this torch's metadata names, or its CUDA build's."""
    wanted = re.search(
        r"^triton==([\d.]+)", "\n".join(importlib.metadata.requires("torch")), re.MULTILINE
    )
    minor = ".".join(torch.__version__.split(".")[:2])
    return wanted[1] if wanted else NAMED.get(minor, "not known")


def forward(x: torch.Tensor, **inputs) -> Callable:
    """The launch of a norm's forward pass."""
    given = Inputs(x, eps=1e-5, counted=x.shape[-1], **inputs)
    return lambda: row_norm.forward(*given)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str = "rms",
    dh: torch.Tensor | None = None,
    ds: torch.Tensor | None = None,
    gains: bool = True,
    has_output_norm: bool = False,
    **inputs,
) -> Callable:
    """The launch of a norm's backward pass."""
    given = Inputs(x, **inputs)
    s = meta(ROWS, 1)
    vectors = (given.w, given.b, given.w_out, given.w_tilde, given.gate_c)
    statistics = (s if kind == "layer" else None, s, s if has_output_norm else None)
    return lambda: row_norm.backward(
        dy, dh, ds, x, given.a, *vectors, *statistics, x.shape[-1], kind, gains
    )


def cases(channels: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Callable]]:
    """(name, launch) of every norm and activation at C channels.

    Activations in `dtype` and float32 gains, as in training.
    """
    C = channels
    x = meta(ROWS, C, dtype=dtype)
    x2 = meta(ROWS, 2 * C, dtype=dtype)  # a gated MLP's two halves
    w = meta(C)
    w2 = meta(2 * C)
    s = meta(ROWS, 1)  # a statistic of each row
    taper = {"w": w, "w_tilde": w, "gate_c": meta(2), "kind": "taper"}
    both = {"a": x, "w": w, "w_out": w}
    yield "rms_norm", forward(x, w=w, kind="rms")
    yield "rms_norm_backward", backward(x, x, w=w)
    yield "add_rms_norm", forward(x, a=x, w=w, kind="rms")
    yield "add_rms_norm_backward", backward(x, x, dh=x, w=w)
    yield "add_normed", forward(x, a=x, w_out=w, eps_out=1e-5)
    yield "norm_add_norm", forward(x, **both, eps_out=1e-5, kind="rms")
    yield "norm_add_norm_backward", backward(x, x, dh=x, **both, has_output_norm=True)
    yield "layer_norm", forward(x, w=w, b=w, kind="layer")
    yield "layer_norm_backward", backward(x, x, "layer", w=w, b=w)
    yield "shared_rms_scale", forward(x, given=s, w=w, kind="shared")
    yield "shared_rms_scale_backward", backward(x, x, "shared", w=w)
    yield "add_shared_rms_scale", forward(x, a=x, given=s, w=w, kind="shared")
    yield "add_shared_rms_scale_backward", backward(x, x, "shared", dh=x, w=w)
    yield "taper_norm", forward(x, **taper)
    yield "taper_norm_backward", backward(x, x, **taper)
    for kind in KINDS:
        given = (x2, s, w2, kind) if kind in GATED else (x, s, w, kind)
        yield f"{kind}", lambda given=given: activation.forward(*given)
        yield f"{kind}_backward", lambda given=given: activation.backward(x, *given, True)


def variants(channels: int) -> Iterator[tuple[str, Callable]]:
    """(name, launch) of what training needs more rarely.

    A float32 stream (train.py's autocast), a bias, a gradient of the statistic, no gains, frozen
    gains.
    """
    for name, launch in cases(channels, torch.float32):
        yield f"{name}, float32", launch
    C = channels
    x = meta(ROWS, C, dtype=torch.bfloat16)
    w = meta(C)
    s = meta(ROWS, 1)
    both = {"a": x, "w": w, "w_out": w}
    yield "rms_norm, bias", forward(x, w=w, b=w, kind="rms")
    yield "rms_norm_backward, bias", backward(x, x, w=w, b=w)
    yield "rms_norm_backward, ds", backward(x, x, ds=s, w=w)
    yield "add_rms_norm_backward, bias, ds", backward(x, x, dh=x, ds=s, w=w, b=w)
    yield "rms_norm, no gain", forward(x, kind="rms")
    yield "rms_norm_backward, no gain", backward(x, x)
    yield "rms_norm_backward, frozen", backward(x, x, w=w, gains=False)
    yield "layer_norm_backward, no gain", backward(x, x, "layer")
    yield "shared_rms_scale, no gain", forward(x, given=s, kind="shared")
    yield "shared_rms_scale_backward, no gain", backward(x, x, "shared")
    yield "shared_rms_scale_backward, frozen", backward(x, x, "shared", w=w, gains=False)
    # a bfloat16 product on a float32 stream (train.py's autocast)
    h = meta(ROWS, C)
    yield "norm_add_norm, autocast", forward(h, **both, eps_out=1e-5, kind="rms")
    yield (
        "norm_add_norm_backward, autocast",
        backward(h, h, dh=h, **both, has_output_norm=True),
    )
    yield "norm_add_norm_backward, ds", backward(x, x, dh=x, ds=s, **both, has_output_norm=True)
    yield (
        "norm_add_norm_backward, no gain",
        backward(x, x, dh=x, a=x, has_output_norm=True),
    )
    yield "taper_norm_backward, no gain", backward(x, x, "taper", gate_c=meta(2))


class Launch(NamedTuple):
    """A Triton kernel and what it would be started with."""

    kernel: triton.JITFunction
    arguments: tuple
    keywords: dict


def launches(call: Callable) -> list[Launch]:
    """Return the launches that `call` would make. No kernel is started."""
    made: list[Launch] = []

    def record(kernel, *arguments, grid, warmup, **keywords):
        made.append(Launch(kernel, arguments, keywords))

    with replaced(triton.JITFunction, run=record):
        call()
    return made


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for a GPU."""

    cubin: bytes  # an ELF file
    shared: int  # bytes of shared memory of a program


def argument_type(value: object) -> str:
    """Return the name of an argument's type in Triton's signatures."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    return "fp32"


def compile_launch(launch: Launch, sm: int) -> Binary:
    """Compile a launch, specialised to its arguments as Triton does on a GPU."""
    kernel, arguments, keywords = launch
    signature = {}
    constants = {}
    attributes = {}
    given = dict(zip(kernel.arg_names, arguments))
    # the other keywords are options of the launch
    given |= {name: value for name, value in keywords.items() if name in kernel.arg_names}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        is_int = isinstance(value, int)
        if value is None or name in keywords or (is_int and value == 1):
            signature[name] = "constexpr"
            constants[(place,)] = value
            continue
        signature[name] = argument_type(value)
        if isinstance(value, torch.Tensor) or (is_int and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        name: keywords[name]
        for name in ("num_warps", "num_stages", "launch_pdl")
        if name in keywords
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return Binary(compiled.asm["cubin"], compiled.metadata.shared)


def instructions(cubin: bytes) -> bytes:
    """Return the section .text of a cubin, an ELF file (ELF64, little-endian) with one kernel."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # of each section: position of its name among the names, start and length, in bytes
    sections = [
        struct.unpack_from("<I20xQQ", cubin, headers + index * size) for index in range(number)
    ]
    _, first_name, _ = sections[names]
    (text,) = (
        cubin[start : start + length]
        for name, start, length in sections
        if cubin.startswith(b".text.", first_name + name)
    )
    return text


def disassemble(cubins: list[bytes], sm: int) -> list[str]:
    """Return the assembly of each cubin.

    nvdisasm takes 0.4 s to start, so it is started once for all of them.
    """
    codes = [instructions(cubin) for cubin in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    lines_of: list[list[str]] = [[] for _ in codes]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        architecture = f"SM{sm}a" if sm >= 90 else f"SM{sm}"
        command = [str(TOOLS / "nvdisasm"), "-b", architecture, file.name]
        assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for offset, instruction in re.findall(r"/\*([0-9a-f]+)\*/ +(.*)", assembly):
        index = bisect.bisect_right(ends, int(offset, 16))
        lines_of[index].append(instruction)
    if any(16 * len(lines) != len(code) for lines, code in zip(lines_of, codes)):
        raise UserError(
            "nvdisasm's output has not one line for each instruction of 16 bytes: "
            "another version of it?"
        )
    return ["\n".join(lines) for lines in lines_of]


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its stack in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()
    return int(registers), int(stack)


def measure(binary: Binary, assembly: str) -> dict[str, int | None]:
    """Measure one kernel: the table's columns, and `early`.

    `early` counts the loads and stores, copies to shared memory included, that it begins before it
    waits for the preceding kernel (None: it does not wait).
    """
    start, wait, _ = assembly.partition("ACQBULK")
    early = None
    if wait:
        early = len(re.findall(r"\b(?:LDG|LDGSTS|STG|LD|ST|UBLKCP)\b", start))

    def count(pattern: str) -> int:
        return len(re.findall(pattern, assembly))

    def widths(instruction: str) -> list[int]:
        """Bits of each such instruction: .128, .64, or 32 without a suffix; [0] for none."""
        found = []
        for suffix in re.findall(rf"\b{instruction}\.E([.\w]*)", assembly):
            if ".128" in suffix:
                found.append(128)
            elif ".64" in suffix:
                found.append(64)
            else:
                found.append(32)
        return found or [0]

    registers, stack = registers_and_stack(binary.cubin)
    return {
        "registers": registers,
        "stack": stack,
        "shared": binary.shared,
        "load bits": max(widths("LDG")),
        "store bits": max(widths("STG")),
        "narrow loads": sum(bits < 128 for bits in widths("LDG")),
        "SHFL": count(r"\bSHFL\b"),
        "BAR": count(r"\bBAR\b"),
        "spill": count(r"\b(?:LDL|STL)\b"),
        "FP64": count(r"\b(?:DADD|DMUL|DFMA|DSETP|DMNMX)\b|\.F64\b|64H\b"),
        "early": early,
    }


def training(config: AotConfig) -> Iterator[tuple[dict, Launch]]:
    """(what a row says, launch) of the kernels of training, all architectures."""
    for sm, channels in itertools.product(config.sm, config.channels):
        operators = list(cases(channels))
        if channels == config.channels[0]:
            operators += variants(channels)
        for name, call in operators:
            for launch in launches(call):
                yield {"operator": name, "C": channels, "sm": sm}, launch


def decoding(config: AotConfig) -> Iterator[tuple[dict, Launch]]:
    """(what a row says, launch) of the kernels of decoding, with overlap where the GPU has it.

    Those that begin to load before they wait, which may cost registers, are there without it too.
    """
    for sm, name, batch in itertools.product(config.sm, config.shapes, config.batch):
        for operator, size, call in aot_decode.cases(name, batch):
            row = {"operator": f"{name} {operator}, batch {batch}", "C": size, "sm": sm}
            for overlaps in (False, True) if sm >= 90 else (False,):
                with overlapping() if overlaps else nullcontext():
                    made = launches(call)
                for launch in made:
                    kernel = launch.kernel.__name__
                    if overlaps or sm < 90 or kernel in aot_decode.EARLY:
                        facts = {"PDL": launch.keywords.get("PDL")}
                        yield row | facts | aot_decode.first_tile(kernel, launch.keywords), launch


def measured(config: AotConfig) -> list[dict]:
    """Compile everything that the config asks for, and measure it: a record a kernel."""
    compiled = []
    for row, launch in decoding(config) if config.batch else training(config):
        row["kernel"] = launch.kernel.__name__
        compiled.append((row, compile_launch(launch, row["sm"])))
    records = []
    for sm in config.sm:
        of_sm = [(row, binary) for row, binary in compiled if row["sm"] == sm]
        assemblies = disassemble([binary.cubin for _, binary in of_sm], sm)
        for (row, binary), text in zip(of_sm, assemblies, strict=True):
            records.append(row | measure(binary, text))
    return records


def main(argv: list[str]) -> int:
    """Print the table, what spills or computes in float64, and the summary.

    Returns:
        The exit status.
    """
    config, _ = parse_args(AotConfig, argv, __doc__)
    if config.named:
        print(named_triton())
        return 0
    if config.out:
        check_replaceable(Path(config.out), TABLE)
    if binding.INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so there is nothing to compile: unset it")
    records = measured(config)
    head = ("operator", "kernel", "C", "sm", *COLUMNS)
    text = markdown(head, ([record[name] for name in head] for record in records))
    print(text)
    compiler = f"triton {triton.__version__}; torch {torch.__version__} names {named_triton()}"
    if config.out:
        write_bytes_atomically(Path(config.out), f"{compiler}\n\n{text}\n".encode())
    spills = [record for record in records if record["stack"] or record["spill"]]
    doubles = [record for record in records if record["FP64"]]
    for record in spills + doubles:
        fault = "float64 arithmetic" if record in doubles else "spill"
        print(f"{fault}: {record}")
    summary = {"compiler": compiler, "spills": len(spills), "float64": len(doubles)}
    print(json.dumps(summary | {"kernels": records}))
    return 1 if spills or doubles else 0


if __name__ == "__main__":
    run_program(main)
