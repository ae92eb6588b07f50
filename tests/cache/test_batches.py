"""Left padding, pads in the middle, beams and cells:  pytest tests/cache/test_batches.py"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream import Tokens, oracle, policy, stream, tokens


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 110), min_size=2, max_size=3),
    prefill=st.sampled_from(["exact", "packed"]),
    chunks=st.lists(st.integers(1, 40), max_size=3),
    sinks=st.sampled_from([0, 16]),
)
def test_left_padded_rows_answer_and_pack_as_each_does_alone(
    backend: str, lengths: list[int], prefill: str, chunks: list[int], sinks: int
) -> None:
    made = policy(sink_tokens=sinks, residual_window=16, prefill=prefill)
    width, more = max(lengths), sum(chunks)
    everything = tokens(width + more, batch=len(lengths))
    pads = torch.arange(width) < torch.tensor([width - n for n in lengths])[:, None]
    batched = stream(made)
    outs = [batched.feed(everything.span(0, width), pads)]
    at = width
    for size in chunks:
        outs.append(batched.feed(everything.span(at, at + size)))
        at += size
    out = torch.cat(outs, dim=2)
    for s, length in enumerate(lengths):
        own = Tokens(*(x[s : s + 1, :, width - length :] for x in (everything.q, everything.k, everything.v)))
        expected = oracle(made, own, prefill=length if prefill == "exact" else 0)
        assert (out[s : s + 1, :, width - length :].double() - expected).abs().max() < 2e-5
        alone = stream(made)
        alone.feed_all(own, [length, *chunks])
        assert batched.layer.length(s) == alone.layer.length(0) == length + more
        if alone.layer.packed:
            assert batched.pages(s) == alone.pages()
    assert batched.layer.get_seq_length() == width + more
    assert batched.cache.ledger().format_bytes == batched.cache.storage_bytes()


def test_pads_between_turns_are_dropped_and_rolled_back_as_columns() -> None:
    """A second turn that is left-padded: its pads count for no block, and a crop drops columns, not real tokens."""
    made, everything = policy(residual_window=16), tokens(150, batch=2)
    fed = stream(made)
    fed.feed(everything.span(0, 70))
    pads = torch.zeros(2, 40, dtype=torch.bool)
    pads[1, :25] = True
    out = fed.feed(everything.span(70, 110), pads)
    assert [fed.layer.length(s) for s in range(2)] == [110, 85]
    joined = Tokens(
        *(torch.cat([x[1:, :, :70], x[1:, :, 95:110]], 2) for x in (everything.q, everything.k, everything.v))
    )
    expected = oracle(made, joined, prefill=70)[:, :, 70:]
    assert (out[1:, :, 25:].double() - expected).abs().max() < 2e-5
    fed.crop(16)
    assert [fed.layer.length(s) for s in range(2)] == [94, 70]


@pytest.mark.parametrize("due", [False, True])
def test_rollback_of_a_padded_batch_restores_what_was_dense(due: bool) -> None:
    made, everything = policy(), tokens(60, batch=2)
    pads = torch.arange(28) < torch.tensor([0, 9])[:, None]
    fed = stream(made)
    fed.feed(everything.span(0, 28), pads)
    before = fed.feed(everything.span(28, 29))
    fed.crop(1)
    step = 16 if due else 2
    fed.feed(everything.span(30, 30 + step))
    assert fed.layer.packed == due
    fed.crop(step)
    assert not fed.layer.packed
    assert torch.equal(fed.feed(everything.span(28, 29)), before)


def test_beams_share_pages_by_reference_and_are_billed_once() -> None:
    fed, everything = stream(policy()), tokens(100, batch=2)
    fed.feed(everything)
    single = fed.cache.ledger()
    fed.cache.batch_repeat_interleave(3)
    layer = fed.layer
    assert layer.batch_size == 6
    assert [layer.pool.references(x.page) for x in layer.segments[0]] == [3, 3, 3]
    assert layer.pool.used == 6
    shared = fed.cache.ledger()
    assert (shared.codes, shared.scales, shared.headers) == (single.codes, single.scales, single.headers)
    assert shared.format_bytes == fed.cache.storage_bytes()
    fed.cache.reorder_cache(torch.tensor([0, 0, 1, 4, 5, 5]))
    assert [layer.pool.references(row[0].page) for row in layer.segments] == [3, 3, 3, 3, 3, 3]
    fed.cache.batch_select_indices(torch.tensor([4, 5]))
    assert layer.pool.used == 3
    assert [layer.pool.references(x.page) for x in layer.segments[0]] == [2, 2, 2]


def test_reordered_beams_go_on_as_if_each_had_been_alone() -> None:
    made, everything = policy(residual_window=16), tokens(160, batch=3)
    fed = stream(made)
    fed.feed(everything.span(0, 90))
    order = torch.tensor([2, 0, 0])
    fed.cache.reorder_cache(order)
    out = fed.feed(everything.span(90, 160))
    for s, origin in enumerate(order.tolist()):
        joined = Tokens(
            *(
                torch.cat([x[origin : origin + 1, :, :90], x[s : s + 1, :, 90:160]], dim=2)
                for x in (everything.q, everything.k, everything.v)
            )
        )
        expected = oracle(made, joined, prefill=90)[:, :, 90:]
        assert (out[s : s + 1].double() - expected).abs().max() < 2e-5
    assert fed.layer.segments[1][:2] == fed.layer.segments[2][:2]
    assert fed.layer.segments[1][2] != fed.layer.segments[2][2]


def test_a_cut_of_one_beam_leaves_the_shared_page_to_the_others() -> None:
    fed, everything = stream(policy(rollback=0)), tokens(64)
    fed.feed(everything)
    fed.cache.batch_repeat_interleave(2)
    page = fed.layer.segments[0][1].page
    fed.layer.sequences.crop([40, 0])
    assert [(x.start, x.tokens) for x in fed.layer.segments[0]] == [(0, 24)]
    assert [(x.start, x.tokens) for x in fed.layer.segments[1]] == [(0, 32), (32, 32)]
    assert fed.layer.pool.references(page) == 1


def test_dense_beams_reorder_with_their_pads() -> None:
    fed, everything = stream(policy()), tokens(20, batch=2)
    pads = torch.arange(20) < torch.tensor([0, 9])[:, None]
    fed.feed(everything, pads)
    fed.cache.reorder_cache(torch.tensor([1, 1]))
    assert [fed.layer.length(s) for s in range(2)] == [11, 11]
    assert torch.equal(fed.layer.keys[0], everything.k[1])


@settings(max_examples=15)
@given(start=st.integers(0, 150), width=st.integers(0, 100), chunk=st.integers(5, 60))
def test_a_cell_packs_only_the_blocks_that_start_in_its_range(start: int, width: int, chunk: int) -> None:
    made, everything = policy(sink_tokens=16), tokens(180)
    cell, count = range(start, start + width), 180 - 180 % chunk
    fed = stream(made, pack_ranges={0: [cell]})
    fed.feed_all(everything.span(0, count), [chunk] * (count // chunk))
    blocks = [(at, at + 32) for at in range(16, count - 31, 32)]
    assert fed.packed_spans() == [span for span in blocks if span[0] in cell]
    assert fed.cache.escalated_blocks == 0
    assert not fed.layer.packed or fed.layer.exact == [count - 32 * len(fed.packed_spans())]


def test_cells_of_a_batch_keep_their_range_when_rows_move() -> None:
    made, everything = policy(), tokens(100, batch=2)
    fed = stream(made, pack_ranges={0: [range(0), range(100)]})
    fed.feed(everything.span(0, 50))
    assert [fed.packed_spans(s) for s in range(2)] == [[], [(0, 32)]]
    fed.cache.reorder_cache(torch.tensor([1, 0]))
    fed.feed(everything.span(50, 100))
    assert [fed.packed_spans(s) for s in range(2)] == [[(0, 32), (32, 64), (64, 96)], []]
