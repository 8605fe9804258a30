"""Check the suggested alpha: is it near the best one?

    python repro/posthoc_alpha.py results/cpu/posthoc/alpha.jsonl TEXT MODEL [MODEL ...]
        (a step of posthoc.sh)

Half the windows of TEXT suggest coupled_first and alpha. On the other half, for every k < L, the KL
at the suggested alpha is compared with the lowest KL on a grid of step 0.01 that reaches 0.1 to
both sides. One line for each model and k.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from common.environment import environment, faster_float32_products
from common.errors import run_program
from common.output import check_replaceable
from load import load_model
from posthoc.coupling import GRID, Calibration, suggest_first, text_windows

WINDOWS = 32
LENGTH = 256  # tokens of a window
BUDGET = 0.01  # of KL, nats a token
REACH = 10  # steps of the grid to either side
SHOWN = ("model", "coupled_first", "alpha", "kl_held_out", "best_alpha", "ratio", "kl_per_layer")


def main(argv: list[str]) -> None:
    """Write one line for each model and k."""
    target, text, *specs = argv
    check_replaceable(Path(target), rb'{"model": .*"coupled_first"')
    with open(target, "w", encoding="utf-8") as file:
        for spec in specs:
            model = load_model(spec)
            faster_float32_products(model.config.n_embd, model.config.head_channels)
            windows = text_windows(text, model.meta, min(LENGTH, model.config.block_size), WINDOWS)
            calibration = Calibration(model, windows[0::2])
            judge = Calibration(model, windows[1::2])
            first, choices = suggest_first(calibration, BUDGET)
            for k, choice in enumerate(choices[:-1]):
                held_out = judge.kl(choice.plan, choice.alpha)
                nearest = round(choice.alpha / GRID)
                points = range(max(1, nearest - REACH), nearest + REACH + 1)
                grid = {point * GRID: judge.kl(choice.plan, point * GRID) for point in points}
                best = min(grid, key=grid.get)
                layers = calibration.alpha(choice.plan)
                row = {
                    "model": spec,
                    "coupled_first": k,
                    "plan": choice.plan,
                    "suggested": k == first,
                    "budget": BUDGET,
                    "alpha": choice.alpha,
                    "kl_calibration": choice.kl,
                    "kl_held_out": held_out,
                    "best_alpha": best,
                    "best_kl": grid[best],
                    "ratio": held_out / grid[best],
                    "kl_per_layer": judge.kl(choice.plan, layers),
                    "kl_alpha_1": judge.kl(choice.plan, 1.0),
                    "alpha_per_layer": layers,
                    **environment(torch.device("cpu")),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                print({name: row[name] for name in SHOWN}, flush=True)


if __name__ == "__main__":
    run_program(main, __doc__)
