"""Codes to bytes and back:  pytest tests/quantizers/test_bitpack.py"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvdrift.quantizers import bitpack


@given(data=st.data(), bits=st.sampled_from([2, 4, 8]), rows=st.integers(1, 3), width=st.sampled_from([4, 8, 72, 80]))
def test_unpack_inverts_pack_and_byte_i_holds_every_nth_code(
    data: st.DataObject, bits: int, rows: int, width: int
) -> None:
    codes = data.draw(arrays(np.uint8, (rows, width), elements=st.integers(0, 2**bits - 1)))
    packed = bitpack.pack(torch.from_numpy(codes), bits)
    assert packed.shape == (rows, width * bits // 8)
    assert torch.equal(bitpack.unpack(packed, bits), torch.from_numpy(codes))
    run = packed.shape[1]
    for i in range(run):
        by_hand = sum(codes[:, i + plane * run].astype(int) << (bits * plane) for plane in range(8 // bits))
        assert packed[:, i].tolist() == by_hand.tolist()


@pytest.mark.parametrize(("bits", "expected"), [(4, [0x31, 0x42]), (2, [0b00_11_10_01])])
def test_a_row_by_hand(bits: int, expected: list[int]) -> None:
    codes = [1, 2, 3, 4] if bits == 4 else [1, 2, 3, 0]
    assert bitpack.pack(torch.tensor([codes], dtype=torch.uint8), bits)[0].tolist() == expected
