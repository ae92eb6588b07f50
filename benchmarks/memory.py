"""What the packed cache holds and what its work allocates at the peak, beside the exact cache and the ledger.

    python benchmarks/memory.py --json memory.json

Reads data/model. Bytes are read off the storages and off torch's allocators, never inferred. `theirs` of the `packed`
and `allocated` rows is the ledger's figure, of the `peak` rows the exact cache's. The first `peak decode` row counts
what the cache holds and what a step allocates beyond a step over one token; its `theirs` is the exact cache's bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "9")

import torch
from decode import bench
from rows import Row, machine, report

from kvdrift.ledger import account
from kvdrift.measure.bench import Bench, Work, held_bytes
from kvdrift.measure.memory import peak_allocation


def decode_peak(made: Bench, make: Callable[[int, int], Any], tokens: int) -> tuple[int, int]:
    """Bytes held by a filled cache, and transient bytes of one decode step."""
    caches: list[Any] = []

    def prepare() -> Work:
        caches.append(make(1, tokens))
        return made.decode(caches[0], 1)

    transient = peak_allocation(prepare, made.device)
    return held_bytes(caches[0]), transient


def rows(made: Bench, tokens: int) -> list[Row]:
    """Every figure at one length."""
    shape = made.packed(1, 16).shape
    ledger = account(made.policy, shape, tokens, 1)
    live = made.packed(1, tokens).ledger()
    case = f"{made.policy.name}, {tokens} tokens: "
    found = [
        _row(case + "packed", live.codes + live.scales + live.lows, ledger.codes + ledger.scales + ledger.lows),
        _row(case + "allocated", held_bytes(made.packed(1, tokens)), ledger.format_bytes),
    ]
    idle = decode_peak(made, lambda batch, _: made.dynamic(batch, 1), 1)[1]
    ours, theirs = decode_peak(made, made.packed, tokens), decode_peak(made, made.dynamic, tokens)
    cache = ours[0] + max(0, ours[1] - idle)
    found.append(_row(case + "peak decode / exact cache's bytes", cache, shape.layers * shape.token_bytes * tokens))
    found.append(_row(case + "peak decode / exact peak decode", sum(ours), sum(theirs)))
    prefills = [
        peak_allocation(lambda empty=empty: made.prefill(empty, 1, tokens), made.device)
        for empty in (made.empty_packed, made.empty_dynamic)
    ]
    found.append(_row(case + "peak prefill / exact peak prefill", *prefills))
    return found


def _row(case: str, ours: int, theirs: int) -> Row:
    return Row(case, ours, theirs, ours / theirs if theirs else float("nan"), "B")


@torch.inference_mode()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--tokens", type=int, default=8000)
    options.add_argument("--policy", default="kivi4")
    options.add_argument("--device", default="cpu")
    options.add_argument("--manifest", type=Path, default=Path("data/model/manifest.json"))
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    made = bench(chosen.manifest, chosen.device, chosen.policy, chosen.tokens)
    print(machine())
    found = rows(made, chosen.tokens)
    for row in found:
        print(f"{row.case:56} {row.ours / 2**20:9.2f} {row.theirs / 2**20:9.2f} MiB  ratio {row.ratio:.3f}")
    report(found, chosen.json)


if __name__ == "__main__":
    main()
