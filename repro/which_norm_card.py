"""The answer of the study "which norm?": a card, tables and a figure.

    python -m repro.which_norm_card cpu

It reads what the stages conclude (results/SCALE/which_norm/*.json) and the archives beside that,
writes README.md and card.png there, and puts the card into docs/which_norm.md and README.md between
their markers. What is not finished yet is said.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError, run_program
from common.output import markdown, write_bytes_atomically
from common.stats import Estimate
from evidence.curves import Curve
from evidence.families import family, power
from evidence.stages import Conclusions, RateStage, Stage, in_tokens
from evidence.study import Plan, Results, Shape
from repro.which_norm import PLAN, STAGES, Worker, moved_bytes
from repro.which_norm_figure import Figure, Interval

# Around the card of one scale in a page; {} is the scale.
MARKERS = ("<!-- card: python -m repro.which_norm_card {} -->", "<!-- end of the card -->")
README = Path("README.md")
PAGES = (Path("docs/which_norm.md"), README)
NORMS = Path("docs/norms.md")  # its table has the launches of a decoding step
MEANING = {
    "rms": "RMSNorm before each sublayer",
    "layer": "LayerNorm before each sublayer",
    "coupled": "the MLP's RMSNorm takes 1/RMS from attention's",
    "coupled-full-gradient": "the MLP's RMSNorm takes 1/RMS from attention's, with gradient",
    "coupled-block-0": "`rms`; in block 0 the MLP's norm takes 1/RMS from attention's",
    "rms-qk-norm": "`rms`, and RMSNorm of each head's queries and keys",
    "rms-no-gain": "`rms` without learned gains",
    "peri": "RMSNorm before and after each sublayer, and of the embeddings",
    "olmo2": "RMSNorm after each sublayer, and of queries and keys",
    "lns": "`rms`, scaled by 1/sqrt(l) in block l",
    "deepnorm": "RMSNorm of each weighted residual sum",
    "dyt": "tanh in place of the norms",
    "taper": "norms that become fixed scales in training",
}
SHAPES = {"W": "wide", "D": "deep"}
# What the later stages ask
QUESTIONS = {
    "verdict": "the tests",
    "check": "other rates and initialisations",
    "tokens": "more tokens",
    "muon": "another optimiser",
}
# How a trained model gets the norm (docs/results.md has what it costs)
TRAINED = {
    "rms": "converted from `layer`, exactly",
    "coupled": "converted from `rms`, inexactly: distil",
    "taper": "converted from `rms`: train on",
    "rms-no-gain": "converted from `rms`, exactly",
}
# Arms that the plan's rule about bytes leaves out -> their names in the ledger
MOVED = {"rms-qk-norm": "rms, QK-norms"}
ENOUGH = 0.8  # power at which "possible" says something against an arm
# Direction -> words; what is shown about the margin -> words, for arms that are not better
DIRECTIONS = {
    "better": "better in both shapes",
    "worse": "worse in both shapes",
    "no difference shown": "not shown better in both shapes, nor worse in both",
}
MARGINS = {
    "within": "a deficit beyond the margin is ruled out",
    "beyond": "the deficit is beyond the margin",
    "open": "a deficit beyond the margin is possible",
}

NO_VERDICT = (
    "*Better*, *worse* and *open* beside the tokens and in the last table: a 95 % interval, not "
    "corrected, lies on one side of zero or around it. No verdicts, but reasons for a test at a "
    "shape of your own."
)


def side_of_zero(numbers: dict[str, Any]) -> str:
    """Return where the interval of a difference lies: better is below zero."""
    if numbers["high"] < 0:
        return "better"
    return "worse" if numbers["low"] > 0 else "open"


def at_best(numbers: dict[str, Any]) -> dict[str, float]:
    """Return seed -> loss of an arm in the screening, at its best rate."""
    return numbers["losses"][f"{numbers['best']:g}"]


class Card:
    """The card at one scale.

    Args:
        worker: of the study; it trains nothing here.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        self.plan: Plan = worker.plan
        self.before: Conclusions = worker.before()
        self.moved = moved_bytes()
        self.launches = read_launches()
        self._read: dict[str, tuple[Any, Results]] = {}

    def read(self, kind: type[Stage]) -> tuple[Any, Results]:
        """Return a stage and its finished runs; its archives are read once for card and figure."""
        if kind.name not in self._read:
            stage = self.worker.stage(kind)
            self._read[kind.name] = stage, self.worker.results(stage)
        return self._read[kind.name]

    @property
    def shapes(self) -> list[str]:
        """Names of the shapes."""
        return [shape.name for shape in self.plan.shapes]

    def missing(self) -> list[str]:
        """Return the names of the stages that are not finished."""
        return [kind.name for kind in self.worker.stages() if kind.name not in self.before]

    def progress(self, name: str) -> str:
        """Return the name of a stage, with its finished runs if it has some."""
        stage, results = self.read(next(kind for kind in STAGES if kind.name == name))
        done = len(results.found)
        planned = sum(count for parts in stage.planned().values() for count, _ in parts)
        details = [QUESTIONS[name]] if name in QUESTIONS else []
        if done:
            details.append(f"{done} of some {planned} runs")
        return f"`{name}` ({'; '.join(details)})" if details else f"`{name}`"

    # The card itself

    def text(self, is_short: bool = False) -> str:
        """Return the card as Markdown; a short one has no table of the arms that are not judged."""
        parts = [f"**Which norm?** {self.setting()}", self.recommendation()]
        if "rates" in self.before:
            table, *others = self.tables(is_short)
            parts += [table, self.margin(), *others, *self.later_stages()]
        else:
            parts.append(self.margin())
        last = []
        if "verdict" in self.before:
            last += [*self.checked(), self.unknown()]
        if self.missing():
            last.append(f"Not finished yet: {', '.join(map(self.progress, self.missing()))}.")
        return "\n\n".join([*parts, " ".join(last)] if last else parts)

    def tables(self, is_short: bool) -> list[str]:
        """Return the table of the judged arms, and what there is to say of the others."""
        judged = [self.plan.baseline, *self.judged()]
        if not self.judged():
            return [self.table(self.order())]
        others = [arm for arm in self.order() if arm not in judged]
        names = ", ".join(f"`{arm}`" for arm in others)
        sentence = (
            f"The best {len(self.judged())} by mean rank over both shapes, in a screening with two "
            f"seeds, were judged. Not judged, in its order: {names}. Places near the cut may be "
            f"chance{self.passed_over(others)}."
        )
        parts = [self.table(judged, is_short), f"{NO_VERDICT} {sentence}"]
        return parts if is_short or not others else [*parts, self.table(others)]

    def passed_over(self, others: list[str]) -> str:
        """Name arms that are not judged and had the lowest loss of the screening in a shape."""
        words = ""
        for name, arms in self.before["rates"]["shapes"].items():
            best = next(arm for arm in self.order() if self.place(arm, name) == 1)
            if best in others:
                losses, baseline = (at_best(arms[arm]) for arm in (best, self.plan.baseline))
                below = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
                words += f"; `{best}` had the lowest loss in {name} ("
                words += " and ".join(f"{value:+.4f}" for value in below)
                words += f" nats against `{self.plan.baseline}`, by seed)"
                for other in self.shapes:
                    if other != name:
                        place = self.place(best, other)
                        words += f" and place {place} of {len(self.plan.arms)} in {other}"
        return words

    def place(self, arm: str, shape: str) -> int:
        """Return the place of an arm among all in a shape's screening; 1 is the lowest loss."""
        found = self.before["rates"]["shapes"][shape]
        means = {name: found[name]["mean_of_seeds"] for name in self.order()}
        losses = {name: math.inf if mean is None else mean for name, mean in means.items()}
        return sorted(losses, key=losses.get).index(arm) + 1

    def table(self, arms: list[str], is_short: bool = False) -> str:
        """Return a table with these arms."""
        rows = [self.row(arm, is_short) for arm in arms]
        return markdown(list(rows[0]), [list(row.values()) for row in rows])

    def setting(self) -> str:
        """Say under what conditions the card holds."""
        shapes = " and ".join(
            f"{shape.name} ({SHAPES.get(shape.name, '')}: {shape.n_layer} blocks of "
            f"{shape.keys['n_embd']} channels{self.start_of(shape)})"
            for shape in self.plan.shapes
        )
        first = self.plan.shapes[0]
        parameters = 12 * first.n_layer * first.keys["n_embd"] ** 2 / 1e6
        verdict = self.plan.plan["verdict"]
        worker = self.worker
        batch = f"{worker.sequences} sequences of {worker.config.block_size} a step"
        return (
            f"Two shapes, each with {parameters:.1f} M parameters in its blocks: {shapes}. "
            f"{worker.tokens / 1e6:.1f} M tokens, {batch}; "
            "AdamW, the learning rate tuned for each arm. Verdicts are over "
            f"{len(verdict['seeds'])} seeds not used for tuning."
        )

    def start_of(self, shape: Shape) -> str:
        """Return the settings that suit the baseline in a shape, as far as they are known."""
        words = ""
        if "init_std" in shape.keys:
            words += f"; `init_std` {shape.keys['init_std']:g}"
        if "rates" in self.before:
            rate = self.before["rates"]["shapes"][shape.name][self.plan.baseline]["rate"]
            words += f", `learning_rate` of `{self.plan.baseline}` {rate:g}"
        return words

    def margin(self) -> str:
        """Say what the margin is, and how likely it is to be shown."""
        share = self.plan.plan["margin"]["share"]
        words = (
            "The margin, the largest deficit that counts as none, is what "
            f"{100 * share:g} % of the tokens buy on average"
        )
        if "margin" not in self.before:
            return f"{words}, and not measured yet."
        found = self.before["margin"]
        tokens = ", ".join(
            f"{100 * in_tokens(-found['margin'], slope):.1f} % in {shape}"
            for shape, slope in found["slopes"].items()
        )
        words += f": {found['margin']:.4f} nats ({tokens})."
        if judged := len(self.judged()):
            words += f" An arm equal to `{self.plan.baseline}` would be shown to be within it"
            chance = f"{found['power'][str(judged)]:.2f}"
            if seen := self.power_seen():
                each = ", ".join(
                    f"{chance_seen:.1f} (`{arm}`)" for arm, chance_seen in seen.items()
                )
                words += (
                    f", by the spread of these runs, with a power of {each}; the plan's formula, "
                    f"which trusts no pairing, foresaw {chance}."
                )
            else:
                words += f" with a power of {chance}."
            if any(self.verdicts()[arm]["margin"] == "open" and seen[arm] < ENOUGH for arm in seen):
                words += ' Where the power is low, "possible" says little against an arm.'
            words += self.near_the_margin()
        return words

    def near_the_margin(self) -> str:
        """Name arms that are within the margin, and would not be if one shape alone had set it.

        Empty if there are none.
        """
        rules = self.plan.plan["verdict"]
        slopes = self.before.get("margin", {}).get("slopes", {})
        within = [arm for arm, found in self.verdicts().items() if found["margin"] == "within"]
        if not within:
            return ""
        shape = min(slopes, key=slopes.get)
        share = self.plan.plan["margin"]["share"]
        smaller = slopes[shape] * math.log1p(share)
        df = len(rules["seeds"]) - 1
        estimates = {
            arm: {
                name: Estimate(numbers["difference"], numbers["se"], df)
                for name, numbers in found["shapes"].items()
            }
            for arm, found in self.verdicts().items()
        }
        p_values = family(estimates, smaller, len(self.judged()))
        arms = [
            f"`{arm}` (p {p_values[arm]:.2f})" for arm in within if p_values[arm] >= rules["level"]
        ]
        if not arms:
            return ""
        return (
            f" With {100 * share:g} % of the tokens in {shape} alone as the margin, "
            f"{smaller:.4f} nats, these would not be within it: {', '.join(arms)}."
        )

    def margin_in_tokens(self) -> dict[str, float]:
        """Return shape -> the margin in % of tokens; empty before it is measured."""
        found = self.before.get("margin", {"slopes": {}})
        return {
            shape: 100 * in_tokens(found["margin"], slope)
            for shape, slope in found["slopes"].items()
        }

    def power_seen(self) -> dict[str, float]:
        """Return judged arm -> power to clear it if it is like the baseline, with its own SDs."""
        rules = self.plan.plan["verdict"]
        count, level = len(rules["seeds"]), rules["level"]
        return {
            arm: power(
                self.before["margin"]["margin"],
                [numbers["se"] * math.sqrt(count) for numbers in found["shapes"].values()],
                count,
                level / len(self.judged()),
            )
            for arm, found in self.verdicts().items()
        }

    def order(self) -> list[str]:
        """Return the arms: the baseline, then by rank."""
        return [self.plan.baseline, *self.before["rates"]["ranking"]]

    def row(self, arm: str, is_short: bool = False) -> dict[str, str]:
        """Return one row of the card: heading -> cell. A short one has tokens and no nats."""
        rates = self.before["rates"]["shapes"]
        shapes = "; ".join(self.shapes)
        cells = {
            "arm": f"`{arm}`",
            "what it is": f"{MEANING.get(arm, '')}{self.keys_of(arm)}",
            "verdict": self.verdict_text(arm),
        }
        if arm in (self.plan.baseline, *self.judged()) and "verdict" in self.before:
            for shape in self.shapes:
                heading = (
                    f"{shape}: more tokens `{self.plan.baseline}` needs for the arm's loss "
                    "(above 0: the arm is better)"
                )
                cells[heading] = self.in_tokens(arm, shape)
            if not is_short:
                heading = f"loss minus that of `{self.plan.baseline}`, nats ({shapes})"
                cells[heading] = self.in_nats(arm)
        limit = self.plan.plan["rates"]["tolerance"]
        heading = (
            f"rate tolerance: octaves above the best rate tried, to +{limit:g} nats ({shapes})"
        )
        cells[heading] = self.by_shape(lambda shape: tolerance_text(rates[shape][arm]))
        cells["norm traffic of a block in training, kB a token (counted, 768 channels)"] = (
            self.kilobytes(arm)
        )
        cells["launches of a block in decoding (plain, fused)"] = self.decoding(arm)
        cells["in a model that is already trained"] = TRAINED.get(arm, "not tried")
        return cells

    def keys_of(self, arm: str) -> str:
        """Return the keys of train.py that make an arm, if its name is not all of them."""
        words = self.plan.arms[arm]
        if words == arm:
            return ""
        keys = words.replace("{block_0}", "Rs RR ... RR R")
        return f" (`--norm_type={keys}`)"

    def in_tokens(self, arm: str, shape: str) -> str:
        """Return what an arm is worth in tokens, with its interval."""
        if arm not in self.verdicts():
            return ""
        value, low, high = self.worth(arm, shape)
        word = side_of_zero(self.verdicts()[arm]["shapes"][shape])
        return f"{value:+.1f} % ({low:+.1f} to {high:+.1f}), {word}"

    def worth(self, arm: str, shape: str) -> Interval:
        """Return how many more tokens the baseline needs for an arm's loss, and the interval, %."""
        numbers = self.verdicts()[arm]["shapes"][shape]
        slope = self.before["margin"]["slopes"][shape]
        value, low, high = (
            100 * in_tokens(numbers[name], slope) for name in ("difference", "high", "low")
        )
        return value, low, high

    def in_nats(self, arm: str) -> str:
        """Return the differences of an arm from the baseline."""
        if arm not in self.verdicts():
            return ""
        shapes = self.verdicts()[arm]["shapes"]
        return self.by_shape(lambda shape: f"{shapes[shape]['difference']:+.4f}")

    def by_shape(self, show: Callable[[str], str]) -> str:
        """Return what `show` says of each shape, one behind the other."""
        return "; ".join(show(shape) for shape in self.shapes)

    def judged(self) -> list[str]:
        """Return the arms of stage 3, those that diverged too; empty before it is finished."""
        found = self.before.get("verdict", {}).get("diverged", {})
        return [arm for arm in found if arm != self.plan.baseline]

    def verdicts(self) -> dict[str, Any]:
        """Return arm -> conclusion of stage 3; empty before it is finished."""
        return self.before.get("verdict", {}).get("arms", {})

    def verdict_text(self, arm: str) -> str:
        """Return the verdict in two parts, and where the rate is not settled."""
        unsettled = [shape for shape in self.shapes if not self.is_settled(arm, shape)]
        parts = [self.verdict_of(arm)]
        if unsettled:
            parts.append(f"rate not settled in {' and '.join(unsettled)}")
        return "; ".join(parts)

    def verdict_of(self, arm: str) -> str:
        """Return the verdict on an arm."""
        if arm == self.plan.baseline:
            return "the baseline"
        if "verdict" not in self.before:
            return "none yet"
        if arm not in self.judged():
            return "not judged"
        for name, words in ((arm, ""), (self.plan.baseline, " of the baseline")):
            if diverged := self.before["verdict"]["diverged"][name]:
                return f"not judged: {diverged} runs{words} diverged"
        found = self.verdicts()[arm]
        words = DIRECTIONS[found["direction"]]
        if found["direction"] == "better":
            return words
        return f"{words}; {MARGINS[found['margin']]} (p {found['p_below_margin']:.2f})"

    def is_settled(self, arm: str, shape: str) -> bool:
        """Is the chosen rate settled?

        Not where the best one lay at an end of the curve, or where stage 4 found a better one.
        """
        unsettled = self.before.get("check", {}).get("not_settled", [])
        is_better = any(line.startswith(f"{arm}, {shape}: learning_rate") for line in unsettled)
        return self.before["rates"]["shapes"][shape][arm]["settled"] and not is_better

    def kilobytes(self, arm: str) -> str:
        """Return what the norms of a block move in training, kB for each token."""
        name = (self.plan.plan["recommendation"]["bytes"] | MOVED).get(arm)
        return f"{self.moved[name] / 1000:.1f}" if name else "n/a"

    def decoding(self, arm: str) -> str:
        """Return the launches of a decoding step, plain and fused.

        Norms of heads add none: the kernel that turns heads computes them (Qwen3 beside GPT-2 in
        results/cpu/launches).
        """
        return self.launches.get(self.plan.arms[arm].split()[0], "n/a")

    def recommendation(self) -> str:
        """Return one sentence of recommendation."""
        if "recommendation" not in self.before:
            return "There is no recommendation before the verdicts."
        found = self.before["recommendation"]
        return f"**Recommendation: `{found['arm']}`**, for {found['why']}.{self.by_one_shape()}"

    def by_one_shape(self) -> str:
        """Name the arms that gain or lose in a shape, by intervals that are not corrected."""
        words = ""
        for side in ("better", "worse"):
            arms = [
                f"`{arm}` in {shape} ({self.worth(arm, shape)[0]:+.1f} % of tokens)"
                for arm, found in self.verdicts().items()
                for shape, numbers in found["shapes"].items()
                if side_of_zero(numbers) == side
            ]
            words += f" By shape, not corrected, {side}: {', '.join(arms)}." if arms else ""
        return words

    def later_stages(self) -> list[str]:
        """Return a table of what stages 5 and 6 found, beside the verdict runs."""
        factor = self.plan.plan["tokens"]["factor"]
        rates = len(self.plan.plan["muon"]["factors"])
        names = {
            "tokens": f"{factor:g} times the tokens, the same rates",
            "muon": f"Muon, the best of {rates} rates",
        }
        columns: dict[str, dict[str, str]] = {}  # heading -> arm -> cell
        for name, what in names.items():
            found = self.before.get(name)
            if not found:
                continue
            shape = found["shape"]
            seeds = len(self.plan.plan[name]["seeds"])
            verdicts = columns.setdefault(f"in {shape}, verdict runs", {})
            cells = columns.setdefault(f"in {shape}, {what} ({seeds} seeds)", {})
            for arm, numbers in found["arms"].items():
                cells[arm] = self.later_text(shape, arm, numbers)
            for arm, conclusion in self.verdicts().items():
                verdicts[arm] = f"{conclusion['shapes'][shape]['difference']:+.4f}"
        if not any(columns.values()):
            return []
        heading = f"loss minus that of `{self.plan.baseline}`, nats"
        rows = [
            [f"`{arm}`", *(cells.get(arm, "not run") for cells in columns.values())]
            for arm in self.judged()
        ]
        table = markdown([heading, *columns], rows)
        muon = self.before.get("muon", {"not_settled": []})
        if not muon["not_settled"]:
            return [table]
        by_factor: dict[float, list[str]] = {}
        for arm in muon["not_settled"]:
            by_factor.setdefault(muon["factors"][arm], []).append(f"`{arm}`")
        ends = "; ".join(
            f"{factor:g} times that for AdamW, for {', '.join(arms)}"
            for factor, arms in by_factor.items()
        )
        return [
            table,
            f"With Muon the best rate was at an end of the {rates} tried ({ends}): better "
            "rates may exist, and a part of these differences may be the rate's.",
        ]

    def checked(self) -> list[str]:
        """Return what stage 4 says of the chosen rates and initialisations."""
        if "check" not in self.before:
            return []
        found = self.before["check"]
        seeds = len(self.plan.plan["check"]["seeds"])
        arms = list(dict.fromkeys(arm for arms in found["shapes"].values() for arm in arms))
        ends = []
        for key in ("learning_rate", "init_std"):
            differences = [
                math.inf if mean is None else mean - means["learning_rate x 1"]
                for arms_here in found["shapes"].values()
                for means in arms_here.values()
                for name, mean in means.items()
                if name.startswith(key) and name != "learning_rate x 1"
            ]
            low, high = min(differences), max(differences)
            ends.append(f"by {low:+.3f} to {high:+.3f} nats with half or double the `{key}`")
        sentences = [
            f"The loss of {' and '.join(f'`{arm}`' for arm in arms)} moves {' and '.join(ends)} "
            f"({' and '.join(self.shapes)}, {seeds} seeds)."
        ]
        lines = [line for line in found["not_settled"] if ": init_std" in line]
        if lines:
            sentences.append(
                f"Better by half a margin with another `init_std`: {'; '.join(lines)}."
            )
        return sentences

    def later_text(self, shape: str, arm: str, numbers: dict[str, Any]) -> str:
        """Return the difference of an arm in a later stage, and what it says of the verdict."""
        if numbers["difference"] is None:
            return "diverged"
        word = side_of_zero(numbers)
        before = side_of_zero(self.verdicts()[arm]["shapes"][shape])
        return "{difference:+.4f} ({low:+.4f} to {high:+.4f}), ".format(**numbers) + (
            f"{word}, as before" if word == before else f"{word}, {before} before"
        )

    def unknown(self) -> str:
        """Return what has not been measured."""
        open_questions = ["other sizes", "other data", "time on a GPU"]
        for name, what, tried in (
            ("tokens", "more tokens for each parameter", "tried"),
            ("muon", "optimisers other than AdamW", "Muon tried"),
        ):
            if found := self.before.get(name):
                what += f" ({tried} in {found['shape']} alone)"
            open_questions.append(what)
        return (
            f"`init_std` was tuned for `{self.plan.baseline}` alone, which may favour it. "
            "Not known: "
            f"{', '.join(open_questions)}."
        )

    # The page with all tables

    def page(self) -> str:
        """Return README.md of the results."""
        parts = [
            "# Which norm?",
            f"Plan: [repro/which_norm.toml](../../../repro/which_norm.toml), SHA-256 "
            f"{self.plan.hash[:16]}{self.hashes()}. Words and figure are explained in "
            "[docs/which_norm.md](../../../docs/which_norm.md).",
            self.text(),
        ]
        if "rates" in self.before:
            parts.append("![The card as a figure](card.png)")
            parts += ["## Learning rates (selection seeds; no verdicts)", self.rates_text()]
        for name, text in (
            ("margin", self.margin_text),
            ("verdict", self.verdict_table),
            ("check", self.check_text),
            ("tokens", self.one_shape_text),
            ("muon", self.one_shape_text),
        ):
            if name in self.before:
                parts += [f"## {name.capitalize()}", text(name)]
        commits = {
            commit[:7] for found in self.before.values() for commit in found.get("commits", [])
        }
        if commits:
            parts.append(f"Commits of the runs: {', '.join(sorted(commits))}.")
        return "\n\n".join(parts) + "\n"

    def hashes(self) -> str:
        """Say which older texts of the plan the runs of finished stages were trained under."""
        found: dict[str, list[str]] = {}
        for kind in self.worker.stages():
            if kind.name in self.before:
                for digest in self.read(kind)[1].hashes(kind.name):
                    found.setdefault(digest, []).append(f"`{kind.name}`")
        found.pop(self.plan.hash[:16], None)
        texts = "; ".join(f"{digest} ({', '.join(stages)})" for digest, stages in found.items())
        return f"; runs under older texts: {texts}" if texts else ""

    def rates_text(self) -> str:
        """Return the losses over the learning rate: a table for each shape."""
        stage, results = self.read(RateStage)
        parts = []
        for shape in self.plan.shapes:
            curves = {arm: stage.curve(results, shape, arm) for arm in self.order()}
            rates = sorted({rate for curve in curves.values() for rate in curve.rates})
            rows = [
                [
                    f"`{arm}`",
                    *(loss_text(curve, rate) for rate in rates),
                    f"{self.before['rates']['shapes'][shape.name][arm]['rate']:g}",
                ]
                for arm, curve in curves.items()
            ]
            header = ["arm", *(f"{rate:g}" for rate in rates), "chosen"]
            parts.append(
                f"{shape.name}: val_loss_full, nats per token.\n\n{markdown(header, rows)}"
            )
            parts.append(self.stability_text(stage, results, shape, curves))
        parts.append(
            "A loss is the mean over the seeds at that rate, the second seed cleared of its mean "
            "difference from the first. Ranking by the mean rank of both shapes: "
            f"{', '.join(self.before['rates']['ranking'])}."
        )
        devices = results.devices(stage.name).items()
        parts.append(
            "Trained on " + ", ".join(f"{device}: {count} runs" for device, count in devices) + "."
        )
        return "\n\n".join(parts)

    def stability_text(self, stage: RateStage, results: Any, shape: Any, curves: Any) -> str:
        """Return clipped steps, spikes and attention logits of each arm at its best rate."""
        rows = []
        for arm, curve in curves.items():
            wanted = stage.run(shape, arm, stage.first, learning_rate=curve.best)
            run = results.of(wanted).run
            events = run.events_of("stability")
            last = events[-1] if events else {}
            found = self.before["rates"]["shapes"][shape.name][arm]
            common = found["common_initialisation"]
            values = [loss for loss in common.values() if loss is not None]
            rows.append(
                [
                    f"`{arm}`",
                    f"{last.get('clipped', math.nan):.0%}",
                    last.get("spikes", "n/a"),
                    f"{last.get('attention_logit', math.nan):.1f}",
                    f"{sum(values) / len(values):.4f}" if values else "-",
                    f"{found['highest_finite']:g}" if found["highest_finite"] else "none",
                    "{:.4f}, {:.4f}".format(*found["regret"]) if found["regret"] else "n/a",
                ]
            )
        header = ["arm", "clipped steps", "spikes", "largest attention logit"]
        header += ["loss with the common initialisation", "highest rate that did not diverge"]
        header.append("regret: mean, 95th percentile")
        return f"At the best rate, {shape.name}:\n\n{markdown(header, rows)}"

    def margin_text(self, name: str) -> str:
        """Return what tokens are worth."""
        found = self.before[name]
        rows = []
        for shape, losses in found["losses"].items():
            for length, values in losses.items():
                cells = ", ".join(f"{loss:.4f}" for loss in values)
                rows.append([shape, length, cells, f"{sum(values) / len(values):.4f}"])
        table = markdown(["shape", "tokens, times the study's", "losses", "mean"], rows)
        slopes = "; ".join(f"{shape} {slope:.4f}" for shape, slope in found["slopes"].items())
        spread = "; ".join(f"{shape} {sd:.4f}" for shape, sd in found["sd_of_differences"].items())
        return (
            f"{table}\n\nNats for e times the tokens: {slopes}. Margin {found['margin']:.4f}. "
            f"SD of a paired difference: {spread}. {self.worker.power_text()}"
        )

    def verdict_table(self, name: str) -> str:
        """Return all numbers of stage 3."""
        rows = []
        for arm, found in self.before[name]["arms"].items():
            for shape, numbers in found["shapes"].items():
                left_out = numbers["without_a_document"]
                rows.append(
                    [
                        f"`{arm}`",
                        shape,
                        f"{numbers['difference']:+.4f}",
                        f"{numbers['low']:+.4f} to {numbers['high']:+.4f}",
                        "{:+.4f} to {:+.4f}".format(*left_out) if left_out else "n/a",
                        f"{found['p_below_margin']:.2g}",
                        f"{found['p_better']:.2g}",
                    ]
                )
        header = ["arm", "shape", "difference", "95 % interval", "without a document"]
        header += ["p below the margin, both shapes (Holm)", "p better, both shapes (Holm)"]
        return markdown(header, rows)

    def check_text(self, name: str) -> str:
        """Return the losses at other rates and initialisations."""
        found = self.before[name]
        rows = [
            [f"`{arm}`", shape, *map(mean_text, means.values())]
            for shape, arms in found["shapes"].items()
            for arm, means in arms.items()
        ]
        settings = next(iter(next(iter(found["shapes"].values())).values()))
        unsettled = ", ".join(found["not_settled"]) or "none"
        table = markdown(["arm", "shape", *settings], rows)
        return f"{table}\n\nBetter by half a margin than what was chosen: {unsettled}."

    def one_shape_text(self, name: str) -> str:
        """Return the differences of stage 5 or 6."""
        found = self.before[name]
        rows = [
            [
                f"`{arm}`",
                f"{numbers['difference']:+.4f} ({numbers['low']:+.4f} to {numbers['high']:+.4f})"
                if numbers["difference"] is not None
                else "diverged",
                f"{numbers.get('of_stage_3', math.nan):+.4f}",
                "yes" if numbers.get("contradicts") else "no",
            ]
            for arm, numbers in found["arms"].items()
        ]
        header = ["arm", f"difference in {found['shape']}", "in stage 3", "contradicts it"]
        return markdown(header, rows)

    # The figure

    def figure(self) -> Figure:
        """Return the figure, to be drawn."""
        stage, results = self.read(RateStage)
        rates = self.before["rates"]["shapes"]
        return Figure(
            baseline=self.plan.baseline,
            shapes=self.shapes,
            curves={
                arm: {shape.name: stage.curve(results, shape, arm) for shape in self.plan.shapes}
                for arm in self.order()
            },
            chosen={
                arm: {shape: rates[shape][arm]["rate"] for shape in self.shapes}
                for arm in self.order()
            },
            worth={
                arm: {shape: self.worth(arm, shape) for shape in self.shapes}
                for arm in self.verdicts()
            },
            margin=self.margin_in_tokens(),
        )


