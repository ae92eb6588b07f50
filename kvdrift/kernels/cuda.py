"""The four functions of `definition` on a CUDA device (compute capability 8.0 and up): the sources in `cuda/`, compiled
by NVRTC through CuPy for the exact shape, run on torch's current stream.

Codes, scales and lows equal the definition's on a CPU bit for bit, subnormals included. Attention multiplies codes in
TF32 with every query, score and weight split in two, and sums in float32: as accurate as float32, not the same bits.
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

from kvdrift.layout import HEADER_BYTES, BlockLayout, TensorLayout
from kvdrift.policy import SCALE_BYTES

SOURCES = Path(__file__).with_suffix("")
INPUT = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "float"}
FORMAT = {"uniform": "UNIFORM", "fp8_e4m3": "FP8"}
EXACT_ENCODING = ("--fmad=false", "--prec-div=true")
"""Options of the modules whose every bit is fixed."""
SEAL_THREADS = 256
STEP_BYTES = 16 * 1024
"""Aim of a warp's step, keys and values together: several steps must be under way at once on each multiprocessor."""
SHARED_BYTES = 96 * 1024
"""Aim of a thread block's shared memory: two of them fit a multiprocessor of compute capability 9.0 and up."""
RESIDENT_BLOCKS = 4
"""Thread blocks of attention a multiprocessor should have, to hide the memory's latency."""


@dataclass(frozen=True)
class AttentionShape:
    """The constants that one attention module is compiled for."""

    layout: BlockLayout
    dtype: torch.dtype
    share: int
    """Query heads of a KV head."""
    tiles: int
    """A thread block takes 4 · tiles (query token, query head) rows."""

    @property
    def step(self) -> int:
        """Tokens that a warp takes at once: a whole block when keys are channel-major."""
        key, value, block = self.layout.key, self.layout.value, self.layout.block
        if key.channel_major:
            return block
        steps = [step for step in (64, 32, 16) if step <= block]
        return next((s for s in steps if _staged_bytes(key, s) + _staged_bytes(value, s) <= STEP_BYTES), 16)

    @property
    def tail_step(self) -> int:
        return 32 if self.layout.head_dim * self.dtype.itemsize <= 256 else 16

    @property
    def warps(self) -> int:
        return next((warps for warps in (4, 2) if self._shared_bytes(warps) <= SHARED_BYTES), 1)

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(self.warps)

    def _shared_bytes(self, warps: int) -> int:
        rows, head_dim = 4 * self.tiles, self.layout.head_dim
        key, value = self.layout.key, self.layout.value
        packed = _staged_bytes(key, self.step) + _staged_bytes(value, self.step) + 4 * rows * (self.step + 4)
        tail = 2 * self.tail_step * head_dim * self.dtype.itemsize + 4 * rows * (self.tail_step + 4)
        queries = 4 * rows * (head_dim + 4) + 4 * rows * max(key.groups, 1)
        return queries + warps * max(packed, tail, 4 * rows * (head_dim + 2))

    def defines(self) -> dict[str, object]:
        return {
            **_defines(self.layout, self.dtype),
            "SHARE": self.share,
            "TILES": self.tiles,
            "STEP": self.step,
            "TAIL_STEP": self.tail_step,
            "WARPS": self.warps,
            "SHARED_BYTES": self.shared_bytes,
        }


