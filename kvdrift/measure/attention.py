"""Keys and values apart, on the stored queries: what quantized keys do to the attention pattern, and what quantized
values do under the reference's own pattern. Exact tokens outside the packed span take part unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvdrift.measure.pages import Decoded
from kvdrift.measure.tensors import bucket_ranges

TOP_ATTENDED = 16


@dataclass(frozen=True)
class AttentionError:
    """Figures of one layer and prompt. Per-bucket figures are null where nothing of the bucket is packed."""

    buckets: list[int]
    key_logits: list[float | None]
    """RMS change of pre-softmax attention logits, over the bucket's packed keys."""
    value_output: list[float | None]
    """‖Σ w (v̂ − v)‖ / ‖Σ w v‖ with the reference's weights w, summed over the bucket's tokens."""
    jensen_shannon: float
    """Mean Jensen–Shannon divergence of attention weights under quantized keys, in nats."""
    top_overlap: float
    """Share of the reference's 16 most attended positions that stay among the candidate's 16."""
    value_error: float
    combined_error: float
    """Relative L2 of the attention output: reference weights over quantized values, and both quantized."""


def attention_error(
    queries: Float[Tensor, "query_heads C d"],
    keys: Float[Tensor, "kv_heads T d"],
    values: Float[Tensor, "kv_heads T d"],
    decoded: Decoded,
    scaling: float,
) -> AttentionError:
    """Compare attention of the stored queries over the prefix, exact and decoded, in float32."""
    share = queries.shape[0] // keys.shape[0]
    q = queries.float().unflatten(0, (keys.shape[0], share))
    exact_k, exact_v = keys.float(), values.float()
    new_k, new_v = exact_k.clone(), exact_v.clone()
    span = slice(decoded.span.start, decoded.span.stop)
    new_k[:, span], new_v[:, span] = decoded.keys, decoded.values

    logits, new_logits = (torch.einsum("hscd,htd->hsct", q, k) * scaling for k in (exact_k, new_k))
    weights, new_weights = logits.softmax(-1), new_logits.softmax(-1)
    output = torch.einsum("hsct,htd->hscd", weights, exact_v)
    norm = output.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    replayed = torch.einsum("hsct,htd->hscd", weights, new_v)
    combined = torch.einsum("hsct,htd->hscd", new_weights, new_v)

    ranges = bucket_ranges(keys.shape[1])
    spans = [slice(max(r.start, span.start), min(r.stop, span.stop)) for r in ranges]
    key_logits: list[float | None] = []
    value_output: list[float | None] = []
    for s in spans:
        if s.start >= s.stop:
            key_logits.append(None)
            value_output.append(None)
            continue
        key_logits.append((new_logits[..., s] - logits[..., s]).square().mean().sqrt().item())
        moved = torch.einsum("hsct,htd->hscd", weights[..., s], new_v[:, s] - exact_v[:, s])
        value_output.append((moved.norm(dim=-1) / norm).mean().item())
    return AttentionError(
        buckets=[r.start for r in ranges],
        key_logits=key_logits,
        value_output=value_output,
        jensen_shannon=_jensen_shannon(weights, new_weights).mean().item(),
        top_overlap=_overlap(weights, new_weights),
        value_error=((replayed - output).norm(dim=-1) / norm).mean().item(),
        combined_error=((combined - output).norm(dim=-1) / norm).mean().item(),
    )


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    mean = (p + q) / 2
    parts = [torch.special.xlogy(x, x) - torch.special.xlogy(x, mean) for x in (p, q)]
    return ((parts[0] + parts[1]).sum(-1) / 2).clamp_min(0.0)


def _overlap(p: Tensor, q: Tensor) -> float:
    n = min(TOP_ATTENDED, p.shape[-1])
    top_p, top_q = (torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(n, -1).indices, True) for x in (p, q))
    return ((top_p & top_q).sum(-1) / n).mean().item()
