"""A small made-up run: what the stages before the verdict would leave behind, by polars and plain numbers."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kvdrift.ledger import CacheShape, account, bits_per_element
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer, packed_until
from kvdrift.prompts.batches import MODES, modes_of
from kvdrift.prompts.prompt import EVALUATION, Prompt, to_frame
from kvdrift.report.evidence import Evidence
from kvdrift.report.limits import CellLimits, Limits, Workload
from kvdrift.report.reading import Sources, read_evidence
from kvdrift.serving.checks import REQUIRED

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=64, query_heads=4)
BUCKETS = (0, 128, 512, 2048)
CRITICAL = ("needle", "copy", "tool_arguments")
TASKS = {"needle": "number", "copy": "exact", "tool_arguments": "arguments", "needle_grid": "number"}
LIMITS = Limits(
    workload=Workload(1, 4096, 32),
    max_bytes_ratio=0.6,
    max_peak_ratio=1.0,
    max_p95_ratio=1.05,
    cell=CellLimits(),
    max_kl=0.02,
    max_kl_p99=0.25,
    max_cohort_kl=0.05,
    min_same_top1=0.95,
    max_saturated=0.05,
    critical=list(CRITICAL),
    max_drift=0.1,
    confidence=0.95,
    grid="needle_grid",
    min_recall=0.9,
)


def kivi(name: str, bits: int) -> CachePolicy:
    key = Quantizer(bits=bits, axis="channel", group=32)
    return CachePolicy(name, (LayerPolicy(key, Quantizer(bits=bits, group=32)),), residual_window=128)


EXACT = CachePolicy("exact", (LayerPolicy(),))


@dataclass
class Run:
    """The folders of one made-up run; a test spoils what it wants to see judged."""

    root: Path
    sources: Sources
    policies: list[str] = field(default_factory=list)

    def add(self, policy: CachePolicy, kl: float = 0.004) -> None:
        """A healthy policy whose cells, logits and generations differ from the reference's by `kl`."""
        name, exact = policy.name, policy.is_exact
        self.policies.append(name)
        kl = 0.0 if exact else kl
        self.write("plans", name, policy.bind(SHAPE.layers, SHAPE.head_dim).to_dict())
        self.write("quantize", name, packing(policy))
        frames = {
            "quantize": errors_frame(policy),
            "quantize_attention": attention_frame(policy),
            "logits": logits_frame(kl),
            "logits_cells": cells_frame(policy, kl),
            "generate": generations_frame(exact),
        }
        for where, frame in frames.items():
            folder, _, suffix = where.partition("_")
            self.table(folder, f"{name}_{suffix}" if suffix else name, frame, policy.id)
        self.write("latency", name, latency(policy))
        checks = [{"name": check, "passed": True, "detail": "it held"} for check in REQUIRED]
        self.write("drill", name, {"policy": policy.id, "checks": checks, "passed": True})

    def table(self, folder: str, name: str, frame: pl.DataFrame, owner: str) -> None:
        frame.write_parquet(self.path(folder, f"{name}.parquet"), metadata={"policy": owner})

    def path(self, folder: str, file: str) -> Path:
        path = self.root / "data" / folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, folder: str, name: str, content: Any) -> None:
        self.path(folder, f"{name}.json").write_text(json.dumps(content))

    def evidence(self, name: str) -> Evidence:
        return read_evidence(name, self.sources)


def prompts(attack: bool = False) -> list[Prompt]:
    """32 of each critical cohort, the needle grid, code, and code long enough to be packed as it is continued; one more
    that an attack found."""
    items: list[tuple[str, int, float | None, int]] = [("attack", 512, None, 0)]
    if not attack:
        items = [(cohort, 320, None, n) for cohort in CRITICAL for n in range(32)]
        items += [("code", 2048, None, n) for n in range(4)]
        items += [("long_code", 512, None, n) for n in range(2)]
        depths = list(enumerate((0.1, 0.5, 0.9)))
        items += [("needle_grid", length, depth, n) for length in (128, 512, 2048, 8128) for n, depth in depths]
    return [
        Prompt(
            id=f"{cohort}-{length}-{n}",
            cohort=cohort,
            task=TASKS.get(cohort, ""),
            split=EVALUATION,
            tokens=(0,) * length,
            roles=("user",) * length,
            continuation=(1,) * scored,
            scored=scored,
            answer="12345",
            max_new_tokens=20,
            depth=depth,
            batch=f"{cohort}-{length}-b00",
        )
        for cohort, length, depth, n in items
        for scored in [257 if cohort == "long_code" else 17]
    ]


