"""Results of a sweep that isn't finished: kept outside the stage's outputs, found again by the hash of its inputs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(".kvdrift/partial")


@dataclass(frozen=True)
class Partial:
    """One sweep's finished parts, a JSON file each."""

    folder: Path

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """The kept result of `name`, or that of `work()`, which is plain JSON data and kept from now on."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(work()))
            os.replace(fresh, path)
        return json.loads(path.read_text())

    def clear(self) -> None:
        """The sweep is finished: what is asked for again is measured again."""
        shutil.rmtree(self.folder, ignore_errors=True)


def partial(inputs: Any, sources: Iterable[Path]) -> Partial:
    """The parts of the sweep with these `inputs` (plain data), made by the code under `sources` (files or folders)."""
    content = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode())
    for source in sources:
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                content.update(file.name.encode() + b"\0" + file.read_bytes())
    return Partial(FOLDER / content.hexdigest()[:16])
