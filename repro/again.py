"""Compare runs that were made again with the committed ones: which losses are equal to the bit?

    python -m repro.again out/again/rivals

AGAIN=1 before a script of this folder trains anew, in out/again, and calls it at the end.
"""

import sys
from pathlib import Path

from common.errors import ConfigError, run_program
from evidence.archive import SUFFIX, by_run, read
from evidence.log import parse_log

RESULTS = Path(__file__).resolve().parents[1] / "results"
LOSSES = ("loss", "val_loss", "val_loss_full")

Losses = dict[tuple[str, int, str], float | None]  # (event, step, name) -> loss


def losses_of(log: bytes, name: str) -> Losses:
    """Return every loss that a log has."""
    found: Losses = {}
    for event in parse_log(log, name):
        if "step" not in event:
            continue
        for loss in LOSSES:
            if loss in event:
                found[event["event"], event["step"], loss] = event[loss]
    return found


def committed_runs(archive: str) -> dict[str, list[bytes]]:
    """Return run -> its logs in the committed archives of this file name, which studies share."""
    found: dict[str, list[bytes]] = {}
    for path in sorted(RESULTS.rglob(archive)):
        for run, files in by_run(read(path)).items():
            found.setdefault(run, []).append(files["log.jsonl"])
    return found


def compare(new: Losses, old: Losses) -> str:
    """Say whether two runs are the same to the bit, or where they part first."""
    both = sorted(new.keys() & old.keys(), key=lambda place: place[1])
    if not both:
        return "no loss of the same step: other settings"
    for event, step, loss in both:
        mine, theirs = new[event, step, loss], old[event, step, loss]
        if mine != theirs:
            return f"parts at step {step}: {loss} {mine} against {theirs}"
    return f"equal to the bit in {len(both)} losses"


def main(argv: list[str]) -> None:
    """Compare each run of the archives below a folder with the committed one of its name."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        raise ConfigError("name the folder of the archives that were made again")
    equal = total = 0
    for path in sorted(Path(argv[0]).rglob(f"*{SUFFIX}")):
        old = committed_runs(path.name)
        for run, files in sorted(by_run(read(path)).items()):
            total += 1
            losses = losses_of(files["log.jsonl"], run)
            found = [
                compare(losses, losses_of(log, f"committed {run}")) for log in old.get(run, ())
            ]
            # "equal" stands before "no loss" and "parts"
            words = min(found, default="no committed run of this name")
            equal += words.startswith("equal")
            sys.stdout.write(f"{path.name}/{run}: {words}\n")
    sys.stdout.write(f"{equal} of {total} runs equal the committed ones to the bit\n")


if __name__ == "__main__":
    run_program(main, __doc__)
