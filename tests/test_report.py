"""report.py: from run folders to pairs, verdicts, tables and pictures; and the published table.

    python -m pytest tests/test_report.py

Most run folders here are written by `write_run`, with losses of known difference; test_sweep.py
reports on real ones.
"""

import csv
import dataclasses
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

import report
from common.errors import UserError
from common.stats import ALPHA, detectable_effect, power_of_tost
from evidence import archive, published, runs
from evidence.comparison import Comparison, at_equal_time, exchange_rate, margin, pair_by_seed
from evidence.names import short_name
from evidence.runs import (
    METRICS,
    by_arm,
    difference_in_settings,
    find_runs,
    item_differences,
    labels_of,
)
from norm_plan import NormConfig, foreign_keys, keys_of
from train import TrainConfig
from training.checkpoint import model_config

SEEDS = range(8, 16)


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
    shown = "".join(
        f"+{name}={value}" for name, value in keys.items() if not name.startswith("delta_")
    )
    run = folder / f"{norm_type}{shown}-{seed}"
    run.mkdir(parents=True)
    config = dataclasses.asdict(
        TrainConfig(norm_type=norm_type, seed=seed, out_dir=str(run), max_iters=100, **keys)
    )
    first = {
        "event": "start",
        "config": config,
        "git": "0" * 40,
        "versions": {"torch": "2.13.0"},
        "device": "a GPU",
    }
    first |= {
        "n_params": 1,
        "norm_plan": "",
        "norm_keys": keys_of(norm_type),
        "other_norm_keys": sorted(foreign_keys(norm_type)),
        "tokens_per_step": 100,
        "world_size": 1,
        "data": "x",
        **(start or {}),
    }
    own = np.random.RandomState(zlib.crc32(run.name.encode()))
    noise = 0.02 * np.random.RandomState(seed).randn() + 0.002 * own.randn()
    events = [first, {"event": "eval", "step": 0, "val_loss": 5.0}]
    for step in range(10, until + 1, 10):
        loss = 1 + 4 * step**-0.5 + noise + extra
        measured = speed * (1 + 0.01 * own.randn())
        events.append({"event": "step", "step": step, "loss": loss + 0.01, "tok_per_s": measured})
        events.append({"event": "eval", "step": step, "val_loss": loss})
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if items is not None:
        write_items(run, own.rand(200) < items)
    return run


