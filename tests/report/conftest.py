"""Fixtures over a made-up run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import Run, made_up
from spoiling import CANDIDATE, FILES

from kvdrift.report.evidence import Evidence


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return made_up(tmp_path)


@pytest.fixture
def spoiled(run: Run) -> Callable[..., Evidence]:
    """kivi4's evidence with some of it replaced."""

    def spoil(**changes: Any) -> Evidence:
        return replace(run.evidence("kivi4"), **changes)

    return spoil


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made_up(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def sound(healthy: Run) -> Evidence:
    return healthy.evidence(CANDIDATE)


@pytest.fixture
def file(healthy: Run, request: pytest.FixtureRequest) -> Iterator[Path]:
    """One artifact, put back afterwards."""
    path = healthy.root / "data" / FILES[request.param]
    before = path.read_bytes()
    yield path
    path.write_bytes(before)
