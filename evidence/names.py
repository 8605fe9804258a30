"""Short names of arms, for tables and pictures: `taper --taper_final=True` -> `taper final`.

The CSV files keep the full arm, which sweep.sh takes. An arm that was given a name has that alone.
"""

import shlex


def short_name(arm: str) -> str:
    """Return an arm without dashes and quotes, and without what its keys repeat.

    A key loses the name of its norm type, and a key that is on its value. Different arms have
    different names.
    """
    norm_type, *keys = shlex.split(arm)
    parts = [norm_type]
    for key in keys:
        name, _, value = key.removeprefix("--").partition("=")
        name = name.removeprefix(f"{norm_type}_")
        parts.append(name if value in ("", "True") else f"{name}={value}")
    return " ".join(parts)
