"""The ledger, beside DESIGN §4's figures and the storages of a live cache:  pytest tests/test_ledger.py"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from kvdrift import ledger
from kvdrift.cache.packed import PackedCache
from kvdrift.ledger import CacheShape, account, bits_per_element, byte_break_even, load_policy
from kvdrift.policy import CachePolicy, PolicyError, from_dict

MIB = 2**20
NAMES = sorted(path.stem for path in Path("conf/policy").glob("*.yaml") if "search:" not in path.read_text())
AUTO = from_dict(
    {
        "sink_tokens": 16,
        "residual_window": 128,
        "layers": [
            {"key": {"bits": 2, "axis": "channel", "group": 32}, "value": {"bits": 4, "group": 64}},
            {"key": {"bits": 8, "axis": "channel", "group": 64}},
            {},
        ],
    },
    "auto",
)
"""A searched policy as a plan resolves it: every layer its own, one half exact, one all exact."""
SHAPE = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 64, "hidden_size": 96}


def live(policy: CachePolicy, batch: int, tokens: int) -> PackedCache:
    config = LlamaConfig(**SHAPE, dtype="bfloat16")
    config._attn_implementation = "kvdrift"
    cache = PackedCache(policy, config)
    filled = torch.randn(batch, 2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    everything = torch.stack([filled] * 6)
    cache.load(list(everything[:3]), list(everything[3:]))
    return cache


@pytest.mark.parametrize("name", [*NAMES, "auto"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_ledger_equals_the_storages_to_the_byte(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 2 and 9: every policy, around the edges of sinks, window and block."""
    monkeypatch.setenv("KVDRIFT_BACKEND", "definition")
    policy = AUTO if name == "auto" else load_policy(name)
    shape = CacheShape(layers=3, kv_heads=2, head_dim=64, query_heads=4, dtype_bytes=2)
    edges = {policy.exact_tokens + policy.block * n + d for n in (1, 2) for d in (-1, 0, 1)}
    for tokens in sorted({1, 16, 63, 64, 65, *edges}):
        cache = live(policy, batch, tokens)
        said, held = account(policy, shape, tokens, batch), cache.ledger()
        assert said == held, tokens
        assert held.format_bytes == cache.storage_bytes(), tokens


@settings(max_examples=30)
@given(
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([64, 128, 256]),
    dtype_bytes=st.sampled_from([2, 4]),
    tokens=st.integers(1, 5000),
    batch=st.integers(1, 8),
    name=st.sampled_from(NAMES),
)
def test_parts_add_up_and_scale_with_the_batch(
    layers: int, kv_heads: int, head_dim: int, dtype_bytes: int, tokens: int, batch: int, name: str
) -> None:
    policy, shape = load_policy(name), CacheShape(layers, kv_heads, head_dim, kv_heads, dtype_bytes)
    one, many = (account(policy, shape, tokens, n) for n in (1, batch))
    assert many.format_bytes == batch * one.format_bytes
    assert many.reference == batch * tokens * layers * 2 * kv_heads * head_dim * dtype_bytes
    raw = many.to_dict()
    parts = [
        x
        for key, x in raw.items()
        if key not in ("reference_bytes", "ideal_bytes", "format_bytes", "saved_bytes", "ratio")
    ]
    assert sum(parts) == raw["format_bytes"] == raw["reference_bytes"] - raw["saved_bytes"]
    assert raw["ratio"] == raw["format_bytes"] / raw["reference_bytes"]


@pytest.mark.parametrize(("batch", "reference", "ideal"), [(1, 192, 48), (2, 384, 96)])
def test_the_examples_of_the_design(batch: int, reference: int, ideal: int) -> None:
    """24 layers, 8 KV heads, head_dim 128, 2,048 tokens in FP16, 4-bit codes."""
    found = account(load_policy("int4"), CacheShape(24, 8, 128, 32, 2), 2048, batch)
    assert (found.reference, found.ideal) == (reference * MIB, ideal * MIB)


