"""The five functions of `definition` on a CUDA device (compute capability 8.0 and up): the sources in `cuda/`, compiled
by NVRTC through CuPy for the exact shape, run on torch's current stream.

Codes, scales and lows equal the definition's on a CPU bit for bit, subnormals included. Attention multiplies codes in
TF32 with every query, score and weight split in two, and sums in float32 over runs of at most `LONGEST_RUN` tokens.
Before it is rounded to the query's dtype, it is within 2⁻²⁰ · (8 + max Σ|q·k|) · max|v| of float64 attention over the
decoded values, q scaled, at any length.
Importing this needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64, UInt8
from torch import Tensor

from kvdrift.layout import HEADER_BYTES, BlockLayout

SOURCES = Path(__file__).with_suffix("")
INPUT = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "float"}
FORMAT = {"uniform": "UNIFORM", "fp8_e4m3": "FP8"}
BIT_EXACT = ("--fmad=false", "--prec-div=true")
"""Options of the modules whose every bit is fixed."""
SEAL_THREADS = 256
RESIDENT_BLOCKS = 4
"""Thread blocks of attention a multiprocessor should have, to hide the memory's latency."""
LONGEST_RUN = 1024
"""Tokens that a warp sums up one after another, at most about: the rounding of float32 adds up."""


@dataclass(frozen=True)
class Attention:
    """The kernels of one shape, and what `attention.cu` says about launching them."""

    attention: Any
    merge: Any
    step: int
    """Tokens that a warp takes at once, in packed blocks."""
    tail_step: int
    warps: int
    shared_bytes: int


