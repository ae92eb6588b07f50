"""E4M3 codes against a table of its 256 values:  pytest tests/quantizers/test_float8.py"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvdrift.quantizers import float8


def value(code: int) -> float:
    """OCP E4M3: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


TABLE = np.array([value(code) for code in range(127)])
"""Every finite value from 0 to 448, in the order of its code."""


def by_hand(x: np.ndarray, stored: type) -> tuple[np.ndarray, np.ndarray]:
    """Nearest code, the even one of two that are equally near, and the stored scale."""
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x) + np.float32(0)
    quotient = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    with np.errstate(all="ignore"):
        scale = np.where(quotient < np.finfo(np.float32).tiny, np.float32(0), quotient).astype(stored)
        step = scale.astype(np.float32)
        scaled = np.clip(x / np.where(step == 0, np.float32(1), step), -448, 448)
    scaled = np.where(step == 0, 0, scaled)
    distance = np.abs(np.abs(scaled.astype(np.float64))[..., None] - TABLE)
    near = np.isclose(distance, distance.min(-1, keepdims=True), rtol=0, atol=0)
    odd = np.where(near, np.arange(127) % 2, 2)
    return odd.argmin(-1) | np.where(np.signbit(scaled), 128, 0), scale


@settings(max_examples=100)
@given(
    x=arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([1, 32])),
        elements=st.one_of(st.floats(-500, 500, width=32), st.sampled_from([0.0, -0.0, 1e-40, 3e38, -3e38, 1e-37])),
    ),
    stored=st.sampled_from([(torch.float32, np.float32), (torch.float16, np.float16)]),
)
def test_codes_equal_the_nearest_of_the_table_bit_for_bit(x: np.ndarray, stored: tuple[torch.dtype, type]) -> None:
    made = float8.encode(torch.from_numpy(x), stored[0])
    codes, scale = by_hand(x, stored[1])
    fits = made.fits.numpy()
    assert np.array_equal(made.codes.numpy()[fits], codes[fits].astype(np.uint8))
    assert made.scale.numpy()[fits].tobytes() == scale[fits].tobytes()
    back = float8.decode(made.codes, made.scale).abs().numpy()[fits]
    assert np.array_equal(back, (TABLE[codes[fits] & 127] * scale[fits].astype(np.float64)).astype(np.float32))


def test_every_code_decodes_to_its_value() -> None:
    codes = torch.tensor([[c for c in range(256) if c & 127 != 127]], dtype=torch.uint8)
    back = float8.decode(codes, torch.ones(1, 1))
    assert back[0].tolist() == [value(c) for c in codes[0].tolist()]


def test_case_4_halves_round_to_the_even_code() -> None:
    """Case 4: between two neighbours of scale 1; the largest value is 448."""
    middles = [(TABLE[c] + TABLE[c + 1]) / 2 for c in range(126)]
    made = float8.encode(torch.tensor([[448.0, *middles]]), torch.float32)
    assert made.scale.item() == 1
    assert made.codes[0, 1:].tolist() == [c + c % 2 for c in range(126)]


@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
@pytest.mark.parametrize("content", [0.0, -0.0, 1e-40])
def test_case_5_an_all_zero_group_reconstructs_exactly(scale: torch.dtype, content: float) -> None:
    """Case 5."""
    made = float8.encode(torch.full((2, 8), content), scale)
    assert made.fits.all()
    assert made.codes.tolist() == [[0] * 8] * 2
    assert torch.equal(float8.decode(made.codes, made.scale), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("content", "scale", "fits"),
    [
        (60_000.0, torch.float16, True),
        (448 * 70_000.0, torch.float16, False),
        (448 * 70_000.0, torch.float32, True),
        (2.0**99, torch.float32, True),
        (2.0**101, torch.float32, False),
        (1e-9, torch.float16, False),
        (1e-9, torch.float32, True),
        (float("inf"), torch.float32, False),
        (float("nan"), torch.float32, False),
    ],
)
def test_case_6_what_the_scale_cannot_hold_does_not_fit(content: float, scale: torch.dtype, fits: bool) -> None:
    """Case 6: scales that vanish or aren't finite escalate, and values that leave attention no room; nothing saturates
    in silence."""
    x = torch.full((1, 8), content)
    x[0, 0] = -content
    made = float8.encode(x, scale)
    assert made.fits.item() is fits
    if fits:
        assert torch.allclose(float8.decode(made.codes, made.scale), x, rtol=2**-4)


@settings(max_examples=50)
@given(x=arrays(np.float32, (2, 32), elements=st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)))
def test_relative_error_within_the_normal_range(x: np.ndarray) -> None:
    made = float8.encode(torch.from_numpy(x), torch.float32)
    back = float8.decode(made.codes, made.scale).numpy()
    normal = np.abs(x) >= 2.0**-6 * made.scale.numpy() * 1.001
    assert (np.abs(back - x) <= 2**-4 * np.abs(x) * 1.001)[normal].all()
