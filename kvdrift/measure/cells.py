"""What single cells do: only one layer's blocks of one position range are packed, everything else is exact.

The forward pass starts at the layer that changed, from the stored hidden state that enters it, and the cells of a
layer are rows of one batch. Each row is compared with an exact row of the same batch, so that batch composition, whose
noise exceeds many a cell, cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache import attention
from kvdrift.cache.packed import PackedCache
from kvdrift.measure.logits import kl, rank_correlation
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import CHUNK
from kvdrift.measure.tensors import bucket_ranges
from kvdrift.policy import CachePolicy, packed_until

NAME = "kvdrift_cells"


@dataclass(frozen=True)
class Variant:
    """Cells of one layer that share a policy: row i may pack the blocks whose first token lies in ranges[i]."""

    policy: CachePolicy
    ranges: tuple[range, ...]


@dataclass(frozen=True)
class Figures:
    """The cells of one variant against the exact row, on a prompt's scored tokens."""

    kl: Float[Tensor, "cells steps"]
    same_top1: Bool[Tensor, "cells steps"]
    rank_correlation: Float[Tensor, "cells steps"]
    kept: Float[Tensor, " cells"] | None
    """Task outcome: share of the gold answer's tokens that the exact row would say and the cell still says, each after
    the gold tokens before it. None without a task, or where the exact row would say none."""

    def rows(self) -> list[dict[str, float | None]]:
        """Means over steps, a mapping a cell: the columns FIGURES."""
        kept = [None] * len(self.kl) if self.kept is None else self.kept.tolist()
        columns = (self.kl.mean(1), self.kl.amax(1), self.same_top1.float().mean(1), self.rank_correlation.mean(1))
        return [dict(zip(FIGURES, row, strict=True)) for row in zip(*(x.tolist() for x in columns), kept, strict=True)]


FIGURES = ("kl", "kl_max", "same_top1", "rank_correlation", "kept")

CELLS = pl.Schema(
    {
        "prompt": pl.String,
        "layer": pl.Int64,
        "bucket": pl.Int64,
        "start": pl.Int64,
        "stop": pl.Int64,
        "tensor": pl.String,
    }
    | dict.fromkeys(FIGURES, pl.Float64)
)
"""A row a cell of a candidate; [start, stop) are its packed tokens. An empty cell has null figures."""


def policy_cells(
    model: Any, stored: Stored, row: int, layer: int, policy: CachePolicy, steps: int
) -> list[dict[str, Any]]:
    """Rows of CELLS for one layer and prompt, keys and values of a cell packed together by the policy itself."""
    spans = bucket_ranges(stored.length)
    packed = range(policy.sink_tokens, packed_until(policy, stored.length))
    cells = [packed_span(policy, packed, span) for span in spans]
    nothing = dict[str, float | None].fromkeys(FIGURES)
    figures = [nothing] * len(spans)
    if any(cells) and not policy.layer(layer).is_exact:
        found = layer_cells(model, stored, row, layer, [Variant(policy, tuple(spans))], steps)[0].rows()
        figures = [own if cell else nothing for own, cell in zip(found, cells, strict=True)]
    return [
        {
            "prompt": stored.prompts[row].id,
            "layer": layer,
            "bucket": span.start,
            "start": cell.start if cell else None,
            "stop": cell.stop if cell else None,
            "tensor": "both",
        }
        | own
        for span, cell, own in zip(spans, cells, figures, strict=True)
    ]


def packed_span(policy: CachePolicy, packed: range, bucket: range) -> range:
    """Tokens of the blocks whose first token lies in the bucket; blocks run in steps from the first packed token."""
    starts = [start for start in range(packed.start, packed.stop, policy.block) if start in bucket]
    return range(starts[0], starts[-1] + policy.block) if starts else range(0)


