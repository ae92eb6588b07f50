"""A PackedCache on a CUDA device: `pytest tests/gpu`. tests/cuda_on_host runs the first two checks on a host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from cache_cases import POLICIES, check_generation, check_stream
from stream import policy
from transformers import LlamaConfig, LlamaForCausalLM

from kvdrift.cache.packed import PackedCache
from kvdrift.kernels import dispatch
from kvdrift.measure.memory import peak_allocation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the packed cache runs on a CPU only"),
]
DEVICE = "cuda"
TOKENS, MIB = 4096, 1 << 20


def test_the_cuda_kernels_are_chosen() -> None:
    assert dispatch.name(torch.device(DEVICE)) == "cuda"


@pytest.mark.parametrize("name", POLICIES)
def test_a_stream_is_the_definitions_byte_for_byte(name: str) -> None:
    """Prefill, decode, chunks, growing tables and pools, rollback, a deep cut."""
    check_stream(name, DEVICE)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_pages_of_a_generation_are_the_definitions(name: str, options: dict[str, Any], llama: Any) -> None:
    check_generation(llama, name, DEVICE, **options)


# -- memory -----------------------------------------------------------------------------------------------------------


def wide() -> Any:
    """Sixteen layers whose keys and values, 128 MiB at 4,096 tokens, are more than all else that a step makes."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 16}
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **sizes, dtype="bfloat16")).to(DEVICE, torch.bfloat16).eval()
    model.set_attn_implementation("kvdrift")
    return model


def filled(model: Any, tokens: int = TOKENS) -> PackedCache:
    cache = PackedCache(policy(), model.config)
    with torch.inference_mode():
        model(torch.ones(1, tokens, dtype=torch.long, device=DEVICE), cache=cache, logits_to_keep=1)
    return cache


def requested() -> int:
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_the_allocator_holds_what_the_ledger_says() -> None:
    """Bytes asked for, not rounded; a pool's growth leaves nothing behind."""
    model = wide()
    filled(model)  # what the libraries keep for themselves
    before = requested()
    cache = filled(model)
    held, ledger = requested() - before, cache.ledger()
    assert ledger.format_bytes == cache.storage_bytes()
    assert 0 <= held - ledger.format_bytes <= MIB // 16
    assert ledger.format_bytes < 0.4 * ledger.reference


def test_a_prefill_holds_one_layer_dense_at_a_time() -> None:
    """All that it makes is less than what an exact cache would hold, to which a layer's work would come."""
    model, reference = wide(), 16 * 2 * 4 * 128 * 2 * TOKENS
    peak = peak_allocation(lambda: lambda: filled(model), torch.device(DEVICE))
    assert reference == 128 * MIB
    assert peak < reference


def test_a_decode_step_unpacks_nothing() -> None:
    """Beyond what a step over a handful of tokens makes: less than one layer's keys, decoded."""
    model = wide()

    def peak(tokens: int) -> int:
        cache = filled(model, tokens)
        one = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
        with torch.inference_mode():
            return peak_allocation(lambda: lambda: model(one, cache=cache), torch.device(DEVICE))

    assert peak(TOKENS) - peak(96) < 2 * MIB < 4 * 128 * 2 * TOKENS
