"""The kernels' meaning: pages, checksums and attention in plain torch:  pytest tests/kernels/test_definition.py"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.kernels import definition
from kvdrift.layout import HEADER_BYTES, BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer
from kvdrift.quantizers import float8, uniform

KEYS = [
    None,
    Quantizer(bits=2, axis="channel", group=32),
    Quantizer(bits=4, axis="channel", group=8, scale_dtype="float32"),
    Quantizer(bits=8, axis="token"),
    Quantizer(bits=4, axis="token", group=8),
    Quantizer("fp8_e4m3", 8, scale_dtype="float32"),
]
VALUES = [
    None,
    Quantizer(bits=2, group=8),
    Quantizer(bits=8, scale_dtype="float32"),
    Quantizer("fp8_e4m3", 8, group=16),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sealed(
    layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An arena with a page to spare in front, the pages used, and which blocks fit."""
    arena = torch.full((len(keys) + 1, layout.page_bytes), 0xAB, dtype=torch.uint8)
    pages = torch.arange(len(keys), 0, -1, dtype=torch.int32)
    return arena, pages, definition.seal(keys, values, layout, arena, pages)


def expected(x: torch.Tensor, quantizer: Quantizer | None) -> torch.Tensor:
    """Encoded and decoded by the family alone, group by group."""
    if quantizer is None:
        return x.float()
    rows = x.transpose(-1, -2) if quantizer.axis == "channel" else x
    groups = rows.unflatten(-1, (-1, quantizer.group or rows.shape[-1]))
    stored = definition.SCALE_DTYPE[quantizer.scale_dtype]
    if quantizer.format == "uniform":
        made = uniform.encode(groups, quantizer.bits, stored)
        back = uniform.decode(made.codes, made.scale, made.low).flatten(-2)
    else:
        made = float8.encode(groups, stored)
        back = float8.decode(made.codes, made.scale).flatten(-2)
    return back.transpose(-1, -2) if quantizer.axis == "channel" else back


@pytest.mark.parametrize(("key", "value"), list(itertools.product(KEYS, VALUES)), ids=str)
def test_a_page_decodes_to_what_its_families_say(key: Quantizer | None, value: Quantizer | None) -> None:
    for dtype, (heads, dim) in zip(DTYPES, [(1, 16), (2, 80), (3, 64)], strict=True):
        layout = block_layout(LayerPolicy(key, value), 32, heads, dim, dtype.itemsize)
        keys, values = random(3, heads, 32, dim, dtype=dtype), random(3, heads, 32, dim, seed=1, dtype=dtype)
        arena, pages, fits = sealed(layout, keys, values)
        assert fits.all()
        back_keys, back_values = definition.unseal(layout, arena, pages, dtype)
        assert torch.equal(back_keys, expected(keys, key))
        assert torch.equal(back_values, expected(values, value))
        assert (arena[:, :HEADER_BYTES] == 0xAB).all()
        assert (arena[0] == 0xAB).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("spoiled", ["keys", "values"])
def test_a_block_fits_only_if_both_tensors_do(bad: float, spoiled: str) -> None:
    layout = block_layout(LayerPolicy(KEYS[1], VALUES[1]), 32, 2, 16, 4)
    tensors = {"keys": random(3, 2, 32, 16), "values": random(3, 2, 32, 16, seed=1)}
    tensors[spoiled][1, 1, 31, 15] = bad
    assert sealed(layout, **tensors)[2].tolist() == [True, False, True]


def test_a_checksum_is_a_sum_by_hand_and_sees_bytes_that_change_or_trade_places() -> None:
    layout = block_layout(LayerPolicy(KEYS[1], VALUES[1]), 32, 2, 16, 4)
    arena, pages, _ = sealed(layout, random(2, 2, 32, 16), random(2, 2, 32, 16, seed=1))
    words = [int.from_bytes(bytes(arena[2, at : at + 4].tolist()), "little") for at in range(64, layout.page_bytes, 4)]
    by_hand = (sum((i + 1) * w for i, w in enumerate(words)) % 2**32 << 32) | sum(words) % 2**32
    before = definition.checksum(arena, pages).tolist()
    assert before[0] % 2**64 == by_hand
    arena[:, :HEADER_BYTES] = 0
    assert definition.checksum(arena, pages).tolist() == before
    changed = arena.clone()
    changed[2, 100] ^= 1
    swapped = arena.clone()
    swapped[2, 64:68], swapped[2, 68:72] = arena[2, 68:72], arena[2, 64:68]
    for other in (changed, swapped):
        assert definition.checksum(other, pages)[0] != before[0]
        assert definition.checksum(other, pages)[1] == before[1]


def test_a_label_is_a_header_that_ends_with_the_checksum() -> None:
    layout = block_layout(LayerPolicy(KEYS[1], VALUES[1]), 32, 2, 16, 4)
    arena, pages, _ = sealed(layout, random(2, 2, 32, 16), random(2, 2, 32, 16, seed=1))
    headers, labelled = torch.randint(0, 256, (2, HEADER_BYTES), dtype=torch.uint8), arena.clone()
    definition.label(labelled, pages, headers)
    at, sums = pages.long(), definition.checksum(arena, pages).view(-1, 1).view(torch.uint8)
    assert torch.equal(labelled[at, :HEADER_BYTES], torch.cat([headers[:, :-8], sums], dim=1))
    labelled[at, :HEADER_BYTES] = arena[at, :HEADER_BYTES]
    assert torch.equal(labelled, arena)


