"""How two generations differ: where they first part, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first differing token, None if the generations are identical."""
    for index, (a, b) in enumerate(zip(reference, candidate, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def edit_distance(reference: Sequence[int], candidate: Sequence[int]) -> int:
    """Levenshtein distance in tokens."""
    return int(Levenshtein.distance(list(reference), list(candidate)))
