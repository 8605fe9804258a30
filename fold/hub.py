"""Load, fold and save models of transformers, of any architecture.

    model = load_pretrained("facebook/opt-125m")   # from a folder or a hub name
    save(folded, "out/opt-rms")                    # a model that fold.fold returned
    model = load("out/opt-rms")                    # the same model, with its RMSNorms

`save` writes what save_pretrained writes, with the weights under their old names, and fold.json
where modules were changed. That file says what the weights do not: which norms are RMSNorms now,
and where centrings were inserted. transformers alone reads such a folder as a model with LayerNorms
on the centred weights. That is the same function, as long as the weights are not trained on. With
trust_remote_code=True its Auto classes read it with RMSNorms, by modeling_folded.py, which goes
along.
"""

import inspect
import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .certificate import Certificate, first_line, run, touched
from .modules import (
    EMBEDDED,
    Center,
    FoldedNorm,
    Insertion,
    Plan,
    Swap,
    set_check,
    swap_and_insert,
)
from .siblings import ConfigError, FoldError, UserError, hub, whole_folder

RECIPE = "fold.json"
CERTIFICATE = "certificate.json"
CODE = "modeling_folded"


def load_pretrained(spec: str | Path) -> nn.Module:
    """Load a model as transformers has it, on the CPU and in eval mode.

    Args:
        spec: a folder or a hub name.

    Returns:
        A model of the class that saved it, in the type it is stored in.

    Raises:
        ConfigError: transformers has no such class or cannot load the folder, or weights are
            missing, which transformers would fill with random numbers.
    """
    folder = hub.model_folder(spec)
    transformers = hub.import_transformers()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = str((hub.read_config(folder).get("architectures") or ["AutoModel"])[0])
    try:
        model, info = getattr(transformers, name).from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # the class, safetensors, a quantiser and the disk raise anything
        raise ConfigError(
            f"{spec}: transformers cannot load it ({first_line(error)}): check the folder; is a "
            "file cut off, is it a newer model, or one with code of its own?"
        ) from None
    # from_pretrained itself only warns.
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"{spec}: {missing[0]} is not there ({len(missing)} are missing): are config.json and "
            "the weights of one model?"
        )
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        # Its product has no float64. This one has, and can be exported.
        model.set_experts_implementation("batched_mm")
    return model.eval()


def save(
    model: nn.Module,
    folder: str | Path,
    certificate: Certificate | None = None,
    source: str = "",
    inputs: dict[str, Any] | None = None,
) -> None:
    """Save a folded model of transformers, load it again, and compare the two.

    The folder takes its name only if what is loaded is the same model to the bit: weights, norms
    and what it returns. A model that was trained since it was folded is saved with a warning.

    Args:
        model: a model of transformers that fold.fold or fold.fold_gains returned.
        folder: a new one. It gets what save_pretrained writes, and fold.json and modeling_folded.py
            where a module is not transformers'.
        certificate: is written as certificate.json, with that of the source if there is one.
            config.json says in `converted_from` what was converted to what, and if gains were ever
            folded, `weightless_norms` is the file's SHA-256.
        source: folder or hub name of the model before the fold; its tokenizer and other small files
            are copied.
        inputs: keyword arguments on which both are run; random ones by default.

    Raises:
        UserError: what is loaded is another model.
    """
    folder = Path(folder)
    if any(folder.glob("*")):
        raise ConfigError(f"{folder}: there is something in it: choose a new folder")
    with whole_folder(folder) as unfinished:
        _write(model, unfinished, certificate, source)
        difference = _difference_to(model, unfinished, inputs)
        if difference:
            raise UserError(
                f"{folder}: nothing written: loaded again, it would be another model "
                f"({difference}): please report it"
            )
    if not _norms_see_centred(model, inputs):
        warnings.warn(
            f"{folder}: what its RMSNorms read is not centred any more (was it trained?). hub.load "
            "reads it as it is, but transformers alone, with LayerNorms, as another function. To "
            "train a folded model, load it with trust_remote_code=True",
            stacklevel=2,
        )


