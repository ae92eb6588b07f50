"""One layer of the packed cache as Transformers sees it: dense until a block is due, packed sequences from then on.

`update` receives no mask, so it takes nothing in: it hands the new tokens on as an `Arrival` to the attention function,
which knows the pads, and which calls `admit` and then one of `prefill`, `append_dense` and `open`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvdrift.cache.block import Identity
from kvdrift.cache.pages import Pages
from kvdrift.cache.pool import PoolExhausted
from kvdrift.cache.sealing import HELD, Binding, Segment
from kvdrift.cache.sequences import Sequences
from kvdrift.layout import BlockLayout
from kvdrift.policy import CachePolicy, packed_blocks

__all__ = ["HELD", "Arrival", "PackedLayer", "Segment"]


@dataclass(frozen=True)
class Arrival:
    """What `update` hands to the attention function: the new tokens, which the layer hasn't taken in yet."""

    layer: PackedLayer
    keys: Float[Tensor, "batch kv_heads new head_dim"]
    values: Float[Tensor, "batch kv_heads new head_dim"]


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer under a policy.

    `pages` are the cache's. `pack_ranges[s]`, when given, is the span of logical positions in which sequence s may pack
    blocks (a cell); a block that starts outside it is held exact.
    """

    is_croppable = True
    is_sliding = False

    def __init__(
        self,
        index: int,
        policy: CachePolicy,
        layout: BlockLayout,
        identity: Identity,
        pages: Pages,
        pack_ranges: Sequence[range] | None = None,
    ) -> None:
        super().__init__()
        self.index, self.policy, self.layout = index, policy, layout
        self._binding = Binding(index, policy, layout, identity)
        self._pages, self._pack_ranges = pages, pack_ranges
        self.sequences: Sequences | None = None
        self.reset()

    # -- what Transformers asks of a layer ------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.element_size() != self.layout.dtype_bytes:
            raise ValueError(
                f"the model computes in {key_states.dtype} and its config says {8 * self.layout.dtype_bytes}-bit; "
                "pass PackedCache(…, dtype=model.dtype)"
            )
        found, expected = {(x.shape[1], x.shape[3]) for x in (key_states, value_states)}, self.layout
        if found != {(expected.kv_heads, expected.head_dim)}:
            raise ValueError(
                f"layer {self.index} has (KV heads, head_dim) of {sorted(found)} and the model's config says "
                f"{(expected.kv_heads, expected.head_dim)}; layers that differ can't be packed, serve the model exact"
            )
        self.device = key_states.device
        self.pool = self._pages.pool(self.index, self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Arrival, Arrival]:
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

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        if self.sequences is not None:
            self.sequences.release()
        self.seen = 0
        """Columns, pads included."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.sequences = None
        self.real: Bool[Tensor, "batch seen"] | None = None
        """Which columns hold a real token, once there has been a pad."""
        self._ranges = None if self._pack_ranges is None else list(self._pack_ranges)

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    @property
    def dense(self) -> list[Tensor]:
        """Keys and values while nothing is packed; empty otherwise."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    @property
    def segments(self) -> list[list[Segment]]:
        """The aged blocks of each sequence."""
        return [] if self.sequences is None else self.sequences.segments

    @property
    def exact(self) -> list[int]:
        """Exact tokens of each packed sequence, held blocks included."""
        return [] if self.sequences is None else self.sequences.exact.lengths

    @property
    def held(self) -> list[int]:
        """How many of them are sinks and held blocks."""
        return [] if self.sequences is None else self.sequences.exact.held

    @property
    def escalated_blocks(self) -> int:
        """Blocks that are held only because their format can't hold them."""
        return 0 if self.sequences is None else self.sequences.escalated_blocks

    @property
    def batch_size(self) -> int:
        if self.sequences is not None:
            return len(self.exact)
        return -1 if self.keys is None else self.keys.shape[0]

    def length(self, sequence: int) -> int:
        """Real tokens of one sequence."""
        if self.sequences is not None:
            return self.sequences.length(sequence)
        if self.keys is None:
            return 0
        return self.keys.shape[2] if self.real is None else int(self.real[sequence].sum())

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors held outside the pool, by the ledger's names."""
        real = [] if self.real is None else [self.real]
        if self.sequences is None:
            return {"exact": self.dense, "rollback": [], "tables": real}
        held = self.sequences
        tables = [held.tables.both, held.exact.on_device, *real]
        return {"exact": [held.exact.both], "rollback": held.shadows.tensors, "tables": tables}

    # -- taking tokens in ------------------------------------------------------------------------------------------

    def admit(self, counts: Sequence[int], new: int) -> int:
        """Blocks that become due when an arrival of `new` columns brings counts[s] real tokens to each sequence.

        Raises, with the layer as it was before `update`, PoolExhausted when a pool of fixed size can't hold them, and
        ValueError when the arrival isn't of the sequences that are here.
        """
        if self.batch_size not in (-1, len(counts)):
            self.seen -= new
            raise ValueError(
                f"{len(counts)} sequences arrive and the cache holds {self.batch_size}; choose with "
                "batch_select_indices or batch_repeat_interleave, or reset() it"
            )
        if self.sequences is not None:
            due = sum(self.sequences.due(s, count) for s, count in enumerate(counts))
        else:
            due = sum(packed_blocks(self.policy, self.length(s) + count) for s, count in enumerate(counts))
        try:
            self._pages.reserve(self.index, due)
        except PoolExhausted:
            self.seen -= new
            raise
        return due

    def note_columns(self, real: Bool[Tensor, "batch new"] | None, batch: int, new: int) -> None:
        """Remember which columns of an arrival are pads (None: none is)."""
        if real is not None or self.real is not None:
            past = torch.ones(batch, self.seen - new, dtype=torch.bool, device=self.device)
            now = torch.ones(batch, new, dtype=torch.bool, device=self.device) if real is None else real
            self.real = torch.cat([past if self.real is None else self.real, now], dim=1)

    def append_dense(self, keys: Tensor, values: Tensor) -> None:
        """Grow the dense tensors, exactly as Transformers' own layer does; they are never the caller's."""
        grown = zip([[x] for x in self.dense] or [[], []], (keys, values), strict=True)
        self.keys, self.values = (torch.cat([*past, new], dim=2) for past, new in grown)

    def prefill(self, keys: Tensor, values: Tensor, due: int) -> None:
        """Take in the first arrival, exact; seal the blocks that are due."""
        if due:
            self._pack(keys, values)
        else:
            self.append_dense(keys, values)

    def open(self, like: Tensor) -> Sequences:
        """The packed sequences, with what was dense in their tails; `like` gives the shape of new ones."""
        if self.sequences is None:
            self._pack(*(self.dense or [like[:, :, :0]] * 2))
        assert self.sequences is not None
        return self.sequences

    def _pack(self, keys: Tensor, values: Tensor) -> None:
        sequences = Sequences(self._binding, self.pool, keys, self._ranges)
        columns = keys.shape[2]
        picks = [slice(None)] * len(keys) if self.real is None else self.real[:, :columns]
        sequences.fill([(k[:, pick], v[:, pick]) for k, v, pick in zip(keys, values, picks, strict=True)])
        self.sequences, self.keys, self.values = sequences, None, None

    # -- cutting, reordering ---------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest |tokens_to_remove| columns of every sequence.

        Whatever lies within `rollback` tokens of the greatest length so far comes back as it was, also below
        `min_length`, where nothing is packed. A deeper cut, and cuts that add up to one, leave a short block (its
        segment says how many tokens are valid), never requantized.
        Raises ValueError when more is cut than there is.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the negative number of tokens to remove")
        cut = -tokens_to_remove
        if cut > self.seen:
            raise ValueError(f"crop({tokens_to_remove}) of a cache of {self.seen} tokens; remove at most {self.seen}")
        if cut == 0:
            return
        self.seen -= cut
        cuts = [cut] * self.batch_size if self.real is None else self.real[:, self.seen :].sum(1).tolist()
        self.real = None if self.real is None else self.real[:, : self.seen].clone()
        if self.sequences is None:
            self.keys, self.values = (x[:, :, : self.seen].clone() for x in self.dense)
            return
        self.sequences.crop(cuts)
        if not any(self.segments):
            real = self.real
            if real is None:
                real = torch.ones(self.batch_size, self.seen, dtype=torch.bool, device=self.device)
            self.keys, self.values = self.sequences.exact.to_dense(real)
            self.sequences = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order; a sequence named twice shares its pages by reference count."""
        if self.batch_size < 0:
            return
        at = indices.to(self.device)
        self._ranges = None if self._ranges is None else [self._ranges[i] for i in indices.tolist()]
        self.real = None if self.real is None else self.real[at]
        if self.sequences is not None:
            self.sequences.select(indices)
        else:
            self.keys, self.values = (x[at] for x in self.dense)
