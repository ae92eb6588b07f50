"""Stored exact tensors through real pages and back: what a layer of the packed cache would answer with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.kernels import dispatch
from kvdrift.layout import BlockLayout
from kvdrift.policy import CachePolicy, packed_blocks


@dataclass(frozen=True)
class Decoded:
    """The packed span of one sequence: exact and decoded tensors of the same tokens, and the blocks that stay exact."""

    span: range
    keys: Float[Tensor, "kv_heads tokens d"]
    values: Float[Tensor, "kv_heads tokens d"]
    escalated: int


def through_pages(
    keys: Float[Tensor, "kv_heads T d"], values: Float[Tensor, "kv_heads T d"], policy: CachePolicy, layout: BlockLayout
) -> Decoded:
    """Seal every block that the policy packs in a sequence of T tokens, unseal it, in float32.

    A block that doesn't fit its format comes back exact and is counted.
    """
    blocks, block, first = packed_blocks(policy, keys.shape[1]), policy.block, policy.sink_tokens
    span = range(first, first + blocks * block)
    exact = [x[:, span.start : span.stop] for x in (keys, values)]
    if not blocks:
        return Decoded(span, exact[0].float(), exact[1].float(), 0)
    backend = dispatch.backend(keys.device)
    arena = torch.empty(blocks, layout.page_bytes, dtype=torch.uint8, device=keys.device)
    pages = torch.arange(blocks, dtype=torch.int32, device=keys.device)
    paged = [x.unflatten(1, (blocks, block)).transpose(0, 1) for x in exact]
    fits = backend.seal(*paged, layout, arena, pages)
    decoded = backend.unseal(layout, arena, pages, keys.dtype)
    kept = (torch.where(fits[:, None, None, None], d, x.float()) for d, x in zip(decoded, paged, strict=True))
    new_keys, new_values = (x.transpose(0, 1).flatten(1, 2) for x in kept)
    return Decoded(span, new_keys, new_values, int((~fits).sum()))
