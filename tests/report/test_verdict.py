"""Every gate of a verdict, passing and failing. `python -m pytest tests/report/test_verdict.py`"""

import copy
import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import polars as pl
import pytest
from made_up import LIMITS, Run, kivi, latency

from kvdrift.report.evidence import Evidence
from kvdrift.report.verdict import NEVER, break_even, judge

Spoil = Callable[..., Evidence]


def gates(verdict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gate["name"]: gate for gate in verdict["gates"]}


def failed(verdict: dict[str, Any]) -> list[str]:
    return [gate["name"] for gate in verdict["gates"] if not gate["passed"]]


def fault(verdict: dict[str, Any]) -> str:
    """What the verdict says of artifacts that it can't use."""
    return str(gates(verdict)["evidence"]["detail"])


def test_a_healthy_candidate_is_accepted(run: Run) -> None:
    verdict = judge(run.evidence("kivi4"), LIMITS)
    assert failed(verdict) == []
    assert verdict["decision"] == "accept"
    assert verdict["worst_cell"]["layer"] == 2
    json.dumps(verdict, allow_nan=False)


def test_the_layer_map_says_where_and_what_it_saves(run: Run) -> None:
    verdict = judge(run.evidence("kivi4"), LIMITS)
    rows = verdict["layers"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert sum(row["saved_bytes"] for row in rows) == verdict["bytes"]["saved_bytes"]
    assert (rows[2]["key_bits"], rows[2]["value_error"], rows[2]["top_overlap"]) == (4, pytest.approx(0.1), 0.01)
    assert rows[2]["key_cosine"] == pytest.approx(0.997)
    assert [row["latency_share"] for row in rows] == pytest.approx([0.25, 0.25, 0.5])
    exact = judge(run.evidence("exact"), LIMITS)["layers"][0]
    assert (exact["key_bits"], exact["saved_bytes"], exact["kl"]) == (16, 0, None)


def test_metrics_are_ten_or_so_numbers(run: Run) -> None:
    metrics = judge(run.evidence("kivi4"), LIMITS)["metrics"]
    assert list(metrics) == "accepted bits bytes kl kl_p99 top1 min_cos drift recall itl even".split()  # noqa: SIM905
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert (metrics["accepted"], metrics["drift"], metrics["even"]) == (1, 0, 1600)


def test_the_exact_policy_is_the_fallback_and_saves_nothing(run: Run) -> None:
    verdict = judge(run.evidence("exact"), LIMITS)
    assert failed(verdict) == []
    assert verdict["decision"] == "fallback"
    assert gates(verdict)["bytes ratio"]["status"] == "not applicable"
    assert verdict["metrics"]["kl"] == 0.0


def test_an_exact_policy_that_differs_from_the_reference_is_rejected(run: Run) -> None:
    evidence = run.evidence("exact")
    assert evidence.logits is not None
    spoiled = replace(evidence, logits=evidence.logits.with_columns(kl=pl.lit(1e-6)))
    assert failed(judge(spoiled, LIMITS)) == ["kl max"]
    changed = run.evidence("kivi4").generations
    assert failed(judge(replace(evidence, generations=changed), LIMITS)) == ["changed generations"]


MISSING = {
    "packing": ["reconciled"],
    "errors": ["cell cos", "saturated"],
    "attention": [],
    "logits": ["kl", "kl p99", "cohort kl", "same top-1"],
    "cells": ["cell kl"],
    "generations": ["drift in copy", "drift in needle", "drift in tool_arguments", "needle recall"],
    "latency": ["peak ratio", "p95 ratio"],
    "drill": ["drill"],
}
MISSING = {what: ["evidence", *gates] for what, gates in MISSING.items()}


def test_missing_covers_all_evidence() -> None:
    assert set(MISSING) == {field.name for field in fields(Evidence)} - {"policy", "shape", "prompts", "faults"}


@pytest.mark.parametrize("what", MISSING)
def test_case_12_what_was_never_measured_fails_by_name(what: str, spoiled: Spoil) -> None:
    verdict = judge(spoiled(**{what: None}), LIMITS)
    assert failed(verdict) == MISSING[what]
    assert verdict["decision"] == "reject"
    json.dumps(verdict, allow_nan=False)


@pytest.mark.parametrize("what", ["errors", "attention", "logits", "cells", "generations"])
def test_case_12_an_empty_table_fails_like_a_missing_one(what: str, spoiled: Spoil) -> None:
    empty = getattr(spoiled(), what).clear()
    assert failed(judge(spoiled(**{what: empty}), LIMITS)) == MISSING[what]


@pytest.mark.parametrize("column", ["kl", "same_top1"])
def test_case_12_a_null_among_the_scored_tokens_fails(column: str, spoiled: Spoil) -> None:
    frame = spoiled().logits
    assert frame is not None
    nulled = pl.when(pl.int_range(pl.len()) == 3).then(None).otherwise(pl.col(column)).alias(column)
    verdict = judge(spoiled(logits=frame.with_columns(nulled)), LIMITS)
    assert failed(verdict) == MISSING["logits"]
    assert "in the row with prompt needle-320-0, step 3" in fault(verdict)


@pytest.mark.parametrize("column", ["correct", "correct_reference"])
def test_case_12_a_generation_that_was_not_graded_fails(column: str, spoiled: Spoil) -> None:
    frame = spoiled().generations
    assert frame is not None
    first = pl.int_range(pl.len()) == 0
    nulled = pl.when(first).then(None).otherwise(pl.col(column)).alias(column)
    verdict = judge(spoiled(generations=frame.with_columns(nulled)), LIMITS)
    assert failed(verdict) == MISSING["generations"]
    assert f"{column} is null in the row with prompt needle-320-0, mode greedy" in fault(verdict)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -2.0])
