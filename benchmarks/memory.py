"""What the packed cache holds and what its work allocates at the peak, beside the exact cache and the ledger.

    python benchmarks/memory.py --json memory.json

Reads data/model. Bytes are read off the storages and off torch's allocators, never inferred. `theirs` of the `packed`
and `allocated` rows is the ledger's figure, of the `peak` rows the exact cache's. `peak decode` is of the last step
that seals a block; beside the exact cache's bytes it counts what ours holds and what the step allocates beyond one
over one token. Pages grow as `generate` lets them, or are `reserved` once, as a server does.
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
from kvdrift.policy import packed_blocks


def decode_peak(made: Bench, make: Callable[[int, int], Any], tokens: int) -> tuple[int, int]:
    """Bytes held before the decode step that brings a cache to `tokens` tokens, and the most that it adds to them."""
    held = list[int]()

    def prepare() -> Work:
        cache = make(1, max(1, tokens - 2))  # the step before is run first, unmeasured
        step = made.decode(cache, 1)

        def decode() -> None:
            held.append(held_bytes(cache))
            step()

        return decode

    transient = peak_allocation(prepare, made.device)
    return held[-1], transient


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
    seals = max(n for n in range(1, tokens + 1) if packed_blocks(made.policy, n) > packed_blocks(made.policy, n - 1))
    exact, theirs = shape.layers * shape.token_bytes * seals, sum(decode_peak(made, made.dynamic, seals))
    for pages, room in (("", None), (", reserved", 2)):
        held, transient = decode_peak(made, lambda batch, length, room=room: made.packed(batch, length, room), seals)
        found.append(_row(f"{case}peak decode{pages} / exact bytes", held + max(0, transient - idle), exact))
        found.append(_row(f"{case}peak decode{pages} / exact peak", held + transient, theirs))
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
