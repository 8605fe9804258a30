"""Errors meant for people: one line that names the thing and the remedy, and an exit code."""

import os
import re
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can put right. Shown as one line; the program exits with `exit_code`."""

    exit_code = 1
    on_every_rank = False  # every process of a run raises it alike, so rank 0 speaks for all


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, or contradicts another one."""

    exit_code = 2
    on_every_rank = True


class FoldError(ConfigError):
    """A conversion does not fit this model, or the model cannot be analysed or checked."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, no checkpoint at all, or of another model."""


class DataError(UserError):
    """A data folder or shard is missing, torn, of another format, or does not fit the run."""


class HFError(UserError):
    """A Hugging Face folder is missing, torn, of an unknown architecture, or asks for what our GPT
    does not have.
    """


def missing_on_this_machine(error: Exception) -> str | None:
    """What to do about an error that is the machine's, not ours: memory or a compiler that is not
    there.
    """
    text = f"{type(error).__name__}: {error}"
    if "OutOfMemoryError" in text:
        asked = re.search(r"Tried to allocate [\d.]+ \w+|$", text)[0]
        return (
            f"the GPU's memory is too small ({asked}): lower the batch or other sizes (train.py "
            "does the same with a smaller batch_size and as many times more "
            "gradient_accumulation_steps)"
        )
    # Inductor's C++, inductor without a compiler, Triton without one, Triton's C (gcc has said more
    # on stderr)
    failed = (
        r"fatal error: Python\.h",
        "InvalidCxxCompiler",
        "Failed to find C compiler",
        r"CalledProcessError: Command '\['\S*(cc|clang)'",
    )
    if any(re.search(pattern, text) for pattern in failed):
        return (
            "torch.compile and Triton need a C++ compiler and Python's headers, which are not "
            "both here: install them (Debian, Ubuntu: g++ python3-dev), or do without "
            "(--compile=False, on a GPU --kernels=torch too)"
        )
    return None


def run_program(main: Callable[[list[str]], int | None]) -> None:
    """Run `main(argv)` as a program: user errors become one line on stderr and an exit code."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        if not (error.on_every_rank and int(os.environ.get("RANK", 0))):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `python X.py --help | head` is no failure of ours
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not (remedy := missing_on_this_machine(error)):
            raise
        print(f"error: {remedy}", file=sys.stderr, flush=True)
        sys.exit(1)
