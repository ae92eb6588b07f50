"""Slices of the error. `python -m pytest tests/report/test_slices.py`"""

from __future__ import annotations

import polars as pl
import pytest

from kvdrift.report.slices import FIGURES, logits_rows, slice_rows, step_rows


def attention(*rows: tuple[str, int | None, str | None, float | None]) -> pl.DataFrame:
    schema = {"slice": pl.String, "bucket": pl.Int64, "role": pl.String} | dict.fromkeys(FIGURES, pl.Float64)
    frame = pl.DataFrame([(*row[:3], *[row[3]] * len(FIGURES)) for row in rows], schema=schema, orient="row")
    return frame.with_columns(prompt=pl.Series([f"p{n}" for n in range(len(rows))]))


def test_every_kind_of_slice_has_its_own_figures():
    errors = pl.DataFrame(
        {
            "bucket": [0, 0, 32, 0, 32],
            "role": ["user", "needle", "user", "user", "generated"],
            "tensor": ["key", "key", "key", "value", "value"],
            "tokens": [30, 10, 40, 8, 16],
            "rel_l2": [0.1, 0.3, 0.2, 0.5, 0.7],
        }
    )
    rows = [("layer", None, None, 9.0), ("position", 0, None, 0.1), ("position", 0, None, 0.3)]
    rows += [("position", 32, None, None), ("distance", 128, None, 0.7), ("role", None, "needle", 0.4)]
    rows += [("region", None, "prompt", 0.2), ("region", None, "generated", None), ("role", None, "generated", 0.6)]
    found = {(row["slice"], row["at"]): row for row in slice_rows(errors, attention(*rows))}
    places = [("position", 0), ("position", 32), ("distance", 128), ("region", "generated"), ("region", "prompt")]
    assert list(found) == [*places, ("role", "generated"), ("role", "needle"), ("role", "user")]
    assert found["position", 0]["key_error"] == pytest.approx((30 * 0.1 + 10 * 0.3) / 40)
    assert found["position", 0]["value_output"] == pytest.approx(0.2)
    assert (found["position", 32]["key_error"], found["position", 32]["jensen_shannon"]) == (0.2, None)
    assert (found["distance", 128]["key_error"], found["distance", 128]["combined_error"]) == (None, 0.7)
    assert found["region", "prompt"]["key_error"] == pytest.approx((30 * 0.1 + 10 * 0.3 + 40 * 0.2) / 80)
    assert (found["region", "prompt"]["value_error"], found["region", "prompt"]["key_logits"]) == (0.5, 0.2)
    assert (found["position", 0]["prompts"], found["distance", 128]["prompts"]) == (2, 1)
    nothing = dict.fromkeys(("prompts", "key_error", *FIGURES))
    assert found["region", "generated"] == {"slice": "region", "at": "generated", "value_error": 0.7} | nothing
    assert (found["role", "generated"]["value_error"], found["role", "generated"]["value_output"]) == (0.7, 0.6)
    assert (found["role", "needle"]["key_logits"], found["role", "user"]["value_error"]) == (0.4, 0.5)


def test_steps_are_told_in_octaves_over_the_answers_that_reach_them():
    kls = [[0.1] * 8 + [0.2] * 8 + [0.4] * 2, [0.3] * 8, None, []]
    generations = pl.DataFrame(
        {"prompt": list("abcd"), "step_kl": kls}, schema_overrides={"step_kl": pl.List(pl.Float64)}
    )
    rows = step_rows(generations)
    assert [(row["first"], row["tokens"], row["prompts"]) for row in rows] == [(0, 16, 2), (8, 8, 1), (16, 2, 1)]
    assert [row["kl"] for row in rows] == pytest.approx([0.2, 0.2, 0.4])


def test_next_tokens_are_told_by_their_own_position():
    positions = [31, 32, 127, 128, 2047, 2048, 8191]
    columns = {"position": positions, "kl": [0.1 * n for n in range(7)], "prompt": list("aabbccd")}
    figures = dict.fromkeys(("delta_p", "rank_correlation", "nll", "nll_reference"), [0.5] * 7)
    rows = logits_rows(pl.DataFrame(columns | {"same_top1": [True] * 6 + [False]} | figures))
    assert [(row["first"], row["tokens"]) for row in rows] == [(0, 1), (32, 2), (128, 1), (512, 1), (2048, 2)]
    assert [row["kl"] for row in rows] == pytest.approx([0.0, 0.15, 0.3, 0.4, 0.55])
    assert rows[-1]["same_top1"] == 0.5


def test_nothing_measured_is_nothing_told():
    assert (slice_rows(None, None), step_rows(None), logits_rows(None)) == ([], [], [])
