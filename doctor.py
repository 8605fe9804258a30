"""Say what norms a model has, what each computes, and how.

    python doctor.py Qwen/Qwen3-0.6B
        a line for each kind of norm: formula, eps and its place, gain, order of rounding, readers
    python doctor.py out/demo --text=book.txt
        and the stream that each norm sees
    python doctor.py FOLDER --against=ours:FOLDER
        the same weights in two forms: which norm differs first, and why
    python doctor.py my_model.py:make
        a model of your own: make() returns it and example inputs, a tuple or a dict
    python doctor.py out/mine --norm_file=my_norm.py
        a model whose norm is in a file

The first argument is the model: a run folder, a checkpoint, `random:` and a published shape, a
Hugging Face folder or hub name, as transformers computes it (ours:NAME is the same as our GPT
computes it), or FILE.py:FUNCTION, which is run.

Norms are found by what they do, not by their names, in modules and written out in a forward. What
is said comes from calls of each: a formula is named only if it gives the norm's outputs at five
sizes and with single channels scaled. What cannot be probed is "not known". docs/conventions.md
explains the words, and lists what the models of transformers do.

--against pairs the norms of two models by width and gain values, else by the order in which they
run, and calls each pair on the same input, the one that the first model's norm received. Both
models run on the first one's example. The report names the first norm that differs and why: offset
(w or 1 + w), eps, its place, rounding, statistic, a missing norm, a permuted gain; or another
input, where all norms before it agree; and by how much the outputs of the models differ. Where it
can, it replaces that one thing and says whether the models agree then.

--text measures what each norm is given on the text: RMS, the largest magnitude beside the range of
float16, the share of the squares that is in the mean and in the first token, and the kurtosis.

With --json the last line of output is JSON.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from common.environment import find_device
from common.errors import ConfigError, failure_line, run_program
from common.hub import model_folder
from configurator import key, parse_args
from fold import norms_of
from fold.alignment import compare_found
from fold.certificate import Inputs
from fold.hub import RECIPE, example_inputs, forward_parameters, load, load_pretrained, no_cache
from fold.streams import streams
from load import load_model
from model import GPT
from norm_files import take_norm_file
from posthoc.coupling import text_windows
from training.checkpoint import BEST, LAST

OURS = "ours:"
TOKENS = 16  # of the example that a GPT is run on


@dataclass(frozen=True)
class DoctorConfig:
    """Keys of doctor.py."""

    against: str = key("", "another model, of the same weights, to compare the norms with")
    text: str = key("", "files of text, with commas between: measure what the norms are given")
    windows: int = key(16, "text: windows of it", least=2)
    length: int = key(256, "text: tokens of a window, at most the model's context", least=2)
    seed: int = key(0, "of the random example inputs", least=0, most=(1 << 32) - 1)
    device: str = key(
        "cpu", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )
    json: bool = key(False, "print the result as a line of JSON at the end")


# ------------------------------------------------------------------------------------------- models


def load_any(spec: str, seed: int) -> tuple[nn.Module, Inputs]:
    """Load a model and draw example inputs for it, on the CPU; in eval mode."""
    file, colon, function = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return made_by(file, function)
    if not spec.startswith(OURS) and is_of_transformers(spec):
        has_recipe = (model_folder(spec) / RECIPE).exists()
        model = (load if has_recipe else load_pretrained)(spec)
        return model, example_inputs(model, seed)
    model = load_model(spec.removeprefix(OURS))
    return model, (random_tokens(model, seed),)


def is_of_transformers(spec: str) -> bool:
    """Is a model a Hugging Face folder or a hub name, and not a run's folder?"""
    if spec.startswith("random:"):
        return False
    folder = model_folder(spec)
    is_run = (folder / BEST).exists() or (folder / LAST).exists()
    return (folder / "config.json").exists() and not is_run


def random_tokens(model: GPT, seed: int) -> torch.Tensor:
    """Draw token ids (2, T)."""
    shape = (2, min(model.config.block_size, TOKENS))
    return torch.randint(model.n_vocab, shape, generator=torch.Generator().manual_seed(seed))


