"""The study "does it last?": what its program makes of runs. They are made up from a kept one.

python -m pytest tests/repro/test_lasts.py
"""

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from made_runs import made
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from common.errors import UserError
from evidence.runs import Run
from repro import declared, lasts
from repro.which_norm import arm_name

SHIFTS = {"rms": 0.0, "layer": 0.0002, "coupled": 0.010, "one-rms": -0.020, "peri": -0.001}
SLOPE = 0.19
RATES = {0.0022: 0.05, 0.0031: 0.0, 0.0044: 0.05}  # and by how much a run ends higher there
SAME = {"study": "lasts of these tests"}


def study(seeds: Iterable[int], sd: float | dict[int, float] = 0.008, **shifts: float):
    """Archives by name. Runs of a seed have a part of their loss in common.

    Args:
        sd: of the paired differences; or first seed -> SD from there on.
    """
    draws = np.random.default_rng(0)
    found: dict[str, list[Run]] = {"A": [], "S": []}
    shifts = SHIFTS | shifts
    for arm in shifts:
        for rate, more in RATES.items():
            settings = SAME | {"learning_rate": rate, "max_iters": 7680}
            found["S"].append(made(arm, 100, 1.3 + more, **settings))
            if rate != 0.0044:
                found["S"].append(made(arm, 101, 1.31 + more, **settings))
    seeds = list(seeds)
    noise = draws.normal(0, 0.5**0.5, (len(shifts), len(seeds)))
    noise -= noise.mean(1, keepdims=True) if seeds else 0  # so that mean differences are `shifts`
    for seed, of_seed in zip(seeds, noise.T, strict=True):
        spread = sd if isinstance(sd, float) else sd[max(first for first in sd if first <= seed)]
        common = draws.normal(1.2, 0.02)
        for (arm, shift), more in zip(shifts.items(), spread * of_seed, strict=True):
            wheels = 1.5 + shift / 4 + draws.normal(0, 0.001)
            found["A"].append(judged(arm, seed, common + shift + more, wheels))
    for steps in (3840, 15360):
        mean = 1.2 - SLOPE * math.log(steps / 7680)
        found[f"M-{steps}"] = [
            made("rms", seed, mean + more, max_iters=steps, learning_rate=0.0031, **SAME)
            for seed, more in zip(range(150, 154), (-0.001, 0.001, -0.002, 0.002), strict=True)
        ]
    return found


def judged(arm: str, seed: int, loss: float, wheels: float = 2.0, **settings) -> Run:
    words = SAME | {"planned_seeds": 20, "max_iters": 7680, "learning_rate": 0.0031} | settings
    return made(arm, seed, loss, wheels, **words)


@pytest.fixture
def archives(monkeypatch):
    """archives(found): the program reads these in place of results/cpu/lasts."""

    def put(found: dict[str, list[Run]]) -> dict[str, list[Run]]:
        monkeypatch.setattr(declared, "read", lambda _, name: found.get(name, []))
        return found

    return put


def verdicts() -> dict[str, list[str]]:
    """The table of the verdict: arm -> its cells."""
    lines = lasts.page().partition("## Verdict")[2].partition("| --- |")[2].splitlines()[1:]
    rows = [[cell.strip("` ") for cell in line.strip("|").split(" | ")] for line in lines]
    return {arm: cells for arm, *cells in rows}


def ends(runs: list[Run], part: slice) -> dict[tuple[str, int], float]:
    """Arm and seed -> mean loss over a part of the documents, by the runs' logs."""
    found = {}
    for run in runs:
        event = run.last("val_full")
        tokens = sum(event["document_tokens"][part])
        found[arm_name(run), run.seed] = sum(event["document_nats"][part]) / tokens
    return found


FAMILY = ("peri", "one-rms", "coupled")


