"""The numbers of the study computed anew from its logs: json, numpy, statsmodels, not our code."""

import functools
import json
import math
import re
import tarfile
import tomllib
from pathlib import Path

import numpy as np
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cpu"
PLAN = tomllib.loads((RESULTS.parents[1] / "repro" / "which_norm.toml").read_text())
SHAPES = PLAN["scales"]["cpu"]["shapes"]
ARMS = PLAN["arms"] | {
    "one-rms": "coupled --coupled_span=0 --coupled_calibrate=10",
    "deepnorm-common": "deepnorm --norm_recipe=common",
}
JUDGED = range(200, 216)
LEADS = range(720, 736)
# column of the card -> archive -> the number of tests of its family, and seeds
COLUMNS = {
    "wide, 2 M tokens": {
        "which_norm/verdict-W": (8, JUDGED),
        "layer_coupled/W": (4, JUDGED),
        "leads/verdict-W": (3, LEADS),
    },
    "deep, 2 M tokens": {
        "which_norm/verdict-D": (8, JUDGED),
        "layer_coupled/D": (4, JUDGED),
        "leads/verdict-D": (3, LEADS),
    },
    "wide, 8 M tokens": {"which_norm/tokens-W": (0, range(400, 404))},
    "wide, Muon": {"which_norm/muon-W": (0, range(500, 504))},
}

# The study that is not on the card: its condition's name -> archives, tests of the family, seeds
OTHER = {"wide, the rate of rms": (("span_again/runs", "span_again/rms"), 5, range(600, 608))}


@functools.cache
def runs(archive: str) -> list[dict]:
    """Return settings, folder's name and final loss of an archive's runs; none without one."""
    found = []
    if not (RESULTS / f"{archive}.tar.xz").exists():
        return found
    with tarfile.open(RESULTS / f"{archive}.tar.xz") as file:
        for member in file:
            if member.name.endswith("/log.jsonl"):
                events = [json.loads(line) for line in file.extractfile(member)]
                # Runs without val_full events evaluated on the whole split (results/cpu/init_std).
                kind, key = ("val_full", "val_loss_full")
                if not events[0]["config"].get("full_val"):
                    kind, key = ("eval", "val_loss")
                last = [event[key] for event in events if event["event"] == kind]
                loss = last[-1] if last else None
                own = {
                    "name": member.name.split("/")[0],
                    "loss": math.inf if loss is None else loss,
                }
                found.append(events[0] | events[0]["config"] | own)
    return found


def of_arm(archive: str, arm: str, **keys: float) -> list[dict]:
    """Return the runs of an arm that have these settings, by the names of their folders."""
    found = []
    for run in runs(archive):
        block_0 = "Rs" + " RR" * (run["n_layer"] - 1) + " R"
        words = ARMS[arm].replace("{block_0}", block_0).replace("'", "")
        start = words.replace(" --", "+").replace(" ", "_")
        more = "max_iters|warmup_iters|optimizer|learning_rate|init_std|planned_seeds"
        if re.fullmatch(rf"{re.escape(start)}(\+({more})=[^+]+)+-\d+", run["name"]) and all(
            run[key] == value for key, value in keys.items()
        ):
            found.append(run)
    return found


def losses(archive: str, arm: str, **keys: float) -> list[float]:
    """Return the final losses of these runs."""
    return [run["loss"] for run in of_arm(archive, arm, **keys)]


def paired(archive: str, arm: str, seeds: range) -> np.ndarray:
    """Return an arm's losses minus those of rms, over the seeds that both have."""
    ours, base = (
        {run["seed"]: run["loss"] for run in of_arm(archive, name) if run["seed"] in seeds}
        for name in (arm, "rms")
    )
    return np.array([ours[seed] - base[seed] for seed in seeds if seed in ours and seed in base])


def slope(shape: str) -> float:
    """Return the nats that e times as many tokens buy rms."""
    short, long = (
        np.mean(losses(f"which_norm/margin-{shape}", "rms", max_iters=n)) for n in (500, 2000)
    )
    return (short - long) / math.log(4)


def margin(shape: str) -> float:
    """Return what 2 % of the tokens buy, nats."""
    return slope(shape) * math.log(1.02)


def adjusted(p_values: dict, tests: int) -> dict:
    """Correct p values by Holm for this number of tests, of which some may be missing."""
    padded = [*p_values.values(), *[1.0] * (tests - len(p_values))]
    return dict(zip(p_values, multipletests(padded, method="holm")[1], strict=False))


