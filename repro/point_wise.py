"""Point-wise norms under Muon: archives of repro/point_wise.sh -> results/cpu/point_wise/README.md.

    python -m repro.point_wise

The head of repro/point_wise.sh declares what is reported, and this file was written before the
first run. Nothing is tested and nothing judged.
"""

import functools
from pathlib import Path

import numpy as np

from common.errors import UserError, run_program
from common.output import markdown, write_bytes_atomically, writing
from common.stats import paired
from evidence.comparison import Pair
from evidence.runs import RATES, Run, final_loss, find_runs
from repro.which_norm import (
    BASELINE,
    Curve,
    all_pairs,
    by_arm_name,
    check_one_study,
    curves_of,
    nats_or_diverged,
)

OUT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "point_wise"
OPTIMIZERS = ("adamw", "muon")
ARMS = ("dyt", "derf")
SEEDS = range(740, 744)


@functools.cache
def read(name: str) -> list[Run]:
    """Return the runs of an archive in results/cpu/point_wise; none if it is not there yet."""
    path = OUT / f"{name}.tar.xz"
    runs = find_runs([path]) if path.exists() else []
    for run in runs:
        run.check()
    return runs


def with_optimizer(name: str, optimizer: str) -> list[Run]:
    """Return an archive's runs with this optimiser. Raises UserError if all of it is not alike."""
    runs = check_one_study(read(name), "optimizer", *RATES)
    return [run for run in runs if run.config["optimizer"] == optimizer]


def curves(optimizer: str) -> dict[str, Curve]:
    """Return arm -> losses over the learning rate."""
    return curves_of(with_optimizer("rates", optimizer))


def pairs(optimizer: str) -> dict[str, dict[int, Pair]]:
    """Return arm -> seed -> pair with `rms`, of the seeds that are reported.

    Raises UserError if an arm was not run at its best rate, or if two runs of a pair differ.
    """
    runs = [run for run in with_optimizer("pairs", optimizer) if run.seed in SEEDS]
    if not runs:
        return {}
    best = {arm: curve.best for arm, curve in curves(optimizer).items()}
    arms = by_arm_name(runs)
    for arm, its in arms.items():
        for run in its.values():
            if run.config["learning_rate"] != best.get(arm):
                raise UserError(f"{run.name}: its rate is not the best of the grid")
    found = all_pairs(arms, BASELINE)
    return {arm: {pair.run.seed: pair for pair in its} for arm, its in found.items()}


def gap(pair: Pair) -> float:
    """Return the loss of an arm minus that of `rms`, nats a byte."""
    return final_loss(pair.run) - final_loss(pair.base)


def row_of(arm: str) -> list[str]:
    """Return the arm's gaps with both optimisers, and by how much that with Muon is larger."""
    by_optimizer = [pairs(optimizer).get(arm, {}) for optimizer in OPTIMIZERS]
    ends = [f"{len(its)} of {len(SEEDS)} pairs" for its in by_optimizer]
    if any(len(its) < len(SEEDS) for its in by_optimizer):  # not over, or a run diverged
        return [f"`{arm}`", *ends, "open"]
    adamw, muon = (np.array([gap(its[seed]) for seed in SEEDS]) for its in by_optimizer)
    cells = []
    for nats in (adamw, muon, muon - adamw):
        estimate = paired(nats)
        low, high = estimate.interval()
        cells.append(f"{estimate.mean:+.4f} ({low:+.4f} to {high:+.4f})")
    return [f"`{arm}`", *cells]


def rates_table(optimizer: str) -> str:
    """Return the losses of the grid, and the best rate, which is the one to use."""
    found = curves(optimizer)
    rates = sorted({rate for curve in found.values() for rate in curve.losses})
    rows = []
    for arm, curve in found.items():
        cells = [nats_or_diverged(curve.at(rate)) if rate in curve.losses else "" for rate in rates]
        rows.append([f"`{arm}`", *cells, f"{curve.best:g}"])
    return markdown(["arm", *(f"{rate:g}" for rate in rates), "best"], rows)


def page() -> str:
    """Return README.md of the results."""
    parts = [
        "# Point-wise norms under Muon",
        "Runs of [repro/point_wise.sh](../../../repro/point_wise.sh), whose head is the "
        "declaration: the wide shape, 2 M tokens, nats a byte. No test and no verdict. This page: "
        "`python -m repro.point_wise`.",
    ]
    for optimizer in OPTIMIZERS:
        table = rates_table(optimizer) if with_optimizer("rates", optimizer) else "Not run."
        parts += [f"## Learning rates with {optimizer} (seed 112)", table]
    header = ["arm", "minus `rms`, AdamW (95 %)", "minus `rms`, Muon", "Muon less AdamW"]
    parts += [
        "## Gaps",
        f"Paired by seed, {SEEDS[0]} to {SEEDS[-1]}, each at its best rate of the grid.",
        markdown(header, [row_of(arm) for arm in ARMS]) if read("pairs") else "Not run.",
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> None:
    """Write the page."""
    if argv:
        raise UserError("give no words")
    with writing(OUT):
        write_bytes_atomically(OUT / "README.md", page().encode())
    print(f"wrote {OUT / 'README.md'}")


if __name__ == "__main__":
    run_program(main, __doc__)
