"""Compare LayerNorm, RMSNorm and CBWC in text classification with dropout.

With dropout, CBWC + RMSNorm is no longer the same function as LayerNorm.

    python repro/cbwc_classify.py --out=results/cpu/cbwc_classify

After section 5.3 of the CBWC paper (AG News, a small Transformer), with data that every machine
has: which of eight packages of Python's standard library do 32 words come from? A word is a row of
letters, its token a hash. About every fourth file, chosen by a hash of its name, is test data. The
GPT's hidden states are averaged over the text, its head's first eight rows give the classes. Runs
pair by seed (initial weights, texts, dropout); verdicts are report.py's: paired t interval with
Holm, TOST within margins declared here. Finished runs in --out are not run again. The last line of
output is JSON.
"""

import json
import re
import sys
import sysconfig
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.environment import environment
from common.errors import ConfigError, UserError, run_program
from common.output import card, write_bytes_atomically, writing
from common.stats import decide, paired, seeds_needed
from configurator import key, parse_args
from model import GPT, GPTConfig
from training.optim import learning_rate, make_optimizer

PACKAGES = (
    "idlelib",
    "asyncio",
    "email",
    "tkinter",
    "xml",
    "multiprocessing",
    "unittest",
    "importlib",
)
ARMS = ("layer", "rms", "cbwc")
# One tensor for each package: the tokens of all its files.
Texts = list[Tensor]


@dataclass(frozen=True)
class ClassifyConfig(GPTConfig):
    """Keys of cbwc_classify.py; the model is small enough for a CPU core."""

    vocab_size: int = key(4096, "tokens that words are hashed to", least=1)
    block_size: int = key(32, "words of a text", least=1)
    n_layer: int = key(2, "number of blocks", least=1)
    n_head: int = key(2, "query heads", least=1)
    n_embd: int = key(48, "channels of the residual stream", least=1)
    bias: bool = key(True, "biases in linears and norms")
    dropout: float = key(0.1, "dropout probability, during training")
    out: str = key("out/cbwc_classify", "folder for results")
    seeds: int = key(6, "runs of each arm, seeds 1, 2, ...", least=2)
    max_iters: int = key(300, "optimiser steps", least=2)
    batch_size: int = key(32, "texts in a step", least=2)
    learning_rate: float = key(
        2e-3, "highest; a cosine takes it to a tenth after 50 steps of warm-up"
    )
    test_texts: int = key(
        1024, "texts that test loss and accuracy are over, the same for every run", least=2
    )
    delta_loss: float = key(0.02, "equivalence margin, nats per text, declared before the runs")
    delta_accuracy: float = key(0.01, "equivalence margin, share of texts")


def read_packages(vocab: int) -> dict[str, Texts]:
    """Read the tokens of the packages' sources, by split. Raises UserError."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, Texts] = {"train": [], "test": []}
    for package in PACKAGES:
        content = {"train": b"", "test": b""}
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root)
            if not {"test", "tests", "idle_test"} & {*name.parts}:
                split = "train" if zlib.crc32(name.as_posix().encode()) % 4 else "test"
                content[split] += path.read_bytes()
        for split, texts in splits.items():
            words = re.findall(rb"[a-z]+", content[split].lower())
            if len(words) < 1024:
                raise UserError(
                    f"{package}: no sources of it in {root}: "
                    "this Python lacks a part of its library"
                )
            texts.append(torch.tensor([zlib.crc32(word) % vocab for word in words]))
    return splits


def draw(
    texts: Texts, count: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw texts: a package, all equally likely, then a place in it.

    Returns:
        Token ids (count, length), and packages (count,).
    """
    targets = torch.randint(len(texts), (count,), generator=generator)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    rows = []
    for where, target in zip(share.tolist(), targets.tolist()):
        text = texts[target]
        start = int(where * (len(text) - length))
        rows.append(text[start : start + length])
    return torch.stack(rows), targets


