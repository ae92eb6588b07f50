"""Attention errors of slices, against attention computed plainly; and the tables of slices and of tensor errors.

pytest tests/measure/test_attention.py
"""

from __future__ import annotations

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.layout import block_layout
from kvdrift.measure.attention import Replay
from kvdrift.measure.buckets import bucket_ranges
from kvdrift.measure.pages import Decoded, through_pages
from kvdrift.measure.quantized import ATTENTION, ERRORS, attention_rows, error_rows
from kvdrift.policy import CachePolicy, LayerPolicy, Quantizer
from kvdrift.prompts.prompt import Prompt

SCALING = 16**-0.5
FIGURES = ["key_logits", "jensen_shannon", "value_output", "combined_error"]
PAIR = LayerPolicy(Quantizer(bits=4, axis="channel", group=32), Quantizer(bits=4))


def prompt_of(length: int, scored: int, roles: tuple[str, ...] = ()) -> Prompt:
    return Prompt(
        id="p",
        cohort="needle",
        task="",
        split="evaluation",
        tokens=(0,) * length,
        roles=roles or ("needle",) * 8 + ("filler",) * (length - 8),
        continuation=(0,) * (scored + 16),
        scored=scored,
        answer="",
        max_new_tokens=0,
        depth=None,
        batch="b",
    )


