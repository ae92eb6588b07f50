"""Tables that are taken for nothing on trust: columns of their type, figures in range, and each row there, once.

Every check returns the first fault in words, or None. This file knows tables; it knows no artifact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from kvdrift.report.strict import Number


def table_fault(table: pl.DataFrame, columns: Mapping[str, Any], key: Sequence[str]) -> str | None:
    """What keeps a table from having these columns and one row a `key`.

    A column is a Number, [Number] if it holds lists of them, or else a type of polars without nulls.
    """
    absent = next((name for name in (*columns, *key) if name not in table.columns), None)
    if absent is not None:
        return f"it has no column {absent}"
    for name, wanted in columns.items():
        if fault := _column_fault(table, name, wanted, key):
            return fault
    twice = table.filter(table.select(key).is_duplicated())
    return None if twice.is_empty() else f"{_where(twice, key)} comes twice"


def _column_fault(table: pl.DataFrame, name: str, wanted: Any, key: Sequence[str]) -> str | None:
    kind = table.schema[name]
    if isinstance(wanted, Number):
        return _figures_fault(table, name, wanted, key)
    if isinstance(wanted, list) and isinstance(kind, pl.List):
        missing = None if wanted[0].or_null else _null_fault(table, name, key)
        items = table.filter(pl.col(name).list.len() > 0).explode(name)
        return missing or _figures_fault(items, name, wanted[0], key)
    return f"{name} is {kind}; allowed: {wanted}" if kind != wanted else _null_fault(table, name, key)


def _null_fault(table: pl.DataFrame, name: str, key: Sequence[str]) -> str | None:
    nulls = table.filter(pl.col(name).is_null())
    return None if nulls.is_empty() else f"{name} is null in {_where(nulls, key)}"


def _figures_fault(table: pl.DataFrame, name: str, wanted: Number, key: Sequence[str]) -> str | None:
    kind = table.schema[name]
    if kind == pl.Null and wanted.or_null:
        return None
    if not (kind.is_integer() if wanted.whole else kind.is_numeric()):
        return f"{name} is {kind}; allowed: {wanted}"
    fits = pl.col(name).is_between(wanted.low, wanted.high).fill_null(wanted.or_null)
    wrong = table.filter(~fits)
    return None if wrong.is_empty() else f"{name} is {wrong[name][0]} in {_where(wrong, key)}; allowed: {wanted}"


def rows_fault(found: pl.DataFrame, expected: pl.DataFrame) -> str | None:
    """What is missing of the rows that have to be there, or is there beside them; on the columns of `expected`."""
    found = found.select(pl.col(name).cast(kind) for name, kind in expected.schema.items())
    for rows, others, words in ((expected, found, "missing"), (found, expected, "out of place")):
        odd = rows.join(others, on=expected.columns, how="anti", nulls_equal=True)
        if not odd.is_empty():
            return f"{odd.height:,} of {rows.height:,} rows are {words}, the first {_where(odd, expected.columns)}"
    return None


def _where(rows: pl.DataFrame, key: Sequence[str]) -> str:
    return "the row with " + ", ".join(f"{name} {value}" for name, value in rows.select(key).row(0, named=True).items())
