"""KL along a candidate's own answer. `pytest tests/measure/test_compounding.py`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvdrift.cache.packed import PackedCache
from kvdrift.measure import replay
from kvdrift.measure.compounding import EXACT, step_kl
from kvdrift.measure.logits import kl
from kvdrift.measure.reference import Stored, run
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.prompts.prompt import Prompt

PACKED = CachePolicy(name="int2", block=32, layers=(LayerPolicy(Quantizer(bits=2), Quantizer(bits=2)),))


@pytest.fixture
def stored(llama: Any, tmp_path: Path) -> Stored:
    tokens = torch.randint(0, 97, (3, 64), generator=torch.Generator().manual_seed(2)).tolist()
    shared = {"cohort": "attack", "task": "number", "split": "evaluation", "roles": ("filler",) * 64, "scored": 1}
    rest = {"continuation": (1,), "answer": "1", "max_new_tokens": 40, "depth": None, "batch": "b"}
    prompts = tuple(Prompt(id=f"p{row}", tokens=tuple(ids), **shared, **rest) for row, ids in enumerate(tokens))
    llama.set_attn_implementation("sdpa")
    tensors, _ = run(llama, prompts)
    llama.set_attn_implementation("kvdrift")
    save_file(tensors, tmp_path / "b.safetensors")
    return Stored(tmp_path / "b.safetensors", prompts)


def generate(llama: Any, stored: Stored, policy: CachePolicy) -> replay.Generated:
    cache = PackedCache(policy, llama.config, dtype=llama.dtype)
    stored.fill(cache, llama.device, tokens=stored.length - 1)
    return replay.generate(llama, cache, stored.prefix, 40, "greedy", 0, [96])


def test_the_exact_policy_has_none(llama, stored):
    made = generate(llama, stored, EXACT)
    found = step_kl(llama, stored, EXACT, made.tokens)
    assert [len(kls) for kls in found] == [len(tokens) for tokens in made.tokens]
    assert max(map(max, found)) == 0.0


def test_chunks_tell_what_single_steps_do_also_after_the_answers_part(llama, stored):
    """Candidate's own logits, step by step in `generate()`, against an exact cache that is fed one token a step."""
    made = generate(llama, stored, PACKED)
    found = step_kl(llama, stored, PACKED, made.tokens)
    exact = generate(llama, stored, EXACT)
    assert any(a != b for a, b in zip(made.tokens, exact.tokens, strict=True))
    said = torch.tensor([row + [0] * (40 - len(row)) for row in made.tokens])
    cache = PackedCache(EXACT, llama.config, dtype=llama.dtype)
    stored.fill(cache, llama.device, tokens=stored.length - 1)
    logits = replay.score(llama, cache, torch.cat([stored.prefix[:, -1:], said], 1), chunk=1)
    for row, tokens in enumerate(made.tokens):
        p, q = (x[row, : len(tokens)].log_softmax(-1) for x in (logits, made.logits))
        assert found[row] == pytest.approx(kl(p, q).tolist(), rel=1e-2, abs=1e-5)
    assert max(map(max, found)) > 1e-3
