"""The stored reference. `pytest tests/measure/test_reference.py`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch

from kvdrift.measure.reference import store
from kvdrift.prompts.batches import rows_of
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


def test_all_rows_are_decoded_greedily_and_the_picked_ones_sampled_as_if_alone(llama: Any, tmp_path: Path) -> None:
    llama.set_attn_implementation("sdpa")
    asked = prompts(20)
    store(llama, Words(), asked, tmp_path / "all", seed=5)
    picked = rows_of("sampled", 20)
    store(llama, Words(), [asked[row] for row in picked], tmp_path / "few", seed=5)
    llama.set_attn_implementation("kvdrift")
    every, few = (pl.read_parquet(tmp_path / name / "generations.parquet") for name in ("all", "few"))
    assert every.filter(mode="greedy")["prompt"].to_list() == [prompt.id for prompt in asked]
    assert every.filter(mode="sampled")["prompt"].to_list() == [f"p{row}" for row in picked]
    assert every.filter(pl.col("prompt").is_in(few["prompt"].implode()) & (pl.col("mode") == "sampled")).equals(
        few.filter(mode="sampled")
    )