@settings(max_examples=40)
@given(
    sequences=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 4), (3, 9), (1, 7)]),
    queries=st.integers(1, 5),
    counts=st.lists(st.integers(0, 32), min_size=0, max_size=3),
    exact=st.lists(st.integers(5, 40), min_size=3, max_size=3),
    key=st.sampled_from(range(6)),
    seed=st.integers(0, 99),
)
def test_attention_is_float64_attention_over_the_decoded_values(
    sequences: int,
    heads: tuple[int, int],
    queries: int,
    counts: list[int],
    exact: list[int],
    key: int,
    seed: int,
) -> None:
    """Short blocks, absent blocks, ragged exact tokens, several queries, every grouping of query heads."""
    kv_heads, query_heads = heads
    layout = block_layout(LayerPolicy(KEYS[key], VALUES[1]), 32, kv_heads, 16, 4)
    blocks = len(counts)
    arena, pages, _ = sealed(
        layout,
        random(max(blocks, 1), kv_heads, 32, 16, seed=seed),
        random(max(blocks, 1), kv_heads, 32, 16, seed=seed + 1),
    )
    tables = pages[:blocks].expand(sequences, -1).contiguous()
    tokens = torch.tensor([[(n + 7 * s) % 33 for n in counts] for s in range(sequences)], dtype=torch.int32)
    tokens = tokens.view(sequences, blocks)
    query = random(sequences, query_heads, queries, 16, seed=seed + 2)
    exact_keys, exact_values = (random(sequences, kv_heads, 48, 16, seed=seed + n) for n in (3, 4))
    lengths = torch.tensor(exact[:sequences], dtype=torch.int32)
    out = definition.decode_attention(
        query, layout, arena, tables, tokens, exact_keys, exact_values, lengths, scaling=0.25
    )
    k, v = definition.unseal(layout, arena, pages[: max(blocks, 1)], torch.float32)
    for s, h, q in itertools.product(range(sequences), range(query_heads), range(queries)):
        kv = h * kv_heads // query_heads
        until = exact[s] - (queries - 1 - q)
        seen = [
            torch.cat([*(x[b, kv, : tokens[s, b]] for b in range(blocks)), own[s, kv, :until]]).double()
            for x, own in ((k, exact_keys), (v, exact_values))
        ]
        weights = (seen[0] @ query[s, h, q].double() * 0.25).softmax(0)
        assert torch.allclose(out[s, h, q].double(), weights @ seen[1], atol=1e-5)


@pytest.mark.parametrize("tokens", [1024, 8192, 131_072])
def test_case_10_the_error_does_not_grow_with_the_length(tokens: int) -> None:
    """Case 10: accumulation over 1 Ki to 128 Ki keys stays within one bound of float64."""
    layout = block_layout(LayerPolicy(KEYS[1], VALUES[1]), 32, 1, 16, 4)
    blocks = tokens // 32
    keys, values = random(blocks, 1, 32, 16), random(blocks, 1, 32, 16, seed=1) + 3
    arena, pages, _ = sealed(layout, keys, values)
    query = random(1, 2, 1, 16, seed=2)
    nothing = torch.zeros(1, 1, 0, 16)
    tables, counts = pages[None], torch.full((1, blocks), 32, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    out = definition.decode_attention(query, layout, arena, tables, counts, nothing, nothing, zero, scaling=0.25)
    k, v = (x.flatten(0, 2).double() for x in definition.unseal(layout, arena, pages, torch.float32))
    exact = (query[0, :, 0].double() @ k.T * 0.25).softmax(-1) @ v
    assert (out[0, :, 0].double() - exact).abs().max() < 1e-5


def test_case_10_a_needle_is_found_at_any_length() -> None:
    """Case 10: one key among 128 Ki that matches keeps the weight it has in float64."""
    layout = block_layout(LayerPolicy(KEYS[3], VALUES[2]), 32, 1, 16, 4)
    blocks = 4096
    keys, values = 0.1 * random(blocks, 1, 32, 16), torch.zeros(blocks, 1, 32, 16)
    keys[1234, 0, 5], values[1234, 0, 5] = 4.0, 1.0
    arena, pages, _ = sealed(layout, keys, values)
    query = torch.ones(1, 1, 1, 16)
    nothing, zero = torch.zeros(1, 1, 0, 16), torch.zeros(1, dtype=torch.int32)
    counts = torch.full((1, blocks), 32, dtype=torch.int32)
    out = definition.decode_attention(query, layout, arena, pages[None], counts, nothing, nothing, zero, scaling=0.25)
    k, v = (x.flatten(0, 2).double() for x in definition.unseal(layout, arena, pages, torch.float32))
    assert torch.allclose(out[0, 0, 0].double(), (k.sum(-1) * 0.25).softmax(0) @ v, rtol=1e-4)
    assert out.min() > 0.5
