"""What tests/cuda_on_host checks on a host, on a CUDA device: `pytest tests/gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import pairwise
from cuda_cases import Case, check_attention, check_pages, length_error, unaligned
from not_finite import BAD, CASES, check, problem, spoiled

from kvdrift.kernels import cuda, definition

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels run on the host only"),
]


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_pages_equal_the_definition_bit_for_bit(case: Case) -> None:
    check_pages(case, "cuda")


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_attention_is_as_good_as_float32(case: Case, queries: int) -> None:
    check_attention(replace(case, queries=queries), "cuda")


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("blocks", [1, 2048])
def test_attention_error_does_not_grow_with_length(blocks: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 10: from 64 to 131,072 tokens, one bound, whether many splits or few fill the device."""
    if few:
        monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 2)
    error, allowed = length_error(blocks, "cuda")
    assert error <= allowed


def test_inputs_may_have_any_strides() -> None:
    case = Case("channel4", 32, "token4", 32, 64, 64, 3, "bfloat16", "float16")
    check_pages(case, "cuda", unaligned)
    check_attention(case, "cuda", arrange=unaligned)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize(("queries", "lengths"), [(1, (1, 3)), (5, (37, 5)), (24, (60, 90))])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_spoils_only_the_queries_that_see_it(
    case: Case, queries: int, lengths: tuple[int, ...], tensor: str, bad: str
) -> None:
    for what, given in spoiled(problem(case, queries, lengths), tensor, BAD[bad]):
        check(what, given, "cuda")


def test_runs_on_the_current_stream() -> None:
    """Work of a side stream comes after what that stream was doing."""
    case = Case("channel4", 32, "token4", 32, 64, 64, 4, "bfloat16", "float16")
    layout = case.layout()
    pages = torch.arange(64, dtype=torch.int32)
    keys = torch.randn(64, 2, 64, 64).to(torch.bfloat16)
    expected = torch.zeros(64, layout.page_bytes, dtype=torch.uint8)
    definition.seal(keys, keys, layout, expected, pages)
    arena = expected.cuda().zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        on_gpu = keys.cuda()
        cuda.seal(on_gpu, on_gpu, layout, arena, pages.cuda())
        assert torch.equal(arena.cpu(), expected)
