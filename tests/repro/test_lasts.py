"""The study "does it last?": what its program makes of runs. They are made up from a kept one.

python -m pytest tests/repro/test_lasts.py
"""

import math

import numpy as np
import pytest
from made_runs import made
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from common.errors import UserError
from evidence.runs import Run
from repro import lasts

SHIFTS = {"rms": 0.0, "layer": 0.0002, "coupled": 0.010, "one-rms": -0.020, "peri": -0.001}
SLOPE = 0.19


def study(seeds, sd: float = 0.008, **shifts: float) -> dict[str, list[Run]]:
    """Archives by name. Runs of a seed have a part of their loss in common."""
    draws = np.random.default_rng(0)
    found = {"A": []}
    for seed in seeds:
        common = draws.normal(1.2, 0.02)
        for arm, shift in (SHIFTS | shifts).items():
            loss = common + shift + draws.normal(0, sd / 2**0.5)
            found["A"].append(made(arm, seed, loss, planned_seeds=20, learning_rate=0.004))
    for steps in lasts.LENGTHS:
        mean = 1.2 - SLOPE * math.log(steps / 7680)
        losses = mean + np.array([-0.001, 0.001, -0.002, 0.002])
        found[f"M-{steps}"] = [
            made("rms", seed, loss, max_iters=steps)
            for seed, loss in zip(range(150, 154), losses, strict=True)
        ]
    return found


@pytest.fixture
def archives(monkeypatch):
    """archives(found): the program reads these in place of results/cpu/lasts."""

    def put(found: dict[str, list[Run]]) -> None:
        monkeypatch.setattr(lasts, "read", lambda name: found.get(name, []))

    return put


def verdicts() -> dict[str, list[str]]:
    """The table of the verdict: arm -> its cells."""
    lines = lasts.verdict_table().splitlines()[2:]
    rows = [[cell.strip("` ") for cell in line.strip("|").split(" | ")] for line in lines]
    return {arm: cells for arm, *cells in rows}


def test_the_verdict_is_that_of_a_second_implementation(archives):
    found = study(range(800, 820))
    archives(found)
    assert lasts.is_whole() and lasts.slope() == pytest.approx(SLOPE)
    ends = {
        (run.config["norm_type"], run.config["coupled_span"], run.seed): sum(
            run.whole_split["document_nats"][:21]
        )
        / 349064
        for run in found["A"]
    }
    keys = {"layer": ("layer", 1), "coupled": ("coupled", 1), "peri": ("peri", 1)}
    keys["one-rms"] = ("coupled", 0)
    nats = {
        arm: np.array([ends[(*key, seed)] - ends["rms", 1, seed] for seed in range(800, 820)])
        for arm, key in keys.items()
    }
    family = ("peri", "one-rms", "coupled")
    p_holm = multipletests(
        [DescrStatsW(nats[arm]).ttest_mean(0)[1] for arm in family], method="holm"
    )
    table = verdicts()
    assert [*table] == ["layer", *family]
    for arm, cells in table.items():
        described = DescrStatsW(nats[arm])
        low, high = described.tconfint_mean()
        assert cells[0] == f"{described.mean:+.4f} ({low:+.4f} to {high:+.4f})"
        share = described.mean / SLOPE
        assert cells[1].startswith(f"{share:+.1%}")
        assert cells[2] == f"{described.ttest_mean(0)[1]:.2g}"
        assert cells[5] == f"{stats.wilcoxon(nats[arm])[1]:.2g}"
        assert cells[6] in ("+0.0000", "-0.0000")
    assert [table[arm][3] for arm in family] == [f"{p:.2g}" for p in p_holm[1]]
    limit = SLOPE * math.log(1.01)
    p_tost = DescrStatsW(nats["layer"]).ttost_mean(-limit, limit)[0]
    assert table["layer"][3:5] == ["", f"{p_tost:.2g}"]
    assert table["layer"][-1] == ("equal within 1% of the tokens" if p_tost < 0.05 else "open")
    for arm, sign, half in (("peri", -1, 0.03), ("one-rms", -1, 0.033), ("coupled", 1, 0.028)):
        lasting = p_holm[1][family.index(arm)] < 0.05 and np.sign(nats[arm].mean()) == sign
        side = "smaller" if sign > 0 else "larger"
        is_half = DescrStatsW(nats[arm]).ttest_mean(sign * half * SLOPE, side)[1] < 0.05
        words = ["lasts"] * bool(lasting) + ["at most half is left"] * bool(is_half)
        assert table[arm][-1] == ("; ".join(words) or "open"), arm
    # what was put in
    assert table["one-rms"][-1] == "lasts" and table["peri"][-1] == "at most half is left"
    assert "## Verdict\n\n| arm |" in lasts.page()


