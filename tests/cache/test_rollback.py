"""Crop and rollback (DESIGN §5, case 7):  pytest tests/cache/test_rollback.py"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream import Stream, decoded, oracle, packed_until, policy, stream, tokens

from kvdrift.ledger import account


def state(fed: Stream) -> dict[str, Any]:
    """Everything that a later query can depend on."""
    layer = fed.layer
    if not layer.packed:
        return {"seen": layer.seen, "dense": [_bytes(x) for x in layer.dense]}
    rows = range(layer.batch_size)
    buffers = (layer.sequences.exact.keys, layer.sequences.exact.values)
    return {
        "seen": layer.seen,
        "pages": [fed.pages(s) for s in rows],
        "segments": [[(x.page < 0, x.start, x.tokens) for x in layer.segments[s]] for s in rows],
        "exact": [[_bytes(x[s, :, : layer.exact[s]]) for x in buffers] for s in rows],
        "held": list(layer.held),
    }


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("window", "spoiled", "least"), [(0, False, 0), (16, False, 0), (16, True, 0), (0, False, 101), (16, True, 90)]
)
def test_case_7_rollback_restores_bytes_length_and_outputs_at_every_length(
    window: int, spoiled: bool, least: int
) -> None:
    """Case 7: ask, roll back, ask again; also where a block was sealed in between, or held exact, or where packing
    began at `min_length`; and in several cuts."""
    made = replace(policy(sink_tokens=16, residual_window=window, rollback=16), min_length=least)
    everything = tokens(140)
    if spoiled:
        everything.k[0, :, 60] = float("inf")
    fed = stream(made)
    fed.feed(everything.span(0, 40))
    for length in range(40, 140 - 16):
        before = state(fed)
        for depth in (5, 16):
            first = fed.feed(everything.span(length, length + depth))
            assert fed.layer.seen == length + depth
            fed.crop(depth)
            assert state(fed) == before
        again = fed.feed(everything.span(length, length + depth))
        assert _bytes(again) == _bytes(first)
        for cut in (4, 4, 8):
            fed.crop(cut)
        assert state(fed) == before
        fed.feed(everything.span(length, length + 1))
    assert fed.layer.pool.used == len([x for x in fed.layer.segments[0] if x.page >= 0])


def test_rollback_to_below_min_length_restores_each_sequence_of_a_batch_and_its_beams() -> None:
    """Two sequences, one of them padded: only the other has begun to pack, then both; the ledger bills what is kept."""
    made, everything = replace(policy(residual_window=0, rollback=16), min_length=100), tokens(130, batch=2)
    fed = stream(made)
    pads = torch.zeros(2, 96, dtype=torch.bool)
    pads[1, :9] = True
    everything.k[1, :, :9], everything.v[1, :, :9] = 0, 0  # a pad's content isn't kept
    fed.feed(everything.span(0, 96), pads)
    for length in range(96, 114):
        before = state(fed)
        fed.feed(everything.span(length, length + 16))
        fed.layer.reorder_cache(torch.tensor([0, 1, 1]))
        assert fed.cache.ledger().format_bytes == fed.cache.storage_bytes()
        fed.layer.reorder_cache(torch.tensor([0, 2]))
        fed.crop(16)
        assert state(fed) == before
        fed.feed(everything.span(length, length + 1))
    assert fed.layer.pool.used == sum(len(row) for row in fed.layer.segments) == 6


@pytest.mark.parametrize(("rollback", "sinks", "window"), [(0, 0, 32), (16, 0, 32), (16, 16, 0), (0, 16, 64)])
def test_the_ledger_is_what_is_held_at_every_length_around_min_length(rollback: int, sinks: int, window: int) -> None:
    made = replace(policy(rollback=rollback, sink_tokens=sinks, residual_window=window), min_length=100)
    everything = tokens(130)
    streamed = stream(made)
    streamed.feed(everything.span(0, 97))
    for length in range(97, 130):
        filled = stream(made)
        filled.cache.load([everything.k[:, :, :length]], [everything.v[:, :, :length]])
        expected = account(made, filled.cache.shape, length, 1)
        for fed in (filled, streamed):
            live = fed.cache.ledger()
            assert live.format_bytes == fed.cache.storage_bytes()
            assert (live.rollback, live.codes) == (expected.rollback, expected.codes)
            assert live.format_bytes == expected.format_bytes or length < 100  # dense tensors have no tables
        streamed.feed(everything.span(length, length + 1))


@settings(max_examples=40)
@given(
    length=st.integers(1, 200),
    depths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    window=st.sampled_from([0, 16, 48]),
    rollback=st.sampled_from([0, 16, 32]),
    spoiled=st.lists(st.integers(0, 5), max_size=3, unique=True),
)
def test_a_cut_of_any_depth_keeps_the_remaining_tokens_and_frees_the_pages(
    length: int, depths: list[int], window: int, rollback: int, spoiled: list[int]
) -> None:
    """Packed tokens stay as they were packed; exact ones stay exact; the sequence goes on from there."""
    made = policy(sink_tokens=16, residual_window=window, rollback=rollback)
    everything = tokens(length + 70)
    for block in spoiled:  # a block that fp16 scales can't hold stays exact
        everything.v[:, :, min(16 + 32 * block, length - 1), 0] = 1e30
    fed = stream(made)
    fed.cache.load([everything.k[:, :, :length]], [everything.v[:, :, :length]])
    packed = {
        position: x
        for x in (fed.layer.segments[0] if fed.layer.packed else [])
        if x.page >= 0
        for position in range(x.start, x.start + x.tokens)
    }
    left = length
    for depth in depths:
        depth = min(depth, left)
        fed.crop(depth)
        left -= depth
        layer = fed.layer
        assert layer.seen == layer.length(0) == left
        if layer.packed:
            now = {p for x in layer.segments[0] if x.page >= 0 for p in range(x.start, x.start + x.tokens)}
            assert now <= packed.keys()
            assert max(now, default=0) < left
            exact = [p for p in range(left) if p not in now]
            held = [p for x in layer.segments[0] if x.page < 0 for p in range(x.start, x.start + x.tokens)]
            sinks = list(range(min(16, left)))
            order = sinks + held + [p for p in exact if p not in {*sinks, *held}]
            assert torch.equal(layer.sequences.exact.keys[0, :, : layer.exact[0]], everything.k[0, :, order])
            assert layer.pool.used == len([x for x in layer.segments[0] if x.page >= 0])
        else:
            assert torch.equal(layer.keys, everything.k[:, :, :left])
            assert fed.layer.pool.used == 0
    fed.feed(everything.span(left, left + 70))
    assert fed.layer.length(0) == left + 70
    if fed.layer.packed:
        assert fed.layer.exact[0] - fed.layer.held[0] < made.residual_window + made.block
    assert fed.cache.ledger().format_bytes == fed.cache.storage_bytes()


def test_a_deep_cut_leaves_a_short_block_that_is_never_requantized() -> None:
    made, everything = policy(residual_window=0, rollback=0), tokens(200)
    fed = stream(made)
    fed.feed(everything.span(0, 96))
    pages = fed.pages()
    fed.crop(40)
    assert [(x.start, x.tokens) for x in fed.layer.segments[0]] == [(0, 32), (32, 24)]
    assert fed.pages() == pages[:2]
    fed.feed(everything.span(96, 130))
    assert [(x.start, x.tokens) for x in fed.layer.segments[0]] == [(0, 32), (32, 24), (56, 32)]
    assert fed.pages()[:2] == pages[:2]


def test_answers_over_a_short_block_count_only_its_valid_tokens(backend: str) -> None:
    made, everything = policy(residual_window=0, rollback=0), tokens(97)
    fed = stream(made)
    fed.feed(everything.span(0, 96))
    fed.crop(40)
    out = fed.feed(everything.span(96, 97))
    k, v = decoded(made, everything.k[0], everything.v[0])
    keys, values = (
        torch.cat([packed[:, :56], exact[0, :, 96:]], dim=1).double().repeat_interleave(2, 0)
        for packed, exact in ((k, everything.k), (v, everything.v))
    )
    scores = everything.q[0, :, 96:].double() @ keys.transpose(1, 2) * 32**-0.5
    assert (out[0].double() - scores.softmax(-1) @ values).abs().max() < 1e-5


def test_rollback_zero_keeps_no_shadow() -> None:
    fed, everything = stream(policy(rollback=0)), tokens(64)
    fed.feed(everything)
    assert fed.cache.ledger().rollback == 0
    assert [x.nbytes for x in fed.layer.storages()["rollback"]] == [0]


def test_cut_errors_name_the_depth_and_change_nothing() -> None:
    fed, everything = stream(policy()), tokens(70)
    fed.feed(everything)
    before = state(fed)
    with pytest.raises(ValueError, match="crop\\(3\\): pass the negative"):
        fed.cache.crop(3)
    with pytest.raises(ValueError, match="crop\\(-71\\) of a cache of 70 tokens; remove at most 70"):
        fed.cache.crop(-71)
    fed.cache.crop(0)
    assert state(fed) == before


def test_a_cut_of_everything_starts_over() -> None:
    fed, everything = stream(policy()), tokens(70)
    fed.feed(everything)
    fed.crop(70)
    assert fed.layer.seen == 0
    again = fed.feed(everything)
    assert torch.equal(again, stream(policy()).feed(everything))
    assert fed.pages() == stream_pages(everything)


def stream_pages(everything: Any) -> list[bytes]:
    fresh = stream(policy())
    fresh.feed(everything)
    return fresh.pages()


def test_reset_gives_the_pages_back_and_a_refill_answers_as_the_first_time() -> None:
    fed, everything = stream(policy()), tokens(150)
    first = fed.feed_all(everything, [100] + [1] * 50)
    assert fed.layer.pool.used == 4
    fed.cache.reset()
    assert fed.layer.pool.used == 0
    assert fed.layer.seen == 0
    assert fed.cache.ledger().format_bytes == fed.cache.storage_bytes()
    other = tokens(90, batch=2, seed=5)
    fed.feed(other)
    fed.cache.reset()
    assert torch.equal(fed.feed_all(everything, [100] + [1] * 50), first)


@settings(max_examples=25)
@given(length=st.integers(33, 150), depth=st.integers(1, 16), window=st.sampled_from([0, 32]))
def test_answers_after_rollback_are_the_oracles(length: int, depth: int, window: int) -> None:
    made, everything = policy(residual_window=window), tokens(170)
    fed = stream(made)
    fed.feed(everything.span(0, length))
    other = tokens(depth, seed=7)
    fed.feed(other)
    fed.crop(depth)
    out = fed.feed(everything.span(length, length + 12))
    expected = oracle(made, everything.span(0, length + 12), prefill=length)[:, :, length:]
    assert (out.double() - expected).abs().max() < 2e-5
    assert len(fed.pages()) * 32 == packed_until(made, length + 11)
