"""report.py: from run folders to pairs, verdicts, tables and pictures; and the published table.

    python -m pytest tests/test_report.py

Most run folders here are written by `write_run`, with losses of known difference; test_sweep.py
reports on real ones.
"""

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

import report
from common.errors import ConfigError, UserError
from common.plotting import plt
from common.stats import ALPHA, detectable_effect, power_of_tost
from evidence import archive, plots, runs
from evidence.comparison import (
    EQUAL_TIME,
    at_equal_time,
    compare,
    exchange_rate,
    margin,
    pair_by_seed,
    usable,
)
from evidence.names import short_name
from evidence.runs import METRICS, by_arm, difference_in_settings, find_runs, item_differences
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


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are composed but not drawn, for tests that look at something else."""

    def close(figure, target: Path) -> Path:
        plt.close(figure)
        return target

    monkeypatch.setattr(plots, "save", close)


def rows_of(folder: Path, baseline: str = "rms", **deltas: float) -> dict[tuple[str, str], object]:
    finished = usable(by_arm(find_runs([folder])))
    pairs, _ = pair_by_seed(finished.arms, baseline)
    rows, _ = compare(pairs, baseline, deltas, finished.diverged)
    return {(row.metric.name, row.arm): row for row in rows}


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
    for row in rows.values():
        assert (
            row.sentence().startswith(f"{row.arm}: {row.word}: ")
            and "rms over 8 seeds" in row.sentence()
        )
    assert (
        rows["train_loss", "coupled"].word == "no difference shown"
    )  # the same numbers as val_loss, but no margin
    assert "no margin was declared" in rows["train_loss", "coupled"].sentence()


def test_files_are_written_and_agree(sweep, tmp_path, capsys):
    out = tmp_path / "report"
    report.main([str(sweep), "--baseline=rms", f"--out={out}"])
    assert "taper: better" in capsys.readouterr().out
    text = (out / "report.md").read_text()
    for heading in (
        "## Verdicts",
        "## Tests",
        "### Equal tokens, equal time",
        "### val_loss (nats per token)",
        "| SD |",
    ):
        assert heading in text
    table = list(csv.DictReader((out / "report.csv").open()))
    # all metrics but val_loss_full, and the loss at equal time
    assert len(table) == 3 * len(METRICS)
    found = {(row["metric"], row["arm"]): row for row in table}
    for name, row in rows_of(sweep).items():
        assert found[name]["verdict"] == row.word
        assert found[name]["direction"] == row.direction
        assert found[name]["margin_verdict"] == row.margin_verdict
        assert float(found[name]["mean_difference"]) == row.estimate.mean
    seeds = list(csv.DictReader((out / "seeds.csv").open()))
    values = {(row["arm"], int(row["seed"])): float(row["val_loss"]) for row in seeds}
    assert values == {(run.arm, run.seed): run.metrics["val_loss"] for run in find_runs([sweep])}
    for name in ("loss_tokens", "loss_time", "differences"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_stream_is_drawn_where_runs_measured_it(sweep, tmp_path):
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
    report.main([str(sweep), "--baseline=rms", f"--out={tmp_path / 'without'}"])
    for seed in SEEDS:
        with (sweep / f"coupled-{seed}" / "log.jsonl").open("a") as log:
            log.write(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    runs = find_runs([sweep / "coupled-8", sweep / "rms-8"])
    assert runs[0].stream["rms"].tolist() == [0.1, 0.2, 0.3] and not runs[1].stream
    report.main([str(sweep), "--baseline=rms", f"--out={tmp_path / 'with'}"])
    assert (
        runs[0].history["logit_norm"].tolist() == [2.0, 7.0]
        and runs[0].history["rms"][0, -1] == 9.0
    )
    assert runs[0].history["tokens"].tolist() == [0, 10000] and not runs[1].history
    for name in ("stream", "output", "drift"):
        assert (tmp_path / "with" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"![{name}]" in (tmp_path / "with" / "report.md").read_text()
        assert not (tmp_path / "without" / f"{name}.png").exists()


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


def test_a_margin_given_now_is_post_hoc(sweep, undrawn):
    row = rows_of(sweep, val_loss=0.05)["val_loss", "coupled"]
    assert (row.delta, row.delta_kind) == (0.05, "post hoc") and "post hoc" in row.sentence()
    report.main([str(sweep), "--baseline=rms", "--delta.val_loss=0.05"])
    assert "post hoc" in (sweep / "report.md").read_text()
    relative = margin(METRICS["tok_per_s"], find_runs([sweep / "rms-8"])[0], {"tok_per_s": 0.02})
    assert relative == (pytest.approx(np.log(1.02)), "post hoc")


def test_margins_that_differ_between_runs_are_refused(tmp_path):
    for seed, delta in ((8, 0.01), (9, 0.02)):
        for norm_type in ("rms", "layer"):
            write_run(tmp_path, norm_type, seed, delta_val_loss=delta)
    with pytest.raises(UserError, match="9 and 8: delta_val_loss"):
        rows_of(tmp_path)


def test_too_small_a_set_shows_nothing_and_says_what_is_missing(tmp_path):
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed, delta_val_loss=0.001)
        write_run(tmp_path, "layer", seed, extra=0.003 * (seed - 9), delta_val_loss=0.001)
    row = rows_of(tmp_path)["val_loss", "layer"]
    assert row.word == "no difference shown, margin open"
    assert f"takes a new set of {row.needed} seeds (80 % power)" in row.sentence()
    assert row.needed > 3


def test_the_program_loads_no_model(tmp_path):
    """What it needs to know of norms is in the logs."""
    words = ["results/cpu/taper_finetune/runs.tar.xz", f"--plot={tmp_path / 'loss.png'}"]
    code = f"import report, sys; report.main({words}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "model", "norm_plan", "kernels"} & set(done.stdout.split())


def test_a_plot_needs_the_name_of_a_picture(tmp_path):
    """matplotlib would write FOLDER.png, and the report name FOLDER."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    run = "results/cpu/taper_finetune/runs.tar.xz"
    for place, part in ((folder, "this is a folder"), (tmp_path / "loss", "no kind of picture")):
        with pytest.raises(UserError, match=part):
            report.main([run, f"--plot={place}"])
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


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


