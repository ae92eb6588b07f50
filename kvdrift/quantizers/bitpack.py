"""Codes to bytes, planar: with n codes a byte, byte i of a row holds codes i, i + row/n, i + 2·row/n …, low bits first.

Planar rather than neighbouring, so that a kernel turns one run of bytes into n runs of consecutive elements.
"""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor


def pack(codes: UInt8[Tensor, "*rows row"], bits: int) -> UInt8[Tensor, "*rows row_bytes"]:
    """Pack `bits`-bit codes; the row must be a multiple of 8/bits."""
    per_byte = 8 // bits
    planes = codes.unflatten(-1, (per_byte, -1))
    packed = planes[..., 0, :].clone()
    for plane in range(1, per_byte):
        packed |= planes[..., plane, :] << (bits * plane)
    return packed


def unpack(packed: UInt8[Tensor, "*rows row_bytes"], bits: int) -> UInt8[Tensor, "*rows row"]:
    """The inverse of `pack`."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * plane)) & mask for plane in range(8 // bits)], dim=-1)
