"""What the probe quantizers do, as the receipt tells it. `python -m pytest tests/report/test_probes.py`"""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from probing import cells_frame, row

from kvdrift.report.probes import probe_rows, read_cells


def table(*rows: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(rows, infer_schema_length=None)


def test_a_row_a_probe_and_tensor_with_its_worst_cells() -> None:
    rows = probe_rows(cells_frame())
    assert [(found["policy"], found["tensor"]) for found in rows] == [
        (policy, tensor) for policy in ("int4", "kivi2") for tensor in ("key", "value", "both")
    ]
    key = rows[3]
    assert key["cells"] == 3 * 3
    # layers 0, 1, 2 alone, mean over code and needle
    assert key["alone"] == pytest.approx(0.1 + 0.2 + 0.3 + 0.03 / 2 * 3)
    assert [(cell["layer"], cell["start"]) for cell in key["worst"]] == [
        (2, 512),
        (2, 128),
        (1, 512),
        (2, 16),
        (1, 128),
    ]
    assert key["worst"][0]["prompt"] == "needle-long"
    assert {cell["prompt"] for cell in key["worst"]} == {"needle-long"}


def test_what_is_kept_is_the_mean_over_needles_of_that_cell() -> None:
    key, value, both = probe_rows(cells_frame())[3:]
    assert (key["needles"], key["asked"]) == (2, 6)
    worst = {(cell["layer"], cell["start"]): cell for cell in both["worst"]}
    assert worst[2, 16]["kept"] == pytest.approx(0.7)  # 0.6 of one needle, 0.8 of the other
    assert worst[2, 16]["needles"] == 2
    assert worst[2, 512]["kept"] is None
    assert worst[2, 512]["needles"] is None
    assert both["least"] == {"layer": 2, "start": 16, "stop": 80, "kept": pytest.approx(0.7)}
    assert both["kept"] == pytest.approx((5 + 0.7) / 6)
    assert (key["least"]["kept"], value["least"]["kept"]) == (1.0, 1.0)


def test_the_cell_that_keeps_least_is_shown_beside_the_worst_by_kl() -> None:
    there = pl.col("needle") & (pl.col("layer") == 0) & (pl.col("bucket") == 0) & (pl.col("tensor") == "both")
    lost = cells_frame().with_columns(kept=pl.when(there).then(0.2).otherwise("kept"))
    worst = probe_rows(lost)[5]["worst"]
    assert len(worst) == 6
    assert (worst[5]["layer"], worst[5]["start"], worst[5]["needles"]) == (0, 16, 2)
    assert worst[5]["kept"] == pytest.approx(0.2)
    assert worst[5]["kl"] == pytest.approx(0.08)
    assert [len(row["worst"]) for row in probe_rows(cells_frame())] == [5] * 6


def test_a_needle_is_not_among_the_worst_cells_however_large_its_kl() -> None:
    spoilt = cells_frame().with_columns(kl=pl.when("needle").then(9.0).otherwise("kl"))
    assert probe_rows(spoilt)[0]["worst"] == probe_rows(cells_frame())[0]["worst"]


def test_whole_layers_alone_are_no_cells_and_a_probe_without_cells_has_no_row() -> None:
    whole = cells_frame().filter(pl.col("bucket").is_null() | (pl.col("probe") == "2"))
    assert {found["policy"] for found in probe_rows(whole)} == {"kivi2"}
    assert probe_rows(whole.clear()) == []


def test_a_map_without_needles_says_nothing_of_what_is_kept() -> None:
    found = probe_rows(cells_frame().filter(~pl.col("needle")))[0]
    assert (found["needles"], found["asked"], found["kept"], found["least"]) == (0, 0, None, None)
    assert found["worst"][0]["kept"] is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cells: cells.drop("needle"),
        lambda cells: cells.with_columns(kl=pl.lit("much")),
        lambda cells: cells.with_columns(kept=pl.lit(1.5)),
        lambda cells: cells.with_columns(kl=pl.lit(float("nan"))),
        lambda cells: pl.concat([cells, cells]),
        lambda cells: cells.with_columns(tensor=pl.col("tensor").replace("both", "all")),
        lambda cells: cells.with_columns(start="stop", stop="start"),
        lambda cells: cells.with_columns(start=pl.lit(None, pl.Int64)),
        lambda cells: cells.with_columns(kl=pl.when(pl.col("layer") == 1).then(None).otherwise("kl")),
        lambda cells: cells.with_columns(layer=pl.col("layer") + 3),
        lambda cells: cells.filter(pl.col("layer") < 2),
        lambda cells: cells.filter("needle"),
        lambda cells: cells.with_columns(policy=pl.lit("kivi2")),
    ],
)
def test_a_map_that_can_not_be_is_not_measured(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "cells.parquet"
    cells_frame().write_parquet(path)
    assert read_cells(path, 3) is not None
    spoil(cells_frame()).write_parquet(path)
    assert read_cells(path, 3) is None


def test_a_missing_or_torn_file_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "cells.parquet"
    assert read_cells(path, 3) is None
    path.write_bytes(b"PAR1 torn")
    assert read_cells(path, 3) is None
    cells_frame().write_parquet(path)
    path.write_bytes(path.read_bytes()[:-40])
    assert read_cells(path, 3) is None
    assert probe_rows(read_cells(path, 3)) == []


def test_a_cell_that_packs_nothing_counts_for_nothing() -> None:
    empty = row("code", "2", 0, "key", 2048) | dict.fromkeys(("start", "stop", "kl", "cosine", "error", "same_top1"))
    assert [row["cells"] for row in probe_rows(pl.concat([cells_frame(), table(empty)], how="vertical_relaxed"))] == [
        9
    ] * 6
