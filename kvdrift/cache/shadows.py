"""Exact copies of aged blocks, so that a rollback brings back what was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.policy import CachePolicy

Block = Float[Tensor, "2 kv_heads block head_dim"]


class Shadows:
    """Of each of `batch` sequences its newest block; and as long as it is early, all of its blocks.

    A sequence is early while a rollback may lead to below `min_length`, where none of its blocks is packed.
    """

    def __init__(self, policy: CachePolicy, like: Float[Tensor, "batch kv_heads _ head_dim"]) -> None:
        batch, kv_heads, _, head_dim = like.shape
        self._kept = policy.rollback > 0
        self._newest = like.new_empty(2, batch, kv_heads, policy.block if self._kept else 0, head_dim)
        self._there = [False] * batch
        self.early: list[list[Block]] = [[] for _ in range(batch)]

    @property
    def tensors(self) -> list[Tensor]:
        """Each once; sequences that were one may share theirs."""
        return [self._newest, *{id(block): block for own in self.early for block in own}.values()]

    def keep(self, s: int, newest: Block, early: bool) -> None:
        """Copy the newest block of a sequence."""
        if self._kept:
            self._newest[:, s] = newest
            self._there[s] = True
        if early:
            self.early[s].append(newest.clone())

    def take(self, s: int) -> Block | None:
        """The newest block of a sequence, if it is there, to become exact again; not to be taken twice."""
        there, self._there[s] = self._there[s], False
        if self.early[s]:
            return self.early[s].pop()
        return self._newest[:, s] if there else None

    def forget(self, s: int) -> None:
        self._there[s], self.early[s] = False, []

    def select(self, order: torch.Tensor) -> None:
        kept: Sequence[int] = order.tolist()
        self._there, self.early = [self._there[i] for i in kept], [list(self.early[i]) for i in kept]
        self._newest = self._newest[:, order.to(self._newest.device)]
