"""The study "which norm?": its committed runs, tables and card, and the script that makes the runs.

python -m pytest tests/repro/test_which_norm.py
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import study_rederived as anew
from helpers import ROOT
from statsmodels.stats.weightstats import DescrStatsW

from common.errors import UserError
from evidence.runs import Run
from repro import which_norm
from repro.which_norm import CONDITIONS, MARKERS, Curve, Difference, put

KEPT = ROOT / "results/cpu/which_norm"
PAGES = (KEPT / "README.md", ROOT / "docs/which_norm.md")
# The texts of the plan that the runs were made under (repro/which_norm.toml says why)
PLANS = {"b5f3fe1e0e4233f1", "911042c2528e5de6", "5a28a67e818937ff"}
LAYER_COUPLED = "a2318d73d7f6d2e1"
LEADS = "f106cc4c4274ddbc"
# stage -> text of repro/muon_rate.sh, which says what changed between them
MUON_RATE = {"curve": "3647e0779b03089e", "step": "0096b06a38f919c6"}


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: the cells of each row, without the header."""
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)
    return [
        [[cell.strip("` ") for cell in line.strip("|").split(" | ")] for line in lines[2:]]
        for lines in map(str.splitlines, blocks)
    ]


def test_the_declarations_are_those_of_the_runs():
    declarations = {
        "which_norm.toml": PLANS,
        "layer_coupled.sh": {LAYER_COUPLED},
        "leads.sh": {LEADS},
        "muon_rate.sh": {MUON_RATE["step"]},
    }
    for name, hashes in declarations.items():
        assert hashlib.sha256((ROOT / "repro" / name).read_bytes()).hexdigest()[:16] in hashes
    for stage, text in MUON_RATE.items():
        assert {run["study"] for run in anew.runs(f"muon_rate/{stage}")} == {f"muon_rate {text}"}
    for condition in CONDITIONS:
        places = {}
        for run in anew.runs(condition.archive):
            assert run["study"].split()[-1] in PLANS | {LAYER_COUPLED, LEADS}
            place = (run["device"], run.get("processor"), run["git"])
            assert places.setdefault(run["seed"], place) == place  # what is compared ran alike


def test_every_difference_is_that_of_a_second_implementation():
    _, differences, both, *_ = tables(PAGES[0])
    found = {(column, arm): cells for column, arm, *cells in differences}
    for cells in found.values():
        cells[-1] = re.sub(", (margin open|beyond the margin)", "", cells[-1])
    assert found == {key: row for key, row in anew.rows().items() if row[1] != "begun"}
    bounds = ((anew.margin("W") + anew.margin("D")) / 2, 0.0)
    below, better = (anew.both_shapes(bound) for bound in bounds)
    assert sorted(both) == sorted([arm, f"{below[arm]:.2g}", f"{better[arm]:.2g}"] for arm in below)


def test_the_study_that_is_not_on_the_card_is_that_of_a_second_implementation():
    rows = which_norm.all_differences((*CONDITIONS, *which_norm.OTHER_STUDIES))
    others = {condition.name for condition in which_norm.OTHER_STUDIES}
    found = {
        (row.condition.name, row.arm): (
            len(row.nats),
            f"{row.estimate.mean:+.4f}",
            row.verdict.direction if row.verdict else "",
        )
        for row in rows
        if row.condition.name in others
    }
    assert found == anew.other_rows()
    assert found["wide, the rate of rms", "one-rms"] == (8, "-0.0240", "better")


def test_the_leads_have_the_rates_that_the_selection_seeds_chose():
    """Those of the page; and those of the judged runs."""
    rows, *_ = tables(ROOT / "results/cpu/leads/README.md")
    chosen = {(shape, arm): float(rate) for shape, arm, *_, rate in rows}
    assert len(chosen) == 4
    for (shape, arm), rate in chosen.items():
        assert rate == anew.chosen_rate(f"leads/rates-{shape}", arm)
    for shape in "WD":
        arms = anew.by_words((f"leads/verdict-{shape}",), range(720, 736))
        for words in arms.keys() - {"rms"}:
            assert {run["learning_rate"] for run in arms[words].values()} == {chosen[shape, words]}


