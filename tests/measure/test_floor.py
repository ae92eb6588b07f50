"""The reference against itself. `pytest tests/measure/test_floor.py`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from kvdrift.measure.floor import ANSWERING, SCORING, generation_floor, noise_floor
from kvdrift.measure.reference import Stored, run
from kvdrift.measure.replay import generate
from kvdrift.prompts.prompt import Prompt
from kvdrift.report.floor import noise_floor as report

STOP = [96]


class Digits:
    """Every token is a digit."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(str(token % 10) for token in tokens)


@pytest.fixture
def stored(llama: Any, tmp_path: Path) -> Stored:
    tokens = torch.randint(0, 97, (6, 81), generator=torch.Generator().manual_seed(3)).tolist()
    shared = {"cohort": "needle", "task": "number", "split": "evaluation", "roles": ("filler",) * 64, "scored": 17}
    rest = {"answer": "1", "max_new_tokens": 8, "depth": None, "batch": "b"}
    prompts = tuple(
        Prompt(id=f"p{row}", tokens=tuple(ids[:64]), continuation=tuple(ids[64:]), **shared, **rest)
        for row, ids in enumerate(tokens)
    )
    llama.set_attn_implementation("sdpa")
    tensors, _ = run(llama, prompts)
    save_file(tensors, tmp_path / "b.safetensors")
    yield Stored(tmp_path / "b.safetensors", prompts)
    llama.set_attn_implementation("kvdrift")


@torch.inference_mode()
def answers(llama: Any, stored: Stored) -> dict[str, list[int]]:
    cache = DynamicCache(config=llama.config)
    for index in range(stored.layers):
        cache.update(*(x[:, :, :-1] for x in stored.layer(index)), index)
    made = generate(llama, cache, stored.prefix, 8, "greedy", 0, STOP)
    return {prompt.id: tokens for prompt, tokens in zip(stored.prompts, made.tokens, strict=True)}


def test_in_float32_other_schedules_say_the_same(llama, stored):
    found = noise_floor(llama, stored)
    assert found["schedule"].unique(maintain_order=True).to_list() == [schedule.name for schedule in SCORING]
    assert found.height == 3 * 16
    assert found["kl"].max() < 1e-6
    again = generation_floor(llama, Digits(), stored, answers(llama, stored), 0, STOP)
    assert again.height == 4 * len(ANSWERING)
    assert again["first_divergence"].null_count() == again.height
    assert torch.get_num_threads() == 1


def test_what_a_schedule_changes_is_counted(llama, stored):
    made = answers(llama, stored)
    made["p1"] = [1, *made["p1"]]
    right = replace(stored, prompts=tuple(replace(p, answer=Digits().decode(made[p.id], True)) for p in stored.prompts))
    told = report(None, generation_floor(llama, Digits(), right, made, 0, STOP))["answers"]
    assert told == [{"schedule": s.name, "answers": 4, "changed": 1, "outcomes": 1} for s in ANSWERING]
