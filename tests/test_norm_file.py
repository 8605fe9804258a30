"""A norm in a file of the user's own: it trains, resumes and samples; nothing else makes it run.

python -m pytest tests/test_norm_file.py
"""

import hashlib
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    Job,
    apart,
    contents,
    events,
    losses,
    plan,
    records,
    same_run,
    val_losses,
)
from torch.utils.checkpoint import checkpoint

import norm_files
import norm_plan
import norm_types
from common.errors import CheckpointError, UserError, one_line
from common.norm_file import COPY, read_norm_file
from evidence.comparison import pair_by_seed
from evidence.runs import Run, by_arm
from model import GPT, GPTConfig
from norm_plan import NormConfig
from taper import StepMean
from training.checkpoint import model_config

RUNNING = """
import torch
from norms import Norm, statistics_dtype
from taper import StepMean


class Running(Norm):
    \"\"\"h / a mean of the token's mean square and that of all tokens, which runs over steps.\"\"\"

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.square = StepMean(1)

    def forward(self, h, inv_rms=None):
        wide = h.to(statistics_dtype(h))
        own = wide.square().mean(-1, keepdim=True)  # (B, T, 1)
        if self.training:
            self.square.add(own.detach().flatten(0, -2))
        known = self.square.value()  # (1,), 0 before the first step
        square = torch.where(known > 0, (own + known) / 2, own)
        return self.affine(wide * (square + self.eps).rsqrt(), h.dtype), None

    def set_step(self, step, max_iters):
        self.square.update()
        return []
"""
LAYOUT = """
import torch
from torch import nn
from norm_types import NormType, Recipe
from norms import Norm, inverse_rms, statistics_dtype


class _Helper(Norm):
    pass


class Mixed(Norm):
    \"\"\"alpha RMSNorm and a linear of it, with parameters drawn in __init__.\"\"\"

    letter = "x"

    def __init__(self, channels, alpha, *args, **keys):
        super().__init__(channels, *args, **keys)
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.noise = nn.Parameter(0.01 * torch.randn(channels))
        self.mix = nn.Linear(channels, channels, bias=False)

    @classmethod
    def of_plan(cls, plan, number):
        return cls(alpha=plan.config.point_alpha or 0.5, **plan.common(number))

    def forward(self, h, inv_rms=None):
        y = h.to(statistics_dtype(h)) * inverse_rms(h, self.eps) * self.alpha
        return self.affine(y + self.mix(y.to(h.dtype)) + self.noise, h.dtype), None


def sandwich(config, n_layer):
    return f"{'x' * 2 * n_layer}R|{'xx' * n_layer}"


TYPES = {
    "sandwich": NormType(
        sandwich,
        "xR",
        outputs="x",
        keys=("point_alpha",),
        recipe=Recipe(lambda n_layer: {"attn.proj": 2.0}, decay_gains=True),
    )
}
"""


def example() -> str:
    """The norm file that docs/norms.md shows."""
    page = (ROOT / "docs/norms.md").read_text()
    section = page.partition("## A norm of your own in a file")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


FILES = {"MeanAbs": example, "Running": lambda: RUNNING, "sandwich": lambda: LAYOUT}
KEYS = {"sandwich": ("--point_alpha=0.7",)}
PLANS = {
    "MeanAbs": "MM MM M",
    "Running": "rr rr r",  # R is the house's
    "sandwich": "xx xx R | xx xx",
}


def write(folder: Path, norm_type: str) -> Path:
    path = folder / f"{norm_type.lower()}_norm.py"
    path.write_text(FILES[norm_type]())
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("norm_type", "ranks"), [("MeanAbs", 1), ("Running", 2), ("sandwich", 1)])
def test_a_norm_of_a_file_trains_resumes_and_samples(
    launch, train_ok, train_fails, tiny_data, tmp_path, norm_type, ranks
):
    file = write(tmp_path, norm_type)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    named = f"--norm_file={file}"
    words = (*TINY, f"--norm_type={norm_type}", *KEYS.get(norm_type, ()), f"--data_dir={tiny_data}")
    words += ("--max_iters=14", "--eval_interval=7", "--checkpoint_interval=4", "--dropout=0.1")
    words += (f"--out_dir={broken}",)
    train_ok(*words, named, f"--out_dir={whole}", ranks=ranks)
    assert len(losses(whole)) == 14 and losses(whole)[14] < 0.98 * losses(whole)[1]
    start = records(whole)[0]
    assert start["norm_file"] == {"name": file.name, "sha256": digest(file)}
    assert start["norm_plan"] == PLANS[norm_type]
    assert (whole / COPY).read_bytes() == file.read_bytes()
    # The digest is saved, and the path nowhere.
    for saved in (json.loads((whole / "config.json").read_text()), start["config"]):
        assert saved["norm_sha256"] == digest(file) and "norm_file" not in saved

    job = launch(*words, named, ranks=ranks, patch=("die_in_save", {"step": 8}))
    assert set(job.wait()) == {9}, job.text()
    before = contents(broken)
    told = train_fails(*words, code=2, ranks=ranks)
    assert f"unknown norm_type '{norm_type}'" in told and "--norm_file=FILE" in told
    edited = tmp_path / "edited.py"
    edited.write_text(file.read_text() + "# another one\n")
    job = launch(*words, f"--norm_file={edited}", ranks=ranks)
    assert set(job.wait()) == {1}
    told = job.text()
    assert digest(file) in told and digest(edited) in told and str(broken) in told
    assert contents(broken) == before
    train_ok(*words, named, ranks=ranks)
    assert [event["step"] for event in events(broken, "resume")] == [7]
    assert same_run(whole, broken)

    sample = (str(whole), "--prompt=012", "--max_new_tokens=8", "--device=cpu")
    assert len(train_ok(*sample, named, program="sample").text()) > 8
    told = train_fails(*sample, program="sample")
    assert f"norm_type '{norm_type}'" in told and digest(file) in told and COPY not in told


