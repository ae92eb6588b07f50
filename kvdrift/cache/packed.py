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
from kvdrift.cache.pages import Pages
from kvdrift.layout import layer_layouts
from kvdrift.ledger import CacheShape, Ledger
from kvdrift.policy import CachePolicy, PolicyError, packed_blocks


class PackedCache(Cache):
    """A cache under `policy` for a model of this `config`.

    Layers that can't be packed (sliding window, linear attention) keep Transformers' own cache and are listed in
    `unpacked`. With `batch` and `max_tokens` the pages are allocated once, and a block that finds none raises
    PoolExhausted, before anything changes; without, pools grow. `dtype` is the model's, where its config doesn't say.
    `pack_ranges[layer]` confines packing to cells.

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
        if (batch is None) != (max_tokens is None):
            raise PolicyError(
                f"batch is {batch} and max_tokens is {max_tokens}; pass both, to reserve pages, or neither"
            )
        text = config.get_text_config(decoder=True)
        self.shape = CacheShape.from_config(text.to_dict(), dtype=str(dtype or text.dtype or torch.get_default_dtype()))
        self.policy = policy.bind(self.shape.layers, self.shape.head_dim)
        layouts = layer_layouts(self.policy, self.shape.kv_heads, self.shape.head_dim, self.shape.dtype_bytes)
        layers: list[Any] = DynamicCache(config=config).layers
        self.unpacked = {
            i: type(layer).__name__ for i, layer in enumerate(layers) if type(layer) is not DynamicLayer and layouts[i]
        }
        packs = {i: x for i, x in enumerate(layouts[: len(layers)]) if x is not None and i not in self.unpacked}
        blocks = None if batch is None or max_tokens is None else batch * packed_blocks(self.policy, max_tokens)
        self.pages = Pages({i: layout.page_bytes for i, layout in packs.items()}, blocks)
        identity = identity or Identity(version=self.policy.id)
        for i, layout in packs.items():
            layers[i] = PackedLayer(i, self.policy, layout, identity, self.pages, (pack_ranges or {}).get(i))
        super().__init__(layers=layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Transformers' own, which an exact layer ahead of all packed ones must be able to take back."""
        self.pages.note(layer_idx, self.layers[layer_idx])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest |tokens_to_remove| tokens; what can't be (too many, a full sliding window) raises first."""
        held = min((layer.get_seq_length() for layer in self.packed_layers), default=-tokens_to_remove)
        if -tokens_to_remove > held:
            raise ValueError(f"crop({tokens_to_remove}) of a cache of {held} tokens; remove at most {held}")
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, PackedLayer)):
            layer.crop(tokens_to_remove)

    @property
    def packed_layers(self) -> list[PackedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def escalated_blocks(self) -> int:
        """Blocks that stay exact because their format can't hold them."""
        return sum(layer.escalated_blocks for layer in self.packed_layers)

    def load_layer(
        self,
        index: int,
        keys: Float[Tensor, "batch kv_heads tokens head_dim"],
        values: Float[Tensor, "batch kv_heads tokens head_dim"],
    ) -> None:
        """Take in one layer's stored exact keys and values, as an exact prefill of the same tokens would have."""
        layer, (batch, _, tokens, _) = self.layers[index], keys.shape
        if layer.get_seq_length():
            raise ValueError(f"layer {index} already holds {layer.get_seq_length()} tokens; reset() the cache first")
        layer.update(keys, values)
        if isinstance(layer, PackedLayer):
            layer.prefill(keys, values, layer.admit([tokens] * batch, tokens))

    def load(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """`load_layer` for every layer."""
        for index, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.load_layer(index, k, v)

    def ledger(self) -> Ledger:
        """The live allocation by purpose; its `format_bytes` is the sum of the storages' bytes."""
        sums = dict.fromkeys(
            (
                "reference",
                "ideal",
                "codes",
                "scales",
                "lows",
                "headers",
                "padding",
                "exact_tokens",
                "exact_room",
                "rollback",
                "tables",
            ),
            0,
        )
        for layer, quantizers in zip(self.layers, self.policy.layers, strict=False):
            if isinstance(layer, PackedLayer):
                self._count(layer, sums)
                tokens = sum(layer.length(s) for s in range(max(layer.batch_size, 0)))
            else:
                sums["exact_tokens"] += sum(t.untyped_storage().nbytes() for t in _states(layer))
                keys = getattr(layer, "keys", None)
                tokens = 0 if keys is None else keys.shape[0] * keys.shape[2]
            sums["reference"] += tokens * self.shape.token_bytes
            for quantizer in (quantizers.key, quantizers.value):
                bits = quantizer.bits if quantizer and isinstance(layer, PackedLayer) else 8 * self.shape.dtype_bytes
                sums["ideal"] += tokens * self.shape.kv_heads * self.shape.head_dim * bits // 8
        return Ledger(**sums, free_pages=self.pages.free_bytes)

    def _count(self, layer: PackedLayer, sums: dict[str, int]) -> None:
        storages = layer.storages()
        dense = 0 if layer.keys is None else layer.keys.shape[0] * layer.keys.shape[2]
        tokens = sum(layer.exact) if layer.packed else dense
        exact = tokens * self.shape.token_bytes
        sums["exact_tokens"] += exact
        sums["exact_room"] += sum(t.untyped_storage().nbytes() for t in storages["exact"]) - exact
        sums["rollback"] += sum(t.untyped_storage().nbytes() for t in storages["rollback"])
        sums["tables"] += sum(t.untyped_storage().nbytes() for t in storages["tables"])
        pages = len({s.page for row in layer.segments for s in row if s.page >= 0})
        for purpose, size in layer.layout.parts().items():
            sums[purpose] += pages * size

    def storage_bytes(self) -> int:
        """Bytes of every distinct storage held, read off the storages themselves."""
        tensors: list[Tensor] = [pool.arena for pool in self.pages.pools]
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                tensors += [t for group in layer.storages().values() for t in group]
            else:
                tensors += _states(layer)
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _states(layer: Any) -> list[Tensor]:
    """What a layer of Transformers' own holds: keys and values, or the states of linear attention."""
    return [t for t in vars(layer).values() if isinstance(t, Tensor)]
