"""Files that are missing, damaged or another policy's are named. `python -m pytest tests/report/test_reading.py`"""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from made_up import LIMITS, Run
from spoiling import CANDIDATE, FILES, rejected

from kvdrift.config import ConfigError
from kvdrift.report.verdict import judge

SPOILERS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "garbage": lambda content: b"\xff\x00 nonsense",
    "null": lambda content: b"null",
    "a list": lambda content: b"[]",
    "nested": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("how", SPOILERS)
@pytest.mark.parametrize(("artifact", "file"), [(name, name) for name in FILES], indirect=["file"])
def test_a_damaged_file_is_named(artifact: str, file: Path, how: str, healthy: Run) -> None:
    file.write_bytes(SPOILERS[how](file.read_bytes()))
    rejected(healthy, artifact)


@pytest.mark.parametrize(("artifact", "file"), [(name, name) for name in FILES], indirect=["file"])
def test_a_missing_file_is_named(artifact: str, file: Path, healthy: Run) -> None:
    file.unlink()
    assert rejected(healthy, artifact) == f"{artifact}: not measured"


@pytest.mark.parametrize("other", ["kivi2", "exact"])
@pytest.mark.parametrize(("artifact", "file"), [(name, name) for name in FILES], indirect=["file"])
def test_another_policys_artifact_is_refused(artifact: str, file: Path, other: str, healthy: Run) -> None:
    file.write_bytes(file.with_name(file.name.replace(CANDIDATE, other)).read_bytes())
    assert "is of policy" in rejected(healthy, artifact)


@pytest.mark.parametrize(("artifact", "file"), [(name, name) for name in FILES], indirect=["file"])
def test_an_artifact_of_no_policy_is_refused(artifact: str, file: Path, healthy: Run) -> None:
    if file.suffix == ".json":
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "policy"}))
    else:
        pl.read_parquet(file).write_parquet(file)
    rejected(healthy, artifact)


def test_a_file_that_polars_panics_on_is_named(healthy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(path: Path) -> pl.DataFrame:
        if path.name == "kivi4_cells.parquet":
            raise pl.exceptions.PanicException("range end index 7 out of range\nfor slice of length 3")
        return read(path)

    read = pl.read_parquet
    monkeypatch.setattr(pl, "read_parquet", panic)
    assert rejected(healthy, "cells") == "cells: range end index 7 out of range for slice of length 3"


def test_another_plan_in_its_place_ends_with_one_line(run: Run) -> None:
    plan = run.path("plans", "kivi4.json")
    plan.write_text(run.path("plans", "kivi2.json").read_text())
    with pytest.raises(
        ConfigError, match=r"kivi4.json can't be used: it is the plan of 'kivi2'; run `dvc repro.* plan@"
    ):
        run.evidence(CANDIDATE)
    plan.write_text(plan.read_text().replace("kivi2", "kivi4"))  # it now says that it is kivi4's, and has kivi2's bits
    faults = judge(run.evidence(CANDIDATE), LIMITS)["gates"][0]
    assert (faults["name"], faults["measured"], faults["passed"]) == ("evidence", 8, False)


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"name": 3}', '{"block": 1e999}', "[" * 100_000])
@pytest.mark.parametrize("what", ["plans/kivi4.json", "model/manifest.json", "prompts/prompts.parquet"])
def test_what_nothing_can_be_judged_without_ends_with_one_line(what: str, content: str, run: Run) -> None:
    (run.root / "data" / what).write_text(content)
    with pytest.raises(ConfigError, match="can't be used") as told:
        run.evidence(CANDIDATE)
    assert "\n" not in str(told.value)
    assert what in str(told.value)
