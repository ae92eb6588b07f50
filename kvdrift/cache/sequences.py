"""The sequences of one packed layer: their pages, and a small exact buffer each.

The exact buffer of a sequence holds, in order, its sinks, blocks that had to stay exact ("held"), and its newest
tokens, the tail. Keys carry their positions already (RoPE), so attention doesn't mind that order. This file moves
tokens from tail to page and back; what a query sees is decided in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvdrift.cache.pool import BlockPool
from kvdrift.cache.sealing import HELD, Binding, Segment, seal
from kvdrift.cache.tables import Tables
from kvdrift.kernels import dispatch


class Sequences:
    """`batch` empty sequences, with the dtype and device of `like`; each ages on its own count of real tokens.

    `ranges[s]`, when given, is the span of positions in which sequence s may pack blocks; others are held exact.
    """

    def __init__(
        self,
        binding: Binding,
        pool: BlockPool,
        like: Float[Tensor, "batch kv_heads _ head_dim"],
        ranges: Sequence[range] | None = None,
    ) -> None:
        self.binding, self.policy, self.layout, self.pool = binding, binding.policy, binding.layout, pool
        self.ranges = ranges
        self.backend = dispatch.backend(like.device)
        batch, kv_heads, _, head_dim = like.shape
        capacity, block = self.policy.exact_tokens + self.policy.block, self.policy.block
        self._hold(like.new_empty(2, batch, kv_heads, capacity, head_dim))
        self.shadow = like.new_empty(2, batch, kv_heads, block if self.policy.rollback else 0, head_dim)
        """The exact keys and values of each sequence's newest block."""
        self.segments: list[list[Segment]] = [[] for _ in range(batch)]
        self.exact = [0] * batch
        """Tokens in the exact buffer of each sequence."""
        self.held = [self.policy.sink_tokens] * batch
        """How many of them come before the tail, once the sinks are there."""
        self.shadowed = [False] * batch
        """Whether a sequence's newest segment can be put back from its shadow."""
        self.early: list[list[Float[Tensor, "2 kv_heads block head_dim"]]] = [[] for _ in range(batch)]
        """All blocks of a sequence, exact, as long as a rollback may lead to below `min_length`."""
        self._write_tables()

    # -- lengths ---------------------------------------------------------------------------------------------------

    def length(self, s: int) -> int:
        """Real tokens of one sequence."""
        if not self.segments[s]:
            return self.exact[s]
        newest = self.segments[s][-1]
        return newest.start + newest.tokens + self.exact[s] - self.held[s]

    @property
    def escalated_blocks(self) -> int:
        """Blocks that are held only because their format can't hold them."""
        return sum(x.page == HELD and self._may_pack(s, x.start) for s, row in enumerate(self.segments) for x in row)

    def due(self, s: int, new: int = 0) -> int:
        """Blocks of one sequence to seal once `new` more real tokens are there."""
        policy = self.policy
        if policy.min_length and self.length(s) + new < policy.min_length:
            return 0
        return max(0, self.exact[s] - self.held[s] + new - policy.residual_window) // policy.block

    def until_due(self, rows: Sequence[int]) -> int:
        """How many more real tokens each of these sequences takes before one of them has a block due."""
        policy, room = self.policy, []
        for s in rows:
            until = policy.residual_window + policy.block - (self.exact[s] - self.held[s])
            room.append(max(until, policy.min_length - self.length(s)) if policy.min_length else until)
        return min(room) - 1

    # -- taking tokens in ------------------------------------------------------------------------------------------

    def fill(self, rows: Sequence[tuple[Float[Tensor, "kv_heads _ d"], Float[Tensor, "kv_heads _ d"]]]) -> None:
        """All tokens of every (still empty) sequence at once: seal what is due, in one go, keep the rest exact."""
        rows = [(keys.detach(), values.detach()) for keys, values in rows]
        aged = [self._aged(s, *row) for s, row in enumerate(rows)]
        due = [s for s, (keys, _) in enumerate(aged) for _ in keys]
        if due:
            found = [own for own in aged if len(own[0])]
            keys, values = found[0] if len(found) == 1 else (torch.cat(x) for x in zip(*found, strict=True))
            for s, segment in zip(due, self._seal(due, keys, values), strict=True):
                self.segments[s].append(segment)
        for s, row in enumerate(rows):
            self._keep(s, *row, *aged[s])
        self._write_tables()

    def _aged(self, s: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks to seal of a sequence that is given these tokens, [blocks, kv_heads, block, d]; maybe none."""
        sinks, block, blocks = self.policy.sink_tokens, self.policy.block, self.due(s, keys.shape[1])
        keys, values = (x[:, sinks : sinks + blocks * block] for x in (keys, values))
        return keys.unflatten(1, (blocks, block)).transpose(0, 1), values.unflatten(1, (blocks, block)).transpose(0, 1)

    def _keep(self, s: int, keys: Tensor, values: Tensor, aged_keys: Tensor, aged_values: Tensor) -> None:
        """Keep exact what of a sequence isn't in pages: sinks, blocks that are held, the tail."""
        sinks, block = self.policy.sink_tokens, self.policy.block
        end = sinks + len(aged_keys) * block
        kept = [(keys[:, :sinks], values[:, :sinks])]
        kept += [(aged_keys[i], aged_values[i]) for i, held in enumerate(self.segments[s]) if held.page == HELD]
        self.held[s] = sinks + block * (len(kept) - 1)
        kept.append((keys[:, end:], values[:, end:]))
        self.exact[s] = sum(part.shape[1] for part, _ in kept)
        if len(aged_keys):
            self._keep_shadow(s, torch.stack([aged_keys[-1], aged_values[-1]]))
        if self._is_early(s):
            self.early[s] = [torch.stack(pair) for pair in zip(aged_keys, aged_values, strict=True)]
        self._make_room(max(self.exact[s], self.held[s] + self.policy.residual_window + block))
        for buffer, parts in zip((self.keys, self.values), zip(*kept, strict=True), strict=True):
            buffer[s, :, : self.exact[s]] = torch.cat(parts, dim=1)

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads new head_dim"],
        values: Float[Tensor, "batch kv_heads new head_dim"],
        rows: Sequence[int],
    ) -> None:
        """Add new real tokens to the tails of the given sequences; the other rows of `keys` and `values` are pads."""
        new = keys.shape[2]
        self._make_room(max(self.exact[s] for s in rows) + new)
        if len(rows) == len(self.exact) and len(set(self.exact)) == 1:
            span = slice(self.exact[0], self.exact[0] + new)
            self.keys[:, :, span], self.values[:, :, span] = keys.detach(), values.detach()
            self.exact_lengths += new
        else:
            for s in rows:
                span = slice(self.exact[s], self.exact[s] + new)
                self.keys[s, :, span], self.values[s, :, span] = keys[s].detach(), values[s].detach()
                self.exact_lengths[s] += new
        for s in rows:
            self.exact[s] += new
            if self.early[s] and not self._is_early(s):
                self.early[s] = []

    def seal_due(self) -> None:
        """Seal the oldest due block of every sequence that has one, until none has."""
        block = self.policy.block
        while due := [s for s in range(len(self.exact)) if self.due(s)]:
            oldest = self._oldest(due)
            packed = {}
            for i, (s, segment) in enumerate(zip(due, self._seal(due, *oldest.unbind()), strict=True)):
                self._keep_shadow(s, oldest[:, i])
                if self._is_early(s) and len(self.early[s]) == len(self.segments[s]):
                    self.early[s].append(oldest[:, i].clone())
                self.segments[s].append(segment)
                if segment.page == HELD:
                    self.held[s] += block
                    self._make_room(self.held[s] + self.policy.residual_window + block)
                else:
                    self._move(s, self.held[s] + block, self.held[s])
                    packed[s] = (segment.page, segment.tokens)
            self.tables.append(packed)
            self._write_lengths()
        self._drop_room()

    def _oldest(self, rows: Sequence[int]) -> Float[Tensor, "2 rows kv_heads block head_dim"]:
        """The oldest block of these sequences' tails; where they lie side by side they aren't copied."""
        spans = [slice(self.held[s], self.held[s] + self.policy.block) for s in rows]
        if len(rows) == len(self.exact) and all(span == spans[0] for span in spans):
            return self.buffer[:, :, :, spans[0]]
        return torch.stack([self.buffer[:, s, :, span] for s, span in zip(rows, spans, strict=True)], dim=1)

    def attend(
        self, query: Float[Tensor, "batch query_heads new head_dim"], scaling: float
    ) -> Float[Tensor, "batch query_heads new head_dim"]:
        """Attention of the newest `new` tokens over all pages and the exact tokens up to each query's own."""
        tables = (self.tables.pages, self.tables.tokens, self.keys, self.values, self.exact_lengths)
        answer: Tensor = self.backend.decode_attention(query, self.layout, self.pool.arena, *tables, scaling)
        return answer

    # -- cutting, reordering ---------------------------------------------------------------------------------------

    @property
    def rollback(self) -> list[Tensor]:
        """The exact tokens of aged blocks; sequences that were one may share theirs."""
        early = {id(block): block for own in self.early for block in own}
        return [self.shadow, *early.values()]

    def crop(self, cuts: Sequence[int]) -> None:
        """Drop the newest `cuts[s]` real tokens of each sequence s."""
        for s, cut in enumerate(cuts):
            if cut:
                self._crop_row(s, cut)
        self._write_tables()

    def _crop_row(self, s: int, cut: int) -> None:
        if self.early[s] and self.length(s) - cut < self.policy.min_length:
            self._reopen_all(s)
        cut -= self._cut_tail(s, cut)
        segments, tail = self.segments[s], self.exact[s] - self.held[s]
        if segments and tail - cut < self.policy.residual_window:  # the shorter sequence would not have sealed it yet
            self._reopen_newest(s)
            cut -= self._cut_tail(s, cut)
        while cut and segments:  # deeper than what is kept exact: what is left of a block stays as it was packed
            segment, self.shadowed[s], self.early[s] = segments.pop(), False, []
            if segment.page == HELD:
                self.held[s] -= segment.tokens
                cut -= self._cut_tail(s, cut)
                continue
            gone = min(cut, segment.tokens)
            cut -= gone
            if gone < segment.tokens:
                segments.append(replace(segment, tokens=segment.tokens - gone))
            else:
                self.pool.release([segment.page])
        self.exact[s] -= cut

    def _cut_tail(self, s: int, cut: int) -> int:
        gone = min(cut, max(0, self.exact[s] - self.held[s]))
        self.exact[s] -= gone
        return gone

    def _reopen_newest(self, s: int) -> None:
        """Make the newest block the start of the tail again, if its exact tokens are still there."""
        newest = self.segments[s][-1]
        if newest.page == HELD:
            self.held[s] -= newest.tokens
        elif self.early[s] or self.shadowed[s]:
            start, stop = self.held[s], self.held[s] + newest.tokens
            self._make_room(self.exact[s] + newest.tokens)
            self._move(s, start, stop)
            self.buffer[:, s, :, start:stop] = self.early[s][-1] if self.early[s] else self.shadow[:, s]
            self.pool.release([newest.page])
        else:
            return
        self.segments[s].pop()
        self.early[s] = self.early[s][:-1]
        self.shadowed[s] = False

    def _reopen_all(self, s: int) -> None:
        """Make every block part of the tail again, of a sequence whose blocks are all still there, exact."""
        sinks, buffer = self.policy.sink_tokens, self.buffer[:, s, :, : self.exact[s]]
        parts = [buffer[:, :, :sinks], *self.early[s], buffer[:, :, self.held[s] :]]
        exact = torch.cat(parts, dim=2)
        self.pool.release(_pages([self.segments[s]]))
        self.exact[s], self.held[s], self.shadowed[s] = exact.shape[2], sinks, False
        self.segments[s], self.early[s] = [], []
        self._make_room(exact.shape[2])
        self.buffer[:, s, :, : exact.shape[2]] = exact

    def select(self, order: Int[Tensor, "kept"]) -> None:
        """Keep these sequences, in this order; a sequence named twice shares its pages by reference count."""
        kept = order.tolist()
        old = self.segments
        self.ranges = None if self.ranges is None else [self.ranges[i] for i in kept]
        self.segments, self.early = [list(old[i]) for i in kept], [list(self.early[i]) for i in kept]
        self.pool.share(_pages(self.segments))
        self.pool.release(_pages(old))
        self.exact, self.held, self.shadowed = ([x[i] for i in kept] for x in (self.exact, self.held, self.shadowed))
        at = order.to(self.keys.device)
        self._hold(self.buffer[:, at])
        self.shadow = self.shadow[:, at]
        self._write_tables()

    def release(self) -> None:
        """Give all pages back."""
        self.pool.release(_pages(self.segments))
        self.segments, self.early = [[] for _ in self.segments], [[] for _ in self.segments]

    def to_dense(self, real: Bool[Tensor, "batch seen"]) -> tuple[Tensor, Tensor]:
        """Keys and values as columns again, zero where `real` says pad, of sequences that have no segment."""
        dense = []
        for buffer in self.buffer:
            columns = buffer.new_zeros(*buffer.shape[:2], real.shape[1], buffer.shape[3])
            for s, length in enumerate(self.exact):
                columns[s, :, real[s]] = buffer[s, :, :length]
            dense.append(columns)
        return dense[0], dense[1]

    # -- storage ---------------------------------------------------------------------------------------------------

    def _make_room(self, tokens: int) -> None:
        capacity = self.buffer.shape[3]
        if tokens > capacity:
            grown = -(-tokens // self.policy.block) * self.policy.block
            new = self.buffer.new_empty(*self.buffer.shape[:3], grown, self.buffer.shape[4])
            new[:, :, :, :capacity] = self.buffer
            self._hold(new)

    def _drop_room(self) -> None:
        """Shrink a buffer that gathered more than a block at a time, as it does until `min_length` is reached."""
        needed = max(max(self.held) + self.policy.residual_window + self.policy.block, *self.exact)
        if needed + self.policy.block <= self.buffer.shape[3]:
            self._hold(self.buffer[:, :, :, :needed].clone())

    def _hold(self, buffer: Float[Tensor, "2 batch kv_heads capacity head_dim"]) -> None:
        """Let this be the exact buffer. It is one tensor, so that one call moves keys and values alike."""
        self.buffer = buffer
        self.keys, self.values = buffer[0], buffer[1]

    def _move(self, s: int, start: int, to: int) -> None:
        """Move the exact tokens from `start` on to `to`."""
        end = self.exact[s]
        if start < end:
            self.buffer[:, s, :, to : to + end - start] = self.buffer[:, s, :, start:end].clone()
        self.exact[s] += to - start

    def _keep_shadow(self, s: int, newest: Float[Tensor, "2 kv_heads block head_dim"]) -> None:
        if self.policy.rollback:
            self.shadow[:, s] = newest
            self.shadowed[s] = True

    def _is_early(self, s: int) -> bool:
        """Whether a rollback may lead to below `min_length`, where none of a sequence's blocks is packed."""
        return self.length(s) < self.policy.min_length + self.policy.rollback

    def _seal(self, sequences: Sequence[int], keys: Tensor, values: Tensor) -> list[Segment]:
        """The next segment of each named sequence; one that is named n times gets n in a row."""
        starts, following = [], dict[int, int]()
        for s in sequences:
            newest = self.segments[s][-1] if self.segments[s] else Segment(HELD, self.policy.sink_tokens, 0)
            start = following.get(s, newest.start + newest.tokens)
            starts.append(start)
            following[s] = start + self.policy.block
        allowed = [self._may_pack(s, start) for s, start in zip(sequences, starts, strict=True)]
        return seal(self.backend, self.binding, self.pool, starts, allowed, keys, values)

    def _may_pack(self, s: int, start: int) -> bool:
        return self.ranges is None or start in self.ranges[s]

    def _write_tables(self) -> None:
        live = [[(x.page, x.tokens) for x in row if x.page != HELD] for row in self.segments]
        self.tables = Tables(live, self.keys.device)
        self._write_lengths()

    def _write_lengths(self) -> None:
        self.exact_lengths = torch.tensor(self.exact, dtype=torch.int32, device=self.keys.device)


def _pages(segments: Sequence[Sequence[Segment]]) -> list[int]:
    return [segment.page for row in segments for segment in row if segment.page != HELD]