@pytest.mark.parametrize(
    ("shift", "sd", "words"),
    [
        (-0.004, 0.002, "lasts; at most half is left"),
        (-0.006, 0.030, "open"),
        (0.020, 0.004, "at most half is left"),  # it turned round
    ],
)
def test_the_words_of_an_arm(archives, shift, sd, words):
    archives(study(range(800, 830), sd, peri=shift))
    assert verdicts()["peri"][-1] == words


def test_nothing_is_judged_before_all_seeds_are_whole(archives):
    found = study(range(800, 819))
    archives(found)
    assert not lasts.is_whole() and "**Open**: whole seeds: 800, " in lasts.page()
    assert "minus" not in lasts.page()
    whole = study(range(800, 820))
    one_less = [run for run in whole["A"] if (run.config["norm_type"], run.seed) != ("layer", 805)]
    archives(whole | {"A": one_less})
    assert not lasts.is_whole()
    with pytest.raises(UserError, match="805 is not whole"):
        lasts.blind_look()
    archives(whole | {"M-3840": whole["M-3840"][:3]})
    assert "Not whole." in lasts.page() and not lasts.is_whole()


def test_a_wide_spread_asks_for_more_seeds(archives, capsys):
    """By the first ten seeds alone, and without a name or a mean."""
    archives(study(range(800, 810), sd=0.020))
    lasts.main(["blind"])
    said = capsys.readouterr().out
    assert said.endswith("seeds 820 to 829 are run too\n")
    assert not any(arm in said for arm in ("layer", "coupled", "peri"))
    archives(study(range(800, 820), sd=0.020))
    assert not lasts.is_whole()
    archives(study(range(800, 830), sd=0.020))
    assert lasts.is_whole()
    assert {len(row.stdlib) for row in lasts.differences(lasts.planned_seeds())} == {30}
    archives(study(range(800, 810), sd=0.004))
    lasts.main(["blind"])
    assert capsys.readouterr().out.endswith(": no more seeds\n")


def test_a_run_that_diverged_is_counted_and_a_bad_end_is_kept(archives):
    found = study(range(800, 820))
    [bad] = [run for run in found["A"] if run.seed == 803 and run.config["norm_type"] == "peri"]
    rest = [run for run in found["A"] if run is not bad]
    settings = {"planned_seeds": 20, "learning_rate": 0.004}
    archives(found | {"A": [*rest, made("peri", 803, math.inf, **settings)]})
    assert verdicts()["peri"][-1] == "diverged in 1 of 20: no verdict"
    assert verdicts()["one-rms"][-1] == "lasts"
    archives(found | {"A": [*rest, made("peri", 803, 1.4, **settings)]})
    assert int(verdicts()["peri"][-2]) >= 1


@pytest.mark.parametrize("key", ["batch_size", "max_iters", "other documents"])
def test_runs_of_another_experiment_are_refused(archives, key):
    found = study(range(800, 820))
    archives(found)
    run = next(run for run in found["A"] if run.config["norm_type"] == "peri")
    if key in run.config:
        run.config[key] += 1
    else:
        run.whole_split["document_tokens"][0] -= 1
    with pytest.raises(UserError):
        lasts.page()


def test_rates_are_chosen_by_the_loss_that_decides(archives):
    by_rate = {0.0022: 1.30, 0.0031: 1.25, 0.0044: 1.28}
    found = [made("rms", 100, loss, learning_rate=rate) for rate, loss in by_rate.items()]
    archives({"S": found})
    curve = lasts.rates()["rms"]
    assert curve.losses == {rate: {100: pytest.approx(loss)} for rate, loss in by_rate.items()}
    assert curve.best == 0.0031 and 0.0031 < curve.chosen < 0.0038
    assert "| `rms` | 1.3000 | 1.2500 | 1.2800 |" in lasts.page()
