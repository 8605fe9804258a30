"""A study from its plan to its verdicts, on runs whose losses are given by a formula.

python -m pytest tests/evidence/test_study.py
"""

import json
import math
import re

import numpy as np
import pytest
from study_runs import make_plan, write

from common.errors import ConfigError, UserError
from evidence.comparison import Pair
from evidence.curves import Curve, pooled_sd
from evidence.families import judge
from evidence.stages import (
    CheckStage,
    InitStage,
    MarginStage,
    MuonStage,
    RateStage,
    TokensStage,
    VerdictStage,
    document_range,
    recommend,
    slope,
)
from evidence.study import Plan, Results, name_of

BEST = {"rms": 4e-3, "layer": 1.3e-3, "shared": 6e-3}  # where each arm's loss is lowest
EXTRA = {"rms": 0.0, "layer": 0.02, "shared": -0.01}


class Trained:
    """Trains what a stage wants, by writing logs, and counts the waves."""

    def __init__(self, folder):
        self.folder = folder
        self.plan = make_plan(folder)
        self.waves = 0

    def results(self, name):
        places = {name: {shape: [self.folder / name / shape] for shape in ("W", "D")}}
        return Results(self.plan, places)

    def finish(self, stage):
        while missing := (found := self.results(stage.name)).missing(stage.wanted(found)):
            self.waves += 1
            for run in missing:
                write(self.plan, self.folder / stage.name, run, self.loss(run))
        text = json.dumps(stage.conclusion(found), sort_keys=False)
        return json.loads(text)

    def loss(self, run):
        rate = float(re.search(r"learning_rate=(\S+)", run.words)[1])
        if rate > 24e-3:
            return None
        noise = 0.003 * np.random.RandomState([run.seed, len(run.shape + run.arm)]).randn()
        loss = 1.4 + 0.03 * math.log2(rate / BEST[run.arm]) ** 2 + EXTRA[run.arm]
        steps = re.search(r"max_iters=(\d+)", run.words)
        return loss + noise - 0.2 * math.log(int(steps[1]) / 1000 if steps else 1.0)


@pytest.fixture
def trained(tmp_path):
    return Trained(tmp_path)


def test_a_plan_names_its_study_and_its_runs(tmp_path):
    plan = make_plan(tmp_path)
    shape = plan.shapes[1]
    assert plan.study == f"toy toy {plan.hash[:16]}"
    words = plan.words("shared", shape, learning_rate=2e-3)
    assert words == "coupled --norm_plan='Rs RR RR R' --learning_rate=0.002"
    assert name_of(words) == "coupled+norm_plan=Rs_RR_RR_R+learning_rate=0.002"
    with pytest.raises(ConfigError, match="unknown scale: it is one of toy"):
        Plan(plan.path, "other")
    text = plan.path.read_text()
    for damaged in (
        text + "\n[scales.toy.rules]\nverdict = 1\n",
        text + "\n[scales.bad]\nconfig = ''\nrates = []\nshapes = {W = 1}\n",
    ):
        plan.path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"a value stands where a \[table\] must be"):
            Plan(plan.path, "bad" if "bad" in damaged else "toy")
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan(tmp_path / "none.toml", "toy")
    plan.path.write_text("[")
    with pytest.raises(ConfigError, match="no plan, or damaged"):
        Plan(plan.path, "toy")


