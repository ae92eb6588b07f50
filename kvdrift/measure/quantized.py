"""Tables of what packing did to one prompt's layer: tensor errors by bucket and role, attention errors by slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.measure.attention import Replay
from kvdrift.measure.buckets import bucket_ranges, bucket_starts
from kvdrift.measure.pages import Decoded
from kvdrift.measure.tensors import errors
from kvdrift.prompts.prompt import Prompt

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
"""A row a slice: `layer` (all that is packed), a `position` or `distance` bucket, or a `role`. `bucket` is the first
position, or the least distance from the current token. A bucket with nothing packed has null figures."""

QUERIES = 4
"""The most scored positions of a prompt whose queries are replayed, evenly spread."""


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
    roles, role = np.unique(prompt.roles[span.start : span.stop], return_inverse=True)
    bucket = np.searchsorted(starts, span, side="right") - 1
    codes, group, tokens = np.unique(bucket * len(roles) + role, return_inverse=True, return_counts=True)
    edges = np.concatenate([[0], np.cumsum(tokens)[:-1]])
    named = starts[codes // len(roles)].tolist(), roles[codes % len(roles)].tolist()
    return _Groups(*named, tokens, np.argsort(group, kind="stable"), edges)


def attention_rows(
    prompt: Prompt, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decoded: Decoded
) -> list[dict[str, Any]]:
    """Rows of ATTENTION, by QUERIES of the scored positions, none when nothing is packed."""
    scored = prompt.scored - 1
    if not decoded.span or scored < 1:
        return []
    picked = range(0, scored, -(-scored // QUERIES))
    replay = Replay(queries[:, list(picked)], keys, values, decoded, keys.shape[-1] ** -0.5)
    named = {"prompt": prompt.id, "cohort": prompt.cohort, "layer": layer}
    rows, whole = [], dict[str, float]()
    for kind, bucket, role, inside in _slices(prompt, picked, decoded.span):
        if kind == "layer" or not bool(inside.all()):
            figures = vars(replay.error(inside)) if bool(inside.any()) else {}
        else:
            figures = whole
        whole = whole or figures
        rows.append(named | {"slice": kind, "bucket": bucket, "role": role} | figures)
    rows[0]["top_overlap"] = replay.top_overlap()
    return rows


@functools.lru_cache(maxsize=256)
def _slices(prompt: Prompt, scored: range, span: range) -> tuple[tuple[str, int | None, str | None, Tensor], ...]:
    return tuple(_marked(prompt, scored, span))


def _marked(prompt: Prompt, scored: range, span: range) -> Iterator[tuple[str, int | None, str | None, Tensor]]:
    """Kind, bucket, role, and which of the packed tokens each query counts in, [scored, tokens]; the layer first.

    Queries stand at the `scored` tokens behind the prefix.
    """
    length, whole = len(prompt.tokens), torch.ones(len(scored), len(span), dtype=torch.bool)
    yield "layer", None, None, whole
    behind = length + torch.tensor(scored)[:, None] - torch.tensor(span)
    for kind, at, reach in (("position", torch.tensor(span), length), ("distance", behind, int(behind.max()) + 1)):
        for bucket in bucket_ranges(reach):
            yield kind, bucket.start, None, whole & (at >= bucket.start) & (at < bucket.stop)
    roles = np.array(prompt.roles[span.start : span.stop])
    for role in np.unique(roles):
        yield "role", None, str(role), whole & torch.from_numpy(roles == role)
