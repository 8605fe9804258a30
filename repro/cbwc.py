"""Check the CBWC paper on small models: LayerNorm, RMSNorm, CBWC + RMSNorm from the same weights.

    repro/cbwc_training.sh    appendix H.4.1: one trajectory of an MLP
    repro/cbwc_centering.sh   appendix F: what centring does to an MLP
    repro/cbwc_classify.sh    section 5.3: text classification with dropout
    python -m repro.cbwc --study=classify --table --out=results/cpu/cbwc_classify
        the table again, from records.jsonl

training: how far do V, the weights of the CBWC model, come from W, those of the LayerNorm model? A
LayerNorm model that starts one rounding error away ("nudged") shows how far rounding alone takes
two runs apart, plain RMSNorm what a real difference does. centering: input mean and norm of each
linear, for LayerNorm and RMSNorm, plain and residual, over several seeds. The images are not
CIFAR's (no download): ten classes of smooth random fields, a random mixture of other fields on top,
noise, pixels in 0 .. 1, so with a mean that is not zero. A residual block is
h + relu(norm(linear(h))).

classify: with dropout CBWC + RMSNorm is no longer the same function as LayerNorm. Which of eight
packages of Python's standard library do 32 words come from (AG News in the paper)? A word is a row
of letters, its token a hash. About every fourth file, chosen by a hash of its name, is test data.
The GPT's hidden states are averaged over the text, its head's first eight rows give the classes.
Runs pair by seed (initial weights, texts, dropout); verdicts are report.py's: paired t interval
with Holm, TOST within margins declared before the runs.

Writes records.jsonl, README.md and pictures into --out.
"""

import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.environment import environment
from common.errors import run_program
from common.output import card, markdown, read_json, write_bytes_atomically, writing
from common.plotting import plt, save, style
from common.stats import decide, paired, paired_ratio, seeds_needed
from configurator import key, parse_args
from model import GPT, GPTConfig
from norms import CenteredLinear, LayerNorm, RMSNorm
from training.optim import learning_rate, make_optimizer
from training.run import LoopKeys

IMAGE = (3, 16, 16)  # channels, height, width
CLASSES = 10
ARMS = {
    "layer": (nn.Linear, LayerNorm),
    "cbwc": (CenteredLinear, RMSNorm),
    "nudged": (nn.Linear, LayerNorm),
    "rms": (nn.Linear, RMSNorm),
}
PACKAGES = "idlelib asyncio email tkinter xml multiprocessing unittest importlib"
N_PACKAGES = len(PACKAGES.split())
TEXTS = GPTConfig(vocab_size=4096, block_size=32, n_layer=2, n_head=2, n_embd=48, bias=True)
TEST_TEXTS = 1024  # the same for every run
MARGINS = {"loss": 0.02, "accuracy": 0.01}  # nats per text, share of texts
Records = list[dict[str, Any]]
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class CbwcConfig:
    """Keys of cbwc.py; defaults are the paper's where it states them."""

    study: str = key("training", "which check", ("training", "centering", "classify"))
    out: str = key("out/cbwc", "folder for results")
    table: bool = key(False, "only write README.md again, from records.jsonl")
    width: int = key(256, "neurons of a hidden layer", least=1)
    plain_depths: tuple[int, ...] = key((6, 15, 35), "linear layers; training: the first", least=2)
    residual_depths: tuple[int, ...] = key(
        (65, 100), "the same, with residual connections", least=2
    )
    epochs: int = key(40, "passes over the images", least=1)
    images: int = key(2560, "number of images", least=256)
    learning_rate: float = key(0.01, "of SGD; AdamW's is a tenth of it")
    seeds: int = key(6, "of weights, data and order: 0, 1, ...; not of training", least=2)
    steps: int = key(300, "classify: optimiser steps of 32 texts", least=2)
    dropout: float = key(0.1, "classify: dropout probability")


# ---------------------------------------------------------------------------------- MLPs on images


