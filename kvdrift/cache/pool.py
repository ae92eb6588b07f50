"""Pages of one size in one arena: take, share by reference count, release. It knows bytes, not what they mean."""

from __future__ import annotations

from collections.abc import Iterable

import torch

GROWTH = 64
"""An arena that may grow does so by at least a sixty-fourth: a page added costs a copy of at most as many."""


class PoolExhausted(MemoryError):
    """No free page is left, and the pool may not grow. Nothing that was held is lost."""


class BlockPool:
    """One arena of equal pages, [capacity, page_bytes] uint8.

    With a capacity the arena is allocated once and never grows: asking for more raises PoolExhausted before anything
    changes. Without one it grows as blocks are sealed.
    """

    def __init__(self, page_bytes: int, device: torch.device, capacity: int | None = None) -> None:
        self.page_bytes = page_bytes
        self.fixed = capacity is not None
        self.arena = torch.empty(capacity or 0, page_bytes, dtype=torch.uint8, device=device)
        self._references = [0] * len(self.arena)
        self._free = list(range(len(self.arena) - 1, -1, -1))

    @property
    def used(self) -> int:
        """Pages in use."""
        return len(self._references) - len(self._free)

    @property
    def free(self) -> int:
        """Pages reserved and not in use."""
        return len(self._free)

    def reserve(self, pages: int) -> None:
        """Make room for `pages` more. Raises PoolExhausted, nothing changed, when the arena may not grow."""
        missing = pages - self.free
        if missing <= 0:
            return
        if self.fixed:
            raise PoolExhausted(
                f"{pages} pages of {self.page_bytes:,} B asked for, {self.free} of {len(self.arena)} free; "
                "finish or evict a sequence, or make the cache with room for more"
            )
        self._grow(max(missing, len(self.arena) // GROWTH))

    def take(self, pages: int) -> list[int]:
        """Pages with one reference each. Raises PoolExhausted, nothing changed, when there aren't as many."""
        self.reserve(pages)
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._references[page] = 1
        return taken

    def references(self, page: int) -> int:
        return self._references[page]

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def _grow(self, pages: int) -> None:
        old = len(self.arena)
        arena = torch.empty(old + pages, self.page_bytes, dtype=torch.uint8, device=self.arena.device)
        arena[:old] = self.arena
        self.arena = arena
        self._references += [0] * pages
        self._free[:0] = range(old + pages - 1, old - 1, -1)
