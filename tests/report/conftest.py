"""Fixtures over a made-up run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from made_up import Run, made_up
from probing import cells_frame
from spoiling import CANDIDATE, FILES
from staging import finish

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One finished run for all tests that write what is already there, or nothing."""
    run = made_up(tmp_path_factory.mktemp("run"))
    cells_frame().write_parquet(run.path("sensitivity", "cells.parquet"))
    floor = pl.read_parquet(run.path("logits", "exact.parquet")).with_columns(schedule=pl.lit("alone"))
    floor.write_parquet(run.path("reference", "noise_floor.parquet"))
    finish(run)
    return run
