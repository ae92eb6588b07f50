"""Which policy serves a request. `python -m pytest tests/serving/test_router.py`"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvdrift.ledger import CacheShape, account, load_policy
from kvdrift.serving.router import Memory, Request, outlier_layers, route

SHAPE = CacheShape(layers=4, kv_heads=2, head_dim=64, query_heads=4)
KIVI4, INT8, EXACT = (load_policy(name) for name in ("kivi4", "int8", "exact"))
LADDER = (replace(KIVI4, max_length=2048), INT8, EXACT)
PLENTY = Memory(1 << 40)


def served(request: Request, memory: Memory = PLENTY, shape: CacheShape = SHAPE) -> str | None:
    policy = route(request, LADDER, shape, memory).policy
    return None if policy is None else policy.name


@pytest.mark.parametrize(("prompt", "policy"), [(2032, "kivi4"), (2033, "int8")])
def test_a_request_beyond_the_evaluated_length_goes_up_the_ladder(prompt: int, policy: str) -> None:
    assert served(Request("r", prompt, 16)) == policy


def test_an_unsupported_head_shape_is_served_by_a_policy_that_fits() -> None:
    """Case 3, at the door."""
    decision = route(Request("r", 512, 16), LADDER, replace(SHAPE, head_dim=72), PLENTY)
    assert decision.policy == INT8
    assert "head_dim 72" in decision.reasons[0]


def test_a_request_with_outliers_gets_eight_bits_or_more() -> None:
    assert served(Request("r", 512, 16, outlier_layers=(3,))) == "int8"


def test_memory_rejects_and_shortens_only_when_asked() -> None:
    tight = Memory(account(KIVI4, SHAPE, 1024, 1).format_bytes)
    assert served(Request("fits", 1008, 16), tight) == "kivi4"
    assert served(Request("rejected", 2000, 16), tight) is None
    decision = route(Request("shortened", 2000, 16, may_shorten=True), LADDER, SHAPE, tight)
    assert decision.policy is not None
    assert 0 < decision.prompt_tokens < 2000
    assert account(decision.policy, SHAPE, decision.prompt_tokens + 16, 1).format_bytes <= tight.free_bytes
    assert "shortened from 2000" in decision.reasons[-1]
    assert route(Request("hopeless", 2000, 16, may_shorten=True), LADDER, SHAPE, Memory(10)).policy is None


def test_under_pressure_a_short_prompt_is_packed_too() -> None:
    patient = replace(KIVI4, min_length=4096)
    free = account(KIVI4, SHAPE, 2016, 1).format_bytes
    assert route(Request("r", 2000, 16), (patient,), SHAPE, Memory(free)).policy is None
    decision = route(Request("r", 2000, 16), (patient,), SHAPE, Memory(free, prefer_packed=True))
    assert decision.policy == replace(patient, min_length=0)


@pytest.mark.parametrize("value", [3.0, -3.0, float("inf"), float("nan")])
def test_outliers_are_found_by_layer_and_tensor(value: float) -> None:
    keys, values = ([torch.ones(1, 2, 8, 4) for _ in range(3)] for _ in "kv")
    limits = [{"keys": 2.0, "values": 2.0}] * 3
    assert outlier_layers(keys, values, limits) == ()
    values[1][0, 1, 5, 2] = value
    assert outlier_layers(keys, values, limits) == (1,)