def test_norm_keys_make_arms(tmp_path):
    for seed in (8, 9):
        write_run(tmp_path, "rms", seed)
        write_run(tmp_path, "coupled", seed)
        write_run(tmp_path, "coupled", seed, coupled_span=2)
    assert list(by_arm(find_runs([tmp_path]))) == ["coupled --coupled_span=2", "coupled", "rms"]
    assert ("val_loss", "coupled --coupled_span=2") in rows_of(tmp_path)


def test_runs_that_differ_in_anything_else_are_not_paired(tmp_path):
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed)
    write_run(tmp_path, "layer", 8)
    write_run(tmp_path, "layer", 9, learning_rate=1e-3)
    write_run(tmp_path, "layer", 10, start={"data": "y"})
    write_run(tmp_path, "layer", 11)
    pairs, left_out = pair_by_seed(by_arm(find_runs([tmp_path])), "rms")
    assert [run.seed for run, _ in pairs["layer"]] == [8]
    for line in (
        "layer, seed 9: not paired: learning_rate=0.001 against 0.0006",
        "layer, seed 11: not paired: rms has no such seed",
    ):
        assert any(line in found for found in left_out)
    assert any("data: y against x" in line for line in left_out)


def test_arms_with_rates_of_their_own_are_not_compared_and_it_is_said(tmp_path, capsys):
    for seed in (8, 9):
        write_run(tmp_path, "rms", seed)
        write_run(tmp_path, "layer", seed, learning_rate=1e-3)
    report.main([str(tmp_path), "--baseline=rms"])
    out = capsys.readouterr().out
    assert "Nothing is compared, for no run has a pair." in out
    assert "layer, seed 9: not paired: learning_rate=0.001 against 0.0006" in out
    assert (tmp_path / "loss_tokens.png").exists()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, ""),
        ({"init_from": "out/base-9"}, ""),
        ({"learning_rate": 1e-3}, "learning_rate=0.001"),
        ({"start": {"device": "another GPU"}}, "device=another GPU"),
    ],
)
def test_only_runs_that_differ_in_the_seed_are_one_curve(tmp_path, monkeypatch, keys, named):
    """Others have a curve each, whose label says what differs; other data have none."""
    labels = []

    def save(figure, target: Path) -> Path:
        labels.extend(text.get_text() for text in figure.axes[0].get_legend().get_texts())
        plt.close(figure)
        return target

    monkeypatch.setattr(plots, "save", save)
    write_run(tmp_path, "rms", 8)
    write_run(tmp_path / "b", "rms", 9, **keys)
    report.main([str(tmp_path)])
    if not named:
        assert len(labels) == 1 and "2 seeds" in labels[0]
    else:
        assert len(labels) == 2 and any(named in label for label in labels)
    write_run(tmp_path / "c", "layer", 8, start={"data": "y"})
    with pytest.raises(UserError, match="data: y against x"):
        report.main([str(tmp_path)])


