"""What tests share: tiny shards, and Job, which runs train.py's main in fresh processes, as
torchrun would.

Processes are forked from a server that has imported torch already, so that a test can start dozens
of runs, kill them with real signals, and still be done in seconds.
"""

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import time
import typing
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

# Inductor compiles a test program for each vector instruction set, in every process anew: eight
# seconds of a core. It is told that the compiler knows the basic ones (AVX2, AVX512) where the
# processor has them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if find_spec("triton"):
    import triton_interpreter  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
# What runs and other programs import sooner or later (AdamW imports dynamo): two seconds and more
# that each process would take again
PROGRAMS = ["train", "report", "convert", "bench.train"]
FORKS.set_forkserver_preload(
    ["tests.first", *PROGRAMS, "torch.distributed.fsdp", "torch._dynamo", "pytest"]
)

torch.set_num_threads(1)

# torch.export lists all operators again for each namespace, and builds the type in a signature for
# each of them: half of its time.
torch._export.utils._materialize_cpp_cia_ops = functools.cache(
    torch._export.utils._materialize_cpp_cia_ops
)
torch._ops.Callable = typing.Callable
# And it prepares them for kinds of hardware that no test has: the first are CPU, CUDA and meta.
del torch.export.exported_program._BACKEND_KEYS_TO_OVERRIDE[3:]
del torch.export.exported_program._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE[3:]
# Nobody reads where in a model each operation of a graph came from.
torch.fx.config.do_not_emit_stack_traces = True
# Nor where a seed was set for a device that is not there. (This is Python's own module.)
torch.cuda.traceback.format_stack = lambda *where, **limits: []


TINY = (
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--init_std=0.02",
    "--block_size=16",
    "--batch_size=2",
    "--eval_tokens=128",
    "--gradient_accumulation_steps=2",
    "--merge_micro_batches=1",
    "--max_iters=40",
    "--warmup_iters=5",
    "--learning_rate=1e-2",
    "--eval_interval=1000",
    "--log_interval=1",
    "--sample_tokens=0",
    "--device=cpu",
)


TAPER_KEYS = ("--taper_warmup=10", "--taper_end=30", "--taper_final=True", "--taper_anchor=0.1")


def keys_of(norm_type: str) -> tuple[str, ...]:
    """The taper of these runs lasts from step 10 to step 30, so that a kill at step 20 falls into
    its decay.
    """
    return (f"--norm_type={norm_type}", *(TAPER_KEYS if norm_type == "taper" else ()))


def offline_data(name: str) -> Path:
    """A file or folder of the offline data, or a skip that says why."""
    root = Path(os.environ.get("NANONORM_DATA", ROOT.parent / "shared" / "data"))
    if not (root / name).exists():
        pytest.skip(f"offline data {name} is not here: set NANONORM_DATA")
    return root / name


BYTES = {"tokenizer": "bytes", "vocab_size": 257}  # meta.json of data in bytes


def write_tiny_shards(
    folder: Path, train: int = 20000, val: int = 2000, vocab: int = 60, meta: dict | None = None
) -> Path:
    """Shards of a learnable sequence (each token depends on the one before, with noise)."""
    from data.shards import write_meta, write_shard

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(0)
    for split, count in (("train", train), ("val", val)):
        noise = random.randint(0, 3, count)
        write_shard(folder / f"tiny_{split}_000000.bin", np.cumsum(1 + noise) % vocab)
    write_meta(folder, meta or chars_meta(vocab))
    return folder


def chars_meta(vocab: int) -> dict:
    """meta.json of data in characters, which count on from 0."""
    chars = "".join(chr(48 + i) for i in range(vocab))
    return {"tokenizer": "chars", "vocab_size": vocab, "chars": chars}


def save_model(path: Path, model: torch.nn.Module, meta: dict | None = None) -> str:
    """Write the checkpoint of a model, in a folder that is made if need be."""
    from training.checkpoint import save_checkpoint

    path.parent.mkdir(exist_ok=True)
    state = {"config": vars(model.config), "meta": meta or {}, "model": model.state_dict()}
    save_checkpoint(path, {"step": 1, **state})
    return str(path)


ITEM_WORDS = [
    "the",
    "a",
    "man",
    "woman",
    "dog",
    "runs",
    "sits",
    "jumps",
    "over",
    "under",
    "table",
    "house",
    "slowly",
]


