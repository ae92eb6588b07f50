"""What ships, and from where it pays. `python -m pytest tests/report/test_frontier.py`"""

import json
from pathlib import Path
from typing import Any

import pytest
from made_up import EXACT, SHAPE, kivi

from kvdrift.config import ConfigError
from kvdrift.ledger import account
from kvdrift.report.frontier import NEVER, BreakEven, activation, bound, break_even, brief, longest, read_verdict
from kvdrift.report.maps import LAYERS

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


VERDICT = {"policy": "kivi4", "layers": [dict.fromkeys(LAYERS, 0)]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        (VERDICT | {"policy": "int4"}, "it is of policy 'int4'"),
        ({"policy": "kivi4"}, "layers"),
        (VERDICT | {"layers": []}, "it has no layers"),
        (VERDICT | {"layers": [{"layer": 0}]}, "key_bits is missing in a layer"),
        (VERDICT | {"layers": [dict.fromkeys(LAYERS)]}, "layer is missing in a layer"),
    ],
)
def test_a_verdict_that_can_not_be_used_is_told_in_a_line(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "kivi4.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_verdict(path)
    (line,) = error.value.args
    assert why in line
    assert line.endswith("run `dvc repro -f -s verdict@kivi4`")
    path.write_text(json.dumps(VERDICT))
    assert read_verdict(path) == VERDICT
