"""What single cells do: only one layer's blocks of one position range are packed, everything else is exact.

A cell's forward pass starts at the layer that changed, from the stored hidden state that enters it. All cells of a
prompt are rows of one batch that grows from layer to layer, so that each layer's stored tensors are read once. Each
row is compared with an exact row that entered at the same layer, so that batch composition, whose noise exceeds many a
cell, cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache import attention
from kvdrift.cache.packed import PackedCache
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.logits import kl, rank_correlation
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import CHUNK
from kvdrift.policy import CachePolicy, packed_until

NAME = "kvdrift_cells"
MOST_SCORES = 2**28
"""Attention scores held at once where no flash kernel tells the log-sum-exp."""


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
    | dict.fromkeys(FIGURES[:-1], pl.Float64)
)
"""A row a cell of a candidate; [start, stop) are its packed tokens. An empty cell has null figures. What its answers
keep is not told: the first scored tokens are the words before the answer."""


def policy_cells(model: Any, stored: Stored, row: int, policy: CachePolicy, steps: int) -> list[dict[str, Any]]:
    """Rows of CELLS for one prompt, layer by layer, keys and values of a cell packed together by the policy itself."""
    spans = bucket_ranges(stored.length)
    packed = range(policy.sink_tokens, packed_until(policy, stored.length))
    cells = [packed_span(policy, packed, span) for span in spans]
    variants = {
        index: [Variant(policy, tuple(spans))]
        for index in range(stored.layers)
        if any(cells) and not policy.layer(index).is_exact
    }
    found = layer_cells(model, stored, row, variants, steps)
    figures = {index: one.rows() for index, (one,) in found.items()}
    return [
        {
            "prompt": stored.prompts[row].id,
            "layer": index,
            "bucket": span.start,
            "start": cell.start if cell else None,
            "stop": cell.stop if cell else None,
            "tensor": "both",
        }
        | {name: figures[index][at][name] if index in figures and cell else None for name in FIGURES[:-1]}
        for index in range(stored.layers)
        for at, (span, cell) in enumerate(zip(spans, cells, strict=True))
    ]


def packed_span(policy: CachePolicy, packed: range, bucket: range) -> range:
    """Tokens of the blocks whose first token lies in the bucket; blocks run in steps from the first packed token."""
    starts = [start for start in range(packed.start, packed.stop, policy.block) if start in bucket]
    return range(starts[0], starts[-1] + policy.block) if starts else range(0)


@torch.inference_mode()
def layer_cells(
    model: Any, stored: Stored, row: int, variants: Mapping[int, Sequence[Variant]], steps: int, given: int = 0
) -> dict[int, list[Figures]]:
    """Every cell of these layers, by layer and variant, on `steps` scored tokens of one prompt, those after `given`.

    The `given` tokens of the continuation count as prefilled: exact for all cells, and run as one row a layer only. The
    model uses the kvdrift attention function.
    """
    if not variants:
        return {}
    decoder, device, prompt = model.get_decoder(), model.device, stored.prompts[row]
    fed = min(given + steps, len(prompt.continuation) - 1)
    edges = [*range(0, given, CHUNK), *range(given, fed, CHUNK), fed]
    hidden: list[Tensor | None] = [None] * (len(edges) - 1)
    rows: dict[int, list[int]] = {}
    for index in tqdm(range(min(variants), len(decoder.layers)), desc=f"cells of {prompt.id}", unit="layer"):
        keys, values = (x[row : row + 1].to(device, model.dtype) for x in stored.layer(index))
        caches, sizes = _entering(model, index, variants.get(index, ()), keys, values)
        (entering,) = stored.read(f"hidden.{index}")
        entering = entering[row : row + 1].to(device, model.dtype)
        block, rest = decoder.layers[index], _Rest(keys, values)
        with _cell_attention(model):
            for at, (start, stop) in enumerate(pairwise(edges)):
                chunk = entering[:, start:stop]
                shared = _shared_inputs(decoder, chunk, stored.length + start)
                before = hidden[at]
                if start == given:
                    rest.spread([sum(own) for own in rows.values() if own])
                parts = [] if before is None else [_run(block, before, rest, shared)]
                own = [
                    _run(block, chunk.expand(size, -1, -1), cache, shared)
                    for cache, size in zip(caches, sizes, strict=True)
                ]
                hidden[at] = torch.cat(parts + (own if start >= given else own[:1]))
        rows[index] = sizes
    scored = min(steps, prompt.scored - 1 - given)
    told = torch.cat([x for x, start in zip(hidden, edges, strict=False) if x is not None and start >= given], dim=1)
    leaving = decoder.norm(told[:, :scored]).split([sum(sizes) for sizes in rows.values()])
    gold = prompt.continuation[given + 1 : given + scored + 1] if prompt.task else ()
    return {
        index: _figures(model, gold, own, rows[index][1:])
        for index, own in zip(rows, leaving, strict=True)
        if index in variants
    }


def _entering(
    model: Any, index: int, variants: Sequence[Variant], keys: Tensor, values: Tensor
) -> tuple[list[PackedCache], list[int]]:
    """A cache for the exact row and one for each variant, with their numbers of rows; none without variants."""
    batches = [Variant(variants[0].policy, (range(0),)), *variants] if variants else []
    caches, sizes = [], [len(v.ranges) for v in batches]
    for variant, size in zip(batches, sizes, strict=True):
        ranges: dict[int, Sequence[range]] = {index: variant.ranges}
        cache = PackedCache(variant.policy, model.config, dtype=model.dtype, pack_ranges=ranges)
        cache.load_layer(index, keys.expand(size, -1, -1, -1), values.expand(size, -1, -1, -1))
        caches.append(cache)
    return caches, sizes


def _figures(
    model: Any, gold: Sequence[int], leaving: Float[Tensor, "rows steps hidden"], sizes: list[int]
) -> list[Figures]:
    """The cells of one layer against its exact row, the first, by variant; `sizes` are the variants' rows, `gold` the
    tokens of the answer, if there is one."""
    log_p = model.get_output_embeddings()(leaving).float().log_softmax(-1)
    exact_row, rows = log_p[:1], log_p[1:]
    top, said = exact_row.argmax(-1), rows.argmax(-1)
    kept = None
    if gold:
        right = top == torch.tensor([gold], device=leaving.device)
        kept = (said == top)[:, right[0]].float().mean(1).cpu() if bool(right.any()) else None
    figures = [kl(exact_row, rows), said == top, rank_correlation(exact_row, rows)]
    kls, same, ranks = (x.cpu().split(sizes) for x in figures)
    shares = [None] * len(sizes) if kept is None else kept.split(sizes)
    return [Figures(*own) for own in zip(kls, same, ranks, shares, strict=True)]


@dataclass(frozen=True)
class _Shared:
    """Keys and values of one exact layer: a prefix that all rows share, and each row's own new tokens."""

    keys: Float[Tensor, "1 kv_heads T d"]
    values: Float[Tensor, "1 kv_heads T d"]
    new_keys: Float[Tensor, "rows kv_heads new d"]
    new_values: Float[Tensor, "rows kv_heads new d"]


