"""Sealing a stream of blocks against Transformers' quantized caches, and against a plain `torch.clone` or `copy_`.

    python benchmarks/pack.py --json pack.json

Int4: per-channel keys and per-token values. A peer is met twice. As a `stream`, both caches are given the tokens block
by block, as decoding does, and the peer quantizes all that it holds again on each flush; so it is slower the longer
the stream is, and a quarter of the tokens is timed too (HQQ is too slow for more). `at once`, the peer quantizes the
same keys and values whole, with the code that its cache layer runs on a flush; how far `torch.clone` would come there
is printed beside it. A peer whose package is missing is named and left out. Throughput is of bfloat16 input bytes,
so a ratio above 1 means that ours is faster. The two sides of a pair read different layers: the second would find the
other's input in the cache. Pages of the arena have been written before, as a pool's have, and so has
what `copy_` writes to; `clone` takes fresh memory, if the allocator has none at hand.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from rows import Row, Run, machine, paired, parser, report

from kvdrift.cache.block import Identity
from kvdrift.cache.pool import BlockPool
from kvdrift.cache.sealing import Binding
from kvdrift.cache.sequences import Sequences
from kvdrift.kernels import dispatch
from kvdrift.layout import block_layout
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer

BLOCK = 64
SHAPES = {"3 heads d64": (3, 64), "8 heads d128": (8, 128)}
POLICY = LayerPolicy(Quantizer(bits=4, axis="channel", group=64), Quantizer(bits=4))

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [1, kv_heads, tokens, head_dim] of several layers."""


def seal(layers: Layers) -> Run:
    kernels = dispatch.backend(torch.device("cpu"))
    _, kv_heads, tokens, head_dim = layers[0][0].shape
    layout = block_layout(POLICY, BLOCK, kv_heads, head_dim, 2)
    pages = torch.arange(tokens // BLOCK, dtype=torch.int32)
    arenas = [torch.ones(len(pages), layout.page_bytes, dtype=torch.uint8) for _ in layers]

    def run(i: int) -> torch.Tensor:
        blocks = [x[0].unflatten(1, (-1, BLOCK)).transpose(0, 1) for x in layers[i]]
        return kernels.seal(*blocks, layout, arenas[i], pages)

    return run


def elsewhere(layers: Layers) -> Layers:
    """The same layers, half a turn further on."""
    half = len(layers) // 2
    return layers[half:] + layers[:half]


def clone(layers: Layers) -> Run:
    return lambda i: [x.clone() for x in layers[i]]


def copy(layers: Layers) -> Run:
    to = [[x.clone() for x in layer] for layer in layers]
    return lambda i: [y.copy_(x) for x, y in zip(layers[i], to[i], strict=True)]


def stream(layers: Layers) -> Run:
    """A layer of the packed cache that is given its tokens block by block."""
    policy = CachePolicy("int4", (POLICY,), block=BLOCK)
    _, kv_heads, tokens, head_dim = layers[0][0].shape
    layout = block_layout(POLICY, BLOCK, kv_heads, head_dim, 2)
    binding = Binding(0, policy, layout, Identity(version=policy.id))

    def run(i: int) -> object:
        sequences = Sequences(binding, BlockPool(layout.page_bytes, torch.device("cpu"), tokens // BLOCK), layers[i][0])
        for keys, values in zip(*(x.split(BLOCK, dim=2) for x in layers[i]), strict=True):
            sequences.append(keys, values, [0])
            sequences.seal_due()
        return sequences

    return run


def missing(backend: str) -> bool:
    return importlib.util.find_spec({"hqq": "hqq", "quanto": "optimum"}[backend]) is None


def peer_layer(backend: str) -> Any:
    """A layer of Transformers' quantized cache that flushes as soon as it may."""
    from transformers import cache_utils

    kinds: dict[str, Any] = {"hqq": cache_utils.HQQQuantizedLayer, "quanto": cache_utils.QuantoQuantizedLayer}
    axis = {"hqq": 1, "quanto": 0}[backend]  # the axes that their documentation uses
    return kinds[backend](nbits=4, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=BLOCK)


def peer_stream(backend: str, layers: Layers) -> Run:
    """The peer's cache layer, given its tokens block by block."""

    def run(i: int) -> object:
        layer = peer_layer(backend)
        for keys, values in zip(*(x.split(BLOCK, dim=2) for x in layers[i]), strict=True):
            layer.update(keys, values)
        return layer

    return run


def peer(backend: str, layers: Layers) -> Run:
    """Transformers' own quantization of a flush."""
    layer = peer_layer(backend)
    layer.lazy_initialization(*layers[0])

    def run(i: int) -> object:
        keys, values = layers[i]
        return layer._quantize(keys.contiguous(), layer.axis_key), layer._quantize(
            values.contiguous(), layer.axis_value
        )

    return run


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine())
    rows = []
    for shape, (kv_heads, head_dim) in SHAPES.items():
        size = (1, kv_heads, options.tokens, head_dim)
        layers = [(torch.randn(size).bfloat16(), torch.randn(size).bfloat16()) for _ in range(options.layers)]
        read = sum(x.nbytes for x in layers[0])
        written = options.tokens // BLOCK * block_layout(POLICY, BLOCK, kv_heads, head_dim, 2).page_bytes
        print(f"\n{shape}, {options.tokens} tokens: {read / 1e6:.1f} MB to read, {written / 1e6:.1f} MB to write")
        few = [(k[:, :, : options.tokens // 4], v[:, :, : options.tokens // 4]) for k, v in layers]
        quarter = f"{options.tokens // 4:,} tokens"
        pairs: dict[str, tuple[Run, Run]] = {
            "torch.clone": (seal(layers), clone(elsewhere(layers))),
            "copy_": (seal(layers), copy(elsewhere(layers))),
        }
        for backend in ("hqq", "quanto"):
            if missing(backend):
                print(f"  {backend} is not installed")
                continue
            pairs[f"{backend} at once"] = seal(layers), peer(backend, elsewhere(layers))
            pairs[f"{backend} stream, {quarter}"] = stream(few), peer_stream(backend, elsewhere(few))
            if backend == "quanto":
                pairs[f"{backend} stream"] = stream(layers), peer_stream(backend, elsewhere(layers))
                pairs[f"{backend} at once, if we were torch.clone"] = clone(layers), peer(backend, elsewhere(layers))
        for name, (run, theirs) in pairs.items():
            case = f"{shape} vs {name}"
            if options.only not in case:
                continue
            rounds = 1 if "hqq" in name else options.rounds
            our_seconds, their_seconds, ratio = paired(run, theirs, options.layers, rounds)
            given = read / 4 if quarter in name else read
            ours, other = given / our_seconds / 1e9, given / their_seconds / 1e9
            print(f"  {name:40s} ours {ours:6.3f} GB/s   theirs {other:8.4f} GB/s   {1 / ratio:8.2f} x as fast")
            rows.append(Row(case, ours, other, 1 / ratio, "GB/s of input"))
    report(rows, options.json)


if __name__ == "__main__":
    main()
