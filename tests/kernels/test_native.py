"""The native kernels against the definition: `pytest tests/kernels/test_native.py`.

Codes, scales, lows, decoded values and checksums, bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from blocks import DTYPES, KIVI4, TROUBLES, layouts, spoil
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.kernels import compiler, definition
from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

try:
    compiler.library()
except compiler.NativeUnavailable as error:
    pytest.skip(f"native kernels: {error}", allow_module_level=True)

from kvdrift.kernels import native

PAGES = (layouts(), st.sampled_from(TROUBLES), st.sampled_from(TROUBLES), st.integers(0, 2**31), st.booleans())


def seal_both(
    keys: torch.Tensor, values: torch.Tensor, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same blocks sealed by native and by the definition into arenas full of junk; their flags must agree."""
    pages = torch.randperm(len(keys) + 2)[: len(keys)].int()
    junk = torch.randint(0, 256, (len(keys) + 2, layout.page_bytes), dtype=torch.uint8)
    arenas = junk.clone(), junk.clone()
    fits = native.seal(keys, values, layout, arenas[0], pages)
    assert torch.equal(fits, definition.seal(keys, values, layout, arenas[1], pages))
    kept = pages[fits].long()
    assert torch.equal(arenas[0][kept], arenas[1][kept])
    return arenas[0], pages, fits


@settings(max_examples=150, deadline=None)
@given(*PAGES)
def test_pages_equal_the_definition(
    layout: tuple[BlockLayout, torch.dtype], of_keys: str, of_values: str, seed: int, strided: bool
) -> None:
    """Cases 4, 5 and 6: every byte behind the header, and what doesn't fit, for every format, shape and trouble."""
    shape, dtype = layout
    torch.manual_seed(seed)
    size = (3, shape.kv_heads, shape.block, shape.head_dim)
    keys, values = (spoil(torch.randn(size).to(dtype), how) for how in (of_keys, of_values))
    if strided:  # as a cache hands them over: cut from [heads, tokens, channels], the heads' rows interleaved
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    arena, pages, fits = seal_both(keys, values, shape)
    assert torch.equal(native.checksum(arena, pages), definition.checksum(arena, pages))
    headers, labelled = torch.randint(0, 256, (3, 64), dtype=torch.uint8), [arena.clone() for _ in range(2)]
    native.label(labelled[0], pages, headers)
    definition.label(labelled[1], pages, headers)
    assert torch.equal(*labelled)
    pages = pages[fits]
    for ours, theirs in zip(
        native.unseal(shape, arena, pages, dtype), definition.unseal(shape, arena, pages, dtype), strict=True
    ):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


