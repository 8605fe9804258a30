"""Teachers, coupled teachers, students and teachers trained on, on the same held-out windows: a
table with intervals.

    python -m repro.posthoc_table out/posthoc 1 val.jsonl.xz results/cpu/posthoc
        judge the models of seed 1 (the last step of posthoc.sh for a seed)
    python -m repro.posthoc_table results/cpu/posthoc
        the table again, from windows.jsonl.xz

Writes windows.jsonl.xz and table.md. Val loss and KL(teacher || model) are in nats a
token, a token is a byte; the first position of a window is left out of the KL, not of the loss,
where it predicts the second byte. Each seed has a teacher of its own. Differences to it are paired
by window, over all whole windows of every document of the file. With one seed their intervals count
documents, for windows of one are alike; with several, seeds and documents, with as many degrees of
freedom as seeds less one, so that they are wide; a second table has an interval over documents for
each seed. "trained on" is also set against the students, as their control.
"""

import json
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.environment import environment, faster_float32_products
from common.errors import ConfigError, run_program
from common.output import markdown, write_bytes_atomically
from common.stats import Estimate, clustered, crossed
from data.documents import input_files, read_files
from data.tokenizers import load_tokenizer
from evidence.archive import locked
from evidence.runs import Run
from load import load_model
from model import GPT
from posthoc.coupling import BATCH, Calibration, first_plan, text_windows, view
from posthoc.kl import kl_divergence

CALIBRATION = 16  # windows
WINDOWS = "windows.jsonl.xz"
TEACHER = "teacher"
CONTROL = "teacher trained on"