# (norm type, what is added to a plain run, what is added to both)
WAYS = {
    "fsdp": ("Running", ("--parallel=fsdp",), ("--bias=True",)),
    "fsdp, drawn parameters": ("sandwich", ("--parallel=fsdp",), ()),
    "compile": ("Running", ("--compile=True",), ("--n_layer=1",)),
    "recompute": ("Running", ("--recompute=True",), ()),
    "one_plus": ("MeanAbs", ("--norm_gain=one_plus",), ("--initial_gain=0.8",)),
    "by hand": ("MeanAbs", ("--norm_plan=MM MM M",), ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train_that_compute_the_same(train_ok, tiny_data, tmp_path, way):
    norm_type, more, both = WAYS[way]
    file = write(tmp_path, norm_type)
    words = (*TINY, f"--norm_file={file}", f"--norm_type={norm_type}", f"--data_dir={tiny_data}")
    words += ("--max_iters=5", "--lr_schedule=constant", "--learning_rate=1e-3", *both)
    ranks = 2 if "--parallel=fsdp" in more else 1
    plain, other = tmp_path / "plain", tmp_path / "other"
    train_ok(*words, f"--out_dir={plain}", ranks=ranks)
    train_ok(*words, *more, f"--out_dir={other}", ranks=ranks, timeout=300)
    assert apart(losses(other), losses(plain)) <= 1e-5
    assert apart(val_losses(other), val_losses(plain)) <= 1e-5


def test_muon_trains_the_matrices_of_a_norm(train_ok, tiny_data, tmp_path):
    file = write(tmp_path, "sandwich")
    words = (*TINY, f"--norm_file={file}", "--norm_type=sandwich", f"--data_dir={tiny_data}")
    words += ("--max_iters=12", "--optimizer=muon", f"--out_dir={tmp_path / 'run'}")
    text = train_ok(*words).text()
    # In two blocks: q, k, v, proj, up, down and the linears of two input and two output norms
    assert "muon for 20 matrices" in text
    assert losses(tmp_path / "run")[12] < losses(tmp_path / "run")[1]


def test_arms_and_pairs(train_ok, tiny_data, tmp_path):
    """A norm is compared with RMSNorm; two files with the same name are not one arm."""
    file = write(tmp_path, "MeanAbs")
    words = (*TINY, f"--norm_file={file}", f"--data_dir={tiny_data}", "--max_iters=2")
    for norm_type, seed in (("rms", 1), ("MeanAbs", 1), ("MeanAbs", 2)):
        out = tmp_path / f"{norm_type}-{seed}"
        train_ok(*words, f"--norm_type={norm_type}", f"--seed={seed}", f"--out_dir={out}")
        file.write_text(file.read_text() + f"# after seed {seed}\n" * (norm_type != "rms"))
    rms, first, second = (Run(tmp_path / name) for name in ("rms-1", "MeanAbs-1", "MeanAbs-2"))
    assert "norm_file" not in rms.start and not (rms.path / COPY).exists()
    pairs, left_out = pair_by_seed(by_arm([rms, first]), "rms")
    assert [pair.run for pair in pairs["MeanAbs"]] == [first] and not left_out
    with pytest.raises(UserError, match="both are named MeanAbs, but norm_sha256 is"):
        by_arm([rms, first, second])


@pytest.mark.parametrize(
    "number, norm_type, printed",
    [(0, "MeanAbs", "MM M"), (1, "Running", "rr r"), (2, "sandwich", "RR R | WW")],
)
def test_the_examples_of_the_manual_run(registry, tmp_path, number, norm_type, printed):
    section = (ROOT / "docs/norms.md").read_text().partition("## A norm of your own in a file")[2]
    path = tmp_path / "example.py"
    path.write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number])
    norm_files.add_norms(read_norm_file(str(path)))
    model = GPT(GPTConfig(norm_type=norm_type, **SHAPE))
    assert str(model.plan) == printed
    ids = torch.randint(64, (2, 8))
    model.set_step(1, 10)
    loss, _ = model(ids, ids)
    model.set_step(2, 10)
    assert loss.isfinite()