def made_by(file: str, function: str) -> tuple[nn.Module, Inputs]:
    """Run a Python file that the user names, and call a function of it for a model and inputs."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: no such file: check the path")
    module_spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        made = getattr(module, function)()
    except Exception as error:  # the user's own code may raise anything
        raise ConfigError(
            f"{file}:{function} fails ({failure_line(error)}): it must return a model and example "
            "inputs"
        ) from None
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module) or not isinstance(made[1], tuple | dict):
        raise ConfigError(
            f"{file}:{function} must return (model, inputs): an nn.Module, and a tuple of "
            "positional or a dict of keyword arguments"
        )
    model, inputs = made
    with suppress(NotImplementedError):  # an exported program stays in the mode of its export
        model.eval()
    return model, without_cache(model, inputs)


def on_device(model: nn.Module, inputs: Inputs, device: torch.device) -> tuple[nn.Module, Inputs]:
    """Move a model and its inputs to a device."""

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return model.to(device), torch.utils._pytree.tree_map(moved, inputs)


def named(model: nn.Module, inputs: Inputs) -> dict[int | str, Any]:
    """Name the arguments of a call, as the signature of the forward does; by position else."""
    if isinstance(inputs, dict):
        return dict(inputs)
    parameters = forward_parameters(model)
    names = [one.name for one in parameters if one.kind == one.POSITIONAL_OR_KEYWORD]
    return {names[i] if i < len(names) else i: value for i, value in enumerate(inputs)}


def without_cache(model: nn.Module, inputs: Inputs) -> Inputs:
    """Switch the key-value cache of a model off, unless the inputs say what to do with it."""
    arguments = no_cache(model)
    given = named(model, inputs)
    if (
        not arguments
        or arguments.keys() & given.keys()
        or not all(isinstance(n, str) for n in given)
    ):
        return inputs
    return given | arguments


class SameInputs(NamedTuple):
    """The inputs of one model in the form in which another takes them.

    Attributes:
        inputs: for the other model.
        why: why its own example stands instead; "" where it does not.
        left_out: the arguments of the first model for which the other's example has no place.
    """

    inputs: Inputs
    why: str
    left_out: list[str]


def same_inputs(model: nn.Module, inputs: Inputs, other: nn.Module, own: Inputs) -> SameInputs:
    """Bring the inputs of one model into the form of another's example.

    Tensors go to the arguments of the same name, and what is left in the order in which it stands.
    Numbers, flags and what holds several tensors go by name alone.
    """
    given, wanted = named(model, inputs), named(other, own)
    new = {name: given[name] for name in wanted if name in given}
    left = [name for name in given if name not in new and isinstance(given[name], torch.Tensor)]
    for name, like in wanted.items():
        if isinstance(like, torch.Tensor) and name not in new and left:
            new[name] = given[left.pop(0)]
    for name, like in wanted.items():
        value = new.get(name)
        if not isinstance(like, torch.Tensor):
            continue
        if not isinstance(value, torch.Tensor) or (
            value.is_floating_point() != like.is_floating_point()
        ):
            return SameInputs(
                own,
                f"{said_argument(name)} of the other model is not in the first model's example: "
                "let both have the same tensors, in the same order or under the same names",
                [],
            )
        new[name] = value.to(like.dtype)
    switched_off = no_cache(model)
    left += [
        name
        for name, value in given.items()
        if not isinstance(value, torch.Tensor | None)
        and name not in wanted
        and name not in switched_off
    ]
    left_out = [said_argument(name) for name in given if name in left]
    if isinstance(own, dict):
        return SameInputs(own | new, "", left_out)
    return SameInputs(tuple(new.get(name, value) for name, value in wanted.items()), "", left_out)


def said_argument(name: int | str) -> str:
    """Name an argument of a call, by its position where it has no name."""
    return f"argument {name}" if isinstance(name, int) else name


def text_batches(
    spec: str, model: nn.Module, config: DoctorConfig, device: torch.device
) -> Iterator[Inputs]:
    """Yield the windows of the text as the model takes them, one at a time."""
    is_ours = isinstance(model, GPT)
    if not is_ours and getattr(model, "main_input_name", "") != "input_ids":
        raise ConfigError("text is for models with a tokenizer: leave it out")
    if is_ours:
        meta, context = model.meta, model.config.block_size
    else:
        meta = {"tokenizer": "hf", "path": str(model_folder(spec))}
        text_config = model.config.get_text_config()
        context = getattr(text_config, "max_position_embeddings", None) or config.length
    windows = text_windows(config.text, meta, min(config.length, context), config.windows)
    for window in windows.to(device):
        ids = window[None]  # (1, T)
        yield (ids,) if is_ours else {"input_ids": ids} | no_cache(model)


# ------------------------------------------------------------------------------------------ program


def main(argv: list[str]) -> None:
    config, spec = parse_args(DoctorConfig, take_norm_file(argv), __doc__, spec=True)
    device = find_device(config.device)
    model, inputs = on_device(*load_any(spec, config.seed), device)
    found = norms_of(model, inputs)
    told = {"spec": spec, **found.record()}
    if config.against:
        other, others = on_device(*load_any(config.against, config.seed), device)
        same = same_inputs(model, inputs, other, others)
        theirs = norms_of(other, same.inputs)
        comparison = compare_found(found, theirs, model, other, inputs, same.inputs, same.why)
        print(f"{spec} against {config.against}:", *comparison.verdict(), sep="\n")
        if same.left_out:
            print(f"the other model's example has no place for {', '.join(same.left_out)}")
        print(*comparison.listed(), sep="\n")
        print(f"\nnorms of {config.against}:", theirs, f"\nnorms of {spec}:", sep="\n")
        told |= {"against": config.against, "left_out": same.left_out, **comparison.record()}
    print(found)
    if config.text:
        measured = streams(model, found, text_batches(spec, model, config, device))
        print("", *measured, sep="\n")
        told["streams"] = [asdict(stream) for stream in measured]
    if config.json:
        print(json.dumps(told))


if __name__ == "__main__":
    run_program(main)
