"""The pages of one cache: a pool for each page size, shared by the layers of that size, reserved for a step at a time.

Knows page sizes and pools. Layers hold it and it holds no layer beyond a step, so a dropped cache is freed at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvdrift.cache.pool import BlockPool, PoolExhausted


class Pages:
    """Pages for the packed layers; `page_bytes[i]` is the page size of packed layer i.

    With `blocks`, the blocks a layer may hold, every pool is allocated once; without, pools grow.
    """

    def __init__(self, page_bytes: Mapping[int, int], blocks: int | None) -> None:
        self.page_bytes = dict(page_bytes)
        self.blocks = blocks
        self.pools: dict[int, BlockPool] = {}
        """By page size."""
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def pool(self, index: int, device: torch.device) -> BlockPool:
        """The pool of a layer; the pools of all page sizes are made together, on the first layer's device.

        Raises ValueError when a later layer is on another device.
        """
        if not self.pools:
            for size in set(self.page_bytes.values()):
                layers = sum(other == size for other in self.page_bytes.values())
                self.pools[size] = BlockPool(size, device, None if self.blocks is None else self.blocks * layers)
        pool = self.pools[self.page_bytes[index]]
        if pool.arena.device != device:
            raise ValueError(f"layer {index} is on {device} and the pages are on {pool.arena.device}; use one device")
        return pool

    def note(self, index: int, layer: Any) -> None:
        """Remember an exact layer that takes tokens in ahead of all packed ones, to undo it if there are no pages."""
        if self.blocks is not None and index < min(self.page_bytes, default=0):
            self._before.append((layer, dict(vars(layer))))

    def reserve(self, index: int, blocks: int) -> None:
        """Room for `blocks` more in each packed layer from `index` on.

        Raises PoolExhausted when a pool of fixed size hasn't as many, and the step left no trace.
        """
        try:
            for size, pool in self.pools.items():
                pool.reserve(blocks * sum(s == size for i, s in self.page_bytes.items() if i >= index))
        except PoolExhausted:
            for layer, state in self._before:
                vars(layer).update(state)
            raise
        finally:
            self._before.clear()

    @property
    def free_bytes(self) -> int:
        """Of pages reserved and not in use."""
        return sum(pool.free * pool.page_bytes for pool in self.pools.values())
