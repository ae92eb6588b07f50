"""What each layer's attention takes of a decode step, timed inside the model's own steps over the packed cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache import attention
from kvdrift.measure.bench import Bench
from kvdrift.measure.timing import milliseconds

NAME = "kvdrift_timed"
STEPS = 9


@torch.inference_mode()
def attention_ms(bench: Bench, batch: int, context: int) -> list[float]:
    """Median milliseconds of a layer's attention call, an entry a layer: it takes the new token in, seals what is due,
    and attends. Every call waits for the device, so the sum is more than a GPU's step would take."""
    step = bench.decode(bench.packed(batch, context), batch)
    step()
    with _timed(bench.model, bench.device) as times:
        for _ in range(STEPS):
            step()
    return [float(np.median(times[layer])) for layer in sorted(times)]


@contextmanager
def _timed(model: Any, device: torch.device) -> Iterator[dict[int, list[float]]]:
    """Milliseconds of every attention call inside, by layer."""
    times: dict[int, list[float]] = {}

    def timed(module: Any, *args: Any, **kwargs: Any) -> Any:
        out: list[Any] = []
        took = milliseconds(lambda: out.append(attention.attention(module, *args, **kwargs)), device)
        times.setdefault(module.layer_idx, []).append(took)
        return out[0]

    AttentionInterface.register(NAME, timed)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield times
    finally:
        model.set_attn_implementation(before)
