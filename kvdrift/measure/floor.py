"""The noise floor: the reference against itself when only the schedule changes. Drift is read against it."""

from __future__ import annotations

from typing import Any

import polars as pl
import torch

from kvdrift.measure.logits import compare
from kvdrift.measure.reference import Stored
from kvdrift.measure.replay import score


@torch.inference_mode()
def noise_floor(model: Any, stored: Stored) -> pl.DataFrame:
    """Score the batch's first prompt alone, over the same stored keys and values, and compare with its stored logits.

    A row a scored token: prompt, cohort, step, kl, same_top1, delta_p, rank_correlation, nll_reference, nll.
    """
    from transformers import DynamicCache

    prompt = stored.prompts[0]
    cache = DynamicCache(config=model.config)
    for index in range(stored.layers):
        cache.update(*(x[:1].to(model.device) for x in stored.layer(index)), index)
    continuation = torch.tensor([prompt.continuation], device=model.device)
    logits = score(model, cache, continuation)[0].cpu()
    (reference,) = stored.read("logits")
    figures = compare(reference[0], logits, continuation[0, 1:].cpu())
    steps = range(prompt.scored - 1)
    return pl.DataFrame(
        {"prompt": [prompt.id] * len(steps), "cohort": [prompt.cohort] * len(steps), "step": list(steps)}
        | {name: figure[: prompt.scored - 1].numpy() for name, figure in figures.items()}
    )
