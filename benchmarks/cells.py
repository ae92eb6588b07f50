"""Cells a second: from the changed layer on over the stored prefix, beside a full prefill for every cell.

    python benchmarks/cells.py --json cells.json

Needs the artifacts of `dvc repro`. `ours` and `theirs` are seconds a cell in float32: one pass over all of kivi2's
cells, and one cell the plain way.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rows import Row, machine, report

from kvdrift import models
from kvdrift.cache.packed import PackedCache
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.cells import Variant, layer_cells
from kvdrift.measure.plans import read_plan
from kvdrift.measure.reference import Stored, longest, stored
from kvdrift.measure.replay import score
from kvdrift.policy import CachePolicy
from kvdrift.prompts.prompt import from_frame

STEPS = 16


@torch.inference_mode()
def naive(model: Any, batch: Stored, row: int, policy: CachePolicy, layer: int) -> None:
    """One cell the plain way: prefill the prompt, with one layer packing in one bucket, and score."""
    ranges = {index: [range(0)] for index in range(len(policy.layers))} | {layer: [range(batch.length)]}
    cache = PackedCache(policy, model.config, dtype=model.dtype, pack_ranges=ranges)
    model(input_ids=batch.prefix[row : row + 1].to(model.device), cache=cache, use_cache=True, logits_to_keep=1)
    score(model, cache, batch.continuation[row : row + 1, : STEPS + 1].to(model.device))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--json", type=Path, help="write the rows here")
    asked.add_argument("--threads", type=int, default=2)
    options = asked.parse_args()
    torch.set_num_threads(options.threads)
    batches = stored(Path("data/reference"), from_frame(pl.read_parquet("data/prompts/prompts.parquet")))
    model, _ = models.load(Path("data/model/manifest.json"), "cpu", "kvdrift")
    model.float()
    policy = read_plan(Path("data/plans"), "kivi2").bind(batches[0].layers, batches[0].layer(0)[0].shape[-1])
    print(machine())
    rows = []
    for cohort in ("code", "needle_grid"):
        batch, row = longest(batches, cohort)
        spans = tuple(bucket_ranges(batch.length))
        start = time.perf_counter()
        layer_cells(model, batch, row, {index: [Variant(policy, spans)] for index in range(batch.layers)}, STEPS)
        mean = (time.perf_counter() - start) / (batch.layers * len(spans))
        start = time.perf_counter()
        naive(model, batch, row, policy, layer=0)
        plain = time.perf_counter() - start
        rows.append(Row(f"cells at {batch.length} tokens", mean, plain, mean / plain, "s a cell"))
        print(
            f"{rows[-1].case}: {1 / mean:.1f} cells/s, {1 / plain:.3f} the plain way, {plain / mean:.0f} times faster"
        )
    report(rows, options.json)


if __name__ == "__main__":
    main()
