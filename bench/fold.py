"""Time a forward pass before and after folding LayerNorm into RMSNorm, in one process.

    python -m bench.fold random:gpt2 --lengths=256,1024 --batch=2 --out=results/cpu/fold/fold.jsonl
    python -m bench.fold hf:bert --lengths=64,256,1024,4096,16384 --batch=4 \\
      --modes=eager,compiled,graph

The first argument is a model of ours (load_model's specs, converted by fold.gpt.to_rms) or a shape
that transformers has (hf:gpt2, hf:bert, vit, opt, bloom, gptj, phi; random weights, folded by
fold.fold). Arms: before, after, before again (A/A), and the model without its norms, whose time
tells the norms' share, in randomised paired rounds. --sequential=50 adds the CBWC paper's protocol
(appendix G.3): 50 passes to warm up, then 50 passes of one arm after the other, eager. That also
measures what else the machine did in that time, so it is shown in addition to the paired ratio, not
instead of it. A ratio above 1 means that folding made it faster. Where not all norms fold (hf:bert,
1 of 25), one more arm has them all swapped, as the paper's figures do: another function, for its
time alone. The last line is JSON.
"""

import copy
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fold
from common.environment import environment, find_device, find_dtype
from common.errors import ConfigError, UserError, run_program
from common.hub import import_transformers
from common.output import append_json, check_replaceable, span
from common.stats import paired_ratio
from configurator import key, parse_args
from decode.timing import captured, time_arms
from fold import gpt
from fold.certificate import certify, randomize
from fold.modules import Plan, Swap, swap_and_insert
from load import load_model
from model import GPT

SWAPPED = "all norms swapped (timing only)"
BARE = "no norms (timing only)"  # what it takes less is the norms' share
MODES = ("eager", "compiled", "graph")
IMAGES = "pixel_values"  # transformers' name of an input of images
# Name -> class, and what the published model sets other than transformers' defaults. The number of
# positions is what --lengths needs.
HF_SHAPES = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "bert": ("BertModel", {}),
    "vit": ("ViTModel", {}),
    "phi": ("PhiForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "gptj": ("GPTJForCausalLM", {}),
}