def write_items(run: Path, right: np.ndarray) -> None:
    chosen = [{"acc_choice": int(not r), "acc_norm_choice": int(not r)} for r in right]
    rows = [{"item": item, "label": 0, **choices} for item, choices in enumerate(chosen)]
    (run / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def committed(study: str, name: str) -> runs.Run:
    """A run of results/cpu."""
    found = find_runs([ROOT / "results/cpu" / study / "runs.tar.xz"])
    return next(run for run in found if run.path.name == name)


@pytest.fixture
def sweep(tmp_path) -> Path:
    """rms; layer, 0.1 worse; coupled, the same and 5 % faster; taper, 0.1 better."""
    arms = (("rms", 0, 1000), ("layer", 0.1, 1000), ("coupled", 0, 1050), ("taper", -0.1, 1000))
    for seed in SEEDS:
        for norm_type, extra, speed in arms:
            write_run(tmp_path, norm_type, seed, extra, speed, items=0.3, delta_val_loss=0.01)
    return tmp_path


def reported(folder: Path, **deltas: float) -> report.Report:
    return report.make_report(by_arm(find_runs([folder])), "rms", deltas)


def rows_of(folder: Path, **deltas: float) -> dict[tuple[str, str], Comparison]:
    return {(row.metric.name, row.arm): row for row in reported(folder, **deltas).rows}


def test_verdicts_and_sentences(sweep):
    rows = rows_of(sweep)
    words = {arm: rows["val_loss", arm].word for arm in ("layer", "coupled", "taper")}
    assert words == {
        "layer": "worse, beyond the margin",
        "coupled": "no difference shown, within the margin",
        "taper": "better, beyond the margin",
    }
    assert rows["tok_per_s", "coupled"].word == "better"
    assert rows["val_loss_equal_time", "coupled"].word == "not judged"
    assert rows["hellaswag_acc", "taper"].word == "not judged"  # at chance
    assert rows["val_loss", "layer"].delta_kind == "declared"
    # the same numbers as val_loss, but no margin
    assert rows["train_loss", "coupled"].word == "no difference shown"
    for row in rows.values():
        assert row.sentence().startswith(f"{row.arm}: {row.word}: ")
        assert "rms over 8 seeds" in row.sentence()
    row, level = rows["val_loss", "coupled"], ALPHA / 3
    assert row.power_within == pytest.approx(power_of_tost(0.0, 0.01, row.sd, 8, level))
    assert row.detectable == pytest.approx(detectable_effect(row.sd, 8, level))


def test_files_are_written_and_agree(sweep, tmp_path, capsys):
    out = tmp_path / "report"
    report.main([str(sweep), "--baseline=rms", f"--out={out}"])
    printed = capsys.readouterr().out
    assert "taper: better" in printed
    rows = rows_of(sweep)
    table = {line.split()[0]: line for line in printed.split("\n\n")[0].splitlines()[2:]}
    assert max(map(len, table.values())) <= 80 and table["rms"].split()[1] == "8"
    ends = {"layer": "worse, beyond", "coupled": "within margin", "taper": "better, beyond"}
    for arm, words in ends.items():
        row = rows["val_loss", arm]
        assert table[arm].endswith(words) and f" {row.estimate.mean:+.4f} " in table[arm]
    text, appendix = (out / "report.md").read_text().split("## Appendix: not judged")
    for heading in ("## Verdicts", "## Tests", "### val_loss (nats per token)", "| SD |"):
        assert heading in text
    assert "| val_loss_equal_time |" in appendix and "| val_loss_equal_time |" not in text
    table = list(csv.DictReader((out / "report.csv").open()))
    # all metrics but val_loss_full, and the loss at equal time
    assert len(table) == 3 * len(METRICS)
    found = {(row["metric"], row["arm"]): row for row in table}
    for name, row in rows.items():
        assert found[name]["verdict"] == row.word
        assert found[name]["direction"] == row.verdict.direction
        assert found[name]["margin_verdict"] == row.verdict.margin
        assert float(found[name]["mean_difference"]) == row.estimate.mean
    seeds = list(csv.DictReader((out / "seeds.csv").open()))
    values = {(row["arm"], int(row["seed"])): float(row["val_loss"]) for row in seeds}
    assert values == {(run.arm, run.seed): run.metrics["val_loss"] for run in find_runs([sweep])}


def test_the_stream_is_drawn_where_runs_measured_it(tmp_path):
    last = {
        "event": "rms",
        "step": 100,
        "rms": [0.1, 0.2, 0.3],
        "drift": [1.0, 2.0, 1.0],
        "spread": [0.0, 0.1, 0.0],
        "logit_norm": 7.0,
        "radial_gradient": -0.5,
    }
    first = {**last, "step": 0, "rms": [9.0, 9.0, 9.0], "logit_norm": 2.0}
    rms, coupled = (write_run(tmp_path, norm_type, 8) for norm_type in ("rms", "coupled"))
    report.main([str(tmp_path), "--baseline=rms"])
    assert "Residual stream" not in (tmp_path / "report.html").read_text()
    append(coupled, **first)
    append(coupled, **last)
    with open(coupled / "log.jsonl", "a") as log:
        log.write('{"event": "st')  # cut off by a kill
    with_events, without = find_runs([coupled, rms])
    assert with_events.stream["rms"].tolist() == [0.1, 0.2, 0.3] and not without.stream
    history = with_events.history
    assert history["logit_norm"].tolist() == [2.0, 7.0] and history["rms"][0, -1] == 9.0
    assert history["tokens"].tolist() == [0, 10000] and not without.history
    report.main([str(tmp_path), "--baseline=rms"])
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Residual stream after training</h2>" in page and "length of the logits" in page


def test_the_page_has_old_runs_and_arms_without_a_verdict(sweep):
    """Runs of before a norm key; of an arm whose runs all diverged, the sentence."""
    logs = [run / "log.jsonl" for run in sweep.glob("rms-*")]
    for log in logs:
        log.write_text(log.read_text().replace('"rms_bias": false, ', "", 1))
    for seed in SEEDS:
        append(sweep / f"taper-{seed}", event="end", reason="step 9: the loss is not finite")
    report.main([str(sweep), "--baseline=rms"])
    page = (sweep / "report.html").read_text()
    assert "<th>rms_bias" in page and "<p>taper: no verdict: 8 of 8 runs diverged" in page


def test_long_names_in_the_terminal_stay_apart(tmp_path, capsys):
    for seed in (8, 9):
        write_run(tmp_path, "rms", seed)
        for anchor in (0.1, 0.01):
            write_run(tmp_path, "taper", seed, taper_final=True, taper_anchor=anchor)
    report.main([str(tmp_path), "--baseline=rms", "--pictures=False"])
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]
    names = {line.partition("  ")[0] for line in lines}
    assert len(names) == 3 and all(len(line) <= 80 for line in lines)


def test_runs_of_before_a_key_existed_are_comparable(tmp_path):
    old = committed("table1", "rms-8")
    new = write_run(tmp_path, "rms", 8)
    lines = (new / "log.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    recorded = {name: first[name] for name in ("norm_keys", "other_norm_keys")}
    start = {**old.start, **recorded, "config": {**first["config"], **old.config}}
    for key, value, message in (
        ("residual", "float32", ""),
        ("parallel", "fsdp", ""),
        ("residual", "autocast", "residual=autocast against float32"),
    ):
        start["config"][key] = value
        (new / "log.jsonl").write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")
        assert difference_in_settings(find_runs([new])[0], old) == message


def test_a_margin_given_now_is_post_hoc(sweep):
    row = rows_of(sweep, val_loss=0.05)["val_loss", "coupled"]
    assert (row.delta, row.delta_kind) == (0.05, "post hoc") and "post hoc" in row.sentence()
    report.main([str(sweep), "--baseline=rms", "--pictures=False", "--delta_val_loss=0.05"])
    assert "post hoc" in (sweep / "report.md").read_text()
    relative = margin(METRICS["tok_per_s"], find_runs([sweep / "rms-8"])[0], {"tok_per_s": 0.02})
    assert relative == (pytest.approx(np.log(1.02)), "post hoc")


def test_too_small_a_set_shows_nothing_and_says_what_is_missing(tmp_path):
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed, delta_val_loss=0.001)
        write_run(tmp_path, "layer", seed, extra=0.003 * (seed - 9), delta_val_loss=0.001)
    row = rows_of(tmp_path)["val_loss", "layer"]
    assert row.word == "no difference shown, margin open"
    assert f"takes a new set of {row.needed} seeds" in row.sentence()
    assert row.needed > 3