@pytest.mark.parametrize(("what", "column"), [("errors", "cosine"), ("errors", "saturated"), ("cells", "kl")])
def test_case_12_no_figure_in_one_cell_is_named(what: str, column: str, value: float | None, spoiled: Spoil) -> None:
    frame = getattr(spoiled(), what)
    here = (pl.col("prompt") == "needle_grid-8128-0") & (pl.col("layer") == 1) & (pl.col("bucket") == 512)
    column_now = pl.when(here).then(pl.lit(value, pl.Float64)).otherwise(pl.col(column)).alias(column)
    verdict = judge(spoiled(**{what: frame.with_columns(column_now)}), LIMITS)
    assert failed(verdict) == MISSING[what]
    assert "in the row with prompt needle_grid-8128-0, layer 1, " in fault(verdict) or value is None


def test_a_cell_that_no_probe_reaches_fails_though_another_artifact_has_it(spoiled: Spoil) -> None:
    cells = spoiled().cells
    assert cells is not None
    verdict = judge(spoiled(cells=cells.filter(pl.col("prompt") == "code-2048-0")), LIMITS)
    assert failed(verdict) == ["cell kl"]
    assert gates(verdict)["cell kl"]["detail"] == "not measured in layer 0 at 2,048 and 2 more cells"


def test_the_cell_beyond_its_gate_is_named_with_its_prompt(spoiled: Spoil) -> None:
    here = (pl.col("layer") == 1) & (pl.col("bucket") == 2048)
    cells, errors = spoiled().cells, spoiled().errors
    assert cells is not None
    assert errors is not None
    bad = cells.with_columns(kl=pl.when(here & pl.col("kl").is_not_null()).then(0.2).otherwise(pl.col("kl")))
    verdict = judge(spoiled(cells=bad), LIMITS)
    assert failed(verdict) == ["cell kl"]
    assert gates(verdict)["cell kl"]["detail"] == "worst in layer 1 at 2,048, on prompt needle_grid-8128-0"
    assert (verdict["worst_cell"]["layer"], verdict["worst_cell"]["bucket"]) == (1, 2048)
    values = here & (pl.col("tensor") == "value")
    bad = errors.with_columns(cosine=pl.when(values).then(0.9).otherwise(pl.col("cosine")))
    assert gates(judge(spoiled(errors=bad), LIMITS))["cell cos"]["detail"] == "worst in layer 1 at 2,048"


def test_savings_on_paper_are_none(run: Run, spoiled: Spoil) -> None:
    assert failed(judge(spoiled(), replace(LIMITS, max_bytes_ratio=0.2))) == ["bytes ratio"]
    packing = json.loads(run.path("quantize", "kivi4.json").read_text())
    packing["memory"][0]["held_bytes"] = 1  # though it still says that it is reconciled
    gate = gates(judge(spoiled(packing=packing), LIMITS))["reconciled"]
    assert (gate["passed"], gate["measured"]) == (False, pytest.approx(4 / 5))
    assert gate["detail"].startswith("128 tokens: 1 bytes held, ")
    packing = json.loads(run.path("quantize", "kivi4.json").read_text()) | {"reconciled": False}
    assert failed(judge(spoiled(packing=packing), LIMITS)) == ["reconciled"]


