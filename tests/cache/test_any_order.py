"""Arrivals, pads, cuts and reorders in any order against a model of one sequence in plain tensors:
pytest tests/cache/test_any_order.py"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stream import HEAD_DIM, KV_HEADS, QUERY_HEADS, decoded, policy, stream, tokens
from torch import Tensor

from kvdrift.policy import CachePolicy

EMPTY = torch.empty(KV_HEADS, 0, HEAD_DIM)
PADS = st.none() | st.lists(st.integers(0, 47), min_size=4, max_size=4)
"""How many pads precede the new tokens of each row."""


@dataclass(frozen=True)
class Sequence:
    """One sequence token by token: `k`, `v` [kv_heads, T, d] as they came, `read_k`, `read_v` as a query reads them.

    `edges` are the positions at which its packed blocks begin, and the last one's end. `kept` says that the newest
    block is still there exact.
    """

    policy: CachePolicy
    edges: tuple[int, ...]
    k: Tensor = field(default=EMPTY, repr=False)
    v: Tensor = field(default=EMPTY, repr=False)
    read_k: Tensor = field(default=EMPTY, repr=False)
    read_v: Tensor = field(default=EMPTY, repr=False)
    kept: bool = False

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @property
    def exact(self) -> list[Tensor]:
        """Keys and values of its sinks and of what isn't packed yet."""
        return [torch.cat([x[:, : self.edges[0]], x[:, self.edges[-1] :]], dim=1) for x in (self.k, self.v)]

    def take(self, k: Tensor, v: Tensor) -> Sequence:
        """One more token; then every block that has aged is quantized, on its own."""
        old = (self.k, self.v, self.read_k, self.read_v)
        grown = (torch.cat([x, new], dim=1) for x, new in zip(old, (k, v, k, v), strict=True))
        made = replace(self, **dict(zip(("k", "v", "read_k", "read_v"), grown, strict=True)))
        start, block = self.edges[-1], self.policy.block
        if made.length < start + block + self.policy.residual_window:
            return made
        aged = slice(start, start + block)
        made.read_k[:, aged], made.read_v[:, aged] = decoded(policy(), made.k[:, aged], made.v[:, aged])
        return replace(made, edges=(*self.edges, start + block), kept=self.policy.rollback > 0)

    def cut(self, count: int) -> Sequence:
        """Without its newest tokens. The newest block comes back exact where the shorter sequence wouldn't have packed
        it; blocks before it, or that came back once already, stay packed, the last one cut short."""
        length, edges, kept = self.length - count, self.edges, self.kept
        read_k, read_v = self.read_k.clone(), self.read_v.clone()
        if kept and length - edges[-1] < self.policy.residual_window:
            back = slice(edges[-2], edges[-1])
            read_k[:, back], read_v[:, back] = self.k[:, back], self.v[:, back]
            edges, kept = edges[:-1], False
        if len(edges) > 1 and length < edges[-1]:
            whole = [edge for edge in edges if edge < length]
            edges, kept = (*whole, length) if whole else edges[:1], False
        left = (x[:, :length] for x in (self.k, self.v, read_k, read_v))
        return Sequence(self.policy, edges, *left, kept)

    def answer(self, q: Tensor, exact: bool) -> Tensor:
        """What a query [query_heads, 1, d] of the newest token gets, in float64."""
        read = (self.k, self.v) if exact else (self.read_k, self.read_v)
        k, v = (x.double().repeat_interleave(QUERY_HEADS // KV_HEADS, 0) for x in read)
        return (q.double() @ k.transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1) @ v


class AnyOrder(RuleBasedStateMachine):
    """A batch of sequences in one layer of the cache, and each of them in the model above."""

    @initialize(
        batch=st.integers(1, 3),
        shape=st.sampled_from([(0, 0), (0, 16), (4, 28), (16, 32)]),
        rollback=st.sampled_from([0, 16, 32]),
        prefill=st.sampled_from(["exact", "packed"]),
        count=st.integers(1, 120),
        pads=PADS,
    )
    def make(
        self, batch: int, shape: tuple[int, int], rollback: int, prefill: str, count: int, pads: list[int] | None
    ) -> None:
        self.policy = policy(sink_tokens=shape[0], residual_window=shape[1], rollback=rollback, prefill=prefill)
        self.fed = stream(self.policy)
        self.model = [Sequence(self.policy, (shape[0],))] * batch
        self.real = torch.empty(batch, 0, dtype=torch.bool)
        self.arrivals = 0
        self.arrive(count, pads)

    @rule(count=st.integers(1, 48), pads=PADS)
    def arrive(self, count: int, pads: list[int] | None) -> None:
        """New tokens, left-padded or not; some row of them is real from the first column on."""
        batch, self.arrivals = len(self.model), self.arrivals + 1
        new = tokens(count, batch, seed=self.arrivals)
        widths = torch.tensor([0] * batch if pads is None else pads[:batch]).clamp(max=count - 1)
        real = torch.arange(count) >= widths[:, None]
        exact = self.policy.prefill == "exact" and not self.real.shape[1]
        out = self.fed.feed(new, None if pads is None else ~real)
        for s, t in real.nonzero().tolist():
            q, k, v = (x[s, :, t : t + 1] for x in (new.q, new.k, new.v))
            self.model[s] = self.model[s].take(k, v)
            assert (out[s, :, t : t + 1].double() - self.model[s].answer(q, exact)).abs().max() < 2e-5
        self.real = torch.cat([self.real, real], dim=1)

    @precondition(lambda self: self.real.shape[1])
    @rule(count=st.integers(1, 20) | st.integers(1, 200))
    def cut(self, count: int) -> None:
        left = max(0, self.real.shape[1] - count)
        self.fed.layer.crop(left - self.real.shape[1])
        self.model = [x.cut(n) for x, n in zip(self.model, self.real[:, left:].sum(1).tolist(), strict=True)]
        self.keep(self.real[:, :left])

    @precondition(lambda self: self.real.shape[1])
    @rule(order=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def reorder(self, order: list[int]) -> None:
        kept = torch.tensor([i % len(self.model) for i in order])
        self.fed.cache.reorder_cache(kept)
        self.model = [self.model[i] for i in kept.tolist()]
        self.keep(self.real[kept])

    def keep(self, real: Tensor) -> None:
        self.real, self.fed.pads = real, None if real.all() else ~real

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        layer, rows = self.fed.layer, range(len(self.model))
        assert layer.get_seq_length() == self.real.shape[1]
        if layer.batch_size > 0:
            assert [layer.length(s) for s in rows] == [x.length for x in self.model]
        assert [self.fed.packed_spans(s) for s in rows] == [list(pairwise(x.edges)) for x in self.model]
        if layer.packed:
            held = [
                x[s, :, : layer.exact[s]]
                for s in rows
                for x in (layer.sequences.exact.keys, layer.sequences.exact.values)
            ]
            assert all(torch.equal(a, b) for a, b in zip(held, (x for m in self.model for x in m.exact), strict=True))
        if layer.is_initialized:
            assert layer.pool.used == len({x.page for row in layer.segments for x in row})
        assert self.fed.cache.ledger().format_bytes == self.fed.cache.storage_bytes()


def test_arrivals_cuts_and_reorders_in_any_order_answer_as_the_model_does(backend: str) -> None:
    examples = 40 if backend == "native" else 5
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=examples, stateful_step_count=10))
