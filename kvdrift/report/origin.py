"""What a receipt binds its evidence to, so that anybody can tell whether theirs is the same: hashes, commit, revision.

Every hash can be had without this file; `again` is the command, to be run where the evidence was made.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.config import ConfigError

CODE = ("kvdrift", "stages", "conf", "params.yaml", "dvc.yaml")
"""What makes the evidence. What it leaves behind, such as metrics and plots, is not part of its source."""


@dataclass(frozen=True)
class Hash:
    """A sha256 in hex, what it covers in words, and the command that shows it again."""

    of: str
    covers: str
    sha256: str
    again: str


def weight_hashes(manifest: Mapping[str, Any], folder: Path) -> list[Hash]:
    """The manifest's own hash of each file of weights, and of the packaged file that they were converted from."""
    source = manifest["source"]
    where = "its folder" if source.get("source") == "hub" else folder.as_posix()
    found = []
    for name, file in sorted((manifest.get("weights") or {}).items()):
        covers, again = f"this file alone, {file['bytes']:,} bytes", f"in {where}: `sha256sum {name}`"
        found.append(Hash(f"weights: {name}", covers, file["sha256"], again))
    if source.get("sha256"):
        again = f"where the package is installed: `sha256sum {source['id']}`"
        found.append(Hash("weights as packaged", f"{source['id']} alone", source["sha256"], again))
    return found


def hashed(of: str, paths: Sequence[Path]) -> Hash:
    """One file's own sha256; of more files, or of folders with all that is in them but `__pycache__`, that of the
    listing which `sha256sum` prints for them, by name."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} is to be hashed for the receipt and isn't there; see conf/frontier.yaml")
    names = " ".join(path.as_posix() for path in paths)
    if len(paths) == 1 and paths[0].is_file():
        return Hash(of, "this file alone", file_sha256(paths[0]), f"`sha256sum {names}`")
    inside = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    files = sorted(file.as_posix() for file in inside if "__pycache__" not in file.parts)
    listing = "".join(f"{file_sha256(Path(file))}  {file}\n" for file in files)
    covers = f"{len(files):,} files in {names}, their names too, without __pycache__"
    find = f"find {names} -type f -not -path '*/__pycache__/*'"
    again = f"`{find} | LC_ALL=C sort | tr '\\n' '\\0' | xargs -0 sha256sum | sha256sum`"
    return Hash(of, covers, hashlib.sha256(listing.encode()).hexdigest(), again)


def config_hash(values: Mapping[str, Any], receipt: Path) -> Hash:
    """Of the selected configuration, which stands in the receipt under `config`, as JSON with sorted keys."""
    read = f"json.dumps(json.load(open('{receipt.as_posix()}'))['config'], sort_keys=True)"
    again = f'`python -c "import hashlib, json; print(hashlib.sha256({read}.encode()).hexdigest())"`'
    found = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return Hash("config", f"{', '.join(values)} as composed: `config` of {receipt.name}", found, again)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it: YAML's keys may be numbers, which don't sort among names."""
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(root: Path) -> dict[str, Any] | None:
    """{commit, dirty} of the code that makes the evidence; None where git knows none."""
    try:
        head = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", *(name for name in CODE if (root / name).exists()))
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": head, "dirty": bool(changed.strip())}


def _git(root: Path, *arguments: str) -> str:
    # Read only: a status that refreshes the index would wait for, or disturb, whoever commits meanwhile.
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def revision(source: Mapping[str, Any]) -> str:
    """The model's revision in words, or what it is known by instead."""
    if source.get("revision"):
        return str(source["revision"])
    kind = source.get("source")
    if kind == "gguf_package":
        return f"none: from package {source['id'].split('/')[0]} {source.get('package_version', '')}".rstrip()
    if kind == "tiny":
        return f"none: drawn from seed {source.get('seed')}"
    return "none: local"