def test_copies_of_a_run_have_a_curve_each(tmp_path, monkeypatch):
    """Though they say the same of themselves, out_dir too."""
    run = write_run(tmp_path / "a", "rms", 8)
    shutil.copytree(run, tmp_path / "b" / run.name)
    drawn = report.label_runs(find_runs([tmp_path]))
    assert len(drawn) == 2 and all(len(runs) == 1 for runs in drawn.values())


def test_runs_of_distillation_and_too_many_curves_are_refused(tmp_path):
    for seed in range(report.MOST_CURVES + 1):
        run = write_run(tmp_path, "rms", seed)
    for path in (tmp_path, tmp_path / "rms-0"):
        assert len(find_runs([path])) in (1, report.MOST_CURVES + 1)
    write_run(tmp_path, "rms", 0, learning_rate=1e-3)  # the same arm and seed: a curve for each run
    with pytest.raises(ConfigError, match="26 curves, 24 can be told apart"):
        report.main([str(tmp_path)])
    assert not (tmp_path / "loss.png").exists()
    log = run / "log.jsonl"
    log.write_text(log.read_text().replace('"norm_type"', '"teacher": "out/rms", "norm_type"', 1))
    with pytest.raises(UserError, match=r"a run of distill\.py"):
        report.main([str(run)])


def test_unfinished_runs_are_left_out_and_named(tmp_path, capsys):
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed)
        write_run(tmp_path, "layer", seed, until=60 if seed == 9 else 100)
    report.main([str(tmp_path), "--baseline=rms"])
    assert (
        "layer, seed 9: not finished: last evaluation at step 60 of 100" in capsys.readouterr().out
    )
    assert rows_of(tmp_path)["val_loss", "layer"].seeds == [8, 10]


def test_one_seed_gives_curves_and_no_verdict(tmp_path):
    write_run(tmp_path, "rms", 8)
    write_run(tmp_path, "layer", 8)
    report.main([str(tmp_path), "--baseline=rms"])
    assert "No arm has two seeds" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "differences.png").exists()


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
    assert EQUAL_TIME.lower_is_better
    every_quarter = [0, 25, 50, 75, 100]
    for steps, has_rate in ((every_quarter, True), (every_quarter[::2], False)):
        points = [(100 * step, 1 + 4 * max(step, 1) ** -0.5) for step in steps]
        base.curve = np.array(points)
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
    (tmp_path / "layer-8" / "hellaswag.jsonl").write_text('{"item": 0}\n')
    with pytest.raises(UserError, match="damaged"):
        rows_of(tmp_path)


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
    assert row.verdict.direction == "better" and row.word == "no verdict"
    assert (row.direction, row.margin_verdict) == ("", "")
    assert "no verdict: 4 of 8 runs diverged" in row.sentence()
    with pytest.raises(
        ConfigError, match="usable runs are 'rms'; taper, seed 8: step 100: the loss"
    ):
        pair_by_seed(
            {"rms": {}}, "taper", ("taper, seed 8: step 100: the loss on rank 0 is not finite",)
        )


@pytest.mark.parametrize("metric", ["val_loss", "val_loss_full"])
def test_a_run_that_ends_with_a_loss_that_is_not_finite_has_diverged(
    sweep, capsys, undrawn, metric
):
    kind = "eval" if metric == "val_loss" else "val_full"
    for seed in (8, 9, 10):
        append(sweep / f"taper-{seed}", event=kind, step=100, **{metric: None})
        append(sweep / f"taper-{seed}", event="end", reason="done")
    report.main([str(sweep), "--baseline=rms"])
    assert "taper: no verdict: 3 of 8 runs diverged" in capsys.readouterr().out
    assert "| `taper` | 8 | 3 |" in (sweep / "report.md").read_text()


