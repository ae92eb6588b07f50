"""What calibration prompts tell: the range of every channel, and which tokens have the largest keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def channel_range(
    batches: Sequence[Float[Tensor, "_ kv_heads _ d"]], name: str
) -> tuple[Float[Tensor, "kv_heads d"], Float[Tensor, "kv_heads d"]]:
    """Least and largest value of each channel over all tokens of the batches, in float32.

    Raises ValueError, naming the tensor by `name`, where no channel varies: a range of warm-up zeros says nothing.
    """
    low = torch.stack([x.float().amin((0, 2)) for x in batches]).amin(0)
    high = torch.stack([x.float().amax((0, 2)) for x in batches]).amax(0)
    if not bool((high > low).any()):
        raise ValueError(
            f"{name} are constant on all calibration prompts, so their range says nothing; calibrate on real text"
        )
    return low, high


def largest_keys(
    tokens: Int[Tensor, "batch T"], keys: Iterable[Float[Tensor, "batch kv_heads T d"]], count: int
) -> list[tuple[int, float]]:
    """The `count` token ids with the largest keys, largest first, each with its magnitude.

    A key's magnitude is its largest absolute element over the layer's median of that, at the layer where this is most;
    a token's is the mean over its occurrences. The first token of a sequence is left out: what is special about it is
    its place.
    """
    magnitude = torch.zeros(tokens.shape)
    for layer in keys:
        peaks = layer.float().abs().amax((1, 3)).cpu()
        magnitude = torch.maximum(magnitude, peaks / peaks.median())
    ids, places = tokens[:, 1:].cpu().unique(return_inverse=True)
    sums = torch.zeros(len(ids)).index_add(0, places.flatten(), magnitude[:, 1:].flatten())
    means = sums / places.flatten().bincount()
    top = means.sort(descending=True, stable=True).indices[:count]
    return [(int(ids[at]), round(float(means[at]), 4)) for at in top]
