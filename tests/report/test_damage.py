"""What is damaged ships nothing, and is told in a line. `python -m pytest tests/report/test_damage.py`"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from made_up import Run
from staging import stage, written

from kvdrift.config import ConfigError

DAMAGED = [
    ("verdict/kivi4.json", "{", "run `dvc repro -f -s verdict@kivi4`"),
    ("verdict/kivi4.json", None, "No such file"),
    ("plans/kivi4.json", None, "run `dvc repro -f -s plan@kivi4`"),
    ("model/manifest.json", "{}", "manifest has no shape; run `dvc repro -f -s model`"),
    ("preflight/device.json", "[]", "device is []; allowed: an object; run `dvc repro -f -s preflight`"),
    ("preflight/software.json", '{"torch": 2}', "software.torch is 2; allowed: null"),
    ("calibration/calibration.json", '{"coverage": 1}', "calibration.coverage is 1; allowed: an object"),
    ("reference/noise_floor.parquet", "PAR1 torn", "run `dvc repro -f -s reference`"),
    ("latency/kivi4.json", "{", "verdict.decision is 'accept'; expected: 'reject'; latency: "),
    ("quantize/kivi4.json", "null", "expected: 'reject'; packing: "),
    ("generate/kivi4.parquet", "torn", "expected: 'reject'; generations: "),
    ("drill/kivi4.json", "[]", "expected: 'reject'; drill: "),
]


@pytest.mark.parametrize(("file", "content", "told"), DAMAGED)
def test_what_is_damaged_ends_the_frontier_with_one_line(
    file: str, content: str | None, told: str, finished: Run
) -> None:
    """What a verdict was given on, too, since that verdict no longer is what its evidence says."""
    path = finished.path(*file.split("/"))
    with replaced(path, content):
        before = written(finished)
        line = refused(finished)
        assert told in line
        assert f"data/{file}" in line or file.startswith(("latency", "quantize", "generate", "drill"))
        assert written(finished) == before


@pytest.mark.parametrize(
    ("field", "other"),
    [("decision", "accept"), ("exact", True), ("metrics", {"bytes": 0.001}), ("cells", []), ("gates", [])],
)
def test_a_verdict_that_its_evidence_does_not_bear_out_ships_nothing(field: str, other: Any, finished: Run) -> None:
    path = finished.path("verdict", "kivi2.json")
    with replaced(path, json.dumps(json.loads(path.read_text()) | {field: other})):
        assert f"kivi2.json can't be used: verdict.{field}" in refused(finished)


def test_the_noise_floor_is_told_if_it_is_one(finished: Run) -> None:
    assert "| floor: alone |" in (finished.root / "data/release/receipt.md").read_text()
    path = finished.path("reference", "noise_floor.parquet")
    rows = pl.read_parquet(path)
    with replaced(path, ""):
        rows.with_columns(kl=pl.lit(-1.0)).write_parquet(path)
        assert "noise_floor.parquet can't be used: kl is -1.0 in the row with schedule alone" in refused(finished)


@contextmanager
def replaced(path: Path, content: str | None) -> Iterator[None]:
    """Another content, or no such file, put back afterwards."""
    before = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_text(content)
    yield
    path.write_bytes(before)


def refused(run: Run) -> str:
    with pytest.raises(ConfigError) as error:
        stage(run, "frontier")
    (line,) = str(error.value).splitlines()
    return line
