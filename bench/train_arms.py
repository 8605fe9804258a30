"""The arms of bench/train.py: how they are written, and one training step of each.

An arm is a norm type with the keys that it sets; in a list, arms are separated by semicolons:

    rms; coupled; coupled coupled_impl=fold; layer compile=False; rms-no-mlp-gamma; nanogpt

`X-no-mlp-gamma` is X without the gain of the norm before each MLP; `nanogpt` is upstream nanoGPT's
model and optimiser. Arms differ in keys of the norms, `residual`, `compile` and `dtype` alone, so
that nothing else can make one of them fast. `compile=auto` and `dtype=auto` are what train.py takes
for the run that the config describes; for nanoGPT what its own users get.
"""

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.auto import AUTO, by_device
from common.distributed import accumulate, replicate
from common.environment import Precision
from common.errors import ConfigError
from configurator import Overrides
from decode.peers import module
from model import GPT, GPTConfig
from norm_plan import NormConfig, NormPlan
from train import TrainConfig
from training.choices import choose
from training.optim import carry_state, guarded_update, micro_step, optimizer_of

NO_MLP_GAMMA = "-no-mlp-gamma"
NANOGPT = "nanogpt"
NANOGPT_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")
# Keys of models and optimisers that nanoGPT cannot build, but for their defaults.
NOT_NANOGPTS = {field.name for field in dataclasses.fields(GPTConfig)} | {"optimizer"}
NOT_NANOGPTS -= {*NANOGPT_SHAPE, "init", "init_std", "kernels"}
# Not coupled_calibrate: train.py calibrates between steps, which would not be timed.
MAY_DIFFER = {field.name for field in dataclasses.fields(NormConfig)} - {
    "norm_type",
    "coupled_calibrate",
}
MAY_DIFFER |= {"residual", "compile", "dtype"}
UPSTREAMS = {"compile", "dtype"}  # keys that an arm of nanoGPT may set

Batch = tuple[Tensor, Tensor]
Step = Callable[[], Tensor]  # one optimiser step; its loss, a scalar on the device


@dataclass(frozen=True)
class TrainArm:
    """One arm."""

    name: str  # as it was written
    config: TrainConfig  # what its step runs with
    is_nanogpt: bool = False
    mlp_gamma: bool = True  # whether the norms before MLPs have a gain


# ----------------------------------------------------------------------------- how they are written


def parse_arms(text: str, config: TrainConfig) -> list[TrainArm]:
    """Parse a list of arms as at the head of this file, on top of `config`.

    Raises ConfigError that names the arm.
    """
    names = [" ".join(part.split()) for part in text.split(";") if part.strip()]
    arms = []
    for name in dict.fromkeys(names):
        try:
            arms.append(parse_arm(name, config))
        except ConfigError as error:
            raise ConfigError(f"arms: {name!r}: {error}") from None
    return arms


def parse_arm(name: str, config: TrainConfig) -> TrainArm:
    """Parse one arm, whose parts have single spaces between. Raises ConfigError."""
    kind, *settings = name.split(" ")
    is_nanogpt = kind == NANOGPT
    norm_type = "layer" if is_nanogpt else kind.removesuffix(NO_MLP_GAMMA)
    may_differ = UPSTREAMS if is_nanogpt else MAY_DIFFER
    overrides = Overrides(TrainConfig)
    for setting in settings:
        key, _, value = setting.partition("=")
        overrides.set(key, value, setting, is_text=True)
        if key not in may_differ:
            raise ConfigError(f"{key} cannot differ here, set it once for all: --{key}={value}")
    config = dataclasses.replace(config, norm_type=norm_type, **overrides.values)
    NormPlan(config, config.n_layer, config.n_embd, config.bias)
    if is_nanogpt:
        for field in NOT_NANOGPTS:
            if getattr(config, field) != getattr(TrainConfig, field):
                raise ConfigError(f"nanoGPT has no {field}={getattr(config, field)}")
    return TrainArm(name, config, is_nanogpt, not kind.endswith(NO_MLP_GAMMA))