def inputs(
    seed: int, tokens: int, queries: int, span: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Decoded]:
    """4 query heads of 2 KV heads, and a decoded span that is off by some noise."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, n, 16, generator=draw) for heads, n in ((4, queries), (2, tokens), (2, tokens)))
    noisy = [x[:, span.start : span.stop] + 0.3 * torch.randn(2, len(span), 16, generator=draw) for x in (k, v)]
    return q, k, v, Decoded(span, noisy[0], noisy[1], 0)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decoded: Decoded, marked: list[tuple[int, list[int]]]
) -> list[float] | None:
    """FIGURES and the overlap of the top 16, query by query and head by head, each with a cache of its own.

    For each query how many tokens it sees, and which of them are quantized; those of which none is don't count.
    """
    js, value, both, square, kept = [], [], [], [], []
    for head in range(q.shape[0]):
        for c, (seen, packed) in enumerate(marked):
            if not packed:
                continue
            exact_k, exact_v = (x[head // 2, :seen].double() for x in (k, v))
            new_k, new_v = exact_k.clone(), exact_v.clone()
            for at in packed:
                new_k[at] = decoded.keys[head // 2, at - decoded.span.start].double()
                new_v[at] = decoded.values[head // 2, at - decoded.span.start].double()
            logits, moved = (x @ q[head, c].double() * SCALING for x in (exact_k, new_k))
            p, r = logits.softmax(0), moved.softmax(0)
            m = (p + r) / 2
            js.append(((p * (p / m).log()).sum() + (r * (r / m).log()).sum()) / 2)
            out = p @ exact_v
            value.append((p @ new_v - out).norm() / out.norm())
            both.append((r @ new_v - out).norm() / out.norm())
            square += (moved - logits)[packed].square().tolist()
            kept.append(len({*p.topk(16).indices.tolist()} & {*r.topk(16).indices.tolist()}) / 16)
    if not square:
        return None
    means = [float(torch.stack(x).mean()) for x in (js, value, both)]
    return [(sum(square) / len(square)) ** 0.5, *means, sum(kept) / len(kept)]


@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_slice_equals_quantizing_only_it(data, seed):
    span = range(8, 40)
    q, k, v, decoded = inputs(seed, 48, 3, span)
    seen = data.draw(st.lists(st.integers(40, 48), min_size=3, max_size=3).filter(lambda all: max(all) == 48))
    until = data.draw(st.lists(st.integers(8, 40), min_size=3, max_size=3).filter(lambda all: max(all) > 8))
    packed = torch.tensor(span) < torch.tensor(until)[:, None]
    # every query its own tokens, as by distance
    some = data.draw(st.lists(st.booleans(), min_size=3 * 32, max_size=3 * 32))
    inside = packed & torch.tensor(some).view(3, 32)
    if not inside.any():
        inside = packed
    replay = Replay(q[None], k[None], v[None], [decoded], torch.tensor(seen), packed, SCALING)
    wanted = plain(
        q, k, v, decoded, [(n, (8 + row.nonzero()[:, 0]).tolist()) for n, row in zip(seen, inside, strict=True)]
    )
    assert [float(x) for x in vars(replay.error(inside)).values()] == pytest.approx(wanted[:4], rel=1e-3, abs=1e-6)
    whole = plain(
        q, k, v, decoded, [(n, (8 + row.nonzero()[:, 0]).tolist()) for n, row in zip(seen, packed, strict=True)]
    )
    assert float(replay.top_overlap()) == pytest.approx(whole[4])


def test_what_is_decoded_exactly_has_no_error():
    span = range(8, 40)
    q, k, v, _ = inputs(0, 48, 3, span)
    exact = Decoded(span, k[:, 8:40], v[:, 8:40], 0)
    packed = torch.ones(3, 32, dtype=torch.bool)
    replay = Replay(q[None], k[None], v[None], [exact], torch.tensor([46, 47, 48]), packed, SCALING)
    found = replay.error(packed)
    assert [float(x) for x in vars(found).values()] == pytest.approx([0.0] * 4, abs=1e-6)
    assert float(replay.top_overlap()) == 1.0


def test_layers_at_once_are_each_layer_alone():
    """With different tensors in each; and rows come layer by layer within a slice, the whole layers first."""
    prompt, policy, span = prompt_of(192, 17), CachePolicy("p", (PAIR,), residual_window=64, block=32), range(128)
    layers = [inputs(seed, 208, 16, span) for seed in range(3)]
    q, k, v = (torch.stack([own[i] for own in layers]) for i in range(3))
    together = attention_rows(prompt, [2, 5, 9], q, k, v, [own[3] for own in layers], policy)
    assert [row["layer"] for row in together[:4]] == [2, 5, 9, 2]
    for index, own in zip((2, 5, 9), layers, strict=True):
        alone = attention_rows(prompt, [index], *(x[None] for x in own[:3]), [own[3]], policy)
        mine = [row for row in together if row["layer"] == index]
        assert [row.keys() for row in mine] == [row.keys() for row in alone]
        figures = [name for name in alone[0] if isinstance(alone[0][name], float)]
        assert len(figures) == 5
        for row, other in zip(mine, alone, strict=True):
            for name, value in other.items():
                assert row[name] == (pytest.approx(value, rel=1e-4, abs=1e-7) if name in figures else value)


POLICIES = st.sampled_from(
    [
        CachePolicy("p", (PAIR,), sink_tokens=sinks, residual_window=residual, block=32)
        for sinks in (0, 16, 32)
        for residual in (0, 16, 48)
    ]
)


@given(policy=POLICIES, length=st.sampled_from([16, 48, 96]), scored=st.integers(2, 90), seed=st.integers(0, 1000))
def test_every_query_sees_what_it_saw_in_decoding(policy, length, scored, seed):
    """All rows of the table, over masks that are spelled out for each query and token."""
    first, residual, held = policy.sink_tokens, policy.residual_window, length + scored - 1

    def until(position: int) -> int:
        return first + 32 * (max(0, position + 1 - first - residual) // 32)

    span = range(first, until(held - 1))
    prompt = prompt_of(length, scored)
    q, k, v, decoded = inputs(seed, held, scored + 15, span)  # the queries of the batch's padding come after
    rows = attention_rows(prompt, [5], q[None], k[None], v[None], [decoded], policy)
    if not span:
        assert rows == []
        return
    step = -(-(scored - 1) // 4)
    steps = sorted(range(scored - 2, -1, -step))
    role = [*prompt.roles, *["generated"] * (scored - 1)]
    ends = {bucket.start: bucket.stop for bucket in bucket_ranges(10_000)}
    within = {
        "layer": lambda row, query, at: True,
        "position": lambda row, query, at: row["bucket"] <= at < ends[row["bucket"]],
        "distance": lambda row, query, at: row["bucket"] <= query - at < ends[row["bucket"]],
        "region": lambda row, query, at: row["role"] == ("prompt" if at < length else "generated"),
        "role": lambda row, query, at: row["role"] == role[at],
    }
    assert {row["slice"] for row in rows} == {*within}
    assert [row["role"] for row in rows if row["slice"] == "region"] == ["prompt", "generated"]
    for row in rows:
        marked = []
        for query in (length + at for at in steps):
            packed = [at for at in range(first, until(query)) if within[row["slice"]](row, query, at)]
            marked.append((query + 1, packed))
        wanted = plain(q[:, steps], k, v, decoded, marked)
        if wanted is None:
            assert not {*FIGURES} & row.keys()
        else:
            assert [row[name] for name in FIGURES] == pytest.approx(wanted[:4], rel=1e-3, abs=1e-6)
        if row["slice"] == "layer":
            assert row["top_overlap"] == pytest.approx(wanted[4])
    covered = {
        kind: [row for row in rows if row["slice"] == kind and "key_logits" in row]
        for kind in ("position", "distance", "region", "role")
    }
    assert all(covered.values())


def test_an_error_at_one_place_shows_in_its_position_distance_and_role_alone():
    prompt = prompt_of(192, 17, ("filler",) * 40 + ("needle",) * 8 + ("filler",) * 144)
    q, k, v, _ = inputs(1, 208, 16, range(0))
    keys, values = k[:, :128].clone(), v[:, :128].clone()
    keys[:, 40:48] += 1.0  # 148 to 167 tokens behind the queries
    decoded, policy = Decoded(range(128), keys, values, 0), CachePolicy("p", (PAIR,), residual_window=64)
    rows = pl.DataFrame(attention_rows(prompt, [5], q[None], k[None], v[None], [decoded], policy), schema=ATTENTION)
    hit = rows.filter(rows["key_logits"] > 1e-3).select("slice", "bucket", "role").rows()
    whole = [("layer", None, None), ("region", None, "prompt")]
    parts = [("position", 32, None), ("distance", 128, None), ("role", None, "needle")]
    assert sorted(hit, key=str) == sorted(whole + parts, key=str)
    empty = rows.filter(rows["key_logits"].is_null()).select("slice", "bucket", "role").rows()
    assert empty == [("position", 128, None), ("distance", 0, None), ("region", None, "generated")]
    assert rows.filter(rows["slice"] != "layer")["top_overlap"].null_count() == rows.height - 1


@given(policy=POLICIES, length=st.sampled_from([16, 48, 96]), scored=st.integers(0, 90))
def test_tensor_errors_tell_every_packed_token_once_and_those_behind_the_prompt_as_generated(policy, length, scored):
    prompt, held = prompt_of(length, scored), length + max(0, scored - 1)
    _, k, v, _ = inputs(0, held, 1, range(0))
    span = through_pages(k, v, policy, block_layout(PAIR, 32, 2, 16, 4)).span
    off = [(x + (torch.arange(held) >= length)[:, None])[:, span.start : span.stop] for x in (k, v)]
    outside = [torch.full((6, 2, 16), 10.0 * sign) for sign in (-1, 1)]
    ranges = {f"{x}_{side}": at for x in ("keys", "values") for side, at in zip(("low", "high"), outside, strict=True)}
    rows = pl.DataFrame(error_rows(prompt, 5, k, v, Decoded(span, *off, 0), ranges), schema=ERRORS)
    stop = policy.sink_tokens + 32 * (max(0, held - policy.exact_tokens) // 32)
    roles = [*prompt.roles, *["generated"] * (held - length)][policy.sink_tokens : stop]
    for tensor in ("key", "value"):
        found = rows.filter(tensor=tensor).group_by("role").agg(pl.col("tokens").sum(), pl.col("rel_l2").min())
        assert {role: tokens for role, tokens, _ in found.iter_rows()} == {role: roles.count(role) for role in {*roles}}
        assert {role for role, _, error in found.iter_rows() if error > 0} == {"generated"} & {*roles}
