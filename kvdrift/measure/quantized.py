"""Tables of what packing did to one prompt's layers: tensor errors by bucket and role, attention errors by slice.

The sequence is a prompt's prefix and the continuation's tokens that were fed behind it, whose role is GENERATED.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvdrift.layout import BlockLayout
from kvdrift.measure.attention import Replay
from kvdrift.measure.buckets import bucket_ranges, bucket_starts
from kvdrift.measure.pages import Decoded, through_pages
from kvdrift.measure.reference import Stored
from kvdrift.measure.tensors import errors
from kvdrift.policy import CachePolicy, packed_until
from kvdrift.prompts.prompt import GENERATED, REGIONS, Prompt

ERRORS = pl.Schema(
    {
        "bucket": pl.Int64,
        "role": pl.String,
        "tokens": pl.Int64,
        "cosine": pl.Float64,
        "cosine_min": pl.Float64,
        "rel_l2": pl.Float64,
        "max_abs": pl.Float64,
        "saturated": pl.Float64,
        "prompt": pl.String,
        "cohort": pl.String,
        "length": pl.Int64,
        "layer": pl.Int64,
        "tensor": pl.String,
    }
)
ATTENTION = pl.Schema(
    {
        "prompt": pl.String,
        "cohort": pl.String,
        "layer": pl.Int64,
        "slice": pl.String,
        "bucket": pl.Int64,
        "role": pl.String,
        "key_logits": pl.Float64,
        "jensen_shannon": pl.Float64,
        "value_output": pl.Float64,
        "combined_error": pl.Float64,
        "top_overlap": pl.Float64,
    }
)
"""A row a slice: `layer` (all that is packed), a `position` or `distance` bucket, a `region` or a `role`. `bucket` is
the first position, or the least distance from the current token; a region, one of REGIONS, stands in `role`.
A slice of which no replayed query reads anything packed has null figures."""

QUERIES = 4
"""The most scored positions of a prompt whose queries are replayed, evenly spread up to the last one."""


MOST_ELEMENTS = 2**23
"""Elements of keys that are taken at once, of as many layers as that holds."""


def fed(prompt: Prompt) -> int:
    """How many tokens of the continuation the cache holds in the end; the last scored one is only predicted."""
    return max(0, prompt.scored - 1)


@dataclass(frozen=True)
class Rows:
    """What packing did to one prompt's tensors: rows of ERRORS and of ATTENTION, and the blocks that stay exact."""

    errors: list[dict[str, Any]]
    attention: list[dict[str, Any]]
    escalated: int


def prompt_rows(
    batch: Stored, at: int, layouts: Sequence[BlockLayout | None], policy: CachePolicy, ranges: dict[str, Tensor]
) -> Rows:
    """Row `at` of a batch, through the pages of every layer that packs."""
    prompt, rows, escalated = batch.prompts[at], Rows([], [], 0), 0
    packing = [(layer, layout) for layer, layout in enumerate(layouts) if layout is not None]
    for group in _groups_of(packing, batch.length + fed(prompt)):
        tensors = [batch.sequence(layer, at, fed(prompt)) for layer, _ in group]
        decoded = []
        for (layer, layout), (keys, values, _) in zip(group, tensors, strict=True):
            decoded.append(through_pages(keys, values, policy, layout))
            rows.errors.extend(error_rows(prompt, layer, keys, values, decoded[-1], ranges))
        keys, values, queries = (torch.stack(own) for own in zip(*tensors, strict=True))
        layers = [layer for layer, _ in group]
        rows.attention.extend(attention_rows(prompt, layers, queries, keys, values, decoded, policy))
        escalated += sum(each.escalated for each in decoded)
    return replace(rows, escalated=escalated)


