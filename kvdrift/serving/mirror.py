"""Sampled requests are decoded on the reference path too, token for token, and compared offline."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Served:
    """What was served: the tokens chosen, and the logits that they were chosen from."""

    tokens: Int[Tensor, "batch steps"]
    logits: Float[Tensor, "batch steps vocab"]


@dataclass(frozen=True)
class Mirrored:
    """The served request beside the reference path. KL(reference ‖ served) is in nats."""

    request: str
    steps: int
    kl_mean: float
    kl_max: float
    same_top1: float
    """Share of steps."""
    first_divergence: int | None
    """First step at which the reference would have chosen another token."""


def sampled(request: str, share: float) -> bool:
    """Whether a request is among the `share` that is looked at; the same answer on every worker."""
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:4], "little") < share * 2**32


@torch.inference_mode()
def decode(model: Any, cache: Any, token: Int[Tensor, "batch 1"], steps: int) -> Served:
    """Greedy steps after a cache that holds everything before `token`."""
    tokens, logits = [], []
    for _ in range(steps):
        answer = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1:]
        token = answer.argmax(-1)
        tokens.append(token)
        logits.append(answer)
    return Served(torch.cat(tokens, dim=1), torch.cat(logits, dim=1))


@torch.inference_mode()
def mirror(request: str, model: Any, cache: Any, token: Int[Tensor, "batch 1"], served: Served) -> Mirrored:
    """Feed what was served to the reference path's `cache`, step by step, and compare each distribution."""
    fed = torch.cat([token, served.tokens[:, :-1]], dim=1)
    steps = [model(input_ids=t, cache=cache, use_cache=True).logits[:, -1:] for t in fed.split(1, dim=1)]
    reference = torch.cat(steps, dim=1)
    log_p, log_q = (x.float().log_softmax(-1) for x in (reference, served.logits))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)
    same = reference.argmax(-1) == served.logits.argmax(-1)
    diverged = (~same).any(0).nonzero().flatten().tolist()
    return Mirrored(
        request=request,
        steps=fed.shape[1],
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        same_top1=float(same.float().mean()),
        first_divergence=diverged[0] if diverged else None,
    )