def test_a_block_that_stays_exact_is_held_beside_the_format(run: Run, spoiled: Spoil) -> None:
    packing = json.loads(run.path("quantize", "kivi4.json").read_text())
    packing["memory"][-1]["escalated_blocks"] = 1
    assert failed(judge(spoiled(packing=packing), LIMITS)) == ["reconciled"]
    packing["memory"][-1]["held_bytes"] += 64 * 2 * 2 * 64 * 2  # block, keys and values, heads, head_dim, bytes
    assert failed(judge(spoiled(packing=packing), LIMITS)) == []


def timed(**headline: float) -> dict[str, Any]:
    """kivi4's latency with other figures in its headline, and in the row that they come from."""
    found = latency(kivi("kivi4", 4))
    found["headline"] |= headline
    names = {"p95_ms": "candidate_p95_ms", "p95_ratio": "p95_ratio"}
    found["rows"][0] |= {names[name]: value for name, value in headline.items() if name in names}
    return found


def test_case_8_a_peak_above_the_reference_is_no_saving(spoiled: Spoil) -> None:
    assert failed(judge(spoiled(latency=timed(peak_bytes=10_000_000)), LIMITS)) == ["peak ratio"]


def test_a_regressing_p95_fails_with_its_figures(spoiled: Spoil) -> None:
    gate = gates(judge(spoiled(latency=timed(p95_ms=66.0, p95_ratio=1.1)), LIMITS))["p95 ratio"]
    assert (gate["passed"], gate["measured"]) == (False, pytest.approx(1.1))
    assert gate["detail"].startswith("60 ms to 66 ms, ")


def test_a_p95_of_another_workload_is_not_measured(spoiled: Spoil) -> None:
    found = timed() | {"workload": {"batch": 1, "context": 512, "output": 64}}
    found["rows"] = [found["rows"][1], found["rows"][0]]
    gate = gates(judge(spoiled(latency=found), LIMITS))["p95 ratio"]
    assert gate["measured"] is None
    assert "the target workload is" in gate["detail"]


def drifting(spoiled: Spoil, cohort: str, lost: int, right: int = 32) -> Evidence:
    """The first `lost` greedy items of a cohort turn wrong; the reference gets only `right` of them right."""
    frame = spoiled().generations
    assert frame is not None
    number = pl.col("prompt").str.extract(r"(\d+)$").cast(pl.Int64)
    here = (pl.col("cohort") == cohort) & (pl.col("mode") == "greedy")
    lost_now, never = here & (number < lost), here & (number >= right)
    return spoiled(generations=graded(frame, lost_now, never))


def graded(frame: pl.DataFrame, lost: pl.Expr, never: pl.Expr) -> pl.DataFrame:
    """Where the candidate is wrong, and where the reference is."""
    for column, wrong in (("", lost), ("_reference", never)):
        frame = frame.with_columns(
            pl.when(wrong).then(0.0).otherwise(pl.col(f"score{column}")).alias(f"score{column}"),
            (pl.col(f"correct{column}") & ~wrong).alias(f"correct{column}"),
        )
    return frame


def test_a_critical_cohort_fails_or_is_inconclusive_and_neither_passes(spoiled: Spoil) -> None:
    verdict = judge(drifting(spoiled, "copy", 5), LIMITS)
    assert failed(verdict) == ["drift in copy"]
    assert gates(verdict)["drift in copy"]["status"] == "fail"
    assert verdict["metrics"]["drift"] == 5
    row = next(row for row in verdict["cohorts"] if row["cohort"] == "copy")
    assert (row["drifted"], row["right"], row["critical"]) == (5, 32, True)
    verdict = judge(drifting(spoiled, "copy", 0, right=20), LIMITS)
    assert failed(verdict) == ["drift in copy"]
    gate = gates(verdict)["drift in copy"]
    assert gate["status"] == "inconclusive"
    assert gate["detail"].endswith("needs 9 more without a drift")


def test_a_model_that_gets_nothing_right_is_inconclusive_and_rejected(spoiled: Spoil) -> None:
    frame = spoiled().generations
    assert frame is not None
    verdict = judge(spoiled(generations=graded(frame, pl.lit(True), pl.lit(True))), LIMITS)
    assert failed(verdict) == ["drift in copy", "drift in needle", "drift in tool_arguments", "needle recall"]
    assert {gates(verdict)[name]["status"] for name in failed(verdict)} == {"inconclusive"}
    assert verdict["decision"] == "reject"


