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


def layer_rows(
    model: Any, stored: Stored, at: int, layer: int, chosen: Sequence[Probe], steps: int
) -> list[dict[str, Any]]:
    """Rows of SCHEMA for one layer and one prompt, row `at` of its batch, on its first `steps` scored tokens."""
    asked = [(probe, tensor) for probe in chosen for tensor in (TENSORS if probe.by_bucket else TENSORS[:2])]
    return _rows(model, stored, at, layer, asked, range(steps), needle=False)


def needle_rows(
    model: Any, stored: Stored, at: int, layer: int, chosen: Sequence[Probe], answer: range
) -> list[dict[str, Any]]:
    """The same for a prompt of the needle set, on the scored tokens of its answer, of single cells only.

    Keys alone and values alone are asked where both together lose a part of the answer: most cells lose nothing, and
    asking them all would take thrice as long.
    """
    cells = [probe for probe in chosen if probe.by_bucket]
    rows = _rows(model, stored, at, layer, [(probe, "both") for probe in cells], answer, needle=True)
    lost = {row["probe"] for row in rows if row["kept"] is not None and row["kept"] < 1}
    apart = [(probe, tensor) for probe in cells if probe.name in lost for tensor in TENSORS[:2]]
    return rows + (_rows(model, stored, at, layer, apart, answer, needle=True) if apart else [])


def _rows(
    model: Any, stored: Stored, at: int, layer: int, asked: Sequence[tuple[Probe, str]], scored: range, needle: bool
) -> list[dict[str, Any]]:
    """Rows of SCHEMA for these probes and tensors on the scored tokens, which follow what counts as prefilled."""
    keys, values = (x[at] for x in stored.layer(layer))
    whole, buckets = range(stored.length), bucket_ranges(stored.length)
    wrong: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    variants = []
    for probe, tensor in asked:
        policy = probe.policy.bind(stored.layers, keys.shape[-1])
        pair = policy.layer(layer)
        if probe.name not in wrong:
            wrong[probe.name] = _errors(keys, values, replace(policy, layers=(pair,)))
        alone = {"key": LayerPolicy(key=pair.key), "value": LayerPolicy(value=pair.value)}.get(tensor, pair)
        only = replace(policy, layers=tuple(alone if i == layer else LayerPolicy() for i in range(stored.layers)))
        spans = [*(() if needle else (whole,)), *(buckets if probe.by_bucket else ())]
        variants.append(Variant(only, tuple(spans)))
    found = layer_cells(model, stored, at, layer, variants, len(scored), scored.start)
    rows, nothing = [], dict.fromkeys(SCHEMA)
    shared = {"prompt": stored.prompts[at].id, "needle": needle, "layer": layer}
    for (probe, tensor), variant, figures in zip(asked, variants, found, strict=True):
        packed = range(probe.policy.sink_tokens, packed_until(probe.policy, stored.length))
        cosine, error = wrong[probe.name][tensor]
        for span, own in zip(variant.ranges, figures.rows(), strict=True):
            row: dict[str, Any] = (
                nothing | shared | {"probe": probe.name, "policy": probe.policy.name, "tensor": tensor}
            )
            row |= {"bucket": None if span == whole else span.start}
            if cell := packed_span(probe.policy, packed, span):
                inner = slice(cell.start - packed.start, cell.stop - packed.start)
                row |= {"start": cell.start, "stop": cell.stop} | own | ({} if needle else {"kept": None})
                row |= {"cosine": float(cosine[inner].mean()), "error": float(error[inner].mean())}
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
