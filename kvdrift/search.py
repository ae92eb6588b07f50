"""Choose bits for each layer's keys and values from the sensitivity map, under a budget of bits an element.

Isolated KL is taken as additive. Start with the fewest bits everywhere; again and again give the tensor with the
largest fall of KL for each byte its next choice; stop when nothing more fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from kvdrift.ledger import CacheShape
from kvdrift.layout import HEADER_BYTES, block_layout
from kvdrift.policy import LayerPolicy, PolicyError, from_dict


@dataclass(frozen=True)
class Allocation:
    """The found policy: a choice name for each (layer, tensor), what it costs and what the map predicts."""

    choices: dict[tuple[int, str], str]
    bits_per_element: float
    predicted_kl: float


def allocate(
    cells: pl.DataFrame, choices: Mapping[str, LayerPolicy], shape: CacheShape, block: int, budget: float
) -> Allocation:
    """Greedy allocation. `cells` has columns layer, tensor, probe, kl of whole layers, a row for every choice.

    Raises PolicyError when the cheapest choice already exceeds the budget or the map lacks a choice.
    """
    names = sorted(choices, key=lambda name: _tensor_bytes(choices[name], "key", shape, block))
    damage = _damage(cells, names)
    slots = [(layer, tensor) for layer in range(shape.layers) for tensor in ("key", "value")]
    missing = [(slot, name) for slot in slots for name in names if (*slot, name) not in damage]
    if missing:
        raise PolicyError(f"the sensitivity map has no figure for {missing[0]}; rerun the sensitivity stage")
    cost = {
        (tensor, name): _tensor_bytes(choices[name], tensor, shape, block)
        for tensor in ("key", "value")
        for name in names
    }
    elements = 2 * shape.kv_heads * shape.head_dim * block * shape.layers
    allowed = budget * elements / 8 - HEADER_BYTES * shape.layers
    level = dict.fromkeys(slots, 0)
    spent = sum(cost[tensor, names[0]] for _, tensor in slots)
    if spent > allowed:
        least = 8 * (spent + HEADER_BYTES * shape.layers) / elements
        raise PolicyError(f"bits_per_element is {budget}; the fewest bits of the choices already take {least:.2f}")
    while True:
        best, gain = None, 0.0
        for (layer, tensor), now in level.items():
            for to in range(now + 1, len(names)):
                extra = cost[tensor, names[to]] - cost[tensor, names[now]]
                fall = damage[layer, tensor, names[now]] - damage[layer, tensor, names[to]]
                if spent + extra <= allowed and fall / extra > gain:
                    best, gain = ((layer, tensor), to, extra), fall / extra
        if best is None:
            break
        slot, to, extra = best
        level[slot] = to
        spent += extra
    chosen = {slot: names[now] for slot, now in level.items()}
    return Allocation(
        choices=chosen,
        bits_per_element=8 * (spent + HEADER_BYTES * shape.layers) / elements,
        predicted_kl=sum(damage[layer, tensor, name] for (layer, tensor), name in chosen.items()),
    )


def resolve(raw: Mapping[str, Any], chosen: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The searched policy as a plain one: `chosen` names the choice of each layer's key and value."""
    choices = {str(name): choice for name, choice in raw["search"]["choices"].items()}
    layers = [{tensor: choices[layer[tensor]][tensor] for tensor in ("key", "value")} for layer in chosen]
    return {name: value for name, value in raw.items() if name != "search"} | {"layers": layers}


def layer_choices(raw: Mapping[str, Any]) -> dict[str, LayerPolicy]:
    """The choices of a searched policy's YAML, validated."""
    return {
        str(name): from_dict(dict(choice), name=str(name)).layers[0]
        for name, choice in raw["search"]["choices"].items()
    }


def _damage(cells: pl.DataFrame, names: Sequence[str]) -> dict[tuple[int, str, str], float]:
    whole = cells.filter(pl.col("bucket").is_null(), pl.col("probe").is_in(list(names)), pl.col("kl").is_not_null())
    mean = whole.group_by("layer", "tensor", "probe").agg(pl.col("kl").mean())
    return {(row["layer"], row["tensor"], row["probe"]): row["kl"] for row in mean.iter_rows(named=True)}


def _tensor_bytes(layer: LayerPolicy, tensor: str, shape: CacheShape, block: int) -> int:
    layout = block_layout(layer, block, shape.kv_heads, shape.head_dim, shape.dtype_bytes)
    section = layout.key if tensor == "key" else layout.value
    return section.codes_bytes + section.scales_bytes + section.lows_bytes
