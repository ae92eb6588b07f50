"""What several rooms' tests share: a Llama small enough to run anywhere, in float32 and bfloat16."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads take the cores of tests that run beside

hypothesis.settings.register_profile("kvdrift", deadline=None, derandomize=True)
hypothesis.settings.load_profile("kvdrift")

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
"""Grouped queries, head_dim unequal to hidden/heads, and weights wide enough that attention isn't flat."""


@functools.cache
def tiny_llama(dtype: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvdrift.cache.packed  # noqa: F401  (registers the attention function)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, dtype=dtype)).to(getattr(torch, dtype)).eval()
    model.set_attn_implementation("kvdrift")
    return model


@pytest.fixture
def llama() -> Any:
    """A two-layer Llama in float32 that uses the kvdrift attention function."""
    return tiny_llama("float32")


@pytest.fixture
def llama_bf16() -> Any:
    """The same in bfloat16."""
    return tiny_llama("bfloat16")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository's stages and configuration, in which a test runs, with the smoke profile selected."""
    from clone import clone  # late: other rooms' tests need none of what it brings

    root = clone(tmp_path / "a clone")
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return root