def test_a_token_of_llama_70b_takes_320_kib() -> None:
    found = account(load_policy("exact"), CacheShape(80, 8, 128, 64, 2), 1, 1)
    assert found.reference == found.format_bytes == 320 * 1024


def test_case_9_kv_heads_and_the_configs_head_dim_are_counted() -> None:
    """Case 9: hidden 2,560, 32 query heads, 8 KV heads, head_dim 128."""
    raw = {
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
    }
    shape = CacheShape.from_config({**raw, "dtype": "bfloat16"})
    assert shape == CacheShape(layers=36, kv_heads=8, head_dim=128, query_heads=32, dtype_bytes=2)
    assert account(load_policy("exact"), shape, 1000, 1).reference == 36 * 2 * 8 * 128 * 1000 * 2


def test_a_shape_without_what_newer_configs_have() -> None:
    raw = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "torch_dtype": "float32"}
    assert CacheShape.from_config({"text_config": raw}) == CacheShape(2, 8, 64, 8, 4)
    for key in ("num_hidden_layers", "num_attention_heads"):
        with pytest.raises(ValueError, match=f"config.json has no '{key}'"):
            CacheShape.from_config({k: v for k, v in raw.items() if k != key})
    with pytest.raises(ValueError, match="neither 'head_dim' nor 'hidden_size'"):
        CacheShape.from_config({k: v for k, v in raw.items() if k != "hidden_size"})
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed: float32, float16, bfloat16"):
        CacheShape.from_config(raw, dtype="int8")


def test_bits_per_element_counts_scales_lows_and_headers() -> None:
    shape = CacheShape(30, 3, 64, 9, 2)
    assert bits_per_element(load_policy("kivi4"), shape) == 8 * 13888 / (2 * 3 * 64 * 64)
    assert bits_per_element(load_policy("exact"), shape) == 16
    half = from_dict({"value": {"bits": 8, "group": 0}}, "half")
    assert 12 < bits_per_element(half, shape) < 12.5


# -- the command -------------------------------------------------------------------------------------------------------

RAW = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}


def model(**change: object) -> str:
    return json.dumps(RAW | change)


