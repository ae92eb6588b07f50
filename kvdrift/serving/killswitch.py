"""The kill switch: after a change of policy, model or kernels nothing packed under the old ones survives."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from kvdrift.cache.packed import PackedCache
from kvdrift.serving.canary import Release


@dataclass(frozen=True)
class Session:
    """One tenant's cache, and the release that it was made under."""

    tenant: str
    release: Release
    cache: PackedCache


def switch(sessions: MutableMapping[str, Session], release: Release) -> list[str]:
    """Clear and drop every session of another release; the names of those dropped, to be rebuilt from their prompts.

    Their pages go back to their pools, and their exact tokens go too: the old cache would pack them as before.
    """
    stale = [name for name, session in sessions.items() if session.release != release]
    for name in stale:
        sessions.pop(name).cache.reset()
    return stale
