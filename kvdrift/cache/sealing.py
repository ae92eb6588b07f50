"""From exact tokens to a page: quantize whole blocks into the pool, write their headers, hold what doesn't fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.cache.block import Identity, header, headers
from kvdrift.cache.pool import BlockPool
from kvdrift.layout import BlockLayout
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
    """What every page of one layer is made under."""

    index: int
    policy: CachePolicy
    layout: BlockLayout
    identity: Identity

    @cached_property
    def header(self) -> np.ndarray:
        """What the headers of its pages have in common."""
        return header(self.identity, self.index, self.layout)


def seal(
    backend: ModuleType,
    binding: Binding,
    pool: BlockPool,
    starts: Sequence[int],
    allowed: Sequence[bool],
    keys: Float[Tensor, "blocks kv_heads block head_dim"],
    values: Float[Tensor, "blocks kv_heads block head_dim"],
) -> list[Segment]:
    """Segments of the blocks at these first positions; HELD where one isn't allowed to be packed or doesn't fit.

    Raises PoolExhausted, with the pool as it was, when there are fewer free pages than blocks.
    """
    pages = [HELD] * len(starts)
    chosen = [i for i, may in enumerate(allowed) if may]
    if chosen:
        if len(chosen) < len(starts):
            keys, values = keys[chosen], values[chosen]
        made = _to_pages(backend, binding, pool, [starts[i] for i in chosen], keys, values)
        for i, page in zip(chosen, made, strict=True):
            pages[i] = page
    return [Segment(page, start, binding.layout.block) for page, start in zip(pages, starts, strict=True)]


def _to_pages(
    backend: ModuleType, binding: Binding, pool: BlockPool, starts: list[int], keys: Tensor, values: Tensor
) -> list[int]:
    taken = pool.take(len(starts))
    at = torch.tensor(taken, dtype=torch.int32, device=keys.device)
    fits = backend.seal(keys, values, binding.layout, pool.arena, at).tolist()
    backend.label(pool.arena, at, headers(binding.header, starts))
    pool.release(page for page, ok in zip(taken, fits, strict=True) if not ok)
    return [page if ok else HELD for page, ok in zip(taken, fits, strict=True)]
