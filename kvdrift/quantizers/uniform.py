"""Asymmetric uniform integers, as in KIVI (arXiv:2402.02750): x ≈ scale · code + low, per group."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvdrift.quantizers.groups import LARGEST, Codes, to_float32


def encode(x: Float[Tensor, "*groups group"], bits: int, scale_dtype: torch.dtype) -> Codes:
    """Quantize each group to `bits` bits.

    scale = high/L − low/L in float32 (so that a span beyond float16 doesn't overflow), rounded to `scale_dtype`;
    codes come from the *stored* scale and low, rounding half to even. A constant group gets scale 0 and reconstructs
    to its stored low. |x − decode(encode(x))| ≤ scale/2, plus the rounding of scale and low to `scale_dtype`.
    """
    levels = (1 << bits) - 1
    x = to_float32(x)
    divisor = x.new_tensor(levels)  # by a tensor: torch on CUDA turns division by a Python number into a product
    smallest, high = torch.aminmax(x, dim=-1, keepdim=True)
    scale = (high / divisor - smallest / divisor).to(scale_dtype)
    low = smallest.to(scale_dtype) + 0.0
    step, base = scale.float(), low.float()
    codes = ((x - base) / torch.where(step == 0, 1.0, step)).round().clamp(0, levels)
    codes = torch.where(step == 0, 0.0, codes).nan_to_num(0.0, 0.0, 0.0)
    held = (base.abs() <= LARGEST) & ((levels * step + base).abs() <= LARGEST)  # false for NaN
    held &= (step != 0) | (high == smallest)
    return Codes(codes.to(torch.uint8), scale, low, held[..., 0] & x.isfinite().all(-1))


def decode(
    codes: UInt8[Tensor, "*groups group"], scale: Float[Tensor, "*groups 1"], low: Float[Tensor, "*groups 1"]
) -> Float[Tensor, "*groups group"]:
    """float32 values: one product and one sum, each rounded."""
    return codes.float() * scale.float() + low.float()
