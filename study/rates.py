"""Choose each arm's learning rate: which runs to make next, and what they say.

The rates of an arm are octaves around the rate of the config: half of it, itself, double. While the
best one is at an end, one octave more there, at most MOST on either side. Then a second seed at the
best two, and at the neighbours of the best. Chosen is the vertex of the parabola through the best
and its neighbours, over the logarithm of the rate.

Everything here is a function of losses alone, so a screening that was killed goes on from the runs
that are there. Losses are in nats; one that diverged is infinite.
"""

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MOST = 3  # octaves on either side of the config's rate
REACH = 0.5  # octaves that the chosen rate may lie from the best one that was run
FIRST, SECOND = 0, 1  # of the two seeds of a screening
DRAWS = 20_000  # screenings that are simulated for the error of a rate
# Of a bend, in units of the noise of a run: its standard error, with two seeds at three octaves;
# and where the error of the chosen rate costs most. A flatter curve forgives a wrong rate.
ERROR_OF_BEND = 0.75**0.5
WORST_BEND = 0.25

Losses = dict[int, dict[int, float]]  # octave -> FIRST or SECOND -> loss


class Wanted(NamedTuple):
    """A run of a screening."""

    octave: int
    seed: int  # FIRST or SECOND


def level_of(
    losses: Mapping[Any, Mapping[int, float]], place: Any, first: int, second: int
) -> float:
    """Return the mean loss over the seeds at a place, on the level of the first seed.

    A loss of the second seed is taken less the mean difference of both seeds, which is that of all
    places that have both.

    Args:
        losses: place -> seed -> loss, infinite where the run diverged.
    """
    both = [its[second] - its[first] for its in losses.values() if {first, second} <= its.keys()]
    finite = [difference for difference in both if math.isfinite(difference)]
    shift = statistics.fmean(finite) if finite else 0.0
    return statistics.fmean(
        loss - shift if seed == second else loss for seed, loss in losses[place].items()
    )


@dataclass
class Screen:
    """What one arm's runs say so far."""

    losses: Losses = field(default_factory=dict)

    def at(self, octave: int) -> float:
        """Return the loss at an octave: the mean over its seeds, as `level_of` takes it."""
        return level_of(self.losses, octave, FIRST, SECOND)

    @property
    def best(self) -> int:
        """The octave with the lowest loss; of equal ones, the lowest rate."""
        return min(sorted(self.losses), key=self.at)

    @property
    def lowest(self) -> float:
        """The loss at the best octave; infinite before the first run."""
        return self.at(self.best) if self.losses else math.inf

    @property
    def missing_neighbour(self) -> int | None:
        """The octave beside the best one that was not run; None if both were."""
        beside = (self.best - 1, self.best + 1)
        return next((octave for octave in beside if octave not in self.losses), None)

    def next_runs(self) -> list[Wanted]:
        """Return the runs to make next; none once the screening is over."""
        start = [octave for octave in (-1, 0, 1) if octave not in self.losses]
        if start:
            return [Wanted(octave, FIRST) for octave in start]
        beside = self.missing_neighbour
        if beside is not None:
            return [Wanted(beside, FIRST)] if abs(beside) <= MOST else []
        by_loss = sorted(self.losses, key=lambda octave: self.losses[octave][FIRST])
        near = (self.best - 1, self.best, self.best + 1)
        for octaves in (by_loss[:2], near):
            second = [octave for octave in sorted(octaves) if self.needs_second(octave)]
            if second:
                return [Wanted(octave, SECOND) for octave in second]
        return []

    @property
    def is_over(self) -> bool:
        """Is no run wanted any more?"""
        return not self.next_runs()

    def needs_second(self, octave: int) -> bool:
        """Is the second seed missing at an octave? One that diverged needs none."""
        its = self.losses[octave]
        return SECOND not in its and math.isfinite(its[FIRST])

    def choice(self) -> float | None:
        """Return the chosen rate, in octaves from that of the config; None if there is none.

        There is none before the screening is over; it is not settled where the best rate is the
        last one that may be run, or where every rate diverged.
        """
        if self.next_runs() or self.missing_neighbour is not None:
            return None
        if not math.isfinite(self.at(self.best)):
            return None
        losses = [self.at(self.best + offset) for offset in (-1, 0, 1)]
        return self.best + vertex(losses)

    @property
    def bend(self) -> float:
        """Nats that the loss rises an octave from its lowest point; infinite if it diverges."""
        low, middle, high = (self.at(self.best + offset) for offset in (-1, 0, 1))
        return (low + high) / 2 - middle

    @property
    def cost_beside_divergence(self) -> float:
        """Return what the chosen rate costs at most, nats, where one neighbour diverged.

        It is the best one that was run, and a better one may lie between it and the divergence. At
        the divergence itself, a parabola costs a third of its rise on the other side.
        """
        rises = [self.at(self.best + offset) - self.at(self.best) for offset in (-1, 1)]
        return min(rises) / 3 if math.isfinite(min(rises)) else 0.0

    def squared_noise(self) -> tuple[float, int]:
        """Return the sum of squares that rates and seeds leave unexplained, and its degrees.

        Of an octave with both seeds, the difference of the two less the mean difference; a half of
        its square is the variance of a run.
        """
        both = [its[SECOND] - its[FIRST] for its in self.losses.values() if len(its) == 2]
        finite = [difference for difference in both if math.isfinite(difference)]
        if len(finite) < 2:
            return 0.0, 0
        mean = statistics.fmean(finite)
        return sum((one - mean) ** 2 for one in finite) / 2, len(finite) - 1


