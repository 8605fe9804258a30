"""The residual stream at every norm position: its size, its drift from the statistic used, and what
the output does.

CoupledNorm divides the stream by the RMS of an earlier position. How much larger the stream is by
then is the drift RMS(h) / RMS(shared), one number a token. Its typical value can be compensated by
a scalar at each position (alpha, section 5.3 of Loretz & Hochreiter 2026), its spread over tokens
cannot. TaperNorm multiplies by a constant c instead: its drift, RMS(c h), is about 1 when c is set
(c fits the squares, over an average of some 100 steps), and moves as the stream grows away from it.

Where a position replaces the stream (P and B of a norm plan), its size is that of the new stream,
which the norm itself sets. With an output norm it is that of the stream after the add.

At the output, the size of the logits and the radial gradient tell whether anything holds the scale
of the stream (Kanavalau, Amo Alonso & Lall 2026, section 4): with a final norm that gradient is 0,
without one it is negative where tokens are predicted well, and logits grow ("logit chasing"). Its
mean over a text is near 0 once the model is about as sure as it is right there, and takes many
windows to tell: those of one document all err to one side. With P or B at the final position, h is
the sum that is normalised there, not the stream that replaces it: that one has no free scale.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.cross_entropy import cross_entropy
from kernels.reference import inverse_rms, statistics_dtype
from model import GPT
from norms import Place


@dataclass(frozen=True)
class RMSStats:
    """One float64 number for each norm position (2L + 1,); at the output, if targets were given,
    one number each.
    """

    rms: Tensor  # root of the mean square over tokens and channels
    # geometric mean over tokens of RMS(h) / RMS(statistic used); 1 where the position has its own
    drift: Tensor
    spread: Tensor  # standard deviation over tokens of the logarithm of that ratio
    # what LayerNorm takes away: the mean over channels, its root mean square over tokens as a share
    # of rms
    mean_share: Tensor
    # length of a token's logits around their mean; root of the mean square over tokens
    logit_norm: float | None = None
    # <gradient of a token's loss, h>, h the stream before the final norm; mean
    radial_gradient: float | None = None

    def record(self) -> dict[str, list[float] | float]:
        """For a log."""
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
            if value is not None
        }


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep `model` in eval mode, without gradients, while a block runs."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def measure(model: GPT, idx: Tensor, targets: Tensor | None = None) -> RMSStats:
    """Statistics on tokens idx (B, T), dropout off; of the output too, if there are targets (B, T).
    Under FSDP all ranks must call it.
    """
    figures: dict[str, list[Tensor]] = {"rms": [], "drift": [], "spread": [], "mean_share": []}
    output: dict[str, float] = {}

    def note(place: Place, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        # h (B, T, C) is the stream with delta added, `used` the statistic that the norm used.
        _, h, used = outputs
        # (B, T, 1); a norm that replaces the stream has a statistic of its own, so no drift
        log_ratio = place.norm.log_drift(h, used)
        rms = h.double().square().mean().sqrt()
        mean = h.double().mean(-1).square().mean().sqrt()
        figures["rms"].append(rms)
        figures["drift"].append(log_ratio.mean().exp())
        figures["spread"].append(log_ratio.std(correction=0))
        figures["mean_share"].append(mean / rms)
        # within forward, where FSDP has the head gathered
        if place is model.norm_f and targets is not None:
            x, delta, _ = inputs
            stream = place.sum(x, delta) if place.replaces else h
            length, gradient = output_statistics(model, stream, used, targets)
            output.update(logit_norm=length, radial_gradient=gradient)

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for place in model.places():
            stack.enter_context(place.register_forward_hook(note))
        # with targets, as in training: FSDP's hooks run, and no whole logits are made
        model(idx, idx)
    of_positions = {name: torch.stack(column).cpu() for name, column in figures.items()}
    return RMSStats(**of_positions, **output)


def output_statistics(
    model: GPT, h: Tensor, used: Tensor | None, targets: Tensor
) -> tuple[float, float]:
    """(logit norm, radial gradient) for the stream h (B, T, C) that the final norm normalises, and
    the statistic `used` that its forward handed on.

    Neither needs all logits at once: |W y|^2 is y^T (W^T W) y, and the loss comes chunk by chunk.
    In full precision.
    """
    with torch.autocast(h.device.type, enabled=False), torch.enable_grad():
        h = h.detach().to(statistics_dtype(h)).requires_grad_()
        y = model.norm_f.read(h, used).flatten(0, -2)  # (B T, C)
        head = model.head_weight().detach().to(y.dtype)
        loss = cross_entropy(y, head, targets.flatten(), model.n_vocab)
        gradient = torch.autograd.grad(loss, h)[0]  # of the mean over tokens
    # rows of tokens that exist, (n_vocab, C)
    head = head[: model.n_vocab]
    head = head - head.mean(0)  # what all logits have in common changes no probability
    # W^T W is (C, C), however large the vocabulary is.
    square = ((y @ (head.T @ head)) * y).sum(-1).mean()
    # The loss is a mean over tokens, so the sum over tokens of <gradient, h> is the mean that is
    # meant.
    return float(square.sqrt()), float((gradient * h).sum())


@torch.no_grad()
def token_rms(model: GPT, windows: Tensor, batch: int = 8) -> Tensor:
    """sqrt(mean square + eps) of the residual stream of every token at every norm position: float64
    (2L + 1, N, T) on the CPU, for a GPT in eval mode and token ids (N, T), `batch` windows at once.
    """
    rows: list[Tensor] = []  # of each position in its turn, (batch, T)
    found = []

    def note(place: Place, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        rows.append(1 / inverse_rms(outputs[1], place.norm.eps).double().squeeze(-1).cpu())

    with contextlib.ExitStack() as stack:
        for place in model.places():
            stack.enter_context(place.register_forward_hook(note))
        for part in windows.split(batch):
            rows.clear()
            model.hidden(part.to(model.wte.weight.device))
            found.append(torch.stack(rows))  # (2L + 1, batch, T)
    return torch.cat(found, 1)  # (2L + 1, N, T)


@torch.no_grad()
def calibrate(model: GPT, idx: Tensor) -> RMSStats:
    """Set alpha of every shared position to its drift on tokens idx (B, T), where the config lets
    it move (coupled_calibrate); the statistics before that.
    """
    stats = measure(model, idx)
    for place, drift in zip(model.places(), stats.drift, strict=True):
        place.norm.calibrate(drift)
    return stats
