"""Resolve one policy to a concrete plan, a quantizer for every layer, in a file of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError, stage


@dataclass(frozen=True)
class PlanConfig:
    name: str
    policy: dict[str, Any]
    manifest: Path
    search: Path
    out: Path


@stage("plan")
def main(config: PlanConfig) -> None:
    import json

    from kvdrift import models
    from kvdrift.policy import PolicyError, from_dict
    from kvdrift.search import resolve

    _, shape = models.read_manifest(config.manifest)
    raw = config.policy
    try:
        if "search" in raw:
            raw = resolve(raw, json.loads(config.search.read_text())["layers"])
        plan = from_dict(raw, name=config.name).bind(shape.layers, shape.head_dim)
    except PolicyError as error:
        raise ConfigError(f"conf/policy/{config.name}.yaml: {error}") from error
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / f"{config.name}.json").write_text(json.dumps(plan.to_dict(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
