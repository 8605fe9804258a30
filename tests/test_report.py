"""report.py: from run folders to pairs, verdicts, tables and pictures; and the published table.

    python -m pytest tests/test_report.py

Most run folders here are written by `write_run`, with losses of known difference; test_sweep.py
reports on real ones.
"""

import csv
import dataclasses
import json
import os
import re
import subprocess
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import study_rederived
from helpers import ROOT

import report
from common import past
from common.code_digest import digest_of_commit
from common.errors import UserError
from common.stats import ALPHA, detectable_effect, power_of_tost
from evidence import archive, published, runs
from evidence.comparison import Comparison, exchange_rate, margin
from evidence.names import short_name
from evidence.runs import METRICS, Run, by_arm, difference_in_settings, find_runs, item_differences
from norm_plan import NormConfig, foreign_keys, keys_of
from train import TrainConfig
from training.checkpoint import model_config

SEEDS = range(8, 16)
DIVERGED = {"event": "end", "reason": "step 100: the loss on rank 0 is not finite"}


def write_run(
    folder: Path,
    norm_type: str,
    seed: int,
    extra: float = 0.0,
    speed: float = 1000.0,
    until: int = 100,
    items: float | None = None,
    start: dict | None = None,
    **keys,
) -> Path:
    """A run folder of 100 steps whose losses are a power law, noise by seed, noise by run, and
    `extra`.
    """
    shown = [f"+{name}={value}" for name, value in keys.items() if not name.startswith("delta_")]
    run = folder / f"{norm_type}{''.join(shown)}-{seed}"
    run.mkdir(parents=True)
    config = TrainConfig(norm_type=norm_type, seed=seed, out_dir=str(run), max_iters=100, **keys)
    first = {
        "event": "start",
        "config": dataclasses.asdict(config),
        "git": "0" * 40,
        "versions": {"torch": "2.13.0"},
        "device": "a GPU",
        "n_params": 1,
        "norm_plan": "",
        "norm_keys": keys_of(norm_type),
        "other_norm_keys": sorted(foreign_keys(norm_type)),
        "tokens_per_step": 100,
        "world_size": 1,
        "data": "x",
        **(start or {}),
    }
    append(run, **first)
    append(run, event="eval", step=0, val_loss=5.0)
    own = np.random.RandomState(zlib.crc32(run.name.encode()))
    noise = 0.02 * np.random.RandomState(seed).randn() + 0.002 * own.randn()
    for step in range(10, until + 1, 10):
        loss = 1 + 4 * step**-0.5 + noise + extra
        measured = speed * (1 + 0.01 * own.randn())
        append(run, event="step", step=step, loss=loss + 0.01, tok_per_s=measured)
        append(run, event="eval", step=step, val_loss=loss)
    if items is not None:
        write_items(run, own.rand(200) < items)
    return run


def write_arms(folder: Path, seeds: Iterable[int], arms: dict[str, dict], **keys) -> None:
    """Write runs of all seeds: norm type -> its own keys. `keys` are of all."""
    for seed in seeds:
        for norm_type, own in arms.items():
            write_run(folder, norm_type, seed, **own, **keys)


def append(run: Path, **event) -> None:
    with open(run / "log.jsonl", "a") as log:
        log.write(json.dumps(event) + "\n")


def change_log(run: Path, old: str, new: str) -> Path:
    """Change the first place of a run's log that has `old`."""
    log = run / "log.jsonl"
    log.write_text(log.read_text().replace(old, new, 1))
    return run


