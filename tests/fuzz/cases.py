"""Make the cases of a program: keys with values, forms of arguments, config files, several keys."""

import math
import random
import zlib
from dataclasses import dataclass

from tests.fuzz.keys import Key

# Numbers at the limits of 16, 32, 48 and 64 bits and of float32 and float64, and none.
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "0.5",
    "1.5",
    "-0.0",
    "65536",
    "2147483647",
    "2147483648",
    "281474976710655",
    "281474976710656",
    "9223372036854775808",
    "1e30",
    "1e-30",
    "1e-45",
    "1e308",
    "-1e308",
    "1e-320",
    "1e999",
    "nan",
    "inf",
    "-inf",
)
ODD_NUMBERS = ("1_0", "٣", "0x10", " 1 ", "1" * 5000, "1,2", "(1,2)", ",", "1,nan", "1," * 2000)
TEXTS = (
    "",
    " ",
    "é",
    "日本",
    "😎",
    "x" * 300,
    "a'b\"c",
    "a\nb",
    "a\tb",
    "\x01\x7f",
    "\x1b[31mred",
    "\udcff",
    "%s%n{0}",
    "--help",
    "-",
    "=",
    "None",
    "auto",
    "True",
    "\\x00",
    "a,b",
    "*",
    "~",
    "$(id)",
    "FILE:",
    "FILE:missing",
    "FILE:fifo",
    "FILE:folder",
)
PATHS = (
    "folder",
    "empty",
    "text.txt",
    "missing",
    "missing/under/it",
    "text.txt/under/it",
    "fifo",
    "fifo.txt",
    "fifo.jsonl",
    "binary",
    "binary.jsonl",
    "torn.jsonl",
    "empty.jsonl",
    "loop",
    "folder.jsonl",
    "folder.txt",
    "binary.safetensors",
    "torn.jsonl.xz",
    "binary.parquet",
    "dangling",
    "/dev/null",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
    ".",
    "run",
    "data",
    "torn",
    "missing/",
    "sp ace",
    "x/" * 3000,
    "run/ckpt_best.pt",
    "run/config.json",
)
BOOLS = ("True", "False", "true", "yes", "0", "1", "")
SPECS = ("random:", "random:x", "random:gpt2 ", "nobody/nothing", "a/b/c", "hf:x", "")

# Content of a config file. {key} is a key of the program.
CONFIGS = (
    b"",
    b"\x00",
    b"\xff\xfe\x00",
    bytes(range(256)),
    b"{key} = ",
    b"{key} = (1, (2,))",
    b"{key} = " + b"(" * 500,
    b"{key} = " + b"-" * 100000 + b"1",
    b"x = 1\n" * 3 + b"y =",
    b"{key} = " + b"1+" * 100000 + b"1",
    b"{key} = 10 ** 400",
    b"{key} = 1e400",
    b"{key} = []",
    b"{key} = 2 ** 0.5 ** -1000 ** 3",
    b"{key} = 0 ** -1",
    b"{key} = (-8) ** 0.5",
    b"{key} = None",
    b'{key} = "a\\x00b"',
    b'{key} = "\\ud800"',
    b'{key} = "' + b"x" * 300 + b'"',
    b"{key} = b'x'",
    b"import os",
    b"{key} = __import__('os')",
    b"{key} = 1 if 1 else 2",
    b"{key}: int = 1",
    b"# -*- coding: latin-1 -*-\n{key} = '\xe9'",
    b"# coding: nothing\n{key} = 1",
    b"{key} += 1",
    b"{key} = 1; {key} = 'b'",
    b"_a = 1\n{key} = _a",
    b"{key} = 9" + b"9" * 5000,
    b"{key} = 1.5",
    b"nothing = 1",
    b"{key} = -1",
    b"{key} = 1e-45",
    b"{key} = 2 ** 63",
    b"{key} = True",
    b"\xef\xbb\xbf{key} = 1",
    b"{key} = 1\r{key} = 2",
    b"{key} = 'a\\nb'",
    b"{key} = 1j",
    b"x = 1  # long\n" * 3000000,
)


@dataclass(frozen=True)
class Case:
    """A command: the program, its arguments, and what the config file case.py holds, if any."""

    program: str
    argv: tuple[str, ...]
    names: tuple[str, ...] = ()  # keys that are not as in the program's valid command
    config: bytes | None = None

    @property
    def id(self) -> str:
        """Name the case by what it is, so that other cases may come and go."""
        content = repr((self.argv, self.config)).encode()
        return f"{self.program}:{zlib.crc32(content):08x}"