def test_a_plan_mixes_a_norm_of_a_file_with_those_of_the_house(registry, tmp_path):
    norm_files.add_norms(read_norm_file(str(write(tmp_path, "MeanAbs"))))
    shape = {"vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}
    model = GPT(GPTConfig(norm_type="MeanAbs", norm_plan="MR I|MI|M", norm_gain="none", **shape))
    assert str(model.plan) == "MR I | MI | M"
    assert [type(place.norm).__name__ for place in model.places()] == [
        "MeanAbs",
        "RMSNorm",
        "NoNorm",
    ]
    h = torch.randn(2, 3, 16).bfloat16()
    y, _ = model.norm_e.norm(h)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.abs().float().mean(-1), torch.ones(2, 3), rtol=0.02, atol=0)


SHAPE = {"vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}


def test_gains_in_pairs_need_gains(tmp_path, registry):
    """A norm of a file may have none, whatever its keys say."""
    file = tmp_path / "n.py"
    file.write_text(
        "from norms import Norm\n"
        "class Bare(Norm):\n"
        "    def __init__(self, *args, **keys):\n"
        "        super().__init__(*args, **keys | {'affine': False})\n"
        "    def forward(self, h, inv_rms=None):\n"
        "        return h, None\n"
    )
    norm_files.add_norms(read_norm_file(str(file)))
    config = GPTConfig(**SHAPE, norm_type="Bare", paired_gains=0.1)
    with pytest.raises(UserError, match="paired_gains needs norms with gains"):
        GPT(config)


def test_statistics_run_at_every_letter_of_a_plan(registry, tmp_path):
    norm_files.add_norms(read_norm_file(str(write(tmp_path, "Running"))))
    model = GPT(GPTConfig(norm_type="Running", norm_plan="rrr|rr|r", **SHAPE))
    ids = torch.randint(64, (2, 8))
    model.set_step(1, 10)
    model(ids, ids)
    model.set_step(2, 10)
    means = {name: part for name, part in model.named_modules() if isinstance(part, StepMean)}
    assert len(means) == 6
    assert all(mean.value() > 0 and not mean.sum.any() for mean in means.values())


def test_a_subclass_of_rms_norm_is_its_own_formula(registry, tmp_path):
    """Wherever a plan has it, and not the kernels' nor the folding's of RMSNorm."""
    path = tmp_path / "subclass.py"
    path.write_text(
        "from norms import Norm, RMSNorm\n"
        "def forward(self, h, inv_rms=None):\n"
        "    return self.affine(h / (h.abs().mean(-1, keepdim=True) + self.eps), h.dtype), None\n"
        "class A(Norm): forward = forward\n"
        "class X(RMSNorm): forward = forward\n"
        "class Y(RMSNorm): gain = property(lambda self: 0.01 * self.weight)\n"
        "class Z(RMSNorm): pass\n"
    )
    norm_files.add_norms(read_norm_file(str(path)))
    ids = torch.randint(64, (2, 8))
    models = [
        GPT(GPTConfig(norm_type=name, norm_plan=f"{name * 3}|{name * 2}|{name}", **SHAPE), seed=3)
        for name in "AX"
    ]
    plain, subclass = (model(ids) for model in models)
    assert torch.equal(plain, subclass)
    assert models[1].norm_e.folded_form() is None
    other_gain, same = (norm_plan.NORMS[letter](models[0].plan, 0) for letter in "YZ")
    assert other_gain.folded_form() is None and same.folded_form() is not None


NOT_A_NORM = {
    "another __init__": ("class A(Norm):\n    def __init__(self, dim): pass\n", "A cannot be made"),
    "a plan as text": (
        "class A(Norm): pass\nTYPES = {'A2': NormType('AA A', 'A')}\n",
        "its plan must be a function",
    ),
    "a plan without text": (
        "class A(Norm): pass\nTYPES = {'A': NormType(lambda *_: None, 'A')}\n",
        "its plan function returned None",
    ),
    "a weight that nothing reads": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(lambda *_: 'AAA', 'A', residual_weight=lambda n: 3.0)}\n",
        "its residual_weight acts where",
    ),
    "a weight as a number": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(lambda *_: 'PPP', 'P', residual_weight=3.0)}\n",
        "its residual_weight must be a function",
    ),
    "a plan of one argument": (
        "class A(Norm): pass\nTYPES = {'A': NormType(lambda config: 'AAA', 'A')}\n",
        "the plan of norm type 'A': TypeError",
    ),
    "a plan that is too short": (
        "class A(Norm): pass\nTYPES = {'A': NormType(lambda *_: 'AA', 'A')}\n",
        "norm_plan 'AA': 1 blocks",
    ),
    "output norms that the row lacks": (
        "class A(Norm): pass\nTYPES = {'A': NormType(lambda *_: 'AAA | RR', 'A')}\n",
        "of the outputs, each one of I; not so: R (outputs of its row in TYPES says",
    ),
    "factors without a function": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(lambda *_: 'AAA', 'A', recipe=Recipe({'mlp.up': 2.0}))}\n",
        "its recipe must be",
    ),
    "a factor of no part": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(lambda *_: 'AAA', 'A', "
        "recipe=Recipe(lambda n: {'attn.out': 2.0}))}\n",
        "name attn.out, and the parts",
    ),
    "keys as text": (
        "class A(Norm): pass\nTYPES = {'A': NormType(uniform('A'), 'A', keys='post_base')}\n",
        "its keys must be a tuple",
    ),
    "letters in a tuple": (
        "class A(Norm): pass\nTYPES = {'A': NormType(uniform('A'), ('A', 'R'))}\n",
        "its allowed_letters must be letters in one text",
    ),
    "no outputs": (
        "class A(Norm): pass\nTYPES = {'A': NormType(uniform('A'), 'A', outputs=None)}\n",
        "its outputs must be letters in one text",
    ),
    "a kind of gain as text": (
        "class A(Norm): pass\nTYPES = {'A': NormType(uniform('A'), 'A', gain_kinds=('plain'))}\n",
        "its gain_kinds must be a tuple of plain",
    ),
    "QK-norms that are not": (
        "class A(Norm): pass\nTYPES = {'A': NormType(uniform('A'), 'A', qk_norm='heads')}\n",
        "its qk_norm must be one of none, head, full",
    ),
    "an alpha as a number": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(uniform('D'), 'D', recipe=Recipe(point_alpha=0.5))}\n",
        "and its point_alpha one of the channels",
    ),
    "no weight": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(post_letters, 'IP', residual_weight=lambda n: None)}\n",
        "its residual_weight returned None, no number above 0",
    ),
    "a negative weight": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(post_letters, 'IP', residual_weight=lambda n: -n)}\n",
        "its residual_weight returned -1, no number above 0",
    ),
    "no factors": (
        "class A(Norm): pass\n"
        "TYPES = {'A': NormType(uniform('A'), 'A', recipe=Recipe(lambda n: None))}\n",
        "its init_factors returned None, no dict",
    ),
    "of_plan without return": (
        "class A(Norm):\n    @classmethod\n    def of_plan(cls, plan, number): pass\n",
        "of_plan of A must return a norm, and returned a NoneType",
    ),
    "a name that is taken": (
        "class A(RMSNorm):\n    def __init__(self, *args, **keys):\n"
        "        super().__init__(*args, **keys)\n"
        "        self.gain = torch.nn.Parameter(torch.ones(3))\n",
        "attribute 'gain' already exists\": correct the norm file",
    ),
    "computed from a parameter": (
        "class A(RMSNorm):\n    def __init__(self, *args, **keys):\n"
        "        super().__init__(*args, **keys)\n        self.twice = 2 * self.weight\n",
        "A: a copy fails; forward computes",
    ),
    "an output norm that needs a sum": (
        "class A(Norm): pass\nTYPES = {'A': NormType(lambda *_: 'AAA|Ds', 'A', outputs='Ds')}\n",
        "has D, s as a norm of outputs",
    ),
    **{
        what: (f"class A(Norm):\n    def forward(self, h, inv_rms=None): {body}\n", why)
        for what, body, why in (
            ("one thing", "return h", "must return two things: (y, inv_rms)"),
            ("a pair in turn", "return None, self.affine(h, h.dtype)", "returns a NoneType as y"),
            ("another size", "return self.affine(h, h.dtype)[..., 1:], None", "(2, 3, 15) float32"),
            ("another type", "return self.affine(h, h.dtype).double(), None", "16) float64 as y"),
            ("a flat statistic", "return self.affine(h, h.dtype), h.mean(-1)", "hands on (2, 3)"),
            ("no gain", "return h, None", "does not use weight"),
            ("an error", "return h + self.gian, None", ":5: A.forward fails: AttributeError"),
        )
    },
    "forward of one": ("class A(Norm):\n    def forward(self, h): pass\n", "takes (h, inv_rms)"),
    "a scalar": (
        "class A(RMSNorm):\n    def __init__(self, *args, **keys):\n"
        "        super().__init__(*args, **keys)\n"
        "        self.scale = torch.nn.Parameter(torch.ones(()))\n",
        "scale has the shape (): make it (1,)",
    ),
}


