"""What ships, and from where it pays. `python -m pytest tests/report/test_frontier.py`"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import EXACT, LIMITS, SHAPE, Run, kivi

from kvdrift.config import ConfigError
from kvdrift.ledger import account
from kvdrift.report.frontier import NEVER, BreakEven, activation, bound, break_even, brief, longest, read_verdict
from kvdrift.report.strict import difference
from kvdrift.report.verdict import judge

KIVI4 = kivi("kivi4", 4)


@pytest.mark.parametrize(
    ("faster", "smaller", "start"),
    [
        (0, 293, 293),
        (76, 293, 293),
        (1600, 293, 1600),
        (9999, 293, 8129),
        (NEVER, 293, 8129),
        (None, 293, 8129),
        (76, NEVER, 8129),
    ],
)
def test_the_released_policy_packs_from_where_it_is_faster_and_smaller(faster: int, smaller: int, start: int) -> None:
    released = bound(KIVI4, BreakEven(faster, smaller), 8128)
    assert (released.min_length, released.max_length) == (start, 8128)
    assert released.id == KIVI4.id


def test_a_policy_that_is_never_both_packs_at_no_certified_length() -> None:
    released = bound(KIVI4, BreakEven(NEVER, 293), 8128)
    ledger = account(released, SHAPE, 8128, 1)
    assert ledger.format_bytes == ledger.reference


def test_the_byte_break_even_counts_room_and_shadow() -> None:
    even = break_even(KIVI4, SHAPE, 76, 8128)
    assert even.faster == 76
    assert even.smaller is not None
    for tokens, smaller in ((even.smaller, True), (even.smaller - 1, False)):
        ledger = account(KIVI4, SHAPE, tokens, 1)
        assert (ledger.format_bytes < ledger.reference) is smaller
    assert even.pays == even.smaller > 76


def test_a_policy_that_packs_nothing_or_was_evaluated_nowhere_has_no_break_even() -> None:
    assert break_even(EXACT, SHAPE, None, 8128) == BreakEven(None, None)
    assert break_even(KIVI4, SHAPE, 76, 0) == BreakEven(None, None)
    assert break_even(KIVI4, SHAPE, 76, 200) == BreakEven(76, NEVER)
    assert bound(EXACT, BreakEven(None, None), 0).max_length is None


def test_activation_says_both_numbers_and_what_memory_pressure_changes() -> None:
    def said(faster: int | None, smaller: int | None) -> str:
        even = BreakEven(faster, smaller)
        return activation(bound(KIVI4, even, 8128), even)

    assert said(76, 293) == "from 293 up to 8,128 tokens (faster from 76 tokens on, smaller from 293 tokens on)"
    assert said(1600, 293).endswith("; under memory pressure from 293 up to 8,128 tokens")
    assert said(0, 293).startswith("from 293 up to 8,128 tokens (faster at every length")
    assert said(76, NEVER) == "never for speed (faster from 76 tokens on, smaller at no length)"
    assert said(None, 293).startswith("never for speed (faster: not measured")


def test_case_14_never_is_said() -> None:
    even = BreakEven(NEVER, 293)
    said = activation(bound(KIVI4, even, 8128), even)
    assert said.startswith("never for speed (faster at no length, smaller from 293 tokens on)")
    assert said.endswith("under memory pressure from 293 up to 8,128 tokens")
    assert [brief(even) for even in (None, NEVER, 0, 1600)] == ["–", "never", "always", "1,600"]


def test_the_longest_length_is_one_that_was_held() -> None:
    assert longest({"memory": [{"tokens": 512}, {"tokens": 7936}, {"tokens": 1024}]}) == 7936
    assert longest(None) == longest({"memory": []}) == 0


def test_a_verdict_is_read_as_its_evidence_gives_it(healthy: Run, tmp_path: Path) -> None:
    judged = judge(healthy.evidence("kivi4"), LIMITS)
    path = tmp_path / "kivi4.json"
    path.write_text(json.dumps(judged))
    assert read_verdict(path, judged) == json.loads(path.read_text())
    path.write_text(json.dumps(judged | {"logits": judged["logits"] | {"kl": judged["logits"]["kl"] * (1 + 1e-9)}}))
    assert read_verdict(path, judged)["decision"] == "accept"  # summed on another machine


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 10**5, "nested too deeply"),
        ("[]", "verdict is []; expected: {"),
        ("null", "verdict is None; expected: {"),
    ],
)
def test_a_verdict_that_can_not_be_read_is_told_in_a_line(content: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "kivi4.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_verdict(path, {"gates": [{"detail": ""}]})
    (line,) = map(str, error.value.args)
    assert line.startswith(f"{path} can't be used: ")
    assert why in line
    assert line.endswith("run `dvc repro -f -s verdict@kivi4`")


def test_no_field_of_a_verdict_is_believed(healthy: Run) -> None:
    """Every key lost, and every value replaced, wherever it stands; one item of each list stands for all."""
    judged = judge(healthy.evidence("kivi4"), LIMITS)

    def everywhere(value: Any, at: str, put: Callable[[Any], Any]) -> None:
        for other in ("another", None):
            if other is not value:
                assert (difference(put(other), judged, "verdict") or "").startswith(f"{at} is "), (at, other)
        for key in value if isinstance(value, dict) else ():
            rest = {k: v for k, v in value.items() if k != key}
            assert difference(put(rest), judged, "verdict") == f"{at} has no {key}"
            everywhere(value[key], f"{at}.{key}", lambda new, key=key: put(value | {key: new}))
        if isinstance(value, list) and value:
            everywhere(value[0], f"{at}[0]", lambda new: put([new, *value[1:]]))

    everywhere(judged, "verdict", lambda new: new)
