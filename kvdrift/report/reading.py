"""Read everything that was measured about one policy, from where the stages put it.

This file knows paths and owners. What an artifact has to look like is `artifacts.py`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from kvdrift.config import ConfigError
from kvdrift.ledger import CacheShape
from kvdrift.policy import CachePolicy, from_dict
from kvdrift.prompts.prompt import EVALUATION
from kvdrift.report import strict
from kvdrift.report.evidence import Evidence, read_json
from kvdrift.report.shapes import MANIFEST
from kvdrift.report.tables import table_fault

UNREADABLE = (OSError, ValueError, TypeError, KeyError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""What reading a damaged file raises; polars panics on some."""

T = TypeVar("T")


@dataclass(frozen=True)
class Sources:
    """Where the stages put their results: `<folder>/<policy>.json`, `.parquet`, `_cells.parquet` …"""

    manifest: Path
    prompts: Path
    attack: Path
    plans: Path
    quantize: Path
    logits: Path
    generate: Path
    latency: Path
    drill: Path


def read_evidence(name: str, sources: Sources) -> Evidence:
    """All that was measured about the policy `name`; what can't be read, or is another policy's, is a fault.

    Raises ConfigError, naming the file and the stage to rerun, if the plan, the manifest or the prompts can't be used.
    """
    shape = required(sources.manifest, "model", _shape)
    policy = required(sources.plans / f"{name}.json", f"plan@{name}", lambda path: _plan(path, name, shape))
    own = required(sources.prompts, "prompts", _prompts).with_columns(attack=pl.lit(False))
    prompts = pl.concat([own, required(sources.attack, "attack", _prompts).with_columns(attack=pl.lit(True))])
    found: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for artifact, file in {
        "packing": sources.quantize / f"{name}.json",
        "errors": sources.quantize / f"{name}.parquet",
        "attention": sources.quantize / f"{name}_attention.parquet",
        "logits": sources.logits / f"{name}.parquet",
        "cells": sources.logits / f"{name}_cells.parquet",
        "generations": sources.generate / f"{name}.parquet",
        "latency": sources.latency / f"{name}.json",
        "drill": sources.drill / f"{name}.json",
    }.items():
        try:
            found[artifact] = _object(file) if file.suffix == ".json" else _table(file, policy.id)
        except UNREADABLE as error:
            found[artifact], faults[artifact] = None, " ".join(str(error).split())
    return Evidence(policy=policy, shape=shape, prompts=prompts, faults=faults, **found)


def required(path: Path, stage: str, reader: Callable[[Path], T]) -> T:
    """What the reader makes of a file that nothing can be judged without. Raises ConfigError, one line."""
    try:
        return reader(path)
    except UNREADABLE as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} can't be used: {why}; run `dvc repro -f -s {stage}`") from error


def read_object(path: Path, stage: str, wanted: strict.Wanted) -> dict[str, Any] | None:
    """The JSON object that the stage wrote, None if there is no such file. Raises ConfigError if it isn't as wanted."""
    return required(path, stage, lambda path: _wanted(path, wanted)) if path.is_file() else None


def read_table(path: Path, stage: str, columns: Mapping[str, Any], key: Sequence[str]) -> pl.DataFrame | None:
    """The table that the stage wrote, None if there is no such file. Raises ConfigError if it isn't as wanted."""

    def reader(path: Path) -> pl.DataFrame:
        table = pl.read_parquet(path)
        if fault := table_fault(table, columns, key):
            raise ValueError(fault)
        return table

    return required(path, stage, reader) if path.is_file() else None


def read_manifest(path: Path) -> dict[str, Any]:
    """The model's manifest. Raises ConfigError if it can't be used."""
    return required(path, "model", lambda path: _wanted(path, MANIFEST))


def _wanted(path: Path, wanted: strict.Wanted) -> dict[str, Any]:
    found: dict[str, Any] = strict.read(path, finite=True)
    if fault := strict.value_fault(found, wanted, path.stem):
        raise ValueError(fault)
    return found


def _shape(manifest: Path) -> CacheShape:
    return CacheShape(**_wanted(manifest, MANIFEST)["shape"])


def _plan(path: Path, name: str, shape: CacheShape) -> CachePolicy:
    raw = strict.read(path, finite=True)
    plan = from_dict(raw)
    if plan.name != name:
        raise ValueError(f"it is the plan of {plan.name!r}")
    return plan.bind(shape.layers, shape.head_dim)


def _prompts(path: Path) -> pl.DataFrame:
    rows = pl.read_parquet(path).filter(split=EVALUATION).rename({"id": "prompt"})
    sizes = {"scored": pl.col("scored"), "length": pl.col("tokens").list.len()}
    return rows.select("prompt", "cohort", "task", "batch", "answer", "depth", **sizes).cast(
        dict.fromkeys(sizes, pl.Int64)
    )


def _object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None if there is no such file. Raises ValueError if it is anything else."""
    content = read_json(path)
    if path.is_file() and not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content


def _table(path: Path, policy: str) -> pl.DataFrame | None:
    """A policy's table, None if there is no such file. Raises ValueError if it is another policy's."""
    if not path.is_file():
        return None
    owner = pl.read_parquet_metadata(path).get("policy")
    if owner != policy:
        raise ValueError(f"{path} is of policy {owner}, not of {policy}")
    return pl.read_parquet(path)
