"""Figures and their Vega templates. `python -m pytest tests/report/test_figures.py`"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dvc_render import VegaRenderer
from made_up import LIMITS, Run
from matplotlib.figure import Figure

from kvdrift.report import figures
from kvdrift.report.figures import (
    FLOOR,
    PANELS,
    attention_rows,
    draw_frontier,
    draw_heatmap,
    draw_latency,
    draw_recall,
    heatmap_rows,
    latency_rows,
    recall_rows,
)
from kvdrift.report.frontier import BreakEven, choose, frontier_rows
from kvdrift.report.verdict import NEVER, judge

TEMPLATES = Path(__file__).parent.parent.parent / ".dvc" / "plots"
EVENS = {"exact": BreakEven(None, None), "kivi4": BreakEven(1600, 293), "kivi2": BreakEven(0, 300)}
AXES = {
    "heatmap": ("bucket", "layer"),
    "attention": ("bucket", "layer"),
    "recall": ("length", "depth"),
    "frontier": ("bytes_ratio", "kl"),
    "latency": ("context", "itl_ms"),
}


@pytest.fixture
def rows(run: Run) -> dict[str, list[dict[str, Any]]]:
    verdicts = [judge(run.evidence(name), LIMITS) for name in run.policies]
    return {
        "heatmap": heatmap_rows(verdicts),
        "attention": attention_rows(verdicts),
        "recall": recall_rows(verdicts),
        "frontier": frontier_rows(verdicts, choose(verdicts)),
        "latency": latency_rows({name: run.evidence(name).latency for name in run.policies}, EVENS),
    }


def test_heatmap_has_a_row_a_cell_and_panel_and_no_zero(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert len(rows["heatmap"]) == 2 * 3 * 4 * 3
    assert min(row["value"] for row in rows["heatmap"]) >= FLOOR
    assert set(rows["heatmap"][0]) == {"policy", "layer", "bucket", "panel", "value"}


def test_attention_has_a_row_a_cell_and_part(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert len(rows["attention"]) == 2 * 3 * 4 * 3
    parts = {row["panel"] for row in rows["attention"]}
    assert parts == {"keys: divergence of weights", "values: error of output", "both: error of output"}


def test_recall_shows_the_reference_once_and_then_each_candidate(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert list(dict.fromkeys(row["policy"] for row in rows["recall"])) == ["reference", "kivi4", "kivi2"]


def test_frontier_marks_decisions_and_what_none_dominates(rows: dict[str, list[dict[str, Any]]]) -> None:
    marks = {row["policy"]: (row["mark"], row["pareto"]) for row in rows["frontier"]}
    assert marks == {"kivi2": ("reject", True), "kivi4": ("chosen", True), "exact": ("fallback", True)}


def test_latency_keeps_the_workload_of_a_length_and_marks_only_a_crossing(run: Run) -> None:
    latency = run.evidence("kivi4").latency
    assert latency is not None
    reused = {**latency["rows"][0], "context": 64, "reuse": "evicted"}
    longer = {**latency["rows"][2], "generated": 1000, "candidate_p50_ms": 1.0}
    found = latency_rows({"kivi4": {**latency, "rows": [*latency["rows"], reused, longer]}, "int4": None}, EVENS)
    assert len(found) == 6
    assert {(row["faster"], row["smaller"], row["even"]) for row in found} == {(1600, 293, "faster 1,600, smaller 293")}
    never = latency_rows({"kivi4": latency}, {"kivi4": BreakEven(NEVER, 293)})
    assert {(row["faster"], row["even"]) for row in never} == {(None, "faster never, smaller 293")}
    nothing = latency_rows({"exact": latency}, EVENS)
    assert {(row["faster"], row["smaller"], row["even"]) for row in nothing} == {(None, None, "no break-even")}


def test_pictures_take_their_rows_and_the_gates_limits(rows: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    draw_heatmap(rows["heatmap"], tmp_path / "plain.png", {})
    draw_heatmap(rows["heatmap"], tmp_path / "heatmap.png", dict.fromkeys(PANELS, 0.002), "kivi4")
    draw_heatmap(rows["attention"], tmp_path / "attention.png", {}, "kivi4", "Attention")
    draw_recall(rows["recall"], tmp_path / "recall.png")
    draw_frontier(rows["frontier"], tmp_path / "unlimited.png")
    draw_frontier(rows["frontier"], tmp_path / "frontier.png", 0.6, 0.02)
    draw_latency(rows["latency"], tmp_path / "latency.png")
    drawn = {path.stem: path.read_bytes() for path in tmp_path.glob("*.png")}
    assert all(drawn.values())
    assert drawn["plain"] != drawn["heatmap"]
    assert drawn["unlimited"] != drawn["frontier"]


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from here on, kept instead."""
    kept: list[Figure] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.append(figure))
    return kept


def test_names_on_the_frontier_stay_in_the_picture_and_the_legend_hides_no_point(
    rows: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = drawn(monkeypatch)
    points = [row | {"policy": f"a_rather_long_{row['policy']}"} for row in rows["frontier"]]
    draw_frontier(points, Path("frontier.png"), 0.6, 0.02)
    (figure,) = kept
    figure.draw_without_rendering()
    (ax,) = figure.axes
    inside = ax.get_window_extent()
    assert len(ax.texts) == 3
    for text in ax.texts:
        box = text.get_window_extent()
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1
        assert inside.y0 <= box.y0 < box.y1 <= inside.y1
    (legend,) = figure.legends
    assert ax.get_legend() is None
    assert legend.get_window_extent().y1 <= inside.y0


def test_a_needle_that_the_reference_misses_is_hatched(
    rows: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = drawn(monkeypatch)
    first = rows["recall"][0]
    for row in rows["recall"]:
        if (row["length"], row["depth"]) == (first["length"], first["depth"]):
            row["reference"] = 0
    draw_recall(rows["recall"], Path("recall.png"))
    hatched = [[patch.get_hatch() for patch in ax.patches] for ax in kept[0].axes[:3]]
    assert hatched == [["////"]] * 3


def test_grey_is_explained_where_something_was_not_measured(
    rows: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = drawn(monkeypatch)
    draw_heatmap(rows["heatmap"], Path("heatmap.png"), {})
    draw_heatmap(rows["heatmap"][1:], Path("heatmap.png"), {})
    assert ["grey: not measured" in figure.get_suptitle() for figure in kept] == [False, True]


@pytest.mark.parametrize("name", AXES)
def test_template_takes_the_rows(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    x, y = AXES[name]
    points = [row | {"rev": "workspace", "filename": f"plots/{name}.json", "field": y} for row in rows[name]]
    renderer = VegaRenderer(points, name, template=name, template_dir=str(TEMPLATES), x=x, y=y)
    filled = renderer.get_filled_template()
    assert filled["data"]["values"] == points
    assert "DVC_METRIC" not in str(filled)


def test_nothing_measured_still_draws(tmp_path: Path) -> None:
    for draw in (partial(draw_heatmap, limits={}), draw_recall, draw_frontier, draw_latency):
        draw([], path=tmp_path / "empty.png")
        assert (tmp_path / "empty.png").stat().st_size
        (tmp_path / "empty.png").unlink()
