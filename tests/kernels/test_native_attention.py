"""Attention over packed blocks and exact tokens: `pytest tests/kernels/test_native_attention.py`.

Native and definition are compared with float64 attention over the decoded values.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from attention_in_float64 import attention
from blocks import KIVI4, TROUBLES, layouts, spoil
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdrift.kernels import compiler, definition
from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

try:
    compiler.library()
except compiler.NativeUnavailable as error:
    pytest.skip(f"native kernels: {error}", allow_module_level=True)

from kvdrift.kernels import native

ATTENTION = (
    layouts(),
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    st.sampled_from([1, 1, 2, 16, 33]),
    st.lists(st.integers(0, 128), min_size=0, max_size=5),
    st.integers(0, 100),
    st.sampled_from([trouble for trouble in TROUBLES if trouble != "largest"]),  # as keys, their logits overflow
    st.sampled_from(TROUBLES),
    st.integers(0, 2**31),
)


@settings(max_examples=120, deadline=None)
@given(*ATTENTION)
def test_attention_is_near_float64(
    layout: tuple[BlockLayout, torch.dtype],
    share: int,
    queries: int,
    counts: list[int],
    spare: int,
    of_keys: str,
    of_values: str,
    seed: int,
) -> None:
    """Whole, short, skipped and absent blocks, ragged exact tails, every share, several queries, every trouble.

    What is NaN or Inf in float64 isn't finite here, and the rest is.
    """
    shape, dtype = layout
    torch.manual_seed(seed)
    blocks, heads, d = len(counts), shape.kv_heads, shape.head_dim
    arena = torch.zeros(2 * blocks + 1, shape.page_bytes, dtype=torch.uint8)
    pages = torch.randperm(2 * blocks + 1)[: 2 * blocks].int()
    troubles = of_keys, of_values
    tokens = torch.tensor([counts, counts[::-1]], dtype=torch.int32).reshape(2, blocks).clamp(max=shape.block)
    if blocks:
        sealed = (spoil(torch.randn(2 * blocks, heads, shape.block, d).to(dtype), how) for how in troubles)
        fits = native.seal(*sealed, shape, arena, pages)
        tokens *= fits.reshape(2, blocks)
    pages = torch.where(tokens > 0, pages.reshape(2, blocks), 2**30)  # a skipped block's page is never looked at
    room = queries + spare + 10
    exact = [spoil(torch.randn(2, room, heads, d).to(dtype).transpose(1, 2), how) for how in troubles]
    lengths = torch.tensor([queries + spare, queries], dtype=torch.int32)
    query = torch.randn(2, queries, heads * share, d).transpose(1, 2)
    if of_keys == "extreme":  # logits are to be numbers of float32, and none the difference of two that nearly aren't
        query /= 16
        query[..., 9] = 0.0
    arguments = (query.to(dtype), shape, arena, pages, tokens, *exact, lengths, d**-0.5)
    meant, tolerance = attention(*arguments)
    info = torch.finfo(dtype)
    rounding = meant.abs() * info.eps / 2 + info.smallest_normal * info.eps
    finite = meant.to(dtype).isfinite()  # what stands for float16's largest number may be larger than that
    for kernels in (native, definition):
        out = kernels.decode_attention(*arguments).double()
        assert torch.equal(out.isfinite(), finite)
        assert ((out - meant).abs() <= tolerance + rounding)[finite].all()


@pytest.mark.parametrize("policy", [KIVI4, LayerPolicy(Quantizer(), Quantizer())], ids=["kivi4", "int8"])
def test_case_10_error_does_not_grow_with_length(policy: LayerPolicy) -> None:
    """1k to 128k tokens, and one of them, far back, that the query looks for."""
    torch.manual_seed(0)
    layout = block_layout(policy, 64, 1, 64, 4)
    keys, values = torch.randn(2048, 1, 64, 64), torch.randn(2048, 1, 64, 64)
    needle = keys[3, 0, 11].clone()
    arena = torch.zeros(2048, layout.page_bytes, dtype=torch.uint8)
    assert native.seal(keys, values, layout, arena, torch.arange(2048, dtype=torch.int32)).all()
    query = torch.stack([torch.randn(64), 1.5 * needle])[None, :, None]
    exact, lengths = torch.randn(1, 1, 1, 64), torch.ones(1, dtype=torch.int32)
    errors = []
    for blocks in (16, 128, 2048):
        pages = torch.arange(blocks, dtype=torch.int32)[None]
        arguments = (query, layout, arena, pages, torch.full_like(pages, 64), exact, exact, lengths, 64**-0.5)
        out = native.decode_attention(*arguments)
        errors.append(float((out.double() - attention(*arguments)[0]).abs().max()))
    assert max(errors) < 5e-6, errors
    assert errors[-1] <= 2 * errors[0] + 5e-7, errors


def test_one_thread_and_two_agree() -> None:
    torch.manual_seed(0)
    layout = block_layout(KIVI4, 64, 2, 64, 4)
    x = torch.randn(40, 2, 64, 64)
    arena, pages = torch.zeros(40, layout.page_bytes, dtype=torch.uint8), torch.randperm(40).int()
    assert native.seal(x, x, layout, arena, pages).all()
    query, exact = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 8, 64)
    tokens, lengths = torch.full((1, 40), 64, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        again = torch.zeros_like(arena)
        assert native.seal(x, x, layout, again, pages).all()
        assert torch.equal(again[pages.long(), 64:], arena[pages.long(), 64:])
        outputs.append(native.decode_attention(query, layout, arena, pages[None], tokens, exact, exact, lengths, 0.125))
    assert torch.allclose(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernels", [native, definition], ids=["native", "definition"])
@pytest.mark.parametrize("share", [1, 3])
def test_what_is_not_finite_spoils_only_the_queries_that_see_it(kernels: ModuleType, share: int) -> None:
    torch.manual_seed(0)
    layout = block_layout(KIVI4, 64, 2, 64, 4)
    arena, pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    assert kernels.seal(torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64), layout, arena, pages).all()
    query, keys, values = torch.randn(1, 2 * share, 3, 64), torch.randn(1, 2, 20, 64), torch.randn(1, 2, 20, 64)

    def answer(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tables = pages[None], torch.tensor([[64]], dtype=torch.int32)
        return kernels.decode_attention(
            query, layout, arena, *tables, keys, values, torch.tensor([20], dtype=torch.int32), 0.125
        )

    clean = answer(keys, values)
    for spoiled, bad in ((keys, "nan"), (values, "nan"), (values, "inf")):
        tensors = [x.clone() for x in (keys, values)]
        tensors[spoiled is values][:, :, -1] = float(bad)
        out = answer(*tensors)
        assert torch.equal(out[:, :, :2], clean[:, :, :2])
        assert not out[:, :, 2].isfinite().any()
