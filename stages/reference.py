"""Run the exact model once on every prompt; store its keys, values, queries, hidden states, logits and generations."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import ConfigError, Profile, stage


@dataclass(frozen=True)
class ReferenceConfig:
    profile: Profile
    disk_limit_gib: float
    """The most that may be written; more is refused before anything runs."""
    floor_batches: int
    """How many batches are scored again with another batch composition, for the noise floor."""
    manifest: Path
    prompts: Path
    out: Path


@stage("reference")
def main(config: ReferenceConfig) -> None:
    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.floor import noise_floor
    from kvdrift.measure.reference import bytes_needed, store, stored
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    prompts = from_frame(pl.read_parquet(config.prompts))
    _, shape = models.read_manifest(config.manifest)
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    needed = bytes_needed(prompts, shape, model.config.hidden_size, model.config.vocab_size)
    if needed > config.disk_limit_gib * 2**30:
        raise ConfigError(
            f"the reference needs {needed / 2**30:.2f} GiB under {config.out}, disk_limit_gib is "
            f"{config.disk_limit_gib}; choose a smaller corpus, or raise it in conf/reference.yaml"
        )
    store(model, tokenizer, prompts, config.out, config.profile.seed)
    shared = [batch for batch in stored(config.out, prompts) if len(batch.prompts) > 1]
    floor = [noise_floor(model, batch) for batch in shared[: config.floor_batches]]
    pl.concat(floor).write_parquet(config.out / "noise_floor.parquet")


if __name__ == "__main__":
    main()
