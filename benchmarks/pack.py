"""Sealing a stream of blocks against Transformers' quantized caches, and against a plain `torch.clone` or `copy_`.

    python benchmarks/pack.py --json pack.json

Int4: per-channel keys and per-token values. The peers quantize the same keys and values with the code that their cache
layers run on a flush; a peer whose package is missing is named and left out. Throughput is of bfloat16 input bytes,
so a ratio above 1 means that ours is faster. The two sides of a pair read different layers: the second would find the
other's input in the cache. Pages of the arena have been written before, as a pool's have, and so has
what `copy_` writes to; `clone` takes fresh memory, if the allocator has none at hand.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from rows import Row, Run, machine, paired, parser, report

from kvdrift.kernels import dispatch
from kvdrift.layout import block_layout
from kvdrift.policy import LayerPolicy, Quantizer

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


def peer(backend: str, layers: Layers) -> Run | None:
    """Transformers' own quantization of a flush, or None where its package is missing."""
    if importlib.util.find_spec({"hqq": "hqq", "quanto": "optimum"}[backend]) is None:
        return None
    from transformers import cache_utils

    kinds: dict[str, Any] = {"hqq": cache_utils.HQQQuantizedLayer, "quanto": cache_utils.QuantoQuantizedLayer}
    axis = {"hqq": 1, "quanto": 0}[backend]  # the axes that their documentation uses
    layer = kinds[backend](nbits=4, axis_key=axis, axis_value=axis, q_group_size=64)
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
        for name, theirs in {
            "torch.clone": clone(elsewhere(layers)),
            "copy_": copy(elsewhere(layers)),
            "hqq": peer("hqq", elsewhere(layers)),
            "quanto": peer("quanto", elsewhere(layers)),
        }.items():
            case = f"{shape} vs {name}"
            if options.only not in case:
                continue
            if theirs is None:
                print(f"  {name:12s} not installed")
                continue
            rounds = 1 if name == "hqq" else options.rounds
            our_seconds, their_seconds, ratio = paired(seal(layers), theirs, options.layers, rounds)
            ours, other = read / our_seconds / 1e9, read / their_seconds / 1e9
            print(f"  {name:12s} ours {ours:6.2f} GB/s   theirs {other:7.3f} GB/s   {1 / ratio:7.2f} x as fast")
            rows.append(Row(case, ours, other, 1 / ratio, "GB/s of input"))
    report(rows, options.json)


if __name__ == "__main__":
    main()