def test_rates_are_found_extended_and_chosen(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    found = trained.finish(stage)
    rms, layer = found["shapes"]["W"]["rms"], found["shapes"]["W"]["layer"]
    # The grid; then above, until the loss has risen by 0.05, and two octaves below for layer, whose
    # lowest rate was best twice; then the second seed.
    assert list(rms["losses"]) == ["0.002", "0.004", "0.008", "0.016"]
    assert next(iter(layer["losses"])) == "0.0005" and layer["settled"]
    assert rms["rate"] == pytest.approx(BEST["rms"], rel=0.1)
    assert layer["rate"] == pytest.approx(BEST["layer"], rel=0.1)
    assert rms["best"] == 4e-3 and len(rms["losses"]["0.004"]) == 2
    # 0.03 x^2 = 0.05 at 1.29 octaves; the curve is interpolated between whole octaves.
    assert 1.1 < rms["tolerance"] < 1.35 and rms["tolerance_seen"]
    assert set(layer["common_initialisation"]) == {"100", "101"}
    assert found["ranking"] == ["shared", "layer"]
    assert found["sd"]["W"] > 0


def test_a_curve_that_diverges_or_does_not_end():
    curve = Curve({1e-3: {1: 2.0}, 2e-3: {1: 1.0}, 4e-3: {1: math.inf}}, 1)
    assert curve.best == curve.chosen == 2e-3 and curve.is_settled
    assert curve.tolerance(0.05) == (0.0, True)
    open_end = Curve({1e-3: {1: 1.0}, 2e-3: {1: 1.01}}, 1)
    assert open_end.tolerance(0.05) == (1.0, False)
    assert open_end.chosen == 1e-3 and not open_end.is_settled
    nothing = Curve({1e-3: {1: math.inf}, 2e-3: {1: math.inf}}, 1)
    assert nothing.best == 1e-3 and nothing.tolerance(0.05) == (0.0, True)


def test_the_second_seed_is_cleared_of_its_mean_difference():
    curve = Curve({1e-3: {1: 1.0}, 2e-3: {1: 0.5, 2: 0.8}, 4e-3: {1: 0.6, 2: 0.7}}, 1)
    assert curve.at(1e-3) == 1.0
    assert curve.at(2e-3) == pytest.approx((0.5 + 0.6) / 2)  # seed 2 lies 0.2 above
    assert curve.at(4e-3) == pytest.approx((0.6 + 0.5) / 2)


def test_arms_are_ranked_by_the_plain_mean_of_both_seeds(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    lowest = {"rms": 4e-3, "layer": 4e-3, "shared": 4e-3}
    losses = {
        ("layer", 100): 1.39,
        ("layer", 101): 1.44,
        ("shared", 100): 1.41,
        ("shared", 101): 1.40,
    }

    def loss(run):
        rate = float(re.search(r"learning_rate=(\S+)", run.words)[1])
        bend = 0.03 * math.log2(rate / lowest[run.arm]) ** 2
        # The second seed differs at the best rate alone.
        first = losses.get((run.arm, 100), 1.4)
        return bend + (losses.get((run.arm, run.seed), 1.4) if rate == 4e-3 else first)

    trained.loss = loss
    found = trained.finish(stage)["shapes"]["W"]
    assert found["layer"]["mean_of_seeds"] == pytest.approx(1.415)
    assert found["shared"]["mean_of_seeds"] == pytest.approx(1.405)
    # cleared of the second seed's mean difference, layer would be first
    assert found["layer"]["loss"] < found["shared"]["loss"]
    assert trained.finish(stage)["ranking"] == ["shared", "layer"]


def test_the_margin_is_what_tokens_are_worth(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    stage = MarginStage(trained.plan, {"rates": rates}, 1000, 100)
    found = trained.finish(stage)
    assert found["slopes"]["W"] == pytest.approx(0.2, abs=0.01)
    assert found["margin"] == pytest.approx(0.2 * math.log(1.02), rel=0.05)
    words = [run.words for run in stage.wanted(trained.results("margin"))]
    assert sum("--max_iters=500 --warmup_iters=50" in text for text in words) == 6
    assert set(found["power"]) == {"1", "2"}


def test_verdicts_rest_on_the_selected_rates(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    margin = {"margin": 0.01, "slopes": {"W": 0.2, "D": 0.2}, "arms": 2}
    before = {"rates": rates, "margin": margin}
    stage = VerdictStage(trained.plan, before, 1000, 100)
    found = trained.finish(stage)
    assert found["arms"]["layer"]["direction"] == "worse"
    assert found["arms"]["layer"]["margin"] == "beyond"
    assert found["arms"]["shared"]["margin"] == "within"
    shared = found["arms"]["shared"]["shapes"]["W"]
    low, high = shared["without_a_document"]
    assert low <= shared["difference"] <= high
    assert shared["tokens"] == pytest.approx(math.expm1(-shared["difference"] / 0.2))
    # Another rate than the selected one in the log of a run.
    run = stage.wanted(trained.results("verdict"))[0]
    folder = trained.folder / "verdict" / run.shape / f"{name_of(run.words)}-{run.seed}"
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(
        re.sub(r'"learning_rate": [\d.e-]+', '"learning_rate": 0.5', text)
    )
    with pytest.raises(UserError, match=r"its log says learning_rate=0\.5, its name"):
        trained.results("verdict")
    # A selection that was changed afterwards wants other runs; those that are there do not count.
    rates["shapes"]["W"]["shared"]["rate"] *= 2
    (folder / "log.jsonl").write_text(text)
    assert trained.results("verdict").missing(
        VerdictStage(trained.plan, before, 1000, 100).wanted(trained.results("verdict"))
    )


def test_an_arm_that_diverged_is_not_judged_on_the_rest(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    margin = {"margin": 0.01, "slopes": {"W": 0.2, "D": 0.2}, "arms": 2}
    stage = VerdictStage(trained.plan, {"rates": rates, "margin": margin}, 1000, 100)
    run = next(run for run in stage.wanted(trained.results("verdict")) if run.arm == "shared")
    write(trained.plan, trained.folder / "verdict", run, None)
    found = trained.finish(stage)
    assert set(found["arms"]) == {"layer"} and found["diverged"]["shared"] == 1


def test_nothing_is_judged_against_a_baseline_that_diverged(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    margin = {"margin": 0.01, "slopes": {"W": 0.2, "D": 0.2}, "arms": 2}
    stage = VerdictStage(trained.plan, {"rates": rates, "margin": margin}, 1000, 100)
    run = next(run for run in stage.wanted(trained.results("verdict")) if run.arm == "rms")
    write(trained.plan, trained.folder / "verdict", run, None)
    found = trained.finish(stage)
    assert found["arms"] == {} and found["diverged"]["rms"] == 1


def test_logs_without_documents_have_no_range(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    run = stage.wanted(trained.results("rates"))[0]
    log = write(trained.plan, trained.folder / "rates", run, 1.0) / "log.jsonl"
    found = trained.results("rates").of(run).run
    assert document_range([Pair(found, found)]) == [0.0, 0.0]
    # train.py leaves out both lists
    log.write_text(re.sub(r', "document_\w+": \[[^]]*\]', "", log.read_text()))
    found = trained.results("rates").of(run).run
    assert document_range([Pair(found, found)]) is None


def test_a_run_that_was_killed_before_its_log_began_is_not_finished(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    run = stage.wanted(trained.results("rates"))[0]
    log = write(trained.plan, trained.folder / "rates", run, 1.0) / "log.jsonl"
    for torn in ("", '{"event": "sta'):
        log.write_text(torn)
        assert run in trained.results("rates").missing([run])


def test_an_arm_that_could_not_be_tested_counts_in_the_family():
    sample = np.array([-0.001, -0.003, -0.002, -0.0015])
    alone = judge({"a": {"W": sample}}, 0.01)["a"].p_better
    assert judge({"a": {"W": sample}}, 0.01, planned=3)["a"].p_better == pytest.approx(3 * alone)


def test_the_regret_of_a_rate_is_that_of_simulated_choices():
    """Of a parabola with curvature 0.06: a shift of x octaves costs 0.03 x^2."""
    losses = {8.0 * 2**octave: {1: 1 + 0.03 * octave**2} for octave in (-1, 0, 1)}
    curve = Curve(losses, 1)
    mean, high = curve.regret(sd=0.004)
    # The vertex moves by (left - right) / (4 * 0.03) octaves.
    expected = 0.03 * 2 * (0.004 / 0.12) ** 2
    assert mean == pytest.approx(expected, rel=0.2) and high > mean
    assert curve.highest_finite == 16.0
    assert math.isnan(Curve({1.0: {1: 1.0}}, 1).regret(0.001)[0])


def test_too_little_power_starts_no_verdicts(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    stage = VerdictStage(trained.plan, {"rates": rates, "margin": {"arms": 0}}, 1000, 100)
    with pytest.raises(UserError, match="not even one arm has a power"):
        stage.wanted(trained.results("verdict"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"study": "toy toy 0"}, "the plan was changed after the run"),
        ({"data": "b"}, "data b, but .* had a"),
        ({"git": "1" * 40}, "git 1+, but"),
        ({"learning_rate": 1.0}, "its log says learning_rate=1.0"),
        ({"seed": 7}, "its log says seed=7"),
    ],
)
def test_foreign_runs_are_refused(trained, change, message):
    stage = RateStage(trained.plan, {}, 1000, 100)
    first, second = stage.wanted(trained.results("rates"))[:2]
    write(trained.plan, trained.folder / "rates", first, 1.0)
    write(trained.plan, trained.folder / "rates", second, 1.0, **change)
    with pytest.raises(UserError, match=message):
        trained.results("rates")


def test_runs_that_are_compared_share_their_processor(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    stage = MarginStage(trained.plan, {"rates": rates}, 1000, 100)
    first, *others = stage.wanted(trained.results("margin"))
    same = [run for run in others if (run.shape, run.seed) == (first.shape, first.seed)]
    other = next(run for run in others if run not in same)
    folder = trained.folder / "margin"
    write(trained.plan, folder, first, 1.0)
    found = trained.results("margin")
    assert found.place_of(same[0])["device"] == "cpu (x)" and found.place_of(other) is None
    write(trained.plan, folder, other, 1.0, device="cpu (y)")
    assert trained.results("margin").place_of(other)["device"] == "cpu (y)"
    write(trained.plan, folder, same[0], 1.0, processor="z")
    with pytest.raises(UserError, match=r"processor z, but .* had x"):
        trained.results("margin")


def test_a_run_that_was_resumed_elsewhere_is_refused(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    run = write(
        trained.plan, trained.folder / "rates", stage.wanted(trained.results("rates"))[0], 1
    )
    log = run / "log.jsonl"
    start, *events = log.read_text().splitlines(keepends=True)
    resume = {"event": "resume", "step": 500, "changed": ["device cpu (x) -> cpu (y)"]}
    log.write_text("".join([start, json.dumps(resume) + "\n", *events]))
    with pytest.raises(UserError, match=r"resumed with other settings.*cpu .y.*train it again"):
        trained.results("rates")


def test_selection_may_change_its_processor(trained):
    stage = RateStage(trained.plan, {}, 1000, 100)
    first, second = stage.wanted(trained.results("rates"))[:2]
    write(trained.plan, trained.folder / "rates", first, 1.0)
    write(trained.plan, trained.folder / "rates", second, 1.0, device="cpu (y)")
    found = trained.results("rates")
    assert found.of(first) and found.of(second) and found.place_of(first) is None
    assert found.devices("rates") == {"cpu (x)": 1, "cpu (y)": 1}


def test_spread_and_slope():
    assert pooled_sd([[1.0, 3.0], [5.0], [2.0, math.inf]]) == pytest.approx(math.sqrt(2))
    assert math.isnan(pooled_sd([[1.0]]))
    assert slope({0.5: [2.0, 2.2], 1.0: [9.0], 2.0: [1.7, 1.9]}) == pytest.approx(0.3 / math.log(4))


def verdicts(**arms) -> dict:
    """Conclusion of stage 3: arm -> (direction, margin, difference)."""
    return {
        "arms": {
            arm: {
                "direction": direction,
                "margin": margin,
                "shapes": {shape: {"difference": difference} for shape in ("W", "D")},
            }
            for arm, (direction, margin, difference) in arms.items()
        }
    }


@pytest.mark.parametrize(
    ("found", "octaves", "seen", "expected"),
    [
        # better wins, the larger gain first
        (
            {"layer": ("better", "within", -0.02), "shared": ("better", "within", -0.01)},
            9,
            True,
            "layer",
        ),
        # then the tolerance, an octave or more above the baseline's
        ({"layer": ("no difference shown", "within", 0.0)}, 2.0, True, "layer"),
        ({"layer": ("no difference shown", "within", 0.0)}, 2.0, False, "rms"),
        ({"layer": ("no difference shown", "open", 0.0)}, 2.0, True, "rms"),
        ({"layer": ("no difference shown", "within", 0.0)}, 1.9, True, "rms"),
        # then bytes; shared has the baseline's
        ({"shared": ("no difference shown", "within", 0.0)}, 1.9, True, "rms"),
        ({"cheap": ("no difference shown", "within", 0.0)}, 1.9, True, "cheap"),
    ],
)
def test_the_recommendation_follows_the_declared_rule(tmp_path, found, octaves, seen, expected):
    plan = make_plan(tmp_path)
    plan.plan["recommendation"]["bytes"]["cheap"] = "none"
    tolerance = {arm: {"tolerance": octaves} for arm in ("layer", "shared", "cheap")}
    shape = tolerance | {"rms": {"tolerance": 1.0, "tolerance_seen": seen}}
    before = {"rates": {"shapes": {"W": shape, "D": shape}}, "verdict": verdicts(**found)}
    moved = {"rms": 43.0, "layer": 48.0, "none": 38.0}
    assert recommend(plan, before, moved)[0] == expected


def test_later_stages_look_at_other_settings(trained):
    rates = trained.finish(RateStage(trained.plan, {}, 1000, 100))
    found = verdicts(shared=("better", "within", -0.01), layer=("worse", "beyond", 0.02))
    before = {
        "rates": rates,
        "margin": {"margin": 0.01},
        "verdict": found,
        "recommendation": {"arm": "rms"},
    }
    check = CheckStage(trained.plan, before, 1000, 100)
    assert check.arms() == ["rms", "shared"]  # the next best, as rms is recommended itself
    concluded = trained.finish(check)
    means = concluded["shapes"]["W"]["shared"]
    assert means["learning_rate x 1"] < means["learning_rate x 0.5"]
    assert concluded["not_settled"] == []
    tokens = TokensStage(trained.plan, before, 1000, 100)
    concluded = trained.finish(tokens)
    assert concluded["arms"]["shared"]["of_stage_3"] == -0.01
    assert not concluded["arms"]["shared"]["contradicts"]
    muon = MuonStage(trained.plan, before, 1000, 100)
    waves = trained.waves
    concluded = trained.finish(muon)
    assert trained.waves == waves + 2  # the rates first
    assert set(concluded["arms"]) == {"shared"}
    assert all("--optimizer=muon" in run.words for run in muon.wanted(trained.results("muon")))


def test_stage_0_finds_an_initialisation(trained, monkeypatch):
    trained.plan.plan["initialisation"] = {"init_std": [0.02, 0.08], "seed": 100}
    stage = InitStage(trained.plan, {}, 1000, 100)
    monkeypatch.setattr(
        trained,
        "loss",
        lambda run: Trained.loss(trained, run) + ("init_std=0.02" in run.words) * 0.2,
    )
    found = trained.finish(stage)
    assert found["init_std"] == {"W": 0.08, "D": 0.08}


def test_planned_runs_are_counted(trained):
    rates = RateStage(trained.plan, {}, 1000, 100)
    assert rates.planned() == {"W": [(17, 1.0)], "D": [(17, 1.0)]}
    found = verdicts(layer=("worse", "open", 0.0))
    stages = [
        kind(trained.plan, {"verdict": found}, 1000, 100)
        for kind in (MarginStage, VerdictStage, CheckStage, TokensStage, MuonStage)
    ]
    counted = {stage.name: stage.planned()["W"] for stage in stages}
    assert counted == {
        "margin": [(3, 0.5), (3, 1.0), (3, 2.0)],
        "verdict": [(18, 1.0)],
        "check": [(20, 1.0)],
        "tokens": [(4, 4.0)],
        "muon": [(10, 1.0)],
    }
