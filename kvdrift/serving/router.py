"""Which policy serves a request: the packed one, a step up its escalation ladder, or none.

This file decides from numbers. It runs no model and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvdrift.ledger import CacheShape, account
from kvdrift.policy import CachePolicy, PolicyError

OUTLIER_SAFE_BITS = 8
"""A request with outliers is served by quantizers of at least this many bits, or exact."""


@dataclass(frozen=True)
class Request:
    """What the router knows of a request. `outlier_layers` is what `outlier_layers()` found in its keys and values."""

    id: str
    prompt_tokens: int
    new_tokens: int
    outlier_layers: tuple[int, ...] = ()
    may_shorten: bool = False
    """The caller asked to have its prompt shortened rather than be rejected."""


@dataclass(frozen=True)
class Memory:
    """Bytes that are free for a newcomer's cache, and whether to save them by packing at any length."""

    free_bytes: int
    prefer_packed: bool = False


@dataclass(frozen=True)
class Decision:
    """The policy to serve with (None: rejected), the prompt tokens that are kept, and why, for the caller to read."""

    policy: CachePolicy | None
    prompt_tokens: int
    reasons: tuple[str, ...]


def route(request: Request, ladder: Sequence[CachePolicy], shape: CacheShape, memory: Memory) -> Decision:
    """The first policy of the ladder that may serve this request and fits into memory.

    `ladder` is the packed policy and then its escalation. Nothing is shortened unless the caller asked for it.
    """
    reasons, allowed = [], []
    for policy in ladder:
        reason = _unfit(request, policy, shape)
        if reason is None:
            allowed.append(replace(policy, min_length=0) if memory.prefer_packed else policy)
        else:
            reasons.append(f"{policy.name}: {reason}")
    length = request.prompt_tokens + request.new_tokens
    for policy in allowed:
        need = account(policy, shape, length, 1).format_bytes
        if need <= memory.free_bytes:
            return Decision(policy, request.prompt_tokens, tuple(reasons))
        reasons.append(f"{policy.name}: needs {need:,} B, {memory.free_bytes:,} are free")
    for policy in allowed if request.may_shorten else ():
        kept = _longest(policy, shape, request, memory.free_bytes)
        if kept:
            reasons.append(f"{policy.name}: prompt shortened from {request.prompt_tokens} to {kept} tokens")
            return Decision(policy, kept, tuple(reasons))
    return Decision(None, 0, tuple(reasons))


def outlier_layers(
    keys: Sequence[Tensor], values: Sequence[Tensor], limits: Sequence[Mapping[str, float]]
) -> tuple[int, ...]:
    """Layers in which a key or value exceeds its calibrated limit: one dict of `keys` and `values` a layer."""
    return tuple(
        index
        for index, (k, v, limit) in enumerate(zip(keys, values, limits, strict=True))
        if not (float(k.abs().amax()) <= limit["keys"] and float(v.abs().amax()) <= limit["values"])
    )


def _unfit(request: Request, policy: CachePolicy, shape: CacheShape) -> str | None:
    """Why this policy may not serve the request, or None."""
    length = request.prompt_tokens + request.new_tokens
    if policy.max_length is not None and length > policy.max_length:
        return f"{length} tokens exceed the evaluated {policy.max_length}"
    try:
        policy.bind(shape.layers, shape.head_dim)
    except PolicyError as error:
        return str(error)
    if request.outlier_layers and _fewest_bits(policy) < OUTLIER_SAFE_BITS:
        return f"outliers in layers {', '.join(map(str, request.outlier_layers))}"
    return None


def _fewest_bits(policy: CachePolicy) -> int:
    quantizers = [q for layer in policy.layers for q in (layer.key, layer.value) if q is not None]
    return min((q.bits for q in quantizers), default=OUTLIER_SAFE_BITS)


def _longest(policy: CachePolicy, shape: CacheShape, request: Request, free_bytes: int) -> int:
    """The most prompt tokens that fit, 0 if none does."""
    low, high = 0, request.prompt_tokens
    while high - low > 1:
        middle = (low + high) // 2
        fits = account(policy, shape, middle + request.new_tokens, 1).format_bytes <= free_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low
