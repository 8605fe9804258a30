"""The answer of the study "which norm?": a card, tables and a figure.

    python -m repro.which_norm_card cpu

It reads what the stages conclude (results/SCALE/which_norm/*.json) and the archives beside that,
writes README.md and card.png there, and puts the card into docs/which_norm.md and README.md between
their markers. What is not finished yet is said.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

from common.errors import ConfigError, run_program
from common.output import markdown, write_bytes_atomically
from common.plotting import plt, save, style
from evidence.curves import Curve
from evidence.stages import Conclusions, RateStage
from evidence.study import Plan
from repro.which_norm import PLAN, STAGES, Worker, moved_bytes

MARKERS = ("<!-- card: python -m repro.which_norm_card -->", "<!-- end of the card -->")
PAGES = (Path("docs/which_norm.md"), Path("README.md"))
NORMS = Path("docs/norms.md")  # its table has the launches of a decoding step
# Which conversion gives a trained model the norm (docs/results.md has what it costs)
TRAINED = {
    "rms": "`--to=rms`, exact",
    "coupled": "`--to=coupled`, inexact; distil",
    "taper": "`--init_from`, trained on",
    "rms-no-gain": "`--to=weightless`, exact",
}
MARGIN_WORDS = {
    "within": "loses less than the margin",
    "beyond": "loses more than the margin",
    "open": "margin open",
}


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

    @property
    def shapes(self) -> list[str]:
        """Names of the shapes."""
        return [shape.name for shape in self.plan.shapes]

    def missing(self) -> list[str]:
        """Return the names of the stages that are not finished."""
        return [kind.name for kind in self.worker.stages() if kind.name not in self.before]

    def progress(self, name: str) -> str:
        """Return the name of a stage, with its finished runs if it has some."""
        stage = self.worker.stage(next(kind for kind in STAGES if kind.name == name))
        done = len(self.worker.results(stage).found)
        planned = sum(count for parts in stage.planned().values() for count, _ in parts)
        return f"`{name}` ({done} of some {planned} runs)" if done else f"`{name}`"

    # The card itself

    def text(self) -> str:
        """Return the card as Markdown."""
        parts = [f"**Which norm?** {self.setting()}"]
        if "rates" in self.before:
            parts.append(markdown(self.header(), [self.row(arm) for arm in self.order()]))
        parts.append(self.recommendation())
        if self.missing():
            parts.append(f"Not finished yet: {', '.join(map(self.progress, self.missing()))}.")
        return "\n\n".join(parts)

    def setting(self) -> str:
        """Say under what conditions the card holds."""
        shapes = " and ".join(
            f"{shape.name} ({shape.n_layer} x {shape.keys['n_embd']})" for shape in self.plan.shapes
        )
        verdict = self.plan.plan["verdict"]
        margin = "not measured yet"
        if "margin" in self.before:
            margin = f"{self.before['margin']['margin']:.4f} nats"
        share = self.plan.plan["margin"]["share"]
        return (
            f"AdamW, blocks x channels {shapes}, {self.worker.steps:,} steps, the learning rate "
            f"tuned for each arm; verdicts over {len(verdict['seeds'])} seeds; margin: {share:.0%} "
            f"of the tokens, {margin}."
        )

    def header(self) -> list[str]:
        """Return the headings of the card's table."""
        return [
            "arm",
            "against the baseline, in tokens",
            "in nats",
            "best rate",
            "rate tolerance",
            "kB",
            "launches",
            "from a trained model",
            "verdict",
        ]

    def order(self) -> list[str]:
        """Return the arms: the baseline, then by rank."""
        return [self.plan.baseline, *self.before["rates"]["ranking"]]

    def row(self, arm: str) -> list[str]:
        """Return one row of the card."""
        rates = self.before["rates"]["shapes"]
        found = self.verdicts().get(arm)
        tokens = nats = "-"
        if found:
            tokens = self.by_shape(lambda s: f"{100 * found['shapes'][s]['tokens']:+.1f} %")
            nats = self.by_shape(
                lambda s: (
                    f"{found['shapes'][s]['difference']:+.4f} ({found['shapes'][s]['low']:+.4f} to "
                    f"{found['shapes'][s]['high']:+.4f})"
                )
            )
        return [
            f"`{arm}`",
            tokens,
            nats,
            self.by_shape(lambda s: self.rate_text(s, arm)),
            self.by_shape(lambda s: tolerance_text(rates[s][arm])),
            self.kilobytes(arm),
            self.decoding(arm),
            TRAINED.get(arm, "not tried"),
            self.verdict_text(arm),
        ]

    def rate_text(self, shape: str, arm: str) -> str:
        """Return the chosen rate, and whether it is settled.

        Not where the best one lay at an end of the curve, or where stage 4 found a better one.
        """
        found = self.before["rates"]["shapes"][shape][arm]
        unsettled = self.before.get("check", {}).get("not_settled", [])
        is_better = any(line.startswith(f"{arm}, {shape}: learning_rate") for line in unsettled)
        return f"{found['rate']:g}" + (
            "" if found["settled"] and not is_better else " (rate not settled)"
        )

    def by_shape(self, show: Any) -> str:
        """Return what `show` says of each shape, one behind the other."""
        return "; ".join(show(shape) for shape in self.shapes)

    def verdicts(self) -> dict[str, Any]:
        """Return arm -> conclusion of stage 3; empty before it is finished."""
        return self.before.get("verdict", {}).get("arms", {})

    def verdict_text(self, arm: str) -> str:
        """Return the verdict in two parts."""
        if arm == self.plan.baseline:
            return "the baseline"
        if "verdict" not in self.before:
            return "none yet"
        if arm not in self.before["verdict"]["diverged"]:
            return "not judged"
        if diverged := self.before["verdict"]["diverged"][arm]:
            return f"{diverged} runs diverged"
        found = self.verdicts()[arm]
        return f"{found['direction']}, {MARGIN_WORDS[found['margin']]}"

    def kilobytes(self, arm: str) -> str:
        """Return what the norms of a block move in training, kB for each token."""
        name = self.plan.plan["recommendation"]["bytes"].get(arm)
        return f"{self.moved[name] / 1000:.1f}" if name else "n/a"

    def decoding(self, arm: str) -> str:
        """Return the launches of a decoding step, plain and fused; QK-norms are not counted."""
        words = self.plan.arms[arm]
        return "n/a" if "qk_norm" in words else self.launches.get(words.split()[0], "n/a")

    def recommendation(self) -> str:
        """Return one sentence of recommendation and one on what is not known."""
        if "recommendation" not in self.before:
            return "There is no recommendation before the verdicts."
        found = self.before["recommendation"]
        sentence = f"**Recommendation: `{found['arm']}`**, for {found['why']}."
        return " ".join([sentence, *self.later_stages(), self.unknown()])

    def later_stages(self) -> list[str]:
        """Return what stages 5 and 6 say of the verdicts."""
        names = {"tokens": "At more tokens", "muon": "Under Muon"}
        sentences = []
        for name, where in names.items():
            arms = self.before.get(name, {}).get("arms", {})
            turned = [f"`{arm}`" for arm, found in arms.items() if found.get("contradicts")]
            if turned:
                sentences.append(f"{where} the sign turns for {', '.join(turned)}.")
            elif arms:
                sentences.append(f"{where} no sign is shown to turn.")
        return sentences

    def unknown(self) -> str:
        """Return what has not been measured."""
        open_questions = ["other sizes", "other data"]
        if "tokens" not in self.before:
            open_questions.append("more tokens for each parameter")
        open_questions.append("other optimisers" + (" than Muon" if "muon" in self.before else ""))
        return f"Not known: {', '.join(open_questions)}."

    # The page with all tables

    def page(self) -> str:
        """Return README.md of the results."""
        parts = [
            "# Which norm?",
            f"Plan: [repro/which_norm.toml](../../../repro/which_norm.toml), SHA-256 "
            f"{self.plan.hash[:16]}. Words and figure are explained in "
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

    def rates_text(self) -> str:
        """Return the losses over the learning rate: a table for each shape."""
        stage = self.worker.stage(RateStage)
        results = self.worker.results(stage)
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
        places = results.places[stage.name].items()
        parts.append(
            "Trained on " + ", ".join(f"{device}: {count} runs" for device, count in places) + ". "
            "Another processor moves a loss about as far as another seed does."
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
        header += ["p below the margin (Holm)", "p better (Holm)"]
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

    def draw(self, target: Path) -> None:
        """Draw the forest of verdicts, where there are some, beside the learning-rate curves."""
        judged = list(self.verdicts())
        count = len(self.shapes) + bool(judged)
        figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 5.2), layout="constrained")
        axes = list(axes)
        if judged:
            self.draw_forest(axes.pop(0), judged)
        for number, (axis, shape) in enumerate(zip(axes, self.plan.shapes, strict=True)):
            self.draw_curves(axis, shape, with_legend=number == len(axes) - 1)
        save(figure, target)

    def draw_forest(self, axis: plt.Axes, arms: list[str]) -> None:
        """Draw differences in tokens with their intervals, and the margin as a band."""
        slopes = self.before["margin"]["slopes"]
        # What the margin is worth in tokens differs between the shapes.
        margin = self.before["margin"]["margin"]
        for shape, line in zip(self.shapes, ("-", "--"), strict=True):
            worth = 100 * math.expm1(-margin / slopes[shape])
            axis.axvline(worth, color="0.6", linestyle=line, label=f"margin, {shape}")
        axis.axvline(0, color="0.5", linewidth=0.8)
        for place, arm in enumerate(arms):
            for offset, shape in zip((-0.12, 0.12), self.shapes, strict=True):
                numbers = self.verdicts()[arm]["shapes"][shape]
                ends = [
                    100 * math.expm1(-numbers[name] / slopes[shape])
                    for name in ("difference", "low", "high")
                ]
                is_first = shape == self.shapes[0]
                color = style(0)["color"]
                axis.plot(ends[1:], [place + offset] * 2, color=color, linewidth=1.4)
                axis.plot(
                    ends[0],
                    place + offset,
                    "o",
                    color=color,
                    markerfacecolor=color if is_first else "white",
                    label=f"shape {shape}" if place == 0 else None,
                )
        axis.set_yticks(range(len(arms)), arms)
        axis.invert_yaxis()
        axis.set_xlabel(f"worth of tokens, % (right: better than {self.plan.baseline})")
        axis.legend(fontsize=8)

    def draw_curves(self, axis: plt.Axes, shape: Any, with_legend: bool) -> None:
        """Draw the losses of all arms over the learning rate; the chosen rate is a large marker."""
        stage = self.worker.stage(RateStage)
        results = self.worker.results(stage)
        lowest = []
        for number, arm in enumerate(self.order()):
            curve = stage.curve(results, shape, arm)
            rates = [rate for rate in curve.rates if math.isfinite(curve.at(rate))]
            losses = [curve.at(rate) for rate in rates]
            look = style(number) | {"linestyle": "--" if number >= 7 else "-"}
            axis.plot(rates, losses, linewidth=1.2, label=arm, **look)
            chosen = self.before["rates"]["shapes"][shape.name][arm]["rate"]
            axis.plot(
                chosen, curve.at(curve.best), look["marker"], color=look["color"], markersize=9
            )
            lowest.append(min(losses, default=math.inf))
        base = min(lowest)
        axis.set_ylim(base - 0.02, base + 0.35)
        axis.set_xscale("log", base=2)
        ticks = sorted(self.plan.rates)
        axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axis.set_xlabel("learning rate")
        axis.set_ylabel("val_loss_full, nats per token")
        axis.set_title(
            f"{shape.name}: {shape.n_layer} blocks of {shape.keys['n_embd']} channels", fontsize=10
        )
        if with_legend:
            axis.legend(fontsize=7, ncol=2)


def mean_text(loss: float | None) -> str:
    """Return a mean loss for a table."""
    return "diverged" if loss is None else f"{loss:.4f}"


def tolerance_text(found: dict[str, Any]) -> str:
    """Return the octaves that the rate may be too high."""
    return ("" if found["tolerance_seen"] else "at least ") + f"{found['tolerance']:.1f} octaves"


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


def put(page: Path, card: str) -> None:
    """Put the card between the markers of a page; a page without them is left alone."""
    if not page.exists():
        return
    text = page.read_text()
    start, end = (text.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        return
    new = text[: start + len(MARKERS[0])] + f"\n\n{card}\n\n" + text[end:]
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
        card.draw(kept / "card.png")
    write_bytes_atomically(kept / "README.md", card.page().encode())
    for page in PAGES:
        put(page, card.text())
    print(card.text())


if __name__ == "__main__":
    run_program(main)
