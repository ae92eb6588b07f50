"""The stored reference. `pytest tests/measure/test_reference.py`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
from transformers.cache_utils import DynamicCache

from kvdrift.measure import replay
from kvdrift.measure.reference import store, stored
from kvdrift.prompts.batches import batched
from kvdrift.prompts.prompt import Prompt


class Words:
    """Tokens as words."""

    eos_token_id = 96

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def prompts(count: int) -> list[Prompt]:
    tokens = torch.randint(0, 97, (count, 49), generator=torch.Generator().manual_seed(4)).tolist()
    shared = {"cohort": "needle", "task": "number", "split": "evaluation", "roles": ("filler",) * 32, "scored": 17}
    rest = {"answer": "1", "max_new_tokens": 6, "depth": None, "batch": "b"}
    return [
        Prompt(id=f"p{row}", tokens=tuple(ids[:32]), continuation=tuple(ids[32:]), **shared, **rest)
        for row, ids in enumerate(tokens)
    ]


def test_all_prompts_are_answered_greedily_and_a_first_batch_sampled_as_if_nothing_had_run_before(
    llama: Any, tmp_path: Path
) -> None:
    llama.set_attn_implementation("sdpa")
    asked = batched(prompts(20), size=10)
    store(llama, Words(), asked, tmp_path, seed=5)
    stored_in = stored(tmp_path, asked)
    rows = pl.read_parquet(tmp_path / "generations.parquet")
    first = [prompt.id for prompt in asked if prompt.batch.endswith("-b00")]
    assert len(first) == 10
    assert sorted(rows.filter(mode="greedy")["prompt"]) == sorted(prompt.id for prompt in asked)
    assert rows.filter(mode="sampled")["prompt"].to_list() == first
    cache = DynamicCache(config=llama.config)
    for index in range(stored_in[0].layers):
        cache.update(*(x[:, :, :-1] for x in stored_in[0].layer(index)), index)
    stop = replay.stop_tokens(llama, Words())
    again = replay.generate(llama, cache, stored_in[0].prefix, asked[0].max_new_tokens, "sampled", 5, stop)
    llama.set_attn_implementation("kvdrift")
    assert rows.filter(mode="sampled")["tokens"].to_list() == again.tokens
