"""The attention function that models call, registered as "kvdrift": it decides what each query sees.

A query at logical position p reads tokens [S, P(p)) packed and all others exact, whatever the chunking: a chunk in
which a block becomes due is split there. Queries of an exact prefill see everything exact. A layer with nothing packed
calls Transformers' own sdpa on the tensors that its own cache would have held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache.layer import Arrival
from kvdrift.cache.sequences import Sequences

NAME = "kvdrift"
UNKNOWN = ("s_aux", "softcap", "position_bias")
"""What some models change scores by (attention sinks, soft-capping, biases); to leave it out would answer wrongly."""


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
    if unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]:
        raise ValueError(
            f"the model's attention takes {', '.join(unknown)}, which kvdrift's doesn't know; serve it on its own"
        )
    if not isinstance(key, Arrival):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    layer, keys, values = key.layer, key.keys, key.values
    batch, _, new, _ = keys.shape
    real = real_columns(attention_mask, batch, new)
    due = layer.admit([new] * batch if real is None else real.sum(1).tolist(), new)
    layer.note_columns(real, batch, new)

    if layer.seen == new and layer.policy.prefill == "exact":
        keys, values = keys.contiguous(), values.contiguous()
        out, _ = sdpa_attention_forward(module, query, keys, values, attention_mask, scaling=scaling, **kwargs)
        layer.prefill(keys, values, due)
        return out, None
    if not (layer.packed or due):
        layer.append_dense(keys, values)
        return sdpa_attention_forward(
            module, query, layer.keys, layer.values, attention_mask, scaling=scaling, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _read_packed(layer.open(keys), query, keys, values, real, scaling), None


def _read_packed(
    sequences: Sequences, query: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, scaling: float
) -> Float[Tensor, "batch new query_heads head_dim"]:
    """Take the new tokens in, split wherever a block becomes due, and let each piece see what is packed by then."""
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    for start, stop, rows in _runs(real, *keys.shape[::2]):
        while start < stop:
            first = slice(start, start + 1)
            sequences.append(keys[:, :, first], values[:, :, first], rows)
            sequences.seal_due()
            end = min(stop, start + 1 + sequences.until_due(rows))
            if end > start + 1:
                rest = slice(start + 1, end)
                sequences.append(keys[:, :, rest], values[:, :, rest], rows)
            answer = sequences.attend(query[:, :, start:end], scaling).transpose(1, 2)
            if answer.shape == out.shape and len(rows) == len(answer):  # a decode step, mostly
                return answer
            out[rows, start:end] = answer if len(rows) == len(answer) else answer[rows]
            start = end
    return out


def _runs(real: Tensor | None, batch: int, new: int) -> Iterator[tuple[int, int, list[int]]]:
    """Spans of columns in which the same sequences have real tokens, and those sequences; spans of pads left out."""
    if real is None:
        yield 0, new, list(range(batch))
        return
    changes = (real[:, 1:] != real[:, :-1]).any(0).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), new]
    for start, stop in pairwise(edges):
        rows = real[:, start].nonzero().flatten().tolist()
        if rows:
            yield start, stop, rows


def real_columns(mask: Tensor | None, batch: int, new: int) -> Bool[Tensor, "batch new"] | None:
    """Which of the new columns hold a real token, from the 4-D mask: a real token sees itself, a pad doesn't.

    None when all do. A mask is boolean (True is visible) or additive.
    """
    if mask is None:
        return None
    diagonal = mask[:, 0].diagonal(offset=mask.shape[-1] - new, dim1=-2, dim2=-1)
    real = diagonal if mask.dtype == torch.bool else diagonal == 0
    return None if bool(real.all()) else real.expand(batch, new)


def register() -> None:
    """Make `attn_implementation="kvdrift"` known to Transformers, with sdpa's mask form."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


register()
