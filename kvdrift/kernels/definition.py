"""What the kernels mean, in plain torch: seal blocks into pages, label, unseal and check them, and attend to them.

`native` and `cuda` have the same five functions. Their codes, scales and lows equal these bit for bit; their attention
is held to float64 attention over the decoded values. Nothing here is meant to be fast.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int32, Int64, UInt8
from torch import Tensor

from kvdrift.layout import HEADER_BYTES, BlockLayout, TensorLayout
from kvdrift.policy import Quantizer
from kvdrift.quantizers import bitpack, float8, uniform
from kvdrift.quantizers.groups import Codes

SCALE_DTYPE = {"float16": torch.float16, "float32": torch.float32}


def seal(
    keys: Float[Tensor, "blocks kv_heads block head_dim"],
    values: Float[Tensor, "blocks kv_heads block head_dim"],
    layout: BlockLayout,
    arena: UInt8[Tensor, "pages page_bytes"],
    pages: Int32[Tensor, "blocks"],
) -> Bool[Tensor, "blocks"]:
    """Quantize and pack whole blocks into the given pages of the arena; headers are left alone.

    Returns which blocks fit their format. A block that doesn't (see `Codes.fits`) must be kept exact by the caller;
    the content of its page is then undefined.
    """
    payload = torch.zeros(len(pages), layout.page_bytes - HEADER_BYTES, dtype=torch.uint8, device=keys.device)
    fits = _seal_tensor(keys, layout.key, payload) & _seal_tensor(values, layout.value, payload)
    arena[pages.long(), HEADER_BYTES:] = payload
    return fits


def unseal(
    layout: BlockLayout, arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], dtype: torch.dtype
) -> tuple[Float[Tensor, "blocks kv_heads block head_dim"], Float[Tensor, "blocks kv_heads block head_dim"]]:
    """Decoded keys and values in float32. Tensors kept exact within a page are read as `dtype`, the model's."""
    content = arena[pages.long()]
    return _unseal_tensor(content, layout.key, dtype), _unseal_tensor(content, layout.value, dtype)


def checksum(arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    """64-bit checksum of each page's payload w (as little-endian uint32 words): Σ (i+1)·wᵢ in the high half, Σ wᵢ in
    the low half, each modulo 2³². Order matters, and it can be summed in any order, as in Fletcher's checksum."""
    words = arena[pages.long(), HEADER_BYTES:].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    index = torch.arange(1, words.shape[1] + 1, device=words.device)
    return (((words * index).sum(-1) & 0xFFFFFFFF) << 32) | (words.sum(-1) & 0xFFFFFFFF)


def label(
    arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], headers: UInt8[Tensor, "blocks 64"]
) -> None:
    """Write each page's header before its payload; the last 8 of its 64 bytes become the payload's checksum."""
    sums = checksum(arena, pages)[:, None].view(torch.uint8)
    arena[pages.long(), :HEADER_BYTES] = torch.cat([headers[:, : -sums.shape[1]].to(arena.device), sums], dim=1)


