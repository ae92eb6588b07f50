"""Which policy serves a request. `python -m pytest tests/serving/test_router.py`"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvdrift.ledger import CacheShape, account, byte_break_even, load_policy
from kvdrift.policy import CachePolicy
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
    assert "shortened from 2,000" in decision.reasons[-1]
    assert route(Request("hopeless", 2000, 16, may_shorten=True), LADDER, SHAPE, Memory(10)).policy is None


def test_under_pressure_a_prompt_is_packed_wherever_that_saves_bytes() -> None:
    patient = replace(KIVI4, min_length=4096)
    smaller = byte_break_even(KIVI4, SHAPE, 4096)
    assert smaller is not None
    free = account(KIVI4, SHAPE, 2016, 1).format_bytes
    assert route(Request("r", 2000, 16), (patient,), SHAPE, Memory(free)).policy is None
    decision = route(Request("r", 2000, 16), (patient,), SHAPE, Memory(free, prefer_packed=True))
    assert decision.policy == replace(patient, min_length=smaller)


@pytest.mark.parametrize("policy", [KIVI4, INT8, EXACT], ids=lambda policy: policy.name)
@pytest.mark.parametrize("limit", [None, 2048])
def test_under_pressure_no_request_holds_more_than_exact(policy: CachePolicy, limit: int | None) -> None:
    """Packed, int8 takes 1.5 times an exact cache's bytes at 128 tokens."""
    ladder = (replace(policy, max_length=limit),)
    for length in range(16, 600, 7):
        served = route(Request("r", length - 15, 15), ladder, SHAPE, replace(PLENTY, prefer_packed=True)).policy
        assert served is not None
        ledger = account(served, SHAPE, length, 1)
        assert ledger.format_bytes <= ledger.reference
        free = Memory(ledger.reference, prefer_packed=True)
        assert route(Request("r", length - 15, 15), ladder, SHAPE, free).policy == served


def test_memory_counts_what_is_held_before_a_sequence_packs() -> None:
    """Exact to 999 tokens, then both until a rollback of 16 can't lead back there, then packed."""
    late = replace(INT8, min_length=1000)
    dense, both, packed = (account(late, SHAPE, length, 1).format_bytes for length in (999, 1015, 1016))
    assert packed < dense < both
    for request, need in (
        (Request("grows", 900, 116), both),
        (Request("packs at once", 1000, 16), both),
        (Request("is packed at once", 1016, 16), account(late, SHAPE, 1032, 1).format_bytes),
        (Request("stays exact", 900, 99), dense),
    ):
        assert route(request, (late,), SHAPE, Memory(need - 1)).policy is None
        assert route(request, (late,), SHAPE, Memory(need)).policy == late
    hasty = replace(late, rollback=0)
    assert route(Request("grows", 900, 116), (hasty,), SHAPE, Memory(dense)).policy == hasty


def test_under_pressure_a_request_that_holds_both_for_a_while_is_packed_only_if_exact_ends_up_larger() -> None:
    smaller = byte_break_even(INT8, SHAPE, 4096)
    assert smaller is not None
    pressed = replace(PLENTY, prefer_packed=True)

    def least(request: Request) -> int:
        served = route(request, (INT8,), SHAPE, pressed).policy
        assert served is not None
        return served.min_length

    assert least(Request("packs at once", smaller + INT8.rollback, 0)) == smaller
    assert least(Request("holds both", smaller, 16)) > smaller + 16
    assert least(Request("holds both, and grows", smaller, 4 * smaller)) == smaller


@pytest.mark.parametrize("least", [0, 400])
def test_a_shortened_prompt_is_the_longest_that_fits(least: int) -> None:
    late = replace(INT8, min_length=least)
    for free in (10_000, 400_000, 800_000, 1_200_000):
        decision = route(Request("r", 1200, 16, may_shorten=True), (late,), SHAPE, Memory(free))
        fitting = [n for n in range(1, 1200) if route(Request("r", n, 16), (late,), SHAPE, Memory(free)).policy]
        assert decision.prompt_tokens == max(fitting, default=0)


@pytest.mark.parametrize("value", [3.0, -3.0, float("inf"), float("nan")])
def test_outliers_are_found_by_layer_and_tensor(value: float) -> None:
    keys, values = ([torch.ones(1, 2, 8, 4) for _ in range(3)] for _ in "kv")
    limits = [{"keys": 2.0, "values": 2.0}] * 3
    assert outlier_layers(keys, values, limits) == ()
    values[1][0, 1, 5, 2] = value
    assert outlier_layers(keys, values, limits) == (1,)