@torch.inference_mode()
def layer_cells(
    model: Any, stored: Stored, row: int, layer: int, variants: Sequence[Variant], steps: int, given: int = 0
) -> list[Figures]:
    """Every cell of one layer, by variant, on `steps` scored tokens of one prompt, the first of them after `given`.

    The `given` tokens of the continuation count as prefilled: exact for all cells, and run as one row only. The model
    uses the kvdrift attention function.
    """
    decoder, device = model.get_decoder(), model.device
    batches = [Variant(variants[0].policy, (range(0),)), *variants]
    caches = [PackedCache(v.policy, model.config, dtype=model.dtype, pack_ranges={layer: v.ranges}) for v in batches]
    sizes = [len(v.ranges) for v in batches]
    for cache, size in zip(caches, sizes, strict=True):
        keys, values = (x[row : row + 1].to(device, model.dtype).expand(size, -1, -1, -1) for x in stored.layer(layer))
        cache.load_layer(layer, keys, values)
    rest = _Rest(stored, row, layer, len(decoder.layers), model)
    (entering,) = stored.read(f"hidden.{layer}")
    entering = entering[row : row + 1, : given + steps].to(device, model.dtype)
    starts = [*range(0, given, CHUNK), *range(given, entering.shape[1], CHUNK)]
    logits = []
    with _cell_attention(model):
        for start, stop in pairwise([*starts, entering.shape[1]]):
            chunk = entering[:, start:stop]
            shared = _shared_inputs(decoder, chunk, stored.length + start)
            parts = [
                _run(decoder.layers[layer], chunk.expand(size, -1, -1), cache, shared)
                for cache, size in zip(caches, sizes, strict=True)
            ]
            hidden = torch.cat(parts) if start >= given else parts[0]
            for index in range(layer + 1, len(decoder.layers)):
                hidden = _run(decoder.layers[index], hidden, rest, shared)
            if start >= given:
                logits.append(model.get_output_embeddings()(decoder.norm(hidden)).float().log_softmax(-1))
    prompt = stored.prompts[row]
    scored = min(steps, prompt.scored - 1 - given)
    log_p = torch.cat(logits, dim=1)[:, :scored]
    exact_row, rows = log_p[:1], log_p[1:]
    top, said = exact_row.argmax(-1), rows.argmax(-1)
    kept = None
    if prompt.task:
        right = top == torch.tensor([prompt.continuation[given + 1 : given + scored + 1]], device=device)
        kept = (said == top)[:, right[0]].float().mean(1).cpu() if bool(right.any()) else None
    figures = [kl(exact_row.expand_as(rows), rows), said == top, rank_correlation(exact_row, rows)]
    kls, same, ranks = (x.cpu().split(sizes[1:]) for x in figures)
    shares = [None] * len(variants) if kept is None else kept.split(sizes[1:])
    return [Figures(*own) for own in zip(kls, same, ranks, shares, strict=True)]


@dataclass(frozen=True)
class _Shared:
    """Keys and values of one exact layer: a prefix that all rows share, and each row's own new tokens."""

    keys: Float[Tensor, "1 kv_heads T d"]
    values: Float[Tensor, "1 kv_heads T d"]
    new_keys: Float[Tensor, "rows kv_heads new d"]
    new_values: Float[Tensor, "rows kv_heads new d"]


class _Rest:
    """Exact caches of the layers behind the changed one. The stored prefix is held once, whatever the rows."""

    def __init__(self, stored: Stored, row: int, layer: int, layers: int, model: Any) -> None:
        self._shared: dict[int, _Shared] = {}
        for index in range(layer + 1, layers):
            keys, values = (x[row : row + 1].to(model.device, model.dtype) for x in stored.layer(index))
            self._shared[index] = _Shared(keys, values, keys[:, :, :0], values[:, :, :0])

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[_Shared, _Shared]:
        held = self._shared[layer_idx]
        rows = keys.shape[0]
        new = [
            torch.cat([x.expand(rows, -1, -1, -1), y], 2) for x, y in ((held.new_keys, keys), (held.new_values, values))
        ]
        self._shared[layer_idx] = now = replace(held, new_keys=new[0], new_values=new[1])
        return now, now


def _attention(module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, **kwargs: Any) -> Any:
    """Rows over their shared prefix as one block of queries, merged by log-sum-exp with each row's own new tokens."""
    if not isinstance(key, _Shared):
        return attention.attention(module, query, key, value, mask, **kwargs)
    rows, _, new, d = query.shape
    heads, scaling = key.keys.shape[1], kwargs.get("scaling") or d**-0.5
    folded = query.unflatten(1, (heads, -1)).permute(1, 0, 2, 3, 4).reshape(1, heads, -1, d)
    out, lse = _with_lse(folded, key.keys, key.values, scaling)
    out, lse = (x.unflatten(2, (rows, -1, new))[0].transpose(0, 1).float() for x in (out, lse[..., None]))

    own = query.unflatten(1, (heads, -1)).float() @ key.new_keys.float()[:, :, None].transpose(-1, -2) * scaling
    seen = key.new_keys.shape[2]
    hidden = torch.arange(seen, device=query.device) > torch.arange(seen - new, seen, device=query.device)[:, None]
    own = own.masked_fill(hidden, float("-inf"))
    own_lse = own.logsumexp(-1, keepdim=True)
    own_out = (own - own_lse).exp() @ key.new_values.float()[:, :, None]
    share = torch.sigmoid(own_lse - lse)
    merged = torch.lerp(out, own_out, share).flatten(1, 2).to(query.dtype)
    return merged.transpose(1, 2).contiguous(), None


def _with_lse(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Full attention and the log-sum-exp of its scores; torch's flash kernel where it has one that tells both."""
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, keys, values, 0.0, False, scale=scaling)[:2]
        return out, lse
    scores = query.float() @ keys.float().transpose(-1, -2) * scaling
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ values.float(), lse


@contextmanager
def _cell_attention(model: Any) -> Iterator[None]:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


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
