"""Nothing that was tampered with is accepted, or ends a verdict. `python -m pytest tests/report/test_artifacts.py`

What an artifact tells is changed here; what becomes of its file is test_reading.py's.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from made_up import LIMITS, SHAPE, Run, kivi
from spoiling import CANDIDATE, TABLES, TEXTS, rejected, rewrite

from kvdrift.ledger import account
from kvdrift.measure import cells, quantized
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.prompts.batches import MODES
from kvdrift.report import artifacts, shapes
from kvdrift.report.evidence import Evidence
from kvdrift.report.strict import Number
from kvdrift.report.verdict import judge


def test_the_healthy_run_is_accepted(healthy: Run) -> None:
    assert judge(healthy.evidence(CANDIDATE), LIMITS)["decision"] == "accept"
    assert judge(healthy.evidence("exact"), LIMITS)["decision"] == "fallback"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers and flags of some JSON are."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))
    if isinstance(value, bool | int | float):
        yield path


def put(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Replace what stands there, and return what did."""
    *parents, last = path
    for key in parents:
        content = content[key]
    was, content[last] = content[last], value
    return was


IMPOSSIBLE = [float("nan"), float("inf"), -1, 10**400, "1", [], {}, "a flag for a number, a number for a flag"]


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("artifact", TEXTS)
def test_an_impossible_figure_is_refused_wherever_it_stands(artifact: str, value: Any, sound: Evidence) -> None:
    whole = getattr(sound, artifact)
    assert artifacts.CHECKS[artifact](whole, sound) is None
    for path in leaves(whole):
        content = copy.deepcopy(whole)
        was = put(content, path, value)
        if isinstance(value, str) and value != "1":
            put(content, path, 1 if isinstance(was, bool) else True)
        assert artifacts.CHECKS[artifact](content, sound), path


@pytest.mark.parametrize("artifact", TEXTS)
def test_a_key_that_an_object_lost_is_missed(artifact: str, sound: Evidence) -> None:
    wanted = {"packing": shapes.PACKING, "latency": shapes.LATENCY, "drill": shapes.DRILL}[artifact]
    for key in wanted:
        content = {name: value for name, value in getattr(sound, artifact).items() if name != key}
        assert artifacts.CHECKS[artifact](content, sound) == f"{artifact} has no {key}"


def test_a_length_that_was_not_reconciled_is_missed(sound: Evidence) -> None:
    assert sound.packing is not None
    for kept in (sound.packing["memory"][1:], sound.packing["memory"][:-1], [*sound.packing["memory"]] * 2):
        fault = artifacts.CHECKS["packing"](sound.packing | {"memory": kept}, sound)
        assert "the prompts have [128, 320, 512, 2048, 8128]" in fault


def without(row: int) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return lambda frame: pl.concat([frame.head(row), frame.tail(frame.height - row - 1)])


TAMPERED: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "no rows": lambda frame: frame.clear(),
    "first row lost": without(0),
    "row lost": without(5),
    "row twice": lambda frame: pl.concat([frame, frame.tail(1)]),
    "all twice": lambda frame: pl.concat([frame, frame]),
    "one prompt lost": lambda frame: frame.filter(pl.col("prompt") != frame["prompt"][0]),
    "another cohort": lambda frame: frame.with_columns(cohort=pl.lit("code"), prompt=pl.lit("code-1")),
    "all text": lambda frame: frame.with_columns(pl.all().exclude(pl.List).cast(pl.String)),
    "all null": lambda frame: frame.with_columns(pl.lit(None).alias(name) for name in frame.columns),
    "no columns": lambda frame: pl.DataFrame(),
}


@pytest.mark.parametrize("how", TAMPERED)
@pytest.mark.parametrize(("artifact", "file"), [(name, name) for name in TABLES], indirect=["file"])
def test_a_table_that_is_not_whole_is_refused(artifact: str, file: Path, how: str, healthy: Run) -> None:
    if (artifact, how) in {("attention", "row lost"), ("cells", "one prompt lost")}:
        pytest.skip("a slice of a layer's attention, and which prompts were probed, no gate goes by")
    rewrite(file, TAMPERED[how])
    rejected(healthy, artifact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -2.0, 2.0**60, None])
@pytest.mark.parametrize("artifact", TABLES)
def test_a_figure_out_of_its_range_is_refused_in_every_column(
    artifact: str, value: float | None, sound: Evidence
) -> None:
    table, first = getattr(sound, artifact), pl.int_range(pl.len()) == 0
    assert artifacts.CHECKS[artifact](table, sound) is None
    for name, column in getattr(shapes, artifact.upper()).items():
        if isinstance(column, Number) and not (value is None and column.or_null):
            new = pl.when(first).then(pl.lit(value, pl.Float64)).otherwise(pl.col(name))
            assert name in artifacts.CHECKS[artifact](table.with_columns(new.alias(name)), sound)


@pytest.mark.parametrize("value", [float("nan"), -2.0, 2.0**60, None, "1"])
@pytest.mark.parametrize("name", ["tokens", "tokens_reference", "step_kl"])
def test_so_is_one_in_a_list(name: str, value: Any, sound: Evidence) -> None:
    assert sound.generations is not None
    lists = sound.generations[name].to_list()
    lists[0] = [1.0, value]
    strings = [None if row is None else list(map(str, row)) for row in lists]
    kept = pl.Series(name, strings) if value == "1" else pl.Series(name, lists, pl.List(pl.Float64), strict=False)
    fault = artifacts.CHECKS["generations"](sound.generations.with_columns(kept), sound)
    assert name in (fault or "") or (name, value) == ("step_kl", None)