STATE = """
import torch
from norms import Norm
from taper import StepMean


class A(Norm):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.register_buffer("seen", torch.zeros(1))
        self.size = 0.0
        {init}

    def forward(self, h, inv_rms=None):
        size = h.abs().mean(-1, keepdim=True) + self.eps
        y = h / size
        {forward}
        return self.affine(y, h.dtype), None

    {method}
"""
COUNTS = "def set_step(self, step, max_iters): self.steps.update()"
# what -> statement of __init__, statement of forward, method, message or None
TRAPS = {
    "nothing": ("", "", "", None),
    "no number": ("", "y = y.sqrt()", "", "returns what is not finite"),
    "in place": ("", "h.mul_(2)", "", "changes h, which others read"),
    "detached": ("", "y = y.detach()", "", "sends no gradient to h"),
    "a list of parameters": (
        "self.own = [torch.nn.Parameter(torch.ones(1))]",
        "y = y * self.own[0]",
        "",
        "training does not know a parameter",
    ),
    "the weight for the gain": ("", "return y * self.weight, None", "", "uses self.weight where"),
    "a number": (
        "",
        "self.size = 0.9 * self.size + float(size.mean()); y = y / (1 + self.size)",
        "",
        "a resumed run would not go on alike",
    ),
    "a tensor": (
        "self.last = torch.ones(1)",
        "y = y * self.last; self.last = size.detach().mean()",
        "",
        "a resumed run would not go on alike",
    ),
    "a buffer": (
        "",
        "if self.training: self.seen += size.detach().mean()\n        y = y / (1 + self.seen)",
        "",
        None,
    ),
    "a number that nothing reads": ("", "self.size = float(size.mean())", "", None),
    "a buffer with a graph": (
        "",
        "self.seen = self.seen + size.mean()",
        "",
        "puts a graph into the buffer seen",
    ),
    "a buffer in evaluation": (
        "",
        "self.seen += size.detach().mean()",
        "",
        "evaluation draws numbers or changes its state",
    ),
    "draws in evaluation": (
        "",
        "y = y + 0.1 * torch.randn_like(y)",
        "",
        "evaluation draws numbers or changes its state",
    ),
    "draws in training": ("", "y = y + 0.1 * self.training * torch.randn_like(y)", "", None),
    "a mean that runs": (
        "self.steps = StepMean(1)",
        "if self.training: self.steps.add(size.detach().flatten(0, -2))\n"
        "        y = y / (1 + self.steps.value())",
        COUNTS,
        None,
    ),
    "a mean of evaluations": (
        "self.steps = StepMean(1)",
        "self.steps.add(size.detach().flatten(0, -2))",
        COUNTS,
        "evaluation draws numbers or changes its state",
    ),
    "a mean that stands": (
        "self.steps = StepMean(1)",
        "if self.training: self.steps.add(size.detach().flatten(0, -2))",
        COUNTS.replace("set_step", "setstep"),
        "nothing moves its StepMean",
    ),
    "set_step of one": (
        "",
        "",
        "def set_step(self, step): pass",
        ".set_step fails: TypeError: A.set_step() takes 2 positional arguments but 3 were given: "
        "it takes (step, max_iters)",
    ),
    "an own set_step": ("", "", "def set_step(self, step, max_iters): pass", None),
    "inv_rms without a default": (
        "",
        "",
        "forward_2 = forward\n    def forward(self, h, inv_rms): return self.forward_2(h, inv_rms)",
        None,
    ),
}


