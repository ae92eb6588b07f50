"""The artifacts of one candidate of a made-up run, and what a verdict says once one is spoiled."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
from made_up import LIMITS, Run

from kvdrift.report.verdict import judge

CANDIDATE = "kivi4"
TEXTS = {
    "packing": "quantize/kivi4.json",
    "latency": "latency/kivi4.json",
    "drill": "drill/kivi4.json",
}
TABLES = {
    "errors": "quantize/kivi4.parquet",
    "attention": "quantize/kivi4_attention.parquet",
    "logits": "logits/kivi4.parquet",
    "cells": "logits/kivi4_cells.parquet",
    "generations": "generate/kivi4.parquet",
}
FILES = TEXTS | TABLES


def rejected(run: Run, artifact: str) -> str:
    """What the verdict says of the artifact, given that it rejects the candidate and is JSON."""
    verdict = judge(run.evidence(CANDIDATE), LIMITS)
    json.dumps(verdict, allow_nan=False)
    assert verdict["decision"] == "reject"
    assert verdict["metrics"]["accepted"] == 0
    gate = next(gate for gate in verdict["gates"] if gate["name"] == "evidence")
    assert not gate["passed"]
    assert gate["detail"].startswith(f"{artifact}: ")
    return str(gate["detail"])


def rewrite(file: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Change a table and leave it its owner."""
    owner = pl.read_parquet_metadata(file)["policy"]
    change(pl.read_parquet(file)).write_parquet(file, metadata={"policy": owner})