@pytest.mark.parametrize("artifact", TABLES)
def test_a_column_that_is_missing_is_named(artifact: str, sound: Evidence) -> None:
    for name in getattr(shapes, artifact.upper()):
        table = getattr(sound, artifact).drop(name)
        assert artifacts.CHECKS[artifact](table, sound) == f"it has no column {name}"


@pytest.mark.parametrize(("artifact", "file"), [("generations", "generations")], indirect=["file"])
def test_a_mode_that_was_not_generated_is_missed(artifact: str, file: Path, healthy: Run) -> None:
    for mode in MODES:
        rewrite(file, lambda frame, mode=mode: frame.filter(pl.col("mode") == mode))
        assert "rows are missing" in rejected(healthy, artifact)


@pytest.mark.parametrize("change", [{"correct": True}, {"first_divergence": None}, {"edit_distance": 0}])
@pytest.mark.parametrize(("artifact", "file"), [("generations", "generations")], indirect=["file"])
def test_a_grade_that_its_text_belies_is_refused(
    artifact: str, file: Path, change: dict[str, Any], healthy: Run
) -> None:
    changed = pl.col("first_divergence").is_not_null()
    wrong = pl.when(changed).then(0.0).otherwise(pl.col("score")).alias("score")
    new = [pl.when(changed).then(pl.lit(v)).otherwise(pl.col(k)).alias(k) for k, v in change.items()]
    rewrite(file, lambda frame: frame.with_columns(wrong, pl.col("correct") & ~changed).with_columns(new))
    assert "is not what its tokens and score say" in rejected(healthy, artifact)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("artifact", "file"), [("cells", "cells"), ("errors", "errors")], indirect=["file"])
def test_a_layer_or_a_bucket_that_the_plan_packs_is_missed(artifact: str, file: Path, layer: int, healthy: Run) -> None:
    before = file.read_bytes()
    rewrite(file, lambda frame: frame.filter(pl.col("layer") != layer))
    rejected(healthy, artifact)
    file.write_bytes(before)
    rewrite(file, lambda frame: frame.filter((pl.col("layer") != layer) | (pl.col("bucket") != 512)))
    rejected(healthy, artifact)


@pytest.mark.parametrize(("artifact", "file"), [("errors", "errors")], indirect=["file"])
def test_the_tokens_behind_a_prompt_are_missed_and_told_from_its_own(artifact: str, file: Path, healthy: Run) -> None:
    before, generated = file.read_bytes(), pl.col("role") == "generated"
    assert pl.read_parquet(file).filter(generated)["cohort"].unique().to_list() == ["long_code"]
    for change in (lambda frame: frame.filter(~generated), lambda frame: frame.with_columns(role=pl.lit("filler"))):
        rewrite(file, change)
        assert "rows are missing" in rejected(healthy, artifact)
        file.write_bytes(before)


def test_a_ratio_that_its_percentiles_belie_is_refused(healthy: Run) -> None:
    path = healthy.path("latency", "kivi4.json")
    text = path.read_text()
    for headline, row in ({"p95_ratio": 0.5}, {"p95_ratio": 0.5}), ({"p95_ratio": 0.5}, {}), ({"p95_ms": 1.0}, {}):
        content = json.loads(text)
        content["headline"] |= headline
        content["rows"][0] |= row
        path.write_text(json.dumps(content))
        assert "p95" in rejected(healthy, "latency")
    path.write_text(text)


def test_a_peak_below_what_the_cache_itself_takes_is_refused(healthy: Run) -> None:
    path = healthy.path("latency", "kivi4.json")
    text = path.read_text()
    least = account(kivi("kivi4", 4), SHAPE, 4096, 1).format_bytes
    content = json.loads(text)
    content["headline"] |= {"held_bytes": least - 1, "peak_bytes": least - 1}
    path.write_text(json.dumps(content))
    assert "the cache alone takes" in rejected(healthy, "latency")
    path.write_text(text)


def test_a_policy_with_exact_layers_and_sinks_is_judged_by_what_it_packs(run: Run) -> None:
    key = Quantizer(bits=8, axis="channel", group=32)
    layers = (LayerPolicy(), LayerPolicy(key, Quantizer(bits=8)), LayerPolicy())
    run.add(CachePolicy("mixed", layers, sink_tokens=16, residual_window=112))
    verdict = judge(run.evidence("mixed"), LIMITS)
    assert [gate["name"] for gate in verdict["gates"] if not gate["passed"]] == ["bytes ratio"]


def test_what_is_demanded_of_a_table_is_in_what_is_written() -> None:
    assert set(artifacts.ERRORS) <= set(quantized.ERRORS)
    assert set(artifacts.ATTENTION) <= set(quantized.ATTENTION)
    assert set(artifacts.CELLS) <= set(cells.CELLS)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows.filter(pl.col("slice") != "region"),
        lambda rows: rows.filter(pl.col("slice") == "layer"),
        lambda rows: rows.with_columns(slice=pl.col("slice").replace("distance", "planet")),
        lambda rows: rows.filter(~((pl.col("slice") == "region") & (pl.col("role") == "generated"))),
        lambda rows: rows.with_columns(top_overlap=pl.lit(None, pl.Float64)),
    ],
)
def test_every_slice_of_a_layers_attention_is_needed(spoil: Any, sound: Evidence) -> None:
    assert artifacts.CHECKS["attention"](sound.attention, sound) is None
    assert artifacts.CHECKS["attention"](spoil(sound.attention), sound)