@pytest.mark.parametrize("what", TRAPS)
def test_what_nobody_would_see(registry, tmp_path, what):
    """State, gradients and gains of a norm, at all inputs, outputs and the embeddings."""
    init, forward, method, message = TRAPS[what]
    path = tmp_path / "trap.py"
    path.write_text(STATE.format(init=init, forward=forward, method=method))
    norm_files.add_norms(read_norm_file(str(path)))
    config = GPTConfig(norm_type="A", norm_plan="AAA|AA|A", norm_gain="one_plus", **SHAPE)
    if message:
        with pytest.raises(UserError, match=re.escape(message)):
            GPT(config)
        return
    model = GPT(config)
    ids = torch.randint(64, (2, 8))
    model.set_step(1, 10)
    loss, _ = model(ids, ids)
    assert loss.isfinite()


@pytest.mark.parametrize("output", [None, "A"])
def test_a_compiled_norm_reads_what_it_was_promised(registry, tmp_path, output):
    """(B, T, C), also where delta has another type: norms of the house read rows there."""
    path = tmp_path / "shape.py"
    path.write_text(
        "from norms import Norm\n"
        "class A(Norm):\n"
        "    def forward(self, h, inv_rms=None):\n"
        "        B, T, C = h.shape\n"
        "        size = h.float().abs().mean((1, 2), keepdim=True) + self.eps\n"
        "        return self.affine(h / size, h.dtype), None\n"
    )
    norm_files.add_norms(read_norm_file(str(path)))
    plan = "AAA|AA" if output else "AAA"
    model = GPT(GPTConfig(norm_type="A", norm_plan=plan, **SHAPE))
    place = model.blocks[0].norm2
    x, delta = torch.randn(2, 8, 16), torch.randn(2, 8, 16).bfloat16()
    compiled = torch.compile(place, backend="eager")
    for mine, exact in zip(compiled(x, delta)[:2], place(x, delta)[:2], strict=True):
        assert torch.equal(mine, exact)


def test_a_plan_by_hand_goes_before_the_weight_of_a_row(registry, tmp_path):
    path = tmp_path / "weighted.py"
    path.write_text(
        "from norms import RMSNorm\nfrom norm_types import NormType, post_letters\n"
        "class A(RMSNorm): pass\n"
        "TYPES = {'mine': NormType(post_letters, 'IPA', residual_weight=lambda n: 3.0)}\n"
    )
    norm_files.add_norms(read_norm_file(str(path)))
    weights = {}
    for letters in ("", "AAA"):
        model = GPT(GPTConfig(norm_type="mine", norm_plan=letters, **SHAPE))
        weights[letters] = [place.residual_weight for place in model.places()]
    assert weights == {"": [1, 3, 3], "AAA": [1, 1, 1]}


