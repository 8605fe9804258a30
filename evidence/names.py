"""Names of arms, for tables and pictures: `taper --taper_final=True` -> `taper final`.

The CSV files keep the full arm, which sweep.sh takes. An arm that was given a name has that alone.
"""

import shlex

from common.errors import printable


def short_name(arm: str) -> str:
    """Return an arm without dashes and quotes, and without what its keys repeat.

    A key loses the name of its norm type, and a key that is on its value.
    """
    try:
        words = shlex.split(arm)
    except ValueError:  # a name that was given, such as "it's"
        words = arm.split()
    if not "".join(words).strip():
        return repr(arm)  # blanks alone
    norm_type, *keys = words
    parts = [norm_type]
    for key in keys:
        name, _, value = key.removeprefix("--").partition("=")
        name = name.removeprefix(f"{norm_type}_")
        parts.append(name if value in ("", "True") else f"{name}={value}")
    # blanks side by side would look like one
    return printable(" ".join(" ".join(parts).split()))


def told_apart(arms: list[str]) -> dict[str, str]:
    """Return arm -> a name whose short name no other arm has: the arm itself, or with a number.

    Two arms of one short name would be one column of a table.
    """
    alike: dict[str, list[str]] = {}
    for arm in sorted({*arms}):
        alike.setdefault(short_name(arm), []).append(arm)
    names = {}
    for short, its in alike.items():
        for number, arm in enumerate(its, 1):
            names[arm] = arm if len(its) == 1 else f"{short} #{number}"
    return names
