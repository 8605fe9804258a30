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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import ConfigError, UserError
from common.norm_file import PIN, NormFile, default_norm_file, split_norm_file
from norm_plan import NORMS, QK_NORMS, NormPlan
from norm_types import COMMON, NONE, NORM_TYPES, NormType, Recipe, uniform
from norms import Norm, inverse_rms
from taper import StepMean

# Beside the norm's own letter: norms of the house that a plan may have at other places
OTHERS = "RL"
# Letters of the house that may be norms of outputs and of the embeddings, too. The others need what
# only the sum at a place has.
ANYWHERE = "RLGV" + NONE
STEPS = 10  # max_iters of a trial of a norm
GAIN_KINDS = NormType.gain_kinds


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
        factors = telling(recipe.init_factors, f"the init_factors of norm type {name!r}", file)
        alpha = telling(recipe.point_alpha, f"the point_alpha of norm type {name!r}", file)
        recipe = replace(recipe, init_factors=factors, point_alpha=alpha)
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
def told_in_a_line(file: NormFile, what: str = "", arguments: str = "") -> Iterator[None]:
    """Raise ConfigError, with the line of the file, for any exception of its code.

    Args:
        what: failed.
        arguments: says what the function is called with, which may be why.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        remedy = (
            arguments if arguments and isinstance(error, TypeError) else "correct the norm file"
        )
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
    for field in ("allowed_letters", "outputs", "embeddings"):
        if not isinstance(getattr(row, field), str):
            raise ConfigError(f"{where}: its {field} must be letters in one text, such as 'RL'")
    if not isinstance(row.gain_kinds, tuple) or not {*row.gain_kinds} <= {*GAIN_KINDS}:
        raise ConfigError(f"{where}: its gain_kinds must be a tuple of {', '.join(GAIN_KINDS)}")
    if row.qk_norm not in QK_NORMS:
        raise ConfigError(f"{where}: its qk_norm must be one of {', '.join(QK_NORMS)}")
    if not callable(row.default_plan):
        raise ConfigError(
            f"{where}: its plan must be a function of (config, n_layer) that returns text"
        )
    if not callable(row.residual_weight):
        raise ConfigError(
            f"{where}: its residual_weight must be a function of n_layer, such as "
            "lambda n_layer: 2.0"
        )
    recipe = row.recipe
    is_recipe = isinstance(recipe, Recipe)
    if not is_recipe or not callable(recipe.init_factors) or not callable(recipe.point_alpha):
        raise ConfigError(
            f"{where}: its recipe must be a norm_types.Recipe, the init_factors of that a function "
            "of n_layer that returns {part: factor}, and its point_alpha one of the channels"
        )
    linear = row.residual_linear
    if not isinstance(linear, type) or not issubclass(linear, nn.Linear):
        raise ConfigError(f"{where}: its residual_linear must be a subclass of torch.nn.Linear")
    check_embed(name, row, file)
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


def check_embed(name: str, row: NormType, file: NormFile) -> None:
    """Call a row's `embed`, if it has one. Raises ConfigError for an error in it."""
    if row.embed is None:
        return
    what = f"the embed of norm type {name!r}"
    x = torch.zeros(2, 3, 16)
    with told_in_a_line(file, f"{what}: ", "it takes x (B, T, C)"):
        y = row.embed(x)
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"norm_file={file.path}: {what} returns {described(y)} for x of {described(x)}: it "
            "returns what has the shape and type of x"
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
            if not isinstance(norm, Norm):
                raise ConfigError(
                    f"norm_file={file.path}: of_plan of {kind.__name__} must return a norm, and "
                    f"returned {described(norm)}"
                )
            check_norm(norm, file)
        norm.is_of_file = True
        return norm

    return build


# ---------------------------------------------------------------------------------- is it a norm?
# Each check is of a mistake that would end in a traceback later, or that nobody would ever see.


def check_norm(norm: Norm, file: NormFile) -> None:
    """Call copies of a norm. Raises ConfigError for what it may not do."""
    trial = Trial(norm, file)
    for name, parameter in norm.named_parameters():
        if parameter.dim() == 0:
            trial.refuse(f": {name} has the shape (): make it (1,), as FSDP asks")
    h = torch.randn(2, 3, norm.channels)
    if type(h) is not Tensor or h.is_meta:
        return  # shapes alone are asked for
    with torch.enable_grad():
        y = check_outputs(trial, h)
        check_gain(trial, h, y)
        check_state(trial, h)


