"""One layer of the packed cache: dense until a block is due, then pages plus a small exact buffer a sequence.

The exact buffer of a sequence holds, in order, its sinks, blocks that had to stay exact ("held"), and its newest
tokens. Keys carry their positions already (RoPE), so attention doesn't mind that order. What a query sees is decided
in `attention.py`; this file moves tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvdrift.cache.block import Identity, headers
from kvdrift.cache.pool import BlockPool
from kvdrift.kernels import dispatch
from kvdrift.layout import HEADER_BYTES, BlockLayout
from kvdrift.policy import CachePolicy

HELD = -1
"""Page of a block that stays exact, in the exact buffer."""


@dataclass(frozen=True)
class Segment:
    """One aged block of a sequence: its page (or HELD), first logical position and valid tokens."""

    page: int
    start: int
    tokens: int


@dataclass(frozen=True)
class Arrival:
    """What `update` hands to the attention function: the new tokens, which the layer hasn't taken in yet."""

    layer: PackedLayer
    keys: Float[Tensor, "batch kv_heads new head_dim"]
    values: Float[Tensor, "batch kv_heads new head_dim"]


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer under a policy; `pack_ranges[s]`, when given, is the span of logical positions in
    which sequence s may pack blocks (a cell); a block outside it is held exact."""

    is_croppable = True

    def __init__(
        self,
        index: int,
        policy: CachePolicy,
        layout: BlockLayout,
        pool: Callable[[torch.device], BlockPool],
        peers: int,
        identity: Identity,
        pack_ranges: Sequence[range] | None = None,
    ) -> None:
        super().__init__()
        self.index, self.policy, self.layout, self.identity = index, policy, layout, identity
        self.peers = peers
        """Layers from this one on that share its pool: what a step needs is asked for by the first of them."""
        self.pack_ranges = pack_ranges
        self._pool_on = pool
        self.reset()

    # -- what Transformers asks of a layer ------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.element_size() != self.layout.dtype_bytes:
            raise ValueError(
                f"the model computes in {key_states.dtype} and its config says {8 * self.layout.dtype_bytes}-bit; "
                "pass PackedCache(…, dtype=model.dtype)"
            )
        self.device = key_states.device
        self.pool = self._pool_on(self.device)
        self.backend = dispatch.backend(self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Arrival, Arrival]:  # type: ignore[override]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        arrival = Arrival(self, key_states, value_states)
        return arrival, arrival

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        if self.packed:
            return len(self.exact)
        return -1 if self.keys is None else self.keys.shape[0]

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        if getattr(self, "segments", None):
            self._release([s for sequence in self.segments for s in sequence])
        self.seen = 0
        self.keys = self.values = None
        self.real: Bool[Tensor, "batch seen"] | None = None
        self.packed = False
        self.segments: list[list[Segment]] = []
        self.exact: list[int] = []
        self.held: list[int] = []
        self.shadow: list[bool] = []
        self.exact_keys = self.exact_values = self.exact_lengths = self.pages = self.tokens = None
        self.shadow_keys = self.shadow_values = None

    # -- lengths ---------------------------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Real tokens of one sequence."""
        if self.packed:
            aged = sum(s.tokens for s in self.segments[sequence] if s.page != HELD)
            return aged + self.exact[sequence]
        if self.keys is None:
            return 0
        return self.keys.shape[2] if self.real is None else int(self.real[sequence].sum())

    def _is_due(self, exact: int, held: int, length: int) -> bool:
        policy = self.policy
        return exact - held >= policy.residual_window + policy.block and length >= policy.min_length

    def stays_dense(self, new: list[int] | int) -> bool:
        """Whether nothing becomes due while `new` more real tokens (of each sequence, or of all) arrive."""
        if self.packed:
            return False
        batch = 1 if self.keys is None else self.keys.shape[0]
        counts = [new] * batch if isinstance(new, int) else new
        lengths = [self.length(s) + count for s, count in zip(range(len(counts)), counts)]
        return not any(self._is_due(n, self.policy.sink_tokens, n) for n in lengths)

    def columns_until_due(self) -> int:
        """How many more real tokens of every sequence fit before one of them makes a block due."""
        policy = self.policy
        room = []
        for sequence, (exact, held) in enumerate(zip(self.exact, self.held)):
            until = policy.residual_window + policy.block - (exact - held)
            room.append(max(until, policy.min_length - self.length(sequence)) if policy.min_length else until)
        return min(room) - 1

    # -- taking tokens in ------------------------------------------------------------------------------------------

    def append_dense(self, keys: Tensor, values: Tensor, real: Bool[Tensor, "batch new"] | None) -> None:
        """Grow the dense tensors, exactly as Transformers' own layer does."""
        if real is not None or self.real is not None:
            past = keys.new_ones(keys.shape[0], 0 if self.keys is None else self.keys.shape[2], dtype=torch.bool)
            new = keys.new_ones(keys.shape[0], keys.shape[2], dtype=torch.bool) if real is None else real
            self.real = torch.cat([past if self.real is None else self.real, new], dim=1)
        if self.keys is None:
            self.keys, self.values = keys.contiguous(), values.contiguous()
        else:
            self.keys = torch.cat([self.keys, keys], dim=2)
            self.values = torch.cat([self.values, values], dim=2)

    def start_packed(self, keys: Tensor, values: Tensor, real: Bool[Tensor, "batch new"] | None) -> None:
        """Seal what is due of whole sequences, and keep the rest in the exact buffer."""
        batch = keys.shape[0]
        self._make_packed(batch, keys)
        rows = [(keys[s], values[s]) if real is None else (keys[s][:, real[s]], values[s][:, real[s]]) for s in range(batch)]
        policy = self.policy
        counts = [max(0, k.shape[1] - policy.exact_tokens) // policy.block for k, _ in rows]
        counts = [n if k.shape[1] >= policy.min_length else 0 for n, (k, _) in zip(counts, rows)]
        if sum(counts) > self.pool.free:
            self.pool.reserve(sum(counts) * self.peers)
        for sequence, ((k, v), blocks) in enumerate(zip(rows, counts)):
            sinks, end = policy.sink_tokens, policy.sink_tokens + blocks * policy.block
            kept = [(k[:, :sinks], v[:, :sinks])]
            if blocks:
                aged_k, aged_v = (x[:, sinks:end].unflatten(1, (blocks, policy.block)).transpose(0, 1) for x in (k, v))
                for i, segment in enumerate(self._seal([sequence] * blocks, aged_k, aged_v)):
                    self.segments[sequence].append(segment)
                    if segment.page == HELD:
                        kept.append((aged_k[i], aged_v[i]))
                self._keep_shadow(sequence, aged_k[-1], aged_v[-1])
            self.held[sequence] = sinks + policy.block * (len(kept) - 1)
            kept.append((k[:, end:], v[:, end:]))
            self._append_row(sequence, torch.cat([x for x, _ in kept], 1), torch.cat([x for _, x in kept], 1))
        self._write_tables()

    def leave_dense(self) -> None:
        """Move to the exact buffer without sealing, so that tokens can be taken in one at a time."""
        if self.packed:
            return
        keys, values, real = self.keys, self.values, self.real
        if keys is None:
            return
        self._make_packed(keys.shape[0], keys)
        for s in range(keys.shape[0]):
            columns = slice(None) if real is None else real[s]
            self._append_row(s, keys[s][:, columns], values[s][:, columns])
            self.held[s] = self.policy.sink_tokens
        self.keys = self.values = self.real = None
        self._write_tables()

    def begin_packed(self, keys: Tensor) -> None:
        """An empty exact buffer, for a prefill that reads packed blocks."""
        self._make_packed(keys.shape[0], keys)
        self.held = [self.policy.sink_tokens] * keys.shape[0]
        self._write_tables()

    def append(self, keys: Tensor, values: Tensor, rows: list[int] | None = None) -> None:
        """Add new real tokens to the exact buffer, of all sequences or of the given rows."""
        new = keys.shape[2]
        rows = list(range(len(self.exact))) if rows is None else rows
        if not rows:
            return
        self._make_room(max(self.exact[s] for s in rows) + new)
        starts = {self.exact[s] for s in rows}
        if len(starts) == 1 and len(rows) == len(self.exact):
            start = starts.pop()
            self.exact_keys[:, :, start : start + new] = keys
            self.exact_values[:, :, start : start + new] = values
            self.exact_lengths += new
        else:
            for s in rows:
                self.exact_keys[s, :, self.exact[s] : self.exact[s] + new] = keys[s]
                self.exact_values[s, :, self.exact[s] : self.exact[s] + new] = values[s]
                self.exact_lengths[s] += new
        for s in rows:
            self.exact[s] += new

    def check_room(self, new: int) -> None:
        """Raise PoolExhausted, with the cache as it was, if a pool of fixed size can't hold `new` more tokens."""
        if self.is_initialized and self.packed and self.pool.fixed:
            policy = self.policy
            tails = [n - held + new - policy.residual_window for n, held in zip(self.exact, self.held)]
            blocks = sum(max(0, tail // policy.block) for tail in tails) * self.peers
            if blocks > self.pool.free:
                self.seen -= new
                self.pool.reserve(blocks)

    def seal_due(self) -> None:
        """Seal the oldest block of every sequence that has one due, until none has."""
        block = self.policy.block
        while due := [s for s, n in enumerate(self.exact) if self._is_due(n, self.held[s], self._length_if_needed(s))]:
            spans = [slice(self.held[s], self.held[s] + block) for s in due]
            keys = torch.stack([self.exact_keys[s, :, span] for s, span in zip(due, spans)])
            values = torch.stack([self.exact_values[s, :, span] for s, span in zip(due, spans)])
            for i, (s, span, segment) in enumerate(zip(due, spans, self._seal(due, keys, values))):
                self.segments[s].append(segment)
                self._keep_shadow(s, keys[i], values[i])
                if segment.page == HELD:
                    self.held[s] += block
                    self._make_room(self.held[s] + self.policy.residual_window + block)
                else:
                    self._cut_out(s, span)
            self._write_tables()

    def _length_if_needed(self, sequence: int) -> int:
        return self.length(sequence) if self.policy.min_length else 0

    # -- cutting, reordering ---------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest |tokens_to_remove| tokens of every sequence.

        Tokens of the newest block come back exact from its shadow; a deeper cut leaves a short block, never
        requantized. Raises ValueError when more is cut than there is.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the negative number of tokens to remove")
        cut = -tokens_to_remove
        if cut > self.seen:
            raise ValueError(f"crop({tokens_to_remove}) of a cache of {self.seen} tokens; remove at most {self.seen}")
        if cut == 0 or not self.is_initialized:
            return
        self.seen -= cut
        if not self.packed:
            self.keys, self.values = self.keys[:, :, :-cut].clone(), self.values[:, :, :-cut].clone()
            self.real = None if self.real is None else self.real[:, :-cut]
            return
        for sequence in range(len(self.exact)):
            self._crop_row(sequence, cut)
        self._write_tables()
        if not any(self.segments) and all(n == self.seen for n in self.exact):
            keys, values = (x[:, :, : self.seen].clone() for x in (self.exact_keys, self.exact_values))
            seen = self.seen
            self.reset()
            self.seen, self.keys, self.values = seen, keys, values

    def _crop_row(self, s: int, cut: int) -> None:
        newest = self.segments[s][-1] if self.segments[s] else None
        kept = max(0, self.exact[s] - self.held[s] - cut)
        cut -= self.exact[s] - self.held[s] - kept
        self.exact[s] = self.held[s] + kept
        if newest is not None and kept - cut < self.policy.residual_window:  # sealed too early for the shorter sequence
            if newest.page == HELD:
                self.segments[s].pop()
                self.held[s] -= newest.tokens
            elif self.shadow[s]:
                self._unseal_newest(s)
            cut_now = min(cut, self.exact[s] - self.held[s])
            self.exact[s] -= cut_now
            cut -= cut_now
        while cut and self.segments[s]:
            segment = self.segments[s].pop()
            self.shadow[s] = False
            gone = min(cut, segment.tokens)
            cut -= gone
            if segment.page == HELD:
                self.exact[s] -= gone
                self.held[s] -= segment.tokens
                if gone < segment.tokens:
                    continue
            elif gone < segment.tokens:
                self.segments[s].append(replace(segment, tokens=segment.tokens - gone))
            else:
                self._release([segment])
        self.exact[s] -= min(cut, self.exact[s])

    def _unseal_newest(self, s: int) -> None:
        """Put the newest block's exact tokens back before the tail, from its shadow, and free its page."""
        held, end, block = self.held[s], self.exact[s], self.policy.block
        self._make_room(end + block)
        for buffer, shadow in ((self.exact_keys, self.shadow_keys), (self.exact_values, self.shadow_values)):
            buffer[s, :, held + block : end + block] = buffer[s, :, held:end].clone()
            buffer[s, :, held : held + block] = shadow[s]
        self.exact[s] += block
        self._release([self.segments[s].pop()])
        self.shadow[s] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order; a sequence named twice shares its pages by reference count."""
        if not self.packed:
            if self.keys is not None:
                at = indices.to(self.device)
                self.keys, self.values = self.keys[at], self.values[at]
                self.real = None if self.real is None else self.real[at]
            return
        order = indices.tolist()
        old = [segment for sequence in self.segments for segment in sequence]
        self.segments = [list(self.segments[i]) for i in order]
        self.pool.share(s.page for sequence in self.segments for s in sequence if s.page != HELD)
        self._release(old)
        self.exact, self.held, self.shadow = ([x[i] for i in order] for x in (self.exact, self.held, self.shadow))
        at = indices.to(self.device)
        self.exact_keys, self.exact_values = self.exact_keys[at], self.exact_values[at]
        if self.shadow_keys is not None:
            self.shadow_keys, self.shadow_values = self.shadow_keys[at], self.shadow_values[at]
        self._write_tables()

    # -- storage ---------------------------------------------------------------------------------------------------

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors held outside the pool, by the ledger's names."""
        named = {
            "exact": [self.keys, self.values, self.exact_keys, self.exact_values],
            "rollback": [self.shadow_keys, self.shadow_values],
            "tables": [self.pages, self.tokens, self.exact_lengths, self.real],
        }
        return {name: [t for t in tensors if t is not None] for name, tensors in named.items()}

    def _make_packed(self, batch: int, like: Tensor) -> None:
        policy, shape = self.policy, (like.shape[1], self.layout.head_dim)
        capacity = policy.exact_tokens + policy.block
        self.exact_keys, self.exact_values = (like.new_empty(batch, shape[0], capacity, shape[1]) for _ in "kv")
        if policy.rollback:
            self.shadow_keys, self.shadow_values = (like.new_zeros(batch, shape[0], policy.block, shape[1]) for _ in "kv")
        self.segments = [[] for _ in range(batch)]
        self.exact, self.held, self.shadow = [0] * batch, [0] * batch, [False] * batch
        self.packed = True

    def _make_room(self, tokens: int) -> None:
        capacity = self.exact_keys.shape[2]
        if tokens > capacity:
            grown = -(-tokens // self.policy.block) * self.policy.block
            for name in ("exact_keys", "exact_values"):
                old = getattr(self, name)
                new = old.new_empty(old.shape[0], old.shape[1], max(grown, capacity), old.shape[3])
                new[:, :, :capacity] = old
                setattr(self, name, new)

    def _append_row(self, s: int, keys: Tensor, values: Tensor) -> None:
        start, end = self.exact[s], self.exact[s] + keys.shape[1]
        self._make_room(end)
        self.exact_keys[s, :, start:end], self.exact_values[s, :, start:end] = keys, values
        self.exact[s] = end

    def _cut_out(self, s: int, span: slice) -> None:
        for buffer in (self.exact_keys, self.exact_values):
            rest = buffer[s, :, span.stop : self.exact[s]].clone()
            buffer[s, :, span.start : span.start + rest.shape[1]] = rest
        self.exact[s] -= span.stop - span.start

    def _keep_shadow(self, s: int, keys: Tensor, values: Tensor) -> None:
        if self.shadow_keys is not None:
            self.shadow_keys[s], self.shadow_values[s] = keys, values
            self.shadow[s] = True

    def _seal(self, sequences: list[int], keys: Tensor, values: Tensor) -> list[Segment]:
        """One new segment for each block [blocks, kv_heads, block, head_dim]; blocks that must stay exact are HELD."""
        block, counts, starts = self.policy.block, dict.fromkeys(sequences, 0), []
        for s in sequences:
            before = self.segments[s][-1] if self.segments[s] else None
            first = self.policy.sink_tokens if before is None else before.start + before.tokens
            starts.append(first + block * counts[s])
            counts[s] += 1
        allowed = [self.pack_ranges is None or start in self.pack_ranges[s] for s, start in zip(sequences, starts)]
        chosen = [i for i, ok in enumerate(allowed) if ok]
        pages = [HELD] * len(sequences)
        if chosen:
            if len(chosen) < len(sequences):
                keys, values = keys[chosen], values[chosen]
            taken = self.pool.take(len(chosen))
            at = torch.tensor(taken, dtype=torch.int32, device=self.device)
            fits = self.backend.seal(keys, values, self.layout, self.pool.arena, at).tolist()
            checksums = self.backend.checksum(self.pool.arena, at)
            header = headers(self.identity, self.index, self.layout, [starts[i] for i in chosen], [block] * len(chosen), checksums)
            self.pool.arena[at.long(), :HEADER_BYTES] = header
            for i, page, ok in zip(chosen, taken, fits):
                pages[i] = page if ok else HELD
            self.pool.release([page for page, ok in zip(taken, fits) if not ok])
        return [Segment(page, start, block) for page, start in zip(pages, starts)]

    def _release(self, segments: list[Segment]) -> None:
        self.pool.release([s.page for s in segments if s.page != HELD])

    def _write_tables(self) -> None:
        live = [[s for s in sequence if s.page != HELD] for sequence in self.segments]
        columns = list(zip_longest(*live, fillvalue=Segment(0, 0, 0)))
        shape = (len(columns), len(live))
        pages = torch.tensor([[s.page for s in column] for column in columns], dtype=torch.int32).view(shape)
        tokens = torch.tensor([[s.tokens for s in column] for column in columns], dtype=torch.int32).view(shape)
        self.pages, self.tokens = (x.t().contiguous().to(self.device) for x in (pages, tokens))
        self.exact_lengths = torch.tensor(self.exact, dtype=torch.int32, device=self.device)
