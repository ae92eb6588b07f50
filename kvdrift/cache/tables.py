"""Which pages each sequence has and how many of their tokens count, as the tensors that attention reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Tables:
    """`pages` and `tokens`, int32 [sequences, blocks]; a short row ends with blocks of no tokens."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> None:
        """Page and tokens of each block of each sequence."""
        self._lengths = [len(row) for row in rows]
        blocks = max(self._lengths, default=0)
        padded = [[*row, *[(0, 0)] * (blocks - len(row))] for row in rows]
        made = torch.tensor(padded, dtype=torch.int32).view(len(rows), blocks, 2).permute(2, 0, 1)
        self._set(made.contiguous().to(device))

    def append(self, newest: Mapping[int, tuple[int, int]]) -> None:
        """Page and tokens of one more block of these sequences; the rest isn't written again, however long it is."""
        blocks, column = self.pages.shape[1], [(0, 0)] * len(self._lengths)
        for s, block in newest.items():
            if self._lengths[s] < blocks:
                self.pages[s, self._lengths[s]], self.tokens[s, self._lengths[s]] = block
            else:
                column[s] = block
            self._lengths[s] += 1
        if max(self._lengths) > blocks:
            both = [[[x] for x in part] for part in zip(*column, strict=True)]
            made = torch.tensor(both, dtype=torch.int32, device=self.both.device)
            self._set(torch.cat([self.both, made], dim=2))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's parts are views of its own tensor."""
        vars(self).update(state)
        self._set(self.both)

    def _set(self, both: torch.Tensor) -> None:
        self.both = both
        self.pages, self.tokens = both.unbind()