class NormMLP(nn.Module):
    """Linear, norm, ReLU, `depth` - 1 times, then a linear: x (B, pixels) -> logits (B, classes).

    Arms begin with the same weights for the same seed. With `residual`, all but the first block add
    to the stream.
    """

    def __init__(self, arm: str, depth: int, width: int, seed: int, residual: bool = False):
        super().__init__()
        linear, norm = ARMS[arm]
        sizes = [int(np.prod(IMAGE)), *[width] * (depth - 1)]
        torch.manual_seed(seed)
        self.linears = nn.ModuleList(linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, CLASSES)
        self.residual = residual
        self.norms = nn.ModuleList(norm(width, bias=True) for _ in self.linears)

    def streams(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each linear reads, the head's input last."""
        yield x
        for index, (linear, norm) in enumerate(zip(self.linears, self.norms)):
            y = F.relu(norm(linear(x))[0])
            x = x + y if self.residual and index else y
            yield x

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.streams(x)
        return self.head(last)


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images (count, pixels), float64 in 0 .. 1, and their classes (count,)."""
    generator = torch.Generator().manual_seed(seed)

    def fields(n: int) -> Tensor:
        """Draw n smooth images: 4 x 4 random numbers per channel, enlarged."""
        coarse = torch.randn(n, IMAGE[0], 4, 4, generator=generator, dtype=torch.float64)
        return F.interpolate(coarse, IMAGE[1:], mode="bicubic").flatten(1)

    targets = torch.randint(CLASSES, (count,), generator=generator)
    nuisance = torch.randn(count, 32, generator=generator, dtype=torch.float64) @ fields(32)
    noise = torch.randn(count, int(np.prod(IMAGE)), generator=generator, dtype=torch.float64)
    return torch.sigmoid(fields(CLASSES)[targets] + 0.25 * nuisance + 0.5 * noise), targets


def train(model: NormMLP, config: CbwcConfig, seed: int, optimizer: str = "sgd") -> Iterator[float]:
    """Train in place, on batches of 256; yield the mean loss of each epoch.

    The images and their order are functions of the seed alone.
    """
    images, targets = make_images(config.images, seed)
    images = images.to(model.head.weight.dtype)
    rate = config.learning_rate
    update = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    if optimizer == "adamw":
        update = torch.optim.AdamW(model.parameters(), rate / 10, weight_decay=0.1)
    order = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        losses = []
        for batch in torch.randperm(config.images, generator=order).split(256):
            losses.append(take_step(model, update, model(images[batch]), targets[batch]))
        yield float(np.mean(losses))


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, logits: Tensor, targets: Tensor
) -> float:
    """Take an optimiser step down the cross-entropy, and return it."""
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def nudge(model: NormMLP) -> None:
    """Move every other column of the first linear's weights by one rounding error."""
    weight = model.linears[0].weight
    weight[:, ::2] *= 1 + torch.finfo(weight.dtype).eps


@torch.no_grad()
def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of any parameter."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def run_training(config: CbwcConfig) -> Rows:
    """Yield losses and |V - W| after each epoch, of every dtype and optimiser."""
    for dtype, optimizer in product(("float64", "float32"), ("sgd", "adamw")):
        models = {
            arm: NormMLP(arm, config.plain_depths[0], config.width, 0).to(getattr(torch, dtype))
            for arm in ARMS
        }
        nudge(models["nudged"])
        layer = models["layer"]
        runs = [train(model, config, 0, optimizer) for model in models.values()]
        for epoch, losses in enumerate(zip(*runs), 1):
            largest = max(float(p.detach().abs().max()) for p in layer.parameters())
            row = {"dtype": dtype, "optimizer": optimizer, "epoch": epoch}
            row["loss"] = dict(zip(models, losses))
            row["apart"] = {arm: apart(model, layer) for arm, model in models.items()}
            yield row | {"largest_weight": largest}


def training_page(records: Records, out: Path) -> str:
    """Draw |V - W|, and return the table of the last epochs."""
    panels: dict[str, dict[str, np.ndarray]] = {"sgd": {}, "adamw": {}}
    lines = []
    for dtype, optimizer in product(("float64", "float32"), panels):
        run = [r for r in records if (r["dtype"], r["optimizer"]) == (dtype, optimizer)]
        curves = {
            arm: np.array([r["apart"][arm] for r in run]) for arm in ("cbwc", "nudged", "rms")
        }
        for arm, curve in curves.items():
            panels[optimizer][f"{arm}, {dtype}"] = curve[None]
        line = [dtype, optimizer, *(f"{curve.max():.1e}" for curve in curves.values())]
        line.append(f"{run[-1]['largest_weight']:.2f}")
        lines.append([*line, *(f"{run[-1]['loss'][arm]:.6f}" for arm in ARMS)])
    plot(panels, 2, "largest difference to LayerNorm's weights", out / "apart.png", is_log=True)
    head = ["type", "optimiser", "apart: cbwc", "apart: nudged", "apart: rms", "largest weight"]
    return (
        "Apart: largest difference of any parameter to the LayerNorm model's, over all epochs "
        "(cbwc: of V to W; nudged: LayerNorm that started one rounding error away). Loss: of "
        "training, in the last epoch.\n\n![apart](apart.png)\n\n"
        + markdown([*head, *(f"loss: {arm}" for arm in ARMS)], lines)
    )


def run_centering(config: CbwcConfig) -> Rows:
    """Yield mean and norm of the input of every linear after each epoch, over 256 images."""
    shapes = [(depth, False) for depth in config.plain_depths]
    shapes += [(depth, True) for depth in config.residual_depths]
    for (depth, residual), seed, arm in product(shapes, range(config.seeds), ("layer", "rms")):
        probe = make_images(config.images, seed)[0][:256].float()
        model = NormMLP(arm, depth, config.width, seed, residual)
        for epoch, loss in enumerate(train(model, config, seed), 1):
            with torch.no_grad():
                inputs = list(model.streams(probe))
            row = {"depth": depth, "residual": residual, "arm": arm, "seed": seed, "epoch": epoch}
            row |= {"loss": loss, "mean": [float(x.mean()) for x in inputs]}
            yield row | {"norm": [float(x.norm(dim=-1).mean()) for x in inputs]}


def select(records: Records, shape: tuple[int, bool], arm: str, what: str) -> np.ndarray:
    """Return `what` of one arm: (seeds, epochs), and a third dimension if it is per layer."""
    found = [r for r in records if ((r["depth"], r["residual"]), r["arm"]) == (shape, arm)]
    values = np.array([r[what] for r in found])  # (seeds * epochs, ...)
    return values.reshape(-1, max(r["epoch"] for r in found), *values.shape[1:])


def centering_page(records: Records, out: Path) -> str:
    """Draw means and norms over layers and epochs, and return a table of the norms."""
    shapes = list(dict.fromkeys((r["depth"], r["residual"]) for r in records))
    names = {shape: f"{shape[0]} layers, {'residual' if shape[1] else 'plain'}" for shape in shapes}
    for what in ("norm", "mean"):
        panels = {f"{name}, after training, by layer": {} for name in names.values()}
        panels |= {f"{name}, last layer, by epoch": {} for name in names.values()}
        for (shape, name), arm in product(names.items(), ("layer", "rms")):
            values = select(records, shape, arm, what)
            panels[f"{name}, after training, by layer"][arm] = values[:, -1, 1:]
            panels[f"{name}, last layer, by epoch"][arm] = values[:, :, -1]
        plot(panels, len(shapes), f"input {what}", out / f"{what}.png")
    lines = []
    for shape, name in names.items():
        layer, rms = (select(records, shape, arm, "norm") for arm in ("layer", "rms"))
        means = [f"{np.exp(np.log(x[:, -1, -1]).mean()):.2f}" for x in (layer, rms)]
        # (seeds, epochs, depth) -> (seeds,), of RMSNorm and of LayerNorm
        compared = [
            [x[:, -1, -1] for x in (rms, layer)],
            [np.exp(np.log(x[:, -1, 1:]).mean(-1)) for x in (rms, layer)],
            [x[:, :, -1].max(1) / x[:, :, -1].min(1) for x in (rms, layer)],
        ]
        ratios = [paired_ratio(*pair) for pair in compared]
        larger = (rms[:, -1, 1:] > layer[:, -1, 1:]).all(0).sum()
        last = [select(records, shape, arm, "loss")[:, -1].mean() for arm in ("layer", "rms")]
        shown = [f"{x['mean']:.3f} ({x['low']:.3f} … {x['high']:.3f})" for x in ratios]
        line = [name, *means, *shown, f"{larger} of {shape[0] - 1}"]
        lines.append([*line, *(f"{loss:.4f}" for loss in last)])
    head = ["MLP", "last input, LN", "RMS", "RMS / LN", "all layers, RMS / LN"]
    head += ["over training, RMS / LN", "layers with RMS > LN", "last loss, LN", "RMS"]
    return (
        f"Input norms at the end of training, geometric mean over {len(layer)} seeds; RMS / LN "
        "paired by seed, with its 95 % t interval. Last input: of the last linear. All layers: "
        "the geometric mean over the linears but the first. Over training: the largest by the "
        "smallest norm of the last input, over epochs. Layers with RMS > LN: in every seed. Last "
        "loss: training loss of the last epoch, mean over seeds.\n\n![norm](norm.png)\n\n"
        "![mean](mean.png)\n\n" + markdown(head, lines)
    )


def plot(
    panels: dict[str, dict[str, np.ndarray]],
    columns: int,
    ylabel: str,
    target: Path,
    is_log: bool = False,
) -> None:
    """Draw one panel a title, with curves (seeds, n): their mean, and a band of all seeds."""
    rows = len(panels) // columns
    size = (3.8 * columns, 3.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, (title, curves) in zip(axes.flat, panels.items()):
        for number, (label, values) in enumerate(curves.items()):
            look = style(number)
            x = np.arange(1, values.shape[1] + 1)
            axis.plot(x, values.mean(0), label=label, markevery=max(1, len(x) // 12), **look)
            axis.fill_between(x, values.min(0), values.max(0), color=look["color"], alpha=0.18)
        axis.set(title=title, yscale="log" if is_log else "linear")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(ylabel)
    axes[0, 0].legend(frameon=False)
    save(figure, target)


# ---------------------------------------------------------------------------------- classification


def read_packages() -> dict[str, list[Tensor]]:
    """Read the sources of the packages: split -> the tokens of each package's files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[Tensor]] = {"train": [], "test": []}
    for package in PACKAGES.split():
        content = {"train": b"", "test": b""}
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root)
            if not {"test", "tests", "idle_test"} & {*name.parts}:
                split = "train" if zlib.crc32(name.as_posix().encode()) % 4 else "test"
                content[split] += path.read_bytes()
        for split, texts in splits.items():
            words = re.findall(rb"[a-z]+", content[split].lower())
            texts.append(torch.tensor([zlib.crc32(word) % TEXTS.vocab_size for word in words]))
    return splits


def draw(texts: list[Tensor], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw texts: a package, all equally likely, then a place in it.

    Returns:
        Token ids (count, 32), and packages (count,).
    """
    targets = torch.randint(len(texts), (count,), generator=generator)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    rows = []
    for where, target in zip(share.tolist(), targets.tolist()):
        text = texts[target]
        start = int(where * (len(text) - TEXTS.block_size))
        rows.append(text[start : start + TEXTS.block_size])
    return torch.stack(rows), targets


def classify(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits of the packages: (B, T) -> (B, packages)."""
    return F.linear(model.hidden(ids).mean(1), model.head_weight()[:N_PACKAGES])


def run_classify(config: CbwcConfig) -> Rows:
    """Yield test loss (nats a text), accuracy, and training loss of the last tenth of each run."""
    data = read_packages()
    test, targets = draw(data["test"], TEST_TEXTS, torch.Generator().manual_seed(0))
    for seed, arm in product(range(1, config.seeds + 1), ("layer", "rms", "cbwc")):
        model = GPT(replace(TEXTS, norm_type=arm, dropout=config.dropout), seed)
        losses = train_classifier(model, config, seed, data["train"])
        model.eval()
        with torch.no_grad():
            logits = torch.cat([classify(model, part) for part in test.split(256)])
        yield {
            "arm": arm,
            "seed": seed,
            "loss": float(F.cross_entropy(logits, targets)),
            "accuracy": float((logits.argmax(-1) == targets).double().mean()),
            "train_loss": float(np.mean(losses[-max(1, config.steps // 10) :])),
        }


def train_classifier(model: GPT, config: CbwcConfig, seed: int, texts: list[Tensor]) -> list[float]:
    """Train in place, after 50 steps of warm-up by a cosine to a tenth; return all losses."""
    optimizer = make_optimizer(model, 2e-3, (0.9, 0.95), 1e-8, 0.1)
    rates = LoopKeys(warmup_iters=50, max_iters=config.steps, learning_rate=2e-3, min_lr=2e-4)
    stream = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, rates)
        torch.manual_seed(zlib.crc32(f"{seed} {step}".encode()))  # dropout's stream
        ids, targets = draw(texts, 32, stream)
        losses.append(take_step(model, optimizer, classify(model, ids), targets))
    return losses


def classify_page(records: Records, out: Path) -> str:
    """Return means and verdicts against LayerNorm."""
    names = ("loss", "accuracy", "train_loss")
    values = {
        (arm, name): np.array([r[name] for r in records if r["arm"] == arm])
        for arm, name in product(("layer", "rms", "cbwc"), names)
    }
    means = []
    for arm in ("layer", "rms", "cbwc"):
        loss, accuracy, training = (values[arm, name] for name in names)
        line = [arm, f"{loss.mean():.4f}", f"{loss.std(ddof=1):.4f}", f"{accuracy.mean():.2%}"]
        means.append([*line, f"{accuracy.std(ddof=1):.2%}", f"{training.mean():.4f}"])
    lines = []
    for name, margin in MARGINS.items():
        differences = {arm: values[arm, name] - values["layer", name] for arm in ("rms", "cbwc")}
        verdicts = decide([paired(d) for d in differences.values()], margin, name == "loss")
        for (arm, d), verdict in zip(differences.items(), verdicts):
            needed = seeds_needed(d.mean(), margin, d.std(ddof=1), 0.025) or "more than 10,000"
            low, high = verdict.interval
            line = [name, arm, f"{d.mean():+.4f}", f"{low:+.4f} … {high:+.4f}"]
            line += [f"{verdict.p_holm:.2g}", f"{verdict.p_tost:.2g} ({margin})", verdict.word]
            lines.append([*line, needed])
    head = ["metric", "arm, less layer", "difference", "Holm interval", "p Holm"]
    arms = markdown(["arm", "test loss", "SD", "accuracy", "SD", "training loss"], means)
    head += ["p TOST (margin)", "verdict", "seeds for a verdict"]
    return f"{arms}\n\n{markdown(head, lines)}"


STUDIES = {
    "training": (run_training, training_page, "CBWC + RMSNorm and LayerNorm train alike"),
    "centering": (
        run_centering,
        centering_page,
        "Inputs of linear layers, LayerNorm and RMSNorm",
    ),
    "classify": (run_classify, classify_page, "Text classification with dropout"),
}


def main(argv: list[str]) -> None:
    config, _ = parse_args(CbwcConfig, argv, __doc__)
    out = Path(config.out)
    run, page, title = STUDIES[config.study]
    with writing(out):
        if not config.table:
            lines = [json.dumps({"config": asdict(config), **environment(torch.device("cpu"))})]
            for row in run(config):
                lines.append(json.dumps(row))
                print(lines[-1], flush=True)
            write_bytes_atomically(out / "records.jsonl", ("\n".join(lines) + "\n").encode())
        about, *records = read_json(out / "records.jsonl")
        table = page(records, out)
        made = f"`repro/cbwc_{config.study}.sh`: {card(about)}."
        text = f"# {title}\n\n{made}\n\n{table}\n"
        write_bytes_atomically(out / "README.md", text.encode())
    print(table)


if __name__ == "__main__":
    run_program(main)