def settle(arm: TrainArm, device: torch.device) -> TrainArm:
    """Return the arm with a value for each key that it leaves to `auto`."""
    if not arm.is_nanogpt:
        chosen = choose(arm.config, device)
    else:
        # Its README has `--compile=False` for CPUs, where its train.py ignores `dtype`.
        usual = by_device(device.type)
        chosen = {key: usual[key] for key in AUTO if getattr(arm.config, key) == AUTO[key]}
        chosen["merge_micro_batches"] = 1  # it cannot merge
    return dataclasses.replace(arm, config=dataclasses.replace(arm.config, **chosen))


# -------------------------------------------------------------------------------------- their steps


def build_step(arm: TrainArm, batches: list[Batch], device: torch.device, nanogpt: str) -> Step:
    """Build the arm's optimiser step, with a model of its own.

    Args:
        arm: of `settle`.
        batches: micro-batches (B, T) on `device`.
        nanogpt: folder with nanoGPT's clone.
    """
    if arm.is_nanogpt:
        return nanogpt_step(arm, batches, device, module(nanogpt, "model", "nanogpt"))
    return our_step(arm, batches, device)


def our_step(arm: TrainArm, batches: list[Batch], device: torch.device) -> Step:
    """Build train.py's step without what does not depend on the model: data, schedule, log."""
    config = arm.config
    precision = Precision(config.dtype, device)
    model = GPT(config, config.seed)
    if not arm.mlp_gamma:
        for block in model.blocks:
            block.norm2.core.weight = None
    model.to(device, precision.weights).train()
    parameters = list(model.parameters())
    optimizer = optimizer_of(config, model)
    forward = model
    if config.compile:
        forward = torch.compile(model, dynamic=False)
    forward = replicate(forward)
    model.set_step(1, config.max_iters)
    following = itertools.count(2)  # number of the next step, for the norms' schedules
    at_once = math.gcd(len(batches), config.merge_micro_batches)
    starts = range(0, len(batches), at_once)

    def step() -> Tensor:
        losses: Any = 0.0
        for start in starts:
            # (at_once B, T) each
            x, y = (torch.cat(parts) for parts in zip(*batches[start : start + at_once]))
            with accumulate(forward, last=start == starts[-1]):
                losses = losses + micro_step(forward, x, y, precision, len(starts))
        is_bad = (~torch.isfinite(losses.sum())).to(losses.dtype)
        guarded_update(optimizer, precision.scaler, parameters, config.grad_clip, is_bad)
        for source, target in model.set_step(next(following), config.max_iters):
            carry_state(optimizer, source, target)
        return losses[0]

    return step


def nanogpt_step(
    arm: TrainArm, batches: list[Batch], device: torch.device, upstream: ModuleType
) -> Step:
    """Build the step of nanoGPT's train.py, with nanoGPT's own model and optimiser.

    Its loss is that of the last micro-batch, as nanoGPT logs it.
    """
    config = arm.config
    precision = Precision(config.dtype, device)
    shape = {name: getattr(config, name) for name in NANOGPT_SHAPE}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its number of parameters
        torch.manual_seed(config.seed)
        model = upstream.GPT(upstream.GPTConfig(**shape))
        model.to(device, precision.weights).train()
        betas = config.beta1, config.beta2
        optimizer = model.configure_optimizers(
            config.decay, config.learning_rate, betas, device.type
        )
    forward = model
    if config.compile:
        forward = torch.compile(model)
    if dist.is_initialized():
        forward = DistributedDataParallel(forward)
    scaler = precision.scaler

    def step() -> Tensor:
        for number, (x, y) in enumerate(batches, 1):
            with accumulate(forward, last=number == len(batches)):
                with precision.autocast():
                    _, loss = forward(x, y)
                    loss = loss / len(batches)
                scaler.scale(loss).backward()
        if config.grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() * len(batches)

    return step
