"""Choose which positions of an RMSNorm model share a statistic, and with which alpha.

No training is needed: a choice is judged by the KL that it costs.

    # windows (N, T) of text; the teacher's states are computed once
    calibration = Calibration(model, windows)
    # smallest coupled_first whose KL is within the budget
    first, choices = suggest_first(calibration, budget=0.01)
    # cheapest position first: KL against the number of statistics saved
    steps = greedy(calibration, budget=0.01)

KL is KL(teacher || student) in nats a token, the mean over the windows. A student is a view of the
teacher: another norm plan on the same tensors. The first position of a window is left out of alpha
and of KL: attention makes a sink of it, whose size says nothing about other tokens.
"""

import copy
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from common.errors import ConfigError, FoldError
from data.documents import input_files, read_files
from data.tokenizers import load_tokenizer
from fold.gpt import bias_keys, linear_after, rebuild, retype
from model import GPT
from norm_plan import NormPlan
from norm_types import SHARED
from norms import FoldedForm, fold_affine
from posthoc.kl import kl_divergence
from training.stream import token_rms

BATCH = 8  # windows in one forward pass
GRID = 0.01  # to which one alpha for all positions matters

Alpha = tuple[float, ...]  # one for each of the 2L + 1 positions


def text_windows(text: str, meta: dict, length: int, count: int) -> Tensor:
    """Return at most `count` windows of token ids (N, length), N even.

    They are spread over the first four times as much text. A document gives no more than two
    windows where there are enough documents, because the sizes of its residual stream are its own:
    32 windows from the beginning of a file were of three documents.

    Args:
        text: files of documents (jsonl, jsonl.xz, parquet, txt), with commas between.
        meta: names the tokenizer.

    Raises:
        ConfigError: there is too little text.
    """
    tokenizer = load_tokenizer(meta)
    needed = 4 * count * length
    # At first some tokens of each document; if that is not enough text, all that are needed.
    for most in (2 * length, needed):
        ids: list[int] = []
        for document in read_files(input_files(text)):
            # Only the beginning of a long document is encoded, eight characters a token.
            tokens = tokenizer.encode_ordinary(document.text[: 8 * most])
            ids += tokens[: min(most, needed - len(ids))]
            if len(ids) >= needed:
                break
        if len(ids) >= needed:
            break
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)  # (all, length)
    if len(windows) < 2:
        raise ConfigError(
            f"text={text}: {len(ids)} tokens, two windows of {length} are needed: give more text"
        )
    even = min(count, len(windows)) // 2 * 2
    chosen = torch.linspace(0, len(windows) - 1, even).long()
    return windows[chosen]


def view(model: GPT, plan: str, alpha: Alpha | float = 1.0) -> GPT:
    """Return `model` under another norm plan: a GPT on the same tensors, in eval mode.

    A norm that shares has no bias: it moves into the linear that reads it, which is exact.

    Args:
        plan: e.g. "RR Rs R".
        alpha: one number, or one for each position.

    Raises:
        FoldError: the model's norms cannot be coupled.
    """
    why = refusal(model)
    if why:
        raise FoldError(why)
    coupled = retype(
        model.config,
        "coupled",
        norm_plan=plan,
        coupled_alpha=alpha,
        rms_bias=model.config.rms_bias,
    )
    weights = model.state_dict()
    letters = NormPlan(coupled, coupled.n_layer, coupled.n_embd, coupled.bias).letters
    for position, (letter, place) in enumerate(zip(letters, model.places(), strict=True)):
        if letter == SHARED and place.norm.bias is not None:
            reader = linear_after(position)
            moved = FoldedForm("shared", shift=place.norm.bias)
            weight, bias = (weights.get(f"{reader}.{part}") for part in ("weight", "bias"))
            weights[f"{reader}.bias"] = fold_affine(weight, bias, moved)[1]
    return rebuild(model, replace(coupled, **bias_keys(model, weights)), weights)


def refusal(model: GPT) -> str:
    """Say why the norms of a model cannot be coupled; "" if they can."""
    config = model.config
    is_whole = config.norm_groups == 1 and config.rms_fraction == 1
    has_rms_norms = set(model.plan.letters) <= {"R", SHARED}
    is_scaled = any(place.norm.depth is not None for place in model.places())
    is_centred = model.plan.type.residual_linear is not nn.Linear
    is_plain = model.plan.adds_plainly and model.norm_e is None
    if has_rms_norms and is_whole and is_plain and not is_scaled and not is_centred:
        return ""
    return (
        f"norm_type={config.norm_type}, norm_plan {model.plan}: coupling is for rms over all "
        "channels, without output norms and a norm of the embeddings (of layer, cbwc and lns first "
        "make rms, which is exact: python convert.py MODEL --to=rms --out=FOLDER)"
    )


