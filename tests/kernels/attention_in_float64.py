"""Attention over decoded blocks and exact tokens in float64: what every backend's attention is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdrift.kernels import definition
from kvdrift.layout import BlockLayout

ALL_OR_NOTHING = 1e7
"""A key whose products with the query are so large has all the weight or none, however they are rounded."""


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
) -> tuple[Tensor, Tensor]:
    """The arguments and the meaning of `definition.decode_attention`, one sequence and KV head at a time.

    Also how far float32 may be from it, [sequences, query_heads, 1, 1]: 2⁻²¹ of the largest value that is seen, times 4
    and the largest sum of magnitudes that a logit is the sum of. 1e-28 is what bytes as factors resolve.
    """
    out = torch.empty(query.shape, dtype=torch.float64)
    sequences, query_heads, queries, _ = query.shape
    tolerance = torch.empty(sequences, query_heads, 1, 1, dtype=torch.float64)
    share = query_heads // layout.kv_heads
    for s in range(sequences):
        live, end = tokens[s] > 0, int(exact_lengths[s])
        decoded = definition.unseal(layout, arena, pages[s][live], query.dtype)
        seen = torch.arange(layout.block) < tokens[s][live][:, None]
        for h in range(layout.kv_heads):
            keys, values = (
                torch.cat([packed[:, h][seen].double(), exact[s, h, :end].double()])
                for packed, exact in zip(decoded, (exact_keys, exact_values), strict=True)
            )
            heads = slice(h * share, (h + 1) * share)
            scores = query[s, heads].double() @ keys.T * scaling
            for i in range(queries):
                sees = len(keys) - (queries - 1 - i)
                out[s, heads, i] = scores[:, i, :sees].softmax(-1) @ values[:sees]
            terms = query[s, heads].double().abs() @ keys.T.abs() * scaling
            reach = torch.where(terms < ALL_OR_NOTHING, terms, 0.0).max()  # without NaN too
            largest = values[values.isfinite()].abs().max()
            tolerance[s, heads] = 2**-21 * largest * (4 + reach) + 1e-28
    return out, tolerance
