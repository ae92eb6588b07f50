"""A made-up sensitivity map: two probes on a text, a long needle prompt and two short ones."""

from typing import Any

import polars as pl

BUCKETS = {0: (16, 80), 128: (128, 528), 512: (512, 1872)}


def row(prompt: str, probe: str, layer: int, tensor: str, bucket: int | None, needle: bool = False) -> dict[str, Any]:
    """Later layers, later buckets and the long needle prompt are worse."""
    start, stop = (16, 1872) if bucket is None else BUCKETS.get(bucket, (bucket, bucket + 64))
    kl = 0.1 * (layer + 1) * (1.0 if bucket is None else 0.5 + bucket / 2000) + (0.03 if prompt != "code" else 0.0)
    kept = None
    if needle:
        kept = {"n1": 0.6, "n2": 0.8}[prompt] if (layer, bucket, tensor) == (2, 0, "both") else 1.0
    found: dict[str, Any] = {"prompt": prompt, "needle": needle, "layer": layer, "tensor": tensor}
    found |= {"probe": probe, "policy": "kivi2" if probe == "2" else probe}
    found |= {"bucket": bucket, "start": start, "stop": stop, "kl": kl, "kl_max": 2 * kl, "same_top1": 0.9}
    return found | {"rank_correlation": 0.95, "kept": kept, "cosine": 0.99, "error": 0.1}


def cells_frame() -> pl.DataFrame:
    rows = [
        row(prompt, probe, layer, tensor, bucket, needle)
        for prompt, needle in (("code", False), ("needle-long", False), ("n1", True), ("n2", True))
        for probe in ("2", "int4")
        for layer in range(3)
        for tensor in ("key", "value", "both")
        for bucket in ((0, 128) if needle else (None, *BUCKETS))
    ]
    return pl.DataFrame(rows, infer_schema_length=None)
