"""Aim prompts at the worst cells: put their task-critical tokens there, and run the reference on them."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import Profile, stage


@dataclass(frozen=True)
class AttackConfig:
    profile: Profile
    cells: int
    """How many of the worst cells are attacked."""
    items: int
    length: int
    seed: int
    manifest: Path
    sensitivity: Path
    out: Path


@stage("attack")
def main(config: AttackConfig) -> None:
    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.reference import store
    from kvdrift.prompts.attack import attack
    from kvdrift.prompts.prompt import to_frame

    torch.set_num_threads(config.profile.threads)
    cells = pl.read_parquet(config.sensitivity).drop_nulls(["bucket", "kl"])
    worst = cells.filter(pl.col("stop") <= config.length).sort("kl", descending=True)
    worst = worst.unique(["start", "stop"], keep="first", maintain_order=True).head(config.cells)
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    spans = list(worst.select("start", "stop").iter_rows())
    prompts = attack(tokenizer, spans, length=config.length, items=config.items, seed=config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    to_frame(prompts).write_parquet(config.out / "prompts.parquet")
    store(model, tokenizer, prompts, config.out / "reference", config.profile.seed)


if __name__ == "__main__":
    main()
