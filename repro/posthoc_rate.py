"""Choose the learning rate of the students: that of the run with the lowest KL.

    python repro/posthoc_rate.py out/posthoc/rates
        (a step of posthoc.sh)

FOLDER holds runs of distill.py. KL is that of the finished student, on the blocks that distill.py
holds out of its own text. Prints each run on stderr, and the chosen rate on stdout.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ConfigError, run_program
from training.log import last_event


def main(argv: list[str]) -> None:
    (folder,) = argv
    found = {}
    for run in sorted(Path(folder).glob("*")):
        end = last_event(run / "log.jsonl")
        if end.get("reason") != "done":
            raise ConfigError(f"{run}: not finished: start repro/posthoc.sh again")
        found[run.name] = end["summary"]["kl"]
        print(f"learning rate {run.name}: KL {found[run.name]:.3e}", file=sys.stderr)
    best = min(found, key=found.get)
    rates = sorted(found, key=float)
    if best in (rates[0], rates[-1]):
        print(f"warning: {best} is at the end of the grid: add a rate beyond it", file=sys.stderr)
    print(best)


if __name__ == "__main__":
    run_program(main, __doc__)
