"""The bytes of a page:  pytest tests/test_layout.py"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.layout import HEADER_BYTES, TensorLayout, block_layout, layer_layouts
from kvdrift.policy import LayerPolicy, Quantizer, from_dict

KEYS = [
    None,
    Quantizer(bits=2, axis="channel", group=32),
    Quantizer(bits=4, axis="channel", group=8),
    Quantizer(bits=8, axis="token", group=8),
    Quantizer("fp8_e4m3", 8, scale_dtype="float32"),
]
VALUES = [None, Quantizer(bits=2), Quantizer(bits=4, group=8), Quantizer("fp8_e4m3", 8, scale_dtype="float16")]


@given(
    key=st.integers(0, 4),
    value=st.integers(0, 3),
    block=st.sampled_from([32, 64, 128]),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([8, 64, 72, 80, 96, 112, 128, 256]),
    dtype_bytes=st.sampled_from([2, 4]),
)
def test_sections_follow_each_other_aligned_and_within_the_page(
    key: int, value: int, block: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> None:
    layout = block_layout(LayerPolicy(KEYS[key], VALUES[value]), block, kv_heads, head_dim, dtype_bytes)
    sections = [
        (at, size)
        for tensor in (layout.key, layout.value)
        for at, size in (
            (tensor.codes, tensor.codes_bytes),
            (tensor.scales, tensor.scales_bytes),
            (tensor.lows, tensor.lows_bytes),
        )
    ]
    end = HEADER_BYTES
    for at, size in sections:
        assert end <= at < end + 4
        assert at % 2 == 0
        end = at + size
    assert end <= layout.page_bytes < end + 64 + 4
    assert layout.page_bytes % 64 == 0
    assert layout.key.codes % 64 == 0
    assert layout.key.scales % 4 == layout.value.codes % 4 == layout.value.scales % 4 == 0
    for tensor, quantizer in ((layout.key, KEYS[key]), (layout.value, VALUES[value])):
        bits = 8 * dtype_bytes if quantizer is None else quantizer.bits
        assert tensor.codes_bytes * 8 == bits * kv_heads * block * head_dim


def section(tensor: TensorLayout) -> dict[str, Any]:
    names = ("rows", "row", "groups", "row_bytes", "codes", "scales", "lows", "end")
    return {name: getattr(tensor, name) for name in names}


def test_kivi4_of_smollm2_by_hand() -> None:
    """3 KV heads, head_dim 64, block 64: keys channel-major, one scale a channel; values token-major, one a token."""
    layout = block_layout(
        LayerPolicy(Quantizer(bits=4, axis="channel", group=64), Quantizer(bits=4, group=64)), 64, 3, 64, 2
    )
    sizes = {"rows": 64, "row": 64, "groups": 1, "row_bytes": 32}
    assert section(layout.key) == {**sizes, "codes": 64, "scales": 6208, "lows": 6592, "end": 6976}
    assert section(layout.value) == {**sizes, "codes": 6976, "scales": 13120, "lows": 13504, "end": 13888}
    assert (layout.key.channel_major, layout.value.channel_major) == (True, False)
    assert (layout.page_bytes, layout.parts()["padding"]) == (13888, 0)


def test_an_exact_layer_has_no_page() -> None:
    made = from_dict({"layers": [{}, {"value": {"bits": 8}}]}, "p").bind(2, 64)
    layouts = layer_layouts(made, 2, 64, 2)
    assert layouts[0] is None
    assert layouts[1] is not None
    assert layouts[1].key.codes_bytes == 2 * 64 * 64 * 2


@pytest.mark.parametrize("group", [0, 16, 64])
def test_elements_of_a_group(group: int) -> None:
    layout = block_layout(LayerPolicy(value=Quantizer(bits=4, group=group)), 32, 2, 64, 2)
    assert layout.value.group == (group or 64)
