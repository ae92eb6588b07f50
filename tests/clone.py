"""A copy of the repository's stages and configuration, to edit and to examine."""

import shutil
from pathlib import Path

import pytest

from kvdrift.config import ConfigError, compose
from kvdrift.preflight import Sound, examine

HERE = Path(__file__).parent.parent
SELECTED = ("profile=smoke", "model=tiny", "corpus=smoke")
PARAMS = "{profile: smoke, model: tiny, corpus: smoke, gates: smoke, policies: [exact, int4, auto]}\n"


def clone(root: Path) -> Path:
    """The repository's stages and configuration, with the smoke profile selected."""
    for name in ("conf", "stages"):
        shutil.copytree(HERE / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "dvc.yaml", root)
    (root / "params.yaml").write_text(PARAMS)
    return root


def examined(repo: Path, *overrides: str) -> Sound:
    given = compose("preflight", [*SELECTED, *overrides], repo / "conf").values
    return examine(repo, given, given["chunk_tokens"], float(given["disk_limit_gib"]))


def edit(repo: Path, file: str, old: str, new: str) -> None:
    text = (repo / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (repo / file).write_text(text.replace(old, new))


def wrong(repo: Path, *overrides: str) -> list[str]:
    """The lines of what is wrong."""
    with pytest.raises(ConfigError) as caught:
        examined(repo, *overrides)
    return str(caught.value).splitlines()


def keep(repo: Path, *stages: str) -> None:
    """Leave these stages alone, which takes less time than all of them."""
    for script in (repo / "stages").glob("*.py"):
        if script.stem not in stages:
            script.unlink()
