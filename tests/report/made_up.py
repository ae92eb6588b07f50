"""A small made-up run: what the stages before the verdict would leave behind, by polars and plain numbers."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from kvdrift.ledger import CacheShape, account
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.report.evidence import Evidence, Sources, read_evidence
from kvdrift.report.limits import CellLimits, Limits, Workload

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=64, query_heads=4)
BUCKETS = (32, 128, 512, 2048)
CRITICAL = ("needle", "copy", "tool_arguments")
TASKS = {"needle": "number", "copy": "exact", "tool_arguments": "arguments", "needle_grid": "number"}
LIMITS = Limits(
    workload=Workload(1, 4096, 64),
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
        errors_frame(0 if exact else SHAPE.layers).write_parquet(self.path("quantize", f"{name}.parquet"))
        attention_frame(0 if exact else SHAPE.layers).write_parquet(self.path("quantize", f"{name}_attention.parquet"))
        logits_frame(kl).write_parquet(self.path("logits", f"{name}.parquet"))
        cells_frame(0 if exact else SHAPE.layers, kl).write_parquet(self.path("logits", f"{name}_cells.parquet"))
        generations_frame(exact).write_parquet(self.path("generate", f"{name}.parquet"))
        self.write("latency", name, latency())
        checks = [{"name": "over-long request", "passed": True, "detail": "routed to exact"}]
        self.write("drill", name, {"checks": checks, "passed": True})

    def path(self, folder: str, file: str) -> Path:
        path = self.root / "data" / folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, folder: str, name: str, content: Any) -> None:
        self.path(folder, f"{name}.json").write_text(json.dumps(content))

    def evidence(self, name: str) -> Evidence:
        return read_evidence(name, self.sources)


def packing(policy: CachePolicy) -> dict[str, Any]:
    rows = []
    for tokens in (1024, 8128):
        size = account(policy, SHAPE, tokens, 1).format_bytes
        rows.append({"tokens": tokens, "batch": 1, "format_bytes": size, "held_bytes": size, "reconciled": True})
    return {"policy": policy.id, "bits_per_element": 4.6, "escalated_blocks": 2, "memory": rows, "reconciled": True}


def errors_frame(layers: int) -> pl.DataFrame:
    rows = [
        {"prompt": prompt, "cohort": "code", "layer": layer, "tensor": tensor, "bucket": bucket, "role": "user"}
        | {"tokens": 100, "cosine": 0.999 - 0.001 * layer, "cosine_min": 0.9, "rel_l2": 0.1, "saturated": 0.001 * layer}
        for prompt in ("code-1", "needle_grid-1")
        for layer in range(layers)
        for tensor in ("key", "value")
        for bucket in BUCKETS
    ]
    schema = {"layer": pl.Int64, "bucket": pl.Int64, "tokens": pl.Int64, "tensor": pl.String}
    return pl.DataFrame(
        rows or None, schema=None if rows else schema | dict.fromkeys(("cosine", "rel_l2", "saturated"), pl.Float64)
    )


def attention_frame(layers: int) -> pl.DataFrame:
    """What kvdrift.measure.quantized writes: the layer's own row, then its slices, worse the further back."""
    names = ("key_logits", "jensen_shannon", "value_output", "combined_error", "top_overlap")
    slices: list[tuple[str, int | None, str | None, float]] = [("layer", None, None, 0.01)]
    slices += [
        (kind, bucket, None, 0.001 * (1 + n)) for kind in ("position", "distance") for n, bucket in enumerate(BUCKETS)
    ]
    slices += [("role", None, "filler", 0.004), ("role", None, "needle", 0.002)]
    rows = [
        {"prompt": "code-1", "cohort": "code", "layer": layer, "slice": kind, "bucket": bucket, "role": role}
        | {name: figure if kind == "layer" or name != "top_overlap" else None for name in names}
        for layer in range(layers)
        for kind, bucket, role, figure in slices
    ]
    strings = dict.fromkeys(("prompt", "cohort", "slice", "role"), pl.String)
    schema = strings | {"layer": pl.Int64, "bucket": pl.Int64} | dict.fromkeys(names, pl.Float64)
    return pl.DataFrame(rows, schema=schema)


def cells_frame(layers: int, kl: float) -> pl.DataFrame:
    rows = [
        {"prompt": prompt, "layer": layer, "bucket": bucket, "start": bucket, "stop": bucket + 64, "tensor": "both"}
        | {"kl": None if bucket == 2048 and prompt == "code-1" else kl * (1 + layer) / 10}
        for prompt in ("code-1", "needle_grid-1")
        for layer in range(layers)
        for bucket in BUCKETS
    ]
    schema = {"prompt": pl.String, "layer": pl.Int64, "bucket": pl.Int64, "start": pl.Int64, "stop": pl.Int64}
    return pl.DataFrame(rows, schema=schema | {"tensor": pl.String, "kl": pl.Float64})


