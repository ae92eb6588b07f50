"""The .cu sources, compiled unmodified by the host's compiler, against the definition.

`pytest tests/cuda_on_host` runs the cases that hold the most pairs of choices; `make pairwise` the rest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import pairwise
from cuda_cases import Case, attention64, check_attention, check_pages, length_error, unaligned
from cuda_host import run_on_host

from kvdrift.kernels import cuda

FAST = 20
CASES = [
    pytest.param(case, id=str(case), marks=[] if i < FAST else pytest.mark.pairwise)
    for i, case in enumerate(pairwise())
]


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_host(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_pages_equal_the_definition_bit_for_bit(case: Case) -> None:
    """CASES 4, 5, 6 and 13: ties, constants, spans beyond float16, an outlier channel, subnormals, NaN and Inf."""
    check_pages(case, "cpu")


@pytest.mark.parametrize("case", CASES)
def test_attention_is_as_good_as_float32(case: Case) -> None:
    check_attention(case, "cpu")


KIVI4 = Case("channel4", 32, "token4", 32, 64, 64, 3, "float32", "float16")


def test_attention_of_many_queries() -> None:
    """16 query tokens take several row tiles, and each sees one token more than the one before."""
    check_attention(replace(KIVI4, queries=16), "cpu", blocks=1)


def test_inputs_may_have_any_strides() -> None:
    check_pages(KIVI4, "cpu", arrange=unaligned)
    check_attention(KIVI4, "cpu", arrange=unaligned)


@pytest.mark.parametrize("blocks", [1, 128, 2048])
def test_attention_error_does_not_grow_with_length(blocks: int) -> None:
    """CASES 10: from 64 to 131,072 tokens, one bound, on a device that few splits fill."""
    error, allowed = length_error(blocks, "cpu")
    assert error < 2e-6 < allowed


@pytest.mark.parametrize("blocks", [0, 1])
def test_attention_without_packed_blocks(blocks: int) -> None:
    """No blocks, or only absent ones: the exact tail alone."""
    layout = KIVI4.layout()
    pages, tokens = torch.full((1, blocks), -1).int(), torch.zeros(1, blocks).int()
    arena = torch.zeros(0, layout.page_bytes, dtype=torch.uint8)
    tail = [torch.randn(1, 2, 100, 64) for _ in range(2)]
    query = torch.randn(1, 6, 1, 64)
    args = (arena, pages, tokens, *tail, torch.tensor([99]).int(), 0.125)
    out = cuda.decode_attention(query, layout, *args)
    assert (out.double() - attention64(query, layout, *args)[0]).abs().max() < 2e-6


def test_no_blocks_to_seal() -> None:
    layout = KIVI4.layout()
    arena, none = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.zeros(0).int()
    empty = torch.zeros(0, 2, 64, 64)
    assert cuda.seal(empty, empty, layout, arena, none).shape == (0,)
    assert cuda.unseal(layout, arena, none, torch.float32)[0].shape == (0, 2, 64, 64)
    assert cuda.checksum(arena, none).shape == (0,)
