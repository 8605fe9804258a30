"""Names of tensors in older checkpoints, as they are today.

Up to d806d57 the norm of a place had its parameters in the place itself: norm1.weight. Beside an
output norm it was called `input`, where it replaced the stream `base`.
"""

import re
from typing import Any

PLACE = re.compile(r"((?:blocks\.\d+\.norm[12]|norm_f|norm_e)\.)(.+)")
PARTS = ("norm", "output", "reader", "anchor")  # of a Place


def name_today(name: str, config: dict[str, Any]) -> str:
    """Return the name of a parameter or buffer of a model of `config`; today's stay as they are."""
    found = PLACE.fullmatch(name)
    if found is None:
        return name
    place, part = found.groups()
    first, _, rest = part.partition(".")
    if first in PARTS and rest:
        return name
    # The base of a taper keeps its name: it is within the norm.
    if first == "input" or (first == "base" and config.get("norm_type") != "taper"):
        part = rest
    return f"{place}norm.{part}"
