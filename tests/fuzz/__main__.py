"""Run the cases: python -m tests.fuzz (see tests/fuzz/__init__.py)."""

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Before torch is imported: forks of a process with threads are not safe.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

from common.output import markdown, read_json, write_results
from tests.fuzz import execute, world
from tests.fuzz.cases import (
    Case,
    config_cases,
    pair_cases,
    single_cases,
    spec_cases,
)
from tests.fuzz.keys import Key, help_of, keys_in
from tests.fuzz.programs import PROGRAMS, Program
from tests.fuzz.regressions import REGRESSIONS
from tests.fuzz.verdict import fault

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results" / "cpu" / "fuzz"
PAGE = """# Odd settings for every key of every program

    python -m tests.fuzz

Each case is a command with wrong, odd or extreme settings, run with 3 GiB of memory beyond its
imports and ten seconds (tests/fuzz/). It has to end with one line that names what is wrong, or with
results that are finite and complete. Keys are counted as `--help` lists them; of those that
train.py has too, other programs try some values. A program whose `sample` in fuzz.jsonl is not 0
was tried with that many of its cases, drawn (`--sample=N`).

{table}
"""
LONG_RUN = 4.0  # seconds until Ctrl-C, for keys that mean how much is done
BY_NAME = {program.name: program for program in PROGRAMS}


@dataclass
class Count:
    """What the cases of one program did."""

    cases: int = 0
    refused: int = 0
    ran: int = 0
    long: int = 0
    faults: list[str] = field(default_factory=list)


def all_cases(
    program: Program, keys: list[Key], shared: list[Key], pairs: int, seed: int
) -> list[Case]:
    """List the cases of a program.

    Args:
        keys: its own keys.
        shared: keys that train.py has too, of which two values each are drawn.
        pairs: cases of several keys, for each key.
    """
    name, base = program.name, program.base
    cases = regressions(program)
    draw = random.Random(f"{seed} {name} shared")
    for key in keys:
        cases += single_cases(name, base, key)
    for key in shared:
        cases += draw.sample(single_cases(name, base, key), 2)
    if program.spec:
        cases += spec_cases(name, base)
    if program.configs and keys:
        cases += config_cases(name, base, keys)
    if keys:
        cases += pair_cases(name, base, keys + shared, pairs, seed)
    for words in ((), ("--help",), ("-h",), ("--",), ("",), ("x" * 300,), ("\udcff",), ("a\nb",)):
        cases.append(Case(name, (*base, *words), words))
    # The system passes no argument with a NUL; the same command may be there twice.
    return list({case.id: case for case in cases if "\0" not in "".join(case.argv)}.values())


def regressions(program: Program) -> list[Case]:
    """List the cases of a program that were faults once."""
    cases = []
    for one in REGRESSIONS:
        if one.program == program.name:
            base = (one.model, *program.base[1:]) if one.model else program.base
            cases.append(Case(program.name, (*base, *one.words), one.names, one.config))
    return cases


def drawn(program: Program, cases: list[Case], count: int, seed: int) -> list[Case]:
    """Draw `count` cases; those that were faults once come first."""
    first = regressions(program)
    ids = {case.id for case in first}
    others = [case for case in cases if case.id not in ids]
    draw = random.Random(f"{seed} {program.name}")
    return first + draw.sample(others, min(count, len(others)))


class Fuzzer:
    """Run cases in copies of one folder."""

    def __init__(self, scratch: Path, seconds: float, verbose: bool):
        self.scratch = scratch
        self.seconds = seconds
        self.verbose = verbose
        self.world = scratch / "world"
        self.number = 0

    def prepare(self) -> None:
        """Write the folder: inputs, then runs that train.py and report.py's archive make."""
        world.write_inputs(self.world)
        train = BY_NAME["train"]
        execute.load(train)
        rms = (*world.TRAINED, "--norm_type=rms")
        runs = {"run": (*world.TRAINED, "--norm_type=layer", "--block_size=32")}
        for seed in (1, 2):
            runs |= {f"runs/rms-{seed}": (*rms, f"--seed={seed}")}
            runs |= {f"runs/layer-{seed}": (*world.TRAINED, f"--seed={seed}")}
        for out_dir, words in runs.items():
            self._must_run(train, (*words, f"--out_dir={out_dir}"))
        archive = BY_NAME["archive"]
        execute.load(archive)
        self._must_run(archive, ("runs.tar.xz", "runs/rms-1", "runs/layer-1"))
        world.write_odd_files(self.world)

    def _must_run(self, program: Program, argv: tuple[str, ...]) -> None:
        done = execute.run(program, Case(program.name, argv), self.world, 120)
        if done.code:
            raise SystemExit(f"{program.name} {' '.join(argv)}: {done.stderr}")

    def run(self, case: Case) -> tuple[execute.Outcome, str]:
        """Run one case in its own folder. Returns what it did, and its fault or ""."""
        program = BY_NAME[case.program]
        self.number += 1
        # Two deep, so that `..` stays within.
        folder = self.scratch / str(self.number) / "case"
        world.copy(self.world, folder)
        # A long run may go on for ever, and Ctrl-C is to end it.
        seconds = LONG_RUN if program.is_long(case.names) else self.seconds
        outcome = execute.run(program, case, folder, seconds)
        wrong = fault(program, case, outcome, folder)
        shutil.rmtree(folder.parent, ignore_errors=True)
        return outcome, wrong


