"""Hold one stored sequence as the cache would, and reconcile the ledger's bytes with the storages' own."""

from __future__ import annotations

from typing import Any

from kvdrift import ledger
from kvdrift.cache.block import Identity
from kvdrift.cache.pool import BlockPool
from kvdrift.cache.sealing import Binding
from kvdrift.cache.sequences import Sequences
from kvdrift.layout import layer_layouts
from kvdrift.ledger import CacheShape
from kvdrift.measure.reference import Stored
from kvdrift.policy import CachePolicy, packed_blocks


def reconcile(stored: Stored, policy: CachePolicy, shape: CacheShape) -> dict[str, Any]:
    """The ledger at this batch's length, one sequence, beside `held_bytes`: what the storages really take.

    Layers are held all at once, as in the cache. Blocks that had to stay exact (`escalated_blocks`) take more than
    the format says; `reconciled` allows for exactly that.
    """
    tokens = stored.length
    counted = ledger.account(policy, shape, tokens, 1)
    blocks, held, escalated = packed_blocks(policy, tokens), [], 0
    for index, layout in enumerate(layer_layouts(policy, shape.kv_heads, shape.head_dim, shape.dtype_bytes)):
        keys, values = (x[:1].clone() for x in stored.layer(index))
        if layout is None or not blocks:
            held += [keys, values]
            continue
        pool = BlockPool(layout.page_bytes, keys.device, blocks)
        binding = Binding(index, policy, layout, Identity(version=policy.id))
        sequences = Sequences(binding, pool, keys)
        sequences.fill([(keys[0], values[0])])
        escalated += sum(segment.page < 0 for segment in sequences.segments[0])
        tables = [sequences.tables.both, sequences.exact.on_device]
        held += [pool.arena, sequences.exact.both, *sequences.shadows.tensors, *tables]
    held_bytes = sum(t.untyped_storage().nbytes() for t in held)
    exact_bytes = escalated * policy.block * shape.token_bytes
    return counted.to_dict() | {
        "tokens": tokens,
        "held_bytes": held_bytes,
        "escalated_blocks": escalated,
        "reconciled": held_bytes == counted.format_bytes + exact_bytes,
    }
