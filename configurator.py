"""Config files and command line -> one typed, frozen dataclass.

    python X.py [config files ...] [--key=value ...]

Later words win over earlier ones. A config file has Python syntax but is never executed: it may
hold a docstring and assignments `key = value` of literals, arithmetic on them, and names assigned
before. Names that begin with an underscore are private to the file; every other name must be a key
of the dataclass.

The dataclass declares its keys with `key(default, help, choices, least)`. Allowed types: bool, int,
float, str, `T | None` (None is written `auto`) and `tuple[T, ...]`, alone or as `T | tuple[T, ...]`
(a tuple is written `1.0,1.1,0.9`).
"""

import ast
import dataclasses
import difflib
import math
import operator
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError

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


def key(default: Any, help: str, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    """A dataclass field that is a config key: its default, one line of help, the allowed strings if
    few, and the smallest number allowed.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "least": least}
    )


def check_least(config: Any) -> None:
    """For __post_init__ of a dataclass of keys: raises ConfigError for a number below its key's
    `least`.
    """
    for field in dataclasses.fields(config):
        value, least = getattr(config, field.name), field.metadata.get("least")
        if None not in (value, least) and not value >= least:  # nan is not
            raise ConfigError(
                f"{field.name}={value}: must "
                + (f"be at least {least}" if least else "not be negative")
            )


# ------------------------------------------------------------------------------------- config files


def read_config_file(path: str | Path) -> dict[str, tuple[Any, int]]:
    """{name: (value, line)} of what a config file assigns, private names left out. Nothing in it is
    executed.

    Raises ConfigError with file and line for everything that is not an assignment of a literal or
    arithmetic.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error.strerror}): check the path"
        ) from None
    # not UTF-8, null bytes, endless brackets
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, what = (
            getattr(error, "lineno", None) or "?",
            getattr(error, "msg", None) or type(error).__name__,
        )
        raise ConfigError(
            f"{path}:{line}: not valid syntax ({what}); write `key = value`"
        ) from None
    found: dict[str, tuple[Any, int]] = {}
    for statement in tree.body:
        try:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    pass  # a docstring
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = _evaluate(value, found), statement.lineno
                case _:
                    raise ValueError(
                        f"`{type(statement).__name__}` is not allowed, only `key = value` is"
                    )
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{path}:{statement.lineno}: {error}") from None
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _evaluate(node: ast.AST, found: dict[str, tuple[Any, int]]) -> Any:
    """Value of a literal expression, with arithmetic on numbers.

    Raises ValueError or ArithmeticError.
    """
    match node:
        case ast.Constant(value=bool() | str() | int() | float() | None):
            return _short(node.value)
        case ast.Name(id=name) if name in found:
            return found[name][0]
        case ast.Name(id=name):
            raise ValueError(f"name {name!r} is not assigned above this line")
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            values = tuple(_evaluate(element, found) for element in elements)
            # lines that double it would fill the memory
            if any(isinstance(value, tuple) for value in values):
                raise ValueError("a tuple within a tuple")
            return values
        case ast.UnaryOp(op=op, operand=operand):
            operands = [_evaluate(operand, found)]
        case ast.BinOp(op=op, left=left, right=right):
            operands = [_evaluate(left, found), _evaluate(right, found)]
        case _:
            raise ValueError(
                f"`{type(node).__name__}` is not allowed, only literals and arithmetic are"
            )
    if type(op) not in ARITHMETIC or not all(type(value) in (int, float) for value in operands):
        raise ValueError("arithmetic is on numbers only, with + - * / // % **")
    if isinstance(op, ast.Pow) and max(map(abs, operands)) > 1000:  # 9**9**9 would run for ever
        raise ValueError("a power of numbers beyond 1000")
    return _short(ARITHMETIC[type(op)](*operands))