def test_divergence_under_other_settings_is_another_experiment(sweep, capsys, undrawn):
    """It takes no verdict and is in no table of these."""
    run = write_run(sweep, "taper", 99, learning_rate=1.0)
    append(run, event="end", reason="step 100: the loss on rank 0 is not finite")
    report.main([str(sweep), "--baseline=rms"])
    text = capsys.readouterr().out
    assert "taper: better" in text and "runs diverged" not in text
    assert "taper, seed 99: step 100: the loss on rank 0 is not finite" in text
    assert "## Stability" not in (sweep / "report.md").read_text()


def test_a_run_that_resumed_with_other_settings_is_left_out(sweep, tmp_path, capsys, undrawn):
    append(sweep / "taper-8", event="resume", step=50, changed=["learning_rate 0.01 -> 0.03"])
    append(
        sweep / "taper-9",
        event="resume",
        step=50,
        changed=["out_dir a -> b", "python 3.11 -> 3.12"],
    )
    for seed, change in (
        (10, "git abc -> def"),
        (11, "world_size 1 -> 2"),
        (12, "torch 2.11 -> 2.13"),
    ):
        append(sweep / f"taper-{seed}", event="resume", step=50, changed=[change])
    report.main([str(sweep), "--baseline=rms", f"--out={tmp_path / 'out'}"])
    text = capsys.readouterr().out
    left_out = "resumed with other settings, code or machine"
    assert f"taper, seed 8: {left_out} (learning_rate 0.01 -> 0.03)" in text
    assert f"taper, seed 10: {left_out} (git abc -> def)" in text
    assert f"taper, seed 11: {left_out} (world_size 1 -> 2)" in text
    assert f"taper, seed 12: {left_out} (torch 2.11 -> 2.13)" in text
    assert "taper, seed 9" not in text


def test_runs_of_two_experiments_are_refused(tmp_path):
    """Each seed's arms agree, but the seeds do not: no mean over them means anything."""
    for seed, rate in ((8, 1e-3), (9, 2e-3)):
        for norm_type in ("rms", "layer"):
            write_run(tmp_path, norm_type, seed, learning_rate=rate)
    with pytest.raises(UserError, match="seeds 9 and 8: learning_rate"):
        rows_of(tmp_path)


def test_means_are_of_the_runs_that_are_compared(tmp_path, undrawn):
    """A run that is not paired enters no table."""
    for seed in (8, 9, 10):
        write_run(tmp_path, "rms", seed)
        write_run(
            tmp_path, "layer", seed, **({"learning_rate": 1e-3, "extra": 5.0} if seed == 10 else {})
        )
    report.main([str(tmp_path), "--baseline=rms"])
    seeds = list(csv.DictReader((tmp_path / "seeds.csv").open()))
    assert {(row["arm"], row["seed"]) for row in seeds} == {
        (arm, seed) for arm in ("rms", "layer") for seed in "89"
    }


def test_a_run_without_hellaswag_costs_its_own_pair_only(sweep, tmp_path, capsys, undrawn):
    (sweep / "taper-8" / "hellaswag.jsonl").unlink()
    write_items(sweep / "layer-9", np.ones(5, bool))
    rows = rows_of(sweep)
    assert rows["hellaswag_acc", "taper"].seeds == list(range(9, 16))
    assert (
        9 not in rows["hellaswag_acc", "layer"].seeds and len(rows["val_loss", "taper"].seeds) == 8
    )
    report.main([str(sweep), "--baseline=rms", f"--out={tmp_path / 'out'}"])
    assert "hellaswag_acc of taper leaves out seed 8" in capsys.readouterr().out


def test_models_at_chance_and_speeds_on_a_cpu_get_no_verdict(tmp_path):
    for seed in SEEDS:
        for norm_type in ("rms", "layer"):
            faster = norm_type == "layer"
            run = write_run(
                tmp_path, norm_type, seed, speed=1000 + 500 * faster, start={"device": "cpu"}
            )
            write_items(run, np.arange(1000) < 230 + 10 * faster)
    rows = rows_of(tmp_path)
    by_chance = rows["hellaswag_acc", "layer"]
    assert by_chance.word == "not judged" and "chance" in by_chance.sentence()
    assert rows["tok_per_s", "layer"].word == "not judged"


