"""What is drilled: a model, a policy and one stored prompt; and what a check says when a rail did not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from kvdrift.cache.block import BlockRejected, Identity
from kvdrift.cache.packed import PackedCache
from kvdrift.policy import CachePolicy
from kvdrift.serving import handover
from kvdrift.serving.admission import Eviction
from kvdrift.serving.canary import Release
from kvdrift.serving.mirror import Served, decode

TENANT, OTHER, SHARED = "tenant-a", "tenant-b", "shared:system-prompt"
BLOCKS = 3
"""Blocks that become due in the drill's prompt, the last of them within STEPS decode steps."""
STEPS = 4
NOTHING_PACKED = "the policy packs nothing"


class DrillFailed(AssertionError):
    """A rail did not hold; says what was seen instead."""


@dataclass(frozen=True)
class Subject:
    """The model and policy under drill, with one stored prompt: its tokens, and its exact keys and values by layer."""

    model: Any
    policy: CachePolicy
    ladder: tuple[CachePolicy, ...]
    """The policy, then its escalation."""
    release: Release
    limits: Sequence[Mapping[str, float]]
    """Calibrated magnitude limits of a request, by layer."""
    eviction: Eviction
    tokens: Int[Tensor, "1 T"]
    keys: Sequence[Float[Tensor, "1 kv_heads T d"]]
    values: Sequence[Float[Tensor, "1 kv_heads T d"]]

    @property
    def context(self) -> int:
        """Two tokens short of the last block that fits into the prompt, of BLOCKS at the most."""
        policy = self.policy
        blocks = min(BLOCKS, (self.tokens.shape[1] - policy.exact_tokens) // policy.block)
        return policy.exact_tokens + blocks * policy.block - 2

    def cache(self, scope: str = TENANT, max_tokens: int | None = None) -> PackedCache:
        """The prompt's first `context` tokens under the policy; with `max_tokens`, in pages reserved for so many."""
        cache = PackedCache(
            self.policy,
            self.model.config,
            batch=None if max_tokens is None else 1,
            max_tokens=max_tokens,
            dtype=self.model.dtype,
            identity=self.release.identity(scope),
        )
        return self.fill(cache)

    def fill(self, cache: Any) -> Any:
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            span = keys[:, :, : self.context], values[:, :, : self.context]
            (cache.load_layer(index, *span) if isinstance(cache, PackedCache) else cache.update(*span, index))
        return cache

    @property
    def token(self) -> Int[Tensor, "1 1"]:
        return self.tokens[:, self.context - 1 : self.context]

    def decode(self, cache: Any, steps: int = STEPS) -> Served:
        return decode(self.model, cache, self.token, steps)


def require(holds: bool, otherwise: str) -> None:
    """Raise DrillFailed with what was seen instead."""
    if not holds:
        raise DrillFailed(otherwise)


def rejection_of(block: handover.Block, identity: Identity, shareable: tuple[str, ...] = ()) -> str:
    """Why a block is rejected; empty if it is accepted."""
    try:
        handover.accept(block, identity, shareable)
    except BlockRejected as error:
        return str(error)
    return ""
