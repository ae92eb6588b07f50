"""What counts as a number, and as JSON. `python -m pytest tests/report/test_strict.py`"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.report.strict import Number, loads, value_fault


@given(st.floats() | st.integers() | st.booleans() | st.none() | st.text() | st.lists(st.integers()))
def test_a_number_fits_only_as_a_finite_one_in_its_range(value: Any) -> None:
    fits = value_fault(value, Number(0, 10), "x") is None
    assert fits == (type(value) in (int, float) and 0 <= value <= 10)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', "NaN", "-Infinity", "1e999", str(10**400), "1" * 5000, "[" * 10**5]
)
def test_strict_json_refuses_what_python_lets_pass(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        loads(text, finite=True)
