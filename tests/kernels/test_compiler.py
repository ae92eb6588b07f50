"""How the native kernels' library is made, kept and made again: `pytest tests/kernels/test_compiler.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvdrift.kernels import compiler, definition, dispatch

STUB = "\n".join(
    f'extern "C" int kvdrift_{name}() {{ return 7; }}'
    for name in ("seal", "unseal", "checksum", "label", "decode_attention")
)


@pytest.fixture
def _stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that compile in no time, and nothing remembered."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "stub.cpp").write_text(STUB + "\nchar room[1 << 18] = {1};")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(compiler, "CONTRACTION", {"stub.cpp": "off"})
    for name in ("library", "build_id"):
        monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)


@pytest.fixture
def _forgetful() -> Iterator[None]:
    """What dispatch resolved here is resolved again elsewhere."""
    dispatch._resolve.cache_clear()
    yield
    dispatch._resolve.cache_clear()


def works(library: object) -> bool:
    function = library.kvdrift_seal  # type: ignore[attr-defined]
    function.argtypes, function.restype = (), compiler.ctypes.c_int
    return bool(function() == 7)


@pytest.mark.usefixtures("_stub")
def test_a_damaged_library_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, cut short anywhere, a byte changed: to load most of these would end the process."""
    whole = tmp_path / "whole"
    monkeypatch.setenv("KVDRIFT_CACHE", str(whole))
    assert works(compiler.library())
    (built,) = whole.iterdir()
    content = built.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for i, damaged in enumerate([b"", content[:100], content[: len(content) // 2], content[:-1], bytes(flipped)]):
        folder = tmp_path / f"damaged-{i}"
        folder.mkdir()
        (folder / built.name).write_bytes(damaged)
        monkeypatch.setenv("KVDRIFT_CACHE", str(folder))
        assert works(compiler.library())
        assert [path.name for path in folder.iterdir()] == [built.name]
        assert compiler._whole(folder / built.name)


AT_ONCE = """
import sys
from pathlib import Path
from kvdrift.kernels import compiler
compiler.SOURCES, compiler.CONTRACTION = Path(sys.argv[1]), {"stub.cpp": "off"}
assert compiler.library().kvdrift_seal
"""


@pytest.mark.usefixtures("_stub")
def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    """Each gets a working library, and one file is left."""
    root, cache = Path(__file__).parents[2], tmp_path / "cache"
    environment = {**os.environ, "KVDRIFT_CACHE": str(cache), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "sources")]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@pytest.mark.usefixtures("_stub")
def test_a_library_that_is_whole_is_loaded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "cache"))
    compiler.library()
    monkeypatch.setattr(compiler, "_compile", lambda path: pytest.fail("compiled again"))
    assert works(compiler.library())


@pytest.mark.usefixtures("_stub", "_forgetful")
@pytest.mark.parametrize("where", ["file/below", "file"])
def test_a_folder_that_cannot_be_used_is_named_and_the_definition_runs(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / where))
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    with pytest.raises(compiler.NativeUnavailable, match=rf"{tmp_path / where} .*set KVDRIFT_CACHE to a folder"):
        compiler.library()
    with pytest.warns(RuntimeWarning, match=rf"native kernels can't run: can't compile into {tmp_path / where} "):
        assert dispatch.backend(torch.device("cpu")) is definition
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.name(torch.device("cpu")) == "definition"