class _Rest:
    """One exact layer for the rows that changed before it. The stored prefix is held once, whatever the rows."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._held = _Shared(keys, values, keys[:, :, :0], values[:, :, :0])

    def spread(self, sizes: Sequence[int]) -> None:
        """What one row of each layer has taken in so far, every row of that layer has: its `sizes` rows."""
        held = self._held
        if held.new_keys.shape[2]:
            repeats = torch.tensor(sizes, device=held.keys.device)
            new_keys, new_values = (x.repeat_interleave(repeats, 0) for x in (held.new_keys, held.new_values))
            self._held = replace(held, new_keys=new_keys, new_values=new_values)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[_Shared, _Shared]:
        held, rows = self._held, keys.shape[0]
        new = [
            torch.cat([x.expand(rows, -1, -1, -1), y], 2) for x, y in ((held.new_keys, keys), (held.new_values, values))
        ]
        self._held = now = replace(held, new_keys=new[0], new_values=new[1])
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
    at_once = max(1, MOST_SCORES // (keys.shape[1] * keys.shape[2]))
    parts = [_scored(q, keys, values, scaling) for q in query.split(at_once, dim=2)]
    out, lse = (torch.cat(own, dim=2) for own in zip(*parts, strict=True))
    return out, lse


def _scored(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
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
