"""Uniform codes against an independent numpy implementation:  pytest tests/quantizers/test_uniform.py"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvdrift.quantizers import uniform

DTYPES = {"float16": (torch.float16, np.float16), "float32": (torch.float32, np.float32)}


def by_hand(x: np.ndarray, bits: int, stored: type) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale, low and whether each group fits, step by step in float32, rounding half to even."""
    levels = np.float32(2**bits - 1)
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x) + np.float32(0)
        low32, high32 = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        scale = (high32 / levels - low32 / levels).astype(stored)
        low = low32.astype(stored) + stored(0)
        step, base = scale.astype(np.float32), low.astype(np.float32)
        codes = np.clip(np.rint((x - base) / np.where(step == 0, np.float32(1), step)), 0, levels)
        top = levels * step + base
        fits = np.isfinite(x).all(-1) & (np.maximum(np.abs(base), np.abs(top)) <= 2.0**100)[..., 0]
        fits &= ~((step == 0) & (high32 != low32))[..., 0]
        codes = np.where(step == 0, 0, codes)
    return codes, scale, low, fits


FLOATS = st.one_of(
    st.floats(width=32),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1e-40, -1e-39, 1.17549435e-38, 6e-8, 60_000.0, -60_000.0, 65504.0]),
    st.sampled_from([1e30, -1e30, 2.0**100, -(2.0**100), 2.0**101, 3.4e38, -3.4e38]),
)


@settings(max_examples=200)
@given(
    x=arrays(np.float32, st.tuples(st.integers(1, 4), st.sampled_from([1, 8, 32])), elements=FLOATS),
    bits=st.sampled_from([2, 4, 8]),
    scale=st.sampled_from(sorted(DTYPES)),
    source=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_case_4_codes_scales_and_lows_equal_numpys_bit_for_bit(
    x: np.ndarray, bits: int, scale: str, source: torch.dtype
) -> None:
    """Case 4: raw codes, not a tolerance. Groups that fit agree in every bit; which fit is agreed on for all."""
    given_ = torch.from_numpy(x).to(source)
    ours = uniform.encode(given_, bits, DTYPES[scale][0])
    codes, step, low, fits = by_hand(given_.float().numpy(), bits, DTYPES[scale][1])
    assert np.array_equal(ours.fits.numpy(), fits)
    assert np.array_equal(ours.codes.numpy()[fits], codes[fits].astype(np.uint8))
    assert ours.scale.numpy()[fits].tobytes() == step[fits].tobytes()
    assert ours.low is not None
    assert ours.low.numpy()[fits].tobytes() == low[fits].tobytes()
    assert uniform.decode(ours.codes, ours.scale, ours.low)[ours.fits].isfinite().all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_case_4_halves_round_to_even(bits: int) -> None:
    """Case 4: values at k + 0.5 steps, of a group with scale 1."""
    levels = 2**bits - 1
    halves = torch.arange(levels) + 0.5
    group = torch.cat([torch.tensor([0.0, float(levels)]), halves])
    made = uniform.encode(group[None], bits, torch.float16)
    assert made.scale.item() == 1
    expected = [2 * ((k + 1) // 2) for k in range(levels)]
    assert made.codes[0, 2:].tolist() == expected


@settings(max_examples=100)
@given(
    x=arrays(np.float32, (3, 32), elements=st.floats(-1000, 1000, width=32)),
    bits=st.sampled_from([2, 4, 8]),
    scale=st.sampled_from(sorted(DTYPES)),
)
def test_the_error_is_half_a_step_and_the_rounding_of_scale_and_low(x: np.ndarray, bits: int, scale: str) -> None:
    made = uniform.encode(torch.from_numpy(x), bits, DTYPES[scale][0])
    back = uniform.decode(made.codes, made.scale, made.low).double().numpy()
    levels, exact = 2**bits - 1, x.astype(np.float64)
    low, high = exact.min(-1, keepdims=True), exact.max(-1, keepdims=True)
    drift = np.abs(made.low.double().numpy() - low) + levels * np.abs(
        made.scale.double().numpy() - (high - low) / levels
    )
    bound = made.scale.double().numpy() / 2 + drift + 1e-6 * np.abs(exact).max(-1, keepdims=True)
    fits = made.fits.numpy()
    assert (np.abs(back - exact) <= bound)[fits].all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -3.0, 60_000.0, 2.0**-14, 1e-40])
@pytest.mark.parametrize("count", [1, 32])
def test_case_5_a_constant_group_reconstructs_exactly(bits: int, value: float, count: int) -> None:
    """Case 5: constant, all zero, a single token; a subnormal counts as zero."""
    made = uniform.encode(torch.full((2, count), value), bits, torch.float16)
    assert made.fits.all()
    expected = 0.0 if abs(value) < 1e-38 else value
    back = uniform.decode(made.codes, made.scale, made.low)
    assert torch.equal(back, torch.full((2, count), expected))
    assert not torch.signbit(back[back == 0]).any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_case_6_a_span_beyond_float16_does_not_overflow(bits: int) -> None:
    """Case 6: ±60,000 in one group: the span, 120,000, is never formed in float16."""
    group = torch.linspace(-60_000, 60_000, 32).half()[None]
    made = uniform.encode(group, bits, torch.float16)
    back = uniform.decode(made.codes, made.scale, made.low)
    assert made.fits.all()
    assert back.isfinite().all()
    assert (back - group.float()).abs().max() <= 60_000 / (2**bits - 1) * 1.01


@pytest.mark.parametrize("value", [1e30, 70_000.0, float("inf"), -float("inf"), float("nan")])
def test_case_6_what_the_scale_dtype_cannot_hold_does_not_fit(value: float) -> None:
    """Case 6: escalated, not saturated."""
    group = torch.linspace(-1, 1, 32)
    group[5] = -abs(value) if value == value else value
    assert not uniform.encode(group[None], 4, torch.float16).fits.any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_leaves_attention_no_room_does_not_fit(sign: float) -> None:
    """A decoded value of 2¹⁰⁰ is the largest that float32 scales may stand for."""
    for most, fits in ((2.0**100, True), (2.0**100 + 2.0**77, False)):
        group = torch.zeros(1, 32)
        group[0, 5] = sign * most
        assert uniform.encode(group, 2, torch.float32).fits.item() is fits
        assert uniform.encode(torch.full((1, 32), sign * most), 2, torch.float32).fits.item() is fits


def test_a_scale_that_vanishes_on_a_group_that_is_not_constant_does_not_fit() -> None:
    group = torch.tensor([[1.0, 1.0 + 2**-23]])
    assert not uniform.encode(group, 8, torch.float16).fits.any()
    assert uniform.encode(group, 8, torch.float32).fits.all()


def test_what_is_broken_in_one_group_stays_there() -> None:
    x = torch.randn(4, 32)
    whole = uniform.encode(x.clone(), 4, torch.float16)
    x[1, 3] = float("nan")
    made = uniform.encode(x, 4, torch.float16)
    assert made.fits.tolist() == [True, False, True, True]
    assert torch.equal(made.codes[[0, 2, 3]], whole.codes[[0, 2, 3]])
