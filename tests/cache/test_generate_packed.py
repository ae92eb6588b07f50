"""`generate()` over packed pages against dense attention that reads decoded values:
pytest tests/cache/test_generate_packed.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stream import decoded, packed_until
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvdrift.cache.packed import PackedCache
from kvdrift.policy import CachePolicy, from_dict

KEYS, VALUES = {"bits": 4, "axis": "channel", "group": 32}, {"bits": 4, "axis": "token", "group": 32}
EIGHT = {"bits": 8}
"""The second layer's: what rounding in the first may do to a code there is small beside the first's own error."""
PADS = 23


def policy(prefill: str) -> CachePolicy:
    layers = [{"key": KEYS, "value": VALUES}, {"key": EIGHT, "value": EIGHT}]
    return from_dict(
        {"layers": layers, "block": 32, "sink_tokens": 4, "residual_window": 12, "prefill": prefill}, "test"
    )


def prompt() -> dict[str, Tensor]:
    """Two rows of 100 tokens, the first left-padded."""
    ids = torch.randint(1, 97, (2, 100), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :PADS] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, name: str = "cache", **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"max_new_tokens": 14, "do_sample": False, name: cache, **options}
    return model.generate(**prompt(), **options, return_dict_in_generate=True, output_logits=True)


def attention_over_decoded(made: CachePolicy) -> Callable[..., tuple[Tensor, None]]:
    """Transformers' attention interface: query by query in float64, over keys and values decoded before P(p)."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        columns, new = key.shape[2], query.shape[2]
        layer = replace(made, layers=made.layers[module.layer_idx : module.layer_idx + 1])
        exact = new == columns and made.prefill == "exact"
        out = torch.zeros_like(query)
        for s in range(len(query)):
            real = torch.ones(columns, dtype=torch.bool) if mask is None else mask[s, 0, -1]
            k, v = key[s][:, real], value[s][:, real]
            read_k, read_v = decoded(layer, k, v)
            first = int(real[: columns - new].sum())
            for p, at in enumerate(real[columns - new :].nonzero().flatten().tolist(), start=first):
                until = (
                    0 if exact else min(p, packed_until(made, p))
                )  # sinks and what is short of a block decode as they are
                keys, values = (
                    torch.cat([x[:, :until], y[:, until : p + 1]], 1).double().repeat_interleave(2, 0)
                    for x, y in ((read_k, k), (read_v, v))
                )
                weights = (query[s, :, at : at + 1].double() @ keys.transpose(1, 2) * scaling).softmax(-1)
                out[s, :, at : at + 1] = (weights @ values).to(out.dtype)
        return out.transpose(1, 2), None

    return attend


def generate_over_decoded(model: Any, made: CachePolicy, **options: Any) -> Any:
    """`generate()` with Transformers' own cache and the attention above."""
    AttentionInterface.register("over_decoded", attention_over_decoded(made))
    AttentionMaskInterface.register("over_decoded", sdpa_mask)
    model.set_attn_implementation("over_decoded")
    try:
        return generate(model, DynamicCache(config=model.config), **options)
    finally:
        model.set_attn_implementation("kvdrift")


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("prefill", ["exact", "packed"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
def test_packed_pages_generate_what_dense_attention_over_decoded_values_does(
    backend: str, prefill: str, options: dict[str, Any], llama: Any
) -> None:
    """Both prefills, blocks that age in the prompt and while decoding, under either name of the argument. The logits of
    the two prefills are 1.8 apart; a code of the second layer that rounds the other way moves them by 0.01."""
    made, beams = policy(prefill), options.get("num_beams", 1)
    cache = PackedCache(made, llama.config)
    ours = generate(llama, cache, **options)
    for layer in cache.packed_layers:
        assert [len(row) for row in layer.segments] == [2] * beams + [3] * beams
        assert layer.pool.used == len({segment.page for row in layer.segments for segment in row}) >= 5
    theirs = generate_over_decoded(llama, made, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all((a - b).abs().max() < 0.1 for a, b in zip(ours.logits, theirs.logits, strict=True))
    with pytest.warns(FutureWarning, match="past_key_values"):
        older = generate(llama, PackedCache(made, llama.config), "past_key_values", **options)
    assert torch.equal(ours.sequences, older.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, older.logits, strict=True))