def keys_of(program: Program) -> list[Key]:
    execute.load(program)
    module = sys.modules[program.module]
    return keys_in(help_of(module.main))


def cases_of(program: Program, keys: list[Key], asked: argparse.Namespace) -> list[Case]:
    """List the cases of a program that the command line asks for."""
    theirs = set()
    if program.name != "train":
        theirs = {(key.name, key.help) for key in keys_of(BY_NAME["train"])}
    shared = [key for key in keys if (key.name, key.help) in theirs]
    own = [key for key in keys if key not in shared]
    cases = all_cases(program, own, shared, asked.pairs, asked.seed)
    if ids := {word for word in asked.what if ":" in word}:
        return [case for case in cases if case.id in ids]
    if asked.short:
        cases = [case for case in cases if not program.is_long(case.names)]
    if asked.sample:
        cases = drawn(program, cases, asked.sample, asked.seed)
    return cases


def fuzz(fuzzer: Fuzzer, program: Program, cases: list[Case], again: str) -> Count:
    """Run the cases of a program, and print each fault with the command that repeats it."""
    count = Count()
    for case in cases:
        outcome, wrong = fuzzer.run(case)
        count.cases += 1
        count.refused += outcome.code in (1, 2) and not wrong
        count.ran += outcome.code == 0 and not wrong
        count.long += outcome.interrupted and outcome.code and not wrong
        if fuzzer.verbose:
            words = " ".join(case.argv[len(program.base) :])
            print(f"{case.id} {outcome.seconds:5.1f} s, code {outcome.code}: {words[:100]!r}")
            print(outcome.stdout[-2000:] + outcome.stderr[-2000:])
        if wrong:
            count.faults.append(f"{case.id} {wrong}")
            changed = [word for word in case.argv if word not in program.base]
            print(f"FAULT {wrong}")
            print(f"      {program.name} {str(changed)[:300]} {(case.config or b'')[:60]!r}")
            print(f"      again: python -m tests.fuzz '{case.id}'{again}", flush=True)
    return count


def table(records: list[dict]) -> str:
    """Return the table of all programs, with their sums."""
    names = ("keys", "cases", "refused", "ran", "long", "faults")
    rows = [(record["program"], *(record[name] for name in names)) for record in records]
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    header = ["program", "keys", "cases", "refused in one line", "ran", "long, ended by Ctrl-C"]
    header.append("faults")
    return markdown(header, [*rows, ("all", *totals)])


def write(folder: Path, records: list[dict]) -> None:
    """Write README.md and fuzz.jsonl; programs that were not run now keep their line."""
    by_name = {record["program"]: record for record in read_json(folder / "fuzz.jsonl")}
    by_name |= {record["program"]: record for record in records}
    ordered = [by_name[name] for name in BY_NAME if name in by_name]
    write_results(folder, "fuzz", ordered, "README.md", PAGE.format(table=table(ordered)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", nargs="*", help="programs, or ids of cases (default: all programs)")
    parser.add_argument("--pairs", type=int, default=2, help="cases of several keys, for each key")
    parser.add_argument("--seed", type=int, default=0, help="of drawn cases")
    parser.add_argument("--sample", type=int, default=0, help="run this many cases, drawn (0: all)")
    parser.add_argument("--short", action="store_true", help="leave out what may be a long run")
    parser.add_argument("--seconds", type=float, default=10, help="what a case may take")
    parser.add_argument("--out", type=Path, help="folder of the table (all programs: results/)")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = dict.fromkeys([word.partition(":")[0] for word in asked.what] or BY_NAME)
    if unknown := set(names) - set(BY_NAME):
        parser.error(f"no program {unknown.pop()}: there are {', '.join(BY_NAME)}")
    again = f" --seed={asked.seed} --pairs={asked.pairs}"
    records = []
    faults = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        is_verbose = asked.verbose or any(":" in word for word in asked.what)
        fuzzer = Fuzzer(Path(scratch), asked.seconds, is_verbose)
        fuzzer.prepare()
        for name in names:
            keys = keys_of(BY_NAME[name])
            count = fuzz(fuzzer, BY_NAME[name], cases_of(BY_NAME[name], keys, asked), again)
            faults += count.faults
            numbers = asdict(count) | {"keys": len(keys), "faults": len(count.faults)}
            records.append({"program": name, **numbers, "sample": asked.sample})
            if asked.out:
                write(asked.out, records)
    print(table(records))
    if not asked.out and not asked.what and not asked.sample:
        write(OUT, records)
    kinds = Counter(wrong.split(" ", 1)[1][:60] for wrong in faults)
    for kind, number in kinds.most_common():
        print(f"{number:5d} {kind}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
