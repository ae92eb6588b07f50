"""Keys and values apart, on the stored queries: what quantized keys do to the attention pattern, what quantized values
do under the reference's own pattern, and both. A slice is the part of the cache that is quantized; all else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvdrift.measure.pages import Decoded

TOP_ATTENDED = 16
LARGEST = 80.0
"""Log-weights are cut here, where exp still fits float32 with room for sums."""


@dataclass(frozen=True)
class AttentionError:
    """Figures of one slice of a prompt in each layer, means over heads and the queries that read some of it packed."""

    key_logits: Float[Tensor, " layers"]
    """RMS change of pre-softmax attention logits over the slice's keys."""
    jensen_shannon: Float[Tensor, " layers"]
    """Jensen–Shannon divergence of attention weights, in nats, with only the slice's keys quantized."""
    value_output: Float[Tensor, " layers"]
    """Relative L2 of the attention output: the reference's weights replayed over the slice's quantized values."""
    combined_error: Float[Tensor, " layers"]
    """The same with keys and values of the slice quantized."""


class Replay:
    """Attention of the stored queries over a sequence, exact and decoded, in float32; several layers at once, since
    what a layer takes is mostly the calls."""

    def __init__(
        self,
        queries: Float[Tensor, "layers query_heads C d"],
        keys: Float[Tensor, "layers kv_heads N d"],
        values: Float[Tensor, "layers kv_heads N d"],
        decoded: Sequence[Decoded],
        seen: Int[Tensor, "C"],
        packed: Bool[Tensor, "C tokens"],
        scaling: float,
    ) -> None:
        """A query sees the first `seen` of the keys, and reads packed what `packed` marks of the decoded span, which
        all layers share; some query must read some token so."""
        heads, span = keys.shape[1], slice(decoded[0].span.start, decoded[0].span.stop)
        new_keys, self._new_values = (torch.stack(x) for x in zip(*((d.keys, d.values) for d in decoded), strict=True))
        # rows of a KV head: its query heads × C
        q = queries.float().unflatten(1, (heads, -1)).flatten(2, 3) * scaling
        self._group = q.shape[2] // queries.shape[2]
        logits = q @ keys.float().transpose(2, 3)
        least = int(seen.min())  # all queries see the keys before it
        beyond = torch.arange(least, keys.shape[2], device=seen.device) >= seen[:, None]
        logits[..., least:].masked_fill_(self._by_head(beyond), -math.inf)
        moved = q @ (new_keys - keys[:, :, span].float()).transpose(2, 3)
        self._moved_squared = moved.square()
        self._weights = logits.softmax(-1)
        self._before = self._weights[..., span]
        log_weights = logits[..., span] - logits.logsumexp(-1, keepdim=True)
        self._after = (log_weights + moved).clamp_max(LARGEST).exp()
        """The candidate's weights on the reference's scale, were all of the span packed: they need not sum to one."""
        self._output = self._weights @ values.float()
        self._values = values[:, :, span].float()
        self._span, self._packed = span, packed

    def error(self, inside: Bool[Tensor, "C tokens"]) -> AttentionError:
        """Quantize only what `inside` marks, for each query some of what it reads packed; at least one token."""
        marked = inside.any(0).nonzero()
        columns = slice(int(marked[0]), int(marked[-1]) + 1)  # a view; what lies between and isn't marked counts zero
        rows = self._by_head(inside[:, columns])
        reading = rows.any(-1)
        moved, p, u = (x[..., columns] for x in (self._moved_squared, self._before, self._after))
        if not bool(rows.all()):
            moved, p, u = moved * rows, p * rows, u * rows
        values, new_values = self._values[:, :, columns], self._new_values[:, :, columns]
        kept = 1 - p.sum(-1, keepdim=True)
        share = 1 / (kept.clamp_min(0) + u.sum(-1, keepdim=True))  # what every weight shrinks by in the softmax
        exact, replayed = p @ values, p @ new_values
        combined = (self._output - exact + u @ new_values) * share
        return AttentionError(
            key_logits=(moved.sum((1, 2, 3)) / (rows.sum() * moved.shape[1])).sqrt(),
            jensen_shannon=_mean(_jensen_shannon(p, u * share, kept.clamp_min(0), share), reading),
            value_output=_mean(self._relative(replayed - exact), reading),
            combined_error=_mean(self._relative(combined - self._output), reading),
        )

    def top_overlap(self) -> Float[Tensor, " layers"]:
        """Share of the reference's 16 most attended positions that stay among the candidate's, all keys that a query
        reads packed quantized; mean over the queries that read any so."""
        packed, new = self._by_head(self._packed), self._weights.clone()
        new[..., self._span] = torch.where(packed, self._after, self._before)
        n = min(TOP_ATTENDED, new.shape[-1])
        top, new_top = (x.topk(n, -1).indices for x in (self._weights, new))
        kept = (top[..., None] == new_top[..., None, :]).any(-1).float()
        return _mean(kept.mean(-1), packed.any(-1))

    def _by_head(self, marks: Bool[Tensor, "C tokens"]) -> Bool[Tensor, "rows tokens"]:
        """The same marks for every query head of a KV head."""
        return marks.repeat(self._group, 1)

    def _relative(self, difference: Tensor) -> Tensor:
        norm = self._output.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return difference.norm(dim=-1) / norm


def _mean(figures: Float[Tensor, "layers kv_heads rows"], reading: Bool[Tensor, " rows"]) -> Float[Tensor, " layers"]:
    """Over the rows that read some of the slice."""
    return figures[:, :, reading].mean((1, 2))


def _jensen_shannon(p: Tensor, q: Tensor, kept: Tensor, share: Tensor) -> Tensor:
    """JS of two distributions: `p` and `q` where they differ; elsewhere p sums to `kept`, and q is `share` · p."""
    tiny = torch.finfo(torch.float32).tiny
    mean = ((p + q) / 2).clamp_min(tiny)
    inside = (torch.special.xlogy(p, p / mean) + torch.special.xlogy(q, q / mean)).sum(-1)
    outside = kept * (math.log(2) * (1 + share) + share * share.log() - (1 + share) * (1 + share).log())
    return ((inside + outside[..., 0]) / 2).clamp_min(0.0)