PROMPTS = prompts()


def packing(policy: CachePolicy) -> dict[str, Any]:
    rows = []
    for tokens in sorted({len(prompt.tokens) for prompt in PROMPTS}):
        size = account(policy, SHAPE, tokens, 1).format_bytes
        row = {"tokens": tokens, "format_bytes": size, "held_bytes": size, "escalated_blocks": 0}
        rows.append(row | {"reconciled": True})
    bits = bits_per_element(policy, SHAPE)
    return {"policy": policy.id, "bits_per_element": bits, "escalated_blocks": 2, "memory": rows, "reconciled": True}


def cells(policy: CachePolicy, layer: int, tokens: int) -> list[tuple[int, range]]:
    """The buckets of a sequence, and the tokens that the policy packs in each."""
    stop = 0 if policy.layer(layer).is_exact else packed_until(policy, tokens)
    spans = [(policy.sink_tokens, BUCKETS[1]), *zip(BUCKETS[1:], (*BUCKETS[2:], 8192), strict=True)]
    return [(bucket, range(start, min(end, stop))) for bucket, (start, end) in zip(BUCKETS, spans, strict=True)]


def held(prompt: Prompt) -> int:
    """Tokens in the cache once the continuation was fed; its last token is only predicted."""
    return len(prompt.tokens) + prompt.scored - 1


def packed(policy: CachePolicy, chosen: list[Prompt]) -> list[tuple[Prompt, int]]:
    """These prompts with each packed layer, if anything of them is packed."""
    reached = [prompt for prompt in chosen if packed_until(policy, held(prompt)) > policy.sink_tokens]
    return [(prompt, n) for prompt in reached for n in range(SHAPE.layers) if not policy.layer(n).is_exact]


def firsts() -> list[Prompt]:
    return list({prompt.batch: prompt for prompt in reversed(PROMPTS)}.values())


def parts(prompt: Prompt, span: range) -> list[tuple[str, range]]:
    """A span's tokens of the prompt and behind it, by role, where there are any."""
    edge = min(max(len(prompt.tokens), span.start), span.stop)
    found = [("user", range(span.start, edge)), ("generated", range(edge, span.stop))]
    return [(role, tokens) for role, tokens in found if tokens]


def errors_frame(policy: CachePolicy) -> pl.DataFrame:
    rows = [
        {"prompt": prompt.id, "cohort": prompt.cohort, "length": len(prompt.tokens), "layer": layer, "tensor": tensor}
        | {"bucket": bucket, "role": role, "tokens": len(tokens), "cosine": 0.999 - 0.001 * layer, "cosine_min": 0.9}
        | {"rel_l2": 0.1, "max_abs": 0.5, "saturated": 0.001 * layer}
        for prompt, layer in packed(policy, firsts())
        for tensor in ("key", "value")
        for bucket, span in cells(policy, layer, held(prompt))
        for role, tokens in parts(prompt, span)
    ]
    strings = dict.fromkeys(("prompt", "cohort", "tensor", "role"), pl.String)
    counts = dict.fromkeys(("length", "layer", "bucket", "tokens"), pl.Int64)
    figures = dict.fromkeys(("cosine", "cosine_min", "rel_l2", "max_abs", "saturated"), pl.Float64)
    return pl.DataFrame(rows, schema=strings | counts | figures)


def attention_frame(policy: CachePolicy) -> pl.DataFrame:
    """What kvdrift.measure.quantized writes: the layer's own row, then its slices, worse the further back."""
    names = ("key_logits", "jensen_shannon", "value_output", "combined_error", "top_overlap")
    slices: list[tuple[str, int | None, str | None, float]] = [("layer", None, None, 0.01)]
    slices += [
        (kind, bucket, None, 0.001 * (1 + n)) for kind in ("position", "distance") for n, bucket in enumerate(BUCKETS)
    ]
    slices += [("region", None, "prompt", 0.004), ("region", None, "generated", 0.005)]
    slices += [("role", None, "filler", 0.004), ("role", None, "needle", 0.002), ("role", None, "generated", 0.005)]
    rows = [
        {"prompt": prompt.id, "cohort": prompt.cohort, "layer": layer, "slice": kind, "bucket": bucket, "role": role}
        | {name: figure if kind == "layer" or name != "top_overlap" else None for name in names}
        for prompt, layer in packed(policy, firsts())
        for kind, bucket, role, figure in slices
    ]
    strings = dict.fromkeys(("prompt", "cohort", "slice", "role"), pl.String)
    schema = strings | {"layer": pl.Int64, "bucket": pl.Int64} | dict.fromkeys(names, pl.Float64)
    return pl.DataFrame(rows, schema=schema)


