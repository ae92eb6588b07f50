"""The measured work: caches filled from the stored reference, and steps of the model over them.

The reference path is Transformers' own `DynamicCache`; the model's attention function hands its tensors to `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache

from kvdrift.cache.packed import PackedCache
from kvdrift.policy import CachePolicy

Work = Callable[[], Any]


@dataclass(frozen=True)
class Prefix:
    """One stored prompt: its tokens and its exact keys and values."""

    tokens: Int[Tensor, "1 T"]
    keys: tuple[Float[Tensor, "1 kv_heads T d"], ...]
    values: tuple[Float[Tensor, "1 kv_heads T d"], ...]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def layer(self, index: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `tokens` tokens, repeated for `batch` sequences."""
        keys, values = (x[index][:, :, :tokens].repeat(batch, 1, 1, 1) for x in (self.keys, self.values))
        return keys, values


def read_prefix(path: Path, tokens: Int[Tensor, "batch T"], device: torch.device) -> Prefix:
    """The first prompt of a stored batch; only its rows are read."""
    with safe_open(str(path), framework="pt") as file:
        layers = sum(name.startswith("keys.") for name in file.keys())  # noqa: SIM118 (it isn't iterable)
        keys, values = (
            tuple(file.get_slice(f"{name}.{i}")[:1].to(device) for i in range(layers)) for name in ("keys", "values")
        )
    return Prefix(tokens[:1].to(device), keys, values)


@dataclass(frozen=True)
class Bench:
    """A model, a policy and a stored prompt to measure them on."""

    model: Any
    policy: CachePolicy
    prefix: Prefix
    prefill_chunk: int = 0

    @property
    def device(self) -> torch.device:
        return self.prefix.tokens.device

    def dynamic(self, batch: int, context: int) -> DynamicCache:
        """The reference path's cache, filled."""
        cache = DynamicCache(config=self.model.config)
        for index in range(len(self.prefix.keys)):
            cache.update(*self.prefix.layer(index, batch, context), index)
        return cache

    def packed(self, batch: int, context: int, room: int | None = None) -> PackedCache:
        """The candidate's cache, filled; with `room`, its pages are reserved for that many more tokens."""
        reserved = (None, None) if room is None else (batch, context + room)
        cache = PackedCache(
            self.policy, self.model.config, batch=reserved[0], max_tokens=reserved[1], dtype=self.model.dtype
        )
        for index in range(len(self.prefix.keys)):
            cache.load_layer(index, *self.prefix.layer(index, batch, context))
        return cache

    def decode(self, cache: Any, batch: int) -> Work:
        """One greedy step of `batch` sequences: feed the last token, choose the next."""
        token = self.prefix.tokens[:, -1:].repeat(batch, 1)

        @torch.inference_mode()
        def step() -> Tensor:
            nonlocal token
            logits = self.model(input_ids=token, cache=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
            return logits

        return step

    def prefill(self, cache: Work, batch: int, context: int) -> Work:
        """A whole prompt into the cache that `cache()` makes, up to the first token's logits."""
        tokens = self.prefix.tokens[:, :context].repeat(batch, 1)

        @torch.inference_mode()
        def run() -> Any:
            filled = cache()
            for chunk in tokens.split(self.prefill_chunk or context, dim=1):
                self.model(input_ids=chunk, cache=filled, use_cache=True, logits_to_keep=1)
            return filled

        return run

    def empty_dynamic(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def empty_packed(self) -> PackedCache:
        return PackedCache(self.policy, self.model.config, dtype=self.model.dtype)


def held_bytes(cache: Any) -> int:
    """Bytes of the distinct storages that a cache holds."""
    if isinstance(cache, PackedCache):
        return cache.storage_bytes()
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
