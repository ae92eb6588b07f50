"""Policies from plain data, their errors and their identity:  pytest tests/test_policy.py"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.ledger import load_policy
from kvdrift.policy import CachePolicy, LayerPolicy, PolicyError, Quantizer, from_dict, packed_blocks, packed_until

KIVI: dict[str, Any] = {
    "residual_window": 128,
    "key": {"bits": 4, "axis": "channel", "group": 64},
    "value": {"bits": 4, "axis": "token", "group": 64},
}
NAMES = sorted(path.stem for path in Path("conf/policy").glob("*.yaml") if "search:" not in path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_survives_json(name: str) -> None:
    made = load_policy(name).bind(layers=5, head_dim=64)
    assert from_dict(json.loads(json.dumps(made.to_dict())), name=name) == made


def test_one_entry_serves_every_layer() -> None:
    made = from_dict(KIVI, "kivi4")
    bound = made.bind(3, 128)
    assert bound.layers == made.layers * 3
    assert made.layer(2) == bound.layer(2) == made.layers[0]


def test_the_id_is_over_what_decides_a_byte_and_nothing_else() -> None:
    made = from_dict(KIVI, "kivi4")
    same = [replace(made, name="other"), replace(made, min_length=500), replace(made, max_length=9)]
    same += [replace(made, escalation=("int8",)), made.bind(30, 64)]
    assert {x.id for x in same} == {made.id}
    other = [replace(made, sink_tokens=16), replace(made, rollback=0), replace(made, block=128)]
    other += [replace(made, prefill="packed"), replace(made, layers=(LayerPolicy(key=Quantizer()),))]
    assert len({made.id, *(x.id for x in other)}) == 6
    assert len(made.id) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blok": 64}, "policy 'p' has an unknown key 'blok'; allowed: block, escalation"),
        ({"block": 48}, "block is 48; allowed: 32, 64, 128"),
        ({"block": 64.0}, "policy 'p': block is 64.0; pass a whole number"),
        ({"prefill": "dense"}, "prefill is 'dense'; allowed: exact, packed"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be 0 or more"),
        ({"residual_window": "128"}, "residual_window is '128'; pass a whole number"),
        ({"residual_window": True}, "residual_window is True"),
        ({"min_length": 1.5}, "min_length is 1.5"),
        ({"max_length": -4}, "max_length is -4; it must be 0 or more"),
        ({"max_length": 0}, "max_length is 0"),
        ({"min_length": 4096, "max_length": 1024}, "max_length is 1024; it must be min_length \\(4096\\) or more"),
        ({"rollback": 65}, "rollback is 65; one block \\(64 tokens\\)"),
        ({"residual_window": 100}, "sink_tokens \\+ residual_window is 100; it must be a multiple of 16"),
        ({"escalation": "exact"}, "escalation is 'exact'; pass a list"),
        ({"escalation": None}, "escalation is None; pass a list"),
        ({"escalation": []}, "escalation is \\[\\]; name where a request goes .*: \\[exact\\]"),
        ({"escalation": ["p", "exact"]}, "escalation is \\['p', 'exact'\\]; 'p' can't escalate to itself"),
        ({"escalation": ["int8", "int8"]}, "escalation is \\['int8', 'int8'\\]; name each policy once"),
        ({"key": 4}, "policy 'p'.key is 4; pass a mapping"),
        (
            {"key": {"bit": 4}},
            "policy 'p'.key has an unknown key 'bit'; allowed: axis, bits, format, group, scale_dtype",
        ),
        ({"key": {"bits": 3}}, "bits of uniform is 3; allowed: 2, 4, 8"),
        ({"key": {"bits": "4"}}, "policy 'p'.key: bits is '4'; pass a whole number"),
        ({"key": {"format": "int4"}}, "format is 'int4'; allowed: uniform, fp8_e4m3"),
        ({"key": {"axis": None}}, "policy 'p'.key: axis is None; pass a name"),
        ({"key": {"axis": "time"}}, "axis is 'time'; allowed: channel, token"),
        ({"key": {"scale_dtype": "bfloat16"}}, "scale_dtype is 'bfloat16'; allowed: float16, float32"),
        ({"key": {"group": -8}}, "group is -8"),
        ({"key": {"group": None}}, "group is None; pass a whole number"),
        ({"key": {"axis": "channel"}}, "group is 0; a per-channel quantizer needs the number of tokens"),
        (
            {"key": {"axis": "channel", "group": 48}},
            "key.group is 48; it must divide the block of 64 tokens: \\[8, 16, 32, 64\\]",
        ),
        ({"key": {"axis": "channel", "group": 128}}, "key.group is 128; it must divide the block of 64"),
        ({"key": {"format": "fp8_e4m3", "axis": "channel", "group": 32}}, "set axis: token"),
        ({"key": {"format": "fp8_e4m3", "bits": 4}}, "bits of fp8_e4m3 is 4; allowed: 8"),
        ({"value": {"axis": "channel", "group": 64}}, "value.axis is 'channel'; .*only 'token' is allowed"),
        ({"layers": {"key": None}}, "policy 'p': layers is .*; pass a list"),
        ({"layers": []}, "policy 'p' has no layers"),
        ({"layers": [{"kee": None}]}, "policy 'p' layer 0 has an unknown key 'kee'; allowed: key, value"),
    ],
)
def test_an_error_names_the_value_and_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        from_dict({**KIVI, **change} if "layers" not in change else change, "p")


def test_every_mistake_is_told_each_once() -> None:
    raw = {"blok": 64, "residual_window": "128", "escalation": 4}
    raw |= {"layers": [{"key": {"bits": 3}, "value": {"axis": "time"}}, {"kee": None}]}
    with pytest.raises(PolicyError) as caught:
        from_dict(raw, "p")
    told = [line.partition(";")[0] for line in str(caught.value).splitlines()]
    assert told == [
        "policy 'p' layer 0.key: bits of uniform is 3",
        "policy 'p' layer 0.value: axis is 'time'",
        "policy 'p' layer 1 has an unknown key 'kee'",
        "policy 'p': escalation is 4",
        "policy 'p' has an unknown key 'blok'",
        "policy 'p': residual_window is '128'",
    ]
    with pytest.raises(PolicyError) as caught:
        from_dict(KIVI, "p").bind(30, 72)
    assert caught.value.args == ("policy 'p': value.group 64 does not divide head_dim 72; " + GROUPS,)


GROUPS = "allowed groups: [0, 8] (0 is the whole head)"


@pytest.mark.parametrize("raw", [{}, {"sink_tokens": 16}])
def test_an_emptied_policy_is_not_taken_for_exact(raw: Any) -> None:
    with pytest.raises(
        PolicyError, match="'p' names neither key, value nor layers; for the exact cache write key: null"
    ):
        from_dict(raw, "p")
    assert from_dict({"key": None, **raw}, "exact").is_exact


def test_layers_beside_a_key_are_refused() -> None:
    with pytest.raises(PolicyError, match="'p' has layers beside key or value"):
        from_dict({"layers": [{}], "key": None}, "p")


@pytest.mark.parametrize("raw", [None, 4, ["key"]])
def test_what_is_no_mapping_is_refused(raw: Any) -> None:
    with pytest.raises(PolicyError, match=r"policy 'p' is .*; pass a mapping"):
        from_dict(raw, "p")


@pytest.mark.parametrize(("head_dim", "groups"), [(72, "[0, 8]"), (80, "[0, 8, 16]")])
@pytest.mark.parametrize("tensor", ["key", "value"])
def test_case_3_a_group_is_checked_when_the_policy_is_bound(head_dim: int, groups: str, tensor: str) -> None:
    """Case 3: head_dim 72 and 80, group 64: an error that names head_dim, group and the allowed groups."""
    made = from_dict({tensor: {"bits": 4, "group": 64}}, "p")
    with pytest.raises(PolicyError) as caught:
        made.bind(2, head_dim)
    said = f"policy 'p': {tensor}.group 64 does not divide head_dim {head_dim}; allowed groups: {groups} "
    assert str(caught.value) == said + "(0 is the whole head)"
    from_dict({tensor: {"bits": 4, "group": 0}}, "p").bind(2, head_dim)
    from_dict({"key": {"bits": 4, "axis": "channel", "group": 64}}, "p").bind(2, head_dim)


def test_binding_names_a_wrong_number_of_layers_and_a_head_that_is_no_whole_number_of_bytes() -> None:
    with pytest.raises(PolicyError, match="policy 'p' names 2 layers; the model has 3"):
        from_dict({"layers": [{}, {}]}, "p").bind(3, 64)
    with pytest.raises(
        PolicyError, match="head_dim 66 at 2 bits is no whole number of bytes; it must be a multiple of 4"
    ):
        from_dict({"value": {"bits": 2}}, "p").bind(1, 66)


@given(
    sinks=st.integers(0, 4).map(lambda n: 16 * n),
    window=st.integers(0, 8).map(lambda n: 16 * n),
    block=st.sampled_from([32, 64, 128]),
    length=st.integers(0, 2000),
    least=st.sampled_from([0, 300]),
)
def test_case_1_and_2_what_is_packed_at_a_length(sinks: int, window: int, block: int, length: int, least: int) -> None:
    """Cases 1 and 2: sinks and at least the window stay exact, everything older is packed, block by block."""
    made = CachePolicy("p", (LayerPolicy(key=Quantizer()),), sinks, window, block, min_length=least)
    until = packed_until(made, length)
    assert until == sinks + block * packed_blocks(made, length)
    if length < least or length < sinks + window + block:
        assert until == sinks
    else:
        assert window <= length - until < window + block
    assert packed_blocks(replace(made, layers=(LayerPolicy(),)), length) == 0