def write_items(run: Path, right: np.ndarray) -> None:
    chosen = [{"acc_choice": int(not r), "acc_norm_choice": int(not r)} for r in right]
    rows = [{"item": item, "label": 0, **choices} for item, choices in enumerate(chosen)]
    (run / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def committed(study: str) -> list[Run]:
    """The runs of results/cpu/STUDY."""
    return find_runs([ROOT / "results/cpu" / study / "runs.tar.xz"])


@pytest.fixture
def sweep(tmp_path) -> Path:
    """rms; layer, 0.1 worse; coupled, the same and 5 % faster; taper, 0.1 better."""
    arms = {
        "rms": {},
        "layer": {"extra": 0.1},
        "coupled": {"speed": 1050.0},
        "taper": {"extra": -0.1},
    }
    write_arms(tmp_path, SEEDS, arms, items=0.3, delta_val_loss=0.01)
    return tmp_path


def reported(folder: Path, delta: float = 0.0) -> report.Report:
    return report.make_report(by_arm(find_runs([folder])), "rms", delta)


def rows_of(folder: Path, delta: float = 0.0) -> dict[tuple[str, str], Comparison]:
    return {(row.metric.name, row.arm): row for row in reported(folder, delta).rows}


def written(folder: Path) -> str:
    """report.md on the runs in a folder."""
    report.main([str(folder), "--baseline=rms", "--pictures=False"])
    return (folder / "report.md").read_text()


def lines_of(table: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    return list(csv.DictReader(table.read_text().splitlines()))


def test_verdicts_and_sentences(sweep):
    rows = rows_of(sweep)
    words = {arm: rows["val_loss", arm].word for arm in ("layer", "coupled", "taper")}
    assert words == {
        "layer": "worse, beyond the margin",
        "coupled": "no difference shown, within the margin",
        "taper": "better, beyond the margin",
    }
    assert rows["tok_per_s", "coupled"].word == "better"
    assert rows["val_loss", "layer"].delta_kind == "declared"
    # the same numbers as val_loss, but no margin
    assert rows["train_loss", "coupled"].word == "no difference shown"
    for row in rows.values():
        assert row.sentence().startswith(f"{row.arm}: {row.word}: ")
    row, level = rows["val_loss", "coupled"], ALPHA / 3
    assert row.power_within == pytest.approx(power_of_tost(0.0, 0.01, row.sd, 8, level))
    assert row.detectable == pytest.approx(detectable_effect(row.sd, 8, level))
    row = rows_of(sweep, delta=0.05)["val_loss", "coupled"]
    assert (row.delta, row.delta_kind) == (0.05, "post hoc") and "post hoc" in row.sentence()


def test_files_are_written_and_agree(sweep, capsys):
    text, appendix = written(sweep).split("## Appendix: not judged")
    printed = capsys.readouterr().out
    rows = rows_of(sweep)
    table = {line.split()[0]: line.split() for line in printed.split("\n\n")[0].splitlines()[2:]}
    for arm in ("layer", "coupled", "taper"):
        row = rows["val_loss", arm]
        assert table[arm][1] == "8" and f"{row.estimate.mean:+.4f}" == table[arm][4]
        assert f"- {row.sentence()}\n" in text and row.sentence() in printed
    # 200 items are too few to tell some accuracies from chance
    assert any(row.not_judged for row in rows.values())
    for row in rows.values():
        cells = f"| {row.metric.name} | `{row.name}` | **{row.word}** |"
        assert (cells in appendix) == bool(row.not_judged) == (cells not in text)
    found = {(row["metric"], row["arm"]): row for row in lines_of(sweep / "report.csv")}
    # all metrics but val_loss_full
    assert len(found) == len(rows) == 3 * (len(METRICS) - 1)
    for name, row in rows.items():
        assert found[name]["verdict"] == row.word
        assert float(found[name]["mean_difference"]) == row.estimate.mean
    seeds = lines_of(sweep / "seeds.csv")
    values = {(row["arm"], int(row["seed"])): float(row["val_loss"]) for row in seeds}
    assert values == {(run.arm, run.seed): run.metrics["val_loss"] for run in find_runs([sweep])}


def test_the_printed_table_fits_80_columns(tmp_path, capsys):
    long = {"taper": {"taper_final": True}}
    for anchor in (0.1, 0.01):
        write_arms(tmp_path, (8, 9), long, taper_anchor=anchor)
    write_arms(tmp_path, (8, 9), {"rms": {}, "layer": {"extra": 0.1}})
    written(tmp_path)
    _, _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len({line.partition("  ")[0] for line in lines}) == 4  # cut names stay apart
    assert max(map(len, lines)) <= 80
    row = rows_of(tmp_path)["val_loss", "layer"]
    [layer] = [line for line in lines if line.startswith("layer")]
    assert f" {row.estimate.mean:+.4f} " in layer and layer.endswith("  worse")
    # what two pairs have shown is said with its condition, and what to do about it
    few = "from 2 pairs this follows only if differences are normal: repeat it with a new set of"
    assert f"; {few} more seeds" in row.sentence()


def test_the_stream_is_drawn_where_runs_measured_it(tmp_path):
    write_run(tmp_path, "rms", 8)
    coupled = write_run(tmp_path, "coupled", 8)
    page = tmp_path / "report.html"
    report.main([str(tmp_path), "--baseline=rms"])
    assert "Residual stream" not in page.read_text()
    for step in (0, 100):
        figures = {"rms": [0.1, 0.2, step], "logit_norm": 7.0, "radial_gradient": -0.5}
        figures |= {"drift": [1, 1, 1], "spread": [0, 0, 0]}
        append(coupled, event="rms", step=step, **figures)
    with open(coupled / "log.jsonl", "a") as log:
        log.write('{"event": "st')  # cut off by a kill
    tokens, figure = Run(coupled).stream("rms")
    assert tokens.tolist() == [0, 10000] and figure.tolist() == [[0.1, 0.2, 0], [0.1, 0.2, 100]]
    report.main([str(tmp_path), "--baseline=rms"])
    assert "<h2>Residual stream after training</h2>" in page.read_text()
    assert "length of the logits" in page.read_text()
    # a norm that shares no statistic has no ratio to one
    assert "SD of its logarithm" not in page.read_text()
    taper = write_run(tmp_path, "taper", 8)
    append(taper, event="rms", step=100, rms=[0.1, 0.2, 3.0], drift=[1, 1, 2], spread=[0, 0, 1])
    report.main([str(tmp_path), "--baseline=rms"])
    assert "SD of its logarithm" in page.read_text()


def test_a_margin_of_a_speed_is_a_share(tmp_path):
    run = Run(write_run(tmp_path, "rms", 8, delta_tok_per_s=0.02))
    assert margin(METRICS["tok_per_s"], run, 0.1) == (pytest.approx(np.log(1.02)), "declared")


def test_too_small_a_set_shows_nothing_and_says_what_is_missing(tmp_path):
    said = {}
    for seed in (8, 9, 10, 11):
        write_run(tmp_path, "rms", seed, delta_val_loss=0.001)
        write_run(tmp_path, "layer", seed, extra=0.003 * (seed - 9), delta_val_loss=0.001)
        if seed > 8:
            row = rows_of(tmp_path)["val_loss", "layer"]
            said[seed] = row.sentence().partition("; ")[2]
            assert row.word == "no difference shown, margin open"
    # two or three pairs do not tell the spread, so not how many pairs it takes
    assert said == {
        9: "the declared margin is 0.0010.",
        10: "the declared margin is 0.0010.",
        11: "to show this difference, or that it is within the margin, takes a new set of "
        f"{row.needed} seeds; the declared margin is 0.0010.",
    }
    assert row.needed > 4


# ---------------------------------------------------------------------------------- arms and names


def test_old_logs_keep_their_arms():
    """Those without norm keys; a new setting of models needs an entry in BEFORE_THE_KEY."""
    assert {run.arm for run in committed("table1")} == {
        "layer",
        "rms",
        "coupled",
        "cbwc",
        "taper --taper_warmup=0.1",
    }
    internal, final, anchor = "taper", "--taper_final=True", "--taper_anchor=0.1"
    assert {run.arm for run in committed("taper")} == {
        "rms",
        internal,
        f"{internal} {final}",
        f"{internal} {anchor}",
        f"{internal} {final} {anchor}",
        f"{internal} --taper_warmup=0.625 --taper_end=0.625",
    }
    old = committed("table1")[0]
    for field in dataclasses.fields(TrainConfig):
        if field.name not in {*old.config, *runs.NAMES, *NormConfig.__dataclass_fields__}:
            assert past.BEFORE_THE_KEY[field.name] == field.default
    newer = Run(old.path, old.files)
    for key, value, message in (
        ("residual", "float32", ""),
        ("parallel", "fsdp", ""),
        ("residual", "autocast", "residual=autocast against float32"),
    ):
        newer.config = {**newer.config, key: value}
        assert difference_in_settings(newer, old) == message


def test_a_log_tells_its_norm_keys(tmp_path):
    """Keys that this program does not know name the arm, and are no difference in settings."""
    start = {"norm_keys": {"norm_eps": 1e-5, "rms_new": 3}, "other_norm_keys": ["coupled_new"]}
    run = write_run(tmp_path, "rms", 8, start=start)
    more = '"norm_eps": 1e-05, "rms_new": 4, "coupled_new": 5, '
    new = Run(change_log(run, '"norm_eps": 1e-05, ', more))
    other = Run(write_run(tmp_path, "layer", 8))
    assert new.arm == "rms --rms_new=4" and difference_in_settings(new, other) == ""


def test_a_default_that_changed_makes_no_arm_of_two_norms(tmp_path):
    write_run(tmp_path, "rms", 8)
    run = write_run(tmp_path, "rms", 9, start={"norm_keys": {"rms_fraction": 0.5}})
    change_log(run, '"rms_fraction": 1.0', '"rms_fraction": 0.5')
    with pytest.raises(UserError, match=r"both are named rms, but rms_fraction is 1\.0 and 0\.5"):
        by_arm(find_runs([tmp_path]))


@pytest.mark.parametrize(
    ("norm_type", "arm", "today"),
    [("rms", "rms", 0.5), ("taper", "taper --taper_warmup=0.1", 0.1)],
)
def test_an_old_default_of_another_norm_type_makes_no_arm(tmp_path, norm_type, arm, today):
    keys = past.OLD_NORM_KEYS[""] | past.OLD_NORM_KEYS.get(norm_type, {})
    folder = write_run(tmp_path, norm_type, 8, start={"norm_keys": keys})
    run = Run(change_log(folder, '"taper_warmup": 0.5', '"taper_warmup": 0.1'))
    assert run.config["taper_warmup"] == 0.1 and run.arm == arm
    # a checkpoint with such a config still loads
    config = model_config(run.config | {"vocab_size": 64}, folder)
    assert config.norm_type == norm_type and config.taper_warmup == today


@pytest.mark.parametrize(
    ("arm", "short"),
    [
        ("rms", "rms"),
        ("taper --taper_final=True --norm_eps=1e-06", "taper final norm_eps=1e-06"),
        ("coupled --norm_plan='Rs R' --coupled_alpha=1.1", "coupled norm_plan=Rs R alpha=1.1"),
    ],
)
def test_short_names_of_arms(arm, short):
    assert short_name(arm) == short


def test_an_arm_has_the_name_that_it_was_given(tmp_path):
    write_arms(tmp_path, (1, 2, 3), {"rms": {}, "coupled": {"coupled_span": 2, "arm": "wide"}})
    assert "| `wide` | `coupled --coupled_span=2` |" in written(tmp_path)
    assert {row["arm"] for row in lines_of(tmp_path / "report.csv")} == {"wide"}
    write_run(tmp_path, "layer", 4, arm="wide")
    with pytest.raises(UserError, match="both are named wide"):
        reported(tmp_path)


@pytest.mark.parametrize("names", [("a c", "a  c"), ("it's", " "), ("taper final", None)], ids=str)
def test_arms_of_any_name_are_told_apart(tmp_path, capsys, names):
    """By columns, rows and lines of their own, whatever their names are alike in."""
    for seed, extra in ((1, 0.1), (2, 0.2)):
        write_run(tmp_path, "rms", seed)
        write_run(tmp_path, "layer", seed, extra, arm=names[0])
        keys = {"arm": names[1]} if names[1] else {"taper_final": True}
        write_run(tmp_path, "taper", seed, -extra, **keys)
    text, printed = written(tmp_path), capsys.readouterr().out
    header = re.findall(r"^\| seed \|.*", text, re.M)[0]
    assert len({*header.split("|")[2:-1]}) == 3
    rows = {line.partition("  ")[0] for line in printed.splitlines() if " not shown" in line}
    assert len({*rows}) == 2
    # the name that was given still names the baseline, and the page is written
    report.main([str(tmp_path), f"--baseline={names[0]}"])
    assert f"against {short_name(names[0])}" in capsys.readouterr().out


# ---------------------------------------------------------------------------------- what is paired


def test_arms_of_a_declared_study_may_have_rates_of_their_own(tmp_path):
    arms = {
        "rms": {"learning_rate": 6e-4, "warmup_iters": 5},
        "layer": {"learning_rate": 1e-3, "warmup_iters": 0},
    }
    write_arms(tmp_path, (8, 9), arms, study="rates")
    assert rows_of(tmp_path)["val_loss", "layer"].seeds == [8, 9]
    assert "layer --learning_rate=0.001 --warmup_iters=0" in written(tmp_path)


def test_an_arm_is_not_a_mean_over_learning_rates(tmp_path):
    """Neither the arm nor the baseline, in a declared study too."""
    for seed, rate in ((3, 1e-3), (4, 1e-3), (5, 1e-2), (6, 1e-2), (7, 1e-2)):
        write_run(tmp_path, "rms", seed, study="x")
        write_run(tmp_path, "layer", seed, extra=rate, study="x", learning_rate=rate)
    rows = rows_of(tmp_path)
    seeds = {arm: row.seeds for (name, arm), row in rows.items() if name == "val_loss"}
    assert seeds == {
        "layer --learning_rate=0.001": [3, 4],
        "layer --learning_rate=0.01": [5, 6, 7],
    }
    found = report.make_report(by_arm(find_runs([tmp_path])), "layer", 0.0)
    assert found.rows == [] and "`layer` has several learning rates" in found.alone


def test_runs_at_several_rates_give_a_table_of_rates(tmp_path, capsys):
    """By any name of the baseline; one that has several rates has no verdicts."""
    rates = (1e-3, 2e-3, 4e-3)
    for norm_type, extra in (("rms", 0.0), ("layer", 0.1)):
        for rate in rates:
            keys = {"learning_rate": rate, "extra": extra + 10 * rate}
            run = write_run(tmp_path, norm_type, 8, **keys)
            if rate < 4e-3:
                write_run(tmp_path, norm_type, 9, **keys)
        append(run, **DIVERGED)
    runs = find_runs([tmp_path])
    cells = []
    for rate in rates[:2]:
        mine = [r for r in runs if r.words == "layer" and r.config["learning_rate"] == rate]
        cells.append(f"{np.mean([run.metrics['val_loss'] for run in mine]):.4f}")
    text = written(tmp_path)
    assert f"| `layer` | {cells[0]} | {cells[1]} | 1 of 1 diverged |" in text
    assert "| arm | 0.001 | 0.002 | 0.004 |" in text and "## Tests" not in text
    printed = capsys.readouterr().out
    assert re.search(rf"^layer +{cells[0]} +{cells[1]} +1 of 1 diverged$", printed, re.M)
    report.main([str(tmp_path), "--baseline=rms --learning_rate=0.002", "--pictures=False"])
    assert "layer learning_rate=0.002: worse" in capsys.readouterr().out


def test_each_seed_may_have_a_device_of_its_own(tmp_path):
    """A pair may not."""
    for seed, device in ((8, "a GPU"), (9, "a GPU"), (10, "another"), (11, "another")):
        write_run(tmp_path, "rms", seed, start={"device": device})
        write_run(tmp_path, "layer", seed, start={"device": device})
    write_run(tmp_path, "taper", 8, start={"device": "another"})
    found = reported(tmp_path)
    assert found.rows[0].seeds == [8, 9, 10, 11]
    assert "taper, seed 8: not paired: device=another against a GPU" in found.left_out


def test_what_other_code_trained_is_not_compared(tmp_path):
    """In a pair, and in one arm."""
    for norm_type, code in (("rms", "a" * 64), ("layer", "b" * 64)):
        write_run(tmp_path, norm_type, 8, start={"code": code})
        for seed in (9, 10):
            write_run(tmp_path, norm_type, seed, start={"code": "a" * 64})
    assert reported(tmp_path).rows[0].seeds == [9, 10]
    write_run(tmp_path, "rms", 11, start={"code": "c" * 64})
    with pytest.raises(UserError, match=r"rms, seeds 11 and 8: code c{12} against a{12}"):
        reported(tmp_path)


def test_a_log_without_a_digest_has_that_of_its_commit(tmp_path):
    """If git knows the commit; else nothing tells that it is the code of a log with a digest.

    Two logs without one do not tell.
    """
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    digest = digest_of_commit(commit)
    unknown = {"git": "f" * 40}
    of_seed = {
        7: ({"git": commit}, unknown),
        8: ({"git": commit}, {"code": digest}),
        9: ({"git": commit}, {"code": "b" * 64}),
        10: ({"git": f"{commit}+12345678"}, {"code": digest}),
        11: (unknown, {"code": digest}),
    }
    for seed, (one, other) in of_seed.items():
        write_run(tmp_path, "rms", seed, start=one)
        write_run(tmp_path, "layer", seed, start=other)
    found = reported(tmp_path)
    assert found.rows[0].seeds == [7, 8]
    assert f"layer, seed 9: not paired: code {'b' * 12} against {digest[:12]}" in found.left_out
    assert any(f"{'f' * 40}, without a digest" in line for line in found.left_out)
    report.main([str(tmp_path), "--baseline=rms", f"--same_code={'b' * 12},{digest[:12]}"])
    assert {line["n_seeds"] for line in lines_of(tmp_path / "report.csv")} == {"3"}


def test_code_that_a_recorded_run_shows_to_be_the_same_is_compared(tmp_path):
    """Whoever reports says so, or a log does, at its start or where its run was resumed."""
    out = tmp_path.parent / "reported"
    a, b, c, d = ("abcd"[place] * 64 for place in range(4))
    for seed in (8, 9, 10, 11):
        write_run(tmp_path, "rms", seed, start={"code": a})
    for seed in (8, 9):
        write_run(tmp_path, "layer", seed, start={"code": b})
    write_run(tmp_path, "layer", 10, start={"code": b}, same_code=(a[:12],))
    resumed = write_run(tmp_path, "layer", 11, start={"code": a})
    changed = ["git one -> two", f"code {a} -> {c}"]
    append(resumed, event="resume", step=50, changed=changed, same_code=[a])
    assert reported(tmp_path).rows[0].seeds == [10, 11]
    said = f"(--same_code): {a[:12]} = {b[:12]}; {a[:12]} = {c[:12]}."
    assert said in written(tmp_path)
    append(resumed, event="resume", step=60, changed=[f"code {c} -> {d}"])
    assert any("11: resumed with other" in line for line in reported(tmp_path).left_out)
    report.main([str(tmp_path), "--baseline=rms", f"--same_code={b[:12]},{a}", f"--out={out}"])
    for name in ("report.md", "report.html"):
        assert f"(--same_code): {a[:12]} = {b[:12]}." in (out / name).read_text()
    assert {line["n_seeds"] for line in lines_of(out / "report.csv")} == {"3"}
    with pytest.raises(UserError, match="same_code=abc: needs the digest"):
        report.main([str(tmp_path), "--baseline=rms", "--same_code=abc"])


def test_runs_that_differ_in_anything_else_are_not_paired(tmp_path, capsys):
    for seed in (8, 9, 10, 12):
        write_run(tmp_path, "rms", seed)
    write_run(tmp_path, "layer", 8)
    write_run(tmp_path, "layer", 9, learning_rate=1e-3)
    write_run(tmp_path, "layer", 10, start={"data": "y"})
    write_run(tmp_path, "layer", 11)
    write_run(tmp_path, "layer", 12, until=60)
    written(tmp_path)
    printed = capsys.readouterr().out
    for line in (
        "layer --learning_rate=0.001, seed 9: not paired: learning_rate=0.001 against 0.0006",
        "layer --learning_rate=0.0006, seed 10: not paired: data: y against x",
        "layer --learning_rate=0.0006, seed 11: not paired: rms has no such seed",
        "layer --learning_rate=0.0006, seed 12: not finished: last evaluation at step 60 of 100",
        # one pair alone: means and curves are of that
        "Nothing is compared, for no arm has two pairs.",
    ):
        assert line in printed
    seeds = [(line["arm"], line["seed"]) for line in lines_of(tmp_path / "seeds.csv")]
    assert seeds == [("rms", "8"), ("layer --learning_rate=0.0006", "8")]
    assert (tmp_path / "report.csv").read_text() == "metric,arm\n"


def test_curves_alone_are_of_one_text(tmp_path):
    write_run(tmp_path, "rms", 8)
    report.main([str(tmp_path)])
    assert (tmp_path / "loss.png").stat().st_size > 1000
    write_run(tmp_path, "layer", 8, start={"data": "y"})
    with pytest.raises(UserError, match="data: "):
        report.main([str(tmp_path)])


def test_a_run_that_resumed_with_other_settings_is_left_out(sweep):
    changes = ["learning_rate 0.01 -> 0.03", "git abc -> def", "world_size 1 -> 2", "torch 1 -> 2"]
    for seed, change in zip(SEEDS, changes):
        append(sweep / f"taper-{seed}", event="resume", step=50, changed=[change])
    harmless = ["out_dir a -> b", "python 3.11 -> 3.12"]
    append(sweep / "taper-12", event="resume", step=50, changed=harmless)
    found = reported(sweep)
    for change in changes:
        assert sum(change in line for line in found.left_out) == 1
    assert [*found.compared["taper"]] == [12, 13, 14, 15]


def test_runs_of_two_experiments_are_refused(tmp_path):
    """Each seed's arms agree, but the seeds do not: no mean over them means anything."""
    for seed in (8, 9):
        write_arms(tmp_path, [seed], {"rms": {}, "layer": {}}, delta_val_loss=seed / 1000)
    with pytest.raises(UserError, match="seeds 9 and 8: delta_val_loss"):
        reported(tmp_path)


def test_what_auto_meant_is_not_another_setting(tmp_path):
    """An older run logged `auto`, on a CPU float32 and eager; a newer one what it has chosen."""
    cpu = {"start": {"device": "cpu (x)"}}
    older = Run(change_log(write_run(tmp_path, "rms", 1, **cpu), '"merge_micro_batches": 0, ', ""))
    chosen = {"compile": False, "merge_micro_batches": 1}
    same, other = (
        Run(write_run(tmp_path, "layer", seed, dtype=dtype, **cpu, **chosen))
        for seed, dtype in ((1, "float32"), (2, "bfloat16"))
    )
    assert older.start["config"]["dtype"] == "auto"
    assert difference_in_settings(same, older) == ""
    assert difference_in_settings(other, same, ("seed",)).startswith("dtype=bfloat16")


@pytest.mark.parametrize(
    ("planned", "seeds", "judged", "said"),
    [
        (16, SEEDS, [*SEEDS], "8 of 16 planned seeds"),
        (16, SEEDS[:1], None, "layer: no verdict: 1 of 16 planned seeds."),
        (6, SEEDS, [8, 9, 10, 11, 12, 13], "6 seeds were planned, so seed 14, 15 is not judged"),
    ],
)
def test_only_the_planned_seeds_are_judged(tmp_path, capsys, planned, seeds, judged, said):
    """However clear the difference is; the first of them, so that nobody stops where it pleases."""
    write_arms(tmp_path, seeds, {"rms": {}, "layer": {"extra": 0.5}}, planned_seeds=planned)
    written(tmp_path)
    assert said in capsys.readouterr().out
    row = rows_of(tmp_path).get(("val_loss", "layer"))
    if judged is not None:
        assert row.seeds == judged and row.verdict.p_holm < 1e-3
        assert row.word == ("worse" if planned == 6 else "no verdict")


# --------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize(
    "event",
    [
        DIVERGED,
        {"event": "eval", "step": 100, "val_loss": None},
        {"event": "val_full", "step": 100, "val_loss_full": None},
    ],
    ids=lambda event: event["event"],
)
def test_diverged_seeds_take_the_verdict_with_them(sweep, event):
    """The four good seeds of an arm whose other four diverged are no fair sample of it."""
    append(sweep / "taper-8", event="end", reason="stopped by SIGTERM after step 50")
    for seed in (8, 10, 12, 14):
        append(sweep / f"taper-{seed}", **event)
    row = rows_of(sweep)["val_loss", "taper"]
    assert row.word == "no verdict" and row.verdict.p_holm < ALPHA
    assert (row.verdict.direction, row.verdict.margin) == ("", "")
    assert "4 of 8 runs diverged" in row.sentence()
    append(sweep / "rms-8", **event)
    row = rows_of(sweep)["val_loss", "layer"]
    assert row.word == "no verdict" and "of rms, 1 of 8 runs diverged" in row.sentence()


def test_divergence_under_other_settings_is_another_experiment(sweep, capsys):
    """It takes no verdict and is in no table of these."""
    append(write_run(sweep, "taper", 99, learning_rate=1.0), **DIVERGED)
    assert "## Stability" not in written(sweep)
    text = capsys.readouterr().out
    assert "taper learning_rate=0.0006: better" in text and "runs diverged" not in text
    assert "learning_rate=1.0, seed 99: step 100: the loss on rank 0 is not finite" in text


def test_divergence_is_a_result(sweep):
    """Also where all runs of an arm diverged; runs without the events have no other outcomes."""
    of_all = {"event": "stability", "spikes": 3}
    for seed in SEEDS:
        append(sweep / f"taper-{seed}", **DIVERGED)
        for norm_type, logit in (("rms", 7.0), ("layer", 30.0 + seed)):
            run, clipped = sweep / f"{norm_type}-{seed}", 0.25 + 0.5 * (seed % 2)
            append(run, event="stability", attention_logit=99.0, clipped=1.0, spikes=9)
            append(run, attention_logit=logit, clipped=clipped, **of_all)  # the last counts
    append(sweep / "rms-8", attention_logit=None, clipped=0, **of_all)
    text = written(sweep)
    for line in (
        "- taper: no verdict: 8 of 8 runs diverged",
        "| `layer` | 8 | 0 | 50 % | 3.0 | 45.0 |",
        "| `rms` | 8 | 0 | 47 % | 3.0 | 7.0 |",
        "| `taper` | 8 | 8 | n/a | n/a | n/a |",
    ):
        assert line in text


# ------------------------------------------------------------------------- time, items, documents


def test_the_exchange_rate_is_the_slope_of_the_later_half(tmp_path):
    """On L = 1 + 4 s^-1/2 the later half falls by about 2 s^-1/2 nats per e-fold of tokens."""
    base = Run(write_run(tmp_path, "rms", 8))
    assert 2 * 100**-0.5 < exchange_rate(base) < 2 * 60**-0.5
    for steps, has_rate in (([0, 25, 50, 75, 100], True), ([0, 50, 100], False)):
        base.curve = np.array([(100 * step, 1 + 4 * max(step, 1) ** -0.5) for step in steps])
        assert (exchange_rate(base) is not None) == has_rate


def test_tokens_are_worth_the_exchange_rate(tmp_path):
    """An arm that is the baseline with more tokens is worth just these, to first order."""
    for seed in SEEDS:
        rate = exchange_rate(Run(write_run(tmp_path, "rms", seed)))
        write_run(tmp_path, "layer", seed, extra=-rate * np.log(1.05))
    rows = rows_of(tmp_path)
    row = rows["val_loss", "layer"]
    assert row.tokens(row.estimate.mean) == pytest.approx(0.05, abs=0.01)
    assert row.tokens(-row.rate * np.log(1.05)) == pytest.approx(0.05)
    assert row.tokens(row.rate * np.log(1.05)) == pytest.approx(1 / 1.05 - 1)
    assert f"(worth {row.show_tokens()} of tokens)" in row.sentence()
    assert rows["tok_per_s", "layer"].rate is None


def test_a_slope_that_was_measured_decides_what_tokens_are_worth(tmp_path):
    """The card's 6.0 %, by runs of half and double the length, which no curve tells."""
    runs = str(ROOT / "results/cpu/which_norm/verdict-W.tar.xz")
    words = [runs, "--baseline=rms", f"--out={tmp_path}", "--pictures=False"]
    report.main([*words, f"--token_slope={study_rederived.slope('W'):.3f}"])
    text = (tmp_path / "report.md").read_text()
    assert "peri: better: -0.0215 nats per token (worth +6.0 % of tokens)" in text
    assert "as given (--token_slope=0.368)" in text and "estimate" not in text.split("## ")[1]


def test_hellaswag_is_paired_item_by_item(tmp_path):
    """Two models that agree on most items differ with less error than their own accuracies have.

    A run without items, or with others, costs its own pair alone.
    """
    for seed in SEEDS:
        for name in ("rms", "layer"):
            right = np.random.RandomState(seed).rand(1000) < 0.3
            right[:20] |= name == "layer"
            write_items(write_run(tmp_path, name, seed), right)
    a, b = Run(tmp_path / "layer-8"), Run(tmp_path / "rms-8")
    assert item_differences(a, b, "acc").sum() == 20 - b.items["acc"][:20].sum()
    row = rows_of(tmp_path)["hellaswag_acc", "layer"]
    assert row.verdict.direction == "better" and row.estimate.se < 0.5 * (0.3 * 0.7 / 1000) ** 0.5
    (tmp_path / "layer-8" / "hellaswag.jsonl").unlink()
    for run in ("layer-9", "layer-10", "rms-10"):
        write_items(tmp_path / run, np.ones(5, bool))
    found = reported(tmp_path)
    assert found.rows[0].seeds == [*SEEDS]
    assert "hellaswag_acc of layer leaves out seed 8, 9, 10: not measured alike" in found.left_out


@pytest.mark.parametrize("keys", [{"start": {"device": "cpu"}}, {"jobs": 2}, {}], ids=str)
def test_models_at_chance_and_some_speeds_get_no_verdict(tmp_path, keys):
    """On a CPU, side by side, or where one run was resumed so."""
    for seed in SEEDS:
        for norm_type, speed in (("rms", 1000), ("layer", 1500)):
            run = write_run(tmp_path, norm_type, seed, speed=speed, **keys)
            write_items(run, np.arange(1000) < 230 + speed / 100)
    if not keys:
        append(run, event="resume", step=50, changed=["jobs 1 -> 2"])
    rows = rows_of(tmp_path)
    by_chance = rows["hellaswag_acc", "layer"]
    assert by_chance.word == "not judged" and "chance" in by_chance.sentence()
    assert rows["tok_per_s", "layer"].word == "not judged"
    assert rows["val_loss", "layer"].seeds == list(SEEDS)


def whole_split(run: Path, nats: list[float], tokens: list[int]) -> None:
    """Log the loss over the whole val split, with this mean loss of each document."""
    sums = [loss * count for loss, count in zip(nats, tokens, strict=True)]
    documents = {"document_tokens": tokens, "document_nats": sums}
    append(run, event="val_full", step=100, val_loss_full=sum(sums) / sum(tokens), **documents)


def test_the_whole_split_is_judged_conditional_on_its_text(tmp_path):
    """Weighted by tokens; the range is that of the mean difference without each document.

    layer is 0.1 worse on the first of three documents, 0.01 worse on the others.
    """
    for seed in SEEDS:
        for norm_type, worse in (("rms", 0.0), ("layer", 0.1)):
            run = write_run(tmp_path, norm_type, seed, delta_val_loss=0.02)
            own = 1 + 0.001 * np.random.RandomState(seed).randn()
            whole_split(run, [own + worse, own + worse / 10, own + worse / 10], [100, 200, 700])
    row = rows_of(tmp_path)["val_loss_full", "layer"]
    assert row.estimate.mean == pytest.approx(0.1 * 0.1 + 0.9 * 0.01)
    assert (row.delta, row.word) == (0.02, "worse, within the margin")
    without_last = (100 * 0.1 + 200 * 0.01) / 300
    assert (row.text.low, row.text.high) == pytest.approx((0.01, without_last))
    assert "conditional on this text: +0.0100 … +0.0400 when one of its 3" in row.sentence()
    text = written(tmp_path)
    assert "| without one document |" in text and "| +0.0100 … +0.0400 |" in text
    assert text.index("- layer: worse, within") < text.index("\nval_loss:")
    lines = {row["metric"]: row for row in lines_of(tmp_path / "report.csv")}
    assert float(lines["val_loss_full"]["high_document"]) == row.text.high
    # other documents have no range; a margin of val_loss that is given now is its margin, too
    whole_split(tmp_path / "layer-8", [1.0, 1.0], [300, 700])
    row = rows_of(tmp_path, delta=0.5)["val_loss_full", "layer"]
    assert row.text is None and (row.delta, row.delta_kind) == (0.5, "post hoc")


# ------------------------------------------------------------------------------ the published table


def test_published_table_supports_no_gain(tmp_path, capsys, monkeypatch):
    """Throughput t = 1.43, p = 0.17, -0.27 % ... +1.35 %; equal losses are not shown within 0.001
    (TOST p = 0.074). Other numbers give other verdicts.
    """
    report.main(["--published"])
    speed, loss, accuracy, *_ = capsys.readouterr().out.split("\n\n")[1:]
    assert "95 % interval -0.27% … +1.35%\n  t = 1.43, p = 0.17," in speed
    assert "TOST within 0.001: p = 0.074\n" in loss
    for text in (speed, loss, accuracy):
        assert text.splitlines()[-1].startswith("  no difference shown")
    text = published.TABLE.read_text().replace("443.0,3.3,445.4", "443.0,3.3,455.4")
    changed = tmp_path / "table.csv"
    changed.write_text(text.replace("3.096,0.0012,3.096,0.0014", "3.096,0.0002,3.096,0.0002"))
    monkeypatch.setattr(published, "TABLE", changed)
    report.main(["--published"])
    speed, loss, *_ = capsys.readouterr().out.split("\n\n")[1:]
    assert speed.endswith("\n  better")
    assert loss.endswith("\n  no difference shown, within the margin")


# ----------------------------------------------------------------------------------------- archives


# Of committed tables: what decided nothing, and is left out since
GONE_COLUMNS = ("p_sign_flip", "low_bca", "high_bca")


@pytest.mark.parametrize("study", ("table1", "table1_again", "taper"))
def test_committed_archives_give_the_committed_tables(study, tmp_path):
    """Text for text, but for what tables of today leave out; rounding differs by machine."""
    folder = ROOT / "results/cpu" / study
    report.main(
        [f"{folder}/runs.tar.xz", "--baseline=rms", f"--out={tmp_path}", "--pictures=False"]
    )
    for name in ("seeds.csv", "report.csv"):
        before, after = (lines_of(table / name) for table in (folder, tmp_path))
        before = [line for line in before if line.get("metric") != "val_loss_equal_time"]
        for old, new in zip(before, after, strict=True):
            kept = [column for column in old if column not in GONE_COLUMNS]
            assert [*new] == kept
            for column in kept:
                was, now = old[column], new[column]
                assert now == was or float(now) == pytest.approx(float(was), rel=1e-6, abs=1e-9)


def test_an_archive_is_its_folders(tmp_path, capsys):
    """Added one by one, a run twice: the same content, and the same bytes in any order."""
    folders = [write_run(tmp_path, name, 8, items=0.3) for name in ("layer", "rms", "taper")]
    first, second = (tmp_path / name / "runs.tar.xz" for name in "ab")
    archive.main([str(first), *map(str, folders)])
    archive.add(second, *folders[:0:-1], folders[0])
    archive.add(second, folders[1])
    assert first.read_bytes() == second.read_bytes()
    archive.main([str(first)])
    assert capsys.readouterr().out == "layer-8\nrms-8\ntaper-8\n"
    for run, folder in zip(find_runs([first.parent]), folders, strict=True):
        assert run.name == f"{first}/{folder.name}" and run.metrics == Run(folder).metrics
    with pytest.raises(UserError, match=r"rms-8 and .*rms-8: both are rms, seed 8"):
        by_arm(find_runs([first, folders[1]]))
    for words in ([first, tmp_path], [tmp_path / "runs.zip"]):
        with pytest.raises(UserError, match=r"log\.jsonl|archive"):
            archive.main(list(map(str, words)))
    assert first.read_bytes() == second.read_bytes()


# ------------------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "text", "half"])
def test_what_is_no_archive_of_runs_is_refused(tmp_path, content):
    path = tmp_path / "runs.tar.xz"
    archive.write(path, {"rms-8/log.jsonl": b'{"event": "start", "config": {}}\n'})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match=r"runs\.tar\.xz"):
        find_runs([path])


