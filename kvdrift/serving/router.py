"""Which policy serves a request: the packed one, a step up its escalation ladder, or none.

This file decides from numbers. It runs no model and allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvdrift.ledger import CacheShape, account, byte_break_even
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
    """Bytes that are free for a newcomer's cache, and whether to pack wherever that saves some, be it faster or not."""

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
            allowed.append(_pressed(request, policy, shape) if memory.prefer_packed else policy)
        else:
            reasons.append(f"{policy.name}: {reason}")
    for policy in allowed:
        need = _need(policy, shape, request.prompt_tokens, request.new_tokens)
        if need <= memory.free_bytes:
            return Decision(policy, request.prompt_tokens, tuple(reasons))
        reasons.append(f"{policy.name}: needs {need:,} B, {memory.free_bytes:,} are free")
    for policy in allowed if request.may_shorten else ():
        kept = _longest(policy, shape, request, memory.free_bytes)
        if kept:
            reasons.append(f"{policy.name}: prompt shortened from {request.prompt_tokens:,} to {kept:,} tokens")
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
        return f"{length:,} tokens exceed its max_length of {policy.max_length:,}"
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


def _pressed(request: Request, policy: CachePolicy, shape: CacheShape) -> CachePolicy:
    """This policy under memory pressure: it packs from its byte break-even on, since a shorter cache would grow, and
    only if the request then never holds more than an exact cache would in the end."""
    if policy.is_exact:
        return policy
    length = request.prompt_tokens + request.new_tokens
    smaller = byte_break_even(policy, shape, policy.max_length or length)
    packs, never = (replace(policy, min_length=least) for least in (smaller or 0, length + 1))
    most, exact = (_need(x, shape, request.prompt_tokens, request.new_tokens) for x in (packs, never))
    return never if smaller is None or most > exact else packs


def _need(policy: CachePolicy, shape: CacheShape, prompt: int, new: int) -> int:
    """The most bytes that a sequence holds from its prompt to its last token: it may grow exact before it packs, and
    holds both until a rollback can't lead back to there."""
    turns = (policy.min_length - 1, policy.min_length + policy.rollback - 1)
    lengths = [prompt + new, *(turn for turn in turns if prompt <= turn <= prompt + new)]
    return max(account(policy, shape, length, 1).format_bytes for length in lengths)


def _longest(policy: CachePolicy, shape: CacheShape, request: Request, free_bytes: int) -> int:
    """The most prompt tokens, fewer than the request has, that fit; 0 if none does."""

    def too_much(prompt: int) -> bool:
        return _need(policy, shape, prompt, request.new_tokens) > free_bytes

    packs, end = max(1, policy.min_length), request.prompt_tokens
    for first, stop in ((packs + policy.rollback, end), (packs, packs + policy.rollback), (1, packs)):
        spans = range(first, min(stop, end))  # within each of them bytes grow with the prompt
        fitting = bisect_left(spans, True, key=too_much)
        if fitting:
            return first + fitting - 1
    return 0
