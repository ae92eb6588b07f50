"""Find the searched policy's bits from the sensitivity map, then refine them on the measured whole stack."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError, Profile, stage
from kvdrift.ranges import require


@dataclass(frozen=True)
class SearchConfig:
    profile: Profile
    policy: dict[str, Any]
    cohorts: list[str]
    """Cohorts whose longest prompt is measured."""
    steps: int
    trials: int
    """Swaps that are measured."""
    manifest: Path
    prompts: Path
    reference: Path
    cells: Path
    out: Path

    def __post_init__(self) -> None:
        require(self, filled=("cohorts",), steps=(16, 1024, 16), trials=(0, 10_000))


@stage("search")
def main(config: SearchConfig) -> None:
    import json

    import polars as pl
    import torch

    from kvdrift import models
    from kvdrift.measure.reference import longest, stored
    from kvdrift.measure.whole import whole_stack_kl
    from kvdrift.policy import PolicyError, from_dict
    from kvdrift.prompts.prompt import from_frame
    from kvdrift.search import Allocation, allocate, layer_choices, refine, resolve

    torch.set_num_threads(config.profile.threads)
    _, shape = models.read_manifest(config.manifest)
    cells = pl.read_parquet(config.cells)
    choices, block = layer_choices(config.policy), config.policy.get("block", 64)
    try:
        start = allocate(cells, choices, shape, block, config.policy["search"]["bits_per_element"])
    except PolicyError as error:
        raise ConfigError(f"conf/policy/auto.yaml: {error}") from error

    model, _ = models.load(config.manifest, config.profile.torch_device, "kvdrift")
    model.float()  # differences between allocations are below bfloat16's rounding noise
    batches = stored(config.reference, from_frame(pl.read_parquet(config.prompts)))
    measured = whole_stack_kl(model, [longest(batches, cohort) for cohort in config.cohorts], config.steps)

    def layers(allocation: Allocation) -> list[dict[str, str]]:
        return [{t: allocation.choices[layer, t] for t in ("key", "value")} for layer in range(shape.layers)]

    def measure(allocation: Allocation) -> float:
        return measured(from_dict(resolve(config.policy, layers(allocation)), name="auto"))

    found, kl = refine(start, cells, choices, shape, block, measure, config.trials)
    content = {
        "layers": layers(found),
        "bits_per_element": found.bits_per_element,
        "predicted_kl": found.predicted_kl,
        "measured_kl": kl,
        "start": {"predicted_kl": start.predicted_kl, "measured_kl": measure(start)},
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(
        f"auto: {found.bits_per_element:.2f} bits an element; KL of the whole stack {kl:.4f} nats, "
        f"{found.predicted_kl:.4f} predicted from isolated layers; "
        f"{content['start']['measured_kl']:.4f} before refining"
    )


if __name__ == "__main__":
    main()