def test_what_never_ends_is_no_file_of_a_run(tmp_path, monkeypatch):
    """1.5 MB may unpack to 10 GiB; to open a pipe waits for its writer."""
    run = write_run(tmp_path, "rms", 8)
    archive.add(tmp_path / "runs.tar.xz", run)
    monkeypatch.setattr(archive, "MOST", 10_000)  # tar's blocks are 10,240 bytes
    with pytest.raises(UserError, match=r"runs\.tar\.xz: .*more than 10,000 bytes"):
        find_runs([tmp_path / "runs.tar.xz"])
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    with pytest.raises(UserError, match=r"log\.jsonl: .*a pipe"):
        find_runs([tmp_path])


HOSTILE = '</script>"><img src=x onerror=alert(1)><b>'


class Elements(HTMLParser):
    """The names of a page's elements, without those that scripts write."""

    def __init__(self, text: str):
        super().__init__()
        self.names: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names[tag] = self.names.get(tag, 0) + 1
        assert not any(name.startswith("on") for name, _ in attributes)


def test_what_a_log_says_is_text_in_the_page(tmp_path):
    """The page of a log whose every text is hostile has the elements of any other page."""
    pages = []
    for text in ("plain", HOSTILE):
        folder = tmp_path / f"of-{len(pages)}"
        start = {
            "device": text,
            "git": text,
            "versions": {"torch": text},
            "norm_keys": {text: 1, "norm_plan": ""},
            "data": text,
        }
        keys = {"study": text, "norm_plan": text, "items": 0.9, "start": start}
        for seed in (8, 9):
            for norm_type in ("rms", "layer"):
                write_run(folder / "runs", norm_type, seed, arm=f"{norm_type} {text}", **keys)
        bad = write_run(folder / "bad", "taper", 8, arm=text, **keys)
        append(bad, event="resume", step=50, changed=[f"git {text} -> b"])
        report.main([str(folder), f"--baseline=rms {text}", f"--out={folder}"])
        pages.append(Elements((folder / "report.html").read_text()).names)
    assert pages[0] == pages[1]


