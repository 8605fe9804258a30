"""Check the CBWC paper on MLPs with LayerNorm, RMSNorm and CBWC + RMSNorm, on synthetic images.

    python repro/cbwc_mlp.py --study=training --out=results/cpu/cbwc_training
        appendix H.4.1: one trajectory
    python repro/cbwc_mlp.py --study=centering --out=results/cpu/cbwc_centering
        appendix F: what centring does

training: depth 6, width 256, 40 epochs, batches of 256, learning rate 0.01, from the same weights:
how far do V, the weights of the CBWC model, come from W, those of the LayerNorm model? A LayerNorm
model that starts one rounding error away ("nudged") shows how far rounding alone takes two runs
apart, plain RMSNorm what a real difference does. centering: input mean and norm of each linear, for
LayerNorm and RMSNorm, plain and residual, over several seeds. The images are not CIFAR's (no
download): ten classes of smooth random fields, a random mixture of other fields on top, noise,
pixels in 0 .. 1, so with a mean that is not zero. A residual block is h + relu(norm(linear(h))).
Writes records.jsonl, README.md and plots into --out. The last line of output is JSON.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.environment import environment
from common.errors import ConfigError, run_program
from common.output import write_bytes_atomically, writing
from common.plotting import plt, save, style
from common.stats import paired_ratio
from configurator import check_ranges, key, parse_args
from norms import CenteredLinear, LayerNorm, RMSNorm

IMAGE = (3, 16, 16)  # channels, height, width
CLASSES = 10
ARMS = {
    "layer": (nn.Linear, LayerNorm),
    "cbwc": (CenteredLinear, RMSNorm),
    "nudged": (nn.Linear, LayerNorm),
    "rms": (nn.Linear, RMSNorm),
}


@dataclass(frozen=True)
class MLPConfig:
    """Keys of cbwc_mlp.py; defaults are the paper's where it states them."""

    study: str = key("training", "which check", ("training", "centering"))
    out: str = key("out/cbwc_mlp", "folder for results")
    width: int = key(256, "neurons of a hidden layer", least=1)
    depth: int = key(6, "training: number of linear layers")
    plain_depths: tuple[int, ...] = key(
        (6, 15, 35), "centering: depths without residual connections"
    )
    residual_depths: tuple[int, ...] = key((65, 100), "centering: depths with residual connections")
    epochs: int = key(40, "passes over the images", least=1)
    images: int = key(2560, "number of images")
    batch_size: int = key(256, "images in a step", least=1)
    learning_rate: float = key(0.01, "of SGD; AdamW's is a tenth of it")
    seeds: int = key(1, "centering: seeds, of weights, images and order", least=1)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.images < self.batch_size:
            raise ConfigError(
                f"images={self.images}: must be at least batch_size={self.batch_size}"
            )
        if min(self.depth, *self.plain_depths, *self.residual_depths) < 2:
            raise ConfigError("a depth counts linear layers: 2 or more")


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

    def forward(self, x: Tensor) -> Tensor:
        for index, (linear, norm) in enumerate(zip(self.linears, self.norms)):
            y = F.relu(norm(linear(x))[0])
            x = x + y if self.residual and index else y
        return self.head(x)

    @torch.no_grad()
    def inputs(self, x: Tensor) -> Tensor:
        """Return mean and norm, averaged over images, of each linear's input: (depth, 2)."""
        seen = []

        def note(module: nn.Module, args: tuple, y: Tensor) -> None:
            seen.append((args[0].mean(), args[0].norm(dim=-1).mean()))

        hooks = [module.register_forward_hook(note) for module in (*self.linears, self.head)]
        self(x)
        for hook in hooks:
            hook.remove()
        return torch.tensor(seen)


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


def train(model: NormMLP, config: MLPConfig, seed: int, optimizer: str = "sgd") -> Iterator[float]:
    """Train in place; yield the mean loss of each epoch.

    The images and their order are functions of the seed alone.
    """
    images, targets = make_images(config.images, seed)
    images = images.to(model.head.weight.dtype)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, config.learning_rate, momentum=0.9, weight_decay=1e-4),
        "adamw": lambda p: torch.optim.AdamW(p, config.learning_rate / 10, weight_decay=0.1),
    }
    update = make[optimizer](model.parameters())
    order = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        total = 0.0
        batches = torch.randperm(config.images, generator=order).split(config.batch_size)
        for batch in batches:
            loss = F.cross_entropy(model(images[batch]), targets[batch])
            update.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            total += loss.item() / len(batches)
        yield total


# ----------------------------------------------------------------------------------------- training


