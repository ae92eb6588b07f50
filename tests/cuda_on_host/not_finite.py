"""What a NaN or Inf may spoil, by the definition: the queries that see it, and no more. Shared by the run on the host,
by tests/gpu and by tests/kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from cuda_cases import Case
from torch import Tensor

from kvdrift.kernels import cuda, definition
from kvdrift.layout import BlockLayout

CASES = (
    Case("channel4", 32, "token4", 32, 64, 64, 3, "float32", "float16"),  # both operands of a product split in two
    Case("token8", 0, "fp8", 0, 128, 32, 4, "float16", "float32"),
    Case("exact", 0, "exact", 0, 80, 64, 1, "bfloat16", "float16"),  # a lane's last column lies beyond the row
)
BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
ROOM = 7  # how many times the longest tail the buffer holds, so that some splits find no token


@dataclass(frozen=True)
class Problem:
    """The arguments of `decode_attention`."""

    layout: BlockLayout
    query: Tensor
    arena: Tensor
    pages: Tensor
    tokens: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor


def problem(case: Case, queries: int, lengths: tuple[int, ...], blocks: int = 2) -> Problem:
    """A sequence for each length of its tail; whole blocks, short ones every other sequence; NaN behind the tail."""
    layout, dtype, sequences = case.layout(), case.torch_dtype, len(lengths)
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    arena = torch.zeros(blocks + 1, layout.page_bytes, dtype=torch.uint8)
    keys, values = (normal(blocks + 1, 2, case.block, case.head_dim) for _ in range(2))
    assert definition.seal(keys, values, layout, arena, torch.arange(blocks + 1).int()).all()
    tokens = torch.full((sequences, blocks), case.block).int()
    tokens[1::2] -= 5
    tail = [normal(sequences, ROOM * max(lengths), 2, case.head_dim).transpose(1, 2) for _ in range(2)]
    for tensor in tail:
        for sequence, length in enumerate(lengths):
            tensor[sequence, :, length:] = float("nan")
    query = normal(sequences, queries, 2 * case.share, case.head_dim).transpose(1, 2)
    pages = torch.arange(blocks).int().repeat(sequences, 1)
    return Problem(layout, query, arena, pages, tokens, *tail, torch.tensor(lengths).int())


def spoiled(whole: Problem, tensor: str, bad: float) -> Iterator[tuple[str, Problem]]:
    """One token that isn't finite, in one channel or in all: each of the queries' own, and some before them."""
    queries = whole.query.shape[2]
    for back in (*range(queries), queries + 1, queries + 12):
        for channels in (slice(5, 6), slice(None)):
            x = getattr(whole, tensor).clone()
            for sequence, length in enumerate(whole.lengths.tolist()):
                if back < length:
                    x[sequence, :, length - 1 - back, channels] = bad
            yield f"{back} before the last token, {channels}", replace(whole, **{tensor: x})


def spoiled_queries(case: Case, bad: float) -> Iterator[tuple[str, Problem]]:
    """One query of a chunk that isn't finite, in one channel of one head."""
    whole = problem(case, queries=5, lengths=(37, 5))
    for query in range(5):
        x = whole.query.clone()
        x[1, case.share, query, 5] = bad
        yield f"query {query}", replace(whole, query=x)


def before_the_first_token(blocks: int) -> Iterator[tuple[str, Problem]]:
    """Queries that stand before the tail's first token, over packed blocks and over none."""
    whole = problem(CASES[0], queries=5, lengths=(2, 3), blocks=blocks)
    yield "packed blocks", whole
    yield "absent blocks", replace(whole, tokens=torch.zeros_like(whole.tokens))


def infinitely_low(whole: Problem) -> Problem:
    """Every score of the tail's last token is −∞."""
    query, keys = whole.query.clone(), whole.keys.clone()
    query[..., 5] = 1.0
    for sequence, length in enumerate(whole.lengths.tolist()):
        keys[sequence, :, length - 1, 5] = float("-inf")
    return replace(whole, query=query, keys=keys)


def check(
    what: str,
    given: Problem,
    device: str,
    arrange: Callable[[Tensor], Tensor] = lambda x: x,
    kernels: ModuleType = cuda,
) -> None:
    """Finite where the definition is finite and nowhere else, and there as near as rounding allows."""
    query, keys, values = given.query, given.keys, given.values
    paged, scaling = (given.arena, given.pages, given.tokens), given.layout.head_dim**-0.5
    meant = definition.decode_attention(query, given.layout, *paged, keys, values, given.lengths, scaling).double()
    arguments = (*paged, arrange(keys), arrange(values), given.lengths)
    out = kernels.decode_attention(arrange(query).to(device), given.layout, *(x.to(device) for x in arguments), scaling)
    out = out.cpu().double()

    finite = meant.isfinite()
    wrong = (out.isfinite() != finite).nonzero().tolist()
    first = [f"(sequence, head, query, channel) {at}: {out[tuple(at)]} for {meant[tuple(at)]}" for at in wrong[:1]]
    assert not wrong, f"{what}: {len(wrong)} places, first {first}"
    largest = float(torch.where(finite, meant, 0.0).abs().amax())
    error = float(torch.where(finite, out - meant, 0.0).abs().amax())
    assert error <= largest * (2**-17 + torch.finfo(query.dtype).eps), f"{what}: {error} beside {largest}"
