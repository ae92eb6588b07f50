"""Decode attention over packed blocks against the fastest exact bfloat16 attention of torch, on the same dense values.

    python benchmarks/attention.py --json attention.json

Each call reads the next of several layers' buffers, as a decode step does. Exact paths tried: SDPA with `enable_gqa`,
SDPA with the query heads of a KV head folded into query rows, and plain matrix products. The packed side also has 64
exact tokens to attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rows import Row, Run, fastest, machine, paired, parser, report
from torch.nn.functional import scaled_dot_product_attention

from kvdrift.kernels import dispatch
from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

BLOCK = 64
SHAPES = {"9/3 d64": (9, 3, 64), "32/8 d128": (32, 8, 128)}
POLICIES = {
    "int8 per-token": LayerPolicy(Quantizer(bits=8), Quantizer(bits=8)),
    "int8 kivi": LayerPolicy(Quantizer(bits=8, axis="channel", group=64), Quantizer(bits=8)),
    "fp8 per-token": LayerPolicy(Quantizer("fp8_e4m3"), Quantizer("fp8_e4m3")),
    "int4 per-token": LayerPolicy(Quantizer(bits=4), Quantizer(bits=4)),
    "int4 kivi": LayerPolicy(Quantizer(bits=4, axis="channel", group=64), Quantizer(bits=4)),
    "int4 kivi g32": LayerPolicy(Quantizer(bits=4, axis="channel", group=32), Quantizer(bits=4, group=32)),
    "int2 kivi": LayerPolicy(Quantizer(bits=2, axis="channel", group=32), Quantizer(bits=2)),
    "int2 kivi g32": LayerPolicy(Quantizer(bits=2, axis="channel", group=32), Quantizer(bits=2, group=32)),
}


@dataclass(frozen=True)
class Dense:
    """One query, and the keys and values of several layers, bfloat16."""

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def scaling(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


def dense(query_heads: int, kv_heads: int, head_dim: int, tokens: int, layers: int) -> Dense:
    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, head_dim).bfloat16()

    return Dense(
        normal(query_heads, 1),
        [normal(kv_heads, tokens) for _ in range(layers)],
        [normal(kv_heads, tokens) for _ in range(layers)],
    )


def exact_paths(data: Dense) -> dict[str, Run]:
    """Every exact path of torch, as a call on layer i."""
    kv_heads = data.keys[0].shape[1]
    folded = data.query.reshape(1, kv_heads, -1, data.query.shape[-1])

    def products(i: int) -> torch.Tensor:
        scores = folded @ data.keys[i].transpose(-1, -2) * data.scaling
        return scores.softmax(-1) @ data.values[i]

    return {
        "sdpa enable_gqa": lambda i: scaled_dot_product_attention(
            data.query, data.keys[i], data.values[i], enable_gqa=True
        ),
        "sdpa folded": lambda i: scaled_dot_product_attention(folded, data.keys[i], data.values[i]),
        "matmul": products,
    }


def packed(data: Dense, layout: BlockLayout) -> Run:
    """Attention over the same values sealed into one arena a layer, as a call on layer i."""
    kernels = dispatch.backend(torch.device("cpu"))
    _, kv_heads, tokens, head_dim = data.keys[0].shape
    pages = torch.arange(tokens // BLOCK, dtype=torch.int32)
    arenas = []
    for keys, values in zip(data.keys, data.values, strict=True):
        arena = torch.zeros(len(pages), layout.page_bytes, dtype=torch.uint8)
        kernels.seal(*(x[0].unflatten(1, (-1, BLOCK)).transpose(0, 1) for x in (keys, values)), layout, arena, pages)
        arenas.append(arena)
    exact, lengths = torch.randn(1, kv_heads, 64, head_dim).bfloat16(), torch.tensor([64], dtype=torch.int32)
    pages = pages[None]
    counts = torch.full_like(pages, BLOCK)
    return lambda i: kernels.decode_attention(
        data.query, layout, arenas[i], pages, counts, exact, exact, lengths, data.scaling
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine())
    rows = []
    for shape, (query_heads, kv_heads, head_dim) in SHAPES.items():
        data = dense(query_heads, kv_heads, head_dim, options.tokens, options.layers)
        paths = exact_paths(data)
        best = fastest(paths, options.layers)
        print(f"\n{shape}, {options.tokens} tokens, {options.layers} layers in turn; fastest exact path: {best}")
        for name, policy in POLICIES.items():
            case = f"{shape} {name}"
            if options.only not in case:
                continue
            layout = block_layout(policy, BLOCK, kv_heads, head_dim, 2)
            ours, theirs, ratio = paired(packed(data, layout), paths[best], options.layers, options.rounds)
            moved = options.tokens // BLOCK * layout.page_bytes + 2 * 64 * kv_heads * head_dim * 2
            print(
                f"  {name:15s} {ours * 1e6:8.0f} us   exact {theirs * 1e6:8.0f} us   ratio {ratio:.3f}   "
                f"{moved / 1e6:6.2f} MB must move: {moved / ours / 1e9:5.1f} GB/s"
            )
            rows.append(Row(case, ours * 1e6, theirs * 1e6, ratio, "us"))
    report(rows, options.json)


if __name__ == "__main__":
    main()