@functools.cache
def rows() -> dict[tuple[str, str], list[str]]:
    """Return column and arm -> seeds, mean and interval, SD, p, p Holm, p TOST, verdict."""
    found: dict[tuple[str, str], list[str]] = {}
    families: dict[int, dict[tuple[str, str], DescrStatsW]] = {}
    for column, archives in COLUMNS.items():
        for archive, (tests, seeds) in archives.items():
            for arm in ARMS:
                values = paired(archive, arm, seeds)
                if arm != "rms" and 0 < len(values) < len(seeds):
                    found[column, arm] = [str(len(values)), "begun", *[""] * 4, "not judged"]
                elif arm != "rms" and len(values):
                    described = DescrStatsW(values)
                    low, high = described.tconfint_mean(0.05)
                    interval = f"{described.mean:+.4f} ({low:+.4f} to {high:+.4f})"
                    sd = f"{np.std(values, ddof=1):.4f}"
                    found[column, arm] = [str(len(values)), interval, sd, "", "", "", "not judged"]
                    if tests:
                        families.setdefault(tests, {})[column, arm] = described
    for tests, its in families.items():
        units = {key: margin("W" if "wide" in key[0] else "D") for key in its}
        p = {key: described.ttest_mean(0)[1] for key, described in its.items()}
        tost = {
            key: described.ttost_mean(-units[key], units[key])[0] for key, described in its.items()
        }
        p_holm, p_tost = adjusted(p, tests), adjusted(tost, tests)
        for key, described in its.items():
            side = "better" if described.mean < 0 else "worse"
            word = side if p_holm[key] < 0.05 else "no difference shown"
            found[key][3:6] = [f"{value[key]:.2g}" for value in (p, p_holm, p_tost)]
            found[key][6] = word if p_tost[key] >= 0.05 else f"{word}, within the margin"
    return found


def words_of(run: dict) -> str:
    """Return an arm's words from the name of its folder, without its learning rate."""
    name = re.sub(r"\+learning_rate=[^+]+(?=-\d+$)", "", run["name"])
    return name.rpartition("-")[0].replace("+", " --")


def by_words(archives: tuple[str, ...], seeds: range) -> dict[str, dict[int, dict]]:
    """Return arm -> seed -> run, of the archives that are there."""
    found: dict[str, dict[int, dict]] = {}
    for archive in archives:
        for run in runs(archive):
            if run["seed"] in seeds:
                found.setdefault(words_of(run), {})[run["seed"]] = run
    return found


def other_rows() -> dict[tuple[str, str], tuple[int, str, str]]:
    """Return condition and arm of OTHER -> pairs, mean, and the verdict of arms with all seeds."""
    found: dict[tuple[str, str], tuple[int, str, str]] = {}
    names = {words: name for name, words in ARMS.items()}
    for condition, (archives, tests, seeds) in OTHER.items():
        p_values: dict[tuple[str, str], float] = {}
        arms = by_words(archives, seeds)
        base = arms.pop("rms", {})
        for words, its in arms.items():
            arm = names.get(words, words)
            pairs = [its[seed]["loss"] - base[seed]["loss"] for seed in seeds if seed in its]
            found[condition, arm] = (len(pairs), f"{np.mean(pairs):+.4f}", "")
            if len(pairs) == len(seeds):
                p = DescrStatsW(pairs).ttest_mean(0)[1]
                p_values[condition, arm] = p
        for key, p in adjusted(p_values, tests).items():
            pairs, mean, _ = found[key]
            side = "better" if mean.startswith("-") else "worse"
            found[key] = (pairs, mean, side if p < 0.05 else "no difference shown")
    return found


def chosen_rate(archive: str, arm: str) -> float:
    """Return the vertex of the parabola through the best rate of an arm and its neighbours.

    In log2 of the rate, to two digits; of means over the seeds, which all rates have.
    """
    losses: dict[float, list[float]] = {}
    for run in runs(archive):
        if words_of(run) == arm:
            losses.setdefault(run["learning_rate"], []).append(run["loss"])
    rates = sorted(losses)
    means = np.array([np.mean(losses[rate]) for rate in rates])
    best = int(means.argmin())
    around = slice(best - 1, best + 2)
    curve = np.polyfit(np.log2(rates[around]), means[around], 2)
    return float(f"{2 ** (-curve[1] / (2 * curve[0])):.1e}")


def both_shapes(bound: float) -> dict[str, float]:
    """Return arm -> p of "below `bound` in W and in D", Holm over four arms."""
    p_values = {}
    for arm in PLAN["arms"]:
        values = [paired(f"which_norm/verdict-{shape}", arm, JUDGED) for shape in SHAPES]
        if arm != "rms" and len(values[0]):
            tests = [DescrStatsW(value).ttest_mean(bound, "smaller")[1] for value in values]
            p_values[arm] = max(tests)
    return adjusted(p_values, 4)


def muon_for_adamw() -> np.ndarray:
    """Return the loss of rms with AdamW minus that with Muon, by seed."""
    adamw, muon = (
        [losses("muon_rate/step", "rms", optimizer=name, seed=seed)[0] for seed in range(500, 504)]
        for name in ("adamw", "muon")
    )
    return np.array(adamw) - np.array(muon)


def worth() -> dict[str, float]:
    """Return what settings are worth to rms in W, nats."""
    by_std = {
        std: min(run["loss"] for run in runs("init_std/W") if run["init_std"] == std)
        for std in (0.02, 0.08)
    }
    here, half = (
        np.mean(losses("which_norm/check-W", "rms", learning_rate=rate, init_std=0.08))
        for rate in (0.0044, 0.0022)
    )
    one_rms = paired("leads/verdict-W", "one-rms", LEADS)
    return {
        "initial weights: std 0.08 instead of 0.02": by_std[0.02] - by_std[0.08],
        "optimiser: Muon instead of AdamW": muon_for_adamw().mean(),
        "learning rate: 0.0044 instead of 0.0022": half - here,
        "norm: one-RMS CoupledNorm instead of RMSNorm": -one_rms.mean(),
    }
