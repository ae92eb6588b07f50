"""Check the whole configuration, the model, the disk and the device; write what makes evidence stale."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift import preflight
from kvdrift.config import Profile, stage
from kvdrift.models import ModelSource


@dataclass(frozen=True)
class PreflightConfig:
    """`chunk_tokens`: teacher forcing's."""

    profile: Profile
    model: ModelSource
    corpus: dict[str, Any]
    chunk_tokens: int
    out: Path


@stage("preflight")
def main(config: PreflightConfig) -> None:
    root = Path.cwd()
    selections = preflight.read_selections(root)
    compositions = preflight.check_stages(root, selections)
    shape = preflight.check_model(config.model)
    preflight.check_policies(root, preflight.used_policies(root, selections), shape)
    tokens = preflight.check_corpus(config.corpus, shape, f"conf/corpus/{selections.corpus}.yaml")
    preflight.check_disk(root, tokens, shape)
    device = preflight.device_fingerprint(config.profile, config.chunk_tokens)
    config.out.mkdir(parents=True, exist_ok=True)
    write(config.out / "device.json", device)
    write(config.out / "software.json", preflight.software_fingerprint())
    print(f"{compositions} configurations fit {config.model.id}; {device['device']}, backend {device['backend']}")


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file rather than write into it: it may be a link into DVC's cache."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
