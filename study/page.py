"""The page of a study: report.html and report.md, from judge.json and run folders alone."""

import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from common.errors import printable
from common.output import check_replaceable, code, markdown, prose, write_bytes_atomically, writing
from evidence import page, stability
from evidence.comparison import Comparison
from evidence.names import short_name

from .declaration import JudgedArm
from .finished import rate_at
from .plan import found_by
from .rates import Screen
from .starts import Start, may_be_matched, why_unmatched
from .verdict import Outcome, label

BEYOND = (1, 2)  # octaves above the best rate at which the loss is told: double and four times
METHODS = """\
Every arm is trained from scratch with the same data, in the same order, and the same settings; only
its norms, its learning rate and, where its words say so, its initial gain, the scale of its initial
weights (init_std) or its optimizer are its own. Of several values of these, each has learning rates
of its own, and the one with the lowest loss goes on. The learning rate is found for each arm by
itself, with two seeds that the verdict does not use: octaves around the config's rate, one more
beyond an end that is best, then a second seed at the best two and beside the best, and the vertex
of the parabola over the logarithm of the rate. The verdict is on new seeds. A difference is the
arm's loss minus the baseline's at the same seed, over every token of the val split after the last
step, nats per token. The interval is a paired t interval at the level of Holm's step for that arm.
Its standard error counts the seeds, and what the screenings leave open in both rates: the root mean
square of what a wrong rate costs, simulated for a parabola as steep as the measured one and runs as
noisy as those of all screenings of the study together. Where a neighbour of the best rate diverged,
a third of the rise on its other side is counted, for a better rate may lie nearer to the
divergence. Intervals cover other seeds, not other texts, sizes or lengths.
In tokens: how many more tokens the baseline would need for the arm's loss, by the slope of its loss
over the logarithm of tokens in the later half of its runs; the decay of the learning rate is in
that slope, so the share is a lower estimate."""


class Table(NamedTuple):
    """A table of the page."""

    header: list[str]
    rows: list[list[Any]]


# ------------------------------------------------------------------------------------------- tables


def verdicts(outcome: Outcome) -> Table:
    """Return the table of verdicts in the loss that decides."""
    header = ["arm", "verdict", "difference, nats", "interval", "in tokens", "seeds", "excluded"]
    rows = []
    for judged in outcome.record.arms[1:]:
        name = label(judged)
        row = outcome.deciding.get(name)
        if row is None:
            rows.append([short_name(name), "no verdict", "", "", "", "", ""])
            continue
        low, high = row.verdict.interval
        rows.append(
            [
                short_name(name),
                row.word,
                row.show(row.estimate.mean),
                row.show_interval(row.verdict.interval),
                row.show_tokens(),
                len(row.seeds),
                f"gain above {max(-low, 0):.4f}, loss above {max(high, 0):.4f}",
            ]
        )
    return Table(header, rows)


def settings_of_arms(outcome: Outcome) -> Table:
    """Return what each arm had of its own: start, rate, parameters."""
    header = ["arm", "as it was trained", "start", "learning rate"]
    header += ["error of the rate, nats", "parameters"]
    header += ["bytes a token of a block's norms", "minutes a run", "declared"]
    record = outcome.record
    rows = []
    for judged in record.arms:
        name = label(judged)
        rate = outcome.rates[name]
        size = record.sizes.get(judged.text, {})
        rows.append(
            [
                short_name(name),
                outcome.chosen[name].text,
                start_of(outcome, judged),
                f"{rate:g}" if rate else "not settled",
                f"{outcome.rate_errors[name]:.4f}" if rate else "",
                f"{size['parameters']:,}" if "parameters" in size else "",
                bytes_text(size),
                f"{record.seconds[judged.text] / 60:.1f}",
                "after the verdict" if name in outcome.later else "before the first run",
            ]
        )
    return Table(header, rows)


def bytes_text(size: dict[str, Any]) -> str:
    """Say what an arm's norms move, or that it could not be counted."""
    count = size.get("bytes_a_token")
    return f"{count:,.0f}" if count is not None else size.get("problem", "")


def start_of(outcome: Outcome, judged: JudgedArm) -> str:
    """Say at which scale an arm's norms start, beside the baseline's."""
    if judged == outcome.record.baseline:
        return "the baseline"
    if judged.matches:
        return "matched to the baseline's scale"
    lines = outcome.record.starts.get(judged.text, [])
    found = [Start(*line) for line in lines if line[-1]]
    if not found:
        return "not measured"
    low, high = min(start.ratio for start in found), max(start.ratio for start in found)
    text = f"{low:.2f} to {high:.2f} times the baseline's scale, where both have a norm"
    has_matched = any(other.matches == judged.text for other in outcome.record.arms)
    if may_be_matched(judged) and not has_matched and (why := why_unmatched(found)):
        text += f"; {why}"
    is_first = outcome.chosen[label(judged)] == judged.options[0]
    return text if is_first else f"{text}, with {judged.options[0].text}"


