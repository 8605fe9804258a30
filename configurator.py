"""Build one typed, frozen dataclass from config files and the command line.

    python X.py [config files ...] [--key=value ...]

Later arguments override earlier ones. A config file has Python syntax but is never executed: it may
hold a docstring and assignments `key = value` of literals, arithmetic on them, and names assigned
before. Names that begin with an underscore are private to the file; every other name must be a key
of the dataclass.

The dataclass declares its keys with `key(default, help, choices, least, most, zero)`. Allowed types
are bool, int, float, str, `T | None` (None is written `auto`) and `tuple[T, ...]`, alone or as
`T | tuple[T, ...]` (a tuple is written `1.0,1.1,0.9`).
"""

import ast
import dataclasses
import difflib
import math
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from common import nanogpt
from common.errors import ConfigError
from common.norm_file import KEY as NORM_FILE
from common.norm_file import refuse

T = TypeVar("T")

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def key(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    zero: bool = False,
) -> Any:
    """Declare a dataclass field that is a config key.

    Args:
        default: its default value.
        help: one line of help.
        choices: the allowed strings, if they are few.
        least: the smallest number allowed, for a tuple that of each element.
        most: the largest one.
        zero: 0 is allowed besides, where it is below `least`.
    """
    metadata = {"help": help, "choices": choices, "least": least, "most": most, "zero": zero}
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(config: Any) -> None:
    """Raise ConfigError for a number beyond its key's `least` or `most`.

    For a dataclass that is also built in code: a value from arguments is checked when it is set.
    """
    for field in dataclasses.fields(config):
        check_range(field, getattr(config, field.name))


def check_range(field: dataclasses.Field, value: Any) -> None:
    """Raise ConfigError for a number, or one of several, beyond the bounds of its key."""
    least = field.metadata.get("least")
    most = field.metadata.get("most")
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if number is None or (number == 0 and field.metadata.get("zero")):
            continue
        # nan is not >= anything
        is_large_enough = least is None or number >= least
        if not is_large_enough or (most is not None and number > most):
            bounds = _range_text(field.metadata).removeprefix(", ")
            raise ConfigError(f"{field.name}={value}: must be {bounds}")


# ------------------------------------------------------------------------------------- config files


