"""Compile every kernel for GPUs that are not here, and count what matters in the machine code.

    python -m bench.aot                            # those of training: some minutes
    python -m bench.aot --sm=90 --channels=768     # some of them
    python -m bench.aot --sm=90 --batch=1,8,31,128  # those of decoding, for all published shapes

The launchers run on tensors without memory, and each launch they make is compiled as on a GPU, with
ptxas, cuobjdump and nvdisasm out of Triton's wheel. Columns: registers a thread; stack bytes;
shared memory bytes a program; bits of the widest load and store of global memory, and how many
loads are of fewer bits than 128 (a row's statistics are); instructions that shuffle between threads
(SHFL), wait for other warps (BAR), move spilled registers (spill), compute in float64 (FP64). Loads
that go to shared memory ahead of use (LDGSTS) are not among the load bits.

Users of a GPU get the triton that their torch brings: 3.7.1 for torch 2.13, which requirements.txt
names, 3.6.0 for 2.11. The tables of another one:

    pip install --target=DIR --no-deps triton==3.6.0
    PYTHONPATH=DIR python -m bench.aot

In decoding, C is the number of inputs of a product, of a head's channels, or of a row. From sm_90
on kernels are those of overlapping launches; the JSON line has how many loads each begins before it
waits. The last line of output is JSON, which also has each program's warps. Exit code 1 if a kernel
spills or computes in float64.
"""

import bisect
import itertools
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from common.errors import ConfigError, UserError, run_program
from common.output import markdown
from configurator import key, parse_args
from decode.arms import is_plain_pre_norm, with_norms
from decode.pack import LEVELS, pack
from decode.step import Decoder
from hf.config import SHAPES
from kernels import binding, rows
from kernels.decode.overlap import overlapping
from kernels.decode.triton_launches import FUSED
from kernels.operands import Inputs, Outputs, Settings
from kernels.reference import ACTIVATIONS, GATED
from load import load_model
from norm_types import SHARED

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROWS = 65536
PROGRAMS = 8 * 132  # of a backward kernel: eight for each multiprocessor of an H200
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
BACKWARD = ("backward_kernel", "dots_kernel", "sum_kernel")
EARLY = ("vector_kernel", "attend_kernel")  # of decoding: these begin to load before they wait
# compile-time arguments that tell launches of decoding apart
NAMED_FACTS = ("N", "KIND", "OWN", "HEADS", "WINDOW", "PARTS", "Q_NORM")
GIVEN = ("INV", "BIAS", "V_GAIN")  # tensors that do so too: a launch has them or not


@dataclass(frozen=True)
class AotConfig:
    """Keys of bench/aot.py."""

    sm: tuple[int, ...] = key(
        (80, 90, 100), f"compute capabilities times ten: {', '.join(map(str, ARCHITECTURES))}"
    )
    channels: tuple[int, ...] = key(
        (768, 1024, 2048, 4096, 8192, 16384), "C; variants at the first", least=1
    )
    variants: bool = key(True, "what training needs more rarely: biases, frozen gains and others")
    batch: tuple[int, ...] = key((), "kernels of decoding: sequences decoded at once", least=1)
    shapes: tuple[str, ...] = key(tuple(SHAPES), "of decoding: shapes, separated by commas")

    def __post_init__(self) -> None:
        if not self.sm or not {*self.sm} <= {*ARCHITECTURES}:
            raise ConfigError(
                f"sm: give some of {', '.join(map(str, ARCHITECTURES))}, separated by commas"
            )


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Case(NamedTuple):
    """One use of an operator."""

    inputs: Inputs
    settings: Settings

    def changed(self, **tensors: torch.Tensor | None) -> "Case":
        """Return the same use with other inputs."""
        return self._replace(inputs=self.inputs._replace(**tensors))