def losses_by_rate(outcome: Outcome) -> Table:
    """Return the losses of the screenings, and what a rate that is too high costs."""
    octaves = sorted({octave for screen in outcome.all_screens for octave in screen.losses})
    rates = [f"{rate_at(outcome.record, octave):g}" for octave in octaves]
    header = ["arm", *rates, "chosen", "at twice the best rate", "at four times"]
    rows = []
    for name, its in outcome.options.items():
        for option, screen in its.items():
            rate = outcome.rates[name]
            chosen = f"{rate:g}" if rate else "not settled"
            if option != outcome.chosen[name]:
                chosen = "another is better"
            cells = [cell_of(screen, octave) for octave in octaves]
            called = name if len(its) == 1 else label(option)
            rows.append([short_name(called), *cells, chosen, *rises(screen)])
    return Table(header, rows)


def cell_of(screen: Screen, octave: int) -> str:
    """Return the loss of a screening at an octave, and by how many seeds if not by both."""
    if octave not in screen.losses:
        return ""
    only_one = " (1 seed)" if len(screen.losses[octave]) == 1 else ""
    return loss(screen.at(octave)) + only_one


def rises(screen: Screen) -> list[str]:
    """Return what the loss rises by above the best rate, nats."""
    if not screen.losses:
        return [""] * len(BEYOND)
    found = []
    for octaves in BEYOND:
        there = screen.best + octaves
        is_run = there in screen.losses
        found.append(
            loss(screen.at(there) - screen.at(screen.best), "+.4f") if is_run else "not run"
        )
    return found


def loss(value: float, form: str = ".4f") -> str:
    """Format a loss; one that is infinite diverged."""
    return "diverged" if value == float("inf") else f"{value:{form}}"


def stability_table(outcome: Outcome) -> Table:
    """Return what happened in the judged runs beside the loss."""
    rows = []
    for name, runs in outcome.arms.items():
        speeds = [run.metrics["tok_per_s"] for run in runs.values() if "tok_per_s" in run.metrics]
        speed = f"{sum(speeds) / len(speeds):,.0f}" if speeds else ""
        rows.append([*stability.row(short_name(name), runs.values(), missing=""), speed])
    return Table([*stability.HEADER, "tokens a second"], rows)


def checks(outcome: Outcome) -> Table:
    """Return what was checked of each arm before it was trained."""
    rows = [
        [short_name(text), what, "right" if is_ok else "FAILED", figure]
        for text, its in outcome.record.checks.items()
        for what, is_ok, figure in its
    ]
    return Table(["arm", "check", "", "figure"], rows)


def row_cells(outcome: Outcome, judged: JudgedArm) -> list[str]:
    """Return an arm's row of the table of judged norms in docs/norms.md, as Markdown."""
    row = outcome.deciding.get(label(judged))
    base = outcome.arms.get(outcome.baseline, {})
    lengths = {run.config["max_iters"] * run.start["tokens_per_step"] for run in base.values()}
    trained = "".join(f", {tokens / 1e6:.1f} M" for tokens in lengths)
    settings = outcome.record.declaration.settings
    cells = [
        code(judged.text),
        code(outcome.record.baseline.text),
        f"{settings['n_layer']} x {settings['n_embd']}{trained}",
    ]
    if row is None or row.no_verdict:
        return [*cells, "", "", "", "no verdict"]
    return [
        *cells,
        f"{row.show(row.estimate.mean)} ({row.show_interval(row.verdict.interval)})",
        row.show_tokens(),
        str(len(row.seeds)),
        row.word,
    ]


# -------------------------------------------------------------------------------------------- words


def about_start(outcome: Outcome) -> list[str]:
    """Say what the start explains of each difference whose start was matched."""
    lines = []
    for arm, matched, share in outcome.explained:
        low, high = share.interval()
        lines.append(
            f"Start: {short_name(arm)} as written minus {short_name(matched)}, which begins at the "
            f"baseline's scale: {share.mean:+.4f} nats per token (95 % interval {low:+.4f} to "
            f"{high:+.4f}). That much of its difference is the start, not the formula."
        )
    return lines


