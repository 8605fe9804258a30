"""Norms in a file of the user's own: run it, and add its norm types to the registry.

    python train.py config/demo.py --norm_file=my_norm.py --norm_type=MeanAbs

Every subclass of Norm in the file, but those whose name begins with an underscore, becomes a norm
type of that name, used at all places as RMSNorm is in `rms`, and a letter of norm plans. The letter
is the class's `letter`, else one of its name that is free. A dict TYPES in the file, name ->
NormType, adds norm types with a layout, a recipe and keys of their own.

The docstring of norms.Norm says what a norm may use. The file runs only because whoever typed the
command named it (common/norm_file.py), and it is read once. Its folder is not on sys.path.
"""

import contextlib
import copy
import linecache
import re
import string
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, UserError
from common.norm_file import PIN, NormFile, default_norm_file, split_norm_file
from norm_plan import NORMS, NormPlan
from norm_types import COMMON, NONE, NORM_TYPES, NormType, Recipe, uniform
from norms import Norm, inverse_rms

# Beside the norm's own letter: norms of the house that a plan may have at other places
OTHERS = "RL"
# Letters of the house that may be norms of outputs and of the embeddings, too. The others need what
# only the sum at a place has.
ANYWHERE = "RLGV" + NONE


def take_norm_file(argv: list[str]) -> list[str]:
    """Run the norm file that a command line, or else NANONORM_NORMS, names, and add its norms.

    Args:
        argv: the words of the command line.

    Returns:
        The words without --norm_file=FILE and --norm_sha256=DIGEST.

    Raises:
        UserError: the file cannot be read, has another digest, fails, or has no norm.
    """
    argv, file = split_norm_file(argv, default_norm_file())
    if file is not None:
        add_norms(file)
    return argv


def add_norms(file: NormFile) -> None:
    """Run a norm file, unless it has run, and add its rows and letters. Raises UserError."""
    if any(row.source and row.source.sha256 == file.sha256 for row in NORM_TYPES.values()):
        return
    module = run_file(file)
    classes = classes_of(module)
    letters = letters_of(classes, file)
    rows = {kind.__name__: default_row(letter) for letter, kind in letters.items()}
    rows |= rows_of(module, file)
    if not rows:
        raise ConfigError(f"norm_file={file.path}: no subclass of norms.Norm is in it: write one")
    known_keys = {key for row in NORM_TYPES.values() for key in row.keys}
    for name, row in rows.items():
        check_row(name, row, letters, known_keys, file)
    # Only now, so that a file that is refused has added nothing.
    NORMS.update((letter, builder(kind, file)) for letter, kind in letters.items())
    NORM_TYPES.update((name, of_file(name, row, file)) for name, row in rows.items())


def of_file(name: str, row: NormType, file: NormFile) -> NormType:
    """Return a row with its source. Errors of its functions are lines that name the file."""
    recipe = row.recipe
    if recipe is not COMMON:
        told = telling(recipe.init_factors, f"the init_factors of norm type {name!r}", file)
        recipe = replace(recipe, init_factors=told)
    return replace(
        row,
        default_plan=telling(row.default_plan, f"the plan of norm type {name!r}", file),
        residual_weight=telling(
            row.residual_weight, f"the residual_weight of norm type {name!r}", file
        ),
        recipe=recipe,
        keys=(*row.keys, PIN),
        source=file,
    )


def telling(function: Callable, what: str, file: NormFile) -> Callable:
    """Return a function of a norm file that raises ConfigError for any error in it."""

    def call(*args):
        with told_in_a_line(file, f"{what}: "):
            return function(*args)

    return call


def run_file(file: NormFile) -> ModuleType:
    """Run the bytes of a norm file as a module of their own. Raises ConfigError with the line."""
    module = ModuleType(f"norm_file_{file.sha256[:16]}")
    module.__file__ = file.path
    # torch.compile looks a function's module up by its name.
    sys.modules[module.__name__] = module
    # A traceback shows the lines that run, also where the file has changed since.
    text = file.content.decode(errors="replace")
    linecache.cache[file.path] = (len(text), None, text.splitlines(keepends=True), file.path)
    with told_in_a_line(file):
        exec(compile(file.content, file.path, "exec", dont_inherit=True), vars(module))
    return module


