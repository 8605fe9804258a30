"""The size of the residual stream at every norm position, its drift from the statistic used, and what the output does.

    python -m posthoc.rms_stats out/rms --text=book.txt                    sizes and ratios per block; what to couple
    python -m posthoc.rms_stats Qwen/Qwen3-0.6B --text=a.jsonl.xz --plot=fig3.png --across=True --out=stats.jsonl

CoupledNorm divides the stream by the RMS of an earlier position. How much larger the stream is by then is the drift
RMS(h) / RMS(shared), one number a token. Its typical value can be compensated by a scalar at each position (alpha,
section 5.3 of Loretz & Hochreiter 2026), its spread over tokens cannot. TaperNorm multiplies by a constant c instead:
its drift, RMS(c h), is about 1 when c is set (c fits the squares, over an average of some 100 steps), and moves as the
stream grows away from it.

At the output, the size of the logits and the radial gradient tell whether anything holds the scale of the stream
(Kanavalau, Amo Alonso & Lall 2026, section 4): with a final norm that gradient is 0, without one it is negative where
tokens are predicted well, and logits grow ("logit chasing"). Its mean over a text is near 0 once the model is about as
sure as it is right there, and takes many windows to tell: those of one document all err to one side.

The program reads any model (see training/checkpoint.py) and any text. Every second window of it measures and
calibrates, the others judge. It suggests coupled_first and alpha for a budget of KL (posthoc/coupling.py). The last
line of output is JSON.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, run_program
from configurator import check_least, key, parse_args
from kernels.cross_entropy import cross_entropy
from kernels.reference import inverse_rms, statistics_dtype
from model import GPT
from norms import Norm, SharedRMSNorm, center
from taper import TaperNorm
from training.log import append_json, environment

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class RMSStats:
    """One float64 number for each norm position (2L + 1,); at the output, if targets were given, one number each."""

    rms: Tensor  # root of the mean square over tokens and channels
    drift: Tensor  # geometric mean over tokens of RMS(h) / RMS(statistic used); 1 where the position has its own
    spread: Tensor  # standard deviation over tokens of the logarithm of that ratio
    logit_norm: float | None = None  # length of a token's logits around their mean; root of the mean square over tokens
    radial_gradient: float | None = None  # <gradient of a token's loss, h>, h the stream before the final norm; mean

    def record(self) -> dict[str, list[float] | float]:
        """For a log."""
        columns = {"rms": self.rms.tolist(), "drift": self.drift.tolist(), "spread": self.spread.tolist()}
        output = {"logit_norm": self.logit_norm, "radial_gradient": self.radial_gradient}
        return columns | {name: value for name, value in output.items() if value is not None}


@torch.no_grad()
def measure(model: GPT, idx: Tensor, targets: Tensor | None = None) -> RMSStats:
    """Statistics on tokens idx (B, T), dropout off; of the output too, if there are targets (B, T). Under FSDP all
    ranks must call it."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    output: list[float] = []

    def note(norm: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        _, h, used = outputs
        log_ratio = log_drift(norm, h, used)
        rows.append((h.double().square().mean().sqrt(), log_ratio.mean().exp(), log_ratio.std(correction=0)))
        if norm is model.norm_f and targets is not None:  # within forward, where FSDP has the head gathered
            output.extend(output_statistics(model, h, used, targets))

    handles = [norm.register_forward_hook(note) for norm in model.norms()]
    was_training = model.training
    try:
        model.eval()(idx, idx)  # with targets, as in training: FSDP's hooks run, and no whole logits are made
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return RMSStats(*(torch.stack(column).cpu() for column in zip(*rows, strict=True)), *output)


def log_drift(norm: Norm, h: Tensor, used: Tensor | None) -> Tensor:
    """log of RMS(h) / RMS(statistic used) (B, T, 1), float64, for a norm that has read the stream h (B, T, C). Zero for
    norms with a statistic of their own, of whatever kind."""
    if isinstance(norm, TaperNorm) and norm.phase != "warm":
        return -inverse_rms((center(h) if norm.centers else h) * norm.scale, norm.eps).log().double()
    if isinstance(norm, SharedRMSNorm):
        return (used / inverse_rms(h, norm.eps)).log().double()
    return torch.zeros(*h.shape[:-1], 1, dtype=torch.float64, device=h.device)


def output_statistics(model: GPT, h: Tensor, used: Tensor | None, targets: Tensor) -> tuple[float, float]:
    """(logit norm, radial gradient) for the stream h (B, T, C) before the final norm, whose forward handed on `used`.

    Neither needs all logits at once: |W y|^2 is y^T (W^T W) y, and the loss comes chunk by chunk. In full precision.
    """
    with torch.autocast(h.device.type, enabled=False), torch.enable_grad():
        h = h.detach().to(statistics_dtype(h)).requires_grad_()
        y = model.norm_f.normalize(h, used)[0].flatten(0, -2)  # (B T, C)
        head = model.head_weight().detach().to(y.dtype)
        loss = cross_entropy(y, head, targets.flatten(), model.n_vocab)
        gradient = torch.autograd.grad(loss, h)[0]  # of the mean over tokens
    head = head[: model.n_vocab]
    head = head - head.mean(0)  # what all logits have in common changes no probability
    square = ((y @ (head.T @ head)) * y).sum(-1).mean()
    return float(square.sqrt()), float((gradient * h).sum())


@torch.no_grad()
def token_rms(model: GPT, windows: Tensor, batch: int = 8) -> Tensor:
    """sqrt(mean square + eps) of the residual stream of every token at every norm position: float64 (2L + 1, N, T) on
    the CPU, for a GPT in eval mode and token ids (N, T), `batch` windows at once."""
    rows: list[list[Tensor]] = [[] for _ in model.norms()]

    def note(norm: Norm, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None], row: int) -> None:
        rows[row].append(1 / inverse_rms(outputs[1], norm.eps).double().squeeze(-1).cpu())

    handles = [norm.register_forward_hook(partial(note, row=row)) for row, norm in enumerate(model.norms())]
    try:
        for part in windows.split(batch):
            model.hidden(part.to(model.wte.weight.device))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([torch.cat(parts) for parts in rows])


