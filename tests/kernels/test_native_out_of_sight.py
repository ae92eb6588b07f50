"""The native kernels: what a query does not see does not touch it, be it NaN, Inf or merely large."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_in_float64 import attention
from cuda_cases import Case
from not_finite import BAD, CASES, before_the_first_token, check, infinitely_low, problem, spoiled, spoiled_queries

from kvdrift.kernels import compiler
from kvdrift.layout import block_layout
from kvdrift.policy import LayerPolicy, Quantizer

try:
    compiler.library()
except compiler.NativeUnavailable as error:
    pytest.skip(f"native kernels: {error}", allow_module_level=True)

from kvdrift.kernels import native

SHAPES = [(5, (37, 5), 2), (24, (90,), 1), (1, (1, 3), 0), (1, (1, 3), 2)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize(("queries", "lengths", "blocks"), SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_spoils_only_the_queries_that_see_it(
    case: Case, queries: int, lengths: tuple[int, ...], blocks: int, tensor: str, bad: str
) -> None:
    every = 7 if queries > 5 else 1
    for what, given in list(spoiled(problem(case, queries, lengths, blocks), tensor, BAD[bad]))[::every]:
        check(what, given, "cpu", kernels=native)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_query_spoils_only_itself(case: Case, bad: str) -> None:
    for what, given in spoiled_queries(case, BAD[bad]):
        check(what, given, "cpu", kernels=native)


@pytest.mark.parametrize("blocks", [0, 2])
def test_queries_before_the_first_token(blocks: int) -> None:
    """Queries that see nothing are NaN; those that see packed blocks alone are not. The others see what they see."""
    for what, given in before_the_first_token(blocks):
        check(what, given, "cpu", kernels=native)


def test_an_infinite_value_whose_weight_is_zero() -> None:
    """A run of tokens that score −∞: their weights are zeros, and zero times infinity is NaN."""
    whole = infinitely_low(problem(CASES[0], queries=1, lengths=(1,)))
    check("finite values", whole, "cpu", kernels=native)
    check("infinite values", replace(whole, values=whole.values * float("inf")), "cpu", kernels=native)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("scale", ["float16", "float32"])
def test_large_numbers_behind_a_short_block_are_out_of_sight(bits: int, group: int, axis: str, scale: str) -> None:
    """Whatever lies behind a block's last token takes no precision from what is seen."""
    torch.manual_seed(0)
    seen = 32 if axis == "channel" else 30  # up to the end of a channel's first group, whose scale they share
    largest = {"float16": 6e4, "float32": 1e30}[scale]
    keys, values = torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64)
    values[:, :, seen:] *= largest / 8
    if axis == "token" or group:
        keys[:, :, seen:] *= largest / 8
    key = Quantizer(bits=bits, axis=axis, group=group or 64, scale_dtype=scale)
    layout = block_layout(LayerPolicy(key, Quantizer(bits=bits, group=group, scale_dtype=scale)), 64, 2, 64, 4)
    arena, pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    assert native.seal(keys, values, layout, arena, pages).all()
    tokens, lengths = torch.tensor([[seen]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    exact = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64)
    arguments = (torch.randn(1, 6, 1, 64), layout, arena, pages[None], tokens, *exact, lengths, 0.125)
    out = native.decode_attention(*arguments)
    assert (out.double() - attention(*arguments)[0]).abs().max() < 5e-6
