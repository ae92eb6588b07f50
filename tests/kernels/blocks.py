"""Layouts and awkward blocks: what the kernels' property tests draw from."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KIVI4 = LayerPolicy(Quantizer(bits=4, axis="channel", group=64), Quantizer(bits=4))


@st.composite
def quantizers(draw: st.DrawFn, head_dim: int, block: int, tensor: str) -> Quantizer | None:
    scale = draw(st.sampled_from(["float16", "float32"]))
    form = draw(st.sampled_from(["exact", "fp8", "token", "token", *(["channel"] * 3 if tensor == "key" else [])]))
    if form == "exact":
        return None
    groups = [0, *(group for group in (8, 16, 32, 64, 128, 256) if head_dim % group == 0)]
    if form == "fp8":
        return Quantizer("fp8_e4m3", 8, "token", draw(st.sampled_from(groups)), scale)
    if form == "channel":
        groups = [group for group in (8, 16, 32, 64, 128) if block % group == 0]
    return Quantizer("uniform", draw(st.sampled_from([2, 4, 8])), form, draw(st.sampled_from(groups)), scale)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BlockLayout, torch.dtype]:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    head_dim, block = draw(st.sampled_from([64, 80, 96, 112, 128, 256])), draw(st.sampled_from([32, 64, 128]))
    key, value = draw(quantizers(head_dim, block, "key")), draw(quantizers(head_dim, block, "value"))
    return block_layout(LayerPolicy(key, value), block, draw(st.integers(1, 3)), head_dim, dtype.itemsize), dtype


def spoil(x: torch.Tensor, how: str) -> torch.Tensor:
    """`x` [blocks, heads, tokens, channels] with one kind of trouble in it."""
    largest = torch.finfo(x.dtype).max
    match how:
        case "constant":
            x[:, :, :, 3], x[:, 0, 5] = -1.37, 0.1
        case "zero":
            x[0], x[:, :, 7] = 0.0, -0.0
        case "extreme":
            x[:, 0, 4, 2], x[:, 0, 4, 9] = largest, -largest
        case "largest":
            x[..., ::2], x[..., 1::2] = 0.999 * largest, -0.999 * largest  # a mean of the largest may round to ∞
        case "large":
            x *= min(2.0**98, largest / 8)
        case "denormal":
            x *= torch.finfo(x.dtype).smallest_normal
        case "tiny":
            x *= 1e-6
        case "halves":
            x.mul_(8).round_().div_(2)
        case "outlier":
            x[..., 7] *= 50
        case "infinite":
            x[-1, 0, 3, 1] = float("inf")
        case "nan":
            x[-1, -1, -1, -1] = float("nan")
    return x


TROUBLES = [
    "none",
    "constant",
    "zero",
    "extreme",
    "large",
    "largest",
    "denormal",
    "tiny",
    "halves",
    "outlier",
    "infinite",
    "nan",
]