def test_every_rate_is_the_one_that_the_study_was_run_with():
    """That of the study's first program, whose text recorded it."""
    recorded = json.loads((KEPT / "rates.json").read_text())["shapes"]
    for shape, arms in recorded.items():
        for arm, found in arms.items():
            assert which_norm.curves(shape)[arm].chosen == found["rate"]
    [curve] = which_norm.curves_of(which_norm.read("muon_rate/curve")).values()
    with_muon = anew.of_arm("muon_rate/step", "rms", optimizer="muon")
    assert min(curve.losses) < curve.best < max(curve.losses)
    assert {run["learning_rate"] for run in with_muon} == {curve.chosen}


def test_the_card_is_that_of_a_second_implementation():
    text = PAGES[0].read_text()
    rows = anew.rows()
    table = tables(PAGES[0])[0]
    assert len(table) == 8
    for arm, *cells in table:
        for column, cell in zip(anew.COLUMNS, cells, strict=True):
            _, expected, *_, verdict = rows.get((column, arm), [0, "not run", "not judged"])
            word = re.match("better|worse|", verdict)[0]
            assert cell == expected + (f", **{word}**" if word else "")
    worth = anew.worth()
    mean = (anew.margin("W") + anew.margin("D")) / 2
    p, stricter = (
        anew.both_shapes(bound)["coupled-full-gradient"] for bound in (mean, anew.margin("W"))
    )
    usual = np.mean(anew.losses("which_norm/verdict-D", "rms"))
    everywhere = anew.losses("which_norm/verdict-D", "rms")
    everywhere += anew.losses("which_norm/margin-D", "rms", max_iters=1000)
    everywhere += anew.losses("which_norm/rates-D", "rms", learning_rate=0.008)
    everywhere += anew.losses("which_norm/check-D", "rms", learning_rate=0.0085, init_std=0.125)
    bad = sum(loss > usual + 0.03 for loss in everywhere)
    nearer, farther = DescrStatsW(anew.muon_for_adamw()).tconfint_mean()
    settings = "; ".join(f"{name} {nats:.4f}" for name, nats in worth.items())
    for said in (
        f"{anew.margin('W'):.4f} nats in the wide shape, {anew.margin('D'):.4f} in the",
        f"than {mean:.4f} in either is borderline (p {p:.3f}; {stricter:.3f} at",
        f"{worth[which_norm.OPTIMIZER]:.4f} nats ({nearer:.4f} to {farther:.4f}, four seeds) below",
        f"{bad} of {len(everywhere)} `rms` runs at its rate",
        f"What choices lower the loss by in the wide shape, nats: {settings}.",
    ):
        assert said in text


def test_the_committed_runs_give_the_committed_pages():
    assert which_norm.page() == PAGES[0].read_text()
    assert which_norm.card() in PAGES[1].read_text()
    assert which_norm.linked() in (ROOT / "README.md").read_text()


