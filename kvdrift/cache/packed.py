"""`PackedCache(policy, model.config)`: a Transformers cache whose aged tokens are packed pages.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvdrift")
    model.generate(**inputs, cache=PackedCache(policy, model.config))

Import this module before loading the model with `attn_implementation="kvdrift"`: it registers the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvdrift.cache import attention
from kvdrift.cache.block import Identity
from kvdrift.cache.layer import PackedLayer
from kvdrift.cache.pool import BlockPool
from kvdrift.layout import HEADER_BYTES, BlockLayout, layer_layouts
from kvdrift.ledger import CacheShape, Ledger
from kvdrift.policy import CachePolicy, PolicyError, packed_blocks


class PackedCache(Cache):
    """A cache under `policy` for a model of this `config`.

    Layers that can't be packed (sliding window, linear attention) keep Transformers' own cache and are listed in
    `unpacked`. With `batch` and `max_tokens` the pages are allocated once, exactly, and running past them raises
    PoolExhausted; without, pools grow. `dtype` is the model's, where its config doesn't say. `pack_ranges[layer]`
    confines packing to cells.

    Raises PolicyError when the policy doesn't fit the shape, ValueError when the model doesn't use the kvdrift
    attention function.
    """

    def __init__(
        self,
        policy: CachePolicy,
        config: Any,
        *,
        batch: int | None = None,
        max_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        identity: Identity | None = None,
        pack_ranges: dict[int, Sequence[range]] | None = None,
    ) -> None:
        implementation = getattr(config, "_attn_implementation", None)
        if implementation != attention.NAME:
            raise ValueError(
                f"the model's attn_implementation is {implementation!r}; load it with attn_implementation="
                f"{attention.NAME!r}, or call model.set_attn_implementation({attention.NAME!r})"
            )
        text = config.get_text_config(decoder=True)
        self.shape = CacheShape.from_config(text.to_dict(), dtype=str(dtype or text.dtype or torch.get_default_dtype()))
        self.policy = policy.bind(self.shape.layers, self.shape.head_dim)
        layouts = layer_layouts(self.policy, self.shape.kv_heads, self.shape.head_dim, self.shape.dtype_bytes)
        layers: list[Any] = DynamicCache(config=config).layers or [DynamicLayer() for _ in layouts]
        self.unpacked = {
            i: type(layer).__name__ for i, layer in enumerate(layers) if type(layer) is not DynamicLayer and layouts[i]
        }
        packs = [i for i, layout in enumerate(layouts) if layout is not None and i not in self.unpacked]
        sizes = [layout.page_bytes if layout is not None else 0 for layout in layouts]
        if (batch is None) != (max_tokens is None):
            raise PolicyError(f"batch is {batch} and max_tokens is {max_tokens}; pass both, to reserve pages, or neither")
        self._capacity: dict[int, int] | None = None
        if batch is not None and max_tokens is not None:
            blocks = batch * packed_blocks(self.policy, max_tokens)
            self._capacity = {size: blocks * sum(sizes[i] == size for i in packs) for size in {sizes[i] for i in packs}}
        self._pools: dict[int, BlockPool] = {}
        for i in packs:
            peers = sum(sizes[j] == sizes[i] for j in packs if j >= i)
            ranges = (pack_ranges or {}).get(i)
            layers[i] = self._layer(i, layouts[i], peers, identity or Identity(version=self.policy.id), ranges)
        super().__init__(layers=layers)

    def _layer(
        self, index: int, layout: BlockLayout, peers: int, identity: Identity, ranges: Sequence[range] | None
    ) -> PackedLayer:
        size = layout.page_bytes
        return PackedLayer(index, self.policy, layout, lambda device: self._pool(size, device), peers, identity, ranges)

    def _pool(self, page_bytes: int, device: torch.device) -> BlockPool:
        if page_bytes not in self._pools:
            capacity = None if self._capacity is None else self._capacity[page_bytes]
            self._pools[page_bytes] = BlockPool(page_bytes, device, capacity)
        return self._pools[page_bytes]

    @property
    def packed_layers(self) -> list[PackedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def escalated_blocks(self) -> int:
        """Blocks that stay exact because their format can't hold them."""
        held = [s for layer in self.packed_layers for row in layer.segments for s in row if s.page < 0]
        return len(held)

    def load_layer(
        self,
        index: int,
        keys: Float[Tensor, "batch kv_heads tokens head_dim"],
        values: Float[Tensor, "batch kv_heads tokens head_dim"],
    ) -> None:
        """Take in one layer's stored exact keys and values, as an exact prefill of the same tokens would have."""
        layer = self.layers[index]
        if not isinstance(layer, PackedLayer):
            layer.update(keys, values)
            return
        layer.update(keys, values)
        if layer.stays_dense(keys.shape[2]):
            layer.append_dense(keys, values, None)
        else:
            layer.start_packed(keys, values, None)

    def load(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """`load_layer` for every layer."""
        for index, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.load_layer(index, k, v)

    def ledger(self) -> Ledger:
        """The live allocation by purpose; its `format_bytes` is the sum of the storages' bytes."""
        sums = dict.fromkeys(
            ("reference", "ideal", "codes", "scales", "lows", "headers", "padding", "exact_tokens", "exact_room", "rollback", "tables"), 0
        )
        for layer, quantizers in zip(self.layers, self.policy.layers):
            if isinstance(layer, PackedLayer):
                self._count(layer, sums)
                tokens = sum(layer.length(s) for s in range(max(layer.batch_size, 0)))
            else:
                held = [t for t in (layer.keys, layer.values) if t is not None]
                sums["exact_tokens"] += sum(t.untyped_storage().nbytes() for t in held)
                tokens = held[0].shape[0] * held[0].shape[2] if held else 0
            sums["reference"] += tokens * self.shape.token_bytes
            for quantizer in (quantizers.key, quantizers.value):
                bits = quantizer.bits if quantizer and isinstance(layer, PackedLayer) else 8 * self.shape.dtype_bytes
                sums["ideal"] += tokens * self.shape.kv_heads * self.shape.head_dim * bits // 8
        return Ledger(**sums, free_pages=sum(pool.free * pool.page_bytes for pool in self._pools.values()))

    def _count(self, layer: PackedLayer, sums: dict[str, int]) -> None:
        storages = layer.storages()
        tokens = sum(layer.exact) if layer.packed else (layer.keys.shape[0] * layer.keys.shape[2] if layer.keys is not None else 0)
        exact = tokens * self.shape.token_bytes
        sums["exact_tokens"] += exact
        sums["exact_room"] += sum(t.untyped_storage().nbytes() for t in storages["exact"]) - exact
        sums["rollback"] += sum(t.untyped_storage().nbytes() for t in storages["rollback"])
        sums["tables"] += sum(t.untyped_storage().nbytes() for t in storages["tables"])
        pages = {s.page for row in layer.segments for s in row if s.page >= 0}
        layout = layer.layout
        for tensor in (layout.key, layout.value):
            sums["codes"] += len(pages) * tensor.codes_bytes
            sums["scales"] += len(pages) * tensor.scales_bytes
            sums["lows"] += len(pages) * tensor.lows_bytes
        sections = sum(t.codes_bytes + t.scales_bytes + t.lows_bytes for t in (layout.key, layout.value))
        sums["headers"] += len(pages) * HEADER_BYTES
        sums["padding"] += len(pages) * (layout.page_bytes - HEADER_BYTES - sections)

    def storage_bytes(self) -> int:
        """Bytes of every distinct storage held, read off the storages themselves."""
        tensors: list[Tensor] = [pool.arena for pool in self._pools.values()]
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                tensors += [t for group in layer.storages().values() for t in group]
            else:
                tensors += [t for t in (layer.keys, layer.values) if t is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
