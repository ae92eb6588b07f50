"""Fixtures over a made-up run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import Run, made_up

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