def _write(model: nn.Module, folder: Path, certificate: Certificate | None, source: str) -> None:
    """Write all files of a folder, as `save` says."""
    norms = [module for module in model.modules() if isinstance(module, FoldedNorm)]
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    swaps = [norm.swap for norm in norms]
    insertions = [hook.insertion for hook in hooks if isinstance(hook, Center)]
    recipe = {
        "swaps": [asdict(swap) for swap in swaps],
        "insertions": [asdict(insertion) for insertion in insertions],
        "check": any(norm.check for norm in norms),
    }
    if _point_to_code(model, swaps, insertions):
        shutil.copyfile(Path(__file__).with_name(f"{CODE}.py"), folder / f"{CODE}.py")
    if certificate is not None:
        told = with_source(certificate, source)
        (folder / CERTIFICATE).write_bytes(told)
        model.config.converted_from = hub.converted_from(told)
        if certificate.to in ("weightless", "rotated") or hasattr(model.config, "weightless_norms"):
            model.config.weightless_norms = model.config.converted_from["certificate"]
    else:  # what they say is about a certificate that this folder does not have
        for name in ("converted_from", "weightless_norms"):
            vars(model.config).pop(name, None)
    model.save_pretrained(folder)
    companions = hub.companions(hub.model_folder(source)) if source else ()
    # A tokenizer and the like, where save_pretrained has not written the file itself
    for path in companions:
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    if any(recipe.values()):
        (folder / RECIPE).write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")


def _point_to_code(model: nn.Module, swaps: list[Swap], insertions: list[Insertion]) -> bool:
    """Say in a model's config how modeling_folded.py makes it, if that file can.

    It can where norms and centrings are along the last axis, in tensors of any rank, and the gains
    are called `weight`; and where transformers has an Auto class for the model. Else the config
    says nothing.
    """
    is_plain = all(
        (swap.axis, swap.groups, swap.gain, swap.ndim) == (-1, 1, "weight", None)
        and swap.bias in ("bias", None)
        for swap in swaps
    ) and all((insertion.axis, insertion.ndim) == (-1, None) for insertion in insertions)
    auto = hub.import_transformers().models.auto.modeling_auto
    config = model.config
    mappings = {
        each: getattr(cls, "_model_mapping", None)
        for each, cls in vars(auto).items()
        if isinstance(cls, type)
    }
    names = [
        each
        for each, mapping in mappings.items()
        if mapping is not None and mapping.get(type(config), None) is type(model)
    ]
    if not (swaps and is_plain and names):
        _forget_code(config)  # of a fold before this one
        return False
    config.folded = {
        "norms": {swap.path: swap.eps for swap in swaps},
        "centrings": {insertion.path: insertion.block for insertion in insertions},
        "is_row": False,
    }
    config.auto_map = {each: f"{CODE}.{type(model).__name__}" for each in names}
    return True


def _forget_code(config: Any) -> None:
    """Take out of a config what says how modeling_folded.py makes its model."""
    if vars(config).pop("folded", None):
        del config.auto_map


def with_source(certificate: Certificate, source: str) -> bytes:
    """Return the JSON of a certificate with that of the source, which may be converted, too."""
    told = json.loads(certificate.to_json()) | {"source": source}
    path = hub.model_folder(source) / CERTIFICATE if source else None
    if path is not None and path.is_file():
        told["source_certificate"] = json.loads(path.read_text(encoding="utf-8"))
    return (json.dumps(told, indent=1) + "\n").encode()


def _difference_to(model: nn.Module, folder: Path, inputs: dict[str, Any] | None) -> str:
    """Load a folder, and say what differs from the model that was saved there; "" for nothing."""
    try:
        again = load_as_saved(folder)
    except UserError as error:
        return str(error)
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    again.to(device)
    for kind in ("attn", "experts"):  # each implementation rounds in its own way
        chosen = getattr(model.config, f"_{kind}_implementation", None)
        if chosen is not None:
            getattr(again, f"set_{kind}_implementation")(chosen)
    names = touched(model, again)
    if names:
        return f"{names[0]} differs"
    was_training = model.training
    inputs = example_inputs(model, seed=0) if inputs is None else inputs
    inputs = tree_map_only(Tensor, lambda x: x.to(device), inputs)
    outputs = [tree_leaves(run(one.eval(), inputs, widen=False)) for one in (model, again)]
    model.train(was_training)
    pairs = zip(*outputs, strict=True)
    same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    return "" if same else "its weights are the same, what it returns is not"


