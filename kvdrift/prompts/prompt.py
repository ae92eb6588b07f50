"""The prompt: tokens, one role a token, and what counts as its right continuation.

This file knows the value and its table. It knows no cohort, no tokenizer and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

LENGTH_STEP = 16
"""Prefix lengths are multiples of this, so that every candidate seals blocks at the same places."""

GENERATED = "generated"
"""The role of a continuation's tokens, which the cache holds beside the prompt's as soon as they were fed."""
REGIONS = ("prompt", GENERATED)
"""The prompt itself, whatever its roles, and what is behind it."""

EVALUATION = "evaluation"
CALIBRATION = "calibration"


class PromptError(ValueError):
    """A prompt, or a specification of prompts, that can't be built."""


@dataclass(frozen=True)
class Prompt:
    """One prefix with its teacher-forced continuation.

    `continuation` is held-out source text, or the gold answer and its end of turn; only its first `scored` tokens
    count, the rest is padding that makes the batch rectangular. Prompts of one `batch` share split, prefix
    length, continuation length and `max_new_tokens`. `task` names a grader, or is empty when the prompt is only
    teacher-forced (then `max_new_tokens` may be 0).
    """

    id: str
    cohort: str
    task: str
    split: str
    tokens: tuple[int, ...]
    roles: tuple[str, ...]
    continuation: tuple[int, ...]
    scored: int
    answer: str
    max_new_tokens: int
    depth: float | None
    batch: str

    def __post_init__(self) -> None:
        if len(self.roles) != len(self.tokens):
            raise PromptError(f"{self.id} has {len(self.tokens)} tokens and {len(self.roles)} roles; give one a token")
        if len(self.tokens) % LENGTH_STEP:
            raise PromptError(f"{self.id} has {len(self.tokens)} tokens; a prefix is a multiple of {LENGTH_STEP}")
        if not 0 <= self.scored <= len(self.continuation):
            raise PromptError(f"{self.id} scores {self.scored} of {len(self.continuation)} continuation tokens")
        if self.split not in (EVALUATION, CALIBRATION):
            raise PromptError(f"{self.id} has split {self.split!r}; allowed: {EVALUATION}, {CALIBRATION}")


SCHEMA: dict[str, pl.DataType] = {
    "id": pl.String(),
    "cohort": pl.String(),
    "task": pl.String(),
    "split": pl.String(),
    "tokens": pl.List(pl.Int32),
    "roles": pl.List(pl.String),
    "continuation": pl.List(pl.Int32),
    "scored": pl.Int32(),
    "answer": pl.String(),
    "max_new_tokens": pl.Int32(),
    "depth": pl.Float64(),
    "batch": pl.String(),
}
"""The columns of the prompt table."""


def to_frame(prompts: Iterable[Prompt]) -> pl.DataFrame:
    """A row a prompt, in the given order; `from_frame` reads it back."""
    kept = list(prompts)
    return pl.DataFrame({name: [getattr(prompt, name) for prompt in kept] for name in SCHEMA}, schema=SCHEMA)


def from_frame(frame: pl.DataFrame) -> list[Prompt]:
    """The prompts that `to_frame` wrote."""
    return [_prompt(row) for row in frame.select(list(SCHEMA)).iter_rows(named=True)]


def _prompt(row: dict[str, Any]) -> Prompt:
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Prompt(**(row | lists))
