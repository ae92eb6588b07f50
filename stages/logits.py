"""Teacher-force every prompt over its packed cache; compare each next-token distribution with the reference's."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class LogitsConfig:
    profile: Profile
    plan: str
    probes: list[str]
    """Cohorts whose longest prompt also gets the KL of single cells."""
    probe_steps: int
    manifest: Path
    prompts: Path
    attack: Path
    reference: Path
    attack_reference: Path
    plans: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, filled=("probes",), probe_steps=(8, 1024, 8))


@stage("logits")
def main(config: LogitsConfig) -> None:
    import polars as pl
    import torch
    from tqdm import tqdm

    from kvdrift import models
    from kvdrift.cache.packed import PackedCache
    from kvdrift.measure.cells import CELLS, policy_cells
    from kvdrift.measure.logits import scored_rows
    from kvdrift.measure.plans import read_plan
    from kvdrift.measure.reference import Stored, longest, stored
    from kvdrift.measure.replay import score
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    policy = read_plan(config.plans, config.plan)
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))
    batches += stored(config.attack_reference, from_frame(pl.read_parquet(config.attack)))
    model, _ = models.load(config.manifest, config.profile.torch_device, "kvdrift")

    def compared(batch: Stored) -> pl.DataFrame:
        cache = PackedCache(policy, model.config, dtype=model.dtype)
        batch.fill(cache, model.device)
        logits = score(model, cache, batch.continuation.to(model.device))
        (reference,) = batch.read("logits")
        return pl.concat(map(scored_rows, batch.prompts, reference, logits))

    scored = [batch for batch in batches if len(batch.prompts[0].continuation) > 1]
    frames = [compared(batch) for batch in tqdm(scored, desc=f"logits {config.plan}", unit="batch")]
    config.out.mkdir(parents=True, exist_ok=True)
    pl.concat(frames).write_parquet(config.out / f"{config.plan}.parquet", metadata={"policy": policy.id})

    model.float()  # a cell's effect is often below bfloat16's own rounding noise
    probes = [longest(scored, cohort) for cohort in config.probes]
    cells = [row for batch, at in probes for row in policy_cells(model, batch, at, policy, config.probe_steps)]
    pl.DataFrame(cells, schema=CELLS).write_parquet(
        config.out / f"{config.plan}_cells.parquet", metadata={"policy": policy.id}
    )


if __name__ == "__main__":
    main()
