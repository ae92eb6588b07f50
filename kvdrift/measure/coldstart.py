"""The first prefill of a process, timed in forked children before this one has run any."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import asdict
from typing import Any

import numpy as np

from kvdrift.measure.bench import Bench, Work
from kvdrift.measure.timing import Pairs, milliseconds, ratio

TIMEOUT = 60.0
"""Seconds after which a forked child that hasn't answered is given up."""


def cold_starts(bench: Bench, context: int, children: int, seed: int) -> dict[str, Any] | str | None:
    """Milliseconds of the first prefill of a process: in forked children, before this process has run any.

    None when none is asked for; "unavailable" on a GPU, whose context does not survive a fork.
    """
    if not children:
        return None
    if bench.device.type == "cuda" or not hasattr(os, "fork"):
        return "unavailable"
    times: dict[str, list[float]] = {"reference": [], "candidate": []}
    makes = {"reference": bench.empty_dynamic, "candidate": bench.empty_packed}
    order = np.random.default_rng(seed)
    for _ in range(children):
        for side in order.permutation(list(times)):
            took = _in_child(bench.prefill(makes[side], 1, context), bench.device)
            if took is None:
                return "unavailable"
            times[side].append(took)
    return asdict(ratio(Pairs(tuple(times["reference"]), tuple(times["candidate"])), seed)) | {
        "context": context,
        "reference_ms": float(np.median(times["reference"])),
        "candidate_ms": float(np.median(times["candidate"])),
    }


def _in_child(work: Work, device: torch.device) -> float | None:
    """Milliseconds of `work` in a forked child; None if it doesn't answer in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(milliseconds(work, device)).encode())
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], TIMEOUT)
        answer = os.read(read, 64).decode() if ready else ""
        if not ready:
            os.kill(child, signal.SIGKILL)
        return float(answer) if answer else None
    finally:
        os.close(read)
        os.waitpid(child, 0)
