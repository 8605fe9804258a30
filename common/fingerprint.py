"""Fingerprints of data: short strings that differ where data differ.

A fingerprint has one part for each split or file, with blanks between. A part is `name:size:ends`,
and for longer data `name:size:ends:inner`:

    size   number of items
    ends   CRC-32 of the first and the last END bytes of each array
    inner  CRC-32 of all bytes; of a sample of PAGES pages, if there are more than WHOLE bytes

Older logs have no `inner`.
"""

import re
import zlib
from collections.abc import Sequence

import numpy as np

END = 1 << 20  # bytes at either end of an array, which are always read
WHOLE = 1 << 29  # bytes; data up to this size are read whole, in some tenths of a second
CHUNK = 1 << 22  # bytes that are read at once
PAGE = 1 << 13  # bytes of a page of the sample
PAGES = 1 << 12  # pages of the sample, over all arrays
# A part: its name, in which blanks may be, and its sums
PART = re.compile(r"(\S.*?):(\d+:[0-9a-f]{8}(?::[0-9a-f]{8})?)(?: |$)")


def fingerprint(name: str, arrays: Sequence[np.ndarray]) -> str:
    """Compute the part `name` of a fingerprint.

    Args:
        name: of the split or file.
        arrays: its contents, 1-d and contiguous, in this order. Memory-mapped arrays are read page
            by page.
    """
    ends = 0
    inner = 0
    is_whole = sum(array.nbytes for array in arrays) <= WHOLE
    for array in arrays:
        data = array.view(np.uint8)
        for end in (data[:END], data[-END:]):
            ends = zlib.crc32(end.tobytes(), ends)
        if len(data) <= 2 * END:
            continue  # its ends are all of it
        size = CHUNK
        step = CHUNK
        if not is_whole:
            size = PAGE
            step = max(PAGE, len(data) * len(arrays) // PAGES)
        for start in range(0, len(data), step):
            inner = zlib.crc32(data[start : start + size].tobytes(), inner)
    items = sum(map(len, arrays))
    part = f"{name}:{items}:{ends:08x}"
    return f"{part}:{inner:08x}" if inner else part


def data_difference(then: str, now: str) -> str:
    """Describe the first part in which two fingerprints differ, as "X there, Y here".

    Names do not count. A fingerprint without `inner` is compared in the rest.

    Returns:
        "" if the two name the same data.
    """
    old, new = PART.findall(then), PART.findall(now)
    if not old or len(old) != len(new):
        return "" if then == now else f"{then} there, {now} here"
    for (old_name, old_sums), (new_name, new_sums) in zip(old, new, strict=True):
        shorter, longer = sorted([old_sums, new_sums], key=len)
        # With a colon at the end, so that only whole numbers are compared.
        if not f"{longer}:".startswith(f"{shorter}:"):
            return f"{old_name}:{old_sums} there, {new_name}:{new_sums} here"
    return ""