def test_the_program_loads_no_model(tmp_path):
    """What it needs to know of norms is in the logs."""
    words = ["results/cpu/taper_finetune/runs.tar.xz", f"--plot={tmp_path / 'loss.png'}"]
    code = f"import report, sys; report.main({words}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "model", "norm_plan", "kernels"} & set(done.stdout.split())


def test_old_logs_keep_their_arms():
    """Those without norm keys; a new setting of models needs an entry in BEFORE_THE_KEY."""
    studies = {
        name: find_runs([ROOT / "results/cpu" / name / "runs.tar.xz"])
        for name in ("table1", "taper")
    }
    arms = {name: {run.arm for run in its} for name, its in studies.items()}
    assert arms["table1"] == {"layer", "rms", "coupled", "cbwc", "taper --taper_warmup=0.1"}
    internal, final, anchor = "taper", "--taper_final=True", "--taper_anchor=0.1"
    assert arms["taper"] == {
        "rms",
        internal,
        f"{internal} {final}",
        f"{internal} {anchor}",
        f"{internal} {final} {anchor}",
        f"{internal} --taper_warmup=0.625 --taper_end=0.625",
    }
    config = committed("table1", "rms-8").config
    added = {
        field.name: field.default
        for field in dataclasses.fields(TrainConfig)
        if field.name not in config
    }
    for name in (
        added.keys() - runs.NAMES - {field.name for field in dataclasses.fields(NormConfig)}
    ):
        assert runs.BEFORE_THE_KEY[name] == added[name]


def test_a_log_tells_its_norm_keys(tmp_path):
    """Keys that this program does not know name the arm, and are no difference in settings."""
    start = {"norm_keys": {"norm_eps": 1e-5, "rms_new": 3}, "other_norm_keys": ["coupled_new"]}
    log = write_run(tmp_path, "rms", 8, start=start) / "log.jsonl"
    more = '"norm_eps": 1e-05, "rms_new": 4, "coupled_new": 5, '
    log.write_text(log.read_text().replace('"norm_eps": 1e-05, ', more, 1))
    new, other = find_runs([log.parent, write_run(tmp_path, "layer", 8)])
    assert new.arm == "rms --rms_new=4" and difference_in_settings(new, other) == ""


def test_a_default_that_changed_makes_no_arm_of_two_norms(tmp_path):
    write_run(tmp_path, "rms", 8)
    log = write_run(tmp_path, "rms", 9, start={"norm_keys": {"rms_fraction": 0.5}}) / "log.jsonl"
    log.write_text(log.read_text().replace('"rms_fraction": 1.0', '"rms_fraction": 0.5', 1))
    with pytest.raises(UserError, match=r"both are rms, but rms_fraction is 1\.0 and 0\.5"):
        by_arm(find_runs([tmp_path]))


def test_an_old_default_of_another_norm_type_makes_no_arm(tmp_path):
    for norm_type, arm in (("rms", "rms"), ("taper", "taper --taper_warmup=0.1")):
        keys = runs.OLD_NORM_KEYS[""] | runs.OLD_NORM_KEYS.get(norm_type, {})
        log = write_run(tmp_path, norm_type, 8, start={"norm_keys": keys}) / "log.jsonl"
        log.write_text(log.read_text().replace('"taper_warmup": 0.5', '"taper_warmup": 0.1', 1))
        run = find_runs([log.parent])[0]
        assert run.config["taper_warmup"] == 0.1 and run.arm == arm
        config = model_config(
            run.config | {"vocab_size": 64}, log
        )  # a checkpoint with such a config still loads
        assert config.norm_type == norm_type and config.taper_warmup == (
            0.1 if norm_type == "taper" else 0.5
        )


def test_arms_of_a_declared_study_may_have_rates_of_their_own(tmp_path):
    for norm_type, rate, warmup in (("rms", 6e-4, 5), ("layer", 1e-3, 0)):
        for seed in (8, 9):
            keys = {"learning_rate": rate, "warmup_iters": warmup}
            write_run(tmp_path, norm_type, seed, study="rates", **keys)
    pairs, left_out = pair_by_seed(by_arm(find_runs([tmp_path])), "rms")
    assert len(pairs["layer"]) == 2 and not left_out
    report.main([str(tmp_path), "--baseline=rms", "--pictures=False"])
    told = (tmp_path / "report.md").read_text()
    assert "layer --learning_rate=0.001 --warmup_iters=0" in told


