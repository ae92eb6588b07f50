"""Error of one tensor, token by token and head by head, and its sums by position bucket.

Buckets are octaves of absolute position, [0, 32) [32, 128) [128, 512) …; a bucket is named by its first token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

FIRST_BUCKET = 32
OCTAVE = 4


@dataclass(frozen=True)
class TensorError:
    """Figures of each token and head, [kv_heads, tokens]."""

    cosine: Float[Tensor, "kv_heads tokens"]
    relative_l2: Float[Tensor, "kv_heads tokens"]
    max_abs: Float[Tensor, "kv_heads tokens"]


def bucket_starts(length: int) -> list[int]:
    """First tokens of the buckets that a sequence of `length` tokens reaches."""
    starts, edge = [0], FIRST_BUCKET
    while edge < length:
        starts.append(edge)
        edge *= OCTAVE
    return starts


def bucket_ranges(length: int) -> list[range]:
    """The buckets as ranges of positions, the last one cut at `length`."""
    starts = bucket_starts(length)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]


def errors(exact: Float[Tensor, "kv_heads tokens d"], decoded: Float[Tensor, "kv_heads tokens d"]) -> TensorError:
    """Cosine similarity, relative L2 and largest absolute error of decoded vectors against exact ones, in float32."""
    x, y = exact.float(), decoded.float()
    norm, difference = x.norm(dim=-1), x - y
    tiny = torch.finfo(torch.float32).tiny
    cosine = (x * y).sum(-1) / (norm * y.norm(dim=-1)).clamp_min(tiny)
    cosine = torch.where(difference.abs().amax(-1) == 0, 1.0, cosine.clamp(-1, 1))
    return TensorError(cosine, difference.norm(dim=-1) / norm.clamp_min(tiny), difference.abs().amax(-1))
