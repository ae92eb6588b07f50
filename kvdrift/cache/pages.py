"""The pages of one cache, reserved for a step at a time: one pool a page size, or one a layer where pools may grow.

Knows page sizes and pools. Layers hold it and it holds no layer beyond a step, so a dropped cache is freed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kvdrift.cache.pool import BlockPool, PoolExhausted


class Pages:
    """Pages for the packed layers; `page_bytes[i]` is the page size of packed layer i.

    With `blocks`, the blocks a layer may hold, everything is allocated once, and layers of one page size share a pool.
    Without, each layer has a pool that grows: while an arena is copied into a larger one, only one layer is held twice.
    """

    def __init__(self, page_bytes: Mapping[int, int], blocks: int | None) -> None:
        self.page_bytes = dict(page_bytes)
        self.blocks = blocks
        self._pools: dict[int, BlockPool] = {}
        """By layer."""
        self._before: list[tuple[Any, dict[str, Any]]] = []

    def pool(self, index: int, device: torch.device) -> BlockPool:
        """The pool of a layer; pools of fixed size are made together, on the first layer's device.

        Raises ValueError when a later layer of theirs is on another device.
        """
        size = self.page_bytes[index]
        if self.blocks is not None and not self._pools:
            layers = Counter(self.page_bytes.values())
            shared = {size: BlockPool(size, device, self.blocks * count) for size, count in layers.items()}
            self._pools = {i: shared[size] for i, size in self.page_bytes.items()}
        elif index not in self._pools:
            self._pools[index] = BlockPool(size, device)
        pool = self._pools[index]
        if pool.arena.device != device:
            raise ValueError(f"layer {index} is on {device} and its pages are on {pool.arena.device}; use one device")
        return pool

    @property
    def pools(self) -> list[BlockPool]:
        """Each once."""
        return list(dict.fromkeys(self._pools.values()))

    def note(self, index: int, layer: Any) -> None:
        """Remember an exact layer that takes tokens in ahead of all packed ones, to undo it if there are no pages."""
        if self.blocks is not None and index < min(self.page_bytes, default=0):
            self._before.append((layer, dict(vars(layer))))

    def reserve(self, index: int, blocks: int) -> None:
        """Room for `blocks` more in layer `index`, and in pools of fixed size for as many in each packed layer behind.

        Raises PoolExhausted when a pool of fixed size hasn't as many, and the step left no trace.
        """
        try:
            if blocks:
                asking = [index] if self.blocks is None else [i for i in self._pools if i >= index]
                for pool, layers in Counter(self._pools[i] for i in asking).items():
                    pool.reserve(blocks * layers)
        except PoolExhausted:
            for layer, state in self._before:
                vars(layer).update(state)
            raise
        finally:
            self._before.clear()

    @property
    def free_bytes(self) -> int:
        """Of pages reserved and not in use."""
        return sum(pool.free * pool.page_bytes for pool in self.pools)
