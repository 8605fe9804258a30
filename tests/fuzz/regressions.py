"""Cases that were faults once, each with what went wrong."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Regression:
    """What is added to a program's valid command, and what the fault was."""

    program: str
    words: tuple[str, ...]
    was: str
    names: tuple[str, ...] = ()
    config: bytes | None = None
    model: str = ""  # takes the place of the valid command's model


REGRESSIONS = (
    Regression("train", ("--window=a\nb",), "two lines of error", ("window",)),
    Regression("sample", ("--top_k=\x1b[31mred",), "wrote to the terminal's control", ("top_k",)),
    Regression("train", ("--seed=" + "1" * 5000,), "an error of 10,000 characters", ("seed",)),
    Regression("sample", ("--prompt=FILE:fifo",), "waited for ever", ("prompt",)),
    Regression("sample", (), "waited for ever", ("fifo",), model="fifo"),
    Regression("hellaswag", ("--data=fifo.jsonl",), "waited for ever", ("data",)),
    Regression("hellaswag", ("--data=/dev/zero",), "read until the memory was full", ("data",)),
    Regression("convert", ("--inputs=fifo",), "waited for ever", ("inputs",)),
    Regression("train", ("fifo.py",), "waited for ever", ("fifo.py",)),
    Regression(
        "train",
        ("case.py",),
        "parsed for minutes",
        ("case.py",),
        b"x = 1  # long\n" * 3_000_000,
    ),
    Regression(
        "convert",
        ("case.py",),
        "ValueError: embedded null byte",
        ("out",),
        b'out = "a\\x00b"',
    ),
    Regression(
        "convert",
        ("case.py",),
        "UnicodeEncodeError",
        ("out",),
        b'out = "\\ud800"',
    ),
    Regression("report", ("--delta.val_loss=1",), "the error named no key", ("delta.val_loss",)),
    Regression("train", ("--resume=loop",), "RuntimeError: Symlink loop", ("resume",)),
    Regression("train", ("--resume=",), "the error named no key", ("resume",)),
    Regression("fineweb_edu", ("--processes=2147483647",), "OverflowError", ("processes",)),
)