def test_runs_that_differ_in_anything_else_are_not_paired(tmp_path, capsys):
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed)
    write_run(tmp_path, "layer", 8)
    write_run(tmp_path, "layer", 9, learning_rate=1e-3)
    write_run(tmp_path, "layer", 10, start={"data": "y"})
    write_run(tmp_path, "layer", 11)
    write_run(tmp_path, "rms", 12)
    write_run(tmp_path, "layer", 12, until=60)
    pairs, left_out = pair_by_seed(by_arm(find_runs([tmp_path])), "rms")
    assert [run.seed for run, _ in pairs["layer"]] == [8]
    for line in (
        "layer, seed 9: not paired: learning_rate=0.001 against 0.0006",
        "layer, seed 11: not paired: rms has no such seed",
        "layer, seed 12: not finished: last evaluation at step 60 of 100",
        "data: y against x",
    ):
        assert any(line in found for found in left_out)
    # one pair alone: means and curves are of that, and nothing is compared
    report.main([str(tmp_path), "--baseline=rms", "--pictures=False"])
    assert "Nothing is compared, for no arm has two pairs." in capsys.readouterr().out
    lines = list(csv.DictReader((tmp_path / "seeds.csv").open()))
    assert [(line["arm"], line["seed"]) for line in lines] == [("rms", "8"), ("layer", "8")]
    table = tmp_path / "report.csv"
    assert table.read_text().splitlines() == ["metric,arm"]
    table.write_text("somebody's own")
    with pytest.raises(UserError, match=r"report\.csv"):
        report.main([str(tmp_path), "--baseline=rms", "--pictures=False"])
    assert table.read_text() == "somebody's own"


def test_curves_alone_are_of_one_text(tmp_path):
    for seed in (8, 9):
        write_run(tmp_path, "rms", seed)
    labels = [f"{tmp_path / name} seed={name[-1]}" for name in ("rms-8", "rms-9")]
    assert labels_of(find_runs([tmp_path])) == labels
    report.main([str(tmp_path)])
    assert (tmp_path / "loss.png").stat().st_size > 1000
    write_run(tmp_path, "layer", 8, start={"data": "y"})
    with pytest.raises(UserError, match="data: "):
        report.main([str(tmp_path)])


def test_equal_time_is_worth_the_exchange_rate(tmp_path):
    """On L = 1 + 4 s^-1/2 the later half falls by about 2 s^-1/2 nats per e-fold of tokens."""
    base, fast = (
        find_runs([write_run(tmp_path, name, 8, speed=speed)])[0]
        for name, speed in (("rms", 1000.0), ("taper", 1100.0))
    )
    rate = exchange_rate(base)
    assert 2 * 100**-0.5 < rate < 2 * 60**-0.5
    gain = np.log(fast.metrics["tok_per_s"] / base.metrics["tok_per_s"])
    assert at_equal_time(fast, base) == pytest.approx(fast.metrics["val_loss"] - rate * gain)
    for steps, has_rate in (([0, 25, 50, 75, 100], True), ([0, 50, 100], False)):
        base.curve = np.array([(100 * step, 1 + 4 * max(step, 1) ** -0.5) for step in steps])
        assert (exchange_rate(base) is not None) == has_rate


def test_hellaswag_is_paired_item_by_item(tmp_path):
    """Two models that agree on most items differ with less error than their own accuracies have."""
    for seed in SEEDS:
        for name in ("rms", "layer"):
            run = write_run(tmp_path, name, seed, items=0.3)
            right = np.random.RandomState(seed).rand(1000) < 0.3
            right[:20] |= name == "layer"
            write_items(run, right)
    a, b = find_runs([tmp_path / "layer-8", tmp_path / "rms-8"])
    assert item_differences(a, b, "acc").sum() == 20 - b.items["acc"][:20].sum()
    row = rows_of(tmp_path)["hellaswag_acc", "layer"]
    assert row.verdict.direction == "better" and row.estimate.se < 0.5 * (0.3 * 0.7 / 1000) ** 0.5


def append(run: Path, **event) -> None:
    with open(run / "log.jsonl", "a") as log:
        log.write(json.dumps(event) + "\n")


def test_diverged_seeds_take_the_verdict_with_them(sweep):
    """The four good seeds of an arm whose other four diverged are no fair sample of it."""
    append(sweep / "taper-8", event="end", reason="stopped by SIGTERM after step 50")
    for seed in (8, 10, 12, 14):
        append(
            sweep / f"taper-{seed}",
            event="end",
            reason="step 100: the loss on rank 0 is not finite",
        )
    row = rows_of(sweep)["val_loss", "taper"]
    assert row.word == "no verdict" and row.verdict.p_holm < ALPHA
    assert (row.verdict.direction, row.verdict.margin) == ("", "")
    assert "4 of 8 runs diverged" in row.sentence()
    append(sweep / "rms-8", event="end", reason="step 100: the loss on rank 0 is not finite")
    row = rows_of(sweep)["val_loss", "layer"]
    assert row.word == "no verdict" and "of rms, 1 of 8 runs diverged" in row.sentence()


@pytest.mark.parametrize("metric", ["val_loss", "val_loss_full"])
def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_diverged(sweep, capsys, metric):
    kind = "eval" if metric == "val_loss" else "val_full"
    for seed in (8, 9, 10):
        append(sweep / f"taper-{seed}", event=kind, step=100, **{metric: None})
        append(sweep / f"taper-{seed}", event="end", reason="done")
    report.main([str(sweep), "--baseline=rms", "--pictures=False"])
    assert "3 of 8 runs diverged" in capsys.readouterr().out
    assert "| `taper` | 8 | 3 |" in (sweep / "report.md").read_text()


