"""A page's header: what binds a block, and that a worker takes no other:  pytest tests/cache/test_block.py"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stream import policy, stream, tokens

from kvdrift.cache import block
from kvdrift.cache.block import BlockRejected, Identity
from kvdrift.kernels import definition

MINE = Identity(scope="tenant-a", model="m", adapter="", version="v1", kernels="k")


def page_of(identity: Identity) -> tuple[torch.Tensor, dict[str, Any]]:
    """The second page of a cache of this identity, and what a worker knows about it."""
    fed = stream(policy(sink_tokens=16), identity=identity)
    fed.feed(tokens(100))
    arena, segment = fed.layer.pool.arena, fed.layer.segments[0][1]
    at = torch.tensor([segment.page], dtype=torch.int32)
    checksum = int(definition.checksum(arena, at)[0])
    return arena[segment.page], {"checksum": checksum, "layer": 0, "layout": fed.layer.layout, "start": 48}


def test_a_page_of_ones_own_is_accepted() -> None:
    page, known = page_of(MINE)
    block.check(page, identity=MINE, **known)
    header = page[:64].numpy().view(block.HEADER)[0]
    assert (header["start"], header["tokens"], header["key_group"], header["value_group"]) == (48, 32, 32, 32)


@pytest.mark.parametrize("name", ["scope", "model", "adapter", "version", "kernels"])
def test_a_page_of_another_identity_is_rejected_by_name(name: str) -> None:
    page, known = page_of(MINE)
    with pytest.raises(BlockRejected, match=f"block rejected: {name} differ"):
        block.check(page, identity=replace(MINE, **{name: "other"}), **known)


@pytest.mark.parametrize(("name", "change"), [("layer", 1), ("start", 16), ("checksum", 7)])
def test_a_page_of_another_place_or_content_is_rejected_by_name(name: str, change: int) -> None:
    page, known = page_of(MINE)
    with pytest.raises(BlockRejected, match=f"block rejected: {name} differ"):
        block.check(page, identity=MINE, **{**known, name: change})


def test_a_page_that_was_never_sealed_is_rejected() -> None:
    page, known = page_of(MINE)
    with pytest.raises(BlockRejected, match="magic, layer, tokens, key_group"):
        block.check(torch.full_like(page, 255), identity=MINE, **known)
