"""Run the points of a sweep on a bench, and tell their figures. Plain data in and out, so that a sweep can resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvdrift.measure import energy, peers
from kvdrift.measure.bench import Bench, Work, held_bytes
from kvdrift.measure.breakeven import break_even
from kvdrift.measure.capacity import copy_bandwidth, largest, predicted
from kvdrift.measure.memory import peak_allocation
from kvdrift.measure.sweep import CapacityTrial, Point, Scheduler
from kvdrift.measure.timing import Pairs, milliseconds, p95_ratio, paired, percentile, ratio

ENERGY_STEPS = 32
PEAK_STEPS = 2
"""`peak_allocation` runs its work once before it looks."""


@torch.inference_mode()
def sample(bench: Bench, point: Point, turn: int, seed: int) -> dict[str, Any]:
    """One visit: paired milliseconds of a point over caches filled anew, and the bytes that both held at its end."""
    if point.phase == "prefill":
        prefills = _prefills(bench, point, turn)
        return _pairs(*prefills, point.generated, seed, bench.device) | {"bytes": [None, None]}
    caches = _filled(bench, point, turn)
    works = [bench.decode(cache, point.batch) for cache in caches]
    found = _pairs(works[0], works[1], point.generated, seed, bench.device)
    return found | {"bytes": [held_bytes(cache) for cache in caches]}


@torch.inference_mode()
def sample_floor(bench: Bench, point: Point, seed: int) -> dict[str, Any]:
    """One visit of the reference path against itself."""
    works = [bench.decode(bench.dynamic(point.batch, point.context), point.batch) for _ in "ab"]
    return _pairs(works[0], works[1], point.generated, seed, bench.device) | {"bytes": [None, None]}


def _pairs(reference: Work, candidate: Work, pairs: int, seed: int, device: torch.device) -> dict[str, Any]:
    return asdict(paired(reference, candidate, pairs, seed, device, warmup=1))


def joined(visits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The visits of one point as one sample."""
    times = {side: [t for visit in visits for t in visit[side]] for side in ("reference", "candidate")}
    return times | {"visits": len(visits), "bytes": visits[-1]["bytes"]}


def _filled(bench: Bench, point: Point, turn: int) -> list[Any]:
    if point.reuse == "shared_prefix":
        caches: list[Any] = [bench.dynamic(1, point.context), bench.packed(1, point.context)]
        for cache in caches:
            cache.batch_repeat_interleave(point.batch)
        return caches
    caches = [bench.dynamic(point.batch, point.context), bench.packed(point.batch, point.context)]
    if point.reuse == "continued_session":
        for cache in caches:
            _feed(bench, cache, point.batch, turn)
    return caches


def _feed(bench: Bench, cache: Any, batch: int, turn: int) -> None:
    """The next turn of a session: new tokens after those that the cache holds."""
    tokens = bench.prefix.tokens[:, :turn].repeat(batch, 1)
    bench.model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)


def _prefills(bench: Bench, point: Point, turn: int) -> tuple[Work, Work]:
    batch, context = point.batch, point.context
    if point.reuse == "continued_session":
        waiting = [[make(batch, context) for _ in range(point.generated + 1)] for make in (bench.dynamic, bench.packed)]
        reference, candidate = (lambda queue=queue: _feed(bench, queue.pop(), batch, turn) for queue in waiting)
        return reference, candidate
    if point.reuse == "evicted":
        cache = bench.packed(batch, context, room=1)

        def evicted() -> Any:
            cache.reset()
            return cache

        return bench.prefill(bench.empty_dynamic, batch, context), bench.prefill(evicted, batch, context)
    return bench.prefill(bench.empty_dynamic, batch, context), bench.prefill(bench.empty_packed, batch, context)


@torch.inference_mode()
def sample_peer(bench: Bench, peer: peers.Peer, point: Point, pairs: int, seed: int) -> dict[str, Any] | str:
    """Decode steps over another of Transformers' caches against the reference, or what is not installed."""
    package = peers.missing(peer)
    if package is not None:
        return f"{package} is not installed"
    return asdict(ratio(peers.sample(bench, peer, point, pairs, seed), seed))


def pairs_of(found: Mapping[str, Any]) -> Pairs:
    return Pairs(tuple(found["reference"]), tuple(found["candidate"]), found["visits"])


