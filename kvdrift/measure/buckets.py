"""Buckets of a sequence: octaves of position, [0, 32) [32, 128) [128, 512) …; one is named by its first token.

The same cuts serve for distances from the current token. A cell is one bucket of one layer, packed in TENSORS.
"""

from __future__ import annotations

TENSORS = ("key", "value", "both")
"""What of a cell is packed: its keys alone, its values alone, or both."""
FIRST_BUCKET = 32
OCTAVE = 4


def bucket_starts(length: int) -> list[int]:
    """First tokens of the buckets that a sequence of `length` tokens reaches."""
    starts, edge = [0], FIRST_BUCKET
    while edge < length:
        starts.append(edge)
        edge *= OCTAVE
    return starts


def bucket_ranges(length: int) -> list[range]:
    """The buckets as ranges of positions, the last one cut at `length`."""
    starts = bucket_starts(length)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]