def cases(channels: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Case]:
    """Return the inputs of every norm and activation at C channels, by name.

    Activations in `dtype` and float32 gains, as in training.
    """
    x = meta(ROWS, channels, dtype=dtype)
    wide = meta(ROWS, 2 * channels, dtype=dtype)  # a gated MLP's two halves
    w = meta(channels)
    s = meta(ROWS, 1)  # a statistic of each row
    found = {kind: Case(Inputs(x, given=s, b=w), Settings(kind)) for kind in ACTIVATIONS}
    for kind in GATED:
        found[kind] = Case(Inputs(wide, given=s, b=meta(2 * channels)), Settings(kind))
    rms = Settings("rms")
    shared = Settings("shared")
    found["rms_norm"] = Case(Inputs(x, w=w), rms)
    found["add_rms_norm"] = Case(Inputs(x, x, w=w), rms)
    found["add_normed"] = Case(Inputs(x, x, w_out=w), Settings(eps_out=1e-5))
    found["norm_add_norm"] = Case(Inputs(x, x, w=w, w_out=w), Settings("rms", eps_out=1e-5))
    found["layer_norm"] = Case(Inputs(x, w=w, b=w), Settings("layer"))
    found["shared_rms_scale"] = Case(Inputs(x, given=s, w=w), shared)
    found["add_shared_rms_scale"] = Case(Inputs(x, x, given=s, w=w), shared)
    found["taper_norm"] = Case(Inputs(x, w=w, w_tilde=w, gate_c=meta(2)), Settings("taper"))
    return found


def both_passes(case: Case, statistic: bool = False, frozen: bool = False) -> None:
    """Run an operator's forward and backward pass.

    Args:
        case: its inputs and settings.
        statistic: has the statistic a gradient too?
        frozen: are gains and biases without one?
    """
    inputs = case.inputs
    names = ("x", "a") if frozen else ("x", "a", "w", "b", "w_out", "w_tilde")
    for name in names:
        tensor = getattr(inputs, name)
        if tensor is not None:
            inputs = inputs._replace(**{name: tensor.detach().requires_grad_()})
    found = Outputs(*binding.Fused.apply(*inputs, case.settings))
    outputs = [found.y, found.h, found.inv if statistic else None]
    outputs = [output for output in outputs if output is not None]
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def operators(channels: int, all_variants: bool) -> Iterator[tuple[str, str, Callable]]:
    """Yield (name, variant, call) of the operators, and of what training needs more rarely.

    A float32 stream (train.py's autocast), a bias, a gradient of the statistic, no gains, frozen
    gains.
    """
    common = cases(channels)
    for name, case in common.items():
        yield name, "", partial(both_passes, case)
    if not all_variants:
        return
    for name, case in cases(channels, torch.float32).items():
        yield name, ", float32", partial(both_passes, case)
    rms_with_bias = common["rms_norm"].changed(b=meta(channels))
    add_with_bias = common["add_rms_norm"].changed(b=meta(channels))
    # a bfloat16 product on a float32 stream (train.py's autocast)
    autocast = common["norm_add_norm"].changed(x=meta(ROWS, channels))
    yield "rms_norm", ", bias", partial(both_passes, rms_with_bias)
    yield "rms_norm", ", ds", partial(both_passes, common["rms_norm"], statistic=True)
    yield "add_rms_norm", ", bias, ds", partial(both_passes, add_with_bias, statistic=True)
    yield "norm_add_norm", ", ds", partial(both_passes, common["norm_add_norm"], statistic=True)
    yield "norm_add_norm", ", autocast", partial(both_passes, autocast)
    for name in ("rms_norm", "shared_rms_scale"):
        yield name, ", frozen", partial(both_passes, common[name], frozen=True)
    for name, case in common.items():
        if name not in ACTIVATIONS:
            bare = case.changed(w=None, b=None, w_out=None, w_tilde=None)
            yield name, ", no gain", partial(both_passes, bare)


class Launch(NamedTuple):
    """A Triton kernel and what it would be started with, by name: arguments and options."""

    kernel: triton.JITFunction
    arguments: dict


