"""Faults planted in the norms of models with QK-norm, for tests/test_doctor.py.

    PYTHONPATH=.:tests python tests/norm_faults.py
        all: eight architectures, six faults, in one norm and in all; and two pairs each without

The other model is our GPT on the same weights, or has other modules in the place of all its norms,
or is a copy; so half of the cases pair two classes.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from hf_models import LLAMA, transformers
from torch import Tensor, nn

from fold import norms_of
from fold.alignment import EPS, MISSING, OFFSET, PLACE, ROUNDING, STATISTIC, compare_found
from fold.roundings import BEFORE
from hf.weights import load_hf
from norms import RMSNorm

BASE = {**LLAMA, "num_hidden_layers": 2, "pad_token_id": None}
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
# name -> (family, keys, what the other model is: "ours", "renamed" or "copy")
MODELS = {
    "qwen3": ("Qwen3", {**BASE, "head_dim": 12}, "renamed"),
    "olmo2": ("Olmo2", BASE, "ours"),
    "olmo3": ("Olmo3", {**BASE, "sliding_window": 12}, "ours"),
    "gemma3": ("Gemma3", {**BASE, "head_dim": 12, "sliding_window": 12}, "ours"),
    "qwen3_moe": ("Qwen3Moe", {**BASE, **MOE, "head_dim": 12}, "copy"),
    "exaone4": ("Exaone4", {**BASE, "sliding_window": 12}, "copy"),
    "hunyuan": ("HunYuanDenseV1", {**BASE, "head_dim": 12}, "copy"),
    "stablelm": ("StableLm", {**BASE, "qk_layernorm": True}, "copy"),
}
# What the other model of a second pair without a fault is
SECOND = {"ours": "copy", "renamed": "copy", "copy": "renamed"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
FAULTS = {
    "offset": OFFSET,
    "eps": EPS,
    "place": PLACE,
    "rounding": ROUNDING,
    "missing": MISSING,
    "statistic": STATISTIC,
}
QK = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


@torch.no_grad()
def build(name: str) -> nn.Module:
    """A small model with random weights, gains too."""
    family, keys, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**keys)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    stream = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and parameter_name.endswith("weight")
        parameter.normal_(1.0 if is_gain else 0.0, 0.25, generator=stream)
    return model


def computed(x: Tensor, weight: Tensor | None, row, fault: str, bias: Tensor | None = None):
    """What a norm computes, with a fault in it."""
    eps = row.eps * (10 if fault == "eps" else 1)
    offset = row.norm.form.offset
    offset = 1 - offset if fault == "offset" else offset
    is_before = (row.norm.roundings[torch.bfloat16].gain == BEFORE) != (fault == "rounding")
    h = x.float()
    if row.norm.found.formula.centred:
        h = h - h.mean(-1, keepdim=True)
    square = h.pow(2).mean(-1, keepdim=True)
    if fault == "statistic":
        square = h.to(x.dtype).pow(2).mean(-1, keepdim=True).float()
    z = h / (square.sqrt() + eps) if fault == "place" else h * torch.rsqrt(square + eps)
    gain = offset + weight.float()
    y = (z * gain).to(x.dtype) if is_before else (z.to(x.dtype).float() * gain).to(x.dtype)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


class Renamed(nn.Module):
    """Another class for a norm of transformers, with a fault or without."""

    def __init__(self, old: nn.Module, row, fault: str):
        super().__init__()
        is_renamed = isinstance(old, Renamed)
        self.scale = old.scale if is_renamed else old.weight
        self.shift = old.shift if is_renamed else getattr(old, "bias", None)
        self.row = row
        self.fault = fault

    def forward(self, x):
        return computed(x, self.scale, self.row, self.fault, self.shift)

    def __deepcopy__(self, memo):
        new = Renamed.__new__(Renamed)
        nn.Module.__init__(new)
        new.scale = copy.deepcopy(self.scale, memo)
        new.shift = copy.deepcopy(self.shift, memo)
        new.row, new.fault = self.row, self.fault
        return new


class OurFaulty(RMSNorm):
    """Our RMSNorm, with a fault."""

    def __init__(self, old: RMSNorm, row, fault: str):
        super().__init__(old.channels, old.eps, offset=old.gain_offset)
        self.weight = old.weight
        self.row = [row]  # not compared, and not copied deep
        self.fault = fault

    def forward(self, h, inv_rms=None):
        return computed(h, self.weight, self.row[0], self.fault), None


class OurNone(RMSNorm):
    """No norm."""

    def forward(self, h, inv_rms=None):
        return h, None


def is_qk(path: str) -> bool:
    return any(part in QK for part in path.split("."))


def plant(model: nn.Module, paths: list[str], rows: dict, fault: str) -> None:
    """Replace norms of a model by others with a fault."""
    for path in paths:
        old = model.get_submodule(path)
        is_ours = isinstance(old, RMSNorm)
        if fault == "missing":
            new = OurNone(old.channels) if is_ours else nn.Identity()
        else:
            new = (OurFaulty if is_ours else Renamed)(old, rows[path], fault)
        model.set_submodule(path, new)


class Case:
    """One architecture: the model, what was found in it, and the other model without a fault.

    Args:
        kind: what the other model is; "" for what MODELS says.
    """

    def __init__(self, name: str, folder: Path, kind: str = ""):
        self.model = build(name)
        ids = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(0))
        self.inputs = dict(input_ids=ids, use_cache=False)
        self.found = norms_of(self.model, self.inputs, graph=False)
        rows = {row.path: row for row in self.found.rows}
        self.kind = kind or MODELS[name][2]
        self.other_inputs = self.inputs
        if self.kind == "ours":
            self.model.save_pretrained(folder)
            self.other = load_hf(folder).eval()
            self.other_inputs = (ids,)
            found = norms_of(self.other, self.other_inputs, graph=False)
            self.rows = {self.norm_path(row.path): row for row in found.rows}
        else:
            self.other = copy.deepcopy(self.model)
            self.rows = rows
            if self.kind == "renamed":
                plant(self.other, [*rows], rows, "")
        # The pairs without a fault say which norm of the model is which of the other.
        plain = self.compare("", [])
        self.plain = plain
        self.partner = {
            self.norm_path(pair.other.path): pair.one.path
            for pair in plain.pairs
            if pair.one and pair.other
        }

    def norm_path(self, path: str) -> str:
        """Path of the norm, not of a place that runs it in one kernel with the add."""
        module = self.other.get_submodule(path) if self.kind == "ours" else None
        if module is None or isinstance(module, RMSNorm):
            return path
        inner = "norm" if isinstance(module.norm, RMSNorm) else "output"
        return f"{path}.{inner}"

    def compare(self, fault: str, paths: list[str]):
        other = copy.deepcopy(self.other)
        if fault:
            plant(other, paths, self.rows, fault)
        found = norms_of(other, self.other_inputs, graph=False)
        return compare_found(self.found, found, self.model, other, self.inputs, self.other_inputs)

    def paths(self, fault: str, scope: str) -> list[str]:
        """Where a fault is planted: in the last QK-norm, or in all norms that can have it."""
        qk = [path for path in self.rows if is_qk(path)]
        if scope == "one":
            return qk[-1:]
        return qk if fault == "missing" else [*self.rows]

    def is_named(self, fault: str, scope: str) -> tuple[bool, str]:
        """Is the fault named, at its first place, with the cause alone?"""
        paths = self.paths(fault, scope)
        found = self.compare(fault, paths)
        if found.first is None:
            return False, "no difference"
        said = f"{found.first.one and found.first.one.path}: {found.cause} | {found.proof}"
        wanted = {self.partner[path] for path in paths}
        order = [row.path for row in self.found.rows if row.path in wanted]
        one = found.first.one
        is_place = one is not None and one.path == order[0]
        if fault == "missing":
            return is_place and found.first.other is None, said
        causes = [difference.cause for difference in found.first.differences]
        return is_place and causes == [FAULTS[fault]], said


def main() -> None:
    good = total = 0

    def count(is_right: bool, said: str) -> None:
        nonlocal good, total
        good += is_right
        total += 1
        print("ok " if is_right else "NOT", said, flush=True)

    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(name, Path(folder))
        second = Case(name, Path(), SECOND[case.kind])
        for one in (case, second):
            found = one.plain
            count(not found.has_difference, f"{name} {one.kind}: {found.cause or 'no difference'}")
        for fault in FAULTS:
            for scope in ("one", "all"):
                is_right, said = case.is_named(fault, scope)
                count(is_right, f"{name} {fault} {scope}: {said[:330]}")
    print(good, "of", total)
    sys.exit(good < total)


if __name__ == "__main__":
    main()