@dataclass(frozen=True)
class FoldBenchConfig:
    """Keys of bench/fold.py."""

    lengths: tuple[int, ...] = key(
        (256, 1024), "tokens of a sequence, several (an image has its own)", least=1
    )
    batch: int = key(2, "sequences in a pass", least=1)
    modes: tuple[str, ...] = key(("eager",), "eager, compiled, graph (CUDA); several")
    rounds: int = key(20, "paired rounds; in each, every arm does one pass", least=6)
    sequential: int = key(0, "passes of each arm by the paper's protocol (0: none)", least=0)
    device: str = key("auto", "where to run", ("auto", "cpu", "cuda"))
    dtype: str = key(
        "auto",
        "of the weights (auto: bfloat16 on CUDA)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    out: str = key("", "append the measurements to this JSONL file")

    def __post_init__(self) -> None:
        if unknown := {*self.modes} - {*MODES}:
            raise ConfigError(f"modes: {min(unknown)!r} is none of {', '.join(MODES)}")


def make_arms(spec: str, config: FoldBenchConfig) -> tuple[dict[str, nn.Module], int]:
    """Return the models by arm, in eval mode and on the CPU, and the number of norms folded."""
    if not spec.startswith("hf:"):
        before = load_model(spec)
        tokens = torch.arange(min(config.lengths))[None] % before.n_vocab
        after, certificate = certify(before, gpt.to_rms, (tokens,))
        if not certificate.ok:
            raise UserError(f"{spec}: {certificate}")
        bare = GPT(gpt.retype(before.config, "none")).eval()
        return {"before": before, "after": after, BARE: bare}, len(before.plan.letters)
    name = spec.removeprefix("hf:")
    if name not in HF_SHAPES:
        shapes = ", ".join(f"hf:{shape}" for shape in HF_SHAPES)
        raise ConfigError(f"{spec}: the shapes are {shapes}")
    family, shape = HF_SHAPES[name]
    model_class = getattr(import_transformers(), family)
    settings = model_class.config_class(**shape)
    known = {*vars(settings), *settings.attribute_map}
    for positions in {"n_positions", "max_position_embeddings"} & known:
        setattr(settings, positions, max(2048, *config.lengths))
    torch.manual_seed(0)
    before = model_class(settings).eval()
    randomize(before)
    report = fold.analyze(before, inputs(before, 2, 16, torch.float32))
    after, certificate = fold.fold(before, report, untie=True, insert=report.worth)
    if not certificate.ok:
        raise UserError(f"{spec}: {certificate}")
    arms = {"before": before, "after": after}
    if certificate.folded < report.total:
        swaps = {norm.swap for norm in report.analysis.norms if isinstance(norm.swap, Swap)}
        arms[SWAPPED] = copy.deepcopy(before)
        swap_and_insert(Plan(swaps=list(swaps)), arms[SWAPPED])
    arms[BARE] = copy.deepcopy(before)
    for path, module in before.named_modules():
        if isinstance(module, nn.LayerNorm):
            arms[BARE].set_submodule(path, nn.Identity())
    return arms, certificate.folded


def inputs(model: nn.Module, batch: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return random inputs of the kind that the model takes.

    Token ids (batch, length), or images (batch, channels, height, width).
    """
    generator = torch.Generator().manual_seed(length)
    device = next(model.parameters()).device
    settings = model.config
    name = getattr(model, "main_input_name", "idx")  # idx: a model of ours
    if name == IMAGES:
        shape = (batch, settings.num_channels, settings.image_size, settings.image_size)
        return {name: torch.randn(shape, generator=generator).to(device, dtype)}
    ids = torch.randint(settings.vocab_size, (batch, length), generator=generator).to(device)
    return {name: ids} | ({"use_cache": False} if hasattr(settings, "use_cache") else {})


def passes(model: nn.Module, x: dict[str, Any], mode: str) -> Callable[[], Any]:
    """Return a function without arguments: one forward pass of `model` on x, compiled and warm."""
    forward = torch.compile(model, dynamic=False) if mode == "compiled" else model
    call = torch.inference_mode()(functools.partial(forward, **x))
    if mode == "graph":
        return captured(lambda: call)
    for _ in range(2):
        call()
    return call


def sequential(arm: Callable[[], Any], device: torch.device, count: int) -> float:
    """Return the mean seconds of `count` passes of an arm, warmed up with as many."""
    start = 0.0
    for _ in range(2):
        start = perf_counter()
        for _ in range(count):
            arm()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (perf_counter() - start) / count


def peak_bytes(arm: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that is in use during a pass, the weights of all arms included."""
    torch.cuda.reset_peak_memory_stats(device)
    arm()
    return torch.cuda.max_memory_allocated(device)


def measure(
    models: dict[str, nn.Module],
    config: FoldBenchConfig,
    mode: str,
    length: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return one record: times, ratios with intervals, tokens/s, what norms take, GPU memory."""
    # All arms and lengths share the code of one forward: dynamo would reach its recompile limit.
    torch.compiler.reset()
    device = next(models["before"].parameters()).device
    x = inputs(models["before"], config.batch, length, dtype)
    arms = {name: passes(model, x, mode) for name, model in models.items()}
    times = time_arms(arms | {"before again": arms["before"]}, config.rounds, device)
    medians = {name: median(values) for name, values in times.items()}
    record = {
        "mode": mode,
        "length": length,
        "batch": config.batch,
        "rounds": config.rounds,
        "seconds": times,
        "ms": {name: 1e3 * middle for name, middle in medians.items()},
        "tok_per_s": {name: config.batch * length / middle for name, middle in medians.items()},
    }
    record["norm_share"] = 1 - medians[BARE] / medians["before"]
    if device.type == "cuda":
        record["peak_bytes"] = {name: peak_bytes(arm, device) for name, arm in arms.items()}
    for name in (*list(arms)[1:], "before again"):
        record[f"before / {name}"] = paired_ratio(times["before"], times[name])
    if config.sequential and mode == "eager":
        means = {name: sequential(arm, device, config.sequential) for name, arm in arms.items()}
        saved = {name: 1 - mean / means["before"] for name, mean in means.items()}
        record["sequential"] = {"seconds": means, "saved": saved}
    return record


def show(record: dict[str, Any]) -> str:
    """Return one readable line about a record."""
    parts = [f"{record['ms']['before']:.2f} ms before, {record['ms']['after']:.2f} ms after"]
    for name in list(record["ms"])[1:]:
        parts.append(f"before / {name} {span(record[f'before / {name}'])}")
    for name, saved in list(record.get("sequential", {}).get("saved", {}).items())[1:]:
        parts.append(f"one after the other, {name} {saved:+.1%} saved")
    parts.append(f"norms take {record['norm_share']:.1%}")
    return f"{record['mode']}, length {record['length']}: {'; '.join(parts)}"


def main(argv: list[str]) -> None:
    config, spec = parse_args(FoldBenchConfig, argv, __doc__, spec=True)
    if config.out:
        check_replaceable(Path(config.out), rb'{"spec": .*"folded"')
    device = find_device(config.device)
    dtype = find_dtype(config.dtype, device)
    models, folded = make_arms(spec, config)
    models = {name: model.to(device, dtype) for name, model in models.items()}
    about = {
        "spec": spec,
        "folded": folded,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        **environment(device),
    }
    print(
        f"{spec}: {folded} norms folded, {about['dtype']}, batch {config.batch}, {about['device']}"
    )
    summary = []
    lengths = config.lengths
    if getattr(models["before"], "main_input_name", "") == IMAGES:  # patches and the class token
        shape = models["before"].config
        lengths = ((shape.image_size // shape.patch_size) ** 2 + 1,)
    for length, mode in itertools.product(lengths, config.modes):
        try:
            record = measure(models, config, mode, length, dtype)
        except RuntimeError as error:  # torch's OutOfMemoryError too
            # Some of transformers' models (bloom) make a tensor on the host in each pass, which no
            # graph can hold.
            if mode != "graph" and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{mode}, length {length}: {error}".splitlines()[0])
            continue
        print(show(record), flush=True)
        summary.append({"mode": mode, "length": length, **record["before / after"]})
        if config.out:
            append_json(Path(config.out), about | record)
    print(json.dumps({"spec": spec, "folded": folded, "ratios": summary}))


if __name__ == "__main__":
    run_program(main)
