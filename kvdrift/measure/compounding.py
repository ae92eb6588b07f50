"""Do errors compound? KL at every generated step, along what the candidate said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvdrift.cache.packed import PackedCache
from kvdrift.measure.logits import kl
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import score
from kvdrift.policy import CachePolicy, LayerPolicy

EXACT = CachePolicy(name="exact", layers=(LayerPolicy(),))


@torch.inference_mode()
def step_kl(model: Any, stored: Stored, policy: CachePolicy, said: Sequence[Sequence[int]]) -> list[list[float]]:
    """KL(reference ‖ candidate) in nats at each generated token, a list a prompt of the batch; `said` is what the
    candidate generated.

    Both caches are fed that same text, in the same chunks, so that the two distributions stay comparable even after
    the candidate has left the reference's answer.
    """
    tokens = torch.zeros(len(said), max(1, *map(len, said)), dtype=torch.long)
    for row, answer in enumerate(said):
        tokens[row, : len(answer)] = torch.tensor(answer)
    fed = torch.cat([stored.prefix[:, -1:], tokens], dim=1).to(model.device)
    both = []
    for side in (EXACT, policy):
        cache = PackedCache(side, model.config, dtype=model.dtype)
        stored.fill(cache, model.device, tokens=stored.length - 1)
        both.append(score(model, cache, fed))
    found = []
    for row, answer in enumerate(said):
        p, q = (logits[row, : len(answer)].float().log_softmax(-1) for logits in both)
        found.append(kl(p, q).tolist())
    return found