def test_divergence_under_other_settings_is_another_experiment(sweep, capsys):
    """It takes no verdict and is in no table of these."""
    run = write_run(sweep, "taper", 99, learning_rate=1.0)
    append(run, event="end", reason="step 100: the loss on rank 0 is not finite")
    report.main([str(sweep), "--baseline=rms", "--pictures=False"])
    text = capsys.readouterr().out
    assert "taper: better" in text and "runs diverged" not in text
    assert "taper, seed 99: step 100: the loss on rank 0 is not finite" in text
    assert "## Stability" not in (sweep / "report.md").read_text()


def test_a_run_that_resumed_with_other_settings_is_left_out(sweep):
    changes = ["learning_rate 0.01 -> 0.03", "git abc -> def", "world_size 1 -> 2", "torch 1 -> 2"]
    for seed, change in zip(SEEDS, changes):
        append(sweep / f"taper-{seed}", event="resume", step=50, changed=[change])
    harmless = ["out_dir a -> b", "python 3.11 -> 3.12"]
    append(sweep / "taper-12", event="resume", step=50, changed=harmless)
    left_out = "resumed with other settings, code or machine"
    expected = [f"taper, seed {seed}: {left_out} ({c})" for seed, c in zip(SEEDS, changes)]
    assert reported(sweep).left_out[:4] == expected
    assert rows_of(sweep)["val_loss", "taper"].seeds == [12, 13, 14, 15]


@pytest.mark.parametrize("key", ["learning_rate", "delta_val_loss"])
def test_runs_of_two_experiments_are_refused(tmp_path, key):
    """Each seed's arms agree, but the seeds do not: no mean over them means anything."""
    for seed, value in ((8, 1e-3), (9, 2e-3)):
        for norm_type in ("rms", "layer"):
            write_run(tmp_path, norm_type, seed, **{key: value})
    with pytest.raises(UserError, match=f"seeds 9 and 8: {key}"):
        rows_of(tmp_path)


def test_a_run_without_hellaswag_costs_its_own_pair_only(sweep):
    (sweep / "taper-8" / "hellaswag.jsonl").unlink()
    write_items(sweep / "layer-9", np.ones(5, bool))
    rows = rows_of(sweep)
    assert rows["hellaswag_acc", "taper"].seeds == list(range(9, 16))
    assert 9 not in rows["hellaswag_acc", "layer"].seeds
    assert len(rows["val_loss", "taper"].seeds) == 8
    left_out = reported(sweep).left_out
    assert "hellaswag_acc of taper leaves out seed 8: not measured alike" in left_out


@pytest.mark.parametrize("how", ["a CPU", "side by side", "resumed so"])
def test_models_at_chance_and_some_speeds_get_no_verdict(tmp_path, how):
    """One such run is enough."""
    for seed in SEEDS:
        for norm_type, speed in (("rms", 1000), ("layer", 1500)):
            start = {"device": "cpu"} if how == "a CPU" else None
            jobs = 2 if how == "side by side" else 1
            run = write_run(tmp_path, norm_type, seed, speed=speed, start=start, jobs=jobs)
            write_items(run, np.arange(1000) < 230 + speed / 100)
    if how == "resumed so":
        append(run, event="resume", step=50, changed=["jobs 1 -> 2"])
    rows = rows_of(tmp_path)
    by_chance = rows["hellaswag_acc", "layer"]
    assert by_chance.word == "not judged" and "chance" in by_chance.sentence()
    assert rows["tok_per_s", "layer"].word == "not judged"
    assert rows["val_loss", "layer"].seeds == list(SEEDS)


def test_what_auto_meant_is_not_another_setting(tmp_path):
    """An older run logged `auto`, on a CPU float32 and eager; a newer one what it has chosen."""
    older = write_run(tmp_path, "rms", 1, start={"device": "cpu (x)"})
    log = (older / "log.jsonl").read_text()
    start = json.loads(log.splitlines()[0])
    assert (start["config"]["dtype"], start["config"]["compile"]) == ("auto", None)
    del start["config"]["merge_micro_batches"]
    rest = log.split("\n", 1)[1]
    (older / "log.jsonl").write_text(json.dumps(start) + "\n" + rest)
    chosen = {"compile": False, "merge_micro_batches": 1}
    same = write_run(tmp_path, "layer", 1, start={"device": "cpu (x)"}, dtype="float32", **chosen)
    other = write_run(tmp_path, "layer", 2, start={"device": "cpu (x)"}, dtype="bfloat16", **chosen)
    assert find_runs([older])[0].config["jobs"] == 1
    older, same, other = (find_runs([run])[0] for run in (older, same, other))
    assert runs.difference_in_settings(same, older) == ""
    assert runs.difference_in_settings(other, same, ("seed",)).startswith("dtype=bfloat16")


def test_arms_are_written_as_sweep_takes_them(tmp_path):
    run = write_run(tmp_path, "coupled", 8, coupled_alpha=(1.0, 1.1), norm_plan="Rs Rs R")
    assert find_runs([run])[0].arm == "coupled --norm_plan='Rs Rs R' --coupled_alpha=1.0,1.1"


# --------------------------------------------------------------------- the whole split, by document


