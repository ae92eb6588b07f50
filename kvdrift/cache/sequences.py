"""The sequences of one packed layer: their pages, and what each holds exact.

This file moves tokens from tail to page and back; what a query sees is decided in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvdrift.cache.exact import ExactTokens
from kvdrift.cache.pool import BlockPool
from kvdrift.cache.sealing import HELD, Binding, Segment, seal
from kvdrift.cache.shadows import Shadows
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
        self.exact, self.shadows = ExactTokens(self.policy, like), Shadows(self.policy, like)
        self.segments: list[list[Segment]] = [[] for _ in range(like.shape[0])]
        self._write_tables()

    def __getstate__(self) -> dict[str, Any]:
        """Without the backend, a module, so that a cache can be copied."""
        return {name: value for name, value in vars(self).items() if name != "backend"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.backend = dispatch.backend(self.exact.both.device)

    # -- lengths ---------------------------------------------------------------------------------------------------

    def length(self, s: int) -> int:
        """Real tokens of one sequence."""
        if not self.segments[s]:
            return self.exact.lengths[s]
        newest = self.segments[s][-1]
        return newest.start + newest.tokens + self.exact.tail(s)

    @property
    def escalated_blocks(self) -> int:
        """Blocks that are held only because their format can't hold them."""
        return sum(x.page == HELD and self._may_pack(s, x.start) for s, row in enumerate(self.segments) for x in row)

    def due(self, s: int, new: int = 0) -> int:
        """Blocks of one sequence to seal once `new` more real tokens are there."""
        policy = self.policy
        if policy.min_length and self.length(s) + new < policy.min_length:
            return 0
        return max(0, self.exact.tail(s) + new - policy.residual_window) // policy.block

    def until_due(self, rows: Sequence[int]) -> int:
        """How many more real tokens each of these sequences takes before one of them has a block due."""
        policy, room = self.policy, []
        for s in rows:
            until = policy.residual_window + policy.block - self.exact.tail(s)
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
        sinks, block, blocks = self.policy.sink_tokens, self.policy.block, len(aged_keys)
        held = [i for i, segment in enumerate(self.segments[s]) if segment.page == HELD]
        end = sinks + blocks * block
        parts = [(keys[:, :sinks], values[:, :sinks]), *((aged_keys[i], aged_values[i]) for i in held)]
        parts.append((keys[:, end:], values[:, end:]))
        self.exact.put(s, [torch.stack(part) for part in parts], sinks + len(held) * block)
        early = self._is_early(s)
        for i in range(0 if early else max(0, blocks - 1), blocks):
            self.shadows.keep(s, torch.stack([aged_keys[i], aged_values[i]]), early)

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads new head_dim"],
        values: Float[Tensor, "batch kv_heads new head_dim"],
        rows: Sequence[int],
    ) -> None:
        """Add new real tokens to the tails of the given sequences; the other rows of `keys` and `values` are pads."""
        self.exact.append(keys.detach(), values.detach(), rows)
        for s in rows:
            if self.shadows.early[s] and not self._is_early(s):
                self.shadows.early[s] = []

    def seal_due(self) -> None:
        """Seal the oldest due block of every sequence that has one, until none has."""
        while due := [s for s in range(len(self.segments)) if self.due(s)]:
            oldest = self.exact.oldest(due)
            packed = {}
            for i, (s, segment) in enumerate(zip(due, self._seal(due, *oldest.unbind()), strict=True)):
                early = self._is_early(s) and len(self.shadows.early[s]) == len(self.segments[s])
                self.shadows.keep(s, oldest[:, i], early)
                self.segments[s].append(segment)
                if segment.page == HELD:
                    self.exact.hold_oldest(s)
                else:
                    self.exact.drop_oldest(s)
                    packed[s] = (segment.page, segment.tokens)
            self.tables.append(packed)
            self.exact.write_lengths()
        self.exact.drop_room()

    def attend(
        self, query: Float[Tensor, "batch query_heads new head_dim"], scaling: float
    ) -> Float[Tensor, "batch query_heads new head_dim"]:
        """Attention of the newest `new` tokens over all pages and the exact tokens up to each query's own."""
        exact = (self.exact.keys, self.exact.values, self.exact.on_device)
        pages = (self.pool.arena, self.tables.pages, self.tables.tokens)
        answer: Tensor = self.backend.decode_attention(query, self.layout, *pages, *exact, scaling)
        return answer

    # -- cutting, reordering ---------------------------------------------------------------------------------------

    def crop(self, cuts: Sequence[int]) -> None:
        """Drop the newest `cuts[s]` real tokens of each sequence s."""
        for s, cut in enumerate(cuts):
            if cut:
                self._crop_row(s, cut)
        self._write_tables()

    def _crop_row(self, s: int, cut: int) -> None:
        if self.shadows.early[s] and self.length(s) - cut < self.policy.min_length:
            self._reopen_all(s)
        cut -= self.exact.cut_tail(s, cut)
        segments = self.segments[s]
        if segments and self.exact.tail(s) - cut < self.policy.residual_window:  # the shorter one hasn't sealed it yet
            self._reopen_newest(s)
            cut -= self.exact.cut_tail(s, cut)
        while cut and segments:  # deeper than what is kept exact: what is left of a block stays as it was packed
            segment = segments.pop()
            self.shadows.forget(s)
            if segment.page == HELD:
                self.exact.held[s] -= segment.tokens
                cut -= self.exact.cut_tail(s, cut)
                continue
            gone = min(cut, segment.tokens)
            cut -= gone
            if gone < segment.tokens:
                segments.append(replace(segment, tokens=segment.tokens - gone))
            else:
                self.pool.release([segment.page])
        self.exact.lengths[s] -= cut

    def _reopen_newest(self, s: int) -> None:
        """Make the newest block the start of the tail again, if its exact tokens are still there."""
        newest, exact = self.segments[s][-1], self.shadows.take(s)
        if newest.page == HELD:
            self.exact.held[s] -= newest.tokens
        elif exact is not None:
            self.exact.insert(s, exact)
            self.pool.release([newest.page])
        else:
            return
        self.segments[s].pop()

    def _reopen_all(self, s: int) -> None:
        """Make every block part of the tail again, of a sequence whose blocks are all still there, exact."""
        sinks, own = self.policy.sink_tokens, self.exact.both[:, s, :, : self.exact.lengths[s]]
        parts = [own[:, :, :sinks], *self.shadows.early[s], own[:, :, self.exact.held[s] :]]
        self.exact.put(s, parts, sinks)
        self.pool.release(_pages([self.segments[s]]))
        self.segments[s] = []
        self.shadows.forget(s)

    def select(self, order: Int[Tensor, "kept"]) -> None:
        """Keep these sequences, in this order; a sequence named twice shares its pages by reference count."""
        kept = order.tolist()
        old = self.segments
        self.ranges = None if self.ranges is None else [self.ranges[i] for i in kept]
        self.segments = [list(old[i]) for i in kept]
        self.pool.share(_pages(self.segments))
        self.pool.release(_pages(old))
        self.exact.select(order)
        self.shadows.select(order)
        self._write_tables()

    def release(self) -> None:
        """Give all pages back."""
        self.pool.release(_pages(self.segments))
        self.segments = [[] for _ in self.segments]

    # -- pages -----------------------------------------------------------------------------------------------------

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
        self.tables = Tables(live, self.exact.both.device)
        self.exact.write_lengths()


def _pages(segments: Sequence[Sequence[Segment]]) -> list[int]:
    return [segment.page for row in segments for segment in row if segment.page != HELD]
