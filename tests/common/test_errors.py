"""Bad input to train.py: one line that names the thing and the remedy, the right exit code, nothing
lost.

    python -m pytest tests/common/test_errors.py
"""

import errno
import subprocess
from typing import Any

import pytest
import torch
from helpers import TINY, run_python
from warm_python import warm_python

from common.errors import missing_on_this_machine, one_line, run_program


@pytest.fixture
def complaint(train_fails, tiny_data, tmp_path):
    """complaint(*words, **how) -> the error line of a run that must fail."""

    def run(*words: object, **how) -> str:
        places = (f"--data_dir={tiny_data}", f"--out_dir={tmp_path / 'run'}")
        return train_fails(*TINY, *places, *words, **how)

    return run


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--n_layr=2", ["n_layr", "n_layer"]),
        ("--n_layer 2", ["--n_layer", "--key=value"]),
        ("config/nowhere.py", ["config/nowhere.py"]),
        ("--norm_type=rmsnorm", ["rmsnorm", "rms"]),
        ("--norm_type=layer --coupled_first=1", ["coupled_first", "coupled"]),
        ("--gradient_accumulation_steps=0", ["gradient_accumulation_steps"]),
        ("--beta2=1.0", ["beta2"]),
        ("--weight_decay=-1", ["weight_decay"]),
        ("--n_vocab=10", ["n_vocab=10", "60"]),
        ("--position=rope --rope_theta=0", ["rope_theta"]),
        ("--n_embd=999999999999999998", ["n_embd", "GB of memory"]),
        ("--vocab_size=50", ["vocab_size=50", "60"]),
        ("--out_dir=", ["out_dir is empty"]),
        ("--n_layer=100000000", ["n_layer", "GB of memory"]),
        ("--norm_eps=1e30", ["norm_eps=1e+30", "at most 1"]),
        ("--grad_clip=1e-45", ["grad_clip", "0 or at least 1e-06"]),
        ("--init_std=0", ["init_std=0.0", "at least 1e-06"]),
        ("--init_std=1e30", ["init_std=1e+30", "at most 100"]),
        ("--adam_eps=1e-45", ["adam_eps", "at least 1e-30"]),
        ("--adam_eps=1e30", ["adam_eps=1e+30", "at most 1"]),
        ("--position=rope --rope_theta=1e30", ["rope_theta", "at most 1e+15"]),
        ("--norm_type=post --residual_weight=1e-45", ["residual_weight", "at least 1e-06"]),
        ("--norm_type=dyt --point_alpha=1,1e30,1", ["point_alpha", "at most 1000000"]),
        ("--optimizer=muon --parallel=fsdp", ["optimizer=muon", "parallel=ddp"]),
        ("--device=mps" if torch.cuda.is_available() else "--device=cuda", ["device"]),
    ],
)
def test_bad_settings_exit_2(complaint, words, parts):
    line = complaint(*words.split(), code=2)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("--data_dir=nowhere", "no train shards"),
        ("--block_size=20000", "block_size=20000 needs 20001 tokens"),
        ("--data_dir=data/fineweb_edu", "python data/fineweb_edu/prepare.py"),
        *(
            (f"--{key}={'x' * 300}", "long")
            for key in ("out_dir", "data_dir", "init_from", "resume")
        ),
    ],
)
def test_missing_data_and_names_that_are_too_long(complaint, word, part):
    assert part in complaint(word)


def test_micro_batches_that_ranks_do_not_divide(complaint):
    word = "gradient_accumulation_steps=3"
    assert word in complaint(f"--{word}", code=2, ranks=2)


COMPILES = """
import torch
import torch._inductor.config
from common.errors import run_program
torch._inductor.config.cpp.cxx = ("no-such-compiler",)  # as the variable CXX says
run_program(lambda argv: torch.compile(lambda x: x.sin() + 1)(torch.ones(9)))
"""


def test_a_machine_without_a_compiler(tmp_path):
    keys: Any = {"python": warm_python(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    job = run_python("-c", COMPILES, code=1, **keys)
    assert "Traceback" not in job.stderr
    assert job.stderr.startswith(
        "error: torch.compile and Triton need a C++ compiler and Python's headers"
    )


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "the memory is too small (OutOfMemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "the memory is too small"),
        (MemoryError(), "the memory is too small"),
        (RuntimeError("CppCompileError\na.cpp:7: fatal error: Python.h: No"), "torch.compile and"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "torch.compile and"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "torch.compile and"),
        (OSError(errno.ENOSPC, "No space left", "out/x"), "out/x: No space left: "),
        (ModuleNotFoundError(name="peft"), "this needs a package: pip install peft"),
        # a fault of ours
        (RuntimeError("a mistake"), None),
        (subprocess.CalledProcessError(1, ["git", "log"]), None),
        (RuntimeError("CppCompileError: a.cpp:7:10: error: expected ';'"), None),
    ],
    ids=repr,
)
def test_what_the_machine_lacks(error, start):
    remedy = missing_on_this_machine(error)
    assert remedy is None if start is None else remedy.startswith(start)


def test_ctrl_c_later(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run_program(interrupted)
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_terminal_of_ascii_only():
    code = "from common.errors import run_program; run_program(lambda argv: print('caf\u00e9'))"
    assert run_python("-c", code, PYTHONIOENCODING="ascii").stdout == "caf\\xe9\n"


def test_a_message_is_one_printable_line():
    """A value that it repeats can neither begin a line nor reach a terminal's control."""
    assert one_line("a\nerror: b\x1b[31m\udcff é") == r"a\nerror: b\x1b[31m\udcff é"
    assert len(one_line("x" * 100_000)) < 1010 and one_line("y" * 1000) == "y" * 1000