def about_power(outcome: Outcome) -> list[str]:
    """Say what these seeds find, with the noise of the screenings."""
    sd = outcome.noise
    if not sd:
        return []
    record = outcome.record
    lines = []
    for family in record.families:
        for judged in family:
            name = label(judged)
            errors = (outcome.rate_errors[name], outcome.rate_errors[outcome.baseline])
            one = (sum(error**2 for error in errors) / 2) ** 0.5 / sd
            found = found_by(record.seeds, len(family), one) * sd * 2**0.5
            lines.append(
                f"Power: {record.seeds} seeds find a difference of {found:.4f} nats between "
                f"{short_name(name)} and {short_name(outcome.baseline)} with 80 % chance, by the "
                f"noise of the screenings (SD {sd:.4f} a run)."
            )
    return lines


def next_command(outcome: Outcome) -> str:
    """Return the command that repeats the study with new seeds."""
    record = outcome.record
    needed = [row.needed for row in outcome.deciding.values() if row.needed]
    seeds = max([record.seeds, *needed])
    first = record.declaration.first_seed + 100 * (1 + record.seeds // 100)
    kept = [
        word
        for word in record.command
        if not word.startswith(
            ("--arms=", "--seeds=", "--first_seed=", "--out=", "--hours=", "--dry_run", "--keep=")
        )
    ]
    arms = shlex.join(judged.text for judged in record.arms if not judged.matches)
    words = [f"--arms={arms}", *kept, f"--first_seed={first}", f"--seeds={seeds}"]
    if rate := better_middle(outcome):
        words = [word for word in words if not word.startswith(("--learning_rate=", "--min_lr="))]
        words.append(f"--learning_rate={rate:g}")
        if lowest := record.declaration.settings.get("min_lr"):
            words.append(f"--min_lr={rate * lowest / record.declaration.rate:.6g}")
    words.append(f"--out={outcome.out}-2")
    return printable(f"python judge.py {shlex.join(words)}")


def better_middle(outcome: Outcome) -> float | None:
    """Return a rate around which all best ones lie; None where that of the config is one.

    Of an arm without a verdict the best rate was the last one that may be tried.
    """
    finite = {
        name: screen.best
        for name, screen in outcome.screens.items()
        if screen.is_over and math.isfinite(screen.lowest)
    }
    if all(outcome.rates[name] is not None for name in finite):
        return None
    return rate_at(outcome.record, (min(finite.values()) + max(finite.values())) // 2)


def declaration_lines(outcome: Outcome) -> list[str]:
    """Say what was declared, when, and by which digests."""
    record = outcome.record
    declared = record.declaration
    arms = ", ".join(f"{judged.text}" for judged in declared.arms)
    file = f"; norm file {record.norm_file_name}, SHA-256 {declared.norm_sha256}"
    lines = [
        f"Declared {record.day}, before the first run: {arms}; {record.seeds} seeds from "
        f"{declared.first_seed} ({record.seeds_from}); rates by the seeds "
        f"{declared.screen_seeds[0]} and {declared.screen_seeds[1]}. Study: {declared.study}.",
        f"Code {declared.code[:16]}; data {declared.data}{file if declared.norm_sha256 else ''}.",
        *declared.rules,
    ]
    for later in record.later:
        added = ", ".join(judged.text for judged in later.arms)
        lines.append(f"After the verdict, {later.day}: {added}; each tested alone.")
    if record.anyway:
        lines.insert(0, "A check failed, and the study was begun anyway.")
    return lines


def header(outcome: Outcome) -> str:
    """Say in a line what was trained, and on what."""
    runs = [run for its in outcome.arms.values() for run in its.values()]
    if not runs:
        return "No judged run is over."
    devices = ", ".join(sorted({run.start["device"] for run in runs}))
    torch = ", ".join(sorted({run.start["versions"]["torch"] for run in runs}))
    tokens = runs[0].config["max_iters"] * runs[0].start["tokens_per_step"]
    screened = sum(len(its) for s in outcome.all_screens for its in s.losses.values())
    return (
        f"{len(runs)} judged runs and {screened} of the screenings, {tokens:,} training tokens "
        f"each. Device: {devices}; torch {torch}."
    )


def settings_line(outcome: Outcome) -> str:
    """Name the settings that all arms share."""
    return ", ".join(
        f"{key}={value}" for key, value in sorted(outcome.record.declaration.settings.items())
    )


# ---------------------------------------------------------------------------------------- the files


def markdown_of(outcome: Outcome) -> str:
    """Return report.md."""
    parts = [f"# Judged: {prose(title(outcome))}", f"**{prose(outcome.sentence())}**"]
    parts += map(prose, (header(outcome), *about_start(outcome), *about_power(outcome)))
    sections = {
        "Verdicts": verdicts(outcome),
        "Arms": settings_of_arms(outcome),
        "Loss by learning rate": losses_by_rate(outcome),
        "Stability and speed": stability_table(outcome),
        "Checks": checks(outcome),
    }
    for name, table in sections.items():
        if table.rows:
            cells = [[prose(str(cell)) for cell in row] for row in table.rows]
            parts += [f"## {name}", markdown(map(prose, table.header), cells)]
    parts += ["## Methods", METHODS, "## Declaration"]
    parts.append("\n".join(f"- {prose(line)}" for line in declaration_lines(outcome)))
    parts += [f"Shared settings: {prose(settings_line(outcome))}.", "## Next"]
    parts.append(f"With new seeds:\n\n    {next_command(outcome)}")
    if outcome.arms.get(outcome.baseline):
        rows = (row_cells(outcome, judged) for judged in outcome.record.arms[1:])
        text = "\n".join(f"    | {' | '.join(cells)} |" for cells in rows)
        parts.append(f"For the table of judged norms (CONTRIBUTING.md):\n\n{text}")
    if outcome.left_out:
        parts += ["## Left out", "\n".join(f"- {prose(line)}" for line in outcome.left_out)]
    return "\n\n".join(parts) + "\n"


def title(outcome: Outcome) -> str:
    """Return which arms are judged against which."""
    names = ", ".join(short_name(label(judged)) for judged in outcome.record.arms[1:])
    return f"{names} against {short_name(outcome.baseline)}"


def rates_picture(outcome: Outcome) -> page.Html:
    """Draw the loss over the learning rate, each arm's chosen rate marked."""
    figure = go.Figure()
    names = dict.fromkeys(outcome.screens)
    for name, screen in outcome.screens.items():
        octaves = [o for o in sorted(screen.losses) if loss(screen.at(o)) != "diverged"]
        if not octaves:
            continue
        color = page.color(names, name)
        figure.add_scatter(
            x=[rate_at(outcome.record, octave) for octave in octaves],
            y=[screen.at(octave) for octave in octaves],
            mode="lines+markers",
            line={"color": color},
            name=short_name(name),
            meta=[name],
        )
        if rate := outcome.rates[name]:
            figure.add_vline(rate, line_width=1, line_dash="dot", line_color=color)
    figure.update_xaxes(type="log", title="learning rate (dotted: chosen)")
    figure.update_yaxes(title="val loss, nats per token")
    return page.styled(figure, 360)


def html_of(outcome: Outcome) -> bytes:
    """Return report.html."""
    arms = outcome.arms
    paragraphs = [page.element("p", page.element("strong", outcome.sentence()))]
    lines = (*about_start(outcome), *about_power(outcome))
    paragraphs += [page.element("p", line) for line in lines]
    sections = {"Verdict": page.joined([*paragraphs, table_of(verdicts(outcome))])}
    deciding: list[Comparison] = [*outcome.deciding.values()]
    if deciding:
        sections["Differences"] = page.forest(deciding, arms)
    sections |= {
        "Loss by learning rate": page.joined(
            [rates_picture(outcome), table_of(losses_by_rate(outcome))]
        ),
        "Validation loss": page.losses(arms),
        "Residual stream after training": page.stream(arms),
        "Scale at the output": page.output(arms),
        "Stability and speed": table_of(stability_table(outcome)),
        "Arms": table_of(settings_of_arms(outcome)),
        "Checks": table_of(checks(outcome)),
        "Methods": page.element("p", METHODS),
        "Declaration": page.joined(
            page.element("p", line)
            for line in (*declaration_lines(outcome), f"Shared: {settings_line(outcome)}.")
        ),
        "Next": page.element("pre", next_command(outcome)),
    }
    if outcome.left_out:
        sections["Left out"] = page.joined(page.element("p", line) for line in outcome.left_out)
    return page.write_page(f"Judged: {title(outcome)}", header(outcome), arms, sections)


def table_of(table: Table) -> page.Html:
    """Return a table of the page; "" without rows."""
    if not table.rows:
        return page.Html()
    return page.table(table.header, table.rows, [""] * len(table.rows))


def write_page(out: Path, outcome: Outcome) -> Path:
    """Write report.md and report.html; return the latter's path. Raises UserError."""
    with writing(out):
        files = {"report.md": markdown_of(outcome).encode(errors="backslashreplace")}
        files["report.html"] = html_of(outcome)
        for name, content in files.items():
            begins = b"# Judged" if name == "report.md" else b"<!doctype html>"
            check_replaceable(out / name, begins)
            write_bytes_atomically(out / name, content)
    return out / "report.html"