def row(point: Point, found: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The figures of one point; a percentile that so few steps can't carry is null."""
    pairs = pairs_of(found)
    middle, tail = ratio(pairs, seed), p95_ratio(pairs, seed)
    figures: dict[str, Any] = asdict(point) | {"pairs": len(pairs.reference), "visits": pairs.visits}
    for side, times in (("reference", pairs.reference), ("candidate", pairs.candidate)):
        figures |= {f"{side}_p{q}_ms": percentile(times, q) for q in (50, 95, 99)}
    per_step = point.batch * (point.context if point.phase == "prefill" else 1)
    figures |= {
        "ratio": middle.value,
        "ratio_low": middle.low,
        "ratio_high": middle.high,
        "p95_ratio": tail and tail.value,
        "p95_ratio_low": tail and tail.low,
        "p95_ratio_high": tail and tail.high,
        "reference_tokens_per_second": 1e3 * per_step / float(np.mean(pairs.reference)),
        "tokens_per_second": 1e3 * per_step / float(np.mean(pairs.candidate)),
        "reference_bytes": found["bytes"][0],
        "bytes": found["bytes"][1],
    }
    return figures


@torch.inference_mode()
def peaks(bench: Bench, batch: int, tokens: int) -> dict[str, int]:
    """Bytes that both caches hold of so many tokens a sequence, and with the most that the last decode step allocates
    besides."""
    found = {}
    context = tokens - PEAK_STEPS
    for side, make in (("reference", bench.dynamic), ("candidate", bench.packed)):
        caches: list[Any] = []

        def prepare(make: Any = make, caches: list[Any] = caches) -> Work:
            caches.append(make(batch, context))
            return bench.decode(caches[0], batch)

        transient = peak_allocation(prepare, bench.device)
        found[f"{side}_held"] = held_bytes(caches[0])
        found[f"{side}_peak"] = found[f"{side}_held"] + transient
    return found


def break_evens(found: Mapping[Point, Mapping[str, Any]], limit: int, seed: int) -> dict[str, Any]:
    """The crossing of each batch size that was measured, fresh, at two lengths or more."""
    lines: dict[int, dict[int, Pairs]] = {}
    for point, samples in found.items():
        if point.phase == "decode" and point.reuse == "fresh":
            lines.setdefault(point.batch, {}).setdefault(point.context, pairs_of(samples))
    return {
        str(batch): asdict(break_even(by_length, limit, seed))
        for batch, by_length in sorted(lines.items())
        if len(by_length) > 1
    }


@torch.inference_mode()
def capacity(bench: Bench, trial: CapacityTrial, scheduler: Scheduler, context: int) -> dict[str, Any]:
    """The most sequences that decode `steps` tokens within the budget, on both paths.

    A count is stable when its cache, read off its storages after admission and after every step, stays within the
    budget and nothing fails to allocate.
    """
    device, limit = bench.device, scheduler.batch_limit
    budget = _budget(trial, device)
    shape = bench.empty_packed().shape
    lengths = range(context, context + trial.steps + 1)
    weights = sum(p.untyped_storage().nbytes() for p in bench.model.parameters())
    bandwidth = copy_bandwidth(device)
    found: dict[str, Any] = {"budget_bytes": budget, "context": context, "steps": trial.steps, "batch_limit": limit}
    found["copy_bandwidth"] = bandwidth
    exact = Bench(bench.model, _exact(bench), bench.prefix)
    for side, policy, make in (
        ("reference_", exact.policy, lambda n: bench.dynamic(n, context)),
        ("", bench.policy, lambda n: bench.packed(n, context, room=trial.steps)),
    ):
        steps: dict[int, list[float]] = {}
        held: dict[int, int] = {}

        def stable(n: int, make: Any = make, steps: Any = steps, held: Any = held) -> bool:
            try:
                cache = make(n)
                held[n] = held_bytes(cache)
                step, steps[n] = bench.decode(cache, n), []
                while held[n] <= budget and len(steps[n]) < trial.steps:
                    steps[n].append(milliseconds(step, device))
                    held[n] = max(held[n], held_bytes(cache))
            except (MemoryError, torch.OutOfMemoryError):
                return False
            return held[n] <= budget

        expected = predicted(policy, shape, lengths, budget, limit)
        most = largest(stable, expected, limit)
        found[f"{side}sequences"], found[f"predicted_{side}sequences".replace("__", "_")] = most, expected
        found[f"{side}step_ms"] = float(np.median(steps[most])) if most else None
        found[f"{side}held_bytes"] = held[most] if most else 0
        found[f"{side}bandwidth_bound_step_ms"] = 1e3 * (weights + held[most]) / bandwidth if most else None
    return found


def _exact(bench: Bench) -> Any:
    from kvdrift.policy import CachePolicy, LayerPolicy

    return CachePolicy("exact", (LayerPolicy(),))


def _budget(trial: CapacityTrial, device: torch.device) -> int:
    if trial.budget_mib is not None:
        return trial.budget_mib << 20
    if device.type != "cuda":
        raise ValueError("capacity.budget_mib is null, which is a GPU's free memory; set a number of MiB on a CPU")
    free, _ = torch.cuda.mem_get_info(device)
    return int(0.8 * free)


@torch.inference_mode()
def joules_per_token(bench: Bench, point: Point) -> dict[str, float] | str:
    """Energy of a decoded token on both paths; "unavailable" where no counter can be read."""
    read = energy.counter(bench.device)
    if read is None:
        return "unavailable"
    found = {}
    for side, cache in (
        ("reference", bench.dynamic(point.batch, point.context)),
        ("candidate", bench.packed(point.batch, point.context)),
    ):
        step = bench.decode(cache, point.batch)
        before = read()
        for _ in range(ENERGY_STEPS):
            step()
        found[f"{side}_joules_per_token"] = (read() - before) / (ENERGY_STEPS * point.batch)
    return found


def headline(rows: list[dict[str, Any]], memory: Mapping[str, int]) -> dict[str, Any]:
    """The workload's own figures: its decode row is the first, its prefill row the longest."""
    decode = rows[0]
    prefills = [r for r in rows if r["phase"] == "prefill" and r["reuse"] == "fresh"]
    prefill = max(prefills, key=lambda r: r["context"], default=None)
    return {
        "itl_ratio": decode["ratio"],
        "itl_ratio_low": decode["ratio_low"],
        "itl_ratio_high": decode["ratio_high"],
        "p95_reference_ms": decode["reference_p95_ms"],
        "p95_ms": decode["candidate_p95_ms"],
        "p95_ratio": decode["p95_ratio"],
        "p95_ratio_low": decode["p95_ratio_low"],
        "p95_ratio_high": decode["p95_ratio_high"],
        "ttft_ratio": prefill and prefill["ratio"],
        "ttft_context": prefill and prefill["context"],
        "tokens_per_second": decode["tokens_per_second"],
        "peak_bytes": memory["candidate_peak"],
        "reference_peak_bytes": memory["reference_peak"],
        "held_bytes": memory["candidate_held"],
        "reference_held_bytes": memory["reference_held"],
    }
