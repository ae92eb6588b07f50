"""Attention errors of slices, against attention computed plainly; and the table of slices.

pytest tests/measure/test_attention.py
"""

from __future__ import annotations

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.measure.attention import Replay
from kvdrift.measure.pages import Decoded
from kvdrift.measure.quantized import ATTENTION, attention_rows
from kvdrift.prompts.prompt import Prompt

T, SPAN, SCALING = 48, range(8, 40), 0.2


def inputs(seed: int, scored: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Decoded]:
    """4 query heads of 2 KV heads, and a decoded span that is off by some noise."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, n, 16, generator=draw) for heads, n in ((4, scored), (2, T), (2, T)))
    noisy = [x[:, SPAN.start : SPAN.stop] + 0.3 * torch.randn(2, len(SPAN), 16, generator=draw) for x in (k, v)]
    return q, k, v, Decoded(SPAN, noisy[0], noisy[1], 0)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decoded: Decoded, inside: torch.Tensor) -> list[float]:
    """The same figures, query by query and head by head, each with its own cache."""
    js, value, both, square = [], [], [], []
    for head in range(q.shape[0]):
        for c in range(q.shape[1]):
            exact_k, exact_v = k[head // 2].double(), v[head // 2].double()
            new_k, new_v = exact_k.clone(), exact_v.clone()
            at = torch.tensor(SPAN)[inside[c]]
            new_k[at] = decoded.keys[head // 2, inside[c]].double()
            new_v[at] = decoded.values[head // 2, inside[c]].double()
            logits, moved = (x @ q[head, c].double() * SCALING for x in (exact_k, new_k))
            p, r = logits.softmax(0), moved.softmax(0)
            m = (p + r) / 2
            js.append(((p * (p / m).log()).sum() + (r * (r / m).log()).sum()) / 2)
            out = p @ exact_v
            value.append((p @ new_v - out).norm() / out.norm())
            both.append((r @ new_v - out).norm() / out.norm())
            square += (moved - logits)[at].square().tolist()
    means = [float(torch.stack(x).mean()) for x in (js, value, both)]
    return [sum(square) / len(square), *means]


@given(seed=st.integers(0, 1000), width=st.integers(1, len(SPAN)))
def test_a_slice_equals_quantizing_only_it(seed, width):
    q, k, v, decoded = inputs(seed)
    # every query its own tokens, as by distance
    inside = torch.stack([torch.arange(len(SPAN)).roll(c) < width for c in range(q.shape[1])])
    found = Replay(q, k, v, decoded, SCALING).error(inside)
    figures = [found.key_logits**2, found.jensen_shannon, found.value_output, found.combined_error]
    assert figures == pytest.approx(plain(q, k, v, decoded, inside), rel=1e-3, abs=1e-6)


def test_what_is_decoded_exactly_has_no_error():
    q, k, v, _ = inputs(0)
    span = slice(SPAN.start, SPAN.stop)
    replay = Replay(q, k, v, Decoded(SPAN, k[:, span], v[:, span], 0), SCALING)
    found = replay.error(torch.ones(3, len(SPAN), dtype=torch.bool))
    assert vars(found) == pytest.approx(dict.fromkeys(vars(found), 0.0), abs=1e-6)
    assert replay.top_overlap() == 1.0


def test_an_error_at_one_place_shows_in_its_position_distance_and_role_alone():
    prompt = Prompt(
        id="p",
        cohort="needle",
        task="",
        split="evaluation",
        tokens=tuple(range(192)),
        roles=("filler",) * 40 + ("needle",) * 8 + ("filler",) * 144,
        continuation=tuple(range(17)),
        scored=17,
        answer="",
        max_new_tokens=0,
        depth=None,
        batch="b",
    )
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, n, 16, generator=draw) for heads, n in ((4, 16), (2, 192), (2, 192)))
    span = range(0, 128)
    keys, values = k[:, :128].clone(), v[:, :128].clone()
    keys[:, 40:48] += 1.0  # 144 to 167 tokens behind the 16 queries
    rows = pl.DataFrame(attention_rows(prompt, 5, q, k, v, Decoded(span, keys, values, 0)), schema=ATTENTION)
    hit = rows.filter(rows["key_logits"] > 1e-3).select("slice", "bucket", "role").rows()
    assert hit == [("layer", None, None), ("position", 32, None), ("distance", 128, None), ("role", None, "needle")]
    empty = rows.filter(rows["key_logits"].is_null()).select("slice", "bucket").rows()
    assert empty == [("position", 128), ("distance", 0)]
    assert rows.filter(rows["slice"] != "layer")["top_overlap"].null_count() == rows.height - 1