def read_config_file(path: str | Path) -> dict[str, tuple[Any, int]]:
    """Read the assignments of a config file: {name: (value, line number)}.

    Nothing in it is executed. Private names are left out. Raises ConfigError with file and line for
    everything that is not an assignment of a literal or of arithmetic.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error.strerror}): check the path"
        ) from None
    except (SyntaxError, ValueError) as error:
        # Besides wrong syntax: null bytes, bytes that are not UTF-8.
        line = getattr(error, "lineno", None) or "?"
        what = getattr(error, "msg", None) or type(error).__name__
        raise ConfigError(
            f"{path}:{line}: not valid syntax ({what}); write `key = value`"
        ) from None
    found: dict[str, tuple[Any, int]] = {}
    for statement in tree.body:
        try:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case ast.Import(names=[ast.alias(name="time", asname=None)]):
                    pass  # of nanoGPT's configs, for a name that is not needed
                case ast.ImportFrom(module="norms"):
                    raise ValueError(f"this is a norm file, no config file: --{NORM_FILE}={path}")
                case ast.Assign(targets=[ast.Name(id=name)]) if name in nanogpt.NOT_NEEDED:
                    found[name] = (None, statement.lineno)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = (_evaluate(value, found), statement.lineno)
                case _:
                    raise ValueError(
                        f"`{type(statement).__name__}` is not allowed, only `key = value` is"
                    )
        except (ValueError, ArithmeticError) as error:
            raise ConfigError(f"{path}:{statement.lineno}: {error}") from None
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _evaluate(node: ast.AST, found: dict[str, tuple[Any, int]]) -> Any:
    """Return the value of a literal expression, with arithmetic on numbers.

    Args:
        found: name -> (value, line) of the assignments above.

    Raises:
        ValueError, ArithmeticError: the expression is not allowed, or has no value.
    """
    match node:
        case ast.Constant(value=bool() | str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in found:
            return found[name][0]
        case ast.Name(id=name):
            raise ValueError(f"name {name!r} is not assigned above this line")
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_evaluate(element, found) for element in elements)
        case ast.UnaryOp(op=op, operand=operand):
            operands = [_evaluate(operand, found)]
        case ast.BinOp(op=op, left=left, right=right):
            operands = [_evaluate(left, found), _evaluate(right, found)]
        case _:
            raise ValueError(
                f"`{type(node).__name__}` is not allowed, only literals and arithmetic are"
            )
    are_numbers = all(type(value) in (int, float) for value in operands)
    if type(op) not in ARITHMETIC or not are_numbers:
        raise ValueError("arithmetic is on numbers only, with + - * / // % **")
    return ARITHMETIC[type(op)](*operands)


# ------------------------------------------------------------------------------ types and overrides


def _type_name(annotation: Any) -> str:
    """Return a type as people write it; None is written auto."""
    if annotation is types.NoneType:
        return "auto"
    if _is_union(annotation):
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _coerce(value: Any, annotation: Any) -> Any:
    """Return `value` as the type `annotation`, or raise ValueError.

    Nothing is narrowed silently: 1.5 is no int, 1 is no bool, nan is no number. Integers have 64
    bits, as those of PyTorch.
    """
    if _is_union(annotation):
        # First, because `str | None` would take the word auto as a string.
        if value == "auto" and types.NoneType in typing.get_args(annotation):
            return None
        for part in typing.get_args(annotation):
            try:
                return _coerce(value, part)
            except ValueError:
                continue
    elif annotation is types.NoneType and (value is None or value == "auto"):
        return None
    elif typing.get_origin(annotation) is tuple:
        # One number for a key that is always several
        elements = value if isinstance(value, tuple | list) else (value,)
        return tuple(_coerce(element, typing.get_args(annotation)[0]) for element in elements)
    elif annotation is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif annotation in (bool, int, str) and type(value) is annotation and not _is_long(value):
        return value
    raise ValueError


def _shown(value: Any) -> str:
    """Return a value as messages show it. Python writes no integers of more than 4,300 digits."""
    return "an integer of more than 64 bits" if _is_long(value) else repr(value)


def _is_long(value: Any) -> bool:
    return type(value) is int and value.bit_length() >= 64


def _from_text(text: str, annotation: Any) -> Any:
    """Return the value that a text of the command line stands for.

    A text that is no value of Python stays one; `_coerce` then refuses it.
    """
    parts = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if str in parts:
        return text
    if tuple[str, ...] in parts:
        return tuple(part for part in text.split(",") if part)
    if bool in parts and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text.strip() or "()")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) is types.UnionType


class Setting(NamedTuple):
    """A key as it is given: see Overrides.set."""

    name: str
    value: Any
    origin: str
    is_text: bool


class Overrides:
    """Collect settings for the dataclass `cls`: check each, then build the instance."""

    def __init__(self, cls: type[T]):
        self.cls = cls
        self.types = typing.get_type_hints(cls)
        self.fields = {field.name: field for field in dataclasses.fields(cls)}
        self.values: dict[str, Any] = {}

    def set(self, name: str, value: Any, origin: str, is_text: bool = False) -> None:
        """Set one key. Arguments and errors are those of `checked`."""
        self.values[name] = self.checked(name, value, origin, is_text)

    def checked(self, name: str, value: Any, origin: str, is_text: bool = False) -> Any:
        """Return the value that a key gets.

        Args:
            name: the key.
            value: its value, or with `is_text` the text of the command line.
            origin: where it was set, for messages: the argument, or file and line.

        Raises:
            ConfigError: the key is unknown, or the value of another type, none of the choices or
                beyond its bounds.
        """
        if name == NORM_FILE:
            # A program that takes one has taken it out of its command line before.
            refuse(origin)
        if name not in self.fields:
            near = difflib.get_close_matches(name, [*self.fields, NORM_FILE], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "--help lists all keys"
            raise ConfigError(f"{origin}: unknown key {name!r}: {hint}")
        annotation = self.types[name]
        given = value
        try:
            if is_text:
                value = _from_text(value, annotation)
            value = _coerce(value, annotation)
        except (ValueError, OverflowError):
            expected = _type_name(annotation)
            raise ConfigError(f"{origin}: {name} must be {expected}, got {_shown(given)}") from None
        choices = self.fields[name].metadata.get("choices", ())
        if choices and isinstance(value, str) and value not in choices:
            raise ConfigError(f"{origin}: {name} is one of {', '.join(choices)}; got {value!r}")
        check_range(self.fields[name], value)
        return value

    def set_all(self, settings: list[Setting], has_model: bool) -> str:
        """Set keys one after the other, nanoGPT's as well, and say what those are here.

        Args:
            has_model: whether the program takes a model.

        Returns:
            The model that nanoGPT's keys name, else "".

        Raises:
            ConfigError: names everything that is wrong.
        """
        problems = []
        for setting in settings:
            if setting.name in self.fields:
                try:
                    self.set(*setting)
                except ConfigError as error:
                    problems.append(str(error))
        # What a key of nanoGPT means can depend on ours, before it or after it.
        known = {name: field.default for name, field in self.fields.items()} | self.values
        last = {setting.name: place for place, setting in enumerate(settings)}
        model = ""
        said = []
        for place, setting in enumerate(settings):
            if place < last[setting.name]:
                continue
            try:
                meant = self._of_nanogpt(setting, known, has_model)
                if meant is None:
                    if setting.name not in self.fields:
                        self.set(*setting)  # raises: nobody knows the key
                    continue
                ours = ", ".join(f"{name}={value}" for name, value in meant.items())
                said.append(f"{setting.name} is {ours or 'not needed'}")
                model = meant.pop(nanogpt.MODEL, model)
                for name, value in meant.items():
                    value = self.checked(name, value, setting.origin)
                    if last.get(name, -1) <= place:  # else ours is given later, and wins
                        self.values[name] = value
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        if said and os.environ.get("RANK", "0") == "0":
            print(f"keys of nanoGPT: {', '.join(said)}", file=sys.stderr)
        return model

    def _of_nanogpt(
        self, setting: Setting, known: dict[str, Any], has_model: bool
    ) -> dict[str, Any] | None:
        """Return our keys for one of nanoGPT; None for one of ours, and for an unknown one."""
        name, value, origin, is_text = setting
        if name in self.fields and name != "init_from":
            return None
        if is_text:
            value = _from_text(value, bool | int)
        try:
            if "eval_tokens" in self.fields:
                return nanogpt.of_train(name, value, known)
            # sample.py alone has nanoGPT's ways to name a model.
            is_sample = has_model and "prompt" in self.fields
            return nanogpt.of_sample(name, value) if is_sample else None
        except ConfigError as error:
            raise ConfigError(f"{origin}: {name} of nanoGPT: {error}") from None

    def build(self) -> Any:
        """Build the dataclass; keys that were not set have their defaults. Raises ConfigError."""
        return self.cls(**self.values)


def parse_args(
    cls: type[T],
    argv: list[str],
    doc: str = "",
    spec: bool = False,
    complete: Callable[[Overrides], None] | None = None,
) -> tuple[T, str]:
    """Build the config `cls` from command-line arguments.

    `--key` alone sets a bool to True. `--help` prints `doc` and every key, and exits with code 0.
    Keys of nanoGPT are translated.

    Args:
        argv: config files and --key=value, later ones override earlier ones.
        spec: whether the program takes a model: the first argument that is neither a config file
            (*.py) nor --key=value.
        complete: sets keys that are not given, before the config is built.

    Returns:
        The config, and the model's spec, "" for programs that take none.

    Raises:
        ConfigError: arguments are wrong, or the model is missing.
    """
    overrides = Overrides(cls)
    model = ""
    settings: list[Setting] = []
    for argument in argv:
        if argument in ("--help", "-h"):
            print(help_text(cls, doc))
            raise SystemExit(0)
        if argument.startswith("-"):
            name, equals, text = argument.removeprefix("--").partition("=")
            is_switch = not equals and overrides.types.get(name) is bool
            if not argument.startswith("--") or not (equals or is_switch):
                raise ConfigError(f"{argument}: settings are written --key=value")
            settings.append(Setting(name, "true" if is_switch else text, argument, True))
        elif argument.endswith(".py"):
            for name, (value, line) in read_config_file(argument).items():
                settings.append(Setting(name, value, f"{argument}:{line}", False))
        elif spec and not model:
            model = argument
        else:
            raise ConfigError(f"{argument!r} is neither a config file (*.py) nor --key=value")
    model = overrides.set_all(settings, spec) or model
    if spec and not model:
        raise ConfigError(
            "name a model first: a run folder, a checkpoint file, a Hugging Face folder or name, "
            "or random: and a shape (--help says more)"
        )
    if complete is not None:
        complete(overrides)
    return overrides.build(), model


def help_text(cls: type, doc: str) -> str:
    """Return `doc`, then every key of `cls` with its default, type and one line of help.

    Keys stand in groups, one for each class that declares some, under the first line of its
    docstring. A class may name in FIRST the keys that people change first; they stand at the top.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    kinds = typing.get_type_hints(cls)
    first = [fields.pop(name) for name in getattr(cls, "FIRST", ())]
    groups = {"What people change first": first} if first else {}
    for name, field in fields.items():
        declaring = [part for part in cls.__mro__ if name in vars(part).get("__annotations__", {})]
        # The last one: a class that only changes the default does not move the key.
        heading = (declaring[-1].__doc__ or "").partition("\n")[0].rstrip(".")
        groups.setdefault(heading, []).append(field)
    lines = [
        doc.strip(),
        "",
        "Keys (--key=value on the command line, key = value in a config file):",
    ]
    for heading, members in groups.items():
        if len(groups) > 1:
            lines += ["", f"{heading}:"]
        for field in members:
            default = "auto" if field.default is None else repr(field.default)
            kind = "|".join(field.metadata.get("choices", ())) or _type_name(kinds[field.name])
            kind += _range_text(field.metadata)
            lines += [f"  --{field.name}={default}  ({kind})"]
            lines += [f"        {field.metadata.get('help', '')}"]
    return "\n".join(lines)


def _range_text(metadata: Mapping[str, Any]) -> str:
    """Return what --help says of a key's bounds, as ", 0 or at least 1e-06, at most 10"."""
    text = ""
    if metadata.get("least") is not None:
        or_zero = "0 or " if metadata.get("zero") else ""
        text += f", {or_zero}at least {metadata['least']:.12g}"
    if metadata.get("most") is not None:
        text += f", at most {metadata['most']:.12g}"
    return text