def own_statistics(model: GPT, name: str = "the model") -> GPT:
    """Return a view of `model` in which every norm computes its own statistic.

    Args:
        name: what messages call the model.

    Raises:
        ConfigError: a norm shares already. With its own statistic the model would compute another
            function, which no teacher has been trained for.
    """
    if "s" in model.plan.letters:
        raise ConfigError(
            f"{name} shares statistics already (norm plan {model.plan}): start from the RMSNorm "
            "model that it was made of"
        )
    return view(model, spell("R" * (2 * model.config.n_layer + 1)))


def spell(letters: Sequence[str]) -> str:
    """Return a plan as it is printed: 'RRRsR' -> 'RR Rs R'."""
    return " ".join("".join(letters[i : i + 2]) for i in range(0, len(letters), 2))


def sources(plan: str) -> list[int]:
    """Return, for each position, the one whose statistic it uses: itself for R."""
    found: list[int] = []
    for position, letter in enumerate(plan.replace(" ", "")):
        found.append(found[-1] if letter == "s" else position)
    return found


def ratios(rms: Tensor, position: int, source: int) -> dict[str, float]:
    """Return typical values of RMS(position) / RMS(source).

    means: mean RMS over mean RMS (section 5.3 of Loretz & Hochreiter 2026). geometric: the
    geometric mean over tokens. least_squares: the alpha that minimises
    E|h / RMS(h) - h / (alpha RMS(source))|^2 over tokens, which is E[r^2] / E[r].

    Args:
        rms: (2L + 1, N, T); the first position of windows is left out.
    """
    own = rms[position, :, 1:]  # (N, T - 1)
    shared = rms[source, :, 1:]
    r = own / shared
    return {
        "means": float(own.mean() / shared.mean()),
        "geometric": float(r.log().mean().exp()),
        "least_squares": float(r.square().mean() / r.mean()),
    }


class Calibration:
    """A teacher on windows of text: sizes of its residual stream and its final hidden states.

    Args:
        model: the teacher.
        windows: token ids (N, T).

    Raises:
        ConfigError: its norms share statistics already.
    """

    def __init__(self, model: GPT, windows: Tensor):
        self.positions = 2 * model.config.n_layer + 1
        self.model = own_statistics(model)
        self.windows = windows
        self.rms = token_rms(self.model, windows)  # (2L + 1, N, T)
        self.hidden = list(self._hidden(self.model))

    @torch.no_grad()
    def _hidden(self, model: GPT) -> Iterator[Tensor]:
        """Yield final hidden states (BATCH, T, C), part by part."""
        for part in self.windows.split(BATCH):
            yield model.hidden(part.to(model.wte.weight.device))

    def alpha(self, plan: str) -> Alpha:
        """Return alpha by least squares for each shared position of `plan`, 1 elsewhere."""
        return tuple(
            1.0 if position == source else ratios(self.rms, position, source)["least_squares"]
            for position, source in enumerate(sources(plan))
        )

    @torch.no_grad()
    def token_kl(self, plan: str, alpha: Alpha | float) -> Tensor:
        """Return the KL (N, T) of every token under `plan`."""
        head = self.model.head_weight()
        student = view(self.model, plan, alpha)
        parts = [
            kl_divergence(x, head, taught, head, self.model.n_vocab)
            for x, taught in zip(self._hidden(student), self.hidden, strict=True)
        ]  # (BATCH, T) each
        return torch.cat(parts)

    def kl(self, plan: str, alpha: Alpha | float) -> float:
        """Return the mean KL over all but the first position of the windows."""
        return float(self.token_kl(plan, alpha)[:, 1:].double().mean())

    def choice(self, plan: str, alpha: Alpha | float) -> "CoupledChoice":
        """Return a plan and its alpha with their KL."""
        return CoupledChoice(plan, alpha, self.kl(plan, alpha))

    def best_alpha(self, plan: str) -> tuple[float, float]:
        """Find the one alpha for all shared positions with the lowest KL; return it and the KL.

        The mean of the ratios alone would not do: with no standard block it cost a KL of 0.064,
        where one alpha for each position cost 0.020.

        The search begins around the mean least-squares ratio.
        """
        letters = plan.replace(" ", "")
        found = [alpha for alpha, letter in zip(self.alpha(plan), letters) if letter == SHARED]
        if not found:
            return 1.0, self.kl(plan, 1.0)
        start = sum(found) / len(found)
        best = minimize_scalar(
            partial(self.kl, plan),
            bounds=(start / 2, start * 2),
            method="bounded",
            options={"xatol": GRID / 2},
        )
        return float(best.x), float(best.fun)

    def calibrated(self, plan: str) -> "CoupledChoice":
        """Return `plan` with the alpha that has the lowest KL of three kinds.

        They are 1 everywhere, the best one for all shared positions, and one for each by least
        squares. None of them is the best in every model: with every block coupled, the last had the
        highest KL of the three in one teacher and the lowest in two (results/cpu/posthoc).
        """
        ones = (1.0,) * self.positions
        one, kl_of_one = self.best_alpha(plan)
        uniform = tuple(
            1.0 if position == source else one for position, source in enumerate(sources(plan))
        )
        choices = (
            self.choice(plan, ones),
            CoupledChoice(plan, uniform, kl_of_one),
            self.choice(plan, self.alpha(plan)),
        )
        return min(choices, key=lambda choice: choice.kl)


