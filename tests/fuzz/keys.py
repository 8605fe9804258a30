"""Read the keys of a program, with types, bounds and choices, from what its --help prints."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

# As configurator.help_text writes a key:   --name=default  (type, at least 0)
LISTED = re.compile(r"^  --(?P<name>[\w.]+)=(?P<default>.*?)  \((?P<kind>.+)\)$", re.MULTILINE)
BOUNDS = re.compile(r"(, (0 or )?at least (?P<least>[^\s,]+))?(, at most (?P<most>\S+))?$")
# As the head of a program without a list shows it: --delta.METRIC=NUMBER, --out=DIR, --remove NAME
SHOWN = re.compile(r"--(?P<name>[a-z_]+(?:\.[a-z_]+)?)(?:[= ](?P<value>[\w.,*]+))?")


@dataclass(frozen=True)
class Key:
    """One key of a program."""

    name: str
    kinds: tuple[str, ...]  # of bool, int, float, str, tuple, auto; empty where there are choices
    default: str = ""
    bounds: tuple[float, ...] = ()  # the smallest and the largest number allowed, where they are
    choices: tuple[str, ...] = ()
    help: str = ""


def help_of(main: Callable[[list[str]], object]) -> str:
    """Return what `main(["--help"])` prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(["--help"])
    return shown.getvalue()


def keys_in(text: str) -> list[Key]:
    """Return the keys that a help text lists or, if it has no list, shows in its examples."""
    listed = [_listed(match, text) for match in LISTED.finditer(text)]
    return listed or _shown(text)


def _listed(match: re.Match, text: str) -> Key:
    kind = match["kind"]
    found = BOUNDS.search(kind)
    bounds = tuple(float(found[name]) for name in ("least", "most") if found[name])
    kind = kind[: found.start()]
    line = text[match.end() + 1 :].partition("\n")[0].strip()
    default = match["default"].strip("'")
    if "|" in kind and " | " not in kind:
        return Key(match["name"], (), default, bounds, tuple(kind.split("|")), line)
    kinds = tuple(part.partition("[")[0] for part in kind.split(" | "))
    return Key(match["name"], kinds, default, bounds, (), line)


def _shown(text: str) -> list[Key]:
    found: dict[str, Key] = {}
    for match in SHOWN.finditer(text):
        name, value = match["name"], match["value"] or ""
        kinds = ("str",)
        if value in ("True", "False"):
            kinds = ("bool",)
        elif value == "NUMBER" or re.fullmatch(r"[\d.]+", value):
            kinds = ("float",)
        if name != "help":
            found.setdefault(name, Key(name, kinds))
    return list(found.values())
