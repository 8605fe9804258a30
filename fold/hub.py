"""Models of transformers, of any architecture, folded in folders: read, given inputs, written, read
again.

    model = load_pretrained("facebook/opt-350m")     as transformers has it; a folder or a hub name
    save(folded, "out/opt-rms")                      what fold.fold made of it
    model = load("out/opt-rms")                      the same again, with its RMSNorms

`save` writes what save_pretrained writes, the weights under their old names, and fold.json, which
says what weights do not: which norms are RMSNorms now, and where centrings were inserted. Whoever
loads the folder with transformers alone gets LayerNorms on the centred weights: the same function,
as long as the weights are not trained on.
"""

import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError, UserError
from hf.hub import import_transformers, read_config, resolve_hub

from .certificate import Certificate
from .modules import Center, FoldedNorm, Insertion, Plan, Swap, swap_and_insert

FORMAT, RECIPE = 1, "fold.json"


def hub_folder(spec: str | Path) -> Path:
    """The folder that a path or a hub name (owner/name) stands for. Raises HFError."""
    return Path(spec) if Path(spec).exists() else resolve_hub(str(spec))


def load_pretrained(spec: str | Path) -> nn.Module:
    """The model of a folder or hub name, of the class that saved it and the type it is stored in;
    CPU, eval mode.

    Raises ConfigError where transformers has no such class or cannot load it, and where weights are
    missing, which it would fill with random numbers.
    """
    folder = hub_folder(spec)
    config = read_config(folder)
    transformers = import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = (config.get("architectures") or ["AutoModel"])[0]
    if not hasattr(transformers, name):
        raise ConfigError(
            f"{spec}: transformers has no {name}: is it a newer model, or one with code of its own?"
        )
    try:
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # whatever the class, safetensors, a quantiser and the disk raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{spec}: transformers cannot load it ({first}): check the folder"
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{spec}: {missing[0]} is not there ({len(missing)} are missing): are config.json and "
            "the weights of one model?"
        )
    return model.eval()


def save(
    model: nn.Module, folder: str | Path, certificate: Certificate | None = None, source: str = ""
) -> None:
    """Write a folded model of transformers: save_pretrained, fold.json, certificate.json; from the
    folder or hub name `source` also its tokenizer and the like. Raises UserError where that cannot
    be written.
    """
    folder = Path(folder)
    swaps = [module.swap for module in model.modules() if isinstance(module, FoldedNorm)]
    recipe = {
        "format": FORMAT,
        "class": type(model).__name__,
        "swaps": [asdict(swap) for swap in swaps],
        "insertions": [asdict(hook.insertion) for hook in _centers(model)],
    }
    try:
        model.save_pretrained(folder)
        for path in hub_folder(source).glob("*") if source else ():
            side = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(
                ".index.json"
            )
            if side and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
        (folder / RECIPE).write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        if certificate is not None:
            (folder / "certificate.json").write_text(certificate.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None


def load(spec: str | Path) -> nn.Module:
    """The model that `save` wrote, in eval mode.

    Raises ConfigError, and CheckpointError for a fold.json of another.
    """
    path = hub_folder(spec) / RECIPE
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
        swaps = [Swap(**swap) for swap in recipe["swaps"]]
        insertions = [
            Insertion(**{**found, "argument": found["argument"] and tuple(found["argument"])})
            for found in recipe["insertions"]
        ]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not there, so not a folded model: load it with transformers"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not of this program ({error}): convert the model again"
        ) from None
    if recipe.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {recipe.get('format')}, this program reads {FORMAT}: update it"
        )
    model = load_pretrained(spec)
    try:
        swap_and_insert(Plan(swaps=swaps, insertions=insertions), model)
    except AttributeError as error:  # no such module
        raise CheckpointError(
            f"{path}: of another model than the weights beside it ({error})"
        ) from None
    return model


def _centers(model: nn.Module) -> Iterator[Center]:
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if isinstance(hook, Center):
                yield hook


# ------------------------------------------------------------------------------------------- inputs


def example_inputs(model: nn.Module, seed: int) -> dict[str, Any]:
    """Random inputs of a transformers model, two examples, without a cache: token ids, pictures,
    films, sound, as its main input and its config ask. Raises ConfigError where they do not tell.
    """
    config, name, inputs = model.config, model.main_input_name, {}
    generator, stored = torch.Generator().manual_seed(seed), next(model.parameters()).dtype

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(stored)

    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    length = min(16, getattr(text, "max_position_embeddings", None) or 16)
    ids = torch.randint(getattr(text, "vocab_size", 2), (2, length), generator=generator)
    if name == "input_ids":
        inputs[name] = ids
    if name == "pixel_values" or vision is not config:
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
        inputs["pixel_values"] = noise(*frames, getattr(vision, "num_channels", 3), height, width)
    elif name == "input_values" and hasattr(config, "conv_stride"):  # a wave, for some 16 frames
        inputs[name] = noise(16 * int(torch.tensor(config.conv_stride).prod()) + 400)
    elif name == "input_values" and hasattr(config, "num_mel_bins"):
        inputs[name] = noise(config.max_length, config.num_mel_bins)
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        inputs[name] = noise(config.num_mel_bins, 2 * config.max_source_positions)
    if not inputs:
        raise ConfigError(
            f"{type(model).__name__} reads {name}: "
            "give --inputs=FILE, tensors named as its arguments"
        )
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = ids
    return inputs | no_cache(model)


def no_cache(model: nn.Module) -> dict[str, bool]:
    """A cache of keys and values is nothing that torch.export returns."""
    takes = "use_cache" in inspect.signature(model.forward).parameters or getattr(
        model.config, "use_cache", False
    )
    return {"use_cache": False} if takes else {}


def read_inputs(path: str, model: nn.Module) -> dict[str, Any]:
    """Tensors of a safetensors file, by the names of the model's arguments. Raises ConfigError."""
    try:
        from safetensors.torch import load_file

        found = load_file(path)
    except Exception as error:  # no package, no file, another file
        raise ConfigError(
            f"inputs={path}: cannot be read as safetensors ({error}): write it with save_file"
        ) from None
    return found | no_cache(model)