# What a run of an arm may not have: archive, what tells the runs, place, key, its value there
MISMATCHES = [
    ("which_norm/verdict-W", {"norm_type": "peri"}, "config", "batch_size", 1),
    ("which_norm/verdict-W", {"norm_type": "peri", "seed": 205}, "config", "max_iters", 900),
    ("which_norm/verdict-W", {"norm_type": "peri"}, "start", "data", "other:1:2"),
    ("which_norm/verdict-W", {"norm_type": "peri", "seed": 205}, "start", "device", "a GPU"),
    ("which_norm/verdict-W", {"norm_type": "peri"}, "config", "study", "another"),
    ("which_norm/verdict-W", {"norm_type": "peri", "seed": 205}, "config", "learning_rate", 0.5),
    ("layer_coupled/D", {"norm_type": "rms", "seed": 205}, "config", "dropout", 0.5),
    ("which_norm/muon-W", {"norm_type": "peri"}, "config", "optimizer", "adamw"),
    ("muon_rate/step", {"optimizer": "muon"}, "config", "batch_size", 1),
    ("muon_rate/step", {"optimizer": "muon", "seed": 501}, "config", "learning_rate", 0.5),
    ("muon_rate/step", {"optimizer": "muon"}, "config", "norm_type", "peri"),
    ("muon_rate/curve", {"learning_rate": 0.0088}, "config", "grad_clip", 9.0),
    ("which_norm/rates-W", {"norm_type": "peri"}, "config", "init_std", 9.0),
    ("which_norm/margin-D", {"max_iters": 500}, "start", "data", "other:1:2"),
    ("which_norm/check-W", {"norm_type": "peri"}, "config", "batch_size", 1),
    ("init_std/W", {"init_std": 0.02}, "config", "batch_size", 1),
]


@pytest.mark.parametrize(
    ("archive", "mine", "place", "key", "value"),
    MISMATCHES,
    ids=[f"{archive}-{key}" for archive, _, _, key, _ in MISMATCHES],
)
def test_runs_of_another_experiment_are_refused(monkeypatch, archive, mine, place, key, value):
    """In pairs and in the tables beside them; nothing is paired by its seed alone."""
    as_kept = which_norm.read
    runs = [Run(run.path, run.files) for run in as_kept(archive)]
    changed = [run for run in runs if mine.items() <= run.config.items()]
    assert 0 < len(changed) < len(runs)
    for run in changed:
        getattr(run, place)[key] = value
    monkeypatch.setattr(which_norm, "read", lambda name: runs if name == archive else as_kept(name))
    cached = (which_norm.all_differences, which_norm.curves, which_norm.rms_lengths)
    for function in cached:
        function.cache_clear()
    try:
        with pytest.raises(UserError):
            which_norm.page()
    finally:
        for function in cached:
            function.cache_clear()


def swapped(runs: list[Run], name: str) -> list[Run]:
    """The runs, with the losses of an arm and of `rms` exchanged, seed by seed."""
    runs = [Run(run.path, run.files) for run in runs]
    mine, base = (
        {run.seed: run for run in runs if run.config["norm_type"] == arm} for arm in (name, "rms")
    )
    for seed in mine.keys() & base.keys():
        ours, theirs = mine[seed].last("val_full"), base[seed].last("val_full")
        key = "val_loss_full"
        ours[key], theirs[key] = theirs[key], ours[key]
    return runs


@pytest.mark.parametrize("change", ["swapped", "left out", "one more", "worth less"])
def test_a_headline_that_the_runs_do_not_bear_out_is_refused(monkeypatch, change):
    """Losses of two arms exchanged in an archive; a norm that beats `rms` and is not named."""
    as_kept = which_norm.read
    archive = "which_norm/verdict-W"
    if change == "swapped":
        runs = swapped(as_kept(archive), "peri")
        patch = {"read": lambda name: runs if name == archive else as_kept(name)}
    elif change == "left out":
        patch = {"CONDITIONS": CONDITIONS[:4], "OTHER_STUDIES": ()}
    elif change == "one more":
        calls = {**which_norm.CALLED_BETTER, which_norm.WIDE: {"peri"}}
        patch = {"CALLED_BETTER": calls}
    else:
        patch = {"worth": lambda: {which_norm.SCALE: 0.1, which_norm.OPTIMIZER: 0.2}}
    for name, value in patch.items():
        monkeypatch.setattr(which_norm, name, value)
    which_norm.all_differences.cache_clear()
    try:
        with pytest.raises(UserError, match="HEADLINE"):
            which_norm.headline()
    finally:
        which_norm.all_differences.cache_clear()