def row_tiles(head_dim: int, share: int, queries: int) -> int:
    """Groups of four (query token, query head) rows that one thread block takes.

    As many as needed, while a warp's sums (head_dim · 4 · tiles) stay in registers; further rows take further thread
    blocks, which read the codes again. The query heads of one token always share one thread block.
    """
    most = max(-(-share // 4), min(4, 256 // head_dim))
    return min(-(-share * queries // 4), most)


def seal(
    keys: Float[Tensor, "blocks kv_heads block head_dim"],
    values: Float[Tensor, "blocks kv_heads block head_dim"],
    layout: BlockLayout,
    arena: UInt8[Tensor, "pages page_bytes"],
    pages: Int32[Tensor, "blocks"],
) -> Bool[Tensor, "blocks"]:
    """As `definition.seal`; keys and values may have any strides."""
    fits = torch.ones(len(pages), dtype=torch.bool, device=keys.device)
    if len(pages):
        tile_bytes = layout.block * (layout.head_dim * keys.dtype.itemsize + 4)
        kernel = _kernel("seal.cu", layout, keys.dtype, keys.device)
        args = [*_strided(keys), *_strided(values), arena, pages.contiguous(), fits]
        _launch(kernel, (len(pages), layout.kv_heads, 2), SEAL_THREADS, args, tile_bytes)
    return fits


def unseal(
    layout: BlockLayout, arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], dtype: torch.dtype
) -> tuple[Float[Tensor, "blocks kv_heads block head_dim"], Float[Tensor, "blocks kv_heads block head_dim"]]:
    """As `definition.unseal`."""
    shape = (len(pages), layout.kv_heads, layout.block, layout.head_dim)
    keys, values = (torch.empty(shape, dtype=torch.float32, device=arena.device) for _ in range(2))
    if len(pages):
        kernel = _kernel("unseal.cu", layout, dtype, arena.device)
        _launch(kernel, (len(pages), layout.kv_heads, 2), SEAL_THREADS, [arena, pages.contiguous(), keys, values])
    return keys, values


def checksum(arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    """As `definition.checksum`."""
    sums = torch.empty(len(pages), dtype=torch.int64, device=arena.device)
    if len(pages):
        kernel = _checksum(arena.device)
        args = [arena, arena.shape[1], np.int32(HEADER_BYTES), pages.contiguous(), sums]
        _launch(kernel, (len(pages), 1, 1), 256, args, 256 * 8)
    return sums


def label(
    arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], headers: UInt8[Tensor, "blocks 64"]
) -> None:
    """As `definition.label`."""
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
    """As `definition.decode_attention`; query and exact tensors may have any strides."""
    sequences, query_heads, queries, head_dim = query.shape
    blocks, heads = pages.shape[1], layout.kv_heads
    share = query_heads // heads
    tiles = row_tiles(head_dim, share, queries)
    turns = -(-share * queries // (4 * tiles))
    padded_rows = turns * 4 * tiles
    kernels = _attention(layout, query.dtype, share, tiles, query.device)
    packed, tail = _splits(kernels, sequences * heads * turns, blocks * layout.block, exact_keys.shape[2], query.device)
    records = (sequences, heads, packed + tail, padded_rows, head_dim + 2)
    partials = torch.empty(records, dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)

    rows = [*_strided(query), np.int32(queries)]
    paged = [arena, pages.contiguous(), tokens.contiguous(), np.int32(blocks)]
    exact = [*_strided(exact_keys), *_strided(exact_values), exact_lengths.contiguous()]
    args = [*rows, *paged, *exact, np.float32(scaling), np.int32(packed), partials]
    grid = (packed + tail, heads * turns, sequences)
    _launch(kernels.attention, grid, 32 * kernels.warps, args, kernels.shared_bytes)
    args = [partials, np.int32(packed + tail), np.int32(padded_rows), np.int32(queries), out]
    _launch(kernels.merge, (share * queries, heads, sequences), 256, args, 8 * 4 * (head_dim + 2))
    return out


def _splits(kernels: Attention, others: int, tokens: int, capacity: int, device: torch.device) -> tuple[int, int]:
    """Splits of the packed blocks and of the exact tail: all thread blocks together fill the device about once or more,
    each warp has two steps or more, and none more than `LONGEST_RUN` tokens."""
    fill = -(-RESIDENT_BLOCKS * _multiprocessors(device) // others)

    def splits(tokens: int, step: int) -> int:
        return min(max(fill, -(-tokens // (LONGEST_RUN * kernels.warps))), -(-tokens // (2 * step * kernels.warps)))

    return splits(tokens, kernels.step), max(1, splits(capacity, kernels.tail_step))


def source(name: str) -> str:
    """One source with its own headers put in: CuPy's kernel cache doesn't look into `#include`d files."""
    seen: set[str] = set()

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        return re.sub(r'#include "(.+)"\n', lambda match: read(match[1]), (SOURCES / file).read_text())

    return read(name).replace("#pragma once\n", "")


def options(defines: dict[str, object]) -> tuple[str, ...]:
    """Constants as compiler options."""
    return tuple(f"-D{name}={value}" for name, value in defines.items())


def page_constants(layout: BlockLayout, dtype: torch.dtype) -> dict[str, object]:
    """The constants that `tensors.h` reads."""
    constants: dict[str, object] = {
        "INPUT": INPUT[dtype],
        "HEAD_DIM": layout.head_dim,
        "BLOCK": layout.block,
        "KV_HEADS": layout.kv_heads,
        "PAGE_BYTES": layout.page_bytes,
        "PAYLOAD_END": layout.value.end,
    }
    for name, tensor in (("KEY", layout.key), ("VALUE", layout.value)):
        quantizer = tensor.quantizer
        constants |= {
            f"{name}_FORMAT": "EXACT" if quantizer is None else FORMAT[quantizer.format],
            f"{name}_BITS": 8 * dtype.itemsize if quantizer is None else quantizer.bits,
            f"{name}_CHANNEL_MAJOR": int(tensor.channel_major),
            f"{name}_GROUPS": max(tensor.groups, 1),
            f"{name}_CODES": tensor.codes,
            f"{name}_SCALES": tensor.scales,
            f"{name}_LOWS": tensor.lows,
            f"{name}_SCALE": "F16" if quantizer is not None and quantizer.scale_dtype == "float16" else "float",
        }
    return constants


@lru_cache(maxsize=256)
def _kernel(file: str, layout: BlockLayout, dtype: torch.dtype, device: torch.device) -> Any:
    flags = (*BIT_EXACT, *options(page_constants(layout, dtype)))
    return _function(file, Path(file).stem, flags, device)


@lru_cache(maxsize=16)
def _checksum(device: torch.device) -> Any:
    return _function("checksum.cu", "checksum", BIT_EXACT, device)


@lru_cache(maxsize=256)
def _attention(layout: BlockLayout, dtype: torch.dtype, share: int, tiles: int, device: torch.device) -> Attention:
    flags = options(page_constants(layout, dtype) | {"SHARE": share, "TILES": tiles})
    names = ("attention", "merge", "sizes")
    attention, merge, sizes = (_function("attention.cu", name, flags, device) for name in names)
    attention.preferred_shared_memory_carveout = 100
    numbers = torch.empty(4, dtype=torch.int32, device=device)
    _launch(sizes, (1, 1, 1), 1, [numbers])
    return Attention(attention, merge, *numbers.tolist())


@lru_cache(maxsize=512)
def _module(file: str, flags: tuple[str, ...], device: torch.device) -> Any:
    """One source, compiled for one device."""
    import cupy

    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError(f"{torch.cuda.get_device_name(device)} is too old: compute capability 8.0 is the least")
    with _on_device(device):
        module = cupy.RawModule(code=source(file), backend="nvrtc", options=("-std=c++17", *flags))
        module.compile()
    return module


def _function(file: str, name: str, flags: tuple[str, ...], device: torch.device) -> Any:
    with _on_device(device):
        return _module(file, flags, device).get_function(name)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device)


def _on_stream(device: torch.device) -> AbstractContextManager[Any]:
    """torch's current stream, as CuPy's."""
    import cupy

    return cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))


def _launch(kernel: Any, grid: tuple[int, int, int], threads: int, args: Sequence[Any], shared: int = 0) -> None:
    """Run on torch's current stream of the tensors' device; a tensor argument becomes its pointer."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    if shared > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = shared
    with _on_device(device), _on_stream(device):
        kernel(grid, (threads, 1, 1), tuple(values), shared_mem=shared)


def _strided(x: Tensor) -> list[Any]:
    return [x, *x.stride()]
