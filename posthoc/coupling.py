"""Which positions of an RMSNorm model can share a statistic, with which alpha: chosen by KL,
without any training.

    # windows (N, T) of text: the teacher's states, once
    calibration = Calibration(model, windows)
    # smallest coupled_first whose KL is within the budget
    first = suggest_first(calibration, budget=0.01)
    # cheapest position first: KL against statistics saved
    steps = greedy(calibration, budget=0.01)

KL is KL(teacher || student), nats a token, mean over the windows. A student is a view of the
teacher: another norm plan on the very same tensors. The first position of a window is left out of
alpha and of KL and told apart: attention makes a sink of it, whose size says nothing about other
tokens.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ConfigError, FoldError
from data.documents import input_files, read_files
from data.tokenizers import load_tokenizer
from fold.gpt import rebuild, retype
from model import GPT
from posthoc.kl import kl_divergence
from training.stream import token_rms

BATCH = 8  # windows at once
GRID = 0.01  # of a global alpha

Alpha = tuple[float, ...]  # one for each of the 2L + 1 positions


def text_windows(text: str, meta: dict, length: int, count: int) -> Tensor:
    """At most `count` windows of token ids (N, length), N even, spread over the first four times as
    much text, of which a document gives no more than two windows where there are enough of them:
    what one says of sizes is its own.

    text: files of documents (jsonl, jsonl.xz, parquet, txt), with commas between. Raises
    ConfigError for too little.
    """
    tokenizer, wanted = load_tokenizer(meta), 4 * count * length
    for most in (2 * length, wanted):  # tokens of a document
        ids: list[int] = []
        for document in read_files(input_files(text)):
            ids += tokenizer.encode_ordinary(document.text[: 8 * most])[
                : min(most, wanted - len(ids))
            ]
            if len(ids) >= wanted:
                break
        if len(ids) >= wanted:
            break
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)  # (all, length)
    if len(windows) < 2:
        raise ConfigError(
            f"text={text}: {len(ids)} tokens, two windows of {length} are needed: give more text"
        )
    return windows[torch.linspace(0, len(windows) - 1, min(count, len(windows)) // 2 * 2).long()]


def view(model: GPT, plan: str, alpha: Alpha | float = 1.0) -> GPT:
    """`model` under another norm plan ('RR Rs R'): a GPT on the same tensors, in eval mode."""
    config = model.config
    plain = config.norm_groups == config.rms_fraction == 1 and not (config.rms_bias and config.bias)
    if config.norm_type not in ("rms", "coupled") or not plain:
        raise FoldError(
            f"norm_type={config.norm_type}: coupling is for rms, whole and without biases in the "
            "norms (convert.py --to=rms makes it of layer and cbwc)"
        )
    return rebuild(
        model, retype(config, "coupled", norm_plan=plan, coupled_alpha=alpha), model.state_dict()
    )


def own_statistics(model: GPT, name: str = "the model") -> GPT:
    """A view of `model` for whom every norm computes its own statistic. Raises ConfigError if one
    shares already: with its own it would be another function, and no teacher. `name` is what the
    user called the model.
    """
    if "s" in model.plan.letters:
        raise ConfigError(
            f"{name} shares statistics already (norm plan {model.plan}): start from the RMSNorm "
            "model that it was made of"
        )
    return view(model, spell("R" * (2 * model.config.n_layer + 1)))


def spell(letters: Sequence[str]) -> str:
    """'RRRsR' -> 'RR Rs R', as plans are printed."""
    return " ".join("".join(letters[i : i + 2]) for i in range(0, len(letters), 2))


def sources(plan: str) -> list[int]:
    """For each position the one whose statistic it uses: itself for R."""
    found: list[int] = []
    for position, letter in enumerate(plan.replace(" ", "")):
        found.append(found[-1] if letter == "s" else position)
    return found


def ratios(rms: Tensor, position: int, source: int) -> dict[str, float]:
    """Typical RMS(position) / RMS(source) of rms (2L + 1, N, T), the first position of windows left
    out.

    means: mean RMS over mean RMS (section 5.3 of Loretz & Hochreiter 2026). geometric: of tokens.
    least_squares: the alpha that minimises E|h / RMS(h) - h / (alpha RMS(source))|^2 over tokens,
    that is E[r^2] / E[r].
    """
    own, shared = rms[position, :, 1:], rms[source, :, 1:]
    r = own / shared
    return {
        "means": float(own.mean() / shared.mean()),
        "geometric": float(r.log().mean().exp()),
        "least_squares": float(r.square().mean() / r.mean()),
    }


class Calibration:
    """A teacher on windows of text (N, T): sizes of its residual stream and its final hidden
    states. ConfigError if its norms share statistics already.
    """

    def __init__(self, model: GPT, windows: Tensor):
        self.positions = 2 * model.config.n_layer + 1
        self.model, self.windows = own_statistics(model), windows
        self.rms = token_rms(self.model, windows)  # (2L + 1, N, T)
        self.hidden = list(self._hidden(self.model))

    @torch.no_grad()
    def _hidden(self, model: GPT) -> Iterator[Tensor]:
        """Final states (BATCH, T, C), part by part."""
        for part in self.windows.split(BATCH):
            yield model.hidden(part.to(model.wte.weight.device))

    def alpha(self, plan: str) -> Alpha:
        """One alpha, by least squares, for each shared position of `plan`, 1 elsewhere."""
        pairs = enumerate(sources(plan))
        return tuple(
            ratios(self.rms, p, source)["least_squares"] if p != source else 1.0
            for p, source in pairs
        )

    @torch.no_grad()
    def token_kl(self, plan: str, alpha: Alpha | float) -> Tensor:
        """KL (N, T) of every token under `plan`."""
        head, parts = self.model.head_weight(), []
        for x, taught in zip(self._hidden(view(self.model, plan, alpha)), self.hidden, strict=True):
            parts.append(
                kl_divergence(x.flatten(0, 1), head, taught.flatten(0, 1), head, self.model.n_vocab)
            )
        return torch.cat(parts).view(self.windows.shape)

    def kl(self, plan: str, alpha: Alpha | float) -> float:
        """Mean KL over all but the first position of the windows."""
        return float(self.token_kl(plan, alpha)[:, 1:].double().mean())

    def best_alpha(self, plan: str) -> tuple[float, float]:
        """(alpha, KL): the one alpha for all shared positions that has the lowest KL here.

        From the least-squares ratio downhill, with steps of 8, 4, 2 and 1 times GRID; then the
        vertex of the parabola through the lowest point and its neighbours.
        """
        own = [(p, source) for p, source in enumerate(sources(plan)) if p != source]
        if not own:
            return 1.0, self.kl(plan, 1.0)
        start = sum(ratios(self.rms, *pair)["least_squares"] for pair in own) / len(own)
        known: dict[int, float] = {}

        def cost(point: int) -> float:
            if point not in known:
                known[point] = self.kl(plan, point * GRID) if point > 0 else float("inf")
            return known[point]

        point = round(start / GRID)
        for step in (8, 4, 2, 1):
            while (best := min((point, point - step, point + step), key=cost)) != point:
                point = best
        below, here, above = cost(point - 1), cost(point), cost(point + 1)
        bend = below - 2 * here + above
        alpha = GRID * (point + ((below - above) / (2 * bend) if 0 < bend < float("inf") else 0.0))
        return alpha, self.kl(plan, alpha)


@dataclass(frozen=True)
class CoupledChoice:
    """A plan, its alpha, its KL on the calibration text, and how many statistics it saves (launches
    in arm B).
    """

    plan: str
    alpha: Alpha | float
    kl: float

    @property
    def saved(self) -> int:
        return self.plan.count("s")


def first_plan(n_layer: int, first: int) -> str:
    """The plan of coupled_first: standard blocks, then Rs."""
    return spell("RR" * first + "Rs" * (n_layer - first) + "R")


def to_coupled(model: GPT, plan: str, idx: Tensor) -> GPT:
    """RMSNorm -> CoupledNorm with the norm plan `plan` ("": Rs in every block) and copies of the
    weights. Not exact.

    Alpha of each shared position is the least-squares ratio of sizes on tokens idx (N, T). Alpha
    from sizes in the coupled model itself, pass after pass, has next to the same KL (LOG.md).
    Raises FoldError for norms that cannot be coupled.
    """
    if model.config.norm_type == "coupled":
        raise FoldError("norm_type=coupled: it is coupled already")
    plan = str(view(model, plan).plan)
    config = retype(
        model.config, "coupled", norm_plan=plan, coupled_alpha=Calibration(model, idx).alpha(plan)
    )
    return rebuild(
        model, config, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    )


def suggest_first(
    calibration: Calibration, budget: float, per_layer: bool = False
) -> tuple[int, list[CoupledChoice]]:
    """(coupled_first, the choice at every k = 0 .. L): the smallest k whose KL is at most `budget`.

    With one alpha for all positions, the best there is; or per layer, by least squares.
    """
    n_layer, choices = calibration.model.config.n_layer, []
    for k in range(n_layer + 1):
        plan = first_plan(n_layer, k)
        if per_layer:
            alpha = calibration.alpha(plan)
            choices.append(CoupledChoice(plan, alpha, calibration.kl(plan, alpha)))
        else:
            choices.append(CoupledChoice(plan, *calibration.best_alpha(plan)))
    return next(
        k for k, choice in enumerate(choices) if choice.kl <= budget or k == n_layer
    ), choices


def greedy(calibration: Calibration, budget: float, across: bool = False) -> list[CoupledChoice]:
    """Let one position after another share, the cheapest first, while the KL is at most `budget`;
    every step.

    Candidates are the positions before MLPs; with `across` those before attention too, which then
    share with blocks before them. Alpha is per position, by least squares. What a position costs is
    measured again when its turn comes, because costs depend on what shares already (lazy greedy,
    Minoux 1978).
    """
    letters = ["R"] * calibration.positions

    def with_shared(position: int) -> CoupledChoice:
        plan = spell([*letters[:position], "s", *letters[position + 1 :]])
        alpha = calibration.alpha(plan)
        return CoupledChoice(plan, alpha, calibration.kl(plan, alpha))

    plan = spell(letters)
    steps = [CoupledChoice(plan, calibration.alpha(plan), calibration.kl(plan, 1.0))]
    candidates = range(1, calibration.positions - 1, 1 if across else 2)
    queue = [(with_shared(position).kl, position) for position in candidates]
    heapq.heapify(queue)
    while queue:
        _, position = heapq.heappop(queue)
        choice = with_shared(position)
        cost = choice.kl - steps[-1].kl
        if queue and cost > queue[0][0]:  # no longer the cheapest: back, at its new cost
            heapq.heappush(queue, (cost, position))
            continue
        if choice.kl > budget:
            continue
        letters[position] = "s"
        steps.append(choice)
    return steps
