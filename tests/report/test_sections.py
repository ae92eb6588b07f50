"""What a reader of the receipt finds in it. `python -m pytest tests/report/test_sections.py`"""

from typing import Any

import pytest

from kvdrift.report.behaviour import behaviour, losses, recall_rule
from kvdrift.report.changed import change_counts
from kvdrift.report.costs import attention_gain, costs
from kvdrift.report.frontier import unmet
from kvdrift.report.page import Table, environment, shown
from kvdrift.report.receipt import worst_cells
from kvdrift.report.show import WIDTH, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.999962, "0.999962"),
        (0.99998, "0.999980"),
        (0.9987, "0.999"),
        (1.0, "1"),
        (1 - 1e-9, "1"),
        (0.987, "0.987"),
        (-0.5, "-0.5"),
        (1234.5, "1,234"),
        (None, "not measured"),
    ],
)
def test_a_figure_near_one_is_not_rounded_to_it(value: float | None, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(("text", "number"), [("0.3", True), ("84.6 ms", True), ("–", True), ("1 of 3, pass", False)])
def test_numbers_are_told_from_words(text: str, number: bool) -> None:
    assert environment().from_string("{{ text is number }}").render(text=text) == str(number)


def test_prose_is_escaped_before_its_code_is_marked() -> None:
    page = environment().from_string("{{ text | prose }}").render(text="a < `b` > <script>")
    assert page == "a &lt; <code>b</code> &gt; &lt;script&gt;"


def attention(*itl: float | None, exact: float | None = 0.99, ms: float | None = None) -> dict[str, Any]:
    rows = [{"policy": f"p{n}", "bits": 2.0 + n, "itl": value, "attention_ms": ms} for n, value in enumerate(itl)]
    return {"reference": "sdpa", "candidate": "kernel", "exact_itl": exact, "exact_ms": ms, "policies": rows}


def test_a_gain_that_all_candidates_share_is_the_attention_paths() -> None:
    text = attention_gain(attention(0.296, 0.327, 0.31))
    assert text is not None
    assert "0.296 to 0.327 for all 3 candidates, from 2 to 4 bits" in text
    assert "at least 0.673 of a step" in text
    assert "most of the gain is the attention path" in text
    assert "has 0.99" in text


def test_a_gain_that_differs_by_policy_is_not() -> None:
    text = attention_gain(attention(0.3, 0.9))
    assert text is not None
    assert "attention path" not in text
    slower = attention_gain(attention(1.2, 1.25))
    assert slower is not None
    assert "attention path" not in slower


def test_one_candidate_or_none_tells_nothing_of_where_the_gain_comes_from() -> None:
    assert attention_gain(attention(0.3)) is None
    assert attention_gain(attention(0.3, None)) is None
    timed = attention_gain(attention(0.3, 0.31, ms=12.5))
    assert timed is not None
    assert "attention takes 12.5 ms of the exact policy's" in timed


def test_the_recall_rule_says_how_few_items_decide() -> None:
    cells = [
        {"length": 512, "depth": d, "items": 1, "reference": 1, "candidate": 1, "kept": 1} for d in (0.1, 0.5, 0.9)
    ]
    assert "1 item a cell" in recall_rule(cells, 0.9)
    assert "With 3 needles at a length, one loss is enough to reject" in recall_rule(cells, 0.9)
    assert "one loss alone does not reject" in recall_rule(cells, 0.6)
    many = [cell | {"items": 20, "reference": 18} for cell in cells]
    assert "20 items a cell" in recall_rule(many, 0.9)
    assert "With 54 needles at a length, one loss alone does not reject" in recall_rule(many, 0.9)


def test_losses_count_both_modes_and_critical_cohorts_apart() -> None:
    rows = [
        {"policy": "p", "mode": mode, "cohort": cohort, "outcome": outcome, "changed": "other"}
        for mode, cohort, outcome in (
            ("greedy", "copy", "same"),
            ("sampled", "copy", "drift"),
            ("sampled", "attack", "drift"),
            ("sampled", "copy", "gain"),
        )
    ]
    counts = change_counts(rows, ["copy"])
    assert counts[1] == {
        "policy": "p",
        "mode": "sampled",
        "changed": 3,
        "drift": 2,
        "critical_drift": 1,
        "gain": 1,
        "kinds": {"other": 3},
    }
    said = losses({"decision": {"policy": "p"}, "changes": counts})
    assert "greedy 0 right → wrong, 0 of them in critical cohorts" in said
    assert "sampled 2 right → wrong, 1 of them in critical cohorts, and 1 wrong → right" in said
    assert "sampled 0 right → wrong" in losses({"decision": {"policy": "another"}, "changes": counts})


def test_worst_cells_hold_those_that_the_gates_name() -> None:
    cells = [
        {"layer": 0, "bucket": 0, "cos": 0.99, "kl": 0.001},
        {"layer": 1, "bucket": 0, "cos": 0.991, "kl": 0.001},
        {"layer": 2, "bucket": 512, "cos": 0.9999, "kl": 0.002},
    ]
    found = worst_cells({"cells": cells, "worst_cells": cells[:2]})
    assert [(cell["gate"], cell["layer"]) for cell in found] == [("cell kl", 2), ("cell cos", 0), (None, 1)]
    assert worst_cells({"cells": cells[:1], "worst_cells": cells[:1]})[0]["gate"] == "cell kl, cell cos"
    assert worst_cells({"cells": [], "worst_cells": []}) == []


def test_what_was_computed_is_not_called_held() -> None:
    row = {"batch": 1, "tokens": 4160, "reference": 2**20, "ideal": 2**19, "format": 2**19, "held": None}
    memory = [row | {"target": True, "smaller": False}, row | {"held": 2**19, "target": False, "smaller": True}]
    receipt = {"memory": memory, "escalated_blocks": 0, "latency": None, "decision": {"policy": "int8"}}
    block = costs(receipt, {})[0].blocks[1]
    assert isinstance(block, Table)
    assert block.rows[0][1] == "4,160 (target workload)"
    assert block.rows[0][5] == "computed, not measured at this length"
    assert (block.rows[1][1], block.rows[1][5]) == ("4,160 (byte break-even)", "0.50 MiB")


def test_the_machine_of_a_timing_is_told() -> None:
    versions = {"torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7", "backend": "native"}
    state = {"clock_mhz": "unavailable", "load": 1.5}
    found = versions | {"threads": 2, "processors": 4, "before": state, "after": {"clock_mhz": 2600, "load": 2.25}}
    receipt = {
        "memory": [],
        "escalated_blocks": 0,
        "attention": attention(0.3),
        "latency": {"machine": found},
        "decision": {"policy": "int8", "packs": False, "break_even": {"faster": None, "smaller": None}},
    }
    text = " ".join(block for block in costs(receipt, {})[1].blocks if isinstance(block, str))
    assert "Taken with 2 threads on 4 processors that the process may use, native kernels" in text
    assert "unavailable before, 2,600 after" in text
    receipt["latency"] = {"machine": found | {"processors": 1}}
    text = " ".join(block for block in costs(receipt, {})[1].blocks if isinstance(block, str))
    assert "2 threads on 1 processor that" in text


def row(policy: str, failed: list[str]) -> dict[str, Any]:
    metrics = dict.fromkeys(("bits", "bytes", "itl", "kl", "kl_p99", "recall"), 0.123456) | {"drift": 3}
    gates = [{"name": name, "detail": "", "measured": 1.0, "limit": 0.5, "sense": "at most"} for name in failed]
    shared = {"policy": policy, "decision": "reject", "chosen": False, "metrics": metrics, "failed": gates}
    return shared | {"break_even": {"faster": 76, "smaller": -1}}


def test_the_decision_table_cuts_no_gate_name() -> None:
    gates = ["cell cos", "cell kl", "kl", "kl p99", *(f"drift in a_rather_long_cohort_{n}" for n in range(6)), "drill"]
    lines = table([row("exact", []), row("one", gates[:2]), row("many", gates)]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].split()[:5] == ["policy", "decision", "bits", "bytes", "itl"]
    assert lines[1].endswith("  -")
    assert lines[2].endswith("never  0.123   0.123      3   0.123  cell cos, cell kl")
    assert lines[3].endswith(" more")
    assert lines[4] == ""
    assert " ".join(" ".join(lines[5:]).split()) == (
        "one did not pass: cell cos 1 > 0.5; cell kl 1 > 0.5 "
        f"many did not pass: {'; '.join(f'{name} 1 > 0.5' for name in gates)}"
    )


def test_a_gate_whose_name_does_not_fit_is_counted() -> None:
    lines = table([row("one", ["x" * 200])]).splitlines()
    assert lines[1].endswith("  1 gates")


@pytest.mark.parametrize(
    ("measured", "sense", "limit", "status", "detail", "text"),
    [
        (0.973, "at most", 0.6, "fail", "ideal codes alone are 0.5", "0.973 > 0.6 (ideal codes alone are 0.5)"),
        (0.8, "at least", 0.9, "fail", "", "0.8 < 0.9"),
        (0.60004, "at most", 0.6, "fail", "", "0.60004 > 0.6"),
        (
            None,
            "at most",
            0.05,
            "fail",
            "not measured in layer 0",
            "not measured, at most 0.05 is allowed (in layer 0)",
        ),
        (None, "at least", 1.0, "fail", "not measured", "not measured, at least 1 is allowed"),
        (1.0, "at least", 0.9, "inconclusive", "blind", "1, inconclusive, at least 0.9 is allowed (blind)"),
    ],
)
def test_a_gate_that_was_not_passed_shows_its_figure_and_its_limit(
    measured: float | None, sense: str, limit: float, status: str, detail: str, text: str
) -> None:
    gate = {"name": "g", "measured": measured, "sense": sense, "limit": limit, "status": status, "detail": detail}
    assert unmet(gate) == f"g {text}"


def test_what_the_reference_does_not_recall_is_no_loss() -> None:
    cells = [{"length": 512, "depth": 0.5, "items": 1, "reference": n, "candidate": 0, "kept": 0} for n in (0, 1)]
    receipt = {
        "recall": cells,
        "limits": {"min_recall": 0.9, "confidence": 0.95, "max_drift": 0.1},
        "decision": {"policy": "p"},
        "cohorts": [],
        "logits": None,
        "noise_floor": None,
        "cohorts_by_policy": {},
        "changes": [],
    }
    grid = next(section for section in behaviour(receipt, {}) if section.title == "Needle recall").blocks[1]
    assert isinstance(grid, Table)
    assert [row[-1] for row in grid.rows] == ["–", "0"]