def values_for(key: Key) -> list[str]:
    """List the values that a key is tried with."""
    if key.choices:
        odd = [key.choices[0].upper(), key.choices[0][:-1], ",".join(key.choices), "auto", "0"]
        return [*key.choices, *odd, "", "x" * 300, "é\n"]
    found: list[str] = []
    if "bool" in key.kinds:
        found += BOOLS
    if {"int", "float", "tuple"} & set(key.kinds):
        found += [
            *NUMBERS,
            *ODD_NUMBERS,
            "",
            "é",
            "a\nb",
            "x" * 300,
            "auto",
            "None",
            "True",
            "\udcff",
        ]
        for bound in key.bounds:
            # At it, one beside it, and as near to it as a float64 can be.
            near = [bound, bound - 1, bound + 1]
            near += [math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf)]
            found += [f"{number:.17g}" for number in near]
    if "str" in key.kinds:
        found += [*TEXTS, *PATHS, "0", "-1", "nan", "1e308", "1" * 5000]
    return list(dict.fromkeys(found))


def single_cases(program: str, base: tuple[str, ...], key: Key) -> list[Case]:
    """List the cases of one key: its values, and forms of the argument."""
    cases = [
        Case(program, (*base, f"--{key.name}={value}"), (key.name,)) for value in values_for(key)
    ]
    default = key.default
    forms: list[tuple[str, ...]] = [
        (f"--{key.name}",),
        (f"-{key.name}={default}",),
        (f"--{key.name.upper()}={default}",),
        (f"--{key.name}x={default}",),
        (f"--{key.name}", default),
        (f"{key.name}={default}",),
        (f"--{key.name}=x\ny", f"--{key.name}={default}"),
        (f"--{key.name} ={default}",),
    ]
    return cases + [Case(program, (*base, *form), (key.name,)) for form in forms]


def spec_cases(program: str, base: tuple[str, ...]) -> list[Case]:
    """List the cases of the first argument, the model: `base` begins with a valid one."""
    rest = base[1:]
    values = dict.fromkeys((*SPECS, *PATHS, *TEXTS))
    return [Case(program, (value, *rest), (value,)) for value in values]


def config_cases(program: str, base: tuple[str, ...], keys: list[Key]) -> list[Case]:
    """List the cases of a config file, with one key of each type."""
    chosen = {key.kinds or ("choice",): key.name for key in reversed(keys)}
    cases = []
    for content in CONFIGS:
        names = list(chosen.values()) if b"{key}" in content else list(chosen.values())[:1]
        for name in names:
            written = content.replace(b"{key}", name.encode())
            cases.append(Case(program, (*base, "case.py"), (name, "case.py"), written))
    odd = ("folder.py", "fifo.py", "missing.py", "/dev/zero.py", "loop.py", "text.txt/x.py", ".py")
    return cases + [Case(program, (*base, path), (path,)) for path in odd]


def pair_cases(
    program: str, base: tuple[str, ...], keys: list[Key], count: int, seed: int
) -> list[Case]:
    """Draw cases of two or three keys at once: `count` for each key."""
    draw = random.Random(f"{seed} {program}")
    cases = []
    for key in keys:
        for _ in range(count):
            others = draw.sample(keys, min(len(keys), draw.choice((1, 1, 2))))
            chosen = list(dict.fromkeys((key, *others)))
            words = [f"--{one.name}={draw.choice(_plausible(one))}" for one in chosen]
            names = tuple(one.name for one in chosen)
            cases.append(Case(program, (*base, *words), names))
    return cases


def _plausible(key: Key) -> list[str]:
    """List the values of a key that have its type: one that has not would hide the other key."""
    if key.choices:
        return list(key.choices)
    if "int" in key.kinds:
        return ["0", "1", "2", "3", "4", "5", "16", "17", "100", "2147483648", "281474976710655"]
    if {"float", "tuple"} & set(key.kinds):
        return ["0", "1", "2", "0.5", "0.999", "1e-45", "1e-8", "1e30", "1e308", "-1"]
    return (
        list(BOOLS[:2])
        if "bool" in key.kinds
        else ["", "x", "run", "folder", "text.txt", "missing"]
    )
