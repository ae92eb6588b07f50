"""Find the searched policy's bits from the sensitivity map."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError, stage


@dataclass(frozen=True)
class SearchConfig:
    policy: dict[str, Any]
    manifest: Path
    cells: Path
    out: Path


@stage("search")
def main(config: SearchConfig) -> None:
    import json

    import polars as pl

    from kvdrift import models
    from kvdrift.policy import PolicyError
    from kvdrift.search import allocate, layer_choices

    _, shape = models.read_manifest(config.manifest)
    try:
        found = allocate(
            pl.read_parquet(config.cells),
            layer_choices(config.policy),
            shape,
            config.policy.get("block", 64),
            config.policy["search"]["bits_per_element"],
        )
    except PolicyError as error:
        raise ConfigError(f"conf/policy/auto.yaml: {error}") from error
    content = {
        "layers": [{t: found.choices[layer, t] for t in ("key", "value")} for layer in range(shape.layers)],
        "bits_per_element": found.bits_per_element,
        "predicted_kl": found.predicted_kl,
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"auto: {found.bits_per_element:.2f} bits an element, predicted KL {found.predicted_kl:.4f} nats")


if __name__ == "__main__":
    main()