def test_the_verdict_is_that_of_a_second_implementation(archives):
    found = archives(study(range(800, 820)))
    assert lasts.is_whole() and lasts.slope() == pytest.approx(SLOPE)
    nats, beside = (
        {
            arm: np.array([its[arm, seed] - its["rms", seed] for seed in range(800, 820)])
            for arm in ("layer", *FAMILY)
        }
        for its in (ends(found["A"], slice(21)), ends(found["A"], slice(21, None)))
    )
    p_values = [DescrStatsW(nats[arm]).ttest_mean(0)[1] for arm in FAMILY]
    p_holm = multipletests(p_values, method="holm")[1]
    table = verdicts()
    assert [*table] == ["layer", *FAMILY]
    for arm, cells in table.items():
        described = DescrStatsW(nats[arm])
        low, high = described.tconfint_mean()
        assert cells[0] == f"{described.mean:+.4f} ({low:+.4f} to {high:+.4f})"
        assert cells[1].startswith(f"{described.mean / SLOPE:+.1%} ({low / SLOPE:+.1%}")
        assert cells[2] == f"{described.ttest_mean(0)[1]:.2g}"
        assert cells[5] == f"{stats.wilcoxon(nats[arm])[1]:.2g}"
        assert cells[6] == f"{beside[arm].mean():+.4f}" != cells[0][:7]
    assert [table[arm][3] for arm in FAMILY] == [f"{p:.2g}" for p in p_holm]
    limit = SLOPE * math.log(1.01)
    p_tost = DescrStatsW(nats["layer"]).ttost_mean(-limit, limit)[0]
    assert table["layer"][3:5] == ["", f"{p_tost:.2g}"]
    assert table["layer"][-1] == ("equal within 1% of the tokens" if p_tost < 0.05 else "open")
    for arm, sign, half in (("peri", -1, 0.03), ("one-rms", -1, 0.033), ("coupled", 1, 0.028)):
        lasting = p_holm[FAMILY.index(arm)] < 0.05 and np.sign(nats[arm].mean()) == sign
        side = "smaller" if sign > 0 else "larger"
        is_half = DescrStatsW(nats[arm]).ttest_mean(sign * half * SLOPE, side)[1] < 0.05
        words = ["lasts"] * bool(lasting) + ["at most half is left"] * bool(is_half)
        assert table[arm][-1] == ("; ".join(words) or "open"), arm
    # what was put in
    assert table["one-rms"][-1] == "lasts" and table["peri"][-1] == "at most half is left"
    pooled = np.mean([DescrStatsW(its[:10]).var_ddof(1) for its in nats.values()]) ** 0.5
    assert f"20 seeds. The blind look at the first ten found a pooled SD of {pooled:.4f}, so " in (
        lasts.page()
    )


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
    archives(study(range(800, 819)))
    assert not lasts.is_whole() and "**Open**: whole seeds: 800, " in lasts.page()
    assert "minus" not in lasts.page()
    whole = study(range(800, 820))
    lost = next(run for run in whole["A"] if (arm_name(run), run.seed) == ("layer", 805))
    archives(whole | {"A": [run for run in whole["A"] if run is not lost]})
    assert not lasts.is_whole() and lasts.page().endswith("818, 819; begun: 805.\n")
    with pytest.raises(UserError, match="805 is not whole"):
        lasts.blind_look()
    archives(whole | {"M-3840": whole["M-3840"][:3]})
    assert "Not whole." in lasts.page() and not lasts.is_whole()
    assert lasts.page().endswith("819; what tokens are worth is not measured.\n")


def test_a_wide_spread_asks_for_more_seeds(archives, capsys):
    """By the first ten seeds alone, and without a name or a mean."""
    archives(study(range(800, 810), 0.020))
    lasts.main(["blind"])
    said = capsys.readouterr().out
    assert said.endswith("seeds 820 to 829 are run too\n")
    assert not any(arm in said for arm in ("layer", "coupled", "peri"))
    wide_first = {800: 0.016, 810: 0.001}
    archives(study(range(800, 820), wide_first))
    assert not lasts.is_whole()
    archives(study(range(800, 830), wide_first))
    assert lasts.is_whole() and "\n\n30 seeds. The blind look" in lasts.page()
    wide_later = study(range(800, 830), {800: 0.009, 810: 0.050})
    archives(wide_later)
    lasts.main(["blind"])
    assert capsys.readouterr().out.endswith(": no more seeds\n")
    assert (
        "\n\n20 seeds. The blind look" in lasts.page()
    )  # the ten that nobody asked for are left out