@pytest.mark.parametrize("how", ["started", "resumed"])
def test_speeds_of_runs_side_by_side_get_no_verdict(tmp_path, how):
    """One such run is enough, and also one that was resumed so."""
    for seed in SEEDS:
        for norm_type in ("rms", "layer"):
            has_neighbours = norm_type == "layer" and seed == SEEDS[-1]
            jobs = 2 if has_neighbours and how == "started" else 1
            run = write_run(tmp_path, norm_type, seed, jobs=jobs)
            if has_neighbours and how == "resumed":
                resume = {"event": "resume", "step": 50, "changed": ["jobs 1 -> 2"]}
                with open(run / "log.jsonl", "a") as log:
                    log.write(json.dumps(resume) + "\n")
    rows = rows_of(tmp_path)
    assert rows["tok_per_s", "layer"].word == "not judged"
    assert "side by side" in rows["tok_per_s", "layer"].sentence()
    assert len(rows["val_loss", "layer"].seeds) == len(SEEDS)


@pytest.mark.parametrize(
    ("line", "field", "value", "message"),
    [
        (1, "config", 3, "log.jsonl:1: damaged: config is '3'"),
        (1, "versions", {}, "its start event is damaged: no version of torch"),
        (1, "tokens_per_step", "100", "tokens_per_step is '100'"),
        (2, "val_loss", "5", "log.jsonl:2: damaged: val_loss is '5'"),
        (3, "tok_per_s", None, ""),
        (3, "loss", ..., "log.jsonl:3: damaged: it has no loss"),
        (4, "step", 10.5, "log.jsonl:4: damaged: step is '10.5'"),
        (4, None, 7, "log.jsonl:4: damaged: no event"),
    ],
)
def test_a_damaged_event_is_named(tmp_path, line, field, value, message):
    run = write_run(tmp_path, "rms", 1)
    write_run(tmp_path, "layer", 1)
    lines = (run / "log.jsonl").read_text().splitlines()
    event = json.loads(lines[line - 1])
    if field is None:
        event = value
    elif value is ...:
        del event[field]
    else:
        event[field] = value
    lines[line - 1] = json.dumps(event)
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    words = [str(tmp_path), "--baseline=rms", "--pictures=False", f"--out={tmp_path / 'out'}"]
    if not message:
        report.main(words)
        return
    with pytest.raises(UserError) as error:
        report.main(words)
    assert message in str(error.value) and "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], None),
        (["--baseline=rms"], "name one run folder"),
        (["x", "--base=rms"], "--baseline=ARM"),
        (["x", "--delta.val_loss=0.1"], "needs a comparison"),
        (["x", "--baseline=rms", "--delta.val_loss=-1"], "above 0"),
        (["x", "--baseline=rms", "--delta.speed=1"], "val_loss, train_loss"),
        (["nowhere"], "cannot be read"),
    ],
)
def test_bad_words(argv, error, capsys):
    if error is None:
        report.main(argv)
        assert "--published" in capsys.readouterr().out
    else:
        with pytest.raises(UserError, match=error):
            report.main(argv)