@torch.no_grad()
def calibrate(model: GPT, idx: Tensor) -> RMSStats:
    """Set alpha of every shared position to its drift on tokens idx (B, T), where the config lets it move
    (coupled_calibrate); the statistics before that."""
    stats = measure(model, idx)
    for norm, drift in zip(model.norms(), stats.drift, strict=True):
        # A model that has just gone wrong keeps its alpha: the next loss will tell, and name the step.
        if isinstance(norm, SharedRMSNorm) and isinstance(norm.alpha, Tensor) and drift.isfinite() and drift > 0:
            norm.alpha.fill_(drift)
    return stats


# ------------------------------------------------------------------------------------------------------------ program


@dataclass(frozen=True)
class StatsConfig:
    """Keys of posthoc/rms_stats.py."""

    text: str = key("", "files of text, with commas between: jsonl, jsonl.xz, parquet, txt")
    windows: int = key(64, "windows of text; half of them calibrate, half judge", least=4)
    length: int = key(256, "tokens of a window, at most the model's context", least=2)
    budget: float = key(0.01, "largest KL from the model as it is, nats a token, for what is suggested", least=0)
    across: bool = key(False, "let blocks share the statistic of blocks before them too")
    plot: str = key("", "picture of the sizes per block, as the paper's Figure 3 ('': none)")
    out: str = key("", "JSONL file to append the results to ('': none)")
    device: str = key("auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps"))

    def __post_init__(self) -> None:
        if not self.text:
            raise ConfigError("text: name a file of text to measure on, --text=FILE")
        check_least(self)


def summary(rms: Tensor) -> list[dict[str, Any]]:
    """One row for each position of rms (2L + 1, N, T): mean, SD and quantiles over tokens; the first token apart."""
    rows = []
    for position, sizes in enumerate(rms):
        later = sizes[:, 1:].flatten()
        quantiles = torch.quantile(later[:: len(later) // 1_000_000 + 1], torch.tensor(QUANTILES).double()).tolist()
        rows.append({"position": position, "mean": float(later.mean()), "sd": float(later.std()),
                     "quantiles": quantiles, "first": float(sizes[:, 0].mean())})  # fmt: skip
    return rows


def blocks_table(rms: Tensor) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines for people and records: sizes before attention and MLP of every block, and how they relate."""
    from posthoc.coupling import ratios

    rows, records = summary(rms), []
    lines = [f"{'block':8}{'RMS before attention':36}{'before MLP':36} {'MLP / attention':27} first token",
             f"{'':8}{'mean     SD (5 .. 95 %)':36}{'mean     SD (5 .. 95 %)':36} {'means':9}{'geom.':9}{'squares':9}"
             "    RMS    ratio"]  # fmt: skip
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
        records.append({"block": block, "attention": a, "mlp": m, "ratio": found, "first_ratio": first})
    return lines, records


def main(argv: list[str]) -> None:
    from common.distributed import faster_float32_products, find_device
    from posthoc.coupling import Calibration, greedy, suggest_first, text_windows
    from training.checkpoint import load_model

    config, spec = parse_args(StatsConfig, argv, __doc__, spec=True)
    model, device = load_model(spec), find_device(config.device)
    windows = text_windows(config.text, model.meta, min(config.length, model.config.block_size), config.windows)
    model.to(device)
    if device.type == "cpu":
        faster_float32_products(model.config.n_embd, model.config.head_channels)
    shares = "s" in model.plan.letters
    if shares or model.config.norm_type not in ("rms", "coupled"):
        lines, records = blocks_table(token_rms(model, windows))
        why = "it shares statistics already" if shares else "only RMSNorm can be coupled (convert.py)"
        print("\n".join([*lines, f"norm_type={model.config.norm_type}, norm plan {model.plan}: {why}"]))
        return finish(config, {"spec": spec, "blocks": records, **environment(device)})
    calibration, judge = (Calibration(model, windows[start::2]) for start in (0, 1))
    lines, records = blocks_table(calibration.rms)
    print("\n".join(lines))
    result: dict[str, Any] = {"spec": spec, "blocks": records, "budget": config.budget,
                              "tokens": calibration.windows.numel()}  # fmt: skip
    print(f"\ncoupled_first: KL in nats a token here (and on the other windows); budget {config.budget:g}")
    for per_layer in (False, True):
        first, choices = suggest_first(calibration, config.budget, per_layer)
        for k, choice in enumerate(choices):
            alpha = "per layer" if per_layer else f"{choice.alpha:.3f}"
            mark = "  <- suggested" if k == first else ""
            print(f"  {k}  alpha {alpha}  {choice.kl:.3e} ({judge.kl(choice.plan, choice.alpha):.3e}){mark}")
        result["per_layer" if per_layer else "one_alpha"] = {
            "coupled_first": first, "alpha": choices[first].alpha,
            "kl": [choice.kl for choice in choices], "kl_held_out": [judge.kl(c.plan, c.alpha) for c in choices],
        }  # fmt: skip
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