@contextlib.contextmanager
def told_in_a_line(
    file: NormFile, what: str = "", remedy: str = "correct the norm file"
) -> Iterator[None]:
    """Raise ConfigError, with the line of the file, for any exception of its code."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{place_of(error, file)}: {what}{type(error).__name__}: {error}: {remedy}"
        ) from None


def place_of(error: Exception, file: NormFile) -> str:
    """Return the path of a norm file and its last line that an exception went through, if any."""
    if isinstance(error, SyntaxError):
        line = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == file.path), None)
    return file.path if line is None else f"{file.path}:{line}"


def classes_of(module: ModuleType) -> list[type[Norm]]:
    """Return the norms that a module defines, in its order; imported ones are not its own."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Norm)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def rows_of(module: ModuleType, file: NormFile) -> dict[str, NormType]:
    """Return TYPES, which not every file has. Raises ConfigError if rows stand elsewhere."""
    if not hasattr(module, "TYPES"):
        for name, value in vars(module).items():
            rows = list(value.values()) if isinstance(value, dict) else [value]
            is_of_house = value is NORM_TYPES or name.startswith("_")
            if not is_of_house and any(isinstance(row, NormType) for row in rows):
                raise ConfigError(
                    f"norm_file={file.path}: {name} is not read: call it TYPES, a dict: name -> "
                    "NormType"
                )
        return {}
    if not isinstance(module.TYPES, dict):
        raise ConfigError(f"norm_file={file.path}: TYPES must be a dict: name -> NormType")
    return module.TYPES


def letters_of(classes: Iterable[type[Norm]], file: NormFile) -> dict[str, type[Norm]]:
    """Give each norm its letter: the class's own, else one of its name or the alphabet.

    They follow from the file alone, because a saved plan is written in them.
    """
    letters: dict[str, type[Norm]] = {}
    # Those that name their letter first. A subclass of one of them does not name it again.
    own_letters = {kind: vars(kind).get("letter", "") for kind in classes}
    for kind in sorted(classes, key=lambda kind: not own_letters[kind]):
        free = [one for one in string.ascii_letters if one not in NORMS and one not in letters]
        own = own_letters[kind]
        if own and own not in free:
            raise ConfigError(
                f"norm_file={file.path}: letter={own!r} of {kind.__name__} is taken, or no letter: "
                f"free ones are {''.join(free)}"
            )
        of_name = (one for char in kind.__name__ for one in (char.upper(), char.lower()))
        letters[own or next(one for one in [*of_name, *free] if one in free)] = kind
    return letters


def default_row(letter: str) -> NormType:
    """Return the row of a norm that sits where `rms` has its norms."""
    letters = letter + OTHERS
    return NormType(uniform(letter), letters + NONE, outputs=letters, embeddings=letters)