def whole_split(run: Path, nats: list[float], tokens: list[int], **values) -> None:
    """Log the loss over the whole val split, with this mean loss of each document."""
    sums = [loss * count for loss, count in zip(nats, tokens, strict=True)]
    event = {
        "val_loss_full": sum(sums) / sum(tokens),
        "tokens": sum(tokens),
        "document_tokens": tokens,
        "document_nats": sums,
    }
    append(run, event="val_full", step=100, **{**event, **values})


@pytest.fixture
def documents(tmp_path) -> Path:
    """layer is 0.1 worse on the first of three documents, 0.01 worse on the others."""
    for seed in SEEDS:
        for norm_type in ("rms", "layer"):
            run = write_run(tmp_path, norm_type, seed, delta_val_loss=0.02)
            own = 1 + 0.001 * np.random.RandomState(seed).randn()
            is_worse = norm_type == "layer"
            nats = [own + 0.1 * is_worse, own + 0.01 * is_worse, own + 0.01 * is_worse]
            whole_split(run, nats, [100, 200, 700])
    return tmp_path


def test_the_whole_split_is_judged_conditional_on_its_text(documents):
    """Weighted by tokens; the range is that of the mean difference without each document."""
    row = rows_of(documents)["val_loss_full", "layer"]
    assert row.estimate.mean == pytest.approx(0.1 * 0.1 + 0.9 * 0.01)
    assert (row.delta, row.delta_kind) == (0.02, "declared")
    assert row.word == "worse, within the margin"
    without_last = (100 * 0.1 + 200 * 0.01) / 300
    assert (row.text.low, row.text.high) == pytest.approx((0.01, without_last))
    assert "conditional on this text: +0.0100 … +0.0400 when one of its 3" in row.sentence()
    report.main([str(documents), "--baseline=rms", "--pictures=False"])
    text = (documents / "report.md").read_text()
    assert "| without one document |" in text and "| +0.0100 … +0.0400 |" in text
    assert "val_loss_full is the one to decide by" in text
    assert text.index("- layer: worse, within") < text.index("\nval_loss:")
    lines = {row["metric"]: row for row in csv.DictReader((documents / "report.csv").open())}
    assert float(lines["val_loss_full"]["high_document"]) == row.text.high
    assert lines["val_loss"]["high_document"] == ""
    seeds = list(csv.DictReader((documents / "seeds.csv").open()))
    assert all(float(line["val_loss_full"]) < 1.05 for line in seeds)


def test_other_documents_have_no_range(documents):
    """A margin given now, too: that of val_loss is its margin."""
    whole_split(documents / "layer-8", [1.0, 1.0], [300, 700])
    row = rows_of(documents, val_loss=0.5)["val_loss_full", "layer"]
    assert row.text is None and (row.delta, row.delta_kind) == (0.5, "post hoc")
    whole_split(documents / "layer-10", [1.0], [1000], val_loss_full=None)
    assert 10 not in rows_of(documents)["val_loss_full", "layer"].seeds


# -------------------------------------------------------------------------- plans, power, stability


@pytest.mark.parametrize(
    ("planned", "seeds", "judged", "said"),
    [
        (16, SEEDS, [*SEEDS], "8 of 16 planned seeds"),
        (16, SEEDS[:1], None, "layer: no verdict: 1 of 16 planned seeds."),
        (6, SEEDS, [8, 9, 10, 11, 12, 13], "6 seeds were planned, so seed 14, 15 is not judged"),
    ],
)
def test_only_the_planned_seeds_are_judged(tmp_path, capsys, planned, seeds, judged, said):
    """However clear the difference is; the first of them, so that nobody stops where it pleases.

    An arm of which all runs diverged has its sentence, without a row.
    """
    for seed in seeds:
        for norm_type, extra in (("rms", 0.0), ("layer", 0.5), ("taper", 0.0)):
            run = write_run(tmp_path, norm_type, seed, extra, planned_seeds=planned)
        append(run, event="end", reason="step 9: the loss is not finite")
    report.main([str(tmp_path), "--baseline=rms", "--pictures=False"])
    printed = capsys.readouterr().out
    assert said in printed and "taper: no verdict: " in printed
    row = rows_of(tmp_path).get(("val_loss", "layer"))
    if judged is not None:
        assert row.seeds == judged and row.verdict.p_holm < 1e-3
        assert row.word == ("worse" if planned == 6 else "no verdict")
    in_table = {line["seed"] for line in csv.DictReader((tmp_path / "seeds.csv").open())}
    assert in_table == {str(seed) for seed in judged or seeds}


def test_divergence_is_a_result(sweep, capsys):
    """Also where all runs of an arm diverged; runs without the events have no other outcomes."""
    for seed in SEEDS:
        if seed > 8:
            append(sweep / f"taper-{seed}", event="end", reason="step 9: the loss is not finite")
        for norm_type, logit in (("rms", 7.0), ("layer", 30.0 + seed)):
            counts = {"clipped": 0.25 + 0.5 * (seed % 2), "spikes": 3}
            run = sweep / f"{norm_type}-{seed}"
            append(run, event="stability", step=50, attention_logit=99.0, clipped=1.0, spikes=9)
            append(run, event="stability", step=100, attention_logit=logit, **counts)
    append(sweep / "rms-8", event="stability", step=100, attention_logit=None, clipped=0, spikes=3)
    report.main([str(sweep), "--baseline=rms", "--pictures=False"])
    text = (sweep / "report.md").read_text()
    assert "7 of 8 runs diverged" in capsys.readouterr().out
    assert "| `layer` | 8 | 0 | 50 % | 3.0 | 45.0 |" in text
    assert "| `rms` | 8 | 0 | 47 % | 3.0 | 7.0 |" in text
    assert "| `taper` | 8 | 7 | n/a | n/a | n/a |" in text


