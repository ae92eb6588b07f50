"""The sensitivity map: what each cell does under probe quantizers: its keys alone, its values alone, and both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from kvdrift.layout import block_layout
from kvdrift.measure.buckets import TENSORS, bucket_ranges
from kvdrift.measure.cells import FIGURES, Variant, layer_cells, packed_span
from kvdrift.measure.pages import through_pages
from kvdrift.measure.reference import Stored
from kvdrift.measure.tensors import errors
from kvdrift.policy import CachePolicy, LayerPolicy, from_dict, packed_until

SCHEMA = pl.Schema(
    {
        "prompt": pl.String,
        "needle": pl.Boolean,
        "probe": pl.String,
        "policy": pl.String,
        "layer": pl.Int64,
        "tensor": pl.String,
        "bucket": pl.Int64,
        "start": pl.Int64,
        "stop": pl.Int64,
    }
    | dict.fromkeys((*FIGURES, "cosine", "error"), pl.Float64)
)
"""A row a cell; `probe` is what the search knows it by, `policy` whose quantizers it has; `error` is relative L2. A
null bucket is the layer's whole packed span. [start, stop) are the packed tokens; empty cells have null figures.
`needle` marks the needle set: its figures are those of the answer's tokens, and `kept` is told there only. For both
tensors, cosine and error are the worse of keys' and values', token by token. The search reads whole layers, so no
needle."""


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
            found[found.index(twin)] = Probe(twin.name, replace(twin.policy, name=policy.name), True)
        else:
            found.append(Probe(policy.name, same, True))
    return found


def prompt_rows(model: Any, stored: Stored, at: int, chosen: Sequence[Probe], steps: int) -> list[dict[str, Any]]:
    """Rows of SCHEMA for one prompt, row `at` of its batch, on its first `steps` scored tokens."""
    asked = [(probe, tensor) for probe in chosen for tensor in (TENSORS if probe.by_bucket else TENSORS[:2])]
    return _rows(model, stored, at, dict.fromkeys(range(stored.layers), asked), range(steps), needle=False)


def needle_rows(model: Any, stored: Stored, at: int, chosen: Sequence[Probe], answer: range) -> list[dict[str, Any]]:
    """The same for a prompt of the needle set, on the scored tokens of its answer, of single cells only.

    Keys alone and values alone are asked where both together lose a part of the answer: most cells lose nothing, and
    asking them all would take thrice as long.
    """
    cells, layers = [probe for probe in chosen if probe.by_bucket], range(stored.layers)
    both = [(probe, "both") for probe in cells]
    rows = _rows(model, stored, at, dict.fromkeys(layers, both), answer, needle=True)
    lost = {(row["layer"], row["probe"]) for row in rows if row["kept"] is not None and row["kept"] < 1}
    apart = {
        layer: [(probe, tensor) for probe in cells if (layer, probe.name) in lost for tensor in TENSORS[:2]]
        for layer in sorted({layer for layer, _ in lost})
    }
    return rows + _rows(model, stored, at, apart, answer, needle=True)


Asked = Sequence[tuple[Probe, str]]
"""Probes and tensors."""


def _rows(
    model: Any, stored: Stored, at: int, asked: Mapping[int, Asked], scored: range, needle: bool
) -> list[dict[str, Any]]:
    """Rows of SCHEMA by layer on the scored tokens, which follow what counts as prefilled."""
    variants = {
        layer: [_variant(stored, layer, probe, tensor, whole=not needle) for probe, tensor in pairs]
        for layer, pairs in asked.items()
    }
    found = layer_cells(model, stored, at, variants, len(scored), scored.start)
    rows: list[dict[str, Any]] = []
    for layer, pairs in asked.items():
        keys, values = (x[at] for x in stored.layer(layer))
        wrong = {probe.name: _errors(keys, values, layer, probe.policy) for probe, _ in pairs}
        for (probe, tensor), variant, figures in zip(pairs, variants[layer], found[layer], strict=True):
            named = {"prompt": stored.prompts[at].id, "needle": needle, "layer": layer}
            named |= {"probe": probe.name, "policy": probe.policy.name, "tensor": tensor}
            told = figures.rows() if needle else [own | {"kept": None} for own in figures.rows()]
            rows += [row | named for row in _cell_rows(stored.length, probe, variant, told, *wrong[probe.name][tensor])]
    return rows


def _variant(stored: Stored, layer: int, probe: Probe, tensor: str, whole: bool) -> Variant:
    """Only this tensor of this layer packed: bucket by bucket, or, with `whole`, all of it first."""
    pair = probe.policy.layer(layer)
    alone = {"key": LayerPolicy(key=pair.key), "value": LayerPolicy(value=pair.value)}.get(tensor, pair)
    layers = tuple(alone if i == layer else LayerPolicy() for i in range(stored.layers))
    spans = [range(stored.length)] if whole else []
    spans += bucket_ranges(stored.length) if probe.by_bucket else []
    return Variant(replace(probe.policy, layers=layers), tuple(spans))


def _cell_rows(
    length: int, probe: Probe, variant: Variant, figures: Sequence[dict[str, Any]], cosine: Tensor, error: Tensor
) -> list[dict[str, Any]]:
    """What a variant's cells are and show; `cosine` and `error` of each packed token."""
    packed = range(probe.policy.sink_tokens, packed_until(probe.policy, length))
    nothing, rows = dict.fromkeys(SCHEMA), []
    for span, own in zip(variant.ranges, figures, strict=True):
        row: dict[str, Any] = nothing | {"bucket": None if span == range(length) else span.start}
        if cell := packed_span(probe.policy, packed, span):
            inner = slice(cell.start - packed.start, cell.stop - packed.start)
            row |= {"start": cell.start, "stop": cell.stop} | own
            row |= {"cosine": float(cosine[inner].mean()), "error": float(error[inner].mean())}
        rows.append(row)
    return rows


def _errors(keys: Tensor, values: Tensor, layer: int, policy: CachePolicy) -> dict[str, tuple[Tensor, Tensor]]:
    """Cosine and relative L2 of each packed token, means over heads, by tensor; the worse of the two for both."""
    policy = replace(policy, layers=(policy.layer(layer),))
    layout = block_layout(policy.layers[0], policy.block, keys.shape[0], keys.shape[-1], keys.element_size())
    decoded = through_pages(keys, values, policy, layout)
    inside = slice(decoded.span.start, decoded.span.stop)
    pairs = {"key": (keys[:, inside], decoded.keys), "value": (values[:, inside], decoded.values)}
    wrong = {tensor: errors(exact, new) for tensor, (exact, new) in pairs.items()}
    found = {tensor: (own.cosine.mean(0), own.relative_l2.mean(0)) for tensor, own in wrong.items()}
    (key_cosine, key_error), (value_cosine, value_error) = found["key"], found["value"]
    both = torch.minimum(key_cosine, value_cosine), torch.maximum(key_error, value_error)
    return found | {"both": both}
