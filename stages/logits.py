"""Teacher-force every prompt over its packed cache; compare each next-token distribution with the reference's."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import Profile, stage


@dataclass(frozen=True)
class LogitsConfig:
    profile: Profile
    plan: str
    probes: list[str]
    """Cohorts whose first prompt also gets the KL of single cells."""
    probe_steps: int
    manifest: Path
    prompts: Path
    attack: Path
    reference: Path
    attack_reference: Path
    plans: Path
    out: Path


@stage("logits")
def main(config: LogitsConfig) -> None:
    import polars as pl
    import torch
    from tqdm import tqdm

    from kvdrift import models
    from kvdrift.cache.packed import PackedCache
    from kvdrift.measure.cells import Variant, layer_kl
    from kvdrift.measure.logits import compare
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.reference import Stored, longest, stored
    from kvdrift.measure.replay import score
    from kvdrift.measure.tensors import bucket_ranges
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    policy = read_plan(config.plans, config.plan)
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))
    batches += stored(config.attack_reference, from_frame(pl.read_parquet(config.attack)))
    model, _ = models.load(config.manifest, config.profile.torch_device, "kvdrift")

    def compared(batch: Stored) -> pl.DataFrame:
        cache = PackedCache(policy, model.config, dtype=model.dtype)
        batch.fill(cache, model.device)
        continuation = batch.continuation.to(model.device)
        logits = score(model, cache, continuation)
        (reference,) = batch.read("logits")
        frames = []
        for row, prompt in enumerate(batch.prompts):
            steps = prompt.scored - 1
            figures = compare(reference[row, :steps].to(model.device), logits[row, :steps], continuation[row, 1 : steps + 1])
            columns = {"step": range(steps), "position": range(batch.length, batch.length + steps)}
            columns |= {name: figure.cpu().numpy() for name, figure in figures.items()}
            frames.append(pl.DataFrame(columns).with_columns(prompt=pl.lit(prompt.id), cohort=pl.lit(prompt.cohort)))
        return pl.concat(frames)

    scored = [batch for batch in batches if len(batch.prompts[0].continuation) > 1]
    frames = [compared(batch) for batch in tqdm(scored, desc=f"logits {config.plan}", unit="batch")]
    config.out.mkdir(parents=True, exist_ok=True)
    pl.concat(frames).write_parquet(config.out / f"{config.plan}.parquet")

    cells = []
    probes = [longest(scored, cohort) for cohort in config.probes]
    bound = policy.bind(len(model.get_decoder().layers), probes[0].layer(0)[0].shape[-1])
    for probe in probes:
        ranges = bucket_ranges(probe.length)
        for layer, quantizers in enumerate(tqdm(bound.layers, desc=f"cells {config.plan}", unit="layer")):
            found = None
            if not quantizers.is_exact:
                found = layer_kl(model, probe, 0, layer, [Variant(bound, tuple(ranges))], config.probe_steps)[0].mean(1)
            for i, span in enumerate(ranges):
                packed = [b for b in range(bound.sink_tokens, probe.length - bound.exact_tokens + bound.sink_tokens - bound.block + 1, bound.block) if b in span]
                kl = float(found[i]) if found is not None and packed else None
                row = {"prompt": probe.prompts[0].id, "layer": layer, "bucket": span.start, "tensor": "both", "kl": kl}
                cells.append(row | {"start": packed[0] if packed else None, "stop": packed[-1] + bound.block if packed else None})
    schema = {"prompt": pl.String, "layer": pl.Int64, "bucket": pl.Int64, "start": pl.Int64, "stop": pl.Int64, "tensor": pl.String, "kl": pl.Float64}
    pl.DataFrame(cells, schema=schema).write_parquet(config.out / f"{config.plan}_cells.parquet")


if __name__ == "__main__":
    main()