def test_what_a_log_says_is_text_in_report_md_and_in_the_terminal(tmp_path, capsys):
    """Beyond code and escapes nothing of it is left that Markdown or a terminal would obey."""
    text = "a`b|c <img src=x> ![x](//y) \x1b[31m$\\frac$"
    start = {"device": text, "git": text, "versions": {"torch": text}}
    for seed in (8, 9):
        for norm_type in ("rms", "layer"):
            write_run(tmp_path, norm_type, seed, arm=f"{norm_type} {text}", start=start, study=text)
    bad = write_run(tmp_path, "taper", 8, arm=text, start=start, study=text)
    append(bad, event="resume", step=50, changed=[f"git {text} -> b"])
    write_run(tmp_path, "peri", 8, arm=f"few {text}", start=start, study=text)
    report.main([str(tmp_path), f"--baseline=rms {text}"])
    page, printed = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    assert "\x1b" not in page + printed
    assert page.count("img src=x") > 20
    rest = re.sub(r"(`+).+?\1(?!`)", "", page)
    assert not {*"<[`"} & {*re.sub(r"\\.", "", rest)}
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_name_is_no_formula_in_a_picture(tmp_path):
    run = write_run(tmp_path, "rms", 8).rename(tmp_path / "$\\frac$")
    report.main([str(run)])
    assert (run / "loss.png").exists()


