"""Teacher, coupled teacher, students and the teacher trained on, on the same held-out windows: a
table with intervals.

    python repro/posthoc_table.py out/posthoc val.jsonl.xz results/cpu/posthoc
        (the last step of posthoc.sh)

Writes models.jsonl and README.md's table. Val loss and KL(teacher || model) are in nats a token, a
token is a byte; the first position of a window is left out of the KL, not of the loss, where it
predicts the second byte. Differences to the teacher are paired by window, over all whole windows of
every document of the file; their intervals count documents, for windows of one are alike.
"""

import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

import torch

from common.environment import environment, faster_float32_products
from common.errors import ConfigError, run_program
from common.output import write_bytes_atomically
from common.stats import clustered
from data.documents import input_files, read_files
from data.tokenizers import load_tokenizer
from load import load_model
from posthoc.coupling import BATCH, Calibration, first_plan, text_windows, view
from posthoc.kl import kl_divergence

CALIBRATION = 16  # windows


def all_windows(text: str, meta: dict, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every document's whole windows.

    Returns:
        Token ids (N, length), and the number of each window's document (N,).

    Raises:
        ConfigError: fewer than two documents are long enough.
    """
    tokenizer = load_tokenizer(meta)
    windows = []
    documents: list[int] = []
    for number, document in enumerate(read_files(input_files(text))):
        ids = torch.tensor(tokenizer.encode_ordinary(document.text), dtype=torch.long)
        windows.append(ids[: len(ids) // length * length].view(-1, length))
        documents += [number] * len(windows[-1])
    if len(set(documents)) < 2:
        raise ConfigError(
            f"{text}: two documents of {length} tokens or more are needed: give more text"
        )
    return torch.cat(windows), torch.tensor(documents)


@torch.no_grad()
def judge(
    model, teacher, windows: torch.Tensor, states: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return val loss and KL from the teacher of each window, (N,) each, float64.

    Args:
        windows: token ids (N, T).
        states: the teacher's final hidden states, (BATCH, T, C) each.
    """
    losses = []
    kls = []
    for idx, taught in zip(windows.split(BATCH), states, strict=True):
        x = model.hidden(idx)
        log_p = model.logits(x)[:, :-1].double().log_softmax(-1)
        losses.append(-log_p.gather(-1, idx[:, 1:, None]).squeeze(-1).mean(1))
        kl = kl_divergence(
            x.flatten(0, 1).double(),
            model.head_weight().double(),
            taught.flatten(0, 1).double(),
            teacher.head_weight().double(),
            teacher.n_vocab,
        )
        kls.append(kl.view(idx.shape)[:, 1:].mean(1))
    return torch.cat(losses), torch.cat(kls)


def main(argv: list[str]) -> None:
    """Judge all models on all held-out windows, and write models.jsonl and table.md."""
    if len(argv) != 3:
        raise ConfigError(
            "posthoc_table.py needs three arguments: "
            "the runs' folder, a file of held-out text, a folder"
        )
    runs = Path(argv[0])
    text = argv[1]
    results = Path(argv[2])
    teacher = load_model(str(runs / "teacher"))
    faster_float32_products(teacher.config.n_embd, teacher.config.head_channels)
    length = teacher.config.block_size
    windows, documents = all_windows(text, teacher.meta, length)
    seen = text_windows(str(runs / "b.jsonl"), teacher.meta, length, CALIBRATION)
    calibration = Calibration(teacher, seen)
    with torch.no_grad():
        states = [teacher.hidden(idx) for idx in windows.split(BATCH)]
    # Name -> makes the model, so that one at a time is in memory.
    models = {"teacher": lambda: teacher}
    for first in (0, 1):
        plan = first_plan(teacher.config.n_layer, first)
        models[f"coupled_first={first}, alpha 1"] = partial(view, teacher, plan)
        models[f"coupled_first={first}, one alpha"] = partial(
            view, teacher, plan, calibration.best_alpha(plan)[0]
        )
        models[f"coupled_first={first}, alpha per layer"] = partial(
            view, teacher, plan, calibration.alpha(plan)
        )
        models[f"coupled_first={first}, distilled"] = partial(
            load_model, str(runs / f"student-{first}")
        )
    models["teacher trained on"] = partial(load_model, str(runs / "teacher-longer"))
    lines = ["| model | val loss | difference to the teacher | relative | KL from the teacher |"]
    lines += ["|---|---|---|---|---|"]
    with open(results / "models.jsonl", "w", encoding="utf-8") as file:
        base = None
        for name, make in models.items():
            loss, kl = judge(make(), teacher, windows, states)
            base = loss if base is None else base
            row = {"model": name, "val_loss": float(loss.mean()), "kl": float(kl.mean())}
            shown = "|"  # two empty cells
            if name != "teacher":
                estimate = clustered((loss - base).numpy(), documents.numpy())
                low, high = estimate.interval()
                row |= {"difference": estimate.mean, "interval": [low, high]}
                # As shares of the teacher's loss: difference, low, high.
                relative = [value / float(base.mean()) for value in (estimate.mean, low, high)]
                row |= {"relative": relative[0], "relative_interval": relative[1:]}
                shown = (
                    f"{estimate.mean:+.5f} ({low:+.5f} .. {high:+.5f}) | "
                    "{:+.3%} ({:+.3%} .. {:+.3%})".format(*relative)
                )
            row["windows"] = len(windows)
            row["length"] = length
            row["documents"] = len(documents.unique())
            row |= environment(torch.device("cpu"))
            file.write(json.dumps(row) + "\n")
            lines.append(f"| {name} | {row['val_loss']:.5f} | {shown} | {row['kl']:.2e} |")
            print(lines[-1], flush=True)
    write_bytes_atomically(results / "table.md", ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    run_program(main)
