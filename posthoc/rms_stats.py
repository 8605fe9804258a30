"""Measure which norms of a trained model can share a statistic, and what KL that costs.

    python -m posthoc.rms_stats out/rms --text=book.txt
        sizes and ratios per block; what to couple
    python -m posthoc.rms_stats Qwen/Qwen3-0.6B --text=a.jsonl.xz \\
      --plot=fig3.png --across=True --out=stats.jsonl

CoupledNorm divides the stream by the RMS of an earlier position; training/stream.py says how sizes
and drift are measured. The program reads any model (load.py) and any text. Half of the text's
windows are measured and calibrate alpha; the other half judge. It suggests coupled_first and alpha
for a budget of KL (posthoc/coupling.py). --out keeps all numbers.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.environment import environment, faster_float32_products, find_device
from common.errors import ConfigError, run_program
from common.output import append_json, check_replaceable, markdown
from configurator import key, parse_args
from load import load_model
from norm_types import SHARED
from posthoc.coupling import Calibration, greedy, ratios, refusal, suggest_first, text_windows
from training.stream import token_rms

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class StatsConfig:
    """Keys of posthoc/rms_stats.py."""

    text: str = key("", "files of text, with commas between: jsonl, jsonl.xz, parquet, txt")
    windows: int = key(64, "windows of text; half of them calibrate, half judge", least=4)
    length: int = key(256, "tokens of a window, at most the model's context", least=2)
    budget: float = key(
        0.01, "largest KL from the given model, nats a token, for what is suggested", least=0
    )
    across: bool = key(False, "let blocks share the statistic of earlier blocks too")
    plot: str = key("", "picture of the sizes per block, as the paper's Figure 3 ('': none)")
    out: str = key("", "JSONL file to append the results to ('': none)")
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("text: name a file of text to measure on, --text=FILE")


def summary(rms: Tensor) -> list[dict[str, Any]]:
    """Describe the sizes at each position, one record each.

    Mean, SD and quantiles are over tokens, without the first of each window, whose mean stands
    apart.

    Args:
        rms: RMS of the stream, (2L + 1, N, T), float64.
    """
    rows = []
    for position, sizes in enumerate(rms):
        later = sizes[:, 1:].flatten()  # (N (T - 1),)
        row = {
            "position": position,
            "mean": float(later.mean()),
            "sd": float(later.std()),
            "quantiles": np.quantile(later.numpy(), QUANTILES).tolist(),
            "first": float(sizes[:, 0].mean()),
        }
        rows.append(row)
    return rows


def blocks_table(rms: Tensor) -> tuple[str, list[dict[str, Any]]]:
    """Return a table and records: sizes in every block, and how they relate.

    Args:
        rms: RMS of the stream, (2L + 1, N, T).
    """
    rows = summary(rms)
    records = []
    lines = []
    for block in range(len(rows) // 2):
        attention, mlp = rows[2 * block : 2 * block + 2]
        record = {
            "block": block,
            "attention": attention,
            "mlp": mlp,
            "ratio": ratios(rms, 2 * block + 1, 2 * block),
            "first_ratio": mlp["first"] / attention["first"],
        }
        records.append(record)
        cells = []
        for row in (attention, mlp):
            low, _, high = row["quantiles"]
            cells.append(f"{row['mean']:.4g}, {row['sd']:.2g} ({low:.3g} .. {high:.3g})")
        numbers = [*record["ratio"].values(), record["first_ratio"]]
        lines.append([block, *cells, *(f"{number:.4f}" for number in numbers)])
    sizes = "mean, SD (5 .. 95 %)"
    header = ["block", f"RMS before attention: {sizes}", f"before the MLP: {sizes}"]
    header += ["ratio of means", "geometric mean", "least squares", "of the first token"]
    return markdown(header, lines), records


def print_choices(
    calibration: Calibration, judge: Calibration, per_layer: bool, budget: float
) -> dict[str, Any]:
    """Print the KL of every coupled_first, and return what is suggested as a record."""
    first, choices = suggest_first(calibration, budget, per_layer)
    held_out = [judge.kl(choice.plan, choice.alpha) for choice in choices]
    for k, choice in enumerate(choices):
        alpha = "per layer" if per_layer else f"{choice.alpha:.3f}"
        mark = "  <- suggested" if k == first else ""
        print(f"  {k}  alpha {alpha}  {choice.kl:.3e} ({held_out[k]:.3e}){mark}")
    return {
        "coupled_first": first,
        "alpha": choices[first].alpha,
        "kl": [choice.kl for choice in choices],
        "kl_held_out": held_out,
    }


def suggest(config: StatsConfig, calibration: Calibration, judge: Calibration) -> dict[str, Any]:
    """Print what can be coupled within the budget, and return it as a record."""
    result: dict[str, Any] = {
        "budget": config.budget,
        "tokens": calibration.windows.numel(),
        "curve": [],
    }
    print(
        "\ncoupled_first: KL in nats a token here (and on the other windows); "
        f"budget {config.budget:g}"
    )
    result["one_alpha"] = print_choices(calibration, judge, False, config.budget)
    result["per_layer"] = print_choices(calibration, judge, True, config.budget)
    print("\nstatistics saved (launches in arm B), cheapest position first, alpha per position")
    for choice in greedy(calibration, config.budget, config.across):
        held_out = judge.kl(choice.plan, choice.alpha)
        record = {**asdict(choice), "saved": choice.saved, "kl_held_out": held_out}
        result["curve"].append(record)
        print(f"  {choice.saved:2d}  {choice.kl:.3e} ({held_out:.3e})  {choice.plan}")
    return result


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, spec = parse_args(StatsConfig, argv, __doc__, spec=True)
    if config.out:
        check_replaceable(Path(config.out), rb'{"spec": .*"blocks"')
    if config.plot:
        # matplotlib takes a second to import
        from common.plotting import check_picture
        from evidence.plots import plot_sizes

        check_picture(Path(config.plot))
    model = load_model(spec)
    device = find_device(config.device)
    length = min(config.length, model.config.block_size)
    windows = text_windows(config.text, model.meta, length, config.windows)
    model.to(device)
    if device.type == "cpu":
        faster_float32_products(model.config.n_embd, model.config.head_channels)
    result: dict[str, Any] = {"spec": spec}
    why = "it shares statistics already" if SHARED in model.plan.letters else refusal(model)
    if why:  # nothing to suggest; sizes alone
        shown, result["blocks"] = blocks_table(token_rms(model, windows))
        print(f"{shown}\nnorm plan {model.plan}: {why}")
    else:
        calibration = Calibration(model, windows[0::2])
        shown, result["blocks"] = blocks_table(calibration.rms)
        print(shown)
        result |= suggest(config, calibration, Calibration(model, windows[1::2]))
        if config.plot:
            plan = result["curve"][-1]["plan"]
            plot_sizes(summary(calibration.rms), plan, Path(config.plot), spec)
    result |= environment(device)
    if config.out:
        append_json(Path(config.out), result)


if __name__ == "__main__":
    run_program(main)