DAMAGED = {
    "seed": ('"seed": 8', '"seed": "\\"><img src=x>3"'),
    "without git": ('"git": ', '"commit": '),
    "without seed": ('"seed": 8', '"seeds": 8'),
    "max_iters": ('"max_iters": 100', '"max_iters": null'),
    "norm_type": ('"norm_type": "rms"', '"norm_type": ["rms"]'),
    "device": ('"device": "a GPU"', '"device": 1'),
    "versions": ('"versions": {"torch": "2.13.0"}', '"versions": {}'),
    "other_norm_keys": ('"other_norm_keys": [', '"other_norm_keys": [[1], '),
    "val_loss": ('"val_loss": 5.0', '"val_loss": "low"'),
    "step": ('"event": "eval", "step": 0', '"event": "eval", "step": -1'),
    "loss": ('"event": "step", "step": 10, "loss"', '"event": "step", "step": 10, "lost"'),
    "val_loss ": ('"val_loss": 5.0', '"val_loss": 1e999'),
    "event": ('{"event": "eval", "step": 0, "val_loss": 5.0}', "[]"),
    "is damaged": ('{"event": "eval", "step": 0, "val_loss": 5.0}', "[" * 100_000),
    "changed": ('"changed": ["numpy 1 -> 2"]', '"changed": [""]'),
    "rms": ('"rms": [1.0, 2.0]', '"rms": []'),
    "document_nats": ('"document_nats": [1.0, 2.0]', '"document_nats": [1.0]'),
    "hellaswag": ('"label": 0', '"label": [0]'),
}