def classify(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits of the packages: (B, T) -> (B, packages)."""
    return F.linear(model.hidden(ids).mean(1), model.head_weight()[: len(PACKAGES)])


def run(config: ClassifyConfig, arm: str, seed: int, data: dict[str, Texts]) -> dict:
    """Train a model; return test loss (nats a text), accuracy, training loss of the last tenth."""
    model = GPT(replace(config, norm_type=arm), seed).train()
    optimizer = make_optimizer(model, config.learning_rate, (0.9, 0.95), 1e-8, 0.1)
    stream = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, config.max_iters + 1):
        rate = learning_rate(
            step,
            "cosine",
            50,
            config.max_iters,
            config.learning_rate,
            config.learning_rate / 10,
            0.2,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(zlib.crc32(f"{seed} {step}".encode()))  # dropout's stream
        ids, targets = draw(data["train"], config.batch_size, config.block_size, stream)
        loss = F.cross_entropy(classify(model, ids), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    # the same texts for every run
    stream = torch.Generator().manual_seed(0)
    ids, targets = draw(data["test"], config.test_texts, config.block_size, stream)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([classify(model, part) for part in ids.split(256)])
    accuracy = (logits.argmax(-1) == targets).double().mean()
    last = max(1, config.max_iters // 10)
    return {
        "arm": arm,
        "seed": seed,
        "loss": float(F.cross_entropy(logits, targets)),
        "accuracy": float(accuracy),
        "train_loss": float(np.mean(losses[-last:])),
    }


def report(records: list[dict], config: ClassifyConfig) -> str:
    """Return means and verdicts against LayerNorm, as Markdown."""
    lines = ["| arm | test loss | SD | accuracy | SD | training loss |", "| --- " * 6 + "|"]
    by_seed = sorted(records, key=lambda r: r["seed"])
    values = {arm: [r for r in by_seed if r["arm"] == arm] for arm in ARMS}
    for arm, runs in values.items():
        loss = np.array([r["loss"] for r in runs])
        accuracy = np.array([r["accuracy"] for r in runs])
        training = np.array([r["train_loss"] for r in runs])
        lines.append(
            f"| {arm} | {loss.mean():.4f} | {loss.std(ddof=1):.4f} | "
            f"{accuracy.mean():.2%} | {accuracy.std(ddof=1):.2%} | {training.mean():.4f} |"
        )
    lines += [
        "",
        "| metric | arm, less layer | difference | Holm interval | p Holm | p TOST (margin) | "
        "verdict | seeds for a verdict |",
        "| --- " * 8 + "|",
    ]
    for name, delta, lower in (
        ("loss", config.delta_loss, True),
        ("accuracy", config.delta_accuracy, False),
    ):
        differences = {}
        for arm in ARMS[1:]:
            pairs = zip(values[arm], values["layer"], strict=True)
            differences[arm] = np.array([a[name] - b[name] for a, b in pairs])
        verdicts = decide([paired(d) for d in differences.values()], delta, lower)
        for (arm, d), verdict in zip(differences.items(), verdicts):
            needed = seeds_needed(d.mean(), delta, d.std(ddof=1), 0.025) or "more than 10,000"
            low, high = verdict.interval
            lines.append(
                f"| {name} | {arm} | {d.mean():+.4f} | {low:+.4f} … {high:+.4f} | "
                f"{verdict.p_holm:.2g} | {verdict.p_tost:.2g} ({delta}) | {verdict.word} | "
                f"{needed} |"
            )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    config, _ = parse_args(ClassifyConfig, argv, __doc__)
    out = Path(config.out)
    about = environment(torch.device("cpu"))
    target = out / "records.jsonl"
    records = []
    settings = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("out", "seeds", "rope_scaling")
    }
    with writing(out):
        if target.exists():
            first, *records = map(json.loads, target.read_text(encoding="utf-8").splitlines())
            if first["config"] != settings:
                raise ConfigError(f"{target} was made with other settings: choose another out")
            about = first
        data = read_packages(config.vocab_size)
        for seed in range(1, config.seeds + 1):
            for arm in ARMS:
                if any((r["arm"], r["seed"]) == (arm, seed) for r in records):
                    continue
                records.append(run(config, arm, seed, data))
                print(json.dumps(records[-1]), flush=True)
                lines = [json.dumps({**about, "config": settings}), *map(json.dumps, records)]
                write_bytes_atomically(target, ("\n".join(lines) + "\n").encode())
        table = report([r for r in records if r["seed"] <= config.seeds], config)
        made = f"`repro/cbwc_classify.sh`: {card(about)}."
        text = f"# Text classification with dropout {config.dropout}\n\n{made}\n\n{table}\n"
        write_bytes_atomically(out / "README.md", text.encode())
    print(table)
    print(json.dumps({"records": len(records), "out": str(out)}))


if __name__ == "__main__":
    run_program(main)