def study_training(config: MLPConfig) -> tuple[list[dict], str]:
    """Records of |V - W| after each epoch, and a table of them."""
    records = []
    for dtype in ("float64", "float32"):
        for optimizer in ("sgd", "adamw"):
            models = {
                arm: NormMLP(arm, config.depth, config.width, seed=0).to(getattr(torch, dtype))
                for arm in ARMS
            }
            nudge(models["nudged"])
            runs = {arm: train(model, config, 0, optimizer) for arm, model in models.items()}
            layer = models["layer"]
            for epoch, losses in enumerate(zip(*runs.values()), 1):
                record = {
                    "dtype": dtype,
                    "optimizer": optimizer,
                    "epoch": epoch,
                    "loss": dict(zip(runs, losses)),
                    "apart": {arm: max_apart(models[arm], layer) for arm in ARMS},
                    "largest_weight": max(
                        float(p.detach().abs().max()) for p in layer.parameters()
                    ),
                }
                records.append(record)
            print(json.dumps(records[-1]))
    plot_training(records, Path(config.out) / "apart.png")
    return records, training_table(records, config.epochs)


def training_table(records: list[dict], epochs: int) -> str:
    """Return the results of study_training as Markdown."""
    arms = list(ARMS)
    header = ["type", "optimiser", *(f"apart: {arm}" for arm in arms[1:]), "largest weight"]
    header += [f"loss: {arm}" for arm in arms]
    lines = [row(header), row(["---"] * len(header))]
    for last in records:
        if last["epoch"] != epochs:
            continue
        run = (last["dtype"], last["optimizer"])
        of_run = [r["apart"] for r in records if (r["dtype"], r["optimizer"]) == run]
        apart = [f"{max(apart[arm] for apart in of_run):.1e}" for arm in arms[1:]]
        losses = [f"{last['loss'][arm]:.6f}" for arm in arms]
        lines.append(row([*run, *apart, f"{last['largest_weight']:.2f}", *losses]))
    about = (
        "Apart: largest difference of any parameter to the LayerNorm model's, over all epochs "
        "(cbwc: of V to W; nudged: LayerNorm that started one rounding error away). Loss: of "
        "training, in the last epoch."
    )
    return "\n".join([about, "", "![apart](apart.png)", "", *lines])


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Move every other column of the first linear's weights by one rounding error."""
    weight = model.linears[0].weight
    weight[:, ::2] *= 1 + torch.finfo(weight.dtype).eps


