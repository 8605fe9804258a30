"""The numbers of a study computed anew from its logs: json, numpy, statsmodels, not our code."""

import functools
import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import DescrStatsW

NO_DIFFERENCE = "not shown better in both shapes, nor worse in both"
MARGIN_WORDS = {
    "below": "a deficit beyond the margin is ruled out",
    "above": "the deficit is beyond the margin",
    "": "a deficit beyond the margin is possible",
}
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


@functools.cache
def config_of(log: str) -> dict:
    """Return the settings of a log."""
    return json.loads(log.splitlines()[0])["config"]


@functools.cache
def final(log: str) -> float:
    """Return val_loss_full of a log; infinite if it is not there."""
    events = [json.loads(line) for line in log.splitlines()]
    found = [event["val_loss_full"] for event in events if event["event"] == "val_full"]
    return found[-1] if found and found[-1] is not None else math.inf


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
    mean = mean_by_rate(losses, first, second)
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
    assert config_of(log)["learning_rate"] == rates["shapes"][shape][arm]["rate"]
    return final(log)


# ---------------------------------------------------------------------- the card, as it is printed


class Rederived:
    """What a finished study's card must say, from plan and logs alone.

    Args:
        plan: file with the plan.
        scale: of the plan.
        logs: of all stages.
        moved: arm -> bytes that its norms move, those that the plan's rule compares.
    """

    def __init__(self, plan: Path, scale: str, logs: Logs, moved: dict[str, float]):
        self.rules = tomllib.loads(plan.read_text())
        self.shapes = self.rules["scales"][scale]["shapes"]
        for stage, own in self.rules["scales"][scale].get("rules", {}).items():
            self.rules[stage].update(own)
        self.logs = logs
        self.moved = moved
        self.baseline = self.rules["baseline"]
        first, second = self.rules["rates"]["seeds"]
        self.curves = {}
        for shape, keys in self.shapes.items():
            for arm, words in self.rules["arms"].items():
                name = folder_name(words, keys["n_layer"])
                self.curves[arm, shape] = mean_by_rate(
                    losses_of(logs["rates", shape], name), first, second
                )

    def runs(self, stage: str, shape: str, arm: str) -> list[dict]:
        """Return config and loss of the runs of an arm."""
        name = re.escape(folder_name(self.rules["arms"][arm], self.shapes[shape]["n_layer"]))
        more = "max_iters|warmup_iters|optimizer|learning_rate|init_std|planned_seeds"
        pattern = rf"{name}(\+({more})=[^+]+)+-\d+"
        found = []
        for folder, log in self.logs.get((stage, shape), {}).items():
            if re.fullmatch(pattern, folder):
                found.append(config_of(log) | {"loss": final(log)})
        return found

    def chosen(self, arm: str, shape: str) -> float:
        """Return the chosen rate."""
        curve = self.curves[arm, shape]
        return float(f"{vertex(curve, min(sorted(curve), key=curve.get)):.1e}")

    def by_length(self, shape: str) -> dict[int, list[float]]:
        """Return steps -> losses of stage `margin`."""
        found: dict[int, list[float]] = {}
        for run in self.runs("margin", shape, self.baseline):
            found.setdefault(run["max_iters"], []).append(run["loss"])
        return found

    def slope(self, shape: str) -> float:
        """Return the nats that e times as many tokens buy."""
        by_length = self.by_length(shape)
        short, long = min(by_length), max(by_length)
        fall = sum(by_length[short]) / len(by_length[short])
        fall -= sum(by_length[long]) / len(by_length[long])
        return fall / (math.log(long) - math.log(short))

    @functools.cached_property
    def margin(self) -> float:
        """The margin in nats."""
        slopes = [self.slope(shape) for shape in self.shapes]
        return math.log(1 + self.rules["margin"]["share"]) * sum(slopes) / len(slopes)

    def differences(self, stage: str, shape: str, arm: str) -> DescrStatsW:
        """Return the differences from the baseline, by seed, over the seeds that are judged."""
        seeds = self.rules[stage]["seeds"]
        values = []
        for name in (arm, self.baseline):
            losses = {run["seed"]: run["loss"] for run in self.runs(stage, shape, name)}
            values.append(np.array([losses[seed] for seed in seeds]))
        return DescrStatsW(values[0] - values[1])

    def at_best(self, arm: str, shape: str) -> dict[int, float]:
        """Return seed -> loss of the screening at an arm's best rate."""
        name = folder_name(self.rules["arms"][arm], self.shapes[shape]["n_layer"])
        curve = self.curves[arm, shape]
        return losses_of(self.logs["rates", shape], name)[min(sorted(curve), key=curve.get)]

    def ranking(self) -> list[str]:
        """Return the arms but the baseline by their mean rank in the screening."""
        others = [arm for arm in self.rules["arms"] if arm != self.baseline]
        means = {}
        for shape in self.shapes:
            for arm in others:
                at_best = self.at_best(arm, shape)
                means[arm, shape] = sum(at_best.values()) / len(at_best)
        ranks = dict.fromkeys(others, 0)
        for shape in self.shapes:
            for rank, arm in enumerate(sorted(others, key=lambda arm: means[arm, shape])):
                ranks[arm] += rank
        first = next(iter(self.shapes))
        return sorted(others, key=lambda arm: (ranks[arm], means[arm, first]))

    def deviation(self, shape: str) -> float:
        """Return the SD of a paired difference that the plan takes for its power."""
        first, second = self.rules["rates"]["seeds"]
        pairs = []
        for words in self.rules["arms"].values():
            name = folder_name(words, self.shapes[shape]["n_layer"])
            for seeds in losses_of(self.logs["rates", shape], name).values():
                if second in seeds and math.isfinite(seeds[first] + seeds[second]):
                    pairs.append((seeds[first] - seeds[second]) ** 2 / 2)
        within = [np.var(losses, ddof=1) for losses in self.by_length(shape).values()]
        return math.sqrt(2 * max(sum(pairs) / len(pairs), sum(within) / len(within)))

    @functools.cached_property
    def judged(self) -> list[str]:
        """Return the arms that are judged: as many of the ranking as have the power."""
        rules = self.rules["verdict"]
        counts = range(1, rules["arms"] + 1)
        enough = [arms for arms in counts if self.power(arms) >= rules["power"]]
        return self.ranking()[: max(enough, default=0)]

    def power(self, arms: int, arm: str = "") -> float:
        """Return the chance to show that an arm like the baseline is non-inferior in all shapes.

        With the SDs that the plan takes, or with those of the verdict runs of `arm`.
        """
        rules = self.rules["verdict"]
        chance = 1.0
        for shape in self.shapes:
            spread = self.deviation(shape)
            if arm:
                spread = (
                    self.differences("verdict", shape, arm).std_mean * len(rules["seeds"]) ** 0.5
                )
            # A true difference of zero against a bound at the margin, one-sided.
            effect = self.margin / spread
            chance *= TTestPower().power(
                effect, len(rules["seeds"]), rules["level"] / arms, alternative="larger"
            )
        return chance

    def adjusted(self, bound: float, side: str) -> dict[str, float]:
        """Return arm -> p that it lies on this side of `bound` in every shape, Holm-adjusted."""
        p_values = [
            max(
                self.differences("verdict", shape, arm).ttest_mean(bound, side)[1]
                for shape in self.shapes
            )
            for arm in self.judged
        ]
        return dict(zip(self.judged, multipletests(p_values, method="holm")[1], strict=True))

    def verdicts(self) -> dict[str, str]:
        """Return arm -> its verdict."""
        level = self.rules["verdict"]["level"]
        better, worse = self.adjusted(0.0, "smaller"), self.adjusted(0.0, "larger")
        below = self.adjusted(self.margin, "smaller")
        above = self.adjusted(self.margin, "larger")
        found = {}
        for arm in self.judged:
            if better[arm] < level:
                found[arm] = "better in both shapes"
                continue
            is_worse = worse[arm] < level
            direction = "worse in both shapes" if is_worse else NO_DIFFERENCE
            side = "below" if below[arm] < level else "above" if above[arm] < level else ""
            found[arm] = f"{direction}; {MARGIN_WORDS[side]} (p {below[arm]:.2f})"
        return found

    def unsettled(self, arm: str) -> list[str]:
        """Return the shapes in which a better rate may exist."""
        found = []
        for shape in self.shapes:
            curve = self.curves[arm, shape]
            best = min(sorted(curve), key=curve.get)
            by_rate: dict[float, list[float]] = {}
            for run in self.runs("check", shape, arm):
                if run.get("init_std", 0) == self.shapes[shape]["init_std"]:
                    by_rate.setdefault(run["learning_rate"], []).append(run["loss"])
            means = {rate: sum(losses) / len(losses) for rate, losses in by_rate.items()}
            here = means.get(self.chosen(arm, shape), -math.inf)
            is_better = any(mean < here - self.margin / 2 for mean in means.values())
            if best in (min(curve), max(curve)) or is_better:
                found.append(shape)
        return found

    def tolerance(self, arm: str, shape: str) -> tuple[float, bool]:
        """Return the octaves that the rate may be too high, and whether the end was seen."""
        curve = self.curves[arm, shape]
        order = sorted(curve)
        place = order.index(min(order, key=curve.get))
        limit = curve[order[place]] + self.rules["rates"]["tolerance"]
        for left, right in zip(order[place:], order[place + 1 :], strict=False):
            start = math.log2(left / order[place])
            if math.isinf(curve[right]):
                return start, True
            if curve[right] > limit:
                share = (limit - curve[left]) / (curve[right] - curve[left])
                return start + share * math.log2(right / left), True
        return math.log2(order[-1] / order[place]), False

    def cells(self, arm: str) -> dict[str, str]:
        """Return heading -> cell of the card's row of an arm, those that the logs decide."""
        tolerances = []
        for shape in self.shapes:
            octaves, is_seen = self.tolerance(arm, shape)
            tolerances.append(("" if is_seen else "at least ") + f"{octaves:.1f}")
        names = "; ".join(self.shapes)
        limit = self.rules["rates"]["tolerance"]
        heading = f"rate tolerance: octaves above the best rate tried, to +{limit:g} nats ({names})"
        found = {heading: "; ".join(tolerances)}
        if arm == self.baseline or arm not in self.judged:
            word = "the baseline" if arm == self.baseline else "not judged"
        else:
            word = self.verdicts()[arm]
            nats = []
            for shape in self.shapes:
                described = self.differences("verdict", shape, arm)
                low, high = described.tconfint_mean(0.05)
                value, least, most = (
                    100 * (math.exp(-nats / self.slope(shape)) - 1)
                    for nats in (described.mean, high, low)
                )
                heading = (
                    f"{shape}: more tokens `{self.baseline}` needs for the arm's loss "
                    "(above 0: the arm is better)"
                )
                found[heading] = (
                    f"{value:+.1f} % ({least:+.1f} to {most:+.1f}), {interval_word(low, high)}"
                )
                nats.append(f"{described.mean:+.4f}")
            found[f"loss minus that of `{self.baseline}`, nats ({names})"] = "; ".join(nats)
        if unsettled := self.unsettled(arm):
            word += f"; rate not settled in {' and '.join(unsettled)}"
        return found | {"verdict": word}

    def recommended(self) -> str:
        """Return the arm that the declared rule recommends."""
        verdicts = self.verdicts()
        means = {
            arm: sum(self.differences("verdict", shape, arm).mean for shape in self.shapes)
            for arm in verdicts
        }
        if better := [arm for arm, word in verdicts.items() if word.startswith("better")]:
            return min(better, key=means.get)
        below = self.adjusted(self.margin, "smaller")
        within = [arm for arm in verdicts if below[arm] < self.rules["verdict"]["level"]]
        octaves = {
            arm: min(self.tolerance(arm, shape)[0] for shape in self.shapes)
            for arm in (*within, self.baseline)
        }
        if all(self.tolerance(self.baseline, shape)[1] for shape in self.shapes):
            least = octaves[self.baseline] + self.rules["recommendation"]["octaves"]
            if tolerant := [arm for arm in within if octaves[arm] >= least]:
                return max(tolerant, key=octaves.get)
        return min(
            [self.baseline, *within],
            key=lambda arm: self.moved.get(arm, math.inf),
        )

    def sentences(self) -> list[str]:
        """Return sentences of a finished card that have numbers of their own."""
        found = []
        slopes = {shape: self.slope(shape) for shape in self.shapes}
        for shape, keys in self.shapes.items():
            found.append(
                f"{keys['n_layer']} blocks of {keys['n_embd']} channels; `init_std` "
                f"{keys['init_std']:g}, `learning_rate` of `{self.baseline}` "
                f"{self.chosen(self.baseline, shape):g})"
            )
        shape = min(slopes, key=slopes.get)
        smaller = slopes[shape] * math.log(1 + self.rules["margin"]["share"])
        level = self.rules["verdict"]["level"]
        below, stricter = (self.adjusted(bound, "smaller") for bound in (self.margin, smaller))
        near = [
            f"`{arm}` (p {stricter[arm]:.2f})"
            for arm in self.judged
            if below[arm] < level <= stricter[arm]
        ]
        if near:
            found.append(
                f"in {shape} alone as the margin, {smaller:.4f} nats, these would not be within "
                f"it: {', '.join(near)}."
            )
        for side in ("better", "worse"):
            arms = []
            for arm in self.judged:
                for shape in self.shapes:
                    described = self.differences("verdict", shape, arm)
                    if interval_word(*described.tconfint_mean(0.05)) == side:
                        worth = 100 * (math.exp(-described.mean / slopes[shape]) - 1)
                        arms.append(f"`{arm}` in {shape} ({worth:+.1f} % of tokens)")
            if arms:
                found.append(f"By shape, not corrected, {side}: {', '.join(arms)}.")
        return found

    def at_highest(self) -> set[str]:
        """Return the arms whose best rate with Muon is the highest tried, as the card has them."""
        rules = self.rules["muon"]
        arms = set()
        for arm in (self.baseline, *self.judged):
            losses = {
                run["learning_rate"]: run["loss"]
                for run in self.runs("muon", rules["shape"], arm)
                if run["seed"] == rules["selection_seed"]
            }
            if losses and min(losses, key=losses.get) == max(losses):
                arms.add(f"`{arm}`")
        return arms

    def place(self, arm: str, shape: str) -> int:
        """Return the place of an arm among all in a shape's screening."""
        mean = {
            name: np.mean(list(self.at_best(name, shape).values())) for name in self.rules["arms"]
        }
        return 1 + sum(value < mean[arm] for value in mean.values())

    def passed_over(self) -> set[tuple[str, str, str]]:
        """Return arms without a verdict, lowest in a shape's screening: arm, shape, by how much."""
        found = set()
        for shape in self.shapes:
            lowest = {arm: self.at_best(arm, shape) for arm in self.rules["arms"]}
            best = min(lowest, key=lambda arm: np.mean(list(lowest[arm].values())))
            if best not in (self.baseline, *self.judged):
                below = " and ".join(
                    f"{lowest[best][seed] - loss:+.4f}"
                    for seed, loss in sorted(lowest[self.baseline].items())
                )
                words = f"({below} nats against `{self.baseline}`, by seed)"
                for other in self.shapes:
                    if other != shape:
                        place = self.place(best, other)
                        words += f" and place {place} of {len(self.rules['arms'])} in {other}"
                found.add((best, shape, words))
        return found

    def later(self) -> set[str]:
        """Return the rows of the card's table of later stages."""
        found = set()
        for arm in self.judged:
            cells: dict[str, str] = {}
            for stage in ("tokens", "muon"):
                shape = self.rules[stage]["shape"]
                before = self.differences("verdict", shape, arm)
                cells[f"{shape} before"] = f"{before.mean:+.4f}"
                cells[stage] = "not run"
                if self.runs(stage, shape, arm):
                    now = self.differences(stage, shape, arm)
                    low, high = now.tconfint_mean(0.05)
                    word = interval_word(low, high)
                    word_before = interval_word(*before.tconfint_mean(0.05))
                    cells[stage] = (
                        f"{now.mean:+.4f} ({low:+.4f} to {high:+.4f}), {word}, "
                        f"{'as' if word_before == word else word_before} before"
                    )
            found.add(f"| `{arm}` | {' | '.join(cells.values())} |")
        return found

    def checked(self, key: str) -> str:
        """Return how far half and double the value of `key` move the loss, in the card's words."""
        moves = []
        for shape in self.shapes:
            for arm in (self.baseline, *self.judged):
                chosen = {
                    "learning_rate": self.chosen(arm, shape),
                    "init_std": self.shapes[shape]["init_std"],
                }
                by_value: dict[float, list[float]] = {}
                for run in self.runs("check", shape, arm):
                    if all(run[name] == chosen[name] for name in chosen if name != key):
                        by_value.setdefault(run[key], []).append(run["loss"])
                means = {value: sum(losses) / len(losses) for value, losses in by_value.items()}
                here = means.pop(chosen[key], 0.0)
                moves += [mean - here for mean in means.values()]
        return f"by {min(moves):+.3f} to {max(moves):+.3f} nats with half or double the `{key}`"


