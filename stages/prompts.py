"""Build every prompt of the corpus, to exact token lengths, with roles, gold answers and continuations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError, Profile, stage


@dataclass(frozen=True)
class PromptsConfig:
    profile: Profile
    corpus: dict[str, Any]
    texts: Path
    manifest: Path
    out: Path


@stage("prompts")
def main(config: PromptsConfig) -> None:
    from kvdrift import models
    from kvdrift.prompts.build import build, prefix_tokens
    from kvdrift.prompts.prompt import PromptError, to_frame
    from kvdrift.prompts.spec import CorpusSpec

    _, shape = models.read_manifest(config.manifest)
    tokenizer = models.load_tokenizer(config.manifest)
    try:
        prompts = build(
            tokenizer, CorpusSpec.from_dict(config.corpus), config.texts, shape.positions, config.profile.seed
        )
    except PromptError as error:
        raise ConfigError(*error.args) from error
    config.out.parent.mkdir(parents=True, exist_ok=True)
    to_frame(prompts).write_parquet(config.out)
    print(f"{len(prompts)} prompts, {prefix_tokens(prompts):,} prefix tokens")


if __name__ == "__main__":
    main()
