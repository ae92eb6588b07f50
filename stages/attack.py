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
    """Prefix tokens of an attack, cut to three quarters of the model's positions."""
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
    from kvdrift.prompts.prompt import LENGTH_STEP, to_frame

    torch.set_num_threads(config.profile.threads)
    _, shape = models.read_manifest(config.manifest)
    length = min(config.length, (shape.positions or config.length) * 3 // 4 // LENGTH_STEP * LENGTH_STEP)
    cells = pl.read_parquet(config.sensitivity).drop_nulls(["bucket", "kl"])
    worst = cells.filter(pl.col("stop") <= length).sort("kl", descending=True)
    worst = worst.unique(["start", "stop"], keep="first", maintain_order=True).head(config.cells)
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    spans = list(worst.select("start", "stop").iter_rows())
    prompts = attack(tokenizer, spans, length=length, items=config.items, seed=config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    to_frame(prompts).write_parquet(config.out / "prompts.parquet")
    store(model, tokenizer, prompts, config.out / "reference", config.profile.seed)


if __name__ == "__main__":
    main()
