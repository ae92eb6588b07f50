"""Tables of what packing did to one prompt's layer: tensor errors by bucket and role, attention errors by bucket."""

from __future__ import annotations

import numpy as np
import polars as pl
from torch import Tensor

from kvdrift.measure.attention import attention_error
from kvdrift.measure.pages import Decoded
from kvdrift.measure.tensors import bucket_of, errors
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
        "bucket": pl.Int64,
        "key_logits": pl.Float64,
        "value_output": pl.Float64,
        "jensen_shannon": pl.Float64,
        "top_overlap": pl.Float64,
        "value_error": pl.Float64,
        "combined_error": pl.Float64,
    }
)


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
    """Rows of ATTENTION: figures of a bucket, and the layer's own with a null bucket."""
    error = attention_error(queries, keys, values, decoded, keys.shape[-1] ** -0.5)
    rows: dict[str, list[object]] = {"bucket": [*error.buckets, None]}
    rows |= {"key_logits": [*error.key_logits, None], "value_output": [*error.value_output, None]}
    for name in ("jensen_shannon", "top_overlap", "value_error", "combined_error"):
        rows[name] = [None] * len(error.buckets) + [getattr(error, name)]
    size = len(error.buckets) + 1
    rows |= {"prompt": [prompt.id] * size, "cohort": [prompt.cohort] * size, "layer": [layer] * size}
    return pl.DataFrame(rows, schema_overrides=ATTENTION).select(list(ATTENTION))
