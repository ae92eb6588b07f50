"""Attention over decoded blocks and exact tokens in float64: what every backend's attention is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdrift.kernels import definition
from kvdrift.layout import BlockLayout


def attention(
    query: Tensor,
    layout: BlockLayout,
    arena: Tensor,
    pages: Tensor,
    tokens: Tensor,
    exact_keys: Tensor,
    exact_values: Tensor,
    exact_lengths: Tensor,
    scaling: float,
) -> Tensor:
    """The arguments and the meaning of `definition.decode_attention`, one sequence and KV head at a time."""
    out = torch.empty(query.shape, dtype=torch.float64)
    sequences, query_heads, queries, _ = query.shape
    share = query_heads // layout.kv_heads
    behind = queries - 1 - torch.arange(queries)[:, None]
    for s in range(sequences):
        live, end = tokens[s] > 0, int(exact_lengths[s])
        decoded = definition.unseal(layout, arena, pages[s][live], query.dtype)
        seen = torch.arange(layout.block) < tokens[s][live][:, None]
        for h in range(layout.kv_heads):
            keys, values = (
                torch.cat([packed[:, h][seen].double(), exact[s, h, :end].double()])
                for packed, exact in zip(decoded, (exact_keys, exact_values), strict=True)
            )
            hidden = torch.arange(len(keys)) >= len(keys) - behind
            heads = slice(h * share, (h + 1) * share)
            scores = query[s, heads].double() @ keys.T * scaling
            out[s, heads] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    return out