@dataclass(frozen=True)
class CoupledChoice:
    """A plan, its alpha, and what it costs."""

    plan: str
    alpha: Alpha | float
    kl: float  # on the calibration text, nats a token

    @property
    def saved(self) -> int:
        """Number of statistics that it saves, which is launches in arm B (decode/arms.py)."""
        return self.plan.count("s")


def first_plan(n_layer: int, first: int) -> str:
    """Return the plan of coupled_first: blocks that do not share, then Rs."""
    return spell("RR" * first + "Rs" * (n_layer - first) + "R")


def to_coupled(model: GPT, plan: str, idx: Tensor) -> GPT:
    """Make a CoupledNorm model of an RMSNorm model, with copies of the weights. Not exact.

    Alpha is that of Calibration.calibrated, by sizes in the given model. Alpha from sizes in the
    coupled model itself, found by iteration, has almost the same KL (docs/log.md).

    Args:
        plan: its norm plan; "" for Rs in every block but the first, or in the only one.
        idx: token ids (N, T) that sizes and KL are measured on.

    Raises:
        FoldError: the norms cannot be coupled.
    """
    blocks = model.config.n_layer
    plan = str(view(model, plan or first_plan(blocks, min(1, blocks - 1))).plan)
    alpha = Calibration(model, idx).calibrated(plan).alpha
    return copy.deepcopy(view(model, plan, alpha))


def suggest_first(
    calibration: Calibration, budget: float, per_layer: bool = False
) -> tuple[int, list[CoupledChoice]]:
    """Find the smallest coupled_first whose KL is at most `budget`.

    Args:
        per_layer: one alpha for each position, by least squares, instead of the best single alpha.

    Returns:
        coupled_first, and the choice at every k from 0 to the number of blocks.
    """
    n_layer = calibration.model.config.n_layer
    plans = [first_plan(n_layer, k) for k in range(n_layer + 1)]
    if per_layer:
        choices = [calibration.choice(plan, calibration.alpha(plan)) for plan in plans]
    else:
        choices = [CoupledChoice(plan, *calibration.best_alpha(plan)) for plan in plans]
    # At k = n_layer nothing is shared, and KL is zero up to rounding, whatever the budget.
    within = (k for k, choice in enumerate(choices) if choice.kl <= budget)
    return next(within, n_layer), choices


def greedy(calibration: Calibration, budget: float, across: bool = False) -> list[CoupledChoice]:
    """Let one position after another share, the cheapest first, while the KL is at most `budget`.

    Alpha is per position, by least squares. What a position costs is measured again when its turn
    comes, because costs depend on what shares already (lazy greedy, Minoux 1978).

    Args:
        across: positions before attention are candidates too, not only those before MLPs. They
            share with earlier blocks.

    Returns:
        The choice after every step, beginning with no shared position.
    """
    letters = ["R"] * calibration.positions

    def with_shared(position: int) -> CoupledChoice:
        plan = spell([*letters[:position], "s", *letters[position + 1 :]])
        return calibration.choice(plan, calibration.alpha(plan))

    plan = spell(letters)
    steps = [calibration.choice(plan, calibration.alpha(plan))]
    step = 1 if across else 2
    candidates = range(1, calibration.positions - 1, step)
    queue = [(with_shared(position).kl, position) for position in candidates]
    heapq.heapify(queue)
    while queue:
        _, position = heapq.heappop(queue)
        choice = with_shared(position)
        cost = choice.kl - steps[-1].kl
        if queue:
            cheapest, _ = queue[0]
            if cost > cheapest:  # it goes back, at its new cost
                heapq.heappush(queue, (cost, position))
                continue
        if choice.kl > budget:
            continue
        letters[position] = "s"
        steps.append(choice)
    return steps
