"""Run the exact model once on every prompt; store its keys, values, queries, hidden states, logits and generations."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class ReferenceConfig:
    profile: Profile
    floor_batches: int
    """How many batches are scored again under other schedules, one of each length, for the noise floor."""
    answered_batches: int
    """How many batches have a few prompts answered again under other schedules."""
    manifest: Path
    prompts: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, floor_batches=(1, 1000), answered_batches=(1, 1000))


@stage("reference")
def main(config: ReferenceConfig) -> None:
    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.floor import generation_floor, noise_floor
    from kvdrift.measure.reference import store, stored
    from kvdrift.measure.replay import stop_tokens
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    prompts = from_frame(pl.read_parquet(config.prompts))
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    store(model, tokenizer, prompts, config.out, config.profile.seed)
    shared = [batch for batch in stored(config.out, prompts) if len(batch.prompts) > 1]
    longest_first = sorted(shared, key=lambda batch: len(batch.prompts[0].continuation), reverse=True)
    lengths = {batch.length: batch for batch in longest_first}  # of each length the one with the fewest tokens to score
    floor = [noise_floor(model, batch) for batch in list(lengths.values())[: config.floor_batches]]
    pl.concat(floor).write_parquet(config.out / "noise_floor.parquet")
    generations = pl.read_parquet(config.out / "generations.parquet").filter(mode="greedy")
    made = dict(generations.select("prompt", "tokens").iter_rows())
    stop, seed = stop_tokens(model, tokenizer), config.profile.seed
    tasks = [batch for batch in shared if batch.prompts[0].task][: config.answered_batches]
    answers = [generation_floor(model, tokenizer, batch, made, seed, stop) for batch in tasks]
    pl.concat(answers).write_parquet(config.out / "noise_floor_answers.parquet")


if __name__ == "__main__":
    main()
