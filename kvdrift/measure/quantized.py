"""Tables of what packing did to one prompt's layer: tensor errors by bucket and role, attention errors by slice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import torch
from torch import Tensor

from kvdrift.measure.attention import Replay
from kvdrift.measure.pages import Decoded
from kvdrift.measure.tensors import bucket_of, bucket_ranges, errors
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

QUERIES = 8
"""The most scored positions of a prompt whose queries are replayed, evenly spread."""


def error_rows(
    prompt: Prompt, layer: int, keys: Tensor, values: Tensor, decoded: Decoded, ranges: dict[str, Tensor]
) -> pl.DataFrame:
    """Rows of ERRORS. `saturated` is the share of elements outside the calibrated range of their channel."""
    span, frames = decoded.span, []
    if not span:
        return pl.DataFrame(schema=ERRORS)
    buckets = np.array([bucket_of(position) for position in span])
    roles = list(prompt.roles[span.start : span.stop])
    for tensor, exact, new in (("keys", keys, decoded.keys), ("values", values, decoded.values)):
        exact = exact[:, span.start : span.stop]
        error = errors(exact, new)
        low, high = (ranges[f"{tensor}_{side}"][layer][:, None] for side in ("low", "high"))
        outside = ((exact < low) | (exact > high)).float().mean(-1)
        columns = {
            "cosine": error.cosine.mean(0),
            "cosine_min": error.cosine.amin(0),
            "rel_l2": error.relative_l2.mean(0),
        }
        columns |= {"max_abs": error.max_abs.amax(0), "saturated": outside.mean(0)}
        frame = pl.DataFrame(
            {"bucket": buckets, "role": roles} | {k: v.double().cpu().numpy() for k, v in columns.items()}
        )
        mean, least = pl.col("cosine", "rel_l2", "saturated").mean(), pl.col("cosine_min").min()
        frame = frame.group_by("bucket", "role", maintain_order=True).agg(
            pl.len().cast(pl.Int64).alias("tokens"), mean, least, pl.col("max_abs").max()
        )
        frames.append(frame.with_columns(tensor=pl.lit(tensor.removesuffix("s"))))
    named = {"prompt": prompt.id, "cohort": prompt.cohort, "length": len(prompt.tokens), "layer": layer}
    rows = pl.concat(frames).with_columns(
        **{k: pl.lit(v, pl.Int64 if isinstance(v, int) else pl.String) for k, v in named.items()}
    )
    return rows.select(list(ERRORS))


def attention_rows(
    prompt: Prompt, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decoded: Decoded
) -> pl.DataFrame:
    """Rows of ATTENTION, by QUERIES of the scored positions, none when nothing is packed."""
    scored = prompt.scored - 1
    if not decoded.span or scored < 1:
        return pl.DataFrame(schema=ATTENTION)
    picked = range(0, scored, -(-scored // QUERIES))
    replay = Replay(queries[:, list(picked)], keys, values, decoded, keys.shape[-1] ** -0.5)
    rows = []
    for kind, bucket, role, inside in _slices(prompt, picked, decoded.span):
        row = {"slice": kind, "bucket": bucket, "role": role}
        rows.append(row | (vars(replay.error(inside)) if bool(inside.any()) else {}))
    rows[0]["top_overlap"] = replay.top_overlap()
    named = {"prompt": prompt.id, "cohort": prompt.cohort, "layer": layer}
    return pl.DataFrame([named | row for row in rows], schema=ATTENTION)


def _slices(prompt: Prompt, scored: range, span: range) -> Iterator[tuple[str, int | None, str | None, Tensor]]:
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
