"""What a sweep measures, how many sequences fit, how it resumes. `python -m pytest tests/measure/test_sweep.py`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvdrift.composed import load_stage
from kvdrift.config import check, compose
from kvdrift.ledger import CacheShape, account, load_policy
from kvdrift.measure.capacity import largest, predicted
from kvdrift.measure.partial import partial
from kvdrift.measure.sweep import CapacityTrial, Point, Scheduler, Sweep, Workload, points

SWEEP = Sweep(
    contexts=[128, 512, 8192], batches=[1, 4, 64], outputs=[16], grid="factors", pairs=8, visits=2,
    prefill_contexts=[512], prefill_pairs=3, reuse=[], turn=64, cold_starts=0, peers=[], capacity=CapacityTrial(64, 4),
)  # fmt: skip
STATIC = Scheduler(batch_limit=8, prefill_chunk=0, eviction="none")
WORKLOAD = Workload(batch=1, context=2048, output=64)


def test_one_factor_varies_at_a_time_around_the_workload() -> None:
    found = points(SWEEP, WORKLOAD, STATIC, longest=7888)
    assert found[0] == Point(1, 2048, 64)
    assert Point(1, 2048, 16) in found
    assert {(p.batch, p.context) for p in found if p.phase == "decode"} == {
        (1, 2048), (1, 128), (1, 512), (1, 7888), (4, 128), (4, 2048),
    }  # fmt: skip
    assert len(found) == len(set(found))
    full = points(replace(SWEEP, grid="full"), WORKLOAD, STATIC, longest=7888)
    assert {(p.batch, p.context) for p in full if p.phase == "decode"} >= {(4, 512), (4, 7888)}


def test_the_workload_has_enough_steps_for_its_gate() -> None:
    """Case 12: the p95 gate needs a p95."""
    assert points(SWEEP, Workload(1, 2048, 4), STATIC, longest=7888)[0].generated == 20


@pytest.mark.parametrize("latency", ["laptop", "smoke", "full", "gpu"])
def test_every_sweep_of_conf_fits_the_stage(latency: str) -> None:
    stage = load_stage(Path("stages/latency.py"))
    for scheduler in ("static", "chunked"):
        overrides = ["plan=kivi4", f"latency={latency}", f"scheduler={scheduler}"]
        config = check(compose("latency", overrides), stage.schema)
        assert points(config.latency, config.workload, config.scheduler, 8000)


@pytest.mark.parametrize("most", [0, 1, 7, 29, 64])
@pytest.mark.parametrize("start", [0, 1, 6, 30, 64])
def test_the_largest_stable_count_is_found_from_any_start(most: int, start: int) -> None:
    tried: list[int] = []

    def stable(n: int) -> bool:
        tried.append(n)
        return n <= most

    assert largest(stable, start, limit=64) == most
    assert len(tried) == len(set(tried)) <= 14
    if start == most and 0 < most < 64:
        assert len(tried) == 2


def test_the_prediction_holds_at_every_length_of_the_trial() -> None:
    shape, policy = CacheShape(4, 2, 64, 4), load_policy("kivi4")
    budget = 10 * account(policy, shape, 512, 1).format_bytes
    assert predicted(policy, shape, range(512, 513), budget, limit=64) == 10
    assert predicted(policy, shape, range(512, 513), budget, limit=4) == 4
    assert predicted(policy, shape, range(512, 4096), budget, limit=64) < 10


def test_a_killed_sweep_continues_and_other_inputs_start_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "kernel.cpp"
    source.write_text("one")
    first = partial({"pairs": 8}, [source])
    first.once("point", lambda: [1.0, 2.0])
    with pytest.raises(RuntimeError):
        first.once("killed", _fails)
    again = partial({"pairs": 8}, [source])
    assert again.once("point", _fails) == [1.0, 2.0]
    assert again.once("killed", lambda: 3) == 3
    assert partial({"pairs": 9}, [source]).folder != first.folder
    source.write_text("two")
    assert partial({"pairs": 8}, [source]).folder != first.folder
    again.clear()
    assert not first.folder.exists()


def _fails() -> None:
    raise RuntimeError("measured again")
