"""Blocks that come from elsewhere: taken only if every field of the header matches and the payload is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import UInt8
from torch import Tensor

from kvdrift.cache.block import BlockRejected, Identity, check
from kvdrift.cache.layer import PackedLayer
from kvdrift.cache.packed import PackedCache
from kvdrift.kernels import dispatch
from kvdrift.layout import BlockLayout


@dataclass(frozen=True)
class Block:
    """One page, with where its receiver wants to put it."""

    page: UInt8[Tensor, " page_bytes"]
    layout: BlockLayout
    layer: int
    start: int


def blocks(cache: PackedCache) -> Iterator[Block]:
    """Every live page of a cache."""
    for layer in cache.packed_layers:
        yield from layer_blocks(layer)


def layer_blocks(layer: PackedLayer) -> Iterator[Block]:
    for segments in layer.segments:
        for segment in segments:
            if segment.page >= 0:
                yield Block(layer.pool.arena[segment.page], layer.layout, layer.index, segment.start)


def accept(block: Block, identity: Identity, shareable: Collection[str] = ()) -> None:
    """Raise BlockRejected, naming the fields, unless the block is this identity's own or lies in a shareable scope.

    `shareable` names the prefix scopes that this tenant may read; nothing is shared without being named.
    """
    one = block.page[None]
    page = torch.zeros(1, dtype=torch.int32, device=one.device)
    checksum = int(dispatch.backend(one.device).checksum(one, page))
    rejection: BlockRejected | None = None
    for scope in (identity.scope, *shareable):
        try:
            check(block.page, checksum, replace(identity, scope=scope), block.layer, block.layout, block.start)
            return
        except BlockRejected as error:
            rejection = rejection or error
    assert rejection is not None
    raise rejection
