"""Give all plots one style, and save them.

This imports matplotlib, which takes a second, so programs import it where they draw.
"""

from pathlib import Path

import matplotlib

from common.errors import UserError, cannot_write
from common.output import check_replaceable

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours can be told apart under every common colour blindness; the markers serve
# prints in black and white.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES = list(zip(COLORS, "osD^vPX"))  # (color, marker)

# Ending -> how such a picture begins.
KINDS = {
    "eps": rb"%!PS",
    "jpg": rb"\xff\xd8",
    "pdf": rb"%PDF",
    "png": rb"\x89PNG",
    "svg": rb"<\?xml",
    "webp": rb"RIFF",
}


def style(index: int) -> dict:
    """Return colour and marker of the line with this number, as arguments of `plot`."""
    color, marker = STYLES[index % len(STYLES)]
    return {"color": color, "marker": marker, "markersize": 4.5}


def check_picture(target: Path) -> None:
    """Raise UserError unless `target` may become a picture: of a known kind, and no other file."""
    check_replaceable(target)
    kind = target.suffix[1:].lower()
    if kind not in KINDS:
        # matplotlib would write TARGET.png
        raise UserError(f"{target}: its ending names no kind of picture: one of {', '.join(KINDS)}")
    check_replaceable(target, KINDS[kind])


def save(figure: plt.Figure, target: Path) -> Path:
    """Write a figure and close it. Raises UserError."""
    check_picture(target)
    try:
        figure.savefig(target, dpi=110)
    except OSError as error:
        raise UserError(cannot_write(target, error)) from None
    finally:
        plt.close(figure)
    return target
