"""What a packed layer's sequences hold exact, a small buffer each: sinks, blocks that had to stay exact, and the tail.

In that order; keys carry their positions already (RoPE), so attention doesn't mind it. This file knows where tokens lie
in the buffer; which of them age is decided in `sequences.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvdrift.policy import CachePolicy


class ExactTokens:
    """`batch` empty sequences, with the dtype and device of `like`."""

    def __init__(self, policy: CachePolicy, like: Float[Tensor, "batch kv_heads _ head_dim"]) -> None:
        batch, kv_heads, _, head_dim = like.shape
        self.policy = policy
        self._set(like.new_empty(2, batch, kv_heads, policy.exact_tokens + policy.block, head_dim))
        self.lengths = [0] * batch
        """Tokens of each sequence."""
        self.held = [policy.sink_tokens] * batch
        """How many of them come before the tail, once the sinks are there."""
        self.write_lengths()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's keys and values are views of its own buffer."""
        vars(self).update(state)
        self._set(self.both)

    def _set(self, both: Float[Tensor, "2 batch kv_heads capacity head_dim"]) -> None:
        self.both = both
        """Keys and values are one tensor, so that one call moves them alike."""
        self.keys, self.values = both[0], both[1]

    def write_lengths(self) -> None:
        """Lengths as attention reads them."""
        self.on_device = torch.tensor(self.lengths, dtype=torch.int32, device=self.both.device)

    def tail(self, s: int) -> int:
        """Tokens after sinks and held blocks; negative while sinks are missing."""
        return self.lengths[s] - self.held[s]

    # -- taking in -------------------------------------------------------------------------------------------------

    def put(self, s: int, parts: Sequence[Float[Tensor, "2 kv_heads _ head_dim"]], held: int) -> None:
        """Let a sequence hold these parts in a row, and nothing else; `held` tokens come before its tail."""
        tokens = torch.cat(list(parts), dim=2)
        self.lengths[s], self.held[s] = tokens.shape[2], held
        self._make_room(max(self.lengths[s], held + self.policy.residual_window + self.policy.block))
        self.both[:, s, :, : self.lengths[s]] = tokens

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads new head_dim"],
        values: Float[Tensor, "batch kv_heads new head_dim"],
        rows: Sequence[int],
    ) -> None:
        """Add new tokens to the tails of the given sequences; the other rows of `keys` and `values` are pads."""
        new = keys.shape[2]
        self._make_room(max(self.lengths[s] for s in rows) + new)
        if len(rows) == len(self.lengths) and len(set(self.lengths)) == 1:
            span = slice(self.lengths[0], self.lengths[0] + new)
            self.keys[:, :, span], self.values[:, :, span] = keys, values
            self.on_device += new
        else:
            for s in rows:
                span = slice(self.lengths[s], self.lengths[s] + new)
                self.keys[s, :, span], self.values[s, :, span] = keys[s], values[s]
                self.on_device[s] += new
        for s in rows:
            self.lengths[s] += new

    # -- the tail's oldest block -----------------------------------------------------------------------------------

    def oldest(self, rows: Sequence[int]) -> Float[Tensor, "2 rows kv_heads block head_dim"]:
        """The oldest block of these sequences' tails; where they lie side by side they aren't copied."""
        spans = [slice(self.held[s], self.held[s] + self.policy.block) for s in rows]
        if len(rows) == len(self.lengths) and all(span == spans[0] for span in spans):
            return self.both[:, :, :, spans[0]]
        return torch.stack([self.both[:, s, :, span] for s, span in zip(rows, spans, strict=True)], dim=1)

    def drop_oldest(self, s: int) -> None:
        """Let the oldest block of a tail go; it is in a page now."""
        self._move(s, self.held[s] + self.policy.block, self.held[s])

    def hold_oldest(self, s: int) -> None:
        """Keep the oldest block of a tail before it."""
        self.held[s] += self.policy.block
        self._make_room(self.held[s] + self.policy.residual_window + self.policy.block)

    def insert(self, s: int, block: Float[Tensor, "2 kv_heads tokens head_dim"]) -> None:
        """Put a block back as the oldest of a tail."""
        start, stop = self.held[s], self.held[s] + block.shape[2]
        self._make_room(self.lengths[s] + block.shape[2])
        self._move(s, start, stop)
        self.both[:, s, :, start:stop] = block

    def cut_tail(self, s: int, tokens: int) -> int:
        """Drop up to so many of the newest tokens; how many there were in the tail."""
        gone = min(tokens, max(0, self.tail(s)))
        self.lengths[s] -= gone
        return gone

    # -- storage ---------------------------------------------------------------------------------------------------

    def select(self, order: Int[Tensor, "kept"]) -> None:
        kept = order.tolist()
        self.lengths, self.held = [self.lengths[i] for i in kept], [self.held[i] for i in kept]
        self._set(self.both[:, order.to(self.both.device)])

    def to_dense(self, real: Bool[Tensor, "batch seen"]) -> tuple[Tensor, Tensor]:
        """Keys and values as columns again, zero where `real` says pad, of sequences that have no segment."""
        dense = []
        for buffer in (self.keys, self.values):
            columns = buffer.new_zeros(*buffer.shape[:2], real.shape[1], buffer.shape[3])
            for s, length in enumerate(self.lengths):
                columns[s, :, real[s]] = buffer[s, :, :length]
            dense.append(columns)
        return dense[0], dense[1]

    def drop_room(self) -> None:
        """Shrink a buffer that gathered more than a block at a time, as it does until `min_length` is reached."""
        block = self.policy.block
        steady, longest = max(self.held) + self.policy.residual_window + block, max(self.lengths)
        needed = steady if longest <= steady else -(-longest // block) * block
        if needed < self.both.shape[3]:
            self._set(self.both[:, :, :, :needed].clone())

    def _make_room(self, tokens: int) -> None:
        capacity = self.both.shape[3]
        if tokens > capacity:
            grown = -(-tokens // self.policy.block) * self.policy.block
            new = self.both.new_empty(*self.both.shape[:3], grown, self.both.shape[4])
            new[:, :, :, :capacity] = self.both
            self._set(new)

    def _move(self, s: int, start: int, to: int) -> None:
        """Move the tokens from `start` on to `to`."""
        end = self.lengths[s]
        if start < end:
            self.both[:, s, :, to : to + end - start] = self.both[:, s, :, start:end].clone()
        self.lengths[s] += to - start
