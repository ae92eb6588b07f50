"""The nearest flags of serving engines. `python -m pytest tests/report/test_export.py`"""

import pytest
from made_up import EXACT, kivi

from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.report.export import engine_flags


def flags(policy: CachePolicy) -> dict[str, tuple[str, str]]:
    return {flag.engine: (flag.flag, flag.nearness) for flag in engine_flags(policy)}


def test_exact_is_the_same_everywhere() -> None:
    assert {nearness for _, nearness in flags(EXACT).values()} == {"same"}


def test_per_channel_keys_have_no_vllm_flag() -> None:
    found = flags(kivi("kivi4", 4))
    assert found["vLLM"] == ("", "no equivalent")
    assert found["llama.cpp"][0].startswith("--cache-type-k q4_1 --cache-type-v q4_1")
    assert "residual_length=128" in found["Transformers"][0]
    assert flags(kivi("kivi2", 2))["llama.cpp"] == ("", "no equivalent")


@pytest.mark.parametrize(
    ("format", "bits", "flag"),
    [
        ("fp8_e4m3", 8, "fp8_per_token_head"),
        ("uniform", 8, "int8_per_token_head"),
        ("uniform", 4, "int4_per_token_head"),
    ],
)
def test_whole_head_formats_have_a_near_vllm_flag(format: str, bits: int, flag: str) -> None:
    quantizer = Quantizer(format=format, bits=bits)
    assert flags(CachePolicy("p", (LayerPolicy(quantizer, quantizer),)))["vLLM"] == (f"--kv-cache-dtype {flag}", "near")


@pytest.mark.parametrize(("bits", "own", "other"), [(8, "q8_0", "q4_1"), (4, "q4_1", "q8_0")])
def test_a_llama_cpp_note_is_on_the_type_that_it_names(bits: int, own: str, other: str) -> None:
    quantizer = Quantizer(bits=bits)
    found = next(f for f in engine_flags(CachePolicy("p", (LayerPolicy(quantizer, quantizer),))) if "llama" in f.engine)
    assert own in found.flag
    assert own in found.note
    assert other not in found.note


def test_a_mixed_policy_has_no_equivalent() -> None:
    layers = (kivi("a", 2).layers[0], kivi("b", 8).layers[0])
    assert {nearness for _, nearness in flags(CachePolicy("auto", layers)).values()} == {"no equivalent"}
