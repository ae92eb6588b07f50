"""Make prompts that attack: facts in the worst cells, and amid the tokens with the largest keys; run the reference."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import ConfigError, Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class AttackConfig:
    profile: Profile
    cells: int
    """How many of the worst cells are attacked."""
    items: int
    repeated: int
    """How many more prompts repeat the tokens whose keys calibration found largest."""
    length: int
    """Prefix tokens of an attack, cut to three quarters of the model's positions."""
    exact_tail: int
    """The newest tokens, which most policies keep exact and no fact is put into: residual window and a block."""
    seed: int
    manifest: Path
    sensitivity: Path
    calibration: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, cells=(1, 1000), items=(1, 1000), repeated=(0, 1000), seed=(0, 2**32 - 1))
        require(self, length=(128, 2**20, 16), exact_tail=(0, 2**20))


@stage("attack")
def main(config: AttackConfig) -> None:
    import json

    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.reference import store
    from kvdrift.prompts.attack import COHORT, attack, repeated
    from kvdrift.prompts.batches import batched
    from kvdrift.prompts.prompt import LENGTH_STEP, PromptError, to_frame

    torch.set_num_threads(config.profile.threads)
    _, shape = models.read_manifest(config.manifest)
    length = min(config.length, (shape.positions or config.length) * 3 // 4 // LENGTH_STEP * LENGTH_STEP)
    cells = pl.read_parquet(config.sensitivity).drop_nulls(["bucket", "kl"])
    end = length - config.exact_tail
    worst = cells.filter(pl.col("start") < end).with_columns(stop=pl.min_horizontal("stop", end))
    worst = worst.sort("kl", descending=True)
    worst = worst.unique(["start", "stop"], keep="first", maintain_order=True).head(config.cells)
    model, tokenizer = models.load(config.manifest, config.profile.torch_device)
    spans = list(worst.select("start", "stop").iter_rows())
    try:
        prompts = attack(tokenizer, spans, length=length, items=config.items, seed=config.seed)
    except PromptError as error:
        raise ConfigError(f"conf/attack.yaml: {error}") from error
    outliers = [row["token"] for row in json.loads(config.calibration.read_text())["outlier_tokens"]]
    prompts += repeated(tokenizer, outliers, length=length, items=config.repeated, seed=config.seed)
    prompts = batched(prompts, len(prompts), COHORT)
    config.out.mkdir(parents=True, exist_ok=True)
    to_frame(prompts).write_parquet(config.out / "prompts.parquet")
    store(model, tokenizer, prompts, config.out / "reference", config.profile.seed)


if __name__ == "__main__":
    main()
