"""Stacked compressions: int8 weights × cache policy × batch, the joint effect beside the parts.

    python benchmarks/stacked.py --json stacked.json

Needs the artifacts of `dvc repro`. The shipped model's weights were 4-bit GGUF; their dequantized bfloat16 form is the
base. The second level is int8: one scale an output channel, held as int8 and read by torch's own `_weight_int8pack_mm`
(longer inputs, as in prefill, unpack one weight at a time). Embedding and output head, which are tied, stay bfloat16.
Every run prefills for itself, so that int8 weights make their own keys and values, and is teacher-forced over its
cache; the reference is bfloat16 weights with the exact cache in the same batches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rows import machine
from torch import Tensor, nn
from transformers import DynamicCache

from kvdrift import models
from kvdrift.cache.packed import PackedCache
from kvdrift.measure.logits import compare
from kvdrift.measure.plans import read_plan
from kvdrift.measure.replay import score
from kvdrift.measure.stats import percentile
from kvdrift.policy import CachePolicy
from kvdrift.prompts.prompt import EVALUATION, Prompt, from_frame

BASE, INT8 = "bfloat16", "int8"
MOST_ROWS = 64
"""Inputs of more rows are faster through an unpacked weight."""
TEXTS, TASKS = 8, 72
"""Prompts of 1,024 tokens of text, and shorter tasks: together enough scored tokens for a p99."""
STEPS = 16


class Int8Linear(nn.Module):
    """A linear layer without bias: int8 weights, symmetric, one bfloat16 scale an output channel."""

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / 127).to(torch.bfloat16)
        self.register_buffer("weight", (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= MOST_ROWS:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        else:
            out = rows @ (self.weight.to(x.dtype) * self.scales[:, None]).T
        return out.view(*x.shape[:-1], -1)


def to_int8(model: Any) -> None:
    """Replace every linear layer of the decoder."""
    for module in list(model.get_decoder().modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))


def weight_bytes(model: nn.Module) -> int:
    held = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def chosen(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Text and tasks, each of one shape, cohorts taken in turn."""
    scored = [p for p in prompts if p.split == EVALUATION and p.scored > 1]
    texts = [p for p in scored if not p.task and len(p.tokens) == 1024]
    tasks = [p for p in scored if p.cohort in ("needle", "copy", "tool_arguments")]
    return [*texts[:: max(1, len(texts) // TEXTS)][:TEXTS], *tasks[:: max(1, len(tasks) // TASKS)][:TASKS]]


def groups(prompts: Sequence[Prompt], batch: int) -> Iterator[list[Prompt]]:
    """Batches of one shape, full ones only, so that every run has the same tokens a batch."""
    for _, same in groupby(prompts, key=lambda p: (len(p.tokens), len(p.continuation))):
        rows = list(same)
        yield from (rows[at : at + batch] for at in range(0, len(rows) - batch + 1, batch))


@torch.inference_mode()
def run(
    model: Any, policies: Sequence[CachePolicy], batch: int, prompts: Sequence[Prompt]
) -> tuple[dict[str, list[Tensor]], dict[str, int], dict[str, float]]:
    """By policy: logits of the scored tokens, a tensor a prompt; bytes of the largest cache; decode tokens a second."""
    logits: dict[str, list[Tensor]] = {policy.name: [] for policy in policies}
    held, speed = dict.fromkeys(logits, 0), dict.fromkeys(logits, 0.0)
    for index, group in enumerate(groups(prompts, batch)):
        exact = DynamicCache(config=model.config)
        tokens = torch.tensor([p.tokens for p in group])
        model(input_ids=tokens, cache=exact, use_cache=True, logits_to_keep=1)
        for policy in policies:
            cache = PackedCache(policy, model.config, dtype=model.dtype)
            cache.load([layer.keys for layer in exact.layers], [layer.values for layer in exact.layers])
            out = score(model, cache, torch.tensor([p.continuation for p in group]))
            logits[policy.name] += [row[: p.scored - 1].clone() for row, p in zip(out, group, strict=True)]
            held[policy.name] = max(held[policy.name], cache.storage_bytes())
            if index == 0:
                speed[policy.name] = decode_speed(model, cache, batch)
    return logits, held, speed


def decode_speed(model: Any, cache: Any, batch: int) -> float:
    """Tokens a second over steps of one token a sequence, by the median step."""
    token, times = torch.ones(batch, 1, dtype=torch.long), []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(input_ids=token, cache=cache, use_cache=True)
        times.append(time.perf_counter() - start)
    return batch / sorted(times)[STEPS // 2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="write the rows here")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--policies", nargs="+", default=["exact", "int8", "kivi4", "kivi2"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    chosen_options = options.parse_args()
    torch.set_num_threads(chosen_options.threads)
    prompts = chosen(from_frame(pl.read_parquet("data/prompts/prompts.parquet")))
    policies = [read_plan(Path("data/plans"), name) for name in chosen_options.policies]
    print(machine())
    rows: list[dict[str, Any]] = []
    references: dict[int, list[Tensor]] = {}
    for weights in (BASE, INT8):
        model, _ = models.load(Path("data/model/manifest.json"), "cpu", "kvdrift")
        if weights == INT8:
            to_int8(model)
        for batch in chosen_options.batches:
            logits, held, speed = run(model, policies, batch, prompts)
            reference = references.setdefault(batch, logits["exact"])
            targets = [torch.tensor(p.continuation[1 : p.scored]) for group in groups(prompts, batch) for p in group]
            for policy in policies:
                figures = compare(torch.cat(reference), torch.cat(logits[policy.name]), torch.cat(targets))
                kl = figures["kl"].double().numpy()
                row = {"weights": weights, "policy": policy.name, "batch": batch, "tokens": len(kl)}
                row |= {"kl": float(kl.mean()), "kl_p99": percentile(kl, 0.99), "kl_max": float(kl.max())}
                row |= {"same_top1": float(figures["same_top1"].float().mean())}
                row |= {"weight_bytes": weight_bytes(model), "cache_bytes": held[policy.name]}
                rows.append(row | {"tokens_per_second": speed[policy.name]})
        del model
    alone = {(row["weights"], row["policy"], row["batch"]): row["kl"] for row in rows}
    head = f"{'weights':9}{'policy':8}{'batch':>6}{'KL':>10}{'parts':>10}{'p99':>9}{'max':>8}{'top-1':>7}"
    print(head + f"{'weights MiB':>13}{'cache MiB':>11}{'tok/s':>8}")
    for row in rows:
        parts = alone[row["weights"], "exact", row["batch"]] + alone[BASE, row["policy"], row["batch"]]
        row["kl_of_parts"] = parts if row["weights"] == INT8 and row["policy"] != "exact" else None
        told = "–" if row["kl_of_parts"] is None else f"{parts:.5f}"
        tail = "–" if row["kl_p99"] is None else f"{row['kl_p99']:.4f}"
        print(
            f"{row['weights']:9}{row['policy']:8}{row['batch']:>6}{row['kl']:>10.5f}{told:>10}{tail:>9}"
            f"{row['kl_max']:>8.3f}{row['same_top1']:>7.3f}{row['weight_bytes'] / 2**20:>13.1f}"
            f"{row['cache_bytes'] / 2**20:>11.2f}{row['tokens_per_second']:>8.1f}"
        )
    if chosen_options.json is not None:
        chosen_options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
