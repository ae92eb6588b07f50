"""Channel ranges of keys and values on the calibration prompts, which saturation and the outlier detector go by, and
the tokens with the largest keys, which attacks repeat."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import ConfigError, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class CalibrateConfig:
    outlier_margin: float
    """A request is an outlier when a key or value exceeds the calibrated range of its layer by this factor."""
    outlier_tokens: int
    """How many of the tokens with the largest keys are recorded."""
    prompts: Path
    reference: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, outlier_margin=(1, 1000), outlier_tokens=(1, 1000))


@stage("calibrate")
def main(config: CalibrateConfig) -> None:
    import json

    import polars as pl
    import torch
    from safetensors.torch import save_file

    from kvdrift.measure.calibration import channel_range, largest_keys
    from kvdrift.measure.reference import stored
    from kvdrift.prompts.prompt import from_frame

    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)), "calibration")
    if not batches:
        raise ConfigError("the corpus has no calibration prompts; give conf/corpus a calibration cohort")
    ranges: dict[str, list[torch.Tensor]] = {}
    limits = []
    for layer in range(batches[0].layers):
        tensors = [batch.layer(layer) for batch in batches]
        limit = {}
        for name, at in (("keys", 0), ("values", 1)):
            try:
                low, high = channel_range([pair[at] for pair in tensors], f"{name} of layer {layer}")
            except ValueError as error:
                raise ConfigError(str(error)) from error
            ranges.setdefault(f"{name}_low", []).append(low)
            ranges.setdefault(f"{name}_high", []).append(high)
            limit[name] = config.outlier_margin * float(torch.maximum(low.abs(), high.abs()).amax())
        limits.append(limit)
    config.out.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.stack(layers) for name, layers in ranges.items()}, config.out / "ranges.safetensors")
    prompts = [p for batch in batches for p in batch.prompts]
    largest: dict[int, float] = {}
    for batch in batches:
        keys = (batch.layer(layer)[0] for layer in range(batch.layers))
        for token, magnitude in largest_keys(batch.prefix, keys, config.outlier_tokens):
            largest[token] = max(magnitude, largest.get(token, 0.0))
    ranked = sorted(largest.items(), key=lambda item: (-item[1], item[0]))[: config.outlier_tokens]
    content = {
        "coverage": {
            "cohorts": sorted({p.cohort for p in prompts}),
            "prompts": len(prompts),
            "tokens": sum(len(p.tokens) for p in prompts),
        },
        "outlier_limits": limits,
        "outlier_tokens": [{"token": token, "magnitude": magnitude} for token, magnitude in ranked],
    }
    (config.out / "calibration.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
