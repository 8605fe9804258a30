"""Time a forward pass before and after folding LayerNorm into RMSNorm, in one process.

    python -m bench.fold random:gpt2 --lengths=256,1024 --batch=2 --out=results/cpu/fold/fold.jsonl
    python -m bench.fold hf:bert --lengths=64,256,1024,4096,16384 --batch=4 \\
      --modes=eager,compiled,graph

The first argument is a model of ours (load_model's specs, converted by fold.gpt.to_rms) or a shape
that transformers has (hf:gpt2, hf:bert, vit, opt, bloom, phi; random weights, folded by fold.fold).
Arms: before, after, and before again (A/A), in randomised paired rounds. --sequential=50 adds the
CBWC paper's protocol (appendix G.3): 50 passes to warm up, then 50 passes of one arm after the
other, eager. That also measures what else the machine did in that time, so it is shown in addition
to the paired ratio, not instead of it. A ratio above 1 means that folding made it faster. Where not
all norms fold (hf:bert, 1 of 25), one more arm has them all swapped, as the paper's figures do:
another function, for its time alone. The last line is JSON.
"""

import common.interrupt  # noqa: F401

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

import fold
from common.environment import environment, find_device, find_dtype
from common.errors import ConfigError, UserError, run_program
from common.output import append_json, check_replaceable, span
from common.stats import median_ratio, paired_ratio, paired_times
from configurator import check_ranges, key, parse_args
from fold import gpt
from fold.certificate import randomize
from fold.modules import Plan, Swap, swap_and_insert
from hf.hub import import_transformers
from load import load_model

SWAPPED = "all norms swapped (timing only)"
MODES = ("eager", "compiled", "graph")
# Name -> class, and what the published model sets other than transformers' defaults. The number of
# positions is what --lengths needs.
HF_SHAPES = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "bert": ("BertModel", {}),
    "vit": ("ViTModel", {}),
    "phi": ("PhiForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
}


@dataclass(frozen=True)
class FoldBenchConfig:
    """Keys of bench/fold.py."""

    lengths: tuple[int, ...] = key(
        (256, 1024), "tokens of a sequence, several (an image has its own)"
    )
    batch: int = key(2, "sequences in a pass", least=1)
    modes: tuple[str, ...] = key(("eager",), "eager, compiled, graph (CUDA); several")
    rounds: int = key(20, "paired rounds; in each, every arm does one pass", least=6)
    sequential: int = key(0, "passes of each arm by the paper's protocol (0: none)", least=0)
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the weights (auto: bfloat16 on CUDA)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    out: str = key("", "append the measurements to this JSONL file")

    def __post_init__(self) -> None:
        check_ranges(self)
        if min(self.lengths, default=0) < 1:
            raise ConfigError("lengths: give one or more, each 1 or more")
        if not self.modes:
            raise ConfigError(f"modes: give one or more of {', '.join(MODES)}")
        for name in ("lengths", "modes"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}: one is there twice: leave it out")
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            raise ConfigError(f"modes: {unknown[0]!r} is none of {', '.join(MODES)}")


def make_arms(spec: str, config: FoldBenchConfig) -> tuple[dict[str, nn.Module], int]:
    """Return the models by arm, in eval mode and on the CPU, and the number of norms folded."""
    if not spec.startswith("hf:"):
        before = load_model(spec)
        if max(config.lengths) > before.config.block_size:
            raise ConfigError(
                f"{spec} reads {before.config.block_size} tokens at most: give smaller lengths"
            )
        return {"before": before, "after": gpt.to_rms(before)}, len(before.plan.letters)
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
    # Matrices keep their random values; gains and biases leave 1 and 0.
    matrices = [name for name, weight in before.named_parameters() if weight.dim() > 1]
    randomize(before, keep=matrices)
    report = fold.analyze(before, inputs(before, 2, 16, torch.float32))
    after, certificate = fold.fold(before, report, untie=True, insert=report.worth)
    if not certificate.ok:
        raise UserError(f"{spec}: {certificate}")
    arms = {"before": before, "after": after}
    swaps = {norm.swap for norm in report.analysis.norms if isinstance(norm.swap, Swap)}
    if certificate.folded < report.total:
        arms[SWAPPED] = copy.deepcopy(before)
        swap_and_insert(Plan(swaps=list(swaps)), arms[SWAPPED])
    return arms, certificate.folded


