"""Pages: taken, shared, released; and a fixed pool that is full:  pytest tests/cache/test_pool.py"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream import Stream, config, policy, stream, tokens

from kvdrift.cache.packed import PackedCache
from kvdrift.cache.pool import BlockPool, PoolExhausted
from kvdrift.policy import PolicyError, from_dict


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=40))
def test_a_growing_pool_never_hands_out_a_page_in_use(steps: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(64, torch.device("cpu")), list[int]()
    for step, count in steps:
        if step == "take":
            taken = pool.take(count)
            assert not set(taken) & set(held)
            held += taken
        elif held and step == "share":
            pool.share([held[count % len(held)]])
            held.append(held[count % len(held)])
        elif held:
            pool.release([held.pop(count % len(held))])
        assert pool.used == len(set(held))
        assert pool.used + pool.free == len(pool.arena)
        assert pool.arena.untyped_storage().nbytes() == 64 * len(pool.arena)
        assert all(pool.references(page) == held.count(page) for page in held)


def test_growth_keeps_the_pages_content() -> None:
    pool = BlockPool(64, torch.device("cpu"))
    (first,) = pool.take(1)
    pool.arena[first] = 7
    pool.take(100)
    assert (pool.arena[first] == 7).all()


def test_a_full_pool_says_what_was_asked_for_and_what_to_do() -> None:
    pool = BlockPool(64, torch.device("cpu"), capacity=3)
    pool.take(2)
    with pytest.raises(PoolExhausted, match="2 pages of 64 B asked for, 1 of 3 free; finish or evict a sequence"):
        pool.take(2)
    assert (pool.used, pool.free) == (2, 1)


def test_a_cache_of_fixed_size_allocates_exactly_and_never_again() -> None:
    fed, everything = stream(policy(residual_window=16), batch=2, max_tokens=100), tokens(101, batch=2)
    fed.feed_all(everything.span(0, 100), [60] + [1] * 40)
    assert fed.layer.pool.free == 0
    assert len(fed.layer.pool.arena) == 2 * ((100 - 16) // 32)


@pytest.mark.parametrize("chunk", [1, 20])
def test_exhaustion_in_the_middle_leaves_the_cache_usable_and_unchanged(chunk: int) -> None:
    made, everything = policy(residual_window=0), tokens(200)
    fed = stream(made, batch=1, max_tokens=96)
    fed.feed(everything.span(0, 100))
    pages, ledger = fed.pages(), fed.cache.ledger()
    at, fits = 100, 127 - (127 - 100) % chunk
    while at < fits:
        fed.feed(everything.span(at, at + chunk))
        at += chunk
    kept = fed.cache.ledger()
    for _ in range(2):
        with pytest.raises(PoolExhausted, match="1 pages of"):
            fed.feed(everything.span(at, at + chunk))
        assert fed.layer.seen == fed.layer.length(0) == at
        assert fed.pages() == pages
        assert fed.cache.ledger() == kept
    assert ledger.codes == kept.codes
    fed.crop(8)
    assert fed.feed(everything.span(at, at + 1)).isfinite().all()


def test_exhaustion_at_prefill_leaves_an_empty_cache_that_takes_a_shorter_prompt() -> None:
    made = from_dict({"layers": [{}, {"key": {"bits": 8}, "value": {"bits": 8}}, {"value": {"bits": 2}}], "block": 32})
    cache = PackedCache(made, config(layers=3), batch=1, max_tokens=64)
    streams, everything = [Stream(cache, index) for index in range(3)], tokens(100)
    streams[0].feed(everything)
    with pytest.raises(PoolExhausted):
        streams[1].feed(everything)
    assert [cache.get_seq_length(index) for index in range(3)] == [0, 0, 0]
    for one in streams:
        one.feed(everything.span(0, 64))
    assert [cache.get_seq_length(index) for index in range(3)] == [64, 64, 64]
    assert cache.ledger().format_bytes == cache.storage_bytes()
    streams[0].feed(everything.span(64, 97))
    with pytest.raises(PoolExhausted):
        streams[1].feed(everything.span(64, 97))
    assert [cache.get_seq_length(index) for index in range(3)] == [64, 64, 64]
    assert torch.equal(cache.layers[0].keys, everything.k[:, :, :64])


def test_a_pool_of_one_layer_that_is_short_stops_the_step_at_the_first() -> None:
    """Two page sizes: the first layer's pages are there, the second's aren't, and the first must not have moved."""
    made = from_dict({"layers": [{"value": {"bits": 8}}, {"value": {"bits": 2}}], "block": 32})
    cache = PackedCache(made, config(layers=2), batch=1, max_tokens=64)
    first, everything = Stream(cache, 0), tokens(64)
    cache.layers[0].lazy_initialization(everything.k, everything.v)
    cache.pages.pool(1, torch.device("cpu")).take(1)
    with pytest.raises(PoolExhausted):
        first.feed(everything)
    assert cache.get_seq_length(0) == 0
    assert cache.pages.pool(0, torch.device("cpu")).used == 0


def test_half_a_reservation_is_an_error() -> None:
    with pytest.raises(PolicyError, match="batch is 2 and max_tokens is None; pass both"):
        PackedCache(policy(), config(), batch=2)


def test_a_dropped_cache_is_freed_at_once() -> None:
    """No cycle of references: a server's memory doesn't wait for Python's garbage collector."""
    cache = PackedCache(policy(), config(), pack_ranges={0: [range(64)]})
    Stream(cache, 0).feed(tokens(97))
    arena, layer = weakref.ref(cache.packed_layers[0].pool.arena), weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert arena() is None
        assert layer() is None
    finally:
        gc.enable()
