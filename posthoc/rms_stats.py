"""Measure which norms of a trained model can share a statistic, and what KL that costs.

    python -m posthoc.rms_stats out/rms --text=book.txt
        sizes and ratios per block; what to couple
    python -m posthoc.rms_stats Qwen/Qwen3-0.6B --text=a.jsonl.xz \\
      --plot=fig3.png --across=True --out=stats.jsonl

CoupledNorm divides the stream by the RMS of an earlier position; training/stream.py says how sizes
and drift are measured. The program reads any model (load.py) and any text. Half of the text's
windows are measured and calibrate alpha; the other half judge. It suggests coupled_first and alpha
for a budget of KL (posthoc/coupling.py). The last line of output is JSON.
"""

import common.interrupt  # noqa: F401

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.environment import environment, faster_float32_products, find_device
from common.errors import ConfigError, run_program
from common.output import append_json, check_replaceable
from configurator import check_ranges, key, parse_args
from load import load_model
from posthoc.coupling import Calibration, greedy, ratios, refusal, suggest_first, text_windows
from training.stream import token_rms

QUANTILES = (0.05, 0.5, 0.95)
QUANTILE_SAMPLE = 1_000_000  # tokens, about; torch.quantile takes no more than 16 million


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
        check_ranges(self)


def summary(rms: Tensor) -> list[dict[str, Any]]:
    """Describe the sizes at each position, one record each.

    Mean, SD and quantiles are over tokens, without the first of each window, whose mean stands
    apart.

    Args:
        rms: RMS of the stream, (2L + 1, N, T), float64.
    """
    quantiles = torch.tensor(QUANTILES).double()
    rows = []
    for position, sizes in enumerate(rms):
        later = sizes[:, 1:].flatten()  # (N (T - 1),)
        every = len(later) // QUANTILE_SAMPLE + 1
        row = {
            "position": position,
            "mean": float(later.mean()),
            "sd": float(later.std()),
            "quantiles": torch.quantile(later[::every], quantiles).tolist(),
            "first": float(sizes[:, 0].mean()),
        }
        rows.append(row)
    return rows


def blocks_table(rms: Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    """Return lines to print and records: sizes in every block, and how they relate.

    Args:
        rms: RMS of the stream, (2L + 1, N, T).
    """
    rows = summary(rms)
    records = []
    sizes_header = f"{'mean     SD (5 .. 95 %)':36}"
    lines = [
        f"{'block':8}{'RMS before attention':36}{'before MLP':36} {'MLP / attention':27} "
        "first token",
        f"{'':8}{sizes_header}{sizes_header} {'means':9}{'geom.':9}{'squares':9}    RMS    ratio",
    ]
    for block in range(len(rows) // 2):
        attention = rows[2 * block]
        mlp = rows[2 * block + 1]
        ratio = ratios(rms, 2 * block + 1, 2 * block)
        sizes = ""
        for row in (attention, mlp):
            low, _, high = row["quantiles"]
            sizes += f"{row['mean']:<8.4g} {row['sd']:.2g} ({low:.3g} .. {high:.3g})".ljust(36)
        numbers = "".join(f"{ratio[how]:<9.4f}" for how in ("means", "geometric", "least_squares"))
        first_ratio = mlp["first"] / attention["first"]
        lines.append(f"{block:<6}  {sizes} {numbers} {attention['first']:8.4g} {first_ratio:8.4f}")
        record = {
            "block": block,
            "attention": attention,
            "mlp": mlp,
            "ratio": ratio,
            "first_ratio": first_ratio,
        }
        records.append(record)
    return lines, records


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


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, spec = parse_args(StatsConfig, argv, __doc__, spec=True)
    if config.out:
        check_replaceable(Path(config.out), rb'{"spec": .*"blocks"')
    if config.plot:
        from common.plotting import check_picture  # matplotlib takes a second to import

        check_picture(Path(config.plot))
    model = load_model(spec)
    device = find_device(config.device)
    length = min(config.length, model.config.block_size)
    windows = text_windows(config.text, model.meta, length, config.windows)
    model.to(device)
    if device.type == "cpu":
        faster_float32_products(model.config.n_embd, model.config.head_channels)

    shares = "s" in model.plan.letters
    why = refusal(model)
    if shares or why:
        # Nothing to suggest; sizes alone.
        lines, records = blocks_table(token_rms(model, windows))
        if shares:
            why = "it shares statistics already"
        lines.append(f"norm plan {model.plan}: {why}")
        print("\n".join(lines))
        finish(config, {"spec": spec, "blocks": records, **environment(device)})
        return

    calibration = Calibration(model, windows[0::2])
    judge = Calibration(model, windows[1::2])
    lines, records = blocks_table(calibration.rms)
    print("\n".join(lines))
    result: dict[str, Any] = {
        "spec": spec,
        "blocks": records,
        "budget": config.budget,
        "tokens": calibration.windows.numel(),
    }
    print(
        "\ncoupled_first: KL in nats a token here (and on the other windows); "
        f"budget {config.budget:g}"
    )
    result["one_alpha"] = print_choices(calibration, judge, False, config.budget)
    result["per_layer"] = print_choices(calibration, judge, True, config.budget)

    print("\nstatistics saved (launches in arm B), cheapest position first, alpha per position")
    curve = []
    for choice in greedy(calibration, config.budget, config.across):
        held_out = judge.kl(choice.plan, choice.alpha)
        curve.append({**asdict(choice), "saved": choice.saved, "kl_held_out": held_out})
        print(f"  {choice.saved:2d}  {choice.kl:.3e} ({held_out:.3e})  {choice.plan}")
    result["curve"] = curve
    if config.plot:
        from evidence.plots import plot_sizes  # matplotlib takes a second to import

        plot_sizes(summary(calibration.rms), curve[-1]["plan"], Path(config.plot), spec)
    finish(config, result | environment(device))


def finish(config: StatsConfig, result: dict[str, Any]) -> None:
    """Write the JSON line, to standard output and to the file."""
    if config.out:
        append_json(Path(config.out), result)
    print(json.dumps(result))


if __name__ == "__main__":
    run_program(main)
