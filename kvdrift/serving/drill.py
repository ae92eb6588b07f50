"""The drill: every rail is tripped on the real model, and what it protects is looked at afterwards.

A check that can't be made because the policy packs nothing passes and says so. One that raises has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.serving import drill_cache, drill_door
from kvdrift.serving.checks import CACHE, DOOR, FALLBACK
from kvdrift.serving.subject import Subject

__all__ = ["Check", "Subject", "fallback", "run"]


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def run(subject: Subject) -> list[Check]:
    """Every check of the rails, those at the door first."""
    checks: list[Callable[[Subject], str]] = [getattr(drill_door, name) for name in DOOR]
    checks += [getattr(drill_cache, name) for name in CACHE]
    return [_checked(check, subject) for check in checks]


def _checked(check: Callable[[Subject], str], subject: Subject) -> Check:
    try:
        return Check(check.__name__, True, check(subject))
    except Exception as error:  # whatever goes wrong in a drill is a finding, not an end of the drill
        return Check(check.__name__, False, f"{type(error).__name__}: {error}")


def fallback(
    stored: tuple[Float[Tensor, "batch scored vocab"], Sequence[Sequence[int]]],
    found: tuple[Float[Tensor, "batch scored vocab"], Sequence[Sequence[int]]],
) -> Check:
    """The exact policy on the same runtime gives the stored reference's logits, bit for bit, and its tokens."""
    kl = _largest_kl(stored[0], found[0])
    tokens = sum(a != b for a, b in zip(stored[1], found[1], strict=True))
    passed = torch.equal(stored[0], found[0]) and not tokens
    detail = f"largest KL {kl:.3g} nats over {stored[0].shape[0] * stored[0].shape[1]} positions; "
    return Check(FALLBACK, passed, detail + f"{tokens} of {len(found[1])} generations differ")


def _largest_kl(reference: Tensor, candidate: Tensor) -> float:
    log_p, log_q = (x.float().log_softmax(-1) for x in (reference, candidate))
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum(-1).max()))
