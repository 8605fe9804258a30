"""Loss curves of one or more runs, as a PNG. Reads only what the runs wrote.

    python report.py out/demo                          writes out/demo/loss.png
    python report.py out/layer out/rms out/coupled --plot=loss.png

Each curve is one run: validation loss as a line with points, training loss faint behind it.
"""

import contextlib
import json
from pathlib import Path

import matplotlib

from errors import ConfigError, UserError, run_program

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe & Ito's colours, told apart under every common colour blindness; markers for black and white.
STYLES = list(zip(["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"], "osD^vPX"))


def read_log(run: Path) -> list[dict]:
    """Events of a run's log.jsonl; a last line torn by a kill is left out."""
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines[:-1]]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): is {run} a run folder?") from None
    except ValueError:
        raise UserError(f"{path}: not a log.jsonl: name run folders") from None
    with contextlib.suppress(ValueError, IndexError):
        records.append(json.loads(lines[-1]))
    if not records or records[0].get("event") != "start":
        raise UserError(f"{path}: does not begin with a start event: is it a run's log?")
    return records


def labels(starts: list[dict]) -> list[str]:
    """Names of the runs: their norm types if these differ, else their folders."""
    types = [start["config"]["norm_type"] for start in starts]
    return types if len(set(types)) == len(types) else [start["config"]["out_dir"] for start in starts]


def plot_losses(runs: list[Path], target: Path) -> None:
    """Validation and training loss over training tokens, one colour a run."""
    logs = [read_log(run) for run in runs]
    validation: list[float] = []  # losses of all runs, for the scale
    figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
    for index, (log, label) in enumerate(zip(logs, labels([log[0] for log in logs]), strict=True)):
        (color, marker), per_step = STYLES[index % len(STYLES)], log[0]["tokens_per_step"] / 1e6
        steps = [(r["step"] * per_step, r["loss"]) for r in log if r["event"] == "step" and r["loss"] is not None]
        evals = [(r["step"] * per_step, r["val_loss"]) for r in log if r["event"] == "eval"]
        evals = [(tokens, loss) for tokens, loss in evals if loss is not None]
        validation.extend(loss for _, loss in evals)
        axes.plot(*zip(*steps, strict=True), color=color, alpha=0.25, linewidth=1) if steps else None
        if evals:
            axes.plot(*zip(*evals, strict=True), color=color, marker=marker, markersize=5, linewidth=1.8,
                      label=f"{label}  (ends at {evals[-1][1]:.3f})")  # fmt: skip
    tokenizer_unit = "byte" if all(log[0]["config"]["n_vocab"] == 257 for log in logs) else "token"
    axes.set(xlabel="training tokens (millions)", ylabel=f"loss (nats per {tokenizer_unit})",
             title="Validation loss (points) and training loss (faint)")  # fmt: skip
    if not validation:
        raise UserError(f"{runs[0]}: no evaluation yet: nothing to draw")
    axes.set_ylim(min(validation) - 0.15, min(validation) + 1.3)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"plot={target}: cannot be written ({error})") from None
    plt.close(figure)


def main(argv: list[str]) -> None:
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    plots = [word.removeprefix("--plot=") for word in argv if word.startswith("--plot=")]
    runs = [Path(word) for word in argv if not word.startswith("--plot=")]
    unknown = [word for word in argv if word.startswith("-") and not word.startswith("--plot=")]
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown key; report.py knows --plot=FILE")
    if not runs:
        raise ConfigError("name one run folder or more")
    target = Path(plots[-1]) if plots else runs[0] / "loss.png"
    plot_losses(runs, target)
    print(f"wrote {target}")


if __name__ == "__main__":
    run_program(main)
