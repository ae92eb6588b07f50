"""Transformers' other caches on the same work: the static one, and the quantized ones where their package installs."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from kvdrift.measure.bench import Bench
from kvdrift.measure.sweep import Point
from kvdrift.measure.timing import Pairs, paired

Peer = Literal["static", "quanto", "hqq"]
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}
AXES = {"quanto": 0, "hqq": 1}
"""The axes that their documentation uses for keys and values."""


def missing(peer: Peer) -> str | None:
    """The package that this peer needs and that isn't installed, or None."""
    package = PACKAGES.get(peer)
    if package is None or importlib.util.find_spec(package.partition(".")[0]) is not None:
        return None
    return package


def filled(bench: Bench, peer: Peer, batch: int, context: int, room: int) -> Any:
    """The peer's cache with the stored prefix, and room for that many more tokens; quantized ones hold 4 bits."""
    from transformers import QuantizedCache, StaticCache

    config = bench.model.config
    cache: Any
    if peer == "static":
        cache = StaticCache(config=config, max_cache_len=context + room)
    else:
        axis = AXES[peer]
        cache = QuantizedCache(backend=peer, config=config, nbits=4, axis_key=axis, axis_value=axis)
    for index in range(len(bench.prefix.keys)):
        cache.update(*bench.prefix.layer(index, batch, context), index)
    return cache


def sample(bench: Bench, peer: Peer, point: Point, pairs: int, seed: int) -> Pairs:
    """Paired decode steps of the reference cache and the peer's."""
    caches = bench.dynamic(point.batch, point.context), filled(bench, peer, point.batch, point.context, pairs + 8)
    reference, candidate = (bench.decode(cache, point.batch) for cache in caches)
    return paired(reference, candidate, pairs, seed, bench.device)
