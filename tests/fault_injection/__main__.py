"""Try every point of every program, and write the table.

python -m tests.fault_injection --out=results/cpu/faults
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fault_injection.launch import ROOT, Place, build, import_programs

MEMORY = "/dev/shm"  # where fsync takes no time


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_injection")
    parser.add_argument("--out", default="", help="folder for table and data ('': print only)")
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--ranks", type=int, default=0, help="programs of N ranks (0: all)")
    parser.add_argument("--modes", default="", help="modes, with commas between ('': all)")
    parser.add_argument("--points", type=int, default=0, help="points of each mode (0: all)")
    parser.add_argument("--turns", action="store_true", help="one mode a program, in turn")
    parser.add_argument(
        "--row", type=int, default=0, help="writes of a row of them to one file (0: all)"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    # Not TemporaryDirectory: each fork would remove it when it ends.
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=memory)).resolve()
    try:
        if "FAULT_LIBRARY" not in os.environ:
            return begin_again(folder, argv)
        return try_all(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def begin_again(folder: Path, argv: list[str]) -> int:
    """Start this program once more, with preload.c."""
    try:
        library = str(build(folder))
    except RuntimeError as error:
        print(f"skipped: {error}")
        return 0
    env = {**os.environ, "LD_PRELOAD": library, "FAULT_LIBRARY": library, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.fault_injection", *argv], cwd=ROOT, env=env
    ).returncode


def try_all(folder: Path, options: argparse.Namespace) -> int:
    """Try the points that the options name. Returns the exit code."""
    import_programs()
    from tests.fault_injection import table
    from tests.fault_injection.judge import MODES
    from tests.fault_injection.programs import Inputs, programs

    made = made_by(options)
    has_failed = False
    modes = options.modes.split(",") if options.modes else list(MODES)
    for number, program in enumerate(programs(Inputs(folder / "inputs"))):
        is_asked = not options.ranks or program.ranks == options.ranks
        if is_asked and program.name.startswith(options.only):
            place = Place(folder / f"program{number}")
            own = [modes[number % len(modes)]] if options.turns else modes
            records = try_program(program, place, own, options)
            has_failed |= any(record["failed"] for record in records)
            if options.out:
                table.write(Path(options.out), records, made)
    gc.unfreeze()  # or extension modules report leaks at the end
    return int(has_failed)


def made_by(options: argparse.Namespace) -> str:
    """Return date, command and commit."""
    import torch

    from common.environment import environment

    given = {name: value for name, value in vars(options).items() if value}
    words = [f"--{name}={value}" for name, value in given.items() if name not in ("out", "turns")]
    words += ["--turns"] * options.turns
    commit = environment(torch.device("cpu"))["git"]
    command = " ".join(["python -m tests.fault_injection", *words])
    return f"{time.strftime('%Y-%m-%d')}, commit {commit}: `{command}`"


def try_program(
    program: Any, place: Place, modes: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Try points of one program. Returns a record for each mode."""
    from tests.fault_injection.judge import problem_at, unbroken

    whole = unbroken(program, place)
    records = []
    for mode in modes:
        began = time.monotonic()
        every = whole.points(mode)
        points = sample(whole.points(mode, options.row), options.points)
        failed = []
        for fault in points:
            found = problem_at(program, place, fault, whole)
            if found:
                call = whole.calls[fault.rank][fault.point - 1]
                path = str(Path(call.path).relative_to(place.files))
                failed.append({"rank": fault.rank, "point": fault.point, "call": call.name})
                failed[-1] |= {"path": path, "problem": found.replace(str(place.files), "FOLDER")}
        record = {"program": program.name, "ranks": program.ranks, "mode": mode, "of": len(every)}
        record |= {"points": len(points), "survived": len(points) - len(failed), "failed": failed}
        records.append(record)
        print(json.dumps({**record, "seconds": round(time.monotonic() - began)}), flush=True)
    return records


def sample(points: list[Any], limit: int) -> list[Any]:
    """Take `limit` of the points, evenly spread (0: all)."""
    if not limit or limit >= len(points):
        return points
    # From the middle of `limit` equal parts.
    return [points[(2 * index + 1) * len(points) // (2 * limit)] for index in range(limit)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
