"""A clone of the working tree in a folder of its own, and what a real `dvc repro` in it runs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUTPUTS = ("dvc.lock", "metrics/", "plots/")
"""What a run leaves in git; the clone starts without it."""
RUNNING = re.compile(r"^Running stage '(.+)':$", re.MULTILINE)


@dataclass(frozen=True)
class Clone:
    """Commands run with its own code first on the path, offline, and with nothing of the user's DVC or git settings."""

    root: Path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "DVC_", "KVDRIFT_"))}
        offline = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
        own = {
            "PYTHONPATH": str(self.root),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "DVC_SITE_CACHE_DIR": str(self.root.parent / "dvc"),
            "COLUMNS": "160",
        }
        return kept | offline | own | more

    def run(self, *command: str, fails: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run to its end; its status must be zero, or not zero where it `fails`."""
        done = subprocess.run(
            command, cwd=self.root, env=self.environment(**environment), capture_output=True, text=True
        )
        assert bool(done.returncode) == fails, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def dvc(self, *arguments: str, fails: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dvc", *arguments, fails=fails, **environment)

    def repro(self, *targets: str, **environment: str) -> set[str]:
        """The stages that `dvc repro` runs; those that it checks out of its cache aren't among them."""
        return set(RUNNING.findall(self.dvc("repro", *targets, **environment).stdout))

    def commit(self) -> None:
        """Everything into git, as the author `test`."""
        self.run("git", "add", "--all")
        author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        self.run("git", *author, "commit", "--quiet", "--message", "a run")

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (self.root / path).write_text(text.replace(old, new))

    def append(self, path: str, line: str) -> None:
        with (self.root / path).open("a") as file:
            file.write(f"{line}\n")

    def policies(self) -> list[str]:
        policies: list[str] = yaml.safe_load((self.root / "params.yaml").read_text())["policies"]
        return policies

    def stages(self, *names: str) -> set[str]:
        """The instances of these stages, one a policy where dvc.yaml says `foreach`."""
        declared = yaml.safe_load((self.root / "dvc.yaml").read_text())["stages"]
        each = {name for name in names if "foreach" in declared[name]}
        return {f"{name}@{policy}" for name in each for policy in self.policies()} | set(names) - each

    def users(self, dep: str) -> set[str]:
        """The instances of every stage that depends on this file or folder."""
        declared = yaml.safe_load((self.root / "dvc.yaml").read_text())["stages"]
        return self.stages(*(name for name, stage in declared.items() if dep in stage.get("do", stage)["deps"]))

    def outputs(self) -> dict[str, str]:
        """The hash of every file that a run has left."""
        folders = [self.root / name for name in ("data", "metrics", "plots")]
        files = [self.root / "dvc.lock", *(file for folder in folders for file in folder.rglob("*") if file.is_file())]
        return {f.relative_to(self.root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)}


def clone(root: Path, policies: Iterable[str]) -> Clone:
    """The tracked files of the working tree, and those that git would track, committed; smoke profile selected."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith(OUTPUTS) and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    selections: dict[str, Any] = {"profile": "smoke", "model": "tiny", "corpus": "smoke", "gates": "smoke"}
    (root / "params.yaml").write_text(yaml.safe_dump(selections | {"policies": list(policies)}))
    made = Clone(root)
    made.run("git", "init", "--quiet")
    made.commit()
    return made