@pytest.mark.parametrize("content, message", NOT_A_NORM.values(), ids=NOT_A_NORM)
def test_what_cannot_be_a_norm_is_a_line_that_says_so(registry, tmp_path, content, message):
    path = tmp_path / "wrong.py"
    path.write_text(
        f"import torch\nfrom norms import Norm, RMSNorm\nfrom norm_types import *\n{content}"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        norm_files.add_norms(read_norm_file(str(path)))
        GPT(GPTConfig(norm_type="A", **SHAPE))


def test_a_running_statistic_counts_each_token_once():
    """Also where the forward pass is computed again in backward (recompute)."""
    mean = StepMean(2)

    def forward(x):
        mean.add(x.detach())
        return x.square().sum()

    x = torch.ones(3, 2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).backward()
    assert mean.sum.tolist() == [3, 3, 3]
    mean.update()
    assert torch.equal(mean.value(), torch.ones(2)) and not mean.sum.any()


def test_letters(registry, tmp_path):
    """A letter that is named goes before one of the name; a subclass has another one."""
    path = tmp_path / "three.py"
    path.write_text(
        "from norms import Norm\n"
        "class Mean(Norm): pass\n"
        "class Named(Norm): letter = 'M'\n"
        "class Narrow(Named): pass\n"
    )
    norm_files.add_norms(read_norm_file(str(path)))
    plans = {name: plan(name, n_layer=0).letters for name in ("Mean", "Named", "Narrow")}
    assert plans == {"Mean": "m", "Named": "M", "Narrow": "N"}


def test_what_a_norm_draws_is_the_same_every_time(registry, tmp_path):
    norm_files.add_norms(read_norm_file(str(write(tmp_path, "sandwich"))))
    shape = {"vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}
    models = []
    for number in (1, 2):
        torch.manual_seed(number)
        models.append(GPT(GPTConfig(norm_type="sandwich", **shape), seed=3))
        assert torch.initial_seed() == number
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    noises = [tensor for name, tensor in first.items() if name.endswith("norm1.norm.noise")]
    assert noises[0].std() > 0


def test_programs_that_take_the_file(train_ok, train_fails, tiny_data, tmp_path):
    file = write(tmp_path, "MeanAbs")
    named = f"--norm_file={file}"
    words = (*TINY, named, "--norm_type=MeanAbs", f"--data_dir={tiny_data}", "--max_iters=3")
    train_ok(*words, f"--out_dir={tmp_path / 'run'}")
    out = tmp_path / "weightless"
    spec = str(tmp_path / "run")
    text = train_ok(spec, "--to=weightless", f"--out={out}", named, program="convert").text()
    assert "exact" in text
    saved = json.loads((out / "config.json").read_text())
    assert saved["norm_gain"] == "none" and saved["norm_sha256"] == digest(file)
    told = train_fails(spec, named, "--data=/nowhere", program="hellaswag")
    assert "/nowhere" in told  # the model is there
    assert "wrote" in train_ok(spec, named, program="report").text()
    for to in ("rms", "folded", "coupled", "hf"):
        more = ("--inexact",) if to == "coupled" else ()
        job = (spec, f"--to={to}", f"--out={tmp_path / to}", named, *more)
        assert "MeanAbs" in train_fails(*job, program="convert", code=1 if to == "hf" else 2)
    file.write_text(file.read_text() + "# edited\n")
    assert digest(file) in train_fails(spec, named, program="report")
    assert digest(file) in train_fails(spec, named, "--to=weightless", program="convert")


# ---------------------------------------------------------------------------------- refused files


BAD = {
    "no such file": (None, "cannot be read"),
    "no syntax": ("class A(:\n", "bad.py:1: SyntaxError"),
    "fails": ("x = 1\ny = 1 / 0\n", "bad.py:2: ZeroDivisionError"),
    "a neighbour": ("import neighbour\n", "bad.py:1: ModuleNotFoundError"),
    "no norm": ("from norms import Norm\n", "no subclass of norms.Norm"),
    "a name of the house": ("from norms import Norm\nclass rms(Norm): pass\n", "'rms' is there"),
    "a letter of the house": (
        "from norms import Norm\nclass A(Norm):\n    letter = 'R'\n",
        "letter='R' of A is taken",
    ),
    "no rows": ("TYPES = ['a']\n", "TYPES must be a dict"),
    "rows of another name": (
        "from norm_types import *\nTYPE = {'a': NormType(uniform('R'), 'R')}\n",
        "TYPE is not read: call it TYPES",
    ),
    "a row that nothing holds": (
        "from norm_types import *\nMine = NormType(uniform('R'), 'R')\n",
        "Mine is not read: call it TYPES",
    ),
    "no row": ("TYPES = {'a': 'b'}\n", "no norm_types.NormType"),
    "an embed that fails": (
        "from norm_types import *\n"
        "TYPES = {'a': NormType(uniform('R'), 'R', embed=lambda x: x[9])}\n",
        "bad.py:2: the embed of norm type 'a': IndexError: ",
    ),
    "an embed of two inputs": (
        "from norm_types import *\n"
        "TYPES = {'a': NormType(uniform('R'), 'R', embed=lambda x, y: x)}\n",
        "the embed of norm type 'a': TypeError: ",
    ),
    "an embed of another shape": (
        "from norm_types import *\n"
        "TYPES = {'a': NormType(uniform('R'), 'R', embed=lambda x: x.mean(-1))}\n",
        "the embed of norm type 'a' returns (2, 3) float32 for x of (2, 3, 16) float32",
    ),
    "no linear": (
        "from norm_types import *\n"
        "TYPES = {'a': NormType(uniform('R'), 'R', residual_linear=center)}\n",
        "its residual_linear must be a subclass of torch.nn.Linear",
    ),
    "a name with a slash": (
        "from norm_types import *\nTYPES = {'a/b': NormType(uniform('R'), 'R')}\n",
        "rename it",
    ),
    "a letter of no norm": (
        "from norm_types import *\nTYPES = {'a': NormType(uniform('z'), 'z')}\n",
        "letters of no norm, z",
    ),
    "a key that is not": (
        "from norm_types import *\n"
        "TYPES = {'a': NormType(uniform('R'), 'R', keys=('norm_eps',))}\n",
        "reads norm_eps",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_norm_file(registry, tmp_path, case):
    """Nothing is added, so that the next file finds the registry as it was."""
    source, message = BAD[case]
    path = tmp_path / "bad.py"
    if source is not None:
        path.write_text(source)
    (tmp_path / "neighbour.py").write_text("")
    before = {**norm_types.NORM_TYPES}, {**norm_plan.NORMS}
    with pytest.raises(UserError, match=re.escape(message)):
        norm_files.take_norm_file([f"--norm_file={path}"])
    assert before == (norm_types.NORM_TYPES, norm_plan.NORMS)


def test_the_digest_that_a_script_gives_is_checked(registry, tmp_path):
    path = write(tmp_path, "MeanAbs")
    with pytest.raises(UserError, match=digest(path)):
        norm_files.take_norm_file([f"--norm_file={path}", f"--norm_sha256={'0' * 64}"])
    assert "MeanAbs" not in norm_types.NORM_TYPES
    words = ["a", f"--norm_sha256={digest(path)}", f"--norm_file={path}", "--b=1"]
    assert norm_files.take_norm_file(words) == ["a", "--b=1"]
    assert NormConfig(norm_type="MeanAbs").norm_sha256 == digest(path)
    with pytest.raises(UserError, match="0000"):
        NormConfig(norm_type="MeanAbs", norm_sha256="0" * 64)
    with pytest.raises(UserError, match="norm_sha256 is a key of"):
        NormConfig(norm_type="rms", norm_sha256=digest(path))


@pytest.mark.parametrize("norm_type", ["A\n\x1b[31merror: none", "A" * 5000], ids=["lines", "long"])
def test_a_config_from_others_is_refused_in_one_line(tmp_path, norm_type):
    """It says which file to give, and what it calls its norm cannot look like a message."""
    saved = {"norm_type": norm_type, "norm_sha256": "a" * 64}
    with pytest.raises(CheckpointError) as told:
        model_config(saved, tmp_path / "ckpt_best.pt")
    text = str(told.value)
    assert text.isprintable() and "norm_type 'A" in text
    # The middle of a long message is left out.
    assert "a" * 64 in one_line(text) and "--norm_file=FILE" in one_line(text)


def test_the_environment_names_a_file_too(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("NANONORM_NORMS", str(write(tmp_path, "MeanAbs")))
    assert norm_files.take_norm_file(["--seed=1"]) == ["--seed=1"]
    assert "MeanAbs" in norm_types.NORM_TYPES


def test_ranks_with_other_files_are_refused(launch, tiny_data, tmp_path):
    """Each rank reads its own copy, as machines do that share no folder."""
    file = write(tmp_path, "MeanAbs")
    words = (*TINY, "--norm_type=MeanAbs", f"--norm_file={file}", f"--data_dir={tiny_data}")
    job = launch(*words, f"--out_dir={tmp_path / 'run'}", ranks=2, patch=("other_norm_file", {}))
    assert set(job.wait()) == {1}
    assert job.text().count("error: ranks have different norm files") == 1
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------- what never runs it

OTHER_PROGRAMS = (
    "bench_decode",
    "distill",
    "bench.train",
    "bench.kernels",
    "bench.bytes",
    "posthoc.rms_stats",
    "data.prepare",
)


@pytest.fixture
def trap(tmp_path) -> tuple[Path, Path]:
    """A norm file, and the file that is there once it has run."""
    ran = tmp_path / "ran"
    path = tmp_path / "trap.py"
    path.write_text(f"{example()}\nopen({str(ran)!r}, 'w')\n")
    return path, ran


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_other_programs_refuse_a_norm_file(train_fails, trap, program):
    path, ran = trap
    words = ("random:gpt2",) if program in ("bench_decode", "posthoc.rms_stats") else ()
    told = train_fails(*words, f"--norm_file={path}", program=program, code=2)
    assert "a norm file is code that runs" in told and not ran.exists()


def named_in_a_config_file(path: Path, folder: Path) -> tuple[str, ...]:
    (folder / "c.py").write_text(f"norm_file = {str(path)!r}\n")
    return ("train", "c.py")


def given_as_a_config_file(path: Path, folder: Path) -> tuple[str, ...]:
    return ("train", str(path))


def edit_config(folder: Path, name: str, path: Path) -> None:
    """Put `norm_file` into a saved config: a checkpoint's, config.json's or a log's."""
    if name.endswith(".pt"):
        state = torch.load(folder / name, weights_only=True)
        state["config"]["norm_file"] = str(path)
        torch.save(state, folder / name)
    elif name == "config.json":
        saved = json.loads((folder / name).read_text()) | {"norm_file": str(path)}
        (folder / name).write_text(json.dumps(saved))
    else:
        first, *others = (folder / name).read_text().splitlines()
        event = json.loads(first)
        event["config"]["norm_file"] = str(path)
        (folder / name).write_text("\n".join([json.dumps(event), *others]))


def in_a_checkpoint(path: Path, folder: Path) -> tuple[str, ...]:
    edit_config(folder / "run", "ckpt_best.pt", path)
    return ("sample", "run", "--device=cpu")


def in_a_checkpoint_that_is_resumed(path: Path, folder: Path) -> tuple[str, ...]:
    edit_config(folder / "run", "ckpt_last.pt", path)
    return ("train", "--max_iters=4")


def in_a_config_json(path: Path, folder: Path) -> tuple[str, ...]:
    edit_config(folder / "run", "config.json", path)
    return ("train", "--init_from=random:gpt2")


def in_a_run_folder(path: Path, folder: Path) -> tuple[str, ...]:
    edit_config(folder / "run", "log.jsonl", path)
    return ("report", "run")


def in_an_archive(path: Path, folder: Path) -> tuple[str, ...]:
    edit_config(folder / "run", "log.jsonl", path)
    (folder / "run" / COPY).write_bytes(path.read_bytes())
    with tarfile.open(folder / "runs.tar.xz", "w:xz") as archive:
        archive.add(folder / "run", "rms-1")
    return ("report", "runs.tar.xz")


PLACES = (
    named_in_a_config_file,
    given_as_a_config_file,
    in_a_checkpoint,
    in_a_checkpoint_that_is_resumed,
    in_a_config_json,
    in_a_run_folder,
    in_an_archive,
)


@pytest.fixture(scope="module")
def three_steps(tiny_data, tmp_path_factory) -> Path:
    """A run folder."""
    folder = tmp_path_factory.mktemp("three")
    words = (*TINY, f"--data_dir={tiny_data}", "--norm_type=rms", f"--out_dir={folder / 'run'}")
    job = Job((*words, "--max_iters=3", "--eval_interval=3"), 1, folder / "job", None)
    assert job.wait() == [0], job.text()
    return folder / "run"


def test_a_norm_that_is_not_chosen_is_said(train_ok, tiny_data, tmp_path):
    (tmp_path / "mine.py").write_text(example())
    words = (*TINY, f"--data_dir={tiny_data}", f"--norm_file={tmp_path / 'mine.py'}")
    job = train_ok(*words, "--max_iters=1", f"--out_dir={tmp_path / 'run'}")
    assert "is not of the norm file, which adds MeanAbs" in job.text()


@pytest.mark.parametrize("affine", [False, True], ids=["no gain", "a gain"])
def test_an_initial_gain_that_changes_nothing_is_said(train_ok, tiny_data, tmp_path, affine):
    file = tmp_path / "bare.py"
    file.write_text(
        "from norms import RMSNorm\n"
        "class Bare(RMSNorm):\n"
        "    def __init__(self, *args, **keys):\n"
        f"        super().__init__(*args, **keys | {{'affine': {affine}}})\n"
    )
    words = (*TINY, f"--data_dir={tiny_data}", f"--norm_file={file}", "--norm_type=Bare")
    words += ("--initial_gain=0.5", "--max_iters=1", f"--out_dir={tmp_path / 'run'}")
    text = train_ok(*words).text()
    assert ("initial_gain=0.5 changes nothing" in text) is not affine


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_names_a_norm_file_does_not_run_it(
    three_steps, train_fails, tiny_data, tmp_path, monkeypatch, trap, place
):
    path, ran = trap
    monkeypatch.chdir(tmp_path)
    words = (*TINY, f"--data_dir={tiny_data}", "--norm_type=rms", "--out_dir=run")
    shutil.copytree(three_steps, tmp_path / "run")
    program, *more = place(path, tmp_path)
    more = [*words, *more] if program == "train" else more
    is_a_file_of_a_run = place in (
        in_a_checkpoint,
        in_a_checkpoint_that_is_resumed,
        in_a_config_json,
    )
    code = 1 if is_a_file_of_a_run else 2
    told = train_fails(*more, program=program, code=code)
    assert "norm file" in told and not ran.exists()