def replaced(found: dict[str, list[Run]], arm: str, seed: int, loss: float):
    """The archives with another end of one judged run."""
    others = [run for run in found["A"] if (arm_name(run), run.seed) != (arm, seed)]
    return found | {"A": [*others, judged(arm, seed, loss)]}


def bad_ends(text: str) -> dict[str, int]:
    told = text.partition("are kept: ")[2].partition(".")[0]
    return {arm.strip("`"): int(count) for arm, count in (one.split() for one in told.split(", "))}


@pytest.mark.parametrize("arm", ["rms", "peri"])
def test_a_bad_end_is_counted_and_kept(archives, arm):
    found = archives(study(range(800, 820)))
    before = bad_ends(lasts.page())
    archives(replaced(found, arm, 815, 1.4))
    after = bad_ends(lasts.page())
    assert [*after] == ["rms", "layer", *FAMILY] and after == before | {arm: before[arm] + 1}


def test_a_run_that_diverged_is_counted(archives):
    found = study(range(800, 820))
    archives(replaced(found, "peri", 803, math.inf))
    assert verdicts()["peri"][-1] == "diverged in 1 of 20: no verdict"
    assert verdicts()["one-rms"][-1] == "lasts"
    archives(replaced(found, "rms", 803, math.inf))
    text = lasts.page()
    assert "`rms` diverged in 1 of 20, so no arm has a verdict." in text and not verdicts()


def test_the_blind_look_takes_nothing_of_an_arm_that_diverged(archives):
    found = study(range(800, 820))
    for seed in range(800, 809):
        found = replaced(found, "layer", seed, math.inf)
    archives(found)
    others = [run for run in found["A"] if arm_name(run) != "layer" and run.seed < 810]
    by_arm = ends(others, slice(21))
    variances = [
        np.var([by_arm[arm, seed] - by_arm["rms", seed] for seed in range(800, 810)], ddof=1)
        for arm in FAMILY
    ]
    assert lasts.blind_look() == pytest.approx(np.mean(variances) ** 0.5)
    for seed in range(800, 810):
        found = replaced(found, "rms", seed, math.inf)
    archives(found)
    with pytest.raises(UserError, match="no arm without"):
        lasts.blind_look()


def test_the_slope_is_not_taken_from_bad_runs(archives):
    found = study(range(800, 820))
    settings = SAME | {"learning_rate": 0.0031}
    diverged = made("rms", 153, math.inf, max_iters=3840, **settings)
    archives(found | {"M-3840": [*found["M-3840"][:3], diverged]})
    with pytest.raises(UserError, match="the slope is inf"):
        lasts.page()
    higher = [made("rms", seed, 1.5, max_iters=15360, **settings) for seed in range(150, 154)]
    archives(found | {"M-15360": higher})
    with pytest.raises(UserError, match="the slope is -"):
        lasts.page()


