"""Bring the selected model to data/model and describe it in manifest.json."""

from dataclasses import dataclass
from pathlib import Path

from kvdrift.config import ConfigError, stage
from kvdrift.models import ModelError, ModelSource, prepare


@dataclass(frozen=True)
class ModelConfig:
    """`out` is the folder of weights, tokenizer and manifest."""

    model: ModelSource
    out: Path


@stage("model")
def main(config: ModelConfig) -> None:
    try:
        manifest = prepare(config.model, config.out)
    except ModelError as error:
        raise ConfigError(error) from error
    print(f"{manifest['source']['id']}: {manifest['shape']}")


if __name__ == "__main__":
    main()
