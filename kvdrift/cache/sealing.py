"""From exact tokens to a page: quantize whole blocks into the pool, write their headers, hold what doesn't fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.cache.block import Identity, headers
from kvdrift.cache.pool import BlockPool
from kvdrift.kernels import dispatch
from kvdrift.layout import HEADER_BYTES, BlockLayout
from kvdrift.policy import CachePolicy

HELD = -1
"""Page of a block that stays exact, in the exact buffer."""


@dataclass(frozen=True)
class Segment:
    """One aged block of a sequence: its page (or HELD), first logical position and valid tokens."""

    page: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Binding:
    """What every page of one layer is made under. `may_pack(sequence, start)` is False where a block must be held."""

    index: int
    policy: CachePolicy
    layout: BlockLayout
    identity: Identity
    may_pack: Callable[[int, int], bool]


def seal(
    binding: Binding,
    pool: BlockPool,
    places: Sequence[tuple[int, int]],
    keys: Float[Tensor, "blocks kv_heads block head_dim"],
    values: Float[Tensor, "blocks kv_heads block head_dim"],
) -> list[Segment]:
    """Segments of the blocks at these (sequence, first position); HELD where one may not be packed or doesn't fit.

    Raises PoolExhausted, with the pool as it was, when there are fewer free pages than blocks.
    """
    pages = [HELD] * len(places)
    chosen = [i for i, place in enumerate(places) if binding.may_pack(*place)]
    if chosen:
        if len(chosen) < len(places):
            keys, values = keys[chosen], values[chosen]
        starts = [places[i][1] for i in chosen]
        for i, page in zip(chosen, _to_pages(binding, pool, starts, keys, values), strict=True):
            pages[i] = page
    return [Segment(page, start, binding.layout.block) for page, (_, start) in zip(pages, places, strict=True)]


def _to_pages(binding: Binding, pool: BlockPool, starts: list[int], keys: Tensor, values: Tensor) -> list[int]:
    layout, backend = binding.layout, dispatch.backend(keys.device)
    taken = pool.take(len(starts))
    at = torch.tensor(taken, dtype=torch.int32, device=keys.device)
    fits = backend.seal(keys, values, layout, pool.arena, at).tolist()
    checksums = backend.checksum(pool.arena, at)
    tokens = [layout.block] * len(starts)
    pool.arena[at.long(), :HEADER_BYTES] = headers(binding.identity, binding.index, layout, starts, tokens, checksums)
    pool.release(page for page, ok in zip(taken, fits, strict=True) if not ok)
    return [page if ok else HELD for page, ok in zip(taken, fits, strict=True)]
