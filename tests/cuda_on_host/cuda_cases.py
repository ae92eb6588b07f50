"""An instantiation of the CUDA kernels, and what it must hold. Shared by the run on the host, by the compilation with
NVRTC, and by tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvdrift.kernels import cuda, definition
from kvdrift.layout import HEADER_BYTES, BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One instantiation, and the query tokens that are asked of it at once; a group of 0 is a whole row (a block for
    channel-major keys). `covering` has the choices."""

    key: str
    key_group: int
    value: str
    value_group: int
    head_dim: int
    block: int
    share: int
    dtype: str
    scale: str
    queries: int = 1

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def quantizer(self, kind: str, group: int) -> Quantizer | None:
        if kind == "exact":
            return None
        if kind == "fp8":
            return Quantizer("fp8_e4m3", 8, "token", group, self.scale)
        if kind.startswith("channel"):
            return Quantizer("uniform", int(kind[-1]), "channel", group or self.block, self.scale)
        return Quantizer("uniform", int(kind[-1]), "token", group, self.scale)

    def layout(self, kv_heads: int = 2) -> BlockLayout:
        layer = LayerPolicy(self.quantizer(self.key, self.key_group), self.quantizer(self.value, self.value_group))
        return block_layout(layer, self.block, kv_heads, self.head_dim, self.torch_dtype.itemsize)


def awkward_blocks(case: Case, kv_heads: int, seed: int = 0) -> Tensor:
    """Blocks [blocks, kv_heads, block, head_dim] of what breaks quantizers, one kind a block; strides as in a model."""
    generator = torch.Generator().manual_seed(seed)
    dtype = case.torch_dtype
    x = torch.randn(14, case.block, kv_heads, case.head_dim, generator=generator)
    x[1, ..., 7] *= 50  # an outlier channel
    diagonal = (torch.arange(case.block)[:, None, None] + torch.arange(case.head_dim)) % 8  # all in each group of 8
    for i, levels in enumerate((3, 15, 255, 448)):  # ties in rounding: a scale of 1, and halves
        ties = torch.randint(0, 2 * levels + 1, x[0].shape, generator=generator) / 2
        x[2 + i] = ties.where(diagonal != 0, 0.0).where(diagonal != 4, float(levels))
    x[6] = 0.0
    x[7, :, 0] = -0.3125  # a constant
    x[8] = torch.where(x[8] > 0, 60000.0, -60000.0)  # a span that float16 can't hold
    x[9] *= torch.finfo(dtype).smallest_normal * 8  # subnormals and scales that vanish
    x[10] = x[10].abs().where(diagonal != 0, -1e-9)  # a low that rounds to float16's negative zero
    x[11, 3, 1, 5] = float("nan")
    x[12, 2, 0, 1] = float("inf")
    x[13] = torch.where(x[13].abs() < 0.1, -0.0, x[13] * torch.finfo(dtype).max / 8)
    return x.to(dtype).transpose(1, 2)


