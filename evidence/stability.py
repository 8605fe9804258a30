"""What happened in runs beside their loss: a row of figures for each arm."""

from collections.abc import Collection

import numpy as np

from evidence.runs import Run

HEADER = ("arm", "runs", "diverged", "clipped steps", "spikes a run", "largest attention logit")


def row(arm: str, runs: Collection[Run], missing: str) -> list[str | int]:
    """Return the cells of HEADER for the runs of one arm, which is shown as `arm`.

    Args:
        missing: stands where no run has the figure.
    """
    clipped = _found(runs, "clipped")
    spikes = _found(runs, "spikes")
    logits = _found(runs, "attention_logit")
    return [
        arm,
        len(runs),
        sum(run.diverged for run in runs),
        f"{100 * np.mean(clipped):.0f} %" if clipped else missing,
        f"{np.mean(spikes):.1f}" if spikes else missing,
        f"{max(logits):.1f}" if logits else missing,
    ]


def _found(runs: Collection[Run], name: str) -> list[float]:
    """Return one figure of the runs that have it."""
    values = [run.stability.get(name) for run in runs]
    return [value for value in values if value is not None]
