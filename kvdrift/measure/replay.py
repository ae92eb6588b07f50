"""The decode path that every comparison replays: teacher-forced chunks, and seeded generation, over a filled cache.

Reference and candidate call the same functions with the same batches, so that chunk edges, batch composition and mask
form are the same. Nothing here knows which cache it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 16
"""Tokens of a teacher-forced chunk. S+R and B are multiples of it, so a chunk sees what single steps see."""


@dataclass(frozen=True)
class Generated:
    """What one batch generated: tokens up to and without the end of turn, and the logits of each step."""

    tokens: list[list[int]]
    logits: Float[Tensor, "batch steps vocab"]


@torch.inference_mode()
def score(
    model: Any, cache: Any, continuation: Int[Tensor, "batch new"], chunk: int = CHUNK
) -> Float[Tensor, "batch scored vocab"]:
    """Feed continuation[:, :-1] in chunks; row i holds the logits that predict continuation[:, i + 1]."""
    fed = continuation[:, :-1]
    logits = [
        model(input_ids=fed[:, start : start + chunk], cache=cache, use_cache=True).logits
        for start in range(0, fed.shape[1], chunk)
    ]
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def generate(
    model: Any, cache: Any, prompt: Int[Tensor, "batch tokens"], new_tokens: int, mode: str, seed: int, stop: list[int]
) -> Generated:
    """Decode after a cache that holds all but the prompt's last token, through the model's own `generate()`.

    Greedy, or sampled at temperature 0.8 and top-p 0.95 from `seed`, so that both sides draw the same numbers.
    """
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if mode == "sampled" else {"do_sample": False}
    torch.manual_seed(seed)
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=new_tokens,
        eos_token_id=stop,
        pad_token_id=stop[0],
        output_logits=True,
        return_dict_in_generate=True,
        **sampled,
    )
    new = out.sequences[:, prompt.shape[1] :].tolist()
    ends = [next((i for i, token in enumerate(row) if token in stop), len(row)) for row in new]
    return Generated([row[:end] for row, end in zip(new, ends, strict=True)], torch.stack(list(out.logits), dim=1))


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a turn: the model's and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