def write_items(path: Path, count: int) -> Path:
    """Random items with random labels."""
    random = np.random.RandomState(0)
    items = []
    for number in range(count):
        endings = [" ".join(random.choice(ITEM_WORDS, random.randint(1, 9))) for _ in range(4)]
        items.append(
            {
                "ind": 3 * number,
                "ctx": " ".join(random.choice(ITEM_WORDS, random.randint(2, 20))),
                "endings": endings,
                "label": random.randint(4),
            }
        )
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def run_python(
    *words: object,
    cwd: Path = ROOT,
    code: int | None = 0,
    python: str = sys.executable,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python as a user starts it, with these variables as well. `code` (None: any) is how it
    must end. `python` may be warm_python().
    """
    command = [python, *map(str, words)]
    keys = {"capture_output": True, "text": True, "timeout": 1200}
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, **keys)
    assert code in (None, done.returncode), done.stdout[-2000:] + done.stderr[-2000:]
    return done


def _write_to(output: str) -> None:
    """Send this process's stdout and stderr to a file."""
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = open(
        1, "w", closefd=False
    )  # buffered, as in a process of its own, whatever this one was started with


def _child(
    argv: list[str], env: dict[str, str], output: str, patch: tuple[str, dict] | None, program: str
) -> None:
    """In the child: like `python PROGRAM.py ...` with stdout and stderr in a file.

    `patch` names a fault to inject.
    """
    os.environ.update(env)
    _write_to(output)
    sys.argv = [f"{program}.py", *argv]
    torch.set_num_threads(1)
    import faults

    from common.errors import run_program

    if patch is not None:
        getattr(faults, patch[0])(**patch[1])
    run_program(importlib.import_module(program).main)


class Job:
    """One run of train.py, or another program, on `ranks` processes."""

    def __init__(
        self,
        argv: tuple[str, ...],
        ranks: int,
        output: Path,
        patch: tuple[str, dict] | None,
        program: str = "train",
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.outputs = [output.with_suffix(f".{rank}.txt") for rank in range(ranks)]
        self.processes = []
        for rank in range(ranks):
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            if ranks > 1 or "--parallel=fsdp" in argv:
                env |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            job = FORKS.Process(
                target=_child, args=(list(argv), env, str(self.outputs[rank]), patch, program)
            )
            job.start()
            self.processes.append(job)

    def wait(self, timeout: float = 120) -> list[int]:
        """Exit codes of all ranks; a rank that hangs fails the test."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            if process.is_alive():
                process.kill()
        assert not hanging, f"ranks {hanging} hang: {self.text()}"
        return [process.exitcode for process in self.processes]

    def signal_at(self, out_dir: Path, step: int, number: int, timeout: float = 120) -> None:
        """Send signal `number` to all ranks once log.jsonl shows `step`."""
        end = time.monotonic() + timeout
        while not any(record.get("step") == step for record in steps_of(out_dir)):
            assert time.monotonic() < end and self.processes[0].is_alive(), (
                f"never came to step {step}: {self.text()}"
            )
            time.sleep(0.002)
        for process in self.processes:
            os.kill(process.pid, number)

    def text(self) -> str:
        return "\n".join(path.read_text() for path in self.outputs if path.exists())


class Malice:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Bytes of each file in a folder, and when it was written."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def records(out_dir: Path) -> list[dict]:
    """Events of log.jsonl; a line being written at this moment is left out."""
    path = out_dir / "log.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(out_dir: Path, kind: str) -> list[dict]:
    return [record for record in records(out_dir) if record["event"] == kind]


def steps_of(out_dir: Path) -> list[dict]:
    return events(out_dir, "step")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path / "ckpt_last.pt", weights_only=True)["model"]


def same(a: object, b: object) -> bool:
    """Equal nested dicts, lists and plain values; tensors are equal bit for bit, and in type."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(part, b[name]) for name, part in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_weights(a: Path, b: Path) -> bool:
    return same(weights(a), weights(b))


def same_run(a: Path, b: Path) -> bool:
    """Two runs have the same losses, evaluations and weights, to the last bit."""
    return losses(a) == losses(b) and val_losses(a) == val_losses(b) and same_weights(a, b)


def losses(out_dir: Path, name: str = "loss") -> dict[int, float]:
    return {record["step"]: record[name] for record in steps_of(out_dir)}


def val_losses(out_dir: Path) -> dict[int, float]:
    return {record["step"]: record["val_loss"] for record in events(out_dir, "eval")}


def apart(a: dict[int, float], b: dict[int, float]) -> float:
    """How far the losses of two runs are apart, which have the same steps."""
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in a)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, always the same for a seed."""
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def tokens(*shape: int, seed: int = 0, below: int = 32) -> torch.Tensor:
    """Token ids, always the same for a seed."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def shake(module: torch.nn.Module) -> torch.nn.Module:
    """float64, and gains, biases and zero matrices away from 1 and 0: the same way for the same
    role (a taper's base or a norm).
    """
    module.double()
    for name, parameter in module.named_parameters():
        if parameter.dim() <= 1 or not parameter.any():
            role = re.sub(r"(norm[12ef_]+\.)norm\.", r"\1", name.replace("base.", ""))
            seed = zlib.crc32(role.encode())
            parameter += 0.3 * draw(*parameter.shape, seed=seed)
    return module


def plan(norm_type: str, n_layer: int = 12, norm_plan: str = "", channels: int = 768, **keys):
    """The NormPlan of a model without biases."""
    from norm_plan import NormConfig, NormPlan

    config = NormConfig(norm_type=norm_type, norm_plan=norm_plan, **keys)
    return NormPlan(config, n_layer, channels, bias=False)


def random_sections(
    draw: random.Random, norm_type: str, n_layer: int, unwanted: str = ""
) -> tuple[str, str, str]:
    """Letters of inputs, outputs and embedding that a plan of this type may have, but one."""
    from norm_types import NORM_TYPES

    row = NORM_TYPES[norm_type]
    inputs = ""
    for _ in range(2 * n_layer + 1):
        # s and h need a statistic
        sharing = {"s": inputs.rstrip("s").endswith("R"), "h": inputs.rstrip("h").endswith("H")}
        letters = [x for x in row.allowed_letters if x != unwanted and sharing.get(x, True)]
        inputs += draw.choice(letters)
    outputs, embeddings = (
        [x for x in letters + "I" if x != unwanted] for letters in (row.outputs, row.embeddings)
    )
    if draw.random() < 0.3:
        outputs = "I"
    return (
        inputs,
        "".join(draw.choice(outputs) for _ in range(2 * n_layer)),
        draw.choice(embeddings),
    )