def logits_frame(kl: float) -> pl.DataFrame:
    rows = [
        {"prompt": f"{cohort}-{prompt}", "cohort": cohort, "step": step, "position": 320 + step}
        | {"kl": kl * (1 + 0.1 * prompt), "same_top1": True, "delta_p": kl, "rank_correlation": 1.0 - kl}
        | {"nll_reference": 2.0, "nll": 2.0 + kl}
        for cohort in (*CRITICAL, "code")
        for prompt in range(20)
        for step in range(16)
    ]
    return pl.DataFrame(rows)


def generations_frame(exact: bool) -> pl.DataFrame:
    items = [(cohort, 320, 0.1, n) for cohort in CRITICAL for n in range(32)]
    items += [("needle_grid", length, depth, 0) for length in (128, 512, 2048, 8128) for depth in (0.1, 0.5, 0.9)]
    rows = []
    for mode in ("greedy", "sampled"):
        for cohort, length, depth, n in items:
            worded = not exact and cohort == "copy" and n == 0
            row = {"prompt": f"{cohort}-{length}-{depth}-{n}", "cohort": cohort, "task": TASKS[cohort], "mode": mode}
            row |= {"length": length, "depth": depth, "answer": "12345"}
            row |= {"output_reference": "It is <b>12345</b>.", "output": "12345 | it is." if worded else "12345"}
            row |= {"tokens_reference": [1, 2], "tokens": [2] if worded else [1, 2]}
            row |= {"score_reference": 1.0, "score": 1.0, "correct_reference": True, "correct": True}
            row |= {"valid_format_reference": True, "valid_format": True, "refused_reference": False, "refused": False}
            rows.append(row | {"first_divergence": 0 if worded else None, "edit_distance": int(worded)})
    return pl.DataFrame(rows, schema_overrides={"first_divergence": pl.Int64}, infer_schema_length=None)


def latency() -> dict[str, Any]:
    rows = [
        {"batch": 1, "context": context, "generated": 64, "phase": "decode", "ratio": 0.9, "ratio_low": 0.88}
        | {"reference_p50_ms": 50 + context / 400, "candidate_p50_ms": 52 + context / 800, "ratio_high": 0.93}
        | {"reference_p95_ms": 55.0, "candidate_p95_ms": 56.0, "p99": None, "tokens_per_second": 19.0}
        for context in (512, 2048, 4096)
    ]
    return {
        "workload": asdict(LIMITS.workload),
        "rows": rows,
        "headline": {
            "itl_ratio": 0.91,
            "p95_reference_ms": 60.0,
            "p95_ms": 57.0,
            "p95_ratio": 0.95,
            "peak_bytes": 40,
            "reference_peak_bytes": 100,
        },
        "break_even": {"1": {"tokens": 1600, "verdict": "crosses", "low": 1200, "high": 2100}},
        "attention_ms": [0.1, 0.1, 0.2],
        "noise_floor": {"ratio": 1.0, "low": 0.98, "high": 1.02},
        "capacity": {"budget_bytes": 2**30, "reference_sequences": 10, "sequences": 28, "predicted_sequences": 28},
        "energy": "unavailable",
        "unavailable": ["energy: no RAPL"],
    }


def made_up(tmp_path: Path) -> Run:
    """A run of the exact policy, kivi4 and kivi2; the last one saves more and is wrong."""
    folders = {
        name: tmp_path / "data" / name for name in ("plans", "quantize", "logits", "generate", "latency", "drill")
    }
    found = Run(tmp_path, Sources(manifest=tmp_path / "data/model/manifest.json", **folders))
    manifest = {"shape": asdict(SHAPE), "dtype": "bfloat16", "positions": 8192, "source": {"id": "somewhere/tiny.gguf"}}
    manifest |= {"architecture": "Llama", "rope": {"rope_theta": 1e4}, "layer_types": ["full_attention"] * 3}
    found.write("model", "manifest", manifest | {"unsupported": []})
    found.write("preflight", "device", {"device": "cpu", "gpu": None, "cpu": "a CPU", "backend": "native"})
    found.write("preflight", "software", {"torch": "2.13.0"})
    found.write("calibration", "calibration", {"coverage": {"cohorts": ["code"], "prompts": 4, "tokens": 2048}})
    found.path("prompts", "prompts.parquet").write_bytes(b"prompts")
    found.path("reference", "generations.parquet").write_bytes(b"generations")
    for policy, kl in ((EXACT, 0.0), (kivi("kivi4", 4), 0.004), (kivi("kivi2", 2), 0.12)):
        found.add(policy, kl)
    return found
