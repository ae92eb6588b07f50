"""What the benchmarks share: paired timing, and rows of {case, ours, theirs, ratio, unit} as text and JSON."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

Run = Callable[[int], object]
"""One timed call; its argument says which of the rotating buffers to use."""


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is the median of paired ratios ours / theirs, not the ratio of the medians."""

    case: str
    ours: float
    theirs: float
    ratio: float
    unit: str


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=10, help="passes over the rotating buffers")
    options.add_argument("--layers", type=int, default=6, help="buffers to rotate through, so that caches don't help")
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--only", default="", help="run only cases whose name contains this")
    return options


def seconds(run: Run, buffer: int) -> float:
    start = time.perf_counter()
    run(buffer)
    return time.perf_counter() - start


def paired(ours: Run, theirs: Run, buffers: int, rounds: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio of pairs that ran one after the other on the same buffer."""
    for run in (ours, theirs):
        run(0)
    pairs = [(seconds(ours, i), seconds(theirs, i)) for _ in range(rounds) for i in range(buffers)]
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return medians[0], medians[1], statistics.median(a / b for a, b in pairs)


def fastest(runs: dict[str, Run], buffers: int) -> str:
    """The name of the one with the quickest single call of three passes: another process can't make a call quicker, so
    a busy machine doesn't pick us a slow opponent."""
    return min(runs, key=lambda name: min(seconds(runs[name], i) for _ in range(3) for i in range(buffers)))


def report(rows: Sequence[Row], to: Path | None) -> None:
    if to is not None:
        to.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def machine() -> str:
    """CPU, threads, versions and the command, to stand beside every number."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{models[0]} ({len(models)} cores)" if models else cpu
    return (
        f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}\n"
        f"$ python {shlex.join(sys.argv)}"
    )
