"""The attention function that models call, registered as "kvdrift": it decides what each query sees.

A query at logical position p reads tokens [S, P(p)) packed and all others exact, whatever the chunking: a chunk in
which a block becomes due is split there. Queries of an exact prefill see everything exact. A layer with nothing packed
calls Transformers' own sdpa on the tensors that its own cache would have held.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache.layer import Arrival, PackedLayer

NAME = "kvdrift"


def attention(
    module: nn.Module,
    query: Float[Tensor, "batch query_heads new head_dim"],
    key: Arrival | Tensor,
    value: Arrival | Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch new query_heads head_dim"], None]:
    """Transformers' attention interface. Layers that the policy keeps exact arrive as tensors and go to sdpa."""
    if not isinstance(key, Arrival):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer, keys, values = key.layer, key.keys, key.values
    new = keys.shape[2]
    layer.check_room(new)
    real = real_columns(attention_mask, new)
    first = layer.seen == new
    counts = new if real is None else real.sum(1).tolist()

    if first and layer.policy.prefill == "exact" and not layer.stays_dense(counts):
        keys, values = keys.contiguous(), values.contiguous()
        out, _ = sdpa_attention_forward(module, query, keys, values, attention_mask, scaling=scaling, **kwargs)
        layer.start_packed(keys, values, real)
        return out, None
    if layer.stays_dense(counts):
        layer.append_dense(keys, values, real)
        return sdpa_attention_forward(module, query, layer.keys, layer.values, attention_mask, scaling=scaling, **kwargs)

    layer.leave_dense()
    if not layer.packed:
        layer.begin_packed(keys)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = query.new_empty(query.shape[0], new, query.shape[1], query.shape[3])
    column = 0
    while column < new:
        if real is not None:  # a pad among the columns: one column at a time, each sequence by itself
            rows = real[:, column].nonzero().flatten().tolist()
            layer.append(keys[:, :, column : column + 1], values[:, :, column : column + 1], rows)
            layer.seal_due()
            end = column + 1
        else:
            layer.append(keys[:, :, column : column + 1], values[:, :, column : column + 1])
            layer.seal_due()
            end = min(new, column + 1 + layer.columns_until_due())
            if end > column + 1:
                layer.append(keys[:, :, column + 1 : end], values[:, :, column + 1 : end])
        answer = _decode(layer, query[:, :, column:end], scale).transpose(1, 2)
        if real is not None:
            answer = torch.where(real[:, column:end, None, None], answer, 0.0)
        out[:, column:end] = answer
        column = end
    return out, None


def real_columns(mask: Tensor | None, new: int) -> Bool[Tensor, "batch new"] | None:
    """Which of the new columns hold a real token, from the 4-D mask: a real token sees itself, a pad doesn't.

    None when all do. A mask is boolean (True is visible) or additive.
    """
    if mask is None:
        return None
    diagonal = mask[:, 0].diagonal(offset=mask.shape[-1] - new, dim1=-2, dim2=-1)
    real = diagonal if mask.dtype == torch.bool else diagonal == 0
    return None if bool(real.all()) else real


def _decode(layer: PackedLayer, query: Tensor, scaling: float) -> Tensor:
    return layer.backend.decode_attention(
        query,
        layer.layout,
        layer.pool.arena,
        layer.pages,
        layer.tokens,
        layer.exact_keys,
        layer.exact_values,
        layer.exact_lengths,
        scaling,
    )


def register() -> None:
    """Make `attn_implementation="kvdrift"` known to Transformers, with sdpa's mask form."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
