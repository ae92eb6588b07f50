"""Build, check and time the CUDA kernels in one call: `python benchmarks/gpu.py [--json FILE]`.

On an H100- or H200-class GPU it compares decode attention over packed blocks with torch's fused attention on the same
tokens in bfloat16 and with the device's own copy bandwidth, and packing with copy bandwidth. Both sides run as CUDA
graphs (no launch overhead on either), rotate through more memory than the L2 cache holds, and alternate; a row's ratio
is the median over the rounds. Of times less is better, of bandwidths more. Without a GPU it says so, and gives no
figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rows import Row, report
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvdrift.kernels import cuda, definition
from kvdrift.layout import BlockLayout, block_layout
from kvdrift.policy import LayerPolicy, Quantizer

KV_HEADS, HEAD_DIM, SHARE, BLOCK = 8, 128, 4, 64
TAIL = 128
"""The newest tokens, exact."""
LENGTHS = [1024 << i for i in range(8)]
ROTATION_BYTES = 512 << 20
ROUNDS = 21
DTYPE = torch.bfloat16


def _policy(bits: int, axis: str) -> LayerPolicy:
    return LayerPolicy(Quantizer(bits=bits, axis=axis, group=64), Quantizer(bits=bits, axis="token", group=64))


POLICIES = {
    "int4, keys per channel": _policy(4, "channel"),
    "int4, keys per token": _policy(4, "token"),
    "int8, keys per channel": _policy(8, "channel"),
    "int8, keys per token": _policy(8, "token"),
}


def _layout(layer: LayerPolicy) -> BlockLayout:
    return block_layout(layer, BLOCK, KV_HEADS, HEAD_DIM, DTYPE.itemsize)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def _graph(work: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """The given calls, one after another, as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in work:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    return graph.replay


