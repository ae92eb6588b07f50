"""What counts as a number, and as JSON. `python -m pytest tests/report/test_strict.py`"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.report.strict import Each, Either, Many, Number, difference, loads, value_fault


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


@pytest.mark.parametrize(
    ("wanted", "fits", "faults"),
    [
        (Many(str), [[], ["a"]], {"x is 3": 3, "x[1] is 4": ["a", 4]}),
        ([str], [["a"]], {"x is []": []}),
        (Each(Number(0)), [{}, {"a": 1}], {"x.a is -1": {"a": -1}}),
        (Either(str, None), ["a", None], {"x is 3; allowed: null": 3}),
        (Either(str, {"a": Number()}), ["a", {"a": 1}], {"x has no a": {}, "x.a is '1'": {"a": "1"}, "x is 3": 3}),
        (Either(("unavailable",), Number(0)), ["unavailable", 7], {"x is 'unknown'": "unknown", "x is -1": -1}),
    ],
)
def test_what_is_wanted_of_plain_data(wanted: Any, fits: list[Any], faults: dict[str, Any]) -> None:
    assert [value_fault(value, wanted, "x") for value in fits] == [None] * len(fits)
    for start, value in faults.items():
        assert (value_fault(value, wanted, "x") or "").startswith(start)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
def test_plain_data_differs_from_all_but_itself(one: Any, other: Any) -> None:
    assert difference(one, one, "x") is None
    if repr(one) != repr(other) and difference(one, other, "x") is None:
        assert {type(one), type(other)} & {int, float, list, dict}  # numbers inside that are equal but for rounding


@pytest.mark.parametrize(
    ("found", "expected", "fault"),
    [
        (1.0, 1, None),
        (1 + 1e-9, 1.0, None),
        (1 + 1e-5, 1.0, "x is 1.00001; expected: 1.0"),
        (1, True, "x is 1; expected: True"),
        (0.0, None, "x is 0.0; expected: None"),
        ("a", "b", "x is 'a'; expected: 'b'"),
        ([1], [1, 2], "x is [1]; expected: [1, 2]"),
        ([1, 3], [1, 2], "x[1] is 3; expected: 2"),
        ({"a": 1}, {"a": 1, "b": 2}, "x has no b"),
        ({"a": 1, "b": 2}, {"a": 1}, "x has an unknown b"),
        ({"a": {"b": [0]}}, {"a": {"b": [2]}}, "x.a.b[0] is 0; expected: 2"),
        ({}, [], "x is {}; expected: []"),
        ([], {}, "x is []; expected: {}"),
    ],
)
def test_the_first_difference_is_named(found: Any, expected: Any, fault: str | None) -> None:
    assert difference(found, expected, "x") == fault
