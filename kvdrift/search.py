"""Choose bits for each layer's keys and values from the sensitivity map, under a budget of bits an element.

`allocate` takes isolated KL as additive: start with the fewest bits everywhere; again and again give the tensor with
the largest fall of KL for each byte its next choice; stop when nothing more fits. Isolated effects need not add up, so
`refine` then swaps choices as long as the KL of the whole stack, measured, falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from kvdrift.layout import HEADER_BYTES, block_layout
from kvdrift.ledger import CacheShape
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


def refine(
    start: Allocation,
    cells: pl.DataFrame,
    choices: Mapping[str, LayerPolicy],
    shape: CacheShape,
    block: int,
    measure: Callable[[Allocation], float],
    trials: int,
) -> tuple[Allocation, float]:
    """The allocation after `trials` measured swaps, and its measured KL in nats.

    A swap takes a choice from the slot that the map says needs it least and gives it to a slot that needs it more, at
    no more bytes; it stays if the measured KL of the whole stack falls.
    """
    names = sorted(choices, key=lambda name: _tensor_bytes(choices[name], "key", shape, block))
    damage = _damage(cells, names)
    best, best_kl = start, measure(start)
    tried: set[tuple[object, object]] = set()
    for _ in range(trials):
        swap = next((pair for pair in _swaps(best, damage, names) if pair not in tried), None)
        if swap is None:
            break
        tried.add(swap)
        (up, to), (down, back) = swap
        trial = best.choices | {up: to, down: back}
        predicted = sum(damage[layer, tensor, name] for (layer, tensor), name in trial.items())
        allocation = replace(best, choices=trial, predicted_kl=predicted)
        kl = measure(allocation)
        if kl < best_kl:
            best, best_kl = allocation, kl
    return best, best_kl


def _swaps(
    now: Allocation, damage: Mapping[tuple[int, str, str], float], names: Sequence[str]
) -> list[tuple[tuple[tuple[int, str], str], tuple[tuple[int, str], str]]]:
    """One slot a choice up, another of the same tensor and level down to where the first was; best prediction first."""
    found = []
    for up, low in now.choices.items():
        for down, high in now.choices.items():
            if up[1] == down[1] and names.index(high) == names.index(low) + 1:
                gain = damage[*up, low] - damage[*up, high]
                loss = damage[*down, low] - damage[*down, high]
                found.append((loss - gain, ((up, high), (down, low))))
    return [swap for _, swap in sorted(found, key=lambda pair: pair[0])]


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
