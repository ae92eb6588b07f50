"""The names of the drill's checks: what runs is what a verdict demands. It imports nothing, so that a verdict may."""

DOOR = (
    "header_fields",
    "other_tenant",
    "corruption",
    "too_long",
    "head_shape",
    "outliers",
    "memory_pressure",
    "shortening",
)
"""Checks at the door, each a function of `drill_door`."""

CACHE = (
    "infinite_block",
    "wide_span",
    "kill_switch",
    "exhaustion",
    "eviction",
    "rollback",
    "mirroring",
    "canary",
)
"""Checks of the cache behind it, each a function of `drill_cache`."""

FALLBACK = "fallback"
"""The exact policy against the stored reference."""

REQUIRED = (*DOOR, *CACHE, FALLBACK)
