"""How far the candidate's next-token distribution is from the reference's, token by token.

KL(reference ‖ candidate) in nats; whether the top token is the same; change of the target token's probability;
Spearman's rank correlation over the reference's top 50 tokens; both negative log-likelihoods.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvdrift.prompts.prompt import Prompt

TOP = 50


def compare(
    reference: Float[Tensor, "*rows vocab"], candidate: Float[Tensor, "*rows vocab"], targets: Int[Tensor, "*rows"]
) -> dict[str, Tensor]:
    """One figure a row, each [*rows]: kl, same_top1, delta_p, rank_correlation, nll_reference, nll."""
    p, q = reference.float().log_softmax(-1), candidate.float().log_softmax(-1)
    target = targets[..., None]
    nll_reference, nll = -p.gather(-1, target)[..., 0], -q.gather(-1, target)[..., 0]
    return {
        "kl": kl(p, q),
        "same_top1": p.argmax(-1) == q.argmax(-1),
        "delta_p": (-nll).exp() - (-nll_reference).exp(),
        "rank_correlation": rank_correlation(p, q),
        "nll_reference": nll_reference,
        "nll": nll,
    }


def scored_rows(
    prompt: Prompt, reference: Float[Tensor, "C vocab"], candidate: Float[Tensor, "C vocab"]
) -> pl.DataFrame:
    """A row a token that the prompt scores: step, position, the figures of `compare`, prompt, cohort."""
    steps = prompt.scored - 1
    targets = torch.tensor(prompt.continuation[1 : steps + 1], device=candidate.device)
    figures = compare(reference[:steps].to(candidate.device), candidate[:steps], targets)
    length = len(prompt.tokens)
    columns: dict[str, Any] = {"step": range(steps), "position": range(length, length + steps)}
    columns |= {name: figure.cpu().numpy() for name, figure in figures.items()}
    return pl.DataFrame(columns).with_columns(prompt=pl.lit(prompt.id), cohort=pl.lit(prompt.cohort))


def kl(log_p: Float[Tensor, "*#rows vocab"], log_q: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """KL(p ‖ q) in nats from log-probabilities; zero where they are equal, never negative."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)


def rank_correlation(p: Float[Tensor, "*#rows vocab"], q: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows"]:
    """Spearman: 1 − 6 Σd² / n(n² − 1), over the top 50 tokens of p in its own order."""
    n = min(TOP, p.shape[-1])
    top = p.topk(n, dim=-1).indices.expand(*q.shape[:-1], n)
    order = q.gather(-1, top).argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    d = (ranks - torch.arange(n, device=p.device)).double()
    return (1 - 6 * d.square().sum(-1) / (n * (n * n - 1))).float()
