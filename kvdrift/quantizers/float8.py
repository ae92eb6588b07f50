"""FP8 E4M3 with a dynamic scale per group (OCP 8-bit floating point, arXiv:2209.05433): x ≈ scale · e4m3."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvdrift.quantizers.groups import LARGEST, SMALLEST_NORMAL, Codes, to_float32

E4M3_MAX = 448.0


def encode(x: Float[Tensor, "*groups group"], scale_dtype: torch.dtype) -> Codes:
    """Quantize each group to E4M3: scale = max|x| / 448 as stored, clamped before a round-half-to-even cast.

    E4M3's own subnormals are kept. An all-zero group reconstructs exactly. Relative error of a value in E4M3's normal
    range is at most 2⁻⁴.
    """
    x = to_float32(x)
    largest = x.abs().amax(-1, keepdim=True)
    quotient = largest / x.new_tensor(E4M3_MAX)  # as in `uniform`, so that CUDA divides too
    scale = torch.where(quotient < SMALLEST_NORMAL, 0.0, quotient).to(scale_dtype)
    step = scale.float()
    scaled = (x / torch.where(step == 0, 1.0, step)).nan_to_num(0.0).clamp(-E4M3_MAX, E4M3_MAX)
    codes = torch.where(step == 0, 0.0, scaled).to(torch.float8_e4m3fn).view(torch.uint8)
    held = (E4M3_MAX * step <= LARGEST) & ((step != 0) | (largest == 0))
    return Codes(codes, scale, None, held[..., 0] & x.isfinite().all(-1))


def decode(codes: UInt8[Tensor, "*groups group"], scale: Float[Tensor, "*groups 1"]) -> Float[Tensor, "*groups group"]:
    """float32 values: E4M3 widened, times the stored scale."""
    return codes.view(torch.float8_e4m3fn).float() * scale.float()
