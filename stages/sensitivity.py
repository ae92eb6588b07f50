"""What every cell does under the probe quantizers: each layer alone, each position bucket; keys, values, both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class SensitivityConfig:
    profile: Profile
    policy: dict[str, Any]
    """The searched policy: its choices are probed layer by layer."""
    probe_policies: list[str]
    """Policies whose quantizers are probed cell by cell."""
    cohorts: list[str]
    """Cohorts whose longest prompt is a probe prompt; the needle set is asked besides."""
    steps: int
    manifest: Path
    prompts: Path
    reference: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, filled=("probe_policies", "cohorts"), steps=(8, 1024, 8))


@stage("sensitivity")
def main(config: SensitivityConfig) -> None:
    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.ledger import load_policy
    from kvdrift.measure.needles import answer_steps, needle_set
    from kvdrift.measure.reference import longest, stored
    from kvdrift.measure.sensitivity import SCHEMA, needle_rows, probes, prompt_rows
    from kvdrift.prompts.prompt import from_frame

    torch.set_num_threads(config.profile.threads)
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))
    model, tokenizer = models.load(config.manifest, config.profile.torch_device, "kvdrift")
    model.float()  # a cell's effect is often below bfloat16's own rounding noise
    chosen = probes(config.policy, [load_policy(name) for name in config.probe_policies])
    asked = [longest(batches, cohort) for cohort in config.cohorts]
    rows = [row for batch, at in asked for row in prompt_rows(model, batch, at, chosen, config.steps)]
    for batch, at in needle_set(batches, chosen[0].policy):
        if answer := answer_steps(tokenizer, batch.prompts[at]):
            rows += needle_rows(model, batch, at, chosen, answer)
    config.out.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(rows, schema=SCHEMA).write_parquet(config.out / "cells.parquet")


if __name__ == "__main__":
    main()
