"""Few cases that hold every valid combination of two, or three, choices: `pairwise` and `triples`.

Cases are found one after another (AETG: Cohen et al., 1997, doi:10.1109/32.605761). Each starts from a combination that
no case holds yet and becomes, of some that are valid, the one with the most of such combinations. Groups must divide
their row, so shapes that are valid are listed first, and the other choices added to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from cuda_cases import DTYPES, Case

KEYS = ("channel2", "channel4", "channel8", "token2", "token4", "token8", "fp8", "exact")
VALUES = ("token2", "token4", "token8", "fp8", "exact")
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
BLOCKS = (32, 64, 128)
GROUPS = (64, 32, 16, 8)
REST: dict[str, Sequence[Any]] = {
    "share": (1, 3, 4, 6, 7, 8),
    "dtype": tuple(DTYPES),
    "scale": ("float16", "float32"),
    "queries": (1, 5, 16),  # of one, of some, and of as many as fill each thread block's row tiles
}
SEED = 8
"""Of the first fifty, the one with the fewest pairwise cases, 57; 48 is the least there can be."""

Choices = dict[str, Any]
Combination = frozenset[tuple[str, Any]]


@lru_cache(maxsize=1)
def pairwise() -> tuple[Case, ...]:
    """Cases that hold every pair of choices; the first ones hold the most."""
    return tuple(Case(**chosen) for chosen in covering(2, SEED))


def triples() -> tuple[Case, ...]:
    """Cases that hold every three choices."""
    return tuple(Case(**chosen) for chosen in covering(3, SEED))


def shapes() -> Iterator[Choices]:
    """Formats and sizes whose groups divide their rows."""
    for key, value, head_dim, block in product(KEYS, VALUES, HEAD_DIMS, BLOCKS):
        for key_group, value_group in product(
            _groups(key, block if key.startswith("channel") else head_dim), _groups(value, head_dim)
        ):
            yield {
                "key": key,
                "key_group": key_group,
                "value": value,
                "value_group": value_group,
                "head_dim": head_dim,
                "block": block,
            }


def _groups(kind: str, row: int) -> list[int]:
    """Of that row, 0 for the whole."""
    return [0] if kind == "exact" else [0, *(group for group in GROUPS if group < row and row % group == 0)]


def held(chosen: Choices, strength: int) -> set[Combination]:
    return set(map(frozenset, combinations(chosen.items(), strength)))


def wanted(strength: int) -> list[Combination]:
    """Every valid combination of choices, those of the factors with the most values first."""
    valid = list(shapes())
    found = []
    for names in combinations([*valid[0], *REST], strength):
        inside, rest = [name for name in names if name in valid[0]], [name for name in names if name in REST]
        seen = dict.fromkeys(tuple(shape[name] for name in inside) for shape in valid)
        every = [(*a, *b) for a, b in product(seen, product(*(REST[name] for name in rest)))]
        found.append([frozenset(zip((*inside, *rest), values, strict=True)) for values in every])
    return [combination for group in sorted(found, key=len, reverse=True) for combination in group]


def covering(strength: int, seed: int, tries: int = 40) -> list[Choices]:
    """The same every time."""
    source, valid, cases = random.Random(seed), list(shapes()), list[Choices]()
    todo = wanted(strength)
    left = set(todo)
    for first in todo:
        if first not in left:
            continue
        fixed = dict(first)
        fitting = [shape for shape in valid if all(shape.get(name, x) == x for name, x in fixed.items())]
        sampled = source.sample(fitting, min(tries, len(fitting)))
        grown = [_completed(shape | fixed, left, strength, source) for shape in sampled]
        cases.append(max(grown, key=lambda chosen: len(held(chosen, strength) & left)))
        left -= held(cases[-1], strength)
    return cases


def _completed(chosen: Choices, left: set[Combination], strength: int, source: random.Random) -> Choices:
    for name in source.sample(list(REST), len(REST)):
        if name not in chosen:
            options = [chosen | {name: value} for value in source.sample(REST[name], len(REST[name]))]
            chosen = max(options, key=lambda option: len(held(option, strength) & left))
    return chosen
