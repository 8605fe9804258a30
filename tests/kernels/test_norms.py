"""A GPT on the kernels, for every norm type: the same numbers, one graph, no recompilation.

python -m pytest tests/kernels/test_norms.py
"""

import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from helpers import shake, tokens

from kernels import binding
from model import GPT, GPTConfig
from norms import Norm
from taper import tapers

DEVICE = "cpu" if binding.INTERPRETED else "cuda"
SHAPE = GPTConfig(
    vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=16, init_std=0.2, qk_norm="head"
)
VARIANTS = {
    "layer": {},
    "layer with biases": {"norm_type": "layer", "bias": True},
    "rms": {},
    "coupled": {},
    "partial": {"norm_type": "rms", "rms_fraction": 0.5},
    "group": {"norm_type": "rms", "norm_groups": 4, "rms_fraction": 0.5},
    "coupled alpha": {"norm_type": "coupled", "coupled_alpha": 1.1},
    "coupled fold": {"norm_type": "coupled", "coupled_impl": "fold"},
    "coupled fold swiglu": {
        "norm_type": "coupled",
        "coupled_impl": "fold",
        "activation": "swiglu",
        "bias": True,
    },
    "coupled full": {"norm_type": "coupled", "coupled_grad": "full"},
    "without gains": {"norm_gain": "none"},
    "cbwc": {"bias": True},
    "taper": {},
    "taper layer": {"norm_type": "taper", "taper_base": "layer"},
    # alpha of 0.5: a larger one leaves alpha a gradient that is all rounding
    "dyt": {"norm_type": "dyt", "norm_recipe": "common"},
    "peri": {},
    "olmo2": {"norm_gain": "one_plus", "norm_type": "olmo2", "qk_norm": None},
    "hybrid": {"norm_type": "hybrid", "residual_weight": 1.5},
    "lns": {},
}
TOKENS = tokens(3, 9, seed=5).to(DEVICE)
IDX, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def model_of(name, dtype=torch.float32, **keys):
    """A model with gains that are not 1; a taper in the middle of its blend."""
    variant = VARIANTS[name]
    config = replace(
        SHAPE,
        **{"norm_type": variant.get("norm_type", name if not variant or name == "cbwc" else "rms")}
        | variant
        | keys,
    )
    model = shake(GPT(config)).to(DEVICE, dtype)
    if config.norm_type == "taper":
        with torch.no_grad():
            model(IDX, TARGETS)
        model.set_step(2, 10)
        model.set_step(6, 10)
        assert {norm.phase for norm in tapers(model)} == {"blend"}
    return model


def step(model, forward=None):
    loss, aux = (model if forward is None else forward)(IDX, TARGETS)
    (loss + aux).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def same(actual, expected):
    """Loss and gradients, but for the order of sums."""
    assert abs(actual[0] - expected[0]) <= 2e-6 * abs(expected[0])
    for parameter, gradient in expected[1].items():
        assert (actual[1][parameter] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3), (
            parameter
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gpt_on_the_kernels_is_the_gpt_in_plain_pytorch(name):
    expected, actual = (step(model_of(name, kernels=mode)) for mode in ("torch", "triton"))
    same(actual, expected)


# Every variant on the kernels and in plain PyTorch, but for those that other tests compile in plain
# PyTorch in the same way: test_model.py, test_coupled_fold.py, and the taper below.
COMPILED = ("layer", "rms", "cbwc", "coupled fold", "taper")
# What another variant has too, with more: biases, groups, an activation with two halves. Of layouts
# with output norms and replaced streams one is enough.
IN_OTHERS = ("layer", "rms", "partial", "coupled alpha", "coupled fold", "olmo2", "hybrid", "lns")
GRAPHS = [
    (name, mode)
    for name in VARIANTS
    for mode in ("torch", "triton")
    if name not in IN_OTHERS and not (mode == "torch" and name in COMPILED)
]


@pytest.mark.parametrize(("name", "mode"), GRAPHS)
def test_one_graph_without_breaks(name, mode):
    """fullgraph=True raises at a graph break. On the kernels forward and backward are traced too.

    One block holds a norm of every place; of coupled, two blocks show that a statistic stays with
    its own.
    """
    model = model_of(name, kernels=mode, n_layer=2 if name == "coupled" else 1)
    expected = step(model)
    model.zero_grad()
    torch._dynamo.reset()
    backend = "aot_eager" if mode == "triton" else "eager"
    actual = step(model, torch.compile(model, fullgraph=True, backend=backend))
    same(actual, expected)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="inductor wants a C++ compiler"
)
@torch._inductor.config.patch(compile_threads=1)
def test_inductor_takes_the_operators_as_they_are():
    """It generates code for what is around them, forward and backward; without a GPU, C++."""
    model = model_of("coupled", kernels="triton", n_layer=1)
    expected = step(model)
    model.zero_grad()
    actual, code = torch._inductor.utils.run_and_get_code(
        step, model, torch.compile(model, fullgraph=True)
    )
    for name in ("fused", "fused_backward"):
        assert any(f"nanonorm.{name}.default" in text for text in code), name
    same(actual, expected)


@pytest.mark.parametrize("mode", ["torch", "triton"])
def test_one_compilation_a_taper_phase(mode):
    model = model_of("taper", kernels=mode, taper_warmup=1.0, taper_end=8.0, n_layer=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    gates = []
    for at in range(4, 8):
        model.set_step(at, 10)
        gates.append(float(model.blocks[0].norm1.norm.gate))
        step(model, compiled)
    assert len(set(gates)) == 4 and counter.frame_count == 1
    model.set_step(8, 10)
    step(model, compiled)
    assert counter.frame_count == 2


def test_the_mode_reaches_every_norm_of_a_model():
    model = model_of("taper", kernels="triton")
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    # norms, tapers' bases, q and k
    assert len(norms) == 5 + 4 + 4 and {norm.kernels for norm in norms} == {"triton"}
