"""Which backend runs, and what is said when it can't: `pytest tests/kernels/test_dispatch.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvdrift.kernels import definition, dispatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch._resolve.cache_clear()


def test_the_variable_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "definition")
    assert dispatch.backend(CPU) is definition
    assert dispatch.name(CPU) == "definition"


def test_an_unknown_name_is_an_error_that_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "avx")
    with pytest.raises(dispatch.BackendError, match="KVDRIFT_BACKEND is 'avx'; allowed: definition, native, cuda"):
        dispatch.backend(CPU)


@pytest.mark.parametrize(
    ("device", "wanted", "missing"),
    [
        pytest.param(
            CUDA,
            "cuda",
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (CUDA, "native", "it needs tensors on cpu, not on cuda"),
    ],
)
def test_what_is_missing_is_named_once(
    device: torch.device, wanted: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, wanted)
    with pytest.warns(RuntimeWarning, match=missing):
        assert dispatch.backend(device) is definition
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.name(device) == "definition"


NO_COMPILER = """
import warnings, torch
from kvdrift.kernels import dispatch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = [dispatch.backend(torch.device("cpu")).__name__ for _ in range(3)]
    dispatch.build_id(torch.device("cpu"))
messages = [warning.message for warning in caught if warning.category is RuntimeWarning]
print(names[0], len(set(names)), *messages, sep="|")
"""


def test_without_a_compiler_the_definition_runs_with_one_warning(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PATH": str(tmp_path), "KVDRIFT_CACHE": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], env=environment, capture_output=True, text=True, check=True
    )
    name, distinct, *messages = done.stdout.strip().split("|")
    assert (name, distinct) == ("kvdrift.kernels.definition", "1")
    assert len(messages) == 1
    assert "no C++ compiler: `c++` is not on PATH" in messages[0]


def test_a_build_id_is_short_and_tells_backends_apart() -> None:
    ids = {dispatch._build_id(name) for name in ("definition", "cuda")}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{12}", one) for one in ids)
