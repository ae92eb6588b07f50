"""The cache's tests run on the torch definition, one thread; those that name `backend` run on every CPU backend."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDRIFT_BACKEND", "definition")
    torch.set_num_threads(1)


@pytest.fixture(params=["definition", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU backend by name, chosen for this test; skipped, by name, where there is no compiler."""
    if request.param == "native":
        from kvdrift.kernels import compiler

        try:
            compiler.library()
        except compiler.NativeUnavailable as error:
            pytest.skip(f"native kernels: {error}")
    monkeypatch.setenv("KVDRIFT_BACKEND", request.param)
    return request.param
