"""A canary exposes a share of requests to one release, and to no other: model, quantizer version and kernel build."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvdrift.cache.block import Identity
from kvdrift.kernels import dispatch
from kvdrift.policy import CachePolicy
from kvdrift.serving.mirror import Mirrored, sampled

ROOMS = ("quantizers", "kernels", "cache")


@dataclass(frozen=True)
class Release:
    """What exposure, headers and metrics are bound to."""

    model: str
    version: str
    kernels: str

    def identity(self, scope: str, adapter: str = "") -> Identity:
        """The header of this release's blocks for one tenant, or one shareable prefix scope."""
        return Identity(scope, self.model, adapter, self.version, self.kernels)


@dataclass(frozen=True)
class Alarms:
    """Limits on mirrored requests. Below `requests` of them nothing is concluded."""

    kl_mean: float
    same_top1: float
    requests: int


@dataclass(frozen=True)
class Canary:
    """Exposure of `share` of the requests to `release`."""

    release: Release
    share: float
    alarms: Alarms


def release(manifest: Mapping[str, Any], policy: CachePolicy, device: torch.device) -> Release:
    """The release that this process runs. `manifest` is the model's, whose weights are known by their hashes."""
    weights = json.dumps(manifest["weights"], sort_keys=True)
    model = hashlib.sha256(weights.encode()).hexdigest()[:12]
    return Release(model, f"{policy.id}-{sources()}", dispatch.build_id(device))


@functools.cache
def sources() -> str:
    """12 hex digits over the sources of quantizers, kernels and cache: with the policy's id, the quantizer version."""
    content, home = hashlib.sha256(), Path(__file__).parent.parent
    for room in ROOMS:
        for file in sorted((home / room).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                content.update(str(file.relative_to(home)).encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:12]


def exposed(canary: Canary, running: Release, request: str) -> bool:
    """Whether this worker serves the request with the canary's policy: only a worker that runs that very release."""
    return running == canary.release and sampled(request, canary.share)


def tripped(alarms: Alarms, mirrored: Iterable[Mirrored]) -> list[str]:
    """The alarms that the mirrored requests set off, by name and figure."""
    requests = list(mirrored)
    if len(requests) < alarms.requests:
        return []
    kl = sum(m.kl_mean for m in requests) / len(requests)
    same = sum(m.same_top1 for m in requests) / len(requests)
    found = []
    if not kl <= alarms.kl_mean:
        found.append(f"KL {kl:.4g} nats exceeds {alarms.kl_mean}")
    if not same >= alarms.same_top1:
        found.append(f"same top-1 {same:.3f} is below {alarms.same_top1}")
    return found