def test_tokens_are_worth_the_exchange_rate(tmp_path):
    """An arm that is the baseline with more tokens is worth just these, to first order."""
    more = 1.05
    for seed in SEEDS:
        rms = write_run(tmp_path, "rms", seed)
        rate = exchange_rate(find_runs([rms])[0])
        write_run(tmp_path, "layer", seed, extra=-rate * np.log(more))
        write_run(tmp_path, "taper", seed, extra=rate * np.log(more))
    rows = rows_of(tmp_path)
    row = rows["val_loss", "layer"]
    assert row.tokens(row.estimate.mean) == pytest.approx(0.05, abs=0.01)
    assert "(worth +5" in row.sentence() or "(worth +4" in row.sentence()
    assert row.tokens(-row.rate * np.log(more)) == pytest.approx(0.05)
    assert rows["val_loss", "taper"].tokens(row.rate * np.log(more)) == pytest.approx(1 / 1.05 - 1)
    assert rows["tok_per_s", "layer"].rate is None


@pytest.mark.parametrize(
    ("arm", "short"),
    [
        ("rms", "rms"),
        ("coupled --coupled_span=2", "coupled span=2"),
        ("taper --taper_final=True --norm_eps=1e-06", "taper final norm_eps=1e-06"),
        ("coupled --coupled_alpha=1.0,1.1", "coupled alpha=1.0,1.1"),
    ],
)
def test_short_names_of_arms(arm, short):
    assert short_name(arm) == short
    plans = [f"coupled --norm_plan='Rs {'RR Rs ' * 8}{last} R'" for last in ("RR", "Rs")]
    first, second = map(short_name, plans)  # cut, and different
    assert first != second and len(first) == len(second) == 40


def test_an_arm_has_the_name_that_it_was_given(tmp_path, capsys):
    for seed in (1, 2, 3):
        write_run(tmp_path, "rms", seed)
        write_run(tmp_path, "coupled", seed, coupled_span=2, arm="wide")
    report.main([str(tmp_path), "--baseline=rms"])
    printed = capsys.readouterr().out
    assert "\nwide " in printed and "coupled" not in printed
    assert "| `wide` | `coupled --coupled_span=2` |" in (tmp_path / "report.md").read_text()
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert {row["arm"] for row in rows} == {"wide"}
    assert 'value="wide"' in (tmp_path / "report.html").read_text()
    write_run(tmp_path, "layer", 4, arm="wide")
    with pytest.raises(UserError, match="both are named wide"):
        reported(tmp_path)


# ------------------------------------------------------------------------------ the published table


def test_published_table_supports_no_gain(tmp_path, capsys, monkeypatch):
    """Throughput t = 1.43, p = 0.17, -0.27 % ... +1.35 %; equal losses are not shown within 0.001
    (TOST p = 0.074). Other numbers give other verdicts.
    """
    found = published.print_verdicts()
    speed, loss, accuracy = (
        found[name] for name in ("train_throughput", "train_loss", "hellaswag")
    )
    assert (round(speed["t"], 2), round(speed["p"], 2)) == (1.43, 0.17)
    assert [round(100 * bound, 2) for bound in speed["ci_relative"]] == [-0.27, 1.35]
    assert round(loss["p_tost"], 3) == 0.074
    assert accuracy["p"] < 0.05 < accuracy["p_holm"]  # and corrected p decides
    words = [row["verdict"] for row in (speed, loss, accuracy)]
    nothing = "no difference shown"
    assert words == [nothing, f"{nothing}, margin open", nothing]
    text = published.TABLE.read_text().replace("443.0,3.3,445.4", "443.0,3.3,455.4")
    changed = tmp_path / "table.csv"
    changed.write_text(text.replace("3.096,0.0012,3.096,0.0014", "3.096,0.0002,3.096,0.0002"))
    monkeypatch.setattr(published, "TABLE", changed)
    found = published.print_verdicts()
    report.main(["--published"])
    assert "better" in capsys.readouterr().out
    assert found["train_throughput"]["verdict"] == "better"
    assert found["train_loss"]["verdict"] == "no difference shown, within the margin"


# ----------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("study", ("table1", "table1_again", "taper"))
def test_committed_archives_give_the_committed_tables(study, tmp_path):
    """Text for text; equal times are means in another order of rounding on another machine."""
    folder = ROOT / "results/cpu" / study
    report.main(
        [str(folder / "runs.tar.xz"), "--baseline=rms", f"--out={tmp_path}", "--pictures=False"]
    )
    for name in ("seeds.csv", "report.csv"):
        with (folder / name).open() as old, (tmp_path / name).open() as new:
            for before, after in zip(csv.DictReader(old), csv.DictReader(new), strict=True):
                for key, text in before.items():
                    try:
                        assert float(after[key]) == pytest.approx(
                            float(text), rel=1e-6, abs=1e-9
                        ), (name, key)
                    except ValueError:
                        assert after[key] == text


