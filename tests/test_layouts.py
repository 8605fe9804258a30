"""Every norm layout against an independent plain implementation, written from the papers.

    python -m pytest tests/test_layouts.py

The implementation here is of the whole GPT: functions over the tensors of a state_dict, in the
shape of the papers' pseudo-code. It calls no norm of ours and reads no plan. In float64.
"""

import math
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import close, plan, random_sections, shake, tokens
from torch import Tensor

from common.errors import ConfigError
from model import GPT, GPTConfig, KVCache
from norm_plan import NormConfig
from norm_types import NORM_TYPES, NormType

L = 4
T = 11
GPT2 = GPTConfig(
    vocab_size=20, block_size=12, n_layer=L, n_head=2, n_embd=16, init_std=0.2, bias=True
)
# A head has other than n_embd / n_head channels, and two query heads share each key.
LLAMA = replace(
    GPT2,
    n_head=4,
    n_kv_head=2,
    head_dim=6,
    n_inner=24,
    activation="swiglu",
    position="rope",
    tie_embeddings=False,
    bias=False,
)
GEMMA = replace(
    LLAMA,
    activation="geglu",
    qk_norm="head",
    rope_theta=1000.0,
    rope_scaling=(8.0,),
    rope_scaling_kind="linear",
    window=3,
    local_blocks="llg",
    local_rope_theta=10.0,
    attn_scale=0.3,
    embed_scale=4.0,
    tie_embeddings=True,
)
OLMO = replace(
    GEMMA,
    n_kv_head=0,
    activation="swiglu",
    rope_theta=50.0,
    # the pairs turn 12, 3.3 and 0.9 times: kept, mixed and stretched
    rope_scaling=(8.0, 3.0, 0.5, 12.0, 1.2),
    rope_scaling_kind="yarn",
    window=4,
    local_blocks="lllg",
    local_rope_theta=0.0,
    attn_scale=0.0,
    embed_scale=1.0,
    tie_embeddings=False,
)
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gemma": GEMMA,
    "olmo": OLMO,
    "tanh": replace(GPT2, activation="gelu_tanh", n_head=4, tie_embeddings=False),
    "local": replace(GPT2, activation="relu2", window=4, local_blocks="l", embed_scale=3.0),
}
IDX, TARGETS = tokens(2, 3, T, below=20)

# ------------------------------------------------------------------------- the plain implementation


