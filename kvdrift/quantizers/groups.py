"""What every family does to its input first, and the form that codes take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
LARGEST = 2.0**100
"""The largest magnitude that codes may stand for. Attention takes a decoded value apart, into parts of up to five times
its size (`cuda` has a uniform code as 2^bits + code), and multiplies keys by queries: 2²⁷ are left for both."""


@dataclass(frozen=True)
class Codes:
    """Unpacked codes of groups: one byte a code, scale and low as stored, and whether each group could be held."""

    codes: UInt8[Tensor, "*groups group"]
    scale: Float[Tensor, "*groups 1"]
    low: Float[Tensor, "*groups 1"] | None
    fits: Bool[Tensor, "*groups"]
    """False where the group must stay exact: a value isn't finite, the scale vanished, or a low or decoded value is
    larger than `LARGEST`."""


def to_float32(x: Float[Tensor, "*groups group"]) -> Float[Tensor, "*groups group"]:
    """float32 with subnormals read as zero (GPU compilers flush them, so every backend must) and no negative zero."""
    x = x.float()
    return torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x) + 0.0
