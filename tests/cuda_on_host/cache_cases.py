"""A PackedCache over the CUDA kernels beside one over the definition on a CPU. Shared by the run on the host and by
tests/gpu."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from stream import Stream, Tokens, policy, stream, tokens
from torch import Tensor

from kvdrift.cache.packed import PackedCache
from kvdrift.kernels import cuda, definition, dispatch
from kvdrift.layout import HEADER_BYTES, BlockLayout
from kvdrift.policy import CachePolicy

POLICIES = {
    "kivi4": policy(sink_tokens=16, residual_window=16, rollback=16),
    "int8": policy(key={"bits": 8}, value={"bits": 8}, residual_window=0),
}
PROMPT = 60


@contextmanager
def kernels(module: ModuleType) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "backend", lambda device: module)
        yield patch


# -- tensors of our own -----------------------------------------------------------------------------------------------


def state(fed: Stream) -> dict[str, Any]:
    """Every byte that a later query can depend on."""
    layer, held = fed.layer, fed.layer.sequences
    rows = range(layer.batch_size)
    return {
        "pages": [[_bytes(held.pool.arena[x.page]) for x in row] for row in layer.segments],
        "spans": [[(x.start, x.tokens) for x in row] for row in layer.segments],
        "exact": [_bytes(held.exact.both[:, s, :, : layer.exact[s]]) for s in rows],
        "lengths": held.exact.on_device.tolist(),
        "table": _bytes(held.tables.both),
    }


def _bytes(x: Tensor) -> bytes:
    return x.cpu().contiguous().numpy().tobytes()


def told(made: CachePolicy, module: ModuleType, given: Tokens) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """What a cache answers and holds after each step: a prefill, single tokens over block edges, chunks, cuts."""
    with kernels(module):
        fed, at = stream(made), 0

        def feed(count: int) -> tuple[str, Tensor, dict[str, Any]]:
            nonlocal at
            out = fed.feed(given.span(at, at + count))
            at += count
            return f"tokens {at - count} to {at}", out.cpu(), state(fed)

        yield feed(100)
        for _ in range(70):
            yield feed(1)
        for count in (5, 16, 40):
            yield feed(count)
        before = state(fed)
        for depth in (3, 16):
            yield feed(depth)
            fed.crop(depth)
            at -= depth
            assert state(fed) == before, f"a rollback of {depth} tokens"
        fed.crop(50)  # deeper than what rolls back: a short block stays
        at -= 50
        for count in (1, 30):
            yield feed(count)


def check_stream(name: str, device: str) -> None:
    """Pages with their headers, tables and exact tokens are the same bytes; answers differ by rounding."""
    given = tokens(300, batch=2)
    there = Tokens(*(x.to(device) for x in (given.q, given.k, given.v)))
    ours, meant = told(POLICIES[name], cuda, there), told(POLICIES[name], definition, given)
    for (what, out, held), (_, expected, kept) in zip(list(ours), list(meant), strict=True):
        assert held == kept, what
        assert (out - expected).abs().max() < 1e-4, what


# -- a model's --------------------------------------------------------------------------------------------------------


def generated(model: Any, made: CachePolicy, **options: Any) -> tuple[Any, PackedCache]:
    """24 tokens after a prompt of two sequences, one of them padded; pages are allocated once."""
    ids = torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :23] = 0
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    cache = PackedCache(made, model.config, batch=2 * options.get("num_beams", 1), max_tokens=PROMPT + 24)
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    return model.generate(**inputs, **options, cache=cache), cache


def check_generation(llama: Any, name: str, device: str, **options: Any) -> None:
    """Each page in use holds what the definition makes, on a CPU, of the keys and values that were sealed into it; the
    first tokens are those of the definition."""
    packed: dict[int, Tensor] = {}
    seal = cuda.seal

    def watched(keys: Tensor, values: Tensor, layout: BlockLayout, arena: Tensor, pages: Tensor) -> Tensor:
        expected = torch.zeros(len(pages), layout.page_bytes, dtype=torch.uint8)
        definition.seal(keys.cpu(), values.cpu(), layout, expected, torch.arange(len(pages)).int())
        packed.update(zip(pages.tolist(), expected, strict=True))
        return seal(keys, values, layout, arena, pages)

    with kernels(definition):
        meant, _ = generated(llama, POLICIES[name], **options)
    with kernels(cuda) as patch:
        patch.setattr(cuda, "seal", watched)
        ours, cache = generated(copy.deepcopy(llama).to(device), POLICIES[name], **options)
    assert torch.equal(ours.sequences[:, : PROMPT + 6].cpu(), meant.sequences[:, : PROMPT + 6])
    assert (ours.logits[0].cpu() - meant.logits[0]).abs().max() < 1e-2
    used = {x.page for layer in cache.packed_layers for row in layer.segments for x in row}
    assert len(used) == cache.packed_layers[0].pool.used > 0
    for page in used:
        assert torch.equal(cache.packed_layers[0].pool.arena[page, HEADER_BYTES:].cpu(), packed[page][HEADER_BYTES:])
    assert cache.ledger().format_bytes == cache.storage_bytes()
    assert {x.device.type for layer in cache.packed_layers for x in layer.sequences.shadows.tensors} == {
        torch.device(device).type
    }
