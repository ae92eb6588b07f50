"""The measured paths on a tiny model. `python -m pytest tests/measure/test_service.py`"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvdrift.ledger import account
from kvdrift.measure import service
from kvdrift.measure.bench import Bench, Prefix, held_bytes
from kvdrift.measure.memory import peak_allocation
from kvdrift.measure.sweep import CapacityTrial, Point, Scheduler
from kvdrift.policy import CachePolicy, from_dict

QUANTIZER = {"format": "uniform", "bits": 4, "axis": "token"}
PACKED = from_dict({"block": 32, "residual_window": 32, "key": QUANTIZER, "value": QUANTIZER}, "packed")
EXACT = from_dict({"key": None, "value": None}, "exact")
STATIC = Scheduler(batch_limit=16, prefill_chunk=0, eviction="none")


@torch.inference_mode()
def bench(model: Any, policy: CachePolicy, tokens: int = 256) -> Bench:
    prompt = torch.randint(0, 97, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(input_ids=prompt, cache=cache, use_cache=True)
    return Bench(model, policy, Prefix(prompt, *zip(*((x.keys, x.values) for x in cache.layers), strict=True)))


def test_an_exact_candidate_decodes_what_the_reference_decodes(llama: Any) -> None:
    made = bench(llama, EXACT)
    reference, candidate = (made.decode(cache, 2) for cache in (made.dynamic(2, 128), made.packed(2, 128)))
    for _ in range(3):
        assert torch.equal(reference(), candidate())


def test_held_bytes_are_the_ledgers(llama: Any) -> None:
    made = bench(llama, PACKED)
    shape = made.packed(3, 200).shape
    assert held_bytes(made.packed(3, 200)) == account(PACKED, shape, 200, 3).format_bytes
    assert held_bytes(made.dynamic(3, 200)) == account(EXACT, shape, 200, 3).format_bytes


@pytest.mark.parametrize(
    "point",
    [
        Point(2, 200, 3),
        Point(1, 128, 2, "prefill"),
        Point(3, 200, 2, "decode", "shared_prefix"),
        Point(2, 200, 2, "prefill", "continued_session"),
        Point(2, 200, 2, "decode", "continued_session"),
        Point(1, 128, 2, "prefill", "evicted"),
    ],
    ids=lambda point: point.name,
)
def test_every_kind_of_point_gives_a_row(llama: Any, point: Point) -> None:
    made = bench(llama, PACKED)
    row = service.row(point, service.joined([service.sample(made, point, turn=16, seed=n) for n in (0, 1)]), seed=0)
    assert (row["pairs"], row["visits"]) == (2 * point.generated, 2)
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["candidate_p95_ms"] is None
    assert row["reuse"] == point.reuse


def test_a_shared_prefix_is_held_once(llama: Any) -> None:
    made = bench(llama, PACKED)
    fresh = service.sample(made, Point(4, 200, 1), 16, 0)["bytes"]
    shared = service.sample(made, Point(4, 200, 1, "decode", "shared_prefix"), 16, 0)["bytes"]
    assert shared[1] < fresh[1]


@pytest.mark.parametrize("policy", [PACKED, EXACT], ids=lambda p: p.name)
def test_capacity_found_by_trying_is_what_the_ledger_predicts(llama: Any, policy: CachePolicy) -> None:
    made = bench(llama, policy)
    shape = made.packed(1, 200).shape
    budget = 1 << 20
    found = service.capacity(made, CapacityTrial(budget_mib=1, steps=4), STATIC, context=190)
    expected = min(16, budget // account(policy, shape, 194, 1).format_bytes)
    assert found["sequences"] == found["predicted_sequences"] == expected
    assert found["reference_sequences"] == found["predicted_reference_sequences"]
    assert found["held_bytes"] <= budget


def test_peak_allocation_sees_what_comes_and_goes() -> None:
    """Case 8: a peak is measured, not inferred."""

    def prepare() -> Any:
        return lambda: (torch.ones(1 << 20) + 1).sum()

    assert 8 << 20 <= peak_allocation(prepare, torch.device("cpu")) < (8 << 20) + 65536


def test_the_packed_cache_peaks_below_the_reference(llama: Any) -> None:
    """Case 8. Both sides are of one length, so that their ratio is the ledger's."""
    made = bench(llama, PACKED)
    peaks, ledger = service.peaks(made, 2, 250), account(PACKED, made.empty_packed().shape, 250, 2)
    assert (peaks["candidate_held"], peaks["reference_held"]) == (ledger.format_bytes, ledger.reference)
    assert peaks["candidate_held"] < peaks["reference_held"]
    assert peaks["candidate_peak"] < peaks["reference_peak"]


def test_energy_that_cannot_be_read_is_unavailable_and_never_zero(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, point = bench(llama, PACKED), Point(1, 128, 1)
    monkeypatch.setattr("kvdrift.measure.energy.counter", lambda device: None)
    assert service.joules_per_token(made, point) == "unavailable"
    ticks = iter(range(100))
    monkeypatch.setattr("kvdrift.measure.energy.counter", lambda device: lambda: 32.0 * next(ticks))
    found = service.joules_per_token(made, point)
    assert found == {"reference_joules_per_token": 1.0, "candidate_joules_per_token": 1.0}