def test_same_perplexity_but_broken_recall_is_rejected_by_name(spoiled: Spoil) -> None:
    frame = spoiled().generations
    assert frame is not None
    lost = (pl.col("cohort") == "needle_grid") & (pl.col("length") == 8128) & (pl.col("depth") == 0.5)
    verdict = judge(spoiled(generations=graded(frame, lost, pl.lit(False))), LIMITS)
    assert failed(verdict) == ["needle recall"]
    assert gates(verdict)["needle recall"]["detail"] == "lost at length × depth 8,128 × 0.5"
    assert verdict["metrics"]["recall"] == pytest.approx(11 / 12, rel=1e-5)


def test_a_length_where_the_reference_recalls_nothing_is_inconclusive(spoiled: Spoil) -> None:
    frame = spoiled().generations
    assert frame is not None
    blind = (pl.col("cohort") == "needle_grid") & (pl.col("length") == 8128)
    gate = gates(judge(spoiled(generations=graded(frame, pl.lit(False), blind)), LIMITS))["needle recall"]
    assert (gate["status"], gate["detail"]) == ("inconclusive", "the reference recalls no needle at 8,128 tokens")


def test_the_aggregate_hides_no_cohort(spoiled: Spoil) -> None:
    frame = spoiled().logits
    assert frame is not None
    here = pl.col("cohort") == "code"
    verdict = judge(spoiled(logits=frame.with_columns(kl=pl.when(here).then(0.06).otherwise(0.0))), LIMITS)
    assert failed(verdict) == ["cohort kl"]
    assert gates(verdict)["cohort kl"]["detail"] == "worst in code"


def test_a_sample_too_small_for_its_tail_fails(spoiled: Spoil) -> None:
    evidence = spoiled()
    assert evidence.logits is not None
    few, kept = evidence.prompts.filter(cohort="code"), evidence.logits.filter(cohort="code")
    gate = gates(judge(replace(evidence, prompts=few, logits=kept), LIMITS))["kl p99"]
    assert (gate["passed"], gate["detail"]) == (False, "64 scored tokens carry no p99")


def test_case_11_saturation_is_gated_where_it_is_worst(spoiled: Spoil) -> None:
    frame = spoiled().errors
    assert frame is not None
    here = (pl.col("layer") == 1) & (pl.col("tensor") == "value")
    share = pl.when(here).then(0.3).otherwise(pl.col("saturated"))
    gate = gates(judge(spoiled(errors=frame.with_columns(saturated=share)), LIMITS))["saturated"]
    assert (gate["passed"], gate["detail"]) == (False, "worst in values of layer 1")


def test_a_failing_drill_names_its_checks(spoiled: Spoil) -> None:
    drill = copy.deepcopy(spoiled().drill)
    assert drill is not None
    drill["checks"][3]["passed"] = False
    gate = gates(judge(spoiled(drill=drill), LIMITS))["drill"]
    assert (gate["measured"], gate["detail"]) == (pytest.approx(16 / 17), "failing or not run: too_long")
    assert failed(judge(spoiled(drill=spoiled().drill | {"passed": False}), LIMITS)) == ["drill"]


def test_a_drill_of_fewer_checks_or_of_others_is_none(spoiled: Spoil) -> None:
    drill = spoiled().drill
    assert drill is not None
    first, *others = drill["checks"]
    gate = gates(judge(spoiled(drill=drill | {"checks": [first]}), LIMITS))["drill"]
    assert gate["measured"] == pytest.approx(1 / 17)
    assert "fallback" in gate["detail"]
    for checks in ([first, first, *others], [*drill["checks"], first | {"name": "nap"}]):
        assert failed(judge(spoiled(drill=drill | {"checks": checks}), LIMITS)) == ["drill"]


def test_what_packs_nothing_has_no_break_even(run: Run) -> None:
    assert judge(run.evidence("exact"), LIMITS)["metrics"]["even"] is None


def test_case_14_a_break_even_may_be_never() -> None:
    assert break_even({"1": {"verdict": "never", "tokens": None}}, 1) == NEVER
    assert break_even({"1": {"verdict": "always", "tokens": None}}, 1) == 0
    assert break_even({"1": {"verdict": "crosses", "tokens": 900}}, 1) == 900
    assert break_even({"1": {"verdict": "crosses", "tokens": 900}}, 4) is None
    assert break_even(None, 1) is None
