"""The byte layout of one block under a policy: the one formula that storage, kernels and ledger share.

A page is [header | key codes, scales, lows | value codes, scales, lows | padding to 64 bytes]. Codes are rows:
channel-major for per-channel keys (a row is one channel's tokens), token-major otherwise (a row is one token's
channels). Scales and lows are [kv_heads, groups of a row, rows], so that a kernel reads them along rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdrift.policy import SCALE_BYTES, CachePolicy, LayerPolicy, Quantizer

HEADER_BYTES = 64
PAGE_ALIGN = 64


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class TensorLayout:
    """Where one tensor of a block lies in its page. Offsets and sizes are in bytes; an exact tensor has codes only."""

    quantizer: Quantizer | None
    kv_heads: int
    rows: int
    row: int
    """Elements of a row."""
    groups: int
    """Groups of a row (0 when exact)."""
    row_bytes: int
    codes: int
    scales: int
    lows: int
    end: int

    @property
    def channel_major(self) -> bool:
        return self.quantizer is not None and self.quantizer.axis == "channel"

    @property
    def group(self) -> int:
        """Elements of a group."""
        return self.row // self.groups

    @property
    def codes_bytes(self) -> int:
        return self.kv_heads * self.rows * self.row_bytes

    @property
    def scales_bytes(self) -> int:
        return self.kv_heads * self.rows * self.groups * _scale_bytes(self.quantizer)

    @property
    def lows_bytes(self) -> int:
        return self.scales_bytes if self.quantizer is not None and self.quantizer.has_low else 0


@dataclass(frozen=True)
class BlockLayout:
    """One page: `block` tokens of one layer of one sequence, all KV heads."""

    key: TensorLayout
    value: TensorLayout
    kv_heads: int
    block: int
    head_dim: int
    dtype_bytes: int
    page_bytes: int

    def parts(self) -> dict[str, int]:
        """Bytes of a page by purpose; they add up to `page_bytes`."""
        tensors = (self.key, self.value)
        held = {
            "codes": sum(t.codes_bytes for t in tensors),
            "scales": sum(t.scales_bytes for t in tensors),
            "lows": sum(t.lows_bytes for t in tensors),
            "headers": HEADER_BYTES,
        }
        return held | {"padding": self.page_bytes - sum(held.values())}


def _scale_bytes(quantizer: Quantizer | None) -> int:
    return 0 if quantizer is None else SCALE_BYTES[quantizer.scale_dtype]


def _tensor(
    quantizer: Quantizer | None, kv_heads: int, block: int, head_dim: int, dtype_bytes: int, start: int
) -> TensorLayout:
    if quantizer is None:
        row_bytes = head_dim * dtype_bytes
        end = start + kv_heads * block * row_bytes
        return TensorLayout(None, kv_heads, block, head_dim, 0, row_bytes, start, end, end, end)
    rows, row = (head_dim, block) if quantizer.axis == "channel" else (block, head_dim)
    groups = row // (quantizer.group or row)
    row_bytes = row * quantizer.bits // 8
    scales = _round_up(start + kv_heads * rows * row_bytes, 4)
    scales_bytes = kv_heads * rows * groups * _scale_bytes(quantizer)
    lows = scales + scales_bytes
    end = lows + (scales_bytes if quantizer.has_low else 0)
    return TensorLayout(quantizer, kv_heads, rows, row, groups, row_bytes, start, scales, lows, _round_up(end, 4))


def block_layout(layer: LayerPolicy, block: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> BlockLayout:
    """The page of one layer. `dtype_bytes` is the size of the model's dtype, which exact tensors keep."""
    key = _tensor(layer.key, kv_heads, block, head_dim, dtype_bytes, HEADER_BYTES)
    value = _tensor(layer.value, kv_heads, block, head_dim, dtype_bytes, key.end)
    return BlockLayout(key, value, kv_heads, block, head_dim, dtype_bytes, _round_up(value.end, PAGE_ALIGN))


def layer_layouts(policy: CachePolicy, kv_heads: int, head_dim: int, dtype_bytes: int) -> list[BlockLayout | None]:
    """One layout a layer of a bound policy; None where the layer is exact."""
    return [
        None if layer.is_exact else block_layout(layer, policy.block, kv_heads, head_dim, dtype_bytes)
        for layer in policy.layers
    ]
