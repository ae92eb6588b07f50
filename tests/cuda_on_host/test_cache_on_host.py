"""A PackedCache over the .cu sources, run on the host:  pytest tests/cuda_on_host/test_cache_on_host.py"""

from __future__ import annotations

from typing import Any

import pytest
from cache_cases import POLICIES, check_generation, check_stream
from cuda_host import run_on_host


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_host(monkeypatch)


@pytest.mark.parametrize("name", POLICIES)
def test_a_stream_is_the_definitions_byte_for_byte(name: str) -> None:
    check_stream(name, "cpu")


@pytest.mark.parametrize(("name", "beams"), [("kivi4", 1), ("int8", 3)])
def test_pages_of_a_generation_are_the_definitions(name: str, beams: int, llama: Any) -> None:
    check_generation(llama, name, "cpu", num_beams=beams)
