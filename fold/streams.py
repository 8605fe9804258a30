"""Measure what the norms of a model are given on a text: sizes, means, tails, the first token.

for stream in streams(model, norms_of(model, example), batches):
    print(stream)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .certificate import Inputs, run
from .norm_probes import SECOND, SUM, NormRow, NormsFound

LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass
class Stream:
    """What one norm was given, over all tokens.

    Attributes:
        path: of the norm.
        rms: root of the mean square.
        largest: largest magnitude.
        mean_share: share of the squares that is in the means of rows: what LayerNorm takes away.
        kurtosis: of the numbers of a row, the mean over rows; 3 for normal ones.
        first: share of the squares that the first token of each text has; None: not known.
    """

    path: str
    rms: float
    largest: float
    mean_share: float
    kurtosis: float
    first: float | None

    def __str__(self) -> str:
        first = "not known" if self.first is None else f"{self.first:.1%}"
        share = self.largest / LARGEST_HALF
        return (
            f"{self.path}: RMS {self.rms:.4g}, largest {self.largest:.4g} ({share:.2%} of float16's"
            f" range), mean {self.mean_share:.2%} of the squares, kurtosis {self.kurtosis:.3g}, "
            f"first token {first} of the squares"
        )


class Sums:
    """Sums over all that one norm is given."""

    def __init__(self, row: NormRow):
        self.row = row
        self.count = self.rows = 0
        self.squares = self.means = self.tails = self.first = self.largest = 0.0
        self.knows_first = True

    def add(self, x: Tensor, tokens: int) -> None:
        """Add what the norm is given in one call.

        Args:
            x: the input of the norm.
            tokens: of each text.
        """
        axes = self.row.norm.found.layout.averaged
        wide = x.detach().double()
        square = wide.square()
        self.count += x.numel()
        self.squares += float(square.sum())
        self.largest = max(self.largest, float(wide.abs().max()))
        mean = wide.mean(axes, keepdim=True)
        self.means += float(mean.square().sum()) * x.numel() / mean.numel()
        centred = wide - mean
        variance = centred.square().mean(axes)
        tails = centred.pow(4).mean(axes) / variance.square().clamp_min(1e-300)
        self.tails += float(tails.sum())
        self.rows += tails.numel()
        at = [a for a in range(1, x.dim()) if x.shape[a] == tokens and a not in axes]
        self.knows_first &= len(at) == 1
        if self.knows_first:
            self.first += float(square.select(at[0], 0).sum())

    def stream(self) -> Stream:
        """Return the averages."""
        squares = max(self.squares, 1e-300)
        return Stream(
            self.row.path,
            rms=(self.squares / self.count) ** 0.5,
            largest=self.largest,
            mean_share=self.means / squares,
            kurtosis=self.tails / self.rows,
            first=self.first / squares if self.knows_first else None,
        )


def streams(model: nn.Module, found: NormsFound, batches: Iterable[Inputs]) -> list[Stream]:
    """Run a model on texts and measure what its norms are given.

    Norms that are written out in a forward, that average over groups, or whose input is not known,
    are left out.

    Args:
        found: what norms_of returned for the model.
        batches: arguments of the model, with token ids (N, T) among them.
    """
    rows = [
        row
        for row in found.rows
        if row.is_named
        and row.norm.call is not None
        and row.norm.found.layout.split is None
        and not row.note.startswith(SECOND)
    ]
    sums = [Sums(row) for row in rows]
    tokens = 0

    def before(one: Sums, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call = one.row.norm.call
        x = call.slot.get(args, kwargs)
        if one.row.note == SUM:
            x = x + sum(slot.get(args, kwargs) for slot in call.others)
        one.add(x, tokens)

    hooks = [
        model.get_submodule(one.row.path).register_forward_pre_hook(
            partial(before, one), with_kwargs=True
        )
        for one in sums
    ]
    try:
        for batch in batches:
            ids = batch[0] if isinstance(batch, tuple) else batch["input_ids"]
            tokens = ids.shape[1]
            run(model, batch, widen=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [one.stream() for one in sums if one.count]