def check_row(
    name: str,
    row: NormType,
    letters: dict[str, type[Norm]],
    known_keys: set[str],
    file: NormFile,
) -> None:
    """Raise ConfigError for a row of TYPES, or a name of a class, that cannot be a norm type."""
    where = f"norm_file={file.path}: norm type {name!r}"
    if name in NORM_TYPES:
        raise ConfigError(f"{where} is there already: give it another name")
    # The name of an arm is part of names of folders.
    if not re.fullmatch(r"[^\W\d]\w*", name):
        raise ConfigError(f"{where}: a name is made of letters, digits and _: rename it")
    if not isinstance(row, NormType):
        raise ConfigError(
            f"{where} is no norm_types.NormType: write TYPES = {{name: NormType(...)}}"
        )
    if not callable(row.default_plan):
        raise ConfigError(
            f"{where}: its plan must be a function of (config, n_layer) that returns text"
        )
    if not callable(row.residual_weight):
        raise ConfigError(
            f"{where}: its residual_weight must be a function of n_layer, such as "
            "lambda n_layer: 2.0"
        )
    if not isinstance(row.recipe, Recipe) or not callable(row.recipe.init_factors):
        raise ConfigError(
            f"{where}: its recipe must be a norm_types.Recipe, and the init_factors of that a "
            "function of n_layer that returns {part: factor}"
        )
    if isinstance(row.keys, str):
        raise ConfigError(f"{where}: its keys must be a tuple: ({row.keys!r},)")
    if wrong := sorted(set(row.outputs + row.embeddings) - set(ANYWHERE) - letters.keys()):
        raise ConfigError(
            f"{where} has {', '.join(wrong)} as a norm of outputs or of the embeddings: these are "
            f"norms of the file, or one of {', '.join(ANYWHERE)}"
        )
    used = set(row.allowed_letters + row.outputs + row.embeddings)
    if unknown := sorted(used - NORMS.keys() - letters.keys()):
        raise ConfigError(f"{where} has letters of no norm, {''.join(unknown)}: remove them")
    if unknown := sorted(set(row.keys) - known_keys):
        raise ConfigError(
            f"{where} reads {', '.join(unknown)}, and can read {', '.join(sorted(known_keys))}"
        )


def builder(kind: type[Norm], file: NormFile) -> Callable[[NormPlan, int], Norm]:
    """Return the function of plan and position that makes a norm, as NORMS has them."""

    def build(plan: NormPlan, number: int) -> Norm:
        # What a norm draws is the same on every rank and in every run: nothing else seeds it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            what = f"{kind.__name__} cannot be made: "
            with told_in_a_line(file, what, "its __init__ takes what Norm's takes"):
                norm = kind.of_plan(plan, number)
            check_forward(norm, file)
        return norm

    return build


def check_forward(norm: Norm, file: NormFile) -> None:
    """Call a copy of a norm once. Raises ConfigError for what would end in a traceback later."""
    where = f"norm_file={file.path}: {type(norm).__name__}"
    for name, parameter in norm.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"{where}: {name} has the shape (): make it (1,), as FSDP asks")
    h = torch.randn(2, 3, norm.channels)
    if type(h) is not Tensor or h.is_meta:
        return  # shapes alone are asked for
    probe = copy.deepcopy(norm)
    what = f"{type(norm).__name__}.forward fails: "
    with torch.enable_grad(), told_in_a_line(file, what, "it takes (h, inv_rms)"):
        result = probe(h, inverse_rms(h, norm.eps))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"{where}.forward must return two things: (y, inv_rms), or (y, None)")
    y, inv_rms = result
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (h.shape, h.dtype):
        raise ConfigError(
            f"{where}.forward returns {described(y)} as y for h of {described(h)}: y has the shape "
            "and type of h"
        )
    if inv_rms is not None and getattr(inv_rms, "shape", None) != (2, 3, 1):
        raise ConfigError(
            f"{where}.forward hands on {described(inv_rms)} for h of {described(h)}: hand on None, "
            "or a statistic (B, T, 1)"
        )
    unused = unused_parameters(probe, [out for out in result if out is not None])
    if unused:
        raise ConfigError(
            f"{where}.forward does not use {', '.join(unused)}, which gets no gradient: use it "
            "(self.affine has the gain and the bias), do not make it (affine=False), or keep it by "
            "taper.keep_in_graph"
        )


def described(value: Any) -> str:
    """Return shape and type of a tensor; of anything else what it is."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def unused_parameters(norm: Norm, outputs: list[Tensor]) -> list[str]:
    """Name the parameters of a norm that its outputs do not depend on."""
    named = {name: one for name, one in norm.named_parameters() if one.requires_grad}
    roots = [out for out in outputs if out.requires_grad]
    if not named or not roots:
        return list(named)
    zeros = [torch.zeros_like(root) for root in roots]
    found = torch.autograd.grad(roots, list(named.values()), zeros, allow_unused=True)
    return [name for name, gradient in zip(named, found) if gradient is None]
