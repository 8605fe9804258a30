"""The study of point-wise norms under Muon: what its program makes of runs, which are made up.

python -m pytest tests/repro/test_point_wise.py
"""

import math

import numpy as np
import pytest
from made_runs import made
from statsmodels.stats.weightstats import DescrStatsW

from common.errors import UserError
from evidence.runs import Run
from repro import declared, point_wise

RATES = {"adamw": (0.002, 0.004, 0.008), "muon": (0.0044, 0.0088, 0.0176)}
GAPS = {
    "adamw": {"rms": 0.0, "dyt": 0.05, "derf": 0.04},
    "muon": {"rms": 0.0, "dyt": 0.05, "derf": 0.2},
}
DRAWS = np.random.default_rng(0).normal(0, 0.005, (2, 3, 4))


def run(arm: str, optimizer: str, rate: float, seed: int, loss: float) -> Run:
    found = made(arm, seed, loss, optimizer=optimizer, learning_rate=rate)
    found.last("val_full")["val_loss_full"] = loss
    return found


def loss_of(optimizer: str, arm: str, seed: int) -> float:
    place = (*RATES,).index(optimizer), (*GAPS[optimizer],).index(arm), seed - 740
    return 1.3 + GAPS[optimizer][arm] + float(DRAWS[place])


@pytest.fixture
def archives(monkeypatch) -> dict[str, list[Run]]:
    """The program reads these in place of results/cpu/point_wise. The middle rate is the best."""
    found: dict[str, list[Run]] = {"rates": [], "pairs": []}
    for optimizer, gaps in GAPS.items():
        for arm in gaps:
            for rate, more in zip(RATES[optimizer], (0.1, 0.0, 0.2), strict=True):
                found["rates"].append(run(arm, optimizer, rate, 112, 1.3 + gaps[arm] + more))
            for seed in point_wise.SEEDS:
                rate, loss = RATES[optimizer][1], loss_of(optimizer, arm, seed)
                found["pairs"].append(run(arm, optimizer, rate, seed, loss))
    monkeypatch.setattr(declared, "read", lambda _, name: found[name])
    return found


def place_of(runs: list[Run], arm: str, optimizer: str, seed: int) -> int:
    keys = [(run.config["norm_type"], run.config["optimizer"], run.seed) for run in runs]
    return keys.index((arm, optimizer, seed))


def test_the_difference_of_differences_is_that_of_a_second_implementation(archives):
    text = point_wise.page()
    for arm in point_wise.ARMS:
        adamw, muon = (
            np.array(
                [loss_of(name, arm, seed) - loss_of(name, "rms", seed) for seed in range(740, 744)]
            )
            for name in RATES
        )
        cells = []
        for nats in (adamw, muon, muon - adamw):
            low, high = DescrStatsW(nats).tconfint_mean()
            cells.append(f"{nats.mean():+.4f} ({low:+.4f} to {high:+.4f})")
        assert f"| `{arm}` | {' | '.join(cells)} |" in text
    assert "| `derf` | 1.4400 | 1.3400 | 1.5400 | 0.004 |" in text
    assert "| `derf` | 1.6000 | 1.5000 | 1.7000 | 0.0088 |" in text


def test_a_best_rate_at_an_end_is_told(archives):
    archives["rates"] = [run for run in archives["rates"] if run.config["learning_rate"] < 0.017]
    assert "| `derf` | 1.6000 | 1.5000 | 0.0088, at an end |" in point_wise.page()


def test_what_is_not_over_or_diverged_has_no_gap(archives):
    whole = list(archives["pairs"])
    archives["pairs"][place_of(whole, "derf", "muon", 742)] = run(
        "derf", "muon", 0.0088, 742, math.inf
    )
    text = point_wise.page()
    [derf] = [line for line in text.splitlines() if line.startswith("| `derf` | +")]
    assert derf.endswith(") | `derf` diverged in 1 of 4 |  |") and "| `dyt` | +0.0" in text
    archives["pairs"] = list(whole)
    archives["pairs"][place_of(whole, "rms", "muon", 740)] = run(
        "rms", "muon", 0.0088, 740, math.inf
    )
    assert point_wise.page().count("`rms` diverged in 1 of 4") == 2
    archives["pairs"] = [run for run in whole if run.config["norm_type"] != "rms"]
    assert point_wise.page().count("open: 0 of 4 seeds of `rms`") == 4
    archives["pairs"] = []
    assert point_wise.page().endswith("Not run.\n")


# place, key, its value there
MISMATCHES = [
    ("config", "learning_rate", 0.002),
    ("config", "batch_size", 1),
    ("config", "seed", 744),
    ("start", "device", "cpu (another)"),
    ("start", "processor", "another"),
]


@pytest.mark.parametrize(
    ("place", "key", "value"), MISMATCHES, ids=[key for _, key, _ in MISMATCHES]
)
def test_runs_of_another_experiment_are_refused(archives, place, key, value):
    """Of an optimiser as a whole too: a seed's runs with AdamW and Muon are of one processor."""
    for one in archives["pairs"]:
        if one.config["optimizer"] == "muon":
            getattr(one, place)[key] = value
    with pytest.raises(UserError):
        point_wise.page()


def test_a_screening_has_one_seed(archives):
    archives["rates"][0].config["seed"] = 113
    with pytest.raises(UserError, match="seed 113 is not one"):
        point_wise.page()