def interval_word(low: float, high: float) -> str:
    """Say where an interval of a difference lies: an arm is better below zero."""
    return "open" if low <= 0 <= high else "better" if low < 0 else "worse"


def mean_by_rate(
    losses: dict[float, dict[int, float]], first: int, second: int
) -> dict[float, float]:
    """Return learning rate -> loss, the second seed cleared of its mean difference."""
    both = [seeds[second] - seeds[first] for seeds in losses.values() if second in seeds]
    both = [shift for shift in both if math.isfinite(shift)]
    shift = float(np.mean(both)) if both else 0.0
    found = {}
    for rate, seeds in losses.items():
        values = [seeds[first]] + ([seeds[second] - shift] if second in seeds else [])
        found[rate] = sum(values) / len(values)
    return found


def check_card(anew: Rederived, text: str) -> int:
    """Compare a finished card with what the logs say. Returns how many statements agree."""
    count = 0
    rows = []
    header: list[str] = []
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith("| arm | what it is | verdict |"):
            header = row
        elif not row:
            header = []
        elif header and line.startswith("| `"):
            cells = dict(zip(header, row, strict=True))
            rows.append(cells["arm"].strip("`"))
            expected = anew.cells(cells["arm"].strip("`"))
            if not any(name.startswith("loss minus") for name in cells):  # README has tokens alone
                expected = {
                    name: cell
                    for name, cell in expected.items()
                    if not name.startswith("loss minus")
                }
            assert {name: cells[name] for name in expected} == expected
            count += len(expected)
    assert rows[: len(anew.judged) + 1] == [anew.baseline, *anew.judged]
    tokens = ", ".join(
        f"{100 * (math.exp(anew.margin / anew.slope(shape)) - 1):.1f} % in {shape}"
        for shape in anew.shapes
    )
    assert f"{anew.margin:.4f} nats ({tokens})" in text
    seen = {arm: anew.power(len(anew.judged), arm) for arm in anew.judged}
    chances = ", ".join(f"{chance:.1f} (`{arm}`)" for arm, chance in seen.items())
    assert f"within it, by the spread of these runs, with a power of {chances}; " in text
    assert f"trusts no pairing, foresaw {anew.power(len(anew.judged)):.2f}." in text
    passed = re.findall(
        r"`([^`]+)` had the lowest loss in (\w+) (\([^)]*\)(?: and place \d+ of \d+ in \w+)*)", text
    )
    assert set(passed) == anew.passed_over()
    sentences = anew.sentences()
    assert [words for words in sentences if words not in text] == []
    highest = max(anew.rules["muon"]["factors"])
    at_end = re.search(rf"{highest:g} times that for AdamW, for ([^;)]*)", text)
    assert set(at_end[1].split(", ") if at_end else ()) == anew.at_highest()
    assert f"**Recommendation: `{anew.recommended()}`**" in text
    table = re.search(r"^\| loss minus that of .*\n.*\n((?:\| .*\n)*)", text, re.M)
    later = table[1].splitlines() if table else []
    assert set(later) == anew.later()
    count += len(later)
    for key in ("learning_rate", "init_std"):
        assert anew.checked(key) in text
    return count + len(sentences) + 7
