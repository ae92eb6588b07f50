"""The kernels on a CPU: C++ from `native/`, compiled on first use for this machine and called through ctypes.

The five functions mean what they mean in `definition`. Codes, scales and lows are equal bit for bit; attention is
accumulated in float32 over runs of at most 32 blocks (where the CPU has VNNI, codes are multiplied as bytes, by factors
of 24 bits). Before it is rounded to the query's dtype, it is within 2⁻²¹ · (4 + max Σ|q·k|) · max|v| + 1e-28 of float64
attention over the decoded values: 1e-5 · max|v| at usual logits. For keys per token with one group a head, whose scores
are taken apart into scale and low, Σ|q| · max|k| stands in place of Σ|q·k|.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Bool, Float, Int32, Int64, UInt8
from torch import Tensor

from kvdrift.kernels.compiler import NativeUnavailable, library
from kvdrift.layout import BlockLayout, TensorLayout

__all__ = ["NativeUnavailable", "checksum", "decode_attention", "label", "seal", "unseal"]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KINDS = {"uniform": 1, "fp8_e4m3": 2}


class _TensorSpec(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "bits", "channel_major", "scale_bytes")),
        *((name, ctypes.c_int32) for name in ("rows", "row", "groups", "row_bytes")),
        *((name, ctypes.c_int64) for name in ("codes", "scales", "lows", "end")),
    )


class _BlockSpec(ctypes.Structure):
    _fields_ = (
        ("key", _TensorSpec),
        ("value", _TensorSpec),
        *((name, ctypes.c_int32) for name in ("kv_heads", "block", "head_dim", "dtype_bytes")),
        ("page_bytes", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """The arguments of one decode_attention, in native/attention.cpp's order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("spec", "arena", "pages", "tokens", "exact_lengths")),
        *((name, ctypes.c_void_p) for name in ("query", "exact_keys", "exact_values", "out")),
        *((name, ctypes.c_int64) for name in ("sequences", "query_heads", "queries", "blocks")),
        *((name, ctypes.c_int64 * 3) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, ctypes.c_int64) for name in ("page_stride", "token_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
        ("scaling", ctypes.c_float),
    )


def _tensor_spec(layout: TensorLayout) -> _TensorSpec:
    quantizer = layout.quantizer
    if quantizer is not None and quantizer.format not in KINDS:
        raise ValueError(f"no kernel packs the format {quantizer.format!r}; allowed: {', '.join(KINDS)}")
    kind, bits, scale = (0, 0, 0) if quantizer is None else (KINDS[quantizer.format], quantizer.bits, 0)
    if quantizer is not None:
        scale = 2 if quantizer.scale_dtype == "float16" else 4
    return _TensorSpec(
        *(kind, bits, layout.channel_major, scale),
        *(layout.rows, layout.row, layout.groups, layout.row_bytes),
        *(layout.codes, layout.scales, layout.lows, layout.end),
    )


@functools.lru_cache(maxsize=256)
def _spec(layout: BlockLayout) -> tuple[_BlockSpec, int]:
    """The layout as C reads it, and its address (the struct must outlive every use of that)."""
    spec = _BlockSpec(
        _tensor_spec(layout.key),
        _tensor_spec(layout.value),
        *(layout.kv_heads, layout.block, layout.head_dim, layout.dtype_bytes, layout.page_bytes),
    )
    return spec, ctypes.addressof(spec)


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """A 4-d tensor whose last dimension is contiguous (copied only if it isn't), and the other strides in bytes."""
    first, second, third, last = x.stride()
    if last != 1:
        x = x.contiguous()
        first, second, third, _ = x.stride()
    size = x.element_size()
    return x, (first * size, second * size, third * size)


def _dtype(x: Tensor) -> int:
    try:
        return DTYPES[x.dtype]
    except KeyError:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"the native kernels read {allowed}, not {x.dtype}; cast the cache or the query") from None


