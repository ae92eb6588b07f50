"""Drive one layer of a PackedCache with tensors of our own, and say in plain torch what it should have answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from kvdrift.cache import attention
from kvdrift.cache.packed import PackedCache
from kvdrift.kernels import definition
from kvdrift.layout import block_layout
from kvdrift.policy import CachePolicy, from_dict

QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32

KEY4 = {"bits": 4, "axis": "channel", "group": 32}
VALUE4 = {"bits": 4, "axis": "token", "group": 32}


def policy(**fields: Any) -> CachePolicy:
    """A KIVI-like policy at 4 bits with blocks of 32, changed as named."""
    return from_dict({"key": KEY4, "value": VALUE4, "block": 32, **fields}, name="test")


def config(layers: int = 1, dtype: str = "float32", **fields: Any) -> LlamaConfig:
    shape = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    made = LlamaConfig(**{**shape, "num_hidden_layers": layers, "hidden_size": 64, "dtype": dtype, **fields})
    made._attn_implementation = "kvdrift"
    return made


@dataclass
class Tokens:
    """Queries [batch, query_heads, T, d], keys and values [batch, kv_heads, T, d] of T tokens."""

    q: Tensor
    k: Tensor
    v: Tensor

    def span(self, start: int, stop: int) -> Tokens:
        return Tokens(*(x[:, :, start:stop] for x in (self.q, self.k, self.v)))

    def row(self, s: int) -> Tokens:
        return Tokens(*(x[s : s + 1] for x in (self.q, self.k, self.v)))


def tokens(count: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tokens:
    source = torch.Generator().manual_seed(seed)
    made = [torch.randn(batch, heads, count, HEAD_DIM, generator=source) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
    return Tokens(*(x.to(dtype) for x in made))


def _module() -> nn.Module:
    made = nn.Module()
    made.num_key_value_groups, made.is_causal = QUERY_HEADS // KV_HEADS, True
    return made


@dataclass
class Stream:
    """One layer fed in chunks. `pads` [batch, columns] are True where a column is a pad."""

    cache: PackedCache
    index: int = 0
    pads: Tensor | None = None
    module: nn.Module = field(default_factory=_module)

    @property
    def layer(self) -> Any:
        return self.cache.layers[self.index]

    def feed(self, new: Tokens, pads: Tensor | None = None) -> Tensor:
        """The answers [batch, query_heads, new, d] to one arrival."""
        batch, count, seen = new.k.shape[0], new.k.shape[2], self.layer.get_seq_length()
        mask = None
        if pads is not None or self.pads is not None or (seen and count > 1):
            fresh = torch.zeros(batch, count, dtype=torch.bool) if pads is None else pads
            past = torch.zeros(batch, seen, dtype=torch.bool) if self.pads is None else self.pads
            all_pads = torch.cat([past, fresh], dim=1)
            if all_pads.any():
                self.pads = all_pads
            causal = torch.arange(seen + count) <= torch.arange(seen, seen + count)[:, None]
            mask = causal[None, None] & ~all_pads[:, None, None]
        key, value = self.cache.update(new.k, new.v, self.index)
        out, _ = attention.attention(self.module, new.q, key, value, mask, scaling=HEAD_DIM**-0.5)
        return out.transpose(1, 2)

    def feed_all(self, given: Tokens, chunks: Sequence[int]) -> Tensor:
        """Answers to all tokens, fed in chunks of these sizes."""
        outs, start = [], 0
        for size in chunks:
            outs.append(self.feed(given.span(start, start + size)))
            start += size
        assert start == given.k.shape[2]
        return torch.cat(outs, dim=2)

    def crop(self, count: int) -> None:
        self.layer.crop(-count)
        if self.pads is not None:
            self.pads = self.pads[:, : self.pads.shape[1] - count]

    def pages(self, s: int = 0) -> list[bytes]:
        """Every byte of each page of one sequence, header included."""
        if not self.layer.packed:
            return []
        return [bytes(self.layer.pool.arena[x.page].numpy()) for x in self.layer.segments[s] if x.page >= 0]

    def packed_spans(self, s: int = 0) -> list[tuple[int, int]]:
        """First and last position of each page of one sequence."""
        if not self.layer.packed:
            return []
        return [(x.start, x.start + x.tokens) for x in self.layer.segments[s] if x.page >= 0]


def stream(given: CachePolicy, *, layers: int = 1, dtype: str = "float32", **options: Any) -> Stream:
    return Stream(PackedCache(given, config(layers, dtype), **options))


def packed_until(given: CachePolicy, position: int) -> int:
    """P(p) of DESIGN §5, written out."""
    beyond = max(0, position + 1 - given.sink_tokens - given.residual_window)
    return given.sink_tokens + given.block * (beyond // given.block)


def decoded(given: CachePolicy, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, T, d] with every whole block from the sinks on quantized at once and decoded; blocks
    that don't fit their format stay as they are."""
    sinks, block = given.sink_tokens, given.block
    count = max(0, k.shape[1] - sinks) // block
    layout = block_layout(given.layers[0], block, KV_HEADS, HEAD_DIM, k.element_size())
    arena, at = torch.zeros(count, layout.page_bytes, dtype=torch.uint8), torch.arange(count, dtype=torch.int32)
    end = sinks + count * block
    blocks = [x[:, sinks:end].unflatten(1, (count, block)).transpose(0, 1) for x in (k, v)] if count else []
    if not count:
        return k.float(), v.float()
    fits = definition.seal(*blocks, layout, arena, at)
    out = []
    for x, whole, back in zip((k, v), blocks, definition.unseal(layout, arena, at, k.dtype), strict=True):
        kept = torch.where(fits[:, None, None, None], back, whole.float())
        out.append(torch.cat([x[:, :sinks].float(), kept.transpose(0, 1).flatten(1, 2), x[:, end:].float()], dim=1))
    return out[0], out[1]


def oracle(given: CachePolicy, seen: Tokens, prefill: int, row: int = 0) -> Tensor:
    """Answers [1, query_heads, T, d] in float64, query by query: token t is decoded for query p when S ≤ t < P(p),
    exact otherwise; everything is exact for the first `prefill` queries."""
    q, k, v = (x[row] for x in (seen.q, seen.k, seen.v))
    packed_k, packed_v = decoded(given, k, v)
    answers = []
    for p in range(k.shape[1]):
        until = given.sink_tokens if p < prefill else packed_until(given, p)
        keys, values = (
            torch.cat(
                [x[:, : given.sink_tokens].float(), y[:, given.sink_tokens : until], x[:, until : p + 1].float()], 1
            )
            for x, y in ((k, packed_k), (v, packed_v))
        )
        keys, values = (x[:, : p + 1].double().repeat_interleave(QUERY_HEADS // KV_HEADS, 0) for x in (keys, values))
        scores = (q[:, p : p + 1].double() @ keys.transpose(1, 2)) * HEAD_DIM**-0.5
        answers.append(scores.softmax(-1) @ values)
    return torch.cat(answers, dim=1)[None]