def _short(value: Any) -> Any:
    """`value`, or ValueError for an integer that no key takes and Python would not even print."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("an integer of more than 64 bits")
    return value


# ------------------------------------------------------------------------------ types and overrides


def _type_name(annotation: Any) -> str:
    if annotation is types.NoneType:
        return "auto"
    if typing.get_origin(annotation) is types.UnionType:
        return " | ".join(_type_name(part) for part in typing.get_args(annotation))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _coerce(value: Any, annotation: Any) -> Any:
    """`value` as `annotation`, or ValueError.

    No silent narrowing: 1.5 is no int, 1 is no bool, nan is no number.
    """
    if typing.get_origin(annotation) is types.UnionType:
        # also where text is allowed
        if value == "auto" and types.NoneType in typing.get_args(annotation):
            return None
        for part in typing.get_args(annotation):
            try:
                return _coerce(value, part)
            except ValueError:
                continue
    elif annotation is types.NoneType and (value is None or value == "auto"):
        return None
    elif typing.get_origin(annotation) is tuple and isinstance(value, tuple | list):
        return tuple(_coerce(element, typing.get_args(annotation)[0]) for element in value)
    elif annotation is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif annotation in (bool, int, str) and type(value) is annotation:
        # no setting is as large, and tensors cannot be
        if annotation is int and abs(value) >= 1 << 48:
            raise ValueError
        return value
    raise ValueError


def _from_text(text: str, annotation: Any) -> Any:
    """The value a command-line text stands for, or ValueError."""
    if typing.get_origin(annotation) is types.UnionType:
        for part in typing.get_args(annotation):
            try:
                return _from_text(text, part)
            except ValueError:
                continue
        raise ValueError
    if typing.get_origin(annotation) is tuple:
        element = typing.get_args(annotation)[0]
        return tuple(
            _from_text(word, element) for word in text.strip("()").split(",") if word.strip()
        )
    if annotation is bool:
        return (
            {"true": True, "false": False}[text.lower()]
            if text.lower() in ("true", "false")
            else text
        )
    if annotation in (int, float):
        return annotation(text)
    return text


class Overrides:
    """Collects settings for the dataclass `cls`, checks name, type and choices of each, builds the
    instance.
    """

    def __init__(self, cls: type[T]):
        self.cls = cls
        self.types = typing.get_type_hints(cls)
        self.fields = {field.name: field for field in dataclasses.fields(cls)}
        self.values: dict[str, Any] = {}

    def set(self, name: str, value: Any, origin: str, is_text: bool = False) -> None:
        """Set key `name`; `is_text` for command-line text.

        Raises ConfigError that names key, type and origin.
        """
        if name not in self.fields:
            near = difflib.get_close_matches(name, self.fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "--help lists all keys"
            raise ConfigError(f"{origin}: unknown key {name!r}: {hint}")
        annotation, choices = self.types[name], self.fields[name].metadata.get("choices", ())
        try:
            value = _coerce(_from_text(value, annotation) if is_text else value, annotation)
        except (ValueError, OverflowError):
            wanted = _type_name(annotation)
            raise ConfigError(f"{origin}: {name} wants {wanted}, got {value!r}") from None
        if choices and value not in choices:
            raise ConfigError(f"{origin}: {name} is one of {', '.join(choices)}; got {value!r}")
        self.values[name] = value

    def build(self) -> Any:
        return self.cls(**self.values)


def parse_args(cls: type[T], argv: list[str], doc: str = "", spec: bool = False) -> tuple[T, str]:
    """(config, model spec) from command-line words; the spec is "" for programs that take none.

    With `spec`, the first word that is neither a config file (*.py) nor --key=value is the model to
    work on. `--key` alone sets a bool to True. `--help` prints `doc` and every key, and exits 0.
    Raises ConfigError.
    """
    overrides, model = Overrides(cls), ""
    for word in argv:
        if word in ("--help", "-h"):
            print(help_text(cls, doc))
            raise SystemExit(0)
        if word.startswith("-"):
            name, equals, text = word.removeprefix("--").partition("=")
            if not word.startswith("--") or not (equals or overrides.types.get(name) is bool):
                raise ConfigError(f"{word}: settings are written --key=value")
            overrides.set(name, text if equals else "true", word, is_text=True)
        elif word.endswith(".py"):
            for name, (value, line) in read_config_file(word).items():
                overrides.set(name, value, f"{word}:{line}")
        elif spec and not model:
            model = word
        else:
            raise ConfigError(f"{word!r} is neither a config file (*.py) nor --key=value")
    if spec and not model:
        raise ConfigError(
            "name a model first: a run folder, a checkpoint file, a Hugging Face folder or name, "
            "or random: and a shape (--help says more)"
        )
    return overrides.build(), model


def help_text(cls: type, doc: str) -> str:
    """Every key of `cls` with type, default and one line, below `doc`."""
    hints = typing.get_type_hints(cls)
    lines = [
        doc.strip(),
        "",
        "Keys (--key=value on the command line, key = value in a config file):",
    ]
    for field in dataclasses.fields(cls):
        choices = field.metadata.get("choices", ())
        kind = "|".join(choices) if choices else _type_name(hints[field.name])
        default = "auto" if field.default is None else repr(field.default)
        least = field.metadata.get("least")
        lines.append(
            f"  --{field.name}={default}  ({kind}{'' if least is None else f', at least {least}'})"
        )
        lines.append(f"        {field.metadata.get('help', '')}")
    return "\n".join(lines)