@pytest.mark.parametrize(("old", "new"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_log_is_named_with_its_field(tmp_path, request, old, new):
    """One line for whatever a field has that it should not have."""
    run = write_run(tmp_path, "rms", 8, items=0.5)
    append(run, event="resume", step=50, changed=["numpy 1 -> 2"])
    append(run, event="rms", step=100, rms=[1.0, 2.0])
    whole_split(run, [1.0, 1.0], [1, 2])
    assert Run(run).metrics and len(Run(run).items["item"]) == 200
    name = "hellaswag.jsonl" if "label" in old else "log.jsonl"
    assert old in (run / name).read_text()
    (run / name).write_text((run / name).read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=f"rms-8: .*{request.node.callspec.id.strip()}"):
        report.main([str(run), "--baseline=rms"])


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ("", 2, "run folder"),
        ("RUN --base=rms", 2, "baseline"),
        ("RUN --baseline=layer", 2, "layer"),
        ("RUN RUN --baseline=rms --out=OUT", 1, "rms-8"),
        ("RUN OUT --baseline=rms", 2, "--out"),
        ("nowhere", 1, "nowhere"),
        ("EMPTY", 1, "empty"),
        ("RUN --plot=OUT", 1, "out"),
        ("RUN --baseline=rms --plot=F.png", 2, "plot=F.png"),
        ("STUDENT", 1, "distill.py"),
        ("DAMAGED", 1, "rms-1.*line 3"),
    ],
)
def test_what_cannot_be_reported_on_is_named(tmp_path, words, code, named):
    run, student, damaged = (write_run(tmp_path, "rms", seed) for seed in (8, 9, 1))
    (tmp_path / "empty").mkdir()
    places = {
        "RUN": run,
        "STUDENT": change_log(student, '"norm_type"', '"teacher": "out/rms", "norm_type"'),
        "DAMAGED": change_log(damaged, '{"event": "step"', "{event"),
        "EMPTY": tmp_path / "empty",
        "OUT": tmp_path / "out",
    }
    for name, place in places.items():
        words = words.replace(name, str(place))
    with pytest.raises(UserError, match=named) as error:
        report.main(words.split())
    assert error.value.exit_code == code and not (tmp_path / "out").exists()
