"""A policy in the words of serving engines: the nearest flag that each has, and how near it is.

None of these caches is the one that was measured, so none inherits the verdict; the flags say where to start.
Sources: vLLM `--kv-cache-dtype` (docs.vllm.ai, quantized KV cache), SGLang `--kv-cache-dtype` (docs.sglang.io,
quantized KV cache), llama.cpp `--cache-type-k/-v` (tools/server/README), Transformers 5 `QuantizedCache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvdrift.policy import CachePolicy, Quantizer


@dataclass(frozen=True)
class Flag:
    """`nearness` compares what the engine would store with what was measured."""

    engine: str
    flag: str
    nearness: Literal["same", "near", "no equivalent"]
    note: str


def engine_flags(policy: CachePolicy) -> list[Flag]:
    """The nearest setting of vLLM, SGLang, llama.cpp and Transformers, or that there is none."""
    if policy.is_exact:
        return [
            Flag("vLLM", "--kv-cache-dtype auto", "same", "the default"),
            Flag("SGLang", "--kv-cache-dtype auto", "same", "the default"),
            Flag("llama.cpp", "--cache-type-k bf16 --cache-type-v bf16", "same", "f16 is its default"),
            Flag("Transformers", "DynamicCache", "same", "the default"),
        ]
    pairs = {(layer.key, layer.value) for layer in policy.layers}
    if len(pairs) > 1 or any(None in pair for pair in pairs):
        note = "one format serves all layers, keys and values alike in all but llama.cpp; this policy mixes them"
        return [Flag(name, "", "no equivalent", note) for name in ("vLLM", "SGLang", "llama.cpp", "Transformers")]
    ((key, value),) = pairs
    assert key is not None
    assert value is not None
    exact = f"; it keeps no {policy.exact_tokens} sink and residual tokens exact" if policy.exact_tokens else ""
    found = [_vllm(key, value), _sglang(key, value), _llama_cpp(key, value)]
    found = [Flag(f.engine, f.flag, f.nearness, f.note + exact) if f.flag else f for f in found]
    return [*found, _transformers(policy, key, value)]


def _vllm(key: Quantizer, value: Quantizer) -> Flag:
    if key != value or key.axis != "token":
        return Flag("vLLM", "", "no equivalent", "its formats hold keys and values alike, and none groups along time")
    integers = {8: "int8_per_token_head", 4: "int4_per_token_head"}
    name = "fp8_per_token_head" if key.format == "fp8_e4m3" else integers.get(key.bits)
    if not name:
        return Flag("vLLM", "", "no equivalent", f"no {key.bits}-bit integers")
    note = {
        "fp8_per_token_head": "dynamic float32 scale a token and head, in recent versions; older ones scale a tensor",
        "int8_per_token_head": "symmetric, float32 scale, in recent versions; measured: asymmetric",
        "int4_per_token_head": "rotated, then asymmetric, in recent versions; measured: not rotated",
    }[name]
    return Flag("vLLM", f"--kv-cache-dtype {name}", "near", note)


def _sglang(key: Quantizer, value: Quantizer) -> Flag:
    if key == value and key.format == "fp8_e4m3":
        return Flag("SGLang", "--kv-cache-dtype fp8_e4m3", "near", "static scale a tensor, 1.0 unless given")
    return Flag("SGLang", "", "no equivalent", "floating formats only (fp8_e4m3, fp8_e5m2, fp4_e2m1)")


def _llama_cpp(key: Quantizer, value: Quantizer) -> Flag:
    types = {("uniform", 8): "q8_0", ("uniform", 4): "q4_1"}
    names = [types.get((quantizer.format, quantizer.bits)) for quantizer in (key, value)]
    if None in names:
        return Flag("llama.cpp", "", "no equivalent", "integers of 4, 5 and 8 bits only")
    flag = f"--cache-type-k {names[0]} --cache-type-v {names[1]} --flash-attn on"
    axis = " along channels, so not per-channel keys" if key.axis == "channel" else ""
    notes = {"q8_0": "q8_0 is symmetric", "q4_1": "q4_1 has a low as measured"}
    used = ", ".join(note for name, note in notes.items() if name in names)
    return Flag("llama.cpp", flag, "near", f"groups of 32{axis}; {used}")


def _transformers(policy: CachePolicy, key: Quantizer, value: Quantizer) -> Flag:
    if policy.sink_tokens or key.format != "uniform" or key.bits != value.bits:
        return Flag("Transformers", "", "no equivalent", "QuantizedCache: integers, one width, no sinks; fp8 a tensor")
    group = key.group or value.group or 64
    arguments = f'backend="hqq", nbits={key.bits}, q_group_size={group}, residual_length={policy.residual_window or 1}'
    note = "groups run over the flattened tensor; requantizes all when its window is full, dequantizes all each step"
    return Flag("Transformers", f"QuantizedCache({arguments}, config=model.config)", "near", note)