def _seconds(replay: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _typical(calls: Sequence[Callable[[], object]]) -> float:
    replay = _graph(calls)
    return statistics.median(_seconds(replay, len(calls)) for _ in range(5))


def compare(
    case: str,
    ours: Sequence[Callable[[], object]],
    theirs: Sequence[Callable[[], object]],
    moved: tuple[float, float] | None = None,
) -> Row:
    """Microseconds a call, or GB/s when `moved` gives the bytes that a call of each side moves."""
    replays = _graph(ours), _graph(theirs)
    rounds = [(_seconds(replays[0], len(ours)), _seconds(replays[1], len(theirs))) for _ in range(ROUNDS + 2)][2:]
    if moved is None:
        pairs, unit = [(a * 1e6, b * 1e6) for a, b in rounds], "us"
    else:
        pairs, unit = [(moved[0] / a / 1e9, moved[1] / b / 1e9) for a, b in rounds], "GB/s"
    row = Row(
        case,
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
        unit,
    )
    print(f"{row.case:48} {row.ours:10.1f} {row.theirs:10.1f} {row.unit:5} ratio {row.ratio:.3f}", flush=True)
    return row


def check() -> None:
    """Every policy's pages against the definition's on the CPU, bit for bit; its attention against float32."""
    for name, layer in POLICIES.items():
        layout = _layout(layer)
        keys, values = (_random(6, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2))
        arena, expected = (torch.zeros(6, layout.page_bytes, dtype=torch.uint8) for _ in range(2))
        pages, arena = torch.arange(6).int(), arena.cuda()
        fits = cuda.seal(keys, values, layout, arena, pages.cuda())
        meant = definition.seal(keys.cpu(), values.cpu(), layout, expected, pages)
        assert torch.equal(fits.cpu(), meant), f"{name}: other blocks fit"
        assert torch.equal(arena.cpu(), expected), f"{name}: other bytes"
        tail = [_random(2, KV_HEADS, TAIL, HEAD_DIM) for _ in range(2)]
        query = _random(2, KV_HEADS * SHARE, 2, HEAD_DIM)
        counts, lengths = torch.full((2, 3), BLOCK).int(), torch.tensor([TAIL, 5]).int()
        args = (arena, pages.view(2, 3).cuda(), counts.cuda(), *tail, lengths.cuda(), HEAD_DIM**-0.5)
        error = (cuda.decode_attention(query, layout, *args).float() - _exact(query, layout, *args)).abs().max()
        assert error < 0.01, f"{name}: attention is {error:.2g} off"
    print("checked: pages equal the definition's bit for bit, attention within bfloat16's rounding", flush=True)


def _exact(query: torch.Tensor, layout: BlockLayout, arena: torch.Tensor, *args: torch.Tensor | float) -> torch.Tensor:
    on_cpu = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return definition.decode_attention(query.cpu(), layout, arena.cpu(), *on_cpu).float().cuda()  # type: ignore[arg-type]


def time_attention(name: str, length: int) -> list[Row]:
    """One query token of one sequence, on as many copies of its cache as outgrow the L2 cache."""
    layout, blocks = _layout(POLICIES[name]), (length - TAIL) // BLOCK
    packed_bytes, dense_bytes = blocks * layout.page_bytes, 2 * 2 * KV_HEADS * HEAD_DIM * length
    tail_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * TAIL
    copies = min(64, max(2, ROTATION_BYTES // packed_bytes))
    arena = torch.empty(copies * blocks, layout.page_bytes, dtype=torch.uint8, device="cuda")
    for copy in range(copies):
        rows = torch.arange(copy * blocks, (copy + 1) * blocks, dtype=torch.int32, device="cuda")
        cuda.seal(*(_random(blocks, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2)), layout, arena, rows)
    pages = torch.randperm(copies * blocks, device="cuda").int().view(copies, 1, blocks)
    tokens = torch.full((1, blocks), BLOCK, dtype=torch.int32, device="cuda")
    tail, lengths = [_random(1, KV_HEADS, TAIL, HEAD_DIM) for _ in range(2)], torch.tensor([TAIL]).int().cuda()
    query, scaling = _random(1, KV_HEADS * SHARE, 1, HEAD_DIM), HEAD_DIM**-0.5
    ours = [
        lambda rows=rows: cuda.decode_attention(query, layout, arena, rows, tokens, *tail, lengths, scaling)
        for rows in pages
    ]

    dense = [
        tuple(_random(1, KV_HEADS, length, HEAD_DIM) for _ in range(2))
        for _ in range(min(64, max(2, ROTATION_BYTES // dense_bytes)))
    ]
    folded = query.view(1, KV_HEADS, SHARE, HEAD_DIM)
    grouped = [lambda k=k, v=v: scaled_dot_product_attention(query, k, v, enable_gqa=True) for k, v in dense]
    as_rows = [lambda k=k, v=v: scaled_dot_product_attention(folded, k, v) for k, v in dense]
    theirs = min(grouped, as_rows, key=_typical)  # the faster way to tell torch about grouped queries

    case = f"attention, {name}, {length // 1024} Ki"
    big, copied = _copy_buffers()
    return [
        compare(f"{case}: time / bf16 fused", ours, theirs),
        compare(
            f"{case}: bandwidth / copy", ours, [lambda: copied.copy_(big)], (packed_bytes + tail_bytes, 2 * big.nbytes)
        ),
    ]


def time_packing(name: str) -> Row:
    layout, blocks = _layout(POLICIES[name]), 2048
    keys, values = (_random(blocks, KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2))
    arena = torch.empty(blocks, layout.page_bytes, dtype=torch.uint8, device="cuda")
    pages = torch.arange(blocks, dtype=torch.int32, device="cuda")
    big, copied = _copy_buffers()
    moved = (keys.nbytes + values.nbytes + arena.nbytes, 2 * big.nbytes)
    ours = [lambda: cuda.seal(keys, values, layout, arena, pages)]
    return compare(f"pack, {name}: bandwidth / copy", ours, [lambda: copied.copy_(big)], moved)


def _copy_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    return source, torch.empty_like(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    check()
    rows = [time_packing(name) for name in POLICIES]
    for name in POLICIES:
        for length in LENGTHS:
            rows += time_attention(name, length)
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
