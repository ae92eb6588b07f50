"""Every rail on a tiny model, and that a broken rail is seen. `python -m pytest tests/serving/test_drill.py`"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvdrift.cache.block import Identity
from kvdrift.cache.layer import PackedLayer
from kvdrift.cache.pool import PoolExhausted
from kvdrift.policy import CachePolicy, from_dict
from kvdrift.serving import drill, drill_cache, drill_door, handover
from kvdrift.serving.admission import make_room
from kvdrift.serving.canary import Alarms, Release, tripped
from kvdrift.serving.checks import CACHE, DOOR, FALLBACK, REQUIRED
from kvdrift.serving.killswitch import Session
from kvdrift.serving.mirror import Mirrored, sampled

RELEASE = Release("model", "version", "kernels")
INT4 = {"format": "uniform", "bits": 4, "axis": "token"}
KEYS = {"format": "uniform", "bits": 2, "axis": "channel", "group": 32}
FP8 = {"format": "fp8_e4m3", "bits": 8, "axis": "token", "scale_dtype": "float32"}
POLICIES = [
    from_dict({"block": 32, "key": INT4, "value": INT4}, "int4"),
    from_dict({"block": 32, "sink_tokens": 16, "residual_window": 32, "key": KEYS, "value": INT4}, "kivi"),
    from_dict({"block": 32, "key": FP8, "value": FP8}, "fp8"),
    from_dict({"block": 32, "layers": [{"key": KEYS, "value": None}, {"key": INT4, "value": INT4}]}, "mixed"),
    from_dict({"block": 32, "layers": [{}, {"key": INT4, "value": INT4}]}, "second layer only"),
    from_dict({"key": None, "value": None}, "exact"),
]
EIGHT = from_dict({"key": {"bits": 8}, "value": {"bits": 8}}, "int8")
EXACT = from_dict({"key": None, "value": None}, "exact")


@torch.inference_mode()
def subject(model: Any, policy: CachePolicy, eviction: Any = "none") -> drill.Subject:
    tokens = torch.randint(0, 97, (1, 256), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens, cache=cache, use_cache=True)
    keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
    limits = [
        {"keys": 1.5 * float(k.abs().amax()), "values": 1.5 * float(v.abs().amax())}
        for k, v in zip(keys, values, strict=True)
    ]
    return drill.Subject(model, policy, (policy, EIGHT, EXACT), RELEASE, limits, eviction, tokens, keys, values)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_rail_holds(llama_bf16: Any, policy: CachePolicy) -> None:
    checks = drill.run(subject(llama_bf16, policy))
    assert [c for c in checks if not c.passed] == []
    assert [c.name for c in checks] == [name for name in REQUIRED if name != FALLBACK]


def test_every_check_that_is_defined_is_required() -> None:
    for module, names in ((drill_door, DOOR), (drill_cache, CACHE)):
        defined = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__ and callable(x)]
        assert [x.__name__ for x in defined if not x.__name__.startswith("_")] == list(names)
    assert len(set(REQUIRED)) == len(REQUIRED) == 17


def test_eviction_of_the_oldest(llama_bf16: Any) -> None:
    check = drill_cache.eviction(subject(llama_bf16, POLICIES[1], "oldest"))
    assert "made room" in check


def test_a_broken_rail_fails_its_own_check(llama_bf16: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject(llama_bf16, POLICIES[1])
    monkeypatch.setattr(handover, "check", lambda *args: None)
    failed = {c.name for c in drill.run(made) if not c.passed}
    assert failed == {"header_fields", "other_tenant", "corruption", "kill_switch"}
    monkeypatch.undo()
    monkeypatch.setattr(PackedLayer, "crop", lambda self, cut: None)
    assert {"rollback"} <= {c.name for c in drill.run(made) if not c.passed}


def test_a_fallback_that_differs_in_one_logit_or_token_fails() -> None:
    logits = torch.randn(2, 3, 7)
    tokens = [[1, 2], [3]]
    assert drill.fallback((logits, tokens), (logits.clone(), tokens)).passed
    assert not drill.fallback((logits, tokens), (logits + torch.eye(7)[:3] * 1e-3, tokens)).passed
    assert not drill.fallback((logits, tokens), (logits, [[1, 2], [4]])).passed


def test_a_block_is_another_tenants_unless_its_scope_is_named(llama_bf16: Any) -> None:
    made = subject(llama_bf16, POLICIES[0])
    block = next(handover.blocks(made.cache(scope="shared")))
    mine = RELEASE.identity("me")
    with pytest.raises(ValueError, match="scope"):
        handover.accept(block, mine)
    handover.accept(block, mine, shareable=("other", "shared"))
    with pytest.raises(ValueError, match="model"):
        handover.accept(block, replace(mine, model="another"), shareable=("shared",))
    assert isinstance(mine, Identity)


def test_room_is_made_from_the_oldest_on_and_only_if_it_suffices(llama_bf16: Any) -> None:
    made = subject(llama_bf16, POLICIES[0])
    sessions = {name: Session("t", RELEASE, made.cache()) for name in "abc"}
    size = sessions["a"].cache.storage_bytes()
    with pytest.raises(PoolExhausted, match="eviction 'none'"):
        make_room(sessions, size, 0, "none")
    with pytest.raises(PoolExhausted):
        make_room(sessions, 4 * size, 0, "oldest")
    assert list(sessions) == ["a", "b", "c"]
    assert all(s.cache.get_seq_length() == made.context for s in sessions.values())
    assert make_room(sessions, size, size, "none") == []
    assert make_room(sessions, 2 * size, size // 2, "oldest") == ["a", "b"]
    assert list(sessions) == ["c"]


def test_sampling_is_by_request_and_alarms_need_enough_of_them() -> None:
    requests = [f"r{i}" for i in range(2000)]
    assert sum(sampled(r, 0.1) for r in requests) == pytest.approx(200, rel=0.3)
    assert not any(sampled(r, 0.0) for r in requests)
    assert all(sampled(r, 1.0) for r in requests)
    alarms = Alarms(kl_mean=0.05, same_top1=0.95, requests=3)
    drifting = [Mirrored(r, 8, 1.0, 2.0, 0.5, 0) for r in requests[:3]]
    assert tripped(alarms, drifting[:2]) == []
    assert len(tripped(alarms, drifting)) == 2
    broken = [Mirrored(r, 8, float("nan"), float("nan"), 1.0, 0) for r in requests[:3]]
    assert "KL nan" in tripped(alarms, broken)[0]