def cells_frame(policy: CachePolicy, kl: float) -> pl.DataFrame:
    """Two probes; the shorter one packs nothing in the last bucket."""
    probes = [prompt for prompt in PROMPTS if prompt.id in ("code-2048-0", "needle_grid-8128-0")]
    figures = {"kl_max": kl, "same_top1": 1.0, "rank_correlation": 0.999}
    rows = [
        {"prompt": prompt.id, "layer": layer, "bucket": bucket, "tensor": "both"}
        | {"start": span.start if span else None, "stop": span.stop if span else None}
        | {name: figure if span else None for name, figure in figures.items()}
        | {"kl": kl * (1 + layer) / 10 if span else None}
        for prompt in probes
        for layer in range(SHAPE.layers)
        for bucket, span in cells(policy, layer, len(prompt.tokens))
    ]
    schema = {"prompt": pl.String, "layer": pl.Int64, "bucket": pl.Int64, "start": pl.Int64, "stop": pl.Int64}
    return pl.DataFrame(rows, schema=schema | {"tensor": pl.String} | dict.fromkeys(("kl", *figures), pl.Float64))


def logits_frame(kl: float) -> pl.DataFrame:
    rows = [
        {"prompt": prompt.id, "cohort": prompt.cohort, "step": step, "position": len(prompt.tokens) + step}
        | {"kl": kl * (1 + 0.1 * (n % 20)), "same_top1": True, "delta_p": kl, "rank_correlation": 1.0 - kl}
        | {"nll_reference": 2.0, "nll": 2.0 + kl}
        for n, prompt in enumerate([*PROMPTS, *prompts(attack=True)])
        for step in range(prompt.scored - 1)
    ]
    return pl.DataFrame(rows)


def tasks(mode: str) -> list[Prompt]:
    """The prompts that are generated in a mode."""
    batches: dict[str, list[Prompt]] = {}
    for prompt in [*PROMPTS, *prompts(attack=True)]:
        if prompt.task:
            batches.setdefault(prompt.batch, []).append(prompt)
    return [row for name, rows in batches.items() if mode in modes_of(name, len(rows)) for row in rows]


def generations_frame(exact: bool) -> pl.DataFrame:
    rows = []
    for mode in MODES:
        for prompt in tasks(mode):
            worded = not exact and prompt.id == "copy-320-0"
            row = {"prompt": prompt.id, "cohort": prompt.cohort, "task": prompt.task, "mode": mode}
            row |= {"length": len(prompt.tokens), "depth": prompt.depth, "answer": prompt.answer}
            row |= {"output_reference": "It is <b>12345</b>.", "output": "12345 | it is." if worded else "12345"}
            row |= {"tokens_reference": [1, 2], "tokens": [2] if worded else [1, 2]}
            row |= {"score_reference": 1.0, "score": 1.0, "correct_reference": True, "correct": True}
            row |= {"step_kl": [0.0, 0.001] if prompt.cohort == "attack" and mode == "greedy" else None}
            row |= {"valid_format_reference": True, "valid_format": True, "refused_reference": False, "refused": False}
            rows.append(row | {"first_divergence": 0 if worded else None, "edit_distance": int(worded)})
    kinds = {"first_divergence": pl.Int64, "depth": pl.Float64, "step_kl": pl.List(pl.Float64)}
    return pl.DataFrame(rows, schema_overrides=kinds, infer_schema_length=None)


