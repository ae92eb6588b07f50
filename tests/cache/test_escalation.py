"""Blocks that their format can't hold stay exact and are counted:  pytest tests/cache/test_escalation.py"""

from __future__ import annotations

import pytest
import torch
from stream import oracle, policy, stream, tokens

FP8 = {"format": "fp8_e4m3", "bits": 8, "scale_dtype": "float16"}


def test_case_6_a_block_whose_span_overflows_fp16_is_packed_all_the_same(backend: str) -> None:
    """Case 6: ±60,000 in one group fits float32 arithmetic; its scale fits fp16 at 4 bits, so the block is packed."""
    everything = tokens(120)
    everything.v[0, 0, 40, :2] = torch.tensor([60_000.0, -60_000.0])
    made = policy()
    fed = stream(made)
    out = fed.feed_all(everything, [60] + [1] * 60)
    assert out.isfinite().all()
    assert fed.cache.escalated_blocks == 0
    expected = oracle(made, everything, prefill=60)
    assert ((out.double() - expected).abs() <= 1e-5 * expected.abs() + 2e-2).all()


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_a_block_that_does_not_fit_is_held_exact_and_counted(backend: str, value: float, tensor: str) -> None:
    everything = tokens(120)
    getattr(everything, tensor)[0, 1, 40, 3] = value
    fed = stream(policy())
    fed.feed(everything.span(0, 60))
    fed.feed_all(everything.span(60, 120), [1] * 60)
    assert [x.page < 0 for x in fed.layer.segments[0]] == [False, True, False]
    assert fed.cache.escalated_blocks == 1
    assert fed.layer.pool.used == 2
    assert fed.layer.held == [32]
    kept = fed.layer.sequences.exact.keys[0, :, :32]
    assert kept.numpy().tobytes() == everything.k[0, :, 32:64].contiguous().numpy().tobytes()
    assert fed.cache.ledger().format_bytes == fed.cache.storage_bytes()


def test_an_escalated_block_answers_as_exact(backend: str) -> None:
    everything = tokens(130)
    everything.v[0, 1, 40, 3] = 1e30
    everything.q[:, 2:] = 0  # the heads that read it would drown everything else
    made = policy(sink_tokens=4, residual_window=12)
    fed = stream(made)
    out = fed.feed_all(everything, [20] + [11] * 10)
    expected = oracle(made, everything, prefill=20)
    assert fed.cache.escalated_blocks == 1
    assert (out[:, :2].double() - expected[:, :2]).abs().max() < 2e-5
    assert ((out.double() - expected).abs() <= 1e-5 * expected.abs() + 2e-5).all()


def test_fp8_with_fp16_scales_escalates_what_the_scale_cannot_hold() -> None:
    everything = tokens(64)
    everything.k[0, 0, 5, 0] = 448.0 * 70_000
    fed = stream(policy(key=FP8, value=FP8))
    fed.feed(everything)
    assert [x.page < 0 for x in fed.layer.segments[0]] == [True, False]


def test_case_5_constant_and_all_zero_blocks_decode_exactly(backend: str) -> None:
    """Case 5: a constant block, an all-zero block; an average over equal values is that value."""
    everything = tokens(96)
    everything.k[:], everything.v[:] = 0.5, -3.0
    everything.v[:, :, :32] = 0.0
    fed = stream(policy())
    out = fed.feed_all(everything, [64] + [1] * 32)
    assert fed.cache.escalated_blocks == 0
    shares = torch.tensor([(p + 1 - 32) / (p + 1) for p in range(64, 96)])
    assert torch.allclose(out[0, 0, 64:, 0], -3.0 * shares, atol=1e-6)