SIXTEEN_BITS = (
    st.sampled_from(["float16", "bfloat16"]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([(64, 32), (64, 64), (128, 64), (96, 64), (256, 128)]),
    st.sampled_from([0, 32, 64]),
    st.lists(
        st.one_of(
            st.integers(0, 2**16 - 1),
            st.integers(0x3000, 0x4100),
            st.integers(0xB000, 0xC100),
            st.sampled_from([0, 1, 0x7F, 0x80, 0x8000, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2**31),
)


@settings(max_examples=120, deadline=None)
@given(*SIXTEEN_BITS)
def test_case_4_pages_of_any_sixteen_bits(
    dtype: str, bits: int, shape: tuple[int, int], group: int, words: list[int], seed: int
) -> None:
    """Groups of a few bit patterns: one sign or both, zeros of both signs, subnormals, infinities and NaNs of both."""
    torch.manual_seed(seed)
    head_dim, block = shape
    pool = torch.tensor(words, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    keys, values = (pool[torch.randint(0, len(words), (4, 2, block, head_dim))] for _ in range(2))
    keys[::2, ..., :5], values[::2, :, :5] = pool[0], pool[0]  # constant groups among the others
    policy = LayerPolicy(
        Quantizer(bits=bits, axis="channel", group=group if group and block % group == 0 else block),
        Quantizer(bits=bits, group=group if head_dim % (group or 1) == 0 else 0),
    )
    seal_both(keys, values, block_layout(policy, block, 2, head_dim, 2))


def test_case_4_half_steps_round_to_even() -> None:
    layout = block_layout(LayerPolicy(Quantizer(), Quantizer()), 32, 1, 64, 4)
    x = torch.arange(64).float().add(0.5).clamp(max=63).repeat(1, 1, 32, 1)
    x[..., 0], x[..., -1] = 0.0, 255.0  # low 0 and scale 1, so that a code is the rounded value
    arena, pages, fits = seal_both(x, x, layout)
    codes = arena[pages.long(), layout.key.codes : layout.key.codes + 64][0]
    assert fits.all()
    assert codes.tolist() == [0, *(round(i + 0.5) for i in range(1, 63)), 255]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 2047),
    st.integers(-24, -2),
    st.sampled_from([*DTYPES]),
    st.integers(0, 99),
)
def test_case_4_half_steps_of_any_half_precision_scale(
    bits: int, mantissa: int, exponent: int, dtype: str, seed: int
) -> None:
    """A quotient that a reciprocal gives must round as a division does, above all half way between two codes."""
    torch.manual_seed(seed)
    scale, levels = mantissa * 2.0**exponent, 2**bits - 1
    x = torch.randint(0, 2 * levels + 1, (4, 2, 64, 64)) * (0.5 * scale)
    x[..., 0, :], x[..., 1, :], x[..., 0], x[..., 1] = 0.0, levels * scale, 0.0, levels * scale
    low = 2.0 ** random.Random(seed).randint(-10, 4)
    layout = block_layout(
        LayerPolicy(Quantizer(bits=bits, axis="channel", group=64), Quantizer(bits=bits)), 64, 2, 64, 4
    )
    seal_both((x + low).to(DTYPES[dtype]), x.to(DTYPES[dtype]), replace(layout, dtype_bytes=DTYPES[dtype].itemsize))


def test_case_6_a_span_beyond_half_precision() -> None:
    x = torch.randn(2, 1, 64, 64).half()
    x[:, 0, 10, 5], x[:, 0, 11, 5] = 60_000, -60_000
    layout = block_layout(KIVI4, 64, 1, 64, 2)
    arena, pages, fits = seal_both(x, x.clamp(-5, 5), layout)
    assert fits.all()
    assert all(decoded.isfinite().all() for decoded in native.unseal(layout, arena, pages, torch.float16))


def test_case_13_an_outlier_channel_ruins_tokens_not_channels() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 64, 64)
    x[..., 7] *= 50

    def error(key: Quantizer) -> float:
        layout = block_layout(LayerPolicy(key), 64, 1, 64, 4)
        arena, pages, _ = seal_both(x, x, layout)
        others = torch.arange(64) != 7
        decoded = native.unseal(layout, arena, pages, torch.float32)[0]
        return float((decoded - x)[..., others].norm() / x[..., others].norm())

    assert error(Quantizer(bits=4, axis="channel", group=64)) < 0.12
    assert error(Quantizer(bits=4, axis="token", group=64)) > 0.9


def test_an_unknown_format_is_refused() -> None:
    unknown = Quantizer()
    object.__setattr__(unknown, "format", "nf4")
    layout = block_layout(LayerPolicy(unknown, unknown), 32, 1, 64, 4)
    x, arena = torch.zeros(1, 1, 32, 64), torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    for kernels in (native, definition):
        with pytest.raises(ValueError, match="'nf4'; allowed: uniform, fp8_e4m3"):
            kernels.seal(x, x, layout, arena, torch.zeros(1, dtype=torch.int32))


def test_dtypes_that_differ_are_refused() -> None:
    layout = block_layout(KIVI4, 64, 1, 64, 4)
    arena, none = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.zeros(1, 0, dtype=torch.int32)
    exact, lengths = torch.zeros(1, 1, 1, 64, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"query is torch\.float32, exact keys torch\.float16"):
        native.decode_attention(torch.zeros(1, 1, 1, 64), layout, arena, none, none, exact, exact, lengths, 1.0)
