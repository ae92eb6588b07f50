"""The sensitivity map: what each cell does under probe quantizers, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from kvdrift.layout import block_layout
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.cells import FIGURES, Figures, Variant, layer_cells, packed_span
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


def prompt_rows(model: Any, stored: Stored, at: int, chosen: Sequence[Probe], steps: int) -> list[dict[str, Any]]:
    """Rows of SCHEMA for one prompt, row `at` of its batch, layer by layer."""
    cells = {layer: _layer_cells(stored, layer, chosen) for layer in range(stored.layers)}
    variants = {layer: [cell.variant for cell in own] for layer, own in cells.items()}
    found = layer_cells(model, stored, at, variants, steps)
    return [row for layer, own in cells.items() for row in _layer_rows(stored, at, layer, own, found[layer])]


@dataclass(frozen=True)
class _Cells:
    """Cells of one layer that share a probe and a tensor; the first is the whole layer."""

    probe: Probe
    tensor: str
    alone: LayerPolicy
    variant: Variant


def _layer_cells(stored: Stored, layer: int, chosen: Sequence[Probe]) -> list[_Cells]:
    cells, layers, head_dim = [], stored.layers, stored.layer(layer)[0].shape[-1]
    for probe in chosen:
        policy = probe.policy.bind(layers, head_dim)
        pair = policy.layer(layer)
        for tensor in TENSORS:
            alone = LayerPolicy(key=pair.key) if tensor == "key" else LayerPolicy(value=pair.value)
            only = replace(policy, layers=tuple(alone if i == layer else LayerPolicy() for i in range(layers)))
            spans = (range(stored.length), *(bucket_ranges(stored.length) if probe.by_bucket else ()))
            cells.append(_Cells(probe, tensor, alone, Variant(only, spans)))
    return cells


def _layer_rows(
    stored: Stored, at: int, layer: int, cells: Sequence[_Cells], found: Sequence[Figures]
) -> list[dict[str, Any]]:
    keys, values = (x[at] for x in stored.layer(layer))
    rows, nothing = [], dict.fromkeys(SCHEMA)
    for cell, figures in zip(cells, found, strict=True):
        probe = cell.probe
        layout = block_layout(cell.alone, probe.policy.block, keys.shape[0], keys.shape[-1], keys.element_size())
        decoded = through_pages(keys, values, replace(probe.policy, layers=(cell.alone,)), layout)
        inside = slice(decoded.span.start, decoded.span.stop)
        exact, new = (keys[:, inside], decoded.keys) if cell.tensor == "key" else (values[:, inside], decoded.values)
        wrong = errors(exact, new)
        cosine, error = wrong.cosine.mean(0), wrong.relative_l2.mean(0)
        for index, (span, own) in enumerate(zip(cell.variant.ranges, figures.rows(), strict=True)):
            packed = packed_span(probe.policy, decoded.span, span)
            row: dict[str, Any] = {
                "prompt": stored.prompts[at].id,
                "probe": probe.name,
                "layer": layer,
                "tensor": cell.tensor,
            }
            row |= {"bucket": None if index == 0 else span.start, "start": None, "stop": None}
            if packed:
                inner = slice(packed.start - decoded.span.start, packed.stop - decoded.span.start)
                row |= {"start": packed.start, "stop": packed.stop} | own
                row |= {"cosine": float(cosine[inner].mean()), "error": float(error[inner].mean())}
            rows.append(nothing | row)
    return rows
