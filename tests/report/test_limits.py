"""Limits that nothing could fail, or nothing pass, are refused. `python -m pytest tests/report/test_limits.py`"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import LIMITS

from kvdrift.composed import load_stage
from kvdrift.config import check, compose
from kvdrift.report.limits import CellLimits, Limits, Workload

ROOT = Path(__file__).parent.parent.parent
FIGURES = [field for field, value in vars(LIMITS).items() if isinstance(value, float)]


def test_every_figure_is_tried() -> None:
    assert len(FIGURES) == 11
    assert isinstance(LIMITS, Limits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.01, 60.0])
@pytest.mark.parametrize("name", FIGURES)
def test_a_limit_is_a_number_that_something_can_fail(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; allowed: "):
        replace(LIMITS, **{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.01, 60.0])
@pytest.mark.parametrize("name", ["cos", "kl"])
def test_so_is_a_cells(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; allowed: "):
        CellLimits(**{name: value})


@given(st.integers(max_value=0) | st.integers(min_value=2**31))
def test_a_workload_serves_something(value: int) -> None:
    for name in ("batch", "context", "output"):
        with pytest.raises(ValueError, match=f"{name} is {value}; allowed: 1 to"):
            Workload(**({"batch": 1, "context": 1, "output": 1} | {name: value}))


CRITICAL: list[tuple[Any, str]] = [
    ([], "critical is .*; allowed: at least one item"),
    (["needle", "needel"], "cohort 'needel' is unknown; allowed: .*needle, "),
    (["copy", "copy"], "name each cohort once"),
]


@pytest.mark.parametrize(("critical", "told"), CRITICAL)
def test_critical_cohorts_are_cohorts(critical: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(LIMITS, critical=critical)
    with pytest.raises(ValueError, match="cohort 'grid' is unknown"):
        replace(LIMITS, grid="grid")


@pytest.mark.parametrize("gates", sorted(path.stem for path in (ROOT / "conf/gates").glob("*.yaml")))
def test_every_gates_yaml_has_limits(gates: str) -> None:
    main = load_stage(ROOT / "stages/verdict.py")
    composed = compose("verdict", [f"gates={gates}", "plan=int8"], ROOT / "conf")
    assert isinstance(check(composed, main.schema).gates, Limits)
