"""KL of single cells: only one layer's blocks of one position range are packed, everything else is exact.

The forward pass starts at the layer that changed, from the stored hidden state that enters it, and the cells of a
layer are rows of one batch. Each row is compared with an exact row of the same batch, so that batch composition, whose
noise exceeds many a cell, cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvdrift.cache.packed import PackedCache
from kvdrift.measure.logits import kl
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import CHUNK
from kvdrift.policy import CachePolicy


@dataclass(frozen=True)
class Variant:
    """Cells of one layer that share a policy: row i may pack the blocks whose first token lies in ranges[i]."""

    policy: CachePolicy
    ranges: tuple[range, ...]


@torch.inference_mode()
def layer_kl(
    model: Any, stored: Stored, row: int, layer: int, variants: Sequence[Variant], steps: int
) -> list[Float[Tensor, "cells steps"]]:
    """KL in nats of every cell of one layer, a tensor a variant, on the first `steps` scored tokens of one prompt.

    `steps` is a multiple of the chunk, or all that the prompt scores. The model uses the kvdrift attention function.
    """
    decoder, device = model.get_decoder(), model.device
    exact = Variant(variants[0].policy, (range(0),))
    batches = [exact, *variants]
    caches = [PackedCache(v.policy, model.config, dtype=model.dtype, pack_ranges={layer: v.ranges}) for v in batches]
    sizes = [len(v.ranges) for v in batches]
    for cache, size in zip(caches, sizes):
        keys, values = (x[row : row + 1].to(device).expand(size, -1, -1, -1) for x in stored.layer(layer))
        cache.load_layer(layer, keys, values)
    rest = _Rest(stored, row, layer, sum(sizes), len(decoder.layers), device)
    (entering,) = stored.read(f"hidden.{layer}")
    entering = entering[row : row + 1, :steps].to(device)
    logits = []
    for start in range(0, entering.shape[1], CHUNK):
        chunk = entering[:, start : start + CHUNK]
        shared = _shared_inputs(decoder, chunk, stored.length + start)
        parts = [
            _run(decoder.layers[layer], chunk.expand(size, -1, -1), cache, shared) for cache, size in zip(caches, sizes)
        ]
        hidden = torch.cat(parts)
        for index in range(layer + 1, len(decoder.layers)):
            hidden = _run(decoder.layers[index], hidden, rest, shared)
        logits.append(model.get_output_embeddings()(decoder.norm(hidden)).float().log_softmax(-1))
    log_p = torch.cat(logits, dim=1)
    found = kl(log_p[:1].expand(log_p.shape[0] - 1, -1, -1), log_p[1:]).cpu()
    return list(found.split(sizes[1:]))


class _Rest:
    """Exact caches of the layers behind the changed one, every row starting from the stored keys and values."""

    def __init__(self, stored: Stored, row: int, layer: int, rows: int, layers: int, device: torch.device) -> None:
        self._layers = {}
        for index in range(layer + 1, layers):
            cached = DynamicLayer()
            cached.update(*(x[row : row + 1].to(device).expand(rows, -1, -1, -1) for x in stored.layer(index)))
            self._layers[index] = cached

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        return self._layers[layer_idx].update(keys, values)


def _shared_inputs(decoder: Any, chunk: Tensor, first: int) -> dict[str, Any]:
    new = chunk.shape[1]
    positions = torch.arange(first, first + new, device=chunk.device)[None]
    return {
        "position_embeddings": decoder.rotary_emb(chunk, position_ids=positions),
        "position_ids": positions,
        "attention_mask": _causal(first, new, chunk.device),
    }


def _causal(first: int, new: int, device: torch.device) -> Bool[Tensor, "1 1 new kept"]:
    keep = torch.arange(first + new, device=device) <= torch.arange(first, first + new, device=device)[:, None]
    return keep[None, None]


def _run(block: Any, hidden: Tensor, cache: Any, shared: dict[str, Any]) -> Tensor:
    out = block(hidden, cache=cache, use_cache=True, **shared)
    return out[0] if isinstance(out, tuple) else out
