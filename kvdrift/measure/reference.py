"""The stored reference: what the exact cache held and said for every prompt, one file a batch, read layer by layer.

Tensors of a file (d = head_dim, T = prefix tokens, C = scored positions): `keys.<layer>`, `values.<layer>`
[batch, kv_heads, T, d]; of the continuation's tokens as they were fed, which stand at T to T + C - 1,
`new_keys.<layer>`, `new_values.<layer>` [batch, kv_heads, C, d], `queries.<layer>` [batch, query_heads, C, d] and
`hidden.<layer>` [batch, C, hidden], entering that layer; `logits` [batch, C, vocab]. All in the model's dtype. This
file imports neither kernels nor cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvdrift.measure.replay import generate, score, stop_tokens
from kvdrift.prompts.batches import modes_of
from kvdrift.prompts.prompt import CALIBRATION, EVALUATION, Prompt

RECORDING = "kvdrift_recording"


@dataclass(frozen=True)
class Stored:
    """One batch of the reference on disk, with its prompts in row order."""

    path: Path
    prompts: tuple[Prompt, ...]

    def read(self, *names: str) -> tuple[Tensor, ...]:
        """Tensors by name; only those are read."""
        with safe_open(str(self.path), framework="pt") as file:
            return tuple(file.get_tensor(name) for name in names)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [batch, kv_heads, T, d]."""
        keys, values = self.read(f"keys.{index}", f"values.{index}")
        return keys, values

    def sequence(self, index: int, row: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """One prompt in one layer: keys and values of its prefix and `new` tokens behind it, [kv_heads, T + new, d],
        and its queries, [query_heads, C, d]; only these are read."""
        with safe_open(str(self.path), framework="pt") as file:
            names = ("keys", "new_keys", "values", "new_values", "queries")
            keys, new_keys, values, new_values, queries = (file.get_slice(f"{name}.{index}")[row] for name in names)
        return torch.cat([keys, new_keys[:, :new]], 1), torch.cat([values, new_values[:, :new]], 1), queries

    @property
    def layers(self) -> int:
        with safe_open(str(self.path), framework="pt") as file:
            return sum(name.startswith("keys.") for name in file.keys())  # noqa: SIM118 — no mapping

    @property
    def length(self) -> int:
        return len(self.prompts[0].tokens)

    @property
    def prefix(self) -> Tensor:
        """Prefix tokens, [batch, T]."""
        return torch.tensor([p.tokens for p in self.prompts])

    @property
    def continuation(self) -> Tensor:
        """Teacher-forced tokens, [batch, C + 1]."""
        return torch.tensor([p.continuation for p in self.prompts])

    def fill(
        self,
        cache: Any,
        device: torch.device,
        tokens: int | None = None,
        rows: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Hand the stored keys and values of the first `tokens` tokens to a cache that has `load_layer`."""
        picked = slice(None) if rows is None else list(rows)
        for index in range(self.layers):
            keys, values = (x[picked][:, :, :tokens].to(device, dtype or x.dtype) for x in self.layer(index))
            cache.load_layer(index, keys, values)


def batches(prompts: Sequence[Prompt], split: str = EVALUATION) -> dict[str, tuple[Prompt, ...]]:
    """Prompts by batch, in order of first appearance."""
    grouped: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.split == split:
            grouped.setdefault(prompt.batch, []).append(prompt)
    return {name: tuple(rows) for name, rows in grouped.items()}


def stored(folder: Path, prompts: Sequence[Prompt], split: str = EVALUATION) -> list[Stored]:
    """Every batch of one split, as files of `folder`."""
    return [Stored(folder / f"{name}.safetensors", rows) for name, rows in batches(prompts, split).items()]


def longest(batches: Sequence[Stored], cohort: str) -> tuple[Stored, int]:
    """The cohort's first prompt with the longest prefix, the one that reaches most position buckets: batch and row."""
    found = [(batch, row) for batch in batches for row, prompt in enumerate(batch.prompts) if prompt.cohort == cohort]
    if not found:
        known = sorted({prompt.cohort for batch in batches for prompt in batch.prompts})
        raise ValueError(f"no prompts of cohort {cohort!r}; the corpus has {', '.join(known)}")
    return max(found, key=lambda at: at[0].length)


@torch.inference_mode()
def run(model: Any, prompts: Sequence[Prompt]) -> tuple[dict[str, Tensor], Any]:
    """Prefill one batch and teacher-force its continuations; returns the tensors to store and the cache, cropped back
    to the prefix."""
    from transformers import DynamicCache

    device = model.device
    prefix = torch.tensor([p.tokens for p in prompts], device=device)
    continuation = torch.tensor([p.continuation for p in prompts], device=device)
    cache = DynamicCache(config=model.config)
    model(input_ids=prefix, cache=cache, use_cache=True, logits_to_keep=1)
    tensors = {}
    for index, layer in enumerate(cache.layers):
        tensors[f"keys.{index}"], tensors[f"values.{index}"] = layer.keys.cpu(), layer.values.cpu()
    scored = continuation.shape[1] - 1
    if scored > 0:
        with recording(model) as record:
            tensors["logits"] = score(model, cache, continuation).cpu()
        for index, layer in enumerate(cache.layers):
            new = (x[:, :, -scored:].cpu().contiguous() for x in (layer.keys, layer.values))
            tensors[f"new_keys.{index}"], tensors[f"new_values.{index}"] = new
            tensors[f"queries.{index}"] = torch.cat(record.queries[index], dim=2).cpu().contiguous()
            tensors[f"hidden.{index}"] = torch.cat(record.hidden[index], dim=1).cpu().contiguous()
        cache.crop(-scored)
    return tensors, cache


def store(model: Any, tokenizer: Any, prompts: Sequence[Prompt], out: Path, seed: int) -> None:
    """Run every batch of both splits and write it, then `generations.parquet`: prompt, mode, tokens, text."""
    import polars as pl
    from safetensors.torch import save_file
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    stop, rows = stop_tokens(model, tokenizer), []
    groups = [group for split in (EVALUATION, CALIBRATION) for group in batches(prompts, split).items()]
    for name, group in tqdm(groups, desc=out.parts[-1], unit="batch"):
        tensors, cache = run(model, group)
        save_file(tensors, out / f"{name}.safetensors")
        del tensors
        prefix = torch.tensor([p.tokens for p in group], device=model.device)
        for mode in modes_of(name, len(group)) if group[0].task else ():
            cache.crop(prefix.shape[1] - 1 - cache.get_seq_length())
            made = generate(model, cache, prefix, group[0].max_new_tokens, mode, seed, stop)
            texts = tokenizer.batch_decode(made.tokens, skip_special_tokens=True)
            rows += [
                {"prompt": prompt.id, "mode": mode, "tokens": t, "text": text}
                for prompt, t, text in zip(group, made.tokens, texts, strict=True)
            ]
    schema: Any = {"prompt": pl.String, "mode": pl.String, "tokens": pl.List(pl.Int64), "text": pl.String}
    pl.DataFrame(rows, schema=schema).write_parquet(out / "generations.parquet")


@dataclass(frozen=True)
class Record:
    """Queries after RoPE and hidden states entering each layer, a list entry a chunk."""

    queries: dict[int, list[Tensor]]
    hidden: dict[int, list[Tensor]]


@contextmanager
def recording(model: Any) -> Iterator[Record]:
    """Record queries and layer inputs of the forward passes inside; the attention called is sdpa, unchanged."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    decoder = model.get_decoder()
    record = Record({i: [] for i in range(len(decoder.layers))}, {i: [] for i in range(len(decoder.layers))})

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        record.queries[module.layer_idx].append(query)  # type: ignore[index]
        return sdpa_attention_forward(module, query, *args, **kwargs)

    def entering(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            record.hidden[index].append(args[0] if args else kwargs["hidden_states"])

        return hook

    AttentionInterface.register(RECORDING, attention)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    before = model.config._attn_implementation
    handles = [x.register_forward_pre_hook(entering(i), with_kwargs=True) for i, x in enumerate(decoder.layers)]
    model.set_attn_implementation(RECORDING)
    try:
        yield record
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
