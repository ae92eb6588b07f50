"""Which prompts run together: those of one shape, whatever their cohort, so that no batch needs padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvdrift.prompts.prompt import Prompt

MOST_TOKENS = 12_288
"""Prefix tokens of one batch. Long prompts run alone: CPU attention holds tokens² scores of every head at once."""

SAMPLED = 8
"""The most prompts of a batch that are sampled; greedy decoding, whose outcomes count, takes all."""
SAMPLED_FROM = 4
"""A batch of fewer prompts isn't sampled: a step takes as long as with more, and so few samples say nothing."""


def batched(prompts: Sequence[Prompt], size: int, label: str = "") -> list[Prompt]:
    """The prompts in their order, each with its `batch`: at most `size` prompts and MOST_TOKENS prefix tokens, all of
    one split, prefix length, continuation length and `max_new_tokens`."""
    shapes: dict[str, int] = {}
    named = []
    for prompt in prompts:
        length = len(prompt.tokens)
        shape = f"{label or prompt.split}-{length:05d}-c{len(prompt.continuation):02d}-n{prompt.max_new_tokens:02d}"
        number = shapes.get(shape, 0)
        shapes[shape] = number + 1
        most = max(1, min(size, MOST_TOKENS // length))
        named.append(replace(prompt, batch=f"{shape}-b{number // most:02d}"))
    return named


def rows_of(mode: str, size: int) -> list[int]:
    """Which rows of a batch of `size` prompts are generated in a mode; those that are sampled are evenly spread."""
    if mode == "sampled" and size < SAMPLED_FROM:
        return []
    return list(range(0, size, -(-size // SAMPLED) if mode == "sampled" else 1))
