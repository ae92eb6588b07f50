"""Room for a newcomer: bytes that are free, and sessions that may have to go."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Literal

from kvdrift.cache.pool import PoolExhausted
from kvdrift.serving.killswitch import Session

Eviction = Literal["none", "oldest"]


def make_room(sessions: MutableMapping[str, Session], need: int, free: int, eviction: Eviction) -> list[str]:
    """Evict sessions, oldest (first) to newest, until `need` bytes are free; the names of those evicted.

    They are to be rebuilt from their prompts. Raises PoolExhausted, with every session as it was, when eviction is
    "none" or evicting all of them would not do.
    """
    chosen: list[str] = []
    for name, session in sessions.items() if eviction == "oldest" else ():
        if free >= need:
            break
        free += session.cache.storage_bytes()
        chosen.append(name)
    if free < need:
        raise PoolExhausted(
            f"{need:,} B needed, {free:,} B to be had with eviction {eviction!r}; finish a sequence, shorten the "
            "prompt or reject the request"
        )
    for name in chosen:
        sessions.pop(name).cache.reset()
    return chosen
