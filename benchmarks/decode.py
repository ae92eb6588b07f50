"""One decode step of the real model over kivi4, against Transformers' exact and quantized caches.

    python benchmarks/decode.py --json decode.json

Reads data/model (`dvc repro model` makes it). Steps of both sides alternate in random order within one process; keys
and values are random, for their content does not decide the time. A ratio below 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rows import Row, machine, report

from kvdrift import models
from kvdrift.cache.packed import PackedCache
from kvdrift.ledger import load_policy
from kvdrift.measure import peers
from kvdrift.measure.bench import Bench, Prefix
from kvdrift.measure.sweep import Point
from kvdrift.measure.timing import Pairs, paired


def bench(manifest: Path, device: str, policy: str, tokens: int) -> Bench:
    """The model over `tokens` random keys and values."""
    model, _ = models.load(manifest, device, "kvdrift")
    plan = load_policy(policy)
    shape = PackedCache(plan, model.config, dtype=model.dtype).shape
    size = (1, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (
        tuple(torch.randn(size, dtype=model.dtype, device=model.device) for _ in range(shape.layers)) for _ in "kv"
    )
    return Bench(model, plan, Prefix(torch.ones(1, tokens, dtype=torch.long, device=model.device), keys, values))


def row(case: str, pairs: Pairs) -> Row:
    """`pairs.reference` is theirs."""
    ours, theirs = np.array(pairs.candidate), np.array(pairs.reference)
    return Row(case, float(np.median(ours)), float(np.median(theirs)), float(np.median(ours / theirs)), "ms")


@torch.inference_mode()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--tokens", type=int, nargs="+", default=[128, 8000])
    options.add_argument("--policy", default="kivi4")
    options.add_argument("--device", default="cpu")
    options.add_argument("--manifest", type=Path, default=Path("data/model/manifest.json"))
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    made = bench(chosen.manifest, chosen.device, chosen.policy, max(chosen.tokens))
    print(machine())
    rows = []
    for tokens in chosen.tokens:
        point = Point(1, tokens, chosen.steps)
        ours, theirs = made.decode(made.packed(1, tokens), 1), made.decode(made.dynamic(1, tokens), 1)
        pairs = paired(theirs, ours, chosen.steps, 0, made.device)
        rows.append(row(f"{chosen.policy} / DynamicCache, {tokens} tokens", pairs))
        for peer in ("quanto", "hqq"):
            if package := peers.missing(peer):  # type: ignore[arg-type]
                print(f"QuantizedCache({peer}): {package} is not installed")
                continue
            theirs = made.decode(peers.filled(made, peer, 1, tokens, chosen.steps), 1)  # type: ignore[arg-type]
            pairs = paired(theirs, made.decode(made.packed(1, tokens), 1), point.generated, 0, made.device)
            rows.append(row(f"{chosen.policy} / QuantizedCache({peer}), {tokens} tokens", pairs))
    for found in rows:
        print(f"{found.case:44} {found.ours:8.1f} {found.theirs:8.1f} {found.unit}  ratio {found.ratio:.3f}")
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