class Trial:
    """Copies of a norm, and how they are called. Errors of its code are lines, with the file."""

    def __init__(self, norm: Norm, file: NormFile):
        self.norm = norm
        self.file = file

    def copy(self) -> Norm:
        what = ": a copy fails; forward computes what follows from parameters, not __init__: "
        with self.told(what):
            return copy.deepcopy(self.norm)

    def call(self, norm: Norm, h: Tensor, seed: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return what forward returns, of the random draws of a seed."""
        torch.default_generator.manual_seed(seed)
        with self.told(".forward fails: ", "it takes (h, inv_rms)"):
            return norm(h, inverse_rms(h.detach(), norm.eps))

    def set_step(self, norm: Norm, step: int) -> None:
        with self.told(".set_step fails: ", "it takes (step, max_iters)"), torch.no_grad():
            norm.set_step(step, STEPS)

    def told(self, what: str, arguments: str = "") -> contextlib.AbstractContextManager[None]:
        return told_in_a_line(self.file, f"{type(self.norm).__name__}{what}", arguments)

    def refuse(self, message: str) -> NoReturn:
        raise ConfigError(f"norm_file={self.file.path}: {type(self.norm).__name__}{message}")


def check_outputs(trial: Trial, h: Tensor) -> Tensor:
    """Check what forward returns, and which tensors get gradients. Returns y."""
    norm = trial.copy()
    given = h.clone().requires_grad_()
    read = given.clone()  # no leaf, which nothing may change in place
    result = trial.call(norm, read)
    if not isinstance(result, tuple) or len(result) != 2:
        trial.refuse(".forward must return two things: (y, inv_rms), or (y, None)")
    y, inv_rms = result
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (h.shape, h.dtype):
        trial.refuse(
            f".forward returns {described(y)} as y for h of {described(h)}: y has the shape and "
            "type of h"
        )
    if inv_rms is not None and getattr(inv_rms, "shape", None) != (2, 3, 1):
        trial.refuse(
            f".forward hands on {described(inv_rms)} for h of {described(h)}: hand on None, or a "
            "statistic (B, T, 1)"
        )
    if not y.isfinite().all():
        trial.refuse(".forward returns what is not finite for an h that is: correct the norm file")
    if not torch.equal(read, h):
        trial.refuse(".forward changes h, which others read: compute a new tensor")
    check_gradients(trial, norm, given, [out for out in result if out is not None])
    return y.detach()


def check_gradients(trial: Trial, norm: Norm, h: Tensor, outputs: list[Tensor]) -> None:
    """Check that h and every parameter get a gradient, and nothing that training does not know."""
    if strangers(norm, h, outputs):
        trial.refuse(
            ": training does not know a parameter that forward uses: make it in __init__, as an "
            "attribute, or in a ParameterList"
        )
    for name, buffer in norm.named_buffers():
        if buffer.requires_grad:
            trial.refuse(f".forward puts a graph into the buffer {name}: detach what it keeps")
    unused = unused_parameters(norm, outputs)
    if unused:
        trial.refuse(
            f".forward does not use {', '.join(unused)}, which gets no gradient: use it "
            "(self.affine has the gain and the bias), do not make it (affine=False), or keep it by "
            "taper.keep_in_graph"
        )
    y = outputs[0]
    if not y.requires_grad or torch.autograd.grad(y.sum(), h, allow_unused=True)[0] is None:
        trial.refuse(".forward sends no gradient to h: do not detach h itself")


def check_gain(trial: Trial, h: Tensor, y: Tensor) -> None:
    """Check that y depends on the gain, however it is stored (offset, depth)."""
    plain = trial.copy()
    if plain.weight is None or plain.has_plain_gain:
        return
    plain.weight = nn.Parameter(plain.exact_gain.float())
    plain.gain_offset = 0.0
    plain.depth = None
    if not torch.allclose(trial.call(plain, h)[0], y, rtol=1e-3, atol=1e-5):
        trial.refuse(
            ".forward uses self.weight where the gain is not the weight itself (norm_gain, depth): "
            "use self.gain or self.affine"
        )


def check_state(trial: Trial, h: Tensor) -> None:
    """Check that a resumed run goes on as this one does, and that evaluation changes nothing."""
    if dist.is_available() and dist.is_initialized():
        return  # set_step may ask all ranks, and not all of them may be here
    norm = trial.copy()
    trial.set_step(norm, 1)
    trial.call(norm, h)
    trial.set_step(norm, 2)
    has_mean = any(isinstance(part, StepMean) for part in norm.modules())
    if has_mean and type(norm).set_step is Norm.set_step:
        trial.refuse(": nothing moves its StepMean: set_step(self, step, max_iters) calls update()")

    resumed = trial.copy()
    resumed.load_state_dict(norm.state_dict())
    trial.set_step(resumed, 2)
    if not torch.equal(trial.call(resumed, h)[0], trial.call(norm, h)[0]):
        trial.refuse(
            ": a resumed run would not go on alike: what forward or set_step changes must be a "
            "buffer, or a taper.StepMean"
        )

    norm.eval()
    before = [buffer.clone() for buffer in norm.buffers()]
    first, _ = trial.call(norm, h)
    second, _ = trial.call(norm, h, seed=1)
    if not torch.equal(first, second) or not all(map(torch.equal, before, norm.buffers())):
        trial.refuse(
            ": evaluation draws numbers or changes its state: do both only `if self.training`"
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
    found = torch.autograd.grad(
        roots, list(named.values()), zeros, allow_unused=True, retain_graph=True
    )
    return [name for name, gradient in zip(named, found) if gradient is None]


def strangers(norm: Norm, h: Tensor, outputs: list[Tensor]) -> bool:
    """Do the outputs depend on a leaf that is neither a parameter of the norm nor h?"""
    known = {id(one) for one in (h, *norm.parameters())}
    left = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return True
        following = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= following
        left += following
    return False