def rms_norm(x: Tensor, eps: float, groups: int = 1) -> Tensor:
    """x / sqrt(mean(x^2) + eps); Zhang & Sennrich 2019."""
    parts = x.unflatten(-1, (groups, -1))
    return (parts / (parts.pow(2).mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps); Ba et al. 2016."""
    return rms_norm(x - x.mean(-1, keepdim=True), eps)


@dataclass
class Plain:
    """A GPT over named tensors `p`; what the config says is said again here, case by case."""

    p: dict[str, Tensor]
    shape: GPTConfig  # sizes, activation and positions only
    layout: str
    kind: str = "rms"  # the norm: rms or layer
    eps: float = 1e-5
    output_eps: float = 1e-6
    one_plus: bool = False
    qk: str = "none"
    has_v_norm: bool = False
    groups: int = 1
    weight: float | None = None  # of the stream in the sum
    plain_at: int | None = None  # the position where that weight is 1 nevertheless (KEEL)
    sections: tuple[str, ...] = ()  # of by_letters
    alpha: float | tuple[float, ...] = 1.0  # of the positions that share
    detach: bool = True
    gate: float = 1.0  # factor of the gates

    def gain(self, name: str, y: Tensor) -> Tensor:
        """Multiply by the gain `name` and add its bias, where the model has them."""
        if f"{name}.weight" in self.p:
            gain = self.p[f"{name}.weight"]
            y = y * (1 + gain if self.one_plus else gain)
        return y + self.p.get(f"{name}.bias", 0.0)

    def N(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        eps = self.eps if eps is None else eps
        y = layer_norm(x, eps) if self.kind == "layer" else rms_norm(x, eps, self.groups)
        return self.gain(name, y)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].T + self.p.get(f"{name}.bias", 0.0)

    def angle(self, block: int) -> tuple[Tensor, float]:
        """Angles (T, d / 2) of a block in radians, pair by pair, and the factor of what turns."""
        shape, d = self.shape, self.shape.head_channels
        local = self.is_local(block)
        theta = shape.local_rope_theta or shape.rope_theta if local else shape.rope_theta
        kind = "" if local or not shape.rope_scaling else shape.rope_scaling_kind
        rates = [theta ** (-2 * pair / d) for pair in range(d // 2)]
        if kind == "linear":
            rates = [rate / shape.rope_scaling[0] for rate in rates]
        factor = 1.0
        if kind == "yarn":
            stretch, fast, slow, original, factor = shape.rope_scaling
            # the pair that turns so often, by theta^(-2 i / d) original = 2 pi turns
            ends = [d / 2 * math.log(original / (2 * math.pi * n), theta) for n in (fast, slow)]
            first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), d - 1)
            for pair, rate in enumerate(rates):
                ramp = min(max((pair - first) / (last - first), 0), 1)
                rates[pair] = rate / stretch * ramp + rate * (1 - ramp)
        position = torch.arange(shape.block_size, dtype=torch.float64)
        return torch.outer(position, torch.tensor(rates, dtype=torch.float64)), factor

    def is_local(self, block: int) -> bool:
        letters = self.shape.local_blocks or "g"
        return letters[block % len(letters)] == "l"

    def rotate(self, block: int, x: Tensor) -> Tensor:
        """RoPE (Su et al. 2021): channel pairs (i, i + d/2) of x (B, T, d) as complex numbers."""
        half = x.shape[-1] // 2
        angle, factor = self.angle(block)
        turn = torch.polar(torch.ones_like(angle), angle)[: x.shape[1]] * factor
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([z.real, z.imag], -1)

    def A(self, block: int, x: Tensor) -> Tensor:
        """Causal attention of block `block`, head by head."""
        shape = self.shape
        heads, kv_heads, d = shape.n_head, shape.n_kv_head or shape.n_head, shape.head_channels
        name = f"blocks.{block}.attn"
        q, k, v = self.linear(f"{name}.qkv", x).split([heads * d, kv_heads * d, kv_heads * d], -1)

        def vectors(y: Tensor, part: str, count: int) -> list[Tensor]:
            norm = f"{name}.{part}_norm"
            wanted = self.qk != "none" and (part != "v" or self.has_v_norm)
            if wanted and self.qk == "full":
                y = self.gain(norm, rms_norm(y, self.eps))
            ys = [y[..., i * d : (i + 1) * d] for i in range(count)]
            if wanted and self.qk == "head":
                ys = [self.gain(norm, rms_norm(y, self.eps)) for y in ys]
            return ys

        qs = vectors(q, "q", heads)
        ks = vectors(k, "k", kv_heads)
        vs = vectors(v, "v", kv_heads)
        if shape.position == "rope":
            qs, ks = ([self.rotate(block, y) for y in ys] for ys in (qs, ks))
        i, j = torch.arange(T)[:, None], torch.arange(T)
        window = shape.window if self.is_local(block) else T
        hidden = (j > i) | (j <= i - window)
        mixed = []
        for head, q in enumerate(qs):
            shared = head // (heads // kv_heads)
            scores = q @ ks[shared].transpose(1, 2) * (shape.attn_scale or 1 / math.sqrt(d))
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ vs[shared])
        return self.linear(f"{name}.proj", torch.cat(mixed, -1))

    def M(self, block: int, x: Tensor) -> Tensor:
        z = self.linear(f"blocks.{block}.mlp.up", x)
        kind = self.shape.activation
        gate, up = z.chunk(2, -1) if kind in ("swiglu", "geglu") else (z, 1.0)
        if kind == "swiglu":
            z = gate * gate.sigmoid()
        elif kind == "relu2":
            z = z.clamp(min=0) ** 2
        elif kind == "gelu":  # the exact one
            z = z * (1 + torch.special.erf(z / math.sqrt(2))) / 2
        else:
            t = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            z = 0.5 * gate * (1 + torch.tanh(t))
        return self.linear(f"blocks.{block}.mlp.down", z * up)

    def embeddings(self) -> Tensor:
        x = self.p["wte.weight"][IDX] * self.shape.embed_scale
        if self.shape.position == "learned":
            x = x + self.p["wpe.weight"][: IDX.shape[1]]
        return x

    def logits(self) -> Tensor:
        assert self.layout in globals(), f"write {self.layout}() here, or a row of LAYOUTS"
        x = globals()[self.layout](self, self.embeddings(), *self.sections)
        return x @ self.p.get("lm_head.weight", self.p["wte.weight"]).T


def cross_entropy(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, TARGETS[..., None]).mean()


def at(position: int) -> str:
    """Name the norm that reads the stream after `position` sublayers."""
    return place(position) + ".norm"


def place(position: int) -> str:
    return "norm_f" if position == 2 * L else f"blocks.{position // 2}.norm{position % 2 + 1}"


# Each layout: (plain model g, embeddings x) -> what the head reads. b counts blocks from 0.


def lns(g: Plain, x: Tensor) -> Tensor:
    """x = x + F(N(x) / sqrt(l)) in block l = 1 .. L. Sun et al. 2025, equation 12."""
    for b in range(L):
        x = x + g.A(b, g.N(at(2 * b), x) / math.sqrt(b + 1))
        x = x + g.M(b, g.N(at(2 * b + 1), x) / math.sqrt(b + 1))
    return g.N(at(2 * L), x)


def dyt(g: Plain, x: Tensor) -> Tensor:
    """gain tanh(alpha x) + bias in the place of each norm of Pre-LN; Zhu et al. 2025."""

    def D(name: str, x: Tensor) -> Tensor:
        z = (2 * g.p[f"{name}.alpha"] * x).exp()
        return g.gain(name, (z - 1) / (z + 1))

    return pointwise(g, x, D)


def derf(g: Plain, x: Tensor) -> Tensor:
    """gain erf(alpha x + s) + bias; arXiv 2512.10938, equation 10."""

    def E(name: str, x: Tensor) -> Tensor:
        return g.gain(name, 1 - torch.special.erfc(g.p[f"{name}.alpha"] * x + g.p[f"{name}.shift"]))

    return pointwise(g, x, E)


def bhyt(g: Plain, x: Tensor) -> Tensor:
    """gain tanh(lambda x / (10 s)), once a block s^2 = mean(x^2) and once that plus what attention
    should add, |W_V W_O|_F^2 / (T d) (lambda / 10)^2; a final RMSNorm. Byun et al. 2026.
    """

    def H(name: str, x: Tensor, square: Tensor) -> Tensor:
        z = g.p[f"{name}.alpha"] * x / (10 * (square + g.eps).sqrt())
        return g.gain(name, (z.exp() - (-z).exp()) / (z.exp() + (-z).exp()))

    heads, d = g.shape.n_head, g.shape.head_channels
    for b in range(L):
        square = x.pow(2).mean(-1, keepdim=True)
        delta = g.A(b, H(at(2 * b), x, square))
        out, qkv = (g.p[f"blocks.{b}.attn.{part}.weight"].detach() for part in ("proj", "qkv"))
        kv_heads = g.shape.n_kv_head or heads
        total = 0.0
        for head in range(heads):  # W_O W_V is a sum over heads
            value = len(qkv) - (kv_heads - head * kv_heads // heads) * d
            total = total + out[:, head * d : (head + 1) * d] @ qkv[value : value + d]
        spread = (total**2).sum() / (g.shape.block_size * x.shape[-1])
        square = square + spread * (g.p[f"{at(2 * b)}.alpha"].detach() / 10) ** 2
        x = x + delta
        x = x + g.M(b, H(at(2 * b + 1), x, square))
    return g.N(at(2 * L), x)


def gatednorm(g: Plain, x: Tensor) -> Tensor:
    """y sigma(W_up silu(W_down y)) with y = N(x); Qiu et al. 2026, section 3.4."""

    def G(name: str, x: Tensor) -> Tensor:
        y = g.N(name, x)
        z = g.linear(f"{name}.gate_down", y)
        return g.gate * y / (1 + (-g.linear(f"{name}.gate_up", z / (1 + (-z).exp()))).exp())

    return pointwise(g, x, G)


def seednorm(g: Plain, x: Tensor) -> Tensor:
    """[tanh(x . beta) alpha + gamma] x / RMS(x); Cai et al. 2025."""

    def V(name: str, x: Tensor) -> Tensor:
        moved = torch.tanh(x @ g.p[f"{name}.beta"])[..., None] * g.p[f"{name}.alpha"]
        return g.N(name, x) + moved * rms_norm(x, g.eps)

    return pointwise(g, x, V)


def pointwise(g: Plain, x: Tensor, D) -> Tensor:
    x = x * g.p.get("norm_e.norm.scale", 1.0)
    for b in range(L):
        x = x + g.A(b, D(at(2 * b), x))
        x = x + g.M(b, D(at(2 * b + 1), x))
    return D(at(2 * L), x)


def by_letters(g: Plain, x: Tensor, inputs: str, outputs: str, embedding: str) -> Tensor:
    """A plan letter by letter: R or L reads the sum, P replaces it, B does both, I nothing."""
    if embedding != "I":
        x = g.N("norm_e.norm", x)
    delta = torch.zeros_like(x)
    statistic = None
    for position, letter in enumerate(inputs):
        name = at(position)
        if position and outputs[position - 1] != "I":
            delta = g.N(f"{place(position)}.output", delta, g.output_eps)
        a = g.weight if letter in "PB" and position not in (0, g.plain_at) else 1.0
        x = a * x + delta
        if letter in "PB":
            x = g.N(name, x)
        y = x
        if letter == "s":
            alpha = g.alpha[position] if isinstance(g.alpha, tuple) else g.alpha
            y = g.gain(name, x * statistic / alpha)
        elif letter != "I" and letter != "P":
            y = g.N(f"{place(position)}.reader" if letter == "B" else name, x)
        if letter == "R":  # what a later s reads
            h = x.detach() if g.detach else x
            statistic = 1 / (h.pow(2).mean(-1, keepdim=True) + g.eps).sqrt()
        if position < 2 * L:
            delta = (g.M if position % 2 else g.A)(position // 2, y)
    return y


# ------------------------------------------------------------------------ forward and all gradients

BASE = {"post_base": "layer"}
ALPHAS = (1.0, 1.3, 1.0, 0.8, 1.5, 1.1, 1.0, 0.7, 1.0)

# Of each layout: letters of the inputs, of the outputs and of the embedding, and numbers. L is 4.
LAYOUTS = {
    # x = x + F(N(x)), a norm at the end. Radford et al. 2019
    "pre": (("R" * 9,), {}),
    # x = N(x + F(x)). Vaswani et al. 2017
    "post": (("IPPPPPPPP",), {}),
    # the same of a x + F(x), a = (2L)^(1/4) in a decoder. DeepNet, section 4.1
    "deepnorm": (("IPPPPPPPP",), {"weight": (2 * L) ** 0.25}),
    # Post-LN for the first block of four, Pre-LN for the others, and so there is a final norm
    "mixln": (("IPBRRRRRR",), {}),
    # x = N(x) at first, x = x + N(F(N(x))), a norm at the end. Kim et al. 2025
    "peri": (("R" * 9, "R" * 8, "R"), {}),
    # x = x + N(F(x)), a norm at the end. OLMo et al. 2025
    "olmo2": (("IIIIIIIIR", "R" * 8), {"qk": "full"}),
    # Y = X + Attn(X), Z = N(Y), X = Z + MLP(Z), a norm at the end. Zhuo et al. 2025
    "hybrid": (("IPIPIPIPR",), {"qk": "head", "has_v_norm": True}),
    # x = N_out(alpha x + F(N_in(x))), alpha = 2L. The first attention has neither N_out nor alpha,
    # the first MLP has N_out and alpha = 1. KEEL, equation 8
    "keel": (("RRBBBBBBP",), {"weight": 2.0 * L, "plain_at": 2}),
}


def told(layout: str, letters: str = "", **more: object) -> dict:
    """What the plain model is told of a layout; with other input letters, if they are given."""
    if layout not in LAYOUTS:
        return {"layout": layout, **more}
    sections, numbers = LAYOUTS[layout]
    sections = (letters or sections[0], *sections[1:], *("I" * 8, "I")[len(sections) - 1 :])
    if more.get("kind") == "layer" and not letters:
        sections = tuple(part.replace("R", "L") for part in sections)
    return {"layout": "by_letters", "sections": sections, "weight": 1.0, **numbers, **more}


# Their cases stand below; those of a taper are in test_taper.py.
PRE_NORM = ("layer", "rms", "coupled", "cbwc", "taper", "none")
# (norm type, config keys, shapes, what the plain model is told)
CASES = [
    *((name, {}, "gpt2 llama", told(name)) for name in NORM_TYPES if name not in PRE_NORM),
    ("deepnorm", BASE, "gpt2 llama", told("deepnorm", kind="layer")),
    # Sizes and numbers of their own
    ("mixln", {"mixln_share": 0.7}, "llama", told("mixln", "IPPPBRRRR")),
    ("mixln", {"mixln_share": 1.0}, "llama", told("mixln", "IPPPPPPPB")),
    ("mixln", {"mixln_share": 0.2}, "llama", told("mixln", "RRRRRRRRR")),
    ("post", {"residual_weight": 0.7}, "gpt2", told("post", weight=0.7)),
    ("peri", {"output_eps": 0.1, "norm_eps": 1e-3}, "gpt2", told("peri", output_eps=0.1, eps=1e-3)),
    # LayerNorm with its bias in the place of RMSNorm
    *((name, BASE, "gpt2 llama", told(name, kind="layer"))
      for name in ("post", "mixln", "keel", "hybrid")),
    ("layer", {"norm_plan": "LL LL LL LL L|LL LL LL LL|L"}, "gpt2", told("peri", kind="layer")),
    # Kinds of gain
    *((name, {"norm_gain": gain}, "gpt2" if name == "layer" else "llama",
       told(layout, kind=kind, one_plus=gain == "one_plus"))
      for gain in ("one_plus", "none")
      for name, layout, kind in (
          ("layer", "pre", "layer"),
          *((name, name, "rms") for name in ("post", "keel", "peri", "olmo2", "hybrid", "dyt",
                                             "derf", "bhyt", "gatednorm")),
      )),
    *((name, {"norm_gain": "one_plus"}, "gpt2", told(name, one_plus=True))
      for name in ("lns", "seednorm")),
    ("gatednorm", {"gate_start": "identity"}, "llama", told("gatednorm", gate=2.0)),
    # Norms within attention
    *((name, {"qk_norm": qk}, "gpt2 llama", told("pre", qk=qk, kind=kind))
      for name, kind in (("rms", "rms"), ("layer", "layer"))
      for qk in ("head", "full")),
    ("olmo2", {"qk_norm": "none"}, "llama", told("olmo2", qk="none")),
    ("hybrid", {"qk_norm": "none"}, "llama", told("hybrid", qk="none", has_v_norm=False)),
    ("hybrid", {"qk_norm": "full"}, "llama", told("hybrid", qk="full")),
    # Old letters under the new sections
    ("rms", {"norm_groups": 2, "norm_plan": "RR RR RR RR R|RR RR RR RR|R"}, "gpt2",
     told("peri", groups=2)),
    ("coupled", {"norm_plan": "Rs Rs Rs Rs R|RR RR RR RR|R"}, "gpt2", told("peri", "RsRsRsRsR")),
    # Activations, windows, positions and scales
    ("layer", {}, "gpt2 tanh local", told("pre", kind="layer")),
    ("cbwc", {"bias": True}, "gpt2 llama", told("pre", "RRRRRRRRR", kind="layer")),
    ("rms", {}, "gemma olmo", told("pre", qk="head")),
    ("rms", {"rms_bias": True}, "gpt2 llama", told("pre")),
    ("none", {}, "gpt2 llama", told("pre", "IIIIIIIII")),
    # Groups of blocks that share a statistic
    *(("coupled", keys, "gpt2",
       told("pre", letters, alpha=keys.get("coupled_alpha", 1.0),
            detach="coupled_grad" not in keys))
      for keys, letters in (
          ({}, "RsRsRsRsR"),
          ({"coupled_first": 1}, "RRRsRsRsR"),
          ({"coupled_first": 4}, "RRRRRRRRR"),
          ({"coupled_span": 2}, "RsssRsssR"),
          ({"coupled_span": 3, "coupled_alpha": 1.1}, "RsssssRsR"),
          ({"coupled_span": 2, "coupled_first": 1, "coupled_alpha": ALPHAS}, "RRRsssRsR"),
          ({"coupled_span": 0, "coupled_grad": "full", "coupled_alpha": 0.9}, "RsssssssR"),
          ({"coupled_span": 0, "coupled_first": 1, "coupled_calibrate": 5}, "RRRsssssR"),
          ({"norm_plan": "RR Rs RR Rs R", "coupled_grad": "full"}, "RRRsRRRsR"),
      )),
]  # fmt: skip
# A case for each shape
RUNS = [(name, keys, shape, of) for name, keys, shapes, of in CASES for shape in shapes.split()]


@pytest.mark.parametrize(
    ("norm_type", "keys", "shape", "of"),
    RUNS,
    ids=[f"{name} {shape} {','.join(map(str, keys.values()))}" for name, keys, shape, _ in RUNS],
)
def test_a_layout_is_the_papers(norm_type, keys, shape, of):
    """Loss, logits and every gradient to 1e-12 of the largest; pieces with a cache likewise."""
    compare(norm_type, keys, SHAPES[shape], of)


@pytest.mark.parametrize("seed", range(30))
def test_a_random_plan_is_its_letters(seed):
    """Any mixture of letters that a type allows."""
    draw = random.Random(seed)
    norm_type = ("keel", "mixln", "post", "hybrid", "peri", "olmo2", "coupled", "rms")[seed % 8]
    letters = NORM_TYPES[norm_type].allowed_letters
    kind = draw.choice(["rms", "layer"]) if "L" in letters else "rms"
    unwanted = "R" if kind == "layer" else "L"
    inputs, outputs, embedding = random_sections(draw, norm_type, L, unwanted)
    keys = {"norm_plan": f"{inputs}|{outputs}|{embedding}", "qk_norm": "none"}
    if "P" in letters:
        keys |= {"residual_weight": 1.5, "post_base": kind}
    of = {"kind": kind, "weight": 1.5, "sections": (inputs, outputs, embedding)}
    if norm_type == "keel":
        of["plain_at"] = 2
    compare(norm_type, keys, draw.choice([GPT2, LLAMA]), {"layout": "by_letters", **of})


# A row of known norms: letters of the inputs and of the outputs
ROWS = {"post": ("IPPPPPPPP", "R" * 8), "borders": ("RRBBBBBBP", "RIRIIRRR")}


@pytest.mark.parametrize("row", ROWS)
def test_a_new_layout_of_known_norms_needs_the_row_alone(monkeypatch, row):
    inputs, outputs = ROWS[row]
    layout = NormType(
        lambda config, n_layer: f"{inputs}|{outputs}",
        "IPRB",
        outputs="R",
        residual_weight=lambda n_layer: 3.0,
    )
    monkeypatch.setitem(NORM_TYPES, "mine", layout)
    of = {"layout": "by_letters", "weight": 3.0, "sections": (inputs, outputs, "I")}
    compare("mine", {}, LLAMA, of)


def compare(norm_type: str, keys: dict, shape: GPTConfig, of: dict) -> None:
    """Hold a shaken model against the plain one."""
    model = shake(GPT(replace(shape, norm_type=norm_type, **keys)))
    model.set_step(1, 1)
    use_exact_angles(model)
    if "sections" in of:
        assert (model.plan.letters, model.plan.outputs, model.plan.embedding) == of["sections"]
    loss, _ = model(IDX, TARGETS)
    loss.backward()
    leaves = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    logits = Plain(leaves, shape, **of).logits()
    expected = cross_entropy(logits)
    expected.backward()
    close(loss, expected, 1e-12 * expected.item())
    largest = max(leaf.grad.abs().max().item() for leaf in leaves.values())
    for name, parameter in model.named_parameters():
        # An own scale for each tensor; biases of keys have no gradient but rounding.
        scale = max(leaves[name].grad.abs().max().item(), 1e-3 * largest)
        close(parameter.grad, leaves[name].grad, 1e-12 * scale)
    with torch.no_grad():
        close(model(IDX), logits, 1e-12 * logits.abs().max().item())
        cache = KVCache(model.config, len(IDX), T, model.wte.weight)
        pieces = [model(piece, cache=cache) for piece in IDX.split([3, 1, 2, 1, 4], 1)]
    close(torch.cat(pieces, 1), logits, 1e-12 * logits.abs().max().item())


def use_exact_angles(model: GPT) -> None:
    """The model's tables are those of the definition in float32; here it gets exact ones."""
    for block, rope in enumerate(model.ropes(0, model.config.block_size)):
        if rope is not None:
            angle, factor = Plain({}, model.config, "pre").angle(block)
            exact = torch.cat([angle, angle], -1)
            for table, values in zip(rope, (exact.cos(), exact.sin()), strict=True):
                close(table.double(), values * factor, 2e-6)
                table.copy_(values * factor)


# ------------------------------------------------------------------------------ values at the start


def start(norm_type: str, shape: str = "llama", **keys) -> dict[str, Tensor]:
    return GPT(replace(SHAPES[shape], norm_type=norm_type, **keys), seed=3).state_dict()


# The authors' standard deviations in units of init_std: queries and keys; values; what a sublayer
# reads with; what it writes with. All other types have the common ones.
DEPTH = 1 / math.sqrt(2 * L)
BETA = (8 * L) ** -0.25  # DeepNet, section 4.3
COMMON = (1, 1, 1, DEPTH)
STANDARD_DEVIATIONS = {
    "post": (1, 1, 1, 1),
    "deepnorm": (1, BETA, BETA, BETA),
    "mixln": (1, 1, 1, 1),
    "olmo2": (1, 1, 1, 1),
    "keel": (1, 1, 1, 1),
    "lns": (1, 1, 1, 1),  # scaled initialisation takes the gain of LayerNorm scaling away
    "dyt": (1, 1, 1, 1),
    "bhyt": (1, 1, 1, 1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_draws_are_those_of_rms_but_for_the_declared_factor(norm_type, shape):
    common, ours = start("rms", shape), start(norm_type, shape)
    plain = start(norm_type, shape, norm_recipe="common")
    qk, v, reads, writes = STANDARD_DEVIATIONS.get(norm_type, COMMON)
    config = SHAPES[shape]
    values = config.kv_heads * config.head_channels
    others = [name for name in common if "norm" not in name]
    assert others == [name for name in ours if "norm" not in name]
    for name in others:
        expected = common[name].clone()
        if name.endswith("qkv.weight"):
            expected[:-values] *= qk
            expected[-values:] *= v
        elif name.endswith("up.weight"):
            expected *= reads
        elif name.endswith(("proj.weight", "down.weight")):
            expected *= writes / DEPTH
        torch.testing.assert_close(ours[name], expected, rtol=1e-6, atol=0)
        assert torch.equal(plain[name], common[name])


def test_mixlns_border_is_a_quarter_of_the_blocks():
    """12 blocks: 3 with Post-LN; 24: 6, as in the authors' POST_NUM."""
    for depth, first in ((12, 3), (24, 6), (7, 1)):
        expected = "I" + "P" * (2 * first - 1) + "B" + "R" * 2 * (depth - first)
        assert plan("mixln", depth).letters == expected
    assert plan("mixln", 3).letters == "R" * 7


@pytest.mark.parametrize(
    ("width", "attention", "others"),
    [
        (768, 1.0, 1.0),  # narrower than all in the paper
        (1024, 1.0, 1.0),
        (2048, 1.0, 0.5),
        (4096, 0.8, 0.2),
        (5120, 0.6, 0.15),
        (8192, 0.2, 0.05),
    ],
)
def test_alpha_of_dyt_by_width(width, attention, others):
    """Zhu et al. 2025, tables 10 and 11: alpha before attention, and at all other places."""
    dyt = plan("dyt", 2, channels=width)
    found = [dyt.place(position).norm.alpha.item() for position in range(5)]
    assert found == pytest.approx([attention, others, attention, others, others])
    assert dyt.embedding_norm().norm.scale.item() == pytest.approx(math.sqrt(width))


def test_other_values_at_the_start():
    """Derf: alpha 1, shift 0, embeddings times sqrt(C), biases of norms though the model has none.

    KEEL: the weight of the first border is 1. PyTorch's own initialisation is not divided by
    sqrt(2 L), so the factors of a recipe do not fit it.
    """
    derf = plan("derf", 2)
    norm = derf.place(4).norm
    assert [norm.alpha.item(), norm.shift.item(), norm.bias.sum().item()] == [1, 0, 0]
    assert derf.embedding_norm().norm.scale.item() == pytest.approx(math.sqrt(768))
    given = plan("derf", 2, point_alpha=(4.0, 0.3, 0.1))
    found = [given.place(position).norm.alpha.item() for position in range(5)]
    assert found == pytest.approx([4.0, 0.3, 4.0, 0.3, 0.1])
    keel = plan("keel", 32)
    assert [keel.place(position).residual_weight for position in range(2, 65)] == [1] + [64] * 62
    with pytest.raises(ConfigError, match=r"init=torch.*norm_recipe=common"):
        start("dyt", init="torch")


def test_weight_decay_on_gains_is_that_of_the_authors():
    decaying = {name for name in NORM_TYPES if NormConfig(norm_type=name).decays_gains}
    assert decaying == {"olmo2", "hybrid", "dyt", "seednorm"}


@pytest.mark.parametrize("kind", ["plain", "one_plus"])
def test_initial_gains(kind):
    """One number is for input norms; 2L + 1 for each; 4L + 2 for each letter."""
    offset = 1 if kind == "one_plus" else 0
    inputs, outputs = [at(p) for p in range(2 * L + 1)], [place(p + 1) for p in range(2 * L)]
    many = tuple(1 + i / 8 for i in range(4 * L + 2))
    for given in (0.5, many[: 2 * L + 1], many):
        state = start("peri", norm_gain=kind, initial_gain=given, qk_norm="head")
        gains = given if isinstance(given, tuple) else (given,) * (2 * L + 1)
        gains = gains + (1.0,) * (4 * L + 2 - len(gains))
        names = [*inputs, *(f"{name}.output" for name in outputs), "norm_e.norm"]
        for name, gain in zip(names, gains, strict=True):
            assert set(state[f"{name}.weight"].tolist()) == {gain - offset}, name
        assert set(state["blocks.0.attn.q_norm.weight"].tolist()) == {1 - offset}
    # Both norms of B have it.
    keel = start("keel", norm_gain=kind, initial_gain=many[: 2 * L + 1])
    for part in ("norm", "reader"):
        assert set(keel[f"blocks.1.norm1.{part}.weight"].tolist()) == {many[2] - offset}


def test_paired_gains():
    """modded-nanogpt #300: in each block 1 - a s and 1 + a s, sum of s 0. All else stays."""
    plain, paired = start("rms"), start("rms", paired_gains=0.125)
    signs = [8 * (1 - paired[f"{at(2 * b)}.weight"]) for b in range(L)]
    for b, s in enumerate(signs):
        assert set(s.tolist()) == {-1, 1} and s.sum() == 0
        assert torch.equal(8 * (paired[f"{at(2 * b + 1)}.weight"] - 1), s)
        assert b == 0 or not torch.equal(s, signs[b - 1])
    others = [name for name in plain if not re.search(r"norm[12]\.norm\.weight", name)]
    assert all(torch.equal(plain[name], paired[name]) for name in others)


def test_what_attention_should_add_is_measured_as_often_as_by_bhyts_authors():
    """Every max_iters / 50 steps, and at least every 1,000."""
    model = GPT(replace(LLAMA, norm_type="bhyt"))
    measured = model.blocks[1].norm1.norm.attention
    for max_iters, step, expected in (
        (40, 2, True),
        (100, 2, False),
        (100, 3, True),
        (10**6, 1000, False),
        (10**6, 1001, True),
    ):
        measured.zero_()
        model.set_step(step, max_iters)
        assert (measured != 0) == expected


def test_gates_start_at_a_half_or_as_rms_norm_and_train_as_matrices():
    """Muon takes both matrices of each norm."""
    rms = GPT(replace(LLAMA, norm_type="rms"), seed=3)
    for keys in ({"initial_gain": 2.0}, {"gate_start": "identity"}):
        model = GPT(replace(LLAMA, norm_type="gatednorm", **keys), seed=3)
        assert torch.equal(model(IDX), rms(IDX))
    assert len(model.hidden_matrices()) == 4 * L + 2 * (2 * L + 1)
    assert model.norm_f.norm.gate_up.weight in model.hidden_matrices()


def test_blocks_of_lns_share_their_graphs():
    """Their scales are tensors: a number for each block would be a graph for each block."""

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = GPT(replace(GPT2, norm_type="lns", n_layer=5))
    for block in model.blocks:
        block.compile(backend="eager")
    model(IDX)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < 5
