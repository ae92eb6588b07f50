"""Check the whole configuration, the model, the disk and the device; write what makes evidence stale."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvdrift.config import stage
from kvdrift.fingerprint import software_fingerprint
from kvdrift.preflight import examine
from kvdrift.ranges import require


@dataclass(frozen=True)
class PreflightConfig:
    """Profile, model and corpus are checked with all the rest, so that whatever is wrong is told at once."""

    profile: dict[str, Any]
    model: dict[str, Any]
    corpus: dict[str, Any]
    chunk_tokens: Literal[16]
    """Teacher forcing's."""
    disk_limit_gib: float
    """The most that the reference may write."""
    out: Path

    def __post_init__(self) -> None:
        require(self, disk_limit_gib=(0.001, 1e6))


@stage("preflight")
def main(config: PreflightConfig) -> None:
    given = {"profile": config.profile, "model": config.model, "corpus": config.corpus}
    sound = examine(Path.cwd(), given, config.chunk_tokens, config.disk_limit_gib)
    for doubt in sound.doubts:
        print(f"[preflight] warning: {doubt}", file=sys.stderr)
    config.out.mkdir(parents=True, exist_ok=True)
    write(config.out / "device.json", sound.device)
    write(config.out / "software.json", software_fingerprint())
    device, backend = sound.device["device"], sound.device["backend"]
    print(f"{sound.compositions} configurations fit {sound.model.id}; {device}, backend {backend}")


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file rather than write into it: it may be a link into DVC's cache."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
