"""The sensitivity map: what each cell does under probe quantizers: its keys alone, its values alone, and both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from kvdrift.layout import block_layout
from kvdrift.measure.cells import FIGURES, Variant, layer_cells, packed_span
from kvdrift.measure.pages import through_pages
from kvdrift.measure.reference import Stored
from kvdrift.measure.tensors import bucket_ranges, errors
from kvdrift.policy import CachePolicy, LayerPolicy, from_dict, packed_until

TENSORS = ("key", "value", "both")
SCHEMA = pl.Schema(
    {
        "prompt": pl.String,
        "needle": pl.Boolean,
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
tokens; empty cells have null figures. `needle` marks the needle set: its figures are those of the answer's tokens, and
`kept` is told there only. For both tensors, cosine and error are the worse of keys' and values', token by token."""


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
    model: Any, stored: Stored, at: int, layer: int, chosen: Sequence[Probe], scored: range, needle: bool = False
) -> list[dict[str, Any]]:
    """Rows of SCHEMA for one layer and one prompt, row `at` of its batch, on its `scored` tokens.

    A needle is asked in the cells of the probes that go bucket by bucket, and in no whole layer.
    """
    whole = range(stored.length)
    keys, values = (x[at] for x in stored.layer(layer))
    variants, named = [], []
    for probe in chosen:
        if needle and not probe.by_bucket:
            continue
        policy = probe.policy.bind(stored.layers, keys.shape[-1])
        pair = policy.layer(layer)
        wrong = _errors(keys, values, replace(policy, layers=(pair,)))
        spans = [*(() if needle else (whole,)), *(bucket_ranges(stored.length) if probe.by_bucket else ())]
        for tensor in TENSORS if probe.by_bucket else TENSORS[:2]:
            alone = {"key": LayerPolicy(key=pair.key), "value": LayerPolicy(value=pair.value)}.get(tensor, pair)
            only = replace(policy, layers=tuple(alone if i == layer else LayerPolicy() for i in range(stored.layers)))
            variants.append(Variant(only, tuple(spans)))
            named.append((policy, {"probe": probe.name, "tensor": tensor}, wrong[tensor], spans))
    found = layer_cells(model, stored, at, layer, variants, len(scored), scored.start)
    rows, nothing = [], dict.fromkeys(SCHEMA)
    shared = {"prompt": stored.prompts[at].id, "needle": needle, "layer": layer}
    for (policy, names, (cosine, error), spans), figures in zip(named, found, strict=True):
        full = range(policy.sink_tokens, packed_until(policy, stored.length))
        for span, own in zip(spans, figures.rows(), strict=True):
            row: dict[str, Any] = nothing | shared | names | {"bucket": None if span == whole else span.start}
            if packed := packed_span(policy, full, span):
                inner = slice(packed.start - full.start, packed.stop - full.start)
                row |= {"start": packed.start, "stop": packed.stop} | own
                row |= {"cosine": float(cosine[inner].mean()), "error": float(error[inner].mean())}
                row |= {} if needle else {"kept": None}
            rows.append(row)
    return rows


def _errors(keys: Tensor, values: Tensor, policy: CachePolicy) -> dict[str, tuple[Tensor, Tensor]]:
    """Cosine and relative L2 of each packed token, means over heads, by tensor; the worse of the two for both."""
    layout = block_layout(policy.layers[0], policy.block, keys.shape[0], keys.shape[-1], keys.element_size())
    decoded = through_pages(keys, values, policy, layout)
    inside = slice(decoded.span.start, decoded.span.stop)
    pairs = {"key": (keys[:, inside], decoded.keys), "value": (values[:, inside], decoded.values)}
    wrong = {tensor: errors(exact, new) for tensor, (exact, new) in pairs.items()}
    found = {tensor: (own.cosine.mean(0), own.relative_l2.mean(0)) for tensor, own in wrong.items()}
    (key_cosine, key_error), (value_cosine, value_error) = found["key"], found["value"]
    both = torch.minimum(key_cosine, value_cosine), torch.maximum(key_error, value_error)
    return found | {"both": both}