def vertex(losses: list[float]) -> float:
    """Return where the parabola through losses at -1, 0 and 1 octaves is lowest.

    At most REACH away from 0, whose loss is the lowest; 0 where a neighbour diverged, or where all
    three are equal.
    """
    low, middle, high = losses
    bend = low - 2 * middle + high
    if not math.isfinite(bend) or bend <= 0:
        return 0.0
    return min(max((low - high) / (2 * bend), -REACH), REACH)


def noise(screens: list[Screen]) -> float | None:
    """Return the SD of a run's loss, pooled over the screenings; None if nothing tells it."""
    squares = [screen.squared_noise() for screen in screens]
    degrees = sum(count for _, count in squares)
    if not degrees:
        return None
    return (sum(total for total, _ in squares) / degrees) ** 0.5


def rate_error(bend: float, sd: float) -> float:
    """Return the standard error that a screening leaves in the loss at the chosen rate, nats.

    The chosen rate is not the best one, so the loss is too high by an excess that is never
    negative: its root mean square over simulated screenings of a parabola with this bend, whose
    runs have this SD. The bend is taken a standard error lower than it was found, for the lowest
    of noisy losses looks steeper than it is.
    """
    if not math.isfinite(bend) or sd == 0:
        return 0.0
    in_noise = max(bend / sd - ERROR_OF_BEND, WORST_BEND)
    # A grid of some per cent is fine enough, and is simulated once.
    return sd * _excess(round(math.log2(in_noise) * 8))


def worst_rate_error() -> float:
    """Return the largest standard error that a screening leaves, in SDs of a run."""
    return rate_error(0.0, 1.0)


@functools.cache
def _excess(eighths: int) -> float:
    """Return the root mean square of the excess for a bend of 2 ** (eighths / 8), at an SD of 1.

    The simulated screening is that of Screen with both seeds at all octaves from -MOST to MOST; the
    truth lies anywhere between two octaves in their middle.
    """
    bend = 2.0 ** (eighths / 8)
    draw = np.random.default_rng(0)
    octaves = np.arange(-MOST, MOST + 1)  # (O,)
    truth = draw.uniform(-0.5, 0.5, (DRAWS, 1))
    losses = bend * (octaves - truth) ** 2 + draw.normal(0, 0.5**0.5, (DRAWS, len(octaves)))
    # The ends give no verdict, so they are not chosen.
    best = losses[:, 1:-1].argmin(1) + 1  # (DRAWS,)
    low, middle, high = (losses[np.arange(DRAWS), best + offset] for offset in (-1, 0, 1))
    curve = np.maximum(low - 2 * middle + high, 1e-12)
    chosen = octaves[best] + np.clip((low - high) / (2 * curve), -REACH, REACH)
    excess = bend * (chosen - truth[:, 0]) ** 2
    return float(np.mean(excess**2) ** 0.5)