def seal(
    keys: Float[Tensor, "blocks kv_heads block head_dim"],
    values: Float[Tensor, "blocks kv_heads block head_dim"],
    layout: BlockLayout,
    arena: UInt8[Tensor, "pages page_bytes"],
    pages: Int32[Tensor, "blocks"],
) -> Bool[Tensor, "blocks"]:
    """Quantize and pack whole blocks into the given pages of the arena, as `definition.seal` does."""
    dtype = _dtype(keys)
    if values.dtype != keys.dtype:
        raise TypeError(f"keys are {keys.dtype} and values {values.dtype}; a block has one dtype")
    (keys, key_strides), (values, value_strides), pages = _rows(keys), _rows(values), pages.contiguous()
    fits = torch.empty(pages.shape[0], dtype=torch.bool)
    library().kvdrift_seal(
        _spec(layout)[1],
        keys.data_ptr(),
        values.data_ptr(),
        (ctypes.c_int64 * 6)(*key_strides, *value_strides),
        dtype,
        arena.data_ptr(),
        pages.data_ptr(),
        pages.shape[0],
        fits.data_ptr(),
        torch.get_num_threads(),
    )
    return fits


def unseal(
    layout: BlockLayout, arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], dtype: torch.dtype
) -> tuple[Float[Tensor, "blocks kv_heads block head_dim"], Float[Tensor, "blocks kv_heads block head_dim"]]:
    """Decoded keys and values in float32, as `definition.unseal` gives them."""
    pages = pages.contiguous()
    shape = (pages.shape[0], layout.kv_heads, layout.block, layout.head_dim)
    keys, values = torch.empty(shape), torch.empty(shape)
    library().kvdrift_unseal(
        _spec(layout)[1],
        arena.data_ptr(),
        pages.data_ptr(),
        pages.shape[0],
        DTYPES[dtype],
        keys.data_ptr(),
        values.data_ptr(),
        torch.get_num_threads(),
    )
    return keys, values


def checksum(arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    """64-bit checksum of each page's payload, as `definition.checksum` gives it."""
    pages = pages.contiguous()
    sums = torch.empty(pages.shape[0], dtype=torch.int64)
    library().kvdrift_checksum(
        arena.data_ptr(),
        arena.shape[1],
        pages.data_ptr(),
        pages.shape[0],
        sums.data_ptr(),
        torch.get_num_threads(),
    )
    return sums


def label(
    arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], headers: UInt8[Tensor, "blocks 64"]
) -> None:
    """Headers with their checksums before the payloads, as `definition.label` writes them."""
    pages, headers = pages.contiguous(), headers.contiguous()
    library().kvdrift_label(
        arena.data_ptr(),
        arena.shape[1],
        pages.data_ptr(),
        pages.shape[0],
        headers.data_ptr(),
        torch.get_num_threads(),
    )


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
    """Attention over packed blocks and exact tokens, as `definition.decode_attention` means it; nothing is copied."""
    if not query.dtype == exact_keys.dtype == exact_values.dtype:
        raise TypeError(
            f"query is {query.dtype}, exact keys {exact_keys.dtype}, exact values {exact_values.dtype}; "
            "all three must be the model's dtype"
        )
    query, query_strides = _rows(query)
    exact_keys, key_strides = _rows(exact_keys)
    exact_values, value_strides = _rows(exact_values)
    pages, tokens, exact_lengths = pages.contiguous(), tokens.contiguous(), exact_lengths.contiguous()
    sequences, query_heads, queries, _ = query.shape
    out = torch.empty(query.shape, dtype=query.dtype)
    blocks = pages.shape[1]
    call = _Call(
        _spec(layout)[1],
        arena.data_ptr(),
        pages.data_ptr(),
        tokens.data_ptr(),
        exact_lengths.data_ptr(),
        query.data_ptr(),
        exact_keys.data_ptr(),
        exact_values.data_ptr(),
        out.data_ptr(),
        sequences,
        query_heads,
        queries,
        blocks,
        query_strides,
        key_strides,
        value_strides,
        blocks,
        blocks,
        _dtype(query),
        torch.get_num_threads(),
        scaling,
    )
    library().kvdrift_decode_attention(ctypes.addressof(call))
    return out