def unaligned(x: Tensor) -> Tensor:
    """The same numbers, two apart in memory and from an odd place on."""
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def check_pages(case: Case, device: str, arrange: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """seal, label, unseal and checksum equal the definition's on a CPU, byte for byte."""
    layout = case.layout()
    keys, values = arrange(awkward_blocks(case, 2)), awkward_blocks(case, 2, seed=1)
    pages = torch.randperm(15, generator=torch.Generator().manual_seed(2))[: len(keys)].int()
    blank = torch.full((15, layout.page_bytes), 0xA5, dtype=torch.uint8)
    expected, sealed = blank.clone(), blank.to(device)
    fits = definition.seal(keys, values, layout, expected, pages)
    got = cuda.seal(keys.to(device), values.to(device), layout, sealed, pages.to(device))
    assert torch.equal(got.cpu(), fits)
    assert torch.equal(sealed[:, :HEADER_BYTES].cpu(), blank[:, :HEADER_BYTES])
    assert fits.any()
    kept = pages[fits]
    wrong = (sealed.cpu()[kept.long()] != expected[kept.long()]).nonzero()
    assert not len(wrong), f"first wrong (block, byte): {wrong[:4].tolist()}, of {len(wrong)}"

    arena = expected.to(device)
    for ours, meant in zip(
        cuda.unseal(layout, arena, kept.to(device), case.torch_dtype),
        definition.unseal(layout, expected, kept, case.torch_dtype),
        strict=True,
    ):
        assert torch.equal(ours.cpu().view(torch.int32), meant.contiguous().view(torch.int32))
    assert torch.equal(cuda.checksum(arena, kept.to(device)).cpu(), definition.checksum(expected, kept))
    headers = torch.arange(HEADER_BYTES, dtype=torch.uint8).repeat(len(kept), 1)
    cuda.label(arena, kept.to(device), headers)
    definition.label(expected, kept, headers)
    assert torch.equal(arena.cpu(), expected)


def check_attention(
    case: Case,
    device: str,
    blocks: int = 3,
    capacity: int = 40,
    arrange: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """decode_attention against float64 over the decoded values: short and absent blocks, ragged exact tails."""
    kv_heads, sequences, queries, dtype = 2, 2, case.queries, case.torch_dtype
    layout = case.layout(kv_heads)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys = normal(blocks + 1, kv_heads, case.block, case.head_dim)
    keys[..., 7] *= 8
    values = normal(blocks + 1, kv_heads, case.block, case.head_dim) + 1
    arena = torch.zeros(blocks + 1, layout.page_bytes, dtype=torch.uint8)
    definition.seal(keys.to(dtype), values.to(dtype), layout, arena, torch.arange(blocks + 1).int())
    pages = torch.stack([torch.arange(blocks, 0, -1), torch.arange(blocks)]).int()
    tokens = torch.full((sequences, blocks), case.block, dtype=torch.int32)
    tokens[1, -1] = case.block - 5
    tokens[1, 0], pages[1, 0] = 0, -1
    exact = [normal(sequences, capacity, kv_heads, case.head_dim).to(dtype).transpose(1, 2) for _ in range(2)]
    lengths = torch.tensor([capacity, queries], dtype=torch.int32)
    for tensor in exact:
        tensor[1, :, queries:] = float("nan")  # beyond the length: must not be read
    query = normal(sequences, queries, kv_heads * case.share, case.head_dim).to(dtype).transpose(1, 2)
    scaling = case.head_dim**-0.5

    args = (arena, pages, tokens, *map(arrange, exact), lengths)
    out = cuda.decode_attention(arrange(query).to(device), layout, *(arg.to(device) for arg in args), scaling)
    meant, logits = attention64(query, layout, *args, scaling)
    assert out.dtype == dtype
    assert out.shape == query.shape
    # TF32 products of numbers split in two leave 2⁻²¹ of each logit; then one rounding to the output's dtype. The bound
    # is that of `cuda`, and tighter: the largest answer for the largest value, as values are around 1, and a logit for
    # the sum of what it is made of.
    largest = meant.abs().amax()
    bound = largest * (2**-20 * (8 + logits) + torch.finfo(dtype).eps / 2)
    assert (out.cpu().double() - meant).abs().amax() <= bound


def length_error(blocks: int, device: str) -> tuple[float, float]:
    """How far one query's answer over this many blocks of 64 tokens is from float64, and how far it may be."""
    case = Case("channel4", 32, "token4", 32, 64, 64, 3, "float32", "float16")
    layout, generator = case.layout(kv_heads=1), torch.Generator().manual_seed(0)
    keys, values = (torch.randn(blocks, 1, 64, 64, generator=generator) for _ in range(2))
    arena = torch.zeros(blocks, layout.page_bytes, dtype=torch.uint8)
    pages = torch.arange(blocks).int()
    definition.seal(keys, values, layout, arena, pages)
    tail = [torch.randn(1, 1, 1, 64, generator=generator) for _ in range(2)]
    query = torch.randn(1, 3, 1, 64, generator=generator)
    args = (arena, pages[None], torch.full((1, blocks), 64).int(), *tail, torch.ones(1).int())
    out = cuda.decode_attention(query.to(device), layout, *(arg.to(device) for arg in args), 0.125)
    meant, logits = attention64(query, layout, *args, 0.125)
    return float((out.cpu().double() - meant).abs().max()), 2**-20 * (8 + logits) * float(values.abs().max())


def attention64(
    query: Tensor, layout: BlockLayout, arena: Tensor, pages: Tensor, tokens: Tensor,
    exact_keys: Tensor, exact_values: Tensor, exact_lengths: Tensor, scaling: float,
) -> tuple[Tensor, float]:  # fmt: skip
    """Attention in float64 over decoded values, sequence by sequence, and the largest logit."""
    out = torch.empty(query.shape, dtype=torch.float64)
    largest, share, queries = 0.0, query.shape[1] // layout.kv_heads, query.shape[2]
    for s in range(len(query)):
        parts = []
        for page, count in zip(pages[s], tokens[s].tolist(), strict=True):
            if count:
                parts.append([x[0, :, :count] for x in definition.unseal(layout, arena, page[None], query.dtype)])
        length = int(exact_lengths[s])
        parts.append([exact_keys[s, :, :length], exact_values[s, :, :length]])
        keys, values = (torch.cat([part[i].double() for part in parts], dim=1) for i in range(2))
        for head in range(query.shape[1]):
            for i in range(queries):
                seen = keys.shape[1] - (queries - 1 - i)
                logits = keys[head // share, :seen] @ query[s, head, i].double() * scaling
                out[s, head, i] = logits.softmax(0) @ values[head // share, :seen]
                largest = max(largest, float(logits.abs().max()))
    return out, largest
