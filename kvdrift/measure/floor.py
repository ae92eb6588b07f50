"""The noise floor: the reference against itself when only the schedule changes. Drift is read against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch

from kvdrift.measure import text
from kvdrift.measure.logits import scored_rows
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import CHUNK, generate, score
from kvdrift.prompts.graders import grade


@dataclass(frozen=True)
class Schedule:
    """What differs from the reference's own run: fewer rows in a batch, perhaps one thread, or tokens fed singly."""

    name: str
    rows: int
    threads: int | None = None
    chunk: int = CHUNK


SCORING = (
    Schedule("alone", 1),
    Schedule("alone, one thread", 1, threads=1),
    Schedule("alone, token by token", 1, chunk=1),
)
ANSWERING = (Schedule("batch of four", 4), Schedule("batch of four, one thread", 4, threads=1))


@torch.inference_mode()
def noise_floor(model: Any, stored: Stored) -> pl.DataFrame:
    """Score a batch's first prompt again, over the same stored keys and values, and compare with its stored logits.

    A row a schedule of SCORING and scored token: `schedule`, and what `scored_rows` tells of the token.
    """
    prompt, frames = stored.prompts[0], []
    continuation = torch.tensor([prompt.continuation], device=model.device)
    (reference,) = stored.read("logits")
    for schedule in SCORING:
        with _threads(schedule.threads):
            logits = score(model, _cache(model, stored, 1, stored.length), continuation, schedule.chunk)[0].cpu()
        frames.append(scored_rows(prompt, reference[0], logits).with_columns(schedule=pl.lit(schedule.name)))
    return pl.concat(frames)


def generation_floor(
    model: Any, tokenizer: Any, stored: Stored, made: Mapping[str, Sequence[int]], seed: int, stop: list[int]
) -> pl.DataFrame:
    """Answer a batch's first prompts again, greedily, and compare with `made`, the reference's tokens by prompt.

    A row a schedule of ANSWERING and prompt: schedule, prompt, cohort, first_divergence, correct_reference, correct.
    """
    rows = []
    for schedule in ANSWERING:
        prompts = stored.prompts[: schedule.rows]
        cache, prefix = _cache(model, stored, len(prompts), stored.length - 1), stored.prefix[: len(prompts)]
        with _threads(schedule.threads):
            out = generate(model, cache, prefix.to(model.device), prompts[0].max_new_tokens, "greedy", seed, stop)
        for prompt, tokens in zip(prompts, out.tokens, strict=True):
            was, now = (
                grade(prompt.task, tokenizer.decode(x, skip_special_tokens=True), prompt.answer).correct
                for x in (made[prompt.id], tokens)
            )
            named = {"schedule": schedule.name, "prompt": prompt.id, "cohort": prompt.cohort}
            parted = text.first_divergence(made[prompt.id], tokens)
            rows.append(named | {"first_divergence": parted, "correct_reference": was, "correct": now})
    return pl.DataFrame(rows, schema_overrides={"first_divergence": pl.Int64}, infer_schema_length=None)


def _cache(model: Any, stored: Stored, rows: int, tokens: int) -> Any:
    """The first rows' stored keys and values as the exact model's own cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for index in range(stored.layers):
        cache.update(*(x[:rows, :, :tokens].to(model.device) for x in stored.layer(index)), index)
    return cache


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