def max_apart(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of any parameter."""
    return max(
        float((a - b).abs().max().detach())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def plot_training(records: list[dict], target: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    for axis, optimizer in zip(axes, ("sgd", "adamw")):
        for number, (arm, dtype) in enumerate(
            product(("cbwc", "nudged", "rms"), ("float64", "float32"))
        ):
            curve = [r for r in records if (r["dtype"], r["optimizer"]) == (dtype, optimizer)]
            axis.semilogy(
                [r["epoch"] for r in curve],
                [r["apart"][arm] for r in curve],
                label=f"{arm}, {dtype}",
                markevery=4,
                **style(number),
            )
        axis.set(title=optimizer, xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("largest difference to LayerNorm's weights")
    axes[0].legend(frameon=False)
    save(figure, target)


# ---------------------------------------------------------------------------------------- centering


def study_centering(config: MLPConfig) -> tuple[list[dict], str]:
    """Records of the inputs of every linear after each epoch, and a table of them."""
    shapes = [(depth, False) for depth in config.plain_depths]
    shapes += [(depth, True) for depth in config.residual_depths]
    records = []
    for depth, residual in shapes:
        for seed in range(config.seeds):
            probe = make_images(config.images, seed)[0][:256].float()
            for arm in ("layer", "rms"):
                model = NormMLP(arm, depth, config.width, seed, residual)
                for epoch, loss in enumerate(train(model, config, seed), 1):
                    mean, norm = model.inputs(probe).T.tolist()
                    record = {
                        "depth": depth,
                        "residual": residual,
                        "arm": arm,
                        "seed": seed,
                        "epoch": epoch,
                        "loss": loss,
                        "mean": mean,
                        "norm": norm,
                    }
                    records.append(record)
                shown = ("depth", "residual", "seed", "arm", "loss")
                print(json.dumps({name: record[name] for name in shown}))
    for what in ("norm", "mean"):
        plot_centering(records, shapes, what, Path(config.out) / f"{what}.png")
    lines = [
        "| MLP | last input, LN | RMS | RMS / LN | all layers, RMS / LN | over training, RMS / LN "
        "| layers with RMS > LN | last loss, LN | RMS |",
        "| --- " * 9 + "|",
    ]
    lines += [centering_row(records, *shape) for shape in shapes]
    about = (
        f"Input norms at the end of training, geometric mean over {config.seeds} seeds; RMS / LN "
        "paired by seed, with its 95 % t interval. Last input: of the last linear. All layers: "
        "the geometric mean over the linears but the first. Over training: the largest by the "
        "smallest norm of the last input, over epochs. Layers with RMS > LN: in every seed. Last "
        "loss: training loss of the last epoch, mean over seeds."
    )
    return records, "\n".join([about, "", "![norm](norm.png)", "", "![mean](mean.png)", "", *lines])


def select(records: list[dict], depth: int, residual: bool, arm: str, what: str) -> np.ndarray:
    """Return `what` of one arm: (seeds, epochs), and a third dimension if it is per layer."""
    run = (depth, residual, arm)
    found = [r for r in records if (r["depth"], r["residual"], r["arm"]) == run]
    epochs = max(r["epoch"] for r in found)
    values = np.array([r[what] for r in found])  # (seeds * epochs, ...)
    return values.reshape(-1, epochs, *values.shape[1:])


def centering_row(records: list[dict], depth: int, residual: bool) -> str:
    """Return one line of study_centering's table."""
    layer = select(records, depth, residual, "layer", "norm")
    rms = select(records, depth, residual, "rms", "norm")

    # (seeds, epochs, depth) -> (seeds,)
    def last_input(x: np.ndarray) -> np.ndarray:
        return x[:, -1, -1]

    def all_layers(x: np.ndarray) -> np.ndarray:
        return np.exp(np.log(x[:, -1, 1:]).mean(-1))

    def over_training(x: np.ndarray) -> np.ndarray:
        return x[:, :, -1].max(1) / x[:, :, -1].min(1)

    cells = []
    for measure in (last_input, all_layers, over_training):
        ratio = paired_ratio(measure(rms), measure(layer))
        cells.append(f"{ratio.mean:.3f} ({ratio.low:.3f} … {ratio.high:.3f})")
    larger = int((rms[:, -1, 1:] > layer[:, -1, 1:]).all(0).sum())
    means = [f"{np.exp(np.log(last_input(x)).mean()):.2f}" for x in (layer, rms)]
    losses = []
    for arm in ("layer", "rms"):
        loss = select(records, depth, residual, arm, "loss")[:, -1].mean()
        losses.append(f"{loss:.4f}")
    return row([title(depth, residual), *means, *cells, f"{larger} of {depth - 1}", *losses])


def title(depth: int, residual: bool) -> str:
    return f"{depth} layers, {'residual' if residual else 'plain'}"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot_centering(
    records: list[dict], shapes: list[tuple[int, bool]], what: str, target: Path
) -> None:
    """Draw the mean or norm of inputs, one column for each shape.

    Above: over layers, after training. Below: of the last layer, over epochs. Band: all seeds.
    """
    figure, axes = plt.subplots(
        2, len(shapes), figsize=(3.6 * len(shapes), 6), layout="constrained", squeeze=False
    )
    for column, (depth, residual) in enumerate(shapes):
        for number, arm in enumerate(("layer", "rms")):
            values = select(records, depth, residual, arm, what)
            for axis, curves in zip(axes[:, column], (values[:, -1, 1:], values[:, :, -1])):
                x = np.arange(1, curves.shape[1] + 1)
                look = style(number)
                axis.plot(x, curves.mean(0), label=arm, markevery=max(1, len(x) // 12), **look)
                axis.fill_between(
                    x, curves.min(0), curves.max(0), color=look["color"], alpha=0.18, linewidth=0
                )
                axis.grid(alpha=0.3)
        axes[0, column].set(title=title(depth, residual), xlabel="linear layer (without the first)")
        axes[1, column].set(xlabel="epoch")
    axes[0, 0].set_ylabel(f"input {what}, after training")
    axes[1, 0].set_ylabel(f"input {what}, last layer")
    axes[0, 0].legend(frameon=False)
    save(figure, target)


STUDIES = {
    "training": (study_training, "CBWC + RMSNorm and LayerNorm train alike"),
    "centering": (study_centering, "Inputs of linear layers, LayerNorm and RMSNorm"),
}


def main(argv: list[str]) -> None:
    config, _ = parse_args(MLPConfig, argv, __doc__)
    out = Path(config.out)
    study, heading = STUDIES[config.study]
    about = environment(torch.device("cpu"))
    with writing(out):
        records, table = study(config)
        lines = [json.dumps({"config": asdict(config), **about}), *map(json.dumps, records)]
        write_bytes_atomically(out / "records.jsonl", ("\n".join(lines) + "\n").encode())
        command = f"`python repro/cbwc_mlp.py {' '.join(argv)}`"
        machine = (
            f"{about['device']}, torch {about['versions']['torch']}, commit {about['git'][:7]}"
        )
        text = (
            f"# {heading}\n\n{command}: {machine}. Synthetic images, as its docstring says.\n\n"
            f"{table}\n"
        )
        write_bytes_atomically(out / "README.md", text.encode())
    print(table)
    print(json.dumps({"study": config.study, "records": len(records), "out": str(out)}))


if __name__ == "__main__":
    run_program(main)
