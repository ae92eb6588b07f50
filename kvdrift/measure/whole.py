"""KL of the whole stack under a policy, on probe prompts, in its dtype; isolated cells need not add up to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdrift.cache.packed import PackedCache
from kvdrift.measure.logits import kl
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import score
from kvdrift.policy import CachePolicy, LayerPolicy


@torch.inference_mode()
def whole_stack_kl(model: Any, probes: Sequence[tuple[Stored, int]], steps: int) -> Callable[[CachePolicy], float]:
    """A function from a policy to its mean KL in nats, on the first `steps` scored tokens of each probe prompt.

    The exact side runs once, in the same dtype and batch, so that rounding noise cancels.
    """

    def log_p(policy: CachePolicy, probe: tuple[Stored, int]) -> torch.Tensor:
        stored, row = probe
        cache = PackedCache(policy, model.config, dtype=model.dtype)
        stored.fill(cache, model.device, rows=[row], dtype=model.dtype)
        continuation = stored.continuation[row : row + 1, : steps + 1].to(model.device)
        return score(model, cache, continuation).float().log_softmax(-1)

    exact = CachePolicy(name="exact", layers=(LayerPolicy(),))
    references = [log_p(exact, probe) for probe in probes]

    def measured(policy: CachePolicy) -> float:
        kls = [kl(reference, log_p(policy, probe)).mean() for reference, probe in zip(references, probes, strict=True)]
        return float(torch.stack(kls).mean())

    return measured
