"""The numbers of a study computed anew from its logs: json, numpy, statsmodels, not our code."""

import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

Logs = dict[tuple[str, str], dict[str, str]]  # (stage, shape) -> name of run folder -> its log


def check(plan: Path, scale: str, kept: Path, logs: Logs) -> int:
    """Compare what a study concluded with its logs. Returns how many numbers were compared."""
    rules = tomllib.loads(plan.read_text())
    rates = json.loads((kept / "rates.json").read_text())
    count = 0
    for shape, keys in rules["scales"][scale]["shapes"].items():
        for arm, words in rules["arms"].items():
            found = rates["shapes"][shape][arm]
            losses = losses_of(logs["rates", shape], folder_name(words, keys["n_layer"]))
            count += check_rate(found, losses, *rules["rates"]["seeds"])
    if (kept / "verdict.json").exists():
        count += check_verdicts(rules, rules["scales"][scale]["shapes"], rates, kept, logs)
    return count


def folder_name(words: str, n_layer: int) -> str:
    """Name the runs of an arm, as sweep.sh does."""
    words = words.replace("{block_0}", "Rs" + " RR" * (n_layer - 1) + " R")
    return words.replace("'", "").replace(" --", "+").replace(" ", "_")


def final(log: str) -> float:
    """Return val_loss_full of a log; infinite if it is not there."""
    events = [json.loads(line) for line in log.splitlines()]
    found = [event["val_loss_full"] for event in events if event["event"] == "val_full"]
    return found[-1] if found else math.inf


def losses_of(logs: dict[str, str], name: str) -> dict[float, dict[int, float]]:
    """Return learning rate -> seed -> loss of one arm."""
    found: dict[float, dict[int, float]] = {}
    for folder, log in logs.items():
        match = re.fullmatch(re.escape(name) + r"\+learning_rate=([\d.e-]+)-(\d+)", folder)
        if match:
            found.setdefault(float(match[1]), {})[int(match[2])] = final(log)
    return found


def check_rate(found: dict, losses: dict[float, dict[int, float]], first: int, second: int) -> int:
    """Compare the best rate, its loss and the chosen rate of one arm in one shape."""
    both = [seeds[second] - seeds[first] for seeds in losses.values() if second in seeds]
    shift = float(np.mean(both))
    mean = {}
    for rate, seeds in losses.items():
        values = [seeds[first]] + ([seeds[second] - shift] if second in seeds else [])
        mean[rate] = float(np.mean(values))
    best = min(sorted(mean), key=mean.get)
    assert best == found["best"]
    assert f"{mean[best]:.4f}" == f"{found['loss']:.4f}"
    assert f"{vertex(mean, best):.1e}" == f"{found['rate']:.1e}"
    return 3


def vertex(mean: dict[float, float], best: float) -> float:
    """Return the vertex of the parabola through three points, by divided differences."""
    order = sorted(mean)
    place = order.index(best)
    near = order[max(0, place - 1) : place + 2]
    if len(near) < 3 or not all(math.isfinite(mean[rate]) for rate in near):
        return best
    x = [math.log2(rate) for rate in near]
    y = [mean[rate] for rate in near]
    left = (y[1] - y[0]) / (x[1] - x[0])
    right = (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    lowest = (x[0] + x[1]) / 2 - left / (2 * bend)
    return 2 ** min(max(lowest, x[1] - 0.5), x[1] + 0.5)


def check_verdicts(rules: dict, shapes: dict, rates: dict, kept: Path, logs: Logs) -> int:
    """Compare differences, intervals and the tests of non-inferiority."""
    verdict = json.loads((kept / "verdict.json").read_text())
    count = 0
    p_values = {}
    for arm, found in verdict["arms"].items():
        p_values[arm] = 0.0
        for shape, numbers in found["shapes"].items():
            here, base = (
                np.array(
                    [
                        loss_at(logs, rules["arms"][name], shape, shapes[shape], rates, name, seed)
                        for seed in rules["verdict"]["seeds"]
                    ]
                )
                for name in (arm, rules["baseline"])
            )
            described = DescrStatsW(here - base)
            low, high = described.tconfint_mean(0.05)
            for name, value in (("difference", described.mean), ("low", low), ("high", high)):
                assert f"{numbers[name]:.4f}" == f"{value:.4f}"
                count += 1
            # The upper one of TOST's two tests is that of non-inferiority.
            _, _, (_, upper, _) = described.ttost_mean(-1e3, verdict["margin"])
            p_values[arm] = max(p_values[arm], upper)
    adjusted = multipletests([*p_values.values()], method="holm")[1]
    for arm, p in zip(p_values, adjusted, strict=True):
        assert math.isclose(verdict["arms"][arm]["p_below_margin"], p, rel_tol=1e-6, abs_tol=1e-15)
        assert (verdict["arms"][arm]["margin"] == "within") == (p < rules["verdict"]["level"])
        count += 2
    return count


def loss_at(
    logs: Logs, words: str, shape: str, keys: dict, rates: dict, arm: str, seed: int
) -> float:
    """Return the loss of a verdict run, which must have the selected rate."""
    start = folder_name(words, keys["n_layer"]) + "+learning_rate="
    names = [
        name
        for name in logs["verdict", shape]
        if name.startswith(start) and name.endswith(f"-{seed}")
    ]
    assert len(names) == 1
    log = logs["verdict", shape][names[0]]
    config = json.loads(log.splitlines()[0])["config"]
    assert config["learning_rate"] == rates["shapes"][shape][arm]["rate"]
    return final(log)