def test_bad_folders(tmp_path):
    with pytest.raises(UserError, match="no run folder in it"):
        report.main([str(tmp_path), "--baseline=rms"])
    run = write_run(tmp_path, "rms", 8)
    with pytest.raises(ConfigError, match="the arms with usable runs are 'rms'"):
        report.main([str(tmp_path), "--baseline=layer"])
    with pytest.raises(UserError, match="both are rms, seed 8"):
        report.main([str(run), str(run), "--baseline=rms", f"--out={tmp_path}"])
    with pytest.raises(ConfigError, match="say where it goes, --out=DIR"):
        report.main([str(run), str(write_run(tmp_path, "rms", 9)), "--baseline=rms"])
    (run / "log.jsonl").write_text('{"event": "start"}\n{"event\n{}\n')
    with pytest.raises(UserError, match=r"log\.jsonl:2: no JSON"):
        report.main([str(run)])
    (run / "log.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="start event"):
        report.main([str(run)])


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


def test_the_whole_split_is_judged_conditional_on_its_text(documents, undrawn):
    """Weighted by tokens; the range is that of the mean difference without each document."""
    row = rows_of(documents)["val_loss_full", "layer"]
    assert row.estimate.mean == pytest.approx(0.1 * 0.1 + 0.9 * 0.01)
    assert (row.delta, row.delta_kind) == (0.02, "declared")
    assert row.word == "worse, within the margin"
    without_last = (100 * 0.1 + 200 * 0.01) / 300
    assert (row.text.low, row.text.high) == pytest.approx((0.01, without_last))
    assert "conditional on this text: +0.0100 … +0.0400 when one of its 3" in row.sentence()
    report.main([str(documents), "--baseline=rms"])
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
    append(documents / "layer-9", event="val_full", step=50, val_loss_full=9.0)  # not the last step
    assert rows_of(documents)["val_loss_full", "layer"].text is not None
    whole_split(documents / "layer-8", [1.0, 1.0], [300, 700])
    row = rows_of(documents, val_loss=0.5)["val_loss_full", "layer"]
    assert row.text is None and "conditional" not in row.sentence()
    assert (row.delta, row.delta_kind) == (0.5, "post hoc")
    whole_split(documents / "layer-8", [1.0], [1000])
    whole_split(documents / "layer-10", [1.0], [1000], val_loss_full=None)
    assert 10 not in rows_of(documents)["val_loss_full", "layer"].seeds
    whole_split(documents / "layer-8", [1.0], [1000], document_nats=[1.0, 2.0])
    with pytest.raises(UserError, match="the documents of its val_full event are damaged"):
        rows_of(documents)


# -------------------------------------------------------------------------- plans, power, stability


def planned(folder: Path, count: int, seeds: range = SEEDS) -> Path:
    for seed in seeds:
        for norm_type, extra in (("rms", 0.0), ("layer", 0.5)):
            write_run(folder, norm_type, seed, extra, planned_seeds=count, delta_val_loss=0.01)
    return folder


def test_before_the_planned_seeds_there_is_no_verdict(tmp_path, capsys, undrawn):
    """However clear the difference is."""
    planned(tmp_path, 16)
    row = rows_of(tmp_path)["val_loss", "layer"]
    assert row.verdict.direction == "worse" and row.verdict.p_holm < 1e-6
    assert (row.word, row.direction, row.margin_verdict) == ("no verdict", "", "")
    report.main([str(tmp_path), "--baseline=rms"])
    assert "layer: no verdict: 8 of 16 planned seeds; so far +0.4997" in capsys.readouterr().out


def test_one_planned_seed_is_said_to_be_none_too(tmp_path, capsys, undrawn):
    """And an arm of which all runs diverged has its sentence, without a row."""
    planned(tmp_path, 16, SEEDS[:1])
    gone = write_run(tmp_path, "taper", 8, planned_seeds=16, delta_val_loss=0.01)
    append(gone, event="end", reason="step 9: the loss is not finite")
    report.main([str(tmp_path), "--baseline=rms"])
    said = capsys.readouterr().out
    assert "- layer: no verdict: 1 of 16 planned seeds.\n" in said
    assert "- taper: no verdict: 1 of 1 runs diverged" in said
    assert "| `taper` | 1 | 1 | n/a |" in (tmp_path / "report.md").read_text()


def test_only_the_planned_seeds_are_judged(tmp_path, capsys, undrawn):
    """The first of them, so that nobody can stop where the verdict pleases."""
    planned(tmp_path, 6)
    row = rows_of(tmp_path)["val_loss", "layer"]
    assert row.seeds == [8, 9, 10, 11, 12, 13] and row.word == "worse, beyond the margin"
    report.main([str(tmp_path), "--baseline=rms"])
    assert "layer: 6 seeds were planned, so seed 14, 15 is not judged" in capsys.readouterr().out
    table = list(csv.DictReader((tmp_path / "seeds.csv").open()))
    assert {line["seed"] for line in table} == {"8", "9", "10", "11", "12", "13"}


def test_the_baselines_divergence_leaves_no_verdict(sweep):
    append(sweep / "rms-8", event="end", reason="step 100: the loss on rank 0 is not finite")
    row = rows_of(sweep)["val_loss", "layer"]
    assert row.word == "no verdict" and "of rms, 1 of 8 runs diverged" in row.sentence()


def test_divergence_is_a_result(sweep, capsys, undrawn):
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
    report.main([str(sweep), "--baseline=rms"])
    text = (sweep / "report.md").read_text()
    assert "taper: no verdict: 7 of 8 runs diverged" in capsys.readouterr().out
    assert "| `layer` | 8 | 0 | 50 % | 3.0 | 45.0 |" in text
    assert "| `rms` | 8 | 0 | 47 % | 3.0 | 7.0 |" in text
    assert "| `taper` | 8 | 7 | n/a | n/a | n/a |" in text


def test_a_report_says_what_its_seeds_can_show(sweep, capsys, undrawn):
    report.main([str(sweep), "--baseline=rms"])
    said = capsys.readouterr().out
    row = rows_of(sweep)["val_loss", "coupled"]
    assert "- val_loss: a difference of 0.00" in said
    assert 'the power to show "within" the margin of 0.0100 at a true difference of zero is' in said
    level = ALPHA / 3
    assert row.power_within == pytest.approx(power_of_tost(0.0, 0.01, row.sd, 8, level))
    assert row.detectable == pytest.approx(detectable_effect(row.sd, 8, level))
    assert rows_of(sweep)["train_loss", "coupled"].power_within is None


def test_what_is_not_judged_goes_to_the_appendix(sweep, capsys, undrawn):
    report.main([str(sweep), "--baseline=rms"])
    said = capsys.readouterr().out
    names = "hellaswag_acc, hellaswag_acc_norm, val_loss_equal_time"
    assert f"Not judged (appendix of report.md): {names}\n" in said
    assert "not judged: " not in said
    text, appendix = (sweep / "report.md").read_text().split("## Appendix: not judged")
    assert "val_loss_equal_time |" not in text and "| val_loss_equal_time |" in appendix
    assert "**not judged**" not in text and "tok_per_s" not in appendix.split("### Equal tokens")[0]


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
    # the rate is that of a whole run, whose decay is in it: a higher rate gives fewer tokens
    twice = dataclasses.replace(row, rate=2 * row.rate)
    assert 0 < twice.tokens(row.estimate.mean) < row.tokens(row.estimate.mean)


@pytest.mark.parametrize(
    ("arm", "short"),
    [
        ("rms", "rms"),
        ("coupled --coupled_span=2", "coupled span=2"),
        ("taper --taper_final=True --norm_eps=1e-06", "taper final norm_eps=1e-06"),
        ("coupled --norm_plan='Rs Rs R'", "coupled norm_plan=Rs Rs R"),
        (f"coupled --norm_plan='Rs {'RR ' * 15}R'", "coupled norm_plan=Rs 15xRR R"),
        ("coupled --coupled_alpha=1.0,1.1,1.1,1.1", "coupled alpha=1.0,3x1.1"),
        ("out/it's", "out/it's"),
    ],
)
def test_short_names_of_arms(arm, short):
    assert short_name(arm) == short


def test_long_names_are_cut_and_stay_different(tmp_path, undrawn):
    plans = [" ".join(["Rs", "RR"] * 8 + [last, "R"]) for last in ("RR", "Rs")]
    for seed in SEEDS:
        write_run(tmp_path, "rms", seed)
        for plan in plans:
            write_run(tmp_path, "coupled", seed, norm_plan=plan)
    arms = [f"coupled --norm_plan='{plan}'" for plan in plans]
    shorts = [short_name(arm) for arm in arms]
    assert len({*shorts}) == 2 and all(len(short) == 40 for short in shorts)
    report.main([str(tmp_path), "--baseline=rms"])
    text = (tmp_path / "report.md").read_text()
    for arm, short in zip(arms, shorts, strict=True):
        assert f"| `{short}` | `{arm}` |" in text and f"- {short}: no difference" in text
        assert text.count(arm) == 1
        assert arm in (tmp_path / "report.csv").read_text()


# ------------------------------------------------------------------------------ the published table


def test_published_table_supports_no_gain():
    """Throughput t = 1.43, p = 0.17, -0.27 % ... +1.35 %; equal losses are not shown within 0.001
    (TOST p = 0.074).
    """
    words = [sys.executable, "report.py", "--published"]
    job = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(job.stdout.splitlines()[-1])
    speed = found["train_throughput"]
    assert (round(speed["t"], 2), round(speed["p"], 2), speed["verdict"]) == (
        1.43,
        0.17,
        "no difference shown",
    )
    assert [round(100 * bound, 2) for bound in speed["ci_relative"]] == [-0.27, 1.35]
    assert (
        round(found["train_loss"]["p_tost"], 3) == 0.074
        and found["train_loss"]["verdict"] == "no difference shown, margin open"
    )
    assert found["hellaswag"]["p"] < 0.05 < found["hellaswag"]["p_holm"]  # and corrected p decides
    assert found["hellaswag"]["verdict"] == "no difference shown"


def test_published_verdicts_come_from_the_file(tmp_path, capsys):
    text = (ROOT / "repro" / "coupled_table1.csv").read_text()
    changed = tmp_path / "table.csv"
    faster = text.replace("443.0,3.3,445.4", "443.0,3.3,455.4")
    changed.write_text(faster.replace("3.096,0.0012,3.096,0.0014", "3.096,0.0002,3.096,0.0002"))
    report.main([f"--published={changed}"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        found["train_throughput"]["verdict"] == "better"
        and found["train_loss"]["verdict"] == "no difference shown, within the margin"
    )
    for wrong in ("many", "nan", "0.0"):
        changed.write_text(text.replace("443.0", wrong))
        with pytest.raises(UserError, match="not a table"):
            report.main([f"--published={changed}"])
    with pytest.raises(UserError, match="cannot be read"):
        report.main([f"--published={tmp_path / 'none.csv'}"])
    with pytest.raises(ConfigError, match="stands alone"):
        report.main(["--published", "--baseline=rms"])


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
    assert not list(tmp_path.glob("*.png"))


def test_an_archive_is_its_folders(sweep, tmp_path):
    """Added one by one, a run twice: the same report; the same bytes in any order."""
    folders = sorted(run for run in sweep.iterdir() if run.is_dir())
    for name, order in (("a", folders), ("b", [*reversed(folders), folders[3]])):
        for run in order:
            archive.add(tmp_path / name / "runs.tar.xz", run)
    first, second = (tmp_path / name / "runs.tar.xz" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    (tmp_path / "c").mkdir()
    for source, out in ((first, "c"), (sweep, "d")):
        report.main([str(source), "--baseline=rms", f"--out={tmp_path / out}", "--pictures=False"])
    assert (tmp_path / "c/report.csv").read_text() == (tmp_path / "d/report.csv").read_text()


def test_two_processes_keep_their_runs_in_one_archive(sweep, tmp_path):
    """And runs of long names, as arms with long settings have."""
    path = tmp_path / "runs.tar.xz"
    for name in "abcdefgh":
        (tmp_path / (name * 100)).mkdir()
        (tmp_path / (name * 100) / "log.jsonl").write_text((sweep / "rms-8/log.jsonl").read_text())
    words = [
        [
            sys.executable,
            "-m",
            "evidence.archive",
            path,
            *(tmp_path / (name * 100) for name in names),
        ]
        for names in ("abcd", "efgh")
    ]
    for job in [subprocess.Popen(command, cwd=ROOT) for command in words]:
        assert job.wait() == 0
    assert {name[0] for name in archive.read(path)} == set("abcdefgh")


def test_the_names_in_an_archive_and_what_is_none(sweep, tmp_path, capsys):
    path = tmp_path / "kept/runs.tar.xz"
    archive.main([str(path)])
    archive.main([str(path), str(sweep / "rms-8"), str(sweep / "rms-9")])
    archive.main([str(path)])
    assert capsys.readouterr().out == "rms-8\nrms-9\n"
    archive.main([str(path), "--remove", "rms-9"])
    assert [run.name for run in find_runs([path.parent])] == [
        f"{path}: rms-8"
    ]  # found in its folder too
    with pytest.raises(UserError, match=r"rms-8 and .*rms-8: both are rms, seed 8"):
        by_arm(find_runs([path, sweep / "rms-8"]))
    with pytest.raises(UserError, match="no run rms-9 in it"):
        archive.main([str(path), "--remove", "rms-9"])
    with pytest.raises(UserError, match=r"no log\.jsonl there: name a run folder"):
        archive.main([str(path), str(tmp_path)])
    with pytest.raises(ConfigError, match="needs a name that ends in"):
        archive.main([str(tmp_path / "runs.zip")])
    whole = path.read_bytes()
    for torn in (whole[: len(whole) // 2], b"", b"no archive"):
        path.write_bytes(torn)
        with pytest.raises(UserError, match="torn, or no archive of runs"):
            find_runs([path])
    with pytest.raises(UserError, match="no such archive"):
        find_runs([tmp_path / "none.tar.xz"])
    archive.write(path, {"../outside/log.jsonl": b"{}"})
    with pytest.raises(UserError, match="no archive of ours"):
        find_runs([path])