def test_an_archive_is_its_folders(sweep, tmp_path):
    """Added one by one, a run twice: the same report; the same bytes in any order."""
    folders = sorted(run for run in sweep.iterdir() if run.is_dir())
    for name, order in (("a", folders), ("b", folders[::-1])):
        archive.add(tmp_path / name / "runs.tar.xz", *order)
    archive.add(tmp_path / "b" / "runs.tar.xz", folders[3])
    first, second = (tmp_path / name / "runs.tar.xz" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    (tmp_path / "c").mkdir()
    for source, out in ((first, "c"), (sweep, "d")):
        report.main([str(source), "--baseline=rms", f"--out={tmp_path / out}", "--pictures=False"])
    assert (tmp_path / "c/report.csv").read_text() == (tmp_path / "d/report.csv").read_text()


def test_runs_are_listed_and_found(sweep, tmp_path, capsys):
    path = tmp_path / "kept/runs.tar.xz"
    archive.main([str(path), str(sweep / "rms-8"), str(sweep / "rms-9")])
    archive.main([str(path)])
    assert capsys.readouterr().out == "rms-8\nrms-9\n"
    assert [run.name for run in find_runs([path.parent])] == [f"{path}/rms-8", f"{path}/rms-9"]
    with pytest.raises(UserError, match=r"rms-8 and .*rms-8: both are rms, seed 8"):
        by_arm(find_runs([path, sweep / "rms-8"]))
    for words, named in (
        ([path, tmp_path], "log.jsonl"),
        ([tmp_path / "runs.zip"], "runs.zip|archive"),
    ):
        before = path.read_bytes()
        with pytest.raises(UserError, match=named):
            archive.main(list(map(str, words)))
        assert path.read_bytes() == before


# ------------------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "text", "half"])
def test_what_is_no_archive_of_runs_is_refused(tmp_path, content):
    path = tmp_path / "runs.tar.xz"
    archive.write(path, {"rms-8/log.jsonl": b'{"event": "start", "config": {}}\n'})
    assert len(find_runs([path])) == 1
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match=r"runs\.tar\.xz"):
        find_runs([path])


def test_an_archive_with_odd_members_is_read_as_far_as_it_has_runs(sweep, tmp_path):
    """Names that collide, and one outside: nothing is unpacked, so they can write nowhere."""
    path = tmp_path / "runs.tar.xz"
    log = (sweep / "rms-8/log.jsonl").read_bytes()
    archive.write(path, {"rms-8/log.jsonl": log, "rms-8/log.jsonl/x": b"", "rms-8/a/b": b""})
    assert [run.arm for run in find_runs([path])] == ["rms"]
    archive.write(path, {"../outside/log.jsonl": log, "rms-8": b"x"})
    with pytest.raises(UserError, match="start event"):
        find_runs([path])


def test_what_never_ends_is_no_file_of_a_run(tmp_path, monkeypatch):
    """1.5 MB may unpack to 10 GiB; to open a pipe waits for its writer."""
    run = write_run(tmp_path, "rms", 8)
    archive.write(tmp_path / "runs.tar.xz", {"rms-8/log.jsonl": (run / "log.jsonl").read_bytes()})
    monkeypatch.setattr(archive, "MOST", 10_000)  # tar's blocks are 10,240 bytes
    with pytest.raises(UserError, match=r"runs\.tar\.xz: .*more than 10,000 bytes"):
        find_runs([tmp_path / "runs.tar.xz"])
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")
    with pytest.raises(UserError, match=r"log\.jsonl: .*a pipe"):
        find_runs([tmp_path])


def test_a_damaged_line_is_named(tmp_path):
    log = write_run(tmp_path, "rms", 1) / "log.jsonl"
    log.write_text(log.read_text().replace('{"event": "step"', "{event", 1))
    with pytest.raises(UserError, match=r"rms-1.*line 3"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ([], 2, "run folder"),
        (["RUN", "--base=rms"], 2, "baseline"),
        (["RUN", "--baseline=rms", "--delta_val_loss=-1"], 2, "delta_val_loss"),
        (["RUN", "--baseline=layer"], 2, "layer"),
        (["RUN", "RUN", "--baseline=rms", "--out=OUT"], 1, "rms-8"),
        (["RUN", "OUT", "--baseline=rms"], 2, "--out"),
        (["nowhere"], 1, "nowhere"),
        (["EMPTY"], 1, "empty"),
        (["RUN", "--plot=OUT"], 1, "out"),
        (["STUDENT"], 1, "distill.py"),
    ],
)
def test_what_cannot_be_reported_on_is_named(tmp_path, words, code, named):
    run = write_run(tmp_path / "runs", "rms", 8)
    student = write_run(tmp_path, "rms", 9)
    log = student / "log.jsonl"
    log.write_text(log.read_text().replace('"norm_type"', '"teacher": "out/rms", "norm_type"', 1))
    (tmp_path / "empty").mkdir()
    places = {"RUN": run, "STUDENT": student, "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    with pytest.raises(UserError, match=named) as error:
        report.main(words)
    assert error.value.exit_code == code and not (tmp_path / "out").exists()
