"""Fingerprints of data: short strings by which runs on different data are told apart.

One part for each split or file, with blanks between. A part is `name:size:ends`, of longer data
`name:size:ends:inner`: how many items it has, the CRC-32 of the first and the last END bytes of
each array, and the CRC-32 of all bytes, or of a sample of PAGES pages where there are more than
WHOLE of them. Logs of before have no `inner`.
"""

import re
import zlib
from collections.abc import Sequence

import numpy as np

END = 1 << 20  # bytes at either end of an array that are always read
WHOLE = 1 << 29  # up to so many bytes are read whole, in some tenths of a second
CHUNK = 1 << 22  # bytes that are read at once
PAGE, PAGES = 1 << 13, 1 << 12  # bytes of a sampled page, and pages of a sample
PART = re.compile(r"(?:^| )(.*?):(\d+:[0-9a-f]{8}(?::[0-9a-f]{8})?)(?= |$)")


def fingerprint(name: str, arrays: Sequence[np.ndarray]) -> str:
    """Name the contents of `arrays`, 1-d and contiguous, in this order; memory-mapped ones are read
    page by page.
    """
    ends = inner = 0
    is_whole = sum(array.nbytes for array in arrays) <= WHOLE
    for array in arrays:
        data = array.view(np.uint8)
        for part in (data[:END], data[-END:]):
            ends = zlib.crc32(part.tobytes(), ends)
        if len(data) <= 2 * END:
            continue
        size = CHUNK if is_whole else PAGE
        step = CHUNK if is_whole else max(PAGE, len(data) * len(arrays) // PAGES)
        for start in range(0, len(data), step):
            inner = zlib.crc32(data[start : start + size].tobytes(), inner)
    short = f"{name}:{sum(map(len, arrays))}:{ends:08x}"
    return f"{short}:{inner:08x}" if inner else short


def data_difference(then: str, now: str) -> str:
    """The first part in which two fingerprints differ, as "X there, Y here"; "" where they name the
    same data.

    Names do not count. A fingerprint of before, without `inner`, is compared in what it has.
    """
    old, new = PART.findall(then), PART.findall(now)
    if len(old) != len(new) or (then != now and not old):  # of a form that we do not know
        return f"{then} there, {now} here"
    for (old_name, old_sums), (new_name, new_sums) in zip(old, new, strict=True):
        shorter, longer = sorted([old_sums, new_sums], key=len)
        if not f"{longer}:".startswith(f"{shorter}:"):
            return f"{old_name}:{old_sums} there, {new_name}:{new_sums} here"
    return ""