def _norms_see_centred(model: nn.Module, inputs: dict[str, Any] | None) -> bool:
    """Run a folded model, and tell whether LayerNorms would compute what its RMSNorms do."""
    checks = [module.check for module in model.modules() if isinstance(module, FoldedNorm)]
    set_check(model, True)
    try:
        run(model, example_inputs(model, seed=0) if inputs is None else inputs, widen=False)
    except FoldError:
        return False
    finally:
        set_check(model, any(checks))  # all have the same
    return True


def load_as_saved(spec: str | Path) -> nn.Module:
    """Load a model of transformers, with its RMSNorms where it is one that was folded."""
    is_folded = (hub.model_folder(spec) / RECIPE).exists()
    return load(spec) if is_folded else load_pretrained(spec)


def load(spec: str | Path, check: bool | None = None) -> nn.Module:
    """Load a model that `save` wrote, in eval mode.

    Args:
        spec: a folder or a hub name.
        check: each of the RMSNorms checks that its input is centred, as in fold.fold; None for what
            the saved model did.

    Raises:
        HFError: fold.json is missing, or no JSON.
        ConfigError: fold.json is damaged, or transformers cannot load the folder.
    """
    recipe = hub.read_config(hub.model_folder(spec), RECIPE)
    try:
        swaps = [Swap(**swap) for swap in recipe["swaps"]]
        insertions = [Insertion(**found) for found in recipe["insertions"]]
        was_checked = recipe.get("check", False)  # older ones lack it
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{spec}: {RECIPE} is damaged, or of another version ({error}): convert the model again"
        ) from None
    model = load_pretrained(spec)
    # `save` writes it again with the code. Without the code save_pretrained could not be read.
    _forget_code(model.config)
    swap_and_insert(Plan(swaps=swaps, insertions=insertions), model)
    set_check(model, was_checked if check is None else check)
    return model


# ------------------------------------------------------------------------------------------- inputs


def example_inputs(model: nn.Module, seed: int) -> dict[str, Any]:
    """Draw random inputs of a transformers model: two examples, without a cache.

    Its main input and its config say which they are: token ids or images.

    Returns:
        Keyword arguments; floats in the type of the model's weights.

    Raises:
        ConfigError: main input and config do not say what is needed.
    """
    config = model.config
    name = model.main_input_name
    generator = torch.Generator().manual_seed(seed)
    inputs = {}

    text = config.get_text_config()
    vision = getattr(config, "vision_config", config)
    length = min(16, getattr(text, "max_position_embeddings", None) or 16)
    ids = torch.randint(getattr(text, "vocab_size", 2), (2, length), generator=generator)
    if name == "input_ids":
        inputs[name] = ids
    if name == "pixel_values" or vision is not config:
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        pixels = torch.randn(2, channels, height, width, generator=generator)
        inputs["pixel_values"] = pixels.to(next(model.parameters()).dtype)
    if not inputs:
        raise ConfigError(
            f"{type(model).__name__} reads {name}: "
            "give --inputs=FILE, tensors named as its arguments"
        )
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = ids
    return inputs | no_cache(model)


def no_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that switches the key-value cache off.

    torch.export cannot return such a cache.
    """
    parameters = forward_parameters(model)
    # A forward may take it with what it hands on.
    takes_more = any(one.kind == one.VAR_KEYWORD for one in parameters)
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    has_cache = getattr(config, "use_cache", False)
    is_taken = any(one.name == "use_cache" for one in parameters) or (takes_more and has_cache)
    return {"use_cache": False} if is_taken else {}


def forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a model's forward; none where they are not known."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except ValueError:  # of a TorchScript module
        return []


def takes_embeddings(model: nn.Module) -> bool:
    """Tell whether a model takes embeddings in the place of token ids."""
    return any(parameter.name in EMBEDDED for parameter in forward_parameters(model))
