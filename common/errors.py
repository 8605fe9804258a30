"""Errors for users: one line that names the thing and the remedy, and an exit code."""

import os
import re
import sys
from collections.abc import Callable

INTERRUPTED = "error: interrupted\n"
LONGEST_LINE = 1000  # characters of a message


class UserError(Exception):
    """Something that the user can put right, shown as one line."""

    exit_code = 1
    on_every_rank = False  # True where every process raises it alike; rank 0 alone prints it then


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, or contradicts another one."""

    exit_code = 2
    on_every_rank = True


class NormFileError(ConfigError):
    """A norm type needs a norm file that is not there, or another one. The message says which."""


class FoldError(ConfigError):
    """A conversion does not fit this model, or the model cannot be analysed or checked."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, not a checkpoint at all, or of another model."""


class DataError(UserError):
    """A data folder or shard is missing, torn, of another format, or does not fit the run."""


class HFError(UserError):
    """A Hugging Face folder is missing, torn, or of an architecture that our GPT does not have."""


def cannot_write(what: object, error: OSError, kept: str = "") -> str:
    """Say that the system refuses to write something, why, and what to do.

    Args:
        what: a path, or key=path.
        error: what the system says.
        kept: what is not lost; "" where nothing could be.
    """
    reason = f"{what}: cannot be written ({error.strerror or error})"
    if kept:
        reason += f"; {kept}"
    return f"{reason}: make room, get permission or choose another path, and repeat the command"


def missing_on_this_machine(error: Exception) -> str | None:
    """Return the remedy for an error of the machine: memory, a file, a package, no compiler.

    None for any other error.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"this needs a package: pip install {error.name}"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}: put that right, and repeat the command"
    text = f"{type(error).__name__}: {error}"
    # PyTorch's on a GPU and on a CPU, Python's and NumPy's
    if re.search("OutOfMemoryError|DefaultCPUAllocator|^_?(Array)?MemoryError", text):
        return (
            f"the memory is too small ({one_line(text)}): lower the batch or other sizes (train.py "
            "does the same with a smaller batch_size and as many times more "
            "gradient_accumulation_steps)"
        )
    no_compiler = (
        r"fatal error: Python\.h",  # Inductor's C++ without Python's headers
        "InvalidCxxCompiler",  # Inductor without a compiler
        "Failed to find C compiler",  # Triton without a compiler
        r"CalledProcessError: Command '\['\S*(cc|clang)'",  # Triton's C; gcc says more on stderr
    )
    if any(re.search(pattern, text) for pattern in no_compiler):
        return (
            "torch.compile and Triton need a C++ compiler and Python's headers, which are not "
            "both here: install them (Debian, Ubuntu: g++ python3-dev), or do without "
            "(--compile=False, on a GPU --kernels=torch too)"
        )
    return None


def lost_ranks(error: Exception) -> bool:
    """Did a collective operation fail because another process of the run has ended?"""
    signs = r"gloo/transport|Connection (closed|reset) by peer|remote process exited"
    is_one_of_many = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return is_one_of_many and re.search(signs, str(error)) is not None


def one_line(text: str) -> str:
    """Return `text` as it fits into one line of a terminal or a log.

    It is printable, and the middle of one of more than LONGEST_LINE characters is left out.
    """
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE // 2]} ... {text[-LONGEST_LINE // 2 :]}"
    return printable(text)


def printable(text: str) -> str:
    """Return `text` with an escape for each character that does not print.

    Line ends and half characters of file names too, so that a value that is repeated in a message
    cannot look like another message, nor tell a terminal what to do.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def failure_line(error: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def run_program(main: Callable[[list[str]], int | None], help_text: str | None = None) -> None:
    """Run `main(argv)` as a program: user errors become one line on stderr and an exit code.

    Args:
        main: the program.
        help_text: what it answers to --help or -h as the first word; None: `main` answers itself.
    """
    if sys.stdout is not None and sys.stdout.errors == "strict":
        # A terminal that knows ASCII only shows other characters as \\u00e9.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if help_text is not None and sys.argv[1:2] in (["--help"], ["-h"]):
            print(help_text)
            sys.exit()
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 or not error.on_every_rank:
            print(f"error: {one_line(str(error))}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has closed the pipe, as in `python X.py --help | head`: no failure.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        remedy = missing_on_this_machine(error)
        if lost_ranks(error):
            rank = os.environ.get("RANK", "?")
            remedy = f"rank {rank} has lost another rank, whose own message says why"
        if remedy is None:
            raise
        print(f"error: {one_line(remedy)}", file=sys.stderr, flush=True)
        sys.exit(1)