def attention_shape(layout: BlockLayout, dtype: torch.dtype, share: int, queries: int) -> AttentionShape:
    """Tiles are as many as the rows need, while a warp's sums (head_dim · 4 · tiles) stay in registers; more rows take
    further thread blocks, which read the codes again. One token's query heads always share one thread block."""
    needed = -(-share * queries // 4)
    most = max(-(-share // 4), min(4, 256 // layout.head_dim))
    return AttentionShape(layout, dtype, share, min(needed, most))


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
        pitch = layout.head_dim + 4 // keys.dtype.itemsize
        kernel = _kernel("seal.cu", "seal", layout, keys.dtype)
        args = [*_strided(keys), *_strided(values), arena, pages, fits]
        shared = layout.block * pitch * keys.dtype.itemsize
        _launch(kernel, (2, layout.kv_heads, len(pages)), SEAL_THREADS, args, shared)
    return fits


def unseal(
    layout: BlockLayout, arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"], dtype: torch.dtype
) -> tuple[Float[Tensor, "blocks kv_heads block head_dim"], Float[Tensor, "blocks kv_heads block head_dim"]]:
    """As `definition.unseal`."""
    shape = (len(pages), layout.kv_heads, layout.block, layout.head_dim)
    keys, values = (torch.empty(shape, dtype=torch.float32, device=arena.device) for _ in range(2))
    if len(pages):
        kernel = _kernel("unseal.cu", "unseal", layout, dtype)
        _launch(kernel, (2, layout.kv_heads, len(pages)), SEAL_THREADS, [arena, pages, keys, values])
    return keys, values


def checksum(arena: UInt8[Tensor, "pages page_bytes"], pages: Int32[Tensor, "blocks"]) -> Int64[Tensor, "blocks"]:
    """As `definition.checksum`."""
    sums = torch.empty(len(pages), dtype=torch.int64, device=arena.device)
    if len(pages):
        kernel = _module("checksum.cu", ("checksum",), EXACT_ENCODING)["checksum"]
        _launch(kernel, (len(pages), 1, 1), 256, [arena, arena.shape[1], np.int32(HEADER_BYTES), pages, sums], 2048)
    return sums


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
    shape = attention_shape(layout, query.dtype, query_heads // heads, queries)
    row_tiles = -(-shape.share * queries // (4 * shape.tiles))
    packed, tail = _splits(shape, sequences * heads * row_tiles, blocks, exact_keys.shape[2], query.device)
    padded_rows = row_tiles * 4 * shape.tiles
    partials = torch.empty(sequences, heads, packed + tail, padded_rows, head_dim + 2, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)

    attention, merge = _attention(shape)
    rows = [*_strided(query), np.int32(queries)]
    paged = [arena, pages.contiguous(), tokens.contiguous(), np.int32(blocks)]
    exact = [*_strided(exact_keys), *_strided(exact_values), exact_lengths]
    split = [np.float32(scaling), np.int32(packed), partials]
    grid = (packed + tail, heads * row_tiles, sequences)
    _launch(attention, grid, 32 * shape.warps, [*rows, *paged, *exact, *split], shape.shared_bytes)
    sizes = [np.int32(packed + tail), np.int32(padded_rows), np.int32(queries)]
    _launch(merge, (shape.share * queries, heads, sequences), 256, [partials, *sizes, out], 8 * 4 * (head_dim + 2))
    return out


def _splits(shape: AttentionShape, others: int, blocks: int, capacity: int, device: torch.device) -> tuple[int, int]:
    """Splits of the packed blocks and of the exact tail, such that all thread blocks fill the device about once."""
    fill = -(-RESIDENT_BLOCKS * _multiprocessors(device) // others)
    steps = blocks * shape.layout.block // shape.step
    tail_steps = -(-capacity // shape.tail_step)
    packed = min(fill, -(-steps // (2 * shape.warps)))
    return packed, max(1, min(fill, -(-tail_steps // (2 * shape.warps))))


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


@lru_cache(maxsize=256)
def _kernel(file: str, name: str, layout: BlockLayout, dtype: torch.dtype) -> Any:
    return _module(file, (name,), (*EXACT_ENCODING, *options(_defines(layout, dtype))))[name]


@lru_cache(maxsize=256)
def _attention(shape: AttentionShape) -> tuple[Any, Any]:
    module = _module("attention.cu", ("attention", "merge"), options(shape.defines()))
    return module["attention"], module["merge"]


@lru_cache(maxsize=512)
def _module(file: str, names: tuple[str, ...], flags: tuple[str, ...]) -> dict[str, Any]:
    """Compiled kernels by name."""
    import cupy

    module = cupy.RawModule(code=source(file), backend="nvrtc", options=("-std=c++17", *flags))
    return {name: module.get_function(name) for name in names}


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


def _staged_bytes(tensor: TensorLayout, step: int) -> int:
    """What `step` tokens of one head take: codes, scales and lows."""
    rows = tensor.rows if tensor.channel_major else step
    per_scale = 0 if tensor.quantizer is None else SCALE_BYTES[tensor.quantizer.scale_dtype]
    stored = 2 if tensor.quantizer is not None and tensor.quantizer.has_low else 1
    return rows * (tensor.row_bytes + tensor.groups * per_scale * stored)


def _defines(layout: BlockLayout, dtype: torch.dtype) -> dict[str, object]:
    defines: dict[str, object] = {
        "INPUT": INPUT[dtype],
        "HEAD_DIM": layout.head_dim,
        "BLOCK": layout.block,
        "KV_HEADS": layout.kv_heads,
        "PAGE_BYTES": layout.page_bytes,
        "PAYLOAD_END": layout.value.end,
    }
    for name, tensor in (("KEY", layout.key), ("VALUE", layout.value)):
        quantizer = tensor.quantizer
        exact = quantizer is None
        defines |= {
            f"{name}_FORMAT": "EXACT" if exact else FORMAT[quantizer.format],
            f"{name}_BITS": 8 * dtype.itemsize if exact else quantizer.bits,
            f"{name}_CHANNEL_MAJOR": int(tensor.channel_major),
            f"{name}_GROUPS": max(tensor.groups, 1),
            f"{name}_CODES": tensor.codes,
            f"{name}_SCALES": tensor.scales,
            f"{name}_LOWS": tensor.lows,
            f"{name}_SCALE": "float" if exact or quantizer.scale_dtype == "float32" else "F16",
        }
    return defines