def launches(call: Callable) -> list[Launch]:
    """Return the launches that `call` would make. No kernel is started."""
    made: list[Launch] = []

    def record(kernel, *arguments, grid, warmup, **named):
        made.append(Launch(kernel, dict(zip(kernel.arg_names, arguments)) | named))

    with (
        mock.patch.object(triton.JITFunction, "run", record),
        mock.patch.object(rows, "programs", lambda *_: PROGRAMS),
    ):
        call()
    return made


def compiled(launch: Launch, sm: int) -> CompiledKernel:
    """Compile a launch for a GPU of capability sm / 10, specialised to its arguments."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_device=lambda: sm,  # Triton keeps what it compiled by device
        get_current_stream=lambda device: 0,
    )
    active = property(lambda _: driver)
    with mock.patch.object(type(triton.runtime.driver), "active", active):
        return launch.kernel.warmup(grid=(1,), **launch.arguments)


def instructions(cubin: bytes) -> bytes:
    """Return the section .text of a cubin, an ELF file (ELF64, little-endian) with one kernel."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # of each section: position of its name among the names, start and length, in bytes
    sections = [
        struct.unpack_from("<I20xQQ", cubin, headers + index * size) for index in range(number)
    ]
    _, first_name, _ = sections[names]
    return next(
        cubin[start : start + length]
        for name, start, length in sections
        if cubin.startswith(b".text.", first_name + name)
    )


