"""Short names of arms, for tables and pictures: `taper --taper_final=True` -> `taper final`.

The CSV files keep the full arm, which sweep.sh takes.
"""

import itertools
import shlex
import zlib

LONGEST = 40  # characters; a longer name is cut


def short_name(arm: str) -> str:
    """Return a short name of an arm. Different arms have different names."""
    name = shortened(arm)
    if len(name) <= LONGEST:
        return name
    # Two long names may be alike up to where they are cut.
    mark = f"… {zlib.crc32(arm.encode()):08x}"
    return name[: LONGEST - len(mark)] + mark


def shortened(arm: str) -> str:
    """Return an arm without dashes and quotes, and without what its keys repeat.

    A key loses the name of its norm type, a key that is on loses its value, and letters or numbers
    that repeat in a value are counted: `RR RR RR` becomes `3xRR`.
    """
    try:
        norm_type, *keys = shlex.split(arm)
    except ValueError:  # a folder with a quote in its name
        return arm
    if not all(key.startswith("--") and "=" in key for key in keys):
        return arm
    parts = [norm_type]
    for key in keys:
        name, _, value = key.removeprefix("--").partition("=")
        name = name.removeprefix(f"{norm_type}_")
        parts.append(name if value == "True" else f"{name}={counted(value)}")
    return " ".join(parts)


def counted(value: str) -> str:
    """Return a value of several parts with its repeated parts counted."""
    separator = " " if " " in value else ","
    parts = []
    for part, same in itertools.groupby(value.split(separator)):
        count = len(list(same))
        parts += [part] * count if count < 3 else [f"{count}x{part}"]
    return separator.join(parts)
