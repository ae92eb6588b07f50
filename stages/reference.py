"""Run the exact model once on every prompt; store its keys, values, queries, hidden states, logits and generations."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class ReferenceConfig:
    profile: Profile
    floor_batches: int
    """How many batches are scored again with another batch composition, for the noise floor."""
    manifest: Path
    prompts: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, floor_batches=(1, 1000))


@stage("reference")
def main(config: ReferenceConfig) -> None:
    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.floor import noise_floor
    from kvdrift.measure.reference import store, stored
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    prompts = from_frame(pl.read_parquet(config.prompts))
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    store(model, tokenizer, prompts, config.out, config.profile.seed)
    shared = [batch for batch in stored(config.out, prompts) if len(batch.prompts) > 1]
    floor = [noise_floor(model, batch) for batch in shared[: config.floor_batches]]
    pl.concat(floor).write_parquet(config.out / "noise_floor.parquet")


if __name__ == "__main__":
    main()
