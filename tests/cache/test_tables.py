"""The tables that attention reads pages by:  pytest tests/cache/test_tables.py"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.cache.tables import Tables

ROW = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 64)), max_size=4)
CASES = st.integers(1, 4).flatmap(
    lambda batch: st.tuples(
        st.lists(ROW, min_size=batch, max_size=batch), st.lists(st.sets(st.integers(0, batch - 1)), max_size=6)
    )
)


@given(CASES)
def test_appended_tables_equal_tables_written_at_once(
    case: tuple[list[list[tuple[int, int]]], list[set[int]]],
) -> None:
    """Sequences that have blocks already and take more, together, in turn or not at all."""
    rows, steps = case
    tables = Tables(rows, torch.device("cpu"))
    for i, step in enumerate(steps):
        newest = dict.fromkeys(step, (100 + i, 64))
        tables.append(newest)
        rows = [[*row, newest[s]] if s in newest else row for s, row in enumerate(rows)]
    whole = Tables(rows, torch.device("cpu"))
    for ours, theirs in ((tables.pages, whole.pages), (tables.tokens, whole.tokens)):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()
        assert ours.dtype == torch.int32
