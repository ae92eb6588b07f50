"""Time of each layer's attention. `pytest tests/measure/test_layers.py`"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvdrift.cache import attention
from kvdrift.measure.bench import Bench, Prefix
from kvdrift.measure.layers import attention_ms
from kvdrift.policy import from_dict

PACKED = from_dict({"block": 32, "key": {"bits": 4}, "value": {"bits": 4}}, "packed")


@torch.inference_mode()
def bench(model: Any) -> Bench:
    prompt = torch.randint(0, 97, (1, 128), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt, cache=cache, use_cache=True)
    return Bench(model, PACKED, Prefix(prompt, *zip(*((x.keys, x.values) for x in cache.layers), strict=True)))


def test_a_slow_layer_is_told_from_a_quick_one(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.attention

    def slow_in_layer_1(module: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02 * module.layer_idx)
        return original(module, *args, **kwargs)

    made = bench(llama)
    monkeypatch.setattr(attention, "attention", slow_in_layer_1)
    first, second = attention_ms(made, 2, 128)
    assert 0 < first < 20 < second
    assert llama.config._attn_implementation == "kvdrift"