def test_the_headline_is_short():
    words = re.findall(r"[\w'-]*\w", which_norm.HEADLINE)
    assert 30 < len(words) <= 45 and not re.search(r"[()\d]", which_norm.HEADLINE)


def test_a_shape_that_is_not_whole_or_diverged_has_no_verdict():
    condition = CONDITIONS[2]
    assert Difference(condition, "layer", np.zeros(3), 0).text() == "begun"
    diverged = Difference(condition, "layer", np.zeros(14), 2)
    assert diverged.text() == "diverged in 2 of 16" and not diverged.is_whole


def test_a_rate_beside_one_that_diverged_is_not_fitted():
    losses = {0.002: {100: 1.5}, 0.004: {100: 1.4}, 0.008: {100: np.inf}}
    assert Curve(losses, {}).chosen == 0.004
    losses[0.008] = {100: 1.41}
    assert Curve(losses, {}).chosen == pytest.approx(0.004 * 2 ** (0.09 / 0.22), rel=0.02)
    losses[0.008] = {100: 1.4, 101: 9.0}
    losses[0.004][101] = 9.01  # the second seed, cleared of its distance, prefers the higher rate
    assert Curve(losses, {}).best == 0.008 == Curve(losses, {}).chosen


def test_a_card_takes_the_place_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    for before, after in (
        (
            f"a\n{MARKERS[0]}\nold\n{MARKERS[1]}\nb\n",
            f"a\n{MARKERS[0]}\n\nnew\n\n{MARKERS[1]}\nb\n",
        ),
        ("no markers\n", "no markers\n"),
    ):
        page.write_text(before)
        put(page, "new")
        assert page.read_text() == after


STUB = """#!/usr/bin/env bash
printf '%s\\t%s\\t%s\\t%s\\n' "$KEEP" "$SEEDS" "$ARMS" "$*"
"""


@pytest.fixture
def script(tmp_path):
    """Run repro/which_norm.sh with a sweep.sh that only says what it is asked for."""
    for folder in ("repro", "config"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "sweep.sh").write_text(STUB)
    (tmp_path / "sweep.sh").chmod(0o755)

    def ask(*words: str, code: int = 0, **env: str) -> list[list[str]]:
        command = ["bash", str(tmp_path / "repro/which_norm.sh"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
        assert done.returncode == code, done.stderr
        return [line.split("\t") for line in done.stdout.splitlines()]

    return ask


def names_of(lines: list[list[str]]) -> set[str]:
    """The names of the runs that were asked for."""
    return {
        f"{'+'.join(shlex.split(arm)).replace('+--', '+').replace(' ', '_')}-{seed}"
        for _, seeds, arms, _ in lines
        for arm in shlex.split(arms)
        for seed in seeds.split()
    }


@pytest.mark.parametrize("archive", sorted(KEPT.glob("*.tar.xz")), ids=lambda path: path.name)
def test_the_script_asks_for_the_committed_runs(script, archive):
    stage, shape = archive.name.removesuffix(".tar.xz").split("-")
    lines = script("cpu", stage, shape)
    asked = names_of(lines)
    assert {line[0] for line in lines} == {str(archive.relative_to(ROOT))}
    kept = {run["name"] for run in anew.runs(f"which_norm/{stage}-{shape}")}
    # of rates the grid; what the rule adds, people give
    assert asked <= kept and len(asked) == (13 * 4 if stage == "rates" else len(kept))


def test_another_scale_needs_rates(script):
    for words in (("30m", "verdict", "W"), ("cpu", "rates", "Q"), ("cpu", "other", "W")):
        script(*words, code=2)
    asked = script("30m", "rates", "D", "--init_std=0.05", RATES="0.1", ARMS="peri", SEEDS="7")
    assert names_of(asked) == {"peri+learning_rate=0.1-7"}
    [[kept, *_]] = script("cpu", "verdict", "W", KEEP="mine.tar.xz")
    assert kept == "mine.tar.xz"
    assert "--n_layer=24 --init_std=0.05" in asked[0][3]