def all_windows(text: str, meta: dict, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every document's whole windows.

    Returns:
        Token ids (N, length), and the number of each window's document (N,).
    """
    tokenizer = load_tokenizer(meta)
    windows = []
    documents: list[int] = []
    for number, document in enumerate(read_files(input_files(text))):
        ids = torch.tensor(tokenizer.encode_ordinary(document.text), dtype=torch.long)
        windows.append(ids[: len(ids) // length * length].view(-1, length))
        documents += [number] * len(windows[-1])
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


def models_of(
    runs: Path, seed: int, teacher: GPT, calibration: Calibration
) -> dict[str, Callable[[], GPT]]:
    """Return name -> what makes the model of a seed, so that one at a time is in memory."""
    models: dict[str, Callable[[], GPT]] = {TEACHER: lambda: teacher}
    for first in (0, 1):
        name = f"coupled_first={first}"
        plan = first_plan(teacher.config.n_layer, first)
        alphas = {
            "alpha 1": (),
            "one alpha": (calibration.best_alpha(plan)[0],),
            "alpha per layer": (calibration.alpha(plan),),
        }
        for kind, alpha in alphas.items():
            models[f"{name}, {kind}"] = partial(view, teacher, plan, *alpha)
        models[f"{name}, distilled"] = partial(load_model, str(runs / f"student-{first}-{seed}"))
    models[CONTROL] = partial(load_model, str(runs / f"teacher-longer-{seed}"))
    return models


def settings_of(runs: Path, seed: int) -> dict[str, Any]:
    """Return what the models of a seed must have in common: learning rate and dtype.

    Raises ConfigError if they differ.
    """
    own: dict[str, Any] = {}
    for name in ("student-0", "student-1", "teacher-longer", TEACHER):
        run = runs / f"{name}-{seed}"
        config = Run(run).config
        keys = ["dtype"]
        if name != TEACHER:
            keys.append("learning_rate")
        for key in keys:
            if config[key] != own.setdefault(key, config[key]):
                raise ConfigError(
                    f"{run}: has {key}={config[key]}, the student {own[key]}: remove the older "
                    "run and train it again"
                )
    return own


def judge_seed(runs: Path, seed: int, text: str, results: Path) -> None:
    """Judge the models of a seed on all held-out windows, and add them to windows.jsonl.xz.

    Its first line has the document of each window; the others a model's name, its seed, loss and KL
    of each window, settings, machine and versions.

    Raises:
        ConfigError: the file has the windows of another text, or seeds with another learning rate.
    """
    settings = settings_of(runs, seed)
    teacher = load_model(str(runs / f"teacher-{seed}"))
    faster_float32_products(teacher.config.n_embd, teacher.config.head_channels)
    length = teacher.config.block_size
    windows, documents = all_windows(text, teacher.meta, length)
    head = {
        "length": length,
        "crc32": zlib.crc32(windows.numpy().tobytes()),
        "learning_rate": settings["learning_rate"],
        "documents": documents.tolist(),
    }
    merged(results, head, [])  # before the long work
    seen = text_windows(str(runs / "b.jsonl"), teacher.meta, length, CALIBRATION)
    with torch.no_grad():
        states = [teacher.hidden(idx) for idx in windows.split(BATCH)]
    rows = []
    for name, make in models_of(runs, seed, teacher, Calibration(teacher, seen)).items():
        losses, kls = judge(make(), teacher, windows, states)
        row = {"model": name, "seed": seed, "dtype": settings["dtype"]}
        row |= {"losses": digits(losses), "kls": digits(kls)}
        rows.append(row | environment(torch.device("cpu")))
        print(f"{name}, seed {seed}: val loss {losses.mean():.5f}, KL {kls.mean():.2e}", flush=True)
    with locked(results):  # another seed may be judged at the same time
        lines = [head, *merged(results, head, rows)]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        write_bytes_atomically(results / WINDOWS, lzma.compress(content.encode(), preset=9))
        write_table(results)


def merged(results: Path, head: dict, rows: list[dict]) -> list[dict]:
    """Return what windows.jsonl.xz has of other seeds, and `rows`.

    Raises ConfigError if its head is another one.
    """
    path = results / WINDOWS
    if not path.exists():
        return rows
    before, models = read_windows(results)
    for key, value in head.items():
        if before.get(key) != value:
            what = "another text" if key != "learning_rate" else f"{key}={before.get(key)}"
            raise ConfigError(f"{path}: has windows of models with {what}: move it away")
    new = {row["seed"] for row in rows}
    kept = []
    for of_model in models.values():
        kept += [row for row in of_model if row["seed"] not in new]
    return kept + rows


def digits(values: torch.Tensor) -> list[float]:
    """Round to eight digits, more than float32 arithmetic has."""
    return [float(f"{value:.8g}") for value in values.tolist()]


def read_windows(results: Path) -> tuple[dict, dict[str, list[dict]]]:
    """Read windows.jsonl.xz. Returns its head, and name -> a record for each seed, in order."""
    with lzma.open(results / WINDOWS, "rt", encoding="utf-8") as file:
        head, *records = map(json.loads, file)
    models: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        models.setdefault(record["model"], []).append(record)
    return head, models


def difference(differences: np.ndarray, documents: np.ndarray) -> Estimate:
    """Estimate the mean of a difference.

    Args:
        differences: (n seeds, N windows).
        documents: the document of each window, (N,).

    Returns:
        Of one seed, an interval over documents; of several, over seeds and documents.
    """
    if len(differences) == 1:
        return clustered(differences[0], documents)
    # What each document adds to the mean, brought to the scale of a mean: their mean is the mean
    # over windows, however many of them a document has.
    means = differences.mean(1, keepdims=True)  # (n, 1)
    index = np.unique(documents, return_inverse=True)[1]
    parts = np.stack([np.bincount(index, row) for row in differences - means])  # (n, G)
    return crossed(means + parts * parts.shape[1] / len(documents))


def spanned(differences: np.ndarray, documents: np.ndarray, form: str = "{:+.3%}") -> str:
    """Write the mean of a difference and its interval, in percent or in another form."""
    estimate = difference(differences, documents)
    numbers = [form.format(value) for value in (estimate.mean, *estimate.interval())]
    return "{} ({} .. {})".format(*numbers)


def write_table(results: Path) -> None:
    """Write table.md from windows.jsonl.xz."""
    head, models = read_windows(results)
    documents = np.array(head["documents"])
    losses = {name: np.array([row["losses"] for row in rows]) for name, rows in models.items()}
    cells = []
    each_seed = []
    controls = ""
    for name, rows in models.items():
        above = losses[name] - losses[TEACHER]  # (n seeds, N windows)
        shares = above / losses[TEACHER].mean(
            1, keepdims=True
        )  # of the loss of each seed's teacher
        shown = ["", ""]
        if name != TEACHER:
            shown = [spanned(above, documents, "{:+.5f}"), spanned(shares, documents)]
            each_seed.append([name, *(spanned(share[None], documents) for share in shares)])
        kl = np.mean([row["kls"] for row in rows])
        cells.append([name, f"{losses[name].mean():.5f}", *shown, f"{kl:.2e}"])
        if name.endswith("distilled"):
            less = spanned(losses[name] - losses[CONTROL], documents, "{:+.5f}")
            controls += f"\n{name}, less the teacher trained on with the same seed: {less}.\n"
    header = ["model", "val loss", "difference to the teacher", "relative", "KL"]
    seeds = [str(record["seed"]) for record in models[TEACHER]]
    text = f"Seeds {', '.join(seeds)}, learning rate {head['learning_rate']:g}.\n\n"
    text += markdown(header, cells) + "\n"
    if len(seeds) > 1:
        text += "\nRelative, each seed against its own teacher, 95 % intervals over documents:\n\n"
        text += markdown(["model", *(f"seed {seed}" for seed in seeds)], each_seed) + "\n"
    text += controls
    write_bytes_atomically(results / "table.md", text.encode())
    print(text)


def main(argv: list[str]) -> None:
    if len(argv) == 1:
        return write_table(Path(argv[0]))
    runs, seed, text, results = argv
    judge_seed(Path(runs), int(seed), text, Path(results))


if __name__ == "__main__":
    run_program(main, __doc__)