def latency(policy: CachePolicy) -> dict[str, Any]:
    """The workload's own row first, then two shorter contexts."""
    workload = LIMITS.workload
    rows = [
        {"batch": 1, "context": context, "generated": 64, "pairs": 64, "phase": "decode", "reuse": "fresh"}
        | {"ratio": 0.9, "ratio_low": 0.88, "ratio_high": 0.93}
        | {"p95_ratio": 0.95, "p95_ratio_low": 0.93, "p95_ratio_high": 0.97}
        | {"reference_p50_ms": 50 + context / 400, "candidate_p50_ms": 52 + context / 800}
        | {"reference_p95_ms": 60.0, "candidate_p95_ms": 57.0}
        | {"reference_p99_ms": None, "candidate_p99_ms": None}
        | {"reference_tokens_per_second": 17.0, "tokens_per_second": 19.0, "reference_bytes": 2, "bytes": 1}
        for context in (workload.context, 512, 2048)
    ]
    ledger = account(policy, SHAPE, workload.context, workload.batch)
    held, reference = ledger.format_bytes, ledger.reference
    return {
        "policy": policy.id,
        "workload": asdict(workload),
        "rows": rows,
        "headline": {
            "itl_ratio": 0.9,
            "p95_reference_ms": 60.0,
            "p95_ms": 57.0,
            "p95_ratio": 0.95,
            "p95_ratio_low": 0.93,
            "p95_ratio_high": 0.97,
            "ttft_ratio": None,
            "held_bytes": held,
            "peak_bytes": held + 100,
            "reference_held_bytes": reference,
            "reference_peak_bytes": reference + 100,
        },
        "break_even": {
            "1": {"tokens": 1600, "verdict": "crosses", "low": 1200, "high": 2100, "confidence": 1.0}
            | {"reference": {"intercept": 50.0, "slope": 0.0025}, "candidate": {"intercept": 52.0, "slope": 0.00125}}
        },
        "attention_ms": [0.1, 0.1, 0.2],
        "noise_floor": {"value": 1.0, "low": 0.98, "high": 1.02},
        "peers": {"static": {"value": 1.1, "low": 1.0, "high": 1.2}, "hqq": "hqq is not installed"},
        "capacity": {"budget_bytes": 2**30, "context": workload.context, "copy_bandwidth": 4e10}
        | {"reference_sequences": 10, "sequences": 28, "predicted_reference_sequences": 10, "predicted_sequences": 28}
        | {f"{side}held_bytes": 2**29 for side in ("", "reference_")}
        | {f"{side}{of}step_ms": 9.0 for side in ("", "reference_") for of in ("", "bandwidth_bound_")},
        "machine": {"threads": 2, "processors": 2, "backend": "native"}
        | {"torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"}
        | {"before": {"clock_mhz": 2596, "load": 0.5}, "after": {"clock_mhz": "unavailable", "load": 1.5}},
        "energy": "unavailable",
        "unavailable": ["energy: no RAPL"],
    }


def made_up(tmp_path: Path) -> Run:
    """A run of the exact policy, kivi4 and kivi2; the last one saves more and is wrong."""
    folders = {
        name: tmp_path / "data" / name for name in ("plans", "quantize", "logits", "generate", "latency", "drill")
    }
    files = {
        "manifest": "model/manifest.json",
        "prompts": "prompts/prompts.parquet",
        "attack": "attack/prompts.parquet",
    }
    files_at = {name: tmp_path / "data" / file for name, file in files.items()}
    found = Run(tmp_path, Sources(**files_at, **folders))
    manifest = {"shape": asdict(SHAPE), "dtype": "bfloat16", "positions": 8192, "source": {"id": "somewhere/tiny.gguf"}}
    weights = found.path("model", "model.safetensors")
    weights.write_bytes(b"weights")
    manifest |= {"weights": {weights.name: {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}}}
    manifest |= {"architecture": "Llama", "rope": {"rope_theta": 1e4}, "layer_types": ["full_attention"] * 3}
    found.write("model", "manifest", manifest | {"unsupported": []})
    found.write("preflight", "device", {"device": "cpu", "gpu": None, "cpu": "a CPU", "backend": "native"})
    found.write("preflight", "software", {"torch": "2.13.0"})
    found.write("calibration", "calibration", {"coverage": {"cohorts": ["code"], "prompts": 4, "tokens": 2048}})
    to_frame(PROMPTS).write_parquet(found.path("prompts", "prompts.parquet"))
    to_frame(prompts(attack=True)).write_parquet(found.path("attack", "prompts.parquet"))
    found.path("reference", "generations.parquet").write_bytes(b"generations")
    for policy, kl in ((EXACT, 0.0), (kivi("kivi4", 4), 0.004), (kivi("kivi2", 2), 0.12)):
        found.add(policy, kl)
    return found
