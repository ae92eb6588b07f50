"""What a receipt binds its evidence to. `python -m pytest tests/report/test_origin.py`"""

import hashlib
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from kvdrift.config import ConfigError
from kvdrift.report.origin import commit, hashed, revision, weight_hashes


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def test_a_commit_is_known_in_a_checkout_alone_and_dirty_by_its_code(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None  # no commit yet
    (tmp_path / "kvdrift").mkdir()
    (tmp_path / "kvdrift" / "code.py").write_text("pass\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "metrics.json").write_text("{}")
    assert commit(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "kvdrift" / "code.py").write_text("1\n")
    assert commit(tmp_path) == {"commit": head, "dirty": True}


def test_a_machine_without_git_knows_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"source": "hub", "id": "a/b", "revision": "0123abc"}, "0123abc"),
        ({"source": "hub", "id": "/somewhere", "revision": None}, "none: local"),
        ({"source": "tiny", "id": "tiny", "revision": None, "seed": 7}, "none: drawn from seed 7"),
        (
            {"source": "gguf_package", "id": "package/file.gguf", "revision": None, "package_version": "0.1.2"},
            "none: from package package 0.1.2",
        ),
    ],
)
def test_a_model_without_a_revision_says_what_it_is_known_by(source: dict[str, object], text: str) -> None:
    assert revision(source) == text


def test_weights_are_hashed_as_files_and_as_packaged() -> None:
    manifest = {"source": {"source": "gguf_package", "id": "p/f.gguf", "sha256": "aa"}}
    files = {"b.safetensors": {"bytes": 5, "sha256": "bb"}, "a.safetensors": {"bytes": 1000, "sha256": "cc"}}
    rows = weight_hashes(manifest | {"weights": files}, Path("data/model"))
    assert [(row.of, row.sha256) for row in rows] == [
        ("weights: a.safetensors", "cc"),
        ("weights: b.safetensors", "bb"),
        ("weights as packaged", "aa"),
    ]
    assert rows[0].again == "in data/model: `sha256sum a.safetensors`"
    assert weight_hashes({"source": {"source": "tiny", "id": "tiny"}}, Path()) == []


def test_a_hash_follows_contents_and_names_but_no_cache(tmp_path: Path) -> None:
    folder = Path("code")
    with chdir(tmp_path):
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "b.py").write_text("b")
        (folder / "a file.py").write_text("a")
        (folder / "__pycache__" / "b.pyc").write_text("1")
        first = hashed("code", [folder])
        shown = subprocess.run(["bash", "-c", first.again.strip("`")], capture_output=True, text=True, check=True)
        assert shown.stdout.split()[0] == first.sha256
        assert first.covers.startswith("2 files in code")
        (folder / "__pycache__" / "b.pyc").write_text("2")
        assert hashed("code", [folder]) == first
        (folder / "b.py").rename(folder / "c.py")
        assert hashed("code", [folder]).sha256 != first.sha256
        assert hashed("one", [folder / "c.py"]).sha256 == hashlib.sha256(b"b").hexdigest()
        with pytest.raises(ConfigError, match=r"conf/frontier\.yaml"):
            hashed("code", [Path("nowhere")])
