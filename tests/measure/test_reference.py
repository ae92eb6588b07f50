"""The stored reference. `pytest tests/measure/test_reference.py`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch
from transformers.cache_utils import DynamicCache

from kvdrift.measure import replay
from kvdrift.measure.reference import run, store, stored
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


def test_what_the_cache_holds_of_a_continuation_is_stored_too(llama: Any) -> None:
    """As one pass over prefix and continuation would give it; the last token is only predicted, never fed."""
    llama.set_attn_implementation("sdpa")
    asked = prompts(3)
    tensors, cache = run(llama, asked)
    assert cache.get_seq_length() == 32
    whole = DynamicCache(config=llama.config)
    with torch.inference_mode():
        llama(input_ids=torch.tensor([[*p.tokens, *p.continuation[:-1]] for p in asked]), cache=whole)
    llama.set_attn_implementation("kvdrift")
    for index, layer in enumerate(whole.layers):
        for name, exact in (("keys", layer.keys), ("values", layer.values)):
            prefix, new = tensors[f"{name}.{index}"], tensors[f"new_{name}.{index}"]
            assert new.shape == (3, exact.shape[1], 16, exact.shape[3])
            torch.testing.assert_close(torch.cat([prefix, new], dim=2), exact, rtol=1e-4, atol=1e-5)


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