def sequence_lengths(model: nn.Module, config: FoldBenchConfig) -> tuple[int, ...]:
    """Return the lengths of --lengths; for images their own, patches and the class token."""
    if getattr(model, "main_input_name", "") != "pixel_values":
        return config.lengths
    patches = (model.config.image_size // model.config.patch_size) ** 2
    return (patches + 1,)


def inputs(
    model: nn.Module, batch: int, length: int, dtype: torch.dtype
) -> dict[str, Tensor] | tuple[Tensor]:
    """Return random inputs of the kind that the model takes.

    Token ids (batch, length), or images (batch, channels, height, width).
    """
    generator = torch.Generator().manual_seed(length)
    device = next(model.parameters()).device
    settings = model.config
    name = getattr(model, "main_input_name", "")  # empty: a model of ours
    if name == "pixel_values":
        shape = (batch, settings.num_channels, settings.image_size, settings.image_size)
        return {name: torch.randn(shape, generator=generator).to(device, dtype)}
    ids = torch.randint(settings.vocab_size, (batch, length), generator=generator).to(device)
    if not name:
        return (ids,)
    if hasattr(settings, "use_cache"):
        return {name: ids, "use_cache": False}
    return {name: ids}


def passes(model: nn.Module, x: dict[str, Tensor] | tuple[Tensor], mode: str) -> Callable[[], None]:
    """Return a function without arguments: one forward pass of `model` on x.

    It returns when the device is done.
    """
    forward = torch.compile(model, dynamic=False) if mode == "compiled" else model
    cuda = next(model.parameters()).is_cuda

    def call() -> None:
        if isinstance(x, tuple):
            forward(*x)
        else:
            forward(**x)

    if mode == "graph":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # The first allocations must not belong to the graph.
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        call = graph.replay

    @torch.inference_mode()
    def run() -> None:
        call()
        if cuda:
            torch.cuda.synchronize()

    return run


def clocked(arm: Callable[[], None], spent: list[float]) -> Callable[[], None]:
    """Return `arm` with a record of its CPU seconds, of all threads.

    On a busy CPU they say more than the wall clock.
    """

    def run() -> None:
        start = process_time()
        arm()
        spent.append(process_time() - start)

    return run


def sequential(arms: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Return the mean seconds of `count` passes of each arm, one arm after the other.

    Each is warmed up with as many passes.
    """
    means = {}
    for name, arm in arms.items():
        for _ in range(count):
            arm()
        start = perf_counter()
        for _ in range(count):
            arm()
        means[name] = (perf_counter() - start) / count
    return means


def measure(
    models: dict[str, nn.Module],
    config: FoldBenchConfig,
    mode: str,
    length: int,
    dtype: torch.dtype,
) -> dict:
    """Return one record: times, ratios with intervals, tokens/s."""
    # All arms and lengths share the code of one forward: dynamo would reach its recompile limit.
    torch.compiler.reset()
    with torch.no_grad():
        x = inputs(models["before"], config.batch, length, dtype)
        arms = {name: passes(model, x, mode) for name, model in models.items()}
    # warm-up: compilation, first allocations
    for arm in arms.values():
        arm()
        arm()
    arms["before again"] = arms["before"]
    spent = {name: [] for name in arms}
    timed = {name: clocked(arm, spent[name]) for name, arm in arms.items()}
    times = paired_times(timed, config.rounds)
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    pairs = {"before / after": ("before", "after"), "A/A": ("before", "before again")}
    if SWAPPED in arms:
        pairs[f"before / {SWAPPED}"] = ("before", SWAPPED)
    record = {
        "mode": mode,
        "length": length,
        "batch": config.batch,
        "rounds": config.rounds,
        "seconds": times,
        "processor_seconds": spent,
        "ms": {name: 1e3 * median for name, median in medians.items()},
        "tok_per_s": {name: config.batch * length / median for name, median in medians.items()},
    }
    for title, (slow, fast) in pairs.items():
        record[title] = {
            "mean": asdict(paired_ratio(times[slow], times[fast])),
            "median": median_ratio(times[slow], times[fast]),
            "processor": asdict(paired_ratio(spent[slow], spent[fast])),
        }
    if config.sequential and mode == "eager":
        means = sequential({name: arms[name] for name in models}, config.sequential)
        record["sequential"] = dict(means)
        for name, mean in means.items():
            if name == "before":
                continue
            entry = "saved_swapped" if name == SWAPPED else "saved"
            record["sequential"][entry] = 1 - mean / means["before"]
    return record


def show(record: dict) -> str:
    """Return one readable line about a record."""
    ratios = []
    for title in ("before / after", f"before / {SWAPPED}", "A/A"):
        if title not in record:
            continue
        ratio = record[title]
        mean = span(ratio["mean"])
        median = span(ratio["median"])
        processor = span(ratio["processor"])
        ratios.append(f"{title} {mean}, median {median}, processor time {processor}")
    paper = ""
    if "sequential" in record:
        paper = f"; one after the other, {record['sequential']['saved']:+.1%} saved"
    times = f"{record['ms']['before']:.2f} ms before, {record['ms']['after']:.2f} ms after"
    return f"{record['mode']}, length {record['length']}: {times}; {'; '.join(ratios)}{paper}"


def main(argv: list[str]) -> None:
    config, spec = parse_args(FoldBenchConfig, argv, __doc__, spec=True)
    if config.out:
        check_replaceable(Path(config.out), rb'{"spec": .*"folded"')
    device = find_device(config.device)
    if "graph" in config.modes and device.type != "cuda":
        raise ConfigError("modes=graph: CUDA graphs need a CUDA device: leave it out")
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
    for length in sequence_lengths(models["before"], config):
        for mode in config.modes:
            try:
                record = measure(models, config, mode, length, dtype)
            except torch.cuda.OutOfMemoryError:
                print(f"{mode}, length {length}: out of memory")
                continue
            except RuntimeError as error:
                if mode != "graph":
                    raise
                # Some of transformers' models (bloom) make a tensor on the host in each pass, which
                # no graph can hold.
                lines = str(error).splitlines() or [""]
                print(f"graph, length {length}: cannot be captured ({lines[0]})")
                continue
            print(show(record), flush=True)
            ratio = record["before / after"]["mean"]
            summary.append({"mode": mode, "length": record["length"], **ratio})
            if config.out:
                append_json(Path(config.out), about | record)
    print(json.dumps({"spec": spec, "folded": folded, "ratios": summary}))


if __name__ == "__main__":
    run_program(main)
