"""Pictures: the one style of all plots, and how they are saved.

Importing it imports matplotlib: a second.
"""

import io
from pathlib import Path

import matplotlib
from PIL import Image

from common.errors import UserError

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe & Ito's colours, told apart under every common colour blindness; markers for black and
# white.
STYLES = list(
    zip(["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"], "osD^vPX")
)


def style(index: int) -> dict:
    color, marker = STYLES[index % len(STYLES)]
    return {"color": color, "marker": marker, "markersize": 4.5}


def save(figure: plt.Figure, target: Path) -> Path:
    """Write and close a figure; PNG with a palette, which takes a quarter of the bytes.

    Raises UserError.
    """
    try:
        if target.suffix != ".png":
            figure.savefig(target)
        else:
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=110)
            picture = Image.open(drawn).convert("RGB")
            # Of Pillow's methods the one that keeps every colour within 16 of 255; dithering would
            # cost bytes.
            palette = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            palette.save(target, optimize=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{target}: cannot be written ({error})") from None
    finally:
        plt.close(figure)
    return target