def mean_text(loss: float | None) -> str:
    """Return a mean loss for a table."""
    return "diverged" if loss is None else f"{loss:.4f}"


def tolerance_text(found: dict[str, Any]) -> str:
    """Return the octaves that the rate may be too high."""
    return ("" if found["tolerance_seen"] else "at least ") + f"{found['tolerance']:.1f}"


def loss_text(curve: Curve, rate: float) -> str:
    """Return the loss at a rate for a table."""
    if rate not in curve.losses:
        return ""
    loss = curve.at(rate)
    text = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
    return f"**{text}**" if rate == curve.best else text


def read_launches() -> dict[str, str]:
    """Read from docs/norms.md: norm type -> launches of a decoding step, plain and fused."""
    found = {}
    for line in NORMS.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.replace("&#124;", ""))]
        if len(cells) > 6 and re.fullmatch(r"\d+, \d+", cells[5]):
            for name in re.findall(r"`(\w+)`", cells[1]):
                found[name] = cells[5]
    return found


def put(page: Path, scale: str, card: str) -> None:
    """Put a scale's card between its markers in a page; a page without them is left alone."""
    if not page.exists():
        return
    text = page.read_text()
    first = MARKERS[0].format(scale)
    start = text.find(first)
    end = text.find(MARKERS[1], start)
    if start < 0 or end < 0:
        return
    new = text[: start + len(first)] + f"\n\n{card}\n\n" + text[end:]
    write_bytes_atomically(page, new.encode())


def main(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("give a scale: cpu, 30m or 124m")
    scale = argv[0]
    kept = Path(os.environ.get("RESULTS", f"results/{scale}/which_norm"))
    out = Path(os.environ.get("OUT", f"out/which_norm/{scale}"))
    card = Card(Worker(Plan(PLAN, scale), out, kept))
    kept.mkdir(parents=True, exist_ok=True)
    if "rates" in card.before:
        card.figure().draw(kept / "card.png")
    write_bytes_atomically(kept / "README.md", card.page().encode())
    for page in PAGES:
        put(page, scale, card.text(is_short=page == README))
    print(card.text())


if __name__ == "__main__":
    run_program(main, __doc__)
