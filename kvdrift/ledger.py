"""Bytes of a KV cache under a policy at (batch, length): ideal, as laid out, and as measured. Run it for a table:

python -m kvdrift.ledger --layers 24 --kv-heads 8 --head-dim 128 --tokens 2048 --batch 1 --policy int4
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvdrift.layout import layer_layouts
from kvdrift.policy import CachePolicy, PolicyError, from_dict, packed_blocks
from kvdrift.ranges import require

CONFIG_COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
TABLE_BYTES_PER_BLOCK = 8
"""int32 page and int32 token count."""
TABLE_BYTES_PER_SEQUENCE = 4
"""int32 count of exact tokens."""


@dataclass(frozen=True)
class CacheShape:
    """What decides the bytes of a model's cache. KV heads, never query heads; head_dim, never hidden/heads."""

    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    dtype_bytes: int = 2
    positions: int | None = None

    def __post_init__(self) -> None:
        least = (1, math.inf)
        require(self, layers=least, kv_heads=least, head_dim=least, query_heads=least, positions=least)
        if self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; allowed: a divisor of the {self.query_heads} query heads")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: str | None = None) -> CacheShape:
        """From a Hugging Face `config.json`. Raises ValueError naming what the config lacks, or has wrong."""
        config = config.get("text_config") or config
        for key in ("num_hidden_layers", "num_attention_heads"):
            if config.get(key) is None:
                raise ValueError(f"config.json has no {key!r}; kvdrift needs a decoder with a KV cache")
        for key in CONFIG_COUNTS:
            if config.get(key) is not None and (type(config[key]) is not int or config[key] < 1):
                raise ValueError(f"config.json: {key} is {config[key]!r}; allowed: a whole number of 1 or more")
        query_heads = config["num_attention_heads"]
        dtype = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if config.get("head_dim") is None and config.get("hidden_size") is None:
            raise ValueError("config.json has neither 'head_dim' nor 'hidden_size'; kvdrift needs one of them")
        return cls(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or query_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // query_heads,
            query_heads=query_heads,
            dtype_bytes=DTYPE_BYTES[dtype],
            positions=config.get("max_position_embeddings"),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's exact keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose, all sequences and layers together. `format_bytes` is their sum and equals the storages held."""

    reference: int
    """The exact cache in the model's dtype."""
    ideal: int
    """Codes alone, as if every token were packed."""
    codes: int = 0
    scales: int = 0
    lows: int = 0
    headers: int = 0
    padding: int = 0
    exact_tokens: int = 0
    """Sinks, residual window, exact layers and escalated blocks: the tokens themselves."""
    exact_room: int = 0
    """Slots of the exact buffer that hold no token now, so that the next block can gather."""
    rollback: int = 0
    """Exact shadow of each sequence's newest block, and of all its blocks within `rollback` tokens of `min_length`."""
    tables: int = 0
    free_pages: int = 0
    """Pages reserved and not in use (allocator rounding)."""

    @property
    def format_bytes(self) -> int:
        parts = (self.codes, self.scales, self.lows, self.headers, self.padding, self.exact_tokens, self.exact_room)
        return sum(parts) + self.rollback + self.tables + self.free_pages

    def to_dict(self) -> dict[str, int | float]:
        parts = {f"{name}_bytes": size for name, size in asdict(self).items()}
        return parts | {
            "format_bytes": self.format_bytes,
            "saved_bytes": self.reference - self.format_bytes,
            "ratio": self.format_bytes / self.reference if self.reference else 1.0,
        }


def account(policy: CachePolicy, shape: CacheShape, tokens: int, batch: int) -> Ledger:
    """The ledger of `batch` sequences of `tokens` real tokens each, cache filled to exactly that length."""
    policy = policy.bind(shape.layers, shape.head_dim)
    blocks = packed_blocks(policy, tokens)
    parts = ("codes", "scales", "lows", "headers", "padding", "exact_tokens", "exact_room", "rollback", "tables")
    sums = dict.fromkeys(("ideal", *parts), 0)
    elements = shape.kv_heads * shape.head_dim * tokens
    layouts = layer_layouts(policy, shape.kv_heads, shape.head_dim, shape.dtype_bytes)
    for layer, layout in zip(policy.layers, layouts, strict=True):
        for quantizer in (layer.key, layer.value):
            sums["ideal"] += elements * (quantizer.bits if quantizer else 8 * shape.dtype_bytes) // 8
        if layout is None or blocks == 0:
            sums["exact_tokens"] += tokens * shape.token_bytes
            continue
        for purpose, size in layout.parts().items():
            sums[purpose] += blocks * size
        exact = tokens - blocks * policy.block
        sums["exact_tokens"] += exact * shape.token_bytes
        sums["exact_room"] += (policy.exact_tokens + policy.block - exact) * shape.token_bytes
        shadows = blocks + 1 if tokens < policy.min_length + policy.rollback else 1
        sums["rollback"] += (shadows * policy.block if policy.rollback else 0) * shape.token_bytes
        sums["tables"] += blocks * TABLE_BYTES_PER_BLOCK + TABLE_BYTES_PER_SEQUENCE
    scaled = {name: size * batch for name, size in sums.items()}
    return Ledger(reference=shape.layers * shape.token_bytes * tokens * batch, **scaled)


def byte_break_even(policy: CachePolicy, shape: CacheShape, limit: int) -> int | None:
    """The shortest length from which on, up to `limit`, a packing sequence holds fewer bytes than an exact one.

    Everything that `account` counts is in it, so a short sequence pays for room and shadow that its few blocks don't
    earn back. None if it is smaller at no such length, as a policy that packs nothing is.
    """
    policy = replace(policy, min_length=0)

    def smaller(tokens: int) -> bool:
        ledger = account(policy, shape, tokens, 1)
        return ledger.format_bytes < ledger.reference

    sealed = [policy.exact_tokens + n * policy.block for n in range(1, packed_blocks(policy, limit) + 1)]
    if not sealed:
        return None
    # Until the next seal the exact cache grows alone, so a block saves the least at its seal. The first block doesn't
    # pay there, since its room is billed beside it; each further one adds the same saving, so once one pays, all do.
    last = sealed[bisect_left(sealed, True, key=smaller) - 1]
    return next((tokens for tokens in range(last + 1, min(last + policy.block, limit) + 1) if smaller(tokens)), None)


def bits_per_element(policy: CachePolicy, shape: CacheShape) -> float:
    """Bits a packed element costs, scales, lows, header and page padding included, averaged over the packed layers."""
    policy = policy.bind(shape.layers, shape.head_dim)
    layouts = [x for x in layer_layouts(policy, shape.kv_heads, shape.head_dim, shape.dtype_bytes) if x is not None]
    if not layouts:
        return 8.0 * shape.dtype_bytes
    return 8 * sum(x.page_bytes for x in layouts) / (len(layouts) * 2 * shape.kv_heads * shape.head_dim * policy.block)


def load_policy(name: str, folder: Path = Path("conf/policy")) -> CachePolicy:
    """A policy by name from `conf/policy`, or by the path of a YAML or JSON file.

    Raises PolicyError naming the policies there are. A policy with a `search` section has no layers until the plan
    stage resolves it, so its resolved file is `data/plans/<name>.json`.
    """
    import yaml

    path = Path(name) if name.endswith((".yaml", ".json")) else folder / f"{name}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in folder.glob("*.yaml"))
        raise PolicyError(f"policy {name!r} is not one of {', '.join(known) or f'(none in {folder})'}")
    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(raw, dict) and "search" in raw:
        raise PolicyError(f"policy {name!r} is searched for; use data/plans/{name}.json once `dvc repro` has made it")
    named = raw.get("name") if path.suffix == ".json" and isinstance(raw, dict) else None  # as kvdrift writes them
    return from_dict(raw, name=named or path.stem)


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face `config.json`. Raises ValueError where it is missing or no JSON object."""
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}; pass the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict):
        raise ValueError(f"{path} holds no JSON object of settings; download it again")
    return config


def _model_shape(model: str) -> CacheShape:
    path = Path(model)
    for candidate in (path, path / "config.json", path / "model" / "config.json"):
        if candidate.is_file():
            return CacheShape.from_config(read_config(candidate))
    raise ValueError(f"no config.json at {model!r}; pass a model folder, or --layers, --kv-heads and --head-dim")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvdrift.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder or its config.json, instead of the numbers below")
    for flag in ("--layers", "--kv-heads", "--head-dim"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--dtype", default="float16", choices=sorted(DTYPE_BYTES))
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.model:
            shape = _model_shape(options.model)
        elif None in (options.layers, options.kv_heads, options.head_dim):
            raise ValueError("pass --model, or all of --layers, --kv-heads and --head-dim")
        else:
            size = DTYPE_BYTES[options.dtype]
            shape = CacheShape(options.layers, options.kv_heads, options.head_dim, options.kv_heads, size)
        if min(options.tokens, options.batch) < 1:
            raise ValueError(f"--tokens {options.tokens} and --batch {options.batch} must be 1 or more")
        ledger = account(load_policy(options.policy), shape, options.tokens, options.batch)
    except ValueError as error:
        print(*(f"error: {line}" for line in error.args), sep="\n", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(ledger.to_dict()))
        return 0
    for name, value in ledger.to_dict().items():
        shown = f"{value:14.4f}" if name == "ratio" else f"{value:14,d} B {value / 2**20:10.2f} MiB"
        print(f"{name.removesuffix('_bytes'):14} {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