def _groups_of(packing: list[tuple[int, BlockLayout]], tokens: int) -> Iterator[list[tuple[int, BlockLayout]]]:
    """The layers in runs of at most MOST_ELEMENTS elements of keys, or of one layer."""
    at_once = max((max(1, MOST_ELEMENTS // (x.kv_heads * x.head_dim * tokens)) for _, x in packing), default=1)
    for start in range(0, len(packing), at_once):
        yield packing[start : start + at_once]


def error_rows(
    prompt: Prompt, layer: int, keys: Tensor, values: Tensor, decoded: Decoded, ranges: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Rows of ERRORS. `saturated` is the share of elements outside the calibrated range of their channel."""
    span, rows = decoded.span, []
    if not span:
        return []
    groups = _groups(prompt, span)
    for tensor, exact, new in (("keys", keys, decoded.keys), ("values", values, decoded.values)):
        exact = exact[:, span.start : span.stop]
        error = errors(exact, new)
        low, high = (ranges[f"{tensor}_{side}"][layer][:, None] for side in ("low", "high"))
        outside = ((exact < low) | (exact > high)).float().mean(-1)
        means = groups.reduce(np.add, error.cosine.mean(0), error.relative_l2.mean(0), outside.mean(0)) / groups.tokens
        (least,) = groups.reduce(np.minimum, error.cosine.amin(0))
        (largest,) = groups.reduce(np.maximum, error.max_abs.amax(0))
        columns = {"bucket": groups.buckets, "role": groups.roles, "tokens": groups.tokens.tolist()}
        columns |= dict(zip(("cosine", "rel_l2", "saturated"), means.tolist(), strict=True))
        columns |= {"cosine_min": least.tolist(), "max_abs": largest.tolist()}
        named = {"prompt": prompt.id, "cohort": prompt.cohort, "length": len(prompt.tokens), "layer": layer}
        named |= {"tensor": tensor.removesuffix("s")}
        rows += [named | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


@dataclass(frozen=True)
class _Groups:
    """The tokens of a packed span by bucket and role."""

    buckets: list[int]
    roles: list[str]
    tokens: np.ndarray
    """How many each group has."""
    order: np.ndarray
    """The tokens, group by group."""
    edges: np.ndarray
    """Where each group begins in that order."""

    def reduce(self, by: np.ufunc, *figures: Float[Tensor, "tokens"]) -> np.ndarray:
        """Every figure over every group, [figures, groups], in float64."""
        values = torch.stack(figures).double().cpu().numpy()
        return by.reduceat(values[:, self.order], self.edges, axis=1)


@functools.lru_cache(maxsize=256)
def _groups(prompt: Prompt, span: range) -> _Groups:
    starts = np.array(bucket_starts(span.stop))
    roles, role = np.unique(_roles(prompt, span), return_inverse=True)
    bucket = np.searchsorted(starts, span, side="right") - 1
    codes, group, tokens = np.unique(bucket * len(roles) + role, return_inverse=True, return_counts=True)
    edges = np.concatenate([[0], np.cumsum(tokens)[:-1]])
    named = starts[codes // len(roles)].tolist(), roles[codes % len(roles)].tolist()
    return _Groups(*named, tokens, np.argsort(group, kind="stable"), edges)


def _roles(prompt: Prompt, span: range) -> np.ndarray:
    return np.array([*prompt.roles, *[GENERATED] * fed(prompt)][span.start : span.stop])


def attention_rows(
    prompt: Prompt,
    layers: Sequence[int],
    queries: Float[Tensor, "layers query_heads C d"],
    keys: Float[Tensor, "layers kv_heads N d"],
    values: Float[Tensor, "layers kv_heads N d"],
    decoded: Sequence[Decoded],
    policy: CachePolicy,
) -> list[dict[str, Any]]:
    """Rows of ATTENTION, by QUERIES of the scored positions, none when nothing is packed.

    Every query sees what it saw in decoding: the sequence up to its own token, and of that packed what `policy` had
    packed by then.
    """
    scored, span = fed(prompt), decoded[0].span
    if not span or not scored:
        return []
    step = -(-scored // QUERIES)
    picked = range((scored - 1) % step, scored, step)
    slices = _slices(prompt, picked, span, policy)
    seen, packed = len(prompt.tokens) + 1 + torch.tensor(picked), slices[0].inside
    replay = Replay(queries[:, :, list(picked)], keys, values, decoded, seen, packed, keys.shape[-1] ** -0.5)
    named = {"prompt": prompt.id, "cohort": prompt.cohort}
    whole, rows = _by_layer(vars(replay.error(packed))), []
    for each in slices:
        nothing: list[dict[str, float]] = [{}] * len(layers)
        figures = whole if each.whole else _by_layer(vars(replay.error(each.inside))) if each.read else nothing
        about = {"slice": each.kind, "bucket": each.bucket, "role": each.role}
        rows += [named | {"layer": layer} | about | own for layer, own in zip(layers, figures, strict=True)]
    for row, overlap in zip(rows, replay.top_overlap().tolist(), strict=False):  # the whole layers come first
        row["top_overlap"] = overlap
    return rows


def _by_layer(figures: Mapping[str, Tensor]) -> list[dict[str, float]]:
    return [dict(zip(figures, own, strict=True)) for own in zip(*(x.tolist() for x in figures.values()), strict=True)]


@dataclass(frozen=True)
class _Slice:
    """A part of what is packed: for each query, the tokens of the span that it reads so and that lie in the slice."""

    kind: str
    bucket: int | None
    role: str | None
    inside: Bool[Tensor, "queries tokens"]
    read: bool
    """Whether any query reads any of it."""
    whole: bool
    """Whether it is all that is packed."""


@functools.lru_cache(maxsize=256)
def _slices(prompt: Prompt, picked: range, span: range, policy: CachePolicy) -> tuple[_Slice, ...]:
    """The layer's own first, then the others. Queries stand at the `picked` tokens behind the prefix."""
    length, at = len(prompt.tokens), torch.tensor(span)
    standing = length + torch.tensor(picked)[:, None]
    until = torch.tensor([packed_until(policy, length + step + 1) for step in picked])[:, None]
    packed, found = at < until, []
    for kind, bucket, role, where in _marked(prompt, at, standing - at):
        inside = packed & where
        found.append(_Slice(kind, bucket, role, inside, bool(inside.any()), bool(inside.equal(packed))))
    return tuple(found)


def _marked(prompt: Prompt, at: Tensor, behind: Tensor) -> Iterator[tuple[str, int | None, str | None, Tensor]]:
    """Kind, bucket, role, and where the slice is, [tokens] or [queries, tokens]; the whole layer first.

    The span's tokens stand `at` their positions, and that far `behind` each query.
    """
    yield "layer", None, None, at >= 0
    for kind, place, reach in (
        ("position", at, len(prompt.tokens) + fed(prompt)),
        ("distance", behind, int(behind.max()) + 1),
    ):
        for bucket in bucket_ranges(reach):
            yield kind, bucket.start, None, (place >= bucket.start) & (place < bucket.stop)
    roles = _roles(prompt, range(int(at[0]), int(at[-1]) + 1))
    generated = torch.from_numpy(roles == GENERATED)
    for region, tokens in zip(REGIONS, (~generated, generated), strict=True):
        yield "region", None, region, tokens
    for role in np.unique(roles):
        yield "role", None, str(role), torch.from_numpy(roles == role)
