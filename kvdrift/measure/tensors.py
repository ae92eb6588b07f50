"""Error of one tensor, token by token and head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TensorError:
    """Figures of each token and head, [kv_heads, tokens]."""

    cosine: Float[Tensor, "kv_heads tokens"]
    relative_l2: Float[Tensor, "kv_heads tokens"]
    max_abs: Float[Tensor, "kv_heads tokens"]


def errors(exact: Float[Tensor, "kv_heads tokens d"], decoded: Float[Tensor, "kv_heads tokens d"]) -> TensorError:
    """Cosine similarity, relative L2 and largest absolute error of decoded vectors against exact ones, in float32."""
    x, y = exact.float(), decoded.float()
    norm, difference = x.norm(dim=-1), x - y
    tiny = torch.finfo(torch.float32).tiny
    cosine = (x * y).sum(-1) / (norm * y.norm(dim=-1)).clamp_min(tiny)
    cosine = torch.where(difference.abs().amax(-1) == 0, 1.0, cosine.clamp(-1, 1))
    return TensorError(cosine, difference.norm(dim=-1) / norm.clamp_min(tiny), difference.abs().amax(-1))