def told(content: bytes, tool: str, *options: str) -> str:
    """Return what one of NVIDIA's tools prints of a file with this content."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        command = [str(TOOLS / tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def disassemble(cubins: list[bytes], sm: int) -> list[str]:
    """Return the assembly of each cubin.

    nvdisasm takes 0.4 s to start, so it is started once for all of them.
    """
    codes = [instructions(cubin) for cubin in cubins]
    ends = list(itertools.accumulate(map(len, codes)))
    lines_of: list[list[str]] = [[] for _ in codes]
    architecture = f"SM{sm}a" if sm >= 90 else f"SM{sm}"
    assembly = told(b"".join(codes), "nvdisasm", "-b", architecture)
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
    usage = told(cubin, "cuobjdump", "-res-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack)


def measure(kernel: CompiledKernel, assembly: str) -> dict[str, int | None]:
    """Measure one kernel: the table's columns, and `early`.

    `early` counts the loads and stores, copies to shared memory included, that it begins before it
    waits for the preceding kernel (None: it does not wait).
    """
    start, wait, _ = assembly.partition("ACQBULK")
    early = len(re.findall(r"\b(?:LDG|LDGSTS|STG|LD|ST|UBLKCP)\b", start)) if wait else None

    def count(pattern: str) -> int:
        return len(re.findall(pattern, assembly))

    def widths(instruction: str) -> list[int]:
        """Bits of each such instruction: .128, .64, or 32 without a suffix; [0] for none."""
        found = re.findall(rf"\b{instruction}\.E(?:[.\w]*?\.(64|128)\b)?", assembly)
        return [int(bits or 32) for bits in found] or [0]

    registers, stack = registers_and_stack(kernel.asm["cubin"])
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
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
    """Yield (what a row says, launch) of the kernels of training."""
    for channels in config.channels:
        all_variants = config.variants and channels == config.channels[0]
        for name, variant, call in operators(channels, all_variants):
            for launch in launches(call):
                suffix = "_backward" if launch.kernel.__name__ in BACKWARD else ""
                yield {"operator": f"{name}{suffix}{variant}", "C": channels}, launch


def steps(name: str, batch: int) -> list[Launch]:
    """Return the different launches of decoding steps of a published shape, with a few blocks.

    With its own norms, and where CoupledNorm may take their place with that, also with one
    statistic for the whole model; at every level of fusion, and with a short and a long cache. One
    block normalises its values too, if it does so with its keys.
    """
    with torch.device("meta"):
        model = load_model(f"random:{name}").bfloat16()
    models = [model]
    if is_plain_pre_norm(model):
        models.append(with_norms(model, "coupled"))
        plan = "R" + SHARED * 2 * model.config.n_layer
        models.append(with_norms(model, "coupled", norm_plan=plan))
    found: dict[str, Launch] = {}
    for one, level, length in itertools.product(models, LEVELS, (256, 4096)):
        length = min(length, model.config.block_size)
        packed = pack(one, level)
        packed.blocks = packed.blocks[:6]  # local and global ones
        packed.blocks[1].v_gain = packed.blocks[1].k_gain
        decoder = Decoder(packed, batch, length, ops=FUSED, graph=False)
        for launch in launches(decoder.step):
            types = {
                name: getattr(value, "dtype", value) for name, value in launch.arguments.items()
            }
            found[str((launch.kernel, types))] = launch
    return list(found.values())


def decoding(config: AotConfig, sm: int) -> Iterator[tuple[dict, Launch]]:
    """Yield (what a row says, launch) of the kernels of decoding, overlapping where the GPU can.

    Those that begin to load before they wait, which may cost registers, are there without it too.
    """
    can_overlap = sm >= 90
    for name, batch in itertools.product(config.shapes, config.batch):
        made = steps(name, batch)
        if can_overlap:
            made = [launch for launch in made if launch.kernel.__name__ in EARLY]
            with overlapping():
                made += steps(name, batch)
        for launch in made:
            kernel, given = launch
            # those of compile time, and other numbers
            words = {
                name: value for name, value in given.items() if not isinstance(value, torch.Tensor)
            }
            facts = [f"{key}={words[key]}" for key in NAMED_FACTS if words.get(key)]
            facts += [name for name in GIVEN if given.get(name) is not None]
            row = {
                "operator": f"{name}, batch {batch}, {' '.join(facts)}",
                "C": next(words[key] for key in ("K", "D", "PARTS", "F", "C") if key in words),
                "PDL": words.get("PDL"),
                # attention that makes its query, key and value
                "joint": kernel.__name__ == "attend_kernel" and given["Q"] is None,
            }
            if kernel.__name__ == "vector_kernel":
                # How often a thread loads for the weights of a first tile: of 16 bits, in loads of
                # 128 by every thread of the warps
                weights = words["OUT"] * words["IN"] * (2 if words["KIND"] in GATED else 1)
                row["tile"] = weights * 16 // (32 * words["num_warps"] * 128)
            yield row, launch


def measured(config: AotConfig) -> list[dict]:
    """Compile everything that the config asks for, and measure it: a record a kernel."""
    records = []
    for sm in config.sm:
        made = list(decoding(config, sm) if config.batch else training(config))
        kernels = [compiled(launch, sm) for _, launch in made]
        assemblies = disassemble([kernel.asm["cubin"] for kernel in kernels], sm)
        for (row, launch), kernel, text in zip(made, kernels, assemblies, strict=True):
            warps = launch.arguments["num_warps"]
            row |= {"sm": sm, "kernel": launch.kernel.__name__, "warps": warps}
            records.append(row | measure(kernel, text))
    return records


def main(argv: list[str]) -> int:
    """Print the table, what spills or computes in float64, and the summary.

    Returns:
        The exit status.
    """
    config, _ = parse_args(AotConfig, argv, __doc__)
    records = measured(config)
    head = ("operator", "kernel", "C", "sm", *COLUMNS)
    print(markdown(head, ([record[name] for name in head] for record in records)))
    spills = [record for record in records if record["stack"] or record["spill"]]
    doubles = [record for record in records if record["FP64"]]
    for record in spills + doubles:
        fault = "float64 arithmetic" if record in doubles else "spill"
        print(f"{fault}: {record}")
    summary = {"triton": triton.__version__, "spills": len(spills), "float64": len(doubles)}
    print(json.dumps(summary | {"kernels": records}))
    return 1 if spills or doubles else 0


if __name__ == "__main__":
    run_program(main)
