"""The sensitivity map: what each cell does under probe quantizers, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from kvdrift.layout import block_layout
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.cells import FIGURES, Variant, layer_cells, packed_span
from kvdrift.measure.pages import through_pages
from kvdrift.measure.reference import Stored
from kvdrift.measure.tensors import errors
from kvdrift.policy import CachePolicy, LayerPolicy, from_dict

TENSORS = ("key", "value")
SCHEMA = pl.Schema(
    {
        "prompt": pl.String,
        "probe": pl.String,
        "layer": pl.Int64,
        "tensor": pl.String,
        "bucket": pl.Int64,
        "start": pl.Int64,
        "stop": pl.Int64,
    }
    | dict.fromkeys((*FIGURES, "cosine", "error"), pl.Float64)
)
"""A row a cell; `error` is relative L2. A null bucket is the layer's whole packed span. [start, stop) are the packed
tokens; empty cells have null figures."""


@dataclass(frozen=True)
class Probe:
    """One quantizer pair put into one layer at a time."""

    name: str
    policy: CachePolicy
    by_bucket: bool


def probes(searched: Mapping[str, Any], policies: Sequence[CachePolicy]) -> list[Probe]:
    """The choices of the searched policy, whole layers; the given policies, bucket by bucket.

    All take the searched policy's sinks, residual window and block, so that cells compare.
    """
    frame = {name: value for name, value in searched.items() if name not in ("search", "escalation")}
    found = [
        Probe(str(name), from_dict(frame | dict(choice), name=str(name)), False)
        for name, choice in searched["search"]["choices"].items()
    ]
    base = found[0].policy
    for policy in policies:
        same = replace(base, name=policy.name, layers=policy.layers)
        twin = next((p for p in found if p.policy.layers == same.layers), None)
        if twin is not None:
            found[found.index(twin)] = replace(twin, by_bucket=True)
        else:
            found.append(Probe(policy.name, same, True))
    return found


def layer_rows(
    model: Any, stored: Stored, at: int, layer: int, chosen: Sequence[Probe], steps: int
) -> list[dict[str, Any]]:
    """Rows of SCHEMA for one layer and one prompt, row `at` of its batch."""
    whole = range(stored.length)
    keys, values = (x[at] for x in stored.layer(layer))
    variants, named = [], []
    for probe in chosen:
        policy = probe.policy.bind(stored.layers, keys.shape[-1])
        pair = policy.layer(layer)
        for tensor in TENSORS:
            alone = LayerPolicy(key=pair.key) if tensor == "key" else LayerPolicy(value=pair.value)
            only = replace(policy, layers=tuple(alone if i == layer else LayerPolicy() for i in range(stored.layers)))
            spans = [whole, *(bucket_ranges(stored.length) if probe.by_bucket else ())]
            variants.append(Variant(only, tuple(spans)))
            named.append((probe, tensor, alone, spans))
    found = layer_cells(model, stored, at, layer, variants, steps)
    rows, nothing = [], dict.fromkeys(SCHEMA)
    for (probe, tensor, alone, spans), figures in zip(named, found, strict=True):
        layout = block_layout(alone, probe.policy.block, keys.shape[0], keys.shape[-1], keys.element_size())
        decoded = through_pages(keys, values, replace(probe.policy, layers=(alone,)), layout)
        inside = slice(decoded.span.start, decoded.span.stop)
        exact, new = (keys[:, inside], decoded.keys) if tensor == "key" else (values[:, inside], decoded.values)
        wrong = errors(exact, new)
        cosine, error = wrong.cosine.mean(0), wrong.relative_l2.mean(0)
        for index, (span, own) in enumerate(zip(spans, figures.rows(), strict=True)):
            packed = packed_span(probe.policy, decoded.span, span)
            row: dict[str, Any] = {
                "prompt": stored.prompts[at].id,
                "probe": probe.name,
                "layer": layer,
                "tensor": tensor,
            }
            row |= {"bucket": None if index == 0 else span.start, "start": None, "stop": None}
            if packed:
                inner = slice(packed.start - decoded.span.start, packed.stop - decoded.span.start)
                row |= {"start": packed.start, "stop": packed.stop} | own
                row |= {"cosine": float(cosine[inner].mean()), "error": float(error[inner].mean())}
            rows.append(nothing | row)
    return rows
