"""Point-wise norms under Muon: archives of repro/point_wise.sh -> results/cpu/point_wise/README.md.

    python -m repro.point_wise

The head of repro/point_wise.sh declares what is reported, and this file was written before the
first run. Nothing is tested and nothing judged.
"""

import math

import numpy as np

from common.errors import UserError, run_program
from common.output import markdown
from common.stats import paired
from evidence.runs import RATES, Run, final_loss
from repro import declared
from repro.which_norm import (
    BASELINE,
    Curve,
    arm_name,
    by_arm_name,
    check_one_study,
    curves_of,
    nats_or_diverged,
)

OPTIMIZERS = ("adamw", "muon")
ARMS = ("dyt", "derf")
SCREENED = {112}
SEEDS = range(740, 744)

Ends = dict[str, dict[int, float]]  # arm -> seed -> loss, infinite where the run diverged


def read(archive: str) -> list[Run]:
    """Return the runs of an archive; none if it is not there yet."""
    return declared.read("point_wise", archive)


def with_optimizer(archive: str, optimizer: str) -> list[Run]:
    """Return an archive's runs with this optimiser."""
    return [run for run in read(archive) if run.config["optimizer"] == optimizer]


def curves(optimizer: str) -> dict[str, Curve]:
    """Return arm -> losses over the learning rate."""
    return curves_of(with_optimizer("rates", optimizer))


def check_study() -> None:
    """Raise UserError if the runs are not of one study, as it was declared."""
    everything = read("rates") + read("pairs")
    check_one_study(everything, "optimizer", *RATES)
    declared.check_seeds(read("rates"), SCREENED)
    declared.check_seeds(read("pairs"), {*SEEDS})
    declared.check_processors(everything, lambda run: run.seed)
    for optimizer in OPTIMIZERS:
        best = {arm: curve.best for arm, curve in curves(optimizer).items()}
        for run in with_optimizer("pairs", optimizer):
            if run.config["learning_rate"] != best.get(arm_name(run)):
                raise UserError(f"{run.name}: its learning rate is not the best of the grid")


def ends(optimizer: str) -> Ends:
    """Return what the runs of the pairs end at, nats a byte."""
    arms = by_arm_name(with_optimizer("pairs", optimizer))
    return {
        arm: {seed: final_loss(run) for seed, run in arms.get(arm, {}).items()}
        for arm in (BASELINE, *ARMS)
    }


def lacking(arm: str, found: Ends) -> str:
    """Say why an arm has no gap; "" if it has."""
    for name in (BASELINE, arm):
        if bad := sum(map(math.isinf, found[name].values())):
            return f"`{name}` diverged in {bad} of {len(SEEDS)}"
        if len(found[name]) < len(SEEDS):
            return f"open: {len(found[name])} of {len(SEEDS)} seeds of `{name}`"
    return ""


def row_of(arm: str) -> list[str]:
    """Return the arm's gaps with both optimisers, and by how much that with Muon is larger."""
    by_optimizer = [ends(optimizer) for optimizer in OPTIMIZERS]
    reasons = [lacking(arm, found) for found in by_optimizer]
    gaps = [
        None if reason else np.array([found[arm][seed] - found[BASELINE][seed] for seed in SEEDS])
        for reason, found in zip(reasons, by_optimizer, strict=True)
    ]
    cells = [
        reason if gap is None else with_interval(gap)
        for reason, gap in zip(reasons, gaps, strict=True)
    ]
    adamw, muon = gaps
    both = "" if adamw is None or muon is None else with_interval(muon - adamw)
    return [f"`{arm}`", *cells, both]


def with_interval(nats: np.ndarray) -> str:
    """Return the mean of differences (n,) and its 95 % interval."""
    estimate = paired(nats)
    low, high = estimate.interval()
    return f"{estimate.mean:+.4f} ({low:+.4f} to {high:+.4f})"


def rates_table(optimizer: str) -> str:
    """Return the losses of the grid, and the best rate, which is the one to use."""
    found = curves(optimizer)
    rates = sorted({rate for curve in found.values() for rate in curve.losses})
    rows = []
    for arm, curve in found.items():
        cells = [nats_or_diverged(curve.at(rate)) if rate in curve.losses else "" for rate in rates]
        is_end = curve.best in (min(curve.losses), max(curve.losses))
        best = f"{curve.best:g}, at an end" if is_end else f"{curve.best:g}"
        rows.append([f"`{arm}`", *cells, best])
    return markdown(["arm", *(f"{rate:g}" for rate in rates), "best"], rows)


def page() -> str:
    """Return README.md of the results."""
    check_study()
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
    declared.write_page("point_wise", page)


if __name__ == "__main__":
    run_program(main, __doc__)
