"""Which norms of a trained model can share a statistic: sizes of the residual stream, and the KL
that sharing costs.

    python -m posthoc.rms_stats out/rms --text=book.txt
        sizes and ratios per block; what to couple
    python -m posthoc.rms_stats Qwen/Qwen3-0.6B --text=a.jsonl.xz \\
      --plot=fig3.png --across=True --out=stats.jsonl

CoupledNorm divides the stream by the RMS of an earlier position; training/stream.py says how sizes
and drift are measured. The program reads any model (see load.py) and any text. Every second window
of it measures and calibrates, the others judge. It suggests coupled_first and alpha for a budget of
KL (posthoc/coupling.py). The last line of output is JSON.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.environment import environment, faster_float32_products, find_device
from common.errors import ConfigError, run_program
from common.output import append_json
from configurator import check_least, key, parse_args
from load import load_model
from posthoc.coupling import Calibration, greedy, ratios, suggest_first, text_windows
from training.stream import token_rms

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class StatsConfig:
    """Keys of posthoc/rms_stats.py."""

    text: str = key("", "files of text, with commas between: jsonl, jsonl.xz, parquet, txt")
    windows: int = key(64, "windows of text; half of them calibrate, half judge", least=4)
    length: int = key(256, "tokens of a window, at most the model's context", least=2)
    budget: float = key(
        0.01, "largest KL from the model as it is, nats a token, for what is suggested", least=0
    )
    across: bool = key(False, "let blocks share the statistic of blocks before them too")
    plot: str = key("", "picture of the sizes per block, as the paper's Figure 3 ('': none)")
    out: str = key("", "JSONL file to append the results to ('': none)")
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("text: name a file of text to measure on, --text=FILE")
        check_least(self)


def summary(rms: Tensor) -> list[dict[str, Any]]:
    """One row for each position of rms (2L + 1, N, T): mean, SD and quantiles over tokens; the
    first token apart.
    """
    rows = []
    for position, sizes in enumerate(rms):
        later = sizes[:, 1:].flatten()
        quantiles = torch.quantile(
            later[:: len(later) // 1_000_000 + 1], torch.tensor(QUANTILES).double()
        ).tolist()
        rows.append(
            {
                "position": position,
                "mean": float(later.mean()),
                "sd": float(later.std()),
                "quantiles": quantiles,
                "first": float(sizes[:, 0].mean()),
            }
        )
    return rows


def blocks_table(rms: Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines for people and records: sizes before attention and MLP of every block, and how they
    relate.
    """
    rows, records = summary(rms), []
    lines = [
        (
            f"{'block':8}{'RMS before attention':36}{'before MLP':36} {'MLP / attention':27} first "
            "token"
        ),
        f"{'':8}{'mean     SD (5 .. 95 %)':36}{'mean     SD (5 .. 95 %)':36} "
        f"{'means':9}{'geom.':9}{'squares':9}    RMS    ratio",
    ]
    for block in range(len(rows) // 2):
        a, m = rows[2 * block], rows[2 * block + 1]
        found = ratios(rms, 2 * block + 1, 2 * block)
        sizes = ""
        for row in (a, m):
            low, _, high = row["quantiles"]
            sizes += f"{row['mean']:<8.4g} {row['sd']:.2g} ({low:.3g} .. {high:.3g})".ljust(36)
        numbers = "".join(f"{found[how]:<9.4f}" for how in ("means", "geometric", "least_squares"))
        first = m["first"] / a["first"]
        lines.append(f"{block:<6}  {sizes} {numbers} {a['first']:8.4g} {first:8.4f}")
        records.append(
            {"block": block, "attention": a, "mlp": m, "ratio": found, "first_ratio": first}
        )
    return lines, records


def main(argv: list[str]) -> None:
    config, spec = parse_args(StatsConfig, argv, __doc__, spec=True)
    model, device = load_model(spec), find_device(config.device)
    windows = text_windows(
        config.text, model.meta, min(config.length, model.config.block_size), config.windows
    )
    model.to(device)
    if device.type == "cpu":
        faster_float32_products(model.config.n_embd, model.config.head_channels)
    shares = "s" in model.plan.letters
    if shares or model.config.norm_type not in ("rms", "coupled"):
        lines, records = blocks_table(token_rms(model, windows))
        why = (
            "it shares statistics already" if shares else "only RMSNorm can be coupled (convert.py)"
        )
        print(
            "\n".join(
                [*lines, f"norm_type={model.config.norm_type}, norm plan {model.plan}: {why}"]
            )
        )
        return finish(config, {"spec": spec, "blocks": records, **environment(device)})
    calibration, judge = (Calibration(model, windows[start::2]) for start in (0, 1))
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
    for per_layer in (False, True):
        first, choices = suggest_first(calibration, config.budget, per_layer)
        for k, choice in enumerate(choices):
            alpha = "per layer" if per_layer else f"{choice.alpha:.3f}"
            mark = "  <- suggested" if k == first else ""
            print(
                f"  {k}  alpha {alpha}  {choice.kl:.3e} "
                f"({judge.kl(choice.plan, choice.alpha):.3e}){mark}"
            )
        result["per_layer" if per_layer else "one_alpha"] = {
            "coupled_first": first,
            "alpha": choices[first].alpha,
            "kl": [choice.kl for choice in choices],
            "kl_held_out": [judge.kl(c.plan, c.alpha) for c in choices],
        }
    print("\nstatistics saved (launches in arm B), cheapest position first, alpha per position")
    curve = []
    for choice in greedy(calibration, config.budget, config.across):
        held_out = judge.kl(choice.plan, choice.alpha)
        curve.append({**asdict(choice), "saved": choice.saved, "kl_held_out": held_out})
        print(f"  {choice.saved:2d}  {choice.kl:.3e} ({held_out:.3e})  {choice.plan}")
    if config.plot:
        from evidence.plots import plot_sizes

        plot_sizes(summary(calibration.rms), curve[-1]["plan"], Path(config.plot), spec)
    finish(config, result | {"curve": curve, **environment(device)})


def finish(config: StatsConfig, result: dict[str, Any]) -> None:
    """The JSON line, to standard output and to the file."""
    if config.out:
        append_json(Path(config.out), result)
    print(json.dumps(result))


if __name__ == "__main__":
    run_program(main)
