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
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import study_rederived as anew
from helpers import ROOT

from repro import which_norm
from repro.which_norm import CONDITIONS, MARKERS, Curve, Difference, put

KEPT = ROOT / "results/cpu/which_norm"
PAGES = (KEPT / "README.md", ROOT / "docs/which_norm.md")
# The texts of the plan that the runs were made under (repro/which_norm.toml says why)
PLANS = {"b5f3fe1e0e4233f1", "911042c2528e5de6", "5a28a67e818937ff"}


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: the cells of each row, without the header."""
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)
    return [
        [[cell.strip("` ") for cell in line.strip("|").split(" | ")] for line in lines[2:]]
        for lines in map(str.splitlines, blocks)
    ]


def test_the_declarations_are_those_of_the_runs():
    for path, hashes in (("which_norm.toml", PLANS), ("layer_coupled.sh", {"a2318d73d7f6d2e1"})):
        assert hashlib.sha256((ROOT / "repro" / path).read_bytes()).hexdigest()[:16] in hashes
    for condition in CONDITIONS:
        places = {}
        for run in anew.runs(condition.archive):
            assert run["study"].split()[-1] in PLANS | {"a2318d73d7f6d2e1"}
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


def test_every_rate_is_that_of_a_second_implementation():
    _, _, _, too_high, wide, deep, margins, checked = tables(PAGES[0])
    too_high = {arm: cells for arm, *cells in too_high}
    for shape, rows in (("W", wide), ("D", deep)):
        table = {arm: cells for arm, *cells in rows}
        recorded = json.loads((KEPT / "rates.json").read_text())["shapes"][shape]
        for arm in anew.PLAN["arms"]:
            curve = anew.curve(shape, arm)
            losses = [float(cell) for cell in table[arm][:-4] if cell not in ("", "diverged")]
            finite = [loss for loss in curve.values() if np.isfinite(loss)]
            assert losses == pytest.approx(finite, abs=5.1e-5)
            assert float(table[arm][-4]) == anew.vertex(curve) == recorded[arm]["rate"]
            if arm in too_high:
                best = min(curve, key=curve.get)
                rises = [curve.get(best * factor, np.nan) - curve[best] for factor in (2, 4)]
                cells = too_high[arm][:2] if shape == "W" else too_high[arm][2:]
                words = ["not run" if np.isnan(rise) else f"{rise:+.4f}" for rise in rises]
                assert cells == [word.replace("+inf", "diverged") for word in words]
    for shape, steps, losses, mean in margins:
        expected = anew.losses(f"which_norm/margin-{shape}", "rms", max_iters=int(steps))
        assert sorted(losses.split(", ")) == sorted(f"{loss:.4f}" for loss in expected)
        assert mean == f"{np.mean(expected):.4f}"
    for arm, shape, rate, init_std, mean in checked:
        keys = {"learning_rate": float(rate), "init_std": float(init_std)}
        expected = anew.losses(f"which_norm/check-{shape}", arm, **keys)
        assert len(expected) == 4 and mean == f"{np.mean(expected):.4f}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_card_is_that_of_a_second_implementation(page):
    text = page.read_text()
    rows = anew.rows()
    table = tables(page)[0]
    assert len(table) == 5
    for arm, *cells in table:
        for column, cell in zip(anew.COLUMNS, cells, strict=True):
            _, expected, *_, verdict = rows.get((column, arm), [0, "not run", "not judged"])
            word = re.match("better|worse|", verdict)[0]
            assert cell == expected + (f", **{word}**" if word else "")
    worth = anew.worth()
    gain = worth["the best norm (peri)"]
    tokens = np.exp(gain / anew.slope("W")) - 1
    low, high = sorted(worth[name] / gain for name in ("initialisation", "Muon for AdamW"))
    for shown in (text, (ROOT / "README.md").read_text()):
        assert f"Peri-LN, {100 * tokens:.0f} % of tokens" in shown
        assert f"are worth {low:.0f} to {high:.0f} times more" in shown
    assert f"{anew.margin('W'):.4f} nats in the wide shape, {anew.margin('D'):.4f} in the" in text
    mean = (anew.margin("W") + anew.margin("D")) / 2
    p, stricter = (
        anew.both_shapes(bound)["coupled-full-gradient"] for bound in (mean, anew.margin("W"))
    )
    assert f"than {mean:.4f} in either is borderline (p {p:.3f}; {stricter:.3f} at" in text
    usual = np.mean(anew.losses("which_norm/verdict-D", "rms"))
    beside = anew.losses("which_norm/margin-D", "rms", max_iters=1000)
    beside += anew.losses("which_norm/check-D", "rms", learning_rate=0.0085, init_std=0.125)
    bad = sum(loss > usual + 0.03 for loss in beside)
    assert f"{bad} of {len(beside)} `rms` runs" in text
    if page == PAGES[0]:
        said = "; ".join(f"{name} {nats:.4f}" for name, nats in worth.items())
        assert f"What settings are worth to `rms` in the wide shape, nats: {said}." in text


def test_what_the_stages_concluded_comes_out_again():
    """The numbers that the study's first program left behind, to the last digit but rounding."""
    rows = {(row.condition.archive, row.arm): row for row in which_norm.all_differences()}
    recorded = {
        name: json.loads((KEPT / f"{name}.json").read_text())
        for name in ("verdict", "muon", "tokens", "margin")
    }
    for arm, found in recorded["verdict"]["arms"].items():
        for shape, numbers in found["shapes"].items():
            estimate = rows[f"which_norm/verdict-{shape}", arm].estimate
            assert (estimate.mean, estimate.se) == pytest.approx(
                (numbers["difference"], numbers["se"])
            )
        p = which_norm.in_both_shapes(recorded["verdict"]["margin"])[arm]
        assert p == pytest.approx(found["p_below_margin"], rel=1e-9)
    for stage in ("muon", "tokens"):
        for arm, numbers in recorded[stage]["arms"].items():
            low, high = rows[f"which_norm/{stage}-W", arm].estimate.interval()
            assert (low, high) == pytest.approx((numbers["low"], numbers["high"]))
    assert which_norm.declared_margin() == pytest.approx(recorded["margin"]["margin"])


