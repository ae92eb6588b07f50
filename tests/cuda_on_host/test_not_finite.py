"""NaN and Inf in the exact tail, in queries, and where nothing is seen at all: the .cu sources on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_cases import Case, unaligned
from cuda_host import run_on_host
from not_finite import BAD, CASES, before_the_first_token, check, infinitely_low, problem, spoiled, spoiled_queries

from kvdrift.kernels import cuda, definition


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_host(monkeypatch)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_spoils_only_the_queries_that_see_it(case: Case, tensor: str, bad: str) -> None:
    for what, given in spoiled(problem(case, queries=5, lengths=(37, 5)), tensor, BAD[bad]):
        check(what, given, "cpu")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_a_token_of_a_long_chunk(tensor: str, bad: str) -> None:
    """Row tiles whose queries see none of a step, all of it, or each another part; rows that aren't aligned."""
    whole = problem(CASES[0], queries=24, lengths=(60,), blocks=1)
    for what, given in list(spoiled(whole, tensor, BAD[bad]))[::5]:
        check(what, given, "cpu", unaligned)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("blocks", [0, 2])
def test_a_tail_of_one_token(blocks: int, tensor: str, bad: str) -> None:
    """All that a split sees isn't finite: it must not pass for a split that sees nothing."""
    whole = problem(CASES[0], queries=1, lengths=(1, 3), blocks=blocks)
    for what, given in spoiled(whole, tensor, BAD[bad]):
        check(what, given, "cpu")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_query_spoils_only_itself(case: Case, bad: str) -> None:
    for what, given in spoiled_queries(case, BAD[bad]):
        check(what, given, "cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_infinite_value_whose_weight_is_zero(case: Case) -> None:
    """A split of tokens that score −∞: their weights are zeros, and zero times infinity is NaN."""
    whole = infinitely_low(problem(case, queries=1, lengths=(1,)))
    check("finite values", whole, "cpu")
    check("infinite values", replace(whole, values=whole.values * float("inf")), "cpu")


@pytest.mark.parametrize("blocks", [0, 2])
def test_queries_before_the_first_token(blocks: int) -> None:
    """Queries that see nothing are NaN; those that see packed blocks alone are not. The others see what they see."""
    for what, given in before_the_first_token(blocks):
        check(what, given, "cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_numbers_behind_a_short_block_are_out_of_sight(case: Case) -> None:
    whole = problem(case, queries=5, lengths=(5, 5))
    whole.tokens[:] = case.block // 2
    generator = torch.Generator().manual_seed(6)
    keys, values = (torch.randn(1, 2, case.block, case.head_dim, generator=generator) for _ in range(2))
    for tensor in (keys, values):
        tensor[:, :, case.block // 2 :] *= 1e4
    blocks = keys.to(case.torch_dtype), values.to(case.torch_dtype)
    assert definition.seal(*blocks, whole.layout, whole.arena, torch.zeros(1).int()).all()
    check("large", whole, "cpu")


@pytest.mark.parametrize("queries", [1, 5])
def test_many_splits_find_no_token(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 64)
    whole = problem(CASES[0], queries, lengths=(37, 5), blocks=9)
    whole.tokens[0, 1:] = 0
    check("finite", whole, "cpu")
    for tensor in ("keys", "values"):
        for what, given in list(spoiled(whole, tensor, BAD["inf"]))[:3]:
            check(what, given, "cpu")