def decode_attention(
    query: Float[Tensor, "sequences query_heads queries head_dim"],
    layout: BlockLayout,
    arena: UInt8[Tensor, "pages page_bytes"],
    pages: Int32[Tensor, "sequences blocks"],
    tokens: Int32[Tensor, "sequences blocks"],
    exact_keys: Float[Tensor, "sequences kv_heads capacity head_dim"],
    exact_values: Float[Tensor, "sequences kv_heads capacity head_dim"],
    exact_lengths: Int32[Tensor, "sequences"],
    scaling: float,
) -> Float[Tensor, "sequences query_heads queries head_dim"]:
    """Attention of the last `queries` tokens of each sequence over its packed blocks and its exact tokens.

    `tokens[s, b]` of a block's tokens count (0: no such block; its page is ignored). All packed tokens are visible to
    every query. The exact tokens are the first `exact_lengths[s]` of the buffer, the queries' own at their end: query
    i of Q sees `exact_lengths[s] − (Q − 1 − i)` of them. Query head h reads KV head h · kv_heads // query_heads.
    Scores are computed in float32 and summed over tokens in float64, so that the error doesn't grow with the length;
    returned in the query's dtype.
    """
    sequences, query_heads, queries, _ = query.shape
    kv_heads, blocks = layout.kv_heads, pages.shape[1]
    device = query.device
    live = tokens > 0
    decoded = unseal(layout, arena, torch.where(live, pages, 0).flatten(), query.dtype)
    packed_keys, packed_values = (
        x.unflatten(0, (sequences, blocks)).transpose(1, 2).flatten(2, 3)
        if blocks
        else x.new_zeros(sequences, kv_heads, 0, layout.head_dim)
        for x in decoded
    )
    keys = torch.cat([packed_keys, exact_keys.float()], dim=2)
    values = torch.cat([packed_values, exact_values.float()], dim=2)

    in_block = torch.arange(layout.block, device=device) < tokens[..., None]
    behind = queries - 1 - torch.arange(queries, device=device)
    in_exact = torch.arange(exact_keys.shape[2], device=device) < (exact_lengths[:, None] - behind)[..., None]
    visible = torch.cat([in_block.flatten(1)[:, None].expand(-1, queries, -1), in_exact], dim=-1)

    share = query_heads // kv_heads
    scores = query.float() @ keys.repeat_interleave(share, 1).transpose(-1, -2) * scaling
    weights = scores.masked_fill(~visible[:, None], float("-inf")).double().softmax(-1)

    def answer(i: int) -> Tensor:
        seen = torch.where(visible[:, i, None, :, None], values, 0.0).double()  # 0 · ∞ is NaN
        return weights[:, :, i : i + 1] @ seen.repeat_interleave(share, 1)

    return torch.cat([answer(i) for i in range(queries)], dim=2).to(query.dtype)


def _seal_tensor(x: Tensor, layout: TensorLayout, payload: Tensor) -> Tensor:
    """Write one tensor's sections into `payload` [blocks, bytes after the header]; True where the block fits."""
    quantizer = layout.quantizer
    if quantizer is None:
        _write(payload, layout.codes, x.contiguous().view(torch.uint8))
        return x.isfinite().flatten(1).all(-1)
    rows = x.transpose(-1, -2) if layout.channel_major else x
    groups = rows.unflatten(-1, (layout.groups, layout.group))
    codes = _encode(groups, quantizer)
    _write(payload, layout.codes, bitpack.pack(codes.codes.flatten(-2), quantizer.bits))
    for offset, stored in ((layout.scales, codes.scale), (layout.lows, codes.low)):
        if stored is not None:
            _write(payload, offset, stored[..., 0].transpose(-1, -2).contiguous().view(torch.uint8))
    return codes.fits.flatten(1).all(-1)


def _encode(groups: Tensor, quantizer: Quantizer) -> Codes:
    dtype = SCALE_DTYPE[quantizer.scale_dtype]
    match quantizer.format:
        case "uniform":
            return uniform.encode(groups, quantizer.bits, dtype)
        case "fp8_e4m3":
            return float8.encode(groups, dtype)
    raise ValueError(f"no kernel packs the format {quantizer.format!r}; allowed: uniform, fp8_e4m3")


def _unseal_tensor(content: Tensor, layout: TensorLayout, dtype: torch.dtype) -> Tensor:
    heads, rows = layout.kv_heads, layout.rows
    quantizer = layout.quantizer
    codes = content[:, layout.codes : layout.codes + layout.codes_bytes].reshape(-1, heads, rows, layout.row_bytes)
    if quantizer is None:
        return codes.contiguous().view(dtype).float()

    def stored(offset: int) -> Tensor:
        section = content[:, offset : offset + layout.scales_bytes].contiguous()
        section = section.view(SCALE_DTYPE[quantizer.scale_dtype])
        return section.reshape(-1, heads, layout.groups, rows).transpose(-1, -2)[..., None]

    groups = bitpack.unpack(codes, quantizer.bits).unflatten(-1, (layout.groups, layout.group))
    if quantizer.format == "uniform":
        x = uniform.decode(groups, stored(layout.scales), stored(layout.lows))
    else:
        x = float8.decode(groups, stored(layout.scales))
    x = x.flatten(-2)
    return x.transpose(-1, -2) if layout.channel_major else x


def _write(payload: Tensor, offset: int, section: Tensor) -> None:
    start = offset - HEADER_BYTES
    flat = section.reshape(payload.shape[0], -1)
    payload[:, start : start + flat.shape[1]] = flat
