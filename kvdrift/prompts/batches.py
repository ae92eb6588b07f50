"""Which prompts run together: those of one shape, whatever their cohort, so that no batch needs padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvdrift.prompts.prompt import Prompt

MOST_TOKENS = 12_288
"""Prefix tokens of one batch. Long prompts run alone: CPU attention holds tokens² scores of every head at once."""

MODES = ("greedy", "sampled")
"""How a prompt with a task is answered."""
SAMPLED_FROM = 4
"""A batch of fewer prompts isn't sampled: a step takes as long as with more, and so few samples say nothing."""


def batched(prompts: Sequence[Prompt], size: int, label: str = "") -> list[Prompt]:
    """The prompts in their order, each with its `batch`: at most `size` prompts and MOST_TOKENS prefix tokens, all of
    one split, prefix length, continuation length and `max_new_tokens`. Those of one shape are dealt out in turn, so
    that each batch holds all cohorts."""
    shapes = [
        f"{label or p.split}-{len(p.tokens):05d}-c{len(p.continuation):02d}-n{p.max_new_tokens:02d}" for p in prompts
    ]
    total, dealt, named = Counter(shapes), Counter[str](), []
    for prompt, shape in zip(prompts, shapes, strict=True):
        most = max(1, min(size, MOST_TOKENS // len(prompt.tokens)))
        batch = dealt[shape] % -(-total[shape] // most)
        dealt[shape] += 1
        named.append(replace(prompt, batch=f"{shape}-b{batch:02d}"))
    return named


def modes_of(batch: str, size: int) -> tuple[str, ...]:
    """How a batch of `size` prompts with tasks is answered: always greedily, whose outcomes count; sampled as well if
    it is the first of its shape, which stands for the others."""
    return MODES if batch.endswith("-b00") and size >= SAMPLED_FROM else MODES[:1]
