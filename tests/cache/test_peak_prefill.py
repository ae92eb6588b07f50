"""Peak memory of a prefill, in bytes (case 8):  pytest tests/cache/test_peak_prefill.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream import policy
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvdrift.cache.packed import PackedCache
from kvdrift.measure.memory import peak_allocation

LAYERS = 6


@pytest.fixture(scope="module")
def deep() -> Any:
    """A Llama of six layers, whose dense cache outweighs whatever one of them allocates in passing."""
    torch.manual_seed(0)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64}
    made = LlamaConfig(**shape, vocab_size=97, intermediate_size=96, num_hidden_layers=LAYERS, dtype="float32")
    model = LlamaForCausalLM(made).eval()
    model.set_attn_implementation("kvdrift")
    return model


@torch.inference_mode()
def peak(work: Callable[[], object]) -> int:
    return peak_allocation(lambda: work, torch.device("cpu"))


def fill(model: Any, cache: Any, chunks: list[Tensor]) -> Any:
    for chunk in chunks:
        model(chunk, cache=cache, logits_to_keep=1)
    return cache


@pytest.mark.parametrize("backend", ["native"], indirect=True)  # the definition decodes what it reads
@pytest.mark.parametrize(
    ("prefill", "length", "chunk"),
    [("exact", 250, 250), ("packed", 250, 250), ("exact", 450, 450), ("packed", 450, 90)],
)
def test_case_8_a_prefill_peaks_at_what_is_held_and_one_dense_layer(
    backend: str, prefill: str, length: int, chunk: int, deep: Any
) -> None:
    """Beyond the model's own work: the packed cache and one layer's keys and values. A cache that stays dense until all
    layers are there breaks the same bound."""
    chunks = list(torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(3)).split(chunk, dim=1))
    made = policy(prefill=prefill)

    def packed() -> PackedCache:
        return fill(deep, PackedCache(made, deep.config), chunks)

    def packed_at_the_end() -> PackedCache:
        layers, cache = fill(deep, DynamicCache(config=deep.config), chunks).layers, PackedCache(made, deep.config)
        cache.load([layer.keys for layer in layers], [layer.values for layer in layers])
        return cache

    with torch.inference_mode():
        cache = packed()
    assert all(layer.pool.used for layer in cache.packed_layers)
    dense_layer = cache.shape.token_bytes * length
    own = peak(lambda: deep(chunks[0], use_cache=False, logits_to_keep=1))
    bound = own + cache.storage_bytes() + dense_layer
    assert peak(packed) <= bound
    assert peak(packed_at_the_end) > bound + dense_layer
