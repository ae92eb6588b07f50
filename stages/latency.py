"""Decode over the packed cache beside the reference cache, paired; write latency, break-even, memory and capacity."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvdrift.config import Profile, stage
from kvdrift.measure.sweep import Scheduler, Sweep, Workload


@dataclass(frozen=True)
class LatencyConfig:
    profile: Profile
    latency: Sweep
    scheduler: Scheduler
    gates: dict[str, Any]
    workload: Workload
    """The gates' own target workload."""
    plan: str
    device: Path
    manifest: Path
    prompts: Path
    reference: Path
    plans: Path
    out: Path


@stage("latency", threads_spin=True)
def main(config: LatencyConfig) -> None:
    import json
    import os
    from functools import partial as bound

    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler, which finds the peak, writes to stderr

    import polars as pl
    from tqdm import tqdm

    from kvdrift import models
    from kvdrift.cache.packed import PackedCache  # noqa: F401 (registers the attention function)
    from kvdrift.measure import coldstart, layers, machine, service, timing
    from kvdrift.measure.bench import Bench, read_prefix
    from kvdrift.measure.partial import partial
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.reference import stored
    from kvdrift.measure.sweep import points, target
    from kvdrift.prompts.prompt import from_frame

    timing.pin(config.profile.threads)
    seed, sweep = config.profile.seed, config.latency
    policy = read_plan(config.plans, config.plan)
    model, _ = models.load(config.manifest, config.profile.torch_device, "kvdrift")
    batch = max(stored(config.reference, from_frame(pl.read_parquet(config.prompts))), key=lambda b: b.length)
    prefix = read_prefix(batch.path, batch.prefix, model.device)
    bench = Bench(model, policy, prefix, config.scheduler.prefill_chunk)
    before = machine.state(bench.device)
    first = target(config.workload, prefix.length)

    inputs = [asdict(config), policy.to_dict(), json.loads(config.device.read_text())]
    kept = partial(inputs, [Path("kvdrift"), Path("stages/latency.py"), config.manifest, config.prompts])
    cold = kept.once("cold", lambda: coldstart.cold_starts(bench, first.context, sweep.cold_starts, seed))
    floors, sampled = [], {point: [] for point in points(sweep, config.workload, config.scheduler, prefix.length)}
    for visit in tqdm(range(sweep.visits), desc=f"latency {config.plan}", unit="visit"):
        base = replace(first, generated=sweep.pairs).share(sweep.visits)
        floors.append(kept.once(f"floor-v{visit}", bound(service.sample_floor, bench, base, seed + visit)))
        for point, visits in sampled.items():
            work = bound(service.sample, bench, point.share(sweep.visits), sweep.turn, seed + visit)
            visits.append(kept.once(f"{point.name}-v{visit}", work))
    found = {point: service.joined(visits) for point, visits in sampled.items()}
    content = {
        "policy": policy.id,
        "workload": asdict(config.workload) | {"context": first.context},
        "rows": [service.row(point, samples, seed) for point, samples in found.items()],
        "break_even": service.break_evens(found, model.config.max_position_embeddings, seed),
        "noise_floor": asdict(timing.ratio(service.pairs_of(service.joined(floors)), seed)),
        "capacity": kept.once(
            "capacity", lambda: service.capacity(bench, sweep.capacity, config.scheduler, first.context)
        ),
        "attention_ms": kept.once("layers", lambda: layers.attention_ms(bench, first.batch, first.context)),
        "energy": kept.once("energy", lambda: service.joules_per_token(bench, first)),
        "cold_start": cold,
        "peers": {
            name: kept.once(name, lambda name=name: service.sample_peer(bench, name, first, sweep.pairs, seed))
            for name in sweep.peers
        },
    }
    content["machine"] = machine.settings(bench.device) | {"before": before, "after": machine.state(bench.device)}
    whole = min(first.context + config.workload.output, prefix.length)
    peaks = kept.once("peaks", lambda: service.peaks(bench, first.batch, whole))
    content["headline"] = service.headline(content["rows"], peaks)
    content["unavailable"] = [name for name in ("energy", "cold_start") if content[name] == "unavailable"]
    content["unavailable"] += [f"peer {name}" for name, figures in content["peers"].items() if isinstance(figures, str)]
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / f"{config.plan}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    kept.clear()


if __name__ == "__main__":
    main()