# What a run may not have: archive, arm, seed, place, key, its value there
MISMATCHES = [
    ("A", "peri", 805, "config", "batch_size", 1),
    ("A", "peri", 805, "config", "max_iters", 7681),
    ("A", "peri", 805, "config", "learning_rate", 0.0044),
    ("A", "layer", 805, "start", "data", "other:1:2"),
    ("A", "rms", 805, "start", "device", "cpu (another)"),
    ("A", "rms", 805, "start", "processor", "another"),
    ("A", "rms", 805, "config", "norm_type", "dyt"),
    ("A", "rms", 805, "config", "seed", 790),
    ("S", "rms", 100, "config", "batch_size", 1),
    ("S", "rms", 100, "config", "seed", 102),
    ("S", "rms", 100, "start", "processor", "another"),
    ("M-3840", "rms", 151, "config", "learning_rate", 0.0044),
    ("M-3840", "rms", 151, "config", "norm_type", "layer"),
    ("M-3840", "rms", 151, "config", "batch_size", 1),
    ("M-3840", "rms", 151, "config", "seed", 149),
    ("M-15360", "rms", 151, "config", "max_iters", 3840),
]


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda its: f"{its[0]} {its[4]}")
def test_runs_of_another_experiment_are_refused(archives, mismatch):
    archive, arm, seed, place, key, value = mismatch
    found = archives(study(range(800, 830)))
    assert lasts.page()
    runs = found[archive]
    at = [(arm_name(run), run.seed) for run in runs].index((arm, seed))
    start, *events = runs[at].events
    (start["config"] if place == "config" else start)[key] = value
    log = "".join(json.dumps(event) + "\n" for event in (start, *events)).encode()
    runs[at] = Run(runs[at].path, {"log.jsonl": log})
    with pytest.raises(UserError):
        lasts.page()


def test_other_documents_are_refused(archives):
    found = archives(study(range(800, 820)))
    found["A"][7].last("val_full")["document_tokens"][0] -= 1
    with pytest.raises(UserError, match="not those of data/stdlib"):
        lasts.page()


def test_rates_are_chosen_by_the_loss_that_decides(archives):
    found = archives(study([]))
    curve = lasts.rates()["rms"]
    assert {rate: its[100] for rate, its in curve.losses.items()} == {
        rate: pytest.approx(1.3 + more) for rate, more in RATES.items()
    }
    assert curve.chosen == 0.0031 and "| `rms` | 1.3500 | 1.3000 | 1.3500 |" in lasts.page()
    assert "Not settled" not in lasts.page()
    first = [run for run in found["S"] if run.seed == 100]
    archives({"S": first})
    assert "`peri`: a second seed at 0.0031 and 0.0022" in lasts.page()
    archives({"S": [run for run in first if run.config["learning_rate"] < 0.004]})
    assert "Not settled: `rms`: the best is at an end, 0.0031; `layer`: " in lasts.page()


def test_runs_on_the_first_processor_choose_nothing(archives):
    found = archives(study([]))
    page = lasts.page()
    settings = SAME | {"learning_rate": 0.0031, "max_iters": 7680}
    found["S-Xeon"] = [
        made("rms", 100, 1.2996, **settings),
        made("rms", 100, 1.1, **settings | {"learning_rate": 0.0011}),
    ]
    added = [line for line in lasts.page().splitlines() if line not in page.splitlines()]
    assert len(added) == 1 and added[0].startswith("2 runs on another model of processor")
    assert "1 of them were run again: they end +0.0004 to +0.0004 from" in added[0]
    found["S-Xeon"] = [made("rms", 100, 1.1, **settings | {"study": "another"})]
    with pytest.raises(UserError, match="study"):
        lasts.page()


def test_a_second_seed_may_come_before_the_first(archives):
    """Its loss stands on the level of the first seed, by the rates that have both."""
    found = study([])
    found["S"].remove(next(run for run in found["S"] if run.config["learning_rate"] == 0.0022))
    archives(found)
    rms = lasts.rates()["rms"]
    assert set(rms.losses[0.0022]) == {101}
    assert rms.at(0.0022) == pytest.approx(1.35) and rms.at(0.0031) == pytest.approx(1.3)
    assert "Not settled: `rms`: a second seed at 0.0022" in lasts.page()


def test_runs_carry_the_declaration(monkeypatch):
    """Those of a study that is there do; of another text they are refused."""
    declared.read.cache_clear()
    assert len(declared.read("leads", "rates-W")) == 6
    declared.read.cache_clear()
    monkeypatch.setattr(declared, "declared", lambda study: f"{study} 0123")
    with pytest.raises(UserError, match="study=leads f106cc4c4274ddbc, not leads 0123"):
        declared.read("leads", "rates-W")
    assert declared.read("leads", "none") == []