def test_a_shape_that_is_not_whole_or_diverged_has_no_verdict():
    condition = CONDITIONS[2]
    assert Difference(condition, "layer", np.zeros(3)).text() == "begun"
    diverged = Difference(condition, "layer", np.array([0.0] * 14 + [np.inf, np.nan]))
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
    page.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n")
    put(page, "new")
    assert page.read_text() == f"before\n{MARKERS[0]}\n\nnew\n\n{MARKERS[1]}\nafter\n"
    page.write_text("no markers\n")
    put(page, "new")
    assert page.read_text() == "no markers\n"


STUB = """#!/usr/bin/env bash
printf '%s\\t%s\\t%s\\t%s\\n' "$KEEP" "$SEEDS" "$ARMS" "$*"
"""


@pytest.fixture
def script(tmp_path):
    """Run repro/which_norm.sh with a sweep.sh that only says what it is asked for."""
    for name in ("repro/which_norm.sh", "repro/start.sh", "repro/which_norm.toml"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "config", tmp_path / "config")
    (tmp_path / "sweep.sh").write_text(STUB)
    (tmp_path / "sweep.sh").chmod(0o755)

    def ask(*words: str, **env: str) -> SimpleNamespace:
        command = ["bash", str(tmp_path / "repro/which_norm.sh"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        names = {
            f"{'+'.join(shlex.split(arm)).replace('+--', '+').replace(' ', '_')}-{seed}"
            for _, seeds, arms, _ in lines
            for arm in shlex.split(arms)
            for seed in seeds.split()
        }
        return SimpleNamespace(code=done.returncode, names=names, lines=lines, error=done.stderr)

    return ask


@pytest.mark.parametrize("archive", sorted(KEPT.glob("*.tar.xz")), ids=lambda path: path.name)
def test_the_script_asks_for_the_committed_runs(script, archive):
    stage, shape = archive.name.removesuffix(".tar.xz").split("-")
    asked = script("cpu", stage, shape)
    assert asked.code == 0, asked.error
    assert {line[0] for line in asked.lines} == {str(archive.relative_to(ROOT))}
    with tarfile.open(archive) as file:
        names = {name.split("/")[0] for name in file.getnames()}
    if stage == "rates":  # the grid; what the rule adds, people give
        assert len(asked.names) == 13 * 4 and asked.names <= names
    else:
        assert asked.names == names


def test_another_scale_needs_rates(script):
    assert script("30m", "verdict", "W").code == 2
    asked = script("30m", "rates", "D", "--init_std=0.05", RATES="0.1", ARMS="peri", SEEDS="7")
    assert asked.names == {"peri+learning_rate=0.1-7"}
    assert "--n_layer=24 --init_std=0.05" in asked.lines[0][3]
    assert script("cpu", "rates", "Q").code == script("cpu", "other", "W").code == 2
