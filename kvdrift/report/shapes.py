"""What a file of evidence has to hold: the keys, columns and ranges of each, whatever the policy.

What must hold between an artifact and its policy, model and prompts is `artifacts.py`'s to know.
"""

from __future__ import annotations

import math
from typing import Any

import polars as pl

from kvdrift.report.strict import Each, Either, Many, Number

NOISE = 1e-6
"""How far float arithmetic may leave a figure beyond its range."""

Columns = dict[str, Any]

COUNT, SIZE = Number(0, whole=True), Number(1, whole=True)
COUNT_OR_NULL, SIZE_OR_NULL = Number(0, whole=True, or_null=True), Number(1, whole=True, or_null=True)
POSITIVE, POSITIVE_OR_NULL = Number(1e-9), Number(1e-9, or_null=True)
SHARE, COSINE, KL = Number(0, 1), Number(-1 - NOISE, 1 + NOISE), Number(-NOISE)
ERROR = Number(0, or_null=True)
TEXT, FLAG = pl.String(), pl.Boolean()

RATIO = {"value": POSITIVE, "low": POSITIVE_OR_NULL, "high": POSITIVE_OR_NULL}

PACKING = {
    "policy": str,
    "bits_per_element": POSITIVE,
    "escalated_blocks": COUNT,
    "memory": [
        {"tokens": SIZE, "format_bytes": SIZE, "held_bytes": SIZE, "escalated_blocks": COUNT, "reconciled": bool}
    ],
    "reconciled": bool,
}
LATENCY = {
    "policy": str,
    "workload": {"batch": SIZE, "context": SIZE, "output": SIZE},
    "rows": [
        dict.fromkeys(("batch", "context", "generated", "pairs"), SIZE)
        | {"phase": ("prefill", "decode"), "reuse": ("fresh", "shared_prefix", "continued_session", "evicted")}
        | dict.fromkeys(("ratio", "reference_p50_ms", "candidate_p50_ms"), POSITIVE)
        | dict.fromkeys(("tokens_per_second", "reference_tokens_per_second"), POSITIVE)
        | dict.fromkeys(("ratio_low", "ratio_high", "p95_ratio", "p95_ratio_low", "p95_ratio_high"), POSITIVE_OR_NULL)
        | {f"{side}_p{q}_ms": POSITIVE_OR_NULL for side in ("reference", "candidate") for q in (95, 99)}
        | dict.fromkeys(("bytes", "reference_bytes"), SIZE_OR_NULL)
    ],
    "headline": dict.fromkeys(("itl_ratio", "p95_ms", "p95_reference_ms", "p95_ratio"), POSITIVE)
    | dict.fromkeys(("p95_ratio_low", "p95_ratio_high", "ttft_ratio"), POSITIVE_OR_NULL)
    | dict.fromkeys(("held_bytes", "peak_bytes", "reference_held_bytes", "reference_peak_bytes"), SIZE),
    "break_even": Each(
        {"verdict": ("always", "never", "crosses"), "confidence": SHARE}
        | dict.fromkeys(("tokens", "low", "high"), COUNT_OR_NULL)
        | {side: {"intercept": Number(), "slope": Number()} for side in ("reference", "candidate")}
    ),
    "attention_ms": [POSITIVE],
    "noise_floor": RATIO,
    "peers": Each(Either(str, RATIO)),
    "capacity": {"budget_bytes": SIZE, "context": SIZE, "copy_bandwidth": POSITIVE}
    | {f"{side}{name}": COUNT for side in ("", "reference_") for name in ("sequences", "held_bytes")}
    | {f"predicted_{side}sequences": COUNT for side in ("", "reference_")}
    | {f"{side}{name}step_ms": POSITIVE_OR_NULL for side in ("", "reference_") for name in ("", "bandwidth_bound_")},
    "machine": dict.fromkeys(("backend", "torch", "transformers", "python"), str)
    | dict.fromkeys(("threads", "processors"), SIZE)
    | {at: {"clock_mhz": Either(("unavailable",), POSITIVE), "load": Number(0)} for at in ("before", "after")},
    "unavailable": Many(str),
}
MANIFEST = {
    "shape": dict.fromkeys(("layers", "kv_heads", "head_dim", "query_heads", "dtype_bytes"), SIZE),
    "source": {"id": str},
    "dtype": str,
    "weights": Each({"bytes": COUNT, "sha256": str}),
    "unsupported": Many(str),
}
DEVICE = {"device": str, "backend": str}
SOFTWARE = Each(Either(str, None))
CALIBRATION = {"coverage": {"cohorts": [str], "prompts": COUNT, "tokens": COUNT}}
DRILL = {"policy": str, "checks": [{"name": str, "passed": bool, "detail": str}], "passed": bool}

ERRORS: Columns = {
    **dict.fromkeys(("prompt", "cohort", "tensor", "role"), TEXT),
    **{"layer": COUNT, "bucket": COUNT, "length": SIZE, "tokens": SIZE, "cosine": COSINE, "cosine_min": COSINE},
    **{"rel_l2": Number(0), "max_abs": Number(0), "saturated": SHARE},
}
ATTENTION: Columns = {
    **dict.fromkeys(("prompt", "cohort", "slice"), TEXT),
    **{"layer": COUNT, "bucket": COUNT_OR_NULL},
    **dict.fromkeys(("key_logits", "value_output", "combined_error"), ERROR),
    "jensen_shannon": Number(-NOISE, math.log(2) + NOISE, or_null=True),
    "top_overlap": Number(0, 1, or_null=True),
}
LOGITS: Columns = {
    **{"prompt": TEXT, "cohort": TEXT, "step": COUNT, "position": COUNT, "kl": KL, "same_top1": FLAG},
    **dict.fromkeys(("delta_p", "rank_correlation"), COSINE),
    **dict.fromkeys(("nll", "nll_reference"), Number(-NOISE, 500)),
}
CELLS: Columns = {
    **{"prompt": TEXT, "tensor": TEXT, "layer": COUNT, "bucket": COUNT},
    **dict.fromkeys(("start", "stop"), COUNT_OR_NULL),
    **dict.fromkeys(("kl", "kl_max"), Number(-NOISE, or_null=True)),
    "same_top1": Number(0, 1, or_null=True),
    "rank_correlation": Number(-1 - NOISE, 1 + NOISE, or_null=True),
}
GENERATIONS: Columns = {
    **dict.fromkeys(("prompt", "cohort", "task", "mode", "answer", "output", "output_reference"), TEXT),
    **{"length": SIZE, "depth": Number(0, 1, or_null=True), "tokens": [COUNT], "tokens_reference": [COUNT]},
    **dict.fromkeys(("score", "score_reference"), SHARE),
    **{f"{flag}{side}": FLAG for flag in ("correct", "valid_format", "refused") for side in ("", "_reference")},
    **{"first_divergence": COUNT_OR_NULL, "edit_distance": COUNT, "step_kl": [Number(-NOISE, or_null=True)]},
}
FLOOR: Columns = LOGITS | {"schedule": TEXT}
FLOOR_ANSWERS: Columns = {
    **{"schedule": TEXT, "prompt": TEXT, "first_divergence": COUNT_OR_NULL},
    **dict.fromkeys(("correct", "correct_reference"), FLAG),
}