NUMBERS = ["--layers", "24", "--kv-heads", "8", "--head-dim", "128", "--tokens", "2048"]


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main([*NUMBERS, "--batch", "2", "--policy", "int4"]) == 0
    table = capsys.readouterr().out
    assert "reference         402,653,184 B     384.00 MiB" in table
    assert "ideal             100,663,296 B      96.00 MiB" in table
    assert ledger.main([*NUMBERS, "--policy", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reference_bytes"], found["ideal_bytes"]) == (192 * MIB, 48 * MIB)
    assert found == account(load_policy("int4"), CacheShape(24, 8, 128, 8, 2), 2048, 1).to_dict()


def test_the_command_takes_the_shape_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for model in (tmp_path, tmp_path / "config.json"):
        assert ledger.main(["--model", str(model), "--tokens", "100", "--policy", "kivi4", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["reference_bytes"] == 2 * 2 * 2 * 64 * 100 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*NUMBERS, "--policy", "int5"], "policy 'int5' is not one of auto, exact, fp8_e4m3, int4"),
        ([*NUMBERS, "--policy", "auto"], "policy 'auto' is searched for; use data/plans/auto.json"),
        ([*NUMBERS, "--batch", "0", "--policy", "int4"], "--tokens 2048 and --batch 0 must be 1 or more"),
        ([*NUMBERS, "--layers", "0", "--policy", "int4"], "error: layers is 0; allowed: 1 or more"),
        ([*NUMBERS, "--head-dim", "-64", "--policy", "int4"], "error: head_dim is -64; allowed: 1 or more"),
        (["--tokens", "5", "--policy", "int4"], "pass --model, or all of --layers, --kv-heads and --head-dim"),
        (["--model", "nowhere", "--tokens", "5", "--policy", "int4"], "no config.json at 'nowhere'"),
        (
            ["--layers", "2", "--kv-heads", "8", "--head-dim", "80", "--tokens", "9", "--policy", "kivi4"],
            "value.group 64 does not divide head_dim 80",
        ),
    ],
)
def test_the_command_ends_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ledger.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON: Expecting property name"),
        ("[1]", "config.json holds no JSON object of settings; download it again"),
        ('{"text_config": [1]}', "config.json holds no JSON object of settings"),
        ("{}", "config.json has no 'num_hidden_layers'; kvdrift needs a decoder with a KV cache"),
        (model(num_hidden_layers="many"), "num_hidden_layers is 'many'; allowed: a whole number of 1 or more"),
        (model(num_attention_heads=0), "num_attention_heads is 0; allowed: a whole number of 1 or more"),
        (model(num_key_value_heads=[2, 4]), "num_key_value_heads is [2, 4]; allowed: a whole number"),
        (model(num_key_value_heads=3), "kv_heads is 3; allowed: a divisor of the 4 query heads"),
        (model(hidden_size=2), "head_dim is 0; allowed: 1 or more"),
        (model(max_position_embeddings=-1), "max_position_embeddings is -1; allowed: a whole number"),
        (model(dtype="int8"), "dtype is 'int8'; allowed: float32, float16, bfloat16"),
    ],
)
def test_a_config_that_is_no_models_is_refused_in_a_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert ledger.main(["--model", str(tmp_path), "--tokens", "5", "--policy", "int4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_policy_file_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("value: {bits: 8}\n")
    assert load_policy(str(tmp_path / "mine.yaml")).name == "mine"
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(PolicyError, match="policy 'empty' is None; pass a mapping"):
        load_policy(str(tmp_path / "empty.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match=r"binary.yaml is not YAML: .* can't decode"):
        load_policy(str(tmp_path / "binary.yaml"))
    (tmp_path / "broken.yaml").write_text("key: {bits: 8\n")
    with pytest.raises(PolicyError, match=r"broken.yaml is not YAML"):
        load_policy(str(tmp_path / "broken.yaml"))


def test_the_module_runs_without_torch() -> None:
    code = (
        "import sys; from kvdrift import ledger; "
        f"assert ledger.main({[*NUMBERS, '--policy', 'int4', '--json']!r}) == 0; "
        "assert not {'torch', 'transformers', 'polars'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@given(
    name=st.sampled_from(NAMES),
    residual=st.integers(0, 12),
    block=st.sampled_from([32, 64, 128]),
    rollback=st.integers(0, 32),
    heads=st.integers(1, 4),
    limit=st.integers(1, 800),
)
@settings(max_examples=25, deadline=None)
def test_byte_break_even_is_where_every_further_length_is_smaller(
    name: str, residual: int, block: int, rollback: int, heads: int, limit: int
) -> None:
    made = replace(load_policy(name), residual_window=16 * residual, rollback=rollback, min_length=9)
    made = replace(made, block=max(block, made.layers[0].key.group if made.layers[0].key else 0))
    shape = CacheShape(2, heads, 64, heads)
    _check_break_even(made, shape, limit)


@given(limit=st.integers(1, 800))
@settings(max_examples=10, deadline=None)
def test_byte_break_even_of_layers_that_differ(limit: int) -> None:
    _check_break_even(AUTO, CacheShape(3, 2, 64, 4), limit)


def _check_break_even(policy: CachePolicy, shape: CacheShape, limit: int) -> None:
    """Against every length, one after the other."""
    held = [account(replace(policy, min_length=0), shape, n, 1) for n in range(1, limit + 1)]
    worse = [n for n, ledger in enumerate(held, start=1) if ledger.format_bytes >= ledger.reference]
    found = byte_break_even(policy, shape, limit)
    assert found == (max(worse) + 1 if max(worse, default=0) < limit else None)


def test_short_prompts_cost_more_packed_than_exact() -> None:
    shape = CacheShape(layers=30, kv_heads=3, head_dim=64, query_heads=9)
    assert byte_break_even(load_policy("int8"), shape, 7936) == 265
    assert byte_break_even(load_policy("kivi4"), shape, 7936) == 293
    assert byte_break_even(load_policy("int8"), shape, 200) is None
    assert byte_break_even(load_policy("exact"), shape, 7936) is None
